"""Whether two commits compile to the same programs for an H200, on a machine without a GPU.

    pip install "jax[cuda13]==0.11.2" absl-py
    python benchmarks/same_programs.py --before REV --after REV [--out FILE] [--only TEXT] [--work FOLDER]

The library's programs of the suites h200, gpu-head and gpu-logits of ``logitless bench``, and a few more, are compiled
at both commits, each by a process of its own over a temporary worktree, with jax's CUDA plugin and a description of an
H200. Compared are the optimised HLO (:mod:`hlo_graph`: instructions, data flow, order; not names, source lines and the
places of values in a loop's state), the Mosaic GPU kernels in it (without source lines), and the memory that it plans.
Which mask or how many live tokens a call has is data and no other program.

What it cannot see: the autotuner's choices, which need a device (they are made of the same matmuls if the programs are
the same), and time spent before a program starts. With ``--work`` programs stay in that folder, and a run that was
stopped goes on. A program takes about 15 s at each commit. The exit code is 1 if any two programs differ.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import harness

FLAGS = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
"""Nothing can be timed here, so nothing is tuned; matmuls are cuBLAS's, as the tuner of an H200 chooses for these."""
TARGET = """
gpu_device_info {
  name: "NVIDIA H200" cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98 memory_bandwidth: 4800000000000 device_address_bits: 64
  device_memory_size: 151397597184 l2_cache_size: 52428800 shared_memory_per_core: 233472
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0" dnn_version: "9.10.0"
}
platform_name: "CUDA" device_description_str: "NVIDIA H200" dnn_version_info { major: 9 minor: 10 patch: 0 }
"""
Case = dict[str, Any]
KERNEL = re.compile(r'kernel_hash = "(?:[^"\\]|\\.)*", module = "((?:[^"\\]|\\.)*)"')
METADATA = re.compile(r', metadata=\{(?:[^{}"]|"(?:[^"\\]|\\.)*"|\{[^{}]*\})*\}')


def cases() -> list[Case]:
    """The library's programs in the suites, as what a child needs; one that is there twice has both names."""
    import numpy as np

    from logitless.lab.bench import case, case_arrays, suites
    from logitless.lab.tools.shapes import MODELS

    found: dict[str, Case] = {}
    every: list[Any] = [c for name in ("gpu-head", "gpu-logits", "h200") for c in suites.suites()[name]]
    every = [c for c in every if isinstance(c, case.BenchConfig)]
    more = [
        case.BenchConfig("head, entropy bonus", tokens=8192, hidden=4096, vocab=151936, baselines=[],
                         objective=dict(aggregation="dapo", entropy_coef=0.01)),
        case.BenchConfig("logits 4096x151936, f32", level="logits", tokens=4096, vocab=151936, rows=1, dtype="float32",
                         baselines=[], arms={"statistics alone": dict(of="default", call="logprobs")}),
    ]  # fmt: skip
    for c in [*every, *more]:
        if c.model:
            c.hidden, c.vocab = MODELS[c.model].hidden, MODELS[c.model].vocab
        for name, arm in case.arms(c).items():
            if arm.kind != "library":
                continue
            fields = {**vars(c), **arm.batch}
            tokens = case_arrays.tokens_of(fields, np.random.default_rng(0))
            at = tokens["targets"].shape
            x = [(*at, c.vocab)] if c.level == "logits" else [(*at, c.hidden), (c.vocab, c.hidden)]
            one = dict(
                case=dict(level=c.level, objective=c.objective),
                arm=dict(kind=arm.kind, call=arm.call, frozen_head=arm.frozen_head, options=arm.options,
                         objective=arm.objective),
                x=[(shape, c.dtype) for shape in x],
                rest={k: (v.shape, str(v.dtype)) for k, v in tokens.items()} | {"old_logp": (at, "float32")},
            )  # fmt: skip
            found.setdefault(key_of(one), dict(one, names=[]))["names"].append(f"{c.name}: {name}")
    return list(found.values())


# In a child: one commit's library, with this checkout's benchmark around it.


def program(c: Case, source: str) -> Any:
    """``f(x, rest)`` of a case, by the public names of the library in ``source``."""
    spec = importlib.util.spec_from_file_location("worker", harness.ROOT / "src/logitless/lab/bench/worker.py")
    assert spec is not None and spec.loader is not None
    worker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(worker)
    worker.graft(source)
    from logitless.lab.bench import arm_program
    from logitless.lab.bench.case import Arm

    return arm_program.program(c["case"], Arm(**c["arm"]))


def kernel_text(raw: bytes) -> str:
    """A Mosaic GPU kernel's module without source locations."""
    from jax._src.interpreters import mlir
    from jax._src.lib.mlir import ir
    from jax.experimental.mosaic.gpu import core

    with mlir.make_ir_context() as context:
        context.allow_unregistered_dialects = True  # kernels are serialised in a dialect of their own
        core.dialect.register_dialect(context)
        return str(ir.Module.parse(raw).operation.get_asm(enable_debug_info=False))


def readable(hlo: str) -> str:
    """Optimised HLO without source locations, and with kernels by a digest of what they do."""

    def digest(found: re.Match[str]) -> str:
        def byte(escape: re.Match[bytes]) -> bytes:
            return bytes([int(escape[1], 16)]) if len(escape[1]) == 2 else escape[1]

        raw = re.sub(rb'\\([0-9A-F]{2}|["\\])', byte, found[1].encode())
        return f'module = "{hashlib.sha256(kernel_text(raw).encode()).hexdigest()[:16]}"'

    hlo = METADATA.sub("", KERNEL.sub(digest, hlo))
    return re.sub(r"\nFileNames\n.*?\n\n\n", "\n", hlo, flags=re.DOTALL)


