"""An exact backend for a call with ``sparse_backward=``: results as without the option, and a report of one dense chunk
without left-out mass.

``route`` takes it where no sparse backward supports a call.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from logitless.core.backend import Around
from logitless.core.problem import Gradients, Loss, Problem, Wanted
from logitless.core.shapes import PyTree
from logitless.core.stats import StatCotangents, TokenStats
from logitless.head.sparse.active_columns import SparseReport, blank_report, dense_report


@dataclasses.dataclass(frozen=True)
class WithDenseReport(Around[Problem, Wanted]):
    """``own``, an exact backend on one device or over a mesh, with the report of a dense backward pass."""

    def statistics(self, p: Problem, loss: Loss | None = None) -> tuple[TokenStats, SparseReport]:
        """A blank report: no gradient is taken."""
        return self.own.statistics(_exact(p), loss)[0], blank_report(p.targets.shape)

    def forward(self, p: Problem, want: Wanted) -> tuple[TokenStats, SparseReport, PyTree]:
        """The residual is the residual of ``own``."""
        out, _, residual = self.own.forward(_exact(p), want)
        return out, _report(p), residual

    def backward(
        self, p: Problem, want: Wanted, out: TokenStats, g: StatCotangents, residual: PyTree, only_logp: bool
    ) -> Gradients:
        return self.own.backward(_exact(p), want, out, g, residual, only_logp)

    def gradients_in_forward(self, p: Problem, want: Wanted, loss: Loss) -> tuple[TokenStats, SparseReport, Gradients]:
        out, _, grads = self.own.gradients_in_forward(_exact(p), want, loss)
        return out, _report(p), grads


def _exact(p: Problem) -> Problem:
    """The problem without a tolerance."""
    return dataclasses.replace(p, tolerance=None)


def _report(p: Problem) -> SparseReport:
    """All live tokens have a gradient, as far as it is known before their cotangents arrive."""
    return dense_report(p.head, jnp.ones(p.targets.shape, bool) if p.live is None else p.live)
