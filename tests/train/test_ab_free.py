"""Free runs of an A/B: what a control and several seeds can tell, and which test has the last word."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from logitless.lab import cli
from logitless.train import ab
from logitless.train.ab import _show, _steps_expected
from logitless.train.ab_plan import plan_of
from logitless.train.ab_text import curve, table
from logitless.train.compare import agreement, block_means, disagreeing, free_runs, over_seeds
from logitless.train.config import ConfigError, load


def run(seed: int = 0, n: int = 100, *, reward: float = 0.0, drift: float = 0.0, kl: float = 1.0) -> list[Any]:
    """A run's records: its rewards rise, with noise of its own and a drift that grows."""
    rng = np.random.default_rng(seed)
    noise = rng.normal(0, 0.03, (2, n))
    rise = np.linspace(0, 1, n)
    return [
        {
            "step": i + 1,
            "train/loss": 0.0,
            "train/reward": float(rise[i] + noise[0, i] + reward + drift * rise[i]),
            "train/kl": float(kl * (rise[i] + 0.1 * noise[1, i])),
            "rollout/tokens_crc32": 0 if i < 3 else seed,
        }
        for i in range(n)
    ]


def test_without_a_control_a_difference_is_reported_and_not_judged() -> None:
    c = load(None, ["ab.replay=false"])
    found = agreement(c, run(), run(1, reward=-0.3))
    assert found["agree"] is None and found["decided_by"] == "nothing"
    assert found["verdict"].startswith("cannot be judged") and "ab.control" in found["verdict"]
    assert found["reward_difference"] == pytest.approx(-0.3, abs=0.02) and "reward_agree" not in found
    assert found["first_difference"] == 4 and "not judged" in found["test"]


def test_a_control_is_the_measure_of_free_runs() -> None:
    c = load(None, ["ab.control=true", "ab.replay=false", "ab.reward_tolerance=0.001", "ab.kl_tolerance=0.001"])
    base, near, far = run(), run(1, drift=0.02), run(2, drift=0.4)
    # The same arm: within the reach of a control that drifts too, and out of that of one that does not.
    assert agreement(c, base, run(3, drift=0.2), control=far)["agree"] is True
    off = agreement(c, base, run(3, drift=0.4), control=near)
    assert off["agree"] is False and off["decided_by"] == "control" and off["verdict"] == "DISAGREES, by control"
    assert off["reward_limit"] == pytest.approx(5 * off["reward_control_distance"])
    # Curves that cross have no mean difference, and are apart all the same.
    crossing = [r | {"train/reward": r["train/reward"] + (0.3 if i < 50 else -0.3)} for i, r in enumerate(run(4))]
    found = agreement(c, base, crossing, control=near)
    assert abs(found["reward_difference"]) < 0.02 and found["reward_distance"] > 0.29 and found["agree"] is False
    # The KL is a curve too, and one that is missing in one run alone is no agreement.
    assert agreement(c, base, run(3, kl=1.3), control=run(1))["kl_agree"] is False
    missing = run(3)
    missing[5]["train/kl"] = None
    assert agreement(c, base, missing, control=run(1))["kl_agree"] is False
    without = [{k: v for k, v in r.items() if k != "train/kl"} for r in run(3)]
    bare = [{k: v for k, v in r.items() if k != "train/kl"} for r in base]
    assert "kl_agree" not in free_runs(c, bare, without, bare)


def test_differences_that_do_not_matter_do_not_count() -> None:
    c = load(None, ["ab.control=true", "ab.reward_tolerance=0.5", "ab.kl_tolerance=0.5"])
    base = run()
    assert free_runs(c, base, run(1, reward=0.4, kl=1.2), base)["reward_agree"]
    assert free_runs(c, base, run(1, kl=1.2), base)["kl_agree"]
    assert not free_runs(c, base, run(1, reward=0.6), base)["reward_agree"]
    assert not free_runs(c, base, run(1, kl=2.2), base)["kl_agree"]


