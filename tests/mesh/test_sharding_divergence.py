"""Calls with a teacher on every layout of eight devices against one device: losses, metrics, all cotangents.

The teacher has a layout, a width, a bias and padded columns of its own, and lies elsewhere than the student's head.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import logitless as L
from interpreted import by_numpy
from matmuls import matmul_flops
from test_sharding import COLUMNS, DH, HIDDEN, LAYOUTS, SHAPE, VOCAB, Layout, assert_same, batch, collectives, run

WIDTH = 48
"""Of the teacher's hidden states."""
OPTIONS = L.Options(backend="chunked", chunk_size=3)
KINDS: dict[str, dict[str, Any]] = {
    "reverse_kl": {"divergence": "reverse_kl"},
    "forward_kl": {"divergence": "forward_kl"},
    "jsd": {"divergence": "jsd", "mix": 0.3},
}


@functools.cache
def arrays(peak: float = 0.0) -> dict[str, Any]:
    """A ragged batch with a teacher: NaN in the dead rows of both, huge numbers in the padded columns of both. ``peak``
    makes columns of the student and the teacher lead in every other sequence, by about so many nats."""
    data, rng = batch(columns=COLUMNS), np.random.default_rng(1)
    h, w, mask = data["hidden"], data["lm_head"], data["mask"]
    th = rng.normal(size=(*SHAPE, WIDTH)).astype(np.float32)
    tw = (rng.normal(size=(WIDTH, VOCAB)) / math.sqrt(WIDTH)).astype(np.float32)
    if peak:
        h[::2] += peak * w[7] / np.sum(w[7] ** 2)
        th[::2] += peak * tw[:, 7] / np.sum(tw[:, 7] ** 2)
    h[~mask], th[~mask] = np.nan, np.nan
    w[COLUMNS:], tw[:, COLUMNS:] = 1e3, 1e3
    rest = {"targets": data["targets"], "mask": mask, "segment_ids": data["segment_ids"]}
    bias = rng.normal(size=(2, VOCAB)).astype(np.float32)
    return dict(hidden=h, lm_head=w, teacher_hidden=th, teacher_lm_head=tw, bias=bias[0], teacher_bias=bias[1], **rest)


def heads(a: dict[str, Any]) -> tuple[L.Head, L.Head]:
    student = L.Head(a["lm_head"], bias=a["bias"], vocab_size=COLUMNS, softcap=12.0)
    return student, L.Head(a["teacher_lm_head"], bias=a["teacher_bias"], vocab_size=COLUMNS, layout="hv", scale=0.8)


def placed(a: dict[str, Any], where: Layout) -> dict[str, Any]:
    """The arrays on a mesh: tokens and the student's head as the layout says, the teacher's head whole on every
    device."""
    mesh = where.mesh()
    spec = {"lm_head": where.head, "bias": P(), "teacher_lm_head": P(), "teacher_bias": P()}
    return {k: jax.device_put(x, NamedSharding(mesh, spec.get(k, where.tokens))) for k, x in a.items()}


LOSSES = {
    "reverse KL": L.Distillation(),
    "JSD and a hard part, by sequences": L.Distillation(
        divergence="jsd", mix=0.3, hard_weight=0.4, aggregation="grpo", count_rows="non_empty"
    ),
    "forward KL, hot": L.Distillation(divergence="forward_kl", temperature=2.0, hard_weight=0.5),
}


def loss(a: dict[str, Any], d: L.Distillation, sharding: L.Sharding | None = None) -> Any:
    student, teacher = heads(a)
    rest = {k: a[k] for k in ("targets", "mask", "segment_ids")}
    return L.linear_distillation_loss(
        a["hidden"], student, a["teacher_hidden"], teacher, distillation=d, sharding=sharding, options=OPTIONS, **rest
    )


def by_student(f: Any) -> Any:
    """``f(arrays)`` and its gradients with respect to the student's arrays, as a function of those and the others."""

    def value(own: dict[str, Any], others: dict[str, Any]) -> Any:
        return f({**own, **others})

    return jax.value_and_grad(value, has_aux=True)


