"""Distillation losses of TRL, Liger and veRL against ours from the same settings, and faults that are known."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is not installed (make conformance)")
pytest.importorskip("trl", reason="TRL is not installed (make conformance)")
pytest.importorskip("liger_kernel", reason="Liger is not installed (make conformance)")
pytest.importorskip("verl", reason="veRL is not installed (make conformance)")

import torch
from trl import DistillationConfig
from trl.experimental.gkd import GKDConfig

import peer_distillation as peer
from logitless import Distillation, oracle
from peer_batches import FLOAT32, FLOAT64, MASKS, disagreement, relative

BETAS = (0.0, 0.1, 0.5, 0.9, 1.0)
TEMPERATURES = (1.0, 0.7, 2.0)


def difference(a: peer.Answer, b: peer.Answer) -> float:
    return max(relative(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))


def agree(
    record: Any, name: str, settings: dict[str, Any], pairs: list[tuple[peer.Answer, peer.Answer]], tolerance: float
) -> None:
    """Every pair of answers, and a line for the record; ``tolerance`` is that of the precision the peer computes in."""
    worst = max(difference(mine, theirs) for mine, theirs in pairs)
    assert worst <= tolerance, f"{name} {settings}: {worst:.1e}"
    found = {"float64": worst, "float32": None} if tolerance == FLOAT64 else {"float64": None, "float32": worst}
    text = ", ".join(f"{k}={v!r}" for k, v in settings.items())
    record("agreement", {"peer": name, "settings": text, "batches": len(pairs), **found, "metrics": []})


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("beta", BETAS)
def test_trl_from_logits(beta: float, temperature: float, record_property: Any) -> None:
    settings = {"beta": beta, "temperature": temperature}
    objective = Distillation.from_trl(**settings)
    cases = [peer.case(mask) for mask in MASKS]
    pairs = [(peer.ours(c, objective), peer.trl_gkd(c, **settings)) for c in cases]
    c = peer.case("ragged")
    pairs.append((peer.ours(c, objective, denominator=40.0), peer.trl_gkd(c, **settings, items=40.0)))
    agree(record_property, "TRL, distillation from logits", settings, pairs, FLOAT64)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("beta", BETAS)
def test_trl_from_hidden_states(beta: float, temperature: float, record_property: Any) -> None:
    settings = {"beta": beta, "temperature": temperature}
    objective = Distillation.from_trl(**settings)
    pairs = [(peer.ours(c, objective), peer.trl_chunked(c, **settings)) for c in map(peer.case, MASKS)]
    c = peer.case("ragged")
    pairs.append((peer.ours(c, objective, denominator=40.0), peer.trl_chunked(c, **settings, items=40.0)))
    agree(record_property, "TRL, distillation from hidden states", settings, pairs, FLOAT32)


@pytest.mark.parametrize("weights", [(0.0, 1.0), (0.5, 0.5), (0.2, 3.0)])
@pytest.mark.parametrize("beta", BETAS)
def test_liger(beta: float, weights: tuple[float, float], record_property: Any) -> None:
    """Hard and soft part, each at its temperature."""
    for temperature in TEMPERATURES:
        settings = dict(beta=beta, weight_hard_loss=weights[0], weight_soft_loss=weights[1], temperature=temperature)
        objective = Distillation.from_liger(**settings)
        pairs = [(peer.ours(c, objective), peer.liger(c, **settings)) for c in map(peer.case, MASKS)]
        agree(record_property, "Liger, distillation", settings, pairs, FLOAT32)


def test_configs_of_the_libraries_are_read(tmp_path: Any) -> None:
    plain = dict(output_dir=str(tmp_path), report_to=[], use_cpu=True, bf16=False)
    made = Distillation.from_trl(DistillationConfig(**plain, beta=0.3, temperature=0.7, top_p=0.9))
    assert made == Distillation(divergence="jsd", mix=0.3, temperature=0.7)
    assert Distillation.from_trl(DistillationConfig(**plain)) == Distillation.from_trl()
    gkd = GKDConfig(**plain, beta=0.0, lmbda=0.9, max_length=99, seq_kd=True)
    assert Distillation.from_trl(gkd) == Distillation(divergence="forward_kl")
    from liger_kernel.chunked_loss.jsd_loss import LigerFusedLinearJSDLoss
    from verl.workers.config import DistillationLossConfig

    assert Distillation.from_liger(LigerFusedLinearJSDLoss(beta=1.0)) == Distillation.from_liger(beta=1.0)
    whole = dict(loss_max_clamp=None, log_prob_min_clamp=None, use_policy_gradient=False)
    config = DistillationLossConfig(loss_mode="forward_kl_topk", **whole, distillation_loss_coef=0.3)
    with pytest.raises(ValueError, match="topk=128 drops the mass"):
        Distillation.from_verl(config)
    assert Distillation.from_verl(config, topk=None).soft_weight == 0.3


# -- a few ids -------------------------------------------------------------------------------------------------------


def of_alpha(alpha: float) -> dict[str, Any]:
    made = Distillation.from_trl(beta=alpha)
    return {"divergence": made.divergence, "mix": made.mix}


def flat() -> peer.Case:
    """Rows without a peak: no id has a probability below 1e-3."""
    c = peer.case("full")
    return c.replace(hidden=0.3 * c.hidden, teacher_hidden=0.3 * c.teacher_hidden)


@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("alpha", BETAS)
def test_sdpo_over_the_students_top_k(alpha: float, tail: bool, record_property: Any) -> None:
    c, worst = flat(), 0.0  # TRL bounds a mass by 1 - 1e-7
    student, teacher = (oracle.logits_rows(x) for x in c.logits())
    for k in (1, 3, 10):
        theirs, gradient = peer.sdpo_top_k(c, k, alpha, tail)
        ids = oracle.top_k(student, k).ids
        logp = oracle.selected_logprobs(teacher, ids).logp
        how: dict[str, Any] = {"outside": "tail" if tail else "renormalised", **of_alpha(alpha)}
        mine = oracle.sparse_divergence(student, ids, logp, **how).divergence
        made = oracle.sparse_divergence_vjp(student, ids, logp, 1.0, **how).inputs
        worst = max(worst, relative(mine, theirs), relative(made, gradient))
    assert worst <= FLOAT64
    fields = {"batches": 3, "float64": worst, "float32": None, "metrics": []}
    settings = f"distillation_alpha={alpha}, distillation_add_tail={tail}, distillation_topk 1, 3 and 10"
    record_property("agreement", {"peer": "TRL, SDPO", "settings": settings, **fields})


@pytest.mark.parametrize("alpha", BETAS)
def test_sdpo_over_the_vocabulary(alpha: float) -> None:
    c = peer.case("full")
    mine = oracle.divergence(c.student, c.teacher, **of_alpha(alpha)).divergence
    assert relative(mine, peer.sdpo_full(c, alpha)) <= FLOAT64


def test_verl_top_k_where_it_is_right(record_property: Any) -> None:
    """Over the whole vocabulary it is the forward KL; masses and overlap are right over any number of ids."""
    c, worst = peer.case("full"), 0.0
    student = oracle.logits_rows(c.logits()[0])
    for k in (1, 3, peer.VOCABULARY):
        theirs, gradient = peer.verl_top_k(c, k)
        found = oracle.top_k(c.teacher, k)
        mine = oracle.sparse_divergence(student, found.ids, found.logp, teacher_log_rest=found.log_rest)
        worst = max(worst, relative(mine.student_mass, theirs["student_mass"]))
        worst = max(worst, relative(mine.teacher_mass, theirs["teacher_mass"]))
        assert relative(mine.overlap * k, theirs["overlap_count"]) <= FLOAT64
    made = oracle.sparse_divergence_vjp(student, found.ids, found.logp, 1.0, teacher_log_rest=found.log_rest).inputs
    assert relative(mine.divergence, theirs["distillation_losses"]) <= FLOAT32  # veRL sums in float32
    assert relative(made, gradient) <= FLOAT32 and worst <= FLOAT64
    fields = {"batches": 3, "float64": worst, "float32": None, "metrics": []}
    settings = "forward_kl_topk: masses, overlap; the loss with topk the vocabulary"
    record_property("agreement", {"peer": "veRL, distillation", "settings": settings, **fields})


# -- faults that are known -------------------------------------------------------------------------------------------


def test_disagreement_verl_drops_the_tail(record_property: Any) -> None:
    """Of a student that is sharper than its teacher the sum is negative; veRL clamps it to 0, without a gradient."""
    c = peer.case("full")
    c = c.replace(teacher_hidden=0.5 * c.hidden, teacher_head=c.head, teacher_bias=0.5 * c.bias)
    student, found = oracle.logits_rows(c.logits()[0]), oracle.top_k(c.teacher, 3)
    theirs = peer.verl_top_k(c, 3)[0]["distillation_losses"]
    mine = oracle.sparse_divergence(student, found.ids, found.logp).divergence
    token = np.unravel_index(np.argmin(theirs), theirs.shape)
    assert theirs[token] < 0 < mine[token] and (mine >= 0).all()
    disagreement(
        record_property, "veRL", "forward KL over the teacher's top 3 of 11 ids, at one token",
        float(mine[token]), float(theirs[token]),
        "veRL leaves out the mass outside the ids, so that the sum is no divergence, and clamps it to 0 from below; "
        "here that mass is one more category",
    )  # fmt: skip


def test_disagreement_liger_pads_the_student_with_logits_of_zero(record_property: Any) -> None:
    c = peer.case("full", teacher_columns=peer.VOCABULARY + 3)
    settings = {"beta": 1.0, "weight_hard_loss": 0.0, "weight_soft_loss": 1.0}
    theirs, mine = peer.liger(c, **settings), peer.ours(c, Distillation.from_liger(**settings))
    cut = c.replace(teacher_head=c.teacher_head[: peer.VOCABULARY], teacher_bias=c.teacher_bias[: peer.VOCABULARY])
    assert difference(mine, peer.liger(cut, **settings)) <= FLOAT32  # over the common ids both agree
    disagreement(
        record_property, "Liger", "reverse KL, teacher of 14 ids and student of 11", mine.loss, theirs.loss,
        "Liger gives the student logits of 0 for the ids that it lacks, here the ids that both have are compared",
    )  # fmt: skip


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_disagreement_jsd_jumps_at_its_ends(beta: float, record_property: Any) -> None:
    """``beta`` is a KL at 0 and 1, and next to them a JSD that tends to 0; here that beta is refused."""
    c, near = peer.case("full"), abs(beta - 1e-4)
    at, beside = peer.trl_gkd(c, beta), peer.trl_gkd(c, near)
    assert beside.loss < 1e-3 * at.loss and np.abs(beside.dhidden).max() < 1e-3 * np.abs(at.dhidden).max()
    with pytest.raises(ValueError, match="trains nothing"):
        Distillation.from_trl(beta=near)
    disagreement(
        record_property, "TRL and Liger", f"beta={beta} (here) and beta={near} (there)",
        peer.ours(c, Distillation.from_trl(beta=beta)).loss, beside.loss,
        "there, beta next to an end trains nothing; here it is refused",
    )  # fmt: skip


@pytest.mark.parametrize("nats", [15.0, 20.0, 25.0])
def test_disagreement_gradient_of_a_peaked_row(nats: float, record_property: Any) -> None:
    """The reverse KL's ``p (d - KL)`` in float32 cancels at the peak, which has the row's largest gradient."""
    c = peer.peaked(nats)
    mine, theirs = (f(c, o) for f, o in ((peer.ours, Distillation()), (peer.trl_chunked, 1.0)))
    exact = peer.trl_gkd(c, 1.0)  # the same formula in float64
    near, error = (np.abs(x.dbias - mine.dbias).max() / np.abs(mine.dbias).max() for x in (exact, theirs))
    assert near <= 1e-5
    assert error > {15.0: 1e-3, 20.0: 1e-2, 25.0: 0.5}[nats]
    disagreement(
        record_property, "TRL", f"gradient of the reverse KL at a peak of {nats:.0f} nats, in float32",
        float(mine.dbias[3]), float(theirs.dbias[3]),
        "the difference of a peaked row's logarithms from their mean cancels; here it is taken from the peak",
    )  # fmt: skip


def test_disagreement_rounded_logits(record_property: Any) -> None:
    """Liger keeps logits in the dtype of the hidden states."""
    c = peer.case("full")
    rounded = {
        name: torch.tensor(getattr(c, name)).bfloat16().double().numpy()
        for name in ("hidden", "head", "bias", "teacher_hidden", "teacher_head", "teacher_bias")
    }
    c = c.replace(**rounded)
    settings = {"beta": 0.5, "weight_hard_loss": 0.0, "weight_soft_loss": 1.0}
    mine, theirs = peer.ours(c, Distillation.from_liger(**settings)), peer.liger(c, torch.bfloat16, **settings)
    error = np.linalg.norm(theirs.dhidden - mine.dhidden) / np.linalg.norm(mine.dhidden)
    assert error > 1e-2  # a bfloat16 result alone is off by 2e-3
    largest = np.unravel_index(np.argmax(np.abs(theirs.dhidden - mine.dhidden)), mine.dhidden.shape)
    disagreement(
        record_property, "Liger", "an entry of the JSD's gradient by bfloat16 hidden states",
        float(mine.dhidden[largest]), float(theirs.dhidden[largest]),
        "Liger rounds logits and probabilities to bfloat16; here they are float32",
    )  # fmt: skip


@pytest.mark.parametrize("which", ["trl_chunked", "liger"])
def test_disagreement_nan_in_a_masked_teacher_row(which: str, record_property: Any) -> None:
    c = peer.case("ragged")
    teacher_hidden = c.teacher_hidden.copy()
    teacher_hidden[~c.mask] = np.nan
    c = c.replace(teacher_hidden=teacher_hidden)
    mine = peer.ours(c, Distillation())
    assert difference(mine, peer.ours(peer.case("ragged"), Distillation())) == 0
    if which == "liger":
        theirs = peer.liger(c, beta=1.0, weight_hard_loss=0.0, weight_soft_loss=1.0)
    else:
        theirs = peer.trl_chunked(c, 1.0)
    assert np.isnan(theirs.dhead).any() and np.isfinite(theirs.loss)
    where = "TRL (without Triton)" if which == "trl_chunked" else "Liger"
    why = "a masked row is multiplied by zero there; here it is never read"
    what = "gradient by the head, NaN in masked rows of the teacher"
    record_property(
        "disagreement", {"peer": where, "what": what, "ours": float(mine.dhead[0, 0]), "theirs": None, "why": why}
    )


def test_disagreement_sdpo_bounds_the_tail(record_property: Any) -> None:
    c = peer.peaked(20.0)
    theirs, gradient = peer.sdpo_top_k(c, 1, 0.0, tail=True)
    student, teacher = (oracle.logits_rows(x) for x in c.logits())
    ids = oracle.top_k(student, 1).ids
    rest, found = oracle.top_k(teacher, 1).log_rest, oracle.selected_logprobs(teacher, ids).logp
    mine = oracle.sparse_divergence(student, ids, found, teacher_log_rest=rest).divergence
    made = oracle.sparse_divergence_vjp(student, ids, found, 1.0, teacher_log_rest=rest).inputs
    assert np.abs(gradient - made).max() > 0.1 * np.abs(made).max()
    disagreement(
        record_property, "TRL", "SDPO's forward KL with its tail, both sure by 20 nats", float(mine[0, 0]),
        float(theirs[0, 0]), "TRL bounds the mass of the ids by 1 - 1e-7 on both sides, and 1 - p is 2e-8 here",
    )  # fmt: skip
