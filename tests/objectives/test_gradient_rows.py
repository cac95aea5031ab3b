"""``rows_with_gradient``: a row that is called free of gradients has none, and can be left out."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from logitless import Objective, loss_denominator, rows_with_gradient
from loss_cases import AGGREGATIONS, POLICY_LEVELS, evaluate, half, objective_of, random_batch

SHAPE = (8, 5)


def random_case(seed: int) -> tuple[Objective, Any, Any, dict[str, Any]]:
    """An objective with some of all options, and a batch of which many rows have nothing to learn."""
    rng = np.random.default_rng(seed)

    def maybe(chance: float, **fields: Any) -> dict[str, Any]:
        return fields if rng.random() < chance else {}

    policy, level = POLICY_LEVELS[rng.integers(len(POLICY_LEVELS))]
    fields: dict[str, Any] = {
        **maybe(0.25, beta=float(rng.choice([0.0, 0.1])), kl=str(rng.choice(["k1", "k2", "k3", "k3+"]))),
        **maybe(0.25, entropy_coef=float(rng.choice([0.0, 0.02]))),
        **maybe(0.15, top_entropy=0.5),
        **maybe(0.25, off_policy_threshold=0.2),
        **maybe(0.6, correction=str(rng.choice(["token", "sequence", "geometric"]))),
        **maybe(0.3, kl_bias_correction=True),
    }
    if policy == "vespo" and fields.get("correction") == "geometric":
        fields["correction"] = "token"
    if "correction" in fields and rng.random() < 0.7:
        fields.update(correction_mode="mask", correction_min=0.7, correction_max=1.3)
    objective = objective_of(policy, level, str(rng.choice(AGGREGATIONS)), **fields)
    logp, entropy, inputs = random_batch(seed, layout=str(rng.choice(["rows", "tokens", "packed"])), shape=SHAPE)
    inputs["advantages"] = inputs["advantages"].copy()
    inputs["advantages"][rng.random(8) < 0.5] = 0.0
    if rng.random() < 0.3:
        inputs["token_weights"] = (rng.random(SHAPE) * (rng.random((8, 1)) < 0.6)).astype(np.float32)
    if "correction" not in fields and rng.random() < 0.3:
        del inputs["old_logp"]
    return objective, logp, entropy, inputs


@pytest.mark.parametrize("seed", half((i,) for i in range(30)))
def test_a_row_without_has_none_and_can_be_left_out(seed: int) -> None:
    objective, logp, entropy, inputs = random_case(seed)
    rows = np.asarray(rows_with_gradient(objective, **inputs))
    denominators = dict(
        denominator=loss_denominator(objective, inputs["mask"], inputs.get("segment_ids")),
        entropy_denominator=max(inputs["mask"].sum(), 1.0),
    )
    whole = evaluate(objective, logp, entropy, **inputs, **denominators)
    assert not whole.dlogp[~rows].any() and not whole.dentropy[~rows].any()
    if objective.top_entropy is not None:
        return
    fewer = {**inputs, "mask": inputs["mask"] & rows[:, None]}
    part = evaluate(objective, logp, entropy, **fewer, **denominators)
    for a, b in ((whole.dlogp, part.dlogp), (whole.dentropy, part.dentropy)):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_allclose(whole.loss, part.loss, rtol=1e-5, atol=1e-6)


def test_the_random_cases_have_rows_of_both_kinds_and_few_are_kept_for_nothing() -> None:
    kept = free = useless = 0
    for seed in range(40):
        objective, logp, entropy, inputs = random_case(seed)
        rows = np.asarray(rows_with_gradient(objective, **inputs))
        kept, free = kept + int(rows.sum()), free + int((~rows & inputs["mask"].any(axis=1)).sum())
        if objective.policy == "reinforce" and objective.off_policy_threshold is objective.top_entropy is None:
            got = evaluate(objective, logp, entropy, **inputs)
            useless += int((~(got.dlogp[rows].any(axis=1) | got.dentropy[rows].any(axis=1))).sum())
    assert kept > 80 and free > 40 and useless == 0


def test_which_terms_count() -> None:
    mask = np.array([[1, 1], [1, 1], [1, 1], [0, 0]])
    advantages = np.array([1.0, 0.0, 0.0, 1.0], np.float32)
    zeros = np.zeros((4, 2), np.float32)

    def rows(o: Objective, **more: Any) -> list[bool]:
        return np.asarray(rows_with_gradient(o, advantages, mask, **more)).tolist()

    learns, live = [True, False, False, False], [True, True, True, False]
    assert rows(Objective()) == rows(Objective(beta=0.0, entropy_coef=0.0)) == learns
    assert rows(Objective(beta=0.1)) == rows(Objective(entropy_coef=0.1)) == rows(Objective(top_entropy=0.5)) == live
    assert rows(Objective(correction="sequence", correction_mode="mask"), rollout_logp=zeros) == learns  # not known yet
    far = dict(old_logp=zeros, rollout_logp=zeros - 9.0)
    assert not any(rows(Objective(correction="token", correction_mode="mask"), **far))
    assert rows(Objective(correction="token"), **far) == learns  # truncated, not dropped
    assert not any(rows(Objective(), token_weights=zeros))
    assert rows(Objective(policy="vespo"), token_weights=zeros) == learns
    # A NaN that the whole batch's loss would show is not left out.
    for name in ("old_logp", "token_weights"):
        array = zeros + 1.0
        array[1, 0] = np.nan
        assert rows(Objective(), **{name: array}) == [True, True, False, False], name
    for bad in (np.nan, np.inf):  # zero times either is no zero
        reference = zeros.copy()
        reference[1, 0] = reference[3, 0] = bad  # row 3 is masked
        assert rows(Objective(beta=0.0), ref_logp=reference) == [True, True, False, False]
        assert rows(Objective(), ref_logp=reference) == learns  # nobody reads it
    # Of a packed row one segment is enough.
    per_token = np.array([[0, 1], [0, 0], [0, 0], [1, 1]], np.float32)
    assert np.asarray(rows_with_gradient(Objective(), per_token, mask, segment_ids=mask)).tolist() == learns
    traced = jax.jit(lambda beta: rows_with_gradient(Objective(beta=beta), jnp.asarray(advantages), jnp.asarray(mask)))
    assert traced(0.0).tolist() == learns and traced(0.1).tolist() == live


def test_bad_input_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"rows_with_gradient: mask has shape \(3,\), expected \[B, T\]"):
        rows_with_gradient(Objective(), np.zeros(3, np.float32), np.ones(3))
    with pytest.raises(ValueError, match="rows_with_gradient: advantages has shape"):
        rows_with_gradient(Objective(), np.zeros(2, np.float32), np.ones((3, 4)))
    with pytest.raises(TypeError, match="rows_with_gradient: objective='grpo' is a string"):
        rows_with_gradient("grpo", np.zeros(3, np.float32), np.ones((3, 4)))  # type: ignore[arg-type]
