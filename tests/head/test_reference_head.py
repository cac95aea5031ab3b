"""A reference head in the same call: the numbers of two calls, one matmul more, and no gradient into it."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flat_calls
from interpreted import by_numpy
from logitless import Objective, Sharding, linear_logprobs, oracle, plan
from logitless.core.options import Head
from matmuls import matmul_flops

B, T, H, V, WIDE = 2, 6, 5, 13, 7
"""The reference is a wider model than the policy."""


def problem(seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    mask = np.arange(T) < np.array([[6], [4]])
    targets = rng.integers(0, V, (B, T))
    targets[~mask] = -100
    return {
        "hidden": normal(B, T, H), "lm_head": normal(V, H), "targets": targets, "mask": mask,
        "advantages": np.float32([1.0, -0.5]),
        "ref_hidden": np.where(mask[..., None], normal(B, T, WIDE), np.nan).astype(np.float32),
        "ref_lm_head": normal(V, WIDE), "ref_bias": normal(V),
    }  # fmt: skip


KL = Objective(beta=0.3, temperature=0.8)


def value_and_gradients(objective: Objective, p: dict[str, Any], *, compiled: bool = False, **options: Any) -> Any:
    rest = {k: v for k, v in p.items() if k not in ("hidden", "lm_head")}

    def loss(h: jax.Array, w: jax.Array) -> Any:
        return flat_calls.linear_grpo_loss(h, w, objective=objective, **rest, **options)

    f = jax.value_and_grad(loss, (0, 1), has_aux=True)
    if compiled:
        return jax.jit(f)(p["hidden"], p["lm_head"])
    return by_numpy(f, p["hidden"], p["lm_head"])


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_against_the_oracle(backend: str) -> None:
    p = problem()
    (loss, metrics), (dh, dw) = value_and_gradients(KL, p, compiled=True, backend=backend, chunk_size=4, softcap=5.0)
    want, want_dh, want_dw, _ = oracle.linear_grpo_loss(**p, objective=KL, softcap=5.0)
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    np.testing.assert_allclose(dh, want_dh, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(dw, want_dw, rtol=1e-4, atol=1e-6)
    assert float(metrics["kl_k3"].sum) > 0.1


def test_by_hand() -> None:
    """Two equal logits, and a reference with a bias of log 3 on the target: log 1/2 against log 3/4."""
    hidden, head, bias = jnp.zeros((1, 1, 3)), jnp.ones((2, 3)), jnp.log(jnp.float32([3.0, 1.0]))
    arrays = dict(hidden=hidden, lm_head=head, ref_hidden=hidden, ref_lm_head=head, ref_bias=bias)
    call = functools.partial(flat_calls.linear_grpo_loss, objective=Objective(beta=2.0, kl="k1"))
    loss, metrics = jax.jit(call)(**arrays, targets=jnp.array([[0]]), advantages=jnp.zeros(1))
    want = np.log(0.5) - np.log(0.75)  # logp - ref
    assert float(metrics["kl_k1"].sum) == pytest.approx(want, rel=1e-6)
    assert float(loss) == pytest.approx(2.0 * want, rel=1e-6)


@pytest.mark.parametrize("on", ["logits", "logp"])
def test_the_same_as_two_calls(on: str) -> None:
    """Also with a temperature that divides log-probabilities: then the reference's as well."""
    p, o = problem(), KL.replace(temperature_on=on)
    of_reference = p["ref_hidden"], p["ref_lm_head"], p["targets"]
    ref = by_numpy(
        lambda h, w, y: linear_logprobs(h, Head(w, bias=p["ref_bias"]), y, mask=p["mask"], objective=o).logp,
        *of_reference,
    )
    two = {k: v for k, v in p.items() if not k.startswith("ref")} | {"ref_logp": ref}
    one, both = value_and_gradients(o, p), value_and_gradients(o, two)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), one, both)
    want = oracle.linear_grpo_loss(**p, objective=o)[0]
    assert float(one[0][0]) == pytest.approx(want, rel=1e-5)


