"""``Head`` as a tree that gradients are taken by, and what a reference's head takes from the policy's."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import logitless
from interpreted import by_numpy
from logitless import Head, Objective, Options

B, T, H, V = 2, 3, 4, 7
KL = Objective(beta=0.5, kl="k3")
CHUNKED = Options(backend="chunked")


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


HIDDEN, WEIGHT, BIAS = normal(0, B, T, H), normal(1, V, H), normal(2, V)
LORA = normal(3, V, 2), normal(4, 2, H)
REF_HIDDEN, REF_WEIGHT = normal(5, B, T, H), normal(6, V, H)
REST: dict[str, Any] = dict(targets=jnp.zeros((B, T), int), advantages=jnp.asarray([1.0, -1.0]), options=CHUNKED)


def test_a_gradient_by_a_head_is_a_head_of_the_gradients_by_its_arrays() -> None:
    def of_head(head: Head) -> jax.Array:
        return logitless.linear_grpo_loss(HIDDEN, head, **REST)[0]

    def of_arrays(weight: jax.Array, bias: jax.Array, lora: Any) -> jax.Array:
        return of_head(Head(weight, bias=bias, lora=lora, lora_scale=0.5, softcap=5.0))

    head = Head(WEIGHT, bias=BIAS, lora=LORA, lora_scale=0.5, softcap=5.0)
    found = by_numpy(jax.grad(of_head), head)
    want = by_numpy(jax.grad(of_arrays, (0, 1, 2)), WEIGHT, BIAS, LORA)
    assert isinstance(found, Head) and (found.lora_scale, found.softcap, found.layout) == (0.5, 5.0, None)
    assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(found))
    jax.tree.map(np.testing.assert_array_equal, (found.weight, found.bias, found.lora), want)


def test_arrays_of_a_head_are_leaves_and_numbers_are_not() -> None:
    paths = [
        jax.tree_util.keystr(k) for k, _ in jax.tree_util.tree_leaves_with_path(Head(WEIGHT, lora=LORA, scale=2.0))
    ]
    assert paths == [".weight", ".lora[0]", ".lora[1]"]
    traced = Head(WEIGHT, lora=LORA, lora_scale=jnp.float32(0.5))
    assert len(jax.tree.leaves(traced)) == 4 and jax.tree.map(lambda x: x, traced).lora_scale == 0.5


@pytest.mark.parametrize("own", [False, True], ids=["array", "head"])
def test_a_references_array_has_the_policys_transform_and_a_head_its_own(own: bool) -> None:
    policy = Head(WEIGHT, scale=0.7, softcap=3.0, vocab_size=V - 1)
    reference = Head(REF_WEIGHT, bias=BIAS, scale=1.5) if own else REF_WEIGHT
    alone = reference if isinstance(reference, Head) else policy.replace(weight=REF_WEIGHT)
    ref = by_numpy(lambda h: logitless.linear_logprobs(h, alone, REST["targets"], options=CHUNKED).logp, REF_HIDDEN)
    inside, before = (
        by_numpy(lambda h, given=given: logitless.linear_grpo_loss(h, policy, objective=KL, **given, **REST), HIDDEN)
        for given in (dict(ref_hidden=REF_HIDDEN, ref_lm_head=reference), dict(ref_logp=ref))
    )
    np.testing.assert_allclose(inside[0], before[0], rtol=1e-6)
    assert float(inside[1]["kl_k3"].sum) > 0.1
