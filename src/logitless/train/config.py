"""The configuration of a training run: one YAML, every key checked by name before anything compiles.

The defaults are the ``tiny`` run: two-number addition, learned in about two minutes on two cores, with no file needed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from logitless.core.chunk_size import platform
from logitless.core.registry import BACKENDS as REGISTERED
from logitless.core.registry import KERNELS
from logitless.lab.tools.command_config import ConfigError, number, one_of
from logitless.lab.tools.command_config import load as load_schema
from logitless.objectives.objective import Objective
from logitless.objectives.presets import PRESETS as OBJECTIVES
from logitless.train.architectures import PRESETS
from logitless.train.files import did_you_mean

__all__ = ["NAIVE", "ConfigError", "TrainConfig", "as_yaml", "load", "loss_backend", "objective_of", "save"]

NAIVE = "naive"
"""The backend that the library does not have: log_softmax and a gather over all logits, to compare with."""
BACKENDS = ("auto", "pallas", NAIVE, *REGISTERED["head"])
DTYPES = ("float32", "bfloat16")
LORA_TARGETS = ("q", "k", "v", "o", "gate", "up", "down")
"""The maps of a layer that can be adapted, and by default are."""
WARM_START_STEPS = 300


@dataclasses.dataclass
class Lora:
    """Train low-rank additions to the layers' maps instead of the weights; rank 0 turns it off."""

    rank: int = number(0, "[0, inf)")
    alpha: float = number(16.0, "(0, inf)")
    targets: list[str] = dataclasses.field(default_factory=lambda: list(LORA_TARGETS))


@dataclasses.dataclass
class Model:
    """Which model, in which precision."""

    weights: str = ""  # a hub folder, a .gguf file, a hub id, or a name of scripts/fetch.py; empty: random
    architecture: str = one_of(*PRESETS, default="tiny")  # shape of random weights
    tokenizer: str = ""  # a folder with tokenizer.json, a .gguf, or "char"; empty: the one that belongs to the weights
    cache_dir: str = ""  # where scripts/fetch.py put weights and data; empty: ~/.cache/logitless
    master_dtype: str = one_of(*DTYPES)
    compute_dtype: str = one_of(*DTYPES)
    remat: bool = False
    lora: Lora = dataclasses.field(default_factory=Lora)


@dataclasses.dataclass
class Data:
    """Which problems."""

    kind: str = one_of("arithmetic", "gsm8k", "reasoning_gym")
    path: str = ""  # gsm8k: a JSONL file or a folder with train.jsonl and test.jsonl; empty: that of scripts/fetch.py
    task: str = ""  # reasoning_gym: the name of the task
    limit: int = number(20, "[2, 2000]")  # arithmetic: both numbers are below it
    form: str = one_of("bare", "chat")  # how a problem becomes a prompt: bare text, or a chat message
    system: str = ""  # system message of a chat; empty: the template's own
    instruction: str = ""  # text after the question of a chat message


@dataclasses.dataclass
class Reward:
    """What a completion earns: ``weight`` times the reward, ``format_weight`` times that of the right form."""

    kind: str = "exact_match"  # a name of logitless.train.reward, or package.module:function of your own
    weight: float = number(1.0, "[0, 1e9]")
    format_weight: float = number(0.0, "[0, 1e9]")
    # Tokens before max_completion_tokens over which a completion loses up to the penalty (DAPO).
    overlong_buffer: int = number(0, "[0, inf)")
    overlong_penalty: float = number(1.0, "[0, 1e9]")
    timeout_s: float = number(60.0, "(0, inf)")  # per completion; a slower reward ends the run


@dataclasses.dataclass
class Rollout:
    """How completions are made."""

    # Sample from the policy, or "random" tokens and lengths (for time and memory)
    kind: str = one_of("sample", "random")
    max_prompt_tokens: int = number(6, "[1, inf)")
    max_completion_tokens: int = number(3, "[1, inf)")
    temperature: float = number(1.0, "(0, inf)")
    top_p: float = number(1.0, "(0, 1]")
    # Ids that a token is drawn from at most; 0: all. Log-probabilities and losses are then over the ids that were kept
    top_k: int = number(0, "[0, inf)")
    rows: int = number(0, "[0, inf)")  # completions sampled at a time; 0: all of a step
    # Times that groups without a spread are drawn anew, with other problems (dynamic sampling, DAPO)
    redraw: int = number(0, "[0, inf)")
    sampler: str = ""  # package.module:make of a sampler from outside (train/sampler.py); empty: the trainer's own
    # Number of steps with recorded completions and a trace of their updates
    record: int = number(0, "[0, inf)")
    replay: str = ""  # a run's folder: update on the completions that it recorded, as long as there are any


