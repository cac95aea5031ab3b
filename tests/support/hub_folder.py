"""Hub folders of a model, as ``transformers`` writes and loads them: what tests load weights from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from logitless.train.architectures import _KEYS
from logitless.train.model import ModelConfig, Params, layer_shapes, param_shapes
from logitless.train.weights import HF_NAMES


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The ``config.json`` for this model, as read by ``transformers``."""
    kind, name = ("qwen2", "Qwen2") if config.attention_bias else ("llama", "Llama")
    return {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": kind,
        **{theirs: getattr(config, ours) for theirs, ours in _KEYS.items()},
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "hidden_act": "silu",
        "tie_word_embeddings": config.tie_word_embeddings,
    }


def save_safetensors(folder: str | Path, config: ModelConfig, params: Params, shard_bytes: int = 4 << 30) -> list[Path]:
    """Write ``config.json`` and the weights, in the dtype of ``params``; returns the weight files."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("model*.safetensors*"):  # of another number of shards
        old.unlink()
    names = {HF_NAMES.top[n]: np.asarray(params[n]) for n in param_shapes(config) if n != "layers"}
    for name in layer_shapes(config):
        for i, layer in enumerate(np.asarray(params["layers"][name])):
            names[HF_NAMES.of_layer(name, i)] = np.ascontiguousarray(layer.T)
    shards: list[dict[str, np.ndarray]] = [{}]
    for name, tensor in names.items():
        if shards[-1] and sum(x.nbytes for x in shards[-1].values()) + tensor.nbytes > shard_bytes:
            shards.append({})
        shards[-1][name] = tensor
    count = len(shards)
    files = [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    if count == 1:
        files = ["model.safetensors"]
    else:
        index = {"weight_map": {name: file for file, shard in zip(files, shards, strict=True) for name in shard}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for file, shard in zip(files, shards, strict=True):
        save_file(shard, folder / file, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config_to_hf(config), "torch_dtype": str(params["embed"].dtype)}))
    return [folder / file for file in files]


def save_tokenizer(folder: Path) -> None:
    """A byte-level BPE of four words, with the shortest of chat templates."""
    tokenizers = pytest.importorskip("tokenizers", reason="the train extra is not installed")
    words = {"<eos>": 0, "a": 1, "b": 2, "ab": 3}
    built = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=words, merges=[("a", "b")]))
    built.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<eos>", "chat_template": "{{ messages[0].content }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
