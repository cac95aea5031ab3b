"""The training configuration: every bad value is refused by its key, before anything compiles."""

from __future__ import annotations

import dataclasses
import functools
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from logitless import Objective
from logitless.lab import cli
from logitless.lab.tools.command_config import check_fields
from logitless.train import config as train_config
from logitless.train.ab_plan import arms_of
from logitless.train.config import ConfigError, as_yaml, load, loss_backend, objective_of
from logitless.train.task import build_task
from logitless.train.trainer import Trainer

CONFIGS = Path(__file__).parents[2] / "configs" / "train"
SHIPPED = (
    "tiny",
    "smollm2-135m-gsm8k",
    "smollm2-135m-arithmetic",
    "smollm2-135m-abc",
    "qwen2.5-1.5b-gsm8k",
    "qwen2.5-1.5b-random",
)


def test_the_shipped_configurations_load_under_their_names() -> None:
    assert {p.stem for p in CONFIGS.glob("*.yaml")} == set(SHIPPED)
    for name in SHIPPED:
        assert load(CONFIGS / f"{name}.yaml").name == name


def test_the_built_in_default_is_the_tiny_file() -> None:
    assert load(CONFIGS / "tiny.yaml") == load(None)


def test_a_saved_configuration_reads_back_the_same(tmp_path: Path) -> None:
    c = load(None, ["train.kl_beta=0.01", "train.objective.eps_high=0.28", "kernel.enabled=false", "seed=3"])
    train_config.save(c, tmp_path / "config.yaml")
    assert load(tmp_path / "config.yaml") == c


