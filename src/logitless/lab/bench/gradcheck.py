"""``logitless gradcheck``: is the kernel's loss and gradient the reference's, and how far is each from the truth?

Deterministic. Compares a backend with ``reference`` on the same inputs, and both with the float64 oracle where that
fits. Inputs are synthetic, or hidden states and head of a model's forward pass. With ``mesh`` the backend runs over
several devices, and the reference on one; on a CPU the devices are virtual, in a separate process. With ``call:
logprobs`` it is the statistics of ``logprobs`` and ``linear_logprobs``, under random cotangents.

Gates: the loss difference, the gradient difference relative to its norm, no gradient in masked tokens and padded
columns, and (with the oracle) the backend's error at most ``contract`` times the reference's own, in norm and in the
largest element (docs/maths.md). With ``sparse_backward`` also the largest mass that it left out of a row, which must
be within the tolerance.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from logitless.core.chunk_size import platform
from logitless.core.registry import KERNELS
from logitless.head.sparse.active_columns import auto_tolerance
from logitless.lab.bench import gradcheck_runs as runs
from logitless.lab.bench import turns
from logitless.lab.bench.arm_program import SPARSE_METRICS
from logitless.lab.bench.gradcheck_config import DTYPES, GradcheckConfig, axes_of, check, objective_of
from logitless.lab.tools import timing
from logitless.lab.tools.command_config import ConfigError

__all__ = ["GradcheckConfig", "axes_of", "check", "objective_of", "run"]

ORACLE_ELEMENTS = 100_000_000
"""Largest array for the float64 oracle, which keeps a few copies."""
Gates = dict[str, tuple[float, float]]
SIZES: dict[str, Callable[[np.ndarray], Any]] = {
    "norm": np.linalg.norm,
    "max": lambda v: np.max(np.abs(v), initial=0.0),
    "row": lambda v: np.max(np.linalg.norm(v, axis=-1), initial=0.0),
}
"""Relative differences and errors of a gradient."""


def _differences(name: str, a: np.ndarray, b: np.ndarray) -> dict[str, float]:
    gap = np.abs(a - b)
    largest = np.max(np.abs(a), initial=0.0)
    return {
        f"max_abs_diff_{name}": float(gap.max(initial=0.0)),
        f"max_rel_diff_{name}": float(gap.max(initial=0.0) / largest) if largest else 0.0,
        f"mean_abs_diff_{name}": float(gap.mean()),
        f"norm_rel_diff_{name}": float(np.linalg.norm(gap) / (np.linalg.norm(a) or 1.0)),
    }


def stages(c: GradcheckConfig) -> int:
    """How many parts of the work :func:`run` names: inputs, reference, backend, and the oracle where it is asked."""
    return 3 + c.oracle


def run(c: GradcheckConfig, say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Numbers and gates as one flat record; ``passed`` says whether every gate is met."""
    check(c)
    needs = next((where for where, kernel in KERNELS.items() if kernel == c.backend), None)
    if needs is not None and needs != (here := platform()) and not c.interpret:
        raise ConfigError(
            f"backend: {c.backend} runs on a {needs.upper()}, but the default device here is a {here.upper()}; "
            "use auto or chunked, or interpret=true"
        )
    objective = objective_of(c)
    if c.mesh and jax.device_count() < (devices := math.prod(axes_of(c).values())):
        return _on_virtual_devices(c, devices, say)
    say("inputs" if c.inputs != "model" else f"the forward pass of {c.model}")
    x, rest = runs.arrays(c, objective)
    names = ["dlogits"] if c.level == "logits" else ["dhidden", "dlm_head"]
    try:
        say("reference")
        ref = runs.by_backend(c, "reference", objective, x, rest)
        say(c.backend + (f" over {c.mesh}" if c.mesh else ""))
        kernel = runs.by_backend(c, c.backend, objective, x, rest)
    except (NotImplementedError, TypeError, ValueError) as error:
        raise ConfigError(str(error)) from None
    record: dict[str, Any] = dict(timing.environment(), **{f"config/{k}": v for k, v in dataclasses.asdict(c).items()})
    record.update(loss_ref=ref.loss, loss_kernel=kernel.loss, abs_diff_loss=abs(ref.loss - kernel.loss))
    gates: Gates = {"loss": (record["abs_diff_loss"] / max(1.0, abs(ref.loss)), c.max_abs_diff_loss)}
    for name, a, b in zip(names, ref.grads, kernel.grads, strict=True):
        record.update(_differences(name, a, b))
        gates[f"{name} difference"] = (record[f"norm_rel_diff_{name}"], c.max_rel_diff_grad)
    _exact_gates(c, gates, kernel, rest["mask"])
    if c.sparse_backward != "off":
        tolerance = auto_tolerance(DTYPES[c.dtype]) if c.sparse_backward == "auto" else c.sparse_backward
        metrics = kernel.metrics
        record.update({k: None if math.isnan(metrics[k]) else metrics[k] for k in SPARSE_METRICS})
        gates["largest left-out mass"] = (metrics["left_out_mass_max"], tolerance)
    record["oracle"] = "compared" if c.oracle else "not asked for"
    if c.oracle and max(a.size for a in x) > ORACLE_ELEMENTS:
        record["oracle"] = f"left out: more than {ORACLE_ELEMENTS:,} elements"
    elif c.oracle:
        say("float64 oracle")
        true = runs.by_oracle(c, objective, x, rest)
        record["loss_oracle"] = true.loss
        for name, truth, a, b in zip(names, true.grads, ref.grads, kernel.grads, strict=True):
            _contract(record, gates, name, (truth, a, b), x[0].dtype, c)
        _statistics(record, gates, true, ref, kernel, c.contract)
    record["gates"] = {k: dict(value=v, limit=limit, ok=bool(v <= limit)) for k, (v, limit) in gates.items()}
    record["passed"] = all(g["ok"] for g in record["gates"].values())
    return record


