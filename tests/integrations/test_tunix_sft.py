"""Tunix' supervised fine-tuning, DPO, ORPO and distillation: stock and without logits, losses and gradients; one step
of its trainers; what is refused; and what a stock compilation leaves behind."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("tunix", reason="Tunix is not installed here: make test-tunix")

import optax
from flax import nnx
from tunix.distillation import distillation_trainer
from tunix.distillation.strategies import logit
from tunix.rl import common
from tunix.sft import peft_trainer
from tunix.sft import utils as sft_utils
from tunix.sft.dpo import dpo_trainer

import logitless.integrations.tunix as integration
import tunix_cases as cases
from loading import loaded
from logitless import Distillation
from logitless.integrations.tunix.distillation import DistillationStrategy

pytestmark = [pytest.mark.tunix, pytest.mark.optimized]

LOSS, GRADIENTS, ODDS = 5e-7, 3.3e-6, 2e-5
"""Bounds of test_tunix_losses.py: the loss absolute, gradients relative to an array's largest number. A ratio of odds
is the exponential of a difference of two sums of about 40, whose last digit is 4e-6."""
MODELS = ["qwen2", "qwen2 untied", "gemma2"]


def assert_same(a: Any, b: Any) -> None:
    """Loss, metrics where there are any, and gradients."""
    (loss, gradients), (our_loss, our_gradients) = a, b
    for (path, x), y in zip(jax.tree.leaves_with_path(loss), jax.tree.leaves(our_loss), strict=True):
        rtol = ODDS if "odds_ratio" in str(path) else 3e-6
        np.testing.assert_allclose(y, x, rtol=rtol, atol=LOSS, err_msg=str(path))
    assert cases.relative(gradients, our_gradients) <= GRADIENTS
    assert max(float(np.abs(g).max()) for g in jax.tree.leaves(gradients)) > 1e-4  # there are gradients


def batch() -> dict[str, Any]:
    """Rows of several lengths; the mask leaves out prompts and padding."""
    rng = np.random.default_rng(3)
    lengths = np.array([9, 12, 5, 12])
    real = np.arange(12) < lengths[:, None]
    ids = jnp.asarray(np.where(real, rng.integers(2, cases.V, (4, 12)), cases.PAD), jnp.int32)
    return {
        "input_tokens": ids,
        "input_mask": jnp.asarray(real & (np.arange(12) >= 3)),
        "positions": sft_utils.build_positions_from_mask(jnp.asarray(real)),
        "attention_mask": sft_utils.make_causal_attn_mask(jnp.asarray(real)),
    }


# -- supervised fine-tuning ------------------------------------------------------------------------------------------


def sft(made: Any, given: dict[str, Any]) -> Any:
    """``(loss, gradients)`` of Tunix' own loss as it stands now."""

    def of_model(m: Any, x: dict[str, Any]) -> Any:
        out = peft_trainer._default_loss_fn(m, **x)
        return out.primary_loss.compute() if hasattr(out, "primary_loss") else out

    return jax.device_get(nnx.jit(nnx.value_and_grad(of_model))(made, given))


@pytest.mark.parametrize("name", MODELS)
def test_fine_tuning(name: str) -> None:
    made = cases.model(name)
    stock = sft(made, batch())
    with integration.install():
        assert_same(stock, sft(made, batch()))


def test_fine_tuning_with_weights_and_an_empty_mask() -> None:
    """A mask of numbers weighs tokens, as it does in Tunix."""
    made, given = cases.model("qwen2"), batch()
    weighed = dict(given, input_mask=given["input_mask"] * jnp.linspace(0.2, 2.0, 12))
    empty = dict(given, input_mask=jnp.zeros_like(given["input_mask"]))
    stock = sft(made, weighed)
    with integration.install():
        assert_same(stock, sft(made, weighed))
        loss, gradients = sft(made, empty)
    assert loss == 0 and not any(np.any(g) for g in jax.tree.leaves(gradients))
    assert abs(float(stock[0]) - float(sft(made, given)[0])) > 1e-2


