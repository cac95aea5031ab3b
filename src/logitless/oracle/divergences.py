"""Divergences of a student from a teacher over the vocabulary, and over a few ids of it, in float64.

With ``p`` the student's probabilities and ``q`` the teacher's, both softmaxes of their transformed logits over the ids
that both models have, ``m = (1 - mix) p + mix q`` and ``dz`` the gradient by the student's transformed logits:

    forward_kl    sum q log(q / p)                                                dz = p - q
    reverse_kl    sum p log(p / q)          d = log p - log q                     dz = p (d - sum p d)
    jsd           mix sum q log(q / m) + (1 - mix) sum p log(p / m)               dz = (1 - mix) p (e - sum p e)
                                            e = log p - log m
    cross entropy -sum q log p                                                    dz = p - q

Values are sums of ``a log(a / b) - a + b``, which adds nothing to a sum over two distributions: no term is negative, so
nothing cancels, and equal rows have a divergence of exactly 0. The mean in ``d - sum p d`` is taken relative to the
student's largest column, because a peaked row has ``d - sum p d`` near 0 there.

Over given ids ``S`` the same divergences compare one number for each id: with ``outside="tail"`` the probabilities of
``S`` and, as one more category, the mass outside ``S``; with ``"renormalised"`` the softmaxes over ``S`` alone. With
``dc`` the gradient by the categories' log-probabilities as logits:

    dz = dc on S;  dc_tail p / (1 - sum_S p) outside S, or 0 if renormalised
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from logitless.oracle.rows import Gradients, Rows
from logitless.oracle.selected_tokens import distinct_ids, highest, log_mass_outside, log_sum
from logitless.oracle.token_stats import Bools, Floats, Ints, per_token, softmax_of_rows, to_float64, token_stats_vjp

DivergenceName = Literal["forward_kl", "reverse_kl", "jsd"]
Outside = Literal["tail", "renormalised"]


@dataclasses.dataclass(frozen=True)
class Divergence:
    """Per token, in the shape of the tokens; exactly 0 where masked."""

    divergence: Floats
    cross_entropy: Floats  # -sum q log p
    entropy: Floats  # of the student
    teacher_entropy: Floats
    logp: Floats  # the student's log-probability of the target; 0 without targets


@dataclasses.dataclass(frozen=True)
class SparseDivergence:
    """Per token, of a divergence over given ids; exactly 0 where masked."""

    divergence: Floats
    student_mass: Floats  # probability that the student gives to the ids
    teacher_mass: Floats
    overlap: Floats  # share of the ids that are among as many of the student's own likeliest


# -- one row ---------------------------------------------------------------------------------------------------------


def _expm1_minus(x: Floats) -> Floats:
    """``e^x - 1 - x`` for ``|x| <= 0.5``, by its series: every term but the first is small."""
    total = np.zeros_like(x)
    for n in range(16, 2, -1):
        total = x / n * (1.0 + total)
    return 0.5 * x * x * (1.0 + total)


def _terms(a: Floats, b: Floats, x: Floats) -> Floats:
    """``a log(a / b) - a + b >= 0`` with ``x = log(b / a)``; 0 where both are 0."""
    near = np.abs(x) <= 0.5
    return np.where(a == 0, b, np.where(near, a * _expm1_minus(np.where(near, x, 0.0)), b - a - a * x))


def _log_ratio_of_mixture(d: Floats, mix: float) -> tuple[Floats, Floats]:
    """``log(m / p)`` and ``log(m / q)`` from ``d = log(p / q)``, from the side whose exponential is at most 1."""
    above, below = np.maximum(d, 0.0), np.minimum(d, 0.0)
    from_p = np.log1p(mix * np.expm1(-above))  # log(m / p) where p >= q
    from_q = np.log1p((1.0 - mix) * np.expm1(below))  # log(m / q) where p <= q
    return np.where(d >= 0, from_p, from_q - below), np.where(d >= 0, from_p + above, from_q)


def _centred(p: Floats, d: Floats, top: NDArray[np.int64]) -> Floats:
    """``p (d - sum p d)``, both relative to the entry of the largest ``p``."""
    c = d - np.take_along_axis(d, top[:, None], axis=1)
    mean = np.where(p == 0, 0.0, p * c).sum(axis=1, keepdims=True)
    return np.where(p == 0, 0.0, p * (c - mean))


def row_divergence(log_p: Floats, log_q: Floats, name: DivergenceName, mix: float = 0.5) -> tuple[Floats, Floats]:
    """``(value [N], dz [N, C])`` of two distributions over ``C`` categories, given as log-probabilities.

    ``dz`` is the gradient by logits whose softmax is ``p``. A KL is infinite where its first distribution has mass and
    its second has none.
    """
    if name not in ("forward_kl", "reverse_kl", "jsd"):
        raise ValueError(f"divergence={name!r} is not known; expected 'forward_kl', 'reverse_kl' or 'jsd'.")
    with np.errstate(all="ignore"):
        p, q, d = np.exp(log_p), np.exp(log_q), log_p - log_q
        top = np.argmax(np.where(np.isnan(log_p), -np.inf, log_p), axis=1)
        if name == "forward_kl":
            near = np.abs(d) <= 0.5
            return _terms(q, p, d).sum(axis=1), np.where(near, q * np.expm1(np.where(near, d, 0.0)), p - q)
        if name == "reverse_kl":
            return _terms(p, q, -d).sum(axis=1), _centred(p, d, top)
        over_p, over_q = _log_ratio_of_mixture(d, mix)
        m = (1.0 - mix) * p + mix * q
        value = (mix * _terms(q, m, over_q) + (1.0 - mix) * _terms(p, m, over_p)).sum(axis=1)
        return value, (1.0 - mix) * _centred(p, -over_p, top)


# -- the whole vocabulary --------------------------------------------------------------------------------------------


def _pair(student: Rows, teacher: Rows) -> tuple[Rows, Rows]:
    """Both models' rows over the ids that both have."""
    if student.shape != teacher.shape:
        raise ValueError(f"the student has tokens {list(student.shape)}, and the teacher {list(teacher.shape)}.")
    columns = min(student.columns, teacher.columns)
    return student.first(columns), teacher.first(columns)


