"""How many files of the package one call runs through: ``python benchmarks/walk.py`` prints the table of
docs/architecture.md.

``jax.value_and_grad(linear_grpo_loss)`` is traced once to load what it needs and once more under ``sys.monitoring``
(``sys.setprofile`` where Python has no such thing, in several times the time). Left out are ``core/pytree.py``, whose
functions JAX calls to flatten arguments, and ``promotion.py``, a decorator.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import logitless

ROOT = Path(logitless.__file__).parent
CALLS: dict[str, dict[str, Any]] = {
    "chunked": dict(backend="chunked"),
    "chunked, sparse": dict(backend="chunked", sparse_backward="auto"),
    "pallas_tpu": dict(backend="pallas_tpu", interpret=True),
    "pallas_tpu, sparse": dict(backend="pallas_tpu", interpret=True, sparse_backward=2.0**-8),
}


def files_of(**options: Any) -> list[str]:
    """The files whose functions a call runs, in the order of their first call."""
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.standard_normal((2, 8, 128)), jnp.float32)
    lm_head = jnp.asarray(rng.standard_normal((256, 128)), jnp.float32)
    targets = jnp.zeros((2, 8), jnp.int32)

    def loss(hidden: Any, lm_head: Any) -> Any:
        return logitless.linear_grpo_loss(
            hidden, lm_head, targets, advantages=jnp.ones(2), options=logitless.Options(**options)
        )

    def trace() -> None:
        jax.make_jaxpr(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(hidden, lm_head)

    found: dict[str, None] = {}

    def note(code: Any) -> None:
        if code.co_filename.startswith(str(ROOT)):
            found.setdefault(str(Path(code.co_filename).relative_to(ROOT)))

    trace()
    with each_function(note):
        trace()
    return [f for f in found if f not in ("core/pytree.py", "core/promotion.py")]


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
    for name, options in CALLS.items():
        files = files_of(**options)
        lines.append(f"| {name} | {len(files)} | {', '.join(files)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
