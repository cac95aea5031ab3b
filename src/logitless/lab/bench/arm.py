"""What a worker process does for a case: prepare an arm, take a turn with it, and tell its memory.

Inputs are made once and shared by the arms. An arm is timed after it was compiled and had run once. The device's peak
is asked for in a process of its own, whose programs come out of the compilation cache: a GPU's autotuner allocates,
too, and an allocator's peak never falls.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import logitless
from logitless.lab.bench import arm_program, case_arrays
from logitless.lab.bench.case import Arm
from logitless.lab.tools import timing
from logitless.lab.tools.child import OUT_OF_MEMORY


def _memory(key: str) -> int | None:
    stats = jax.devices()[0].memory_stats()
    return None if not stats else stats.get(key)


class Bench:
    """A case's arms in the current process."""

    def __init__(self) -> None:
        self._data = case_arrays.Data()
        self._ready: dict[str, tuple[Any, case_arrays.Inputs]] = {}

    def prepare(self, case: dict[str, Any], name: str, arm: dict[str, Any]) -> dict[str, Any]:
        """Compile the arm and run it once: results, and the compiler's plan for memory."""
        own = Arm(**arm)
        x, rest = self._data.of(case, own.batch)
        compiled, seconds = timing.compile_in_steps(arm_program.program(case, own), x, rest)
        plan = timing.compiled_memory(compiled)
        try:
            out = jax.block_until_ready(compiled(x, rest))
        except Exception as error:
            limit = _memory("bytes_limit")
            if "RESOURCE_EXHAUSTED" not in str(error) or limit is None:
                raise
            needs = plan["arguments"] + plan["outputs"] + plan["temporaries"]
            return dict(error=OUT_OF_MEMORY, needs=needs, limit=limit)
        self._ready[name] = compiled, (x, rest)
        return dict(
            environment=timing.environment(),
            compiler=plan,
            compile_s=seconds,
            has_peaks=_memory("peak_bytes_in_use") is not None,
            live=int(jnp.sum(rest["mask"])),
            entropy=self._data.entropy(case, own.batch),
            **_said(case, own, (x, rest), out),
        )

    def turn(self, case: dict[str, Any], name: str) -> dict[str, Any]:
        """Times of a single turn, by a prepared arm."""
        compiled, inputs = self._ready[name]
        return timing.turn(compiled, *inputs, repeats=case["repeats"], warmup=case["warmup"])

    def peak(self, case: dict[str, Any], arm: dict[str, Any]) -> dict[str, Any]:
        """The allocator's peak of one step, on inputs whose numbers do not matter."""
        own = Arm(**arm)
        x, rest = case_arrays.blank(case, own.batch)
        compiled = arm_program.program(case, own).lower(x, rest).compile()
        after_compile = _memory("peak_bytes_in_use")
        out = jax.block_until_ready(compiled(x, rest))
        return dict(device=_device_memory(_memory("peak_bytes_in_use"), after_compile, (x, rest), out))


def _said(case: dict[str, Any], arm: Arm, inputs: case_arrays.Inputs, out: dict[str, Any]) -> dict[str, Any]:
    """The numbers of an arm's result."""
    said: dict[str, Any] = {}
    if "loss" in out:
        said["loss"] = float(out["loss"])
    if "grads" in out:
        said["grad_norms"] = [float(jnp.linalg.norm(g.astype(jnp.float32))) for g in out["grads"]]
        if case["check_rows"]:
            said["rows"] = row_errors(case, arm, inputs, out["grads"][0])
    values = logitless.metric_values(out.get("metrics", {}))
    return said | {k: None if math.isnan(v) else v for k, v in values.items()}


def row_errors(case: dict[str, Any], arm: Arm, inputs: case_arrays.Inputs, grads: Any) -> dict[str, float]:
    """Errors against float64 of some rows of dlogits at the true shape, relative in norm and in the largest element.

    A token's gradient depends on its own row and on how many tokens are live, so that a few rows are enough.
    """
    (x,), rest = inputs
    objective = logitless.Objective().replace(**{**case["objective"], **arm.objective})
    if objective.aggregation != "dapo" or objective.level != "token":
        raise ValueError("check_rows: only where a token's gradient is its own (aggregation dapo, level token)")
    live = np.asarray(rest["mask"])
    picked = np.random.default_rng(2).permutation(np.argwhere(live))[: case["check_rows"]]
    at = tuple(picked.T)
    advantages = np.broadcast_to(np.asarray(rest["advantages"]).reshape(live.shape[0], -1), live.shape)
    from logitless import oracle

    _, truth = oracle.grpo_loss(
        np.asarray(x[at])[None],
        np.asarray(rest["targets"])[at][None],
        objective=objective,
        advantages=advantages[at][None],
        old_logp=np.asarray(rest["old_logp"])[at][None],
        denominator=float(live.sum()),
    )
    off = np.asarray(grads[at]).astype(np.float64) - truth[0]
    return dict(
        norm=float(np.linalg.norm(off) / np.linalg.norm(truth)), max=float(np.abs(off).max() / np.abs(truth).max())
    )


def _device_memory(peak: int | None, after_compile: int | None, inputs: Any, outputs: Any) -> dict[str, Any] | None:
    """The allocator's peak after one step, split; ``from_compile`` if it was reached before the step ran."""
    if peak is None:
        return None
    size_in, size_out = (sum(a.nbytes for a in jax.tree.leaves(tree)) for tree in (inputs, outputs))
    return dict(
        peak=peak,
        inputs=size_in,
        outputs=size_out,
        temporaries=max(peak - size_in - size_out, 0),
        from_compile=after_compile is not None and peak <= after_compile,
    )


def gradcheck(config: dict[str, Any]) -> dict[str, Any]:
    """A gradcheck's record."""
    from logitless.lab.bench import gradcheck as checks

    return checks.run(checks.GradcheckConfig(**config))


def handlers(peers: bool = False) -> dict[str, Any]:
    """What a worker answers; PyTorch's arms live in workers of their own."""
    if peers:
        from logitless.lab.bench.peers import Peers

        bench: Any = Peers()
        return dict(prepare=bench.prepare, turn=bench.turn)
    bench = Bench()
    return dict(prepare=bench.prepare, turn=bench.turn, peak=bench.peak, gradcheck=gradcheck)
