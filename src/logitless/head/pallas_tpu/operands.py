"""What a fused-head TPU kernel is given, out of a problem whose live tokens stand first; and what kernels share.

Pallas hands trees on, so one dataclass serves three times: :class:`Operands` of arrays outside, of ``BlockSpec`` at the
call, of references inside. ``None`` is what a call does not have.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from logitless.core import compat
from logitless.core.compat import Index, Ref
from logitless.core.problem import Problem
from logitless.core.pytree import register
from logitless.head.pallas_tpu import lora
from logitless.head.pallas_tpu.tiles import LANES, Kernel, Part, Spec, Tiles, choose, fill_rows, whole_lanes

LOG_ZERO = -200.0
"""exp of anything below is 0 in float32; clamping there keeps ``0 * -inf`` out at one operation per element."""


@register
@dataclasses.dataclass(frozen=True)
class Operands:
    """What a kernel reads. Numbers per token stand along the lanes, 4 bytes each (a column would be stored 128 times
    larger), but for dhead of an ``[H, V]`` head."""

    scalars: Any  # [4] float32, in SMEM: temperature, softcap, scale, LoRA's scale
    h: Any  # [N, H]
    weight: Any  # [V, H] or [H, V]; None in dhead where every token's exponentials are kept
    bias: Any = None  # [1, V] float32
    token: Any = None  # [ROWS, whole lanes] float32: each token's numbers; dhead's may be [N, ROWS]
    h_t: Any = None  # [H, N], dhead of an [H, V] head
    kept: Any = None  # [V, room] or [room, V], dhead: exponentials that the forward sweep kept
    factors: Any = None  # [tiles, 1, kept] or [kept, tiles] float32, dhead: what they are to be multiplied by
    low: Any = None  # [N, R], with LoRA: the hidden states behind its inner factor, in whole lanes (``lora.py``)
    low_t: Any = None  # [R, N], dhead of an [H, V] head
    outer: Any = None  # [V, R] or [R, V], with LoRA: the factor that meets the vocabulary

    def blocks(self, **specs: pl.BlockSpec) -> Operands:
        """Block specs for the operands in use."""
        names = [f.name for f in dataclasses.fields(self)]
        return Operands(**{name: None if getattr(self, name) is None else specs[name] for name in names})


@dataclasses.dataclass(frozen=True)
class Launch:
    """A kernel's static spec, its operands and the number of tokens that count."""

    spec: Spec
    operands: Operands
    n_live: Array  # [1] int32

    @property
    def live(self) -> Array:
        """``[N]`` bool: the tokens that count."""
        return jnp.arange(self.spec.n) < self.n_live[0]

    @property
    def rank(self) -> int:
        """LoRA's rank in whole lanes; 0 without LoRA."""
        return 0 if self.operands.low is None else self.operands.low.shape[1]

    def reading(self, **more: Array | None) -> Launch:
        """The same with other operands."""
        return dataclasses.replace(self, operands=dataclasses.replace(self.operands, **more))


def tiles_of(kernel: Kernel, p: Problem, keeping: bool = False) -> Tiles:
    """The tiles of a kernel at a problem's shapes."""
    n, width = p.h.shape
    item = jnp.dtype(p.h.dtype).itemsize
    width += whole_lanes(p.head.rank)  # LoRA's factors stand beside the hidden states and the head
    return choose(kernel, n, (p.head.vocab, width), item, p.head.layout, compat.tpu_vmem_bytes(), keeping)


def check(p: Problem) -> None:
    """Raise ``NotImplementedError`` with the reason if the kernels cannot serve a problem (its shapes and dtypes)."""
    (n, width), w, head = p.h.shape, p.head.weight, p.head
    if p.h.dtype != w.dtype or p.h.dtype not in (jnp.float32, jnp.bfloat16):
        raise NotImplementedError(
            f"pallas_tpu: hidden states ({p.h.dtype}) and lm_head ({w.dtype}) must both be bfloat16 or both "
            f"float32: a kernel does not cast the head."
        )
    generation = compat.tpu_generation()
    if p.h.dtype == jnp.bfloat16 and generation is not None and generation < 4:
        raise NotImplementedError(f"pallas_tpu: a kernel has no bfloat16 matmul on TPU v{generation}.")
    if jnp.dtype(p.call.logits_dtype) not in (jnp.float32, jnp.bfloat16):
        raise NotImplementedError(f"pallas_tpu: logits_dtype {p.call.logits_dtype} is neither float32 nor bfloat16.")
    if width % LANES:
        raise NotImplementedError(f"pallas_tpu: the hidden size {width} is not a multiple of {LANES}.")
    if w.shape[1 - head.axis] != width:
        raise NotImplementedError(f"pallas_tpu: lm_head {w.shape} is not {head.layout} for a hidden size of {width}.")
    if head.bias is not None and head.bias.shape != (head.vocab,):
        raise NotImplementedError(
            f"pallas_tpu: bias {head.bias.shape} does not match lm_head {w.shape} ({head.layout})."
        )
    if n == 0:
        raise NotImplementedError("pallas_tpu: there are no tokens.")
    if head.lora_a is not None and head.rank == 0:
        raise NotImplementedError("pallas_tpu: LoRA of rank 0.")
    kernels: tuple[Kernel, ...] = ("forward", "dhidden", "dhead")
    for kernel in kernels:
        tiles_of(kernel, p)


