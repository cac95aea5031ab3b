"""The decoder: stages, rows that make room, fused maps, adapters, and caches that are not copied."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from interpreted import by_numpy
from logitless.train import decode
from logitless.train.lora import LoRA, init_lora
from logitless.train.model import ModelConfig, decoder_layer, fused_layer, hidden_states, init, lm_head, positions_of
from logitless.train.rollout import Sampling, best_with_logp, generate
from logitless.train.task import pad_left

MODEL = ModelConfig(16, 16, 32, 2, 4, 2, 8, attention_bias=True)


@functools.cache
def params() -> Any:
    """By one program in place of one for every operation."""

    def perturbed(x: jax.Array) -> jax.Array:
        return x + 0.1 * jnp.sin(jnp.arange(x.size).reshape(x.shape))

    return jax.jit(lambda key: jax.tree.map(perturbed, init(MODEL, key)))(jax.random.key(1))


PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8]]


def sampled(lora: LoRA | None = None, **options: Any) -> Any:
    settings: dict[str, Any] = dict(max_new=12, temperature=1.0, top_p=1.0, group_size=3, eos_ids=(3, 9), pad_id=0)
    prompts = pad_left(PROMPTS, 5, 0)
    s = Sampling(**{**settings, **options})
    run = functools.partial(generate, config=MODEL, sampling=s)
    return by_numpy(run, params(), lora, prompts.tokens, prompts.valid, jax.random.key(5))


def test_stages_and_rows_that_make_room_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = sampled()
    assert decode.stages(5, 16) == [16]
    monkeypatch.setattr(decode, "LEAST_STAGE", 2)
    assert decode.stages(5, 16) == [9, 13, 16]
    monkeypatch.setattr(decode, "LEAST_SHRUNK", 1)
    monkeypatch.setattr(decode, "SHRINK", 2)
    loops = str(jax.make_jaxpr(lambda k: _generated(k))(jax.random.key(0))).count("while[")
    staged = sampled()
    assert loops == 4 and (~plain.mask[:, 7]).sum() >= 5  # half of the rows are done before the second stage is
    np.testing.assert_array_equal(plain.tokens, staged.tokens)
    np.testing.assert_array_equal(plain.mask, staged.mask)
    np.testing.assert_allclose(plain.logp, staged.logp, atol=2e-6)
    assert plain.mask[:, 11].any()  # and some go on to the last
    assert decode.stages(5, 16, 1) == [16]
    assert str(jax.make_jaxpr(lambda k: _generated(k, stages=1))(jax.random.key(0))).count("while[") == 1


def _generated(key: Any, **options: Any) -> Any:
    prompts = pad_left(PROMPTS, 5, 0)
    s = Sampling(12, 1.0, 1.0, 3, (3, 9), 0, **options)
    return generate(
        params(), None, jnp.asarray(prompts.tokens), jnp.asarray(prompts.valid), key, config=MODEL, sampling=s
    )


def test_the_decoder_reads_what_the_model_reads() -> None:
    """Log-probabilities of a whole row at once, with adapters, are those that were recorded one token at a time."""
    rng = np.random.default_rng(0)
    lora = init_lora(MODEL, 2, jax.random.key(3), targets=("q", "v", "up", "down"))
    lora = jax.tree.map(lambda x: x + 0.1 * rng.standard_normal(x.shape).astype(np.float32), lora)
    for adapters in (None, lora):
        done = sampled(adapters)
        prompts = pad_left(PROMPTS, 5, 0).repeat(3)
        tokens = np.concatenate([prompts.tokens, done.tokens], axis=1)
        valid = np.concatenate([prompts.valid, done.mask], axis=1)

        def logp(p: Any, tokens: Any, valid: Any, adapters: Any) -> Any:
            hidden = hidden_states(p, MODEL, tokens, positions_of(valid), valid, lora=adapters)
            return jax.nn.log_softmax(hidden[:, 4:-1] @ lm_head(p, MODEL).T)

        every = by_numpy(logp, params(), tokens, valid, adapters)
        own = np.take_along_axis(every, done.tokens[..., None], axis=-1)[..., 0]
        np.testing.assert_allclose(np.where(done.mask, own, 0.0), done.logp, atol=1e-5)
    assert done.logp.min() < -1


def test_fused_maps_are_the_maps() -> None:
    weights = jax.tree.map(lambda x: x[1], params()["layers"])
    fused = fused_layer(weights)
    assert {"qkv", "qkv_bias", "gate_up", "o", "down"} < set(fused) and not {"q", "k", "up", "v_bias"} & set(fused)
    x = jax.random.normal(jax.random.key(0), (2, 3, 16))
    rotation = (jnp.ones((2, 3, 1, 4)), jnp.zeros((2, 3, 1, 4)))

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return q + jnp.repeat(k * v, 2, axis=2)

    one, other = (
        by_numpy(lambda w: decoder_layer(MODEL, w, x, rotation, attend, {}, None), w) for w in (weights, fused)
    )
    np.testing.assert_allclose(one, other, atol=1e-6)


def test_a_sample_comes_with_its_log_probability() -> None:
    z = 4 * jax.random.normal(jax.random.key(0), (5, 1000))
    token, logp = best_with_logp(z, z)
    np.testing.assert_array_equal(token, jnp.argmax(z, axis=1))
    np.testing.assert_allclose(logp, jax.nn.log_softmax(z)[jnp.arange(5), token], atol=1e-6)
    # Gumbel noise makes of the largest a sample: frequencies are the softmax.
    p = jnp.array([0.5, 0.3, 0.15, 0.05])
    many = jnp.tile(jnp.log(p), (20_000, 1))
    token, logp = best_with_logp(many, many + jax.random.gumbel(jax.random.key(1), many.shape))
    np.testing.assert_allclose(np.bincount(np.asarray(token), minlength=4) / 20_000, p, atol=0.015)
    np.testing.assert_allclose(logp, jnp.log(p)[token], atol=1e-6)


@pytest.mark.optimized
def test_caches_are_written_in_place() -> None:
    """The program needs the caches once: no layer's is copied in a step, nor between stages."""
    rows, slots = 8, 4096
    config = dataclasses.replace(MODEL, num_kv_heads=4, max_position=2 * slots)
    s = Sampling(slots - 8, 1.0, 1.0, rows, (3,), 0)
    of = jax.ShapeDtypeStruct
    params = jax.eval_shape(lambda: init(config, jax.random.key(0)))
    arguments = (params, of((1, 9), jnp.int32), of((1, 9), bool), jax.eval_shape(lambda: jax.random.key(0)))
    run = jax.jit(lambda p, t, v, k: generate(p, None, t, v, k, config=config, sampling=s))
    memory: Any = run.lower(*arguments).compile().memory_analysis()
    cache = 2 * config.num_layers * rows * slots * config.num_kv_heads * config.head_dim * 4
    assert memory.temp_size_in_bytes < 1.5 * cache
