"""Is what is about to be timed right? Each way of calling the library, at a small shape, against the reference and
float64 (:mod:`.gradcheck`), in a separate process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from logitless.lab.bench import turns
from logitless.lab.bench.case import Arm, BenchConfig, is_ours
from logitless.lab.bench.gradcheck import GradcheckConfig

NO_LIMIT = 1e9  # a number, since JSON has no infinity
Verified = dict[str, dict[str, Any]]
"""Verifications in a suite, shared by cases."""


def check_of(c: BenchConfig, arm: Arm) -> GradcheckConfig:
    """The gradcheck of an arm's own options."""
    options = dict(arm.options)
    sparse = options.pop("sparse_backward", "off")
    fields: dict[str, Any] = dict(batch=2, tokens=24, hidden=128, vocab=1024)
    chunk = 10  # to have several chunks
    if sparse != "off":
        fields = dict(batch=2, tokens=64, hidden=128, vocab=4096, inputs="realistic", sparse_backward=sparse)
        chunk = 0  # as chosen: a chunk of few rows has few columns, and leaves out more of each row than true ones do
        if sparse != "auto":  # a mass of one's own is no part of the contract: only the mass itself is a gate
            fields |= dict(contract=NO_LIMIT, max_rel_diff_grad=NO_LIMIT)
    if c.level == "head":
        fields |= dict(logits_dtype=arm.logits_dtype, head_grad_dtype=options.pop("head_grad_dtype", "float32"))
        fields |= dict(chunk_size=chunk)
        options.pop("logits_dtype", None)
        options.pop("chunk_size", None)
    objective = {**c.objective, **arm.objective}
    if c.distillation:
        fields |= _divergence({**c.distillation, **arm.objective}, c)
        objective = {}
    elif c.teacher:  # the estimates of the KL and the policy's part are checked; the divergence by cases of its own
        objective = {k: v for k, v in objective.items() if k != "kl"}
    return GradcheckConfig(
        level=c.level,
        backend=options.pop("backend", "auto"),
        call="logprobs" if arm.call == "logprobs" else "loss",
        objective=objective,
        dtype=c.dtype,
        **fields,
        **options,
    )


def _divergence(settings: dict[str, Any], c: BenchConfig) -> dict[str, Any]:
    """Keys of a gradcheck for the settings of a distillation."""
    known = {k: settings[k] for k in ("divergence", "mix") if settings.get(k) is not None}
    return dict(divergence="reverse_kl", teacher=128 * (c.teacher == c.hidden) or 96) | known


def verify(c: BenchConfig, arms: dict[str, Arm], known: Verified, say: Callable[[str], None]) -> dict[str, Any]:
    """``passed`` and the ``gates`` of every arm of this tree's library; arms with the same options share a check."""
    checks: dict[str, tuple[str, GradcheckConfig]] = {}
    for name, arm in arms.items():
        if is_ours(arm):
            one = check_of(c, arm)
            checks.setdefault(repr(one), (name, one))
    todo = {key: check for key, check in checks.items() if key not in known}
    if todo:
        with turns.open_worker() as worker:
            for key, (name, one) in todo.items():
                say(f"verifying {name} at a small shape")
                job = dict(do="gradcheck", config=dataclasses.asdict(one))
                found = worker.ask(job, c.timeout_s)
                if found.get("gone"):
                    return dict(passed=False, gates={}, error=f"{name}: {found['error']}")
                known[key] = found
    out: dict[str, Any] = dict(passed=True, gates={})
    for key, (name, _) in checks.items():
        found = known[key]
        out["passed"] = out["passed"] and found.get("passed", False)
        out["gates"] |= {f"{name}: {k}": g for k, g in found.get("gates", {}).items()}
        if "error" in found:
            out["error"] = f"{name}: {found['error']}"
    return out
