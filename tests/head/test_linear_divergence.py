"""``linear_divergence``, ``divergence`` and their losses against float64, on every plain-JAX path."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import logitless as L
from interpreted import by_numpy, in_numpy
from logitless import oracle
from logitless.core import divergences, row_passes
from logitless.core.problem import Call, Given, Problem, Teacher
from logitless.core.stats import LogitTransform, finish, merge
from numerics import BACKENDS, assert_contract, f64

KINDS: dict[str, dict[str, Any]] = {
    "reverse_kl": {},
    "forward_kl": {},
    "jsd": {"mix": 0.3},
}
EVERY = pytest.mark.parametrize("kind, backend", list(itertools.product(KINDS, BACKENDS)))
N, H, H2, V = 12, 16, 24, 211


def options(backend: str) -> L.Options:
    return L.Options(backend=backend, chunk_size=5 if backend == "chunked" else None)


def states(seed: int, width: int, vocab: int = V, spread: float = 2.0, n: int = N) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    h = spread * rng.standard_normal((n, width)) / np.sqrt(width)
    return h.astype(np.float32), rng.standard_normal((vocab, width)).astype(np.float32)


def plain(kind: str, mix: float, t: Any, h: Any, w: Any, th: Any, tw: Any, v: int) -> Any:
    """What one writes without this library: dense logits, two log_softmax, a sum; JAX differentiates it."""
    lp = jax.nn.log_softmax((h @ w.T)[:, :v] / t)
    lq = jax.lax.stop_gradient(jax.nn.log_softmax((th @ tw.T)[:, :v] / t))
    p, q = jnp.exp(lp), jnp.exp(lq)
    if kind == "forward_kl":
        return jnp.sum(q * (lq - lp), -1)
    if kind == "reverse_kl":
        return jnp.sum(p * (lp - lq), -1)
    lm = jnp.logaddexp(lp + jnp.log1p(-mix), lq + jnp.log(mix))
    return mix * jnp.sum(q * (lq - lm), -1) + (1 - mix) * jnp.sum(p * (lp - lm), -1)


def row_errors(got: Any, want: np.ndarray) -> np.ndarray:
    """Error of each row relative to the row itself; a row below float32's range counts as zero."""
    size = np.linalg.norm(want, axis=-1)
    return np.linalg.norm(f64(got) - want, axis=-1) / np.maximum(size, 1e-30)


@functools.partial(jax.jit, static_argnums=(0, 1))
def four_statistics(kind: str, backend: str, h: Any, w: Any, th: Any, tw: Any, y: Any, t: Any, g: Any) -> Any:
    """``((divergence, entropy, logp, lse), the teacher's entropy, (dH, dW))`` for cotangents ``g`` of the four."""

    def ours(h: Any, w: Any) -> Any:
        s = L.linear_divergence(
            h, w, th, tw, divergence=kind, temperature=t, targets=y, options=options(backend), **KINDS[kind]
        )
        return (s.divergence, s.entropy, s.logp, s.lse), s.teacher_entropy

    values, pull, teacher_entropy = jax.vjp(ours, h, w, has_aux=True)
    return values, teacher_entropy, pull(tuple(g))


