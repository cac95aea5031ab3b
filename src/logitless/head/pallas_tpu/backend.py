"""The exact head on TPU as a backend: no logits in HBM, four matmuls for loss, dH and dW of an objective of ``logp``,
three for tokens whose exponentials are kept.

    forward    statistics, and with a gradient of the hidden states D = d logp/d hidden from the same sweep (2 matmuls)
    backward   dH = g_logp D, a multiply, whatever the objective;  dW by its own sweep (2 matmuls;
               1 for tokens whose exponentials the forward pass kept, kept_exponentials.py)

Cotangents of entropy or lse (an entropy bonus, a user's loss) need dH by a sweep of its own. Live tokens are gathered
to the front for the forward sweep, tokens with a nonzero cotangent for dW's; the kernels skip what lies behind them.

``D`` is a sum over columns: a shard of the vocabulary scales its own part by the statistics of all, and the parts are
summed in the forward pass instead of dH in the backward pass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from logitless.core.backend import Cost, Counts, Split, Way, refusal
from logitless.core.problem import Gradients, HeadGrads, Loss, Problem, Wanted
from logitless.core.pytree import register
from logitless.core.row_passes import Front
from logitless.core.row_passes import front as rows_front
from logitless.core.stats import RowSums, StatCotangents, TokenStats
from logitless.head.pallas_tpu import kernels, lora, operands
from logitless.head.pallas_tpu.dweight import HeadSums
from logitless.head.pallas_tpu.kept_exponentials import Kept, nothing_kept_because, tokens_kept
from logitless.head.pallas_tpu.tiles import Kernel, whole_lanes
from logitless.head.sparse.gather import without

Part = tuple[Array, Array | None]
"""Of a shard: the target's raw logit ``[N]``, and the expected head row ``[N, H]`` where a direction is wanted."""


_NOT_OVER_A_MESH = (
    "over a mesh a large dW is made and summed in parts, which their array does not fit, and a shard of the vocabulary "
    "is seldom of whole tiles"
)


def front(chosen: Array | None) -> Front:
    """The tokens where ``chosen`` is true first."""
    return rows_front(chosen, by_sort=False)


@register
@dataclasses.dataclass(frozen=True)
class Residual:
    """What the forward sweep leaves for the backward pass."""

    direction: Array | kernels.Terms  # d logp / d hidden [N, H] float32, or its terms, tokens in the order of the sweep
    low: Array | None = None  # [N, r] float32, with LoRA: d logp / d low, of a shard its own columns' part (lora.py)
    kept: Kept | None = None  # exponentials for dW, in the order in which live tokens were swept


def describe(p: Problem) -> dict[str, dict[str, float]]:
    """Tiles, matmuls and HBM bytes of each kernel at a problem's shapes, for ``explain()``."""
    n, width = p.h.shape[0], p.h.shape[1] + whole_lanes(p.head.rank)
    item, vocab = jnp.dtype(p.h.dtype).itemsize, p.head.vocab
    head, rows = vocab * width * item, n * width * item

    kept = min(p.call.kept, n)
    one, exponentials = 2 * n * width * vocab, kept * vocab * item

    def about(kernel: Kernel, keeping: bool = False) -> dict[str, float]:
        t = operands.tiles_of(kernel, p, keeping)
        matmuls: float = 2
        if kernel == "dhead":
            moved = pl.cdiv(vocab, t.vocab) * rows * (1 if p.head.layout == "vh" else 2) + 2 * head
            if keeping:
                moved += exponentials - (head if kept == n else 0)
                matmuls = 2 - kept / n
        else:
            moved = pl.cdiv(n, t.tokens) * head + rows + 4 * n * width + (exponentials if keeping else 0)
        flops = round(matmuls * one)
        return dict(token_tile=t.tokens, vocab_tile=t.vocab, matmuls=matmuls, flops=flops, hbm_bytes=moved)

    both, stats = about("forward", kept > 0), about("forward")
    stats = dict(stats, matmuls=1, flops=one, hbm_bytes=stats["hbm_bytes"] - 4 * n * width)
    found = {
        "token_stats": stats,
        "token_stats_and_direction": both,
        "dhidden": about("dhidden"),
        "dhead": about("dhead", kept > 0),
    }
    if p.head.rank:  # logits again, and in place of dW the outer factor's gradient, in float32
        lanes, dhead = whole_lanes(p.head.rank), about("dhead")
        moved = dhead["hbm_bytes"] - head + 4 * vocab * lanes
        found["dhead_of_lora"] = dict(dhead, matmuls=1, flops=one + 2 * n * lanes * vocab, hbm_bytes=moved)
    return found


