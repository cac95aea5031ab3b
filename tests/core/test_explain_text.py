"""What ``explain`` says, word for word: sizes, chunks and counts of matmuls are those of the call."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from flat_calls import explain
from logitless import Objective, grpo_loss, linear_grpo_loss, linear_logprobs, logprobs

HIDDEN, HEAD = jax.ShapeDtypeStruct((1, 64, 8), jnp.float32), jax.ShapeDtypeStruct((100, 8), jnp.float32)
LOGITS = jax.ShapeDtypeStruct((2, 16, 100), jnp.bfloat16)
HERE = "backend chunked (the default on a CPU)"
IN_FORWARD = """\
  way      grad in forward: a token's cotangent follows from its own statistics
  matmuls  3 (2 with a frozen head, 1 without a gradient) per live token; 1 where no gradient is possible"""
LATER = "4 (3 with a frozen head, 1 without a gradient) per live token; 1 where the cotangent is zero"


def swept(chunks: int, size: int, tokens: int) -> str:
    return f"""
  bytes    head read {chunks}x per matmul (3,200 B each), logits chunk {size:,} B at a time; at most {chunks} chunks, \
fewer with dead tokens
  tiles    chunk={tokens}, layout=vh"""


HEADS: list[tuple[dict[str, Any], str]] = [
    ({}, f"{HERE}\n{IN_FORWARD}{swept(1, 25_600, 64)}"),
    ({"chunk_size": 7}, f"{HERE}\n{IN_FORWARD}{swept(10, 2_800, 7)}"),
    ({"memory_budget": 8_000}, f"{HERE}\n{IN_FORWARD}{swept(7, 4_000, 10)}"),
    ({"memory_budget": 4_000, "logits_dtype": "bfloat16"}, f"{HERE}\n{IN_FORWARD}{swept(7, 2_000, 10)}"),
    (
        {"backend": "reference"},
        "backend reference (named in the call)\n  way      dense: [64, 100] logits and dlogits in memory\n"
        "  matmuls  3 (1 without a gradient)\n  bytes    logits and dlogits 51,200 B, each written and read\n"
        "  tiles    none",
    ),
]
LOGIT_CALLS: list[tuple[Any, dict[str, Any], str]] = [
    (
        logprobs,
        {},
        f"logprobs: {HERE}\n  way      statistics; dlogits later from the cotangents that arrive\n  matmuls  0\n"
        "  bytes    logits read 2x (12,800 B), dlogits written once (6,400 B)\n  tiles    rows=32",
    ),
    (
        grpo_loss,
        {},
        f"grpo_loss: {HERE}\n  way      statistics and dlogits in one pass (each token's gradient follows from its own "
        "statistics)\n  matmuls  0\n  bytes    logits read 2x (12,800 B), dlogits written once (6,400 B)\n"
        "  tiles    rows=32",
    ),
    (
        grpo_loss,
        {"backend": "reference"},
        "grpo_loss: backend reference (named in the call)\n  way      dense plain JAX, differentiated by JAX\n"
        "  matmuls  0\n  bytes    up to XLA; at least 19,200 B\n  tiles    none",
    ),
]


@pytest.mark.parametrize("options, text", HEADS)
def test_a_loss_of_hidden_states(options: dict[str, Any], text: str) -> None:
    assert str(explain(linear_grpo_loss, HIDDEN, HEAD, **options)) == f"linear_grpo_loss: {text}"


@pytest.mark.parametrize("call, options, text", LOGIT_CALLS)
def test_a_call_of_logits(call: Any, options: dict[str, Any], text: str) -> None:
    assert str(explain(call, LOGITS, **options)) == text


@pytest.mark.parametrize("options", [{}, {"chunk_size": 16}])
def test_what_comes_later_takes_four_matmuls(options: dict[str, Any]) -> None:
    said = explain(linear_logprobs, HIDDEN, HEAD, **options)
    assert said.matmuls == LATER and said.tiles == {"chunk": options.get("chunk_size", 64), "layout": "vh"}
    coupled = explain(linear_grpo_loss, HIDDEN, HEAD, objective=Objective(level="sequence"), **options)
    assert coupled.matmuls == LATER and coupled.way.startswith("by recompute: ")
