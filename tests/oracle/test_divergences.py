"""The oracle's divergences by hand, against 60-digit decimals, against finite differences, and by identities."""

from __future__ import annotations

import decimal
import itertools
import math
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from logitless import Distillation, oracle
from logitless.oracle import linear_rows, logits_rows
from logitless.oracle.rows import Rows
from test_oracle import central_difference

NAN, INF = math.nan, math.inf
KINDS: list[dict[str, Any]] = [
    {"divergence": "forward_kl"},
    {"divergence": "reverse_kl"},
    *({"divergence": "jsd", "mix": mix} for mix in (0.1, 0.5, 0.9)),
]
IDS = ["-".join(map(str, kind.values())) for kind in KINDS]


# -- the whole vocabulary --------------------------------------------------------------------------------------------


def test_two_columns_by_hand() -> None:
    student, teacher = logits_rows(np.log([[3.0, 1.0]])), logits_rows(np.log([[1.0, 1.0]]))
    forward = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    reverse = 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)
    m = (0.75 * 0.75 + 0.25 * 0.5, 0.75 * 0.25 + 0.25 * 0.5)  # mix = 0.25
    jsd = 0.25 * (0.5 * math.log(0.5 / m[0]) + 0.5 * math.log(0.5 / m[1]))
    jsd += 0.75 * (0.75 * math.log(0.75 / m[0]) + 0.25 * math.log(0.25 / m[1]))
    for kind, value in ({"divergence": "forward_kl"}, forward), ({"divergence": "reverse_kl"}, reverse), (
        {"divergence": "jsd", "mix": 0.25}, jsd
    ):  # fmt: skip
        assert oracle.divergence(student, teacher, **kind).divergence[0] == pytest.approx(value, rel=1e-14)
    beside = oracle.divergence(student, teacher, targets=[1])
    assert beside.cross_entropy[0] == pytest.approx(-0.5 * math.log(0.75) - 0.5 * math.log(0.25), rel=1e-14)
    assert beside.entropy[0] == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25), rel=1e-14)
    assert beside.teacher_entropy[0] == pytest.approx(math.log(2.0), rel=1e-14)
    assert beside.logp[0] == pytest.approx(math.log(0.25), rel=1e-14)
    np.testing.assert_allclose(
        oracle.divergence_vjp(student, teacher, 2.0, divergence="forward_kl").inputs, [[0.5, -0.5]], rtol=1e-14
    )


def decimal_divergence(s: list[float], t: list[float], divergence: str, mix: float = 0.5) -> tuple[float, list[float]]:
    """Value and gradient by the definitions, without any care for cancellation, in 60 digits."""
    with decimal.localcontext() as context:
        context.prec = 60

        def log_softmax(row: list[float]) -> list[Decimal]:
            z = [Decimal(v) for v in row]
            lse = sum((v.exp() for v in z), Decimal(0)).ln()
            return [v - lse for v in z]

        lp, lq, b = log_softmax(s), log_softmax(t), Decimal(mix)
        p, q = [v.exp() for v in lp], [v.exp() for v in lq]
        if divergence == "forward_kl":
            value = sum((y * (ly - lx) for y, lx, ly in zip(q, lp, lq, strict=True)), Decimal(0))
            return float(value), [float(x - y) for x, y in zip(p, q, strict=True)]
        if divergence == "reverse_kl":
            d = [lx - ly for lx, ly in zip(lp, lq, strict=True)]
            value = sum((x * v for x, v in zip(p, d, strict=True)), Decimal(0))
            return float(value), [float(x * (v - value)) for x, v in zip(p, d, strict=True)]
        lm = [((1 - b) * x + b * y).ln() for x, y in zip(p, q, strict=True)]
        over_p = [lx - m for lx, m in zip(lp, lm, strict=True)]
        of_p = sum((x * v for x, v in zip(p, over_p, strict=True)), Decimal(0))
        of_q = sum((y * (ly - m) for y, ly, m in zip(q, lq, lm, strict=True)), Decimal(0))
        gradient = [float((1 - b) * x * (v - of_p)) for x, v in zip(p, over_p, strict=True)]
        return float(b * of_q + (1 - b) * of_p), gradient


