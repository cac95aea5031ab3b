"""The sweeps: one group of rows (a native tile high) over the columns of a block in VMEM.

Three sweeps, each in straight-line steps of some 8,000 columns whose partial results are reduced as trees over vector
registers; lanes are reduced once, at the end.

    1  u of z = k u = transform(x), to the float32 scratch; M = max u
    2  s = k (u - c), over u in the scratch; S, A, Q of ``stats.RowSums``, of which the target is no part
    3  d = exp(s) (a - b s), rounded, to the output block (``stats.dz_line``)
    -  the target's own column is patched: out of the scratch before 2, into the output after 3

``c`` is any point near the row's largest logit other than the target: M itself, unless the target leads the columns of
the other 127 lanes by more than ``LEAD`` nats, where exp(k (u - M)) of the others would vanish; then their own maximum
is taken in one more sweep. To keep the target out by a compare and a select on every element would cost a tenth of the
time.

``u`` below ``LOWEST`` are taken as ``LOWEST``: their probability is 0 either way, and ``0 * -inf`` cannot arise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from logitless.core import stats as S
from logitless.core.compat import Index, Ref
from logitless.core.shapes import PyTree
from logitless.core.stats import LogitTransform, factor, pull_back, slope, swept, times
from logitless.logits.pallas_tpu.tiles import LANES

STEP_TILES = (48, 80)
"""Bounds on a step, in 128 columns. A step is straight-line code: shorter ones pay its ramp too often (32: 9 % more
time), longer ones gain little."""

SHORT_STEP = 512
"""Columns per step in rare sweeps: short, to keep the code small."""

LOWEST = -1e20
LEAD = 30.0

STAT_FIELDS = S.STAT_FIELDS
STAT_COLUMNS = 8


@dataclasses.dataclass(frozen=True)
class Group:
    """A group of rows within the current block."""

    x: Ref  # ref [rows, width], logits
    u: Ref  # ref [group, width] float32 scratch
    first: Index  # first row within the block
    size: int
    limit: Index  # vocabulary columns in this block; a Python int if static
    starts: Sequence[Array]  # a scalar per row: first of the 128 columns with its target; any if it is not in the block
    label: Array  # [group, 1] target column within the block; anything outside it if it is elsewhere
    transform: LogitTransform  # scalars, and a temperature that may be [group, 1]

    @property
    def rows(self) -> pl.Slice:
        return pl.ds(self.first, self.size)

    @property
    def width(self) -> int:
        return self.x.shape[1]

    @property
    def active(self) -> int:
        """Columns to sweep: up to the vocabulary's end where that is known while tracing."""
        return -(-self.limit // LANES) * LANES if isinstance(self.limit, int) else self.width


def lanes(value: Array, size: int) -> Array:
    """A per-row ``[group, 1]`` over one register's lanes."""
    return jnp.broadcast_to(value, (size, LANES))


def across(value: Array, width: int) -> Array:
    """``[group, 128]`` repeated over ``width`` columns; the same registers, no data moves."""
    return jnp.concatenate([value] * (width // LANES), axis=1)


def tree(op: Callable[[Array, Array], Array], value: Array) -> Array:
    """``value [group, k 128]`` reduced to ``[group, 128]`` as a balanced tree."""
    parts = [value[:, i : i + LANES] for i in range(0, value.shape[1], LANES)]
    while len(parts) > 1:
        pairs = [op(a, b) for a, b in zip(parts[::2], parts[1::2], strict=False)]
        parts = pairs + parts[len(pairs) * 2 :]
    return parts[0]


def step_columns(columns: int) -> int:
    """Length of the equal steps that cover ``columns`` with the least left over."""
    low, high = STEP_TILES
    tiles = columns // LANES
    if tiles <= high:
        return tiles * LANES
    fewest = -(-tiles // high)
    count = min(range(fewest, max(tiles // low, fewest) + 1), key=lambda k: tiles % k)
    return tiles // count * LANES


def sweep(group: Group, body: Callable[[Index, int, PyTree], PyTree], carry: PyTree, rare: bool = False) -> PyTree:
    """``carry = body(first column, columns, carry)`` over the block: equal steps, and what is left.

    The equal steps lie inside the vocabulary and need no mask; the start of the last step is static.
    """
    known = group.limit if isinstance(group.limit, int) else group.width
    step = min(SHORT_STEP, known // LANES * LANES) if rare else step_columns(known)
    count = known // step if step else 0
    if count > 1:
        carry = jax.lax.fori_loop(0, count, lambda i, c: body(pl.multiple_of(i * step, LANES), step, c), carry)
    elif count:
        carry = body(0, step, carry)
    at = count * step
    return body(at, group.active - at, carry) if at < group.active else carry


def crosses(group: Group, start: Index, columns: int) -> bool:
    """Whether a step may reach past the vocabulary; always in doubt where the limit is not static."""
    return not isinstance(group.limit, int) or (isinstance(start, int) and start + columns > group.limit)


def inside(group: Group, start: Index, columns: int) -> Array:
    """Which of a step's columns belong to the vocabulary."""
    return jax.lax.broadcasted_iota(jnp.int32, (group.size, columns), 1) < group.limit - start


def swept_of(group: Group, start: Index, columns: int) -> Array:
    """``u`` of a step, float32, at least ``LOWEST``, which is also what columns past the vocabulary get."""
    u = swept(group.x[group.rows, pl.ds(start, columns)], group.transform)
    u = jnp.maximum(u, LOWEST)
    return jnp.where(inside(group, start, columns), u, LOWEST) if crosses(group, start, columns) else u


def step_factor(group: Group, columns: int) -> Array | None:
    """``k`` of ``z = k u`` for a step."""
    k = factor(group.transform)
    return across(lanes(k, group.size), columns) if k is not None and group.transform.per_token else k


def at_targets(group: Group, ref: Ref, rows: slice | pl.Slice, value: Array | float | None) -> Array:
    """What ``ref`` holds in each row's target column, ``[group, 1]`` float32, 0 where that is not in this block.

    ``value`` (a number or ``[group, 1]``), if given, is then written there.
    """
    lane, row = (jax.lax.broadcasted_iota(jnp.int32, (group.size, LANES), d) for d in (1, 0))
    label = lanes(group.label, group.size)
    # Loads precede stores, and therefore overlap. Every tile gets the values for all its rows: the order
    # of the stores does not matter where two targets share a tile.
    tiles = [ref[rows, pl.ds(start, LANES)].astype(jnp.float32) for start in group.starts]
    found = jnp.zeros((group.size, LANES), jnp.float32)
    for r, (start, tile) in enumerate(zip(group.starts, tiles, strict=True)):
        here = lane + start == label
        found = jnp.where(here & (row == r), tile, found)
        if value is not None:
            spread = jnp.broadcast_to(value, (group.size, LANES)).astype(jnp.float32)
            ref[rows, pl.ds(start, LANES)] = jnp.where(here, spread, tile).astype(ref.dtype)
    return jnp.sum(found, axis=1, keepdims=True)  # one lane holds the value


def raw_target(group: Group) -> Array | None:
    """The raw logit ``[group, 1]`` of each row's target, if the slope depends on the logit."""
    return None if group.transform.softcap is None else at_targets(group, group.x, group.rows, None)


def at_target(group: Group, dz: Array, raw: Array | None) -> Array:
    """The target's dlogit ``[group, 1]`` from its dz."""
    return row_slope(group.transform, dz) if raw is None else pull_back(dz, raw, group.transform)


def group_sums(group: Group) -> tuple[S.RowSums, Array, Array]:
    """Sweeps 1 and 2: ``(sums [group, 1] of this block, c, odd)``; ``s = k (u - c)`` is left in the scratch.

    ``odd`` is a scalar: some row's target leads by far, or some row is not finite.
    """

    def fill(start: Index, columns: int, top: Array) -> Array:
        u = swept_of(group, start, columns)
        group.u[:, pl.ds(start, columns)] = u
        return jnp.maximum(top, tree(jnp.maximum, u))

    lowest = jnp.full((group.size, LANES), LOWEST, jnp.float32)
    top = sweep(group, fill, lowest)
    target = at_targets(group, group.u, slice(None), LOWEST)

    lane = jax.lax.broadcasted_iota(jnp.int32, (group.size, LANES), 1)
    elsewhere = jnp.where(lane == lanes(group.label & (LANES - 1), group.size), LOWEST, top)
    elsewhere = jnp.max(elsewhere, axis=1, keepdims=True)
    centre = jnp.max(top, axis=1, keepdims=True)

    def others_maximum() -> Array:
        def step(start: Index, columns: int, m: Array) -> Array:
            return jnp.maximum(m, tree(jnp.maximum, group.u[:, pl.ds(start, columns)]))

        return jnp.max(sweep(group, step, lowest, rare=True), axis=1, keepdims=True)

    # Vector to scalar is slow: a single reduction answers both.
    leads = times(factor(group.transform), centre - elsewhere) > LEAD
    odd = jnp.max(jnp.where(leads | (centre - centre != 0), 1.0, 0.0)) > 0
    centre = jax.lax.cond(odd, others_maximum, lambda: centre)
    c = lanes(centre, group.size)

    def sums(start: Index, columns: int, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        s = times(step_factor(group, columns), group.u[:, pl.ds(start, columns)] - across(c, columns))
        group.u[:, pl.ds(start, columns)] = s
        e = jnp.exp(s)
        total, centred, squares = carry
        return total + tree(jnp.add, e), centred + tree(jnp.add, e * s), squares + tree(jnp.add, e * e)

    zero = jnp.zeros((group.size, LANES), jnp.float32)
    total, centred, squares = (jnp.sum(v, axis=1, keepdims=True) for v in sweep(group, sums, (zero, zero, zero)))
    none = centre <= LOWEST  # false for a NaN, which must stay NaN
    zero = jnp.zeros_like(centre)
    found = S.RowSums(
        maximum=jnp.where(none, S.NEG_INF, centre),
        total=jnp.where(none, zero, total),
        centred=jnp.where(none, zero, centred),
        squares=jnp.where(none, zero, squares),
        target=jnp.where(target <= LOWEST, S.NEG_INF, target),
    )
    return found, centre, odd


def gradient(
    group: Group, out: Ref, s_of: Callable[[Index, int], Array], a: Array, b: Array, keep: Array | None
) -> None:
    """Sweep 3: dlogits of every column but the target's, from ``s_of(start, columns)``; ``keep``: rows not to zero.

    ``a`` and ``b`` are ``[group, 1]`` and hold the transform's slope already where it is the same for a whole row.
    """
    a, b = lanes(a, group.size), lanes(b, group.size)
    kept = None if keep is None else lanes(keep.astype(jnp.float32), group.size)

    def step(start: Index, columns: int, carry: PyTree) -> PyTree:
        s = s_of(start, columns)
        d = jnp.exp(s) * (across(a, columns) - across(b, columns) * s)
        if group.transform.softcap is not None:
            x = group.x[group.rows, pl.ds(start, columns)]
            d = pull_back(d, x, group.transform.rows(lambda t: across(lanes(t, group.size), columns)))
        if kept is not None:
            d = jnp.where(across(kept, columns) > 0, d, 0.0)
        if crosses(group, start, columns):
            d = jnp.where(inside(group, start, columns), d, 0.0)
        out[group.rows, pl.ds(start, columns)] = d.astype(out.dtype)
        return carry

    sweep(group, step, 0)
    blank(group, out, group.active)


def blank(group: Group, out: Ref, start: int) -> None:
    """Zeros from column ``start`` (a multiple of 128) on."""

    def write(at: Index, columns: int) -> None:
        out[group.rows, pl.ds(at, columns)] = jnp.zeros((group.size, columns), out.dtype)

    def step(i: Array, carry: int) -> int:
        write(pl.multiple_of(start + i * SHORT_STEP, LANES), SHORT_STEP)
        return carry

    count, rest = divmod(group.width - start, SHORT_STEP)
    if count:
        jax.lax.fori_loop(0, count, step, 0)
    if rest:
        write(group.width - rest, rest)


def row_slope(transform: LogitTransform, value: Array) -> Array:
    """``value [group, 1]`` times the slope, where the slope is the same for a whole row."""
    if transform.softcap is not None:
        return value
    d = slope(value, transform)
    return value if d is None else value * d


def erase(group: Group, out: Ref, rows_to_zero: Array) -> None:
    """Zero the rows ``[group, 1]`` in the output."""
    drop = lanes(rows_to_zero.astype(jnp.float32), group.size)

    def step(start: Index, columns: int, carry: PyTree) -> PyTree:
        at = (group.rows, pl.ds(start, columns))
        out[at] = jnp.where(across(drop, columns) > 0, 0.0, out[at].astype(jnp.float32)).astype(out.dtype)
        return carry

    sweep(group, step, 0, rare=True)


def store_stats(ref: Ref, rows: slice | pl.Slice, stats: S.TokenStats, live: Array) -> None:
    """The statistics as columns of ``ref [rows, 8]`` in the order of ``STAT_FIELDS``; zeros where not live."""
    size = live.shape[0]
    column = jax.lax.broadcasted_iota(jnp.int32, (size, STAT_COLUMNS), 1)
    out = jnp.zeros((size, STAT_COLUMNS), jnp.float32)
    for i, name in enumerate(STAT_FIELDS):
        value = getattr(stats, name).astype(jnp.float32)
        out = jnp.where(column == i, jnp.where(live, value, 0.0), out)
    ref[rows, :] = out
