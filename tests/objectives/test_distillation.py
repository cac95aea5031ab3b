"""The Distillation itself, and Distillations from other libraries' settings."""

from __future__ import annotations

import dataclasses
import pickle
import types
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from logitless import Distillation, loss_denominator
from logitless.settings import distillation_settings as settings

STATIC = {f.name for f in dataclasses.fields(Distillation) if f.metadata.get("static")}


def test_choices_are_structure_and_numbers_are_leaves() -> None:
    o = Distillation(divergence="jsd", mix=0.5, temperature=2, soft_weight=np.float32(0.5))
    leaves, tree = jax.tree.flatten(o)
    assert leaves == [0.5, 2.0, 0.5] and all(isinstance(leaf, float) for leaf in leaves)
    assert jax.tree.unflatten(tree, leaves) == o
    assert jax.tree.structure(o.replace(temperature=1.5, soft_weight=0.1)) == tree
    for change in (
        {"divergence": "reverse_kl", "mix": None},
        {"temperature_squared": True},
        {"overlap": True},
        {"hard_weight": 0.1},
        {"aggregation": "grpo"},
        {"outside": "renormalised"},
    ):
        assert jax.tree.structure(o.replace(**change)) != tree
    assert {"divergence", "outside", "temperature_squared", "overlap", "aggregation", "count_rows"} == STATIC


def test_it_is_frozen_hashable_and_pickles_and_shows_what_differs() -> None:
    o = Distillation(divergence="jsd", mix=0.1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        o.mix = 0.2  # type: ignore[misc]
    assert hash(o) == hash(Distillation(divergence="jsd", mix=0.1)) and pickle.loads(pickle.dumps(o)) == o
    assert repr(o) == "Distillation(divergence='jsd', mix=0.1)" and repr(Distillation()) == "Distillation()"


def test_numbers_may_be_arrays_or_traced() -> None:
    temperature = jnp.ones((2, 3))
    assert Distillation(temperature=temperature).temperature is temperature

    @jax.jit
    def made(x: Any) -> Any:
        return Distillation(divergence="jsd", mix=x, soft_weight=x, hard_weight=x).replace(mix=2 * x)

    assert float(made(0.25).mix) == 0.5
    assert jax.grad(lambda o: o.mix * o.soft_weight)(Distillation(divergence="jsd", mix=0.5)).mix == 1.0


def test_aggregation_takes_the_peers_names_and_counts_as_the_objective() -> None:
    mask = jnp.array([[1, 1, 0], [1, 0, 0], [0, 0, 0]])
    assert Distillation(aggregation="seq-mean-token-mean").aggregation == "grpo"  # type: ignore[arg-type]
    assert float(loss_denominator(Distillation(), mask)) == 3.0
    rows = Distillation(aggregation="dr_grpo", max_length=8, count_rows="non_empty")
    assert float(loss_denominator(rows, mask)) == 16.0


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"divergence": "kl"}, r"divergence='kl' is not known. KL\(teacher \|\| student\) is 'forward_kl'"),
    ({"divergence": "RKL"}, r"divergence='RKL' is not known. Here: 'reverse_kl'"),
    ({"divergence": "reverse"}, r"divergence='reverse' is not known; expected one of.*Did you mean 'reverse_kl'\?"),
    ({"divergence": "jsd", "mix": 0}, r"mix=0.0 lies within 0.001 of 0.*divergence='forward_kl' if that is meant"),
    ({"divergence": "jsd", "mix": 0.9995}, r"mix=0.9995 lies within 0.001 of 1.*divergence='reverse_kl' if that"),
    ({"divergence": "jsd", "mix": 1.5}, r"mix=1.5, expected a share of the teacher between 0 and 1"),
    ({"mix": 0.3}, r"mix=0.3 belongs to divergence='jsd' and would be ignored with 'reverse_kl'"),
    ({"temperature": 0}, r"temperature=0.0, expected a number > 0"),
    ({"temperature_squared": True}, r"temperature_squared=True has no effect without temperature"),
    ({"soft_weight": 0}, r"soft_weight=0 with hard_weight=None trains nothing"),
    ({"soft_weight": 0, "hard_weight": 0}, r"soft_weight=0 with hard_weight=0.0 trains nothing"),
    ({"soft_weight": -1}, r"soft_weight=-1.0, expected a number >= 0"),
    ({"soft_weight": None}, r"soft_weight=None, expected a number \(its default is 1.0\)"),
    ({"hard_weight": float("nan")}, r"hard_weight is NaN"),
    ({"aggregation": "dr_grpo"}, r"aggregation='dr_grpo'.*give max_length"),
    ({"max_length": 8}, r"max_length belongs to aggregation='dr_grpo'"),
    ({"count_rows": "none"}, r"count_rows='none' is not known; expected one of 'all', 'non_empty'"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=lambda v: str(v) if isinstance(v, dict) else "")
def test_what_makes_no_sense_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^Distillation: {message}"):
        Distillation(**fields)