NOISE = np.random.default_rng(0).normal(size=(2, 6)).round(6)
PAIRS: dict[str, tuple[list[float], list[float]]] = {
    "ordinary": ([0.3, -1.2, 2.5, 0.0, 1.1], [0.1, 1.2, -2.5, 0.5, 1.0]),
    **{
        f"both peak at column 2, {nats} nats": tuple(
            (NOISE[k] + nats * (np.arange(6) == 2)).tolist() for k in range(2)
        )
        for nats in (10, 15, 20, 25, 30)
    },
    "they peak apart, 30 nats": tuple((NOISE[k] + 30 * (np.arange(6) == 2 + k)).tolist() for k in range(2)),
    "nearly equal": (NOISE[0].tolist(), (NOISE[0] + 1e-6 * NOISE[1]).tolist()),
    "logits of 200": ([200.0, 199.0, -200.0], [-200.0, 201.0, 200.5]),
    "three columns": ([0.0, 1.0, 2.0], [2.0, 1.0, 0.0]),
    "two columns": ([0.0, 3.0], [1.0, 0.0]),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS, ids=IDS)
@pytest.mark.parametrize("pair", PAIRS)
def test_value_and_gradient_against_decimals(pair: str, kind: dict[str, Any]) -> None:
    s, t = PAIRS[pair]
    value, gradient = decimal_divergence(s, t, **kind)
    student, teacher = logits_rows(np.array(s)), logits_rows(np.array(t))
    rel = 1e-9 if pair == "nearly equal" else 1e-12
    assert float(oracle.divergence(student, teacher, **kind).divergence) == pytest.approx(value, rel=rel, abs=0)
    ours = oracle.divergence_vjp(student, teacher, 1.0, **kind).inputs
    np.testing.assert_allclose(ours, gradient, rtol=100 * rel, atol=rel * np.abs(gradient).max())


@pytest.mark.parametrize("kind", KINDS, ids=IDS)
@pytest.mark.parametrize("columns", [1, 2, 3, 40])
def test_equal_rows_have_a_divergence_of_exactly_zero(columns: int, kind: dict[str, Any]) -> None:
    z = 20 * np.random.default_rng(columns).normal(size=(4, columns))
    same = logits_rows(z)
    assert not oracle.divergence(same, same, **kind).divergence.any()
    assert not oracle.divergence_vjp(same, same, 1.0, **kind).inputs.any()


def test_one_column_is_certain_for_both() -> None:
    student, teacher = logits_rows([[3.0]]), logits_rows([[-200.0]])
    for kind in KINDS:
        assert oracle.divergence(student, teacher, **kind).divergence[0] == 0
        assert oracle.divergence_vjp(student, teacher, 1.0, **kind).inputs[0, 0] == 0


def pair_of_rows(seed: int = 0, columns: int = 7, peak: float = 3.0) -> tuple[Rows, Rows]:
    rng = np.random.default_rng(seed)
    return logits_rows(peak * rng.normal(size=(2, 3, columns))), logits_rows(peak * rng.normal(size=(2, 3, columns)))


def test_jsd_tends_to_the_two_kls_over_its_small_share() -> None:
    s, t = pair_of_rows()
    forward, reverse = (oracle.divergence(s, t, divergence=d).divergence for d in ("forward_kl", "reverse_kl"))
    low, high = (oracle.divergence(s, t, divergence="jsd", mix=mix).divergence for mix in (1e-7, 1 - 1e-7))
    np.testing.assert_allclose(low / 1e-7, forward, rtol=1e-4)
    np.testing.assert_allclose(high / 1e-7, reverse, rtol=1e-4)


def test_jsd_is_its_own_mirror_and_bounded() -> None:
    s, t = pair_of_rows(peak=30.0)
    for mix in (0.1, 0.5, 0.8):
        there = oracle.divergence(s, t, divergence="jsd", mix=mix).divergence
        back = oracle.divergence(t, s, divergence="jsd", mix=1 - mix).divergence
        np.testing.assert_allclose(there, back, rtol=1e-12)
        assert (there <= -mix * math.log(mix) - (1 - mix) * math.log(1 - mix)).all()


def test_cross_entropy_is_forward_kl_and_the_teacher_s_entropy() -> None:
    s, t = pair_of_rows()
    found = oracle.divergence(s, t, divergence="forward_kl")
    np.testing.assert_allclose(found.cross_entropy, found.divergence + found.teacher_entropy, rtol=1e-13)
    np.testing.assert_allclose(
        oracle.divergence_vjp(s, t, None, 0.3).inputs,
        oracle.divergence_vjp(s, t, 0.3, divergence="forward_kl").inputs,
        rtol=1e-14,
    )