def _targets(targets: ArrayLike | None, student: Rows) -> tuple[Ints, Bools]:
    """Targets ``[N]`` within the columns, and which of them were; without targets all are."""
    if targets is None:
        n = int(np.prod(student.shape))
        return np.zeros(n, np.int64), np.ones(n, bool)
    y = np.asarray(targets).astype(np.int64).reshape(-1)
    known = (y >= 0) & (y < student.columns)
    return np.where(known, y, 0), known


def divergence(
    student: Rows,
    teacher: Rows,
    *,
    divergence: DivergenceName = "reverse_kl",
    mix: float = 0.5,
    temperature: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    targets: ArrayLike | None = None,
) -> Divergence:
    """Divergence, entropies, cross entropy and the target's log-probability of each token.

    ``temperature`` divides both models' logits, a number or one for each token. A live token whose target is no id of
    both models has NaN in every field.
    """
    s, t = _pair(student, teacher)
    tau, (y, known) = s.temperatures(temperature), _targets(targets, s)
    found = {f.name: np.zeros(len(y)) for f in dataclasses.fields(Divergence)}
    for i in s.blocks(s.live(mask)):
        with np.errstate(all="ignore"):
            p, q = softmax_of_rows(s.transformed(i, tau[i])), softmax_of_rows(t.transformed(i, tau[i]))
            weight = np.exp(q.log_p)
            values = {
                "divergence": row_divergence(p.log_p, q.log_p, divergence, mix)[0],
                "cross_entropy": np.where(weight == 0, 0.0, -weight * p.log_p).sum(axis=1),
                "entropy": p.entropy,
                "teacher_entropy": q.entropy,
                "logp": p.log_p[np.arange(len(i)), y[i]] if targets is not None else np.zeros(len(i)),
            }
        for name, value in values.items():
            found[name][i] = np.where(known[i], value, np.nan)
    return Divergence(**{name: value.reshape(student.shape) for name, value in found.items()})