BAD = """
seed=-1 | seed: -1, expected 0 to 4294967295
train.stepz=3 | Did you mean 'train.steps'
train.loss.bakend=chunked | Did you mean 'train.loss.backend'
train.steps=many | train.steps
train.steps=0 | train.steps: 0, expected at least 1
train.learning_rate=0 | train.learning_rate: 0.0, expected a finite number above 0
train.schedule=cosin | train.schedule: 'cosin', expected one of constant, linear, cosine. Did you mean 'cosine'
train.packing=share | train.packing: 'share', expected one of off, sequences, shared. Did you mean
train.loss.backend=chunkd | train.loss.backend: 'chunkd'
train.loss.logits_dtype=float16 | train.loss.logits_dtype: 'float16', expected one of float32, bfloat16
train.loss.sparse_backward=on | train.loss.sparse_backward: True, expected off, auto or a probability mass
train.loss.sparse_backward=1 | train.loss.sparse_backward: 1, expected off, auto or a probability mass
train.loss.sparse_backward=atuo | train.loss.sparse_backward: 'atuo', expected off, auto or a probability mass
train.adam_b2=1 | train.adam_b2: 1.0, expected a number in [0, 1)
train.weight_decay=1e39 | train.weight_decay: 1e+39, expected at least 0 (finite in float32)
train.objective.eps_hi=1 | train.objective.eps_hi is not known. Did you mean 'train.objective.eps_high'
train.objective.policy=clpi | train.objective: Objective: policy='clpi' is not known
train.objective.beta=0.1 | train.objective.beta: set train.kl_beta instead
train.objective.temperature=2 | train.objective.temperature: set rollout.temperature instead
train.preset=tlr | train.preset: 'tlr'
train.preset=liger | set rollout.temperature to it (it is 1.0)
model.architecture=tinny | model.architecture: 'tinny'
model.compute_dtype=float64 | model.compute_dtype: 'float64'
model.architecture=qwen2.5-0.5b | model.tokenizer: random weights bring no tokenizer
model.lora.targets=[q_proj] | model.lora.targets: ['q_proj'], expected some of q, k
model.lora.targets=[] | model.lora.targets: [], expected some of q, k
data.kind=gsm9k | data.kind: 'gsm9k'
data.limit=2001 | data.limit: 2001, expected a number in [2, 2000]
data.path=x | data.path: belongs to data.kind gsm8k
data.kind=reasoning_gym | data.task: empty
reward.kind=exact | reward.kind: reward 'exact'
reward.kind=no_such_module:f | reward.kind: reward 'no_such_module:f'
reward.weight=1e39 | reward.weight: 1e+39, expected a number in [0, 1e9]
reward.weight=0 | reward: weight and format_weight are both 0
reward.overlong_buffer=4 | reward.overlong_buffer: 4 tokens, more than
rollout.top_p=0 | rollout.top_p: 0.0, expected a number in (0, 1]
name=a/b | name: 'a/b', expected a name
wandb_mode=sometimes | wandb_mode
oops | expected key=value
"""
# Four groups of six completions; GROUPS packed.
GROUPS = "train.prompts_per_step=4 train.group_size=6"
PACKED = f"{GROUPS} train.packing=sequences train.microbatch=4"
REFUSED = f"""
train.group_size=1 | train.group_size: 1 completion a prompt has no group
{GROUPS} train.minibatches=3 | train.minibatches: 4 prompts do not split into 3
{GROUPS} train.minibatches=2 train.microbatch=8 | train.microbatch: 12 rows of an update
{GROUPS} rollout.rows=8 | rollout.rows: 8, expected a multiple
{GROUPS} rollout.rows=18 | rollout.rows: 18, expected a multiple
{GROUPS} mesh.data=4 mesh.fsdp=4 | mesh: data x fsdp = 16 does not divide the 24 rows
{GROUPS} mesh.fsdp=8 train.microbatch=12 | mesh: data x fsdp = 8 does not divide the 12 rows
{PACKED} train.microbatch=0 | train.packing: saves nothing
{PACKED} train.microbatch_tail=3 | train.microbatch_tail: 3 rows do not divide the 4
{PACKED} train.pack_length=7 | train.pack_length: 7, but a prompt with its completion may take 8 slots
{PACKED} train.report_skipped=true | train.report_skipped: true has no effect
{PACKED} mesh.data=4 mesh.fsdp=2 | mesh: data x fsdp = 8 does not divide the 4 rows of a gradient
{PACKED} train.microbatch_tail=2 mesh.data=4 | mesh: data x fsdp = 4 does not divide the 2 rows
train.skip_rows=true | train.skip_rows: True has no effect with train.packing off
train.pack_length=2 | train.pack_length: 2 has no effect with train.packing off
train.microbatch_tail=2 | train.microbatch_tail: 2 has no effect with train.packing off
train.warmup_steps=100 train.schedule=linear | train.warmup_steps: 100 of 100 steps leave nothing
train.loss.chunk_size=1 train.loss.memory_budget=1 | train.loss: give chunk_size or memory_budget
train.loss.backend=naive mesh.tensor=2 | mesh: train.loss.backend naive is for one device
train.loss.backend=naive rollout.temperature=0.5 | rollout.temperature: 0.5, but
train.loss.backend=naive train.objective.entropy_coef=0.1 | train.objective.entropy_coef: train
train.loss.backend=naive train.objective.top_entropy=0.5 | train.objective.top_entropy: train
train.microbatch=64 train.objective.top_entropy=0.5 | train.objective.top_entropy takes a quantile
train.microbatch=64 train.objective={{aggregation:bnpo,sequence_error_max:2.0}} | sequence_error_max takes sequences out
train.loss.backend=reference train.loss.sparse_backward=auto | train.loss.sparse_backward: 'auto', but
train.loss.backend=naive train.loss.sparse_backward=auto | backend naive is a dense baseline
kernel.enabled=false train.loss.sparse_backward=auto | backend reference is a dense baseline
kernel.enabled=false train.loss.backend=chunked | kernel.enabled: false means
kernel.enabled=true train.loss.backend=reference | kernel.enabled: true, but
kernel.enabled=true train.loss.backend=naive | kernel.enabled: true, but train.loss.backend is 'naive'
data.kind=gsm8k warm_start.steps=3 | warm_start.steps: 3, but the supervised start is for
rollout.kind=random warm_start.steps=0 rollout.redraw=2 | rollout.redraw: 2 has no effect with rollout.kind random
ab.control=true ab.seeds=2 | ab.control and ab.seeds: two tests of the free runs; choose one of them
ab.arms={{a:{{}}}} | ab.arms: only a; expected at least two
ab.arms={{a:{{}},b:{{}}}} ab.baseline=naive | ab.baseline and ab.kernel: ab.arms names
ab.arms={{a:{{}},b:{{}}}} ab.kernel=chunked | ab.baseline and ab.kernel: ab.arms names
ab.arms={{a:{{}},b:{{bakend:x}}}} | ab.arms.b.bakend is not a key of train.loss
ab.arms={{a:{{}},b/c:{{}}}} | ab.arms: 'b/c', expected a name of letters
"""
TAKEN = f"""
train.group_size=2
train.group_size=1 train.advantage_scale=none
{GROUPS} train.minibatches=2 train.microbatch=4
{GROUPS} rollout.rows=12
{GROUPS} mesh.data=4 mesh.fsdp=3
{PACKED} train.microbatch_tail=2 train.pack_length=8 train.skip_rows=true train.report_skipped=true
reward.overlong_buffer=3
reward.weight=0 reward.format_weight=1
train.warmup_steps=100
train.warmup_steps=99 train.schedule=linear
train.loss.backend=naive
train.objective.top_entropy=0.5
ab.control=true
ab.arms={{a:{{}},b:{{chunk_size:4}}}}
"""