def trained(tmp_path: Any, ours: bool) -> tuple[Any, Any]:
    """A model after two steps of Tunix' trainer, and its losses."""
    made = cases.softened(cases.MODELS["qwen2"]())
    losses = []

    def run() -> None:
        trainer = peft_trainer.PeftTrainer(made, optax.sgd(0.1), peft_trainer.TrainingConfig(eval_every_n_steps=9))
        trainer = trainer.with_gen_model_input_fn(lambda x: batch())
        trainer._post_process_train_step = lambda aux: losses.append(float(trainer._buffered_train_metrics.loss))
        given = batch()
        one = peft_trainer.TrainingInput(input_tokens=given["input_tokens"], input_mask=given["input_mask"])
        trainer.train([one, one])

    if ours:
        with integration.install():
            run()
    else:
        run()
    return jax.device_get(nnx.state(made, nnx.Param)), losses


def test_its_trainer_trains(tmp_path: Any) -> None:
    (stock, losses), (ours, our_losses) = trained(tmp_path, False), trained(tmp_path, True)
    np.testing.assert_allclose(our_losses, losses, atol=LOSS)
    assert len(losses) == 2 and losses[1] < losses[0]
    assert cases.relative(stock, ours) <= GRADIENTS


@pytest.mark.filterwarnings("ignore:`with mesh.*:DeprecationWarning")
def test_over_a_mesh() -> None:
    """fsdp 2 x tp 2: fine-tuning, DPO and distillation, where the vocabulary of both heads is cut over tp."""
    made, teacher, given, pairs = cases.model("qwen2"), cases.model("qwen2 untied"), unmasked(), preferences(True)
    settings = {"temperature": 2.0, "alpha": 0.5}
    stock = [
        sft(made, given),
        dpo(made, pairs),
        distilled(logit.LogitStrategy(forward, forward, one_hot, **settings), made, teacher, given),
    ]
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("fsdp", "tp"))
    with mesh, integration.install():
        ours = [
            sft(made, given),
            dpo(made, pairs),
            distilled(DistillationStrategy(forward, forward, ids, **settings), made, teacher, given),
        ]
        text = nnx.jit(lambda m, x: peft_trainer._default_loss_fn(m, **x)).lower(made, given).compile().as_text()
    for a, b in zip(stock, ours, strict=True):
        assert_same(a, b)
    assert "all-reduce" in text


# -- DPO and ORPO ----------------------------------------------------------------------------------------------------


def preferences(reference: bool) -> Any:
    given = batch()
    mask = given["input_tokens"][:, 4:] != cases.PAD
    return dpo_trainer.TrainExample(
        input_ids=given["input_tokens"], positions=given["positions"], attention_mask=given["attention_mask"],
        ref_chosen_logps=jnp.array([-30.0, -20.0]) if reference else None,
        ref_rejected_logps=jnp.array([-25.0, -33.0]) if reference else None,
        completion_mask=mask, logits_to_keep=mask.shape[1],
    )  # fmt: skip


def dpo(made: Any, example: Any, **settings: Any) -> Any:
    def of_model(m: Any, x: Any) -> Any:
        x = x.replace(logits_to_keep=example.logits_to_keep)
        out = dpo_trainer.dpo_loss_fn(m, x, **settings)
        return out if isinstance(out, tuple) else (out.primary_loss.compute(), out.aux_metrics)

    step = nnx.jit(nnx.value_and_grad(of_model, has_aux=True))
    return jax.device_get(step(made, example.replace(logits_to_keep=None)))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("settings", [{"algorithm": "dpo", "label_smoothing": 0.1}, {"algorithm": "orpo"}], ids=str)
def test_preferences(name: str, settings: dict[str, Any]) -> None:
    """With a reference for DPO; one shape for both, so that a program of the stock call must be forgotten."""
    made, example = cases.model(name), preferences(settings["algorithm"] == "dpo")
    stock = dpo(made, example, **settings)
    with integration.install():
        ours = dpo(made, example, **settings)
    assert_same(stock, ours)
    again = dpo(made, example, **settings)
    jax.tree.map(np.testing.assert_array_equal, again, stock)