def divergence_vjp(
    student: Rows,
    teacher: Rows,
    g_divergence: ArrayLike | None,
    g_cross_entropy: ArrayLike | None = None,
    g_entropy: ArrayLike | None = None,
    g_logp: ArrayLike | None = None,
    *,
    divergence: DivergenceName = "reverse_kl",
    mix: float = 0.5,
    temperature: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    targets: ArrayLike | None = None,
) -> Gradients:
    """Gradients of what the student's rows are made of, for the cotangents of :class:`Divergence` (``None`` is zero).

    The teacher is a constant. A masked token, and one whose cotangents are all zero, has a gradient of exactly zero.
    """
    s, t = _pair(student, teacher)
    tau, (y, known) = s.temperatures(temperature), _targets(targets, s)
    gd, gc, gh, gl = (per_token(g, s.shape, 0.0) for g in (g_divergence, g_cross_entropy, g_entropy, g_logp))

    def dz(i: Ints) -> Floats:
        z = s.transformed(i, tau[i])
        p, q = softmax_of_rows(z), softmax_of_rows(t.transformed(i, tau[i]))
        total = np.zeros(z.shape)
        for g, name in ((gd[i], divergence), (gc[i], "forward_kl")):  # the cross entropy's dz is the forward KL's
            asked = g != 0
            total[asked] += g[asked, None] * row_divergence(p.log_p[asked], q.log_p[asked], name, mix)[1]
        total += token_stats_vjp(z, y[i], gl[i], gh[i])
        total[~known[i]] = np.nan
        return total

    asked = (gd != 0) | (gc != 0) | (gh != 0) | (gl != 0)
    return s.pull_back(temperature, s.live(mask) & asked, dz)


# -- given ids -------------------------------------------------------------------------------------------------------


def _gathered(log_p: Floats, ids: Ints) -> Floats:
    """Log-probabilities ``[n, K]`` at ids ``[n, K]``; ``-inf`` where the id is -1."""
    return np.where(ids < 0, -np.inf, np.take_along_axis(log_p, np.maximum(ids, 0), axis=1))


def _categories(log_p: Floats, log_rest: Floats, outside: Outside) -> Floats:
    """Log-probabilities of the categories that are compared: the ids and the rest, or the ids renormalised."""
    if outside == "tail":
        return np.concatenate([log_p, log_rest[:, None]], axis=1)
    total = log_sum(log_p)[:, None]
    return np.where(total == -np.inf, -np.inf, log_p - np.where(total == -np.inf, 0.0, total))


def _given(
    student: Rows, ids: ArrayLike, teacher_logp: ArrayLike, log_rest: ArrayLike | None, outside: Outside
) -> tuple[Ints, Floats, Floats]:
    """Ids ``[N, K]``, the teacher's log-probabilities at the ids, and the log of the remaining mass ``[N]``."""
    if outside not in ("tail", "renormalised"):
        raise ValueError(f"outside={outside!r} is not known; expected 'tail' or 'renormalised'.")
    chosen = distinct_ids(ids, student)
    logp = to_float64(teacher_logp).reshape(-1, np.shape(teacher_logp)[-1])
    if logp.shape != chosen.shape:
        raise ValueError(f"teacher_logp {list(np.shape(teacher_logp))} is not of the ids' shape {list(np.shape(ids))}.")
    log_q = np.where(chosen < 0, -np.inf, logp)
    if log_rest is not None:
        return chosen, log_q, to_float64(log_rest).reshape(-1)
    with np.errstate(divide="ignore"):
        return chosen, log_q, np.log(np.maximum(-np.expm1(log_sum(log_q)), 0.0))