def lines(table: str) -> list[str]:
    return table.strip().splitlines()


@pytest.mark.parametrize("line", [*lines(BAD), *lines(REFUSED)])
def test_bad_values_and_pairs_are_refused_by_key(line: str) -> None:
    overrides, _, message = line.partition(" | ")
    with pytest.raises(ConfigError) as refused:
        load(None, [item.replace(":", ": ") if "{" in item else item for item in overrides.split()])
    assert message in str(refused.value)


@pytest.mark.parametrize("line", lines(TAKEN))
def test_pairs_that_go_together_are_taken(line: str) -> None:
    load(None, [item.replace(":", ": ") if "{" in item else item for item in line.split()])


def test_log_probabilities_of_a_sampler_that_no_correction_can_compare() -> None:
    settings = ["train.preset=mllm-jax", "train.objective={correction: token}", "rollout.temperature=2"]
    with pytest.raises(ConfigError, match=r"rollout\.sampler: its log-probabilities are of logits divided by the temp"):
        load(None, [*settings, "rollout.sampler=a:b"])


def bounded(config: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every key with declared bounds."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from bounded(value, f"{prefix}{field.name}.")
        elif "bounds" in field.metadata:
            yield prefix + field.name, field.metadata["bounds"]


@pytest.mark.parametrize(("key", "bounds"), bounded(load(None)))
def test_the_last_value_within_the_bounds_is_taken_and_the_first_outside_refused(key: str, bounds: str) -> None:
    """What the bounds say by themselves: a value that is taken may still not go with the rest."""
    low, high = (float(end) for end in bounds[1:-1].split(","))
    *path, name = key.split(".")
    owner: Any = functools.reduce(getattr, path, load(None))
    whole = isinstance(getattr(owner, name), int)
    values = {low: bounds[0] == "[", low - (1 if whole else 1e-3): False, low + (1 if whole else 1e-3): True}
    values |= {high: False} if high == math.inf else {high: bounds[-1] == "]", high + (1 if whole else 1e-3): False}
    values |= {} if whole else {math.nan: False}
    for value, taken in values.items():
        setattr(owner, name, int(value) if whole and value != math.inf else value)
        try:
            check_fields(owner)
            said = ""
        except ConfigError as error:
            said = str(error)
        assert said == "" if taken else said.startswith(f"{name}: {getattr(owner, name)}, expected"), value


def test_the_warm_start_is_for_random_weights_on_sums() -> None:
    assert load(None).warm_start.steps == 300
    assert load(None, ["warm_start.steps=7"]).warm_start.steps == 7
    for own in (["model.weights=a/folder"], ["data.kind=gsm8k"]):
        assert load(None, own).warm_start.steps == 0
    assert "steps: 300" in as_yaml(load(None)).partition("warm_start:")[2].partition("mesh:")[0]  # kept as it was


def test_the_switch_of_the_ab() -> None:
    assert loss_backend(load(None)) is None
    assert loss_backend(load(None, ["kernel.enabled=true"])) is None
    assert loss_backend(load(None, ["kernel.enabled=false"])) == "reference"
    assert loss_backend(load(None, ["train.loss.backend=chunked"])) == "chunked"
    with pytest.raises(ConfigError, match="no kernels for a CPU"):
        loss_backend(load(None, ["train.loss.backend=pallas"]))


def test_a_mesh_of_more_devices_than_there_are() -> None:
    with pytest.raises(ConfigError, match="mesh: 1 x 1 x 64 asks for 64 devices"):
        Trainer(load(None, ["mesh.tensor=64"]), build_task(load(None)))


def test_the_parent_of_an_ab_leaves_the_device_to_its_arms() -> None:
    """A GPU's memory is taken by the first process that asks for the device."""
    code = (
        "from jax._src import xla_bridge; from logitless.train import ab; from logitless.train.config import load; "
        "ab.arms_of(load(None, ['ab.kernel=pallas', 'mesh.data=2'])); assert not xla_bridge._backends"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_only_the_backend_and_the_folder_differ_between_the_arms() -> None:
    baseline, kernel = arms_of(load(None, ["ab.kernel=chunked"])).values()
    assert (loss_backend(baseline), loss_backend(kernel)) == ("reference", "chunked")
    loss = dataclasses.replace(kernel.train.loss, backend="reference")
    train = dataclasses.replace(kernel.train, loss=loss)
    assert dataclasses.replace(kernel, train=train, run_dir=baseline.run_dir) == baseline
    with pytest.raises(ConfigError, match="both arms would use 'reference'"):
        arms_of(load(None, ["ab.kernel=reference"]))


def test_objectives() -> None:
    assert objective_of(load(None)) == Objective(aggregation="dapo")
    c = load(None, ["train.preset=tunix", "train.objective={eps_high: 0.3}"])
    assert objective_of(c).beta == 0.04 and objective_of(c).eps_high == 0.3
    c = load(None, ["train.kl_beta=0.1", "rollout.temperature=0.7"])
    assert objective_of(c).beta == 0.1 and objective_of(c).temperature == 0.7


def test_a_prompt_that_does_not_fit_is_refused_and_not_cut() -> None:
    with pytest.raises(ConfigError, match=r"rollout.max_prompt_tokens: 5, but \d+ of 400 prompts are longer.*6 tokens"):
        build_task(load(None, ["rollout.max_prompt_tokens=5"]))


def test_more_tokens_than_the_model_has_positions() -> None:
    with pytest.raises(ConfigError, match="258, but the model has 256 positions"):
        build_task(load(None, ["rollout.max_completion_tokens=252"]))


@pytest.mark.parametrize("command", ["train", "ab"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train.stepz=3"], "Did you mean 'train.steps'"),
        (["--config", "no/such.yaml"], "no such configuration file"),
        (["ab.baseline=x"], "ab.baseline: 'x'"),
        (["kernel.enabled=perhaps"], "kernel.enabled"),
    ],
)
def test_bad_usage_exits_with_2(
    command: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([command, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_bad_data_exits_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.jsonl").write_text('{"question": "1+1?", "answer": "#### 2"}\n{"question": "2+2?"}\n')
    settings = ["data.kind=gsm8k", f"data.path={tmp_path}", "warm_start.steps=0", f"run_dir={tmp_path / 'run'}"]
    assert cli.main(["train", *settings]) == 2
    assert "train.jsonl, line 2" in capsys.readouterr().err
    assert cli.main(["train", "model.weights=/no/such/model", "warm_start.steps=0", f"run_dir={tmp_path / 'r2'}"]) == 2
    assert "no model at /no/such/model" in capsys.readouterr().err
