"""What a training configuration may hold; see :mod:`logitless.train.config`. Nothing here looks for a device."""

from __future__ import annotations

import dataclasses
import re

from logitless.lab.tools.command_config import ConfigError, check_common, check_fields, sparse_backward_of
from logitless.objectives.inputs import statistics_temperature
from logitless.objectives.objective import Objective
from logitless.train.config import (
    LORA_TARGETS,
    NAIVE,
    Loss,
    TrainConfig,
    loss_backend,
    needs_rollout,
    objective_of,
    warm_start_fits,
)
from logitless.train.files import did_you_mean
from logitless.train.reward import RewardError, load_reward


def check(c: TrainConfig) -> None:
    """Refuse by key what cannot be run."""
    check_common(c.seed, c.wandb_mode)
    check_fields(c)
    if c.train.warmup_steps >= c.train.steps and c.train.schedule != "constant":
        raise ConfigError(
            f"train.warmup_steps: {c.train.warmup_steps} of {c.train.steps} steps leave nothing for the "
            f"{c.train.schedule} schedule"
        )
    _check_rows(c)
    _check_draws(c)
    _check_task(c)
    _check_kernel_switch(c)
    _check_arms(c)
    objective = objective_of(c)
    _check_naive(c, objective)
    _check_sparse(c)
    divided = objective.temperature_on == "logp" and objective.temperature is not None
    if c.rollout.sampler and divided and needs_rollout(objective):
        raise ConfigError(
            "rollout.sampler: its log-probabilities are of logits divided by the temperature, which no correction can "
            "compare with those of temperature_on=logp; use temperature_on=logits, or rollout.temperature=1"
        )
    if objective.top_entropy is not None and c.train.microbatch:
        raise ConfigError(
            "train.objective.top_entropy takes a quantile over the whole update, which micro-batches do not see; "
            "set train.microbatch to 0"
        )
    if objective.sequence_error_max is not None and c.train.microbatch:
        raise ConfigError(
            "train.objective.sequence_error_max takes sequences out of the denominators of the whole update, which "
            "micro-batches do not see; set train.microbatch to 0"
        )


def _check_rows(c: TrainConfig) -> None:
    t = c.train
    rows = t.prompts_per_step * t.group_size
    if t.group_size < 2 and t.advantage_scale == "group":
        raise ConfigError("train.group_size: 1 completion a prompt has no group to compare with, expected at least 2")
    if t.prompts_per_step % t.minibatches:
        raise ConfigError(f"train.minibatches: {t.prompts_per_step} prompts do not split into {t.minibatches}")
    update_rows = rows // t.minibatches
    _check_packing(c)
    if t.microbatch and update_rows % t.microbatch and t.packing == "off":
        raise ConfigError(
            f"train.microbatch: {update_rows} rows of an update (prompts_per_step x group_size / minibatches) "
            f"do not split into micro-batches of {t.microbatch}"
        )
    if c.rollout.rows and (c.rollout.rows % t.group_size or rows % c.rollout.rows):
        raise ConfigError(
            f"rollout.rows: {c.rollout.rows}, expected a multiple of train.group_size ({t.group_size}) that divides "
            f"the {rows} rows of a step"
        )
    shards = c.mesh.data * c.mesh.fsdp
    gradient_rows = t.microbatch_tail or t.microbatch or update_rows
    if gradient_rows % shards:
        raise ConfigError(f"mesh: data x fsdp = {shards} does not divide the {gradient_rows} rows of a gradient")
    if t.loss.chunk_size and t.loss.memory_budget:
        raise ConfigError("train.loss: give chunk_size or memory_budget, not both")


def _check_draws(c: TrainConfig) -> None:
    r = c.rollout
    for key in ("redraw", "sampler"):
        if getattr(r, key) and r.kind != "sample":
            raise ConfigError(f"rollout.{key}: {getattr(r, key)!r} has no effect with rollout.kind {r.kind}")
    _check_support(c)
    if c.reward.overlong_buffer > r.max_completion_tokens:
        raise ConfigError(
            f"reward.overlong_buffer: {c.reward.overlong_buffer} tokens, more than rollout.max_completion_tokens "
            f"({r.max_completion_tokens})"
        )
    if c.reward.overlong_buffer and c.rollout.kind != "sample":
        raise ConfigError(f"reward.overlong_buffer: has no effect with rollout.kind {r.kind}")


def _check_support(c: TrainConfig) -> None:
    r = c.rollout
    if not r.top_k:
        return
    refusals = {
        f"rollout.kind {r.kind}": r.kind != "sample",
        "rollout.record": bool(r.record),
        "rollout.replay": bool(r.replay),
        f"train.loss.backend {NAIVE}": loss_backend(c) == NAIVE,
    }
    for what in (k for k, there in refusals.items() if there):
        raise ConfigError(f"rollout.top_k: {r.top_k} keeps the ids of every token, which {what} cannot do; set it to 0")


