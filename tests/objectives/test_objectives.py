"""Every objective against the float64 oracle, values and gradients, through ``logitless.policy_loss``."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flat_calls
import logitless
from logitless import Objective, oracle
from loss_cases import (
    AGGREGATIONS,
    EVERYTHING,
    POLICY_LEVELS,
    Evaluation,
    evaluate,
    evaluate_all,
    half,
    objective_of,
    random_batch,
    token_stats,
)

# Both sides get the same float32 numbers; the oracle then works in float64. What remains is float32 arithmetic: a
# token's loss is some twenty roundings of 6e-8 deep, through an exp of a log-ratio below 3 whose own rounding (6e-8 of
# |logp| < 8) is absolute. That is 2e-6 at the worst, relative to the largest term; sums over 24 tokens add little.
# The absolute part covers terms that cancel (policy gradient against KL gradient, 1 - sigmoid in sapo).
RTOL = 1e-5
ATOL_OF_LARGEST = 2e-6

LAYOUTS = ["rows", "tokens", "packed", "scattered"]


def agrees(got: Evaluation, objective: Objective, logp: Any, entropy: Any, **inputs: Any) -> tuple[float, Any, Any]:
    """Loss and both gradients are the oracle's, within the float32 bound above; returns the oracle's."""
    loss, dlogp, dentropy = oracle.policy_loss_grad(logp, entropy, objective=objective, **inputs)
    # The loss is a sum of terms of both signs: its rounding is relative to what was added up, not to the sum.
    largest = max(1e-30, np.abs(dlogp).max() * (1 + np.abs(np.where(inputs["mask"], logp, 0)).max()))
    np.testing.assert_allclose(got.loss, loss, rtol=RTOL, atol=ATOL_OF_LARGEST * max(abs(loss), largest * dlogp.size))
    for name, a, b in (("dlogp", got.dlogp, dlogp), ("dentropy", got.dentropy, dentropy)):
        np.testing.assert_allclose(a, b, rtol=RTOL, atol=ATOL_OF_LARGEST * np.abs(b).max(), err_msg=name)
    return loss, dlogp, dentropy


Case = tuple[Objective, int, str, dict[str, Any]]


def check_all(cases: list[Case]) -> None:
    """``(objective, seed, layout, changes of the batch)``: each is the oracle's, and there was something to compare."""
    batches = []
    for objective, seed, layout, changes in cases:
        logp, entropy, inputs = random_batch(seed, layout=layout)
        batches.append((objective, logp, entropy, {**inputs, **changes}))
    for case, (objective, logp, entropy, inputs), got in zip(cases, batches, evaluate_all(batches), strict=True):
        try:
            loss, dlogp, _ = agrees(got, objective, logp, entropy, **inputs)
            assert loss != 0.0 and np.any(dlogp != 0.0)
        except AssertionError as e:
            e.add_note(f"{objective!r}, seed {case[1]}, {case[2]}, {sorted(case[3])}")
            raise


def check(objective: Objective, seed: int = 0, layout: str = "rows", **changes: Any) -> None:
    """As :func:`check_all`, with the objective's numbers as Python's."""
    logp, entropy, inputs = random_batch(seed, layout=layout)
    inputs = {**inputs, **changes}
    loss, dlogp, _ = agrees(evaluate(objective, logp, entropy, **inputs), objective, logp, entropy, **inputs)
    assert loss != 0.0 and np.any(dlogp != 0.0)


# -- the family -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "level"), POLICY_LEVELS)
def test_policy_level_aggregation(policy: str, level: str) -> None:
    check_all([(objective_of(policy, level, a), 0, layout, {}) for a in AGGREGATIONS for layout in LAYOUTS])


@pytest.mark.parametrize(("policy", "level"), POLICY_LEVELS)
def test_all_options_at_once(policy: str, level: str) -> None:
    everything = {**EVERYTHING, "kl": "k3+", "correction": "token"}
    for aggregation in AGGREGATIONS:
        check(objective_of(policy, level, aggregation, **everything), seed=1, layout="scattered")


@pytest.mark.parametrize(
    ("policy", "level", "layout"), [("clip", "sequence_token", "packed"), ("sapo", "token", "rows")]
)
def test_xla_computes_what_the_interpreter_does(policy: str, level: str, layout: str) -> None:
    """These tests trace losses and leave most of their arithmetic to NumPy (``interpreted``): compiled, they are the
    same but for the order of sums."""
    o = objective_of(policy, level, beta=0.1, correction="sequence", top_entropy=0.75, entropy_coef=0.02)
    logp, entropy, inputs = random_batch(1, layout=layout)
    got = evaluate(o, logp, entropy, **inputs)

    @jax.jit
    def compiled(logp: Any, entropy: Any) -> Any:
        def loss(lp: Any, h: Any) -> Any:
            return logitless.policy_loss(token_stats(lp, h), objective=o, **inputs)

        return jax.value_and_grad(loss, (0, 1), has_aux=True)(logp, entropy)

    (loss, metrics), (dlogp, dentropy) = compiled(logp, entropy)
    found = (got.loss, got.dlogp, got.dentropy, got.metrics)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves((loss, dlogp, dentropy, metrics)), strict=True):
        # A loss near zero is a sum of terms of about one.
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=max(1e-6 * float(np.abs(b).max()), 1e-7))


