"""Replay: two losses on the same completions. Honest arms are never told apart, faults always are."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from logitless.train import ab, loop, recorded, replay, turns, update
from logitless.train.ab_plan import plan_of
from logitless.train.ab_text import table
from logitless.train.compare import same_completions
from logitless.train.config import ConfigError, TrainConfig, load
from logitless.train.head_calls import make_head_loss
from logitless.train.recorded import Trace
from logitless.train.task import build_task
from logitless.train.trainer import Trainer
from train_micro import kept_programs, micro, micro_params  # noqa: F401

pytestmark = pytest.mark.usefixtures("kept_programs")

STEPS = 10
SETTINGS = ["train.prompts_per_step=8", "rollout.record=1000", f"train.steps={STEPS}"]


def too_large(loss: Callable[..., Any]) -> Callable[..., Any]:
    """The right value with a gradient that is 2 % too large."""

    def wrong(*args: Any, **arrays: Any) -> Any:
        value, metrics = loss(*args, **arrays)
        return value + 0.02 * (value - jax.lax.stop_gradient(value)), metrics

    return wrong


def one_in_fifty(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Every fiftieth slot of the batch is forgotten."""

    def wrong(*args: Any, mask: Any, **arrays: Any) -> Any:
        forgotten = jnp.arange(mask.size).reshape(mask.shape) % 50 == 0
        return loss(*args, mask=mask & ~forgotten, **arrays)

    return wrong


def trainer_of(config: TrainConfig, fault: Callable[..., Any] | None = None) -> Trainer:
    with pytest.MonkeyPatch.context() as patch:
        if fault is not None:
            patch.setattr(update, "make_head_loss", lambda *args: fault(make_head_loss(*args)))
        return Trainer(config, build_task(config))


class Lab:
    """Trainers that were compiled once, run in step over one trainer's completions, ``epochs`` updates in a step."""

    def __init__(self, settings: list[str], epochs: int):
        settings = [*settings, *SETTINGS, f"train.inner_epochs={epochs}"]
        self.config = load(None, [*settings, "train.loss.backend=reference"])
        kernel = load(None, [*settings, "train.loss.backend=chunked", "train.loss.chunk_size=20"])
        self.baseline = trainer_of(self.config)
        self.others = {
            "control": trainer_of(replay.control_of(self.config)),
            "kernel": trainer_of(kernel),
            "too_large": self.faulty(too_large),
            "one_in_fifty": self.faulty(one_in_fifty),
        }

    def faulty(self, fault: Callable[..., Any]) -> Trainer:
        """The baseline with a fault in the first update of a step; the rest is the baseline's, compiled already."""
        made = trainer_of(self.config, fault)
        wrong = made.update_program

        def update_program(state: Any, base: Any, part: Any) -> Any:
            return (wrong if part.old_logp is None else self.baseline.update_program)(state, base, part)

        update_program.compile_s = 0.0  # type: ignore[attr-defined]
        made.update_program, made.score_program = update_program, self.baseline.score_program  # type: ignore[assignment]
        return made

    def traces(self, seed: int, steps: int, *names: str) -> dict[str, list[Trace]]:
        """The baseline's steps from random weights of this seed, and those of other arms on its completions."""
        trainers = {"baseline": self.baseline, **{n: self.others[n] for n in ("control", *names)}}
        params = micro_params(100 + seed)
        states = {}
        for name, trainer in trainers.items():
            trainer.config, trainer.key = dataclasses.replace(trainer.config, seed=seed), jax.random.key(seed)
            states[name] = trainer.initial(params)
        out: dict[str, list[Trace]] = {name: [] for name in trainers}
        for step in range(1, steps + 1):
            rolled: Any = None
            for name, trainer in trainers.items():
                if rolled is not None:
                    trainer.rollouts = lambda *_, r=rolled: dataclasses.replace(r)  # type: ignore[method-assign]
                state, record, done = trainer.step(*states[name], step)
                rolled = rolled or done
                states[name] = (state, states[name][1])
                live = done.trainer_logp[np.asarray(done.completions.mask)]  # type: ignore[index]
                numbers = (np.array(record[k]) for k in ("train/losses", "train/grad_norms"))
                out[name].append(Trace(*numbers, live, np.asarray(trainer.sample_weights(state.trained))))
        return out

    def judge(self, found: dict[str, list[Trace]], name: str) -> dict[str, Any]:
        return replay.judge(self.config, found["baseline"], found["control"], found[name])