def test_statistics_beside_are_those_of_token_stats() -> None:
    s, t = pair_of_rows()
    y = np.array([[0, 1, 2], [3, 4, 6]])
    found, own = oracle.divergence(s, t, targets=y), oracle.token_stats(s.inputs, y)
    np.testing.assert_array_equal(found.logp, own.logp)
    np.testing.assert_array_equal(found.entropy, own.entropy)
    np.testing.assert_array_equal(found.teacher_entropy, oracle.token_stats(t.inputs, y).entropy)


def test_a_category_that_one_side_rules_out() -> None:
    s, t = logits_rows([[0.0, 0.0, -INF, -INF]]), logits_rows([[0.0, -INF, 0.0, -INF]])
    assert oracle.divergence(s, t, divergence="forward_kl").divergence[0] == INF
    assert oracle.divergence(s, t, divergence="reverse_kl").divergence[0] == INF
    jsd = oracle.divergence(s, t, divergence="jsd").divergence[0]
    assert jsd == pytest.approx(0.5 * math.log(2.0), rel=1e-14)
    narrower = logits_rows([[0.0, -INF, -INF, -INF]])
    assert oracle.divergence(narrower, s, divergence="reverse_kl").divergence[0] == pytest.approx(math.log(2.0))
    gradient = oracle.divergence_vjp(narrower, s, 1.0, divergence="reverse_kl").inputs
    np.testing.assert_array_equal(gradient, np.zeros((1, 4)))