@dataclasses.dataclass
class Loss:
    """How the loss is computed; ``backend`` is the one line that differs between the arms of an A/B."""

    # naive (log_softmax and gather) | reference | chunked | pallas_tpu | mosaic_gpu | pallas (this platform's) | auto
    backend: str = one_of(*BACKENDS)
    sparse_backward: Any = "off"  # off | auto | mass that a token's gradient may leave out (docs/sparse-backward.md)
    logits_dtype: str = one_of(*DTYPES)
    head_grad_dtype: str = one_of("float32", "param")
    chunk_size: int = number(0, "[0, inf)")  # tokens; 0: the library's choice
    memory_budget: int = number(0, "[0, inf)")  # bytes, in place of chunk_size

    def __post_init__(self) -> None:
        if self.sparse_backward is False:  # YAML's reading of a plain `off`
            self.sparse_backward = "off"


@dataclasses.dataclass
class Train:
    """The update."""

    steps: int = number(100, "[1, inf)")
    prompts_per_step: int = number(64, "[1, inf)")
    group_size: int = number(8, "[1, inf)")
    inner_epochs: int = number(2, "[1, inf)")  # passes over a step's completions
    minibatches: int = number(1, "[1, inf)")  # optimiser updates in one pass
    microbatch: int = number(0, "[0, inf)")  # rows per gradient; 0: all rows of an update. With packing: packed rows
    # With packing: rows per gradient at the end, if a full gradient would be partly empty; 0: the same
    microbatch_tail: int = number(0, "[0, inf)")
    # Rows without padding; shared: a group's prompt once in a row
    packing: str = one_of("off", "sequences", "shared")
    pack_length: int = number(0, "[0, inf)")  # tokens of a packed row; 0: max_prompt_tokens + max_completion_tokens
    skip_rows: bool = False  # with packing: sequences that can have no gradient do not go through the model
    report_skipped: bool = False  # with skip_rows: they do, forward only, for entropy, KL and ratios of the whole batch
    learning_rate: float = number(3e-4, "(0, inf)")
    warmup_steps: int = number(10, "[0, inf)")
    schedule: str = one_of("constant", "linear", "cosine")  # after the warm-up
    clip_norm: float = number(1.0, "(0, inf)")
    weight_decay: float = number(0.0, "[0, inf)")
    adam_b1: float = number(0.9, "[0, 1)")
    adam_b2: float = number(0.999, "[0, 1)")
    adam_eps: float = number(1e-8, "(0, inf)")
    preset: str = one_of("", *OBJECTIVES)  # an objective preset
    objective: dict[str, Any] = dataclasses.field(default_factory=lambda: {"aggregation": "dapo"})
    kl_beta: float | None = number(None, "[0, inf)")  # pull towards the initial policy
    kl_report: bool = True  # measure the KL to the initial policy even without the pull
    advantage_scale: str = one_of("group", "batch", "none")
    advantage_eps: float = number(1e-4, "(0, inf)")
    max_skipped: int = number(5, "[1, inf)")  # stop after so many steps in a row whose loss or gradient is not finite
    loss: Loss = dataclasses.field(default_factory=Loss)

    def __post_init__(self) -> None:
        if self.packing == "False":  # what YAML and a field of text make of a plain `off`
            self.packing = "off"


@dataclasses.dataclass
class WarmStart:
    """Supervised steps before the first rollout, on answers of which some are wrong: something to improve on."""

    # Null: 300 for random weights on the built-in sums, and none for anything else
    steps: int | None = number(None, "[0, inf)")
    batch: int = number(64, "[1, inf)")
    learning_rate: float = number(1e-3, "(0, inf)")
    wrong_fraction: float = number(0.5, "[0, 1]")
    cache: str = ""  # folder of the result; empty: in the run's folder


@dataclasses.dataclass
class Mesh:
    """Devices per axis: batch, batch and parameters, matrices and vocabulary."""

    data: int = number(1, "[1, inf)")
    fsdp: int = number(1, "[1, inf)")
    tensor: int = number(1, "[1, inf)")


@dataclasses.dataclass
class Eval:
    """Greedy completions of held-out problems."""

    every: int = number(25, "[0, inf)")  # steps; 0: never
    problems: int = number(64, "[1, inf)")


@dataclasses.dataclass
class Checkpoint:
    """What survives a kill."""

    every: int = number(20, "[0, inf)")  # steps; 0: none at all
    keep: int = number(2, "[1, inf)")


@dataclasses.dataclass
class Kernel:
    """``enabled: false`` is ``train.loss.backend: reference``, ``true`` is ``auto``."""

    enabled: bool | None = None


