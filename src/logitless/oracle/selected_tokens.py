"""More than one id for each token: log-probabilities at given ids, a softmax over given ids, the likeliest ids.

With ``p`` the softmax of a row over the whole vocabulary, ``S`` the ids given for it and ``g`` the cotangents:

    logp_k = log p at id k     lse     mass = sum_S p
    dz_v   = sum_k g_k (1[v = id_k] - p_v) + g_lse p_v + g_mass p_v (1[v in S] - mass)
             + g_log_rest p_v (1[v not in S] / rest - 1)        log_rest = log rest,  rest = 1 - mass

A softmax restricted to ``S`` is the softmax of a row that is ``-inf`` outside ``S``: its statistics and their gradients
are those of that row, and columns outside ``S`` have no gradient.

The ids of a token are distinct; -1 is none. A live token with an id that is not there has NaN.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from logitless.oracle.rows import Gradients, Rows
from logitless.oracle.token_stats import (
    Bools,
    Floats,
    Ints,
    TokenStats,
    no_stats,
    per_token,
    softmax_of_rows,
    to_float64,
    token_stats,
    token_stats_vjp,
)


@dataclasses.dataclass(frozen=True)
class SelectedLogprobs:
    """Log-probabilities at given ids; exactly 0 where masked, and where the id is -1."""

    logp: Floats  # [..., K]
    lse: Floats  # [...]
    mass: Floats  # [...]
    log_rest: Floats  # [...], log of the mass of all other ids


class TopK(NamedTuple):
    """The likeliest ids in order; exactly 0 where masked."""

    ids: Ints  # [..., k]
    logp: Floats  # [..., k]
    lse: Floats  # [...]
    log_rest: Floats  # [...], log of the mass of all other ids: 1 - sum p would lose it to rounding


def distinct_ids(ids: ArrayLike, rows: Rows) -> Ints:
    """Ids ``[N, K]`` from ``[..., K]``; an id that a token has twice, and one below -1, is an error."""
    given = np.asarray(ids).astype(np.int64)
    if given.shape[:-1] != rows.shape:
        raise ValueError(f"ids {list(given.shape)} are not [..., K] with tokens {list(rows.shape)}.")
    if (given < -1).any():
        raise ValueError(f"ids has {np.min(given)}; expected ids of the vocabulary, and -1 for none.")
    flat = given.reshape(-1, given.shape[-1])
    ordered = np.sort(flat, axis=1)
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if twice.any():
        token, k = np.argwhere(twice)[0]
        raise ValueError(f"ids has {ordered[token, k]} twice for token {token}; the ids of a token are distinct.")
    return flat


def log_sum(log_a: Floats) -> Floats:
    """``log sum exp`` of each row; ``-inf`` for a row of ``-inf``."""
    top = np.max(log_a, axis=1, initial=-np.inf)
    shift = np.where(top == -np.inf, 0.0, top)
    with np.errstate(divide="ignore"):
        return np.asarray(shift + np.log(np.exp(log_a - shift[:, None]).sum(axis=1)))


def log_mass_outside(log_p: Floats, ids: Ints) -> tuple[Bools, Floats]:
    """Which columns lie outside the ids of their row, and the log of their mass."""
    outside = np.ones(log_p.shape, bool)
    row, k = np.nonzero(ids >= 0)
    outside[row, ids[row, k]] = False
    return outside, log_sum(np.where(outside, log_p, -np.inf))


def highest(z: Floats, k: int) -> Ints:
    """The ``k`` largest columns of each row in order, equal ones by the smaller id."""
    return np.argsort(-z, axis=1, kind="stable")[:, :k]


def _within(ids: Ints, columns: int) -> tuple[Ints, Bools]:
    """Ids with those of unknown rows replaced by -1, and which rows are known."""
    known = (ids < columns).all(axis=1)
    return np.where(known[:, None], ids, -1), known


def selected_logprobs(
    rows: Rows, ids: ArrayLike, *, temperature: ArrayLike | None = None, mask: ArrayLike | None = None
) -> SelectedLogprobs:
    """Log-probabilities of ``ids [..., K]``, the row's ``lse``, and the mass of the ids."""
    chosen, tau = distinct_ids(ids, rows), rows.temperatures(temperature)
    logp, lse, mass, rest = np.zeros(chosen.shape), *(np.zeros(len(chosen)) for _ in range(3))
    for i in rows.blocks(rows.live(mask)):
        here, known = _within(chosen[i], rows.columns)
        with np.errstate(all="ignore"):
            soft = softmax_of_rows(rows.transformed(i, tau[i]))
            at = np.take_along_axis(soft.log_p, np.maximum(here, 0), axis=1)
        total = np.where(here < 0, 0.0, np.exp(at)).sum(axis=1)
        logp[i] = np.where(known[:, None], np.where(here < 0, 0.0, at), np.nan)
        lse[i], mass[i] = np.where(known, soft.lse, np.nan), np.where(known, total, np.nan)
        rest[i] = np.where(known, log_mass_outside(soft.log_p, here)[1], np.nan)
    return SelectedLogprobs(logp.reshape(np.shape(ids)), *(x.reshape(rows.shape) for x in (lse, mass, rest)))


