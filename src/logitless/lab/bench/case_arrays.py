"""A case's inputs on the device: hidden states and head, or logits, and the tokens' own arrays.

Made on the host, but for targets and log-probabilities of the policy itself, which are computed a few rows at a time.
``old_logp`` is near the policy's own, so that next to nothing is clipped and every token has a gradient to compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from logitless.lab.bench import realistic, states
from logitless.lab.tools import shapes

Inputs = tuple[tuple[Array, ...], dict[str, Array]]
"""``(differentiable arrays, the rest)``."""
ARRAYS = ("level", "tokens", "hidden", "vocab", "dtype", "inputs", "states", "seed")
"""Keys of a case that hidden states, head and logits depend on; they are made once for all arms."""


def policy_statistics(x: tuple[Array, ...], targets: Array, chunk: int = 64) -> np.ndarray:
    """``[2, N]`` float32: log-probabilities of ``targets [N]``, and entropies; plainly, ``chunk`` rows at a time."""

    @jax.jit
    def some(x: tuple[Array, ...], y: Array, start: Array) -> Array:
        def rows(a: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(a, start, chunk)

        z = rows(x[0])
        if len(x) > 1:
            z = jax.lax.dot_general(z, x[1], (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        z = z.astype(jnp.float32)
        lse = jax.nn.logsumexp(z, axis=1)
        mean = jnp.sum(jnp.where(z > -jnp.inf, jnp.exp(z - lse[:, None]) * z, 0.0), axis=1)
        return jnp.stack([jnp.take_along_axis(z, rows(y)[:, None], 1)[:, 0] - lse, lse - mean])

    n = targets.shape[0]
    chunk = min(chunk, n)
    out = np.empty((2, n), np.float32)
    for start in range(0, n, chunk):
        at = min(start, n - chunk)
        out[:, at : at + chunk] = some(x, targets, at)
    return out


class Data:
    """The inputs of a case's arms, made when they are asked for and then kept."""

    def __init__(self) -> None:
        self._arrays: dict[tuple[Any, ...], tuple[tuple[Array, ...], Array, np.ndarray]] = {}
        self._teachers: dict[tuple[Any, ...], tuple[Array, Array]] = {}

    def of(self, c: dict[str, Any], own: dict[str, Any]) -> Inputs:
        """The inputs of the case ``c`` with the keys of ``own`` changed."""
        c = {**c, **own}
        x, targets, (logp, _) = self._made(c)
        rng = np.random.default_rng(c["seed"])
        rest = tokens_of(c, rng)
        shape = rest["targets"].shape
        old = logp.reshape(shape) + 0.05 * rng.standard_normal(shape).astype(np.float32)
        rest |= dict(targets=targets.reshape(shape), old_logp=old)
        rest |= self._teacher(c, x, shape)
        x = (x[0].reshape(*shape, -1), *x[1:])
        return jax.block_until_ready((x, {k: jnp.asarray(v) for k, v in rest.items()}))

    def _teacher(self, c: dict[str, Any], x: tuple[Array, ...], shape: tuple[int, ...]) -> dict[str, Array]:
        """The second model of a case that has one: independent numbers beside flat inputs; else the policy's own
        states, moved by a fifth of their size, under its own head (a copy)."""
        if not c.get("teacher"):
            return {}
        key = (*(c[k] for k in ARRAYS), c["teacher"])
        if key not in self._teachers:
            rng, dtype = np.random.default_rng(c["seed"] + 1), jnp.dtype(c["dtype"])
            if c["inputs"] == "flat":
                made = shapes.host_arrays("head", c["tokens"], c["teacher"], c["vocab"], dtype, rng, 1)
                self._teachers[key] = tuple(jax.device_put(a.reshape(-1, a.shape[-1])) for a in made)
            else:
                size = jnp.linalg.norm(x[0].astype(jnp.float32), axis=1, keepdims=True) / np.sqrt(c["teacher"])
                noise = 0.2 * size * rng.standard_normal(x[0].shape, np.float32)
                self._teachers[key] = (x[0] + noise).astype(dtype), jnp.copy(x[1])
        hidden, head = self._teachers[key]
        return dict(teacher_hidden=hidden.reshape(*shape, -1), teacher_lm_head=head)

    def entropy(self, c: dict[str, Any], own: dict[str, Any]) -> float:
        """The policy's mean entropy over these inputs, in nats."""
        return float(np.mean(self._made({**c, **own})[2][1]))

    def _made(self, c: dict[str, Any]) -> tuple[tuple[Array, ...], Array, np.ndarray]:
        key = tuple(c[k] for k in ARRAYS)
        if key not in self._arrays:
            rng = np.random.default_rng(c["seed"])
            dtype, n = jnp.dtype(c["dtype"]), c["tokens"]
            made: Sequence[np.ndarray]
            policy = realistic.POLICIES.get(c["inputs"])
            given = None
            if c["inputs"] == "real":
                *made, given = states.load(c["states"], n, dtype)
            elif policy is not None:
                sizes = n, c["hidden"], c["vocab"], c["seed"]
                made = realistic.realistic_head(*sizes, dtype, policy)
            else:
                made = shapes.host_arrays(c["level"], n, c["hidden"], c["vocab"], dtype, rng, 1)
            x = tuple(jax.device_put(a.reshape(-1, a.shape[-1])) for a in made)
            del made
            if given is not None:
                targets = jnp.asarray(given)
            elif policy is not None:
                targets = realistic.sample_targets(x[0], x[1], c["seed"], chunk=64)
            else:
                targets = jnp.asarray(rng.integers(0, c["vocab"], n, dtype=np.int32))
            self._arrays[key] = x, targets, policy_statistics(x, targets)
        return self._arrays[key]


def tokens_of(c: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Targets (for their shape), mask and advantages, on the host."""
    if c["batch_kind"] == "rl":
        return shapes.rl_batch(c["tokens"], c["vocab"], rng, c["rows"], c["live"])
    return shapes.uniform_batch(c["tokens"], c["vocab"], rng, c["rows"], c["live"], c["moving"])


def blank(c: dict[str, Any], own: dict[str, Any]) -> Inputs:
    """Inputs of the right shapes and of small equal numbers, for a program whose memory alone is asked for."""
    c = {**c, **own}
    rest = tokens_of(c, np.random.default_rng(c["seed"]))
    shape, dtype = rest["targets"].shape, jnp.dtype(c["dtype"])
    sizes = [(*shape, c["vocab"])] if c["level"] == "logits" else [(*shape, c["hidden"]), (c["vocab"], c["hidden"])]
    x = tuple(jax.device_put(np.full(size, 0.01, dtype)) for size in sizes)
    rest["old_logp"] = np.full(shape, -np.log(c["vocab"]), np.float32)
    if c.get("teacher"):
        rest["teacher_hidden"] = np.full((*shape, c["teacher"]), 0.01, dtype)
        rest["teacher_lm_head"] = np.full((c["vocab"], c["teacher"]), 0.01, dtype)
    return jax.block_until_ready((x, {k: jax.device_put(v) for k, v in rest.items()}))
