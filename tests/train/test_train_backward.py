"""The backward pass a layer at a time: the gradients of plain differentiation, added where the sums lie."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from interpreted import in_numpy
from logitless.train.backward import add_gradients
from logitless.train.lora import LoRA, init_lora
from logitless.train.model import ModelConfig, Params, Parts, init, lm_head, model_pass, positions_of

MODEL = ModelConfig(32, 16, 24, 3, 4, 2, 4, attention_bias=True)
TOKENS = jax.random.randint(jax.random.key(1), (2, 9), 0, 12)  # some of them often
VALID = jnp.arange(9) >= jnp.array([[0], [3]])
KEY = jax.random.key(3)
WEIGHTS = jax.random.normal(jax.random.key(2), (2, 9, 32))


def parts(config: ModelConfig, lora: LoRA | None, dtype: Any = jnp.float32) -> Parts:
    return model_pass(config, TOKENS, positions_of(VALID), VALID, lora=lora, compute_dtype=dtype)


def loss_of(hidden: jax.Array, head: jax.Array) -> tuple[jax.Array, dict[str, Any]]:
    logp = jax.nn.log_softmax((hidden @ head.astype(hidden.dtype).T).astype(jnp.float32))
    loss = jnp.sum(jnp.where(VALID[..., None], WEIGHTS * logp, 0.0)) / 18
    return loss, {"largest": jnp.max(logp)}


@pytest.mark.parametrize("case", ["tied", "untied", "lora"])
def test_gradients_are_those_of_plain_differentiation(case: str) -> None:
    config = dataclasses.replace(MODEL, tie_word_embeddings=case != "untied")
    params = jax.jit(init, static_argnums=0)(config, jax.random.key(0))
    lora = None
    if case == "lora":
        make = functools.partial(init_lora, config, 2, targets=("q", "down"), alpha=3.0)
        lora = jax.tree.map(lambda x: x + 0.1 * np.cos(np.arange(x.size).reshape(x.shape)), jax.jit(make)(KEY))
    trained: Any = (params, None) if lora is None else (None, lora)
    before = jax.tree.map(lambda x: np.sin(np.arange(x.size, dtype=x.dtype)).reshape(x.shape), trained)

    def plain(trained: tuple[Params | None, LoRA | None]) -> tuple[jax.Array, dict[str, Any]]:
        ours, adapters = (trained[0] or params), trained[1]
        return loss_of(parts(config, adapters).hidden(ours, adapters, remat=False), lm_head(ours, config))

    @in_numpy
    def both(params: Params, lora: LoRA | None, trained: Any, before: Any) -> Any:
        by_hand = add_gradients(before, params, lora, config, parts(config, lora), loss_of)
        return by_hand, jax.value_and_grad(plain, has_aux=True)(trained)

    (loss, metrics, total), ((expected, expected_metrics), gradients) = both(params, lora, trained, before)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    np.testing.assert_allclose(metrics["largest"], expected_metrics["largest"], rtol=1e-6)
    assert jax.tree.structure(total) == jax.tree.structure(before)
    for path, gradient in jax.tree_util.tree_leaves_with_path(gradients):
        assert np.abs(gradient).max() > 1e-4, path
    jax.tree.map(
        lambda t, b, g: np.testing.assert_allclose(t - b, g, rtol=0, atol=1e-6 + 1e-5 * np.abs(g).max()),
        total,
        before,
        gradients,
    )


@pytest.mark.optimized
def test_gradients_exist_once() -> None:
    """The program's temporaries are below the gradients': the sums are its arguments, and it writes in them."""
    config = ModelConfig(32, 64, 2048, 12, 2, 2, 32)
    params = jax.eval_shape(lambda: init(config, jax.random.key(0)))

    def run(total: Any, params: Params) -> Any:
        return add_gradients((total, None), params, None, config, parts(config, None), loss_of)

    memory: Any = jax.jit(run, donate_argnums=0).lower(params, params).compile().memory_analysis()
    size = sum(4 * x.size for x in jax.tree.leaves(params))
    assert memory.alias_size_in_bytes >= size and memory.temp_size_in_bytes < 0.4 * size
