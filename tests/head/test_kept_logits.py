"""Logits that the forward pass keeps for cotangents that arrive later, in plain JAX: values, gradients, matmuls."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flat_calls
from logitless import Objective
from logitless.head.linear import rounded
from matmuls import matmul_flops
from numerics import assert_same_bits, head_case

SHAPE, WIDTH, VOCAB = (3, 37), 16, 90
GSPO = Objective(level="sequence", entropy_coef=0.1)
BUDGET = 4 * VOCAB * (111 + 2 * 111) + 4 * VOCAB * WIDTH
"""Logits of all tokens beside a chunk's logits and dlogits, which is all of them here, and the sum of dW."""


def gradients(mask: Any, **options: Any) -> Any:
    case = head_case(0, SHAPE, WIDTH, VOCAB, options.pop("dtype", jnp.float32))

    def loss(h: Any, w: Any, mask: Any) -> Any:
        given = dict(advantages=jnp.array([1.0, 0.0, -2.0]), mask=mask, objective=GSPO, backend="chunked", **options)
        return flat_calls.linear_grpo_loss(h, w, jnp.asarray(case.targets), **given)[0]

    return jax.value_and_grad(loss, (0, 1)), (*case.parameters(), mask)


@pytest.mark.parametrize("logits_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gradients_are_those_by_recompute(dtype: Any, logits_dtype: str) -> None:
    mask = jnp.asarray(np.random.default_rng(0).random(SHAPE) < 0.6)
    ways = [gradients(mask, dtype=dtype, logits_dtype=logits_dtype, **o) for o in (dict(memory_budget=BUDGET), {})]
    both = [jax.jit(f) for f, _ in ways]
    h, w, _ = ways[0][1]
    for live in (mask, jnp.ones_like(mask)):
        kept, by_recompute = (f(h, w, live) for f in both)
        assert_same_bits(kept[0], by_recompute[0])
        for a, b in zip(kept[1], by_recompute[1], strict=True):
            np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=1e-5, atol=1e-6)


def test_three_matmuls_a_token_and_two_that_move_less() -> None:
    """Of live tokens all one, of those with a gradient two more; by recompute three."""
    mask = jnp.asarray(np.random.default_rng(0).random(SHAPE) < 0.6)
    one = 2 * WIDTH * VOCAB
    for options, more in (dict(memory_budget=BUDGET), 2), ({}, 3):
        f, arrays = gradients(mask, **options)
        chunks = 111  # of one chunk
        assert matmul_flops(f, *arrays) == one * chunks * (1 + more)


def test_explain_says_so_and_a_byte_less_recomputes() -> None:
    case = head_case(0, SHAPE, WIDTH, VOCAB)

    def explained(budget: int) -> Any:
        given = dict(advantages=jnp.ones(3), objective=GSPO, memory_budget=budget, backend="chunked")
        return flat_calls.explain(flat_calls.linear_grpo_loss, *case.parameters(), jnp.asarray(case.targets), **given)

    enough = 4 * VOCAB * (111 + 2 * 111)  # a float32 head needs no other sum of dW
    kept, less = explained(enough), explained(enough - 1)
    assert kept.tiles["kept"] == 111 and kept.matmuls.startswith("3 ") and "kept logits" in kept.way
    assert "kept" not in less.tiles and less.matmuls.startswith("4 ") and "recompute" in less.way


def test_a_rounding_that_is_made_wide_again_stays_one() -> None:
    """A compiler may leave out two conversions; the logits of a second pass would be others than those of the first."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal(1000), jnp.float32)
    twice = jax.jit(lambda x: rounded(x, jnp.bfloat16).astype(jnp.float32))(x)
    np.testing.assert_array_equal(twice, np.asarray(x).astype(jnp.bfloat16).astype(np.float32))
    assert rounded(x, jnp.float32) is x
