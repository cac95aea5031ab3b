"""What the TPU kernels need: the tiles, matmuls and bytes of those that run, and the arrays beside them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from logitless.core.problem import Head, Problem
from logitless.core.route import Route
from logitless.lab.plan.work import Way, Work


def way(w: Work, route: Route) -> Way:
    """The kernels that run, of which the backend knows tiles and bytes."""
    from logitless.head.pallas_tpu.backend import describe
    from logitless.head.pallas_tpu.kept import room_for

    moves_rows = w.wants_hidden or w.wants_lora  # LoRA's inner factor has its gradient from what stands beside dH
    carries = moves_rows and not route.way_taken.entropy
    keeps = route.static.kept if carries and w.wants_head else 0
    problem = _problem(w, route, keeps)
    about, room = describe(problem), room_for(problem, keeps) if keeps else 0
    used = ["token_stats_and_direction" if carries else "token_stats"]
    used += ["dhidden"] * (moves_rows and not carries)
    used += ["dhead"] if w.wants_head else ["dhead_of_lora"] * w.wants_lora
    tiles = {k: f"{about[k]['token_tile']}x{about[k]['vocab_tile']}" for k in used}
    matmuls = sum(about[k]["matmuls"] for k in used)
    swept = sum(about[k]["flops"] for k in used) / (2 * max(w.live, 1) * w.width * w.vocab)
    outside = w.rank * (1 + w.backward + w.wants_hidden + w.wants_lora) / w.vocab  # low in both passes, dH's part, dB
    return Way(
        matmuls=matmuls,
        moved=sum(about[k]["hbm_bytes"] for k in used),
        passes=0,
        temporaries=_temporaries(w, carries, route.tiles["layout"])
        + (room * w.vocab * w.item if room > w.width else 0),
        tiles=tiles,
        narrow=swept - matmuls + outside if w.rank else 0.0,
    )


def _problem(w: Work, route: Route, keeps: int) -> Problem:
    """A call of these shapes."""
    dtype: Any = "bfloat16" if w.item == 2 else "float32"
    layout = route.tiles["layout"]
    shape = (w.vocab, w.width) if layout == "vh" else (w.width, w.vocab)
    sizes = (shape, (shape[0], w.rank), (w.rank, shape[1]))
    arrays: Any = [jax.ShapeDtypeStruct(s, dtype) if min(s) else None for s in sizes]
    head = Head(arrays[0], None, arrays[1], arrays[2], layout=layout)
    hidden: Any = jax.ShapeDtypeStruct((max(w.live, 1), w.width), dtype)
    return Problem(hidden, head, None, None, call=dataclasses.replace(route.static, kept=keeps))  # type: ignore[arg-type]


def _temporaries(w: Work, carries: bool, layout: str) -> int:
    """Arrays ``[tokens, H]`` beside inputs and outputs, as libtpu 0.0.50 places them.

    The accumulator stands where dH will, or with a mask, which puts its rows back into their places, beside that; of
    16 bits it has a second half. Hidden states are gathered for the sweep of dW, with a mask for the first one. An
    ``[H, V]`` head has the target's rows whole, in two orders, and the hidden states transposed. An entropy bonus has
    dH in float32.
    """
    if w.rank:
        return _temporaries_with_lora(w, carries)
    arrays = 1 if w.masked or w.wants_head else 0
    if w.wants_hidden and not carries:
        return w.tokens * w.width * (8 + w.item)
    if w.wants_hidden:
        second = int(w.item == 2)
        arrays = 2 + second if w.masked else max(second, arrays)
        arrays += 3 if layout == "hv" else 0
    return w.tokens * w.width * w.item * arrays


def _temporaries_with_lora(w: Work, carries: bool) -> int:
    """The same with LoRA, as libtpu 0.0.50 places them: the larger of two times.

    The sweep that makes what stands for dH: its accumulator ``[tokens, H + R]`` and the parts of it. The one that makes
    dW or LoRA's outer factor: that in float32 ``[V, R]``, the direction, hidden states in order, dH. Beside both the
    outer factor in whole lanes.
    """
    lanes = -(-w.rank // 128) * 128
    rows, outer = w.tokens * w.width, w.vocab * lanes
    first = w.tokens * (w.width + lanes) * (8 if carries else 8 + w.item) if w.wants_hidden or w.wants_lora else 0
    last = 4 * outer + rows * (4 + 2 * w.item if carries else w.item) if w.wants_head or w.wants_lora else 0
    return w.item * outer + max(first, last) + 4 * rows * (w.masked and carries)