@EVERY
@pytest.mark.parametrize("spread", [2.0, 12.0], ids=["ordinary", "peaked"])
def test_values_and_gradients(kind: str, backend: str, spread: float) -> None:
    """Random cotangents of all four statistics, a temperature per token, more token ids on the teacher's side."""
    (h, w), (th, tw) = states(0, H, spread=spread), states(1, H2, vocab=V + 5, spread=spread)
    rng = np.random.default_rng(2)
    y, t = rng.integers(0, V, N), rng.uniform(0.5, 2.0, N).astype(np.float32)
    g = rng.standard_normal((4, N)).astype(np.float32)
    values, teacher_entropy, got = four_statistics(kind, backend, h, w, th, tw, y, t, g)
    student, teacher = oracle.linear_rows(h, w), oracle.linear_rows(th, tw)
    about = dict(divergence=kind, temperature=t, targets=y, **KINDS[kind])
    truth = oracle.divergence(student, teacher, **about)
    made = oracle.divergence_vjp(student, teacher, f64(g[0]), None, f64(g[1]), f64(g[2]), **about)
    more = oracle.linear_token_stats_vjp(h, w, y, None, None, f64(g[3]), temperature=t)
    base = by_numpy(lambda h, w: plain(kind, KINDS[kind].get("mix", 0.5), t[:, None], h, w, th, tw, V), h, w)
    assert_contract("divergence", values[0], base, truth.divergence)
    np.testing.assert_allclose(values[1], truth.entropy, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(values[2], truth.logp, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(teacher_entropy, truth.teacher_entropy, rtol=2e-5, atol=2e-6)
    for label, ours, a, b in zip(("dH", "dW"), got, made, more, strict=False):
        want = f64(a) + f64(b)
        assert np.abs(f64(ours) - want).max() <= 4e-6 * np.abs(want).max(), label


@EVERY
def test_equal_rows_are_exactly_zero(kind: str, backend: str) -> None:
    """Also where the row is peaked, and with everything a head can have."""
    h, w = states(3, H, spread=10.0)
    head = L.Head(jnp.asarray(w), bias=jnp.linspace(-1, 1, V), softcap=20.0, scale=0.7, vocab_size=V - 3)

    def total(h: Any, head: L.Head) -> Any:
        s = L.linear_divergence(h, head, h, head, divergence=kind, options=options(backend), **KINDS[kind])
        return jnp.sum(s.divergence), s.divergence

    (dh, dhead), values = by_numpy(jax.grad(total, (0, 1), has_aux=True), h, head)
    for x in (values, dh, dhead.weight, dhead.bias):
        assert not np.any(x)


@EVERY
def test_padding_is_no_column(kind: str, backend: str) -> None:
    """Rows of both heads beyond the vocabulary, with logits as large as the others'."""
    (h, w), (th, tw) = states(6, H), states(7, H2)
    real = V - 40

    def total(w: Any, tw: Any) -> Any:
        heads = L.Head(w, layout="vh", vocab_size=real), L.Head(tw, layout="vh", vocab_size=real)
        given = dict(divergence=kind, options=options(backend), **KINDS[kind])
        found = L.linear_divergence(h, heads[0], th, heads[1], **given).divergence
        return jnp.sum(found), found

    run = in_numpy(jax.grad(total, has_aux=True))
    (got, values), (want, cut) = run(w, tw), run(w[:real], tw[:real])
    np.testing.assert_allclose(values, cut, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got[:real], want, rtol=1e-4, atol=1e-6)
    assert not np.any(got[real:])


@functools.partial(jax.jit, static_argnums=(0, 1))
def of_logits(kind: str, backend: str, x: Any, t: Any) -> Any:
    """``(divergence, dlogits of its sum)`` of two rows of logits."""

    def values(x: Any) -> Any:
        return L.divergence(x, t, divergence=kind, options=L.Options(backend=backend), **KINDS[kind]).divergence

    value, pull = jax.vjp(values, x)
    return value, pull(jnp.ones_like(value))[0]


def check_rows(kind: str, x: np.ndarray, t: np.ndarray, found: Any, rtol: float = 1e-5) -> None:
    """Values and every row of dlogits are right to ``rtol`` of their own size."""
    rows = oracle.logits_rows(x), oracle.logits_rows(t)
    truth = oracle.divergence(*rows, divergence=kind, **KINDS[kind]).divergence
    want = oracle.divergence_vjp(*rows, np.ones(len(x)), divergence=kind, **KINDS[kind]).inputs
    np.testing.assert_allclose(found[0], truth, rtol=rtol)
    assert row_errors(found[1], want).max() <= rtol


@EVERY
@pytest.mark.parametrize("lead", [10.0, 20.0, 25.0, 30.0])
def test_gradient_rows_at_a_peak(kind: str, lead: float, backend: str) -> None:
    """Rows whose largest logit leads all others by ``lead`` nats on both sides: each row of dlogits is right to 1e-5 of
    its own size, where float32 autodiff loses all digits."""
    x, t = np.random.default_rng(4).standard_normal((2, 6, 50)).astype(np.float32)
    x[:, 7] = lead + 4
    t[:3, 7] = lead + 4.5
    t[3:, 9] = lead + 4.5  # another peak than the student's
    check_rows(kind, x, t, of_logits(kind, backend, x, t))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lead", [0.0, 0.4, 0.5, 3.0, 20.0])
def test_a_peak_made_again_with_another_rounding(kind: str, lead: float) -> None:
    """Another loop or shard makes the logits again, an ulp or two apart from those of the statistics: the peak is still
    found once, near the bound of a dominated row too."""
    rng = np.random.default_rng(5)
    x, t = rng.standard_normal((2, 200, 12)).astype(np.float32)
    x[:, 3] = np.log(np.sum(np.exp(np.delete(x, 3, 1)), 1)) + lead  # p is 0.5, 0.6, 0.62, 0.95 and 1 - 2e-9 there
    again = x * (1 + 3e-7 * rng.standard_normal(x.shape)).astype(np.float32)

    def value(x: Any, t: Any, again: Any) -> Any:
        teacher = Teacher(Given(t), LogitTransform(), jnp.float32(0.3), kind)  # type: ignore[arg-type]
        alone = Problem(Given(x), jnp.zeros(200, jnp.int32), LogitTransform(), call=Call("test", 12))
        rows = dataclasses.replace(alone, teacher=teacher)
        stats, other = row_passes.statistics(rows.logits, alone), row_passes.teacher_statistics(rows)
        sums = row_passes.sums_of_pair(again, rows, stats, other)
        return divergences.finish_pair(kind, stats, other, sums, jnp.float32(0.3)).divergence  # type: ignore[arg-type]

    truth = oracle.divergence(oracle.logits_rows(x), oracle.logits_rows(t), divergence=kind, mix=0.3).divergence
    np.testing.assert_allclose(by_numpy(value, x, t, again), truth, rtol=3e-5, atol=1e-6)


def merged(kind: Any, cuts: tuple[int, ...], x: Any, t: Any) -> Any:
    """``(divergence, dlogits)`` of rows whose columns lie on several shards: what ``mesh/vocab_parallel.py`` does."""
    found = []
    for first, last in itertools.pairwise((0, *cuts, x.shape[1])):
        teacher = Teacher(Given(t[:, first:last]), LogitTransform(), None, kind)
        call = Call("test", last - first)
        rows = Problem(Given(x[:, first:last]), jnp.full(len(x), -1), LogitTransform(), teacher=teacher, call=call)
        found.append(row_passes.shard_of_pair(rows.logits, rows))
    both = [functools.reduce(merge, sums) for sums in zip(*((f.sums, f.teacher_sums) for f in found), strict=True)]
    nowhere = jnp.full(len(x), -jnp.inf)  # no shard has the target
    whole, other = (finish(dataclasses.replace(s, target=nowhere), True) for s in both)

    def pair(f: Any) -> Any:
        own, theirs = divergences.log_mass(f.own, whole, None), divergences.log_mass(f.teacher, other, None)
        return divergences.of_all_columns(kind, f, whole, own, theirs)

    total = functools.reduce(divergences.merge_pairs, map(pair, found))
    stats = divergences.finish_pair(kind, whole, other, total, None)
    wide, theirs = (jax.tree.map(lambda a: a[:, None], s) for s in (stats, other))
    log_p, log_q = (divergences.log_probabilities(z, None, s) for z, s in ((x, wide), (t, theirs)))
    return stats.divergence, divergences.pair_dz(kind, log_p, log_q, divergences.dominating(log_p, wide), wide)


@pytest.mark.parametrize("kind", ["reverse_kl", "forward_kl"])
@pytest.mark.parametrize("lead", [0.0, 0.45, 10.0, 25.0])
@pytest.mark.parametrize("apart", [1.0, 1e-3, 0.0])
def test_shards_of_the_columns_put_together(apart: float, lead: float, kind: str) -> None:
    """A KL over all columns from one sweep of each shard, of which one has a single column: values and rows of dlogits
    beside those of one softmax, at shared and other peaks, near the bound of a dominated row; equal rows are zero."""
    rng = np.random.default_rng(6)
    x, noise = rng.standard_normal((2, 40, 50)).astype(np.float32)
    x[:, 7] = np.log(np.sum(np.exp(np.delete(x, 7, 1)), 1)) + lead
    t = (x + apart * noise).astype(np.float32)
    if apart == 1.0:
        t[20:, 31] = t[20:].max(1) + lead  # another peak than the student's, on another shard
    value, got = by_numpy(functools.partial(merged, kind, (7, 8, 30)), x, t)
    if apart == 0:
        assert not np.any(value) and not np.any(got)
        return
    rows = oracle.logits_rows(x), oracle.logits_rows(t)
    truth = oracle.divergence(*rows, divergence=kind).divergence  # type: ignore[arg-type]
    want = oracle.divergence_vjp(*rows, np.ones(len(x)), divergence=kind).inputs  # type: ignore[arg-type]
    # Near rows have what float32 keeps of log p - log q.
    whole, one = by_numpy(functools.partial(merged, kind, ()), x, t)
    np.testing.assert_allclose(value, truth, rtol=2e-5 if apart == 1.0 else 2e-3)
    factor = 2 if apart == 1.0 else 6  # a log-probability of a shard is rounded once more
    values = [np.abs(f64(s) / truth - 1).max() for s in (value, whole)]
    assert values[0] <= factor * values[1] + 2e-5
    assert row_errors(got, want).max() <= factor * row_errors(one, want).max() + 2e-5


@EVERY
def test_sums_in_one_reduction(kind: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where the sums of a row are one reduction of several operands; also where JAX differentiates it."""
    monkeypatch.setattr(divergences, "platform", lambda: "gpu")
    x, t = np.random.default_rng(20).standard_normal((2, 6, 50)).astype(np.float32)
    check_rows(kind, x, t, by_numpy(functools.partial(of_logits.__wrapped__, kind, backend), x, t))


@pytest.mark.parametrize("vocab", [1, 2, 3])
def test_small_vocabularies(vocab: int) -> None:
    """Values and dlogits of rows with one, two and three columns, and logits of 200."""
    x, t = (200 * np.random.default_rng(vocab).uniform(-1, 1, (2, 5, vocab))).astype(np.float32)
    for kind in KINDS:
        check_rows(kind, x, t, by_numpy(functools.partial(of_logits.__wrapped__, kind, None), x, t))


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_in_dead_rows_reaches_nothing(backend: str) -> None:
    """NaN in the teacher's and the student's dead rows; in a live row of the teacher the value and its row are NaN."""
    (h, w), (th, tw) = states(5, H), states(6, H2)
    mask = np.arange(N) % 3 != 0
    h[~mask], th[~mask] = np.nan, np.nan
    th[1] = np.nan

    def loss(h: Any, w: Any) -> Any:
        s = L.linear_divergence(h, w, th, tw, mask=mask, options=options(backend))
        return jnp.sum(s.divergence[2:]), s.divergence

    (dh, dw), values = by_numpy(jax.grad(loss, (0, 1), has_aux=True), h, w)
    assert not np.any(values[~mask]) and np.isnan(values[1])
    assert not np.any(dh[~mask]) and np.isfinite(dh[2:]).all()
    if backend == "chunked":  # autodiff multiplies the zero cotangent of the NaN row by NaN
        assert np.isfinite(dw).all()


def test_second_derivatives_of_the_reference() -> None:
    """The dense backend differentiates its own rule: a directional second derivative by finite differences."""
    with jax.enable_x64(True):
        x, t, v = np.random.default_rng(7).standard_normal((3, 1, 9)).astype(np.float32)
        for kind, extra in KINDS.items():
            f = functools.partial(L.divergence, divergence=kind, options=L.Options(backend="reference"), **extra)
            grad = jax.grad(lambda x: jnp.sum(f(x, t).divergence))  # noqa: B023
            exact = by_numpy(lambda x: jax.jvp(grad, (x,), (v,))[1], x)  # noqa: B023
            step = 1e-2
            above, below = (by_numpy(grad, x + d * v) for d in (step, -step))
            np.testing.assert_allclose(exact, (above - below) / (2 * step), atol=2e-4)


CASES = {
    "reverse": L.Distillation(),
    "jsd, hot": L.Distillation(divergence="jsd", mix=0.2, temperature=2.0),
    "forward with a hard part": L.Distillation(divergence="forward_kl", hard_weight=0.4, soft_weight=0.6),
    "Tunix": L.Distillation.from_tunix(temperature=2.0, alpha=0.75),
    "rows": L.Distillation(aggregation="grpo", count_rows="non_empty"),
}


@pytest.mark.parametrize("case", CASES)
def test_distillation_loss(case: str) -> None:
    """Loss and gradients against float64, with holes in the mask, NaN behind them and a head with a bias."""
    d, shape = CASES[case], (3, 5)
    (h, w), (th, tw) = states(8, H, n=15), states(9, H2, n=15)
    rng = np.random.default_rng(10)
    y, mask = rng.integers(0, V, shape), rng.random(shape) < 0.7
    h, th = h.reshape(*shape, H), th.reshape(*shape, H2)
    h[~mask], th[~mask] = np.nan, np.nan
    bias = rng.standard_normal(V).astype(np.float32)

    def loss(h: Any, w: Any, bias: Any) -> Any:
        return L.linear_distillation_loss(
            h, L.Head(w, bias=bias), th, tw, y, mask=mask, distillation=d, options=options("chunked")
        )

    (value, metrics), got = by_numpy(jax.value_and_grad(loss, (0, 1, 2), has_aux=True), h, w, bias)
    student, teacher = oracle.linear_rows(h, w, bias=bias), oracle.linear_rows(th, tw)
    truth, want = oracle.distillation_loss(student, teacher, objective=d, targets=y, mask=mask)
    np.testing.assert_allclose(value, truth, rtol=1e-5)
    for a, b in zip(got, want, strict=True):
        assert np.abs(f64(a) - f64(b)).max() <= 5e-6 * np.abs(f64(b)).max()
    mix = 0.5 if d.mix is None else float(d.mix)
    per_token = oracle.divergence(
        student, teacher, divergence=d.divergence, mix=mix, temperature=d.temperature, mask=mask
    )
    logged = L.metric_values(metrics)
    np.testing.assert_allclose(logged["divergence"], per_token.divergence.sum() / mask.sum(), rtol=1e-5)
    np.testing.assert_allclose(logged["teacher_entropy"], per_token.teacher_entropy.sum() / mask.sum(), rtol=1e-5)
    assert ("hard_loss" in logged) == (d.hard_weight is not None)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("kind", ["reverse_kl", "jsd"])
def test_full_kl_beside_a_policy(level: str, kind: str) -> None:
    """``Objective(kl="full")`` is the same loss without a KL, plus beta times the aggregated divergence."""
    shape = (2, 6)
    (h, w), (th, tw) = states(11, H, n=12), states(12, H2, n=12)
    h, th = h.reshape(*shape, H), th.reshape(*shape, H2)
    rng = np.random.default_rng(13)
    y, a, old = rng.integers(0, V, shape), rng.standard_normal(2), -5 + 0.1 * rng.standard_normal(shape)
    common = dict(advantages=a.astype(np.float32), old_logp=old.astype(np.float32), options=options("chunked"))
    bare = L.Objective(level=level, temperature=0.9)
    full = bare.replace(beta=0.3, kl="full", divergence=kind, mix=0.2 if kind == "jsd" else None)

    def both(h: Any, w: Any) -> Any:
        return L.linear_grpo_loss(h, w, y, ref_hidden=th, ref_lm_head=tw, objective=full, **common)

    def apart(h: Any, w: Any) -> Any:
        loss, _ = L.linear_grpo_loss(h, w, y, objective=bare, **common)
        d = L.linear_divergence(h, w, th, tw, divergence=kind, mix=full.mix, temperature=0.9).divergence
        return loss + 0.3 * jnp.mean(d), jnp.mean(d)

    (value, metrics), got = by_numpy(jax.value_and_grad(both, (0, 1), has_aux=True), h, w)
    (want, mean), grads = by_numpy(jax.value_and_grad(apart, (0, 1), has_aux=True), h, w)
    np.testing.assert_allclose(value, want, rtol=1e-5)
    np.testing.assert_allclose(L.metric_values(metrics)["kl_loss"], mean, rtol=1e-5)
    for x, y_ in zip(got, grads, strict=True):
        assert np.abs(f64(x) - f64(y_)).max() <= 2e-6 * np.abs(f64(y_)).max()


def test_policy_loss_reads_the_divergence_of_given_statistics() -> None:
    """``policy_loss`` over statistics of ``divergence``; without one it is refused by name."""
    rng = np.random.default_rng(14)
    x, t = rng.standard_normal((2, 1, 4, 9)).astype(np.float32)
    y = rng.integers(0, 9, (1, 4))
    o = L.Objective(kl="full", beta=2.0)
    stats = by_numpy(lambda: L.divergence(x, t, targets=y))
    given = dict(advantages=np.zeros(1, np.float32), objective=o)
    loss, _ = by_numpy(lambda: L.policy_loss(stats, **given))
    np.testing.assert_allclose(loss, 2.0 * np.mean(stats.divergence), rtol=1e-6)
    with pytest.raises(ValueError, match="kl='full' is a divergence over the whole vocabulary"):
        jax.eval_shape(lambda x: L.policy_loss(L.logprobs(x, y), **given), x)


def refused(**changes: Any) -> Any:
    (h, w), (th, tw) = states(0, H), states(1, H2)
    call = dict(hidden=h, lm_head=w, teacher_hidden=th, teacher_lm_head=tw) | changes
    return lambda: L.linear_divergence(**call)


@pytest.mark.parametrize(
    "call, message",
    [
        (refused(divergence="kl"), "divergence='kl' is not known; expected one of 'forward_kl', 'reverse_kl', 'jsd'"),
        (refused(divergence="jsd", mix=0.0), "mix=0.0 lies within 0.001 of 0"),
        (refused(mix=0.4), "mix=0.4 belongs to divergence='jsd'"),
        (refused(teacher_lm_head=np.zeros((100, H2), np.float32)), "the teacher has 100 token ids and the policy 211"),
        (refused(teacher_hidden=np.zeros((3, H2), np.float32)), r"hidden has shape \(3, \d+\), expected \(\d+, H\)"),
        (refused(options=L.Options(backend="pallas_tpu", interpret=True)), "no kernel for a second distribution"),
        (lambda: L.Objective(divergence="jsd"), "divergence belongs to kl='full'"),
        (lambda: L.Objective(kl="full", beta=1.0, kl_bias_correction=True), "kl_bias_correction acts on an estimate"),
        (
            lambda: L.linear_grpo_loss(
                np.zeros((1, 2, H), np.float32), np.zeros((V, H), np.float32), np.zeros((1, 2), np.int32),
                advantages=np.ones(1, np.float32), objective=L.Objective(kl="full", beta=1.0),
            ),
            "ref_hidden and ref_lm_head",
        ),
        (
            lambda: L.linear_distillation_loss(
                np.zeros((1, 2, H), np.float32), np.zeros((V, H), np.float32), np.zeros((1, 2, H), np.float32),
                np.zeros((V, H), np.float32), distillation=L.Distillation(hard_weight=1.0),
            ),
            "hard_weight=1.0 needs targets",
        ),
    ],
)  # fmt: skip
def test_refused_by_name(call: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=message):
        call()


def test_explain_counts_both_heads() -> None:
    """Four matmuls where gradients come out of the forward pass, six where cotangents arrive later."""
    h, w = jax.ShapeDtypeStruct((1, 64, H), jnp.float32), jax.ShapeDtypeStruct((V, H), jnp.float32)
    assert L.explain(L.linear_distillation_loss, h, w, h, w).described.counts == (4, 3, 2)
    assert L.explain(L.linear_divergence, h, w, h, w).described.counts == (6, 5, 2)
    o = L.Objective(kl="full", beta=0.1)
    assert L.explain(L.linear_grpo_loss, h, w, ref_hidden=h, ref_lm_head=w, objective=o).described.counts == (4, 3, 2)


def test_no_logits_of_either_side_in_memory() -> None:
    """The compiled program's temporaries hold chunks of logits, not all of them."""
    tokens, width, vocab = 4096, 64, 8192
    h, w = jax.ShapeDtypeStruct((1, tokens, width), jnp.float32), jax.ShapeDtypeStruct((vocab, width), jnp.float32)

    def loss(h: Any, w: Any, th: Any, tw: Any) -> Any:
        return L.linear_distillation_loss(h, w, th, tw, options=L.Options(chunk_size=128))[0]

    compiled = jax.jit(jax.grad(loss, (0, 1))).lower(h, w, h, w).compile()
    analysis = compiled.memory_analysis()
    assert analysis is not None
    assert analysis.temp_size_in_bytes < tokens * vocab * 4 / 4
