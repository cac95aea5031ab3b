"""Bad input: an error before anything is compiled, that names the call, the argument, what came and what was expected.

Every case is run twice, eagerly and while tracing (``jax.eval_shape``: nothing is compiled), where a trainer meets it.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flat_calls
import logitless
from interpreted import by_numpy, in_numpy
from logitless import Objective
from logitless.objectives import checks
from loss_cases import token_stats, without_metrics

pytestmark = pytest.mark.quick

B, T, V, H = 2, 3, 7, 4
TOKENS = np.zeros((B, T), np.float32)
TARGETS = np.zeros((B, T), np.int32)
LOSS = {"advantages": np.ones(B, np.float32)}
LOGITS = {"logits": np.zeros((B, T, V), np.float32), "targets": TARGETS}
HEAD = {"hidden": np.zeros((B, T, H), np.float32), "lm_head": np.zeros((V, H), np.float32), "targets": TARGETS}
GOOD: dict[str, dict[str, Any]] = {
    "logprobs": LOGITS,
    "linear_logprobs": HEAD,
    "grpo_loss": {**LOGITS, **LOSS},
    "linear_grpo_loss": {**HEAD, **LOSS},
    "policy_loss": {"stats": token_stats(TOKENS, TOKENS), **LOSS},
}
LOSSES = ("grpo_loss", "linear_grpo_loss", "policy_loss")
ON_LOGITS = ("logprobs", "grpo_loss")
ON_HEAD = ("linear_logprobs", "linear_grpo_loss")
STATS = ("logprobs", "linear_logprobs")
FOUR = ON_LOGITS + ON_HEAD
ALL = (*FOUR, "policy_loss")

Case = tuple[tuple[str, ...], dict[str, Any], type[Exception], tuple[str, ...]]


def zeros(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


CASES: list[Case] = [
    # -- rank and shape
    (("logprobs",), {"logits": zeros(V)}, ValueError, ("logits has shape (7,)", "expected [..., V]")),
    (("grpo_loss",), {"logits": zeros(6, V)}, ValueError, ("logits has shape (6, 7)", "expected [B, T, V]")),
    (("linear_logprobs",), {"hidden": zeros(H)}, ValueError, ("hidden has shape (4,)", "expected [..., H]")),
    (("linear_grpo_loss",), {"hidden": zeros(6, H)}, ValueError, ("hidden has shape (6, 4)", "expected [B, T, H]")),
    (("policy_loss",), {"stats": token_stats(zeros(3), zeros(3))}, ValueError, ("stats.logp has shape (3,)", "[B, T]")),
    (("policy_loss",), {"stats": token_stats(zeros(B, T), zeros(B, 2))}, ValueError,
     ("stats.entropy has shape (2, 2)", "expected (2, 3)")),
    (FOUR, {"targets": zeros(B, 2, dtype=np.int32)}, ValueError, ("targets has shape (2, 2)", "expected (2, 3)")),
    (ALL, {"mask": zeros(B)}, ValueError, ("mask has shape (2,)", "expected (2, 3)")),
    (LOSSES, {"advantages": zeros(3)}, ValueError,
     ("advantages has shape (3,)", "[B] = (2,), [B, 1] = (2, 1) or [B, T] = (2, 3)")),
    (LOSSES, {"advantages": zeros(1, T)}, ValueError, ("advantages has shape (1, 3)", "expected [B] = (2,)")),
    (LOSSES, {"old_logp": zeros(B, 2)}, ValueError, ("old_logp has shape (2, 2)", "expected (2, 3)")),
    (LOSSES, {"ref_logp": zeros(T)}, ValueError, ("ref_logp has shape (3,)", "expected (2, 3)")),
    (LOSSES, {"rollout_logp": zeros(B, T, 1)}, ValueError, ("rollout_logp has shape (2, 3, 1)", "expected (2, 3)")),
    (LOSSES, {"segment_ids": zeros(B, dtype=np.int32), "advantages": TOKENS}, ValueError,
     ("segment_ids has shape (2,)", "expected (2, 3)")),
    (LOSSES, {"segment_ids": zeros(0, dtype=np.int64), "advantages": TOKENS}, ValueError,
     ("segment_ids has shape (0,)", "expected (2, 3)")),
    (LOSSES, {"segment_ids": TARGETS}, ValueError,
     ("advantages has shape (2,)", "segment_ids", "one advantage per token, (2, 3)")),
    (LOSSES, {"denominator": zeros(2)}, ValueError, ("denominator has shape (2,)", "expected a scalar")),
    (LOSSES, {"entropy_denominator": zeros(2)}, ValueError, ("entropy_denominator has shape (2,)", "a scalar")),
    # -- dtypes
    (ON_LOGITS, {"logits": zeros(B, T, V, dtype=np.int32)}, TypeError, ("logits has dtype int32", "expected a float")),
    (ON_HEAD, {"hidden": zeros(B, T, H, dtype=np.int32)}, TypeError, ("hidden has dtype int32", "expected a float")),
    (ON_HEAD, {"lm_head": zeros(V, H, dtype=np.int8)}, TypeError, ("lm_head has dtype int8", "expected a float")),
    (ON_HEAD, {"bias": zeros(V, dtype=np.int32)}, TypeError, ("bias has dtype int32", "expected a float")),
    (("policy_loss",), {"stats": token_stats(TOKENS, TOKENS).map(lambda x: x.astype(jnp.int32))}, TypeError,
     ("stats.logp has dtype int32", "expected a float")),
    (FOUR, {"targets": TOKENS}, TypeError, ("targets has dtype float32", "expected an integer")),
    (FOUR, {"targets": TARGETS == 0}, TypeError, ("targets has dtype bool", "expected an integer")),
    (LOSSES, {"advantages": zeros(B, dtype=np.int32)}, TypeError, ("advantages has dtype int32", "expected a float")),
    (LOSSES, {"old_logp": TARGETS}, TypeError, ("old_logp has dtype int32", "expected a float")),
    (LOSSES, {"ref_logp": TARGETS}, TypeError, ("ref_logp has dtype int32", "expected a float")),
    (LOSSES, {"rollout_logp": TARGETS}, TypeError, ("rollout_logp has dtype int32", "expected a float")),
    (LOSSES, {"segment_ids": TOKENS, "advantages": TOKENS}, TypeError,
     ("segment_ids has dtype float32", "expected an integer")),
    (ON_HEAD, {"lm_head": jnp.zeros((V, H), jnp.bfloat16)}, TypeError,
     ("hidden is float32", "lm_head bfloat16", "cast one of them")),
    # -- not arrays
    (FOUR, {"targets": None}, TypeError, ("targets is NoneType", "expected an array")),
    (ON_LOGITS, {"logits": "logits"}, TypeError, ("logits is str", "expected an array")),
    (ON_HEAD, {"lm_head": {"kernel": 1}}, TypeError, ("lm_head is dict", "expected an array")),
    (LOSSES, {"advantages": None}, TypeError, ("advantages is NoneType", "expected an array")),
    (LOSSES, {"advantages": [[1.0], [1.0, 2.0]]}, TypeError, ("advantages is list", "expected an array")),
    (FOUR, {"targets": [[0, 0, 2**40], [0, 0, 0]]}, TypeError, ("targets is list", "expected an array")),
    (LOSSES, {"denominator": "many"}, TypeError, ("denominator is 'many'", "expected a number")),
    (("policy_loss",), {"stats": TOKENS}, TypeError, ("stats is ndarray", "expected TokenStats")),
    # -- the vocabulary
    (ON_HEAD, {"lm_head": zeros(V, 5)}, ValueError, ("lm_head has shape (7, 5)", "H = 4", "expected [V, 4]")),
    (ON_HEAD, {"lm_head": zeros(V)}, ValueError, ("lm_head has shape (7,)", "expected [V, H] or [H, V]")),
    (ON_HEAD, {"lm_head": zeros(H, H)}, ValueError,
     ("lm_head has shape (4, 4)", "both layouts fit", "Head(lm_head, layout='vh')")),
    (ON_HEAD, {"head_layout": "hv"}, ValueError, ("lm_head has shape (7, 4)", "Head.layout='hv'", "expected")),
    (ON_HEAD, {"head_layout": "vocab"}, ValueError, ("Head.layout='vocab'", "expected 'vh'")),
    (ON_HEAD, {"bias": zeros(6)}, ValueError, ("bias has shape (6,)", "expected (7,)")),
    (FOUR, {"vocab_size": 8}, ValueError, ("vocab_size=8", "expected 1 to 7")),
    (FOUR, {"vocab_size": 0}, ValueError, ("vocab_size=0", "expected 1 to 7")),
    (FOUR, {"vocab_size": 7.0}, TypeError, ("vocab_size is float", "expected a Python int")),
    (ON_HEAD, {"lora": (zeros(V, 2), zeros(3, H))}, ValueError,
     ("lora has shapes (7, 2) and (3, 4)", "expected (7, r) and (r, 4)")),
    (ON_HEAD, {"lora": zeros(V, 2)}, TypeError, ("lora is ndarray", "expected a pair (A, B)")),
    # -- an empty batch
    (ON_LOGITS, {"logits": zeros(0, T, V), "targets": zeros(0, T, dtype=np.int32)}, ValueError,
     ("logits has shape (0, 3, 7)", "expected no dimension of zero")),
    (ON_HEAD, {"hidden": zeros(B, 0, H), "targets": zeros(B, 0, dtype=np.int32)}, ValueError,
     ("hidden has shape (2, 0, 4)", "expected no dimension of zero")),
    (ON_HEAD, {"lm_head": zeros(0, H)}, ValueError, ("lm_head has shape (0, 4)", "expected no dimension of zero")),
    (("policy_loss",), {"stats": token_stats(zeros(0, T), zeros(0, T)), "advantages": zeros(0)}, ValueError,
     ("stats.logp has shape (0, 3)", "expected no dimension of zero")),
    # -- options
    (STATS, {"temperature": 0.0}, ValueError, ("temperature=0.0", "expected a number > 0")),
    (STATS, {"temperature": np.float32(0)}, ValueError, ("temperature=0.0", "expected a number > 0")),
    (STATS, {"temperature": "hot"}, TypeError, ("temperature is 'hot'", "expected a number")),
    (STATS, {"temperature": zeros(T)}, ValueError, ("temperature has shape (3,)", "one value per token, (2, 3)")),
    (FOUR, {"softcap": -1.0}, ValueError, ("softcap=-1.0", "expected a number > 0")),
    (FOUR, {"softcap": zeros(V)}, ValueError, ("softcap has shape (7,)", "expected a scalar")),
    (FOUR, {"scale": zeros(B, T)}, ValueError, ("scale has shape (2, 3)", "expected a scalar")),
    (FOUR, {"backend": "chunkd"}, ValueError, ("backend='chunkd'", "expected None or one of", "mean 'chunked'?")),
    (ON_LOGITS, {"bwd_impl": "triton"}, ValueError, ("bwd_impl='triton'", "expected 'pallas' or 'jax'")),
    (ON_LOGITS, {"donate_logits": True, "backend": "chunked"}, ValueError, ("donate_logits=True", "kernel backends")),
    (ON_HEAD, {"chunk_size": 0}, ValueError, ("chunk_size=0", "expected a positive Python int")),
    (ON_HEAD, {"chunk_size": 2.0}, ValueError, ("chunk_size=2.0", "expected a positive Python int")),
    (ON_HEAD, {"chunk_size": 2, "memory_budget": 100}, ValueError, ("chunk_size or memory_budget", "not both")),
    (ON_HEAD, {"logits_dtype": "int8"}, ValueError, ("logits_dtype='int8'", "expected 'float32' or 'bfloat16'")),
    (ON_HEAD, {"head_grad_dtype": "bf16"}, ValueError, ("head_grad_dtype='bf16'", "expected 'float32' or 'param'")),
    (LOSSES, {"denominator": 0}, ValueError, ("denominator=0", "expected a number > 0")),
    # -- numbers that are not real, and statistics in the place of an array
    (LOSSES, {"denominator": 1j}, TypeError, ("denominator has dtype complex64", "expected real numbers")),
    (LOSSES, {"entropy_denominator": np.array(True)}, TypeError, ("entropy_denominator has dtype bool", "real")),
    (FOUR, {"softcap": 1j}, TypeError, ("softcap has dtype complex64", "expected real numbers")),
    (STATS, {"temperature": zeros(B, T, dtype=np.complex64)}, TypeError, ("temperature has dtype complex64", "real")),
    (ALL, {"mask": zeros(B, T, dtype=np.complex64)}, TypeError, ("mask has dtype complex64", "expected bool")),
    *(
        (LOSSES, {name: zeros(B, T, dtype=dtype)}, TypeError, (f"{name} has dtype {dtype}", "expected a float"))
        for name in ("advantages", "old_logp", "ref_logp", "rollout_logp", "token_weights")
        for dtype in ("complex64", "bool")
    ),
    *(
        (LOSSES, {name: token_stats(TOKENS, TOKENS)}, TypeError, (f"{name} is TokenStats", "pass its .logp"))
        for name in ("advantages", "old_logp", "ref_logp", "rollout_logp")
    ),
    # -- logits in the place of hidden states
    (ON_HEAD, {"hidden": zeros(B, T, V), "lm_head": zeros(V, H)}, ValueError,
     ("lm_head has shape (7, 4)", "Is hidden the logits?", "grpo_loss or logprobs", "layout='hv'")),
    # -- the objective and what it needs
    (LOSSES, {"objective": "trl"}, TypeError, ("objective='trl' is a string", "Objective.preset('trl')")),
    (LOSSES, {"objective": "TRL"}, TypeError, ("objective='TRL' is a string", "Objective.preset('trl')")),
    (LOSSES, {"objective": "grpo"}, TypeError, ("objective='grpo' is a string", "use Objective.grpo()")),
    (LOSSES, {"objective": "mine"}, TypeError, ("objective='mine' is a string", "preset(name) with one of trl,")),
    (LOSSES, {"objective": {"beta": 0.1}}, TypeError, ("objective is dict", "expected logitless.Objective")),
    (LOSSES, {"objective": Objective(beta=0.1)}, ValueError, ("objective.beta=0.1", "ref_logp is missing", "give")),
    (LOSSES, {"objective": Objective(correction="token")}, ValueError,
     ("objective.correction='token'", "needs rollout_logp")),
    (LOSSES, {"objective": Objective(eps_low=jnp.zeros(3))}, ValueError,
     ("objective.eps_low has shape (3,)", "expected a scalar")),
    (LOSSES, {"objective": None}, TypeError, ("objective is NoneType", "expected logitless.Objective")),
    (FOUR, {"objective": Objective(temperature=jnp.ones(3), temperature_on="logp")}, ValueError,
     ("temperature has shape (3,)", "one value per token, (2, 3)")),
]  # fmt: skip
FLAT = [(call, *case[1:]) for case in CASES for call in case[0]]


def _id(value: Any) -> str:
    return ",".join(value) if isinstance(value, dict) else value if isinstance(value, str) else ""


@pytest.mark.parametrize(("call", "change", "error", "fragments"), FLAT, ids=_id)
def test_bad_input(call: str, change: dict[str, Any], error: type[Exception], fragments: tuple[str, ...]) -> None:
    arguments = {**GOOD[call], **change}
    with pytest.raises(error) as eager:
        getattr(flat_calls, call)(**arguments)

    def is_traced(value: Any) -> bool:
        return isinstance(value, (np.ndarray, jax.Array, logitless.TokenStats))

    constant = {k: v for k, v in arguments.items() if not is_traced(v)}
    arrays = {k: v for k, v in arguments.items() if is_traced(v)}
    with pytest.raises(error) as traced:
        jax.eval_shape(lambda a: getattr(flat_calls, call)(**a, **constant), arrays)
    for info in (eager, traced):
        message = str(info.value)
        assert message.startswith(f"{call}: ")
        for fragment in fragments:
            if info is traced:  # the one word that differs: what is not an array on the host is a tracer inside jit
                fragment = fragment.replace("is ndarray", "is ")
            assert fragment in message


@pytest.mark.parametrize("call", GOOD)
def test_the_good_arguments_are_good(call: str) -> None:
    """So that each case above fails for its own reason."""
    jax.eval_shape(lambda a: getattr(flat_calls, call)(**a), GOOD[call])


def test_nested_lists_are_arrays() -> None:
    logits = np.random.default_rng(0).normal(size=(1, 2, 3)).astype(np.float32)
    head = np.zeros((5, 3), np.float32)
    want = by_numpy(lambda: logitless.logprobs(logits, np.array([[0, 2]])).logp)
    np.testing.assert_array_equal(by_numpy(lambda: logitless.logprobs(logits.tolist(), [[0, 2]]).logp), want)
    with without_metrics():
        of_logits = by_numpy(lambda: logitless.grpo_loss(logits, [[0, 2]], advantages=[1.0], mask=[[1, 0]])[0])
        of_head = by_numpy(lambda: logitless.linear_grpo_loss(logits, head, [[0, 2]], advantages=[1.0])[0])
    assert of_logits == of_head == -1.0


# -- names of arguments ----------------------------------------------------------------------------------------------

UNKNOWN: list[tuple[tuple[str, ...], str, str]] = [
    (LOSSES, "beta", r"It belongs to the objective: objective=Objective\(beta=...\)\."),
    (LOSSES, "temperature", r"It belongs to the objective: objective=Objective\(temperature=...\)\."),
    (STATS, "beta", r"It belongs to the objective, which the losses take: objective=Objective\(beta=...\)\."),
    (LOSSES, "epsilon", r"It belongs to the objective: objective=Objective\(...\). Here: eps_low, and eps_high"),
    (LOSSES, "loss_type", r"It is TRL's and Liger's: Objective.from_trl\(loss_type=...\)"),
    (ALL, "completion_mask", r"Here: mask\."),
    (ALL, "attention_mask", r"Here: mask, which is 1 on completion tokens only\."),
    (LOSSES, "old_per_token_logps", r"Here: old_logp\."),
    (LOSSES, "sampling_per_token_logps", r"Here: rollout_logp\."),
    (LOSSES, "num_items_in_batch", r"Here: denominator \(logitless.dapo_denominator\)\."),
    (LOSSES, "per_token_logps", r"the call computes them; policy_loss\(TokenStats\(logp=...\)\)"),
    (ON_HEAD, "_input", r"Here: hidden\."),
    (ON_HEAD, "lin_weight", r"Here: lm_head\."),
    (FOUR, "selected_token_ids", r"Here: targets\."),
    (LOSSES, "advantage", r"Did you mean 'advantages'\?"),
    (LOSSES, "bta", r"Did you mean objective=Objective\(beta=...\)\?"),
    (FOUR, "zzzzzz", r"Arguments: (logits|hidden), "),
]


@pytest.mark.parametrize(
    ("call", "name", "hint"), [(call, *rest) for calls, *rest in UNKNOWN for call in calls], ids=str
)
def test_an_unknown_argument_is_answered_with_ours(call: str, name: str, hint: str) -> None:
    with pytest.raises(TypeError, match=rf"^{call}: there is no argument '{name}'\..*{hint}"):
        getattr(flat_calls, call)(**GOOD[call], **{name: TOKENS})


def test_calls_over_the_calls_answer_alike() -> None:
    hint = r": there is no argument 'beta'\. It belongs to the objective"
    shapes = (jax.ShapeDtypeStruct((8, 16), jnp.bfloat16), jax.ShapeDtypeStruct((32, 16), jnp.bfloat16))
    with pytest.raises(TypeError, match=r"^explain\(linear_grpo_loss\)" + hint):
        logitless.explain(logitless.linear_grpo_loss, *shapes, beta=0.1)
    with pytest.raises(TypeError, match=r"^plan(\(linear_grpo_loss\))?" + hint):
        logitless.plan(*shapes, beta=0.1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="^grpo_loss" + hint):
        logitless.with_stats(logitless.grpo_loss)(**GOOD["grpo_loss"], beta=0.1)


def test_hints_name_arguments_that_exist() -> None:
    arguments = {n for call in ALL for n in inspect.signature(getattr(logitless, call)).parameters}
    arguments |= {f.name for f in dataclasses.fields(logitless.Head)} - {"weight"}
    for name, hint in checks.THEIR_ARGUMENTS.items():
        ours = hint.partition(",")[0].partition(" ")[0]
        assert name not in arguments and (ours in arguments or ours == "nothing"), name


@pytest.mark.parametrize("call", ALL)
def test_missing_and_surplus_arguments(call: str) -> None:
    f = getattr(logitless, call)
    required = [p.name for p in inspect.signature(f).parameters.values() if p.default is p.empty]
    for name in required:
        with pytest.raises(TypeError, match=rf"^{call}: missing {name}, "):
            f(**{k: v for k, v in GOOD[call].items() if k != name})
    ordered = [k for k in GOOD[call] if k != "advantages"]
    values = [GOOD[call][k] for k in ordered]
    with pytest.raises(TypeError, match=rf"^{call}: {len(values) + 1} arguments came by position, .*{ordered[0]}"):
        f(*values, LOSS["advantages"])
    with pytest.raises(TypeError, match=rf"^{call}: {ordered[0]} came twice"):
        f(*values, **GOOD[call])


@pytest.mark.parametrize("call", ALL)
def test_no_message_prints_an_array(call: str) -> None:
    """An array of 2,500 numbers in the place of any argument."""
    array = np.full((50, 50), 0.123, np.float32)
    for name in inspect.signature(getattr(logitless, call)).parameters:
        for value in (array, jnp.asarray(array), token_stats(array, array), [array.tolist()] * 2, {"a": array}):
            try:
                jax.eval_shape(lambda n=name, v=value: getattr(flat_calls, call)(**{**GOOD[call], n: v}))
            except (TypeError, ValueError, NotImplementedError) as error:
                message = str(error)
                assert "0.123" not in message and len(message) < 600, (name, type(value))


# -- masks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ALL)
@pytest.mark.parametrize("value", [0.5, 2, np.nan])
def test_a_mask_is_zero_or_one_where_it_can_be_seen(call: str, value: float) -> None:
    mask = np.ones((B, T), np.float32)
    mask[1, 2] = value
    for seen in (mask, mask.tolist(), jnp.asarray(mask)):
        with pytest.raises(
            ValueError, match=rf"^{call}: mask is {value}.* at \(1, 2\), expected 0 or 1.*token_weights="
        ):
            getattr(flat_calls, call)(**GOOD[call], mask=seen)
        with pytest.raises(ValueError, match=rf"^{call}: mask is {value}"):  # a constant of the program
            jax.eval_shape(lambda a, m=seen: getattr(flat_calls, call)(**a, mask=m), GOOD[call])
    jax.eval_shape(lambda a, m: getattr(flat_calls, call)(**a, mask=m), GOOD[call], mask)
    for good in (mask > 0, np.trunc(np.nan_to_num(mask) > 0), (mask > 0).astype(np.int8)):
        jax.eval_shape(lambda a, m=good: getattr(flat_calls, call)(**a, mask=m), GOOD[call])


def test_other_masks_are_zero_or_one() -> None:
    half = np.full((B, T), 0.5, np.float32)
    for name, f in {
        "validate_targets": lambda: logitless.validate_targets(TARGETS, V, mask=half),
        "loss_denominator": lambda: logitless.loss_denominator(Objective(), half),
        "entropy_denominator": lambda: logitless.entropy_denominator(Objective(), half),
        "rows_with_gradient": lambda: logitless.rows_with_gradient(Objective(), LOSS["advantages"], half),
        "next_tokens": lambda: logitless.next_tokens(TARGETS, half),
    }.items():
        with pytest.raises(ValueError, match=rf"^{name}: mask is 0.5 at \(0, 0\), expected 0 or 1"):
            f()


# -- layouts ---------------------------------------------------------------------------------------------------------


def test_a_small_vocabulary_is_taken_where_the_layout_is_said() -> None:
    hidden, head = zeros(B, T, V), zeros(V, H)
    logp = jax.eval_shape(lambda: logitless.linear_logprobs(hidden, logitless.Head(head, layout="hv"), TARGETS).logp)
    assert logp.shape == (B, T)
    jax.eval_shape(lambda: logitless.linear_logprobs(hidden, zeros(H, V), TARGETS))  # [V, H], whatever is larger
    with pytest.raises(ValueError, match=r"^linear_grpo_loss, the reference: lm_head .* Is hidden the logits\?"):
        flat_calls.linear_grpo_loss(**GOOD["linear_grpo_loss"], ref_hidden=hidden, ref_lm_head=head)


@pytest.mark.parametrize("call", LOSSES)
def test_a_missing_ref_with_a_traced_beta(call: str) -> None:
    """A zero needs no reference. Inside jit nobody knows that it is one: if it is not, the loss is NaN."""
    loss = in_numpy(lambda o: getattr(flat_calls, call)(**GOOD[call], objective=o)[0])
    plain = by_numpy(lambda: getattr(flat_calls, call)(**GOOD[call])[0])
    assert float(loss(Objective(beta=0.0))) == float(plain)
    assert np.isnan(loss(Objective(beta=0.1)))
    for zero in (0.0, np.float32(0.0), jnp.float32(0.0)):
        jax.eval_shape(lambda a, zero=zero: getattr(flat_calls, call)(**a, objective=Objective(beta=zero)), GOOD[call])
    with pytest.raises(ValueError, match=r"objective.beta=0.5 asks for a KL term but ref_logp is missing"):
        getattr(flat_calls, call)(**GOOD[call], objective=Objective(beta=jnp.float32(0.5)))


@pytest.mark.parametrize("call", FOUR)
def test_validate_finds_targets_on_the_host(call: str) -> None:
    targets = np.array([[0, 1, 9], [-1, 6, 7]])
    arguments = {**GOOD[call], "targets": targets, "validate": True}
    with pytest.raises(ValueError, match=r"3 live tokens lie outside \[0, 7\): 9 at \(0, 2\) and 2 more"):
        getattr(flat_calls, call)(**arguments)
    by_numpy(lambda: getattr(flat_calls, call)(**arguments, mask=(targets >= 0) & (targets < 7)))
    with pytest.raises(TypeError, match="validate_targets: got traced arrays; call it outside jit"):
        jax.eval_shape(lambda y: getattr(flat_calls, call)(**{**arguments, "targets": y}), targets)


def test_validate_targets() -> None:
    good = np.array([[0, 6], [3, -100]])
    assert logitless.validate_targets(good, 7, mask=[[1, 1], [1, 0]]) is None
    with pytest.raises(ValueError, match=r"targets: 1 live token lies outside \[0, 7\): -100 at \(1, 1\). Mask it out"):
        logitless.validate_targets(good, 7)
    with pytest.raises(ValueError, match=r"2 live tokens lie outside \[0, 6\): 6 at \(0, 1\) and 1 more. Mask them"):
        logitless.validate_targets(good, 6)
    with pytest.raises(ValueError, match=r"4294967299 at \(0,\)"):
        logitless.validate_targets(np.array([2**32 + 3]), 7)
    with pytest.raises(ValueError, match=r"validate_targets: mask has shape \(2,\), expected \(2, 2\)"):
        logitless.validate_targets(good, 7, mask=[1, 1])
    with pytest.raises(TypeError, match=r"validate_targets: targets has dtype float64, expected an integer dtype"):
        logitless.validate_targets(np.array([[0.5]]), 7)
    for size in (0, -1, 7.0, None, True):
        with pytest.raises(ValueError, match=rf"validate_targets: vocab_size={size}, expected a positive int"):
            logitless.validate_targets(good, size)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="validate_targets: got traced arrays"):
        jax.eval_shape(lambda m: logitless.validate_targets(good, 7, mask=m), np.ones((2, 2)))


GROUPS: list[tuple[tuple[Any, Any], dict[str, Any], type[Exception], str]] = [
    ((zeros(2, 4), 4), {}, ValueError, r"rewards has shape \(2, 4\), expected one reward a completion \[B\]"),
    ((zeros(8, dtype=np.int32), 4), {}, TypeError, r"rewards has dtype int32, expected a float dtype"),
    ((None, 4), {}, TypeError, r"rewards is NoneType, expected an array"),
    ((zeros(8), 3), {}, ValueError, r"8 rewards do not split into groups of 3; expected a non-empty multiple"),
    ((zeros(8), 0), {}, ValueError, r"8 rewards do not split into groups of 0; expected a non-empty multiple"),
    ((zeros(8), -4), {}, ValueError, r"8 rewards do not split into groups of -4"),
    ((zeros(0), 4), {}, ValueError, r"0 rewards do not split into groups of 4; expected a non-empty multiple"),
    ((zeros(8), 4.0), {}, TypeError, r"group_size is 4.0, expected a Python int"),
    ((zeros(8), "4"), {}, TypeError, r"group_size is '4', expected a Python int"),
    ((zeros(8), 4), {"scale": "std"}, ValueError, r"scale='std', expected 'group', 'batch', 'tokens' or 'none'"),
    ((zeros(2), 2), {"scale": "tokens"}, ValueError, r"scale='tokens' needs lengths"),
    (
        (zeros(2), 2),
        {"baseline": "rloo"},
        ValueError,
        r"baseline='rloo', expected one of 'mean', 'leave_one_out', 'by_length'",
    ),
    ((zeros(2), 2), {"baseline": "by_length"}, ValueError, r"baseline='by_length' needs lengths"),
    ((zeros(2), 2), {"lengths": zeros(2, dtype=np.int32)}, ValueError, r"baseline='mean' does not take lengths"),
    ((zeros(2), 2), {"baseline": "by_length", "lengths": np.ones(3, int)}, ValueError, r"lengths has shape"),
    ((zeros(2), 1), {"baseline": "second_best"}, ValueError, r"baseline='second_best' needs groups of at least 2"),
]


@pytest.mark.parametrize(("arguments", "options", "error", "message"), GROUPS)
def test_group_advantages(arguments: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    rewards, size = arguments
    with pytest.raises(error, match=f"^group_advantages: {message}"):
        logitless.group_advantages(rewards, size, **options)
    if rewards is not None:
        with pytest.raises(error, match=f"^group_advantages: {message}"):
            jax.eval_shape(lambda r: logitless.group_advantages(r, size, **options), rewards)


def test_kernel_backends_say_where_they_run() -> None:
    for backend in ("pallas_tpu", "mosaic_gpu"):
        with pytest.raises(NotImplementedError, match=rf"logprobs: backend='{backend}' runs on a .*'chunked'"):
            flat_calls.logprobs(**LOGITS, backend=backend)


def test_keywords_that_moved_name_their_new_home() -> None:
    assert set(checks.OPTION_FIELDS) == {f.name for f in dataclasses.fields(logitless.Options)}
    assert set(checks.HEAD_FIELDS.values()) == {f.name for f in dataclasses.fields(logitless.Head)} - {"weight"}
    good = GOOD["linear_grpo_loss"]
    for name in checks.OPTION_FIELDS:
        with pytest.raises(TypeError, match=rf"{name}.*options=logitless\.Options\({name}=\.\.\.\)"):
            logitless.linear_grpo_loss(**good, **{name: 1})
    for name, field in checks.HEAD_FIELDS.items():
        with pytest.raises(TypeError, match=rf"{name}.*logitless\.Head\(lm_head, {field}=\.\.\.\)"):
            logitless.linear_grpo_loss(**good, **{name: 1})
    with pytest.raises(TypeError, match=r"ref_bias.*ref_lm_head=logitless\.Head\(ref_lm_head, bias"):
        logitless.linear_grpo_loss(**good, ref_bias=1)


@pytest.mark.parametrize(
    ("call", "options", "fragment"),
    [
        ("linear_logprobs", dict(donate_logits=True), r"Options\.donate_logits is for calls from logits"),
        ("grpo_loss", dict(chunk_size=8), r"Options\.chunk_size is for calls from hidden states, not from logits"),
    ],
)
def test_options_of_the_other_level_are_refused(call: str, options: dict[str, Any], fragment: str) -> None:
    with pytest.raises(ValueError, match=rf"^{call}: {fragment}"):
        getattr(logitless, call)(**GOOD[call], options=logitless.Options(**options))
    with pytest.raises(TypeError, match=rf"^{call}: options is dict, expected logitless\.Options"):
        getattr(logitless, call)(**GOOD[call], options=options)
