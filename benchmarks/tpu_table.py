"""What each TPU generation makes of each feature, by its real compiler: results/tpu_table.json and docs/tpu.md.

    python benchmarks/tpu_table.py                  (compiles everything anew, 20 minutes on two cores; needs libtpu)
    python benchmarks/tpu_table.py v5p tpu7x        (these generations; the others are kept)
    python benchmarks/tpu_table.py --page           (writes docs/tpu.md from the records)
    python benchmarks/tpu_table.py --routes         (prints what every call would do, without compiling: seconds)

A case is a public call with its options, value and gradients, at a small shape (the last group: at a real one). Its
route is asked of ``explain`` under a mesh of the generation's chips, which is how the call itself decides, and the
program is compiled by libtpu for those chips. Nothing is run.

    compiles    the route is the kernels, and the compiler takes the program; ``without``: why no exponentials are kept
    falls back  the route is ``chunked``, plain JAX; ``why`` is what ``explain`` says
    refused     the call raises before anything is compiled; ``why`` is the error
    fails       the compiler refuses the program: a defect, which tests/plan/test_tpu_table.py does not let pass
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import harness
import logitless
from logitless import Objective, Sharding
from logitless.core.options import grouped
from logitless.lab.tpu import aot

HERE = Path(__file__).resolve()
RESULT, STEP = "tpu_table.json", "tpu_train_step.json"
PAGE = harness.ROOT / "docs" / "tpu.md"
BEGIN, END = "<!-- table: written by benchmarks/tpu_table.py -->\n", "<!-- end of the table -->\n"

GENERATIONS = {
    "v2": "v2:2x2", "v3": "v3:2x2", "v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2",
    "tpu7x": "tpu7x:2x2x1",
}  # fmt: skip
CHIPS = 4
"""Devices of the sharded cases."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A public call and what is given to it."""

    call: str = "linear_grpo_loss"
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    tokens: int = 128
    hidden: int = 256
    vocab: int = 2560
    layout: str = "vh"
    dtype: str = "bfloat16"
    frozen: bool = False  # no gradient of the head
    bias: bool = False
    lora: bool = False
    per_token_temperature: bool = False
    precision: str | None = None  # jax_default_matmul_precision
    sharding: str | None = None  # one of LAYOUTS


LAYOUTS: dict[str, tuple[dict[str, int], Any]] = {
    "data": ({"data": 4}, dict(tokens=P("data"), head=P())),
    "fsdp": ({"fsdp": 4}, dict(tokens=P("fsdp"), head=P("fsdp", None))),
    "fsdp, hidden": ({"fsdp": 4}, dict(tokens=P("fsdp"), head=P(None, "fsdp"))),
    "tensor": ({"tensor": 4}, dict(tokens=P(), head=P("tensor", None))),
    "data x tensor": ({"data": 2, "tensor": 2}, dict(tokens=P("data"), head=P("tensor", None))),
    "logits, data": ({"data": 4}, dict(tokens=P("data"))),
    "logits, tensor": ({"tensor": 4}, dict(tokens=P(), vocab="tensor")),
}

