"""A key that is not known is answered with the one that was meant, also by the last part of its name."""

from __future__ import annotations

import pytest

from logitless.lab.bench.case import BenchConfig
from logitless.lab.tools.command_config import ConfigError, load


@pytest.mark.parametrize(
    "given, meant",
    [
        ("backend=cuda", "kernel.backend"),
        ("backnd=auto", "kernel.backend"),
        ("kernel.bakend=auto", "kernel.backend"),
        ("vocabb=3", "vocab"),
    ],
)
def test_what_was_meant(given: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"is not known. Did you mean '{meant}'"):
        load(BenchConfig, None, [given])
