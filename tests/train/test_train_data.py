"""Problems and rewards: determinism, disjoint splits, files that are wrong, and answers found in any text."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from logitless.train.data import DataError, Problem, arithmetic, batch, gsm8k, reasoning_gym
from logitless.train.reward import (
    RewardError,
    exact_match,
    exact_text,
    extract_answer,
    format_reward,
    load_reward,
    parse_number,
)

SIX = [Problem(str(i), str(i)) for i in range(6)]


def test_a_batch_depends_on_seed_and_step_alone() -> None:
    run = [batch(SIX, 3, step, 4) for step in range(9)]
    assert [batch(SIX, 3, step, 4) for step in reversed(range(9))] == run[::-1]
    assert [batch(SIX, 4, step, 4) for step in range(9)] != run
    flat = [problem for one in run for problem in one]
    passes = [flat[i : i + 6] for i in range(0, 36, 6)]
    assert all(sorted(p.prompt for p in one) == sorted(p.prompt for p in SIX) for one in passes)
    assert len({tuple(p.prompt for p in one) for one in passes}) > 1, "each pass has an order of its own"


def test_a_batch_may_be_larger_than_the_dataset() -> None:
    assert sorted(p.prompt for p in batch(SIX[:2], 0, 1, 6)) == ["0", "0", "0", "1", "1", "1"]


def test_sums_are_right_and_the_test_split_was_not_trained_on() -> None:
    train, test = (arithmetic(20, split, seed=1) for split in ("train", "test"))
    pairs = [{(min(p.meta["a"], p.meta["b"]), max(p.meta["a"], p.meta["b"])) for p in part} for part in (train, test)]
    assert not pairs[0] & pairs[1]
    assert len(train) + len(test) == 400 and 30 <= len(test) <= 50
    assert all(
        int(p.answer) == p.meta["a"] + p.meta["b"] and p.prompt == f"{p.meta['a']}+{p.meta['b']}=" for p in train
    )
    assert arithmetic(20, seed=1) == train != arithmetic(20, seed=2)
    chat = arithmetic(1000, form="chat", instruction="Number only.")
    assert len(chat) == 10_000
    assert chat[0].prompt == f"What is {chat[0].meta['a']} + {chat[0].meta['b']}?\nNumber only."


def jsonl(path: Path, *rows: Any) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


GOOD = {"question": "Two and\u2028two?", "answer": "2+2=<<2+2=4>>4\n#### 1,004"}


def test_gsm8k_is_read_from_a_file_or_a_folder(tmp_path: Path) -> None:
    jsonl(tmp_path / "test.jsonl", GOOD, "", GOOD)
    for path in (tmp_path, tmp_path / "test.jsonl"):
        problems = gsm8k(path, "test", instruction="Answer.")
        assert [p.meta["line"] for p in problems] == [1, 3]
        assert problems[0].prompt == "Two and\u2028two?\nAnswer." and problems[0].answer == "1004"
        assert exact_match(problems[0].meta["solution"], problems[0]) == 1.0
    assert "####" in gsm8k(tmp_path, "test")[0].prompt
    with pytest.raises(DataError, match=r"train.jsonl: no such file"):
        gsm8k(tmp_path, "train")


@pytest.mark.parametrize(
    "line, message",
    [
        ("{oops", "line 2: not JSON"),
        ("[1]", "line 2: expected an object with the text 'question'"),
        ({"question": "q"}, "line 2: expected an object with the text 'answer'"),
        ({"question": " ", "answer": "#### 1"}, "line 2: expected an object with the text 'question'"),
        ({"question": "q", "answer": 4}, "line 2: expected an object with the text 'answer'"),
        ({"question": "q", "answer": "it is 4"}, "line 2: the answer has no number after ####"),
        ("[" * 100_000, "line 2: not JSON"),
        ('{"question": ' + "9" * 5000 + "}", "line 2: not JSON"),
        ('{"question": 1e999999}', "line 2: expected an object with the text 'question'"),
        ("\x00", "line 2: not JSON"),
        ('"text"', "line 2: expected an object"),
    ],
)
def test_bad_lines_are_named(line: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        gsm8k(jsonl(tmp_path / "x.jsonl", GOOD, line))


def test_empty_and_binary_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no problem"):
        gsm8k(jsonl(tmp_path / "x.jsonl", "", " "))
    (tmp_path / "y.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="not UTF-8"):
        gsm8k(tmp_path / "y.jsonl")


def test_reasoning_gym_is_optional_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "reasoning_gym", None)
    with pytest.raises(DataError, match=r"pip install 'logitless\[reasoning\]'"):
        reasoning_gym("leg_counting")


def test_reasoning_gym_problems_score_their_own_answers() -> None:
    pytest.importorskip("reasoning_gym", reason="the reasoning extra is not installed")
    problems = reasoning_gym("leg_counting", count=3, instruction="Answer after ####.")
    assert problems != reasoning_gym("leg_counting", "test", count=3)
    reward = load_reward("reasoning_gym")
    for problem in problems:
        assert reward(f"So.\n#### {problem.answer}", problem) == 1.0
        assert reward(f"It is {problem.answer} or so, or not", problem) == 0.0
    with pytest.raises(DataError, match="task 'no_such_task'"):
        reasoning_gym("no_such_task")


@pytest.mark.parametrize(
    "text, number",
    [
        ("so\n#### 72", 72),
        ("#### 1,234,567", 1234567),
        ("#### $1,234.50 per week", Fraction(12345, 10)),
        ("####-5", -5),
        ("#### -$5", -5),
        ("#### $-5", -5),
        ("#### 18 dollars, not 20", 18),
        ("#### 18.", 18),
        ("#### 18.0", 18),
        ("#### 3/4", Fraction(3, 4)),
        ("#### 5\nQuestion: more?\n#### 6", 5),
        ("write it after ####. So it is\n#### 7", 7),
        ("#### none, though 9 was near", 9),
        ("She has 3 apples and 4 pears, 7 in all.", 7),
        ("the answer is **1,000**", 1000),
        ("it fell to -12 degrees", -12),
        ("it fell to \N{MINUS SIGN}12 degrees", -12),
        ("10-3", 3),
        ("10 - 3 = 7", 7),
        ("- 3 pears", 3),
        ("a total of $.50", Fraction(1, 2)),
        ("1,2345", 2345),
        ("x=-7", -7),
        ("one of 1,2,3", 3),
        ("about 18kg", 18),
        ("50%", 50),
        ("v1.2.3", 3),
        ("no number here", None),
        ("", None),
        ("#### ", None),
        ("#### 4/0", None),
        ("#### " + "9" * 5000, None),
        ("٣", None),
    ],
)
def test_the_number_of_a_completion(text: str, number: Any) -> None:
    assert extract_answer(text) == number


def test_nothing_is_evaluated() -> None:
    problem = Problem("1+1=", "2")
    for text in ("#### 1+1", "#### __import__('os').getpid()", "{1+1}", "#### 10**9", "#### 0x2", "1+1"):
        assert exact_match(text, problem) == 0.0, text
    assert exact_match("#### 2**10**10**10", problem) == 1.0, "the first number is all that is read"
    for text in ("1e5", "nan", "inf", "0x10", "1_000", "--1", ""):
        assert parse_number(text) is None


def test_exact_match_compares_numbers_and_needs_one() -> None:
    assert exact_match("#### 2.50", Problem("", "5/2")) == 1.0
    assert exact_match("#### 2.51", Problem("", "5/2")) == 0.0
    assert exact_match("nothing", Problem("", "0")) == 0.0
    with pytest.raises(RewardError, match="the answer 'blue' is not a number; use exact_text"):
        exact_match("blue", Problem("", "blue"))
    assert exact_text(" blue\n", Problem("", "blue")) == 1.0
    assert exact_text("12+7", Problem("", "7")) == 0.0


@pytest.mark.parametrize(
    "text, score",
    [
        ("work\n#### 5", 1.0),
        ("work\n####5\n", 1.0),
        ("#### -1,000.5", 1.0),
        ("5", 0.0),
        ("#### 5 apples", 0.0),
        ("#### 5\n#### 5", 0.0),
        ("####", 0.0),
    ],
)
def test_the_form_of_a_completion(text: str, score: float) -> None:
    assert format_reward(text, SIX[0]) == score


def test_a_reward_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards.py").write_text(
        "def short(completion, problem):\n    return len(completion) < 3\n"
        "def one(completion):\n    return 1.0\n"
        "def nan(completion, problem):\n    return float('nan')\n"
        "def word(completion, problem):\n    return 'good'\n"
        "number = 3\n"
    )
    (tmp_path / "broken.py").write_text("import no_such_package")
    monkeypatch.syspath_prepend(str(tmp_path))
    for spec in ("my_rewards:short", f"{tmp_path}/my_rewards.py:short"):
        assert [load_reward(spec)(text, SIX[0]) for text in ("ab", "abc")] == [1.0, 0.0]
    for name in ("nan", "word"):
        with pytest.raises(RewardError, match=f"'my_rewards:{name}' returned .*, expected a finite number"):
            load_reward(f"my_rewards:{name}")("", SIX[0])
    for spec, message in (
        ("my_rewards:one", r"cannot be called as one\(completion, problem\)"),
        ("my_rewards:two", "has no function 'two'"),
        ("my_rewards:number", "has no function 'number'"),
        ("no_such_module:f", "importing no_such_module failed: ModuleNotFoundError"),
        ("broken:f", "importing broken failed: ModuleNotFoundError.*no_such_package"),
        (f"{tmp_path}/missing.py:f", "importing .*missing.py failed: FileNotFoundError"),
        ("exactmatch", "Did you mean 'exact_match'"),
    ):
        with pytest.raises(RewardError, match=message):
            load_reward(spec)


@pytest.mark.parametrize(
    "value, taken", [("1e9", True), ("-1e9", True), ("2e9", False), ("-2e9", False), ("-inf", False)]
)
def test_a_reward_of_either_sign_is_bounded(value: str, taken: bool, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(f"def reward(completion, problem):\n    return float('{value}')\n")
    reward = load_reward(f"{tmp_path / 'own.py'}:reward")
    if taken:
        assert reward("2", Problem("1+1=", "2")) == float(value)
        return
    with pytest.raises(RewardError, match="expected a finite number of at most"):
        reward("2", Problem("1+1=", "2"))
