"""dH of the fused head on TPU for any cotangents of logp, entropy and lse, with no logits in HBM.

    dhidden   grid (token tile, vocabulary tile):  dH [tokens, H] += dx W, carried in its float32 output block.
              HBM: W once per token tile, hidden states once, 4 N H written.

Two matmuls (``4 N H V`` FLOP): logits are made again, ``dx`` is that of ``dweight.py``.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from logitless.core import compat
from logitless.core.compat import Ref
from logitless.head.pallas_tpu.dweight import TARGET, cotangent_of_logits
from logitless.head.pallas_tpu.operands import (
    ROWS,
    Launch,
    Operands,
    add_head_rows,
    clear_outside,
    column_ids,
    compiler_params,
    outer_bytes,
    over_vocabulary,
    raw_logits,
    sweep_blocks,
)
from logitless.head.pallas_tpu.tiles import SUBLANES, Spec, over_parts, turn_around, zero_rows


def _dhidden_kernel(spec: Spec, n_live: Ref, refs: Operands, out_ref: Ref, token: Ref) -> None:
    i, j = pl.program_id(0), pl.program_id(1)
    live = spec.live(i, n_live)

    @pl.when(live & (j == 0))
    def _() -> None:
        zero_rows(out_ref)
        turn_around(refs.token, token)

    def step(width: int, masked: bool) -> None:
        if masked:
            clear_outside(spec, refs, width)
        work = 2 * spec.tiles.vocab * refs.h.shape[1]
        over_parts(spec.tiles.tokens, work, SUBLANES, lambda part: rows_of(part.rows, width, masked))

    def rows_of(rows: slice | pl.Slice, width: int, masked: bool) -> None:
        x = raw_logits(spec, refs, rows, slice(0, width))
        column = column_ids(x)
        is_target = column == token[rows, TARGET : TARGET + 1].astype(jnp.int32) - j * spec.tiles.vocab
        d = cotangent_of_logits(spec, x, lambda k: token[rows, k : k + 1], is_target, refs.scalars)
        if masked:
            d = jnp.where(column < spec.tail, d, 0.0)
        add_head_rows(spec, refs, out_ref, rows, None, d.astype(refs.weight.dtype), slice(0, width))

    over_vocabulary(spec, live, step)


def dhidden_sweep(k: Launch) -> Array:
    """dH ``[N, H]`` float32, ``[N, H + R]`` with LoRA (``lora.py``); rows of dead tiles are not written."""
    spec, x = k.spec, k.operands
    (n, width), tokens, passes = x.h.shape, spec.tiles.tokens, spec.token_steps
    width += k.rank
    return pl.pallas_call(
        functools.partial(_dhidden_kernel, spec),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(passes, spec.vocab_steps),
            in_specs=[sweep_blocks(k)],
            out_specs=pl.BlockSpec((tokens, width), lambda i, j, n_live: (i, 0), pipeline_mode=pl.Buffered(1)),
            scratch_shapes=[pltpu.VMEM((spec.lanes, ROWS), jnp.float32)],
        ),
        out_shape=compat.hbm_output((n, width), jnp.float32, spec.interpret),
        compiler_params=compiler_params(spec),
        cost_estimate=pl.CostEstimate(
            flops=4 * n * width * spec.vocab_size,
            transcendentals=n * spec.vocab_size,
            bytes_accessed=passes * (x.weight.nbytes + outer_bytes(k)) + x.h.nbytes + 4 * n * width,
        ),
        name=f"head_dhidden_t{tokens}_v{spec.tiles.vocab}",
        interpret=spec.interpret,
    )(k.n_live, x)
