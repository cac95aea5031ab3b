"""Hidden states and head of real weights, from a file: what a benchmark's generator is held against.

An ``.npz`` with ``h [tokens, H]`` (final hidden states), ``y [tokens]`` (the targets) and ``head [V, H]``, in any float
dtype; ``python benchmarks/sparse_real_weights.py --states FILE --model MODEL --gsm8k test.jsonl`` makes one.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from logitless.lab.tools.command_config import ConfigError


def check(path: str, tokens: int) -> tuple[int, int]:
    """``(H, V)`` of a file that has at least ``tokens`` tokens."""
    if not Path(path).is_file():
        raise ConfigError(f"states: {path!r} is no file; inputs=real needs an .npz with h, y and head")
    try:
        with np.load(path) as f:
            h, y, head = (f[key].shape for key in ("h", "y", "head"))
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise ConfigError(f"states: {path} cannot be read ({error}); expected an .npz with h, y and head") from None
    if len(h) != 2 or len(head) != 2 or h[1] != head[1] or y != h[:1]:
        raise ConfigError(f"states: {path} has h {h}, y {y}, head {head}; expected [T, H], [T] and [V, H]")
    if h[0] < tokens:
        raise ConfigError(f"states: {path} has {h[0]} tokens, expected at least the {tokens} of tokens")
    return head[1], head[0]


def load(path: str, tokens: int, dtype: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``(h [tokens, H], head [V, H])`` in ``dtype``, and the targets ``[tokens]``."""
    with np.load(path) as f:
        return f["h"][:tokens].astype(dtype), f["head"].astype(dtype), f["y"][:tokens].astype(np.int32)
