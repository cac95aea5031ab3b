"""The maths of a row: from the head's raw product to the logits that the softmax sees, and per-token statistics of the
softmax with their exact gradients, which every backend returns. Kernels call the same functions.

Order of the transform, everywhere: bias, scale, softcap, temperature. With ``x`` the raw logit (bias included),

    capped = softcap * tanh(scale * x / softcap)      (or scale * x without a softcap)
    z      = capped / temperature

in float32, whatever the dtype of ``x``; the temperature divides after the upcast. A softmax needs only differences of
``z``, so every pass over logits takes differences *before* the last product:

    z = k u        u = x,  k = scale / temperature,  or with a softcap
                   u = tanh(scale * x / softcap),  k = softcap / temperature
    z_v - z_w = k (u_v - u_w)

A compiler may contract ``k u_v - m`` into one multiply-add in one pass and not in the next, and then the two disagree
by the rounding of the product, which at ``|z| = 300`` is 1e-5 of every probability. Across the difference of two ``u``
there is nothing to contract: every pass sees the same ``z``. ``k`` is positive, so ``u`` has the order of ``z``.

The slope ``dz/dx = scale * (1 - (capped / softcap)^2) / temperature`` carries a cotangent of ``z`` back to ``x``.

Notation: ``z`` are the transformed logits of a token, ``y`` is its target, ``p = softmax(z)``:

    lse     = logsumexp_v z_v
    logp    = z_y - lse                 computed as -softplus(lse_{v != y} - z_y)
    entropy = -sum_v p_v log p_v        computed as p_y (lse - z_y) + sum_{v != y} p_v (lse - z_v) if the target leads
                                        all others together, else as (lse - m) - sum_v p_v (z_v - m)

The plain difference ``z_y - lse`` is exactly 0 in float32 once the target leads by about 15 nats, which is where RL
policies live; and the two sums of the entropy have no negative terms, so nothing cancels. In the entropy's other form
little does, and ``log p + entropy`` is exactly zero in a uniform row. Logits enter only as differences from the largest
one, so their common offset costs no digits; with ``z = k u`` the difference is that of two ``u``, and the factor ``k``
comes after it. Both statistics need sums over the columns *other than the target*, which are what a sweep over the
vocabulary carries (:class:`RowSums`):

    m = max_{v != y} u_v    S = sum e_v    A = sum e_v s_v    Q = sum e_v^2      with s_v = k (u_v - m), e_v = exp(s_v)

Sweeps over disjoint column ranges are combined by :func:`merge`, whether the ranges are tiles or shards.

Gradients: ``d logp/d z_v = 1[v=y] - p_v``, ``d entropy/d z_v = -p_v (log p_v + entropy)``, ``d lse/d z_v = p_v``, and
at the target ``d logp/d z_y = -expm1(logp)``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from logitless.core.pytree import register

NEG_INF = float("-inf")
_NOT_GIVEN: Any = None  # no array: only in statistics that a user made


# -- the transform -----------------------------------------------------------------------------------------------------


@register
@dataclasses.dataclass(frozen=True)
class LogitTransform:
    """Scale, softcap and temperature; every number is a traced leaf, ``None`` means "not there".

    ``temperature`` is a scalar or has one value per token (the shape of the targets).
    """

    temperature: Array | float | None = None
    softcap: Array | float | None = None
    scale: Array | float | None = None

    @property
    def per_token(self) -> bool:
        """Whether the temperature is per token."""
        return self.temperature is not None and jnp.ndim(self.temperature) > 0

    def rows(self, take: Callable[[Array], Array]) -> LogitTransform:
        """The transform of other tokens: ``take`` on a per-token temperature."""
        return dataclasses.replace(self, temperature=take(jnp.asarray(self.temperature))) if self.per_token else self

    def column(self) -> LogitTransform:
        """The transform with a per-token temperature ``[N]`` turned into ``[N, 1]``, for ``[N, V]`` rows."""
        return self.rows(lambda t: t[:, None])


def swept(x: Array, transform: LogitTransform) -> Array:
    """``u`` in float32 from the raw logits ``x``: what a pass over the vocabulary compares and takes differences of."""
    u = x.astype(jnp.float32)
    if transform.softcap is None:
        return u
    # One factor: two products in a row may be reordered in one program and not in another.
    scale = jnp.asarray(1.0 if transform.scale is None else transform.scale, jnp.float32)
    return jnp.tanh(u * (scale / jnp.asarray(transform.softcap, jnp.float32)))


def factor(transform: LogitTransform) -> Array | None:
    """``k`` in ``z = k u``, a scalar or of the temperature's shape; ``None`` for a factor of one."""
    k = transform.scale if transform.softcap is None else transform.softcap
    if transform.temperature is None:
        return None if k is None else jnp.asarray(k, jnp.float32)
    return jnp.asarray(1.0 if k is None else k, jnp.float32) / jnp.asarray(transform.temperature, jnp.float32)


