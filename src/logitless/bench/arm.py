"""One arm of a benchmark, in a process of its own: ``python -m logitless.bench.arm '{...}'`` prints one JSON line.

Inputs are made on the host and put on the device once, so that the allocator's peak is that of the loss and not of the
input generator. The arm is timed after it was compiled and warmed up; with ``peak_only`` it takes one step, for that
peak alone. With ``{"gradcheck": ...}`` it is a gradcheck instead, in a process of its own for the same reason.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from typing import Any

from logitless.tools.child import OUT_OF_MEMORY


def _memory_peak() -> int | None:
    import jax

    stats = jax.devices()[0].memory_stats()
    return None if not stats else stats.get("peak_bytes_in_use")


def _loss(c: dict[str, Any]) -> Callable[..., Any]:
    """``loss(arrays, rest) -> (loss, metrics)`` of the arm; no metrics but those of a sparse backward, so that nothing
    else is timed."""
    from logitless.head.api import linear_grpo_loss
    from logitless.head.sparse_report import SPARSE_METRICS
    from logitless.logits.api import grpo_loss
    from logitless.objectives.objective import Objective
    from logitless.tools import baselines

    objective = Objective().replace(**c["objective"])
    arm = c["arm"]
    if not arm["kernel"]:
        kind = arm["baseline"]
        if c["level"] == "logits":
            return lambda x, rest: (baselines.logits_loss(kind, x[0], objective=objective, **rest), {})
        dtype = c["logits_dtype"]
        return lambda x, rest: (baselines.head_loss(kind, *x, objective=objective, logits_dtype=dtype, **rest), {})
    if c["level"] == "logits":
        options: dict[str, Any] = dict(backend=arm["backend"] or None, bwd_impl=arm["bwd_impl"])
        return lambda x, rest: (grpo_loss(x[0], objective=objective, **rest, **options)[0], {})
    options = dict(
        backend=arm["backend"] or None,
        logits_dtype=c["logits_dtype"],
        head_grad_dtype=c["head_grad_dtype"],
        head_layout="vh",
        sparse_backward=arm.get("sparse_backward", "off"),
    )

    def loss(x: Any, rest: dict[str, Any]) -> Any:
        value, metrics = linear_grpo_loss(x[0], x[1], objective=objective, **rest, **options)
        return value, {k: metrics[k] for k in SPARSE_METRICS if k in metrics}

    return loss


def _inputs(c: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``(differentiable arrays, the rest)`` on the device, made on the host.

    Only the tokens of a realistic policy are sampled on the device, 64 at a time: far less than any loss needs.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    from logitless.bench import realistic
    from logitless.tools import shapes

    rng = np.random.default_rng(c["seed"])
    if c["batch_kind"] == "rl":
        rest = shapes.rl_batch(c["tokens"], c["vocab"], rng, c["rows"])
    else:
        rest = shapes.uniform_batch(c["tokens"], c["vocab"], rng, c["rows"], c["live"])
    dtype, shape = jnp.dtype(c["dtype"]), rest["targets"].shape
    noise = rng.standard_normal(shape)
    if c["inputs"] == "realistic":
        states, head = realistic.realistic_head(c["tokens"], c["hidden"], c["vocab"], c["seed"], dtype)
        x = jax.device_put(states.reshape(*shape, -1)), jax.device_put(head)
        rest["targets"], logp = realistic.on_policy(x[0], x[1], c["seed"], chunk=64)
        rest["old_logp"] = (logp + 0.05 * noise).astype(np.float32)
    else:
        made = shapes.host_arrays(c["level"], c["tokens"], c["hidden"], c["vocab"], dtype, rng, c["rows"])
        x = tuple(jax.device_put(a) for a in made)
        rest["old_logp"] = (-12.0 + 0.3 * noise).astype(np.float32)
    return jax.block_until_ready((x, {k: jax.device_put(v) for k, v in rest.items()}))


def run(c: dict[str, Any]) -> dict[str, Any]:
    """Compile, warm up and time the arm ``c["arm"]`` at the shape of ``c``."""
    import jax
    import jax.numpy as jnp

    from logitless.objectives.metrics import metric_values
    from logitless.tools import timing

    x, rest = _inputs(c)
    step = jax.jit(jax.value_and_grad(_loss(c), has_aux=True))
    compiled = step.lower(x, rest).compile()
    after_compile = _memory_peak()  # a GPU's autotuner allocates, too
    (value, metrics), grads = jax.block_until_ready(compiled(x, rest))
    device = _device_memory(_memory_peak(), after_compile, (x, rest), (value, grads))
    if c.get("peak_only"):
        return dict(device=device)
    result = dict(
        environment=timing.environment(),
        compiler=timing.compiled_memory(compiled),
        device=device,
        loss=float(value),
        grad_norms=[float(jnp.linalg.norm(g.astype(jnp.float32))) for g in grads],
        live=int(jnp.sum(rest["mask"])),
        **{k: None if math.isnan(v) else v for k, v in metric_values(metrics).items()},
    )
    del value, grads
    result["times_ms"] = timing.device_times(compiled, x, rest, repeats=c["repeats"], warmup=c["warmup"])
    return result


def _device_memory(peak: int | None, after_compile: int | None, inputs: Any, outputs: Any) -> dict[str, Any] | None:
    """The allocator's peak after one step, split; ``from_compile`` if it was reached before the step ran."""
    import jax

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


def check(c: dict[str, Any]) -> dict[str, Any]:
    """A gradcheck's record."""
    from logitless.bench import gradcheck

    return gradcheck.run(gradcheck.GradcheckConfig(**c))


def main() -> None:
    try:
        job = json.loads(sys.argv[1])
        result = check(job["gradcheck"]) if "gradcheck" in job else run(job)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        memory = "RESOURCE_EXHAUSTED" in text or "Out of memory" in text or isinstance(error, MemoryError)
        result = dict(error=OUT_OF_MEMORY if memory else text[:2000], kind=type(error).__name__)
    print("\n" + json.dumps(result))


if __name__ == "__main__":
    main()