@pytest.fixture(scope="module")
def lab(micro: list[str]) -> Lab:
    """With half of the programs: the second update of a step, off-policy, is another one."""
    return Lab(micro, epochs=1)


@pytest.mark.slow
@pytest.mark.parametrize("repeats", [4, 20])
def test_honest_arms_are_not_told_apart(micro: list[str], repeats: int) -> None:
    lab, verdicts, nearest = Lab(micro, epochs=2), [], 0.0
    for seed in range(repeats):
        found = lab.traces(seed, STEPS, "kernel")
        result = lab.judge(found, "kernel")
        verdicts.append(result["agree"])
        nearest = max(nearest, *(w["deviation"] / w["limit"] for w in result["worst"].values()))
        assert result["steps"] == STEPS and len(result["course"]["logp"]["arm"]) == STEPS
        # Something was trained and something was rounded: the test had a difference to look at.
        assert replay.deviations(found["baseline"][0], found["baseline"][-1])["weights"] > 1e-3
        assert result["worst"]["weights"]["deviation"] > 0 and result["worst"]["weights"]["control"] > 0
    assert verdicts == [True] * repeats
    assert nearest < 0.7  # and none was close to it


@pytest.mark.long
@pytest.mark.parametrize("fault", ["too_large", "one_in_fifty"])
def test_planted_faults_are_caught_in_the_first_step(lab: Lab, fault: str) -> None:
    result = lab.judge(lab.traces(0, 2, fault), fault)
    assert not result["agree"] and result["first"] == 1
    worst = result["worst"]["grad_norm"]
    assert worst["deviation"] > 100 * worst["limit"]


@pytest.mark.long
def test_a_fault_that_comes_late_is_caught_too(lab: Lab) -> None:
    found = lab.traces(0, STEPS, "kernel")
    last = found["kernel"][-1]
    found["kernel"][-1] = dataclasses.replace(last, grad_norms=last.grad_norms * 1.2)
    result = lab.judge(found, "kernel")
    assert not result["agree"] and result["first"] == STEPS


def fake(n: int = 1000, **fields: Any) -> Trace:
    given = dict(losses=np.zeros(1), grad_norms=np.ones(1), logp=-np.ones(n), weights=np.ones(4))
    return Trace(**{**given, **{k: np.asarray(v, float) for k, v in fields.items()}})


def test_the_limit_is_what_the_docstring_says() -> None:
    c = load(None, ["ab.replay_factor=10"])
    base, control = [fake(), fake()], [fake(grad_norms=[1 + 1e-4]), fake()]
    eps = float(np.finfo(np.float32).eps)
    result = replay.judge(c, base, control, [fake(grad_norms=[1 + 9e-4]), fake(grad_norms=[1 + 9e-4])])
    assert result["agree"]
    # The control's largest deviation so far counts; from the second step on, so does a token's decision.
    early = replay.judge(c, base, control[::-1], [fake(grad_norms=[1 + 9e-4]), fake()])
    assert not early["agree"] and early["first"] == 1
    assert early["worst"]["grad_norm"]["limit"] == pytest.approx(8 * eps)
    late = replay.judge(c, base, control, [fake(), fake(grad_norms=[1 + 6e-3])])
    assert not late["agree"] and late["worst"]["grad_norm"]["limit"] == pytest.approx(1e-3 + 8 * eps + 4 / 1000)
    assert replay.judge(c, base, control, [fake(), fake(grad_norms=[1 + 4e-3])])["agree"]
    bfloat = load(None, ["ab.replay_factor=10", "model.compute_dtype=bfloat16"])
    limits = replay.judge(bfloat, base, base, base)["worst"]
    assert limits["logp"]["limit"] == pytest.approx(8 * 2**-7) and limits["weights"]["limit"] == pytest.approx(8 * eps)
    # 1000 tokens: rounding averages out of a norm, and two percent are seen in bfloat16 as well.
    assert limits["grad_norm"]["limit"] == pytest.approx(8 * 2**-7 / 1000**0.5) and limits["grad_norm"]["limit"] < 0.003


def test_each_quantity_counts() -> None:
    c, base = load(None), [fake(), fake()]
    for key, other in {
        "loss": fake(losses=[1e-3]),
        "grad_norm": fake(grad_norms=[1.001]),
        "logp": fake(logp=-1.001 * np.ones(1000)),
        "weights": fake(weights=[1, 1, 1, 1.001]),
    }.items():
        result = replay.judge(c, base, base, [other, fake()])
        assert not result["agree"] and result["first"] == 1
        over = [k for k, w in result["worst"].items() if w["deviation"] > w["limit"]]
        assert over == [key]


