"""Losses worked by hand over several tokens, so that library and oracle cannot agree on a wrong formula unnoticed."""

from __future__ import annotations

import importlib
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flat_calls
import logitless
from interpreted import by_numpy
from logitless import Objective, TokenStats, oracle, policy_loss
from loss_cases import evaluate, metrics_of, random_batch, token_stats


def both(objective: Objective, logp: Any, **inputs: Any) -> tuple[float, np.ndarray]:
    """``(loss, dlogp)`` of the library, which the oracle's are equal to."""
    logp = np.asarray(logp, np.float32)
    inputs = {k: np.asarray(v, np.float32) for k, v in inputs.items()}
    got = evaluate(objective, logp, np.zeros_like(logp), **inputs)
    loss, dlogp, _ = oracle.policy_loss_grad(logp, np.zeros_like(logp), objective=objective, **inputs)
    assert float(got.loss) == pytest.approx(loss, rel=1e-5, abs=0)
    np.testing.assert_allclose(got.dlogp, dlogp, rtol=1e-5, atol=1e-7)
    return float(got.loss), got.dlogp


def test_gmpo_is_a_geometric_mean_over_the_tokens_of_a_sequence() -> None:
    """r = 0.1, 0.3, -0.5 with A = 2: q = 0.1, 0.2, -0.5 (bounded above), mean -1/15; then r = 0.3, A = -1."""
    logp = [[-1.0, -1.0, -1.0], [-1.0, -1.0, -1.0]]
    old = [[-1.1, -1.3, -0.5], [-1.3, 9.0, 9.0]]
    mask = [[1, 1, 1], [1, 0, 0]]
    o = Objective(policy="gmpo", aggregation="luspo")
    loss, dlogp = both(o, logp, old_logp=old, mask=mask, advantages=[2.0, -1.0])
    first, second = -2 * math.exp(-0.2 / 3), math.exp(0.3)
    # luspo: each of the three tokens carries the sequence's value, over two rows.
    assert loss == pytest.approx((3 * first + second) / 2, rel=1e-6)
    # d/dlogp of exp(mean q) is exp(mean q) / 3 for the tokens inside their bound, times the three tokens that carry it.
    assert dlogp[0] == pytest.approx([first / 2, 0.0, first / 2], rel=1e-5)
    assert dlogp[1] == pytest.approx([second / 2, 0.0, 0.0], rel=1e-5)


def test_gspo_and_gspo_token_take_the_mean_log_ratio() -> None:
    """r = 0.2, -0.1: the ratio is exp(0.05) for both tokens."""
    for level in ("sequence", "sequence_token"):
        loss, dlogp = both(Objective(level=level), [[-1.0, -1.0]], old_logp=[[-1.2, -0.9]], advantages=[2.0])
        assert loss == pytest.approx(-2 * math.exp(0.05), rel=1e-6)
        assert dlogp[0] == pytest.approx([-math.exp(0.05)] * 2, rel=1e-6)