def test_a_weight_may_be_annealed_to_zero() -> None:
    assert Distillation(soft_weight=0, hard_weight=1).soft_weight == 0
    assert Distillation(hard_weight=0).hard_weight == 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("beta", r"no field 'beta'\. It is TRL's and Liger's: Distillation\.from_trl"),
        ("weight_hard_loss", r"Here: hard_weight"),
        ("distill_alpha", r"soft_weight=alpha, hard_weight=1 - alpha"),
        ("temperatur", r"Did you mean 'temperature'\?"),
    ],
)
def test_names_of_other_libraries_are_answered_with_ours(name: str, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        Distillation(**{name: 1.0})
    with pytest.raises(TypeError, match=message):
        Distillation().replace(**{name: 1.0})


# -- other libraries' settings ---------------------------------------------------------------------------------------

FULL = {"loss_mode": "forward_kl_topk", "topk": None, "loss_max_clamp": None, "log_prob_min_clamp": None}
VERL = {**FULL, "use_policy_gradient": False}

MAPPED: list[tuple[Callable[..., Distillation], dict[str, Any], Distillation]] = [
    (Distillation.from_trl, {}, Distillation(divergence="reverse_kl")),
    (Distillation.from_trl, {"beta": 0.0}, Distillation(divergence="forward_kl")),
    (
        Distillation.from_trl,
        {"beta": 0.3, "temperature": 0.7},
        Distillation(divergence="jsd", mix=0.3, temperature=0.7),
    ),
    (Distillation.from_liger, {}, Distillation(divergence="jsd", mix=0.5, soft_weight=0.5, hard_weight=0.5)),
    (
        Distillation.from_liger,
        {"beta": 1, "weight_hard_loss": 0, "weight_soft_loss": 2.0, "temperature": 3.0},
        Distillation(divergence="reverse_kl", soft_weight=2.0, temperature=3.0),
    ),
    (
        Distillation.from_tunix,
        {},
        Distillation(
            divergence="forward_kl", temperature=2.0, temperature_squared=True, soft_weight=0.5, hard_weight=0.5
        ),
    ),
    (Distillation.from_tunix, {"temperature": 1.0, "alpha": 1.0}, Distillation(divergence="forward_kl")),
    (
        Distillation.from_tunix,
        {"temperature": 1.0, "alpha": 0.0},
        Distillation(divergence="forward_kl", soft_weight=0.0, hard_weight=1.0),
    ),
    (Distillation.from_nemo, {"kl_type": "forward", "topk_logits_k": None}, Distillation(divergence="forward_kl")),
    (Distillation.from_nemo, {"kl_type": "reverse", "topk_logits_k": None}, Distillation(divergence="reverse_kl")),
    (Distillation.from_nemo, {"mixed_kl_weight": 1.0, "topk_logits_k": None}, Distillation(divergence="forward_kl")),
    (Distillation.from_nemo, {"mixed_kl_weight": 0, "topk_logits_k": None}, Distillation(divergence="reverse_kl")),
    (Distillation.from_verl, VERL, Distillation(divergence="forward_kl", count_rows="non_empty")),
    (
        Distillation.from_verl,
        {**VERL, "distillation_loss_coef": 0.2, "loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 9},
        Distillation(
            divergence="forward_kl", soft_weight=0.2, aggregation="dr_grpo", max_length=9, count_rows="non_empty"
        ),
    ),
]


@pytest.mark.parametrize(("read", "given", "expected"), MAPPED)
def test_settings_are_mapped(read: Callable[..., Distillation], given: dict[str, Any], expected: Distillation) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read(**given) == expected
        by_key = {"from_trl": "beta", "from_liger": "weight_soft_loss", "from_tunix": "alpha"}
        library = {"from_trl": settings.TRL, "from_liger": settings.LIGER, "from_tunix": settings.TUNIX}
        if read.__name__ in by_key:  # the same from an object that has them as attributes
            config = types.SimpleNamespace(**{**library[read.__name__].loss, **given})
            assert read(config) == expected
        assert read(dict(given)) == expected


UNMAPPED: list[tuple[Callable[..., Distillation], dict[str, Any], str]] = [
    (Distillation.from_trl, {"beta": 1.2}, r"from_trl: beta=1.2, expected 0 \(forward KL\), 1 \(reverse KL\)"),
    (Distillation.from_trl, {"beta": 0.0005}, r"mix=0.0005 lies within 0.001 of 0"),
    (Distillation.from_liger, {"weight_soft_loss": 0.0, "weight_hard_loss": 0.0}, r"trains nothing"),
    (Distillation.from_tunix, {"alpha": 1.5}, r"from_tunix: alpha=1.5"),
    (Distillation.from_tunix, {"distill_top_k": 5}, r"from_tunix: distill_top_k=5 compares the teacher's likeliest"),
    (Distillation.from_nemo, {}, r"from_nemo: topk_logits_k=64 compares"),
    (Distillation.from_nemo, {"topk_logits_k": None}, r"from_nemo: kl_type='mixed' with mixed_kl_weight=0.5 is a weig"),
    (Distillation.from_nemo, {"topk_logits_k": None, "zero_outside_topk": True}, r"from_nemo: zero_outside_topk=True"),
    (Distillation.from_nemo, {"topk_logits_k": None, "kl_type": "jsd"}, r"from_nemo: kl_type='jsd' is not known"),
    (Distillation.from_verl, {}, r"from_verl: loss_mode='k3' estimates the reverse KL from the sampled token"),
    (Distillation.from_verl, {**VERL, "loss_mode": "full"}, r"from_verl: loss_mode='full' is not known"),
    (Distillation.from_verl, FULL, r"from_verl: use_policy_gradient=True makes the loss a reward"),
    (Distillation.from_verl, {**VERL, "topk": 128}, r"from_verl: topk=128 drops the mass outside"),
    (Distillation.from_verl, {**VERL, "loss_max_clamp": 10.0}, r"from_verl: loss_max_clamp=10.0 has no counterpart"),
    (Distillation.from_verl, {**VERL, "log_prob_min_clamp": -10}, r"from_verl: log_prob_min_clamp=-10 has no counte"),
    (Distillation.from_verl, {**VERL, "loss_agg_mode": "seq-mean-token-sum-norm"}, r"give it as max_length=T"),
]


@pytest.mark.parametrize(("read", "given", "message"), UNMAPPED)
def test_settings_without_a_counterpart_are_refused_by_name(
    read: Callable[..., Distillation], given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read(**given)


BASES: list[tuple[Callable[..., Distillation], settings.Library, dict[str, Any]]] = [
    (Distillation.from_trl, settings.TRL, {}),
    (Distillation.from_liger, settings.LIGER, {}),
    (Distillation.from_tunix, settings.TUNIX, {}),
    (Distillation.from_nemo, settings.NEMO, {"kl_type": "forward", "topk_logits_k": None}),
    (Distillation.from_verl, settings.VERL, VERL),
]
OTHER_VALUE: dict[str, Any] = {
    "kl_type": "reverse", "loss_mode": "k1", "loss_agg_mode": "seq-mean-token-mean", "zero_outside_topk": True,
    "use_task_rewards": False, "use_policy_gradient": True, "topk_logits_k": 8, "topk": 8, "distill_top_k": 8,
}  # fmt: skip


@pytest.mark.parametrize(("read", "library", "base"), BASES)
def test_no_setting_of_a_loss_is_passed_over(
    read: Callable[..., Distillation], library: settings.Library, base: dict[str, Any]
) -> None:
    """Another value of any setting changes the objective, is refused by name, or is warned about by name."""
    if read is Distillation.from_verl:
        base = {**base, "distillation_loss_coef": 0.9}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        before = read(**base)
    for name in library.loss:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                assert read(**{**base, name: OTHER_VALUE.get(name, 0.7)}) != before, name
            except (ValueError, UserWarning) as error:
                assert name in str(error), name  # noqa: PT017


def test_a_gkd_config_samples_at_its_temperature_and_trains_at_one() -> None:
    config = {"beta": 0.5, "lmbda": 1.0, "temperature": 0.9, "seq_kd": False}
    assert Distillation.from_trl(config) == Distillation(divergence="jsd", mix=0.5)
    assert Distillation.from_trl({"beta": 0.5, "temperature": 0.9}) == Distillation(
        divergence="jsd", mix=0.5, temperature=0.9
    )


def test_configs_of_other_losses_are_refused() -> None:
    grpo = types.SimpleNamespace(beta=0.04, temperature=0.9, num_generations=8)
    with pytest.raises(TypeError, match=r"is a config of a policy loss, where beta is the coefficient of a KL"):
        Distillation.from_trl(grpo)
    with pytest.raises(TypeError, match=r"SimpleNamespace has no 'weight_soft_loss'; expected a LigerFusedLinearJSDL"):
        Distillation.from_liger(grpo)
    for read in (Distillation.from_tunix, Distillation.from_nemo, Distillation.from_verl):
        with pytest.raises(TypeError, match=r"SimpleNamespace has no"):
            read(grpo)


def test_unknown_settings_and_those_of_the_trainer() -> None:
    with pytest.raises(TypeError, match=r"from_trl: TRL has no setting 'betta'.*Did you mean 'beta'\?"):
        Distillation.from_trl(betta=0.5)
    with pytest.raises(TypeError, match=r"from_trl: learning_rate does not concern the loss"):
        Distillation.from_trl(learning_rate=1e-6)
    with pytest.raises(TypeError, match=r"ignore_index marks targets: give the loss a mask"):
        Distillation.from_liger(ignore_index=-100)


def test_what_the_library_itself_ignores_is_said() -> None:
    with pytest.warns(UserWarning, match=r"NeMo-RL ignores mixed_kl_weight=0.3 with kl_type='forward'"):
        Distillation.from_nemo(kl_type="forward", mixed_kl_weight=0.3, topk_logits_k=None)
    with pytest.warns(UserWarning, match=r"veRL ignores distillation_loss_coef=0.3 without use_task_rewards=True"):
        Distillation.from_verl(**VERL, use_task_rewards=False, distillation_loss_coef=0.3)
