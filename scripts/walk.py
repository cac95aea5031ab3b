"""How many files of the package one call runs through: ``python scripts/walk.py`` prints the table of
docs/architecture.md.

``jax.value_and_grad(linear_grpo_loss)`` is traced once to load what it needs and once more under ``sys.monitoring``
(``sys.setprofile`` where Python has no such thing, in several times the time). A call with a chip is traced as if that
chip were here. Left out are ``core/pytree.py``, whose functions JAX calls to flatten arguments, and ``promotion.py``,
a decorator.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import logitless
from logitless.core.compat import mosaic_gpu_reason
from logitless.lab.plan.chips import CHIPS, as_if_on

ROOT = Path(logitless.__file__).parent
CALLS: dict[str, dict[str, Any]] = {
    "chunked": dict(backend="chunked"),
    "chunked, sparse": dict(backend="chunked", sparse_backward="auto"),
    "pallas_tpu": dict(backend="pallas_tpu", interpret=True),
    "pallas_tpu, sparse": dict(backend="pallas_tpu", interpret=True, sparse_backward=2.0**-8),
    "mosaic_gpu": dict(backend="mosaic_gpu"),
    "mosaic_gpu, sparse": dict(backend="mosaic_gpu", sparse_backward="auto"),
}
"""Options of each call."""
ON = {"mosaic_gpu": ("h200", 4096), "mosaic_gpu, sparse": ("h200", 4096)}
"""The chip that a call is traced for, and its vocabulary: calls that no interpreter serves."""
LEFT_OUT = ("core/pytree.py", "core/promotion.py")


def calls() -> list[str]:
    """The calls that this version of jax can trace."""
    return [call for call in CALLS if call not in ON or mosaic_gpu_reason() is None]


def files_of(call: str) -> list[str]:
    """The files whose functions a call runs, in the order of their first call."""
    chip, vocab = ON.get(call, (None, 256))
    tokens, width, dtype = ((2, 8), 128, jnp.float32) if chip is None else ((2, 512), 1024, jnp.bfloat16)
    shapes = [jax.ShapeDtypeStruct(s, dtype) for s in ((*tokens, width), (vocab, width))]
    targets, options = jnp.zeros(tokens, jnp.int32), logitless.Options(**CALLS[call])

    def loss(hidden: Any, lm_head: Any) -> Any:
        return logitless.linear_grpo_loss(hidden, lm_head, targets, advantages=jnp.ones(2), options=options)

    def trace() -> None:
        with as_if_on(None if chip is None else CHIPS[chip]):
            jax.make_jaxpr(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(*shapes)

    found: dict[str, None] = {}

    def note(code: Any) -> None:
        if code.co_filename.startswith(str(ROOT)):
            found.setdefault(str(Path(code.co_filename).relative_to(ROOT)))

    trace()
    with each_function(note):
        trace()
    return [f for f in found if f not in LEFT_OUT and not f.startswith("lab/")]


@contextlib.contextmanager
def each_function(note: Callable[[Any], None]) -> Iterator[None]:
    """``note(code)`` when a Python function is called for the first time, or each time."""
    if sys.version_info < (3, 12):
        sys.setprofile(lambda frame, event, _: note(frame.f_code) if event == "call" else None)
        try:
            yield
        finally:
            sys.setprofile(None)
        return
    watch = sys.monitoring
    watch.use_tool_id(watch.PROFILER_ID, "walk")

    def first(code: Any, _: int) -> Any:
        note(code)
        return watch.DISABLE

    watch.register_callback(watch.PROFILER_ID, watch.events.PY_START, first)
    watch.set_events(watch.PROFILER_ID, watch.events.PY_START)
    watch.restart_events()
    try:
        yield
    finally:
        watch.set_events(watch.PROFILER_ID, 0)
        watch.free_tool_id(watch.PROFILER_ID)


def table() -> str:
    """The table in Markdown."""
    lines = ["| call | files | in order |", "|---|---|---|"]
    for name in calls():
        files = files_of(name)
        lines.append(f"| {name} | {len(files)} | {', '.join(files)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