def _exact_gates(c: GradcheckConfig, gates: Gates, kernel: runs.Found, mask: np.ndarray) -> None:
    """Gates that must hold bit by bit."""
    if not mask.all():
        gates["gradient of masked tokens"] = (float(np.abs(kernel.grads[0][~mask]).max()), 0.0)
    if c.vocab_size and c.vocab_size < c.vocab:
        padding = kernel.grads[0][..., c.vocab_size :] if c.level == "logits" else kernel.grads[1][c.vocab_size :]
        gates["gradient of padded columns"] = (float(np.abs(padding).max()), 0.0)
    if kernel.loss_alone is not None:
        gates["loss without a gradient: difference"] = (abs(kernel.loss - kernel.loss_alone), 0.0)


def _on_virtual_devices(c: GradcheckConfig, devices: int, say: Callable[[str], None]) -> dict[str, Any]:
    """The same in a fresh process with so many virtual CPU devices; JAX cannot add virtual devices to a running
    process."""
    if jax.default_backend() != "cpu":
        raise ConfigError(f"mesh: {c.mesh} needs {devices} devices, there are {jax.device_count()}")
    say(f"a process with {devices} virtual CPU devices")
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}".strip()
    with turns.open_worker(environment=dict(XLA_FLAGS=flags, JAX_PLATFORMS="cpu")) as worker:
        found = worker.ask(dict(do="gradcheck", config=dataclasses.asdict(c)), c.timeout_s)
    if "error" in found:
        raise ConfigError(found["error"].removeprefix("ConfigError: "))
    return found


def _contract(
    record: dict[str, Any],
    gates: Gates,
    name: str,
    values: tuple[np.ndarray, np.ndarray, np.ndarray],
    dtype: Any,
    c: GradcheckConfig,
) -> None:
    """The backend's error against float64 in units of the reference's: in norm, and the largest. Error per element, or
    per row with a sparse backward: the left-out mass belongs to a row, and may move an element by a unit in the last
    place. ``values``: truth, reference and backend.

    The reference may be lucky, so its error has a floor: two units in the last place of float32 (for a probability and
    for its cotangent), or a quarter of a unit in the gradient's dtype.
    """
    truth, ref, kernel = values
    floor = max(2 * float(jnp.finfo(jnp.float32).eps), float(jnp.finfo(dtype).eps) / 4)
    judged = ("norm", "max" if c.sparse_backward == "off" else "row")
    for what, size in SIZES.items():
        scale = float(size(truth)) or 1.0
        error_ref, error_kernel = (float(size(g - truth)) / scale for g in (ref, kernel))
        record[f"error_{what}_{name}_ref"] = error_ref
        record[f"error_{what}_{name}_kernel"] = error_kernel
        if what in judged:
            gates[f"{name} error / reference's ({what})"] = (error_kernel / max(error_ref, floor), c.contract)


def _statistics(
    record: dict[str, Any], gates: Gates, true: runs.Found, ref: runs.Found, kernel: runs.Found, limit: float
) -> None:
    """The largest error per statistic, relative to the reference's error. The reference's error counts as at least
    eight units in the last place of lse in float32 (for a pair, of the statistic)."""
    for name, truth in true.statistics.items():
        largest = max(float(np.abs(true.statistics.get("lse", truth)).max()), 1.0)
        floor = 8 * float(jnp.finfo(jnp.float32).eps) * largest
        error_ref, error_kernel = (float(np.abs(f.statistics[name] - truth).max()) for f in (ref, kernel))
        record[f"error_{name}_ref"], record[f"error_{name}_kernel"] = error_ref, error_kernel
        gates[f"{name} error / reference's"] = (error_kernel / max(error_ref, floor), limit)
