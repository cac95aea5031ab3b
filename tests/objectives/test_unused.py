"""An array that the objective does not read: one table, a warning by name, and the table is true."""

from __future__ import annotations

import functools
import itertools
import warnings
from typing import Any

import jax
import numpy as np
import pytest

import logitless
from logitless import Objective, UnusedArgumentWarning
from logitless.objectives.inputs import READ_WHEN
from loss_cases import POLICY_LEVELS, evaluate, objective_of, random_batch

OPTIONS: list[dict[str, Any]] = [
    {"aggregation": "bnpo"},
    {"aggregation": "dapo", "beta": 0.1, "kl_bias_correction": True, "entropy_coef": 0.1},
    {"aggregation": "grpo"},
    {"aggregation": "bnpo", "correction": "token"},
    {"aggregation": "bnpo", "correction": "sequence"},
    {"aggregation": "bnpo", "off_policy_threshold": -0.05},
    {"aggregation": "bnpo", "off_policy_threshold": -0.05, "off_policy_from": "old"},
]


@pytest.mark.parametrize("every_option", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("policy", "level"), POLICY_LEVELS)
def test_the_table_is_true(policy: str, level: str, every_option: bool) -> None:
    """What it calls unread changes no bit of the loss and its gradients, and what it calls read changes them: by
    default with every other of the options, and the others with the next policy."""
    logp, entropy, inputs = random_batch(5, layout="packed")
    inputs["advantages"] = -np.abs(inputs["advantages"])  # so that the off-policy mask acts
    inputs["entropy_denominator"] = np.float32(3.0)
    for options in OPTIONS if every_option else OPTIONS[POLICY_LEVELS.index((policy, level)) % 2 :: 2]:
        wide = {"eps_low": 2.0} if policy.startswith("dppo") else {}  # a trust region that keeps every token
        o = objective_of(policy, level, **options, **wide)

        @functools.cache
        def found(drop: str = "", roll: str = "", *, o: Objective = o) -> Any:
            given = {k: np.roll(v, 1, axis=1) if k == roll else v for k, v in inputs.items() if k not in drop.split()}
            return evaluate(o, logp, entropy, **given)

        for name in set(READ_WHEN) & set(inputs):
            # In the drift the sampler's take the place of old_logp.
            gone = "rollout_logp" if name == "old_logp" and o.correction is None else ""
            with_all = found(gone)
            needed = name in ("ref_logp", "rollout_logp") and READ_WHEN[name][0](o)  # it cannot be left out
            without = found(gone, name) if needed else found(f"{gone} {name}".strip())
            pairs = [(getattr(with_all, k), getattr(without, k)) for k in ("loss", "dlogp", "dentropy")]
            same = all(np.array_equal(a, b) for a, b in pairs)
            assert same != READ_WHEN[name][0](o), (name, o)


B, T, V, H = 2, 3, 7, 4
ARRAYS = {
    "old_logp": Objective.reinforce(), "ref_logp": Objective(), "ref_hidden": Objective(), "rollout_logp": Objective(),
    "segment_ids": Objective.dapo(), "entropy_denominator": Objective(),
}  # fmt: skip
"""Each array with an objective that does not read it."""
SAID = {
    "old_logp": r"policy='reinforce' has no ratio",
    "ref_logp": r"only the metrics kl_k1 and kl_k3 read it. Set Objective\(beta=...\)",
    "ref_hidden": r"only the metrics kl_k1 and kl_k3 read it. Set Objective\(beta=...\)",
    "rollout_logp": r"Set Objective\(correction='token'\)",
    "segment_ids": r"such as Objective\(level='sequence'\)",
    "entropy_denominator": r"Set Objective\(entropy_coef=...\)",
}
READING = Objective(beta=0.1, correction="token", entropy_coef=0.1)


def call(name: str, given: str, objective: Objective) -> None:
    """The public call ``name`` with the array ``given``, traced."""
    tokens = np.zeros((B, T), np.float32)
    made: dict[str, Any] = {
        "ref_hidden": np.zeros((B, T, H), np.float32),
        "segment_ids": np.zeros((B, T), np.int32),
        "entropy_denominator": 2.0,
    }
    arrays: dict[str, Any] = {"advantages": tokens, given: made.get(given, tokens)}
    if given == "ref_hidden":
        arrays["ref_lm_head"] = np.zeros((V, H), np.float32)
    if objective.correction is not None:
        arrays |= {k: tokens for k in ("ref_logp", "rollout_logp") if k != given and given != "ref_hidden"}
        arrays.setdefault("rollout_logp", tokens)
    first: dict[str, Any] = {
        "grpo_loss": {"logits": np.zeros((B, T, V), np.float32)},
        "linear_grpo_loss": {"hidden": np.zeros((B, T, H), np.float32), "lm_head": np.zeros((V, H), np.float32)},
    }[name]
    jax.eval_shape(
        lambda a: getattr(logitless, name)(**a, targets=np.zeros((B, T), np.int32), objective=objective, **arrays)[0],
        first,
    )


CASES = [c for c in itertools.product(("grpo_loss", "linear_grpo_loss"), ARRAYS) if c != ("grpo_loss", "ref_hidden")]


@pytest.mark.parametrize(("name", "given"), CASES)
def test_it_is_warned_about_by_name_at_the_line_of_the_call(name: str, given: str) -> None:
    with pytest.warns(UnusedArgumentWarning, match=f"^{name}: {given} changes neither .*{SAID[given]}.*out") as found:
        call(name, given, ARRAYS[given])
    assert len(found) == 1 and found[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(name, given, READING)


def test_every_array_of_the_table_has_a_case() -> None:
    assert set(ARRAYS) == set(SAID) == set(READ_WHEN)


def test_calls_over_the_calls_warn_at_the_users_line_and_the_package_itself_does_not() -> None:
    stats = logitless.TokenStats(np.zeros((B, T), np.float32))
    arrays = {"advantages": np.ones(B, np.float32), "rollout_logp": np.zeros((B, T), np.float32)}
    x, y = np.zeros((B, T, V), np.float32), np.zeros((B, T), np.int32)
    for f in (
        lambda: jax.eval_shape(lambda: logitless.policy_loss(stats, **arrays)[0]),
        lambda: jax.eval_shape(lambda x: logitless.with_stats(logitless.grpo_loss)(x, y, **arrays)[0], x),
        lambda: jax.eval_shape(logitless.grpo_loss, x, y, **arrays),  # JAX makes the call: the line is that of jit
    ):
        with pytest.warns(UnusedArgumentWarning, match="rollout_logp changes neither") as found:
            f()
        assert [w.filename for w in found] == [__file__]
    inside: dict[str, Any] = {"__name__": "logitless.integrations.mine", "logitless": logitless, "x": x, "y": y}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exec("def call(**arrays): return logitless.grpo_loss(x, y, **arrays)[0]", inside)
        jax.eval_shape(lambda: inside["call"](**arrays))
        jax.eval_shape(lambda: logitless.explain(logitless.grpo_loss, x, y, **arrays) and 0.0)
