"""Models out of GGUF files: the weights dequantised, the shape and the tokenizer from the metadata.

A GGUF of the llama architecture stores the rows of q and k in another order: its runtime rotates neighbouring pairs
``(2i, 2i + 1)`` where the hub's weights (and this model) rotate ``(i, i + hd/2)``. They are put back. Qwen2's are
stored as they are.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import Array

from logitless.train import gguf_file
from logitless.train.dequantise import dequantise, known
from logitless.train.files import package
from logitless.train.gguf_file import GGUFFile, Tensor
from logitless.train.model import ModelConfig, ModelError
from logitless.train.weights import ModelFile, TensorNames

GGUF_NAMES = TensorNames(
    top={"embed": "token_embd.weight", "norm": "output_norm.weight", "lm_head": "output.weight"},
    layer={
        "attention_norm": "attn_norm.weight",
        "q": "attn_q.weight",
        "k": "attn_k.weight",
        "v": "attn_v.weight",
        "o": "attn_output.weight",
        "q_bias": "attn_q.bias",
        "k_bias": "attn_k.bias",
        "v_bias": "attn_v.bias",
        "mlp_norm": "ffn_norm.weight",
        "gate": "ffn_gate.weight",
        "up": "ffn_up.weight",
        "down": "ffn_down.weight",
    },
    prefix="blk.{i}.",
)
_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def gguf_model(path: Path) -> ModelFile:
    """The model of a GGUF file (architectures qwen2 and llama); tensors are dequantised on the device when read.

    Files of tied models often hold the one matrix twice, quantised in two ways, and load as an untied model.
    """
    file = _read(path)
    config, tensors = _config(path, file), file.tensors
    permuted = {}
    if _field(path, file, "general.architecture") == "llama":
        heads = {"q": config.num_heads, "k": config.num_kv_heads}
        permuted = {GGUF_NAMES.of_layer(n, i): heads[n] for n in heads for i in range(config.num_layers)}

    def read(name: str, dtype: Any) -> Array:
        return _numbers(*_blocks(path, tensors[name]), permuted.get(name, 0), dtype)

    return ModelFile(str(path), config, GGUF_NAMES, {name: tensor.shape for name, tensor in tensors.items()}, read)


def _blocks(path: str | Path, tensor: Tensor) -> tuple[np.ndarray, str]:
    """Rows as the device takes them: bytes and their type; or numbers, and no type, where it has no such type."""
    kind, data = tensor.kind.name, tensor.data
    if known(kind):
        return (data if data.ndim == 2 else data[None]), kind
    from gguf import quants

    try:
        return quants.dequantize(data, tensor.kind), ""
    except (NotImplementedError, ValueError) as error:
        raise ModelError(f"{path}: tensor {tensor.name!r} of type {kind}: {error}") from None


@partial(jax.jit, static_argnums=(1, 2, 3))
def _numbers(data: Array, kind: str, permuted: int, dtype: Any) -> Array:
    """Rows ``[out, in]``; where ``permuted`` heads are, from the order of neighbouring pairs to that of halves."""
    rows = (dequantise(kind, data) if kind else data).astype(dtype)
    return rows.reshape(permuted, -1, 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape) if permuted else rows


def tokenizer_from_gguf(path: str | Path) -> tuple[Any, dict[str, Any]]:
    """``(tokenizers.Tokenizer, settings)``: the byte-level BPE in the file's metadata.

    The settings are those of a hub folder's ``tokenizer_config.json``: the special tokens and the chat template.
    """
    tokenizers = package("tokenizers", ModelError("tokenizers are missing: pip install 'logitless[train]'"))
    decoders, models, normalizers = tokenizers.decoders, tokenizers.models, tokenizers.normalizers
    pre_tokenizers = tokenizers.pre_tokenizers
    file = _read(path)
    kind = _field(path, file, "tokenizer.ggml.model")
    if kind != "gpt2":
        raise ModelError(f"{path}: tokenizer.ggml.model is {kind!r}; supported is byte-level BPE ('gpt2').")
    pre = _field(path, file, "tokenizer.ggml.pre")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre != "qwen2")
    if pre == "qwen2":
        split: Any = pre_tokenizers.Split(tokenizers.Regex(_QWEN2_SPLIT), "isolated")
    elif pre == "smollm":
        split = pre_tokenizers.Digits(individual_digits=True)
    else:
        raise ModelError(
            f"{path}: tokenizer.ggml.pre is {pre!r}, supported are 'qwen2' and 'smollm'. "
            "Use a hub folder's tokenizer.json instead."
        )
    words = _field(path, file, "tokenizer.ggml.tokens")
    kinds = _field(path, file, "tokenizer.ggml.token_type")
    merges = [tuple(pair.split(" ", 1)) for pair in _field(path, file, "tokenizer.ggml.merges")]
    built = tokenizers.Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges))
    if pre == "qwen2":
        built.normalizer = normalizers.NFC()
    built.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    built.decoder = decoders.ByteLevel()
    control, user_defined = 3, 4  # gguf.TokenType
    for wanted in (control, user_defined):
        of_kind = [word for word, one in zip(words, kinds, strict=True) if one == wanted]
        special = wanted == control
        added = [tokenizers.AddedToken(w, special=special, normalized=False) for w in of_kind]
        if special:
            built.add_special_tokens(added)
        else:
            built.add_tokens(added)
    settings = {"chat_template": _field(path, file, "tokenizer.chat_template", None)}
    for ours, theirs in (("eos_token", "eos"), ("pad_token", "padding"), ("bos_token", "bos")):
        token_id = _field(path, file, f"tokenizer.ggml.{theirs}_token_id", None)
        if token_id is not None and not 0 <= token_id < len(words):
            raise ModelError(f"{path}: tokenizer.ggml.{theirs}_token_id is {token_id}, expected 0 to {len(words) - 1}.")
        settings[ours] = None if token_id is None else words[token_id]
    return built, settings


def _config(path: str | Path, file: GGUFFile) -> ModelConfig:
    kind = _field(path, file, "general.architecture")
    if kind not in ("qwen2", "llama"):
        raise ModelError(f"{path}: the architecture is {kind!r}; supported are 'qwen2' and 'llama'.")

    def get(key: str, *default: Any) -> Any:
        return _field(path, file, f"{kind}.{key}", *default)

    scaling = get("rope.scaling.type", "none")
    if scaling != "none":
        raise ModelError(f"{path}: rotary scaling {scaling!r} is not supported, only plain rotary positions.")
    heads, hidden = get("attention.head_count"), get("embedding_length")
    tensors = file.tensors
    embed = tensors.get(GGUF_NAMES.top["embed"])
    if embed is None:
        raise ModelError(f"{path}: tensor {GGUF_NAMES.top['embed']!r} missing.")
    return ModelConfig(
        vocab_size=embed.shape[0],
        hidden_size=hidden,
        intermediate_size=get("feed_forward_length"),
        num_layers=get("block_count"),
        num_heads=heads,
        num_kv_heads=get("attention.head_count_kv", heads),
        head_dim=get("attention.key_length", hidden // heads),
        rope_theta=float(get("rope.freq_base", 10_000.0)),
        rms_norm_eps=float(str(np.float32(get("attention.layer_norm_rms_epsilon")))),  # stored in 32 bits
        tie_word_embeddings=GGUF_NAMES.top["lm_head"] not in tensors,
        attention_bias=kind == "qwen2",
        max_position=get("context_length"),
    )


def _read(path: str | Path) -> GGUFFile:
    package("gguf", ModelError("GGUF files need the gguf package: pip install 'logitless[gguf]'"))
    try:
        return gguf_file.read(path)
    except ValueError as error:  # UnicodeDecodeError is one
        raise ModelError(f"{path}: not readable as GGUF: {error}") from None


_REQUIRED = object()


def _field(path: str | Path, file: GGUFFile, key: str, default: Any = _REQUIRED) -> Any:
    if key in file.fields:
        return file.fields[key]
    if default is _REQUIRED:
        raise ModelError(f"{path}: the metadata has no {key!r}.")
    return default
