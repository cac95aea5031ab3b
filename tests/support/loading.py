"""A file of Python outside the packages, imported; no tests here."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def loaded(path: Path) -> ModuleType:
    """The module of a script, under the file's name; it finds the other files of its folder."""
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where dataclasses of the file look themselves up
    spec.loader.exec_module(module)
    return module