def test_padding_of_preferences_is_not_computed() -> None:
    made, example = cases.model("qwen2"), preferences(False)
    arguments = (made, example.input_ids, example.positions, example.attention_mask, example.logits_to_keep)
    stock = np.asarray(common.get_per_token_logps(*arguments))
    with integration.install():
        ours = np.asarray(common.get_per_token_logps(*arguments))
    live = np.asarray(example.completion_mask)
    np.testing.assert_allclose(ours[live], stock[live], atol=2e-6)
    assert not ours[~live].any() and stock[~live].all()


def test_what_stood_there_is_put_back() -> None:
    before = common.get_per_token_logps, peft_trainer._default_loss_fn
    with integration.install():
        assert all(
            a is not b for a, b in zip(before, (common.get_per_token_logps, peft_trainer._default_loss_fn), strict=True)
        )
    assert (common.get_per_token_logps, peft_trainer._default_loss_fn) == before


@pytest.mark.parametrize(
    "module, name, message",
    [
        (peft_trainer, "_default_loss_fn", r"_default_loss_fn .* is \(model, batch\)"),
        (common, "get_per_token_logps", r"get_per_token_logps .* is \(model, batch\)"),
        (dpo_trainer, "compute_logps", r"compute_logps .* without common, get_per_token_logps"),
    ],
)
def test_a_changed_tunix_is_refused(module: Any, name: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, name, lambda model, batch: None)
    with pytest.raises(integration.TunixChanged, match=message):
        integration.install()


def test_a_tunix_without_dpo_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tunix.sft.dpo.dpo_trainer", None)
    with pytest.raises(integration.TunixChanged, match=r"dpo_trainer of the Tunix .* is not there"):
        integration.install()


# -- distillation ----------------------------------------------------------------------------------------------------


def forward(model: Any, input_tokens: Any, input_mask: Any, positions: Any, attention_mask: Any) -> Any:
    """As Tunix' own example has it."""
    logits, _ = model(input_tokens, positions, None, attention_mask)
    return logits[:, :-1, :]


def one_hot(input_tokens: Any, input_mask: Any, **_: Any) -> Any:
    labels = jax.nn.one_hot(input_tokens[:, 1:], cases.V)
    return labels * input_mask[:, 1:].astype(labels.dtype)[..., None]


def ids(input_tokens: Any, input_mask: Any, **_: Any) -> Any:
    return input_tokens[:, 1:], input_mask[:, 1:]


def distilled(strategy: Any, student: Any, teacher: Any, given: dict[str, Any]) -> Any:
    """``((loss, metrics), gradients)`` of a step as Tunix' trainer takes it."""
    outputs = strategy.get_teacher_outputs(teacher, given)
    step = nnx.jit(nnx.value_and_grad(lambda m, t, x: strategy.get_train_loss(m, t, x), has_aux=True))
    return jax.device_get(step(student, outputs, given))


def unmasked() -> dict[str, Any]:
    given = batch()
    return dict(given, input_mask=jnp.ones_like(given["input_mask"]))


@pytest.mark.parametrize("temperature, alpha", [(2.0, 0.5), (1.0, 0.7), (3.0, 0.0)])
@pytest.mark.parametrize("student, teacher", [("qwen2", "gemma2"), ("qwen2 untied", "qwen2")])
def test_distillation_is_logit_strategy_where_no_token_is_masked(
    student: str, teacher: str, temperature: float, alpha: float
) -> None:
    given, pair = unmasked(), (cases.model(student), cases.model(teacher))
    settings = {"temperature": temperature, "alpha": alpha}
    stock = distilled(logit.LogitStrategy(forward, forward, one_hot, **settings), *pair, given)
    ours = distilled(DistillationStrategy(forward, forward, ids, **settings), *pair, given)
    assert stock[0][1].keys() == ours[0][1].keys()
    assert_same(stock, ours)