def test_seeds_are_a_paired_t_test() -> None:
    c = load(None, ["ab.seeds=4", "ab.replay=false", "ab.reward_tolerance=0.0001", "ab.kl_tolerance=0.0001"])
    shifts = [0.1, 0.3, 0.2, 0.25]
    pairs = [(run(i), run(i, reward=shift)) for i, shift in enumerate(shifts)]
    found = over_seeds(c, pairs)
    error = np.std(shifts, ddof=1) / 2
    assert found["reward_difference"] == pytest.approx(np.mean(shifts))
    assert found["reward_standard_error"] == pytest.approx(error)
    assert found["reward_limit"] == pytest.approx(5.8409 * error, rel=1e-4)  # t at 0.995 with 3 degrees of freedom
    assert found["reward_agree"] is True and found["kl_agree"] is True
    clear = [(run(i), run(i, reward=0.2 + shift / 10)) for i, shift in enumerate(shifts)]
    off = agreement(c, *clear[0], seeds=clear)
    assert off["agree"] is False and off["decided_by"] == "seeds" and off["reward_agree"] is False
    # One seed has no spread.
    one = agreement(load(None, ["ab.control=true", "ab.replay=false"]), *clear[0], control=run(9), seeds=clear[:1])
    assert one["decided_by"] == "control" and "reward_standard_error" not in one
    # A second seed without the metric is no agreement.
    pairs[1][1][0]["train/reward"] = None
    assert over_seeds(c, pairs)["reward_agree"] is False


def test_replay_decides_where_it_is_on() -> None:
    c = load(None, ["ab.control=true"])
    base = run()
    row = {"step": 1, "deviation": 1e-7, "control": 1e-7, "limit": 1e-6}
    worst = dict.fromkeys(("loss", "grad_norm", "logp", "weights"), row)
    fine = {"agree": True, "steps": 5, "first": None, "worst": worst}
    far = agreement(c, base, run(1, reward=0.9), replay=fine, control=run(2))
    assert far["agree"] is True and far["decided_by"] == "replay" and far["free_agree"] is False
    bad = {**fine, "agree": False, "first": 2}
    near = agreement(c, base, run(1), replay=bad, control=run(2))
    assert near["agree"] is False and near["verdict"] == "DISAGREES, by replay" and near["replay_first"] == 2
    idle = agreement(load(None), base, run(1), replay={**fine, "agree": None})
    assert idle["agree"] is None and "no step of the replay had a gradient" in idle["verdict"]
    # An arm that is approximate by design: the control has the last word, unless its very forward is off.
    why = "a sparse backward leaves a little out of the gradients"
    assert agreement(c, base, run(1), replay=fine, control=run(2), approximate=why)["decided_by"] == "control"
    assert agreement(c, base, run(1), replay=bad, control=run(2), approximate=why)["decided_by"] == "replay"
    alone = agreement(load(None), base, run(1), replay=fine, approximate=why)
    assert alone["agree"] is None and why in alone["verdict"]


