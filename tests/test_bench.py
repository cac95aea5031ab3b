"""The bench command: arms in their own processes, verified, recorded, compared."""

import json
from pathlib import Path

import jax.numpy as jnp
import pytest

from logitless import cli
from logitless.bench import microbench, shapes
from logitless.bench.config import load
from logitless.logits import chunked

CONFIGS = Path(__file__).parent.parent / "configs" / "bench"
TINY = ["tokens=16", "rows=2", "hidden=16", "vocab=64", "repeats=2", "warmup=1", "dtype=float32"]


def test_runs_records_and_compares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "a.jsonl"
    assert cli.main(["bench", "--config", str(CONFIGS / "cpu_head_small.yaml"), f"out={out}", *TINY]) == 0
    record = json.loads(out.read_text())
    assert list(record["arms"]) == ["naive", "strong", "kernel"]
    for row in record["arms"].values():
        assert row["median_ms"] > 0 and row["repeats"] == 2
        assert row["bench/step_s_mean"] == pytest.approx(row["mean_ms"] / 1e3)
        assert set(row["mem/compiler"]) >= {"arguments", "outputs", "temporaries", "peak"}
        assert row["environment"]["platform"] == "cpu"
    losses = [row["loss"] for row in record["arms"].values()]
    assert max(losses) - min(losses) < 1e-5 and record["verify"]["passed"]
    capsys.readouterr()
    assert cli.main(["bench", "compare", str(out), str(out)]) == 0
    assert capsys.readouterr().out.count("1.000") >= 3


def test_logits_level_with_the_jax_backward(tmp_path: Path) -> None:
    out = tmp_path / "a.jsonl"
    args = ["level=logits", "kernel.bwd_impl=jax", "baselines=[strong]", f"out={out}", *TINY]
    assert cli.main(["bench", *args]) == 0
    assert list(json.loads(out.read_text())["arms"]) == ["strong", "kernel (jax backward)"]


def test_a_kernel_that_does_not_verify_fails_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    right = chunked.pull_back
    monkeypatch.setattr(chunked, "pull_back", lambda *a: right(*a) * jnp.float32(1.1))
    monkeypatch.setattr(microbench, "_run_arm", lambda c, arm: dict(error="not run"))
    record = microbench.run(load(microbench.BenchConfig, None, TINY))
    assert not record["passed"]


def test_running_out_of_memory_is_recorded_and_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    c = load(microbench.BenchConfig, None, [*TINY, "verify=false", "baselines=[naive]"])
    real = microbench._run_arm

    def starved(c: microbench.BenchConfig, arm: dict) -> dict:
        return real(c, arm) if arm["kernel"] else dict(error="out of memory")

    monkeypatch.setattr(microbench, "_run_arm", starved)
    record = microbench.run(c)
    assert record["arms"]["naive"] == {"error": "out of memory"}
    assert record["arms"]["kernel"]["median_ms"] > 0
    assert "out of memory" in microbench.table(record)


@pytest.mark.parametrize(
    "override, message",
    [
        ("kernel.enbled=true", "Did you mean 'kernel.enabled'"),
        ("model=qwen3", "model: 'qwen3', expected one of"),
        ("baselines=[nave]", "baselines: 'nave'"),
        ("tokens=17", "17 do not split into 2 rows"),
        ("batch_kind=x", "batch_kind: 'x'"),
    ],
)
def test_bad_configuration_is_exit_code_2(override: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", *TINY, override]) == 2
    assert message in capsys.readouterr().err


def test_compare_refuses_what_is_not_a_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{}\n")
    assert cli.main(["bench", "compare", str(bad), str(bad)]) == 2
    assert cli.main(["bench", "compare", str(tmp_path / "none"), str(bad)]) == 2
    assert "no such file" in capsys.readouterr().err


def test_every_shipped_configuration_loads() -> None:
    names = {p.stem for p in CONFIGS.glob("*.yaml")}
    for level, kinds in (("logits_bpd1_t4096_vocab151936", ("baseline", "pallas", "jaxbwd")),):
        assert {f"{level}_{k}" for k in kinds} <= names
    for kind in ("baseline", "fused"):
        assert {f"linear_bpd1_t8192_h4096_vocab151936_{kind}{s}" for s in ("", "_f32logits")} <= names
    for path in CONFIGS.glob("*.yaml"):
        c = load(microbench.BenchConfig, path)
        microbench.check(c)
        assert c.name == path.stem


def test_the_rl_batch_is_mostly_dead_weight() -> None:
    import numpy as np

    b = shapes.rl_batch(12 * 512, 100, np.random.default_rng(0), 12)
    live = b["mask"].mean()
    assert 0.2 < live < 0.7
    assert not b["mask"][:, :64].any()
    assert (b["advantages"] == 0).mean() == pytest.approx(1 / 3)
