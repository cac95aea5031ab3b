"""The gradcheck command: it passes on right code, fails on wrong code, and says what is wrong with a configuration."""

import json
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

from logitless import cli
from logitless.bench import gradcheck, tracking
from logitless.bench.config import ConfigError, load
from logitless.logits import chunked

CONFIGS = Path(__file__).parent.parent / "configs" / "gradcheck"
SMALL = ["batch=2", "tokens=6", "hidden=16", "vocab=60"]


def run(*args: str) -> int:
    return cli.main(["gradcheck", *args])


@pytest.mark.parametrize("level", ["logits", "head"])
@pytest.mark.parametrize("kind", ["ordinary", "peaked", "extreme"])
def test_passes_and_logs(level: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "a" / "log.jsonl"
    assert run("--config", str(CONFIGS / f"{level}_chunked.yaml"), f"inputs={kind}", f"out={out}", *SMALL) == 0
    (line,) = out.read_text().splitlines()
    record = json.loads(line)
    for name in ["dlogits"] if level == "logits" else ["dhidden", "dlm_head"]:
        assert record[f"max_abs_diff_{name}"] >= 0 and record[f"max_rel_diff_{name}"] < 1e-3
        assert f"error_norm_{name}_kernel" in record
    assert record["abs_diff_loss"] == abs(record["loss_ref"] - record["loss_kernel"])
    assert "PASS loss" in capsys.readouterr().out


def test_is_deterministic(tmp_path: Path) -> None:
    records = []
    for _ in range(2):
        c = load(gradcheck.GradcheckConfig, None, [*SMALL, "seed=3", "dtype=bfloat16"])
        records.append(gradcheck.run(c))
    assert records[0] == records[1]


def test_a_wrong_gradient_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right = chunked.pull_back
    monkeypatch.setattr(chunked, "pull_back", lambda *a: right(*a) * jnp.float32(1.05))
    assert run("level=logits", f"out={tmp_path / 'log.jsonl'}", *SMALL) == 1
    assert "FAIL dlogits difference" in capsys.readouterr().out


def test_a_small_loss_of_accuracy_fails_the_contract(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    right = chunked.pull_back
    monkeypatch.setattr(chunked, "pull_back", lambda *a: right(*a) * jnp.float32(1 + 2e-6))
    record = gradcheck.run(load(gradcheck.GradcheckConfig, None, ["level=logits", *SMALL]))
    assert record["gates"]["dlogits difference"]["ok"]
    assert not record["gates"]["dlogits error / reference's (norm)"]["ok"]


@pytest.mark.parametrize(
    "override, message",
    [
        ("sed=1", "Did you mean 'seed'"),
        ("seed=one", "'seed'"),
        ("level=middle", "level: 'middle', expected one of logits, head"),
        ("backend=chunkd", "Did you mean 'chunked'"),
        ("preset=trll", "Did you mean 'trl'"),
        ("objective.polcy=clip", "Did you mean 'policy'"),
        ("tokens=0", "tokens: 0, expected at least 1"),
        ("seed", "expected key=value"),
    ],
)
def test_bad_configuration_is_exit_code_2(
    override: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(f"out={tmp_path / 'log.jsonl'}", *SMALL, override) == 2
    assert message in capsys.readouterr().err


def test_missing_and_broken_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--config", str(tmp_path / "none.yaml")) == 2
    assert "no such configuration file" in capsys.readouterr().err
    (tmp_path / "bad.yaml").write_text("a: [1, 2")
    assert run("--config", str(tmp_path / "bad.yaml")) == 2
    assert "not readable as YAML" in capsys.readouterr().err


def test_every_shipped_configuration_loads() -> None:
    paths = sorted(CONFIGS.glob("*.yaml"))
    assert len(paths) >= 6
    for path in paths:
        c = load(gradcheck.GradcheckConfig, path)
        gradcheck.objective_of(c)
        assert c.backend in path.stem


def test_a_wandb_outage_does_not_fail_a_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Broken:
        @staticmethod
        def init(**_: object) -> None:
            raise OSError("network is down")

    monkeypatch.setitem(sys.modules, "wandb", Broken)
    out = tmp_path / "log.jsonl"
    assert run("level=logits", "wandb_mode=offline", f"out={out}", *SMALL) == 0
    assert capsys.readouterr().err.count("network is down") == 1
    assert out.read_text().count("\n") == 1


def test_online_without_a_key_goes_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = {}

    class Fake:
        @staticmethod
        def init(**kwargs: object) -> None:
            seen.update(kwargs)
            raise RuntimeError("stop here")

    monkeypatch.setitem(sys.modules, "wandb", Fake)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    tracking.Tracker(tmp_path / "x.jsonl", mode="online", project="p", name="n", config={})
    assert seen["mode"] == "offline"


def test_config_errors_name_the_source() -> None:
    with pytest.raises(ConfigError, match="override 'tokns=3'"):
        load(gradcheck.GradcheckConfig, None, ["tokns=3"])


def test_plan_command(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["plan", "--tokens", "8192", "--hidden", "4096", "--vocab", "151936"]
    assert cli.main(args) == 0
    assert "30.59 TFLOP" in capsys.readouterr().out
    assert cli.main([*args, "--memory-budget", "10"]) == 2
    assert "memory_budget=10 bytes is less" in capsys.readouterr().err