def test_log_ratio_clamps() -> None:
    """Tunix: a log-ratio of 120 is one of 20, without a gradient; gspo-token: the sequence's is at most 10."""
    far = {"old_logp": [[-121.0, -1.0]], "advantages": [-1.0]}
    loss, dlogp = both(Objective(log_ratio_clamp=20.0), [[-1.0, -1.0]], **far)
    assert loss == pytest.approx((math.exp(20.0) + 1) / 2, rel=1e-5) and dlogp[0].tolist() == [0.0, 0.5]
    assert not np.isfinite(evaluate(Objective(), [[-1.0, -1.0]], [[0.0, 0.0]], **_arrays(far)).loss)
    low = {"old_logp": [[29.0, -1.0]], "advantages": [1.0]}
    loss, dlogp = both(Objective(log_ratio_clamp=2.0), [[-1.0, -1.0]], **low)
    assert loss == pytest.approx(-(math.exp(-2.0) + 1) / 2, rel=1e-5) and dlogp[0].tolist() == [0.0, -0.5]
    # The mean of 3 (clamped from 5) and 1 is 2; bounded by 1.5 it has no gradient, by 2 it has.
    two = {"old_logp": [[-6.0, -2.0]], "advantages": [-1.0]}
    for level in ("sequence", "sequence_token"):
        o = Objective(level=level, log_ratio_clamp=3.0, sequence_log_ratio_max=2.0)
        loss, dlogp = both(o, [[-1.0, -1.0]], **two)
        assert loss == pytest.approx(math.exp(2.0), rel=1e-6)
        own = [0.0, 0.5] if level == "sequence" else [0.5, 0.5]  # the clamped token's own r does not move
        assert dlogp[0] == pytest.approx(np.array(own) * math.exp(2.0), rel=1e-5)
        loss, dlogp = both(o.replace(sequence_log_ratio_max=1.5), [[-1.0, -1.0]], **two)
        assert loss == pytest.approx(math.exp(1.5), rel=1e-6) and not dlogp.any()
    # GMPO and VESPO see the clamped ratio as well.
    both(Objective(policy="gmpo", log_ratio_clamp=0.1, eps_low=0.3), [[-1.0, -1.0]], **two)
    clamped, _ = both(Objective(policy="vespo", log_ratio_clamp=0.5), [[-1.0, -1.0]], **two)
    assert clamped == pytest.approx(-math.exp(2 + 3 * 1.0 - 2 * math.exp(1.0)), rel=1e-5)


def _arrays(inputs: dict[str, Any]) -> dict[str, np.ndarray]:
    return {k: np.asarray(v, np.float32) for k, v in inputs.items()}


def test_vespo_phi_that_overflows_is_zero() -> None:
    """nan_to_num of its formula: an infinite weight drops the token, in both."""
    o = Objective(policy="vespo", vespo_lambda_pos=0.0, vespo_k_pos=100.0)
    loss, dlogp = both(o, [[-1.0]], old_logp=[[-16.0]], advantages=[1.0])
    assert loss == 0.0 and not dlogp.any()


def test_vespo_clamps() -> None:
    """Each log-ratio to +-20 (30 and -30.5 then cancel), and their sum to at least log 1e-8."""
    loss, _ = both(Objective(policy="vespo"), [[-1.0, -1.0]], old_logp=[[-31.0, 29.5]], advantages=[1.0])
    assert loss == pytest.approx(1.0, rel=1e-5)  # phi = exp(3 - 3) of a sum of 0
    loss, _ = both(Objective(policy="vespo"), [[-1.0]], old_logp=[[29.0]], advantages=[1.0])
    assert loss == pytest.approx(math.exp(3 + 2 * math.log(1e-8) - 3e-8), rel=1e-4, abs=0)


# -- token weights --------------------------------------------------------------------------------------------------


def test_token_weights_multiply_the_policy_term_and_not_the_kl() -> None:
    """Weights 0.5 and 2 on losses of -1 each, with a KL of 0.1 * 0.5 a token."""
    inputs = {"advantages": [1.0], "ref_logp": [[-1.5, -1.5]]}
    loss, dlogp = both(Objective(beta=0.1, kl="k1"), [[-1.0, -1.0]], token_weights=[[0.5, 2.0]], **inputs)
    assert loss == pytest.approx((-0.5 - 2.0) / 2 + 0.05, rel=1e-6)
    assert dlogp[0] == pytest.approx([-0.25 + 0.05, -1.0 + 0.05], rel=1e-6)