def times(k: Array | None, difference: Array) -> Array:
    """``k`` times a swept quantity or difference; ``k`` comes from :func:`factor`."""
    return difference if k is None else difference * k


def divided(u: Array, transform: LogitTransform) -> Array:
    """``k u`` of a few numbers per row (swept quantities or their differences), divided by the temperature.

    The product with a rounded ``k`` is off by up to half an ulp more. A compiler would make that product of a division
    by a number that it knows, so the divisor is a select; the select around the result keeps it from being contracted
    with what is added: the same bits in every program, whether the temperature is known or traced.
    """
    numerator = transform.scale if transform.softcap is None else transform.softcap
    if numerator is None and transform.temperature is None:
        return u
    gone = u == -jnp.inf
    z = jnp.where(gone, 0.0, u)
    if numerator is not None:
        z = z * jnp.asarray(numerator, jnp.float32)
    if transform.temperature is not None:
        z = z / jnp.where(gone, 1.0, jnp.asarray(transform.temperature, jnp.float32))
    return jnp.where(gone, -jnp.inf, z)


def forward(x: Array, transform: LogitTransform) -> Array:
    """``z`` in float32 from the raw logits ``x``; broadcasts against ``transform.temperature``."""
    return times(factor(transform), swept(x, transform))


def slope(x: Array, transform: LogitTransform) -> Array | None:
    """``dz/dx`` at the raw logits ``x``, or ``None`` for a constant slope of one."""
    k = factor(dataclasses.replace(transform, softcap=None))
    return k if transform.softcap is None else times(k, 1.0 - jnp.square(swept(x, transform)))


def pull_back(dz: Array, x: Array, transform: LogitTransform) -> Array:
    """The cotangent of ``x`` from that of ``z``; exactly zero where ``dz`` is, even where ``x`` or the temperature of a
    dead token is not finite."""
    d = slope(x, transform)
    if d is None:
        return dz
    if transform.softcap is None:  # a select by dz would lose the second derivative where dz is zero
        return dz * jnp.where(jnp.abs(d) < jnp.inf, d, 0.0)
    return jnp.where(dz == 0, 0.0, dz * d)


def transform_of(temperature: object, softcap: object, scale: object) -> LogitTransform:
    """A :class:`LogitTransform` from user arguments; a Python ``1.0`` temperature or scale drops out."""

    def neutral(value: object) -> bool:
        return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool) and value == 1)

    return LogitTransform(
        temperature=None if neutral(temperature) else jax.numpy.asarray(temperature, jnp.float32),
        softcap=None if softcap is None else jax.numpy.asarray(softcap, jnp.float32),
        scale=None if neutral(scale) else jax.numpy.asarray(scale, jnp.float32),
    )


_NOT_TRANSFORMED = LogitTransform()


# -- statistics --------------------------------------------------------------------------------------------------------


