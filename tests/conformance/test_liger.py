"""Liger's chunked GRPO loss and ``linear_grpo_loss`` from the same settings, reference head included."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest

from logitless.core.options import Head

pytest.importorskip("torch", reason="PyTorch is not installed (make conformance)")
pytest.importorskip("liger_kernel", reason="Liger is not installed (make conformance)")

import peer_liger
from logitless import Objective, linear_grpo_loss, metric_values, oracle
from peer_batches import FLOAT32, MASKS, Batch, batch, disagreement, relative
from peer_liger import FusedAnswer, Model

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo")
KLS: dict[str, dict[str, Any]] = {
    "no KL": {"beta": 0.0},
    "KL": {"beta": 0.1},
    "weighted KL": {"beta": 0.1, "use_bias_correction_kl": True},
}


def near(m: Model, b: Batch) -> Batch:
    """The batch with old log-probabilities around the model's own."""
    logp = oracle.linear_token_stats(m.hidden, m.head, m.targets, bias=m.bias).logp
    return b.replace(old=(logp + b.old - b.logp).astype(np.float32).astype(np.float64))


@functools.cache
def _program(objective: Objective) -> Any:
    """``linear_grpo_loss`` with its gradients, compiled once for all batches of an objective."""

    def of(leaves: tuple[Any, ...], given: dict[str, Any]) -> Any:
        hidden, head, bias = leaves
        return linear_grpo_loss(hidden, Head(head, bias=bias), objective=objective, **given)

    return jax.jit(jax.value_and_grad(of, has_aux=True))


def ours(settings: dict[str, Any], m: Model, b: Batch, **more: Any) -> FusedAnswer:
    objective = Objective.from_liger(**settings)
    given: dict[str, Any] = {"advantages": np.float32(b.advantages), "mask": b.mask, "old_logp": np.float32(b.old)}
    if objective.beta is not None:
        given |= {"ref_hidden": m.ref_hidden, "ref_lm_head": Head(m.ref_head, bias=m.ref_bias)}
    leaves = m.hidden, m.head, m.bias
    (value, metrics), gradients = _program(objective)(leaves, dict(given, targets=m.targets, **more))
    values = metric_values(metrics)
    logged = [values["kl_loss"]] if objective.beta is not None else []
    return FusedAnswer(float(value), *map(np.asarray, gradients), metrics=(*logged, values.get("clip_fraction", 0.0)))


def differences(a: FusedAnswer, b: FusedAnswer) -> float:
    pairs = [(a.loss, b.loss), (a.dhidden, b.dhidden), (a.dhead, b.dhead), (a.dbias, b.dbias), (a.metrics, b.metrics)]
    return max(relative(x, y) for x, y in pairs)


def compare(
    record: Any, settings: dict[str, Any], label: str, masks: tuple[str, ...] = tuple(MASKS), **more: Any
) -> None:
    m, worst = peer_liger.model(), 0.0
    for mask in masks:
        b = near(m, batch(mask))
        theirs = peer_liger.loss(settings, m, b, more.get("token_weights"), more.get("denominator"))
        found = differences(ours(settings, m, b, **more), theirs)
        assert found <= FLOAT32, f"{label}, {mask}: differs by {found:.1e}"
        worst = max(worst, found)
    fields = {"batches": len(masks), "float64": None, "float32": worst, "metrics": ["kl", "clip_ratio"]}
    record("agreement", {"peer": "Liger", "settings": label, **fields})


def base(loss_type: str, **settings: Any) -> dict[str, Any]:
    if loss_type == "dr_grpo":
        settings["max_completion_length"] = 9
    if loss_type == "cispo":
        settings["epsilon_high"] = 1.2
    return dict(loss_type=loss_type, **settings)


