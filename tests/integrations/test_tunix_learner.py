"""Runs of Tunix' GRPOLearner, stock, without logits and fused: equal rewards, equal losses, equal parameters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("tunix", reason="Tunix is not installed here: make test-tunix")

import logitless.integrations.tunix as integration
from tunix_learner import Run, learn, moved

pytestmark = [
    pytest.mark.tunix,
    pytest.mark.optimized,
    pytest.mark.filterwarnings("ignore:`with mesh.*:DeprecationWarning"),
]

LORA = ".*(q_proj|lm_head).*"
RUNS: dict[str, dict[str, Any]] = {
    "tied": {},
    "LoRA, on the head as well": {"tied": False, "lora": LORA},
    "fsdp 2 x tp 2": {"mesh_shape": (2, 2)},
    "fsdp 2 x tp 2, LoRA": {"mesh_shape": (2, 2), "tied": False, "lora": LORA},
}


def assert_same(stock: Run, ours: Run) -> None:
    assert ours.rewards == stock.rewards and len(set(stock.rewards)) > 2
    assert len(stock.losses) == 6
    np.testing.assert_allclose(ours.losses, stock.losses, atol=5e-7)


@pytest.mark.parametrize("name", list(RUNS))
def test_runs_are_equal(name: str) -> None:
    stock = learn(**RUNS[name])
    with integration.install():
        assert_same(stock, learn(**RUNS[name]))
        assert_same(stock, learn(policy_loss_fn="logitless", **RUNS[name]))


def test_another_beta_moves_the_parameters() -> None:
    """A control: what a coefficient that did not arrive would look like."""
    with integration.install():
        a, b = (learn(steps=2, policy_loss_fn="logitless", beta=beta) for beta in (0.04, 2.0))
    assert moved(a, b) > 1e-3
