"""MaxText's models behind the Tunix adapter of #5301, by a fake of its shape: log-probabilities and gradients against
the adapter's own logits, and through Tunix' loss; what is refused."""

from __future__ import annotations

import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax", reason="flax is not installed here: make install")

from flax import nnx

import fake_maxtext as fake
import logitless
from logitless.integrations.tunix.tunix_model import without_head

IDS = jnp.asarray(np.random.default_rng(5).integers(2, 96, (3, 9)), jnp.int32)
TARGETS, MASK = logitless.next_tokens(IDS)
WEIGHTS = jnp.asarray(np.random.default_rng(6).normal(size=IDS.shape), jnp.float32)


def stock(model: Any) -> Any:
    logits, _ = model(IDS, None, None, None)
    return jnp.sum(jnp.where(MASK, WEIGHTS * logitless.logprobs(logits, TARGETS, mask=MASK).logp, 0.0))


def ours(model: Any, norm: bool = True) -> Any:
    body, head = without_head(model)
    hidden, _ = body(IDS, None, None, None)
    if not norm:
        hidden = model(IDS, None, None, None, skip_lm_head=True)[0]
    stats = logitless.linear_logprobs(**head.arguments(hidden), targets=TARGETS, mask=MASK)
    return jnp.sum(jnp.where(MASK, WEIGHTS * stats.logp, 0.0))


def relative(a: Any, b: Any) -> float:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(float(jnp.abs(x - y).max() / jnp.abs(x).max()) for x, y in pairs)


@pytest.mark.parametrize("name", list(fake.HEADS))
def test_the_adapters_own_logits(name: str) -> None:
    model = fake.adapter(name)
    value, gradients = nnx.jit(nnx.value_and_grad(stock))(model)
    found, own = nnx.jit(nnx.value_and_grad(ours))(model)
    assert abs(float(value) - float(found)) < 2e-5
    assert relative(gradients, own) < 3e-6 and len(jax.tree.leaves(own)) >= 3
    assert abs(float(ours(model, norm=False)) - float(value)) > 0.1  # the control: a norm that is left out is seen


def test_bfloat16_is_multiplied_as_there() -> None:
    """Hidden states and weights in bfloat16; with ``logits_dot_in_fp32`` a dense head multiplies in float32."""
    kinds = {}
    for name in fake.HEADS:
        body, head = without_head(fake.adapter(name, dtype=jnp.bfloat16))
        call = head.arguments(body(IDS, None, None, None)[0])
        kinds[name] = (call["hidden"].dtype.name, call["lm_head"].weight.dtype.name)
    assert kinds.pop("logits_dense in float32") == ("float32", "float32")
    assert set(kinds.values()) == {("bfloat16", "bfloat16")}


@pytest.mark.parametrize(
    "change, why",
    [
        (lambda m: fake.ReleasedAdapter(m.base), r"ReleasedAdapter: .* takes no skip_lm_head="),
        (
            lambda m: setattr(m.base.decoder.logits_dense, "kernel_lora_a", nnx.Param(jnp.ones(1))) or m,
            "LoRA on decoder",
        ),
        (lambda m: fake.adapter(shard_mode="explicit"), "shard_mode=explicit"),
        (lambda m: fake.adapter(parameter_memory_host_offload=True), "parameter_memory_host_offload"),
        (lambda m: delattr(m.base.decoder, "decoder_norm") or m, "without decoder_norm"),
    ],
    ids=["no skip_lm_head", "LoRA", "explicit", "offload", "Linen"],
)
def test_what_is_refused(change: Any, why: str) -> None:
    with pytest.raises(NotImplementedError, match=why):
        without_head(change(fake.adapter()))


@pytest.mark.tunix
@pytest.mark.parametrize("name", list(fake.HEADS))
def test_through_tunix(name: str) -> None:
    """Tunix' own GRPO loss over the adapter, stock, without logits and fused; and its fine-tuning loss."""
    if importlib.util.find_spec("tunix") is None:
        pytest.skip("Tunix is not installed here: make test-tunix")
    from tunix.rl import algo_core, function_registry

    import logitless.integrations.tunix as integration
    import tunix_cases as cases

    made, batch, settings = fake.adapter(name), cases.example(), cases.config()
    (loss, _), gradients = cases.run(algo_core.grpo_loss_fn, made, batch, settings)
    with integration.install():
        fused = function_registry.get_policy_loss_fn("logitless")
        for policy_loss in (algo_core.grpo_loss_fn, fused):
            (found, _), own = cases.run(policy_loss, made, batch, settings)
            assert abs(float(found) - float(loss)) < 1e-6
            assert cases.relative(gradients, own) < 4e-6
