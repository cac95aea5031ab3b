"""A worker process of a benchmark: ``python worker.py SRC [peers]`` answers questions from stdin (:mod:`.arm`).

It is run as a file and not as a module, because ``SRC`` may be another tree: then ``logitless`` is that tree's, and
only ``logitless.lab`` is this one's, so that both trees are measured by the same code.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

HERE = Path(__file__).parents[2]


def graft(source: str) -> None:
    """Import ``logitless`` from ``source``, but with the ``lab`` folder of this checkout."""
    own = str(HERE / "lab" / "bench")  # this file's folder, added by Python
    sys.path[:] = [source, *(p for p in sys.path if p != own)]
    import logitless

    if Path(logitless.__file__).parent == HERE:
        return
    full = "logitless.lab"
    for loaded in [m for m in sys.modules if m == full or m.startswith(f"{full}.")]:
        del sys.modules[loaded]
    spec = importlib.util.spec_from_file_location(
        full, HERE / "lab" / "__init__.py", submodule_search_locations=[str(HERE / "lab")]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[full] = module
    spec.loader.exec_module(module)
    logitless.lab = module


if __name__ == "__main__":
    graft(sys.argv[1])
    from logitless.lab.bench import arm
    from logitless.lab.tools import child

    child.serve(arm.handlers(peers="peers" in sys.argv[2:]))
