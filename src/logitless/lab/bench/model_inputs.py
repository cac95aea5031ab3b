"""Hidden states and head of a real model's forward pass, as inputs of a check."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import numpy as np

from logitless.lab.tools.command_config import ConfigError

if TYPE_CHECKING:
    from logitless.train.model import ModelConfig


def hidden_and_head(
    model: str, layers: int, vocab: int, batch: int, tokens: int, seed: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``(hidden [B, T, H], lm_head [V, H], targets [B, T])`` in float32, on the host.

    ``model`` is an architecture by name, with random weights; or a folder (config.json and safetensors), a ``.gguf``
    file or a hub id, with its own. ``layers`` and ``vocab`` cut a model down to its first layers and tokens; 0 leaves
    all. The prompt is random tokens, and every target is sampled from the model's own distribution, as a policy's are.
    """
    from logitless.train import hub
    from logitless.train import model as models
    from logitless.train.architectures import PRESETS, preset
    from logitless.train.weights import load_model

    rng = np.random.default_rng(seed)
    try:
        if model in PRESETS:
            config = preset(model)
            sizes = layers or config.num_layers, vocab or config.vocab_size
            config = dataclasses.replace(config, num_layers=sizes[0], vocab_size=sizes[1])
            params = models.init(config, jax.random.key(seed))
        elif Path(model).exists() or hub.is_id(model):
            config, params = _cut(*load_model(model), layers, vocab)
        else:
            known = ", ".join(PRESETS)
            raise ConfigError(
                f"model: {model!r} is neither an architecture ({known}) nor a folder, .gguf file or hub id"
            )
    except (models.ModelError, hub.FetchError) as error:
        raise ConfigError(f"model: {error}") from None
    prompt = rng.integers(0, config.vocab_size, (batch, tokens), dtype=np.int32)
    positions = np.broadcast_to(np.arange(tokens, dtype=np.int32), prompt.shape)
    valid = np.ones(prompt.shape, bool)
    hidden = jax.jit(models.hidden_states, static_argnums=1)(params, config, prompt, positions, valid)
    hidden = np.asarray(hidden, np.float32)
    head = np.asarray(models.lm_head(params, config), np.float32)
    logits = hidden @ head.T
    targets = np.argmax(logits + rng.gumbel(size=logits.shape).astype(np.float32), axis=-1).astype(np.int32)
    return hidden, head, targets


def _cut(config: ModelConfig, params: dict, layers: int, vocab: int) -> tuple:
    """The first ``layers`` layers and ``vocab`` tokens of a loaded model."""
    if layers:
        params = dict(params, layers=jax.tree.map(lambda x: x[:layers], params["layers"]))
    if vocab:
        params = {k: v[:vocab] if k in ("embed", "lm_head") else v for k, v in params.items()}
    there = jax.tree.leaves(params["layers"])[0].shape[0]
    return dataclasses.replace(config, num_layers=there, vocab_size=params["embed"].shape[0]), params