_AUTO = {"sparse_backward": "auto"}
_BUDGET = Case(options={"memory_budget": 1 << 24}, tokens=4096, hidden=1536)
GROUPS: dict[str, dict[str, Case]] = {
    "Calls": {
        "`linear_grpo_loss`": Case(),
        "`linear_logprobs`": Case("linear_logprobs"),
        "`grpo_loss`": Case("grpo_loss"),
        "`logprobs`": Case("logprobs"),
    },
    "Head": {
        "`[H, V]` head": Case(layout="hv"),
        "frozen head": Case(frozen=True),
        "float32": Case(dtype="float32"),
        "float16": Case(dtype="float16"),
        "bias": Case(bias=True),
        "bias, `[H, V]`": Case(bias=True, layout="hv"),
        "LoRA on the head": Case(lora=True),
        "LoRA on the head, `[H, V]`": Case(lora=True, layout="hv"),
        "LoRA, the head frozen": Case(lora=True, frozen=True),
        "hidden size 320 (no whole lanes)": Case(hidden=320),
        "one token": Case(tokens=1),
        "one token, `[H, V]`": Case(tokens=1, layout="hv"),
        "padded vocabulary (`vocab_size=`)": Case(options={"vocab_size": 2500}),
        '`jax_default_matmul_precision="highest"`': Case(precision="highest"),
    },
    "Logits and objective": {
        "bfloat16 logits": Case(options={"logits_dtype": "bfloat16"}),
        "bfloat16 logits, `[H, V]`": Case(options={"logits_dtype": "bfloat16"}, layout="hv"),
        "softcap": Case(options={"softcap": 30.0}),
        "temperature": Case(options={"objective": {"temperature": 0.7}}),
        "temperature per token": Case("linear_logprobs", per_token_temperature=True),
        "entropy bonus": Case(options={"objective": {"entropy_coef": 0.01}}),
        "sequence-level ratio (GSPO)": Case(options={"objective": {"level": "sequence"}}),
    },
    "Sparse backward": {
        '`sparse_backward="auto"`': Case(options=_AUTO),
        "sparse, `linear_logprobs`": Case("linear_logprobs", options=_AUTO),
        "sparse, frozen head": Case(options=_AUTO, frozen=True),
        "sparse, `[H, V]` head": Case(options=_AUTO, layout="hv"),
        "sparse, bfloat16 logits": Case(options={**_AUTO, "logits_dtype": "bfloat16"}),
        "sparse, bias and softcap": Case(options={**_AUTO, "softcap": 30.0}, bias=True),
        "sparse, LoRA on the head": Case(options=_AUTO, lora=True),
        "sparse, LoRA, bfloat16 logits, `[H, V]`": Case(
            options={**_AUTO, "logits_dtype": "bfloat16"}, lora=True, layout="hv"
        ),
        "sparse, tokens over data": Case(options=_AUTO, sharding="data"),
        "sparse, FSDP": Case(options=_AUTO, sharding="fsdp"),
        "sparse, vocabulary-parallel": Case(options=_AUTO, sharding="tensor"),
    },
    "Kept exponentials": {
        "`memory_budget=`": _BUDGET,
        "`memory_budget=`, `[H, V]`": dataclasses.replace(_BUDGET, layout="hv"),
        "`memory_budget=`, `linear_logprobs`": dataclasses.replace(_BUDGET, call="linear_logprobs"),
        "`memory_budget=`, hidden size 256": dataclasses.replace(_BUDGET, hidden=256),
        "`memory_budget=`, LoRA": dataclasses.replace(_BUDGET, lora=True),
        "`memory_budget=`, tokens over data": dataclasses.replace(_BUDGET, sharding="data"),
        "`memory_budget=`, vocabulary-parallel": dataclasses.replace(_BUDGET, sharding="tensor"),
    },
    "Sharding": {
        "tokens over data, head replicated": Case(sharding="data"),
        "FSDP, vocabulary cut": Case(sharding="fsdp"),
        "FSDP, hidden dimension cut": Case(sharding="fsdp, hidden"),
        "vocabulary-parallel": Case(sharding="tensor"),
        "data x vocabulary-parallel": Case(sharding="data x tensor"),
        "vocabulary-parallel, `linear_logprobs`": Case("linear_logprobs", sharding="tensor"),
        "LoRA, tokens over data": Case(lora=True, sharding="data"),
        "LoRA, vocabulary-parallel": Case(lora=True, sharding="tensor"),
        "logits, tokens over data": Case("grpo_loss", sharding="logits, data"),
        "logits, vocabulary-parallel": Case("grpo_loss", sharding="logits, tensor"),
    },
    "Real shapes": {
        "T=8192 H=4096 V=151936": Case(tokens=8192, hidden=4096, vocab=151936),
        "logits T=4096 V=151936": Case("grpo_loss", tokens=4096, vocab=151936),
    },
}
CASES = {name: case for group in GROUPS.values() for name, case in group.items()}


def mesh_of(generation: str, case: Case) -> jax.sharding.Mesh:
    axes = {"chip": 1} if case.sharding is None else LAYOUTS[case.sharding][0]
    return aot.mesh(GENERATIONS[generation], tuple(axes.values()), tuple(axes))


