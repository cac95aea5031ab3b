"""What a gradcheck is asked for, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from logitless.core import registry
from logitless.core.divergences import DIVERGENCES
from logitless.lab.bench import synthetic_inputs as inputs
from logitless.lab.plan.mesh import parse_mesh
from logitless.lab.tools.command_config import (
    AT_LEAST_0,
    AT_LEAST_1,
    ConfigError,
    check_common,
    check_fields,
    number,
    one_of,
    sparse_backward_of,
)  # fmt: skip
from logitless.objectives.checks import did_you_mean
from logitless.objectives.objective import Objective

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}


@dataclasses.dataclass
class GradcheckConfig:
    """Keys of a gradcheck configuration."""

    name: str = "gradcheck"
    level: str = one_of("head", "logits")
    backend: str = "chunked"  # or reference, pallas_tpu, mosaic_gpu; auto: the best one here
    interpret: bool = False
    bwd_impl: str = one_of("pallas", "jax")
    call: str = one_of("loss", "logprobs")  # logprobs: random cotangents of logp, entropy and lse
    divergence: str = one_of("off", *DIVERGENCES)  # from a teacher: the distillation loss, or the divergence itself
    mix: float = number(0.5, "[0, 1]")  # of divergence=jsd
    teacher: int = number(0, AT_LEAST_0)  # width of the teacher's hidden states; 0: the student's
    preset: str = ""  # trl | liger | verl | tunix | mllm-jax, or empty for a plain Objective
    objective: dict[str, Any] = dataclasses.field(default_factory=dict)
    batch: int = number(2, AT_LEAST_1)
    tokens: int = number(64, AT_LEAST_1)
    hidden: int = number(128, AT_LEAST_1)
    vocab: int = number(1024, AT_LEAST_0)  # 0 with inputs=model: the model's own
    dtype: str = one_of(*DTYPES)
    logits_dtype: str = one_of("float32", "bfloat16")
    head_grad_dtype: str = one_of("float32", "param")  # head level
    chunk_size: int = number(0, AT_LEAST_0)  # tokens of a chunk (head level); 0: as chosen
    memory_budget: int = number(0, AT_LEAST_0)  # bytes for logits (head level); 0: none is given
    donate: bool = False  # the logits' memory may be written over (logits level)
    same_without_gradient: bool = False  # the loss must be the same to the bit where no gradient is taken
    sparse_backward: Any = "off"  # off | auto | a mass (head level)
    inputs: str = one_of(*inputs.KINDS, "realistic", "model")  # realistic: head level
    model: str = ""  # inputs=model: an architecture's name (random weights), a folder of weights, or a .gguf file
    layers: int = number(0, AT_LEAST_0)  # inputs=model: only so many layers; 0: all
    mesh: str = ""  # data=2,fsdp=2,tensor=2: the backend over several devices; empty: a single device
    spread: float = 3.0  # of ordinary logits
    temperature: float = 1.0
    softcap: float = 0.0  # 0: none
    scale: float = 0.0  # 0: none
    vocab_size: int = 0  # columns that count; 0: all
    old_logp_noise_scale: float = 0.1
    seed: int = 0
    oracle: bool = True
    max_abs_diff_loss: float = 1e-3  # relative to max(1, |loss|)
    max_rel_diff_grad: float = 2e-2  # of the difference in norm
    contract: float = 1.5
    timeout_s: int = number(600, AT_LEAST_1)  # of a process with virtual devices
    out: str = "runs/gradcheck.jsonl"
    wandb_mode: str = "disabled"  # online | offline | disabled
    wandb_project: str = "logitless"


def objective_of(c: GradcheckConfig) -> Objective:
    """The configured objective; its own errors become configuration errors."""
    fields = dict(c.objective)
    if c.temperature != 1.0:
        fields.setdefault("temperature", c.temperature)
    try:
        return Objective.preset(c.preset, **fields) if c.preset else Objective().replace(**fields)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"objective: {error}") from None


def check(c: GradcheckConfig) -> None:
    """Refuse by name what cannot be run."""
    check_common(c.seed, c.wandb_mode)
    check_fields(c)
    backends = ("auto", *registry.BACKENDS[c.level])
    if c.backend not in backends:
        hint = did_you_mean(c.backend, backends)
        raise ConfigError(f"backend: {c.backend!r}, expected one of {', '.join(backends)}{hint}")
    of_model = c.inputs == "model"
    if of_model != bool(c.model):
        raise ConfigError("inputs: 'model' needs model=NAME or a path, and model= needs inputs=model")
    if not c.vocab and not of_model:
        raise ConfigError("vocab: 0, expected at least 1; 0, the model's own, needs inputs=model")
    c.sparse_backward = sparse_backward_of("sparse_backward", c.sparse_backward)
    if c.level == "logits" and (c.inputs == "realistic" or c.sparse_backward != "off"):
        raise ConfigError("level: logits, but inputs=realistic and sparse_backward are for level=head")
    if c.call == "logprobs" and c.sparse_backward != "off":
        raise ConfigError("call: logprobs has no sparse_backward; that is the loss's")
    if c.divergence != "off":
        _check_divergence(c)
    elif c.teacher:
        raise ConfigError(f"teacher: {c.teacher}, but divergence is off; give the divergence from it")
    if not 0 <= c.vocab_size <= c.vocab:
        raise ConfigError(f"vocab_size: {c.vocab_size}, expected 0 (all) to {c.vocab}")


def _check_divergence(c: GradcheckConfig) -> None:
    """Refuse what a gradcheck of a divergence does not have."""
    if c.level == "logits" and c.call == "loss":
        raise ConfigError("divergence: the distillation loss is from hidden states; from logits, give call=logprobs")
    if c.level == "logits" and c.teacher:
        raise ConfigError("teacher: is the width of hidden states, for level=head")
    if c.inputs == "model":
        raise ConfigError("inputs: 'model' has no teacher; give divergence=off or other inputs")
    if c.preset or c.objective:
        raise ConfigError("objective: a divergence has none; give divergence, mix and temperature")


def axes_of(c: GradcheckConfig) -> dict[str, int]:
    """Devices along each axis of ``c.mesh``."""
    try:
        axes = parse_mesh(c.mesh)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if c.batch % (axes["data"] * axes["fsdp"]):
        raise ConfigError(
            f"batch: {c.batch} rows do not split over data x fsdp = {axes['data'] * axes['fsdp']} devices"
        )
    return axes