def test_what_is_not_finite_or_does_not_fit_is_a_difference() -> None:
    c, base = load(None), [fake(), fake()]
    for other in (fake(losses=[np.nan]), fake(logp=-np.ones(999)), fake(weights=[1, 1, np.inf, 1])):
        assert not replay.judge(c, base, base, [fake(), other])["agree"]
    both = [fake(losses=[np.nan]), fake()]
    assert replay.judge(c, both, both, both)["agree"]
    # Gradients that are unknown are as large as the others' mean, half of which are unknown, too.
    unknown = [fake(), fake(grad_norms=[np.nan])]
    worst = replay.judge(c, unknown, unknown, [fake(), fake(grad_norms=[1.0])])["worst"]["grad_norm"]
    assert worst["step"] == 2 and worst["scale"] == 0.5
    # A control that went wrong allows nothing.
    assert not replay.judge(c, base, [fake(losses=[np.nan]), fake()], [fake(losses=[0.1]), fake()])["agree"]
    with pytest.raises(ConfigError, match="do not cover the same steps: baseline 2, control 2, arm 1"):
        replay.judge(c, base, base, base[:1])


def test_steps_without_a_gradient_prove_nothing() -> None:
    c = load(None)
    idle = [fake(grad_norms=[0.0]), fake(grad_norms=[0.0])]
    assert replay.judge(c, idle, idle, idle)["agree"] is None
    assert replay.judge(c, idle, idle, [fake(grad_norms=[1.0]), fake()])["agree"] is False
    assert replay.judge(c, [idle[0], fake()], [idle[0], fake()], [idle[0], fake()])["agree"] is True


def test_an_arm_that_is_approximate_by_design_is_judged_by_its_forward() -> None:
    c, base = load(None), [fake(), fake()]
    other = [fake(grad_norms=[1.1]), fake(grad_norms=[1.1], logp=-1.1 * np.ones(1000))]
    assert not replay.judge(c, base, base, other)["agree"]
    assert replay.judge(c, base, base, other, forward_only=True)["agree"]
    wrong = [fake(logp=-1.1 * np.ones(1000)), fake()]
    assert not replay.judge(c, base, base, wrong, forward_only=True)["agree"]
    loss = c.train.loss
    assert replay.approximate(loss, dataclasses.replace(loss, backend="chunked", chunk_size=8)) is None
    for change in ({"sparse_backward": 0.01}, {"logits_dtype": "bfloat16"}, {"head_grad_dtype": "param"}):
        assert replay.approximate(loss, dataclasses.replace(loss, **change)) is not None


def test_the_control_is_the_baseline_with_another_split() -> None:
    c = load(None)
    control = replay.control_of(c)
    assert control.train.microbatch == 256 and dataclasses.replace(control, train=c.train) == c
    assert replay.control_of(load(None, ["train.microbatch=8"])).train.microbatch == 4
    assert replay.control_of(load(None, ["train.microbatch=8", "mesh.data=4"])).train.microbatch == 4
    for settings in (
        ["train.microbatch=1"],
        ["train.objective.top_entropy=0.5"],
        ["train.microbatch=4", "mesh.data=4"],
    ):
        with pytest.raises(ConfigError, match=r"second baseline.*ab\.replay=false"):
            replay.control_of(load(None, settings))


def replayed(update: list[float], load: float = 0.5) -> list[dict[str, Any]]:
    """A replay's records: updates that take so long, in steps that take a quarter of a second more."""
    return [
        {
            "step": i, "train/loss": 0.0, "time/update_s": u, "time/rollout_s": load,
            "time/train/step_s": u + 0.25 + load,
        }
        for i, u in enumerate(update, 1)
    ]  # fmt: skip


