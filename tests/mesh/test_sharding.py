"""Every layout on eight devices against one device: loss, metrics, dH and dW, for plain JAX and for the TPU kernels.

The same compiled programs are searched for collectives: they hold those that docs/sharding.md promises, and no other of
any size.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import flat_calls
from interpreted import by_numpy
from logitless import Objective, Sharding

RTOL = 1e-5
TOKEN = Objective(aggregation="dapo", eps_high=0.28, beta=0.02)
SEQUENCE = Objective(level="sequence", aggregation="grpo", entropy_coef=0.01)
OBJECTIVES = {"token": TOKEN, "sequence": SEQUENCE}


SHAPE, HIDDEN, VOCAB = (4, 8), 128, 64
STATISTICS, DH, DW = (4 * math.prod(n) for n in (SHAPE, (*SHAPE, HIDDEN), (VOCAB, HIDDEN)))
"""Bytes of one float32 statistic of all tokens, of dH and of dW."""


def mesh_of(axes: dict[str, int], explicit: bool = False) -> Mesh:
    kind = AxisType.Explicit if explicit else AxisType.Auto
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes))


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh and what lies where (``head`` in the order [V, H]), and the large collectives of loss and gradients."""

    axes: dict[str, int]
    tokens: P
    head: P = P()
    collectives: tuple[tuple[str, int], ...] = ()
    explicit: bool = False

    def mesh(self) -> Mesh:
        return mesh_of(self.axes, self.explicit)

    def sharding(self) -> Sharding:
        return Sharding(self.mesh(), tokens=self.tokens, head=self.head)