def test_token_weights_of_a_row_are_those_of_its_tokens() -> None:
    logp, entropy, inputs = random_batch(1)
    rows = np.float32([0.5, 2.0, 7.0, 0.25])
    for fields in ({}, {"correction": "token"}, {"correction": "sequence", "off_policy_threshold": 0.1}):
        o = Objective(**fields)
        shapes = [rows, rows[:, None], np.broadcast_to(rows[:, None], (4, 6))]
        losses = {float(evaluate(o, logp, entropy, token_weights=w, **inputs).loss) for w in shapes}
        assert len(losses) == 1 and losses != {float(evaluate(o, logp, entropy, **inputs).loss)}
        for old in (inputs["old_logp"], None):
            own = dict(inputs, old_logp=old, token_weights=rows)
            got = evaluate(o, logp, entropy, **own)
            np.testing.assert_allclose(got.loss, oracle.policy_loss(logp, entropy, objective=o, **own), rtol=1e-5)


def test_vespo_folds_token_weights_in() -> None:
    """One weight of 0.5 a sequence is log 0.5 once; 0.5 a token of two is log 0.25."""
    two = {"old_logp": [[-1.0, -1.0]], "advantages": [1.0]}
    for weights, total in (([0.5], 0.5), ([[0.5]], 0.5), ([[0.5, 0.5]], 0.25)):
        s = math.log(total)
        phi = math.exp(3 + 2 * s - 3 * math.exp(s))
        loss, _ = both(Objective(policy="vespo"), [[-1.0, -1.0]], token_weights=weights, **two)
        assert loss == pytest.approx(phi, rel=1e-5)
    logp, entropy, inputs = random_batch(2, layout="packed")
    weights = np.exp(0.3 * logp)
    for fields in ({"correction": "token"}, {"correction": "sequence"}):
        for old in (inputs["old_logp"], None):
            own = dict(inputs, old_logp=old, token_weights=weights)
            o = Objective(policy="vespo", **fields)
            got = evaluate(o, logp, entropy, **own).loss
            np.testing.assert_allclose(got, oracle.policy_loss(logp, entropy, objective=o, **own), rtol=1e-5)


def test_a_token_weight_of_zero_drops_an_infinite_loss() -> None:
    inputs = _arrays({"old_logp": [[-200.0, -1.0]], "advantages": [-1.0], "token_weights": [[0.0, 1.0]]})
    assert evaluate(Objective(), [[0.0, -1.0]], [[0.0, 0.0]], **inputs).loss == 0.5


def test_token_weights_are_checked() -> None:
    logp, entropy, inputs = random_batch(1, layout="packed")
    with pytest.raises(ValueError, match=r"token_weights has shape \(4,\), expected \[B, T\] = \(4, 6\)\."):
        evaluate(Objective(), logp, entropy, token_weights=np.ones(4, np.float32), **inputs)
    del inputs["segment_ids"]
    with pytest.raises(ValueError, match=r"shape \(6,\), expected \[B, T\] = \(4, 6\), \[B, 1\] = \(4, 1\) or \[B\]"):
        evaluate(Objective(), logp, entropy, token_weights=np.ones(6, np.float32), **inputs)
    with pytest.raises(TypeError, match="token_weights has dtype int32"):
        evaluate(Objective(), logp, entropy, token_weights=np.ones(4, np.int32), **inputs)


# -- masks and counts -----------------------------------------------------------------------------------------------


def test_empty_rows_count_or_do_not() -> None:
    """Three rows of lengths 2, 1 and 0, losses of -1 a token."""
    mask = [[1, 1], [1, 0], [0, 0]]
    want = {"grpo": (-2 / 3, -2 / 2), "luspo": (-3 / 3, -3 / 2), "dr_grpo": (-3 / 12, -3 / 8), "bnpo": (-1, -1)}
    for aggregation, losses in want.items():
        for count_rows, expected in zip(("all", "non_empty"), losses, strict=True):
            length = {"max_length": 4.0} if aggregation == "dr_grpo" else {}
            o = Objective(aggregation=aggregation, count_rows=count_rows, **length)
            loss, _ = both(o, np.zeros((3, 2)), advantages=[1.0, 1.0, 1.0], mask=mask)
            assert loss == pytest.approx(expected, rel=1e-6), (aggregation, count_rows)
    nothing, _ = both(Objective(count_rows="non_empty"), np.zeros((3, 2)), advantages=[1.0] * 3, mask=np.zeros((3, 2)))
    assert nothing == 0.0


