"""Reading another library's settings: each one is mapped, refused by name, or ignored with a warning as it is there.

A library is described by two collections: ``loss``, the settings of its loss with their defaults, and ``other``, the
settings of its trainer that the loss does not depend on. Settings come as keywords, where only those of the loss make
sense, or as the library's config (a dataclass, a mapping, or any object that has them as attributes), which may hold
the others too. A setting in neither collection is refused, unless a config only has it at its default.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
import warnings
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NoReturn, TypeVar

from logitless.objectives import checks

_MISSING = object()


@dataclasses.dataclass(frozen=True)
class Library:
    """A library's names for loss settings."""

    name: str
    call: str
    loss: Mapping[str, object]
    other: Collection[str] = ()


Fields = dict[str, Any]
"""Fields of an ``Objective`` or a ``Distillation`` by name."""
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a loss under their library's names, defaults filled in."""

    library: Library
    values: Mapping[str, Any]
    said: frozenset[str]  # given as a keyword, or unlike the default in a config

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def choice(self, name: str, known: Mapping[str, T]) -> T:
        """What the setting's value stands for; another value is refused by name."""
        value = self.values[name]
        if value not in known:
            options = ", ".join(repr(k) for k in known)
            self.refuse(f"{name}={value!r} is not known; expected one of {options}.")
        return known[value]

    def refuse(self, why: str) -> NoReturn:
        raise ValueError(f"{self.library.call}: {why}")

    def ignored(self, names: Iterable[str], when: str) -> None:
        """Warn about settings that the library itself ignores here."""
        for name in names:
            if name in self.said:
                warnings.warn(
                    f"{self.library.call}: {self.library.name} ignores {name}={self.values[name]!r} {when}, and so "
                    "does this objective.",
                    stacklevel=_callers_level(),
                )


def _callers_level() -> int:
    """The ``stacklevel`` at which :meth:`Settings.ignored` names the line of the user who called this library."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "logitless":
        level, frame = level + 1, frame.f_back
    return level


def read(library: Library, config: object, given: Mapping[str, object]) -> Settings:
    """The settings of a config (``None``: the library's defaults) with the keywords over them."""
    values, said = dict(library.loss), set(given)
    for name, (value, default) in _of_config(config, library).items():
        if name in library.loss:
            values[name] = value
            if not _same(value, library.loss[name]):
                said.add(name)
        elif name not in library.other and not _same(value, default):
            raise ValueError(
                f"{library.call}: {name}={value!r} is not a setting of {library.name} that is known here. If it does "
                "not concern the loss, give those that do as keywords; if it does, build an Objective."
            )
    for name in given:
        if name in library.other:
            raise TypeError(
                f"{library.call}: {name} does not concern the loss and would be ignored; leave it out, or pass the "
                "whole config."
            )
        if name not in library.loss:
            hint = checks.did_you_mean(name, tuple(library.loss))
            raise TypeError(
                f"{library.call}: {library.name} has no setting {name!r} of its loss that is known here.{hint}"
            )
    return Settings(library, {**values, **given}, frozenset(said))


def _same(a: object, b: object) -> bool:
    comparable = type(a) is type(b) or isinstance(a, (int, float))
    return a is b or (comparable and bool(a == b))


def _of_config(config: object, library: Library) -> dict[str, tuple[object, object]]:
    """``{name: (value, default)}`` of a config's own settings."""
    if config is None:
        return {}
    if isinstance(config, str):
        raise TypeError(
            f"{library.call}: the config is the string {config!r}; expected {library.name}'s config object."
        )
    if isinstance(config, Mapping):
        return {str(k): (v, _MISSING) for k, v in config.items()}
    found = {k: (getattr(config, k), _MISSING) for k in library.loss if hasattr(config, k)}
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        fields, own = dataclasses.fields(config), _own_names(type(config))
        return {f.name: (getattr(config, f.name), _default(f)) for f in fields if f.name in own} | found
    if not found:
        raise TypeError(
            f"{library.call}: {type(config).__name__} has none of the settings of {library.name}'s loss: "
            f"{', '.join(library.loss)}."
        )
    return found


def _own_names(cls: type) -> set[str]:
    """Fields that the config's own package declares: a trainer's base class (of Hugging Face) has no loss in it."""
    package = cls.__module__.partition(".")[0]
    own = [c for c in cls.__mro__ if c.__module__.partition(".")[0] == package]
    return {name for c in own for name in inspect.get_annotations(c)}


def _default(field: dataclasses.Field[object]) -> object:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return _MISSING if field.default is dataclasses.MISSING else field.default
