"""The examples in the docstrings run and say what they say."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import logitless

OPTIONAL = ("logitless.train", "logitless.lab.bench", "logitless.__main__")
"""Need an extra, or run something when imported."""

MODULES = sorted(
    m.name
    for m in pkgutil.walk_packages(logitless.__path__, "logitless.", onerror=lambda name: None)
    if not m.name.startswith(OPTIONAL)
)


@pytest.mark.parametrize("name", ["logitless", *MODULES])
def test_module(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("logitless"):
            raise  # broken, not optional
        pytest.skip(f"needs {error.name}")
    result = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0


def test_the_public_calls_have_examples() -> None:
    finder = doctest.DocTestFinder(recurse=False)
    for name in ("logprobs", "linear_logprobs", "grpo_loss", "linear_grpo_loss", "Objective", "policy_loss", "explain"):
        found = finder.find(getattr(logitless, name), name)
        assert any(test.examples for test in found), f"{name} has no example"
