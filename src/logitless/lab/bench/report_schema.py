"""Required keys for each kind of record, and a check for missing keys."""

from __future__ import annotations

import json
import math
from typing import Any

from logitless.lab.tools.result_files import Record, kind_of

TEXT, FLAG, NUMBER, ANY_NUMBER = "a text", "true or false", "a finite number", "a number"
LARGEST = 1e30
"""Larger numbers are no measurements and cannot be drawn."""
DEEPEST = 40


class Either:
    """Objects of two shapes, told apart by a key."""

    def __init__(self, key: str, with_it: dict[str, Any], without: dict[str, Any]):
        self.key, self.with_it, self.without = key, with_it, without


# "key?" may be absent or null; "*" stands for every key; [shape] is a list.
_MEMORY = {"inputs?": NUMBER, "arguments?": NUMBER, "outputs": NUMBER, "temporaries": NUMBER, "from_compile?": FLAG}
_FAILED = {"error": TEXT}
_WHERE = {"device?": TEXT, "platform?": TEXT}
_ARM = {
    **dict.fromkeys(("median_ms", "p10_ms", "p90_ms"), NUMBER),
    **{f"{k}?": NUMBER for k in ("wall_ms", "back_to_back_ms", "tflops", "gb_per_s", "roofline_ms", "roofline_ratio")},
    "mem/compiler?": _MEMORY,
    "mem/device?": _MEMORY,
    "ratios?": {"*": {"*": {"ratio": NUMBER, "low?": NUMBER, "high?": NUMBER}}},
    "environment?": _WHERE,
}
_HEAD = {"level": TEXT, "tokens": NUMBER, "vocab": NUMBER, "hidden?": NUMBER, "dtype": TEXT, "live": NUMBER}
_GATE = {"value?": ANY_NUMBER, "low?": ANY_NUMBER, "high?": ANY_NUMBER, "limit": ANY_NUMBER, "state": TEXT}
_TRAINED = {"metrics?": [{"step?": NUMBER}], "summary?": {}}
_TPU = {"topology": TEXT, "config": {"level": TEXT, "n": NUMBER, "vocab": NUMBER}}
_PLAN: dict[str, Any] = {
    "config": {"model?": TEXT, "chip?": TEXT, "tokens": NUMBER, "hidden": NUMBER, "vocab": NUMBER},
    "plan": {
        "backend": TEXT, "seconds?": NUMBER, "dense_seconds?": NUMBER,
        **dict.fromkeys(("matmuls", "flops", "dense_flops", "peak", "dense_peak", "temporaries"), NUMBER),
        "dense_temporaries": NUMBER,
    },
    "contexts": [{"tokens": NUMBER, "peak": NUMBER, "dense_peak": NUMBER}],
    "longest_context?": {"fused?": NUMBER, "dense?": NUMBER},
}  # fmt: skip
_MESH = {"config": {**_PLAN["config"], "mesh": TEXT, "chip": TEXT}, "mesh": {"peak": NUMBER}}
SCHEMA: dict[str, dict[str, Any] | Either] = {
    "bench": {
        "name": TEXT, "config": _HEAD, "arms": {"*": Either("error", _FAILED, _ARM)}, "busy?": NUMBER,
        "verify?": {"passed": FLAG}, "gates?": {"*": _GATE},
    },
    "gradcheck": {
        "config/name": TEXT, "gates": {"*": {"value": ANY_NUMBER, "limit": ANY_NUMBER, "ok": FLAG}},
    },
    "train": {"step?": NUMBER},
    "ab": {
        "arms": {"*": _TRAINED}, "control?": _TRAINED, "agreement?": {}, "config?": {"ab?": {"parallel?": FLAG}},
        "same_completions?": {"*": {"*": {"mean?": NUMBER, "ratio?": NUMBER, "interval?": [NUMBER]}}},
    },
    "plan": Either("mesh", _MESH, _PLAN),
    "tpu_compile": {**_TPU, "programs": {"*": Either("error", _FAILED, {"peak": NUMBER})}},
    "tpu_cycles": {**_TPU, "operations?": {"*": NUMBER}},
    "record": {},
}  # fmt: skip
_OF_ALL = {
    "environment?": _WHERE,
    "made?": {"command": TEXT, "date": TEXT, "version": TEXT, "python": TEXT, "commit?": TEXT},
}


def is_number(value: object) -> bool:
    """Whether a value is a number that can be drawn."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= LARGEST


def fault(record: Record) -> str | None:
    """The first key that is missing or of another type, with what was expected; ``None`` if there is none."""
    shape = SCHEMA[str(kind_of(record))]
    return _depth(record, DEEPEST) or _fault(record, _OF_ALL, "") or _fault(record, shape, "")


def _depth(value: Any, left: int) -> str | None:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if left == 0:
        return f"its values are nested more than {DEEPEST} deep"
    return next(filter(None, (_depth(v, left - 1) for v in inner)), None)


def _fault(value: Any, shape: Any, at: str) -> str | None:
    if isinstance(shape, Either):
        shape = shape.with_it if isinstance(value, dict) and shape.key in value else shape.without
    if isinstance(shape, str):
        return None if _is(value, shape) else _said(value, at, shape)
    if isinstance(shape, list):
        if not isinstance(value, list):
            return _said(value, at, "a list")
        return next(filter(None, (_fault(v, shape[0], f"{at}[{i}]") for i, v in enumerate(value))), None)
    if not isinstance(value, dict):
        return _said(value, at, "an object")
    for key, inner in shape.items():
        name = key.rstrip("?")
        for k in value if key == "*" else [name]:
            where = f"{at}.{k}" if at else str(k)
            if k not in value and name == key:
                return f"{where} is missing"
            if value.get(k) is None and name != key:
                continue
            if found := _fault(value[k], inner, where):
                return found
    return None


def _is(value: object, kind: str) -> bool:
    if kind == TEXT:
        return isinstance(value, str)
    if kind == FLAG:
        return isinstance(value, bool)
    return is_number(value) or (kind == ANY_NUMBER and isinstance(value, float) and not math.isfinite(value))


def _said(value: object, at: str, expected: str) -> str:
    shown = json.dumps(value)
    return f"{at} is {shown if len(shown) <= 40 else shown[:37] + '...'}, expected {expected}"
