"""The gradcheck command: it passes on right code, fails on wrong code, and says what is wrong with a configuration."""

import dataclasses
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from conftest import CHILD_ENVIRONMENT
from logitless.core import row_passes
from logitless.lab import cli
from logitless.lab.bench import gradcheck
from logitless.lab.bench import gradcheck_runs as runs
from logitless.lab.tools import tracking
from logitless.lab.tools.command_config import ConfigError, load

CONFIGS = Path(__file__).parents[2] / "configs" / "gradcheck"
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


def test_a_models_hidden_states(tmp_path: Path) -> None:
    out = tmp_path / "log.jsonl"
    model = ["inputs=model", "model=tiny", "vocab=60", "batch=2", "tokens=6"]  # of SMALL's shape: the same programs
    for level in ("head", "logits"):
        assert run("--config", str(CONFIGS / f"{level}_chunked.yaml"), f"out={out}", *model) == 0
    for line in out.read_text().splitlines():
        record = json.loads(line)
        assert record["passed"] and record["oracle"] == "compared"


def test_weights_from_a_folder_are_the_models_own(tmp_path: Path) -> None:
    import jax
    import numpy as np

    from hub_folder import save_safetensors
    from logitless.lab.bench import model_inputs
    from logitless.train import model as models
    from logitless.train.architectures import preset

    config = preset("tiny", 40)
    save_safetensors(tmp_path / "weights", config, models.init(config, jax.random.key(7)))
    folder = str(tmp_path / "weights")
    hidden, head, targets = model_inputs.hidden_and_head(folder, 0, 0, 2, 5, seed=7)
    same, _, _ = model_inputs.hidden_and_head("tiny", 0, 40, 2, 5, seed=7)
    assert np.array_equal(hidden, same) and head.shape == (40, 128) and targets.max() < 40
    fewer, cut, _ = model_inputs.hidden_and_head(folder, 1, 32, 2, 5, seed=7)
    assert cut.shape == (32, 128) and not np.array_equal(fewer, hidden)


def test_a_mesh_runs_on_virtual_devices_in_a_process_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gradcheck.jax, "device_count", lambda: 1)  # whatever the tests were started with
    for name in CHILD_ENVIRONMENT.keys() - {"JAX_NUM_CPU_DEVICES"}:  # the command says how many itself
        monkeypatch.setenv(name, CHILD_ENVIRONMENT[name])
    out = tmp_path / "log.jsonl"
    config = str(CONFIGS / "mesh_2x2x2_chunked.yaml")
    assert run("--config", config, f"out={out}") == 0
    assert "8 virtual CPU devices" in capsys.readouterr().err
    record = json.loads(out.read_text())
    assert record["config/mesh"] == "data=2,fsdp=2,tensor=2" and record["passed"]
    assert record["norm_rel_diff_dlm_head"] > 0  # the two did not run the same program


def test_what_is_too_large_for_the_oracle_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradcheck, "ORACLE_ELEMENTS", 100)
    record = gradcheck.run(load(gradcheck.GradcheckConfig, None, ["level=logits", *SMALL]))
    assert record["oracle"].startswith("left out") and "loss_oracle" not in record
    assert set(record["gates"]) == {"loss", "dlogits difference", "gradient of masked tokens"} and record["passed"]


def test_is_deterministic(tmp_path: Path) -> None:
    records = []
    for _ in range(2):
        c = load(gradcheck.GradcheckConfig, CONFIGS / "head_chunked.yaml", [*SMALL, "seed=3"])
        records.append(gradcheck.run(c))
    assert records[0] == records[1]


def test_a_wrong_gradient_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right = row_passes.pull_back
    monkeypatch.setattr(row_passes, "pull_back", lambda *a: right(*a) * jnp.float32(1.05))
    assert run("level=logits", f"out={tmp_path / 'log.jsonl'}", *SMALL) == 1
    assert "FAIL dlogits difference" in capsys.readouterr().out


def changed(monkeypatch: pytest.MonkeyPatch, change: Callable[[runs.Found], runs.Found]) -> None:
    """The backend's result is another one; the reference's stays."""
    right = runs.by_backend

    def by_backend(c: Any, backend: str, *rest: Any) -> runs.Found:
        found = right(c, backend, *rest)
        return found if backend == "reference" else change(found)

    monkeypatch.setattr(runs, "by_backend", by_backend)


def test_a_wrong_loss_fails_although_its_gradient_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    c = load(gradcheck.GradcheckConfig, None, ["level=logits", *SMALL])
    changed(monkeypatch, lambda f: dataclasses.replace(f, loss=f.loss + 0.01))
    record = gradcheck.run(c)
    assert not record["passed"] and [k for k, g in record["gates"].items() if not g["ok"]] == ["loss"]
    assert record["gates"]["loss"]["value"] == pytest.approx(0.01, rel=2e-2)
    changed(monkeypatch, lambda f: dataclasses.replace(f, loss=math.nan))
    assert not gradcheck.run(c)["gates"]["loss"]["ok"]