def test_exit_codes_and_the_last_line_name_the_test(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    c, base, summary = load(None, ["ab.control=true", "ab.replay=false"]), run(), {"loss_backend": "x"}

    def printed(other: list[Any], **options: Any) -> tuple[int, str]:
        arms = {"baseline": {"metrics": base, "summary": summary}, "kernel": {"metrics": other, "summary": summary}}
        result = {"name": "x", "arms": arms, "agreement": agreement(c, base, other, **options)}
        monkeypatch.setattr(ab, "run", lambda *_, **__: result)
        return cli.main(["ab"]), capsys.readouterr().out.splitlines()[-1]

    assert printed(run(1), control=run(2)) == (0, "the arms agree (decided by control)")
    assert printed(run(1, drift=5), control=run(2)) == (1, "THE ARMS DISAGREE (decided by control)")
    assert printed(run(1, drift=5)) == (0, "NOT JUDGED: see above")

    def failed(*_: Any, **__: Any) -> None:
        raise ab.ArmFailed("kernel", 143, "")

    monkeypatch.setattr(ab, "run", failed)
    assert cli.main(["ab"]) == 143


def test_ten_blocks_or_as_many_as_there_are_steps() -> None:
    assert block_means([1.0, 3.0]) == [1.0, 3.0]
    assert block_means(list(range(20))) == [0.5 + 2 * i for i in range(10)]


def test_the_runs_of_an_ab() -> None:
    plan = plan_of(load(None, ["ab.kernel=chunked", "run_dir=x"]))
    assert list(plan.free) == ["baseline", "kernel"] and list(plan.replays) == ["control", "baseline", "kernel"]
    assert plan.arms["baseline"].rollout.record == 100 and plan.arms["kernel"].rollout.record == 0
    for arm in plan.replays.values():
        assert arm.rollout.replay == "x/baseline" and arm.rollout.record == 0 == arm.eval.every
    assert plan.replays["control"].train.loss == plan.arms["baseline"].train.loss
    assert plan.replays["control"].train.microbatch == 256
    assert plan_of(load(None, ["ab.kernel=chunked", "ab.replay_steps=7"])).arms["baseline"].rollout.record == 7
    # Random completions are the same in every arm: all of them are traced, and the control alone comes on top.
    random = plan_of(load(None, ["ab.kernel=chunked", "rollout.kind=random", "warm_start.steps=0"]))
    assert list(random.replays) == ["control"] and random.arms["kernel"].rollout.record == 100
    assert random.replays["control"].rollout.replay == ""
    free = plan_of(load(None, ["ab.kernel=chunked", "ab.control=true", "ab.replay=false"]))
    assert list(free.free) == ["baseline", "kernel", "control"] and not free.replays
    assert free.free["control"].train.microbatch == 256 and free.arms["baseline"].rollout.record == 0
    seeds = plan_of(load(None, ["ab.kernel=chunked", "ab.seeds=3", "seed=5"]))
    assert [a.seed for a in seeds.free.values()] == [5, 5, 6, 6, 7, 7]
    assert len({a.run_dir for a in seeds.free.values()}) == 6
    assert len({a.warm_start.cache for a in seeds.free.values()}) == 3
    with pytest.raises(ConfigError, match="'control' is a name"):
        plan_of(load(None, ["ab.arms={control: {backend: naive}, b: {backend: chunked}}"]))


@pytest.mark.parametrize(
    "overrides, steps",
    [
        (["train.steps=9"], 9),
        (["train.steps=9", "ab.replay_steps=4"], 9),
        (["train.steps=9", "rollout.replay=x"], 9),
        (["train.steps=9", "rollout.replay=x", "ab.replay_steps=4"], 4),
        (["train.steps=9", "rollout.replay=x", "ab.replay_steps=12"], 9),
    ],
)
def test_steps_that_an_arm_is_expected_to_take(overrides: list[str], steps: int) -> None:
    assert _steps_expected(load(None, overrides)) == steps


def test_arms_that_disagree_are_named() -> None:
    def of(*verdicts: bool | None) -> dict[str, Any]:
        names = [f"arm{i}" for i in range(len(verdicts))]
        agreement = {n: {"agree": v} for n, v in zip(names, verdicts, strict=True)}
        return {"arms": dict.fromkeys(["baseline", *names]), "agreement": agreement}

    assert disagreeing(of(True, False, None)) == ["arm1"]
    two = {"arms": dict.fromkeys(["baseline", "kernel"]), "agreement": {"agree": False}}
    assert disagreeing(two) == ["kernel"]


def test_a_kl_of_nothing_has_next_to_no_tolerance() -> None:
    """A share of next to nothing would be none at all; a share of one would hide everything."""

    def run(kl: float) -> list[dict[str, Any]]:
        return [{"train/loss": 0.0, "train/kl": kl} for _ in range(4)]

    c = load(None, ["ab.kl_tolerance=0.5", "ab.control=true"])
    limits = [free_runs(c, run(kl), run(kl), run(kl))["kl_limit"] for kl in (0.0, 1e-6, 2.0, -2.0)]
    assert limits == [5e-5, 5e-5, 1.0, 1.0]


def test_a_curve_that_no_seed_has_measured_is_not_judged() -> None:
    pairs = [([{"train/loss": 0.0, "train/reward": i}],) * 2 for i in (0.25, 0.5)]
    found = over_seeds(load(None, ["ab.seeds=2"]), pairs)
    assert found["reward_agree"] and not any(key.startswith("kl") for key in found)


def test_the_line_of_the_arms_that_run(tmp_path: Path) -> None:
    """The slowest says what is left; one without a step says its last words."""
    arms = {name: load(None, [f"run_dir={tmp_path / name}", "train.steps=10"]) for name in ("a", "b", "c", "d")}
    for name, done, pace in (("a", 4, 2.0), ("b", 8, 60.0)):
        (tmp_path / name).mkdir()
        record = {"train/loss": 0.5, "train/reward": 0.25, "time/train/step_avg_last10_s": pace}
        (tmp_path / name / "metrics.jsonl").write_text((json.dumps(record) + "\n") * done + '{"train/loss": 3')
    (tmp_path / "c.log").write_text("one\n loading \n\n")
    at: list[tuple[int, str]] = []
    progress: Any = SimpleNamespace(at=lambda done, text: at.append((done, text)))
    a, b = (f"reward 0.250  loss 0.5000  {pace} s/step" for pace in ("2.00", "60.00"))
    assert _show(arms, ["a", "b", "c", "d"], progress, 7) == f"{at[0][1]}  about 2 min left"
    assert at == [(7, f"a 4/10  {a}, b 8/10  {b}, c: loading, d: starting")]
    assert _show(arms, ["a"], progress, 0).endswith("about 12 s left")
    assert _show(arms, ["d"], progress, 0) == "d: starting"


def test_a_curve_is_the_mean_of_every_few_steps() -> None:
    def metrics(scale: float, kl: float | None) -> list[dict[str, Any]]:
        return [{"train/loss": 0.0, "train/reward": scale * i, "train/kl": kl} for i in range(5)]

    result = {"arms": {"one": {"metrics": [{"step": 0}, *metrics(1.0, None)]}, "two": {"metrics": metrics(2.0, 0.25)}}}
    assert curve(result, width=2).splitlines() == [
        "sampled reward, mean of every 2 steps:",
        "  one         0.500  2.500  4.000",
        "  two         1.000  5.000  8.000",
        "KL, mean of every 2 steps:",
        "  two          0.2500   0.2500   0.2500",
    ]


def test_the_table_of_two_arms() -> None:
    """A number that one arm alone has is a dash in the other; bytes are MiB; what neither has has no row."""
    test = {"agree": None, "decided_by": "nothing", "test": "t", "first_difference": 3, "verdict": "v"}
    summaries = {
        "baseline": {
            "loss_backend": "reference", "train/reward_first10": 0.25, "eval/last": 0.5, "train/kl_last10": 0.01,
            "memory/update_temporaries_bytes": 3 * 2**20, "memory/device_peak_bytes": 2**30,
            "time/update_s/last10": 0.5,
        },
        "kernel": {
            "loss_backend": "chunked", "train/reward_first10": 0.5, "train/kl_last10": 0.02,
            "memory/update_temporaries_bytes": 2**20, "memory/device_peak_bytes": 2**29, "time/update_s/last10": 0.25,
        },
    }  # fmt: skip
    result = {
        "name": "tiny",
        "parallel": True,
        "arms": {name: {"summary": summary} for name, summary in summaries.items()},
        "agreement": test,
    }
    lines = table(result).splitlines()
    assert [line.split() for line in lines[:7]] == [
        ["tiny", "baseline", "(reference)", "kernel", "(chunked)", "ratio"],
        ["sampled", "reward,", "first", "10", "steps", "0.250", "0.500", "2.000"],
        ["held-out", "reward", "at", "the", "end", "0.500", "-"],
        ["KL,", "last", "10", "steps", "0.0100", "0.0200", "2.000"],
        ["update", "phase,", "last", "10", "(s)", "0.500", "0.250", "0.500"],
        ["update's", "temporaries", "(MiB)", "3.0", "1.0", "0.333"],
        ["device", "peak", "(MiB)", "1,024.0", "512.0", "0.500"],
    ]
    assert lines[0].index("(reference)") + len("(reference)") == lines[1].index("0.250") + len("0.250")
    assert lines[7:] == [
        "times: not compared, for the arms ran at the same time (ab.parallel)",
        "kernel against baseline: test: t",
        "  free runs: other tokens from step 3 on",
        "kernel against baseline: v",
        "NOT JUDGED: see above",
    ]