@pytest.mark.parametrize("kind", KINDS, ids=IDS)
def test_gradient_of_everything_together_by_finite_differences(kind: dict[str, Any]) -> None:
    """dH, dW and dbias through scale, softcap, a temperature for each token, padding columns and both layouts."""
    rng = np.random.default_rng(1)
    h, w, b = rng.normal(size=(2, 2, 3)), rng.normal(size=(3, 7)), rng.normal(size=7)
    teacher = linear_rows(rng.normal(size=(2, 2, 4)), 2 * rng.normal(size=(9, 4)), softcap=5.0, vocab_size=8)
    how: dict[str, Any] = {"scale": 1.4, "softcap": 4.0, "vocab_size": 6, "head_layout": "hv"}
    tau, y = np.array([[0.7, 1.0], [1.5, 2.0]]), np.array([[0, 5], [2, 3]])
    mask = np.array([[1, 1], [0, 1]])
    g = rng.normal(size=(4, 2, 2))

    def total(h: np.ndarray, w: np.ndarray, b: np.ndarray) -> float:
        student = linear_rows(h, w, bias=b, **how)
        found = oracle.divergence(student, teacher, temperature=tau, mask=mask, targets=y, **kind)
        fields = (found.divergence, found.cross_entropy, found.entropy, found.logp)
        return float(sum((x * f).sum() for x, f in zip(g, fields, strict=True)))

    made = oracle.divergence_vjp(
        linear_rows(h, w, bias=b, **how), teacher, *g, temperature=tau, mask=mask, targets=y, **kind
    )
    np.testing.assert_allclose(made.inputs, central_difference(lambda x: total(x, w, b), h), rtol=1e-6, atol=1e-8)
    assert made.head is not None and made.bias is not None
    np.testing.assert_allclose(made.head, central_difference(lambda x: total(h, x, b), w), rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(made.bias, central_difference(lambda x: total(h, w, x), b), rtol=1e-6, atol=1e-8)
    assert not made.head[:, 6:].any() and not made.inputs[1, 0].any()


def test_different_vocabularies_are_compared_over_their_common_ids() -> None:
    rng = np.random.default_rng(2)
    s, t = rng.normal(size=(3, 5)), rng.normal(size=(3, 8))
    narrow = oracle.divergence(logits_rows(s), logits_rows(t[:, :5]))
    for student, teacher in ((s, t), (t, s)):
        other = oracle.divergence(logits_rows(student), logits_rows(teacher))
        cut = oracle.divergence(logits_rows(student[:, :5]), logits_rows(teacher[:, :5]))
        np.testing.assert_array_equal(other.divergence, cut.divergence)
    wide = oracle.divergence_vjp(logits_rows(t), logits_rows(s), 1.0).inputs
    assert wide.shape == (3, 8) and not wide[:, 5:].any()
    padded = np.concatenate([s, np.full((3, 3), NAN)], axis=1)  # padding columns are never read
    assert (oracle.divergence(logits_rows(padded, vocab_size=5), logits_rows(t)).divergence == narrow.divergence).all()


def test_what_does_not_fit_is_refused() -> None:
    s, t = pair_of_rows()
    with pytest.raises(ValueError, match=r"tokens \[2, 3\], and the teacher \[3\]"):
        oracle.divergence(s, logits_rows(np.zeros((3, 7))))
    with pytest.raises(ValueError, match=r"vocab_size=8 does not lie in \[1, 7\]"):
        logits_rows(np.zeros((3, 7)), vocab_size=8)
    with pytest.raises(ValueError, match="divergence='kl' is not known"):
        oracle.divergence(s, t, divergence="kl")  # type: ignore[arg-type]


@pytest.mark.parametrize("side", ["student", "teacher"])
def test_nan_stays_in_its_token_and_a_masked_one_is_never_read(side: str) -> None:
    s, t = pair_of_rows()
    broken = (s if side == "student" else t).inputs
    broken[1, 1] = NAN
    mask = np.ones((2, 3))
    found, gradient = oracle.divergence(s, t), oracle.divergence_vjp(s, t, 1.0).inputs
    assert np.argwhere(np.isnan(found.divergence)).tolist() == [[1, 1]]
    assert np.isnan(gradient[1, 1]).all() and np.isfinite(np.delete(gradient.reshape(6, 7), 4, 0)).all()
    mask[1, 1] = 0
    hidden, none = oracle.divergence(s, t, mask=mask), oracle.divergence_vjp(s, t, 1.0, mask=mask).inputs
    assert hidden.divergence[1, 1] == hidden.entropy[1, 1] == 0 and not none[1, 1].any() and np.isfinite(none).all()


def test_a_target_outside_the_common_ids_is_nan() -> None:
    s, t = logits_rows(np.zeros((2, 5))), logits_rows(np.zeros((2, 4)))
    found = oracle.divergence(s, t, targets=[3, 4])
    assert found.divergence[0] == 0 and np.isnan(found.divergence[1]) and np.isnan(found.logp[1])
    gradient = oracle.divergence_vjp(s, t, 1.0, g_logp=1.0, targets=[3, 4]).inputs
    assert np.isfinite(gradient[0]).all() and np.isnan(gradient[1, :4]).all() and gradient[1, 4] == 0


# -- given ids -------------------------------------------------------------------------------------------------------


def teacher_at(teacher: Rows, k: int) -> dict[str, Any]:
    found = oracle.top_k(teacher, k)
    return {"ids": found.ids, "teacher_logp": found.logp, "teacher_log_rest": found.log_rest}


def test_top_k_of_the_teacher_by_hand() -> None:
    p = np.array([[0.5, 0.3, 0.15, 0.05]])
    student, ids, logp = logits_rows(np.log(p)), np.array([[1, 3]]), np.log([[0.6, 0.2]])
    tail = 0.6 * math.log(0.6 / 0.3) + 0.2 * math.log(0.2 / 0.05) + 0.2 * math.log(0.2 / 0.65)
    found = oracle.sparse_divergence(student, ids, logp)
    assert found.divergence[0] == pytest.approx(tail, rel=1e-13)
    assert (found.student_mass[0], found.teacher_mass[0]) == (pytest.approx(0.35), pytest.approx(0.8))
    assert found.overlap[0] == 0.5  # the student's own two are 0 and 1
    gradient = oracle.sparse_divergence_vjp(student, ids, logp, 1.0).inputs
    np.testing.assert_allclose(gradient, [[0.5 * (1 - 0.2 / 0.65), 0.3 - 0.6, 0.15 * (1 - 0.2 / 0.65), 0.05 - 0.2]])

    renormalised = 0.75 * math.log(0.75 / (6 / 7)) + 0.25 * math.log(0.25 * 7)
    options: dict[str, Any] = {"outside": "renormalised"}
    assert oracle.sparse_divergence(student, ids, logp, **options).divergence[0] == pytest.approx(renormalised)
    gradient = oracle.sparse_divergence_vjp(student, ids, logp, 1.0, **options).inputs
    np.testing.assert_allclose(gradient, [[0, 6 / 7 - 0.75, 0, 1 / 7 - 0.25]], atol=1e-15)

    options = {"divergence": "reverse_kl"}
    reverse = 0.3 * math.log(0.5) + 0.05 * math.log(0.25) + 0.65 * math.log(0.65 / 0.2)
    assert oracle.sparse_divergence(student, ids, logp, **options).divergence[0] == pytest.approx(reverse, rel=1e-13)
    dd = np.log([0.65 / 0.2, 0.3 / 0.6, 0.65 / 0.2, 0.05 / 0.2])
    gradient = oracle.sparse_divergence_vjp(student, ids, logp, 1.0, **options).inputs
    np.testing.assert_allclose(gradient, p * (dd - reverse), rtol=1e-12)


@pytest.mark.parametrize("outside", ["tail", "renormalised"])
@pytest.mark.parametrize("kind", KINDS, ids=IDS)
def test_gradient_over_given_ids_by_finite_differences(kind: dict[str, Any], outside: Any) -> None:
    rng = np.random.default_rng(3)
    h, w, b = rng.normal(size=(2, 2, 3)), rng.normal(size=(7, 3)), rng.normal(size=7)
    teacher = logits_rows(rng.normal(size=(2, 2, 7)))
    ids, logp = oracle.top_k(teacher, 3)[:2]
    ids[0, 1, 2] = -1  # ragged
    ids[1, 0] = -1  # and empty
    g, tau = rng.normal(size=(2, 2)), np.array([[0.7, 1.0], [1.5, 2.0]])
    how: dict[str, Any] = {"outside": outside, "temperature": tau, **kind}

    def total(h: np.ndarray, w: np.ndarray, b: np.ndarray) -> float:
        student = linear_rows(h, w, bias=b, softcap=4.0)
        return float((g * oracle.sparse_divergence(student, ids, logp, **how).divergence).sum())

    made = oracle.sparse_divergence_vjp(linear_rows(h, w, bias=b, softcap=4.0), ids, logp, g, **how)
    np.testing.assert_allclose(made.inputs, central_difference(lambda x: total(x, w, b), h), rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(made.head, central_difference(lambda x: total(h, x, b), w), rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(made.bias, central_difference(lambda x: total(h, w, x), b), rtol=1e-6, atol=1e-8)
    assert not made.inputs[1, 0].any()


@pytest.mark.parametrize("kind", KINDS, ids=IDS)
@pytest.mark.parametrize("peak", [3.0, 25.0])
def test_a_tail_never_exceeds_the_whole_divergence_and_grows_to_it(peak: float, kind: dict[str, Any]) -> None:
    s, t = pair_of_rows(peak=peak)
    whole = oracle.divergence(s, t, **kind).divergence
    tails = [oracle.sparse_divergence(s, **teacher_at(t, k), **kind).divergence for k in range(1, 8)]
    assert (tails[0] >= 0).all()
    for fewer, more in itertools.pairwise(tails):
        assert (fewer <= more * (1 + 1e-9) + 1e-12).all()
    np.testing.assert_allclose(tails[-2], whole, rtol=1e-9)  # a tail of one id
    every = oracle.sparse_divergence(s, **teacher_at(t, 7), outside="renormalised", **kind)
    np.testing.assert_allclose(every.divergence, whole, rtol=1e-9)
    assert (every.overlap == 1).all()


def test_a_top_k_without_its_tail_would_be_negative() -> None:
    """The sum over the ids alone, as veRL takes it, is no divergence."""
    s, t = pair_of_rows()
    ids, logp = oracle.top_k(t, 1)[:2]
    at = oracle.selected_logprobs(s, ids).logp
    assert ((np.exp(logp) * (logp - at)).sum(-1) < 0).any()
    assert (oracle.sparse_divergence(s, ids, logp).divergence >= 0).all()


def test_a_teacher_whose_mass_exceeds_one_by_rounding() -> None:
    student = logits_rows(np.zeros((1, 4)))
    logp = np.float32(np.log([[0.5, 0.5]])) + np.float32(1e-7)
    found = oracle.sparse_divergence(student, [[0, 1]], logp)
    assert found.teacher_mass[0] > 1 and found.divergence[0] == pytest.approx(math.log(2.0), rel=1e-6)
    reverse = oracle.sparse_divergence(student, [[0, 1]], logp, divergence="reverse_kl")
    assert reverse.divergence[0] == INF  # the student has mass where the teacher, as far as is known, has none
    known = oracle.sparse_divergence(student, [[0, 1]], logp, divergence="reverse_kl", teacher_log_rest=[-20.0])
    assert known.divergence[0] == pytest.approx(0.5 * math.log(0.5) + 0.5 * (math.log(0.5) + 20.0), rel=1e-6)


def test_an_id_that_the_student_lacks_is_nan_and_a_masked_one_is_not() -> None:
    student = logits_rows(np.zeros((2, 4)))
    ids, logp = [[0, 4], [0, 4]], np.log(np.full((2, 2), 0.3))
    found = oracle.sparse_divergence(student, ids, logp, mask=[1, 0])
    assert np.isnan(found.divergence[0]) and np.isnan(found.student_mass[0]) and found.divergence[1] == 0
    gradient = oracle.sparse_divergence_vjp(student, ids, logp, 1.0, mask=[1, 0]).inputs
    assert np.isnan(gradient[0]).all() and not gradient[1].any()
    with pytest.raises(ValueError, match="outside='clip' is not known"):
        oracle.sparse_divergence(student, ids, logp, outside="clip")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"teacher_logp \[2, 3\]"):
        oracle.sparse_divergence(student, ids, np.zeros((2, 3)))


# -- the loss --------------------------------------------------------------------------------------------------------


def test_distillation_loss_by_hand() -> None:
    s, t = pair_of_rows()
    mask, y = np.array([[1, 1, 0], [1, 0, 0]]), np.array([[0, 1, 2], [3, 4, 5]])
    o = Distillation(
        divergence="forward_kl", temperature=2.0, temperature_squared=True, soft_weight=0.7, hard_weight=0.3
    )
    soft = oracle.divergence(s, t, divergence="forward_kl", temperature=2.0, mask=mask).divergence
    hard = -oracle.token_stats(s.inputs, y, mask=mask).logp
    token = 0.7 * 4.0 * soft + 0.3 * hard
    expected = {
        "bnpo": token.sum() / 3,
        "grpo": (token[0].sum() / 2 + token[1].sum()) / 2,
        "luspo": token.sum() / 2,
        "dr_grpo": token.sum() / (2 * 10),
    }
    for aggregation, value in expected.items():
        length = 10 if aggregation == "dr_grpo" else None
        whole = o.replace(aggregation=aggregation, max_length=length)
        found = oracle.distillation_loss(s, t, objective=whole, targets=y, mask=mask)[0]
        assert found == pytest.approx(value, rel=1e-13), aggregation
    assert oracle.distillation_loss(s, t, objective=o, targets=y, mask=mask, denominator=30)[0] == pytest.approx(
        token.sum() / 30, rel=1e-13
    )
    with pytest.raises(ValueError, match=r"hard_weight=0.3 needs targets"):
        oracle.distillation_loss(s, t, objective=o)


@pytest.mark.parametrize("kind", KINDS, ids=IDS)
def test_gradient_of_the_distillation_loss_by_finite_differences(kind: dict[str, Any]) -> None:
    rng = np.random.default_rng(4)
    h, w, b = rng.normal(size=(2, 3, 3)), rng.normal(size=(6, 3)), rng.normal(size=6)
    teacher = linear_rows(rng.normal(size=(2, 3, 2)), rng.normal(size=(6, 2)))
    mask, y = np.array([[1, 1, 0], [1, 0, 1]]), rng.integers(0, 6, (2, 3))
    tau = np.array([[0.7, 1.0, 1.0], [1.5, 2.0, 0.5]])
    o = Distillation(temperature=tau, temperature_squared=True, hard_weight=0.4, aggregation="grpo", **kind)  # type: ignore[arg-type]

    def loss(h: np.ndarray, w: np.ndarray, b: np.ndarray) -> Any:
        return oracle.distillation_loss(linear_rows(h, w, bias=b), teacher, objective=o, targets=y, mask=mask)

    made = loss(h, w, b)[1]
    np.testing.assert_allclose(made.inputs, central_difference(lambda x: loss(x, w, b)[0], h), rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(made.head, central_difference(lambda x: loss(h, x, b)[0], w), rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(made.bias, central_difference(lambda x: loss(h, w, x)[0], b), rtol=1e-6, atol=1e-8)


def test_a_nan_in_a_live_token_is_a_nan_loss_and_in_a_masked_one_nothing() -> None:
    s, t = pair_of_rows()
    t.inputs[1, 2] = NAN
    o = Distillation()
    assert np.isnan(oracle.distillation_loss(s, t, objective=o)[0])
    mask = np.array([[1, 1, 1], [1, 1, 0]])
    loss, made = oracle.distillation_loss(s, t, objective=o, mask=mask)
    assert np.isfinite(loss) and np.isfinite(made.inputs).all() and not made.inputs[1, 2].any()
    nothing, none = oracle.distillation_loss(s, t, objective=o, mask=np.zeros((2, 3)))
    assert nothing == 0 and not none.inputs.any()
