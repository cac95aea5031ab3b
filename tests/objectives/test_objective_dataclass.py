"""The Objective itself: its choices, its presets, its behaviour as a pytree, and what it refuses."""

from __future__ import annotations

import dataclasses
import pickle
import re
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from logitless import Objective
from logitless.objectives import checks
from logitless.objectives.objective import AGGREGATION_ALIASES, Policy
from logitless.objectives.presets import PRESETS
from loss_cases import POLICY_LEVELS

pytestmark = pytest.mark.quick

STATIC = {f.name for f in dataclasses.fields(Objective) if f.metadata.get("static")}
NUMBERS = [f.name for f in dataclasses.fields(Objective) if f.name not in STATIC]


def test_choices_are_structure_and_numbers_are_leaves() -> None:
    o = Objective(beta=0.04, delta=2.0, temperature=0.9)
    leaves, tree = jax.tree.flatten(o)
    assert len(leaves) == sum(getattr(o, n) is not None for n in NUMBERS)
    assert all(isinstance(leaf, float) for leaf in leaves)
    assert jax.tree.unflatten(tree, leaves) == o
    assert jax.tree.structure(o.replace(beta=1.0, eps_low=0.0)) == tree
    assert jax.tree.structure(o.replace(beta=None)) != tree
    for change in ({"kl": "k1"}, {"aggregation": "dapo"}, {"level": "sequence"}, {"kl_bias_correction": True}):
        assert jax.tree.structure(o.replace(**change)) != tree


def test_leaves_have_names() -> None:
    paths = {jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(Objective(beta=0.1))}
    assert {".beta", ".eps_low", ".eps_high"} <= paths


