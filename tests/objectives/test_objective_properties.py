"""What an objective promises of every batch: NaN is seen, bounds are where the documentation has them."""

from __future__ import annotations

import numpy as np
import pytest

from logitless import Objective, rows_with_gradient


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("name, beta", [("ref_logp", 0.0), ("old_logp", None)])
def test_a_row_with_a_nan_has_a_gradient(name: str, beta: float | None, bad: float) -> None:
    """Zero times NaN is no zero, so a row that is left out for its advantage of zero would hide one."""
    array = np.zeros((3, 2), np.float32)
    array[1, 1] = bad
    found = rows_with_gradient(Objective(beta=beta), np.zeros(3, np.float32), np.ones((3, 2)), **{name: array})
    infinite_ratio = name == "old_logp" and np.isinf(bad)  # an advantage of zero is none for any ratio
    assert np.asarray(found).tolist() == [False, not infinite_ratio, False]