def test_the_off_policy_mask_measures_from_rollout_or_old_and_drops_nothing_without_either() -> None:
    """Row 0 drifted from old, row 1 from rollout, both by 1, with a threshold of 0.5 and a negative advantage."""
    logp = [[-2.0], [-2.0]]
    inputs = {"old_logp": [[-1.0], [-2.0]], "rollout_logp": [[-2.0], [-1.0]], "advantages": [-1.0, -1.0]}
    ratios = [math.exp(-1.0), 1.0]

    def kept(o: Objective, **own: Any) -> list[bool]:
        _, dlogp = both(o, logp, **own)
        return [bool(x) for x in dlogp[:, 0] != 0]

    o = Objective(off_policy_threshold=0.5, eps_low=0.9, aggregation="luspo")
    assert kept(o, **inputs) == [True, False]
    assert kept(o.replace(off_policy_from="old"), **inputs) == [False, True]
    loss, _ = both(o.replace(off_policy_from="old", correction="token", correction_max=None), logp, **inputs)
    assert loss == pytest.approx(ratios[1] * math.exp(-1.0) / 2, rel=1e-5)  # corrected by rollout, masked by old
    without = {"advantages": inputs["advantages"]}
    assert kept(o, **without) == kept(o.replace(off_policy_threshold=-3.0), **without) == [True, True]


def test_sequences_far_from_their_sampler_leave_the_loss_and_its_denominator() -> None:
    """The mean of ``exp(|logp - rollout|)`` over a sequence, as Tunix has it: row 0 is off by ln 4 at one of two
    tokens, (4 + 1) / 2 = 2.5; row 1 by ln 2 at each, 2; row 2 is right, and its sampler's second value is not known;
    row 3 has a token that the sampler could not draw. At a threshold of 2 the middle two stay."""
    logp, ln = np.full((4, 2), -3.0, np.float32), np.log
    rollout = logp + np.array([[ln(4.0), 0], [-ln(2.0), ln(2.0) - 1e-6], [0, np.nan], [-np.inf, 0]], np.float32)
    mask, a = np.array([[1, 1], [1, 1], [1, 1], [1, 1]], bool), np.float32([1.0, 2.0, -1.0, 1.0])
    ref, entropy = logp + np.float32([[0.3], [0.1], [-0.2], [0.4]]), np.full((4, 2), 0.7, np.float32)
    given = {"advantages": a, "ref_logp": ref}
    rest = {"advantages": a[1:3], "ref_logp": ref[1:3], "mask": mask[1:3]}
    for aggregation in ("grpo", "bnpo", "luspo"):
        o = Objective(
            aggregation=aggregation, count_rows="non_empty", sequence_error_max=2.0, beta=0.1, entropy_coef=0.5
        )
        got = evaluate(o, logp, entropy, mask=mask, rollout_logp=rollout, **given)
        plain = evaluate(o.replace(sequence_error_max=None), logp[1:3], entropy[1:3], **rest)
        np.testing.assert_allclose(got.loss, plain.loss, rtol=1e-6)
        np.testing.assert_allclose(got.dlogp[1:3], plain.dlogp, rtol=1e-6)
        np.testing.assert_allclose(got.dentropy[1:3], plain.dentropy, rtol=1e-6)
        assert not got.dlogp[[0, 3]].any() and not got.dentropy[[0, 3]].any()
        assert float(got.metrics["kept_tokens"].sum) == 4
    given_count = evaluate(
        o, logp, entropy, mask=mask, rollout_logp=rollout, denominator=8.0, entropy_denominator=16.0, **given
    )
    plain = evaluate(
        o.replace(sequence_error_max=None), logp[1:3], entropy[1:3], denominator=8.0, entropy_denominator=16.0, **rest
    )
    np.testing.assert_allclose(given_count.loss, plain.loss, rtol=1e-6)
    with pytest.raises(ValueError, match="set count_rows='non_empty'"):
        Objective(sequence_error_max=2.0)
    with pytest.raises(ValueError, match="expected 1 or more"):
        Objective.bnpo(sequence_error_max=0.5)
    with pytest.raises(ValueError, match="sequence_error_max needs rollout_logp"):
        evaluate(o, logp, entropy, **given)
    assert Objective.from_tunix(seq_logprob_error_threshold=2.0).sequence_error_max == 2.0