def inputs(case: Case, mesh: jax.sharding.Mesh) -> tuple[Any, list[Any], dict[str, Any], dict[str, Any]]:
    """``(the call, what it is differentiated by, its other arrays, its options)``, as shapes on the mesh."""
    sharding = None if case.sharding is None else Sharding(mesh, **LAYOUTS[case.sharding][1])
    tokens, head, vocab = (P(), P(), None) if sharding is None else (sharding.tokens, sharding.head, sharding.vocab)
    head = P(*(*head, None, None)[:2])
    rows = 1 if case.tokens < CHIPS else CHIPS
    length = case.tokens // rows

    def s(shape: tuple[int, ...], dtype: Any, spec: P | None = None) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P() if spec is None else spec))

    options = dict(case.options, sharding=sharding)
    if "objective" in options:
        options["objective"] = Objective(**options["objective"])
    arrays: dict[str, Any] = {"targets": s((rows, length), jnp.int32, tokens)}
    if case.call.endswith("grpo_loss"):
        arrays["advantages"] = s((rows,), jnp.float32, tokens)
        arrays["old_logp"] = s((rows, length), jnp.float32, tokens)
    if case.per_token_temperature:
        arrays["temperature"] = s((rows, length), jnp.float32, tokens)
    if not case.call.startswith("linear"):
        logits = s((rows, length, case.vocab), case.dtype, P(tokens[0] if len(tokens) else None, None, vocab))
        return getattr(logitless, case.call), [logits], arrays, options
    shape = (case.vocab, case.hidden) if case.layout == "vh" else (case.hidden, case.vocab)
    options["head_layout"] = case.layout
    weight = s(shape, case.dtype, head)
    primals = [s((rows, length, case.hidden), case.dtype, tokens)] + ([] if case.frozen else [weight])
    if case.frozen:
        arrays["lm_head"] = weight
    if case.bias:
        arrays["bias"] = s((case.vocab,), case.dtype, P(head[0 if case.layout == "vh" else 1]))
    if case.lora:
        first = s((shape[0], 16), case.dtype, P(head[0], None))
        arrays["lora"] = (first, s((16, shape[1]), case.dtype, P(None, head[1])))
    return getattr(logitless, case.call), primals, arrays, options


@contextlib.contextmanager
def set_as(case: Case, mesh: Any) -> Any:
    """Under the mesh and with the case's settings."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.set_mesh(mesh))
        if case.precision is not None:
            stack.enter_context(jax.default_matmul_precision(case.precision))
        yield


def by_name(call: Any, first: Any, *flat: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a public call, by name."""
    name = next(iter(inspect.signature(call).parameters))
    return grouped({name: first} | {k: v for part in flat for k, v in part.items()})


def route(generation: str, case: Case) -> dict[str, Any]:
    """What the call would do: ``outcome`` and ``why``."""
    mesh = mesh_of(generation, case)
    call, primals, arrays, options = inputs(case, mesh)
    head = {"lm_head": primals[1]} if len(primals) > 1 else {}
    try:
        with set_as(case, mesh):
            found = logitless.explain(call, **by_name(call, primals[0], head, arrays, options))
    except (NotImplementedError, ValueError, TypeError) as error:
        return {"outcome": "refused", "why": _reason(case, str(error))}
    if found.backend == "pallas_tpu":
        if found.exact_because is not None:
            return {"outcome": "compiles", "exact": found.exact_because}
        nothing = re.search(r"no exponentials are kept for it: ([^;]+)", found.way)
        return {"outcome": "compiles"} if nothing is None else {"outcome": "compiles", "without": nothing[1]}
    return {"outcome": "falls back", "why": _reason(case, found.because)}


def _reason(case: Case, text: str) -> str:
    """The reason itself: which call and backend it is about stands beside it."""
    text = re.sub(rf"^{case.call}: ", "", text)
    return re.sub(r"^backend='pallas_tpu' cannot serve this call: (pallas_tpu: )?", "", text).rstrip(".")


def outcome(generation: str, case: Case) -> dict[str, Any]:
    """The route, and what the compiler says to the program."""
    found = route(generation, case)
    if found["outcome"] == "refused":
        return found
    mesh = mesh_of(generation, case)
    call, primals, arrays, options = inputs(case, mesh)
    trained = {name: arrays.pop(name) for name in ("bias", "lora") if name in arrays}

    def loss(primals: Any, trained: Any, arrays: Any) -> Any:
        head = {"lm_head": primals[1]} if len(primals) > 1 else {}
        out = call(**by_name(call, primals[0], head, trained, arrays, options))
        return out[0] if isinstance(out, tuple) else jnp.sum(out.logp + 0.1 * out.entropy)

    try:
        with set_as(case, mesh):
            done = aot.compile_for(mesh, jax.value_and_grad(loss, (0, 1)), primals, trained, arrays)
    except Exception as error:  # what the compiler says is the result
        return {"outcome": "fails", "why": f"{type(error).__name__}: {str(error).strip()[:600]}"}
    return {**found, "kernels": done.kernels, "peak_bytes": done.peak_bytes}


# -- the page ----------------------------------------------------------------------------------------------------------