def test_it_is_frozen_comparable_hashable_and_pickles() -> None:
    o = Objective.preset("verl", beta=0.1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        o.beta = 0.2  # type: ignore[misc]
    assert o == Objective.preset("verl", beta=0.1) != Objective.preset("verl", beta=0.2)
    assert hash(o) == hash(Objective.preset("verl", beta=0.1))
    assert pickle.loads(pickle.dumps(o)) == o
    with pytest.raises(TypeError):
        Objective("clip")  # type: ignore[call-arg,misc]


def test_transformations_rebuild_it_without_running_its_checks() -> None:
    """Placeholders, tracers and gradients stand where numbers were."""
    o = Objective(beta=0.5)
    assert jax.tree.map(lambda _: None, o).eps_low is None
    assert jax.tree.map(lambda x: "anything", o).beta == "anything"
    gradient = jax.grad(lambda p: p.beta**2 + p.eps_low)(o)
    assert isinstance(gradient, Objective) and float(gradient.beta) == 1.0 and float(gradient.eps_high) == 0.0
    doubled = jax.jit(lambda p: jax.tree.map(lambda x: 2 * x, p))(o)
    assert float(doubled.beta) == 1.0 and doubled.kl == "k3"


def test_numbers_become_floats_so_that_their_type_never_recompiles() -> None:
    o = Objective(delta=2, dual_clip=np.int32(3), eps_low=np.float32(0.2), temperature=np.float64(0.9))
    assert [type(getattr(o, n)) for n in ("delta", "dual_clip", "eps_low", "temperature")] == [float] * 4
    assert o.eps_low == float(np.float32(0.2))  # its exact value
    kept = jnp.float32(0.2)
    assert Objective(eps_low=kept).eps_low is kept


def test_replace_checks_again() -> None:
    o = Objective()
    assert o.replace(beta=0.1).beta == 0.1 and o.beta is None
    with pytest.raises(ValueError, match="max_length"):
        o.replace(aggregation="dr_grpo")
    with pytest.raises(TypeError, match=r"no field 'epsilon_low'. Here: eps_low.*aggregation"):
        o.replace(epsilon_low=0.1)
    with pytest.raises(TypeError, match=r"no field 'eps_lo'. Did you mean 'eps_low'\?.*aggregation"):
        o.replace(eps_lo=0.1)


def test_every_policy_and_level_is_either_legal_or_refused() -> None:
    legal = []
    for policy in get_args(Policy):
        for level in ("token", "sequence", "sequence_token"):
            try:
                Objective(policy=policy, level=level)  # type: ignore[arg-type]
                legal.append((policy, level))
            except ValueError as error:
                assert "level" in str(error) and policy in str(error)  # noqa: PT017  (some of them are legal)
    assert sorted(legal) == sorted(POLICY_LEVELS)


def test_aggregation_names_of_the_peers() -> None:
    assert AGGREGATION_ALIASES == {
        "token-mean": "bnpo",
        "seq-mean-token-mean": "grpo",
        "seq-mean-token-sum": "luspo",
        "seq-mean-token-sum-norm": "dr_grpo",
        "sequence-mean-token-mean": "grpo",
        "sequence-mean-token-scale": "dr_grpo",
        "sequence-mean-token-sum-norm": "luspo",
        "sapo": "grpo",
        "cispo": "dapo",
        "vespo": "dapo",
    }
    for alias, name in AGGREGATION_ALIASES.items():
        length = {"max_length": 4.0} if name == "dr_grpo" else {}
        assert Objective(aggregation=alias, **length) == Objective(aggregation=name, **length)  # type: ignore[arg-type]


COMBINATIONS: list[tuple[dict[str, Any], str]] = [
    ({"policy": "gmpo", "level": "sequence"}, r"policy='gmpo'.*level must be 'token', not 'sequence'"),
    ({"policy": "sapo", "level": "sequence_token"}, r"level='sequence_token'.*policy='clip', not 'sapo'"),
    ({"policy": "reinforce", "level": "sequence"}, r"policy='reinforce' uses no ratio.*level='sequence'"),
    ({"policy": "cispo", "delta": 2.0}, r"delta belongs to policy='clip'.*'cispo'"),
    ({"policy": "sapo", "dual_clip": 3.0}, r"dual_clip belongs to policy='clip'.*'sapo'"),
    ({"aggregation": "dr_grpo"}, r"aggregation='dr_grpo'.*give max_length"),
    ({"max_length": 8.0}, r"max_length belongs to aggregation='dr_grpo'.*'grpo'"),
    ({"correction": "geometric_mask"}, r"correction='geometric_mask' drops.*correction_mode='mask'"),
    ({"policy": "vespo", "correction": "geometric"}, r"policy='vespo'.*correction='geometric'"),
    ({"sequence_log_ratio_max": 10.0}, r"sequence_log_ratio_max bounds the ratio of a sequence.*level='token'"),
    ({"correction_min": 3.0}, r"correction_min=3.0 lies above correction_max=2.0"),
    ({"correction_mode": "mask"}, r"correction_mode='mask' has no effect without correction="),
    (
        {"correction": "token", "correction_mode": "mask", "correction_max": None},
        r"correction_mode='mask' has no effect without correction_min or correction_max",
    ),
]


BAD_VALUES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"policy": "clpi"}, ValueError, r"policy='clpi' is not known; expected one of 'clip'.*Did you mean 'clip'\?"),
    ({"policy": None}, ValueError, r"policy=None is not known; expected one of 'clip'"),
    ({"level": "seq"}, ValueError, r"level='seq' is not known; expected one of 'token', 'sequence'"),
    ({"aggregation": "mean"}, ValueError, r"aggregation='mean' is not known; expected one of 'grpo'"),
    ({"kl": "k4"}, ValueError, r"kl='k4' is not known; expected one of 'k1', 'k2', 'k3', 'k3\+'"),
    ({"kl_bias_correction": "yes"}, ValueError, r"kl_bias_correction='yes' is not known; expected one of False, True"),
    ({"correction": "tokens"}, ValueError, r"correction='tokens' is not known.*Did you mean 'token'"),
    ({"correction_mode": "clip"}, ValueError, r"correction_mode='clip' is not known"),
    ({"cispo_bound": "upper"}, ValueError, r"cispo_bound='upper' is not known"),
    ({"clip_metrics": "verl"}, ValueError, r"clip_metrics='verl' is not known"),
    ({"temperature_on": "probs"}, ValueError, r"temperature_on='probs' is not known"),
    ({"eps_low": -0.1}, ValueError, r"eps_low=-0.1, expected a number >= 0"),
    ({"eps_high": None}, ValueError, r"eps_high=None, expected a number \(its default is 0.2\)"),
    ({"eps_high": "0.2"}, TypeError, r"eps_high='0.2' is a str, expected a number"),
    ({"eps_high": [0.2]}, TypeError, r"eps_high=\[0.2\] is a list, expected a number"),
    ({"beta": True}, TypeError, r"beta=True is a bool, expected a number"),
    ({"beta": 1j}, TypeError, r"beta=1j is a complex, expected a number"),
    ({"eps_low": np.array(True)}, TypeError, r"eps_low=array\(True\) is a ndarray, expected a number"),
    ({"policy": np.zeros(300)}, ValueError, r"policy=ndarray float64\[300\] is not known; expected one of 'clip'"),
    ({"beta": float("nan")}, ValueError, r"beta is NaN"),
    ({"beta": np.float32("nan")}, ValueError, r"beta is NaN"),
    ({"delta": -1}, ValueError, r"delta=-1.0, expected a number >= 0"),
    ({"dual_clip": 1.0}, ValueError, r"dual_clip=1.0, expected a constant above 1"),
    ({"tau_pos": 0.0}, ValueError, r"tau_pos=0.0, expected a number > 0"),
    ({"tau_neg": 0.0}, ValueError, r"tau_neg=0.0, expected a number > 0"),
    ({"temperature": 0}, ValueError, r"temperature=0.0, expected a number > 0"),
    ({"top_entropy": 0.0}, ValueError, r"top_entropy=0.0, expected a fraction in \(0, 1\]"),
    ({"top_entropy": 1.5}, ValueError, r"top_entropy=1.5, expected a fraction in \(0, 1\]"),
    ({"aggregation": "dr_grpo", "max_length": 0}, ValueError, r"max_length=0.0, expected a number > 0"),
]