def interpreter(interpret: object) -> object:
    """What ``pallas_call`` takes for ``Call.interpret``."""
    return pltpu.InterpretParams() if interpret is True else interpret


def prepare(kernel: Kernel, p: Problem, n_live: Array | int | None, tiles: Tiles | None, **keeping: Any) -> Launch:
    """What every kernel takes of a problem; ``n_live`` tokens count, ``None``: all of them. ``keeping``: of the
    exponentials that are kept, what the spec is told (``kept``, ``spare``, ``kept_tile``)."""
    check(p)
    t, interpret = p.transform, interpreter(p.call.interpret)
    spec = Spec(
        layout=p.head.layout,
        n=p.n,
        vocab=p.head.vocab,
        vocab_size=p.call.vocab_size,
        tiles=tiles or tiles_of(kernel, p, keeping.get("kept", 0) > 0),
        logits_dtype=jnp.dtype(p.call.logits_dtype),
        has_temperature=t.temperature is not None,
        per_token_temperature=t.per_token,
        has_softcap=t.softcap is not None,
        has_scale=t.scale is not None,
        all_live=n_live is None,
        interpret=interpret,
        **keeping,
    )
    numbers = (None if t.per_token else t.temperature, t.softcap, t.scale, p.head.lora_scale)
    low, outer = lora.operands(p) if p.head.rank else (None, None)
    operands = Operands(
        scalars=jnp.stack([jnp.asarray(1.0 if v is None else v, jnp.float32).reshape(()) for v in numbers]),
        h=compat.in_hbm(p.h, interpret),
        weight=compat.in_hbm(p.head.weight, interpret),
        bias=None if p.head.bias is None else p.head.bias.astype(jnp.float32)[None, :],
        token=in_lanes(p.targets, t.temperature if t.per_token else 1.0) if kernel == "forward" else None,
        h_t=compat.in_hbm(p.h.T, interpret) if p.head.layout == "hv" and kernel == "dhead" else None,
        low=low,
        low_t=low.T if low is not None and p.head.layout == "hv" and kernel == "dhead" else None,
        outer=outer,
    )
    count = jnp.asarray(p.n if n_live is None else n_live, jnp.int32).reshape((1,))
    return Launch(spec, operands, count)


TARGET_COLUMN, TEMPERATURE, FLOOR = range(3)
"""Per-token outputs of the forward sweep: rows of ``Operands.token``."""

ROWS = 8
"""Number of per-token inputs, some unused: rows of whole tiles."""


def in_lanes(*rows: Any) -> Array:
    """``[ROWS, whole lanes]`` float32 of numbers per token ``[N]``, the first of which says how many there are; a
    column of the vocabulary is exact in float32."""
    n = rows[0].shape[0]
    full = [jnp.broadcast_to(jnp.asarray(row, jnp.float32), (n,)) for row in rows]
    return jnp.pad(jnp.stack(full), ((0, ROWS - len(full)), (0, whole_lanes(n) - n)))


def compiler_params(spec: Spec) -> pltpu.CompilerParams:
    """Compiler parameters for a two-dimensional grid with a sum along the second dimension."""
    return pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=spec.tiles.vmem_limit)


def sweep_blocks(k: Launch) -> Operands:
    """Block specs of the kernels whose grid is (token tile, vocabulary tile)."""
    spec, width = k.spec, k.operands.h.shape[1]
    tokens, vocab = spec.tiles.tokens, spec.tiles.vocab

    def token(i: Index, j: Index, n_live: Ref) -> tuple[Index, Index]:
        return spec.readable(i, n_live), 0

    def column(i: Index, j: Index, n_live: Ref) -> Index:
        j = jnp.where(j < spec.vocab_steps, j, 0) if spec.leaving else j  # the next token tile's first, beforehand
        return j if spec.all_live else jnp.where(spec.live(i, n_live), j, spec.vocab_steps - 1)

    def head_vh(i: Index, j: Index, n_live: Ref) -> tuple[Index, Index]:
        return column(i, j, n_live), 0

    def head_hv(i: Index, j: Index, n_live: Ref) -> tuple[Index, Index]:
        return 0, column(i, j, n_live)

    # Changes once per token tile: a second buffer would hide a few microseconds and cost megabytes.
    once, vh = pl.Buffered(1), spec.layout == "vh"
    return k.operands.blocks(
        scalars=pl.BlockSpec(memory_space=pltpu.SMEM),
        h=pl.BlockSpec((tokens, width), token, pipeline_mode=once),
        weight=pl.BlockSpec((vocab, width), head_vh) if vh else pl.BlockSpec((width, vocab), head_hv),
        bias=pl.BlockSpec((1, vocab), head_hv),
        token=pl.BlockSpec((ROWS, spec.lanes), lambda i, j, n_live: token(i, j, n_live)[::-1]),
        low=pl.BlockSpec((tokens, k.rank), token, pipeline_mode=once),
        outer=pl.BlockSpec((vocab, k.rank), head_vh) if vh else pl.BlockSpec((k.rank, vocab), head_hv),
    )