def selected_logprobs_vjp(
    rows: Rows,
    ids: ArrayLike,
    g_logp: ArrayLike | None,
    g_lse: ArrayLike | None = None,
    g_mass: ArrayLike | None = None,
    g_log_rest: ArrayLike | None = None,
    *,
    temperature: ArrayLike | None = None,
    mask: ArrayLike | None = None,
) -> Gradients:
    """Gradients of what the rows are made of, for the cotangents of ``logp [..., K]``, ``lse``, ``mass`` and
    ``log_rest``.

    The cotangent of a log-probability whose id is -1 counts for nothing.
    """
    chosen, tau = distinct_ids(ids, rows), rows.temperatures(temperature)
    gl = np.zeros(chosen.shape) if g_logp is None else to_float64(g_logp).reshape(chosen.shape)
    gl = np.where(chosen < 0, 0.0, gl)
    gz, gm, gr = (per_token(g, rows.shape, 0.0) for g in (g_lse, g_mass, g_log_rest))

    def dz(i: Ints) -> Floats:
        here, known = _within(chosen[i], rows.columns)
        log_p = softmax_of_rows(rows.transformed(i, tau[i])).log_p
        p = np.exp(log_p)
        row, k = np.nonzero(here >= 0)
        column = here[row, k]
        at_ids = np.zeros(p.shape)
        at_ids[row, column] = gl[i][row, k]
        inside = np.zeros(p.shape, bool)
        inside[row, column] = True
        mass, rest = (np.where(x, p, 0.0).sum(axis=1)[:, None] for x in (inside, ~inside))
        by_mass = np.where(inside, p * rest, -p * mass)  # 1 - mass without cancellation
        others = gl[i].sum(axis=1)[:, None] - at_ids  # the cotangents of all ids but the column's own
        top = np.argmax(p, axis=1)
        share = p.copy()
        share[np.arange(len(p)), top] = 0.0
        below = np.where(np.arange(p.shape[1]) == top[:, None], share.sum(axis=1)[:, None], 1.0 - p)  # 1 - p
        log_rest = log_sum(np.where(inside, -np.inf, log_p))[:, None]
        with np.errstate(invalid="ignore"):
            of_rest = np.where(log_rest > -np.inf, np.exp(log_p - log_rest), 0.0)  # a softmax of its own
        by_rest = np.where(inside, -p, of_rest * mass)
        out = at_ids * below - others * p + gz[i, None] * p + gm[i, None] * by_mass + gr[i, None] * by_rest
        out[~known] = np.nan
        return out

    asked = (gl != 0).any(axis=1) | (gz != 0) | (gm != 0) | (gr != 0)
    return rows.pull_back(temperature, rows.live(mask) & asked, dz)


# -- a softmax over a support ----------------------------------------------------------------------------------------


