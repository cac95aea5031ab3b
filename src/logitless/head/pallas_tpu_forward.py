"""Forward sweep of the fused head on TPU: token statistics, and the expected head row, with no logits in HBM.

For a tile of tokens the vocabulary is swept tile by tile; with ``x = h W^T + bias`` and ``z = transform(x)``, both in
VMEM only, the columns other than the target are carried as :class:`logitless.stats.RowSums` relative to a running
maximum ``m`` (:func:`_absorb`), and, when the direction is wanted, so is

    E[n, :] = sum_{v != y} exp(z_v - m) slope_v W_v       slope = dz/dx, taken in here only if a softcap varies it

with the exponentials rounded to the head's dtype before the matmul, as dlogits are. This is flash attention with
queries ``h`` and keys and values ``W``. With and without the direction the statistics come from the same instructions
on the same tiles: they are bit-identical.

For a sparse backward (``pallas_tpu_sparse.py``) the sweep also gives, per token tile, the maximum over its tokens of

    z_v - b        b = max(floor, logsumexp of the columns seen so far), floor known beforehand: the target's logit

for every column v (at a token's own target its other tokens count). ``b`` is at most the logsumexp of the row, so no
column is missed; a column swept before the row's leading one may look more probable than it is. Tokens that do not
count have an infinite floor. Two more operations an element, ``4 V`` bytes written per token tile.

Cost: one matmul (``2 N H V`` FLOP) for statistics, two with the direction. HBM bytes: W once per token tile
(``ceil(N / tokens) V H b``), ``N H b`` of hidden states, ``4 N H`` written for ``E``.

Tails are static: the last vocabulary step works on ``vocab_size mod tile`` columns rounded up to whole lanes; only the
columns within that last lane group are masked. Nothing is padded in HBM.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from logitless import compat
from logitless.head.pallas_tpu_tiles import LANES, Spec
from logitless.stats import NEG_INF, RowSums
from logitless.transform import forward, slope

LOW = -1e30
"""Start of the running maximum: finite, so that no difference of two maxima is ``inf - inf``."""

LOG_ZERO = -200.0
"""exp of anything below is 0 in float32; clamping there keeps ``0 * -inf`` out at one operation per element."""

SUMS = 8
"""Columns of the output of per-token sums: m, S, A, Q, z_y, x_y, and two unused."""


def dot(a: Array, b: Array, contract: tuple[int, int]) -> Array:
    """Matmul with float32 accumulation; float32 operands in full precision."""
    return jax.lax.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), ((), ())),
        preferred_element_type=jnp.float32,
        precision=jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None,
    )


def raw_logits(spec: Spec, h: Array, w: Array, bias: Array | None) -> Array:
    """``x [tokens, width]`` as float32 numbers, rounded to ``logits_dtype``."""
    x = dot(h, w, (1, 1 if spec.layout == "vh" else 0))
    if bias is not None:
        x = x + bias
    return x if spec.logits_dtype == jnp.float32 else x.astype(spec.logits_dtype).astype(jnp.float32)


def head_tile(spec: Spec, w_ref: Any, width: int) -> Array:
    """The first ``width`` columns of the vocabulary in the block of the head."""
    if width == spec.tiles.vocab:
        return w_ref[...]
    return w_ref[:width, :] if spec.layout == "vh" else w_ref[:, :width]


def clear_outside(spec: Spec, w_ref: Any, width: int) -> None:
    """Zero the columns of the last block beyond ``vocab_size``: what lies there is not ours, and 0 * NaN is NaN."""
    axis = 0 if spec.layout == "vh" else 1
    w = head_tile(spec, w_ref, width)
    kept = jax.lax.broadcasted_iota(jnp.int32, w.shape, axis) < spec.tail
    cleared = jnp.where(kept, w, jnp.zeros((), w.dtype))
    if spec.layout == "vh":
        w_ref[:width, :] = cleared
    else:
        w_ref[:, :width] = cleared


def clear_dead(ref: Any, axis: int, kept: Any) -> None:
    """Zero the tokens of a block from ``kept`` on: dead ones may hold anything, and a block may end after the array."""
    inside = jax.lax.broadcasted_iota(jnp.int32, ref.shape, axis) < kept
    ref[...] = jnp.where(inside, ref[...], jnp.zeros((), ref.dtype))


def _absorb(sums: RowSums, z: Array, is_target: Array) -> tuple[RowSums, Array, Array, Array]:
    """``sums [T, 1]`` with the columns of ``z [T, C]`` taken in; also ``exp(z - m)``, the factor on what was there, and
    ``z - m``, ``-inf`` at the target.

    The same sums as ``merge(sums, row_sums(z, is_target))``, relative to the new maximum at once, so that the
    exponentials serve the expected head row too.
    """
    others = jnp.where(is_target, NEG_INF, z)
    m = jnp.maximum(sums.maximum, jnp.max(others, axis=1, keepdims=True))
    shifted = others - m
    e = jnp.exp(shifted)
    step = sums.maximum - m
    a = jnp.exp(step)

    def total(x: Array) -> Array:
        return jnp.sum(x, axis=1, keepdims=True)

    absorbed = RowSums(
        maximum=m,
        total=a * sums.total + total(e),
        centred=a * (sums.centred + step * sums.total) + total(e * jnp.maximum(shifted, LOG_ZERO)),
        squares=a * a * sums.squares + total(e * e),
        target=sums.target,
    )
    return absorbed, e, a, shifted


def _kernel(
    spec: Spec,
    n: int,
    direction: bool,
    maxima: bool,
    n_live: Any,
    scalars: Any,
    h_ref: Any,
    w_ref: Any,
    y_ref: Any,
    *rest: Any,
) -> None:
    """One (token tile, vocabulary tile) step; scratch carries the sums, the output block carries ``E``."""
    refs = list(rest)
    floor_ref = refs.pop(0) if maxima else None
    t_ref = refs.pop(0) if spec.per_token_temperature else None
    b_ref = refs.pop(0) if spec.has_bias else None
    out_ref = refs.pop(0)
    e_ref = refs.pop(0) if direction else None
    best_ref = refs.pop(0) if maxima else None
    m_ref, s_ref, a_ref, q_ref, x_ref = refs
    i, j = pl.program_id(0), pl.program_id(1)
    live = spec.live(i, n_live)
    transform = spec.transform(scalars, None if t_ref is None else t_ref[...])

    @pl.when(live & (j == 0))
    def _() -> None:
        m_ref[...] = jnp.full_like(m_ref, LOW)
        for ref in (s_ref, a_ref, q_ref, x_ref) if e_ref is None else (s_ref, a_ref, q_ref, x_ref, e_ref):
            ref[...] = jnp.zeros_like(ref)

    if maxima and not (spec.all_live and n % spec.tiles.tokens == 0):
        count = n if spec.all_live else n_live[0]

        @pl.when(live & (j == 0) & ((i + 1) * spec.tiles.tokens > count))
        def _() -> None:  # a column's maximum is over all rows of the block, and a dead one may hold NaN
            clear_dead(h_ref, 0, count - i * spec.tiles.tokens)

    def step(width: int, masked: bool) -> None:
        if masked and direction:
            clear_outside(spec, w_ref, width)
        w = head_tile(spec, w_ref, width)
        x = raw_logits(spec, h_ref[...], w, None if b_ref is None else b_ref[:, :width])
        z = forward(x, transform)
        column = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
        if masked:
            z = jnp.where(column < spec.tail, z, NEG_INF)
        is_target = column == y_ref[...] - j * spec.tiles.vocab
        sums = RowSums(m_ref[...], s_ref[...], a_ref[...], q_ref[...], x_ref[...])
        sums, e, a, shifted = _absorb(sums, z, is_target)
        m_ref[...], s_ref[...], a_ref[...], q_ref[...] = sums.maximum, sums.total, sums.centred, sums.squares
        x_ref[...] += jnp.sum(jnp.where(is_target, x, 0.0), axis=1, keepdims=True)
        if floor_ref is not None and best_ref is not None:
            bound = jnp.maximum(floor_ref[...], sums.maximum + jnp.log(sums.total))
            best_ref[0, :, :width] = jnp.max(shifted + (sums.maximum - bound), axis=0, keepdims=True)
        if e_ref is None:
            return
        if spec.has_softcap:
            # Columns at -inf have no weight; their slope may be 0 * inf.
            bend = slope(x, transform)
            assert bend is not None
            e = jnp.where(e > 0, e * bend, 0.0)
        e_ref[...] = a * e_ref[...] + dot(e.astype(w.dtype), w, (1, 0 if spec.layout == "vh" else 1))

    last = spec.vocab_steps - 1
    masked = spec.tail % LANES != 0 and spec.tail != spec.tiles.vocab
    if spec.tail == spec.tiles.vocab:
        pl.when(live)(functools.partial(step, spec.tiles.vocab, False))
    else:
        if last > 0:
            pl.when(live & (j < last))(functools.partial(step, spec.tiles.vocab, False))
        pl.when(live & (j == last))(functools.partial(step, spec.tail_width, masked))

    @pl.when(live & (j == last))
    def _() -> None:
        m = m_ref[...]
        x_y = x_ref[...]
        columns = (jnp.where(m > LOW, m, NEG_INF), s_ref[...], a_ref[...], q_ref[...], forward(x_y, transform), x_y)
        for k, value in enumerate(columns):
            out_ref[:, k : k + 1] = value


def sweep_inputs(spec: Spec, hidden: int) -> dict[str, pl.BlockSpec]:
    """Block specs shared by the kernels whose grid is (token tile, vocabulary tile)."""
    tokens, vocab = spec.tiles.tokens, spec.tiles.vocab

    def token(i: Any, j: Any, n_live: Any) -> tuple[Any, Any]:
        return spec.readable(i, n_live), 0

    def column(i: Any, j: Any, n_live: Any) -> Any:
        return j if spec.all_live else jnp.where(spec.live(i, n_live), j, spec.vocab_steps - 1)

    def head_vh(i: Any, j: Any, n_live: Any) -> tuple[Any, Any]:
        return column(i, j, n_live), 0

    def head_hv(i: Any, j: Any, n_live: Any) -> tuple[Any, Any]:
        return 0, column(i, j, n_live)

    once = pl.Buffered(
        1
    )  # changes once per token tile: a second buffer would hide a few microseconds and cost megabytes
    return {
        "scalars": pl.BlockSpec(memory_space=pltpu.SMEM),
        "hidden": pl.BlockSpec((tokens, hidden), token, pipeline_mode=once),
        "head": pl.BlockSpec((vocab, hidden), head_vh)
        if spec.layout == "vh"
        else pl.BlockSpec((hidden, vocab), head_hv),
        "token": pl.BlockSpec((tokens, 1), token),
        "sums": pl.BlockSpec((tokens, SUMS), token),
        "bias": pl.BlockSpec((1, vocab), head_hv),
    }


def forward_sweep(
    spec: Spec,
    hidden: Array,
    lm_head: Array,
    targets: Array,
    bias: Array | None,
    temperature: Array | None,
    scalars: Array,
    n_live: Array,
    direction: bool,
    floor: Array | None = None,
) -> tuple[RowSums, Array, Array | None, Array | None]:
    """``(sums [N], raw target logit [N], E [N, H] or None, maxima [token tiles, vocab_size] or None)``; what belongs to
    dead tiles is not written.

    ``hidden [N, H]``, ``targets [N]`` int32, ``bias [V]`` float32, ``temperature [N]``, ``scalars [3]``,
    ``n_live [1]``; ``floor [N]`` asks for the maxima.
    """
    n, width = hidden.shape
    tokens = spec.tiles.tokens
    specs = sweep_inputs(spec, width)
    large = [(name, compat.in_hbm(x, spec.interpret)) for name, x in (("hidden", hidden), ("head", lm_head))]
    operands: list[tuple[str, Array]] = [("scalars", scalars), *large]
    operands.append(("token", targets[:, None]))
    if floor is not None:
        # Rows of the last block beyond the array must not count, whatever would stand there.
        operands.append(("token", jnp.pad(floor, (0, -n % tokens), constant_values=jnp.inf)[:, None]))
    if temperature is not None:
        operands.append(("token", temperature[:, None]))
    if bias is not None:
        operands.append(("bias", bias[None, :]))

    # Dead tiles keep their own output block: on a chip with two cores another core may hold the last live one.
    def own(i: Any, j: Any, n_live: Any) -> tuple[Any, Any]:
        return i, 0

    out_specs = [pl.BlockSpec((tokens, SUMS), own)]
    out_shape = [jax.ShapeDtypeStruct((n, SUMS), jnp.float32)]
    if direction:
        out_specs.append(pl.BlockSpec((tokens, width), own, pipeline_mode=pl.Buffered(1)))
        out_shape.append(compat.hbm_output((n, width), jnp.float32, spec.interpret))
    matmuls = 2 if direction else 1
    passes = pl.cdiv(n, tokens)
    moved = passes * lm_head.nbytes + hidden.nbytes + (4 * n * width if direction else 0)
    if floor is not None:
        out_specs.append(pl.BlockSpec((1, 1, spec.tiles.vocab), lambda i, j, n_live: (i, 0, j)))
        out_shape.append(jax.ShapeDtypeStruct((passes, 1, spec.vocab_size), jnp.float32))
        moved += 4 * passes * spec.vocab_size
    what = "direction" if direction else "stats" if floor is None else "maxima"
    out = pl.pallas_call(
        functools.partial(_kernel, spec, n, direction, floor is not None),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(passes, spec.vocab_steps),
            in_specs=[specs[name] for name, _ in operands],
            out_specs=out_specs,
            scratch_shapes=[pltpu.VMEM((tokens, 1), jnp.float32)] * 5,
        ),
        out_shape=out_shape,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=spec.tiles.vmem_limit
        ),
        cost_estimate=pl.CostEstimate(
            flops=matmuls * 2 * n * width * spec.vocab_size, transcendentals=n * spec.vocab_size, bytes_accessed=moved
        ),
        name=f"head_{what}_t{tokens}_v{spec.tiles.vocab}",
        interpret=spec.interpret,
    )(n_live, *(x for _, x in operands))
    sums = out[0]
    return (
        RowSums(*(sums[:, k] for k in range(5))),
        sums[:, 5],
        out[1] if direction else None,
        None if floor is None else out[-1][:, 0],
    )