# dual_clip must lie above 1; eps_low = 0.05 with delta = 1.02 below 1 + eps_high makes delta decide for A > 0 as well.
CLIP_OPTIONS: list[dict[str, Any]] = [
    {"eps_low": 0.05, "eps_high": 0.5}, {"eps_low": 0.0, "eps_high": 0.0}, {"delta": 1.4},
    {"delta": 1.02, "eps_low": 0.05}, {"dual_clip": 1.1}, {"dual_clip": 1.3, "delta": 1.5},
    {"dual_clip": 1.5, "delta": 1.3},
]  # fmt: skip


@pytest.mark.parametrize("level", ["token", "sequence", "sequence_token"])
def test_clip_options(level: str) -> None:
    batches = list(itertools.product((0, 1), ("rows", "packed")))
    check_all([(objective_of("clip", level, **o), seed, kind, {}) for o in CLIP_OPTIONS for seed, kind in batches])


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_cispo_bounds(level: str) -> None:
    options: list[dict[str, Any]] = [
        {"cispo_bound": "raw", "eps_high": 0.8},
        {"cispo_bound": "raw", "eps_high": 5.0},
        {"cispo_bound": "interval", "eps_low": 0.1, "eps_high": 0.1},
        {"cispo_bound": "interval", "eps_low": 0.3, "eps_high": 0.2},
    ]
    check_all([(objective_of("cispo", level, **o), 0, "tokens", {}) for o in options])


def test_sapo_and_vespo_numbers() -> None:
    check(objective_of("sapo", tau_pos=0.7, tau_neg=2.0), layout="tokens")
    check(
        objective_of("vespo", vespo_k_pos=1.5, vespo_lambda_pos=2.5, vespo_k_neg=2.0, vespo_lambda_neg=1.0),
        layout="packed",
    )


# -- KL -------------------------------------------------------------------------------------------------------------


KL_CLAMPS: list[dict[str, float]] = [
    {},
    {"kl_log_ratio_clamp": 0.6},
    {"kl_clamp": 0.2},
    {"kl_log_ratio_clamp": 0.9, "kl_clamp": 0.3},
]
LEVELS = ("token", "sequence", "sequence_token")


def kl_cases(kl: str, bias_correction: bool, clamps: dict[str, float], levels: tuple[str, ...]) -> list[Case]:
    fields = {"beta": 0.3, "kl": kl, "kl_bias_correction": bias_correction, **clamps}
    # The KL of a token that the policy loss does not touch.
    alone = objective_of("reinforce", **fields), 3, "tokens", {"advantages": np.zeros((4, 6), np.float32)}
    return [*((objective_of("clip", level, **fields), 2, "rows", {}) for level in levels), alone]


