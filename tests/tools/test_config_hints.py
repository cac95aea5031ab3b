"""A key that is not known is answered with the one that was meant, also by the last part of its name."""

from __future__ import annotations

import pytest

from logitless.lab.bench.case import BenchConfig
from logitless.lab.tools.command_config import ConfigError, load
from logitless.train.config import TrainConfig


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


@pytest.mark.parametrize("given, meant", [("train.lr=1", "train.learning_rate"), ("train.los=1", "train.loss")])
def test_initials_of_a_neighbour(given: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"is not known. Did you mean '{meant}'"):
        load(TrainConfig, None, [given])