LAYOUTS = {
    "data and sequence, head replicated": Layout({"data": 4, "seq": 2}, P("data", "seq"), P(), (("all-reduce", DW),)),
    "fsdp on the vocabulary": Layout({"fsdp": 8}, P(None, "fsdp"), P("fsdp", None),
        (("all-gather", DW), ("reduce-scatter", DW // 8)), explicit=True),
    "data x fsdp, on the hidden dimension": Layout({"data": 2, "fsdp": 4}, P("data", "fsdp"), P(None, "fsdp"),
        (("all-gather", DW), ("reduce-scatter", DW // 4), ("all-reduce", DW // 4))),
    "vocabulary-parallel": Layout({"tensor": 8}, P(), P("tensor", None), (("all-reduce", DH),)),
    "data x tensor": Layout({"data": 4, "tensor": 2}, P("data"), P("tensor", None),
        (("all-reduce", DH // 4), ("all-reduce", DW // 2)), explicit=True),
    "data x sequence x tensor, fsdp over data": Layout({"data": 2, "seq": 2, "tensor": 2}, P("data", "seq"),
        P(("tensor", "data"), None),
        (("all-gather", DW // 2), ("reduce-scatter", DW // 4), ("all-reduce", DW // 4), ("all-reduce", DH // 4))),
}  # fmt: skip

_BYTES = {"f32": 4, "bf16": 2, "s32": 4, "u32": 4, "pred": 1, "s8": 1, "u8": 1}
_KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast"


def collectives(program: str) -> list[tuple[str, int]]:
    """``(kind, bytes)`` of every array that a collective of a compiled program makes."""
    found = []
    for result, kind in re.findall(rf"= (.*?) ({_KINDS})(?:-start)?\(", program):
        for dtype, shape in re.findall(r"\b([a-z]+\d*)\[([\d,]*)\]", result):
            found.append((kind, _BYTES[dtype] * math.prod(int(d) for d in shape.split(",") if d)))
    return found


def batch(seed: int = 0, shape: tuple[int, int] = SHAPE, columns: int = VOCAB) -> dict[str, Any]:
    """A ragged batch: masked tokens, a sequence without any live one, segments that cross every cut, NaN where dead."""
    rng = np.random.default_rng(seed)
    mask = rng.random(shape) < 0.7
    mask[1] = False  # a device with no live token at all
    h = rng.normal(size=(*shape, HIDDEN)).astype(np.float32)
    h[~mask] = np.nan
    w = (rng.normal(size=(VOCAB, HIDDEN)) / np.sqrt(HIDDEN)).astype(np.float32)
    return {
        "hidden": h,
        "lm_head": w,
        "targets": rng.integers(0, columns, shape).astype(np.int32),
        "mask": mask,
        "advantages": rng.normal(size=shape).astype(np.float32),
        "old_logp": -rng.gamma(4.0, size=shape).astype(np.float32),
        "ref_logp": -rng.gamma(4.0, size=shape).astype(np.float32),
        "segment_ids": np.cumsum(rng.random(shape) < 0.3, axis=1).astype(np.int32),
    }


def loss(h: Any, w: Any, data: dict[str, Any], objective: Objective, **options: Any) -> Any:
    data = dict(data)
    if objective.beta is None:
        del data["ref_logp"]
    return flat_calls.linear_grpo_loss(h, w, data.pop("targets"), objective=objective, **data, **options)


def evaluate(data: dict[str, Any], objective: Objective, layout: Layout, **options: Any) -> Any:
    """``(((loss, metrics), (dH, dW)) on the host, the compiled program)``."""
    data = dict(data)
    h, w = data.pop("hidden"), data.pop("lm_head")
    mesh, options["sharding"] = layout.mesh(), layout.sharding()
    w = jax.device_put(w, NamedSharding(mesh, layout.head))
    h, data = jax.device_put((h, data), NamedSharding(mesh, layout.tokens))
    f = functools.partial(loss, objective=objective, **options)
    return run(jax.value_and_grad(f, argnums=(0, 1), has_aux=True), h, w, data)


def alone(data: dict[str, Any], objective: Objective, **options: Any) -> Any:
    """``((loss, metrics), (dH, dW))`` of one device, interpreted."""
    f = jax.value_and_grad(functools.partial(loss, objective=objective, **options), argnums=(0, 1), has_aux=True)
    rest = {k: v for k, v in data.items() if k not in ("hidden", "lm_head")}
    return by_numpy(f, data["hidden"], data["lm_head"], rest)


def run(f: Callable[..., Any], *args: Any) -> tuple[Any, str]:
    """``(f(*args) on the host, the compiled program)``; compiled quickly, for it runs once."""
    program = jax.jit(f).lower(*args).compile(compiler_options={"xla_backend_optimization_level": 0})
    return jax.device_get(program(*args)), program.as_text()


def assert_same(got: Any, expected: Any, rtol: float = RTOL) -> None:
    """Every array within ``rtol`` of its largest value; a loss or a metric, a sum that may cancel, of 0.1 at least."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert a.shape == b.shape
        scale, error = max(np.max(np.abs(b)), 0.1 if b.ndim == 0 else 1e-6), np.max(np.abs(a - b))
        assert np.all(np.isfinite(b)) and error <= rtol * scale, (jax.tree_util.keystr(path), error, scale)


def _options(backend: str) -> dict[str, Any]:
    return {"backend": backend, "interpret": backend == "pallas_tpu", "vocab_size": COLUMNS, "chunk_size": 3}


COLUMNS = 50
"""A vocabulary that does not divide: of the shards of the padded 64 columns one is cut, and of eight one is empty."""


@functools.cache
def one_device(level: str) -> Any:
    """What every layout and backend has to give."""
    return alone(batch(columns=COLUMNS), OBJECTIVES[level], **_options("chunked"))


def _calls() -> Iterator[Any]:
    """Every layout and level. What a layout does is the same code around every backend, so the kernels are run by the
    layouts that have all there is, coupled or vocabulary-parallel; a loss of tokens does nothing under fully sharded
    weights alone that a coupled one does not do, and a coupled one nothing under cut tokens or a cut vocabulary alone
    that it does not do under both. The others only repeat these."""
    enough = {
        ("pallas_tpu", "token"): ("vocabulary-parallel",),
        ("pallas_tpu", "sequence"): (),
        ("chunked", "token"): ("data and sequence, head replicated", "vocabulary-parallel"),
        ("chunked", "sequence"): LAYOUTS.keys() - {"data and sequence, head replicated", "vocabulary-parallel"},
    }
    for backend, layout, level in itertools.product(["chunked", "pallas_tpu"], LAYOUTS, OBJECTIVES):
        repeats = layout not in enough[backend, level]
        yield pytest.param(backend, layout, level, marks=[pytest.mark.slow] if repeats else [])


@pytest.mark.parametrize("backend, layout, level", _calls())
def test_equals_one_device(backend: str, layout: str, level: str) -> None:
    where = LAYOUTS[layout]
    data = batch(columns=COLUMNS)
    data["lm_head"][COLUMNS:] = 1e3  # what would dominate every softmax if it counted
    got, program = evaluate(data, OBJECTIVES[level], where, **_options(backend))
    assert_same(got, one_device(level))

    found = collectives(program)
    assert sorted(c for c in found if c[1] > 4 * STATISTICS) == sorted(where.collectives)
    if "tensor" in where.axes and level == "token":
        # Shards of the vocabulary exchange a maximum, and four sums in one array.
        own = STATISTICS // math.prod(n for a, n in where.axes.items() if a != "tensor")
        assert [c for c in found if 4 < c[1] <= 4 * STATISTICS] == [("all-reduce", own), ("all-reduce", 4 * own)]
