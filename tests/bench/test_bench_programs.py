"""What an arm computes and what is timed: the loss with its gradients, of every baseline too, on inputs as promised."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from logitless import Distillation, Objective, oracle
from logitless.lab.bench import arm, arm_program, case, case_arrays, peers
from logitless.lab.bench.case import PEERS, Arm, BenchConfig, arms
from logitless.lab.tools import timing
from logitless.lab.tools.command_config import ConfigError

HEAD = BenchConfig(tokens=32, rows=4, hidden=16, vocab=50, dtype="float32", live=0.8, moving=0.9)
CASES = {"head": HEAD, "logits": dataclasses.replace(HEAD, level="logits")}


def truth(c: BenchConfig, inputs: case_arrays.Inputs) -> tuple[float, list[np.ndarray]]:
    x, rest = ([np.asarray(a) for a in inputs[0]], {k: np.asarray(v) for k, v in inputs[1].items()})
    objective = Objective(aggregation="dapo")
    if c.level == "logits":
        loss, *grads = oracle.grpo_loss(x[0], objective=objective, **rest)
    else:
        loss, *grads = oracle.linear_grpo_loss(x[0], x[1], objective=objective, head_layout="vh", **rest)
    return loss, grads[: len(x)]


FORMS = {
    "head": ["naive", "strong", "checkpointed", "default", "frozen", "strong frozen"],
    "logits": ["naive", "strong", "gather", "default"],
}


@pytest.mark.parametrize("level", ["head", "logits"])
def test_every_arm_has_the_loss_and_the_gradients_of_float64(level: str) -> None:
    c = dataclasses.replace(CASES[level], baselines=[f for f in FORMS[level] if f in ("naive", "strong", "gather")])
    if level == "head":
        more = {"frozen": dict(of="default", frozen_head=True), "strong frozen": dict(of="strong", frozen_head=True)}
        c = dataclasses.replace(c, baselines=["naive", "strong", "checkpointed"], arms=more)
    found = arms(c)
    assert set(FORMS[level]) == set(found)
    inputs = case_arrays.Data().of(dataclasses.asdict(c), {})
    loss, grads = truth(c, inputs)
    for name, own in found.items():
        out = arm_program.program(dataclasses.asdict(c), own)(*inputs)
        assert float(out["loss"]) == pytest.approx(loss, abs=1e-5), name
        assert len(out["grads"]) == (1 if own.frozen_head else len(grads)), name
        for got, want in zip(out["grads"], grads, strict=False):
            assert np.linalg.norm(np.asarray(got) - want) < 1e-5 * np.linalg.norm(want), name


@pytest.mark.parametrize("kind", ["reverse_kl", "forward_kl", "jsd"])
def test_every_arm_of_a_distillation_has_the_loss_and_the_gradients_of_float64(kind: str) -> None:
    """The dense forms, the library's call, few live tokens; the teacher has a width of its own."""
    settings = dict(divergence=kind) | (dict(mix=0.3) if kind == "jsd" else {})
    c = dataclasses.replace(HEAD, teacher=24, distillation=settings, moving=1.0)
    c = dataclasses.replace(c, arms={"few": dict(of="default", batch=dict(live=0.3))})
    case.check(c)
    for name, own in arms(c).items():
        x, rest = inputs = case_arrays.Data().of(dataclasses.asdict(c), own.batch)
        student, teacher = oracle.linear_rows(*x), oracle.linear_rows(rest["teacher_hidden"], rest["teacher_lm_head"])
        objective: Any = Distillation(**settings)
        loss, want = oracle.distillation_loss(student, teacher, objective=objective, mask=rest["mask"])
        out = arm_program.program(dataclasses.asdict(c), own)(*inputs)
        assert float(out["loss"]) == pytest.approx(loss, rel=1e-5), name
        for got, true in zip(out["grads"], (want.inputs, want.head), strict=True):
            assert true is not None and np.linalg.norm(np.asarray(got) - true) < 2e-5 * np.linalg.norm(true), name


