"""FSDP over eight devices: parameters, optimiser state and batch are cut over one mesh axis, the loss included.

    python examples/grpo_fsdp.py

On a machine without eight accelerators it takes eight CPU devices. Model and update are those of grpo_optax.py; what is
new is where arrays lie, and `sharding=` in the calls of the loss: the head is gathered once a call, its gradient comes
back cut in the same way.
"""

from __future__ import annotations

from typing import Any

import grpo_optax
import jax
import optax
import toy
from grpo_optax import EPOCHS, OBJECTIVE, OPTIMIZER, hidden_states
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import logitless

DEVICES = 8


def make_mesh() -> Mesh:
    """Eight devices on one axis; the compiler decides what the model's own arrays do (``Auto``)."""
    return jax.make_mesh((DEVICES,), ("fsdp",), axis_types=(AxisType.Auto,))


def cut(tree: Any, mesh: Mesh) -> Any:
    """Every array cut along its first dimension that divides by the devices; the others (scalars) on all of them."""

    def place(x: Array) -> Array:
        which = next((i for i, n in enumerate(x.shape) if n % DEVICES == 0 and n), None)
        spec = P() if which is None else P(*[None] * which, "fsdp")
        return jax.device_put(x, NamedSharding(mesh, spec))

    return jax.tree.map(place, tree)


def update_over(mesh: Mesh) -> Any:
    """The update of grpo_optax.py over a mesh."""
    sharding = logitless.Sharding(mesh, tokens=P("fsdp"), head=P("fsdp", None))

    @jax.jit
    def update(params: Any, state: Any, batch: dict[str, Array]) -> tuple[Any, Any, Any]:
        rest = dict(batch)
        ids = rest.pop("ids")

        def loss(params: Any) -> Any:
            hidden = hidden_states(params, ids)
            return logitless.linear_grpo_loss(hidden, params["embed"], objective=OBJECTIVE, sharding=sharding, **rest)

        gradients, metrics = jax.grad(loss, has_aux=True)(params)
        changes, state = OPTIMIZER.update(gradients, state, params)
        return optax.apply_updates(params, changes), state, metrics

    return update


def main(steps: int = 100, seed: int = 0) -> list[float]:
    """The mean reward of each step."""
    mesh = make_mesh()
    update = update_over(mesh)
    start, *keys = jax.random.split(jax.random.key(seed), steps + 1)
    reference = params = cut(grpo_optax.init(start), mesh)
    state = cut(OPTIMIZER.init(params), mesh)
    rewards: list[float] = []
    for step, key in enumerate(keys):
        batch, reward = grpo_optax.rollout(params, reference, key)
        batch = cut(batch, mesh)  # rows over the devices
        for _ in range(EPOCHS):
            params, state, _ = update(params, state, batch)
        rewards.append(float(reward))
        toy.say(step, rewards)
    held = params["embed"].addressable_shards[0].data.size / params["embed"].size
    print(f"a device holds {held:.3f} of the head")
    return rewards


if __name__ == "__main__":
    if jax.config.jax_platforms == "cpu":
        jax.config.update("jax_num_cpu_devices", DEVICES)
    main()