def test_the_off_policy_mask_keeps_a_token_without_an_advantage() -> None:
    """Only negative advantages are dropped: of two rows that drifted, the one with A = 0 is counted as kept."""
    logp = np.float32([[-2.0], [-2.0]])
    inputs = {"advantages": np.float32([0.0, -1.0]), "rollout_logp": logp + 1, "old_logp": logp}
    kept = metrics_of(Objective(off_policy_threshold=0.5), logp, logp, **inputs)["kept_tokens"]
    assert (float(kept.sum), float(kept.count)) == (1, 2)


def test_a_correction_without_bounds() -> None:
    """exp(old - rollout) = exp(3) as it is."""
    o = Objective(correction="token", correction_max=None)
    loss, _ = both(o, [[-1.0]], old_logp=[[-1.0]], rollout_logp=[[-4.0]], advantages=[1.0])
    assert loss == pytest.approx(-math.exp(3.0), rel=1e-6)


def test_a_geometric_mask_weighs_tokens_of_sequences_inside_the_band() -> None:
    """Weights 2, 0.5 have the geometric mean 1, and stay; 2, 1 have 1.41, and are dropped."""
    o = Objective(correction="geometric_mask", correction_mode="mask", correction_min=0.9, correction_max=1.1)
    old = np.float32([[-1.0, -2.0], [-1.0, -2.0]])
    rollout = old - np.log([[2.0, 0.5], [2.0, 1.0]]).astype(np.float32)
    given = dict(old_logp=old, rollout_logp=rollout, advantages=[1.0, 1.0])
    loss, gradient = both(o, old, **given)
    assert loss == pytest.approx(-(2 + 0.5) / 4, rel=1e-6)
    np.testing.assert_allclose(gradient, [[-0.5, -0.125], [0, 0]], rtol=1e-6)
    on_policy, _ = both(o, old, rollout_logp=rollout, advantages=[1.0, 1.0])  # Tunix: of the current policy
    assert on_policy == pytest.approx(loss, rel=1e-6)


def test_the_entropy_denominator_replaces_the_kept_tokens_of_top_entropy() -> None:
    """Entropies 1 to 4, the upper half kept: a bonus of 0.1 * (3 + 4) over 2, or over what is given."""
    o = Objective(top_entropy=0.5, entropy_coef=0.1)
    entropy = np.float32([[1.0, 2.0, 3.0, 4.0]])
    for given, count in ((None, 2.0), (10.0, 10.0), (jnp.float32(0.5), 0.5)):
        inputs = {"advantages": np.zeros(1, np.float32), "entropy_denominator": given}
        got = evaluate(o, np.zeros_like(entropy), entropy, **inputs)
        assert float(got.loss) == pytest.approx(-0.7 / count, rel=1e-6)
        np.testing.assert_allclose(got.dentropy, [[0, 0, -0.1 / count, -0.1 / count]], rtol=1e-6)
        assert oracle.policy_loss(np.zeros_like(entropy), entropy, objective=o, **inputs) == pytest.approx(-0.7 / count)


def test_the_denominator_of_a_whole_batch() -> None:
    from logitless.objectives.aggregate import loss_denominator

    mask, ids = np.array([[1, 1, 0], [1, 0, 0], [0, 0, 0]]), np.array([[0, 1, 1], [4, 4, 4], [2, 2, 2]])
    for aggregation, whole, non_empty, packed in (("grpo", 3, 2, 3), ("dapo", 3, 3, 3), ("dr_grpo", 15, 10, 15)):
        o = Objective(aggregation=aggregation, **({"max_length": 5.0} if aggregation == "dr_grpo" else {}))
        assert float(loss_denominator(o, mask)) == whole
        assert float(loss_denominator(o.replace(count_rows="non_empty"), mask)) == non_empty
        assert float(loss_denominator(o, mask, ids)) == packed