@pytest.mark.parametrize("every_level", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("bias_correction", [False, True])
@pytest.mark.parametrize("kl", ["k1", "k2", "k3", "k3+"])
def test_kl(kl: str, bias_correction: bool, every_level: bool) -> None:
    """With every clamp and, a clamp each, at every level: the clamps know nothing of levels."""
    for i, clamps in enumerate(KL_CLAMPS):
        check_all(kl_cases(kl, bias_correction, clamps, LEVELS if every_level else (LEVELS[i % 3],)))


@pytest.mark.parametrize(("policy", "level"), POLICY_LEVELS)
def test_kl_with_every_policy(policy: str, level: str) -> None:
    check(objective_of(policy, level, beta=0.04, kl_bias_correction=True), layout="packed")


def test_k3_keeps_its_digits_where_training_lives() -> None:
    """``exp(d) - d - 1`` at d = 1e-4 is 5e-9: the plain formula has no digit of it left in float32."""
    d = np.zeros((4, 6), np.float32)
    d[0], d[1, :2] = [1e-4, -1e-3, 0.02, 0.3, 0.49, 0.51], [-0.7, 3.0]
    zero, o = np.zeros_like(d), Objective(beta=1.0)
    shared = {"advantages": np.zeros(4, np.float32), "ref_logp": d}
    batches = [{**shared, "mask": np.arange(24).reshape(4, 6) == token} for token in range(8)]
    for inputs, got in zip(batches, evaluate_all([(o, zero, zero, inputs) for inputs in batches]), strict=True):
        want, dlogp, _ = oracle.policy_loss_grad(zero, None, objective=o, **inputs)
        np.testing.assert_allclose(got.loss, want, rtol=1e-6)
        np.testing.assert_allclose(got.dlogp, dlogp, rtol=1e-6)


# -- correction, masks, entropy -------------------------------------------------------------------------------------


CORRECTION_BOUNDS: list[dict[str, Any]] = [
    {},
    {"correction_min": 0.7, "correction_max": 1.3},
    {"correction_min": 0.9, "correction_max": None},
]


@pytest.mark.parametrize("every_bound", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("correction", "mode"),
    [*itertools.product(["token", "sequence", "geometric"], ["truncate", "mask"]), ("geometric_mask", "mask")],
)
def test_correction(correction: str, mode: str, every_bound: bool) -> None:
    """Every policy with one of the bounds, and every bound: the weight knows nothing of the policy it multiplies."""
    # VESPO refuses the geometric one: test_objective_dataclass.py.
    policies = [pl for pl in POLICY_LEVELS if not (pl[0] == "vespo" and correction.startswith("geometric"))]
    one_each = zip(policies, itertools.cycle(CORRECTION_BOUNDS), strict=False)
    pairs = itertools.product(policies, CORRECTION_BOUNDS) if every_bound else one_each
    fields = {"correction": correction, "correction_mode": mode}
    check_all([(objective_of(*pl, **fields, **bounds), 4, "scattered", {}) for pl, bounds in pairs])


@pytest.mark.parametrize("correction", ["token", "sequence", "geometric"])
def test_correction_on_policy_uses_the_current_logp(correction: str) -> None:
    check(objective_of("clip", correction=correction, beta=0.1), seed=5, layout="packed", old_logp=None)
    if correction == "geometric":
        band = {"correction": "geometric_mask", "correction_mode": "mask", "correction_max": 1.05}
        check(objective_of("clip", **band), seed=5, layout="packed", old_logp=None)
    else:
        check(objective_of("vespo", correction=correction), seed=5, layout="packed", old_logp=None)


@pytest.mark.parametrize(
    ("policy", "level", "sampler"),
    half((*pl, s) for i, pl in enumerate(POLICY_LEVELS) for s in ("rollout", "old")[:: 1 if i % 2 else -1]),
)
def test_off_policy_mask(policy: str, level: str, sampler: str) -> None:
    o = objective_of(policy, level, off_policy_threshold=0.05, beta=0.1)
    changes = {"rollout_logp": None} if sampler == "old" else {}
    check(o, seed=7, layout="tokens", **changes)
    logp, entropy, inputs = random_batch(7, layout="packed")
    inputs.update(changes)
    got = evaluate(o, logp, entropy, **inputs)
    assert agrees(got, o, logp, entropy, **inputs)[0] != 0.0
    kept = got.metrics["kept_tokens"]
    assert 0 < float(kept.sum) < float(kept.count)  # the mask did something


@pytest.mark.parametrize("aggregation", ["grpo", "bnpo", "dr_grpo", "luspo"])
def test_sequences_beyond_an_error(aggregation: str) -> None:
    """Rows, packed rows, NaN among the sampler's values, and a token level and a sequence level."""
    of_length = {"max_length": 5} if aggregation == "dr_grpo" else {}
    for level, more in (
        ("token", {"beta": 0.1, "entropy_coef": 0.02, "top_entropy": 0.5}),
        ("sequence", {"delta": None}),
    ):
        o = objective_of(
            "clip", level, aggregation, count_rows="non_empty", sequence_error_max=1.2, **of_length, **more
        )
        for layout in ("rows", "packed"):
            logp, entropy, inputs = random_batch(11, layout=layout)
            inputs["rollout_logp"] = np.where(inputs["rollout_logp"] > -0.1, np.nan, inputs["rollout_logp"])
            got = evaluate(o, logp, entropy, **inputs)
            assert agrees(got, o, logp, entropy, **inputs)[0] != 0.0
            kept = got.metrics["kept_tokens"]
            assert 0 < float(kept.sum) < float(kept.count)


# Fractions with few binary digits: 1 - rho is then exact, and a token that sits on the quantile is kept by both sides.
@pytest.mark.parametrize("entropy_coef", [None, 0.03])
def test_top_entropy_and_entropy_bonus(entropy_coef: float | None) -> None:
    objectives = [
        objective_of("clip", top_entropy=t, entropy_coef=entropy_coef, beta=0.1) for t in (0.25, 0.5, 0.75, 1.0)
    ]
    check_all([(o, 8, layout, {}) for o in objectives for layout in ("rows", "scattered")])


def test_the_token_on_the_quantile_is_kept_by_value_and_gradient_alike() -> None:
    """Compiled, the entropy of that token may be computed more than once, with different roundings."""
    rng = np.random.default_rng(0)
    targets = rng.integers(0, 8, (1, 9))  # 9 tokens: the median is one of them
    o = Objective(top_entropy=0.5, entropy_coef=1.0)
    inputs = dict(targets=targets, advantages=jnp.zeros(1), mask=np.ones((1, 9), bool), objective=o, backend="chunked")
    step = jax.jit(jax.value_and_grad(lambda x: flat_calls.grpo_loss(x, **inputs), has_aux=True))
    for _ in range(30):
        (_, metrics), dlogits = step(3 * rng.normal(size=(1, 9, 8)).astype(np.float32))
        assert np.asarray(dlogits).any(-1).sum() == float(metrics["kept_tokens"].sum) == 5


def test_equal_entropies_are_all_on_the_quantile() -> None:
    """Interpolating between equal numbers must not round above them and drop every token."""
    logp, _, inputs = random_batch(16)
    cases = [
        (Objective(top_entropy=rho), logp, np.full_like(logp, value), inputs)
        for value, rho in itertools.product((0.1, 0.7, 1.3, 2.2), (0.1, 0.3, 0.37, 0.9))
    ]
    for got in evaluate_all(cases, metrics=True):
        kept = got.metrics["kept_tokens"]
        assert float(kept.sum) == float(kept.count) > 0


@pytest.mark.parametrize(("policy", "level"), POLICY_LEVELS)
def test_entropy_bonus(policy: str, level: str) -> None:
    o = objective_of(policy, level, "luspo", entropy_coef=0.05)
    logp, entropy, inputs = random_batch(9)
    got = evaluate(o, logp, entropy, **inputs)
    assert agrees(got, o, logp, entropy, **inputs)[0] != 0.0
    np.testing.assert_allclose(got.dentropy, np.where(inputs["mask"], -0.05 / inputs["mask"].sum(), 0.0), rtol=1e-6)


# -- aggregation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_given_denominators_are_used_as_they_are(aggregation: str) -> None:
    """Also one below 1."""
    o = objective_of("clip", aggregation=aggregation, entropy_coef=0.05, beta=0.1)
    for denominator in (0.25, 3.0, jnp.float32(100.0), np.int32(12)):
        check(o, 11, denominator=denominator, entropy_denominator=denominator)
    logp, entropy, inputs = random_batch(11)
    o = o.replace(entropy_coef=None)
    quarter, one = (evaluate(o, logp, entropy, denominator=d, **inputs).loss for d in (0.25, 1.0))
    assert quarter == 4 * one != 0


@pytest.mark.parametrize(
    ("level", "aggregation", "layout"),
    half(itertools.product(["token", "sequence"], AGGREGATIONS, ["rows", "tokens", "scattered"])),
)
def test_micro_batches_add_up(level: str, aggregation: str, layout: str) -> None:
    """Parts with the whole batch's denominators sum to the whole batch, gradients included."""
    o = objective_of("clip", level, aggregation, beta=0.1, entropy_coef=0.02, correction="sequence")
    logp, entropy, inputs = random_batch(12, layout=layout)
    whole = evaluate(o, logp, entropy, **inputs)
    mask = inputs["mask"]
    if aggregation in ("bnpo", "dapo"):
        denominator = mask.sum()
    elif layout == "scattered":
        ids = inputs["segment_ids"]
        denominator = len({(b, ids[b, t]) for b, t in np.argwhere(mask).tolist()})
    else:
        denominator = mask.shape[0]
    if aggregation == "dr_grpo":
        denominator = denominator * 7.0
    counts = {"denominator": np.float32(denominator), "entropy_denominator": np.float32(mask.sum())}
    halves = (slice(0, 2), slice(2, 4))  # row 2 is empty
    parts = evaluate_all([(o, logp[r], entropy[r], {**{k: v[r] for k, v in inputs.items()}, **counts}) for r in halves])
    np.testing.assert_allclose(sum(p.loss for p in parts), whole.loss, rtol=1e-5)
    np.testing.assert_allclose(np.concatenate([p.dlogp for p in parts]), whole.dlogp, rtol=1e-5, atol=1e-9)
    np.testing.assert_allclose(np.concatenate([p.dentropy for p in parts]), whole.dentropy, rtol=1e-5)


def test_segments_of_a_row_are_the_sequences_of_unpacked_rows() -> None:
    """Four sequences of three tokens, one a row or two a row: the same loss and gradients."""
    logp, entropy, inputs = random_batch(13, layout="tokens")
    inputs["mask"] = np.broadcast_to(np.arange(6) < 3, (4, 6))

    def pack(x: np.ndarray) -> np.ndarray:
        return np.concatenate([x[:, :3].reshape(2, 6), np.zeros((2, 6), x.dtype)])

    packed = {k: pack(v) for k, v in inputs.items()}
    packed["segment_ids"] = np.repeat([[5, -7]] * 4, 3, axis=1)
    aggregations = itertools.cycle(AGGREGATIONS)
    for (policy, level), aggregation in zip(POLICY_LEVELS, aggregations, strict=False):
        o = objective_of(policy, level, aggregation, correction="sequence", off_policy_threshold=0.1)
        a = evaluate(o, logp, entropy, **inputs)
        b = evaluate(o, pack(logp), pack(entropy), **packed)
        np.testing.assert_allclose(b.loss, a.loss, rtol=1e-6)
        np.testing.assert_allclose(b.dlogp, pack(a.dlogp), rtol=1e-5, atol=1e-8)


def test_segments_without_valid_tokens_do_not_count() -> None:
    logp = -np.arange(1, 13, dtype=np.float32).reshape(2, 6)
    inputs = {"advantages": np.ones((2, 6), np.float32), "segment_ids": np.arange(12).reshape(2, 6)}
    o = Objective(policy="reinforce", aggregation="luspo")
    got = evaluate(o, logp, logp, mask=logp > -2.5, **inputs)
    assert got.loss == 1.5  # (1 + 2) / two segments


def test_dapo_denominator() -> None:
    assert float(logitless.dapo_denominator(1000, world_size=4, accumulation=3, steps_per_generation=6)) == 125.0
    assert float(logitless.dapo_denominator(1000)) == 1000.0
    assert float(logitless.dapo_denominator(0, world_size=2)) == 0.5  # max(N, 1) comes first
    assert float(jax.jit(logitless.dapo_denominator)(jnp.int32(7))) == 7.0


# -- the ratio ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "level"), POLICY_LEVELS)
def test_on_policy_the_ratio_is_exactly_one(policy: str, level: str) -> None:
    logp, entropy, inputs = random_batch(14, layout="packed")
    inputs["old_logp"] = None
    o = objective_of(policy, level, beta=0.1, kl_bias_correction=True)
    got = evaluate(o, logp, entropy, **inputs)
    agrees(got, o, logp, entropy, **inputs)
    assert float(got.metrics["ratio_min"].sum) == float(got.metrics["ratio_max"].sum) == 1.0
    assert float(got.metrics["ratio"].sum) == float(got.metrics["ratio"].count) == inputs["mask"].sum()


@pytest.mark.parametrize("level", ["token", "sequence", "sequence_token"])
def test_on_policy_with_eps_zero_has_the_full_gradient(level: str) -> None:
    """Every ratio is exactly on both bounds, where autodiff's own min and clip would halve the gradient, twice."""
    logp, entropy, inputs = random_batch(15)
    inputs.update(old_logp=None)
    for extra in ({}, {"delta": 1.0}):
        o = objective_of("clip", level, "luspo", eps_low=0.0, eps_high=0.0, **extra)
        got = evaluate(o, logp, entropy, **inputs)
        want = -np.where(inputs["mask"], inputs["advantages"][:, None], 0.0) / 4
        np.testing.assert_allclose(got.dlogp, want, rtol=1e-6)


def one_token(objective: Objective, *, advantage: float, logp: float = -1.0, old: Any = None, **inputs: Any) -> Any:
    inputs |= {"advantages": np.float32([advantage]), "old_logp": None if old is None else np.float32([[old]])}
    got = evaluate(objective, [[logp]], [[1.0]], **inputs)
    return float(got.loss), float(got.dlogp[0, 0])


@pytest.mark.parametrize("advantage", [2.0, -2.0])
@pytest.mark.parametrize("log_ratio", [0.25, -0.25])
@pytest.mark.parametrize("level", ["token", "sequence", "sequence_token"])
def test_a_ratio_on_its_bound_has_the_full_gradient(level: str, log_ratio: float, advantage: float) -> None:
    ratio = np.asarray(jnp.exp(jnp.float32(log_ratio)))
    eps = float(abs(ratio - np.float32(1)))  # exact, so that 1 + eps (1 - eps) is the ratio to the bit
    side = "eps_high" if log_ratio > 0 else "eps_low"
    loss, gradient = one_token(Objective(level=level, **{side: eps}), advantage=advantage, old=-1.0 - log_ratio)
    assert loss == gradient == -advantage * ratio


def test_delta_and_dual_clip_bounds_have_the_full_gradient() -> None:
    ratio = float(jnp.exp(jnp.float32(1.25)))
    for bound in ({"delta": ratio}, {"dual_clip": ratio}, {"delta": ratio, "dual_clip": ratio}):
        loss, gradient = one_token(Objective(**bound), advantage=-2.0, old=-2.25)
        assert loss == gradient == 2 * ratio, bound
        below = {k: v * 0.999 for k, v in bound.items()}
        loss, gradient = one_token(Objective(**below), advantage=-2.0, old=-2.25)
        assert loss < 2 * ratio and gradient == 0.0, below


def test_gmpo_and_kl_bounds_have_the_full_gradient() -> None:
    ratio = float(jnp.exp(jnp.float32(0.25)))
    loss, gradient = one_token(Objective(policy="gmpo", eps_high=0.25), advantage=2.0, old=-1.25)
    assert loss == gradient == -2 * ratio
    loss, gradient = one_token(Objective(policy="gmpo", eps_low=0.25), advantage=-2.0, old=-0.75)
    assert loss == gradient == pytest.approx(2 / ratio, rel=1e-6)
    ref = np.float32([[0.5]])  # d = 1.5
    for clamps in ({"kl_log_ratio_clamp": 1.5}, {"kl_clamp": 1.125}, {"kl_log_ratio_clamp": 1.5, "kl_clamp": 1.125}):
        o = Objective(beta=1.0, kl="k2", **clamps)
        assert one_token(o, advantage=0.0, ref_logp=ref) == (1.125, -1.5)


@pytest.mark.parametrize(("policy", "level"), POLICY_LEVELS)
def test_zero_advantage_is_zero_even_where_the_ratio_overflows(policy: str, level: str) -> None:
    plain, corrected = objective_of(policy, level), objective_of(policy, level, correction="token")
    cases: list[tuple[Objective, Any, Any, dict[str, Any]]] = []
    for old in (-200.0, 200.0):
        inputs = {"advantages": np.zeros(1, np.float32), "old_logp": np.float32([[old]])}
        cases.append((plain, [[-1.0]], [[1.0]], inputs))
        cases.append((corrected, [[-1.0]], [[1.0]], {**inputs, "rollout_logp": np.float32([[old + 150]])}))
    cases = [(o, np.float32(logp), np.float32(entropy), inputs) for o, logp, entropy, inputs in cases]
    for got in evaluate_all(cases):
        assert got.loss == got.dlogp == 0.0


def test_an_overflowing_ratio_meets_its_bound_without_nan() -> None:
    for level in ("token", "sequence", "sequence_token"):
        overflow = {"old": -200.0, "logp": 0.0}
        assert one_token(Objective(level=level, eps_high=0.5), advantage=2.0, **overflow) == (-3.0, 0.0)
        assert one_token(Objective(level=level, dual_clip=3.0), advantage=-2.0, **overflow) == (6.0, 0.0)
        assert one_token(Objective(level=level, delta=4.0), advantage=-2.0, **overflow) == (8.0, 0.0)
    assert one_token(Objective(policy="sapo"), advantage=1.0, **overflow) == (-4.0, 0.0)
    loss, gradient = one_token(Objective(policy="cispo", eps_high=5.0), advantage=2.0, old=-200.0, logp=-1.0)
    assert (loss, gradient) == (10.0, -10.0)


DROPPED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"correction": "token", "correction_mode": "mask"}, {"rollout_logp": np.float32([[-300.0, -1.0] * 3] * 2)}),
    ({"off_policy_threshold": 0.0}, {"rollout_logp": np.full((2, 6), 5.0, np.float32)}),
    ({"top_entropy": 0.5}, {}),
]


