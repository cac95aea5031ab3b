"""The examples run, and their policies learn."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import flat_calls
from interpreted import by_numpy

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 30
"""Enough to tell learning from luck: a random policy scores 0.08, and none stays below 0.2."""


@pytest.fixture(autouse=True)
def _beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Examples import each other as scripts of one folder do."""
    monkeypatch.syspath_prepend(str(EXAMPLES))


def example(name: str) -> Any:
    needs = {"grpo_nnx": "flax", "grpo_linen": "flax", "grpo_equinox": "equinox"}.get(name)
    if needs is not None:
        pytest.importorskip(needs, reason=f"{needs} comes with logitless[examples]")
    return importlib.import_module(name)


def learned(rewards: list[float]) -> None:
    first, last = np.mean(rewards[:5]), np.mean(rewards[-5:])
    assert first < 0.2
    assert last > first + 0.12, rewards


def test_it_learns() -> None:
    learned(example("grpo_optax").main(STEPS))


def test_a_student_learns_from_its_teacher() -> None:
    learned(example("distil_optax").main(2 * STEPS, teacher_steps=2 * STEPS))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo_nnx", "grpo_linen", "grpo_equinox", "gspo_packed", "grpo_fsdp", "grpo_lora"])
def test_it_learns_too(name: str) -> None:
    learned(example(name).main(STEPS))


@pytest.mark.parametrize("name", ["grpo_nnx", "grpo_linen", "grpo_equinox", "grpo_lora"])
def test_its_programs_can_be_traced(name: str) -> None:
    """Rollout and update, not compiled: that they run, and learn, is a slow test."""
    module, key = example(name), jax.random.key(0)
    batch = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), a_batch_shape())
    if name == "grpo_nnx":
        from flax import nnx

        policy, reference = module.Policy(nnx.Rngs(0)), module.Policy(nnx.Rngs(0))
        optimizer = nnx.Optimizer(policy, optax.adam(1e-3), wrt=nnx.Param)
        rollout, update = (policy, reference, key), (policy, optimizer, batch)
    elif name == "grpo_linen":
        params = jax.eval_shape(module.POLICY.init, key, batch["ids"])["params"]
        create = functools.partial(module.TrainState.create, apply_fn=module.POLICY.apply, tx=optax.adam(1e-3))
        state = jax.eval_shape(lambda params: create(params=params), params)
        rollout, update = (params, params, key), (state, batch)
    elif name == "grpo_equinox":
        policy = module.Policy(key)
        state = module.OPTIMIZER.init(module.eqx.filter(policy, module.eqx.is_inexact_array))
        rollout, update = (policy, policy, key), (policy, state, batch)
    else:
        frozen = jax.eval_shape(example("grpo_optax").init, key)
        maps = jax.eval_shape(module.init_maps, key, frozen)
        rollout, update = (maps, frozen, key), (maps, jax.eval_shape(module.OPTIMIZER.init, maps), frozen, batch)
    assert "while" in module.rollout.lower(*rollout).as_text()
    assert "while" in module.update.lower(*update).as_text()


def a_batch_shape() -> dict[str, Any]:
    """Shapes of the batch that all rollouts of the examples give."""
    plain, key = example("grpo_optax"), jax.random.key(0)
    params = jax.eval_shape(plain.init, key)
    return jax.eval_shape(plain.rollout, params, params, key)[0]


def a_batch(seed: int = 0) -> tuple[Any, dict[str, Any]]:
    """Parameters of the plain example that differ from those that sampled, and its batch."""
    plain = example("grpo_optax")
    old, key = jax.jit(plain.init)(jax.random.key(seed)), jax.random.key(seed + 1)
    batch, _ = plain.rollout(old, old, key)
    return jax.tree.map(lambda x: 1.01 * x, old), batch


def test_packed_rows_have_the_loss_and_the_gradients_of_padded_ones() -> None:
    plain, packed = example("grpo_optax"), example("gspo_packed")
    params, batch = a_batch()

    def padded_loss(params: Any, batch: dict[str, Any]) -> Any:
        rest = dict(batch)
        hidden = plain.hidden_states(params, rest.pop("ids"))
        return flat_calls.linear_grpo_loss(hidden, params["embed"], objective=packed.OBJECTIVE, **rest)

    (padded, _), of_padded = by_numpy(jax.value_and_grad(padded_loss, has_aux=True), params, batch)
    rows = packed.packed(batch)
    assert int(rows.mask.sum()) == int(batch["mask"].sum())
    (value, _), gradients = by_numpy(jax.value_and_grad(packed.loss_of, has_aux=True), params, rows)
    np.testing.assert_allclose(value, padded, rtol=1e-5, atol=1e-6)
    for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(of_padded), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * float(np.abs(b).max() + 1e-3))


def test_fsdp_makes_the_update_of_one_device() -> None:
    """Every device holds an eighth of the head, and of its optimiser state, before and after."""
    plain, fsdp = example("grpo_optax"), example("grpo_fsdp")
    params, batch = a_batch()
    state = plain.OPTIMIZER.init(params)
    alone, _, _ = plain.update(params, state, batch)
    mesh = fsdp.make_mesh()
    together, new_state, _ = fsdp.update_over(mesh)(*(fsdp.cut(x, mesh) for x in (params, state, batch)))
    for a, b in zip(jax.tree.leaves(together), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    moments = [x for x in jax.tree.leaves(new_state) if x.shape == params["embed"].shape]
    for x in (together["embed"], *moments):
        assert {s.data.size for s in x.addressable_shards} == {x.size // 8}


def test_every_example_is_named_on_the_examples_page() -> None:
    page = (EXAMPLES.parent / "docs" / "examples.md").read_text()
    for path in EXAMPLES.glob("*.py"):
        assert path.name in page, f"docs/examples.md does not name {path.name}"
