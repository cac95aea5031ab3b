"""Configuration of the command-line tools: a dataclass schema, a YAML file, and ``key=value`` overrides on top."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from logitless.objectives.checks import same_name

T = TypeVar("T")
FLOAT32_MAX = 3.4028234663852886e38
LARGEST_SEED = 2**32 - 1
"""JAX takes 32 bits of a seed; of more it would drop some without a word."""


class ConfigError(Exception):
    """A configuration that cannot be used; the message is for the person who wrote it."""


def sparse_backward_of(key: str, given: Any) -> Any:
    """``off``, ``auto`` or a mass, as the calls take it; YAML makes a plain ``off`` a ``False``."""
    given = "off" if given is False else given
    number = isinstance(given, (int, float)) and not isinstance(given, bool)
    if given not in ("off", "auto") and not (number and 0 < given < 1):
        raise ConfigError(f"{key}: {given!r}, expected off, auto or a probability mass between 0 and 1")
    return given


def check_common(seed: int, wandb_mode: str) -> None:
    """Keys that every tool has."""
    if not 0 <= seed <= LARGEST_SEED:
        raise ConfigError(f"seed: {seed}, expected 0 to {LARGEST_SEED}")
    modes = ("disabled", "offline", "online")
    if wandb_mode not in modes:
        raise ConfigError(f"wandb_mode: {wandb_mode!r}, expected one of {', '.join(modes)}.")
    if wandb_mode != "disabled" and "wandb" not in sys.modules and importlib.util.find_spec("wandb") is None:
        raise ConfigError(
            f"wandb_mode: {wandb_mode} needs wandb: pip install 'logitless[wandb]', or set it to disabled"
        )


AT_LEAST_0, AT_LEAST_1 = "[0, inf)", "[1, inf)"


def number(default: float | None, bounds: str) -> Any:
    """A field for numbers of the interval ``bounds``, such as ``[0, 1)`` or ``[1, inf)``."""
    return dataclasses.field(default=default, metadata={"bounds": bounds})


def one_of(*choices: str, default: str | None = None) -> Any:
    """A field for one of ``choices``; the first by default."""
    return dataclasses.field(default=choices[0] if default is None else default, metadata={"choices": choices})


def check_fields(config: Any, prefix: str = "") -> None:
    """Refuse by key the first value outside of what :func:`number` or :func:`one_of` declare for its field."""
    for field in dataclasses.fields(config):
        key, value = prefix + field.name, getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            check_fields(value, key + ".")
        if "choices" in field.metadata and value not in field.metadata["choices"]:
            allowed = field.metadata["choices"]
            close = difflib.get_close_matches(str(value), allowed, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"{key}: {value!r}, expected one of {', '.join(a or 'nothing' for a in allowed)}.{hint}")
        if "bounds" in field.metadata and value is not None:
            _check_number(key, value, field.metadata["bounds"])


def _check_number(key: str, value: float, bounds: str) -> None:
    low, high = (float(end) for end in bounds[1:-1].split(","))
    above = value >= low if bounds[0] == "[" else value > low
    below = value <= min(high, FLOAT32_MAX) if bounds[-1] == "]" or high > FLOAT32_MAX else value < high
    if above and below:
        return
    expected = f"a number in {bounds}"
    if high > FLOAT32_MAX:
        expected = f"at least {low:g}" if bounds[0] == "[" else f"a finite number above {low:g}"
        expected += " (finite in float32)" if not value <= FLOAT32_MAX else ""
    raise ConfigError(f"{key}: {value}, expected {expected}")


def _known_keys(schema: type, prefix: str = "") -> list[str]:
    keys = []
    for name, kind in get_type_hints(schema).items():
        keys.append(prefix + name)
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            keys += _known_keys(kind, f"{prefix}{name}.")
    return keys


def load(schema: type[T], path: str | Path | None, overrides: Sequence[str] = ()) -> T:
    """``schema`` filled from its defaults, then the YAML file at ``path``, then ``overrides`` such as ``seed=3``."""
    try:
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException
    except ImportError:
        raise ConfigError("configuration files need omegaconf: pip install 'logitless[tools]'") from None
    config = OmegaConf.structured(schema)
    parts: list[tuple[str, Any]] = []
    if path is not None:
        try:
            loaded = OmegaConf.load(path)
        except FileNotFoundError:
            raise ConfigError(
                f"{path}: no such configuration file; `logitless configs` lists those that go by name"
            ) from None
        except Exception as error:  # YAML errors: location and cause
            raise ConfigError(f"{path}: not readable as YAML: {' '.join(str(error).split())}") from None
        if not OmegaConf.is_dict(loaded):
            raise ConfigError(f"{path}: expected keys and values, found a list or a single value")
        parts.append((str(path), loaded))
    for item in overrides:
        if "=" not in item:
            raise ConfigError(f"override {item!r}: expected key=value")
        try:
            parts.append((f"override {item!r}", OmegaConf.from_dotlist([item])))
        except Exception as error:
            raise ConfigError(f"override {item!r}: {error}") from None
    for source, part in parts:
        try:
            config = OmegaConf.merge(config, part)
        except OmegaConfBaseException as error:
            raise ConfigError(f"{source}: {_explain(error, schema)}") from None
    try:
        made: Any = OmegaConf.to_object(config)
    except (OmegaConfBaseException, ValueError, TypeError) as error:
        raise ConfigError(f"{path or 'configuration'}: {error}") from None
    return made


def _nearest(given: str, known: list[str]) -> str | None:
    """The key that was meant, by its whole name or by the last part of it: ``backend`` is ``kernel.backend``, and
    ``train.lr`` is ``train.learning_rate``."""
    parent, _, last = given.rpartition(".")
    siblings = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == parent}
    if (short := same_name(last, siblings)) is not None:
        return siblings[short]
    names = {key.rpartition(".")[2]: key for key in reversed(known)} | {key: key for key in known}
    close = difflib.get_close_matches(given, names, n=1) or difflib.get_close_matches(
        given.rpartition(".")[2], names, n=1
    )
    return names[close[0]] if close else None


def _explain(error: Any, schema: type) -> str:
    key = getattr(error, "full_key", None) or getattr(error, "key", None)
    first = str(error).splitlines()[0]
    close = _nearest(str(key), _known_keys(schema)) if key else None
    if close and close != str(key):
        return f"{key!r} is not known. Did you mean {close!r}?"
    return f"{key!r}: {first}" if key else first