# -- metrics --------------------------------------------------------------------------------------------------------


def test_the_dual_clip_counts_negative_advantages_beyond_its_constant_before_delta() -> None:
    """Ratios 2, 4 and 6: with c = 3 the last two, whatever delta and the style of the other fractions."""
    logp, ratio = np.full((2, 3), -1.0, np.float32), np.array([[2.0, 4.0, 6.0]] * 2)
    inputs = {"advantages": np.float32([-1.0, 1.0]), "old_logp": (logp - np.log(ratio)).astype(np.float32)}
    for fields in ({}, {"delta": 2.5}, {"delta": 2.5, "clip_metrics": "liger"}):
        metric = metrics_of(Objective(dual_clip=3.0, **fields), logp, logp, **inputs)["clip_fraction_dual"]
        assert (float(metric.sum), float(metric.count)) == (2, 6), fields


def test_the_kl_of_the_metrics_is_that_of_the_loss_under_a_temperature_of_logp() -> None:
    """logp = log(1/4) / 0.5 = log(1/16) against ref = log(1/16) - 1: k1 = 1, k3 = 1/e."""
    o = Objective(beta=1.0, kl="k1", temperature_on="logp", temperature=0.5)
    arrays = {"advantages": np.zeros(1, np.float32), "ref_logp": np.float32([[-np.log(16.0) - 1.0]])}
    loss, metrics = by_numpy(lambda x: flat_calls.grpo_loss(x, [[0]], objective=o, **arrays), np.zeros((1, 1, 4)))
    assert float(loss) == float(metrics["kl_k1"].sum) == pytest.approx(1.0, rel=1e-6)
    assert float(metrics["kl_k3"].sum) == pytest.approx(math.exp(-1.0), rel=1e-6)


# -- the oracle's own arithmetic ------------------------------------------------------------------------------------


