"""How much faster, and is it? Ratios of arms that took turns, with 95 % intervals.

The turns of a round are adjacent in time: a drift of the machine (a chip at its power limit moves a matmul by 10 %
between two runs) affects both, and their ratio stays. With ``d_i`` the logarithm of the ratio in round ``i``, the ratio
is ``exp(mean d)`` and its interval ``exp(mean d +- t s / sqrt n)`` with Student's ``t``. Only an interval without one
is a difference; :func:`verdict` has the words.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from logitless.lab.tools.timing import CLOCKS

T_95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""Student's t at 97.5 % for 1, 2, ... degrees of freedom."""
NONE, UNSURE, FASTER, SLOWER, ONE = "no difference", "cannot tell", "faster", "slower", "one round: no interval"
SAME = 0.9, 1.1
"""Bounds for an interval around 1 that counts as no difference."""


def verdict(low: float | None, high: float | None) -> str:
    """What an interval of a time ratio says in words."""
    if low is None or high is None:
        return ONE
    if high < 1 or low > 1:
        return FASTER if high < 1 else SLOWER
    return NONE if SAME[0] <= low and high <= SAME[1] else UNSURE


def ratio(a: Sequence[float], b: Sequence[float]) -> dict[str, Any]:
    """``a / b`` of paired rounds: ``ratio``, ``low``, ``high``, and the verdict in words."""
    d = [math.log(x / y) for x, y in zip(a, b, strict=True)]
    middle = statistics.fmean(d)
    if len(d) == 1:
        return dict(ratio=math.exp(middle), low=None, high=None, verdict=verdict(None, None))
    wide = T_95[min(len(d) - 1, len(T_95)) - 1] * statistics.stdev(d) / math.sqrt(len(d))
    low, high = math.exp(middle - wide), math.exp(middle + wide)
    return dict(ratio=math.exp(middle), low=low, high=high, verdict=verdict(low, high))


def clocks(a: dict[str, Any], b: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Ratios of two rows by every clock that both have, the main one first."""
    return {k: ratio(a["rounds"][k], b["rounds"][k]) for k in CLOCKS if k in a["rounds"] and k in b["rounds"]}


def main_ratio(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """The ratio by the device's clock, or by the host's where the device has none."""
    return next(iter(clocks(a, b).values()))


def shown(r: dict[str, Any]) -> str:
    """``0.912x [0.905, 0.919]``, and the verdict if the interval contains 1."""
    if r["low"] is None:
        return f"{r['ratio']:.3f}x (one round)"
    inside = f"{r['ratio']:.3f}x [{r['low']:.3f}, {r['high']:.3f}]"
    said = verdict(r["low"], r["high"])
    return f"{inside} {said}" if said in (NONE, UNSURE) else inside


# Gates: bars that a case has to meet.

MET, MISSED, OPEN, UNMEASURED = "met", "missed", "undecided", "not measured"
FACTOR, FLOOR = 1.5, 4 * 2.0**-23
"""The contract on gradient rows: times the dense form's own error, plus this relative part."""


def gate(what: str, a: dict[str, Any], b: dict[str, Any], limit: float) -> dict[str, Any]:
    """A bar: ``time`` (a ratio with its interval), ``memory`` (of the compiler's temporaries), ``mib`` (the
    temporaries of ``a``) or ``rows`` (gradient errors of ``a`` in units of what ``b``'s own allow).

    ``undecided`` if the limit is inside the interval: more rounds would tell.
    """
    low = high = None
    if "error" in a or "error" in b:
        return dict(value=None, limit=limit, state=UNMEASURED, ok=False)
    if what == "time":
        r = main_ratio(a, b)
        value, low, high = r["ratio"], r["low"], r["high"]
    elif what == "memory":
        value = a["mem/compiler"]["temporaries"] / max(b["mem/compiler"]["temporaries"], 1)
    elif what == "mib":
        value = a["mem/compiler"]["temporaries"] / 2**20
    else:
        value = max(a["rows"][k] / (FACTOR * b["rows"][k] + FLOOR) for k in ("norm", "max"))
    least, most = (value, value) if low is None or high is None else (low, high)
    state = MET if most <= limit else MISSED if not least <= limit else OPEN
    return dict(value=value, low=low, high=high, limit=limit, state=state, ok=state != MISSED)