def test_stock_divides_by_padding_and_we_do_not() -> None:
    """Its known fault: masked positions count in both means, and their divergence is in the loss."""
    given, pair, settings = batch(), (cases.model("qwen2"), cases.model("gemma2")), {"temperature": 2.0, "alpha": 0.5}
    (theirs, found), _ = distilled(logit.LogitStrategy(forward, forward, one_hot, **settings), *pair, given)
    (loss, metrics), gradients = distilled(DistillationStrategy(forward, forward, ids, **settings), *pair, given)
    live, total = int(given["input_mask"][:, 1:].sum()), given["input_mask"][:, 1:].size
    assert abs(float(theirs) - float(loss)) > 0.1 * float(loss)
    np.testing.assert_allclose(found["distill/hard_loss"], metrics["distill/hard_loss"] * live / total, rtol=1e-5)
    # Its soft part is that of every position, whatever the mask says.
    (_, everything), _ = distilled(DistillationStrategy(forward, forward, ids, **settings), *pair, unmasked())
    np.testing.assert_allclose(found["distill/soft_loss"], everything["distill/soft_loss"], rtol=1e-5)
    assert max(float(np.abs(g).max()) for g in jax.tree.leaves(gradients)) > 1e-4


def test_other_divergences_and_the_teacher_has_no_gradient() -> None:
    """A student that is its teacher has no loss and no gradient."""
    made, given = cases.model("qwen2"), batch()
    strategy = DistillationStrategy(forward, forward, ids, Distillation(divergence="reverse_kl"))
    (loss, _), gradients = distilled(strategy, made, made, given)
    assert abs(loss) < 1e-10  # the two models run in programs of their own, which round differently
    assert max(float(np.abs(g).max()) for g in jax.tree.leaves(gradients)) < 1e-6


def test_its_distillation_trainer_trains() -> None:
    losses = []
    student, teacher, given = cases.softened(cases.MODELS["qwen2"]()), cases.model("gemma2"), batch()
    strategy = DistillationStrategy(forward, forward, ids, temperature=2.0, alpha=0.5)
    config = distillation_trainer.TrainingConfig(eval_every_n_steps=2)
    trainer = distillation_trainer.DistillationTrainer(student, teacher, strategy, optax.sgd(0.01), config)
    trainer = trainer.with_gen_model_input_fn(lambda x: given)
    trainer._post_process_train_step = lambda aux: losses.append(float(aux["distill/soft_loss"]))
    one = distillation_trainer.TrainingInput(input_tokens=given["input_tokens"], input_mask=given["input_mask"])
    trainer.train([one] * 4, [one])
    assert len(losses) == 4 and losses[-1] < losses[0]


@pytest.mark.parametrize("what", ["sft", "distillation"])
def test_memory_at_a_large_vocabulary(what: str) -> None:
    """XLA's temporaries of a step at V = 151,936, bfloat16, without running it."""
    memory = loaded(Path(__file__).parents[2] / "benchmarks" / "tunix_memory.py")
    found = memory.temporaries("bfloat16", what)
    assert found["stock"] > 4000 and found["install()"] <= 0.1 * found["stock"]


def test_distillation_refuses_by_name() -> None:
    given, made = batch(), cases.model("qwen2")
    strategy = DistillationStrategy(forward, forward, one_hot)
    with pytest.raises(ValueError, match=r"labels of shape \(4, 11, 96\).* One-hot labels"):
        distilled(strategy, made, made, given)
    summed = DistillationStrategy(lambda m, **x: forward(m, **x).sum(-1), forward, ids)
    with pytest.raises(ValueError, match=r"the forward function returned an array of shape \(4, 11\)"):
        distilled(summed, made, made, given)
    with pytest.raises(ValueError, match="distill_top_k=5"):
        DistillationStrategy(forward, forward, ids, distill_top_k=5)
    with pytest.raises(TypeError, match="distillation= and alpha were both given"):
        DistillationStrategy(forward, forward, ids, Distillation(), alpha=0.5)


def test_a_changed_strategy_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from tunix.distillation.strategies import base_strategy

    monkeypatch.setattr(base_strategy.BaseStrategy, "get_train_loss", lambda self, model, batch: None)
    with pytest.raises(integration.TunixChanged, match=r"BaseStrategy\.get_train_loss"):
        DistillationStrategy(forward, forward, ids)