def test_the_oracle_adds_up_its_blocks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every gradient is the same whether rows are taken one at a time or all at once."""
    rng = np.random.default_rng(0)
    hidden, head, bias = rng.normal(size=(2, 3, 4)), rng.normal(size=(5, 4)), rng.normal(size=5)
    targets, g = rng.integers(0, 5, (2, 3)), [rng.normal(size=(2, 3)) for _ in range(3)]

    def gradients() -> Any:
        return oracle.linear_token_stats_vjp(hidden, head, targets, *g, bias=bias)

    whole = gradients()
    module = importlib.import_module("logitless.oracle.token_stats")  # the package has a function of that name
    monkeypatch.setattr(module, "_BLOCK_ELEMENTS", 5)
    assert len(list(module.row_blocks(np.ones(6, bool), 5))) == 6
    for one_by_one, at_once in zip(gradients(), whole, strict=True):
        np.testing.assert_allclose(one_by_one, at_once, rtol=1e-12, atol=1e-14)


# -- cotangents of the public calls ---------------------------------------------------------------------------------


def test_an_entropy_bonus_alone_moves_the_head() -> None:
    """Without an advantage or a KL: a sweep that skips what cannot move must not skip these tokens."""
    rng = np.random.default_rng(5)
    hidden, head = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((2, 3, 4), (7, 4)))
    rest = dict(targets=rng.integers(0, 7, (2, 3)), advantages=jnp.zeros(2), objective=Objective(entropy_coef=0.1))
    gradients = [
        by_numpy(jax.grad(lambda w, b=b: flat_calls.linear_grpo_loss(hidden, w, backend=b, **rest)[0]), head)
        for b in ("reference", "chunked")
    ]
    assert np.abs(gradients[0]).max() > 1e-3
    np.testing.assert_allclose(gradients[1], gradients[0], rtol=1e-4, atol=1e-7)


# -- precision ------------------------------------------------------------------------------------------------------


def test_the_loss_is_float32_under_x64() -> None:
    """A float64 temperature, per token or not, or any other float64 number, does not widen it."""
    with jax.enable_x64(True):
        logp, entropy, inputs = random_batch(3)
        stats = token_stats(logp, entropy)
        logits, targets = np.zeros((4, 6, 3), np.float32), np.zeros((4, 6), np.int32)
        for temperature in (jnp.asarray(np.full((4, 6), 0.7)), jnp.asarray(np.float64(0.7))):
            assert temperature.dtype == jnp.float64
            for on in ("logits", "logp"):
                o = Objective(temperature=temperature, temperature_on=on)  # type: ignore[arg-type]
                loss, metrics = jax.eval_shape(
                    lambda x, o=o: flat_calls.grpo_loss(x, targets, objective=o, **inputs), logits
                )
                assert {loss.dtype, *(m.sum.dtype for m in metrics.values())} == {np.dtype("float32")}
        o = Objective(beta=0.1, level="sequence", eps_high=jnp.asarray(np.float64(0.3)), entropy_coef=jnp.asarray(0.1))
        loss, metrics = jax.eval_shape(lambda s: logitless.policy_loss(s, objective=o, **inputs), stats)
        assert {loss.dtype, *(m.sum.dtype for m in metrics.values())} == {np.dtype("float32")}


@pytest.mark.parametrize("policy", ["dppo_tv", "dppo_kl"])
def test_dppo_drops_tokens_whose_own_probability_has_moved(policy: str) -> None:
    """From 0.5 to 0.6 with A > 0 and to 0.4 with A < 0 lies within 0.15, and its binary KL of 0.02 within 0.03. To 0.8
    and 0.2 lies outside (0.22); a step back towards the old policy never does. The ratio counts as at most 1.5."""
    p = np.array([[0.6, 0.4, 0.8, 0.2, 0.8, 0.2]])
    a = np.array([[1.0, -1.0, 1.0, -1.0, -1.0, 1.0]], np.float32)
    logp, old = np.log(p).astype(np.float32), np.full(p.shape, np.log(0.5), np.float32)
    bound = 0.15 if policy == "dppo_tv" else 0.03
    o = Objective(policy=policy, eps_low=bound, eps_high=bound, delta=1.5, aggregation="bnpo")
    kept = np.array([[1, 1, 0, 0, 1, 1]])
    weight = np.minimum(p / 0.5, 1.5) * kept

    def loss(x: Any) -> Any:
        return policy_loss(TokenStats(logp=x), advantages=a, old_logp=old, objective=o)[0]

    value, gradient = by_numpy(jax.value_and_grad(loss), logp)
    np.testing.assert_allclose(value, -(weight * a * np.log(p)).sum() / 6, rtol=1e-6)
    np.testing.assert_allclose(gradient, -weight * a / 6, rtol=1e-6)
    truth = oracle.policy_loss(logp, None, objective=o, advantages=a, old_logp=old)
    np.testing.assert_allclose(truth, value, rtol=1e-6)
    metrics = logitless.metric_values(metrics_of(o, logp, np.zeros_like(logp), advantages=a, old_logp=old))
    assert metrics["clip_fraction"] == pytest.approx(2 / 6) and metrics["clip_fraction_low"] == pytest.approx(1 / 6)


def test_dppo_from_verl_has_the_cap_of_its_config() -> None:
    """``ActorConfig`` sets ``clip_ratio_c`` to 3, whatever the paper has."""
    o = Objective.from_verl(loss_mode="dppo_tv", clip_ratio_low=0.1, clip_ratio_high=0.2)
    assert (o.policy, o.delta, o.eps_low, o.eps_high, o.log_ratio_clamp) == ("dppo_tv", 3.0, 0.1, 0.2, 20.0)
    assert Objective.from_verl(loss_mode="dppo_kl", clip_ratio_c=20.0).delta == 20.0
    with pytest.raises(ValueError, match="policy='dppo_tv' compares probabilities of tokens, so level must be 'token'"):
        Objective(policy="dppo_tv", level="sequence")


def test_dro_is_reinforce_with_a_k2_penalty_to_the_old_policy() -> None:
    """``-A logp + beta (logp - old)^2 / 2``: the gradient stays where the advantage is 0."""
    rng = np.random.default_rng(3)
    logp, old = (-rng.exponential(size=(2, 5)) for _ in range(2))
    a, mask = np.array([1.5, 0.0]), np.array([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]])
    o = Objective.from_verl(loss_mode="dro", dro_beta=0.3, loss_agg_mode="token-mean")
    given: dict[str, Any] = dict(advantages=np.float32(a), ref_logp=np.float32(old), mask=mask, objective=o)

    def loss(x: Any) -> Any:
        return policy_loss(TokenStats(logp=x), **given)[0]

    value, gradient = by_numpy(jax.value_and_grad(loss), np.float32(logp))
    want = (mask * (-a[:, None] * logp + 0.15 * (logp - old) ** 2)).sum() / 6
    np.testing.assert_allclose(value, want, rtol=1e-6)
    np.testing.assert_allclose(gradient, mask * (-a[:, None] + 0.3 * (logp - old)) / 6, rtol=1e-5, atol=1e-7)
    truth = oracle.policy_loss(logp, None, **given | {"advantages": a, "ref_logp": old})
    np.testing.assert_allclose(truth, want, rtol=1e-12)


def test_dro_from_verl_refuses_what_has_no_counterpart() -> None:
    nested = {"policy_loss": {"loss_mode": "dro", "dro_beta": 0.2}}
    assert Objective.from_verl(nested).beta == 0.2
    refused: list[tuple[dict[str, Any], str]] = [
        ({}, "loss_mode='dro' needs dro_beta"),
        ({"dro_beta": 0.1, "use_kl_loss": True}, "has two penalties"),
        ({"dro_beta": 0.1, "rollout_correction": {"rollout_is": "token"}}, "has no counterpart here"),
    ]
    for settings, why in refused:
        with pytest.raises(ValueError, match=why):
            Objective.from_verl(loss_mode="dro", **settings)


def test_a_lora_scale_of_zero_is_the_head_alone() -> None:
    rng = np.random.default_rng(4)
    hidden, head, a, b = (rng.normal(size=s).astype(np.float32) for s in ((1, 2, 4), (7, 4), (7, 2), (2, 4)))
    targets = rng.integers(0, 7, (1, 2))
    with_lora, alone = (
        by_numpy(lambda h, options=options: flat_calls.linear_logprobs(h, head, targets, **options).logp, hidden)
        for options in ({"lora": (a, b), "lora_scale": 0}, {})
    )
    np.testing.assert_array_equal(with_lora, alone)


def test_k3_plus_has_the_gradient_of_an_unclamped_k2() -> None:
    """d = 3 and d = -25: the values are k3, clamped to 10 and to 19 at d = -20; the gradients -d, as in veRL."""
    o = Objective(beta=1.0, kl="k3+", kl_log_ratio_clamp=20.0, kl_clamp=10.0)
    for d, value in ((3.0, 10.0), (-25.0, 10.0), (0.5, math.exp(0.5) - 1.5)):
        inputs = {"advantages": np.float32([0.0]), "ref_logp": np.float32([[-30.0 + d]])}
        got = evaluate(o, [[-30.0]], [[1.0]], **inputs)
        assert float(got.loss) == pytest.approx(value, rel=1e-5) and float(got.dlogp[0, 0]) == pytest.approx(-d)
        want, gradient, _ = oracle.policy_loss_grad([[-30.0]], None, objective=o, **inputs)
        assert want == pytest.approx(value) and gradient[0, 0] == pytest.approx(-d)
