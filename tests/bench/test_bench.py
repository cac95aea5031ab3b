"""The bench command: arms, verified, recorded, compared; suites; bad use."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

import logitless
from bench_fakes import in_this_process, prepared, scripted, turn
from logitless.core import row_passes
from logitless.head.sparse.active_columns import blank_report
from logitless.lab import cli
from logitless.lab.bench import arm, arm_program, case, microbench, suites, verification
from logitless.lab.bench.case import BenchConfig, Kernel
from logitless.lab.bench.gradcheck_config import GradcheckConfig
from logitless.lab.tools import shapes
from logitless.lab.tools.command_config import ConfigError, load

CONFIGS = Path(__file__).parents[2] / "configs" / "bench"
TINY = ["tokens=16", "rows=2", "hidden=16", "vocab=64", "repeats=2", "rounds=2", "warmup=1", "dtype=float32"]


def test_runs_and_records(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    in_this_process(monkeypatch)
    out = tmp_path / "a.jsonl"
    assert cli.main(["bench", "--config", str(CONFIGS / "cpu_head_small.yaml"), f"out={out}", *TINY]) == 0
    record = json.loads(out.read_text())
    assert list(record["arms"]) == ["naive", "strong", "default"]
    for row in record["arms"].values():
        assert row["median_ms"] > 0 and row["repeats"] == 4 and len(row["rounds"]["back_to_back_ms"]) == 2
        assert row["bench/step_s_mean"] == pytest.approx(row["mean_ms"] / 1e3)
        assert set(row["mem/compiler"]) >= {"arguments", "outputs", "temporaries", "peak"}
        assert row["environment"]["platform"] == "cpu"
        assert list(row["compile_s"]) == ["trace", "lower", "compile"] and sum(row["compile_s"].values()) > 0
    losses = [row["loss"] for row in record["arms"].values()]
    assert max(losses) - min(losses) < 1e-5 and record["verify"]["passed"]
    assert "default: dhidden difference" in record["verify"]["gates"]
    norms = [row["grad_norms"] for row in record["arms"].values()]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4) and norms[2] == pytest.approx(norms[1], rel=1e-4)
    assert len(norms[0]) == 2 and min(norms[0]) > 1e-4
    assert " of strong" in capsys.readouterr().out


@pytest.mark.slow  # 8 seconds of processes; what they report is tested without
def test_two_trees_in_real_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another tree's library runs in the other tree's arm and nowhere else: there the loss is 7 too large. That
    tree may be older than the registry of backends."""
    package = tmp_path / "other" / "src" / "logitless"
    shutil.copytree(Path(logitless.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__", "bench"))
    (package / "core" / "registry.py").rename(package / "core" / "table.py")
    for file in package.rglob("*.py"):
        text = file.read_text()
        text = text.replace("from logitless.core import registry", "from logitless.core import table as registry")
        file.write_text(text.replace("from logitless.core.registry import", "from logitless.core.table import"))
    init = package / "__init__.py"
    init.write_text(
        init.read_text()
        + "\n_right = linear_grpo_loss\n"
        + "def linear_grpo_loss(*a, **k):\n    loss, metrics = _right(*a, **k)\n    return loss + 7.0, metrics\n"
    )
    out = tmp_path / "a.jsonl"
    args = ["baselines=[strong]", "verify=false", f"out={out}", *TINY]
    assert cli.main(["bench", "--against", str(tmp_path / "other"), *args]) == 1  # the losses disagree
    record = json.loads(out.read_text())
    losses = {k: v["loss"] for k, v in record["arms"].items()}
    assert losses["default"] == pytest.approx(losses["strong"], abs=1e-5)
    assert losses["default (other tree)"] == pytest.approx(losses["default"] + 7.0, abs=1e-5)
    assert "default (other tree)" in record["arms"]["default"]["ratios"]
    assert "not verified" in capsys.readouterr().out
    assert cli.main(["bench", "--against", str(tmp_path / "none"), *args]) == 2
    assert "no src/logitless in it" in capsys.readouterr().err


def test_logits_level_with_the_jax_backward(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    in_this_process(monkeypatch)
    out = tmp_path / "a.jsonl"
    args = ["level=logits", "kernel.bwd_impl=jax", "baselines=[strong]", "check_rows=8", f"out={out}", *TINY]
    assert cli.main(["bench", *args]) == 0
    record = json.loads(out.read_text())
    assert list(record["arms"]) == ["strong", "default", "kernel (jax backward)"]
    for row in record["arms"].values():  # rows of the gradient at the true shape, against float64
        assert 0 < row["rows"]["norm"] < 1e-5 and 0 < row["rows"]["max"] < 1e-5


def test_wrong_rows_at_the_true_shape_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    in_this_process(monkeypatch)
    gates = {"rows": ("rows", "default", "strong", 1.0)}
    c = BenchConfig(level="logits", tokens=16, rows=2, vocab=64, dtype="float32", baselines=["strong"], gates=gates)
    c = dataclasses.replace(c, check_rows=8, verify=False, rounds=1, repeats=1, live=0.5)
    record = microbench.run(c)
    assert record["gates"]["rows"]["state"] == "met"
    assert all(arm["rows"]["norm"] < 1e-5 for arm in record["arms"].values())  # the truth divides by live tokens
    right = row_passes.pull_back
    monkeypatch.setattr(row_passes, "pull_back", lambda *a: right(*a) * jnp.float32(1.0001))
    record = microbench.run(c)
    assert record["gates"]["rows"]["state"] == "missed" and not record["passed"]


def test_a_sparse_backward_is_an_arm_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    in_this_process(monkeypatch)
    args = ["tokens=128", "rows=4", "hidden=128", "vocab=8192", "repeats=1", "rounds=1", "baselines=[strong]"]
    sparse = ["dtype=bfloat16", "inputs=realistic", "kernel.sparse_backward=auto", "verify=false"]
    record = microbench.run(load(BenchConfig, None, [*args, *sparse]))
    assert list(record["arms"]) == ["strong", "default", "default, sparse backward"] and record["passed"]
    row = record["arms"]["default, sparse backward"]
    assert 0 < row["left_out_mass_max"] <= 2.0**-8 and "left_out_mass" not in record["arms"]["default"]
    assert set(blank_report(1).metrics(8192)) <= set(row)
    assert record["arms"]["default"]["loss"] == pytest.approx(record["arms"]["strong"]["loss"], abs=1e-3)


def test_real_states_come_from_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Shapes are the file's; its tokens, in their order, with their entropy in the record; a suite takes the path."""
    import numpy as np

    in_this_process(monkeypatch)
    rng, path = np.random.default_rng(0), tmp_path / "states.npz"
    h, head = rng.normal(size=(70, 16)).astype(np.float32), rng.normal(size=(512, 16)).astype(np.float16)
    np.savez(path, h=h, y=rng.integers(0, 512, 70), head=head)
    args = ["tokens=64", "rows=4", "repeats=1", "rounds=1", "baselines=[strong]", "verify=false", "dtype=float32"]
    record = microbench.run(load(BenchConfig, None, [*args, "inputs=real", f"states={path}"]))
    assert record["passed"] and (record["config"]["hidden"], record["config"]["vocab"]) == (16, 512)
    z = h[:64] @ head.astype(np.float32).T
    p = np.exp(z - z.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    assert record["arms"]["default"]["entropy"] == pytest.approx(-np.sum(p * np.log(p), 1).mean(), rel=1e-4)
    for bad in (["inputs=real"], [f"states={path}"], ["inputs=real", f"states={path}", "tokens=128"]):
        with pytest.raises(ConfigError, match="states"):
            microbench.run(load(BenchConfig, None, [*args, *bad]))
    np.savez(path, h=h, y=np.zeros(3), head=head)
    with pytest.raises(ConfigError, match=r"expected \[T, H\]"):
        microbench.run(load(BenchConfig, None, [*args, "inputs=real", f"states={path}"]))
    names = [c.name for c in suites.chosen("gpu-sparse", "1536")]
    assert names and not any("real" in name for name in names)
    (real,) = suites.chosen("gpu-sparse", "real states", [f"states={path}"])
    assert isinstance(real, BenchConfig) and real.states == str(path)
    with pytest.raises(ConfigError, match="states=FILE"):
        suites.chosen("gpu-sparse", "real states")


@pytest.mark.parametrize("given, contract", [("auto", 1.5), (0.1, verification.NO_LIMIT)])
def test_a_sparse_backward_is_verified_on_realistic_data(
    monkeypatch: pytest.MonkeyPatch, given: Any, contract: float
) -> None:
    def answer(job: dict[str, Any]) -> dict[str, Any]:
        return dict(passed=job["config"]["sparse_backward"] == "off", gates={"g": {"ok": True}})

    asked = scripted(monkeypatch, answer)
    c = BenchConfig(kernel=Kernel(sparse_backward=given))
    found = verification.verify(c, case.arms(c), {}, lambda _: None)
    assert not found["passed"] and set(found["gates"]) == {"default: g", "default, sparse backward: g"}
    checks = [j["config"] for j in asked if j["do"] == "gradcheck"]
    assert [x["sparse_backward"] for x in checks] == ["off", given]
    assert checks[1]["inputs"] == "realistic" and checks[1]["contract"] == contract


def test_no_two_cases_share_a_verification_that_is_not_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another dtype, backend, logits dtype, objective or call is another check; the same one is not repeated."""
    asked = scripted(monkeypatch, lambda job: dict(passed=True, gates={}) if job["do"] == "gradcheck" else prepared())
    known: verification.Verified = {}

    def checks(**fields: Any) -> list[dict[str, Any]]:
        before = len(asked)
        c = BenchConfig(**{"dtype": "float32", **fields})
        verification.verify(c, case.arms(c), known, lambda _: None)
        return [j["config"] for j in asked[before:] if j["do"] == "gradcheck"]

    (first,) = checks()
    assert (first["dtype"], first["backend"], first["logits_dtype"]) == ("float32", "auto", "float32")
    assert checks(tokens=2048) == []
    assert [x["dtype"] for x in checks(dtype="bfloat16")] == ["bfloat16"]
    assert [x["backend"] for x in checks(kernel=Kernel(backend="chunked"))] == ["chunked"]
    assert [x["logits_dtype"] for x in checks(logits_dtype="bfloat16")] == ["bfloat16"]
    assert [x["head_grad_dtype"] for x in checks(head_grad_dtype="param")] == ["param"]
    assert [x["objective"]["aggregation"] for x in checks(objective=dict(aggregation="grpo"))] == ["grpo"]
    assert [x["call"] for x in checks(arms=dict(logprobs=dict(of="default", call="logprobs")))] == ["logprobs"]
    assert [x["level"] for x in checks(level="logits")] == ["logits"]
    assert [x["bwd_impl"] for x in checks(level="logits", kernel=Kernel(bwd_impl="jax"))] == ["jax"]


def test_a_kernel_that_does_not_verify_fails_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    in_this_process(monkeypatch)
    c = load(BenchConfig, None, [*TINY, "level=logits", "baselines=[]"])
    assert microbench.run(c)["passed"]
    right = row_passes.pull_back
    monkeypatch.setattr(row_passes, "pull_back", lambda *a: right(*a) * jnp.float32(1.1))
    record = microbench.run(c)
    assert not record["verify"]["passed"] and not record["passed"]


def test_roofline_and_what_is_achieved(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a chip of the table: H200, one step of 50 ms at T=8192 H=4096 V=151936."""
    part = prepared(
        live=8192, device=dict(peak=10, inputs=4, outputs=4, temporaries=2, from_compile=False),
        environment=dict(device="NVIDIA H200", platform="gpu"), turns=[turn(49.0, 50.0, 51.0)],
    )  # fmt: skip
    sizes = ["tokens=8192", "hidden=4096", "vocab=151936", "dtype=bfloat16"]
    row = microbench._summarise(load(BenchConfig, None, sizes), part)
    flops = 6 * 8192 * 4096 * 151936
    assert row["tflops"] == pytest.approx(flops / 0.05 / 1e12)
    assert row["gb_per_s"] == pytest.approx(2 * 2 * (8192 + 151936) * 4096 / 0.05 / 1e9)
    assert row["roofline_ms"] == pytest.approx(1e3 * flops / 989e12)
    assert row["roofline_ratio"] == pytest.approx(50 / row["roofline_ms"])
    assert row["mem/peak_bytes_in_use_max"] == 10 and row["mem/device"]["temporaries"] == 2
    quarter = microbench._summarise(load(BenchConfig, None, sizes), dict(part, live=2048))
    assert quarter["tflops"] == pytest.approx(row["tflops"] / 4)  # matmuls are over live tokens
    level = load(BenchConfig, None, ["level=logits", "tokens=4096", "vocab=151936"])
    row = microbench._summarise(level, part)
    assert row["roofline_ms"] == pytest.approx(1e3 * 2 * 2 * 4096 * 151936 / 4.8e12)
    float32 = load(BenchConfig, None, [*sizes, "dtype=float32"])
    assert microbench._summarise(float32, part)["roofline_ms"] is None  # the table has bfloat16's speed


def test_device_memory_is_split() -> None:
    import numpy as np

    memory = arm._device_memory(1000, 700, [np.zeros(50, np.float32)], (np.zeros(25, np.float32),))
    assert memory == dict(peak=1000, inputs=200, outputs=100, temporaries=700, from_compile=False)
    assert arm._device_memory(700, 700, [], [])["from_compile"]  # type: ignore[index]
    assert arm._device_memory(None, None, [], []) is None


def test_a_suite_writes_one_file_and_survives_a_case_without_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(job: dict[str, Any]) -> Any:
        if job["do"] == "gradcheck":
            own = {"config/name": job["config"]["name"], "device": "d", "jax": "0"}
            return dict(own, passed=True, gates={"loss": dict(value=0.1, limit=1, ok=True)})
        if job["do"] == "turn":
            return turn(1.0)
        return dict(error="out of memory", needs=2, limit=1) if job["name"] == "naive" else prepared()

    asked = scripted(monkeypatch, answer)
    small: dict[str, Any] = dict(tokens=16, rows=2, hidden=16, vocab=64, rounds=1, dtype="float32")
    cases = [
        BenchConfig(name="one", baselines=["strong"], **small),
        BenchConfig(name="no room", baselines=["naive"], **small),
        GradcheckConfig(name="a check"),
        BenchConfig(name="rl", batch_kind="rl", baselines=[], **small),
    ]
    monkeypatch.setattr(suites, "suites", lambda: {"x": cases})
    out = tmp_path / "a" / "x.json"
    assert cli.main(["bench", "--suite", "x", "--out", str(out), "rounds=2", "peaks=false"]) == 0
    result = json.loads(out.read_text())
    assert [r.get("name") for r in result["records"]] == ["one", "no room", None, "rl"] and result["passed"]
    assert result["records"][1]["arms"]["naive"] == {"error": "out of memory"}
    assert result["records"][0]["config"]["rounds"] == 2 and cases[0].rounds == 1
    checks = [j["config"]["name"] for j in asked if j["do"] == "gradcheck"]
    assert checks == ["gradcheck", "a check"]  # the same kernel is verified once
    progress = capsys.readouterr()
    assert "case 2/4: no room" in progress.err and "4 cases in" in progress.out and "PASS loss" in progress.out


def test_a_check_of_a_suite_that_fails_fails_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gates = {"loss": dict(value=3.0, limit=1.0, ok=False)}
    record = {"config/name": "g", "device": "d", "jax": "0", "passed": False, "gates": gates}
    scripted(monkeypatch, lambda job: record)
    monkeypatch.setattr(suites, "suites", lambda: {"x": [GradcheckConfig(name="g")]})
    assert cli.main(["bench", "--suite", "x", "--out", str(tmp_path / "x.json")]) == 1
    scripted(monkeypatch, lambda job: dict(error="backend='mosaic_gpu' runs on a GPU"))
    assert cli.main(["bench", "--suite", "x", "--out", str(tmp_path / "x.json")]) == 1
    assert "runs on a GPU" in (tmp_path / "x.json").read_text()


def test_every_case_of_every_suite_can_be_run() -> None:
    known = suites.suites()
    assert set(known) == {"cpu", "h200", "gpu-head", "gpu-sparse", "gpu-distill", "gpu-logits"}
    for name, cases in known.items():
        assert len({c.name for c in cases}) == len(cases)
        for c in cases:
            if isinstance(c, GradcheckConfig):
                from logitless.lab.bench import gradcheck

                gradcheck.check(c)
                gradcheck.objective_of(c)
                continue
            if c.inputs == "real":  # needs a file: test_real_states_come_from_a_file
                continue
            case.check(c)
            found = case.arms(c, peers=True)
            assert c.kernel.enabled and c.tokens // c.rows > 0
            assert found["default"].options == {}  # what a user gets without options
            if c.level == "head" and c.baselines:
                assert {"strong/f32", "strong"} & set(found)
                assert found[case.reference_of("default", found) or ""].logits_dtype == "float32"
            for own in found.values():  # each can be verified and each objective exists
                if case.is_ours(own):
                    verification.check_of(c, own)
                    arm_program._objective(dataclasses.asdict(c), own)
        of_a_loss = name not in ("gpu-logits", "gpu-distill")
        assert not of_a_loss or any("RL batch" in str(c) or c.name.startswith("head 8192") for c in cases)


def test_a_suite_needs_no_omegaconf(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import sys

    scripted(monkeypatch, lambda job: turn(1.0) if job["do"] == "turn" else prepared())
    monkeypatch.setitem(sys.modules, "omegaconf", None)
    out = str(tmp_path / "x.json")
    assert cli.main(["bench", "--suite", "cpu", "--only", "3/4", "--out", out, "verify=false", "rounds=1"]) == 0
    with pytest.raises(ConfigError, match="need omegaconf"):
        load(BenchConfig, None, [])


def test_host_arrays_are_what_the_baselines_expect() -> None:
    import numpy as np

    (x,) = shapes.host_arrays("logits", 64, 1, 5000, np.float32, np.random.default_rng(0), 4)
    assert x.shape == (4, 16, 5000) and x.std() == pytest.approx(3.0, rel=0.05)
    h, w = shapes.host_arrays("head", 64, 256, 300, np.float32, np.random.default_rng(0), 4)
    assert (h.reshape(64, 256) @ w.T).std() == pytest.approx(3.0, rel=0.1)
    assert len(np.unique(w[:, 0])) > 290  # rows are different ones


def test_every_shipped_configuration_loads() -> None:
    names = {p.stem for p in CONFIGS.glob("*.yaml")}
    for level, kinds in (("logits_bpd1_t4096_vocab151936", ("baseline", "pallas", "jaxbwd")),):
        assert {f"{level}_{k}" for k in kinds} <= names
    for kind in ("baseline", "fused"):
        assert {f"linear_bpd1_t8192_h4096_vocab151936_{kind}{s}" for s in ("", "_f32logits")} <= names
    for path in CONFIGS.glob("*.yaml"):
        c = load(BenchConfig, path)
        case.check(c)
        assert c.name == path.stem


def test_the_rl_batch_is_mostly_dead_weight() -> None:
    import numpy as np

    b = shapes.rl_batch(12 * 512, 100, np.random.default_rng(0), 12)
    live = b["mask"].mean()
    assert 0.2 < live < 0.7
    assert not b["mask"][:, :64].any()
    assert (b["advantages"] == 0).mean() == pytest.approx(1 / 3)
    quarter = shapes.rl_batch(12 * 512, 100, np.random.default_rng(0), 12, 0.25)
    assert quarter["mask"].mean() == pytest.approx(0.25, abs=0.005)
    b = shapes.uniform_batch(4096, 100, np.random.default_rng(0), 4, 0.5, 0.25)
    assert b["mask"].mean() == pytest.approx(0.5, abs=0.05)
    assert (b["advantages"] != 0).mean() == pytest.approx(0.25, abs=0.05)
