"""What docs/scan-and-remat.md says about ``jax.checkpoint`` and ``lax.scan`` around the loss."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loading import loaded
from matmuls import matmul_flops

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def remat() -> Any:
    return loaded(ROOT / "benchmarks" / "remat.py")


def test_a_checkpoint_adds_one_matmul(remat: Any) -> None:
    x = remat.batch(64, 16, 96, jnp.float32)
    flops = {name: matmul_flops(arm, *x.values()) for name, arm in remat.ARMS.items()}
    assert flops["plain"] == 3 * 2 * 64 * 16 * 96
    assert flops["checkpoint"] == pytest.approx(4 / 3 * flops["plain"])
    kept = functools.partial(remat.checkpointed, policy=jax.checkpoint_policies.everything_saveable)
    assert matmul_flops(kept, *x.values()) == flops["checkpoint"], "no policy avoids it, as the page says"


def test_the_three_ways_have_the_same_numbers(remat: Any) -> None:
    x = remat.batch(64, 16, 96, jnp.float32)
    plain, *others = (jax.jit(arm)(*x.values()) for arm in remat.ARMS.values())
    for other in others:
        for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(other), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_the_page_has_the_recorded_ratios() -> None:
    page = (ROOT / "docs" / "scan-and-remat.md").read_text()
    records = [json.loads(path.read_text()) for path in (ROOT / "benchmarks" / "results").glob("remat_*.json")]
    found = {f"{r['ratio']:.2f} [{r['low']:.2f}, {r['high']:.2f}]" for e in records for r in e["ratios"].values()}
    told = set(re.findall(r"\d\.\d\d \[\d\.\d\d, \d\.\d\d\]", page))
    assert told and told <= found
