"""A/B/C: naive, dense, exact and sparse losses in one comparison."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hub_folder import save_safetensors
from interpreted import by_numpy
from logitless.lab import cli
from logitless.lab.bench import report
from logitless.objectives.loss import metric_values
from logitless.train import ab, loop
from logitless.train import folder as folders
from logitless.train.ab_plan import plan_of
from logitless.train.config import ConfigError, TrainConfig, load, objective_of, save
from logitless.train.head_calls import make_head_logp, make_head_loss
from logitless.train.model import ModelConfig, init
from logitless.train.task import build_task
from logitless.train.trainer import Trainer
from logitless.train.update import Batch, Policy, State, make_optimizer, make_update
from train_micro import kept_programs, micro  # noqa: F401

pytestmark = pytest.mark.usefixtures("kept_programs")

CONFIGS = Path(__file__).parents[2] / "configs" / "train"
MODEL = ModelConfig(32, 16, 32, 1, 2, 1, 8, max_position=64)


def peaked() -> Any:
    """Weights whose policy is sure of a few of 10 tokens; the other 22 have next to nothing in every row."""
    rows = 2.5 * np.random.default_rng(4).standard_normal((32, 16), np.float32)
    rows[10:] *= 0.01
    return init(MODEL, jax.random.key(3)) | {"embed": jnp.asarray(rows)}


def batch() -> Batch:
    """Eight rows, a little off-policy."""
    rng = np.random.default_rng(0)
    prompt, completion = (rng.integers(0, 10, (8, n), dtype=np.int32) for n in (4, 6))
    old = rng.normal(-8, 0.3, (8, 6)).astype(np.float32)
    return Batch(
        prompt=prompt,  # type: ignore[arg-type]
        prompt_valid=np.ones(prompt.shape, bool),  # type: ignore[arg-type]
        completion=completion,  # type: ignore[arg-type]
        mask=np.arange(6) < rng.integers(2, 7, (8, 1)),  # type: ignore[arg-type]
        advantages=rng.standard_normal(8).astype(np.float32),  # type: ignore[arg-type]
        old_logp=old,  # type: ignore[arg-type]
        ref_logp=old - 0.2,  # type: ignore[arg-type]
    )


def test_the_naive_loss_is_the_reference_without_entropy() -> None:
    x = batch()
    hidden, head = np.random.default_rng(1).standard_normal((8, 6, 16), np.float32), peaked()["embed"]
    arrays = dict(advantages=x.advantages, mask=x.mask, old_logp=x.old_logp, ref_logp=x.ref_logp, denominator=11.0)
    found = []
    for backend in ("reference", "naive"):
        c = load(None, ["train.kl_beta=0.1", f"train.loss.backend={backend}"])
        loss = partial(make_head_loss(c, objective_of(c)), targets=x.completion, **arrays)
        logp = by_numpy(make_head_logp(c, objective_of(c)), hidden, head, x.completion, x.mask)
        found.append((by_numpy(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True), hidden, head), logp))
    (((a, ours), grads), logp), (((b, naive), naive_grads), naive_logp) = found
    assert abs(float(a)) > 1e-2 and float(np.min(logp)) < -1
    np.testing.assert_allclose(logp, naive_logp, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(a, b, rtol=1e-5)
    for g, other in zip(grads, naive_grads, strict=True):
        np.testing.assert_allclose(g, other, rtol=1e-4, atol=1e-5 * np.abs(g).max())
    assert ours.keys() - naive.keys() == {"entropy", "is_top1"}
    x_values, y_values = metric_values(ours), metric_values(naive)
    np.testing.assert_allclose([x_values[k] for k in y_values], list(y_values.values()), rtol=1e-4, atol=1e-6)


def test_sparse_metrics_add_up_over_micro_batches() -> None:
    settings = ["train.loss.backend=chunked", "train.loss.sparse_backward=0.05", "train.loss.chunk_size=12"]
    c = load(None, ["train.prompts_per_step=2", "train.group_size=4", "train.microbatch=2", *settings])
    optimizer, trained = make_optimizer(c), Policy(peaked(), None)
    update = make_update(c, MODEL, objective_of(c), optimizer)
    state = State(trained, optimizer.init(trained))
    found = by_numpy(update, state, Policy(None, None), batch())[1]["metrics"]
    values = metric_values(found)
    assert 0 < values["left_out_mass"] < values["left_out_mass_max"] <= 0.05
    # Every token with a gradient counts once, and every micro-batch has one chunk of 12 tokens.
    moving = float(found["live_token_share"].sum) * (1 - values["zero_gradient_tokens"])
    assert float(found["left_out_mass"].count) == float(found["hard_rows"].count) == pytest.approx(moving)
    assert float(found["dense_chunks"].count) == float(found["backward_columns"].count) == 4
    assert 0 < values["active_columns"] < 1


ARMS = (
    "ab.arms={{dense: {{backend: reference}}, exact: {{backend: chunked}}, "
    "sparse: {{backend: chunked, sparse_backward: {}}}}}"
)


def test_the_arms_of_a_mapping_differ_in_their_loss_alone() -> None:
    c = load(CONFIGS / "smollm2-135m-abc.yaml", ["ab.arms.exact.backend=chunked", "ab.arms.exact.chunk_size=64"])
    arms = ab.arms_of(c)
    assert list(arms) == ["dense", "exact", "sparse"]
    losses = {n: (a.train.loss.backend, a.train.loss.sparse_backward, a.train.loss.chunk_size) for n, a in arms.items()}
    assert losses == {
        "dense": ("reference", "off", 0),
        "exact": ("chunked", "off", 64),
        "sparse": ("mosaic_gpu", "auto", 0),
    }
    for arm in arms.values():
        train = dataclasses.replace(arm.train, loss=c.train.loss)
        same = dataclasses.replace(arm, train=train, run_dir=c.run_dir, warm_start=c.warm_start)
        assert same == c
    assert c.train.kl_report and c.train.steps == 100
    bad = {
        "{a: {backend: chunked}, b: {backend: chunked}}": "a and b are the same",
        "{a: {backend: chunked}, b: {backend: reference, sparse_backward: auto}}": "arm b: train.loss.sparse_backward",
        "{a: {backend: chunked}, b: {chunk_size: many}}": "ab.arms.b.chunk_size: .*many",
        "{a: {backend: chunkd}, b: {}}": "arm a: train.loss.backend: 'chunkd'",
    }
    for arms_text, message in bad.items():
        with pytest.raises(ConfigError, match=message):
            ab.arms_of(load(None, [f"ab.arms={arms_text}"]))


def test_the_name_of_the_loss_on_record(micro: list[str]) -> None:
    """``naive`` is no backend of the library, and keeps its name."""
    for loss, name in (("naive", "naive"), ("reference", "reference"), ("auto", "chunked")):
        c = load(None, [*micro, f"train.loss.backend={loss}"])
        assert Trainer(c, build_task(c)).backend == name


def test_a_sparse_backward_over_a_mesh_is_for_the_library_to_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything compiles, and as an error of the configuration."""

    def refuses(*_: Any, **given: Any) -> Any:
        assert given["options"].sparse_backward == "auto" and given["sharding"] is not None
        raise NotImplementedError("linear_grpo_loss: not with sharding=")

    if len(jax.devices()) < 2:
        pytest.skip("needs 2 (virtual) devices")
    monkeypatch.setattr("logitless.train.trainer.explain", refuses)
    c = load(None, ["mesh.data=2", "train.loss.backend=chunked", "train.loss.sparse_backward=auto"])
    with pytest.raises(ConfigError, match=r"train\.loss: linear_grpo_loss: not with sharding="):
        Trainer(c, build_task(c))