@pytest.mark.parametrize(("fields", "inputs"), DROPPED, ids=lambda v: str(sorted(v)))
def test_a_dropped_token_is_dropped_even_where_its_loss_is_infinite(
    fields: dict[str, Any], inputs: dict[str, Any]
) -> None:
    """Every other token has ratio exp(200) and a negative advantage: without the drop its loss is infinite."""
    logp, entropy = np.float32([[0.0, -1.0] * 3] * 2), np.float32([[0.1, 2.0] * 3] * 2)
    inputs = {
        "advantages": np.full((2, 6), -1.0, np.float32),
        "old_logp": np.float32([[-200.0, -1.0] * 3] * 2),
        "mask": np.ones((2, 6)),
        **inputs,
    }
    assert not np.isfinite(evaluate(Objective(), logp, entropy, **inputs).loss)
    o = Objective(**fields)
    got = evaluate(o, logp, entropy, **inputs)
    loss, dlogp, _ = oracle.policy_loss_grad(logp, entropy, objective=o, **inputs)
    assert np.isfinite(loss)
    np.testing.assert_allclose(got.loss, loss, rtol=1e-6)
    np.testing.assert_allclose(got.dlogp, dlogp, rtol=1e-6)


# -- any shape, mask and layout -------------------------------------------------------------------------------------


