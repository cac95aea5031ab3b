"""Checkpoints that survive a kill: one file each, replaced atomically.

    <folder>/step_00000020.safetensors   the tree, each array by the path that leads to it; in the header's metadata,
                                         under ``about``: step, notes, and the CRC-32 of every array

A file of that name is complete: everything is on disk before the rename. Restoring compares every array with its
checksum, so a truncated or altered file is found before training continues. A tree with a NaN or an infinity in it is
never written. Old checkpoints are deleted only after a newer one is in place.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from logitless.train.files import in_a_line, replaced

_NAME = re.compile(r"step_([0-9]{8,})\.safetensors")


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read; the message is for the person who runs the training."""


def _named_leaves(tree: Any) -> dict[str, Any]:
    """Arrays by the path that leads to them: this flat form depends on no class of ours or optax's."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def save_tree(file: Path, tree: Any, notes: dict[str, Any]) -> None:
    """Write ``tree`` and ``notes`` to ``file``, which appears complete or not at all."""
    arrays = _named_leaves(tree)
    for name, x in arrays.items():
        if jnp.issubdtype(x.dtype, jnp.floating) and not bool(jnp.all(jnp.isfinite(x))):
            raise CheckpointError(f"{file}: not written, because {name} holds NaN or infinity")
    try:
        with replaced(file) as beside:
            _write(beside, arrays, notes)
    except Exception as error:  # the disk's own errors, as Python or as safetensors says them
        raise CheckpointError(
            f"{file}: could not be written ({in_a_line(error)}). "
            "The checkpoints before it are untouched; free some space (or set checkpoint.keep, checkpoint.every) and "
            "go on with --resume"
        ) from error


def _write(file: Path, arrays: dict[str, Any], notes: dict[str, Any]) -> None:
    from safetensors.numpy import save_file

    host = {name: np.asarray(x, order="C") for name, x in arrays.items()}
    about = {**notes, "crc32": {name: zlib.crc32(x.tobytes()) for name, x in host.items()}}
    save_file(host, file, metadata={"about": json.dumps(about)})


def read_about(file: Path) -> dict[str, Any]:
    """What a checkpoint's header says: its notes, and the checksums under ``crc32``."""
    from safetensors import safe_open

    try:
        with safe_open(file, framework="np") as opened:
            about = json.loads(opened.metadata()["about"])
            if set(about["crc32"]) != set(opened.keys()):
                raise ValueError("its checksums are not those of its arrays")
        return about
    except Exception as error:  # whatever damaged bytes make of the reader
        raise CheckpointError(f"{file}: cannot be read ({in_a_line(error)})") from None


def load_tree(file: Path, like: Any) -> tuple[Any, dict[str, Any]]:
    """The tree in ``file`` laid out as ``like`` (shapes, dtypes, shardings), and its notes; checked to the bit."""
    from safetensors.numpy import load_file

    wanted = _named_leaves(like)
    notes = read_about(file)
    sums = notes.pop("crc32")
    if sums.keys() != wanted.keys():
        odd = sorted(sums.keys() ^ wanted.keys())
        raise CheckpointError(f"{file}: is of another model or optimiser: {odd[0]} and {len(odd) - 1} more differ")
    try:
        found = load_file(file)
    except Exception as error:
        raise CheckpointError(f"{file}: cannot be read ({in_a_line(error)})") from None
    for name, x in wanted.items():
        given, expected = (f"{y.dtype}{[*y.shape]}" for y in (found[name], x))
        if given != expected:
            raise CheckpointError(f"{file}: {name} is {given}, expected {expected}")
        if zlib.crc32(found[name].tobytes()) != sums[name]:
            raise CheckpointError(f"{file}: {name} has changed since it was written (its checksum differs)")
    placed = [jax.device_put(found[name], getattr(x, "sharding", None)) for name, x in wanted.items()]
    return jax.tree.unflatten(jax.tree.structure(like), placed), notes


def steps_in(folder: Path) -> list[int]:
    """Steps that have a complete checkpoint, oldest first; only what :func:`step_file` names is one."""
    found = (_NAME.fullmatch(p.name) for p in folder.glob("step_*"))
    return sorted(int(match[1]) for match in found if match)


def step_file(folder: Path, step: int) -> Path:
    """Path of the checkpoint for ``step``."""
    return folder / f"step_{step:08d}.safetensors"


def save(folder: Path, step: int, tree: Any, notes: dict[str, Any], keep: int) -> None:
    """The checkpoint after ``step`` steps; then all but the last ``keep`` are deleted."""
    save_tree(step_file(folder, step), tree, {**notes, "step": step})
    for old in steps_in(folder)[:-keep]:
        step_file(folder, old).unlink(missing_ok=True)


def restore(
    folder: Path, like: Any, say: Callable[[str], object], counts: Collection[str] = ()
) -> tuple[int, Any, dict[str, Any]] | None:
    """The newest checkpoint that can be read: ``(step, tree, notes)``; ``None`` where there is none.

    A checkpoint that cannot be read, or lacks one of ``counts`` in its notes, is reported through ``say`` and moved
    aside before an older checkpoint is tried; if none can be read, an error is raised and all files stay.
    """
    for path in folder.glob("step_*"):
        if not _NAME.fullmatch(path.name) and path.suffix != ".new":
            say(f"WARNING: {path}: not the name of a checkpoint; left alone")
    bad: list[tuple[int, CheckpointError]] = []
    for step in reversed(steps_in(folder)):
        file = step_file(folder, step)
        try:
            tree, notes = load_tree(file, like)
            for key in ("step", *counts):
                if type(notes.get(key)) is not int or notes[key] < 0:
                    raise CheckpointError(f"{file}: {key} is {notes.get(key)!r}, expected a count")
            if notes["step"] != step:
                raise CheckpointError(f"{file}: is of step {notes['step']}")
        except CheckpointError as error:
            say(f"WARNING: checkpoint unreadable: {error}")
            bad.append((step, error))
            continue
        if bad:
            say(f"WARNING: going back to the checkpoint of step {step}; the steps after it are computed again")
        for number, _ in bad:  # kept under another name for whoever wants to look
            file = step_file(folder, number)
            try:
                os.replace(file, file.with_name(f"unreadable_{file.name}"))
            except OSError as error:
                raise CheckpointError(f"{file}: could not be moved aside ({error})") from None
        return step, tree, notes
    if bad:
        raise CheckpointError(
            f"none of the checkpoints of steps {[step for step, _ in reversed(bad)]} can be read; the last one: "
            f"{bad[0][1]}. Move {folder} away to start from the beginning"
        )
    return None
