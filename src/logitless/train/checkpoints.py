"""Checkpoints that survive a kill: written beside their place, checked, then renamed into it.

    <folder>/step_00000020/arrays.safetensors   the tree, each array by the path that leads to it
    <folder>/step_00000020/about.json           step, notes, and the shape, dtype and CRC-32 of every array

A folder that is named ``step_*`` is complete: everything is on disk before the rename. Restoring reads every array back
and compares its checksum, so that a truncated or altered file is found before training goes on from it. A tree with a
NaN or an infinity in it is never written. Old checkpoints are deleted only after a newer one is in place.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_PREFIX, _UNFINISHED = "step_", ".unfinished_"
_ARRAYS, _ABOUT = "arrays.safetensors", "about.json"
_NAME = re.compile(_PREFIX + "[0-9]{8,}")


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read; the message is for the person who runs the training."""


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _named_leaves(tree: Any) -> dict[str, Any]:
    """Arrays by the path that leads to them: this flat form depends on no class of ours or optax's."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def _describe(host: np.ndarray) -> dict[str, Any]:
    return dict(shape=list(host.shape), dtype=str(host.dtype), crc32=zlib.crc32(host.tobytes()))


def save_tree(folder: Path, tree: Any, notes: dict[str, Any]) -> None:
    """Write ``tree`` and ``notes`` to ``folder``, which appears complete or not at all."""
    arrays = _named_leaves(tree)
    for name, x in arrays.items():
        if jnp.issubdtype(x.dtype, jnp.floating) and not bool(jnp.all(jnp.isfinite(x))):
            raise CheckpointError(f"{folder}: not written, because {name} holds NaN or infinity")
    unfinished = folder.parent / (_UNFINISHED + folder.name)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove(unfinished)
        unfinished.mkdir()
        _write(unfinished.absolute(), arrays, notes)
        _sync_all(unfinished)
        _remove(folder)
        os.rename(unfinished, folder)
        _sync(folder.parent)
    except Exception as error:  # the disk's own errors, as Python or as safetensors says them
        _remove(unfinished, quietly=True)
        raise CheckpointError(
            f"{folder}: could not be written ({_first_line(error)}). "
            "The checkpoints before it are untouched; free some space (or set checkpoint.keep, checkpoint.every) and "
            "go on with --resume"
        ) from error


def _write(folder: Path, arrays: dict[str, Any], notes: dict[str, Any]) -> None:
    from safetensors.numpy import save_file

    host = {name: np.asarray(x, order="C") for name, x in arrays.items()}
    save_file(host, folder / _ARRAYS)
    about = {**notes, "arrays": {name: _describe(x) for name, x in host.items()}}
    (folder / _ABOUT).write_text(json.dumps(about))


def _sync_all(folder: Path) -> None:
    """Every file and folder on disk, before the rename says that they are: a power cut must not leave empty ones."""
    for path in [*folder.rglob("*"), folder]:
        if path.is_dir():
            _sync(path)
        else:
            with path.open("rb") as file:
                os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """A folder's own entries on disk, where the system can do that for folders."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)


def _remove(path: Path, quietly: bool = False) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=quietly)
    else:
        path.unlink(missing_ok=True)


def load_tree(folder: Path, like: Any) -> tuple[Any, dict[str, Any]]:
    """The tree in ``folder`` laid out as ``like`` (shapes, dtypes, shardings), and its notes; checked to the bit."""
    wanted = _named_leaves(like)
    recorded, notes = _about(folder)
    if recorded.keys() != wanted.keys():
        odd = sorted(recorded.keys() ^ wanted.keys())
        raise CheckpointError(f"{folder}: is of another model or optimiser: {odd[0]} and {len(odd) - 1} more differ")
    for name, x in wanted.items():
        given, expected = (
            [d["dtype"], d["shape"]] for d in (recorded[name], dict(dtype=str(x.dtype), shape=[*x.shape]))
        )
        if given != expected:
            raise CheckpointError(f"{folder}: {name} is {given[0]}{given[1]}, expected {expected[0]}{expected[1]}")
    leaves = _read(folder, recorded)
    placed = [jax.device_put(leaves[name], getattr(x, "sharding", None)) for name, x in wanted.items()]
    return jax.tree.unflatten(jax.tree.structure(like), placed), notes


