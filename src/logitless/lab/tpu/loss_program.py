"""The programs that ``logitless tpu`` compiles or simulates: loss and gradients at a named shape, fused or dense."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from logitless.api import grpo_loss, linear_grpo_loss
from logitless.core.options import Head, Options
from logitless.lab.tools import baselines
from logitless.lab.tpu.hlo import collectives_of
from logitless.mesh.sharding import Sharding
from logitless.objectives.objective import Objective


def program(
    form: str,
    level: str,
    n: int,
    hidden: int,
    vocab: int,
    dtype: str = "bfloat16",
    logits_dtype: str = "float32",
    frozen_head: bool = False,
    mesh: Any = None,
    **options: Any,
) -> tuple[Any, tuple[Any, ...]]:
    """``(f, argument shapes)`` of a loss and its gradients over ``n`` tokens; ``form`` is ``fused``, with ``options``
    of the call, ``dense`` (the strongest form) or ``naive``.

    On a mesh with the axes ``data``, ``fsdp`` and ``tensor`` rows are split over the first two, and the head's
    vocabulary over ``tensor`` and ``fsdp``: parts of a hidden dimension that are no multiple of 128 would cost an
    all-reduce of dW in place of the reduce-scatter. The dense form leaves all else to the compiler.
    """
    objective, dense = Objective(aggregation="dapo"), "strong" if form == "dense" else form
    rows = 1 if mesh is None else mesh.shape["data"] * mesh.shape["fsdp"]
    batch, columns = P(("data", "fsdp")), P(("tensor", "fsdp"))

    def s(shape: tuple[int, ...], dtype: Any, spec: Any = batch) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=None if mesh is None else NamedSharding(mesh, spec))

    sharding = None if mesh is None else Sharding(mesh, tokens=batch, head=columns, vocab="tensor")
    rest = (s((rows, n // rows), jnp.int32), s((rows,), jnp.float32), s((rows, n // rows), jnp.float32))

    def over_logits(x: Any, y: Any, a: Any, old: Any) -> Any:
        if form == "fused":
            return grpo_loss(x, y, advantages=a, old_logp=old, objective=objective, sharding=sharding)[0]
        return baselines.logits_loss(dense, x, y, objective=objective, advantages=a, old_logp=old)

    def over_head(h: Any, w: Any, y: Any, a: Any, old: Any) -> Any:
        o: dict[str, Any] = dict(advantages=a, old_logp=old, objective=objective)
        if form == "fused":
            how = Options(logits_dtype=logits_dtype, **options)
            return linear_grpo_loss(h, Head(w, layout="vh"), y, sharding=sharding, options=how, **o)[0]
        return baselines.head_loss(dense, h, w, y, logits_dtype=logits_dtype, **o)

    if level == "logits":
        x = s((rows, n // rows, vocab), dtype, P(("data", "fsdp"), None, "tensor"))
        return jax.value_and_grad(over_logits), (x, *rest)
    gradients = (0,) if frozen_head else (0, 1)
    h, w = s((rows, n // rows, hidden), dtype), s((vocab, hidden), dtype, columns)
    return jax.value_and_grad(over_head, argnums=gradients), (h, w, *rest)


def _parts(axes: dict[str, int]) -> dict[str, set[int]]:
    """Into how many parts tokens and vocabulary may be cut on the way: a chip's own arrays are what its text shows."""
    data, fsdp, tensor = (axes.get(name, 1) for name in ("data", "fsdp", "tensor"))
    return {"n": {1, data * fsdp}, "vocab": {1, tensor, tensor * fsdp}}


def has_logits(hlo: str, tokens: set[int], vocab: set[int]) -> bool:
    """Whether any array of a compiled program is one row of a vocabulary for each token, or the transpose."""
    pairs = [f"{a},{b}" for n in tokens for v in vocab for a, b in ((n, v), (v, n))]
    return re.search(rf"\[(?:1,)?(?:{'|'.join(pairs)})\]", hlo) is not None


def compile_record(topology: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Compile a program and return the record."""
    from logitless.lab.tpu import aot

    arguments = dict(arguments)
    axes = arguments.pop("axes", None)
    where: Any = topology
    if axes:
        where = arguments["mesh"] = aot.mesh(topology, tuple(axes.values()), tuple(axes))
    f, args = program(**arguments)
    compiled = aot.compile_for(where, f, *args)
    n, vocab = ({arguments[key] // count for count in parts} for key, parts in _parts(axes or {}).items())
    searched = compiled.text
    if arguments["level"] == "head" and arguments["hidden"] in n:
        # [hidden, vocabulary], a head or its gradient, would pass for logits: look in a program that tells them apart.
        f, args = program(**dict(arguments, hidden=max(n) + 128))
        searched = aot.compile_for(where, f, *args).text
    sizes = dict(peak=compiled.peak_bytes, arguments=compiled.argument_bytes, outputs=compiled.output_bytes)
    found = dict(logits_in_program=has_logits(searched, n, vocab), collectives=collectives_of(compiled.text))
    return compiled.record() | sizes | found


def main() -> None:
    """In a separate process: ``python -m logitless.lab.tpu.loss_program TOPOLOGY '{...}'`` prints a JSON line."""
    try:
        result = compile_record(sys.argv[1], json.loads(sys.argv[2]))
    except Exception as error:  # the compiler's refusal is the result
        result = dict(error=f"{type(error).__name__}: {str(error).strip()[:1500]}")
    print("\n" + json.dumps(result))


if __name__ == "__main__":
    main()