@st.composite
def batches(draw: st.DrawFn) -> tuple[Any, Any, dict[str, Any]]:
    """Few shapes (each compiles its primitives once), any mask and segment layout; the floats come from a seed."""
    shape = draw(st.sampled_from([(1, 1), (4, 6)]))
    size = shape[0] * shape[1]
    logp, entropy, inputs = random_batch(draw(st.integers(0, 10_000)), layout="tokens", shape=shape)
    bits = draw(st.lists(st.booleans(), min_size=size, max_size=size))
    inputs["mask"] = np.array(bits).reshape(shape)
    layout = draw(st.sampled_from(["rows", "tokens", "segments"]))
    if layout == "rows":
        inputs["advantages"] = inputs["advantages"][:, 0]
    elif layout == "segments":
        ids = draw(st.lists(st.integers(-2, 3) | st.just(2**31 - 1), min_size=size, max_size=size))
        inputs["segment_ids"] = np.array(ids, np.int32).reshape(shape)
    if draw(st.booleans()):
        inputs["old_logp"] = None
    # Some tokens are far off-policy, so that clips, clamps and bounds are all met.
    far = draw(st.floats(0.0, 6.0, width=32))
    inputs["rollout_logp"] = inputs["rollout_logp"] - np.float32(far)
    inputs["ref_logp"] = inputs["ref_logp"] + np.float32(far)
    return logp, entropy, inputs