def _about(folder: Path) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """What ``about.json`` says of every array, and its notes."""
    file = folder / _ABOUT
    try:
        notes = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: cannot be read ({_first_line(error)})") from None
    arrays = notes.pop("arrays", None) if isinstance(notes, dict) else None
    if not isinstance(arrays, dict):
        raise CheckpointError(f"{file}: expected an object with 'arrays', an object")
    for name, one in arrays.items():
        if not isinstance(one, dict) or not {"shape", "dtype", "crc32"} <= one.keys():
            raise CheckpointError(f"{file}: expected shape, dtype and crc32 of {name}")
    return arrays, notes


def _read(folder: Path, recorded: dict[str, dict[str, Any]]) -> dict[str, np.ndarray]:
    """The arrays, each compared with what was recorded of it."""
    from safetensors import safe_open

    try:
        with safe_open(folder / _ARRAYS, framework="np") as file:
            found = {name: file.get_tensor(name) for name in recorded}
    except Exception as error:  # whatever damaged bytes make of the reader
        raise CheckpointError(f"{folder / _ARRAYS}: cannot be read ({_first_line(error)})") from None
    for name, x in found.items():
        if _describe(x) != {key: recorded[name][key] for key in ("shape", "dtype", "crc32")}:
            raise CheckpointError(f"{folder}: {name} has changed since it was written (its checksum differs)")
    return found


def steps_in(folder: Path) -> list[int]:
    """Steps that have a complete checkpoint, oldest first; only what :func:`step_folder` names is one."""
    if not folder.is_dir():
        return []
    return sorted(int(p.name.removeprefix(_PREFIX)) for p in folder.iterdir() if _NAME.fullmatch(p.name))


def step_folder(folder: Path, step: int) -> Path:
    """Where the checkpoint of ``step`` is."""
    return folder / f"{_PREFIX}{step:08d}"


def save(folder: Path, step: int, tree: Any, notes: dict[str, Any], keep: int) -> None:
    """The checkpoint after ``step`` steps; then all but the last ``keep`` are deleted."""
    save_tree(step_folder(folder, step), tree, {**notes, "step": step})
    for old in steps_in(folder)[:-keep]:
        _remove(step_folder(folder, old), quietly=True)


def restore(
    folder: Path, like: Any, say: Callable[[str], object], counts: Collection[str] = ()
) -> tuple[int, Any, dict[str, Any]] | None:
    """The newest checkpoint that can be read: ``(step, tree, notes)``; ``None`` where there is none.

    One that cannot be read, or whose notes lack one of ``counts``, is named through ``say`` and moved aside before an
    older one is taken; if none can be, it is an error and all stay where they are.
    """
    for path in folder.glob(_PREFIX + "*"):
        if not _NAME.fullmatch(path.name):
            say(f"WARNING: {path}: not the name of a checkpoint; left alone")
    bad: list[tuple[int, CheckpointError]] = []
    for step in reversed(steps_in(folder)):
        try:
            tree, notes = load_tree(step_folder(folder, step), like)
            _check_counts(step_folder(folder, step), notes, step, counts)
        except CheckpointError as error:
            say(f"WARNING: checkpoint unreadable: {error}")
            bad.append((step, error))
            continue
        if bad:
            say(f"WARNING: going back to the checkpoint of step {step}; the steps after it are computed again")
            _move_aside(folder, [number for number, _ in bad])
        return step, tree, notes
    if bad:
        raise CheckpointError(
            f"none of the checkpoints of steps {[step for step, _ in reversed(bad)]} can be read; the last one: "
            f"{bad[0][1]}. Move {folder} away to start from the beginning"
        )
    return None


def _check_counts(folder: Path, notes: dict[str, Any], step: int, counts: Collection[str]) -> None:
    for key in ("step", *counts):
        if type(notes.get(key)) is not int or notes[key] < 0:
            raise CheckpointError(f"{folder / _ABOUT}: {key} is {notes.get(key)!r}, expected a count")
    if notes["step"] != step:
        raise CheckpointError(f"{folder / _ABOUT}: is of step {notes['step']}")


def _move_aside(folder: Path, steps: list[int]) -> None:
    """Unreadable checkpoints, kept under another name for whoever wants to look."""
    for step in steps:
        aside = folder / f"unreadable_{step_folder(folder, step).name}"
        try:
            _remove(aside)
            os.rename(step_folder(folder, step), aside)
        except OSError as error:
            raise CheckpointError(f"{step_folder(folder, step)}: could not be moved aside ({error})") from None