@register
@dataclasses.dataclass(frozen=True)
class PairStats:
    """What the gradient of a divergence is taken from, per token; all float32."""

    teacher_peak: Array  # ``peak`` of the teacher's softmax
    teacher_max_logp: Array  # its ``max_logp``
    mean: Array  # sum of p d (``logitless.core.divergences``)
    at_peak: Array  # the gradient at the student's largest logit, for a row that this one column dominates


@register
@dataclasses.dataclass(frozen=True)
class SelectedStats:
    """Log-probabilities at the ids that a call was given for each token; the first three are differentiable.

    Exactly 0 where a token is masked; an id of -1 has a log-probability of 0 and no mass.
    """

    logp: Array
    """Log-probability of each id, ``[..., K]``."""
    mass: Array
    """Probability of all ids together; an id that is given twice counts once."""
    log_rest: Array
    """Log of the probability outside the ids. ``log(1 - mass)`` loses digits at a mass near one."""
    rest_peak: Array
    """Largest logit outside the ids, before its last factor (as :attr:`TokenStats.peak`)."""
    rest_total: Array
    """Sum of the exponentials of the other logits, relative to ``rest_peak``; 1 if there are no others."""


@register
@dataclasses.dataclass(frozen=True)
class TokenStats:
    """Statistics of each token's softmax, all with the shape of the targets.

    ``logp``, ``entropy`` and ``lse`` are float32 and differentiable; the rest are not (their gradient is zero). A live
    token whose target lies outside ``[0, V)`` has NaN in every float field. Tokens masked out by ``mask=`` have zeros.
    The library's calls fill in every field. Who makes statistics for :func:`logitless.policy_loss` needs ``logp``,
    and ``entropy`` where the objective reads it.

    >>> import jax.numpy as jnp, logitless
    >>> stats = logitless.TokenStats(logp=jnp.array([[-1.0, -2.0]]))
    >>> float(logitless.policy_loss(stats, advantages=jnp.array([2.0]))[0])
    -2.0
    """

    logp: Array
    """Log-probability of the target."""
    entropy: Array = _NOT_GIVEN
    """Entropy of the whole distribution, in nats."""
    lse: Array = _NOT_GIVEN
    """Logsumexp of the transformed logits."""
    max_logit: Array = _NOT_GIVEN
    """Largest transformed logit (float32)."""
    log_sum_p2: Array = _NOT_GIVEN
    """``log sum_v p_v^2``, the negative Renyi-2 entropy (float32)."""
    is_top1: Array = _NOT_GIVEN
    """Whether no other column has a larger logit than the target (bool)."""
    max_logp: Array = _NOT_GIVEN
    """Largest log-probability of the row, ``max_logit - lse`` with all its digits (float32)."""
    peak: Array = _NOT_GIVEN
    """``max_logit`` before its last factor (``u`` above): what gradients are taken relative
    to (float32)."""

    divergence: Array | None = None
    """Divergence of this distribution and a teacher's, where the call has a teacher; differentiable."""
    teacher_entropy: Array | None = None
    """Entropy of the teacher's distribution, if a teacher is given (float32)."""
    pair: PairStats | None = None
    """What the divergence's gradient is taken from."""
    selected: SelectedStats | None = None
    """Log-probabilities at the ``ids`` of each token, where the call has them; differentiable."""

    def map(self, f: Callable[[Array], Array]) -> TokenStats:
        """``f`` applied to every array."""
        return jax.tree.map(f, self)


STAT_FIELDS = tuple(f.name for f in dataclasses.fields(TokenStats))[:8]
"""Names of the statistics of a single distribution: a kernel writes one float32 column for each."""


def stats_of_columns(columns: Sequence[Array]) -> TokenStats:
    """Statistics from the columns of :data:`STAT_FIELDS`."""
    logp, entropy, lse, max_logit, log_sum_p2, is_top1, max_logp, peak = columns
    return TokenStats(logp, entropy, lse, max_logit, log_sum_p2, is_top1 > 0, max_logp, peak)