@st.composite
def objectives(draw: st.DrawFn) -> Objective:
    policy, level = draw(st.sampled_from(POLICY_LEVELS))
    fields: dict[str, Any] = {}
    if policy == "clip":
        fields["delta"] = draw(st.sampled_from([None, 1.1, 3.0]))
        fields["dual_clip"] = draw(st.sampled_from([None, 1.2, 3.0]))
    if policy == "cispo":
        fields["cispo_bound"] = draw(st.sampled_from(["raw", "interval"]))
    if draw(st.booleans()):
        fields["beta"] = draw(st.sampled_from([0.04, 1.0]))
        fields["kl"] = draw(st.sampled_from(["k1", "k2", "k3", "k3+"]))
        fields["kl_bias_correction"] = draw(st.booleans())
        fields["kl_log_ratio_clamp"] = draw(st.sampled_from([None, 2.0]))
        fields["kl_clamp"] = draw(st.sampled_from([None, 10.0]))
    kinds = [None, "token", "sequence"] + ([] if policy == "vespo" else ["geometric"])
    fields["correction"] = draw(st.sampled_from(kinds))
    if fields["correction"] is not None:
        fields["correction_mode"] = draw(st.sampled_from(["truncate", "mask"]))
        fields["correction_min"] = draw(st.sampled_from([None, 0.5]))
    fields["off_policy_threshold"] = draw(st.sampled_from([None, 0.0, 0.7]))
    fields["top_entropy"] = draw(st.sampled_from([None, 0.25, 0.5]))
    fields["entropy_coef"] = draw(st.sampled_from([None, 0.1]))
    return objective_of(policy, level, draw(st.sampled_from(AGGREGATIONS)), **fields)