def render(record: dict[str, Any], step: dict[str, Any]) -> str:
    """The part of docs/tpu.md between ``BEGIN`` and ``END``."""
    versions = record["versions"]
    lines = [f"From `benchmarks/results/tpu_table.json`: jax {versions['jax']}, libtpu {versions['libtpu']}.", ""]
    notes: dict[str, int] = {}
    names = alike(record)
    for group, cases in GROUPS.items():
        rows = [[name, *(_cell(record["cases"][name].get(g[0]), notes) for g in names)] for name in cases]
        lines += [f"### {group}", "", *harness.table(["", *(", ".join(n) for n in names)], rows)]
    lines += ["### Reasons", "", *(f"{number}. {why}." for why, number in notes.items()), ""]
    return "\n".join([*lines, *_step_lines(step)])


def alike(record: dict[str, Any]) -> list[list[str]]:
    """Generations in groups whose cases all have the same outcome for the same reason."""
    groups: list[tuple[list[Any], list[str]]] = []
    for generation in GENERATIONS:
        found = [record["cases"].get(name, {}).get(generation) or {} for name in CASES]
        answers = [{k: v for k, v in f.items() if k in ("outcome", "why", "exact", "without")} for f in found]
        same = next((names for other, names in groups if other == answers), None)
        if same is None:
            groups.append((answers, [generation]))
        else:
            same.append(generation)
    return [names for _, names in groups]


def _cell(found: dict[str, Any] | None, notes: dict[str, int]) -> str:
    if found is None:
        return "not compiled"
    if found["outcome"] == "compiles":
        for key, words in (("without", "none kept"), ("exact", "exact")):
            if key in found:
                return f"yes, {words} [{notes.setdefault(found[key], len(notes) + 1)}]"
        return "yes"
    number = notes.setdefault(found["why"], len(notes) + 1)
    return f"{found['outcome']} [{number}]"


def _step_lines(step: dict[str, Any]) -> list[str]:
    """The train step's peaks (benchmarks/tpu_train_step.py)."""
    rows = []
    for name, row in step["slices"].items():
        peaks = [row[form]["peak_bytes"] / 1e9 for form in ("fused", "dense")]
        ratio = f"{peaks[0] / peaks[1]:.2f}"
        rows.append([name, *(f"{peak:.2f}" for peak in peaks), ratio, str(row["fused"]["kernels"])])
    columns = ["slice", "fused, GB a chip", "dense loss, GB a chip", "fused / dense", "kernels"]
    head = ["### A whole train step", "", step["what"], "", f"    {step['command']}", ""]
    return [*head, *harness.table(columns, rows)]


def write_page() -> None:
    content = render(harness.read(RESULT), harness.read(STEP))
    PAGE.write_text(harness.between(PAGE.read_text(), BEGIN, END, content))


# -- the command -------------------------------------------------------------------------------------------------------


def compile_all(generation: str, names: list[str]) -> None:
    """Compile and record the cases of a generation, in a process of its own."""
    command = [sys.executable, str(HERE), "--one", generation, json.dumps(names)]
    with subprocess.Popen(command, env={**os.environ, **aot.ENVIRONMENT}, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in filter(lambda line: line.startswith("{"), child.stdout):
            found = json.loads(line)
            record = {"cases": {}} | harness.read(RESULT)
            record["what"] = "what the TPU compiler says to each call, ahead of time; nothing was run"
            record |= {"command": "python benchmarks/tpu_table.py", "versions": aot.versions()}
            record["cases"] = {name: record["cases"].get(name, {}) for name in CASES}
            record["cases"][found.pop("case")][generation] = found
            harness.write(RESULT, record)


def main() -> None:
    p = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    p.add_argument("generations", nargs="*", help=f"some of {', '.join(GENERATIONS)} (default: all)")
    p.add_argument("--page", action="store_true", help="write docs/tpu.md from the records")
    p.add_argument("--routes", action="store_true", help="print every case's route as JSON, without compiling")
    p.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = p.parse_args()
    unknown = [g for g in args.generations if g not in GENERATIONS]
    if unknown:
        p.error(f"{unknown[0]!r} is not known; expected some of {', '.join(GENERATIONS)}")
    if args.one:
        for name in json.loads(args.one[1]):
            found = dict(case=name, **outcome(args.one[0], CASES[name]))
            print("\n" + json.dumps(found), flush=True)
            print(args.one[0], name, {k: str(v)[:160] for k, v in found.items() if k != "case"}, file=sys.stderr)
    elif args.routes:
        routes = {name: {g: route(g, CASES[name]) for g in args.generations or GENERATIONS} for name in CASES}
        print("\n" + json.dumps(routes))
    elif args.page:
        write_page()
    else:
        for generation in args.generations or GENERATIONS:
            compile_all(generation, list(CASES))
        write_page()


if __name__ == "__main__":
    main()