# -- inside a kernel ---------------------------------------------------------------------------------------------------


def dot(a: Array, b: Array, contract: tuple[int, int]) -> Array:
    """Matmul with float32 accumulation; float32 operands in full precision.

    The precision is always said: ``None`` takes up ``jax_default_matmul_precision``, and no kernel lowers a 16-bit
    matmul of another precision than the default. A single-row ``b`` is repeated: Mosaic lowers no 16-bit matmul whose
    result is one column.
    """
    if contract[1] == 1 and b.shape[0] == 1:
        return dot(a, jnp.broadcast_to(b, (8, b.shape[1])), contract)[:, :1]
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def rounded(spec: Spec, x: Array) -> Array:
    """Logits as float32 numbers, rounded to ``logits_dtype``."""
    return x if spec.logits_dtype == jnp.float32 else x.astype(spec.logits_dtype).astype(jnp.float32)


def raw_logits(spec: Spec, refs: Operands, rows: Any, columns: slice) -> Array:
    """Logits ``x [rows, columns]`` for ``rows`` of a token tile and some vocabulary columns."""
    x = dot(refs.h[rows, :], some_columns(spec, refs.weight, columns), (1, 1 - spec.axis))
    if refs.low is not None:
        outer = some_columns(spec, refs.outer, columns)
        x = x + refs.scalars[3] * dot(refs.low[rows, :], outer, (1, 1 - spec.axis))
    if refs.bias is not None:
        x = x + refs.bias[:, columns]
    return rounded(spec, x)


def some_columns(spec: Spec, w_ref: Ref, columns: slice) -> Array:
    """Some columns of the vocabulary in the block of the head, or of LoRA's outer factor."""
    if columns == slice(0, spec.tiles.vocab):
        return w_ref[...]
    return w_ref[columns, :] if spec.layout == "vh" else w_ref[:, columns]


def clear_outside(spec: Spec, refs: Operands, width: int) -> None:
    """Zero the columns of the last block beyond ``vocab_size``: what lies there is not ours, and 0 * NaN is NaN."""
    for ref in (refs.weight,) if refs.outer is None else (refs.weight, refs.outer):
        w = some_columns(spec, ref, slice(0, width))
        kept = lax.broadcasted_iota(jnp.int32, w.shape, spec.axis) < spec.tail
        cleared = jnp.where(kept, w, jnp.zeros((), w.dtype))
        if spec.layout == "vh":
            ref[:width, :] = cleared
        else:
            ref[:, :width] = cleared


def add_head_rows(
    spec: Spec, refs: Operands, total: Ref, tokens: slice | pl.Slice, before: Array | None, d: Array, columns: slice
) -> None:
    """``total [tokens, H + R] = before total + d [W, outer]`` for a tile's ``tokens`` and some of its columns;
    ``before [tokens, 1]``, ``None``: 1."""

    def add(at: slice, rows: Array) -> None:
        old = total[tokens, at]
        total[tokens, at] = (old if before is None else before * old) + dot(d, rows, (1, spec.axis))

    width, w = refs.h.shape[1], some_columns(spec, refs.weight, columns)
    if refs.outer is None:
        add(slice(None), w)
        return
    add(slice(0, width), w)
    add(slice(width, None), some_columns(spec, refs.outer, columns))


def outer_bytes(k: Launch) -> int:
    """Of LoRA's outer factor."""
    return 0 if k.operands.outer is None else k.operands.outer.nbytes


def clear_dead(ref: Ref, axis: int, kept: Any) -> None:
    """Zero the tokens of a block from ``kept`` on: dead ones may hold anything, and a block may end after the array."""

    def cleared(part: Part) -> Array:
        first = part.first if axis == 0 else 0
        inside = lax.broadcasted_iota(jnp.int32, (part.size, ref.shape[1]), axis) < kept - first
        return jnp.where(inside, ref[part.rows, :], jnp.zeros((), ref.dtype))

    fill_rows(ref, cleared)


def over_vocabulary(spec: Spec, live: Array | bool, step: Callable[[int, bool], None]) -> None:
    """``step(width, masked)`` at this grid step of a sweep over the vocabulary: whole tiles, and the last, narrower
    one; ``masked`` if it holds columns that do not count."""
    j, last = pl.program_id(1), spec.vocab_steps - 1
    if spec.tail == spec.tiles.vocab:
        pl.when(live)(lambda: step(spec.tiles.vocab, False))
        return
    if last > 0:
        pl.when(live & (j < last))(lambda: step(spec.tiles.vocab, False))
    pl.when(live & (j == last))(lambda: step(spec.tail_width, spec.tail % LANES != 0))


def column_ids(x: Array, axis: int = 1) -> Array:
    """Column numbers within a tile of logits."""
    return lax.broadcasted_iota(jnp.int32, x.shape, axis)
