"""A training configuration's defaults, written out, and its bounds: the last value taken, the first refused."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest

from logitless.train.config import ConfigError, TrainConfig, load
from logitless.train.config_check import check

DEFAULTS: dict[str, dict[str, Any]] = {
    "model.lora": dict(rank=0, alpha=16.0, targets=["q", "k", "v", "o", "gate", "up", "down"]),
    "data": dict(kind="arithmetic", limit=20, form="bare"),
    "reward": dict(weight=1.0, format_weight=0.0, overlong_buffer=0, overlong_penalty=1.0, timeout_s=60.0),
    "rollout": dict(
        max_prompt_tokens=6, max_completion_tokens=3, temperature=1.0, top_p=1.0, top_k=0, rows=0, redraw=0,
        record=0,
    ),
    "train": dict(
        steps=100, prompts_per_step=64, group_size=8, inner_epochs=2, minibatches=1, microbatch=0, microbatch_tail=0,
        packing="off", pack_length=0, skip_rows=False, report_skipped=False, learning_rate=3e-4, warmup_steps=10,
        schedule="constant", clip_norm=1.0, weight_decay=0.0, adam_b1=0.9, adam_b2=0.999, adam_eps=1e-8, kl_beta=None,
        kl_report=True, advantage_scale="group", advantage_eps=1e-4, max_skipped=5,
    ),
    "train.loss": dict(
        backend="auto", sparse_backward="off", logits_dtype="float32", head_grad_dtype="float32", chunk_size=0,
        memory_budget=0,
    ),
    "warm_start": dict(steps=300, batch=64, learning_rate=1e-3, wrong_fraction=0.5),
    "mesh": dict(data=1, fsdp=1, tensor=1),
    "eval": dict(every=25, problems=64),
    "checkpoint": dict(every=20, keep=2),
    "ab": dict(
        baseline="reference", kernel="", arms={}, replay=True, replay_steps=0, turns=False, replay_factor=10.0,
        control=False, seeds=1, control_factor=5.0, confidence=0.99, reward_tolerance=0.02, kl_tolerance=0.05,
        timeout_s=7200, parallel=False,
    ),
}  # fmt: skip
DEFAULT = load(None)
LEAST = {
    0: "seed reward.weight reward.format_weight reward.overlong_buffer reward.overlong_penalty rollout.rows "
    "rollout.redraw rollout.record rollout.top_k train.microbatch train.microbatch_tail train.pack_length "
    "train.warmup_steps train.weight_decay train.loss.chunk_size train.loss.memory_budget eval.every checkpoint.every "
    "ab.replay_steps ab.reward_tolerance ab.kl_tolerance warm_start.steps model.lora.rank samples",
    1: "rollout.max_prompt_tokens rollout.max_completion_tokens train.steps train.prompts_per_step train.group_size "
    "train.inner_epochs train.minibatches train.max_skipped warm_start.batch mesh.data mesh.fsdp mesh.tensor "
    "eval.problems checkpoint.keep ab.replay_factor ab.control_factor ab.seeds ab.timeout_s",
}
BOUNDS = [(key, least) for least, keys in LEAST.items() for key in keys.split()]
ABOVE_ZERO = (
    "model.lora.alpha reward.timeout_s rollout.temperature train.learning_rate train.clip_norm train.adam_eps "
    "train.advantage_eps warm_start.learning_rate"
)
SHARES = [  # key, taken, refused
    ("rollout.top_p", [1.0, 1e-3], [0.0, 1.001]),
    ("warm_start.wrong_fraction", [0.0, 1.0], [-0.001, 1.001]),
    ("ab.confidence", [0.5, 0.999], [0.499, 1.0]),
    ("train.adam_b1", [0.0, 0.999], [-0.001, 1.0]),
    ("train.adam_b2", [0.0, 0.999], [-0.001, 1.0]),
    ("train.kl_beta", [0.0, 2.0, None], [-0.001, float("inf"), float("nan")]),
    *((key, [1e-9], [0.0, -1.0, float("inf"), float("nan")]) for key in ABOVE_ZERO.split()),
]


def complaint(**changes: Any) -> str:
    """What is said of the default configuration with other values; empty where it is taken."""
    config = copy.deepcopy(DEFAULT)
    for key, value in changes.items():
        *path, name = key.split(".")
        at: Any = config
        for part in path:
            at = getattr(at, part)
        setattr(at, name, value)
    try:
        check(config)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("section", DEFAULTS)
def test_defaults(section: str) -> None:
    at: Any = DEFAULT
    for part in section.split("."):
        at = getattr(at, part)
    fields = {f.name: getattr(at, f.name) for f in dataclasses.fields(at)}
    assert {k: v for k, v in fields.items() if k in DEFAULTS[section]} == DEFAULTS[section]
    numbers = {k for k, v in fields.items() if isinstance(v, int | float)}
    assert numbers <= DEFAULTS[section].keys(), "a number without a line in the table above"
    assert (DEFAULT.seed, DEFAULT.samples, TrainConfig().warm_start.steps) == (0, 4, None)


@pytest.mark.parametrize("key, least", BOUNDS)
def test_a_number_s_bound(key: str, least: int) -> None:
    assert "expected at least" not in complaint(**{key: least}) or key == "train.group_size"
    assert complaint(**{key: least - 1}).startswith(f"{key}: {least - 1}, expected")


@pytest.mark.parametrize("key, taken, refused", SHARES)
def test_a_share_s_bounds(key: str, taken: list[Any], refused: list[Any]) -> None:
    for value in taken:
        assert not complaint(**{key: value}).startswith(f"{key}: {value}, expected")
    for value in refused:
        assert complaint(**{key: value}).startswith(f"{key}: {value}, expected")


GROUPS = {"train.prompts_per_step": 4, "train.group_size": 6}
PACKED = {**GROUPS, "train.packing": "sequences", "train.microbatch": 4}
PAIRS: list[tuple[dict[str, Any], str]] = [
    ({"train.group_size": 2}, ""),
    ({"train.group_size": 1}, "train.group_size: 1 completion a prompt has no group"),
    ({"train.group_size": 1, "train.advantage_scale": "none"}, ""),
    ({**GROUPS, "train.minibatches": 2}, ""),
    ({**GROUPS, "train.minibatches": 3}, "train.minibatches: 4 prompts do not split into 3"),
    ({**GROUPS, "train.minibatches": 2, "train.microbatch": 4}, ""),
    ({**GROUPS, "train.minibatches": 2, "train.microbatch": 8}, "train.microbatch: 12 rows of an update"),
    ({**GROUPS, "rollout.rows": 12}, ""),
    ({**GROUPS, "rollout.rows": 8}, "rollout.rows: 8, expected a multiple"),
    ({**GROUPS, "rollout.rows": 18}, "rollout.rows: 18, expected a multiple"),
    ({**GROUPS, "mesh.data": 4, "mesh.fsdp": 3}, ""),
    ({**GROUPS, "mesh.data": 4, "mesh.fsdp": 4}, "mesh: data x fsdp = 16 does not divide the 24 rows"),
    ({**GROUPS, "mesh.fsdp": 8, "train.microbatch": 12}, "mesh: data x fsdp = 8 does not divide the 12 rows"),
    ({"train.loss.chunk_size": 1, "train.loss.memory_budget": 1}, "train.loss: give chunk_size or memory_budget"),
    ({"reward.overlong_buffer": 3}, ""),
    ({"reward.overlong_buffer": 4}, "reward.overlong_buffer: 4 tokens, more than"),
    (PACKED, ""),
    ({**PACKED, "train.microbatch": 0}, "train.packing: saves nothing"),
    ({**PACKED, "train.microbatch_tail": 2}, ""),
    ({**PACKED, "train.microbatch_tail": 3}, "train.microbatch_tail: 3 rows do not divide the 4"),
    ({**PACKED, "train.pack_length": 8}, ""),
    ({**PACKED, "train.pack_length": 7}, "train.pack_length: 7, but a prompt with its completion may take 8 slots"),
    ({**PACKED, "train.skip_rows": True, "train.report_skipped": True}, ""),
    ({**PACKED, "train.report_skipped": True}, "train.report_skipped: true has no effect"),
    *(({f"train.{k}": 2}, f"train.{k}: 2 has no effect with train.packing off") for k in ("skip_rows", "pack_length")),
    ({"train.microbatch_tail": 2}, "train.microbatch_tail: 2 has no effect with train.packing off"),
    ({**PACKED, "mesh.data": 4, "mesh.fsdp": 2}, "mesh: data x fsdp = 8 does not divide the 4 rows of a gradient"),
    ({**PACKED, "train.microbatch_tail": 2, "mesh.data": 4}, "mesh: data x fsdp = 4 does not divide the 2 rows"),
    ({"train.packing": "share"}, "train.packing: 'share', expected one of off, sequences, shared. Did you mean"),
    ({"data.kind": "reasoning_gym", "warm_start.steps": 0}, "data.task: empty"),
    ({"train.loss.backend": "naive", "train.objective": {"top_entropy": 0.5}}, "train.objective.top_entropy: train"),
    ({"train.warmup_steps": 100}, ""),
    ({"train.warmup_steps": 99, "train.schedule": "linear"}, ""),
    ({"train.warmup_steps": 100, "train.schedule": "linear"}, "train.warmup_steps: 100 of 100 steps leave nothing"),
    ({"reward.weight": 0.0}, "reward: weight and format_weight are both 0"),
    ({"reward.weight": 0.0, "reward.format_weight": 1.0}, ""),
    ({"train.loss.backend": "naive"}, ""),
    ({"train.loss.backend": "naive", "mesh.tensor": 2}, "mesh: train.loss.backend naive is for one device"),
    ({"train.loss.backend": "naive", "rollout.temperature": 0.5}, "rollout.temperature: 0.5, but"),
    ({"train.loss.backend": "naive", "train.objective": {"entropy_coef": 0.1}}, "train.objective.entropy_coef: train"),
    ({"train.objective": {"top_entropy": 0.5}}, ""),
    ({"train.objective": {"top_entropy": 0.5}, "train.microbatch": 64}, "train.objective.top_entropy takes a quantile"),
    (
        {"train.objective": {"aggregation": "bnpo", "sequence_error_max": 2.0}, "train.microbatch": 64},
        "train.objective.sequence_error_max takes sequences out of the denominators",
    ),
    ({"ab.control": True}, ""),
    ({"ab.control": True, "ab.seeds": 2}, "ab.control and ab.seeds: two tests"),
    ({"ab.arms": {"a": {}, "b": {"chunk_size": 4}}}, ""),
    ({"ab.arms": {"a": {}}}, "ab.arms: only a; expected at least two"),
    ({"ab.arms": {"a": {}, "b": {}}, "ab.baseline": "naive"}, "ab.baseline and ab.kernel: ab.arms names"),
    ({"ab.arms": {"a": {}, "b": {}}, "ab.kernel": "chunked"}, "ab.baseline and ab.kernel: ab.arms names"),
    ({"ab.arms": {"a": {}, "b": {"chunk": 4}}}, "ab.arms.b.chunk is not a key of train.loss"),
    ({"name": "a/b"}, "name: 'a/b', expected a name"),
    ({"data.path": "x"}, "data.path: belongs to data.kind gsm8k"),
    ({"wandb_mode": "sometimes"}, "wandb_mode"),
]


@pytest.mark.parametrize("changes, message", PAIRS)
def test_values_that_belong_together(changes: dict[str, Any], message: str) -> None:
    said = complaint(**changes)
    assert said.startswith(message) if message else said == ""
