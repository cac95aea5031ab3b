"""Text for a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Iterable

WIDTH = 80


def wrapped(parts: Iterable[str], indent: int = 4, between: str = "  ") -> str:
    """The parts on lines of at most :data:`WIDTH` columns; a line ends between two parts and never inside one."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + len(between) + len(part) <= WIDTH:
            lines[-1] += between + part
        elif lines:
            lines[-1] += between.rstrip()
            lines.append(" " * indent + part)
        else:
            lines.append(part)
    return "\n".join(lines)