def test_statistics_padding_transforms_and_the_loss_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """``call=logprobs`` under random cotangents, padded columns, softcap and scale, in both levels; and each gate of
    its own can fail."""
    bent = ["softcap=20", "scale=0.8", "temperature=0.7", "vocab_size=50", "head_grad_dtype=param", "chunk_size=4"]
    exact = {"gradient of masked tokens", "gradient of padded columns", "loss without a gradient: difference"}
    for level, call in (("logits", "loss"), ("head", "logprobs")):
        args = [f"level={level}", f"call={call}", "same_without_gradient=true", *SMALL, *bent]
        c = load(gradcheck.GradcheckConfig, None, args)
        record = gradcheck.run(c)
        assert record["passed"], record["gates"]
        assert exact <= set(record["gates"]) and all(record["gates"][k]["limit"] == 0 for k in exact)
    assert {f"{k} error / reference's" for k in ("logp", "entropy", "lse")} <= set(record["gates"])
    assert record["error_row_dhidden_kernel"] == pytest.approx(record["error_row_dhidden_ref"], rel=1.0)

    def spoil(f: runs.Found) -> runs.Found:
        grads = [g + 1e-12 for g in f.grads]
        return dataclasses.replace(
            f, grads=grads, loss_alone=f.loss + 1e-9, statistics={k: v + 1e-3 for k, v in f.statistics.items()}
        )

    changed(monkeypatch, spoil)
    failed = {k for k, g in gradcheck.run(c)["gates"].items() if not g["ok"]}
    assert failed == exact | {f"{k} error / reference's" for k in ("logp", "entropy", "lse")}


def test_a_small_loss_of_accuracy_fails_the_contract(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    right = row_passes.pull_back
    monkeypatch.setattr(row_passes, "pull_back", lambda *a: right(*a) * jnp.float32(1 + 2e-6))
    record = gradcheck.run(load(gradcheck.GradcheckConfig, None, ["level=logits", *SMALL]))
    assert record["gates"]["dlogits difference"]["ok"]
    assert not record["gates"]["dlogits error / reference's (norm)"]["ok"]


REALISTIC = ("level=head", "dtype=bfloat16", "inputs=realistic", "tokens=64", "hidden=128", "vocab=8192")


def test_a_sparse_backward_is_held_to_its_tolerance_and_the_contract() -> None:
    record = gradcheck.run(load(gradcheck.GradcheckConfig, None, [*SMALL, *REALISTIC, "sparse_backward=auto"]))
    gate = record["gates"]["largest left-out mass"]
    assert record["passed"] and 0 < gate["value"] == record["left_out_mass_max"] <= gate["limit"] == 2.0**-8
    assert 0 < record["active_columns"] < 0.5 and record["dense_chunks"] == 0


@pytest.mark.slow  # a gate that fails fails the run: the tests around this one
def test_a_tolerance_that_spoils_the_gradient_fails() -> None:
    rough = gradcheck.run(load(gradcheck.GradcheckConfig, None, [*SMALL, *REALISTIC, "sparse_backward=0.3"]))
    assert rough["gates"]["largest left-out mass"]["ok"] and rough["left_out_mass_max"] > 2.0**-8
    assert not rough["gates"]["dhidden error / reference's (norm)"]["ok"] and not rough["passed"]


def test_more_left_out_than_allowed_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradcheck, "auto_tolerance", lambda dtype: 1e-6)
    record = gradcheck.run(load(gradcheck.GradcheckConfig, None, [*SMALL, *REALISTIC, "sparse_backward=auto"]))
    assert not record["gates"]["largest left-out mass"]["ok"] and not record["passed"]


def test_every_shipped_configuration_loads() -> None:
    paths = sorted(CONFIGS.glob("*.yaml"))
    backends = {f"{level}_{b}" for level in ("logits", "head") for b in ("chunked", "mosaic_gpu", "pallas_tpu")}
    assert backends <= {p.stem for p in paths}
    meshes = 0
    for path in paths:
        c = load(gradcheck.GradcheckConfig, path)
        gradcheck.check(c)
        gradcheck.objective_of(c)
        assert c.backend in path.stem and c.name == f"gradcheck_{path.stem}"
        if c.mesh:
            assert math.prod(gradcheck.axes_of(c).values()) == 8  # as a v6e-8 has
            meshes += 1
    assert meshes >= 4


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