def sparse_divergence(
    student: Rows,
    ids: ArrayLike,
    teacher_logp: ArrayLike,
    *,
    divergence: DivergenceName = "forward_kl",
    mix: float = 0.5,
    outside: Outside = "tail",
    teacher_log_rest: ArrayLike | None = None,
    temperature: ArrayLike | None = None,
    mask: ArrayLike | None = None,
) -> SparseDivergence:
    """The divergence from a teacher that is known at ``ids [..., K]`` alone, by its log-probabilities there.

    An id of -1 is none, and its log-probability is not read; a token without ids has a divergence of 0. A live token
    with an id that the student does not have has NaN. ``temperature`` divides the student's logits; the teacher's
    log-probabilities are taken as they are. The masses are those of the whole vocabulary, whatever ``outside`` says.

    The teacher's mass outside the ids is one minus their sum, clamped at 0 against rounding; a reverse KL is infinite
    at 0. ``teacher_log_rest [...]`` is the logarithm of that mass, if known (:func:`logitless.oracle.top_k`).
    """
    chosen, log_q, log_rest = _given(student, ids, teacher_logp, teacher_log_rest, outside)
    tau = student.temperatures(temperature)
    found = {f.name: np.zeros(len(chosen)) for f in dataclasses.fields(SparseDivergence)}
    for i in student.blocks(student.live(mask)):
        known = (chosen[i] < student.columns).all(axis=1)
        here = np.where(known[:, None], chosen[i], -1)
        with np.errstate(all="ignore"):
            z = student.transformed(i, tau[i])
            log_p = softmax_of_rows(z).log_p
            at = _gathered(log_p, here)
            p = _categories(at, log_mass_outside(log_p, here)[1], outside)
            q = _categories(log_q[i], log_rest[i], outside)
            value = row_divergence(p, q, divergence, mix)[0]
        empty = (chosen[i] < 0).all(axis=1)
        count = (here >= 0).sum(axis=1)
        likeliest = highest(z, int(np.max(count, initial=0)))
        own = [len(np.intersect1d(a[a >= 0], b[:n])) for a, b, n in zip(here, likeliest, count, strict=True)]
        values: dict[str, object] = {
            "divergence": np.where(empty, 0.0, value),
            "student_mass": np.exp(log_sum(at)),
            "teacher_mass": np.exp(log_sum(log_q[i])),
            "overlap": np.array(own) / np.maximum(count, 1),
        }
        for name, numbers in values.items():
            found[name][i] = np.where(known, numbers, np.nan)
    return SparseDivergence(**{name: value.reshape(student.shape) for name, value in found.items()})


def sparse_divergence_vjp(
    student: Rows,
    ids: ArrayLike,
    teacher_logp: ArrayLike,
    g_divergence: ArrayLike,
    *,
    divergence: DivergenceName = "forward_kl",
    mix: float = 0.5,
    outside: Outside = "tail",
    teacher_log_rest: ArrayLike | None = None,
    temperature: ArrayLike | None = None,
    mask: ArrayLike | None = None,
) -> Gradients:
    """Gradients for the inputs of the student's rows, given the cotangent of ``divergence [...]``."""
    chosen, log_q, log_rest = _given(student, ids, teacher_logp, teacher_log_rest, outside)
    tau, g = student.temperatures(temperature), per_token(g_divergence, student.shape, 0.0)

    def dz(i: Ints) -> Floats:
        known = (chosen[i] < student.columns).all(axis=1)
        here = np.where(known[:, None], chosen[i], -1)
        log_p = softmax_of_rows(student.transformed(i, tau[i])).log_p
        rest, log_tail = log_mass_outside(log_p, here)
        p = _categories(_gathered(log_p, here), log_tail, outside)
        q = _categories(log_q[i], log_rest[i], outside)
        dc = row_divergence(p, q, divergence, mix)[1]
        out = np.zeros(log_p.shape)
        if outside == "tail":
            out = np.where(rest, dc[:, -1:] * np.exp(log_p - log_tail[:, None]), 0.0)
        row, k = np.nonzero(here >= 0)
        out[row, here[row, k]] = dc[row, k]
        out[(chosen[i] < 0).all(axis=1)] = 0.0
        out[~known] = np.nan
        return g[i, None] * out

    return student.pull_back(temperature, student.live(mask) & (g != 0), dz)
