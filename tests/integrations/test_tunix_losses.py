"""Tunix' stock GRPO loss, the same without logits ("thin", ``install``), and the fused one: loss, gradients of every
parameter, metrics; options, models, LoRA, a mesh; and controls that must differ."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("tunix", reason="Tunix is not installed here: make test-tunix")

from flax import nnx
from tunix.rl import algo_core, function_registry

import logitless.integrations.tunix as integration
import tunix_cases as cases

pytestmark = [pytest.mark.tunix, pytest.mark.optimized]

LOSS, GRADIENTS, METRICS, RATIOS = 5e-7, 3.3e-6, 6e-7, 2e-6
"""Bounds: absolute for the loss, relative to an array's largest number, and to 1 or the metric. Ratios are exponentials
of differences of log-probabilities of 4 to 16, whose last digit is 5e-7 to 1e-6."""

WEIGHTS = jnp.asarray(np.random.default_rng(2).uniform(0.2, 2.0, (cases.B, cases.T)), jnp.float32)
FAR = -60.0 * jnp.ones((cases.B, cases.T))
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "defaults": ({}, {}),
    "on-policy": ({}, {"old": False}),
    "temperature 0.7": ({"temperature": 0.7}, {}),
    "temperature 0 means 1": ({"temperature": 0.0}, {}),
    "no KL": ({"beta": 0.0}, {"ref_per_token_logps": None}),
    "a reference without KL": ({"beta": 0.0}, {}),
    "mse_kl": ({"kl_loss_mode": "mse_kl"}, {}),
    "low_var_kl, clamped": ({"kl_loss_mode": "low_var_kl", "kl_clamp_value": 0.5}, {}),
    "epsilon_high": ({"epsilon_high": 0.6}, {}),
    "dual clip": ({"epsilon_c": 1.5}, {}),
    "token-mean": ({"loss_agg_mode": "token-mean"}, {}),
    "sequence-mean-token-scale": ({"loss_agg_mode": "sequence-mean-token-scale"}, {}),
    "seq-mean-token-sum": ({"loss_agg_mode": "seq-mean-token-sum"}, {}),
    "sequence-mean-token-sum-norm": ({"loss_agg_mode": "sequence-mean-token-sum-norm"}, {}),
    "gspo-token": ({"loss_algo": "gspo-token"}, {}),
    "sampler weights": ({}, {"sampler_is_weights": WEIGHTS}),
    "log-ratios beyond the clamp": ({}, {"old_per_token_logps": FAR}),
    "gspo-token beyond its bound": ({"loss_algo": "gspo-token"}, {"old_per_token_logps": FAR}),
    "packed": ({}, {"packed": True}),
    "packed, gspo-token, token-mean": ({"loss_algo": "gspo-token", "loss_agg_mode": "token-mean"}, {"packed": True}),
}


def fused() -> Any:
    integration.register()
    return function_registry.get_policy_loss_fn("logitless")


def all_three(made: Any, batch: Any, settings: Any, lora: bool = False) -> Any:
    stock = cases.run(algo_core.grpo_loss_fn, made, batch, settings, lora)
    with integration.install():
        thin = cases.run(algo_core.grpo_loss_fn, made, batch, settings, lora)
    return stock, thin, cases.run(fused(), made, batch, settings, lora)


def assert_same(stock: Any, ours: Any) -> None:
    (loss, aux), gradients = stock
    (our_loss, our_aux), our_gradients = ours
    assert abs(float(loss) - float(our_loss)) <= LOSS * max(1.0, abs(float(loss)))
    assert our_aux.keys() == aux.keys() and len(aux) >= 18
    for name, value in aux.items():
        bound = RATIOS if name.startswith("is_ratio/") else METRICS
        np.testing.assert_allclose(our_aux[name], value, rtol=bound, atol=bound, err_msg=name)
    assert cases.relative(gradients, our_gradients) <= GRADIENTS


@pytest.mark.parametrize("name", list(VARIANTS))
def test_options(name: str) -> None:
    settings, batch = VARIANTS[name]
    stock, thin, fast = all_three(cases.model("qwen2"), cases.example(**batch), cases.config(**settings))
    assert_same(stock, thin)
    assert_same(stock, fast)
    assert cases.relative(stock[1], jax.tree.map(np.zeros_like, stock[1])) == 1  # there are gradients


@pytest.mark.parametrize("name", [n for n in cases.MODELS if n != "qwen2"])
def test_models(name: str) -> None:
    stock, thin, fast = all_three(cases.model(name), cases.example(), cases.config(temperature=0.9))
    assert_same(stock, thin)
    assert_same(stock, fast)


LORA_ON_HEAD = ".*(q_proj|lm_head).*"


@pytest.mark.parametrize("name, where", [("qwen2", ".*q_proj.*"), ("qwen2 untied", LORA_ON_HEAD)])
def test_lora(name: str, where: str) -> None:
    made = cases.with_lora(cases.MODELS[name](), where)
    stock, thin, fast = all_three(made, cases.example(), cases.config(), lora=True)
    assert_same(stock, thin)
    assert_same(stock, fast)
    if "lm_head" in where:
        other = cases.with_lora(cases.MODELS[name](), where, alpha=7.0)
        assert abs(float(stock[0][0] - cases.run(fused(), other, cases.example(), cases.config(), True)[0][0])) > 1e-4


@pytest.mark.parametrize("name, where", [("qwen2", None), ("qwen2 untied", LORA_ON_HEAD)])
@pytest.mark.filterwarnings("ignore:`with mesh.*:DeprecationWarning")
def test_over_a_mesh(name: str, where: str | None) -> None:
    """fsdp 2 x tp 2: the head is cut, and found cut."""
    made = cases.MODELS[name]() if where is None else cases.with_lora(cases.MODELS[name](), where)
    batch, settings = cases.example(), cases.config()
    stock = cases.run(algo_core.grpo_loss_fn, made, batch, settings, where is not None)
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    with jax.sharding.Mesh(devices, ("fsdp", "tp")), integration.install():
        assert_same(stock, cases.run(algo_core.grpo_loss_fn, made, batch, settings, where is not None))
        assert_same(stock, cases.run(fused(), made, batch, settings, where is not None))
        graphdef, state = nnx.split(made)
        from tunix.rl import common

        arguments = (graphdef, state, batch.prompt_ids, batch.completion_ids, cases.PAD, cases.EOS)
        text = common.compute_per_token_logps.lower(*arguments).compile().as_text()
        assert "all-reduce" in text  # the vocabulary is cut over tp


def test_reference_pass_masks_no_live_token() -> None:
    """Where pad is the end token, the first one behind a completion may be live; all before it are computed."""
    from tunix.rl import common

    made, batch = cases.model("qwen2"), cases.example()
    graphdef, state = nnx.split(made)
    arguments = (graphdef, state, batch.prompt_ids, batch.completion_ids, cases.PAD, cases.EOS)
    stock = common.compute_per_token_logps(*arguments)
    with integration.install():
        ours = common.compute_per_token_logps(*arguments)
    length = np.asarray(batch.completion_mask).sum(1)
    live = np.arange(cases.T) <= length[:, None]
    np.testing.assert_allclose(ours[live], stock[live], atol=2e-6)
    assert not np.asarray(ours)[~live].any() and np.asarray(stock)[~live].all()


def test_controls_differ() -> None:
    """What would pass if a setting did not reach the loss."""
    made = cases.model("qwen2")
    base = cases.run(fused(), made, cases.example(), cases.config())
    for settings in ({"beta": 0.2}, {"temperature": 0.7}, {"kl_loss_mode": "mse_kl"}, {"loss_agg_mode": "token-mean"},
                     {"loss_algo": "gspo-token"}, {"epsilon": 0.9}):  # fmt: skip
        other = cases.run(fused(), made, cases.example(), cases.config(**settings))
        assert cases.relative(base[1], other[1]) > 1e-3, settings


# -- what is refused, and what is put back ---------------------------------------------------------------------------


def test_install_is_undone() -> None:
    from tunix.rl import common

    before = common.compute_per_token_logps, algo_core.compute_entropy_from_logits
    with integration.install() as first:
        with integration.install():  # does nothing, so leaving it does nothing
            pass
        assert common.compute_per_token_logps is not before[0] and "active=True" in repr(first)
    assert (common.compute_per_token_logps, algo_core.compute_entropy_from_logits) == before


def test_a_changed_tunix_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from tunix.rl import common

    monkeypatch.setattr(common, "compute_per_token_logps", lambda graphdef, state, tokens: None)
    with pytest.raises(integration.TunixChanged, match=r"compute_per_token_logps .* is \(graphdef, state, tokens\)"):
        integration.install()
    monkeypatch.undo()
    monkeypatch.setattr(algo_core, "grpo_loss_fn", functools.partial(algo_core.grpo_loss_fn))
    with pytest.raises(integration.TunixChanged, match=r"grpo_loss_fn .* without"):
        integration.install()


def _named(module: str, base: type = object) -> Any:
    made = type("Policy", (base,), {"__call__": lambda self, *_: None})
    made.__module__ = module
    return made


@pytest.mark.parametrize(
    "module, why",
    [
        ("maxtext.integration.tunix.tunix_adapter", "takes no skip_lm_head="),
        ("my.models", "not known here; qwen2, qwen3"),
        ("tunix.models.gemma4.model", "not known here"),
    ],
)
def test_other_models_are_refused_by_name(module: str, why: str) -> None:
    from logitless.integrations.tunix.tunix_model import split

    with pytest.raises(NotImplementedError, match=rf"{module}.Policy: .*{why}"):
        split(_named(module)())


def test_a_call_of_its_own_is_refused() -> None:
    from logitless.integrations.tunix.tunix_model import take_head

    made = cases.MODELS["qwen2"]()
    object.__setattr__(made, "__class__", _named("my.models", type(made)))
    with pytest.raises(NotImplementedError, match="has a __call__ of its own, not that of Qwen2"):
        take_head(made)


@pytest.mark.parametrize(
    "name, rule, why",
    [
        ("qwen2 untied", {"where": ".*lm_head.*", "weight_qtype": "int8"}, "quantised"),
        ("qwen2 untied", {"where": ".*lm_head.*", "dropout": 0.1}, "dropout=0.1"),
    ],
)
def test_heads_that_are_not_served(name: str, rule: dict[str, Any], why: str) -> None:
    from logitless.integrations.tunix.tunix_model import take_head

    if "dropout" in rule:
        made = cases.with_lora(cases.MODELS[name](), rule["where"])
        import dataclasses

        from logitless.integrations.tunix.tunix_model import _provider

        provider = _provider(type(made).__call__)
        provider._rules = [dataclasses.replace(r, dropout=0.1) for r in provider._rules]
    else:
        made = cases.with_lora(cases.MODELS[name](), **rule)
    with pytest.raises(NotImplementedError, match=why):
        take_head(made)
