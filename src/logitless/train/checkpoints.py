"""Checkpoints that survive a kill: written beside their place, checked, then renamed into it.

    <folder>/step_00000020/arrays       the tree, by Orbax
    <folder>/step_00000020/about.json   step, notes, and the shape, dtype and CRC-32 of every array

A folder that is named ``step_*`` is complete: everything is on disk before the rename. Restoring reads every array back
and compares its checksum, so that a truncated or altered file is found before training goes on from it. A tree with a
NaN or an infinity in it is never written. Old checkpoints are deleted only after a newer one is in place.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_PREFIX, _UNFINISHED = "step_", ".unfinished_"


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read; the message is for the person who runs the training."""


def _orbax() -> Any:
    try:
        import orbax.checkpoint as ocp
    except ImportError:
        raise CheckpointError("checkpoints need orbax: pip install 'logitless[train]'") from None
    return ocp


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _named_leaves(tree: Any) -> dict[str, Any]:
    """Arrays by the path that leads to them. Orbax stores this flat form: it depends on no class of ours or optax's."""
    return {
        jax.tree_util.keystr(path).replace("/", "_"): leaf
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    }


def _describe(x: Any) -> dict[str, Any]:
    host = np.asarray(x)
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
    except CheckpointError:
        raise
    except Exception as error:  # the disk's own errors, and whatever Orbax makes of them
        _remove(unfinished, quietly=True)
        raise CheckpointError(
            f"{folder}: could not be written ({_first_line(error)}). "
            "The checkpoints before it are untouched; free some space (or set checkpoint.keep, checkpoint.every) and "
            "go on with --resume"
        ) from error


def _write(folder: Path, arrays: dict[str, Any], notes: dict[str, Any]) -> None:
    ocp = _orbax()
    with _said_once(), ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "arrays", arrays)
        checkpointer.wait_until_finished()
    about = {**notes, "arrays": {name: _describe(x) for name, x in arrays.items()}}
    (folder / "about.json").write_text(json.dumps(about))


@contextlib.contextmanager
def _said_once() -> Iterator[None]:
    """Orbax' threads log what went wrong with their tracebacks, and then raise it: what is raised is enough."""
    log = logging.getLogger("absl")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


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


def _remove(folder: Path, quietly: bool = False) -> None:
    if folder.exists():
        shutil.rmtree(folder, ignore_errors=quietly)


def load_tree(folder: Path, like: Any) -> tuple[Any, dict[str, Any]]:
    """The tree in ``folder`` laid out as ``like`` (shapes, dtypes, shardings), and its notes; checked to the bit."""
    ocp = _orbax()
    wanted = _named_leaves(like)
    try:
        about = json.loads((folder / "about.json").read_text())
        recorded = about.pop("arrays")
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{folder}: about.json cannot be read ({type(error).__name__}: {error})") from None
    if recorded.keys() != wanted.keys():
        odd = sorted(recorded.keys() ^ wanted.keys())
        raise CheckpointError(f"{folder}: is of another model or optimiser: {odd[0]} and {len(odd) - 1} more differ")
    for name, x in wanted.items():
        given = (tuple(recorded[name]["shape"]), recorded[name]["dtype"])
        if given != (tuple(x.shape), str(x.dtype)):
            raise CheckpointError(f"{folder}: {name} is {given[1]}{list(given[0])}, expected {x.dtype}{list(x.shape)}")
    target = {
        k: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None)) for k, x in wanted.items()
    }
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            arrays = checkpointer.restore((folder / "arrays").absolute(), target)
    except Exception as error:
        raise CheckpointError(f"{folder}: cannot be read ({_first_line(error)})") from None
    for name, x in arrays.items():
        if _describe(x)["crc32"] != recorded[name]["crc32"]:
            raise CheckpointError(f"{folder}: {name} has changed since it was written (its checksum differs)")
    return jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in wanted]), about


def steps_in(folder: Path) -> list[int]:
    """Steps that have a complete checkpoint, oldest first."""
    if not folder.is_dir():
        return []
    names = [p.name.removeprefix(_PREFIX) for p in folder.iterdir() if p.name.startswith(_PREFIX)]
    return sorted(int(n) for n in names if n.isdigit())


def step_folder(folder: Path, step: int) -> Path:
    """Where the checkpoint of ``step`` is."""
    return folder / f"{_PREFIX}{step:08d}"


def save(folder: Path, step: int, tree: Any, notes: dict[str, Any], keep: int) -> None:
    """The checkpoint after ``step`` steps; then all but the last ``keep`` are deleted."""
    save_tree(step_folder(folder, step), tree, {**notes, "step": step})
    for old in steps_in(folder)[:-keep]:
        _remove(step_folder(folder, old), quietly=True)


def restore(folder: Path, like: Any, say: Any) -> tuple[int, Any, dict[str, Any]] | None:
    """The newest checkpoint that can be read: ``(step, tree, notes)``; ``None`` where there is none.

    One that cannot be read is named through ``say`` before an older one is taken; if none can be, it is an error.
    """
    steps = steps_in(folder)
    first_error: CheckpointError | None = None
    for step in reversed(steps):
        try:
            tree, notes = load_tree(step_folder(folder, step), like)
        except CheckpointError as error:
            first_error = first_error or error
            say(f"WARNING: checkpoint unreadable: {error}")
            continue
        if first_error is not None:
            say(f"WARNING: going back to the checkpoint of step {step}; the steps after it are computed again")
            for bad in steps[steps.index(step) + 1 :]:  # kept for whoever wants to look, but out of the way
                aside = folder / f"unreadable_{step_folder(folder, bad).name}"
                _remove(aside, quietly=True)
                os.rename(step_folder(folder, bad), aside)
        return step, tree, notes
    if first_error is not None:
        raise CheckpointError(
            f"none of the checkpoints of steps {steps} can be read; the last one: {first_error}. Move {folder} away to "
            "start from the beginning"
        )
    return None
