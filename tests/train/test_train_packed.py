"""Updates on packed rows: the numbers of padded ones, with any number of micro-batches and one program."""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from interpreted import in_numpy
from logitless.objectives.loss import Metric, metric_values
from logitless.objectives.objective import Objective
from logitless.train import train_mesh
from logitless.train.config import load, objective_of
from logitless.train.model import Params
from logitless.train.packed import (
    _in_micro_batches,
    _micro_batch,
    _nothing,
    _of_the_whole,
    make_packed_score,
    make_packed_update,
    pack_batch,
)
from logitless.train.task import build_task, pad_left
from logitless.train.trainer import Trainer
from logitless.train.update import Batch, Policy, State, make_optimizer, make_score, make_update
from train_micro import MICRO, micro, micro_params  # noqa: F401

PARAMS = micro_params(1)
P, C = 6, 7
GROUPS, SIZE = 3, 4
SETTINGS = [
    f"train.prompts_per_step={GROUPS}",
    f"train.group_size={SIZE}",
    f"rollout.max_prompt_tokens={P}",
    f"rollout.max_completion_tokens={C}",
]
PACKED = ["train.packing=shared", "train.microbatch=2", "train.pack_length=32"]
TAIL = "train.microbatch_tail=1"


def batch(seed: int = 0) -> Batch:
    """Three groups, of which the second has no spread; some off-policy."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, P + 1, GROUPS)
    prompts = pad_left([rng.integers(0, 16, n).tolist() for n in lengths], P, 0).repeat(SIZE)
    advantages = rng.standard_normal(GROUPS * SIZE).astype(np.float32)
    advantages[SIZE : 2 * SIZE] = 0.0
    shape = (GROUPS * SIZE, C)
    logp = (-2.7 + 0.2 * rng.standard_normal(shape)).astype(np.float32)
    arrays: dict[str, Any] = dict(
        prompt=prompts.tokens,
        prompt_valid=prompts.valid,
        completion=rng.integers(0, 16, shape, dtype=np.int32),
        mask=np.arange(C) < rng.integers(1, C + 1, (shape[0], 1)),
        advantages=advantages,
        old_logp=logp,
        rollout_logp=logp - 0.1,
        ref_logp=logp + 0.2,
    )
    return Batch(**arrays)


@functools.cache
def weights(layers: int) -> Params:
    """The micro model with its layer so many times, each time a little different."""
    deep = jax.tree.map(lambda x: jnp.concatenate([x * (1 + 0.1 * i) for i in range(layers)]), PARAMS["layers"])
    return {**PARAMS, "layers": deep}


@functools.cache
def programs(*overrides: str, layers: int = 1) -> Any:
    c = load(None, [*SETTINGS, *overrides])
    model = dataclasses.replace(MICRO, num_layers=layers)
    optimizer, objective = make_optimizer(c), objective_of(c)
    update, score = (make_update, make_score) if c.train.packing == "off" else (make_packed_update, make_packed_score)
    # Padded rows on one device are what the others are compared with.
    run = in_numpy if c.train.packing == "off" and train_mesh.make_mesh(c) is None else jax.jit
    return c, objective, optimizer, run(update(c, model, objective, optimizer)), run(score(c, model, objective))


def updated(x: Batch, *overrides: str, layers: int = 1) -> tuple[State, dict[str, Any]]:
    c, objective, optimizer, update, _ = programs(*overrides, layers=layers)
    trained = Policy(weights(layers), None)
    given: Any = x if c.train.packing == "off" else pack_batch(c, objective, x, c.train.skip_rows)
    return update(State(trained, optimizer.init(trained)), Policy(None, None), given)


def assert_same_update(a: Any, b: Any) -> None:
    (one, x), (other, y) = a, b
    assert abs(float(x["loss"])) > 1e-3 and float(x["grad_norm"]) > 1e-2
    np.testing.assert_allclose(x["loss"], y["loss"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(x["grad_norm"], y["grad_norm"], rtol=1e-5)
    # The first moment is the gradient, times a constant.
    for g, ours in zip(jax.tree.leaves(one.optimizer), jax.tree.leaves(other.optimizer), strict=True):
        np.testing.assert_allclose(g, ours, rtol=0, atol=1e-5 * float(np.abs(g).max() + 1e-30))


OBJECTIVES = {
    "dapo": "{aggregation: dapo}",
    "gspo": "{level: sequence, aggregation: grpo, eps_low: 0.05, eps_high: 0.05}",
    "corrected": "{aggregation: dr_grpo, max_length: 7, correction: sequence, off_policy_threshold: 0.3}",
    "entropy": "{aggregation: luspo, entropy_coef: 0.01}",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dapo", "gspo", "corrected", "entropy"])
def test_a_packed_update_is_the_padded_one(name: str) -> None:
    objective = f"train.objective={OBJECTIVES[name]}"
    for seed in (0, 1, 2):
        plain = updated(batch(seed), objective)
        packed = updated(batch(seed), objective, *PACKED, TAIL, "train.skip_rows=true", "train.report_skipped=true")
        assert_same_update(plain, packed)
        ours, theirs = metric_values(packed[1]["metrics"]), metric_values(plain[1]["metrics"])
        for key, value in theirs.items():  # report_skipped: all metrics are those of the whole batch
            np.testing.assert_allclose(ours[key], value, rtol=1e-4, atol=1e-6, err_msg=key)
        assert ours["update_rows"] == pytest.approx(1.0 if name == "entropy" else 2 / 3)
        assert 0.5 < ours["packed_fill"] <= 1


def test_supports_travel_with_their_tokens() -> None:
    """An update and log-probabilities over the ids that each token was drawn from, ragged, and a token without."""
    x, rng = batch(), np.random.default_rng(4)
    completion: Any = np.asarray(x.completion)
    support = (
        completion[..., None] + np.cumsum(rng.integers(0, 4, (*completion.shape, 5)), axis=-1)
    ) % MICRO.vocab_size
    support[..., 0] = completion
    support[..., 1:][rng.random(support[..., 1:].shape) < 0.3] = -1
    support[0, 0], support[~np.asarray(x.mask)] = -1, -1
    x = x.with_logp(support=support.astype(np.int32))
    objective = f"train.objective={OBJECTIVES['dapo']}"
    assert_same_update(updated(x, objective), updated(x, objective, *PACKED, "train.skip_rows=true"))
    assert not np.isclose(updated(batch(), objective)[1]["grad_norm"], updated(x, objective)[1]["grad_norm"], rtol=1e-3)
    logp = []
    for more in ((), PACKED):
        c, o, _, _, score = programs(objective, *more)
        given: Any = pack_batch(c, o, x, skip=False) if more else x
        logp.append(np.asarray(score(PARAMS, None, given)))
    np.testing.assert_allclose(*logp, rtol=1e-5, atol=1e-6)
    assert np.abs(logp[0]).max() > 0.1


def test_sequences_far_from_their_sampler_leave_the_update() -> None:
    """As if the mask had been without them, denominators included."""
    x = batch()
    plain = "{aggregation: bnpo, entropy_coef: 0.01}"
    logp = np.array(programs(f"train.objective={plain}")[-1](PARAMS, None, x))
    logp[::3] -= 1.0
    x = x.with_logp(rollout_logp=logp)
    dropped = updated(x, "train.objective={aggregation: bnpo, entropy_coef: 0.01, sequence_error_max: 1.5}")
    rest = dataclasses.replace(x, mask=np.asarray(x.mask) & (np.arange(len(logp)) % 3 > 0)[:, None])
    assert_same_update(updated(rest, f"train.objective={plain}"), dropped)
    kept = dropped[1]["metrics"]["kept_tokens"]
    assert float(kept.sum) == np.asarray(rest.mask).sum() < float(kept.count)


def test_skipped_rows_change_no_gradient_and_no_count() -> None:
    objective = f"train.objective={OBJECTIVES['dapo']}"
    plain = updated(batch(), objective)
    skipping = updated(batch(), objective, *PACKED, "train.skip_rows=true")
    assert_same_update(plain, skipping)
    ours, theirs = metric_values(skipping[1]["metrics"]), metric_values(plain[1]["metrics"])
    known = ["live_token_share", "zero_gradient_tokens", *(k for k in theirs if k.startswith("clip_fraction"))]
    assert len(known) >= 4
    for key in known:
        np.testing.assert_allclose(ours[key], theirs[key], rtol=1e-5, err_msg=key)
    assert theirs["zero_gradient_tokens"] > 0.2
    # Statistics of the policy are over what went through the model.
    assert ours["kl_k1"] != pytest.approx(theirs["kl_k1"], rel=1e-4)


@pytest.mark.optimized
def test_rows_that_are_left_out_change_no_bit_of_the_others() -> None:
    """One micro-batch, float32: skipping is exact, for what it leaves out contributes exact zeros."""
    c = load(None, [*SETTINGS, "train.packing=sequences", "train.microbatch=12", "train.skip_rows=true"])
    optimizer, objective = make_optimizer(c), objective_of(c)
    update = jax.jit(make_packed_update(c, MICRO, objective, optimizer))
    x = batch()
    left_out = pack_batch(c, objective, x, skip=True)
    # The same rows, with the skipped sequences in rows that were empty.
    rest = pack_batch(c, objective, dataclasses.replace(x, advantages=1.0 - (x.advantages != 0)), skip=True)
    used, free = int((left_out.rows.segment_ids[0] > 0).any(1).sum()), (rest.rows.segment_ids[0] > 0).any(1)
    assert used + free.sum() <= 12 and free.sum() > 0

    def together(a: Any, b: Any) -> Any:
        out = np.array(a)
        out[0, used : used + free.sum()] = np.asarray(b)[0, free]
        return out

    bare = [dataclasses.replace(p.rows, slots=None) for p in (left_out, rest)]
    with_zeros = jax.tree.map(together, *bare)
    with_zeros.arrays["advantages"][0, used:] = 0.0
    with_zeros = dataclasses.replace(left_out, rows=dataclasses.replace(with_zeros, slots=left_out.rows.slots))
    trained = Policy(PARAMS, None)
    state = State(trained, optimizer.init(trained))
    (a, x_info), (b, y_info) = (update(state, Policy(None, None), p) for p in (left_out, with_zeros))
    assert float(x_info["grad_norm"]) > 0
    np.testing.assert_array_equal(x_info["grad_norm"], y_info["grad_norm"])
    for g, ours in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(g, ours)


def test_one_program_for_any_number_of_micro_batches() -> None:
    objective = f"train.objective={OBJECTIVES['dapo']}"
    c, o, optimizer, update, _ = programs(objective, *PACKED, "train.skip_rows=true")
    trained = Policy(PARAMS, None)
    state, base = State(trained, optimizer.init(trained)), Policy(None, None)
    counts, texts = set(), set()
    for learning in (0, 1, 12):
        x = batch(5)
        x = dataclasses.replace(x, advantages=np.where(np.arange(12) < learning, 1.0, 0.0).astype(np.float32))
        packed = pack_batch(c, o, x, skip=True)
        counts.add(int(packed.learning))
        texts.add(update.lower(state, base, packed).as_text())
        norm = float(update(state, base, packed)[1]["grad_norm"])
        assert (norm > 0) == (learning > 0)
    assert len(counts) == 3 and 0 in counts and len(texts) == 1


def test_what_is_left_at_the_end_takes_small_micro_batches() -> None:
    """As few rows as hold the sequences, in whole micro-batches and then in slices; each of them once."""
    x, gone = batch(3), []
    for tail in (0, 1, 2, 4):
        more = ["train.microbatch=4", "train.pack_length=12", f"train.microbatch_tail={tail}"]
        c = load(None, [*SETTINGS, "train.packing=sequences", *more])
        packed, size = pack_batch(c, objective_of(c), x, skip=False), tail or 4
        used = int(packed.used)
        rows = np.asarray(packed.rows.segment_ids).any(-1)
        assert packed.rows.tokens.shape[1:] == (size, 12) and rows[:used].any(1).all() and not rows[used:].any()

        def seen(i: Any, count: int, total: Any, packed: Any = packed) -> Any:
            part = _micro_batch(packed.rows, i, count)
            return total[0] + jnp.sum(part.segment_ids > 0), total[1] + len(part.tokens), total[2] + (count > 1)

        total = _in_micro_batches(c, 0, packed.used, seen, (0, 0, 0))
        assert int(total[0]) == (np.asarray(packed.rows.segment_ids) > 0).sum()
        gone.append((int(total[1]), int(total[2])))
    (all_rows, none), (fewest, whole), *_ = gone
    assert none == 0 and whole == fewest // 4 >= 1 and fewest == rows.sum() < all_rows
    assert [n for n, _ in gone] == [4 * -(-fewest // 4), fewest, 2 * -(-fewest // 2), 4 * -(-fewest // 4)]


def test_packed_log_probabilities_are_the_padded_ones() -> None:
    x = batch(4)
    objective = f"train.objective={OBJECTIVES['dapo']}"
    _, _, _, _, plain = programs(objective)
    c, o, _, _, packed = programs(objective, *PACKED, TAIL)
    assert pack_batch(c, o, x, skip=False).used % 2  # a whole micro-batch or two, and a slice
    theirs, ours = plain(PARAMS, None, x), packed(PARAMS, None, pack_batch(c, o, x, skip=False))
    assert theirs.min() < -1
    np.testing.assert_allclose(ours, theirs, atol=2e-6, rtol=0)


def run_steps(settings: list[str], steps: int = 3) -> list[dict[str, Any]]:
    c = load(None, settings)
    task = build_task(c)
    trainer = Trainer(c, task)
    state, frozen = trainer.initial(task.load_params())
    trainer.compile(state, frozen)
    compiled, records = trainer._compile_seconds(), []
    for step in range(1, steps + 1):
        state, record, _ = trainer.step(state, frozen, step)
        records.append(record)
    assert trainer._compile_seconds() == compiled  # no step compiles
    return records


@pytest.mark.slow
def test_a_trainer_that_packs_takes_the_same_steps(micro: list[str]) -> None:
    own = ["train.inner_epochs=2", "train.kl_report=true", "train.minibatches=2"]
    packed = ["train.packing=shared", "train.microbatch=2", "train.skip_rows=true", "train.report_skipped=true"]
    plain, ours = run_steps([*micro, *own]), run_steps([*micro, *own, *packed])
    for a, b in zip(plain, ours, strict=True):
        assert a["rollout/tokens_crc32"] == b["rollout/tokens_crc32"]
        for key in ("train/loss", "train/grad_norm", "train/kl", "train/live_token_share", "train/entropy"):
            np.testing.assert_allclose(b[key], a[key], rtol=1e-3, atol=1e-5, err_msg=key)
        assert b["train/ratio_first"] in (0.0, 1.0) and 0 <= b["train/update_rows"] <= 1
    assert plain[0]["train/grad_norm"] > 0


def over_a_mesh(x: Batch, *overrides: str, layers: int = 1) -> tuple[State, dict[str, Any], Any]:
    """An update and the log-probabilities, with weights and rows laid out as the trainer does."""
    c, objective, optimizer, update, score = programs(*overrides, layers=layers)
    mesh = train_mesh.make_mesh(c)
    trained = train_mesh.place_weights(Policy(weights(layers), None), mesh)
    state = State(trained, train_mesh.place_weights(optimizer.init(trained), mesh))
    if c.train.packing == "off":
        rows = train_mesh.place_rows(x, mesh)
        return *update(state, Policy(None, None), rows), score(trained.params, None, rows)
    rows, all_rows = (
        train_mesh.place_micro_batches(pack_batch(c, objective, x, skip), mesh) for skip in (c.train.skip_rows, False)
    )
    return *update(state, Policy(None, None), rows), score(trained.params, None, all_rows)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh, name, packing, remat",
    [
        ((2, 2, 2), "dapo", "shared", False),
        *(
            (mesh, name, packing, remat)
            for mesh in ((2, 2, 2), (1, 4, 2), (4, 1, 2), (1, 2, 4), (2, 2, 1))
            for name, packing, remat in (
                ("dapo", "off", False),
                ("gspo", "sequences", False),
                ("entropy", "shared", False),
                ("dapo", "off", True),
                ("entropy", "shared", True),
            )
        ),
    ],
)
def test_an_update_over_a_mesh_is_that_of_one_device(
    mesh: tuple[int, ...], name: str, packing: str, remat: bool
) -> None:
    """Also with one row a device (2 x 2 x 2, 4 rows), where XLA once gave other gradients: the model has a layout."""
    if len(jax.devices()) < 8:
        pytest.skip("needs 8 (virtual) devices")
    settings = [f"train.objective={OBJECTIVES[name]}", "train.microbatch=4", f"train.packing={packing}"]
    if packing != "off":
        settings += ["train.pack_length=12", "train.skip_rows=true"]
    if name == "entropy":  # nothing is skipped: eight rows and, at the end, four
        settings += ["train.microbatch=8", "train.microbatch_tail=4"]
    x = batch()
    axes = [f"mesh.{axis}={size}" for axis, size in zip(("data", "fsdp", "tensor"), mesh, strict=True)]
    layers = 2 if remat else 1  # whose gradients are taken one by one
    *ours, logp = over_a_mesh(x, *settings, *axes, f"model.remat={str(remat).lower()}", layers=layers)
    assert_same_update(updated(x, *settings[:1], layers=layers), ours)  # padded, whole
    plain = programs(*settings[:1], layers=layers)[-1](weights(layers), None, x)
    np.testing.assert_allclose(np.where(x.mask, logp, 0), np.where(x.mask, plain, 0), rtol=1e-5, atol=1e-5)


def test_off_is_a_word_on_the_command_line_too() -> None:
    """YAML makes False of it."""
    assert load(None, ["train.packing=off"]).train.packing == "off"


def test_micro_batches_lie_in_rows_over_the_mesh() -> None:
    mesh = Mesh(np.asarray(jax.devices()[:4]).reshape(2, 2, 1), train_mesh.AXES)
    tree = {"slots": np.zeros((3, 4, 5)), "count": np.int32(2), "mask": np.zeros((4, 5))}
    placed = train_mesh.place_micro_batches(tree, mesh)
    specs = {k: x.sharding.spec for k, x in placed.items()}
    assert specs == {"slots": PartitionSpec(None, ("data", "fsdp")), "count": PartitionSpec(), "mask": PartitionSpec()}
    rows = train_mesh.place_rows({"a": np.zeros((8, 3)), "b": np.zeros((6, 3))}, mesh)
    assert {k: x.sharding.spec for k, x in rows.items()} == {"a": train_mesh.ROWS, "b": PartitionSpec()}
    alone = train_mesh.place_micro_batches(tree, None)
    assert all(len(x.sharding.device_set) == 1 for x in alone.values())


@pytest.mark.parametrize("name, axes", [("embed", ("tensor", "fsdp")), ("up", ("fsdp", "tensor")), ("q_bias", ())])
def test_a_weight_s_layout(name: str, axes: tuple[str, ...]) -> None:
    mesh = Mesh(np.asarray(jax.devices()[:4]).reshape(1, 2, 2), train_mesh.AXES)
    path = (jax.tree_util.DictKey(name),)
    assert train_mesh.weight_spec(path, (6, 4), mesh) == PartitionSpec(*axes)
    stacked = PartitionSpec(None, *axes) if axes else PartitionSpec()
    assert train_mesh.weight_spec(path, (3, 6, 4), mesh) == stacked
    assert train_mesh.weight_spec(path, (6, 5), mesh) == (PartitionSpec(axes[0], None) if axes else PartitionSpec())
    assert train_mesh.weight_spec(path, (4,), mesh) == PartitionSpec()


@pytest.mark.parametrize(
    "level, metrics, more", [("token", "trl", 3), ("sequence", "trl", 2), ("sequence", "liger", 3)]
)
def test_metrics_of_skipped_sequences_are_those_of_tokens_that_nothing_happened_to(
    level: Any, metrics: Any, more: int
) -> None:
    """Two of four sequences were skipped: three tokens, unclipped, without a gradient."""
    mask = jnp.array([[1, 1, 0], [1, 1, 1], [1, 0, 0], [0, 0, 0]], bool)
    rows: Any = SimpleNamespace(tokens=np.zeros((3, 1, 4)), segment_ids=jnp.array([[[1, 1, 2, 0]]] * 3))
    learned = jnp.array([False, True, False, True])
    batch: Any = SimpleNamespace(mask=mask, rows=rows, learned=learned, learning=jnp.int32(2))
    names = ("clip_fraction", "zero_gradient_tokens", "clip_fraction_min", "clip_fraction_max", "entropy")
    given = {k: Metric(jnp.float32(0.5), jnp.float32(2)) for k in names}
    c = load(None, ["train.packing=sequences", "train.microbatch=64", "train.skip_rows=true"])
    got = jax.tree.map(float, _of_the_whole(c, Objective(level=level, clip_metrics=metrics), batch, given))
    assert got["zero_gradient_tokens"] == (3.5, 5.0) and got["entropy"] == (0.5, 2.0)
    assert got["clip_fraction"] == (0.5, 2.0 + more)
    assert got["clip_fraction_min"] == (0.0, 4.0) and got["clip_fraction_max"] == (0.5, 4.0)
    assert got["live_token_share"] == (6.0, 12.0) and got["update_rows"] == (2.0, 4.0)
    assert got["packed_fill"] == (6.0, 8.0)
    reported = dataclasses.replace(c, train=dataclasses.replace(c.train, report_skipped=True))
    same = jax.tree.map(float, _of_the_whole(reported, Objective(level=level), batch, given))
    assert all(same[k] == (0.5, 2.0) for k in names)


@pytest.mark.parametrize("name, extreme", [("x_min", np.inf), ("x_max", -np.inf), ("minimum", 0.0)])
def test_a_metric_that_nothing_went_into(name: str, extreme: float) -> None:
    assert _nothing(name).sum == extreme and _nothing(name).count == 0
