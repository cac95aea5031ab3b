"""The interpreter of ``interpreted.py`` against the compiler, where NumPy's ways are others than JAX's."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from interpreted import in_numpy


def program(x: jax.Array, steps: jax.Array, at: jax.Array, key: jax.Array) -> dict[str, Any]:
    def count(n: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] * 2 + x[0]), (jnp.int32(0), x[:3]))

    whole = jnp.arange(-4, 5)
    return {
        "loops of different lengths": jax.vmap(count)(steps),
        "a slice beyond the end": jax.lax.dynamic_slice(x, (at,), (4,)),
        "written beyond the end": jax.lax.dynamic_update_slice(x, x[:4], (at,)),
        "sums from the end": jax.lax.cumsum(x, reverse=True),
        "parts": jax.lax.split(x, (2, 5, 1)),
        "towards zero": (jax.lax.div(whole, jnp.full_like(whole, 3)), jax.lax.rem(whole, jnp.full_like(whole, 3))),
        "scanned backwards": jax.lax.scan(lambda c, row: (c + row, c * row), x[0], x, reverse=True),
        "branches": [jax.lax.switch(at - i, [jnp.sin, jnp.cos, jnp.tanh], x) for i in range(5, 10)],
        "two sums at once": jax.lax.reduce((x, x * x), (0.0, 0.0), lambda a, b: (a[0] + b[0], a[1] + b[1]), (0,)),
        "random": jax.random.normal(jax.random.split(key)[1], (3,)),
        "rounded": jnp.dot(x.astype(jnp.bfloat16), x.astype(jnp.bfloat16), preferred_element_type=jnp.float32),
    }


def test_it_computes_what_the_compiler_does() -> None:
    x = np.linspace(-1.5, 2.0, 8, dtype=np.float32)
    given = (x, np.array([0, 3, 1], np.int32), np.int32(7), jax.random.key(3))
    run = in_numpy(program)
    for arguments in (given, (x[::-1].copy(), *given[1:])):  # one shape: traced once
        got, want = run(*arguments), jax.jit(program)(*arguments)
        assert jax.tree.structure(got) == jax.tree.structure(want)
        for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
            assert isinstance(a, np.ndarray) and a.dtype == b.dtype, path
            np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-6, err_msg=jax.tree_util.keystr(path))
