"""Frozen dataclasses as pytrees: numbers and arrays are leaves, fields marked :func:`static` are not.

Unflattening bypasses ``__init__``, so that checks in ``__post_init__`` see only what users construct and never
tracers or the placeholder objects that transformations put into leaves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax

T = TypeVar("T")


def static(default: object = dataclasses.MISSING, **kwargs: Any) -> Any:
    """A dataclass field that is part of the tree's structure: changing it compiles anew."""
    if default is not dataclasses.MISSING:
        kwargs["default"] = default
    return dataclasses.field(metadata={"static": True}, **kwargs)


def register(cls: type[T]) -> type[T]:
    """Class decorator: register a dataclass as a pytree with named leaves."""
    of: Any = cls
    fields = dataclasses.fields(of)
    leaves = tuple(f.name for f in fields if not f.metadata.get("static"))
    statics = tuple(f.name for f in fields if f.metadata.get("static"))

    def flatten_with_keys(obj: T) -> tuple[list[tuple[object, object]], tuple[object, ...]]:
        children = [(jax.tree_util.GetAttrKey(n), getattr(obj, n)) for n in leaves]
        return children, tuple(getattr(obj, n) for n in statics)

    def flatten(obj: T) -> tuple[list[object], tuple[object, ...]]:
        return [getattr(obj, n) for n in leaves], tuple(getattr(obj, n) for n in statics)

    def unflatten(aux: tuple[object, ...], children: Iterable[object]) -> T:
        obj = object.__new__(cls)
        for name, value in zip(leaves, children, strict=True):
            object.__setattr__(obj, name, value)
        for name, value in zip(statics, aux, strict=True):
            object.__setattr__(obj, name, value)
        return obj

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    return cls


def tree_of(make: Callable[..., T], *leaves: object, **named: object) -> T:
    """The pytree that ``make`` builds, its leaves of any type: specs, shapes, dtypes, host arrays or ``None`` may stand
    where the class declares arrays."""
    return make(*leaves, **named)


def with_leaves(tree: T, **leaves: object) -> T:
    """A copy of ``tree`` with other leaves, of any type as in :func:`tree_of`."""
    changes: dict[str, Any] = leaves
    of: Any = tree
    return dataclasses.replace(of, **changes)