def test_presets() -> None:
    assert set(PRESETS) == {"trl", "liger", "verl", "tunix", "mllm-jax"}
    for name in PRESETS:
        assert Objective.preset(name, eps_high=0.28, beta=0.01).eps_high == 0.28
        assert Objective.preset(name) == Objective(**PRESETS[name])
    with pytest.raises(ValueError, match=r"Objective.preset: 'tlr' is not known; expected one of trl.*mean 'trl'\?"):
        Objective.preset("tlr")
    with pytest.raises(TypeError, match=r"no field 'epsilon'"):
        Objective.preset("trl", epsilon=0.1)
    with pytest.raises(ValueError, match="delta belongs"):
        Objective.preset("trl", policy="sapo", delta=2.0)


def test_a_preset_serves_other_policies() -> None:
    """veRL's dual clip belongs to its clip loss and steps aside, unless it is asked for."""
    assert Objective.preset("verl").dual_clip == 3.0
    assert Objective.preset("verl", policy="cispo").dual_clip is None
    with pytest.raises(ValueError, match="dual_clip belongs"):
        Objective.preset("verl", policy="cispo", dual_clip=3.0)


def test_coupling_says_why() -> None:
    assert Objective().coupling() is None
    assert Objective(beta=0.1, entropy_coef=0.1, correction="sequence", delta=2.0).coupling() is None
    for fields, word in (
        ({"policy": "vespo"}, "vespo"),
        ({"policy": "gmpo"}, "gmpo"),
        ({"level": "sequence"}, "level='sequence'"),
        ({"level": "sequence_token"}, "level='sequence_token'"),
        ({"off_policy_threshold": 0.1}, "off_policy_threshold"),
        ({"top_entropy": 0.2}, "top_entropy"),
    ):
        reason = Objective(**fields).coupling()  # type: ignore[arg-type]
        assert reason is not None and word in reason


def test_its_repr_shows_what_differs_from_the_defaults() -> None:
    assert repr(Objective()) == "Objective()"
    o = Objective(policy="cispo", eps_high=5, beta=0.0, correction_max=None, kl_bias_correction=True)
    text = "Objective(policy='cispo', kl_bias_correction=True, eps_high=5.0, beta=0.0, correction_max=None)"
    assert repr(o) == text and eval(text) == o
    assert "temperature=Array(0.5" in repr(Objective(temperature=jnp.float32(0.5)))


