"""One small batch under many masks, in float64, and how a peer's answer is compared with ours.

Ours is asked twice: the float64 oracle, which a peer that runs in float64 has to meet to the last digits, and the
library in float32. A peer's settings are turned into an objective by ``Objective.from_trl`` and its like alone: what is
compared is what a user of that peer gets who changes the call and keeps the settings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from logitless import Objective, metric_values, oracle
from loss_cases import evaluate

ROWS, WIDTH = 4, 6
FLOAT64, FLOAT32 = 1e-9, 2e-5
"""Largest error allowed, relative to the largest entry."""

_LENGTHS = {"full": (6, 6, 6, 6), "ragged": (6, 3, 1, 5), "one row empty": (6, 0, 2, 5), "nothing": (0, 0, 0, 0)}
MASKS: dict[str, np.ndarray] = {name: np.arange(WIDTH) < np.array(n)[:, None] for name, n in _LENGTHS.items()}
MASKS["holes"] = MASKS["ragged"] & (np.arange(WIDTH) % 3 != 1)  # as a tool's answers make them


@dataclasses.dataclass(frozen=True)
class Batch:
    """Log-probabilities and all that a loss takes; float64 values that float32 holds exactly."""

    logp: np.ndarray
    entropy: np.ndarray
    mask: np.ndarray
    advantages: np.ndarray
    old: np.ndarray | None
    ref: np.ndarray
    rollout: np.ndarray
    weights: np.ndarray

    def replace(self, **changes: Any) -> Batch:
        return dataclasses.replace(self, **changes)


def batch(mask: str = "ragged", seed: int = 0, per_token: bool = False) -> Batch:
    """Ratios from 0.3 to 3, advantages of both signs and a zero."""
    rng = np.random.default_rng(seed)
    shape = ROWS, WIDTH

    def exact(x: np.ndarray) -> np.ndarray:
        return x.astype(np.float32).astype(np.float64)

    logp = exact(-rng.exponential(size=shape))
    advantages = rng.normal(size=shape)
    advantages[3] = 0.0 if per_token else advantages[3]
    return Batch(
        logp=logp,
        entropy=exact(rng.exponential(size=shape)),
        mask=MASKS[mask],
        advantages=exact(advantages if per_token else np.array([1.3, -0.7, -1.1, 0.4])),
        old=exact(logp - 0.5 * rng.normal(size=shape)),
        ref=exact(logp + 0.9 * rng.normal(size=shape)),
        rollout=exact(logp - 0.6 * rng.normal(size=shape)),
        weights=exact(np.exp(0.4 * rng.normal(size=shape))),
    )


@dataclasses.dataclass(frozen=True)
class Answer:
    """A loss with its gradients by log-probability and entropy, and the metrics that were logged."""

    loss: float
    dlogp: np.ndarray
    dentropy: np.ndarray | None = None
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)


def relative(a: Any, b: Any, size: float = 0.0) -> float:
    """The largest difference, relative to the largest entry or to ``size``; NaN agrees with nothing."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert a.shape == b.shape, (a.shape, b.shape)
    scale = max(np.abs(b).max(initial=0.0), size, 1e-3)  # a loss of zero is compared absolutely
    return float(np.abs(a - b).max(initial=0.0) / scale)


def difference(ours: Answer, theirs: Answer) -> float:
    """Of loss and gradients, whichever is larger. A loss near zero is compared by the size of its terms: the derivative
    of a token's term by its log-probability is as large as the term."""
    terms = float(np.abs(theirs.dlogp).sum())
    found = [relative(ours.loss, theirs.loss, terms), relative(ours.dlogp, theirs.dlogp)]
    if theirs.dentropy is not None:
        found.append(relative(ours.dentropy, theirs.dentropy))
    return float(np.max(found))


def inputs_of(b: Batch, **more: Any) -> dict[str, Any]:
    """The arguments of ``policy_loss`` beside statistics and objective."""
    given = {"advantages": b.advantages, "mask": b.mask, "old_logp": b.old, "ref_logp": b.ref}
    return {k: v for k, v in (given | more).items() if v is not None}


def by_oracle(o: Objective, b: Batch, **more: Any) -> Answer:
    loss, dlogp, dentropy = oracle.policy_loss_grad(b.logp, b.entropy, objective=o, **inputs_of(b, **more))
    return Answer(loss, dlogp, dentropy)


def by_library(o: Objective, b: Batch, **more: Any) -> Answer:
    inputs = {k: np.float32(v) if np.ndim(v) and k != "mask" else v for k, v in inputs_of(b, **more).items()}
    got = evaluate(o, b.logp, b.entropy, **inputs)
    return Answer(float(got.loss), got.dlogp, got.dentropy, metric_values(got.metrics))


@dataclasses.dataclass
class Agreement:
    """The largest differences of a settings' batches, for the record."""

    record: Callable[[str, Any], None]
    peer: str
    settings: str
    batches: int = 0
    float64: float = 0.0
    float32: float = 0.0
    metrics: list[str] = dataclasses.field(default_factory=list)
    tolerance: float = FLOAT64

    def check(self, o: Objective, b: Batch, theirs: Answer, names: dict[str, str] | None = None, **more: Any) -> None:
        """Loss and gradients of both of ours against theirs; ``names``: their metric's name to ours."""
        judged = by_oracle(o, b, **more)
        computed = by_library(o, b, **more)
        exact, single = difference(judged, theirs), difference(computed, theirs)
        assert exact <= self.tolerance, f"{self.settings}: the oracle differs by {exact:.1e}: {judged} against {theirs}"
        assert single <= FLOAT32, f"{self.settings}: the library differs by {single:.1e}: {computed} against {theirs}"
        self.batches += 1
        self.float64, self.float32 = max(self.float64, exact), max(self.float32, single)
        for their_name, our_name in (names or {}).items():
            at_token_level = our_name.startswith("clip_fraction_") and our_name.endswith(("_min", "_max"))
            if our_name not in computed.metrics and at_token_level:  # ours has those extremes for sequences alone
                continue
            if our_name == "entropy_coef" and not b.mask.any():  # of nothing: a disagreement of its own (test_trl.py)
                continue
            if their_name not in theirs.metrics:
                continue
            want, got = theirs.metrics[their_name], computed.metrics[our_name]
            want = 0.0 if np.isnan(want) else want  # of nothing
            assert abs(got - want) <= FLOAT32 * max(abs(want), 1.0), (
                f"{self.settings}: {their_name} is {want} there, and {our_name} {got} here"
            )
            if their_name not in self.metrics:
                self.metrics.append(their_name)

    def done(self) -> None:
        fields = {k: getattr(self, k) for k in ("peer", "settings", "batches", "float64", "float32", "metrics")}
        self.record("agreement", fields)


def disagreement(
    record: Callable[[str, Any], None], peer: str, what: str, ours: float, theirs: float, why: str
) -> None:
    """Two numbers that are known to differ; it is an error if they no longer do."""
    assert abs(ours - theirs) > 1e-3 * max(abs(ours), abs(theirs)), f"{what}: {ours} and {theirs} agree by now"
    record("disagreement", {"peer": peer, "what": what, "ours": ours, "theirs": theirs, "why": why})