@dataclasses.dataclass
class AB:
    """The arms of ``logitless ab``, and how they are compared (docs/training.md)."""

    baseline: str = one_of(*BACKENDS, default="reference")
    kernel: str = one_of("", *BACKENDS)  # empty: train.loss.backend
    # Name -> own keys of train.loss; the first arm is the baseline. Empty: the two arms above.
    arms: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    # Replay: all arms, and a second baseline that differs in rounding alone, update on the baseline's completions.
    replay: bool = True
    replay_steps: int = number(0, "[0, inf)")  # 0: all
    # The replays in one process, a step of each arm in turn: times, like with like. The device holds all arms' states
    turns: bool = False
    replay_factor: float = number(10.0, "[1, inf)")  # times the second baseline's distance that an arm may be away
    # Free runs: a second baseline that samples for itself, or several seeds; without, differences are not judged.
    control: bool = False
    seeds: int = number(1, "[1, inf)")
    # Times the second baseline's distance that an arm's curve may be away
    control_factor: float = number(5.0, "[1, inf)")
    confidence: float = number(0.99, "[0.5, 1)")  # of the t-test over seeds
    reward_tolerance: float = number(0.02, "[0, inf)")  # differences below it do not count
    kl_tolerance: float = number(0.05, "[0, inf)")  # the same, as a share of the baseline's mean KL
    timeout_s: int = number(7200, "[1, inf)")  # of one arm
    parallel: bool = False  # all arms at the same time: sooner done on a CPU, but their times disturb each other


@dataclasses.dataclass
class TrainConfig:
    """Keys of a training configuration."""

    name: str = "tiny"
    run_dir: str = ""  # empty: runs/<name>
    seed: int = 0
    model: Model = dataclasses.field(default_factory=Model)
    data: Data = dataclasses.field(default_factory=Data)
    reward: Reward = dataclasses.field(default_factory=Reward)
    rollout: Rollout = dataclasses.field(default_factory=Rollout)
    train: Train = dataclasses.field(default_factory=Train)
    warm_start: WarmStart = dataclasses.field(default_factory=WarmStart)
    mesh: Mesh = dataclasses.field(default_factory=Mesh)
    eval: Eval = dataclasses.field(default_factory=Eval)
    checkpoint: Checkpoint = dataclasses.field(default_factory=Checkpoint)
    kernel: Kernel = dataclasses.field(default_factory=Kernel)
    ab: AB = dataclasses.field(default_factory=AB)
    samples: int = number(4, "[0, inf)")  # completions written to samples.jsonl at each evaluation
    wandb_mode: str = "disabled"
    wandb_project: str = "logitless"


def load(path: str | Path | None, overrides: Sequence[str] = ()) -> TrainConfig:
    """A checked configuration from a file (``None``: the tiny run) and ``key=value`` overrides."""
    from logitless.train.config_check import check

    config = load_schema(TrainConfig, path, overrides)
    if config.warm_start.steps is None:
        config.warm_start.steps = WARM_START_STEPS if warm_start_fits(config) else 0
    check(config)
    return config


def warm_start_fits(c: TrainConfig) -> bool:
    """Whether the supervised start is for this run: one's own weights need none, and other data has no answers."""
    return not c.model.weights and c.data.kind == "arithmetic"


def as_yaml(config: TrainConfig) -> str:
    """The resolved configuration as text that :func:`load` reads back."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.structured(config))


def save(config: TrainConfig, path: Path) -> None:
    """Write the resolved configuration to a file."""
    path.write_text(as_yaml(config))


def loss_backend(c: TrainConfig) -> str | None:
    """What to pass as ``backend=``: ``train.loss.backend`` and its alias ``kernel.enabled`` resolved.

    Not part of :func:`check`: it may have to look for the device, which the parent of an A/B leaves to its arms.
    """
    backend = c.train.loss.backend
    if c.kernel.enabled is False:
        return "reference"
    if backend == "auto":
        return None
    if backend == "pallas":
        here = platform()
        if here not in KERNELS:
            raise ConfigError(f"train.loss.backend: pallas has no kernels for a {here.upper()}; use auto or chunked")
        return KERNELS[here]
    return backend


def objective_of(c: TrainConfig) -> Objective:
    """The objective: preset, overrides, ``kl_beta`` and the temperature that completions are sampled with."""
    fields = dict(c.train.objective)
    for key, owner in (("beta", "train.kl_beta"), ("temperature", "rollout.temperature")):
        if key in fields:
            raise ConfigError(f"train.objective.{key}: set {owner} instead, which the rest of the run follows too")
    try:
        objective = Objective.preset(c.train.preset, **fields) if c.train.preset else Objective(**fields)
        if objective.temperature not in (None, c.rollout.temperature):
            raise ConfigError(
                f"train.preset: {c.train.preset} is for completions sampled at temperature {objective.temperature}; "
                f"set rollout.temperature to it (it is {c.rollout.temperature})"
            )
        if c.train.kl_beta is not None:
            objective = objective.replace(beta=c.train.kl_beta)
        return objective.replace(temperature=None if c.rollout.temperature == 1.0 else c.rollout.temperature)
    except (TypeError, ValueError) as error:
        names = [f.name for f in dataclasses.fields(Objective)]
        unknown = [k for k in fields if k not in names]
        if unknown:
            hint = did_you_mean(unknown[0], names, "train.objective.")
            raise ConfigError(f"train.objective.{unknown[0]} is not known.{hint}") from None
        raise ConfigError(f"train.objective: {error}") from None


def needs_rollout(objective: Objective) -> bool:
    """Whether the loss reads the sampler's log-probabilities."""
    asks = objective.correction, objective.off_policy_threshold, objective.sequence_error_max
    return any(x is not None for x in asks)
