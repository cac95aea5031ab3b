"""Every public call where ``jax_numpy_dtype_promotion="strict"`` and ``jax_numpy_rank_promotion="raise"`` are set.

People set them for a whole program. They bind what is traced: tracing is enough to see whether a call works.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flat_calls
import logitless
from logitless import AdaptiveEntropy, Metric, Objective

BACKENDS = ("reference", "chunked", "pallas_tpu", "mosaic_gpu")
KERNELS = ("pallas_tpu", "mosaic_gpu")
B, T, H, V = 2, 4, 128, 300
RNG = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def half_precision(*shape: int) -> jax.Array:
    return jnp.asarray(normal(*shape), jnp.bfloat16)


TARGETS = RNG.integers(0, V, (B, T))
ARRAYS: dict[str, Any] = dict(
    advantages=normal(B, T), mask=RNG.random((B, T)) < 0.8, old_logp=normal(B, T), rollout_logp=normal(B, T),
    token_weights=np.abs(normal(B, T)), segment_ids=np.array([[0, 0, 1, 1]] * B),
)  # fmt: skip
PRIMALS = dict(
    hidden=half_precision(B, T, H),
    lm_head=half_precision(V, H),
    bias=half_precision(V),
    lora=(half_precision(V, 2), half_precision(2, H)),
)
REFERENCE = dict(ref_hidden=PRIMALS["hidden"], ref_lm_head=PRIMALS["lm_head"], ref_bias=PRIMALS["bias"])
SEVERAL = dict(beta=0.1, entropy_coef=0.01, correction="token", kl_bias_correction=True, temperature=0.7)
OBJECTIVES = {
    "uncoupled": Objective(**SEVERAL),  # type: ignore[arg-type]
    "sequence": Objective(level="sequence", clip_metrics="trl", top_entropy=0.5, off_policy_threshold=0.1, **SEVERAL),  # type: ignore[arg-type]
    "vespo": Objective(policy="vespo", aggregation="dapo", **SEVERAL),  # type: ignore[arg-type]
    "gmpo": Objective(policy="gmpo", aggregation="luspo", **SEVERAL),  # type: ignore[arg-type]
    "dual": Objective(dual_clip=3.0, delta=4.0, aggregation="dr_grpo", max_length=7.0, **SEVERAL),  # type: ignore[arg-type]
}


@pytest.fixture(autouse=True)
def both_settings() -> Iterator[None]:
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


def options(backend: str) -> dict[str, Any]:
    return dict(backend=backend, interpret=backend in KERNELS)


def traced(loss: Callable[..., Any], *primals: Any) -> None:
    """The gradient of ``loss``, and that of its jitted form, where JAX traces the custom rules on its own later."""
    for f in (loss, jax.jit(loss)):
        jax.make_jaxpr(jax.grad(f, tuple(range(len(primals)))))(*primals)


@pytest.mark.parametrize("backend", [*BACKENDS[:2], *(pytest.param(k, marks=pytest.mark.slow) for k in KERNELS)])
def test_losses_of_the_head(backend: str) -> None:
    for name in ("uncoupled", "sequence"):
        for sparse in ("off",) if backend == "reference" else ("off", "auto"):

            def loss(p: Any, objective: Any = OBJECTIVES[name], sparse: str = sparse) -> Any:
                reference = dict(softcap=30.0, scale=0.5, vocab_size=V - 3, sparse_backward=sparse, **options(backend))
                given = dict(p, lora=p["lora"] if sparse == "off" else None)
                return flat_calls.linear_grpo_loss(
                    **given, targets=TARGETS, objective=objective, **ARRAYS, **REFERENCE, **reference
                )[0]

            traced(loss, PRIMALS)


@pytest.mark.parametrize("backend", BACKENDS)
def test_statistics_and_losses_of_logits(backend: str) -> None:
    temperature = np.full((B, T), 0.7, np.float32)

    def of_head(p: Any) -> Any:
        stats = flat_calls.linear_logprobs(
            **p, targets=TARGETS, mask=ARRAYS["mask"], temperature=temperature, logits_dtype="bfloat16",
            head_grad_dtype="param", **options(backend),
        )  # fmt: skip
        return jnp.sum(stats.logp + stats.entropy + stats.lse)

    def of_logits(x: Any) -> Any:
        stats = flat_calls.logprobs(x, TARGETS, mask=ARRAYS["mask"], temperature=0.7, softcap=30.0, **options(backend))
        return jnp.sum(stats.logp + stats.entropy + stats.lse)

    def loss(x: Any) -> Any:
        o = Objective(entropy_coef=0.1)
        return flat_calls.grpo_loss(x, TARGETS, objective=o, **ARRAYS, bwd_impl="jax", **options(backend))[0]

    traced(of_head, PRIMALS)
    traced(of_logits, half_precision(B, T, V))
    traced(loss, half_precision(B, T, V))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_kind_of_objective_with_its_metrics(name: str) -> None:
    def loss(h: Any) -> Any:
        call = logitless.with_stats(logitless.linear_grpo_loss)
        return call(h, PRIMALS["lm_head"], TARGETS, objective=OBJECTIVES[name], ref_logp=ARRAYS["old_logp"], **ARRAYS)

    jax.make_jaxpr(jax.value_and_grad(loss, has_aux=True))(PRIMALS["hidden"])
    stats = logitless.TokenStats(logp=jnp.asarray(ARRAYS["old_logp"]), entropy=jnp.ones((B, T)))
    policy = functools.partial(logitless.policy_loss, objective=OBJECTIVES[name], ref_logp=ARRAYS["old_logp"], **ARRAYS)
    jax.make_jaxpr(jax.grad(lambda s: policy(s)[0]))(stats)


def test_what_stands_around_a_loss() -> None:
    o = OBJECTIVES["uncoupled"]
    mask, segments = ARRAYS["mask"], ARRAYS["segment_ids"]
    logitless.next_tokens(TARGETS, mask, segment_ids=segments)
    logitless.group_advantages(normal(4), 2)
    logitless.group_advantages(normal(4), 2, scale="batch", baseline="leave_one_out")
    stats = logitless.TokenStats(logp=-jnp.ones((B, T)), log_sum_p2=-jnp.ones((B, T)))
    logitless.optimal_token_advantages(normal(B), stats, mask, 1, token_weights=np.ones((B, T), np.float32))
    logitless.loss_denominator(o, mask, segments)
    logitless.loss_denominator(OBJECTIVES["dual"], mask)
    logitless.entropy_denominator(OBJECTIVES["sequence"], mask, np.abs(normal(B, T)))
    logitless.dapo_denominator(np.int32(7), world_size=2)
    rows = logitless.rows_with_gradient(o, ref_logp=ARRAYS["old_logp"], **ARRAYS)
    given = {k: v for k, v in ARRAYS.items() if k not in ("mask", "segment_ids")}
    packed = logitless.pack(TARGETS, mask | True, TARGETS, mask, length=8, keep=rows, share_prompts=True, **given)
    packed.attention_mask()
    for x in (packed.targets, jnp.ones((*packed.targets.shape, 3), jnp.bfloat16)):
        logitless.unpack(packed, x)
    one = Metric(jnp.float32(1.0), jnp.float32(2.0))
    stacked = Metric(jnp.ones(3), jnp.ones(3))
    logitless.metric_values(logitless.reduce_metrics([{"ratio": one}, {"ratio": stacked}]))
    logitless.validate_targets(TARGETS, V, mask)
    control = AdaptiveEntropy(coef=0.1, target=1.0, step=0.01)
    o.replace(entropy_coef=control.update(one).applied)
    assert "grad" in str(
        logitless.explain(logitless.linear_grpo_loss, PRIMALS["hidden"], PRIMALS["lm_head"], objective=o)
    )