@pytest.mark.parametrize("kl", KLS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_every_loss_type_and_kl_under_every_mask(loss_type: str, kl: str, record_property: Any) -> None:
    compare(record_property, base(loss_type, **KLS[kl]), f"loss_type={loss_type!r}, {kl}")


@pytest.mark.parametrize("kl", KLS)
@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo"])
def test_sequence_level(loss_type: str, kl: str, record_property: Any) -> None:
    settings = base(loss_type, importance_sampling_level="sequence", **KLS[kl])
    compare(record_property, settings, f"loss_type={loss_type!r}, sequence level, {kl}")


def test_luspo_agrees_where_a_sequence_has_one_number(record_property: Any) -> None:
    settings = base("luspo", importance_sampling_level="sequence", beta=0.0)
    compare(record_property, settings, "loss_type='luspo', sequence level, no KL")


OPTIONS: dict[str, dict[str, Any]] = {
    "delta": {"delta": 1.5},
    "a higher upper clip": {"epsilon_low": 0.1, "epsilon_high": 0.4},
    "temperature": {"temperature": 0.7},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_options(option: str, record_property: Any) -> None:
    compare(record_property, base("grpo", beta=0.1, **OPTIONS[option]), f"loss_type='grpo', {option}")


@pytest.mark.parametrize("shape", ["[B, T]", "[B, 1]", "[B]"])
def test_weights_and_denominator(shape: str, record_property: Any) -> None:
    """``vllm_is_ratio`` is ``token_weights``, ``num_items_in_batch`` is ``denominator``."""
    w = np.float32(batch().weights)
    weights = {"[B, T]": w, "[B, 1]": w[:, :1], "[B]": w[:, 0]}[shape]
    label = f"loss_type='dapo', vllm_is_ratio {shape}, num_items_in_batch=40"
    compare(record_property, base("dapo", beta=0.1), label, token_weights=weights, denominator=40)


@pytest.mark.parametrize("loss_type", ["cispo", "sapo", "vespo"])
def test_both_refuse_the_sequence_level_of(loss_type: str) -> None:
    settings = base(loss_type, importance_sampling_level="sequence")
    with pytest.raises(ValueError, match="not supported"):
        peer_liger.loss(settings, peer_liger.model(), batch())
    with pytest.raises(ValueError, match="Liger refuses"):
        Objective.from_liger(**settings)


def test_disagreement_luspo_per_token(record_property: Any) -> None:
    m = peer_liger.model()
    b = near(m, batch("ragged"))
    settings = base("luspo", beta=0.0)
    disagreement(
        record_property, "Liger", "luspo at the token level, rows of 6, 3, 1 and 5 of 6 tokens",
        ours(settings, m, b).loss, peer_liger.loss(settings, m, b).loss,
        "Liger multiplies every position, padding included, by its row's length and takes the mean; TRL and this "
        "library sum a row's valid tokens",
    )  # fmt: skip


def test_disagreement_dapo_denominator(record_property: Any) -> None:
    """TRL's has two factors more; given the same ``num_items_in_batch``, Liger's loss is another one."""
    pytest.importorskip("trl", reason="TRL is not installed (make conformance)")
    import peer_trl

    b = batch("ragged")
    config = peer_trl.config(loss_type="dapo", gradient_accumulation_steps=2, steps_per_generation=8)
    theirs = peer_trl.loss(peer_trl.trainer(config), b, items=40).loss
    same = peer_trl.loss(peer_trl.trainer(peer_trl.config(loss_type="dapo")), b, items=40).loss
    assert theirs == pytest.approx(4 * same)
    disagreement(
        record_property, "TRL and Liger", "dapo, 40 tokens in the generation batch, 2 accumulation steps of 8",
        theirs, same, "TRL multiplies the denominator by accumulation / steps_per_generation, Liger does not; "
        "dapo_denominator(...) has both",
    )  # fmt: skip


def test_disagreement_defaults(record_property: Any) -> None:
    pytest.importorskip("trl", reason="TRL is not installed (make conformance)")
    trl, liger = Objective.from_trl(), Objective.from_liger()
    assert trl.beta is None and liger.beta == 0.04
    disagreement(
        record_property, "TRL and Liger", "the default of beta", 0.0, liger.beta,
        "TRL has no KL unless asked for, Liger has one; TRL's is weighted by the ratio, Liger's is not",
    )  # fmt: skip
