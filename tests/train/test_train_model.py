"""The decoder: padding, rematerialisation, LoRA. Its numbers are checked in test_train_weights.py."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hub_folder import config_to_hf
from interpreted import by_numpy, in_numpy
from logitless.train import attention
from logitless.train.architectures import PRESETS, config_from_hf, preset
from logitless.train.lora import init_lora, merge
from logitless.train.model import (
    ModelConfig,
    ModelError,
    hidden_states,
    init,
    lm_head,
    num_params,
    param_shapes,
    positions_of,
)

CONFIG = ModelConfig(61, 32, 48, 3, 4, 2, 8, 1e4, 1e-6, tie_word_embeddings=False, attention_bias=True)
LENGTH = 8


@functools.cache
def params() -> Any:
    """Random weights, with norms and biases that do something."""
    rng = np.random.default_rng(0)
    tree = jax.jit(init, static_argnums=0)(CONFIG, jax.random.key(0))
    return jax.tree.map(lambda x: x + 0.2 * rng.standard_normal(x.shape).astype(np.float32), tree)


@functools.cache
def traced(config: ModelConfig, **choices: Any) -> Any:
    return in_numpy(lambda tree, ids, given: hidden_states(tree, config, ids, **given, **choices))


def run(tree: Any, config: ModelConfig, ids: Any, positions: Any, valid: Any, **options: Any) -> Any:
    """:func:`hidden_states`, interpreted."""
    choices = {k: options.pop(k) for k in ("remat", "compute_dtype", "attention") if k in options}
    return traced(config, **choices)(tree, ids, {"positions": positions, "valid": valid, **options})


def tokens(rows: int = 2, length: int = LENGTH) -> jax.Array:
    return jax.random.randint(jax.random.key(2), (rows, length), 0, CONFIG.vocab_size)


def full(ids: jax.Array, **options: Any) -> jax.Array:
    """Hidden states of rows without padding."""
    valid = jnp.ones(ids.shape, bool)
    return run(params(), CONFIG, ids, positions_of(valid), valid, **options)


def padded(ids: jax.Array, where: list[int], pad: int) -> tuple[jax.Array, jax.Array]:
    """The tokens of ``ids`` at the slots ``where`` of longer rows, ``pad`` at all others."""
    length = max(where) + 1 if where[0] else len(where) + 3
    valid = jnp.zeros((ids.shape[0], length), bool).at[:, jnp.asarray(where)].set(True)
    return jnp.full(valid.shape, pad, jnp.int32).at[:, jnp.asarray(where)].set(ids), valid


@pytest.mark.parametrize("pad", [0, -7, 10**6])
@pytest.mark.parametrize("where", [[3, 4, 5, 6, 7, 8, 9, 10], [0, 1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 5, 6, 7, 9, 10]])
def test_padding_changes_nothing(where: list[int], pad: int) -> None:
    ids, valid = padded(tokens(), where, pad)
    hidden = run(params(), CONFIG, ids, positions_of(valid), valid)
    assert np.isfinite(hidden).all()
    np.testing.assert_allclose(hidden[:, np.asarray(where)], full(tokens()), atol=3e-6, rtol=0)


def test_the_side_of_the_padding_does_not_change_a_bit() -> None:
    left, right = ([padded(tokens(), where, 0)][0] for where in ([*range(3, 11)], [*range(8)]))
    results = [
        run(params(), CONFIG, ids, positions_of(valid), valid)[np.asarray(valid)] for ids, valid in (left, right)
    ]
    np.testing.assert_array_equal(*results)


def test_a_token_sees_nothing_that_comes_later() -> None:
    ids = tokens()
    changed = ids.at[:, 5:].set((ids[:, 5:] + 1) % CONFIG.vocab_size)
    before, after = full(ids), full(changed)
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert np.abs(before[:, 5:] - after[:, 5:]).min(axis=-1).max() > 0


def test_remat_changes_neither_values_nor_gradients() -> None:
    ids, valid = tokens(), np.arange(LENGTH) >= np.array([[0], [3]])

    def loss(tree: Any, remat: bool) -> jax.Array:
        hidden = hidden_states(tree, CONFIG, ids, positions_of(valid), valid, remat=remat)
        return jnp.sum(jnp.where(valid[..., None], hidden @ lm_head(tree, CONFIG).T, 0.0) ** 2)

    (plain, plain_grads), (again, again_grads) = (
        by_numpy(jax.value_and_grad(functools.partial(loss, remat=remat)), params()) for remat in (False, True)
    )
    np.testing.assert_allclose(plain, again, rtol=1e-6)
    for name, a, b in zip(
        jax.tree_util.tree_leaves_with_path(plain_grads),
        jax.tree.leaves(plain_grads),
        jax.tree.leaves(again_grads),
        strict=True,
    ):
        assert np.abs(a).max() > 0, name[0]
        np.testing.assert_allclose(a, b, atol=1e-5 * float(np.abs(a).max()), rtol=0)


def test_blocks_of_queries_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (jax.random.normal(jax.random.key(i), (2, 12, n, 8)) for i, n in enumerate((4, 2, 2)))

    def attended(q: jax.Array) -> jax.Array:
        return attention.causal_attention(q, k, v)

    def with_gradient() -> Any:
        return by_numpy(jax.grad(lambda q: (jnp.sum(attended(q) ** 2), attended(q)), has_aux=True), q)

    whole = with_gradient()
    monkeypatch.setattr(attention, "_QUERY_BLOCK", 3)
    assert "scan" in str(jax.make_jaxpr(attended)(q))
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=4e-6, rtol=0), with_gradient(), whole)


@pytest.mark.parametrize("length", [6, 7])
def test_cudnn_is_handed_even_lengths_and_no_mask(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(length)
    q, k, v = (rng.standard_normal((2, length, n, 8)).astype(np.float32) for n in (4, 2, 2))

    def attended(implementation: str) -> Any:
        return by_numpy(functools.partial(attention.causal_attention, implementation=implementation), q, k, v)

    expected = attended("xla")
    plain = jax.nn.dot_product_attention

    def cudnn(q: jax.Array, *args: Any, **options: Any) -> Any:
        assert q.shape[1] == 2 * ((length + 1) // 2)
        assert options == {"is_causal": True, "implementation": "cudnn"}
        return plain(q, *args, is_causal=True)

    monkeypatch.setattr(jax.nn, "dot_product_attention", cudnn)
    np.testing.assert_allclose(attended("cudnn"), expected, atol=2e-6, rtol=0)


def test_an_id_outside_the_vocabulary_is_not_taken_for_another() -> None:
    for bad in (-1, CONFIG.vocab_size):
        hidden = full(tokens().at[0, 2].set(bad))
        assert np.isnan(hidden[0, 2]).all() and np.isfinite(hidden[1]).all()


def test_bfloat16_computes_close_to_float32_and_leaves_the_weights() -> None:
    hidden = full(tokens(), compute_dtype=jnp.bfloat16)
    assert hidden.dtype == jnp.bfloat16
    error = np.abs(hidden.astype(np.float32) - full(tokens()))
    assert 1e-4 < error.max() < 0.2 and error.mean() < 0.02
    valid = jnp.ones((2, LENGTH), bool)

    def loss(tree: Any) -> jax.Array:
        hidden = hidden_states(tree, CONFIG, tokens(), positions_of(valid), valid, compute_dtype=jnp.bfloat16)
        return hidden.sum(dtype=jnp.float32)

    grads = jax.eval_shape(jax.grad(loss), params())
    assert {x.dtype for x in jax.tree.leaves(grads)} == {jnp.dtype("float32")}


def test_lora_starts_as_the_model_and_merges_into_it() -> None:
    lora = init_lora(CONFIG, 2, jax.random.key(3), targets=("q", "v", "o", "down"), alpha=6.0)
    assert lora.scale == 3.0
    np.testing.assert_array_equal(full(tokens(), lora=lora), full(tokens()))
    rng = np.random.default_rng(4)
    moved = jax.tree.map(lambda x: x + 0.1 * rng.standard_normal(x.shape).astype(np.float32), lora)
    adapted = full(tokens(), lora=moved)
    assert np.abs(adapted - full(tokens())).max() > 0.05
    valid = jnp.ones((2, LENGTH), bool)
    merged = merge(params(), moved)
    hidden = run(merged, CONFIG, tokens(), positions_of(valid), valid)
    np.testing.assert_allclose(hidden, adapted, atol=2e-5, rtol=0)
    np.testing.assert_array_equal(merged["layers"]["k"], params()["layers"]["k"])


def test_lora_refuses_what_it_cannot_adapt() -> None:
    with pytest.raises(ModelError, match=r"targets are \['q_proj'\], expected some of q, k"):
        init_lora(CONFIG, 2, jax.random.key(0), targets=["q_proj"])
    with pytest.raises(ModelError, match="rank is 0"):
        init_lora(CONFIG, 0, jax.random.key(0))


@pytest.mark.parametrize(
    "name, count",
    [
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen2.5-1.5b", 1_543_714_304),
        ("qwen2.5-7b", 7_615_616_512),
        ("smollm2-135m", 134_515_008),
    ],
)
def test_presets_have_the_published_number_of_parameters(name: str, count: int) -> None:
    shapes = jax.tree.leaves(param_shapes(preset(name)), is_leaf=lambda x: isinstance(x, tuple))
    assert sum(math.prod(shape) for shape in shapes) == count


def test_tiny_is_tiny_and_takes_the_callers_vocabulary() -> None:
    tree = jax.eval_shape(lambda key: init(preset("tiny", vocab_size=16), key), jax.random.key(0))
    assert 0.42e6 < num_params(tree) < 0.44e6
    bigger = jax.eval_shape(lambda key: init(preset("tiny", vocab_size=30), key, jnp.bfloat16), jax.random.key(0))
    assert bigger["embed"].shape == (30, 128) and bigger["norm"].dtype == jnp.bfloat16
    with pytest.raises(ModelError, match=r"Did you mean 'qwen2.5-1.5b'"):
        preset("qwen2.5-1b")
    assert config_from_hf(config_to_hf(PRESETS["smollm2-135m"])) == PRESETS["smollm2-135m"]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"tokens": jnp.zeros((2, 3))}, r"tokens is float32\[2, 3\], expected integers"),
        ({"tokens": jnp.zeros(3, jnp.int32)}, r"expected integers \[B, T\]"),
        ({"positions": jnp.zeros((2, 1), jnp.int32)}, r"positions is int32\[2, 1\], expected integers \[2, 3\]"),
        ({"positions": jnp.zeros((2, 3))}, r"positions is float32\[2, 3\], expected integers"),
        ({"valid": jnp.ones((2, 3))}, r"valid is float32\[2, 3\], expected bool"),
        ({"attention": "flash"}, "attention is 'flash', expected one of auto, cudnn, xla"),
    ],
)
def test_bad_input_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    ids = jnp.zeros((2, 3), jnp.int32)
    call = {"tokens": ids, "positions": ids, "valid": ids == 0, **change}
    with pytest.raises(ValueError, match=message):
        hidden_states(params(), CONFIG, **call)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"num_kv_heads": 3}, "4 heads over 3 key-value heads"),
        ({"head_dim": 7}, "head_dim is 7, expected an even"),
        ({"num_layers": 0}, "num_layers is 0, expected a positive integer"),
        ({"vocab_size": 2.5}, "vocab_size is 2.5"),
        ({"num_layers": 10_001}, "num_layers is 10001, expected at most 10000"),
    ],
)
def test_impossible_shapes_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        dataclasses.replace(CONFIG, **change)