@pytest.mark.slow
def test_abc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], micro: list[str]
) -> None:
    """Three arms, here in one process: their starts are the most of so small a run."""

    def in_this_process(arms: dict[str, TrainConfig], _: bool) -> subprocess.Popen[bytes]:
        (arm,) = arms.values()
        loop.run(arm, say=lambda _: None)
        return subprocess.Popen([sys.executable, "-c", ""])

    monkeypatch.setattr(ab, "_start", in_this_process)
    save_safetensors(tmp_path / "weights", MODEL, peaked())
    (tmp_path / "turns.py").write_text("n = 0\ndef score(text, problem):\n    global n\n    n += 1\n    return n % 2\n")
    folder = tmp_path / "abc"
    settings = [*micro, "train.steps=4", "checkpoint.every=0", "train.kl_report=true", f"run_dir={folder}"]
    settings += [ARMS.format("0.05"), "train.learning_rate=1e-3", f"model.weights={tmp_path / 'weights'}"]
    settings += [f"reward.kind={tmp_path / 'turns.py'}:score"]
    assert cli.main(["ab", *settings]) == 0
    printed = capsys.readouterr().out
    for text in (
        "sparse against dense: test: replay: log-probabilities of step 1",
        "exact/dense",
        "sparse (chunked)",
        "exact against dense: agrees, by replay",
        "sparse against dense: cannot be judged: a sparse backward leaves a little out",
        "NOT JUDGED: see above (what could be judged agrees, by replay)",
    ):
        assert text in printed, printed
    result = json.loads((folder / "ab.json").read_text())
    assert list(result["arms"]) == ["dense", "exact", "sparse"]
    assert set(result["ratios"]) == set(result["agreement"]) == {"exact", "sparse"}
    assert not ab.disagreeing(result)
    assert result["ratios"]["sparse"]["update_time"] > 0
    steps = result["arms"]["sparse"]["metrics"]
    assert any(s["train/left_out_mass"] > 0 for s in steps)
    assert all(0 <= s["train/left_out_mass"] <= s["train/left_out_mass_max"] <= 0.05 for s in steps)
    assert "train/left_out_mass" not in result["arms"]["exact"]["metrics"][0]
    assert result["arms"]["sparse"]["summary"]["train/left_out_mass_max"] == max(
        s["train/left_out_mass_max"] for s in steps
    )
    exact, sparse = result["agreement"]["exact"], result["agreement"]["sparse"]
    assert exact["decided_by"] == "replay" and exact["agree"] and exact["replay_steps"] == 4
    assert sparse["agree"] is None and sparse["decided_by"] == "nothing" and sparse["replay_agree"]
    # The sparse arm's gradients differ by design: seen by the replay, and not judged.
    assert exact["replay_weights_deviation"] <= exact["replay_weights_limit"]
    furthest = {n: max(r["course"]["weights"]["arm"]) for n, r in result["replay"].items()}
    assert furthest["sparse"] > furthest["exact"] > 0, furthest
    assert set(result["replay"]) == {"exact", "sparse"} and len(result["replay"]["exact"]["course"]["loss"]["arm"]) == 4
    replayed = json.loads((folder / "replay" / "exact" / "metrics.jsonl").read_text().splitlines()[2])
    assert replayed["rollout/tokens_crc32"] == result["arms"]["dense"]["metrics"][2]["rollout/tokens_crc32"]
    assert "left-out mass, mean of every" in ab.curve(result)
    _page_has_all_arms(folder, tmp_path)
    # Nothing is left to do: a second call takes the arms' own records, and starts no process.
    (folder / "ab.json").unlink()
    said: list[str] = []
    again = ab.run(load(None, settings), resume=True, say=said.append)
    replays = [f"replay: arm {n}: complete already" for n in ("control", "dense", "exact", "sparse")]
    complete = ["arm dense: complete already", *replays, *(f"arm {n}: complete already" for n in ("exact", "sparse"))]
    assert [s for s in said if "complete already" in s] == complete
    assert again["agreement"] == result["agreement"]
    # One without its last steps is.
    lines = (folder / "exact" / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "exact" / "metrics.jsonl").write_text("".join(lines[:-1]))
    arms = plan_of(load(None, settings)).arms
    assert [folders.finished(a, 4) for a in arms.values()] == [True, False, True]
    other = dataclasses.replace(arms["dense"], seed=5)
    with pytest.raises(ConfigError, match="seed: 5, but the run in"):
        folders.finished(other, 4)


def _page_has_all_arms(folder: Path, out: Path) -> None:
    report.write([folder], out / "page.html", plots=out / "plots")
    page = (out / "page.html").read_text()
    for chart in ("Reward", "KL", "Left-out mass", "Largest left-out mass"):
        assert f"{chart} by step: abc" in page
    assert "Update time by step" not in page and "abc: the same completions in all arms" in page
    assert "abc: agreement with dense" in page
    svg = (out / "plots" / "kl-by-step-abc.svg").read_text()
    assert all(f">{arm}</text>" in svg for arm in ("dense", "exact", "sparse"))
    colours = set(re.findall(r'style="fill: none;[^"]*stroke: var\(--(\w+)\)', svg)) - {"ink", "muted", "grid"}
    assert len(colours) == 3, colours


def test_saved_arms_read_back(tmp_path: Path) -> None:
    c = load(None, [ARMS.format("auto"), "train.loss.sparse_backward=off"])
    save(c, tmp_path / "c.yaml")
    assert load(tmp_path / "c.yaml") == c and c.train.loss.sparse_backward == "off"
    assert jnp.dtype(c.train.loss.logits_dtype) == jnp.float32