def split(a: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    own = ("hidden", "lm_head", "bias")
    return {k: a[k] for k in own}, {k: x for k, x in a.items() if k not in own}


@functools.cache
def loss_on_one_device(name: str) -> Any:
    return by_numpy(by_student(lambda a: loss(a, LOSSES[name])), *split(arrays()))


@pytest.mark.parametrize(
    "name, layout",
    [
        *(("reverse KL", layout) for layout in LAYOUTS if layout != "data x tensor"),
        ("JSD and a hard part, by sequences", "data x tensor"),
        ("forward KL, hot", "fsdp on the vocabulary"),
    ],
)
def test_distillation_loss(name: str, layout: str) -> None:
    """Packed rows with their segments, padding, NaN behind the mask, a device without any live token."""
    where = LAYOUTS[layout]
    f = by_student(lambda a: loss(a, LOSSES[name], where.sharding()))
    got, program = run(f, *split(placed(arrays(), where)))
    assert_same(got, loss_on_one_device(name))
    if name == "reverse KL" and layout == "vocabulary-parallel":
        found = collectives(program)
        assert max(size for _, size in found) == DH  # no head, no logits


def statistics(a: dict[str, Any], kind: str, sharding: L.Sharding | None = None) -> Any:
    """A sum of all differentiable statistics with fixed random weights, and the statistics that are public."""
    student, teacher = heads(a)
    rng = np.random.default_rng(2)
    g, t = rng.normal(size=(4, *SHAPE)).astype(np.float32), rng.uniform(0.5, 2.0, SHAPE).astype(np.float32)
    s = L.linear_divergence(
        a["hidden"], student, a["teacher_hidden"], teacher, targets=a["targets"], mask=a["mask"], temperature=t,
        sharding=sharding, options=OPTIONS, **KINDS[kind],
    )  # fmt: skip
    named = {k: getattr(s, k) for k in ("divergence", "entropy", "logp", "lse", "teacher_entropy")}
    return sum(jnp.sum(w * x) for w, x in zip(g, list(named.values())[:4], strict=True)), named


ALL_CUTS = "data x sequence x tensor, fsdp over data"


@pytest.mark.parametrize(
    "layout, peak, kind",
    [
        *(("vocabulary-parallel", 22.0, kind) for kind in KINDS),
        (ALL_CUTS, 0.0, "jsd"),
        # A KL over that layout is the loss's above.
        *(pytest.param(ALL_CUTS, 0.0, kind, marks=pytest.mark.slow) for kind in ("reverse_kl", "forward_kl")),
    ],
)
def test_statistics_and_every_cotangent(layout: str, peak: float, kind: str) -> None:
    """The sums of both heads over all shards, also where one shard's column dominates rows of both sides."""
    where = LAYOUTS[layout]
    a = arrays(peak)
    f = by_student(lambda a: statistics(a, kind, where.sharding()))
    got, _ = run(f, *split(placed(a, where)))
    assert_same(got, by_numpy(by_student(lambda a: statistics(a, kind)), *split(a)))


@pytest.mark.parametrize("kind", KINDS)
def test_from_logits(kind: str) -> None:
    """``divergence`` over a vocabulary that is cut, with more columns on the teacher's side than count."""
    rng = np.random.default_rng(3)
    x, t = (3 * rng.normal(size=(2, *SHAPE, VOCAB))).astype(np.float32)
    x[0, :, 5], t[0, :, 5] = 25.0, 24.0
    g = rng.normal(size=SHAPE).astype(np.float32)
    where = LAYOUTS["data x tensor"]

    def f(x: Any, sharding: L.Sharding | None = None) -> Any:
        s = L.divergence(x, t, vocab_size=COLUMNS, sharding=sharding, **KINDS[kind])
        return jnp.sum(g * s.divergence), s.divergence

    sharding = L.Sharding(where.mesh(), tokens=where.tokens, vocab="tensor")
    got, _ = run(jax.value_and_grad(functools.partial(f, sharding=sharding), has_aux=True), x)
    assert_same(got, by_numpy(jax.value_and_grad(f, has_aux=True), x))


@pytest.mark.parametrize("level, layout", [("token", "fsdp on the vocabulary"), ("sequence", "data x tensor")])
def test_full_kl_to_a_reference(level: str, layout: str) -> None:
    """``linear_grpo_loss`` with ``kl="full"``: policy term and divergence of one sweep, coupled or not."""
    where, a, rng = LAYOUTS[layout], arrays(), np.random.default_rng(4)
    o = L.Objective(level=level, beta=0.3, kl="full", aggregation="grpo")
    a = a | {k: rng.normal(size=SHAPE).astype(np.float32) for k in ("advantages", "old_logp")}

    def f(a: dict[str, Any], sharding: L.Sharding | None = None) -> Any:
        (student, teacher), rest = heads(a), {k: a[k] for k in ("targets", "mask", "segment_ids", "advantages")}
        return L.linear_grpo_loss(
            a["hidden"], student, ref_hidden=a["teacher_hidden"], ref_lm_head=teacher, old_logp=a["old_logp"] - 4,
            objective=o, sharding=sharding, options=OPTIONS, **rest,
        )  # fmt: skip

    got, _ = run(by_student(lambda a: f(a, where.sharding())), *split(placed(a, where)))
    assert_same(got, by_numpy(by_student(f), *split(a)))


@pytest.mark.parametrize("layout", ["one device", "data and sequence, head replicated", "vocabulary-parallel"])
def test_dead_tokens_cost_nothing(layout: str) -> None:
    """Matmuls that are run: four for each live token, one of them of the teacher's width. Over a cut vocabulary six,
    two of them the teacher's, and eight for JSD, as ``explain`` says."""
    a = arrays()
    tokens = np.arange(math.prod(SHAPE)).reshape(SHAPE)

    def flops(live: int, kind: dict[str, Any] = KINDS["reverse_kl"]) -> float:
        own = dict(a, mask=tokens < live)
        own = {k: np.nan_to_num(x) if x.dtype == np.float32 else x for k, x in own.items()}
        where = None if layout == "one device" else LAYOUTS[layout].sharding()
        return matmul_flops(
            lambda own, others: by_student(lambda a: loss(a, L.Distillation(**kind), where))(own, others)[1],
            *split(own),
        )

    if layout == "one device":
        per_token = 2 * VOCAB * (3 * HIDDEN + WIDTH)
        assert flops(0) == 0 and flops(6) == 6 * per_token and flops(12) == 12 * per_token
    elif layout == "vocabulary-parallel":
        per_token = 2 * VOCAB // 8 * (4 * HIDDEN + 2 * WIDTH)
        assert flops(0) == 0 and flops(6) == 6 * per_token
        assert flops(6, KINDS["jsd"]) == 6 * 2 * VOCAB // 8 * (5 * HIDDEN + 3 * WIDTH)
        (student, teacher), where = heads(a), LAYOUTS[layout].sharding()
        given = a["hidden"], student, a["teacher_hidden"], teacher
        route = L.explain(L.linear_distillation_loss, *given, options=OPTIONS, sharding=where)
        assert route.described.counts == (6, 5, 2)
        settings = L.Distillation(**KINDS["jsd"])
        route = L.explain(L.linear_distillation_loss, *given, options=OPTIONS, sharding=where, distillation=settings)
        assert route.described.counts == (8, 7, 4)
    else:
        assert flops(0) == 0 and flops(math.prod(SHAPE)) > 0


def test_refused_by_name() -> None:
    """A vocabulary-parallel teacher with other columns than the student's, and a width that does not divide."""
    a, where = arrays(), LAYOUTS["vocabulary-parallel"]
    student, _ = heads(a)
    wide = L.Head(np.zeros((WIDTH, 2 * VOCAB), np.float32), layout="hv")
    with pytest.raises(ValueError, match="teacher's head has 128 columns where lm_head has 64"):
        L.linear_divergence(a["hidden"], student, a["teacher_hidden"], wide, sharding=where.sharding())
    where = LAYOUTS["data x fsdp, on the hidden dimension"]
    odd, narrow = a["teacher_hidden"][..., :45], L.Head(a["teacher_lm_head"][:45], vocab_size=COLUMNS, layout="hv")
    with pytest.raises(ValueError, match="the teacher's hidden dimension of size 45 is sharded over"):
        L.linear_divergence(a["hidden"], student, odd, narrow, sharding=where.sharding())