def _restricted(z: Floats, support: Ints) -> Floats:
    """``z`` with ``-inf`` outside the support of each row; a row without ids keeps its whole vocabulary."""
    inside = (support < 0).all(axis=1)[:, None] & np.ones(z.shape, bool)
    row, k = np.nonzero(support >= 0)
    inside[row, support[row, k]] = True
    return np.where(inside, z, -np.inf)


def _inside(targets: Ints, support: Ints) -> Bools:
    return (support < 0).all(axis=1) | (support == targets[:, None]).any(axis=1)


def support_token_stats(
    rows: Rows,
    targets: ArrayLike,
    support: ArrayLike,
    *,
    temperature: ArrayLike | None = None,
    mask: ArrayLike | None = None,
) -> TokenStats:
    """Statistics at ``targets [...]`` of the softmax over ``support [..., K]``, ids that are ragged by -1.

    A token without ids has the whole vocabulary. A live token with a target outside its support, or with an invalid id
    in its support, has NaN.
    """
    chosen, tau = distinct_ids(support, rows), rows.temperatures(temperature)
    y = np.asarray(targets).astype(np.int64).reshape(-1)
    fields = no_stats(len(y))
    for i in rows.blocks(rows.live(mask)):
        here, known = _within(chosen[i], rows.columns)
        with np.errstate(all="ignore"):
            z = _restricted(rows.transformed(i, tau[i]), here)
        stats = token_stats(z, np.where(known & _inside(y[i], chosen[i]), y[i], -1))
        for name, values in fields.items():
            values[i] = getattr(stats, name)
    return TokenStats(**{name: values.reshape(rows.shape) for name, values in fields.items()})


def support_token_stats_vjp(
    rows: Rows,
    targets: ArrayLike,
    support: ArrayLike,
    g_logp: ArrayLike | None,
    g_entropy: ArrayLike | None = None,
    g_lse: ArrayLike | None = None,
    *,
    temperature: ArrayLike | None = None,
    mask: ArrayLike | None = None,
) -> Gradients:
    """Gradients of what the rows are made of, for the cotangents of logp, entropy and lse over the support."""
    chosen, tau = distinct_ids(support, rows), rows.temperatures(temperature)
    y = np.asarray(targets).astype(np.int64).reshape(-1)
    gl, gh, gz = (per_token(g, rows.shape, 0.0) for g in (g_logp, g_entropy, g_lse))

    def dz(i: Ints) -> Floats:
        here, known = _within(chosen[i], rows.columns)
        z = _restricted(rows.transformed(i, tau[i]), here)
        return token_stats_vjp(z, np.where(known & _inside(y[i], chosen[i]), y[i], -1), gl[i], gh[i], gz[i])

    asked = (gl != 0) | (gh != 0) | (gz != 0)
    return rows.pull_back(temperature, rows.live(mask) & asked, dz)


def top_k(rows: Rows, k: int, *, temperature: ArrayLike | None = None, mask: ArrayLike | None = None) -> TopK:
    """The ``k`` likeliest ids of each token, by transformed logit, equal ones by the smaller id."""
    if not 0 < k <= rows.columns:
        raise ValueError(f"k={k} does not lie in [1, {rows.columns}], the size of the vocabulary.")
    tau, tokens = rows.temperatures(temperature), int(np.prod(rows.shape))
    ids, logp = np.zeros((tokens, k), np.int64), np.zeros((tokens, k))
    lse, log_rest = np.zeros(tokens), np.zeros(tokens)
    for i in rows.blocks(rows.live(mask)):
        with np.errstate(all="ignore"):
            z = rows.transformed(i, tau[i])
            soft = softmax_of_rows(z)
        ids[i] = highest(z, k)
        logp[i], lse[i] = np.take_along_axis(soft.log_p, ids[i], axis=1), soft.lse
        log_rest[i] = log_mass_outside(soft.log_p, ids[i])[1]
    wide = (*rows.shape, k)
    return TopK(ids.reshape(wide), logp.reshape(wide), lse.reshape(rows.shape), log_rest.reshape(rows.shape))