def compile_all(todo: Path, out: Path, source: str) -> None:
    """Compile the cases that are not there yet with the ``logitless`` that is on the path."""
    import jax
    from jax.experimental import topologies

    (device,) = topologies.get_topology_desc("", "cuda", target_config=TARGET, topology="1x1x1").devices
    placed = jax.sharding.SingleDeviceSharding(device)
    jax.default_backend = lambda: "gpu"  # which is what the library asks, and this machine's is a CPU

    def shaped(shape: Any, dtype: str) -> Any:
        return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=placed)

    every = json.loads(todo.read_text())
    for n, c in enumerate(every, 1):
        path, start = out / f"{key_of(c)}.json", time.monotonic()
        if path.exists():
            continue
        x = tuple(shaped(*a) for a in c["x"])
        try:
            compiled = program(c, source).lower(x, {k: shaped(*a) for k, a in c["rest"].items()}).compile()
        except Exception as error:  # is said of this case
            result: dict[str, Any] = dict(error=f"{type(error).__name__}: {error}"[:2000])
        else:
            m: Any = compiled.memory_analysis()
            hlo = readable(compiled.as_text())
            result = dict(hlo=hlo, temporaries=m.temp_size_in_bytes, peak=m.peak_memory_in_bytes)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(result))
        part.rename(path)
        print(
            f"{n}/{len(every)} {c['names'][0]} ({time.monotonic() - start:.0f} s)", result.get("error", ""), flush=True
        )


# In the parent.


def key_of(c: Case) -> str:
    """A name for a program's file: all that it is made of."""
    text = json.dumps({k: v for k, v in c.items() if k != "names"}, sort_keys=True)
    return hashlib.sha256("|".join((text, FLAGS, TARGET)).encode()).hexdigest()[:16]


def git(*args: str) -> str:
    done = subprocess.run(["git", "-C", str(harness.ROOT), *args], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@contextmanager
def checked_out(commit: str, folder: Path) -> Iterator[Path]:
    """A worktree of a commit, for as long as it is needed."""
    git("worktree", "add", "--detach", str(folder), commit)
    try:
        yield folder
    finally:
        git("worktree", "remove", "--force", str(folder))


def compiled_at(commit: str, todo: list[Case], work: Path) -> list[dict[str, Any]]:
    """What a child says of each case."""
    out = work / commit[:12]
    out.mkdir(parents=True, exist_ok=True)
    listed = out / "cases"
    listed.write_text(json.dumps(todo))
    with tempfile.TemporaryDirectory() as scratch, checked_out(commit, Path(scratch) / "tree") as tree:
        own = dict(PYTHONPATH=str(tree / "src"), JAX_PLATFORMS="cpu", XLA_FLAGS=FLAGS)
        command = [sys.executable, str(Path(__file__).resolve()), "--child", str(listed), str(out), str(tree / "src")]
        subprocess.run(command, env={**os.environ, **own}, check=True)
    return [json.loads((out / f"{key_of(c)}.json").read_text()) for c in todo]


def judged(c: Case, before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """One case of the record; pairs are before and after."""
    both, said = (before, after), dict(names=c["names"])
    if "error" in before or "error" in after:
        return {**said, "same": "no", "errors": [r.get("error") for r in both]}
    from hlo_graph import compare  # not in a child: its tree may have no parser

    found = compare(before["hlo"], after["hlo"])
    kernels = [sorted(re.findall(r'module = "(\w+)"', r["hlo"])) for r in both]
    targets = Counter(re.findall(r'custom_call_target="([^"]+)"', after["hlo"]))
    memory = {k: [r[k] for r in both] for k in ("temporaries", "peak")}
    equal = found["same"] != "no" and all(a == b for a, b in (kernels, *memory.values()))
    return {
        **said, "equal": equal, **found, **memory, "library_calls": dict(targets),
        "kernels": kernels[1] if kernels[0] == kernels[1] else dict(before=kernels[0], after=kernels[1]),
    }  # fmt: skip


def main() -> int:
    args = harness.options(__doc__, before="", after="HEAD", out="same_programs.json", only="", work="").parse_args()
    todo = [c for c in cases() if any(args.only in name for name in c["names"])]
    commits = {k: git("rev-parse", f"{getattr(args, k)}^{{commit}}") for k in ("before", "after")}
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(args.work or scratch).resolve()
        before, after = (compiled_at(commit, todo, work) for commit in commits.values())
    rows = [judged(*row) for row in zip(todo, before, after, strict=True)]
    packages = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda13-pjrt")
    record = dict(
        kind="same_programs",
        what="programs compiled for an H200 without one, at two commits; pairs are before and after",
        **{k: dict(commit=v[:12], subject=git("log", "-1", "--format=%s", v)) for k, v in commits.items()},
        versions={name: importlib.metadata.version(name) for name in packages},
        flags=FLAGS,
        equal=sum(r.get("equal", False) for r in rows),
        of=len(rows),
        cases=rows,
    )
    harness.write(args.out, record)
    for r in rows:
        print(f"{r['same']:5s} {'equal' if r.get('equal') else 'DIFFERS'} {r.get('temporaries', '')} {r['names'][0]}")
    return 0 if record["equal"] == record["of"] else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        compile_all(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
    else:
        raise SystemExit(main())
