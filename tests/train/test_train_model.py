"""The decoder: padding, rematerialisation, LoRA. Its numbers are checked in test_train_weights.py."""

from __future__ import annotations

import dataclasses
import functools
import math
from types import SimpleNamespace
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
    model_pass,
    num_params,
    param_shapes,
    positions_of,
)
from train_micro import MICRO, micro_params

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


def test_a_form_of_attention_that_is_not_known() -> None:
    with pytest.raises(ValueError, match="attention is 'flash', expected one of auto, cudnn, xla"):
        full(tokens(), attention="flash")


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


@pytest.mark.parametrize("length, blocks", [(63, 0), (256, 0), (257, 0), (320, 2), (509, 0), (510, 2), (512, 2)])
def test_long_rows_attend_in_blocks_of_queries(length: int, blocks: int) -> None:
    """In the fewest equal ones of at most 256; in one where blocks would be shorter than 64."""
    shape = jax.ShapeDtypeStruct((1, length, 2, 8), jnp.float32)
    jaxpr = jax.make_jaxpr(attention.causal_attention)(shape, shape, shape)
    assert [e.params["length"] for e in jaxpr.eqns if e.primitive.name == "scan"] == [blocks] * bool(blocks)


@pytest.mark.parametrize(
    "dtype, width, version, served",
    [
        (jnp.bfloat16, 128, "cuda 13", True),
        (jnp.float16, 64, "cuda 13", True),
        (jnp.float32, 128, "cuda 13", False),
        (jnp.bfloat16, 136, "cuda 13", False),
        (jnp.bfloat16, 100, "cuda 13", False),
        (jnp.bfloat16, 128, "rocm 7", False),
    ],
)
def test_cudnn_serves_small_heads_of_16_bits(
    dtype: Any, width: int, version: str, served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    q = jax.ShapeDtypeStruct((1, 4, 2, width), dtype)
    assert not attention._cudnn_serves(q)  # type: ignore[arg-type]
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax.extend.backend, "get_backend", lambda: SimpleNamespace(platform_version=version))
    assert attention._cudnn_serves(q) == served  # type: ignore[arg-type]


@pytest.mark.parametrize("remat", [False, True])
def test_layers_are_computed_again_where_that_is_asked_for(remat: bool) -> None:
    ids = jnp.ones((1, 3), int)
    parts = model_pass(MICRO, ids, jnp.arange(3)[None], ids > 0)
    jaxpr = jax.make_jaxpr(lambda p: parts.hidden(p, None, remat))(micro_params(0))
    assert ("remat" in str(jaxpr) or "checkpoint" in str(jaxpr)) == remat


@pytest.mark.parametrize("length", [6, 7])
def test_cudnn_is_handed_packed_rows_of_an_even_length(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask that also names what comes later: none of it is seen."""
    rng = np.random.default_rng(length)
    q, k, v = (jnp.asarray(rng.standard_normal((2, length, n, 8)), jnp.float32) for n in (4, 2, 2))
    mask = jnp.asarray(rng.random((2, length, length)) < 0.5) | jnp.eye(length, dtype=bool)
    expected = attention.causal_attention(q, k, v, mask, "xla")
    plain = jax.nn.dot_product_attention

    def cudnn(q: jax.Array, *args: Any, implementation: str, is_causal: bool, mask: jax.Array) -> Any:
        even = 2 * ((length + 1) // 2)
        assert q.shape[1] == even and mask.shape == (2, 1, even, even) and is_causal and implementation == "cudnn"
        return plain(q, *args, mask=mask, is_causal=True)

    monkeypatch.setattr(jax.nn, "dot_product_attention", cudnn)
    np.testing.assert_allclose(attention.causal_attention(q, k, v, mask, "cudnn"), expected, atol=4e-6, rtol=0)
