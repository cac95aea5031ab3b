"""Exponentials that the forward sweep keeps for dW: whose tokens take three matmuls in the place of four.

The forward sweep (``forward.py``) multiplies the head by ``e_v = exp(k (u_v - m))``, rounded to the head's dtype, where
``m`` is the running maximum of the token's row after that block of the vocabulary. Kept in HBM, they give a token's
part of dW without its logits being made again: with no cotangent of the entropy

    dx_v = e_v f        f = (g_lse - g_logp) p(m) slope,  one number for each token and block (:func:`factors`)

(a softcap's slope is in ``e`` already). The product is rounded to the head's dtype like every dlogit: where that is
bfloat16, ``dx`` is rounded twice, at the exponential and here, and an element of dW has at most 1.5 times the ordinary
error, as the contract has it.

Storage: an array with the layout of dW. A ``[V, H]`` head stores them as ``[V, room]``, tokens along the lanes, an
``[H, V]`` head as ``[room, V]``. With ``room = H`` the array has dW's shape and dtype. The dW sweep reads a vocabulary
tile to its end before writing that tile of dW, so dW overwrites the exponentials, and ``H`` tokens cost no memory. More
tokens, up to all, use an additional array. On a TPU ``memory_budget=`` bounds that array (:func:`tokens_kept`); without
a budget nothing is kept.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from logitless.core import compat
from logitless.core.compat import Index, Ref
from logitless.core.problem import Problem
from logitless.core.pytree import register, static
from logitless.core.stats import StatCotangents, TokenStats, dz_at_target, dz_line, factor, slope, times
from logitless.head.pallas_tpu.operands import Launch, tiles_of
from logitless.head.pallas_tpu.tiles import LANES, Spec, blocks_of


@register
@dataclasses.dataclass(frozen=True)
class Kept:
    """Exponentials kept by a forward sweep for its first tokens."""

    exponentials: Array  # [V, room] of a [V, H] head, [room, V] of an [H, V] one
    tops: Array  # [kept, blocks] float32: m after each block of the vocabulary
    x_y: Array  # [kept] float32: raw logit of the target
    tile: int = static(0)  # columns per block in the forward sweep


LEAST_WIDTH = 896
"""Hidden size from which on exponentials are kept. To write those of a token and to read them again takes as many bytes
as a matmul of that token at a hidden size of about 1100 takes time on a v6e, hidden behind what the two sweeps compute;
at 896 that was simulated."""


def nothing_kept_because(p: Problem) -> str | None:
    """Why no exponentials are kept at a problem's shapes; ``None`` if they can be."""
    width, vocab = p.h.shape[1], p.head.vocab
    if p.head.lora_a is not None:
        return "LoRA's factor has its gradient from logits that are made again"
    forward, dhead = tiles_of("forward", p, True), tiles_of("dhead", p, True)
    if width < LEAST_WIDTH:
        return f"at a hidden size of {width} keeping them costs what it saves"
    block = blocks_of(forward.vocab)[0].stop
    if vocab % LANES or forward.vocab % block or block % dhead.vocab:
        return f"the vocabulary, {vocab}, is not of whole tiles"
    if math.lcm(forward.tokens, dhead.tokens) % LANES or math.lcm(forward.tokens, dhead.tokens) > p.n:
        return f"{p.n} tokens are less than a tile"
    return None


def tokens_kept(p: Problem, memory_budget: int) -> int:
    """How many tokens' exponentials are kept: whole tiles of them, as many as fit into dW's place, or more if
    ``memory_budget`` bytes hold more, the spare tile of two cores among them."""
    if nothing_kept_because(p) is not None:
        return 0
    n, width = p.h.shape
    tile = math.lcm(tiles_of("forward", p, True).tokens, tiles_of("dhead", p, True).tokens)
    bought = memory_budget // (p.head.vocab * jnp.dtype(p.h.dtype).itemsize)
    most = min(max(width, bought), n) // tile * tile
    return most - tile if has_spare(p, most) else most


def has_spare(p: Problem, kept: int) -> bool:
    """Whether the forward sweep needs a token tile in the array of exponentials to write nothing of use to: where two
    cores share its grid and some tokens are not kept, one core's tokens may all be such."""
    return 0 < kept < p.h.shape[0] and compat.tpu_cores() > 1


def room_for(p: Problem, kept: int) -> int:
    """Tokens that the array of exponentials has room for: ``H`` where dW will be written over it."""
    spare = tiles_of("forward", p, True).tokens if has_spare(p, kept) else 0
    return max(kept + spare, p.h.shape[1])


def factors(p: Problem, kept: Kept, stats: TokenStats, g: StatCotangents) -> tuple[Array, Array]:
    """``(f [kept, blocks], dx at the target [kept])`` of the problem's first tokens; zero where ``g`` is.

    ``stats`` and ``g`` are those of all tokens; ``g.entropy`` is zero.
    """
    count = kept.x_y.shape[0]
    p = p.rows(lambda x: x[:count])
    stats, g = jax.tree.map(lambda x: x[:count], (stats, g))
    k = factor(p.transform)
    column = k if k is None or k.ndim == 0 else k[:, None]
    by_row = jax.tree.map(lambda x: x[:, None], (stats, g))
    f = dz_line(kept.tops, by_row[0], by_row[1], column)[0]
    own = dz_at_target(stats, g)
    bend = slope(kept.x_y, p.transform)
    if bend is not None:
        own = jnp.where(own == 0, 0.0, own * bend)
    return f if p.transform.softcap is not None else times(column, f), own


def schedule(k: Launch, moves: Array) -> Array:
    """What dW's sweep is told: ``[how many tokens count, the kept tile to read at each step, whether it has a token
    that moves]``; a kept tile without one is neither read nor worked on."""
    steps = k.spec.kept_steps
    active = jnp.any(moves[: k.spec.kept].reshape(steps, -1), axis=1)
    at = jax.lax.cummax(jnp.where(active, jnp.arange(steps, dtype=jnp.int32), 0))
    return jnp.concatenate([k.n_live, at, active.astype(jnp.int32)])


def has_gradient(n_live: Ref, tile: Index, kept_steps: int) -> Array:
    """Whether a tile of kept tokens has one with a gradient, by what :func:`schedule` says."""
    return n_live[1 + kept_steps + tile] != 0


def block_of_step(spec: Spec) -> pl.BlockSpec:
    """Where a step's exponentials leave to.

    Steps that keep nothing point at an old block, so nothing new is written: a dead tile at its last block, other
    tokens at the last kept block, which is flushed again unchanged. Where two cores share a grid the second may have
    kept nothing, and what it holds is not to be written over the first one's: there they hold the spare tile.
    """
    last, steps = spec.vocab_steps - 1, spec.kept_steps
    other = steps if spec.spare else steps - 1

    def at(i: Index, j: Index, n_live: Ref) -> tuple[Index, Index]:
        row = jnp.where((i < steps) & spec.live(i, n_live), jnp.minimum(j, last), last)
        column = jnp.minimum(i, other)
        return (row, column) if spec.layout == "vh" else (column, row)

    tile = (spec.tiles.vocab, spec.tiles.tokens)
    return pl.BlockSpec(tile if spec.layout == "vh" else tile[::-1], at)