@pytest.mark.parametrize("examples", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_any_objective_on_any_batch(examples: int) -> None:
    @hypothesis.settings(max_examples=examples)
    @hypothesis.given(objective=objectives(), batch=batches())
    def check(objective: Objective, batch: tuple[Any, Any, dict[str, Any]]) -> None:
        logp, entropy, inputs = batch
        got = evaluate(objective, logp, entropy, **inputs)
        agrees(got, objective, logp, entropy, **inputs)
        assert not got.dlogp[~inputs["mask"]].any() and not got.dentropy[~inputs["mask"]].any()

    check()


# -- compile counts -------------------------------------------------------------------------------------------------

EVERY_NUMBER = Objective(
    level="sequence", aggregation="dr_grpo", log_ratio_clamp=20.0, sequence_log_ratio_max=10.0, kl_bias_correction=True,
    correction="token", delta=2.5, dual_clip=3.0, beta=0.04, kl_log_ratio_clamp=20.0, kl_clamp=10.0,
    correction_min=0.5, correction_max=2.0, off_policy_threshold=0.3, top_entropy=0.5, entropy_coef=0.01,
    max_length=8.0, temperature=0.9, sequence_error_max=3.0, count_rows="non_empty",
)  # fmt: skip
NUMBERS = [f.name for f in dataclasses.fields(Objective) if not f.metadata.get("static")]


class Traced:
    """A jitted loss of an Objective that counts how often it is traced."""

    def __init__(self, **inputs: Any) -> None:
        self.count = 0

        def loss(objective: Objective, stats: Any, arrays: dict[str, Any]) -> jax.Array:
            self.count += 1
            return logitless.policy_loss(stats, objective=objective, **arrays)[0]

        logp, entropy, arrays = random_batch(20)
        self.arguments = token_stats(logp, entropy), {**arrays, **inputs}
        self.jitted = jax.jit(loss)

    def __call__(self, objective: Objective) -> float:
        return float(self.jitted(objective, *self.arguments))


def test_changing_a_number_does_not_recompile() -> None:
    loss = Traced()
    before = loss(EVERY_NUMBER)
    assert loss.count == 1
    changed = {}
    for name in NUMBERS:
        if name == "mix":
            continue  # of a divergence over the vocabulary, which log-probabilities alone do not have
        value = getattr(EVERY_NUMBER, name)
        assert isinstance(value, float), name
        changed[name] = loss(EVERY_NUMBER.replace(**{name: value * 0.5 if name == "top_entropy" else value * 1.25}))
    assert loss.count == 1
    moved = {k for k, v in changed.items() if v != before}
    # The numbers are read at run time: those that decide something on this batch move the loss.
    assert {"beta", "entropy_coef", "max_length", "top_entropy"} <= moved
    # Ints and NumPy scalars are the same numbers.
    for value in (3, np.float32(3.0), np.float64(3.0), np.int64(3)):
        loss(EVERY_NUMBER.replace(delta=value, eps_low=0))
    assert loss.count == 1


def test_changing_a_choice_recompiles() -> None:
    loss = Traced()
    base = Objective(beta=0.04, correction="token")
    loss(base)
    choices: dict[str, Any] = dict(
        policy="sapo", level="sequence", aggregation="bnpo", kl="k1", kl_bias_correction=True, correction="geometric",
        correction_mode="mask", cispo_bound="interval", clip_metrics="liger", temperature_on="logp",
        count_rows="non_empty", off_policy_from="old", parity_metrics=True, delta=2.0,  # a number that comes into being
    )  # fmt: skip
    # The divergence belongs to kl="full", which log-probabilities alone do not have.
    assert choices.keys() >= {f.name for f in dataclasses.fields(Objective) if f.metadata} - {"divergence"}
    for i, (name, choice) in enumerate(choices.items(), start=2):
        loss(base.replace(**{name: choice}))
        assert loss.count == i, name
    loss(base)
    assert loss.count == len(choices) + 1


@pytest.mark.parametrize("call", ["grpo_loss", "linear_grpo_loss"])
def test_changing_a_number_of_a_full_loss_does_not_recompile(call: str) -> None:
    count = 0
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(2, 3, 8)).astype(np.float32)
    head = rng.normal(size=(8, 5)).astype(np.float32)
    hidden = rng.normal(size=(2, 3, 5)).astype(np.float32)
    targets = rng.integers(0, 8, (2, 3))
    arrays = {"advantages": np.float32([1.0, -1.0]), "ref_logp": np.zeros((2, 3), np.float32)}

    @jax.jit
    def loss(objective: Objective, mask: jax.Array) -> jax.Array:
        nonlocal count
        count += 1
        args = (logits,) if call == "grpo_loss" else (hidden, head)
        return getattr(flat_calls, call)(*args, targets, **arrays, mask=mask, objective=objective)[0]

    values = {
        float(loss(Objective(beta=beta, temperature=temperature, eps_high=eps), np.arange(6).reshape(2, 3) < live))
        for beta, temperature, (eps, live) in itertools.product((0.04, 1), (0.9, 1.0, 2), ((0.2, 4), (0.3, 5)))
    }
    assert count == 1
    assert len(values) == 12  # beta, temperature and the live tokens matter


def test_a_batch_of_objectives_under_vmap() -> None:
    """Numbers are leaves, so a sweep over one is a vmap."""
    logp, entropy, inputs = random_batch(21)
    stats = token_stats(logp, entropy)
    betas = [0.0, 0.1, 1.0]
    many = dataclasses.replace(Objective(beta=0.5), beta=jnp.float32(betas))
    axes = jax.tree.map(lambda _: None, many)
    object.__setattr__(axes, "beta", 0)
    got = jax.jit(jax.vmap(lambda o: logitless.policy_loss(stats, objective=o, **inputs)[0], in_axes=(axes,)))(many)
    want = [evaluate(Objective(beta=b), logp, entropy, **inputs).loss for b in betas]
    np.testing.assert_allclose(got, want, rtol=1e-6)