def blank_stats(n: int, pair: bool = False, ids: int = 0) -> TokenStats:
    """Statistics of ``n`` tokens that nobody has visited: zeros; ``pair``: with a teacher's; with ``ids`` selected."""
    zero = jnp.zeros((n,), jnp.float32)
    stats = TokenStats(zero, zero, zero, zero, zero, jnp.zeros((n,), bool), zero, zero)
    if ids:
        selected = SelectedStats(jnp.zeros((n, ids), jnp.float32), zero, zero, zero, zero)
        stats = dataclasses.replace(stats, selected=selected)
    if not pair:
        return stats
    return dataclasses.replace(stats, divergence=zero, teacher_entropy=zero, pair=PairStats(zero, zero, zero, zero))


def valid_targets(targets: Array, vocab_size: int) -> Array:
    """Which targets name a column."""
    return (targets >= 0) & (targets < vocab_size)


def masked_stats(stats: TokenStats, live: Array | None) -> TokenStats:
    """Zeros where a token is not live."""
    return stats if live is None else stats.map(lambda s: where_rows(live, s))


def where_rows(keep: Array, x: Array) -> Array:
    """``x [*tokens, ...]`` with zeros where ``keep [*tokens]`` is false."""
    return jnp.where(keep.reshape(*keep.shape, *(1,) * (x.ndim - keep.ndim)), x, jnp.zeros((), x.dtype))


@register
@dataclasses.dataclass(frozen=True)
class RowSums:
    """What a sweep over vocabulary columns carries for each row; the target column is in ``target`` only."""

    maximum: Array  # m, as swept (u); -inf while no column other than the target was seen
    total: Array  # S
    centred: Array  # A
    squares: Array  # Q
    target: Array  # u_y; 0 while the target was not seen (so that shards can be added)


def empty_sums(shape: tuple[int, ...]) -> RowSums:
    """The neutral element of :func:`merge`."""
    zero = jnp.zeros(shape, jnp.float32)
    return RowSums(jnp.full(shape, NEG_INF, jnp.float32), zero, zero, zero, zero)


def exponentials(u: Array, is_target: Array, k: Array | None = None) -> tuple[Array, Array, Array]:
    """``(m [...], s, e)`` of :class:`RowSums` for ``u [..., V]`` (float32); ``is_target [..., V]`` marks the target's
    column, ``k`` broadcasts against ``u``. ``e`` is 0 at the target, and ``s`` is 0 where ``e`` is: no 0 * -inf."""
    others = jnp.where(is_target, NEG_INF, u)
    # The sums are relative to m, and the statistics do not depend on which m was chosen: it carries no gradient.
    m = jax.lax.stop_gradient(jnp.max(others, axis=-1))
    centre = jnp.where(m > NEG_INF, m, 0.0)
    shifted = others - centre[..., None]
    if k is not None:  # where JAX differentiates this by k, too, no -inf may meet a zero cotangent
        seen = others != NEG_INF
        shifted = jnp.where(seen, times(k, jnp.where(seen, shifted, 0.0)), NEG_INF)
    e = jnp.exp(shifted)
    return m, jnp.where(e > 0, shifted, 0.0), e


def sums_of(m: Array, s: Array, e: Array, target: Array) -> RowSums:
    """Sums over the last axis of what :func:`exponentials` gave, beside the target's own ``u``."""
    total, centred, squares = jnp.sum(e, axis=-1), jnp.sum(e * s, axis=-1), jnp.sum(e * e, axis=-1)
    return RowSums(maximum=m, total=total, centred=centred, squares=squares, target=target)


def row_sums(u: Array, is_target: Array, k: Array | None = None) -> RowSums:
    """Sums over the last axis of ``u [..., V]``; the arguments are those of :func:`exponentials`."""
    return sums_of(*exponentials(u, is_target, k), jnp.sum(jnp.where(is_target, u, 0.0), axis=-1))