def test_shortcuts_are_the_objectives_of_their_papers() -> None:
    assert Objective.grpo() == Objective()
    assert Objective.grpo(beta=0.04, eps_high=0.3) == Objective(beta=0.04, eps_high=0.3)
    assert Objective.dapo() == Objective(aggregation="dapo", eps_low=0.2, eps_high=0.28)
    assert Objective.dr_grpo(512) == Objective(aggregation="dr_grpo", max_length=512.0)
    assert Objective.gspo() == Objective(level="sequence", eps_low=3e-4, eps_high=4e-4)
    assert Objective.gspo(level="sequence_token", eps_low=0.1).level == "sequence_token"
    assert Objective.cispo() == Objective(policy="cispo", aggregation="dapo", eps_high=5.0)
    assert Objective.gspo_token() == Objective.gspo(level="sequence_token")
    assert Objective.luspo() == Objective.gspo(aggregation="luspo")
    assert Objective.sapo() == Objective(policy="sapo", tau_pos=1.0, tau_neg=1.05)
    assert Objective.vespo() == Objective(policy="vespo", aggregation="dapo")
    assert Objective.gmpo() == Objective(policy="gmpo", eps_low=0.4, eps_high=0.4)
    assert Objective.bnpo() == Objective.ppo() == Objective(aggregation="bnpo")
    assert Objective.reinforce() == Objective(policy="reinforce")
    assert Objective.rloo() == Objective(policy="reinforce", aggregation="luspo")
    for name in set(checks.ALGORITHMS) - {"drgrpo", "gspo-token", "gpg", "dr_grpo"}:
        assert getattr(Objective, name)(beta=0.5) == getattr(Objective, name)().replace(beta=0.5), name
        with pytest.raises(TypeError, match=r"no field 'epsilon'. Here: eps_low"):
            getattr(Objective, name)(epsilon=0.1)


HINTS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"policy": "gspo"}, ValueError, r"policy='gspo' is not known.*'gspo' is a whole objective: Objective.gspo\(\)"),
    ({"policy": "GRPO"}, ValueError, r"'GRPO' is a whole objective: Objective.grpo\(\)"),
    ({"loss_type": "dapo"}, TypeError, r"no field 'loss_type'. It is TRL's and Liger's: Objective.from_trl\(loss_type"),
    ({"epsilon": 0.2}, TypeError, r"no field 'epsilon'. Here: eps_low, and eps_high"),
    ({"kl_coef": 0.2}, TypeError, r"no field 'kl_coef'. Here: beta."),
    ({"policy": "geo_mean"}, ValueError, r"another library's name: Objective.from_verl\(loss_mode='geo_mean'\)"),
    ({"aggregation": "token_mean"}, ValueError, r"Did you mean 'token-mean', which is 'bnpo' here\?"),
    ({"aggregation": "Sequence-Mean-Token-Mean"}, ValueError, r"'sequence-mean-token-mean', which is 'grpo' here"),
    ({"aggregation": "gspo"}, ValueError, r"'gspo' is a whole objective: Objective.gspo\(\)"),
    ({"aggregation": "DAPO"}, ValueError, r"Did you mean 'dapo'\?"),
    ({"level": "gspo-token"}, ValueError, r"whole objective: Objective.gspo_token\(\)"),
    ({"bta": 0.2}, TypeError, r"no field 'bta'. Did you mean 'beta'\?"),
]


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        *((fields, ValueError, message) for fields, message in COMBINATIONS),
        *BAD_VALUES,
        *((fields, error, f".*{hint}") for fields, error, hint in HINTS),
    ],
    ids=lambda v: str(v) if isinstance(v, dict) else "",
)
def test_refused_by_name(fields: dict[str, Any], error: type[Exception], message: str) -> None:
    """Combinations without meaning; bad values, by field, value and expectation; other libraries' names, with ours."""
    with pytest.raises(error, match=f"^Objective(:| has) {message}"):
        Objective(**fields)


def test_presets_are_found_by_their_name_in_any_case_and_told_from_algorithms() -> None:
    with pytest.raises(ValueError, match=r"'TRL' is not known; expected one of trl,.*Did you mean 'trl'\?"):
        Objective.preset("TRL")
    with pytest.raises(ValueError, match=r"'gspo' is an algorithm and not a library: use Objective.gspo\(\)"):
        Objective.preset("gspo")


def test_every_hint_names_something_that_exists() -> None:
    """The code in a hint runs, and the fields that a hint names are fields."""
    for code in checks.ALGORITHMS.values():
        expression = code.partition(" (")[0].replace("max_length)", "max_length=8)")
        assert isinstance(eval(expression), Objective), code
    fields = {f.name for f in dataclasses.fields(Objective)}
    for name, hint in checks.THEIR_NAMES.items():
        assert name not in fields
        assert any(re.search(rf"\b{field}\b", hint) for field in fields), (name, hint)