def test_no_gradient_flows_into_the_reference() -> None:
    p = problem()

    def loss(reference: Any) -> Any:
        return flat_calls.linear_grpo_loss(**p | reference, objective=KL)[0]

    given = {k: jnp.nan_to_num(p[k]) for k in ("ref_hidden", "ref_lm_head", "ref_bias")}
    for name, gradient in by_numpy(jax.grad(loss), given).items():
        assert not np.asarray(gradient).any(), name

    def of_both(w: jax.Array) -> jax.Array:
        both = {"lm_head": w, "ref_hidden": p["hidden"], "ref_lm_head": w, "ref_bias": None}
        return flat_calls.linear_grpo_loss(**p | both, objective=KL)[0]

    tied = by_numpy(jax.grad(of_both), p["lm_head"])
    apart = value_and_gradients(KL, p | {"ref_hidden": p["hidden"], "ref_lm_head": p["lm_head"], "ref_bias": None})
    np.testing.assert_allclose(tied, apart[1][1], rtol=1e-5, atol=1e-6)


def test_one_matmul_more_for_each_live_token_as_explain_and_plan_say() -> None:
    p = problem() | {"ref_hidden": problem()["hidden"], "ref_lm_head": problem()["lm_head"], "ref_bias": None}
    p |= {"mask": np.ones((B, T), bool), "targets": np.zeros((B, T), int)}
    options = {"objective": KL, "chunk_size": 6}

    def flops(**given: Any) -> float:
        rest = {k: v for k, v in (p | given).items() if v is not None and k not in ("hidden", "lm_head")}
        f = jax.value_and_grad(lambda h, w: flat_calls.linear_grpo_loss(h, w, **rest, **options)[0], (0, 1))
        return matmul_flops(f, p["hidden"], p["lm_head"]) / (2 * B * T * H * V)

    assert flops() == 4.0
    assert flops(ref_hidden=None, ref_lm_head=None, ref_logp=np.zeros((B, T), np.float32)) == 3.0
    route = flat_calls.explain(flat_calls.linear_grpo_loss, **p, **options)
    assert route.reference is not None and route.reference.backend == route.backend
    assert route.matmuls.endswith("and 1 per live token for the reference") and "of the reference" in str(route)
    own, both = (plan(p["hidden"], p["lm_head"], **options, reference=r, compile=False) for r in (False, True))
    assert (own.matmuls, both.matmuls) == (3, 4) and both.flops == own.flops * 4 / 3
    arrays = p["hidden"].nbytes + p["lm_head"].nbytes
    assert both.arguments == own.arguments + arrays - 4 * B * T  # in the place of ref_logp
    assert both.temporaries == own.temporaries
    assert own.dense is not None and both.dense is not None and both.dense.flops == own.dense.flops * 4 / 3


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"ref_lm_head": None}, ValueError, "ref_hidden without ref_lm_head"),
    ({"ref_hidden": None}, ValueError, "ref_lm_head without ref_hidden"),
    ({"ref_logp": np.zeros((B, T), np.float32)}, ValueError, "ref_logp and ref_hidden were both given"),
    ({"ref_hidden": "base"}, TypeError, "ref_hidden is str"),
    ({"ref_hidden": np.zeros((B, T - 1, WIDE), np.float32)}, ValueError, "the reference: targets has shape"),
    ({"ref_lm_head": np.zeros((V, WIDE + 1), np.float32)}, ValueError, "the reference: lm_head has shape"),
    ({"ref_bias": np.zeros(V - 1, np.float32)}, ValueError, "the reference: bias has shape"),
]


@pytest.mark.parametrize(("changes", "error", "message"), BAD, ids=[m for _, _, m in BAD])
def test_what_is_refused(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        flat_calls.linear_grpo_loss(**problem() | changes, objective=KL)


@pytest.mark.slow
def test_over_a_mesh() -> None:
    """Tokens over two devices, vocabulary over four: the same loss and gradients."""
    mesh = jax.make_mesh((2, 4), ("data", "tensor"))
    p = problem() | {"ref_bias": None}
    p |= {k: np.pad(p[k], ((0, 3), (0, 0))) for k in ("lm_head", "ref_lm_head")}
    P = jax.sharding.PartitionSpec
    sharding = Sharding(mesh, tokens=P("data"), head=P("tensor"))
    one = value_and_gradients(KL, p, compiled=True, vocab_size=V)
    both = value_and_gradients(KL, p, compiled=True, vocab_size=V, sharding=sharding)
    np.testing.assert_allclose(one[0][0], both[0][0], rtol=1e-6)
    for a, b in zip(one[1], both[1], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
