"""Files and functions from elsewhere: what is wrong with them ends in one line, within bounds of time and memory."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

import jax
import pytest

from hub_folder import save_safetensors, save_tokenizer
from logitless.lab import cli
from logitless.train import bounds, tokenizer
from logitless.train.config import ConfigError, load
from logitless.train.data import Problem
from logitless.train.model import ModelError, init
from logitless.train.reward import RewardError, load_reward, score
from logitless.train.tokenizer import render
from logitless.train.weights import load_model
from train_micro import MICRO

SUM = Problem("1+1=", "2")
CHAT = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("text", ["- a\n- b\n", "just text\n", "a: [1, 2\n", "? : :\n", "[" * 5000])
def test_bad_configuration_files_end_in_one_line(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"c\.yaml"):
        load(file)
    assert cli.main(["train", "--config", str(file)]) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ([], "expected a JSON object"),
        ({"weight_map": ["a"]}, "weight_map is not an object"),
        ({}, "weight_map is not an object"),
        ({"weight_map": {"model.norm.weight": 3}}, "weight_map is not an object"),
        ({"weight_map": {"model.norm.weight": "../outside.safetensors"}}, "not a file of this folder"),
        ({"weight_map": {"model.norm.weight": "/etc/passwd"}}, "not a file of this folder"),
        ({"weight_map": {"model.norm.weight": ".."}}, "not a file of this folder"),
        ({"weight_map": {"model.norm.weight": "gone.safetensors"}}, "names gone.safetensors, which is not there"),
    ],
)
def test_a_malformed_index_of_weights_is_refused(tmp_path: Path, index: Any, message: str) -> None:
    save_safetensors(tmp_path / "m", MICRO, init(MICRO, jax.random.key(0)))
    (tmp_path / "outside.safetensors").write_bytes((tmp_path / "m" / "model.safetensors").read_bytes())
    (tmp_path / "m" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=message):
        load_model(tmp_path / "m")
    (tmp_path / "m" / "config.json").write_text("[" * 100_000)
    with pytest.raises(ModelError, match=r"config\.json: not readable as JSON"):
        load_model(tmp_path / "m")


@pytest.mark.parametrize(
    "template",
    [
        "{{ 1 // 0 }}",
        "{{ 'a' * 30000000000000 }}",
        "{{ ('a' * 2000000000) | length }}",
        "{% set ns = namespace(s='aaaaaaaaaa') %}"
        "{% for i in range(14) %}{% set ns.s = ns.s.replace('a', 'aaaaaaaaaa') %}{% endfor %}{{ ns.s | length }}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ messages[0].content.nothing.at_all }}",
        "{% if %}",
        "{{ ''.__class__.__mro__ }}",
        "{{ raise_exception('no') }}",
    ],
)
def test_a_template_has_bounds(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "TEMPLATE_SECONDS", 0.5)
    start = time.monotonic()
    said = "refuses these messages: no" if "raise" in template else "cannot be rendered|is not rendered after 0.5 s"
    with pytest.raises(ModelError, match=f"the chat template ({said})"):
        render(template, CHAT, True, {})
    assert time.monotonic() - start < 30
    assert render("{{ messages[0].content }}!", CHAT, True, {}) == "hi!"


@pytest.mark.parametrize(("given", "stop"), [(None, (0,)), (2, (0, 2)), ([0, 2, 3, 2], (0, 2, 3))])
def test_all_end_tokens_of_a_folder_end_a_completion(tmp_path: Path, given: Any, stop: tuple[int, ...]) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": given}))
    assert tokenizer.load_tokenizer(tmp_path).stop_ids == stop


@pytest.mark.parametrize(
    ("file", "change"),
    [
        *(("generation_config.json", {"eos_token_id": i}) for i in (99999999999, 4000000000, 4, -1, True, "a")),
        ("generation_config.json", {"eos_token_id": [0, -1]}),
        ("generation_config.json", {"eos_token_id": [True]}),
        ("tokenizer_config.json", {"unk_token": 5}),
        ("tokenizer_config.json", {"unk_token": {"text": "<unk>"}}),
        ("tokenizer_config.json", {"eos_token": "<nope>"}),
        ("tokenizer_config.json", {"chat_template": "{{ messages[0].content }}\ud800"}),
        ("tokenizer_config.json", {"chat_template": 5}),
        ("tokenizer_config.json", {"chat_template": [5]}),
        ("tokenizer.json", {"model": {"type": "WordLevel", "vocab": {"<eos>": 0, "a": 1}, "unk_token": "<unk>"}}),
        ("tokenizer.json", {"model": {"type": "WordLevel", "vocab": {"<eos>": 4000000000}, "unk_token": "<eos>"}}),
    ],
)
def test_strangers_tokenizers_are_refused(tmp_path: Path, file: str, change: dict[str, Any]) -> None:
    save_tokenizer(tmp_path)

    def use() -> list[int]:
        return tokenizer.load_tokenizer(tmp_path).encode_prompt("ab", chat=True)

    assert use() == [3]
    path = tmp_path / file
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(before | change))
    with pytest.raises(ModelError, match=str(tmp_path)) as error:
        use()
    assert "\n" not in str(error.value)


def test_a_time_limit_cannot_be_caught_by_what_it_cuts_short() -> None:
    def stubborn() -> None:
        while True:
            with contextlib.suppress(Exception):
                time.sleep(0.01)

    with pytest.raises(bounds.TooLong), bounds.time_limit(0.1):
        stubborn()
    with bounds.time_limit(0.05):
        pass
    time.sleep(0.1)  # the alarm is off


REWARDS = """
import re
def raises(completion, problem):
    return {}[completion]
def hangs(completion, problem):
    while True: pass
def backtracks(completion, problem):
    return bool(re.match(r"(a+)+$", "a" * 60 + "b"))
def texts(completion, problem):
    return "much"
def large(completion, problem):
    return 1e39
"""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raises", r"raises' raised KeyError: '12' \(completion '12', problem '1\+1='\)"),
        ("hangs", r"hangs' took longer than reward.timeout_s = 0.2 s \(completion '12'"),
        ("backtracks", r"backtracks' took longer than reward.timeout_s = 0.2 s"),
        ("texts", r"texts' returned 'much', expected a finite number of at most 1e\+09 in size. \(completion '12'"),
        ("large", r"large' returned 1e\+39, expected a finite number .* \(completion '12', problem '1\+1='\)"),
    ],
)
def test_a_reward_that_fails_is_named_with_its_sample(tmp_path: Path, name: str, message: str) -> None:
    file = tmp_path / "rewards.py"
    file.write_text(REWARDS)
    spec = f"{file}:{name}"
    with pytest.raises(RewardError, match=message):
        score(spec, load_reward(spec), "12", SUM, 0.2)
    assert score("exact_match", load_reward("exact_match"), "2", SUM, 0.2) == 1.0