def _check_packing(c: TrainConfig) -> None:
    t, longest = c.train, c.rollout.max_prompt_tokens + c.rollout.max_completion_tokens - 1
    if t.packing == "off":
        for key in ("pack_length", "microbatch_tail", "skip_rows", "report_skipped"):
            if getattr(t, key):
                raise ConfigError(f"train.{key}: {getattr(t, key)} has no effect with train.packing off")
        return
    if not t.microbatch:
        raise ConfigError(
            "train.packing: saves nothing while an update is one micro-batch, whose shape is that of the fullest step; "
            "set train.microbatch, the packed rows of one gradient"
        )
    if t.microbatch_tail and t.microbatch % t.microbatch_tail:
        raise ConfigError(
            f"train.microbatch_tail: {t.microbatch_tail} rows do not divide the {t.microbatch} of train.microbatch"
        )
    if t.pack_length and t.pack_length < longest:
        raise ConfigError(
            f"train.pack_length: {t.pack_length}, but a prompt with its completion may take {longest} slots "
            "(rollout.max_prompt_tokens + max_completion_tokens - 1); none is cut"
        )
    if t.report_skipped and not t.skip_rows:
        raise ConfigError("train.report_skipped: true has no effect without train.skip_rows")


def _check_task(c: TrainConfig) -> None:
    if c.rollout.replay and c.rollout.kind != "sample":
        raise ConfigError("rollout.replay: random rollouts are the same in every run; there is nothing to replay")
    if not c.name or "/" in c.name:
        raise ConfigError(f"name: {c.name!r}, expected a name that can be part of a path")
    if c.data.kind == "reasoning_gym" and not c.data.task:
        raise ConfigError("data.task: empty, expected the name of a reasoning-gym task")
    if c.data.path and c.data.kind != "gsm8k":
        raise ConfigError(f"data.path: belongs to data.kind gsm8k and would be ignored with {c.data.kind}")
    try:
        load_reward(c.reward.kind)
    except RewardError as error:
        raise ConfigError(f"reward.kind: {error}") from None
    if c.reward.weight + c.reward.format_weight == 0:
        raise ConfigError("reward: weight and format_weight are both 0: nothing can be learned")
    if c.warm_start.steps and not warm_start_fits(c):
        raise ConfigError(
            f"warm_start.steps: {c.warm_start.steps}, but the supervised start is for random weights on the built-in "
            "arithmetic; leave it out, or set it to 0, with other weights or data"
        )
    targets = c.model.lora.targets
    if not targets or not set(targets) <= set(LORA_TARGETS):
        raise ConfigError(f"model.lora.targets: {targets}, expected some of {', '.join(LORA_TARGETS)}")
    words = c.model.weights or c.model.tokenizer or c.model.architecture == "tiny" or c.rollout.kind != "sample"
    if not words:
        raise ConfigError("model.tokenizer: random weights bring no tokenizer; give a folder, a .gguf or 'char'")


def _check_kernel_switch(c: TrainConfig) -> None:
    backend = c.train.loss.backend
    if c.kernel.enabled is False and backend not in ("auto", "reference"):
        raise ConfigError(f"kernel.enabled: false means train.loss.backend reference, but that is {backend!r}")
    if c.kernel.enabled and backend in ("reference", NAIVE):
        raise ConfigError(f"kernel.enabled: true, but train.loss.backend is {backend!r}; set one of them only")


def _check_naive(c: TrainConfig, objective: Objective) -> None:
    """The naive form has log-probabilities at temperature 1, on one device, and nothing else."""
    if c.train.loss.backend != NAIVE:
        return
    use = "use train.loss.backend reference for it"
    for field in ("entropy_coef", "top_entropy"):
        if getattr(objective, field) is not None:
            raise ConfigError(f"train.objective.{field}: train.loss.backend naive has no entropy; {use}")
    if statistics_temperature(objective) is not None:
        raise ConfigError(
            f"rollout.temperature: {c.rollout.temperature}, but train.loss.backend naive has no temperature; {use}"
        )
    if c.mesh.data * c.mesh.fsdp * c.mesh.tensor > 1:
        raise ConfigError(f"mesh: train.loss.backend naive is for one device; {use}")


def _check_sparse(c: TrainConfig) -> None:
    """Everything but what depends on the device, which the library says before anything compiles."""
    backend = c.train.loss.backend
    given = sparse_backward_of("train.loss.sparse_backward", c.train.loss.sparse_backward)
    dense = "reference" if c.kernel.enabled is False else backend
    if given != "off" and dense in ("reference", NAIVE):
        raise ConfigError(
            f"train.loss.sparse_backward: {given!r}, but train.loss.backend {dense} is a dense baseline without it; "
            "use chunked, mosaic_gpu or auto, or set it to off"
        )


def _check_arms(c: TrainConfig) -> None:
    """Names and keys of ``ab.arms``; what they make of ``train.loss`` is checked for each arm when an A/B is run."""
    if c.ab.control and c.ab.seeds > 1:
        raise ConfigError("ab.control and ab.seeds: two tests of the free runs; choose one of them")
    arms = c.ab.arms
    if not arms:
        return
    if len(arms) < 2:
        raise ConfigError(f"ab.arms: only {', '.join(arms)}; expected at least two arms, the baseline first")
    if c.ab.kernel or c.ab.baseline != "reference":
        raise ConfigError("ab.baseline and ab.kernel: ab.arms names the arms already; give one or the other")
    known = [f.name for f in dataclasses.fields(Loss)]
    for name, overrides in arms.items():
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name):
            raise ConfigError(f"ab.arms: {name!r}, expected a name of letters, digits, '_', '-' and '.' (a folder's)")
        for key in overrides:
            if key not in known:
                hint = did_you_mean(str(key), known)
                raise ConfigError(f"ab.arms.{name}.{key} is not a key of train.loss ({', '.join(known)}).{hint}")
