"""What a completion earns. Answers are found by pattern and compared as exact numbers; nothing is ever evaluated.

A reward is a function ``(completion: str, problem: Problem) -> float``. :func:`load_reward` takes the name of one from
here, or ``"package.module:function"`` or ``"path/to/file.py:function"`` of one's own.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from logitless.train.bounds import TooLong, time_limit
from logitless.train.data import Problem
from logitless.train.files import did_you_mean

Reward = Callable[[str, Problem], float]

# A sign counts where it touches its number and cannot be a difference ("10-3") or a bullet ("- 3"); commas count where
# they group thousands.
_SIGN = r"(?:(?<![0-9A-Za-z)\]])-)?(?:\$\s?-?)?"
_DIGITS = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9A-Za-z])\.[0-9]+)"
_NUMBER = rf"{_SIGN}{_DIGITS}(?:/[0-9]+)?"
_ANYWHERE = re.compile(_NUMBER)
_MARKED = re.compile(rf"####\s*({_NUMBER})")
_FORMATTED = re.compile(rf"####[ ]?{_NUMBER}\Z")
LARGEST = 1e9
"""Bound for a reward and for its weight: their product, squared and summed over a group, stays far below the float32
maximum."""
_LONGEST = 64  # characters of a number: a model can write any number of digits


class RewardError(ValueError):
    """A reward function that cannot be used, or that returned no number."""


def parse_number(text: str) -> Fraction | None:
    """``"1,234"``, ``"-$5.50"``, ``"3/4"`` as an exact number, or ``None``."""
    plain = re.sub(r"[\s$,]", "", text)
    if len(plain) > _LONGEST or not re.fullmatch(r"-?([0-9]+(\.[0-9]+)?|\.[0-9]+)(/[0-9]+)?", plain):
        return None
    numerator, _, denominator = plain.partition("/")
    if denominator and int(denominator) == 0:
        return None
    return Fraction(numerator) / Fraction(denominator or "1")


def extract_answer(text: str) -> Fraction | None:
    """The number after the first ``####`` that has one, else the last number in the text, else ``None``."""
    text = text.replace("\N{MINUS SIGN}", "-")
    marked = _MARKED.search(text)
    if marked:
        return parse_number(marked.group(1))
    numbers = _ANYWHERE.findall(text)
    return parse_number(numbers[-1]) if numbers else None


def exact_match(completion: str, problem: Problem) -> float:
    """1 where the completion's number is the problem's answer, else 0."""
    expected = parse_number(problem.answer)
    if expected is None:
        raise RewardError(
            f"exact_match: the answer {problem.answer!r} is not a number; use exact_text or a reward of your own."
        )
    return float(extract_answer(completion) == expected)


def exact_text(completion: str, problem: Problem) -> float:
    """1 where the completion, without the blanks around it, is the answer and nothing else."""
    return float(completion.strip() == problem.answer.strip())


def format_reward(completion: str, problem: Problem) -> float:
    """1 if the completion ends with its only ``####`` and a number, else 0."""
    text = completion.strip()
    return float(text.count("####") == 1 and _FORMATTED.search(text) is not None)


def reasoning_gym_score(completion: str, problem: Problem) -> float:
    """The task's own scorer on the text after the last ``####`` (or all of it); 1 at a full score alone.

    Its scorers give part of the points for an answer that is merely contained in a longer text.
    """
    from logitless.train.data import reasoning_gym_module

    score = reasoning_gym_module().get_score_answer_fn(problem.meta["task"])
    answer = completion.rpartition("####")[2].strip()
    return float(score(answer, problem.meta["entry"]) >= 1.0)


REWARDS: dict[str, Reward] = {
    "exact_match": exact_match,
    "exact_text": exact_text,
    "format": format_reward,
    "reasoning_gym": reasoning_gym_score,
}


def load_reward(spec: str) -> Reward:
    """A reward by name, or a function of one's own as ``"package.module:function"`` or ``"file.py:function"``.

    The function takes ``(completion: str, problem: Problem)`` and returns a finite number; both are checked, the
    signature here and the number at each call. The module's code runs: name only code you trust.
    """
    if spec in REWARDS:
        return REWARDS[spec]
    module_name, _, name = spec.rpartition(":")
    if not module_name or not name:
        hint = did_you_mean(spec, REWARDS)
        raise RewardError(f"reward {spec!r}: expected {', '.join(REWARDS)} or 'package.module:function'.{hint}")
    function = function_of("reward", spec)
    try:
        inspect.signature(function).bind("completion", "problem")
    except TypeError as error:
        raise RewardError(f"reward {spec!r}: cannot be called as {name}(completion, problem): {error}.") from None

    def checked(completion: str, problem: Problem) -> float:
        """The function's number; what it raises is for :func:`score` to name."""
        value = function(completion, problem)
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not abs(number) <= LARGEST:
            given = " ".join(repr(value).split())[:80]
            raise RewardError(
                f"reward {spec!r} returned {given}, expected a finite number of at most {LARGEST:g} in size."
            )
        return number

    return checked


def score(name: str, reward: Reward, completion: str, problem: Problem, timeout_s: float) -> float:
    """What a completion earns; a reward that raises, or takes too long, is named with the sample that did it."""
    try:
        with time_limit(timeout_s):
            return reward(completion, problem)
    except RewardError as error:
        reason = str(error)
    except TooLong:
        reason = f"reward {name!r} took longer than reward.timeout_s = {timeout_s:g} s"
    except Exception as error:
        reason = f"reward {name!r} raised {type(error).__name__}: {error}"
    raise RewardError(f"{reason} (completion {completion[:80]!r}, problem {problem.prompt[:80]!r})")


def function_of(kind: str, spec: str) -> Callable[..., Any]:
    """The function that ``"package.module:function"`` or ``"file.py:function"`` names; its module's code runs."""
    module_name, _, name = spec.rpartition(":")
    if not module_name or not name:
        raise RewardError(f"{kind} {spec!r}: expected 'package.module:function' or 'file.py:function'.")
    module = _module(kind, spec, module_name)
    function = getattr(module, name, None)
    if not callable(function):
        raise RewardError(f"{kind} {spec!r}: {module_name} has no function {name!r}.")
    return function


def overlong_penalty(lengths: np.ndarray, limit: int, buffer: int, penalty: float) -> np.ndarray:
    """DAPO's soft punishment of long completions, ``[B]``: 0 up to ``limit - buffer`` tokens, then linearly down to
    ``-penalty`` at ``limit``.

    >>> import numpy as np
    >>> from logitless.train.reward import overlong_penalty
    >>> overlong_penalty(np.array([10, 80, 90, 100]), limit=100, buffer=20, penalty=1.0).tolist()
    [0.0, 0.0, -0.5, -1.0]
    """
    share = np.clip((lengths - (limit - buffer)) / buffer, 0.0, 1.0)
    return np.where(share > 0, -penalty * share, 0.0).astype(np.float32)


def _module(kind: str, spec: str, name: str) -> Any:
    try:
        if not name.endswith(".py"):
            return importlib.import_module(name)
        found = importlib.util.spec_from_file_location(Path(name).stem, name)
        assert found is not None and found.loader is not None
        module = importlib.util.module_from_spec(found)
        found.loader.exec_module(module)
        return module
    except Exception as error:  # whatever the user's module raises
        raise RewardError(f"{kind} {spec!r}: importing {name} failed: {type(error).__name__}: {error}") from error