def test_times_on_the_same_completions_are_compared_step_by_step() -> None:
    """Lengths vary, and the times with them; the first step of a process and the reading of files do not count."""
    c = load(None, ["ab.confidence=0.9"])
    lengths = [1.0, 2.0, 4.0]
    free = [{"step": i, "time/rollout_s": 2.0 * n, "time/reward_s": n} for i, n in enumerate(lengths, 1)]
    replays = {"dense": replayed(lengths), "fused": replayed([9.0, 1.8, 3.6], 0.125)}
    found = same_completions(c, free, "dense", replays, {"dense": 100, "fused": 75})
    assert found["fused"]["update"]["ratio"] == pytest.approx(0.9) and found["dense"]["update"]["ratio"] == 1.0
    assert found["fused"]["update"]["interval"] == pytest.approx([0.9, 0.9])
    assert found["fused"]["update"]["mean"] == pytest.approx(2.7)
    steps = np.log([(3 * n + 0.9 * n + 0.25) / (3 * n + n + 0.25) for n in lengths[1:]])
    assert found["fused"]["step"]["ratio"] == pytest.approx(np.exp(steps.mean()))
    low, high = found["fused"]["step"]["interval"]
    half = 6.3138 * abs(steps[0] - steps[1]) / 2  # the t-distribution's 95 % point with one degree of freedom
    assert np.log([low, high]) == pytest.approx([steps.mean() - half, steps.mean() + half], rel=1e-4)
    assert found["fused"]["peak"] == {"mean": 75.0, "ratio": pytest.approx(0.75), "interval": None}
    assert "peak" not in same_completions(c, free, "dense", replays, {"dense": None})["fused"]
    short = {name: records[:1] for name, records in replays.items()}  # nothing is left to compare
    nothing = same_completions(c, free, "dense", short, {})["fused"]
    assert [*nothing] == ["update", "step"]
    assert all(found == {"mean": None, "ratio": None, "interval": None} for found in nothing.values())


def test_replays_take_turns(tmp_path: Path, micro: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of every arm on the baseline's completions, then the next one; each is the replay that it is alone."""
    settings = [
        *micro,
        "train.steps=3",
        "train.loss.backend=reference",
        "ab.kernel=chunked",
        "ab.control=true",
        f"run_dir={tmp_path / 'x'}",
        "ab.turns=true",
    ]
    plan = plan_of(load(None, settings))
    order: list[tuple[str, int]] = []
    step = loop.Run.step

    def noted(run: loop.Run, state: Any, frozen: Any, number: int, progress: Any) -> Any:
        order.append((run.folder.name, number))
        return step(run, state, frozen, number, progress)

    popen = subprocess.Popen

    def in_this_process(command: list[str], **_: Any) -> subprocess.Popen[bytes]:
        assert command[1] == "-m"
        if command[2] == "logitless":
            loop.run(load(Path(command[5])), say=lambda _: None)
        else:
            assert turns.main(command[3:]) == 0
        return popen([sys.executable, "-c", ""])

    monkeypatch.setattr(loop.Run, "step", noted)
    monkeypatch.setattr(ab.subprocess, "Popen", in_this_process)
    result = ab.run(load(None, settings), say=lambda _: None)
    arms = ["control", "baseline", "kernel"]
    assert list(plan.replays) == arms
    expected = [(arms[(n + k) % 3], n) for n in (1, 2, 3) for k in range(3)]
    assert order[:12] == [("baseline", 1), ("baseline", 2), ("baseline", 3), *expected]  # before the other free runs
    assert result["agreement"]["agree"] and result["agreement"]["decided_by"] == "replay"
    assert result["agreement"]["replay_steps"] == 3
    assert all(arm["metrics"][0]["time/update_s"] > 0 for arm in result["arms"].values())  # no arm ran beside another
    found = result["same_completions"]
    assert set(found) == set(arms) and found["baseline"]["step"]["interval"] == [1.0, 1.0]
    assert all(0 < a[key]["interval"][0] <= a[key]["ratio"] for a in found.values() for key in ("update", "step"))
    assert "step (s)          kernel" in table(result)
    own, again = (recorded.load_traces(Path(p["baseline"].run_dir)) for p in (plan.arms, plan.replays))
    for mine, other in zip(own, again, strict=True):  # to the bit
        jax.tree.map(np.testing.assert_array_equal, dataclasses.asdict(mine), dataclasses.asdict(other))
    kept = Path(plan.replays["kernel"].run_dir, "metrics.jsonl").read_text()
    order.clear()
    ab.run(load(None, settings), resume=True, say=lambda _: None)
    assert not order  # complete
    Path(plan.replays["control"].run_dir, "summary.json").unlink()
    ab.run(load(None, settings), resume=True, say=lambda _: None)
    assert order == expected  # all of them anew
    assert len(Path(plan.replays["kernel"].run_dir, "metrics.jsonl").read_text().splitlines()) == len(kept.splitlines())


@pytest.mark.parametrize("more", [["ab.parallel=true"], ["ab.replay=false"], ["rollout.kind=random"]])
def test_replays_that_cannot_take_turns_are_refused(more: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"ab\.turns: replays in turns need"):
        plan_of(load(None, ["ab.kernel=chunked", "ab.turns=true", *more]))
