"""Model shapes that tests, benchmarks and plans share, and batches to put through them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class HeadShape:
    """The LM head of a model."""

    hidden: int
    vocab: int
    tied: bool


MODELS: dict[str, HeadShape] = {
    "qwen2.5-0.5b": HeadShape(896, 151936, True),
    "qwen2.5-1.5b": HeadShape(1536, 151936, True),
    "qwen2.5-7b": HeadShape(3584, 152064, False),
    "qwen2.5-72b": HeadShape(8192, 152064, False),
    "llama-3.2-1b": HeadShape(2048, 128256, True),
    "llama-3.1-8b": HeadShape(4096, 128256, False),
    "gemma-2-2b": HeadShape(2304, 256000, True),
    "gemma-3-4b": HeadShape(2560, 262144, True),
    "gpt-oss-20b": HeadShape(2880, 201088, False),
    "smollm2-135m": HeadShape(576, 49152, True),
}


def head_sizes(model: str | None, hidden: int | None, vocab: int | None, tokens: int) -> tuple[int | None, int]:
    """``(hidden size, vocabulary)`` of the options --model, or --hidden and --vocab, of a command."""
    if model is not None:
        if hidden is not None or vocab is not None:
            raise ValueError("give --model, or --hidden and --vocab, not both")
        if model not in MODELS:
            raise ValueError(f"--model {model!r} is not known; expected one of {', '.join(MODELS)}")
        hidden, vocab = MODELS[model].hidden, MODELS[model].vocab
    if vocab is None:
        raise ValueError("give --model, or --hidden and --vocab")
    for name, value in (("--hidden", hidden), ("--vocab", vocab), ("--tokens", tokens)):
        if value is not None and value < 1:
            raise ValueError(f"{name} {value}, expected at least 1")
    return hidden, vocab


def uniform_batch(
    tokens: int, vocab: int, rng: np.random.Generator, rows: int, live: float, moving: float = 1.0
) -> dict[str, Any]:
    """A batch whose tokens are live at random; with ``moving`` below 1 only that share of them has an advantage."""
    shape = (rows, tokens // rows)
    out = dict(
        targets=rng.integers(0, vocab, shape, dtype=np.int32),
        mask=rng.random(shape) < live,
        advantages=rng.standard_normal(rows).astype(np.float32),
    )
    if moving < 1.0:
        out["advantages"] = np.where(rng.random(shape) < moving, out["advantages"][:, None], np.float32(0))
    return out


def rl_batch(tokens: int, vocab: int, rng: np.random.Generator, rows: int, live: float = 1.0) -> dict[str, Any]:
    """A batch as RL makes it: prompts masked, completions of lognormal length, a third of the groups (of four rows)
    with equal rewards and so without advantage. About a third of the tokens are live, or the share ``live``."""
    width = tokens // rows
    prompt = width // 8
    drawn = rng.lognormal(np.log(width * 0.35), 0.6, rows)

    def cut(scale: float) -> np.ndarray:
        return np.clip((scale * drawn).astype(int), 1, width - prompt)

    scale = 1.0
    for _ in range(30 if live < 1 else 0):  # what is cut at the row's end is made up for by the others
        scale *= live * tokens / int(cut(scale).sum())
    lengths = cut(scale)
    position = np.arange(width)
    advantages = rng.standard_normal(rows).astype(np.float32)
    groups = np.arange(rows) // 4
    advantages[groups % 3 == 0] = 0.0
    return dict(
        targets=rng.integers(0, vocab, (rows, width), dtype=np.int32),
        mask=(position >= prompt) & (position < prompt + lengths[:, None]),
        advantages=advantages,
    )


def host_arrays(
    level: str, tokens: int, hidden: int, vocab: int, dtype: Any, rng: np.random.Generator, rows: int
) -> tuple[np.ndarray, ...]:
    """``(logits,)`` or ``(hidden, lm_head)`` with logits of a spread of about 3, made on the host.

    Every row is a stretch of one pool of random numbers, from a place of its own: as random as a benchmark needs, and
    a hundred times faster to make than new numbers for every row.
    """

    def normal(shape: tuple[int, int], scale: float) -> np.ndarray:
        count, width = shape
        pool = (rng.standard_normal(width + (1 << 22), np.float32) * np.float32(scale)).astype(dtype)
        out = np.empty(shape, dtype)
        for i, start in enumerate(rng.integers(0, 1 << 22, count)):
            out[i] = pool[start : start + width]
        return out

    width = tokens // rows
    if level == "logits":
        return (normal((tokens, vocab), 3.0).reshape(rows, width, vocab),)
    return normal((tokens, hidden), 1.0).reshape(rows, width, hidden), normal((vocab, hidden), 3.0 / hidden**0.5)
