"""The configurations that come with the package: by name instead of by path (``--config tiny``)."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from logitless.lab.tools.text import WIDTH

KINDS = {"train": "train and ab", "bench": "bench", "gradcheck": "gradcheck"}
"""Folder of configurations -> commands for the folder."""


def folder() -> Path:
    """Inside the package if installed from a wheel, next to the package in a checkout."""
    inside = Path(__file__).parents[1] / "configs"
    return inside if inside.is_dir() else Path(__file__).parents[3] / "configs"


def names(kind: str) -> dict[str, Path]:
    """Configurations of a kind (``train``, ``bench``, ``gradcheck``) by name."""
    return {path.stem: path for path in sorted((folder() / kind).glob("*.yaml"))}


def find(kind: str, given: str | None) -> str | None:
    """The file for ``--config``: a path as given, or the shipped configuration with this name."""
    if given is None or Path(given).exists():
        return given
    return str(names(kind).get(given, given))


def mistaken(kind: str, overrides: Sequence[str]) -> str | None:
    """What was meant where a configuration stands among the ``key=value`` arguments."""
    for item in overrides:
        if "=" not in item and (item in names(kind) or item.endswith((".yaml", ".yml"))):
            return f"{item!r} is a configuration; did you mean --config {item}?"
    return None


def listing() -> str:
    """All shipped configurations, each with the first line of its comment."""
    lines = []
    for kind, commands in KINDS.items():
        lines.append(f"{commands}: --config NAME")
        for name, path in names(kind).items():
            first = path.read_text().partition("\n")[0]
            about = first.lstrip("# ").partition(". ")[0].rstrip(".:") if first.startswith("#") else ""
            lines.append(f"  {name}")
            lines += textwrap.wrap(about, WIDTH, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines)
