"""The architectures that can be trained, and their translation from and to the hub's ``config.json``."""

from __future__ import annotations

import dataclasses
from typing import Any

from logitless.train.files import did_you_mean
from logitless.train.model import ModelConfig, ModelError

PRESETS: dict[str, ModelConfig] = {
    "qwen2.5-0.5b": ModelConfig(151936, 896, 4864, 24, 14, 2, 64, 1e6, 1e-6, True, True, 32768),
    "qwen2.5-1.5b": ModelConfig(151936, 1536, 8960, 28, 12, 2, 128, 1e6, 1e-6, True, True, 32768),
    "qwen2.5-7b": ModelConfig(152064, 3584, 18944, 28, 28, 4, 128, 1e6, 1e-6, False, True, 32768),
    "smollm2-135m": ModelConfig(49152, 576, 1536, 30, 9, 3, 64, 1e5, 1e-5, True, False, 8192),
    "tiny": ModelConfig(16, 128, 384, 2, 4, 4, 32, 1e4, 1e-6, True, False, 256),
}
"""Shapes by name. ``tiny`` (0.43 M parameters) is for the built-in arithmetic; its vocabulary is the tokenizer's."""


def preset(name: str, vocab_size: int | None = None) -> ModelConfig:
    """The preset with this name, with another vocabulary if given."""
    if name not in PRESETS:
        raise ModelError(f"no architecture {name!r}; there are {', '.join(PRESETS)}.{did_you_mean(name, PRESETS)}")
    config = PRESETS[name]
    return config if vocab_size is None else dataclasses.replace(config, vocab_size=vocab_size)


_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "max_position_embeddings": "max_position",
    "rms_norm_eps": "rms_norm_eps",
}
_UNSUPPORTED = {"mlp_bias": "biases in the MLP", "use_sliding_window": "sliding-window attention"}


def config_from_hf(hf: dict[str, Any]) -> ModelConfig:
    """The model of a hub folder's ``config.json``; what this decoder does not compute is refused by name."""
    kind = hf.get("model_type")
    if kind not in ("qwen2", "llama"):
        raise ModelError(f"config.json: model_type is {kind!r}; supported are 'qwen2' (Qwen2, Qwen2.5) and 'llama'.")
    missing = [key for key in _KEYS if hf.get(key) is None]
    if missing:
        raise ModelError(f"config.json: {', '.join(missing)} missing.")
    for key, what in _UNSUPPORTED.items():
        if hf.get(key):
            raise ModelError(f"config.json: {key} is {hf[key]!r}; {what} is not supported.")
    if kind == "llama" and hf.get("attention_bias"):
        raise ModelError("config.json: attention_bias of a llama model also biases the output map: not supported.")
    if hf.get("hidden_act", "silu") != "silu":
        raise ModelError(f"config.json: hidden_act is {hf['hidden_act']!r}, supported is 'silu'.")
    rope = {**(hf.get("rope_scaling") or {}), **(hf.get("rope_parameters") or {})}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type != "default" or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(f"config.json: rotary scaling {rope} is not supported, only plain rotary positions.")
    heads = hf["num_attention_heads"]
    return ModelConfig(
        **{ours: hf[theirs] for theirs, ours in _KEYS.items()},
        num_kv_heads=hf.get("num_key_value_heads") or heads,
        head_dim=hf.get("head_dim") or hf["hidden_size"] // heads,
        rope_theta=float(hf.get("rope_theta") or rope.get("rope_theta") or 10_000.0),
        # transformers leaves a key out where it has the family's default: tied is False for both.
        tie_word_embeddings=bool(hf.get("tie_word_embeddings", False)),
        attention_bias=kind == "qwen2",
    )
