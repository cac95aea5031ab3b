"""The training configuration: every bad value is refused by its key, before anything compiles."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from logitless import Objective
from logitless.lab import cli
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


BAD = [
    ("train.stepz=3", "Did you mean 'train.steps'"),
    ("train.loss.bakend=chunked", "Did you mean 'train.loss.backend'"),
    ("train.steps=many", "train.steps"),
    ("train.learning_rate=0", "train.learning_rate: 0.0, expected a finite number above 0"),
    (
        "train.schedule=cosin",
        "train.schedule: 'cosin', expected one of constant, linear, cosine. Did you mean 'cosine'",
    ),
    ("train.loss.backend=chunkd", "train.loss.backend: 'chunkd'"),
    ("train.loss.logits_dtype=float16", "train.loss.logits_dtype: 'float16', expected one of float32, bfloat16"),
    ("train.loss.sparse_backward=on", "train.loss.sparse_backward: True, expected off, auto or a probability mass"),
    ("train.loss.sparse_backward=1", "train.loss.sparse_backward: 1, expected off, auto or a probability mass"),
    ("train.loss.sparse_backward=atuo", "train.loss.sparse_backward: 'atuo', expected off, auto or a probability mass"),
    ("ab.arms={a: {backend: naive}, b: {bakend: x}}", "ab.arms.b.bakend is not a key of train.loss"),
    ("ab.arms={a: {backend: naive}, b/c: {}}", "ab.arms: 'b/c', expected a name of letters"),
    ("train.adam_b2=1", "train.adam_b2: 1.0, expected a number in [0, 1)"),
    ("train.objective.eps_hi=1", "train.objective.eps_hi is not known. Did you mean 'train.objective.eps_high'"),
    ("train.objective.policy=clpi", "train.objective: Objective: policy='clpi' is not known"),
    ("train.objective.beta=0.1", "train.objective.beta: set train.kl_beta instead"),
    ("train.objective.temperature=2", "train.objective.temperature: set rollout.temperature instead"),
    ("train.preset=tlr", "train.preset: 'tlr'"),
    ("train.preset=liger", "set rollout.temperature to it (it is 1.0)"),
    ("model.architecture=tinny", "model.architecture: 'tinny'"),
    ("model.compute_dtype=float64", "model.compute_dtype: 'float64'"),
    ("model.architecture=qwen2.5-0.5b", "model.tokenizer: random weights bring no tokenizer"),
    ("data.kind=gsm9k", "data.kind: 'gsm9k'"),
    ("reward.kind=exact", "reward.kind: reward 'exact'"),
    ("reward.kind=no_such_module:f", "reward.kind: reward 'no_such_module:f'"),
    ("reward.weight=1e39", "reward.weight: 1e+39, expected a number in [0, 1e9]"),
    ("train.weight_decay=1e39", "train.weight_decay: 1e+39, expected at least 0 (finite in float32)"),
    ("rollout.top_p=0", "rollout.top_p: 0.0, expected a number in (0, 1]"),
    ("oops", "expected key=value"),
]


@pytest.mark.parametrize(("override", "message"), BAD, ids=[b[0] for b in BAD])
def test_bad_values_are_refused_by_key(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(None, [override])
    assert message in str(refused.value)


PAIRS = [
    (["data.kind=gsm8k", "warm_start.steps=3"], "warm_start.steps: 3, but the supervised start is for"),
    (["kernel.enabled=false", "train.loss.backend=chunked"], "kernel.enabled: false means"),
    (["kernel.enabled=true", "train.loss.backend=reference"], "kernel.enabled: true, but"),
    (
        [
            "train.preset=mllm-jax",
            "train.objective={correction: token}",
            "rollout.temperature=2",
            "rollout.sampler=a:b",
        ],
        "rollout.sampler: its log-probabilities are of logits divided by the temperature",
    ),
    (["kernel.enabled=true", "train.loss.backend=naive"], "kernel.enabled: true, but train.loss.backend is 'naive'"),
    (["train.loss.sparse_backward=auto", "train.loss.backend=reference"], "train.loss.sparse_backward: 'auto', but"),
    (["train.loss.sparse_backward=auto", "train.loss.backend=naive"], "backend naive is a dense baseline"),
    (["train.loss.sparse_backward=auto", "kernel.enabled=false"], "backend reference is a dense baseline"),
]


@pytest.mark.parametrize(("overrides", "message"), PAIRS)
def test_bad_pairs_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(None, overrides)


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
