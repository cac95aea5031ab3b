"""Problems to train on: GSM8K from JSONL, built-in addition, and reasoning-gym's tasks.

A dataset is a sequence of :class:`Problem`. The seed and the step alone determine the problems of a step
(:func:`batch`), so a run resumed at step n sees the same problems.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from logitless.train.files import package

SPLITS = ("train", "test")
INSTRUCTION = "Reason step by step, and end with the answer as a number after ####."
"""The default instruction for a chat model; ``reward.extract_answer`` parses the requested form."""


class DataError(ValueError):
    """Problems that cannot be read or made as asked; the message says where and what."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """One problem. ``prompt`` is the plain text; a chat template is put around it by the tokenizer."""

    prompt: str
    answer: str
    meta: dict[str, Any] = dataclasses.field(default_factory=dict)


def batch(dataset: Sequence[Problem], seed: int, step: int, size: int) -> list[Problem]:
    """Problems of ``step``: a shuffled pass over the dataset after the other, each in an order of its own."""
    chosen: list[Problem] = []
    first = step * size
    while len(chosen) < size:
        epoch, start = divmod(first + len(chosen), len(dataset))
        order = np.random.default_rng([seed, epoch]).permutation(len(dataset))
        chosen += [dataset[i] for i in order[start : start + size - len(chosen)]]
    return chosen


def gsm8k(path: str | Path, split: str = "train", instruction: str = INSTRUCTION) -> list[Problem]:
    """GSM8K's problems from a JSONL file, or from ``train.jsonl`` or ``test.jsonl`` of a folder.

    Each line has ``question`` and ``answer``, whose number stands after ``####``. The instruction follows the question.
    """
    from logitless.train.reward import extract_answer

    path = Path(path).expanduser()
    file = path / f"{split}.jsonl" if path.is_dir() else path
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        raise DataError(f"{file}: no such file; expected GSM8K as JSONL.") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: not UTF-8 text: {error}") from None
    problems = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{file}, line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:  # not JSON, a number of 5,000 digits; nested too deep
            raise DataError(f"{where}: not JSON: {error}.") from None
        for key in ("question", "answer"):
            if not isinstance(row, dict) or not isinstance(row.get(key), str) or not row[key].strip():
                raise DataError(f"{where}: expected an object with the text {key!r}, got {line[:80]!r}.")
        answer = extract_answer(row["answer"]) if "####" in row["answer"] else None
        if answer is None:
            raise DataError(f"{where}: the answer has no number after ####: {row['answer'][-80:]!r}.")
        prompt = f"{row['question']}\n{instruction}" if instruction else row["question"]
        problems.append(Problem(prompt, str(answer), {"solution": row["answer"], "line": number}))
    if not problems:
        raise DataError(f"{file}: holds no problem.")
    return problems


_HELD_OUT, _MOST_SUMS = 0.1, 10_000


def arithmetic(
    limit: int, split: str = "train", *, seed: int = 0, form: str = "bare", instruction: str = ""
) -> list[Problem]:
    """At most 10,000 sums ``a + b`` with ``0 <= a, b < limit``, in an order that the seed decides.

    A tenth of the pairs make the test split. They are set aside in both orders: if 3+4 is tested, 4+3 was not trained
    on. ``form``: ``bare`` (``"3+4="``) or ``chat`` (``"What is 3 + 4?"`` and the instruction).
    """
    low, high = np.triu_indices(limit)
    rng = np.random.default_rng([seed, limit])
    order = rng.permutation(len(low))
    tested = max(1, round(_HELD_OUT * len(low)))
    chosen = order[:tested] if split == "test" else order[tested:]
    pairs = np.stack([low[chosen], high[chosen]], axis=1)
    pairs = np.concatenate([pairs, pairs[pairs[:, 0] != pairs[:, 1], ::-1]])
    pairs = pairs[rng.permutation(len(pairs))][:_MOST_SUMS]
    more = f"\n{instruction}" if instruction else ""
    return [
        Problem(f"{a}+{b}=" if form == "bare" else f"What is {a} + {b}?{more}", str(a + b), {"a": a, "b": b})
        for a, b in pairs.tolist()
    ]


def reasoning_gym(
    task: str, split: str = "train", *, seed: int = 0, count: int = 1000, instruction: str = "", **options: Any
) -> list[Problem]:
    """Problems of a reasoning-gym task; the two splits have different seeds. Score with ``reward: reasoning_gym``."""
    module = reasoning_gym_module()
    try:
        entries = module.create_dataset(task, size=count, seed=2 * seed + SPLITS.index(split), **options)
    except Exception as error:  # its checks for names and options
        raise DataError(f"reasoning_gym: task {task!r} with {options}: {error}") from None
    return [
        Problem(
            f"{entry['question']}\n{instruction}" if instruction else entry["question"],
            str(entry["answer"]),
            {"task": task, "entry": entry},
        )
        for entry in entries
    ]


def reasoning_gym_module() -> Any:
    """The package, or a word on how to get it."""
    return package("reasoning_gym", DataError("this task needs reasoning-gym: pip install 'logitless[reasoning]'"))