def rescale(s: RowSums, m: Array, k: Array | None = None) -> RowSums:
    """``s`` expressed relative to the larger maximum ``m``; ``k`` has a row's shape, or none."""
    seen = s.maximum > NEG_INF
    step = jnp.where(seen, times(k, s.maximum - m), 0.0)
    a = jnp.where(seen, jnp.exp(step), 0.0)
    # exp(-inf) * -inf must not appear: a == 0 means that nothing of s is left.
    centred = jnp.where(a > 0, a * (s.centred + step * s.total), 0.0)
    return RowSums(m, a * s.total, centred, a * a * s.squares, s.target)


def merge(a: RowSums, b: RowSums, k: Array | None = None) -> RowSums:
    """The sums over two disjoint column ranges together."""
    m = jnp.maximum(a.maximum, b.maximum)
    a, b = rescale(a, m, k), rescale(b, m, k)
    return RowSums(m, a.total + b.total, a.centred + b.centred, a.squares + b.squares, a.target + b.target)


def finish(
    sums: RowSums, target_valid: Array | bool = True, transform: LogitTransform = _NOT_TRANSFORMED
) -> TokenStats:
    """Statistics from the sums over the whole vocabulary; NaN where ``target_valid`` is false.

    The numbers of a row are divided by the temperature (``transform.divided``): at ``|z| = 1e3`` the rounding of
    ``k = 1 / temperature`` would be 6e-5 of a log-probability. In the sums ``k`` does, since what counts there is near
    the largest logit.
    """
    u_y, m = sums.target, sums.maximum
    others_seen = m != NEG_INF  # and not "above": a NaN must not pass for an empty row
    log_total = jnp.where(others_seen, jnp.log(jnp.where(others_seen, sums.total, 1.0)), NEG_INF)
    # Everything relative to m: a rounded lse of 1e4 would carry an error of 5e-4 into every probability.
    lead = divided(u_y - jnp.where(others_seen, m, 0.0), transform)
    margin = jnp.where(others_seen | (u_y > NEG_INF), log_total - lead, jnp.inf)  # lse_{v != y} - z_y
    logp = -jax.nn.softplus(margin)
    # From whichever side dominates: the small correction is added to the larger number.
    others_lead = margin > 0
    gap = jnp.where(others_lead, log_total + jax.nn.softplus(-margin), lead - logp)  # lse - m
    lse = jnp.where(others_lead, divided(m, transform) + gap, divided(u_y, transform) - logp)
    p_y = jnp.exp(logp)
    gap = jnp.where(others_seen, gap, 0.0)
    scale = jnp.where(others_seen, jnp.exp(-gap), 0.0)
    # Where the others lead, gap minus the mean of s: what is rounded in gap cancels in log p + entropy. A target that
    # leads takes a sum without negative terms. Neither the value nor the gradient has 0 * -inf.
    spread = gap - (scale * sums.centred + p_y * jnp.where(p_y > 0, lead, 0.0))
    own = p_y * -jnp.where(p_y > 0, logp, 0.0)
    entropy = jnp.where(others_lead, spread, own + scale * (gap * sums.total - sums.centred))
    log_sum_p2 = jnp.log(p_y * p_y + scale * scale * sums.squares)

    def known(x: Array) -> Array:
        return jnp.where(target_valid, x, jnp.nan)

    return TokenStats(
        logp=known(logp),
        entropy=known(entropy),
        lse=known(lse),
        max_logit=known(divided(jnp.maximum(m, u_y), transform)),
        log_sum_p2=known(log_sum_p2),
        is_top1=jnp.logical_and(u_y >= m, target_valid),
        max_logp=known(jnp.where(u_y >= m, logp, -gap)),
        peak=known(jnp.where(u_y >= m, u_y, m)),  # as in max_logp: a tie must not share its derivative out
    )


