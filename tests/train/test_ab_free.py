"""Free runs of an A/B: what a control and several seeds can tell, and which test has the last word."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from logitless.lab import cli
from logitless.train import ab
from logitless.train.ab_plan import plan_of
from logitless.train.compare import agreement, block_means, free_runs, over_seeds
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
    with pytest.raises(ConfigError, match="choose one of them"):
        load(None, ["ab.control=true", "ab.seeds=2"])