def test_a_reference_of_its_own_states() -> None:
    """A case with a teacher and no distillation: a GRPO loss with the exact KL, and the same with an estimate."""
    own = dict(beta=0.1, kl="full", aggregation="dapo")
    k3 = dict(of="default", objective=dict(kl="k3"), against="default")
    c = dataclasses.replace(HEAD, teacher=24, objective=own, baselines=[], arms={"k3": k3}, inputs="flat")
    case.check(c)
    x, rest = inputs = case_arrays.Data().of(dataclasses.asdict(c), {})
    losses = {k: float(arm_program.program(dataclasses.asdict(c), a)(*inputs)["loss"]) for k, a in arms(c).items()}
    rows = oracle.linear_rows(*x), oracle.linear_rows(rest["teacher_hidden"], rest["teacher_lm_head"])
    kl = oracle.divergence(*rows, mask=rest["mask"]).divergence
    plain = {k: v for k, v in rest.items() if not k.startswith("teacher")}
    bare, *_ = oracle.linear_grpo_loss(*x, objective=Objective(aggregation="dapo"), head_layout="vh", **plain)
    assert losses["default"] == pytest.approx(bare + 0.1 * float(kl.sum()) / int(rest["mask"].sum()), rel=1e-5)
    assert losses["k3"] != pytest.approx(losses["default"], rel=1e-3)


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(distillation=dict(divergence="jsd")), "needs a teacher"),
        (dict(level="logits", teacher=8), "teacher: is for level=head"),
        (dict(teacher=8, inputs="on_policy"), "the policy's own width, 16"),
        (dict(teacher=8), "give baselines=\\[\\]"),
        (dict(teacher=8, distillation=dict(mix=0.5), baselines=["checkpointed"]), "expected some of naive, strong"),
    ],
)
def test_what_a_case_with_a_teacher_cannot_have(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        case.check(dataclasses.replace(HEAD, **fields))


def test_what_is_timed_is_the_loss_with_its_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[Any] = []

    def take(f: Any, *args: Any, repeats: int, warmup: int) -> dict[str, Any]:
        timed.append(f(*args))
        return dict(wall_ms=[1.0] * repeats, back_to_back_ms=1.0)

    monkeypatch.setattr(timing, "turn", take)
    bench, c = arm.Bench(), dataclasses.asdict(HEAD)
    own = dataclasses.asdict(Arm("baseline", "strong"))
    said = bench.prepare(c, "strong", own)
    assert bench.turn(c, "strong")["wall_ms"] == [1.0] * HEAD.repeats
    _, grads = truth(HEAD, case_arrays.Data().of(c, {}))
    norms = [float(jnp.linalg.norm(g)) for g in timed[0]["grads"]]
    assert norms == pytest.approx([float(np.linalg.norm(g)) for g in grads], rel=1e-4)
    assert said["grad_norms"] == pytest.approx(norms, rel=1e-5)


def test_other_calls_of_an_arm() -> None:
    c = dataclasses.asdict(HEAD)
    x, rest = case_arrays.Data().of(c, {})
    alone = arm_program.program(c, Arm("library", call="loss"))(x, rest)
    assert set(alone) == {"loss", "metrics"}
    assert float(alone["loss"]) == pytest.approx(truth(HEAD, (x, rest))[0], abs=1e-5)
    stats = arm_program.program(c, Arm("library", call="logprobs"))(x, rest)["stats"]
    want = oracle.linear_token_stats(*(np.asarray(a) for a in x), np.asarray(rest["targets"]), head_layout="vh").logp
    np.testing.assert_allclose(stats.logp, np.where(rest["mask"], want, 0.0), atol=1e-5)
    np.testing.assert_array_equal(arm_program.program(c, Arm("copy"))(x, rest)["copy"], x[0] + 1)
    with pytest.raises(ValueError, match="a baseline has call: loss"):
        arm_program.program(c, Arm("baseline", "strong", call="logprobs"))
    gspo = arm_program.program(c, Arm("library", objective=dict(level="sequence", aggregation="grpo")))(x, rest)
    assert float(gspo["loss"]) != pytest.approx(float(alone["loss"]), abs=1e-4)


@pytest.mark.parametrize("kind", ["flat", "realistic", "logits"])
def test_inputs_are_near_the_policy_that_they_come_from(kind: str) -> None:
    c = dataclasses.replace(HEAD, hidden=64, vocab=512, inputs=kind) if kind != "logits" else CASES["logits"]
    made = case_arrays.Data()
    x, rest = made.of(dataclasses.asdict(c), {})
    z = np.asarray(x[0], np.float64) if kind == "logits" else np.asarray(x[0], np.float64) @ np.asarray(x[1]).T
    logp = oracle.token_stats(z, np.asarray(rest["targets"])).logp
    assert 0.02 < np.abs(np.asarray(rest["old_logp"]) - logp).max() < 0.2 and np.std(logp) > 0.3
    few, other = made.of(dataclasses.asdict(c), dict(rows=8, live=0.3))
    np.testing.assert_array_equal(np.asarray(few[0]).reshape(-1), np.asarray(x[0]).reshape(-1))
    assert other["mask"].shape == (8, 4) and np.mean(other["mask"]) < 0.6
    np.testing.assert_array_equal(np.asarray(other["targets"]).reshape(-1), np.asarray(rest["targets"]).reshape(-1))
    blank, blank_rest = case_arrays.blank(dataclasses.asdict(c), {})
    assert [a.shape for a in blank] == [a.shape for a in x] and [a.dtype for a in blank] == [a.dtype for a in x]
    assert {k: (v.shape, v.dtype) for k, v in blank_rest.items()} == {k: (v.shape, v.dtype) for k, v in rest.items()}


def test_a_peer_that_is_not_installed_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {(level, form) for level, forms in PEERS.items() for form in forms} == set(peers.MAKERS)
    monkeypatch.setitem(sys.modules, "torch", None)
    own = dataclasses.asdict(Arm("peer", "liger"))
    assert peers.Peers().prepare(dataclasses.asdict(HEAD), "peer: liger", own)["error"].startswith("not here: ")


def test_the_peak_is_that_of_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = iter([700, 1000])  # after compiling, and after the step
    monkeypatch.setattr(arm, "_memory", lambda key: next(peaks))
    found = arm.Bench().peak(dataclasses.asdict(HEAD), dataclasses.asdict(Arm("library")))["device"]
    outputs = found["outputs"]
    assert outputs >= 4 * (32 * 16 + 50 * 16)  # both gradients
    assert found["peak"] == 1000 and not found["from_compile"] and found["inputs"] >= outputs