def sums_of_stats(s: TokenStats) -> RowSums:
    """Sums behind the statistics of rows whose target has no mass (``u_y = -inf``): the inverse of :func:`finish`."""
    seen = s.peak != NEG_INF
    gap = jnp.where(seen, -s.max_logp, 0.0)
    total = jnp.where(seen, jnp.exp(gap), 0.0)
    squares = jnp.where(seen, total * total * jnp.exp(s.log_sum_p2), 0.0)
    centred = jnp.where(seen, total * (gap - s.entropy), 0.0)
    return RowSums(s.peak, total, centred, squares, jnp.full_like(s.peak, NEG_INF))


@register
@dataclasses.dataclass(frozen=True)
class StatCotangents:
    """Cotangents of the differentiable statistics, per token, float32."""

    logp: Array
    entropy: Array
    lse: Array
    divergence: Array | None = None  # where there is a teacher
    selected: SelectedStats | None = None  # where there are ids

    def any_nonzero(self) -> Array:
        """True where the token's row of dlogits can be nonzero (NaN counts as nonzero)."""
        moves = (self.logp != 0) | (self.entropy != 0) | (self.lse != 0)
        if self.selected is not None:
            own = self.selected
            moves |= jnp.any(own.logp != 0, axis=-1) | (own.mass != 0) | (own.log_rest != 0)
        return moves if self.divergence is None else moves | (self.divergence != 0)


def log_probability(u: Array, k: Array | None, s: TokenStats) -> Array:
    """``log p_v = k (u_v - peak) + max_logp``, and not ``z_v - lse``: at ``|z| = 1e4`` a float32 lse is off by 5e-4,
    which would be the relative error of every probability. ``s`` broadcasts against ``u``."""
    return times(k, u - s.peak) + s.max_logp


def dz(
    u: Array, is_target: Array, s: TokenStats, g: StatCotangents, k: Array | None = None, rest: Array | None = None
) -> Array:
    """``sum_s g_s d stat_s / d z`` for rows ``u [..., V]`` (float32); ``s`` and ``g`` broadcast as ``[..., 1]``.

    Exactly zero in rows whose cotangents are all zero, even where the row itself is not finite. ``rest`` is
    ``1 - p_y`` where the caller has it (Mosaic lowers no ``expm1``).
    """
    rest = -jnp.expm1(s.logp) if rest is None else rest
    log_p = jnp.where(is_target, s.logp, log_probability(u, k, s))
    p = jnp.exp(log_p)
    # entropy's own gradient is -p (log p + H): the product with p is 0 where p is, never 0 * -inf.
    spread = jnp.where(p > 0, p * (log_p + s.entropy), p)
    others = p * (g.lse - g.logp) - g.entropy * spread
    at_target = p * g.lse + g.logp * rest - g.entropy * spread
    return jnp.where(g.any_nonzero(), jnp.where(is_target, at_target, others), 0.0)


def dz_at_target(s: TokenStats, g: StatCotangents) -> Array:
    """:func:`dz` of each row at its target; needs no logit."""
    return dz(jnp.zeros_like(s.peak), jnp.ones_like(s.is_top1), s, g)


def dz_line(centre: Array, s: TokenStats, g: StatCotangents, k: Array | None = None) -> tuple[Array, Array]:
    """``(a, b)`` per row: at every column but the target, :func:`dz` is ``exp(s) (a - b s)``, ``s = k (u_v - centre)``.

    Five operations an element instead of a dozen, for kernels. ``centre`` is a row's reference point, such that ``s``
    of its largest logit other than the target is at least about -80; ``(0, 0)`` in rows whose cotangents are all zero.
    """
    offset = log_probability(centre, k, s)  # of the centre
    w = jnp.exp(offset)
    a = w * ((g.lse - g.logp) - g.entropy * (offset + s.entropy))
    moves = g.any_nonzero()
    return jnp.where(moves, a, 0.0), jnp.where(moves, w * g.entropy, 0.0)
