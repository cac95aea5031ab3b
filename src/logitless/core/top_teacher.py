"""A teacher that is known at a few ids of each token alone: a server's answer, or one that was stored.

The divergence compares one number for each id (``logitless.core.divergences``, term by term): with
``outside="tail"`` the probabilities of the ids and, as one more outcome, all other mass, which bounds the divergence
over the vocabulary from below; with ``"renormalised"`` the softmaxes over the ids alone. It is a function of the
student's :class:`~logitless.core.stats.SelectedStats`, and its gradient follows from theirs.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from logitless.core.divergences import divergence_terms
from logitless.core.id_passes import row_ids
from logitless.core.pytree import register, static
from logitless.core.stats import NEG_INF, TokenStats, where_rows
from logitless.core.top_k import TopK
from logitless.objectives.distillation import Outside
from logitless.objectives.loss import Metric, Metrics
from logitless.objectives.objective import Divergence


@register
@dataclasses.dataclass(frozen=True)
class TopTeacher:
    """A teacher's ids and log-probabilities ``[*tokens, K]``, and the divergence from it; a constant."""

    top: TopK
    mix: Array | None  # of jsd
    divergence: Divergence = static("forward_kl")
    outside: Outside = static("tail")

    def _once(self) -> Array:
        """Valid ids, at their first occurrence."""
        flat = self.top.ids.reshape(-1, self.top.ids.shape[-1])
        return row_ids(flat, jnp.iinfo(jnp.int32).max).once.reshape(self.top.ids.shape)

    def _logs(self, live: Array | None) -> tuple[Array, Array, Array]:
        """``(once, log q at the ids, log of the teacher's other mass)``; nothing of a token that is not live."""
        once, log_q = self._once(), self.top.logp
        if live is not None:
            once, log_q = once & live[..., None], where_rows(live, log_q)
        log_q = jnp.where(once, log_q, NEG_INF)
        if self.top.log_rest is not None:
            rest = self.top.log_rest
            return once, log_q, rest if live is None else where_rows(live, rest)
        return once, log_q, _log_rest(log_q)

    def with_divergence(self, stats: TokenStats, live: Array | None) -> TokenStats:
        """The student's statistics with the divergence; 0 where a token has no ids."""
        once, log_q, log_rest = self._logs(live)
        own = stats.selected
        assert own is not None
        log_p = jnp.where(once, own.logp, NEG_INF)
        if self.outside == "tail":
            there = jnp.concatenate([once, jnp.ones_like(once[..., :1])], axis=-1)
            p = jnp.concatenate([log_p, own.log_rest[..., None]], axis=-1)
            q = jnp.concatenate([log_q, log_rest[..., None]], axis=-1)
        else:
            there, p, q = once, _normalised(log_p, once), _normalised(log_q, once)
        # An outcome without mass on either side adds nothing, and no gradient of -inf.
        there &= (p > NEG_INF) | (q > NEG_INF) | jnp.isnan(p)
        p, q = jnp.where(there, p, 0.0), jnp.where(there, q, 0.0)
        terms = jnp.where(there, divergence_terms(self.divergence, p, q, self.mix), 0.0)
        value = jnp.where(jnp.any(once, axis=-1), jnp.sum(terms, axis=-1), 0.0)
        return dataclasses.replace(stats, divergence=value)

    def metrics(self, stats: TokenStats, live: Array) -> Metrics:
        """Mean mass that the student and the teacher give to the ids."""
        stats, (once, log_q, _) = jax.lax.stop_gradient((stats, self._logs(live)))
        assert stats.selected is not None
        tokens = jnp.sum(live, dtype=jnp.float32)
        teacher = jnp.sum(jnp.where(once, jnp.exp(log_q), 0.0), axis=-1)
        masses = {"student_mass": stats.selected.mass, "teacher_mass": teacher}
        return {k: Metric(jnp.sum(where_rows(live, x), dtype=jnp.float32), tokens) for k, x in masses.items()}


def overlap_with(teacher: TopK, own_ids: Array, live: Array) -> Metric:
    """Mean share of the teacher's ids that are among as many of the student's likeliest, ``own_ids [*tokens, K]`` in
    order; 0 where a token has no ids."""
    once = TopTeacher(teacher, None)._once()
    count = jnp.sum(once, axis=-1)
    among = jnp.arange(own_ids.shape[-1]) < count[..., None]  # the student's first ones, as many
    found = jnp.any((teacher.ids[..., :, None] == own_ids[..., None, :]) & among[..., None, :], axis=-1)
    share = jnp.sum(once & found, axis=-1) / jnp.maximum(count, 1)
    return Metric(jnp.sum(where_rows(live, share), dtype=jnp.float32), jnp.sum(live, dtype=jnp.float32))


def _log_rest(log_q: Array) -> Array:
    """``log(1 - sum q)``, ``-inf`` if rounding makes the difference negative. The largest ``q`` is taken from one
    first, by ``expm1``: in a peaked row the difference of two sums would lose the rest."""
    largest = jnp.argmax(log_q, axis=-1, keepdims=True)
    others = jnp.where(jnp.arange(log_q.shape[-1]) == largest, 0.0, jnp.exp(log_q))
    lead = -jnp.expm1(jnp.take_along_axis(log_q, largest, axis=-1))[..., 0]
    return jnp.log(jnp.maximum(lead - jnp.sum(others, axis=-1), 0.0))


def _normalised(log_p: Array, there: Array) -> Array:
    """Log-probabilities over valid ids."""
    some = jnp.any(there & (log_p > NEG_INF), axis=-1, keepdims=True)
    safe = jnp.where(some, jnp.where(there, log_p, NEG_INF), 0.0)
    return jnp.where(there, jnp.where(some, jax.nn.log_softmax(safe, axis=-1), NEG_INF), NEG_INF)
