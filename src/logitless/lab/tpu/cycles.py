"""Estimated TPU time, from the compiler's own cycle simulator.

libtpu writes a static profile of every operation it compiles, Mosaic kernels included. The estimate ranks variants
well, and comes out within 5 to 35 % of published times (optimistic for small kernels). The simulator's DMAs are too
fast, so

    time = max(cycles / clock, bytes / bandwidth)

The simulator needs about 1.5 GB per million cycles and is slow: simulate few rows, in a process with a memory limit,
and take the slope. An estimate is never a measurement, and is reported as an estimate.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from logitless.lab.plan.chips import CHIPS
from logitless.lab.tools import child
from logitless.lab.tpu import aot

TOPOLOGY, CLOCK_HZ = "v6e:2x4", 1.75e9
"""The chip with a known clock."""
MEMORY_BYTES = 16_000_000_000
TIMEOUT_S = 600


def seconds(cycles: float, moved: float) -> float:
    """The larger of the time to compute and the time to move."""
    return max(cycles / CLOCK_HZ, moved / CHIPS["v6e"].hbm)


def simulate(
    target: str, arguments: dict[str, Any], topology: str = TOPOLOGY, *, partial: bool = False
) -> dict[str, int]:
    """Estimated cycles of every operation in a program, by name.

    ``target`` is ``module:function`` or ``path/to/file.py:function``. Called with ``arguments`` (JSON), the function
    returns ``(f, args)`` or ``(f, args, donated argument numbers)``, to be compiled in a separate process. ``partial``
    accepts a profile made before a failure: the simulator occupies VMEM, so a kernel close to the VMEM limit compiles
    without the profile and fails with it.
    """
    why = aot.missing()
    if why is not None:
        raise aot.TpuCompilerMissing(why)
    with tempfile.TemporaryDirectory() as folder:
        # Read by libtpu when it loads, hence the environment of a fresh process.
        flags = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} --xla_jf_dump_static_llo_profile_to={folder}"
        environment = child.environment(dict(aot.ENVIRONMENT, LIBTPU_INIT_ARGS=flags.strip()))
        command = [sys.executable, "-m", "logitless.lab.tpu.cycles", target, json.dumps(arguments), topology]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        found = dict(_profile(path.read_text()) for path in sorted(Path(folder).glob("*.textproto")))
        if done.returncode and not (partial and found):
            raise RuntimeError(f"simulating {target} with {arguments} failed:\n{done.stderr[-2000:]}")
        return found


def _profile(text: str) -> tuple[str, int]:
    """``(operation, estimated cycles)`` of one profile."""
    name = re.search(r'hlo_op_name: "(.*?)"', text)
    cycles = re.search(r"estimated_cycles: (\d+)", text)
    if name is None or cycles is None:
        raise ValueError(f"not a static profile of this compiler: {text[:200]!r}")
    return name.group(1), int(cycles.group(1))


def _load(target: str) -> Any:
    where, function = target.rsplit(":", 1)
    if not where.endswith(".py"):
        return getattr(importlib.import_module(where), function)
    spec = importlib.util.spec_from_file_location(Path(where).stem, where)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, function)


def _child(target: str, arguments: str, topology: str) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    f, args, *donate = _load(target)(**json.loads(arguments))
    aot.compile_for(topology, f, *args, donate=donate[0] if donate else ())


if __name__ == "__main__":
    _child(*sys.argv[1:])