def cost_of(p: Problem, used: tuple[str, ...], way: str = "", counts: Counts | None = None) -> Cost:
    """The cost of a call that runs the kernels ``used``, by their names in :func:`describe`."""
    about = describe(p)
    matmuls = "" if counts is None else "{:.3g} ({} with a frozen head, {} without a gradient)".format(*counts)
    tiles = {k: f"{about[k]['token_tile']}x{about[k]['vocab_tile']}" for k in used}
    moved = ", ".join(f"{k} {about[k]['hbm_bytes']:,} B" for k in used)
    return Cost(
        way, matmuls, moved, {**tiles, "layout": p.head.layout}, counts,
        sweep=int(about[used[0]]["token_tile"]), stored="nothing",
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class PallasTpu:
    """Statistics, direction, dH and dW by the kernels of this package."""

    name: ClassVar[str] = "pallas_tpu"
    kernels: ClassVar[str | None] = "tpu"
    in_forward: ClassVar[bool] = False
    head_in_parts: ClassVar[bool] = True

    def supports(self, p: Problem, split: Split) -> str | None:
        """bfloat16 or float32 alike in hidden states and head, a hidden size of whole lanes."""
        if p.teacher is not None:
            return "it has no kernel for a second distribution"
        return refusal(operands.check, p)

    def describe(self, p: Problem, way: Way) -> Cost:
        """Four matmuls for an objective of ``logp``, three for tokens whose exponentials are kept; five with an entropy
        bonus."""
        if way.entropy:
            words = "statistics, then dH and dW by sweeps of their own (an entropy bonus has a gradient too)"
            return _with_lora(p, cost_of(p, ("token_stats", "dhidden", "dhead"), words, (5, 3, 1)))
        words = "flash: the forward sweep carries d logp/d hidden, dW has a sweep of its own"
        kept, used = p.call.kept, ("token_stats_and_direction", "dhead")
        if kept:
            size = kept * p.head.vocab * jnp.dtype(p.h.dtype).itemsize
            where = "where dW will stand" if kept <= p.h.shape[1] else f"{size:,} B"
            words += f"; for it the exponentials of {kept} of {p.n} tokens are kept ({where}), which saves a matmul"
        elif p.call.memory_budget is not None:
            words += f"; no exponentials are kept for it: {nothing_kept_because(p) or _NOT_OVER_A_MESH}"
        return _with_lora(p, cost_of(p, used, words, (4 - kept / p.n, 2, 1)))

    def tokens_kept(self, p: Problem) -> int:
        """How many tokens' exponentials the forward pass keeps, if the head has a gradient."""
        return 0 if p.call.memory_budget is None or not p.call.logp_only else tokens_kept(p, p.call.memory_budget)

    def statistics(self, p: Problem, loss: Loss | None = None) -> tuple[TokenStats, None]:
        """One matmul per live token."""
        f = front(p.live)
        return jax.tree.map(f.put_back, kernels.token_stats(f.problem(p), f.count)), None

    def forward(self, p: Problem, want: Wanted) -> tuple[TokenStats, None, Residual | None]:
        """The residual is d logp / d hidden ``[N, H]``, where only ``logp``'s cotangent is expected: two matmuls. With
        a gradient of the head, exponentials of the first tokens are kept, too."""
        if not self._carries_direction(p, want):
            return self.statistics(p)[0], None, None
        f, keep = front(p.live), p.call.kept if want.weight else 0
        if p.head.rank:
            found = kernels.token_stats_and_direction(f.problem(p), f.count)[:2]
            stats, both = jax.tree.map(f.put_back, found)
            return stats, None, Residual(*both)
        stats, terms, kept = kernels.token_stats_and_terms(kernels.in_order(f, p), f.count, keep=keep)
        return jax.tree.map(f.put_back, stats), None, Residual(terms, None, kept)

    def backward(
        self, p: Problem, want: Wanted, out: TokenStats, g: StatCotangents, residual: Residual | None, only_logp: bool
    ) -> Gradients:
        """dH from the direction if only ``logp`` has a cotangent, else by a sweep (two matmuls); dW and dbias by one
        (two, one without dW, and one for tokens whose exponentials were kept). With LoRA the outer factor's gradient
        comes from the dW sweep, and the inner factor's from dlow, computed with dH."""
        g = g if p.live is None else without(g, ~p.live)
        dh = low = kept = None
        head = HeadSums(None, None)
        by_sweep = want.hidden or want.lora
        if only_logp and residual is not None:
            kept, by_sweep = residual.kept, False

            def times_g(d: Array) -> Array:
                return jnp.where((g.logp != 0)[:, None], g.logp[:, None] * d, 0.0)

            if want.hidden:
                # dH before dW: then dH's inputs are dead during dW.
                rounded: jnp.dtype = jnp.dtype(jnp.float32) if p.call.partial_hidden else p.h.dtype
                if isinstance(residual.direction, kernels.Terms):
                    f = front(p.live)
                    dh = f.put_back(residual.direction.times(p, f.take(g.logp), rounded))
                else:
                    dh = times_g(residual.direction).astype(rounded)
                dh, g = lax.optimization_barrier((dh, g))
            low = times_g(residual.low) if want.lora and residual.low is not None else None
        if kept is not None and want.weight:
            head = self._dhead_of_kept(p, out, g, kept)
        elif by_sweep or want.weight or want.bias or want.lora:
            f = front(g.any_nonzero())
            part = kernels.hidden_in_order(f, p)
            if by_sweep:
                dh, low = jax.tree.map(f.put_back, kernels.dhidden(part, f.count, out, g, order=f.order))
            if want.weight or want.bias or want.lora:
                head = kernels.dhead(part, f.count, out, g, weight=want.weight, order=f.order)
        if not want.hidden:
            dh = None
        inner = lora.dinner(p, low) if want.lora and low is not None else None
        return Gradients(
            dh if dh is None or p.call.partial_hidden else dh.astype(p.h.dtype), head_grads(p, want, head, inner)
        )

    def gradients_in_forward(self, p: Problem, want: Wanted, loss: Loss) -> tuple[TokenStats, None, Gradients]:
        """:meth:`forward`, then :meth:`backward`."""
        out, _, residual = self.forward(p, want)
        g = live_cotangents(p, loss, out)
        return out, None, self.backward(p, want, out, g, residual, p.call.logp_only)

    def _dhead_of_kept(self, p: Problem, out: TokenStats, g: StatCotangents, kept: Kept) -> HeadSums:
        """dW and dbias, with kept exponentials for the first tokens: those tokens come first in the order of the
        forward sweep, the others follow in the order of the backward pass, tokens with a gradient first."""
        count, moves = kept.x_y.shape[0], g.any_nonzero()
        first = jnp.arange(p.n) if p.live is None else front(p.live).order
        assert first is not None
        if count == p.n and p.live is None:
            return kernels.dhead_of_kept(p, None, out, g, kept)
        rest = front(moves[first[count:]])
        order = jnp.concatenate([first[:count], rest.take(first[count:])])
        assert rest.count is not None
        f = Front(order, rest.count + count)
        part = kernels.in_order(f, p)
        if p.live is not None:  # a dead token among the kept adds zero if it holds a number
            part = part.with_hidden(jnp.where(f.take(p.live)[:, None], part.h, jnp.zeros((), p.h.dtype)))
        return kernels.dhead_of_kept(part, f.count, jax.tree.map(f.take, out), jax.tree.map(f.take, g), kept)

    # A shard of the vocabulary.

    def sums(self, p: Problem, want: Wanted | None) -> tuple[RowSums, Part]:
        """Sums over the head's columns (one matmul), and the input of :meth:`shard_residual` from the same sweep (one
        more); ``p.targets`` are -1 on other shards. What belongs to dead tokens means nothing."""
        f = front(p.live)
        found = kernels.token_sums(f.problem(p), f.count, self._carries_direction(p, want))
        sums, *part = jax.tree.map(f.put_back, found)
        return sums, tuple(part)

    def shard_residual(
        self, p: Problem, stats: TokenStats, sums: RowSums, part: Part, total: Callable[[Array], Array]
    ) -> Residual | None:
        """d logp / d hidden, a ``total`` over shards, from the statistics of all of them; LoRA's ``low`` belongs to
        this shard; its part of dB is summed over shards with the factor's gradient."""
        x_y, expected = part
        if expected is None:
            return None
        both = kernels.token_direction(p, None, stats, sums, x_y, expected, here=p.targets >= 0)
        if p.live is not None:
            live = p.live[:, None]
            both = jax.tree.map(lambda d: jnp.where(live, d, 0.0), both)
        return Residual(total(both[0]), both[1])

    def _carries_direction(self, p: Problem, want: Wanted | None) -> bool:
        """Whether the forward sweep makes d logp / d hidden, too."""
        return want is not None and (want.hidden or want.lora) and p.call.logp_only


def live_cotangents(p: Problem, loss: Loss, out: TokenStats) -> StatCotangents:
    """Cotangents for live tokens; zero for all others."""
    g = loss.cotangents(out)
    return g if p.live is None else without(g, ~p.live)


def _with_lora(p: Problem, cost: Cost) -> Cost:
    """The cost of a call with LoRA in words."""
    if p.head.lora_a is None or cost.counts is None:
        return cost
    both, frozen, none = cost.counts
    words = f"{cost.way}; LoRA's factors by narrow matmuls beside the wide ones, no merged head"
    matmuls = f"{both:.3g} ({frozen + 1} with LoRA trained and the head frozen, {frozen} with both frozen, "
    return dataclasses.replace(cost, way=words, matmuls=f"{matmuls}{none} without a gradient)")


def head_grads(p: Problem, want: Wanted, made: HeadSums, inner: Array | None) -> HeadGrads:
    """The head's gradients that are wanted, out of a sweep and LoRA's inner factor's: dW as it was made, the others in
    their parameters' dtypes; a part of a sum over devices stays float32."""

    def own_dtype(d: Array | None, like: Array | None) -> Array | None:
        return d if d is None or like is None or p.call.partial_head else d.astype(like.dtype)

    head, outer = p.head, made.outer if want.lora else None
    lora_a, lora_b = (outer, inner) if head.layout == "vh" else (inner, outer)
    return HeadGrads(
        made.weight if want.weight else None,
        own_dtype(made.bias, head.bias) if want.bias else None,
        own_dtype(lora_a, head.lora_a),
        own_dtype(lora_b, head.lora_b),
    )
