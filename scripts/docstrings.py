"""For mkdocstrings: our docstrings as Markdown, with examples and roles as code (mkdocs.yml names this file)."""

from __future__ import annotations

import re
from typing import Any

import griffe


def markdown(docstring: str) -> str:
    """Examples fenced, which Markdown takes for quotations otherwise, and ``:func:`~logitless.x``` as ```x```."""
    fenced = re.sub(r"^>>>.*?(?=\n\s*\n|\Z)", r"```pycon\n\g<0>\n```", docstring, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r":(?:func|class|meth|mod|data):`~?(?:logitless\.)?([^`]+)`", r"`\1`", fenced)


class Docstrings(griffe.Extension):
    """Applies :func:`markdown` to what is read."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)
