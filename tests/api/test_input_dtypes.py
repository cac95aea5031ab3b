"""Dtypes in which people keep ids, segments and arrays: taken as they are meant, or refused by name; float16, where a
loss scale has to act before dlogits are rounded."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flat_calls
import logitless
from interpreted import by_numpy
from logitless import Objective
from logitless.core import validation
from loss_cases import evaluate, random_batch, token_stats

UNSIGNED = ("uint8", "uint16", "uint32", "uint64")
RNG = np.random.default_rng(0)
B, T, H, V = 2, 3, 4, 7
IDS = RNG.integers(0, V, (B, T))
HIDDEN, HEAD = RNG.normal(size=(B, T, H)).astype(np.float32), RNG.normal(size=(V, H)).astype(np.float32)
ADVANTAGES = RNG.normal(size=(B, T)).astype(np.float32)


@pytest.mark.parametrize("dtype", UNSIGNED)
def test_unsigned_ids_are_the_same_ids(dtype: str) -> None:
    ids, mask = IDS.astype(dtype), (IDS > 1).astype("uint8")

    def losses(y: Any, m: Any) -> Any:
        logits = jnp.einsum("bth,vh->btv", HIDDEN, HEAD)
        rest = dict(targets=y, advantages=ADVANTAGES, mask=m, validate=True)
        return flat_calls.linear_grpo_loss(HIDDEN, HEAD, **rest)[0], flat_calls.grpo_loss(logits, **rest)[0]

    assert by_numpy(lambda: losses(ids, mask)) == by_numpy(lambda: losses(IDS.astype(np.int32), IDS > 1))
    for i, known in zip(logitless.next_tokens(ids, mask), logitless.next_tokens(IDS, IDS > 1), strict=True):
        assert i.dtype == known.dtype
        np.testing.assert_array_equal(i, known)
    packed = logitless.pack(ids, mask | 1, ids, mask, length=6)
    known = logitless.pack(IDS, IDS >= 0, IDS, IDS > 1, length=6)
    for a, b in zip(jax.tree.leaves(packed), jax.tree.leaves(known), strict=True):
        np.testing.assert_array_equal(a, b)
    logitless.validate_targets(ids, V, mask)


@pytest.mark.parametrize(
    ("dtype", "given"),
    [("uint32", "jax"), *((d, g) for d in ("uint32", "uint64", "int64") for g in ("numpy", "jax64"))],
)
def test_an_id_that_int32_cannot_hold_stays_invalid(dtype: str, given: str) -> None:
    """On its way to int32 alone, 2^32 + 5 would become the token 5, and 2^31 + 5 a large negative number."""
    wide = np.array([[3, 2**31 + 5, 2**32 - 1 if dtype == "uint32" else 2**32 + 5, 5]], dtype)
    with jax.enable_x64(given == "jax64"):
        ids = wide if given == "numpy" else jnp.asarray(wide)
        assert validation.target_array("test", ids, (1, 4), "it").tolist() == [[3, -1, -1, 5]]
        assert logitless.next_tokens(ids)[0].tolist() == [[-1, -1, 5, 0]]
    packed = logitless.pack(wide, wide > 0, wide, wide > 0, length=8)
    assert packed.tokens.tolist() == [[3, -1, -1, 5, 3, -1, -1, 0]]


FAR_APART = {
    "high half": lambda s: s.astype(np.int64) * 2**32 + 7,
    "negative": lambda s: s.astype(np.int64) * 2**32 - 2**40,
    "down from zero": lambda s: (s.astype(np.int64) - s.max()) * 2**32,
    "hashes": lambda s: (s.astype(np.uint64) << np.uint64(32)) + np.uint64(2**63),
}


@pytest.mark.parametrize("form", FAR_APART)
def test_segments_of_64_bits_are_as_many_as_they_are(form: str) -> None:
    logp, entropy, inputs = random_batch(1, layout="scattered")
    small = inputs.pop("segment_ids")
    wide = FAR_APART[form](small)
    assert len(np.unique(small)) == len(np.unique(wide)) > 2
    o = Objective(level="sequence", entropy_coef=0.1)
    known, got, one = (evaluate(o, logp, entropy, segment_ids=s, **inputs) for s in (small, wide, np.zeros_like(small)))
    assert got.loss == known.loss != one.loss
    np.testing.assert_array_equal(got.dlogp, known.dlogp)
    assert len({float(logitless.loss_denominator(o, inputs["mask"], s)) for s in (small, wide)}) == 1
    masks = [logitless.next_tokens(IDS[:, :2], segment_ids=s[:2, :2])[1] for s in (small, wide)]
    np.testing.assert_array_equal(*masks)
    o = o.replace(entropy_coef=None, correction="sequence", correction_mode="mask", correction_max=1.1)
    rows = [logitless.rows_with_gradient(o, segment_ids=s, **inputs).tolist() for s in (small, wide)]
    assert rows[0] == rows[1]


def test_next_tokens_of_64_bit_segments() -> None:
    segments = np.array([[2**32, 2**32, 2**33, 2**33]])
    assert logitless.next_tokens(np.ones((1, 4), int), segment_ids=segments)[1].tolist() == [[True, False, True, False]]
    with pytest.raises(TypeError, match="next_tokens: segment_ids has dtype float32, expected an integer dtype"):
        logitless.next_tokens(np.ones((1, 4), int), segment_ids=np.ones((1, 4), np.float32))


F8 = jnp.float8_e4m3fn
_SCORES = dict(hidden=HIDDEN, lm_head=HEAD, targets=IDS)
_LOGITS = dict(logits=np.einsum("bth,vh->btv", HIDDEN, HEAD), targets=IDS)
_LORA = (np.zeros((V, 2), np.float32), np.zeros((2, H), np.float32))
_LOSS = dict(advantages=ADVANTAGES)
_REFERENCE = dict(ref_hidden=HIDDEN, ref_lm_head=HEAD, objective=Objective(beta=0.1))
_PAIR = dict(prompt=IDS, prompt_mask=IDS >= 0, completion=IDS, completion_mask=IDS >= 0, length=6)
FLOAT8 = [
    ("logprobs", _LOGITS, "logits"), ("grpo_loss", _LOGITS | _LOSS, "logits"),
    ("grpo_loss", _LOGITS | _LOSS, "advantages"), ("linear_logprobs", _SCORES, "hidden lm_head"),
    ("linear_logprobs", _SCORES, "lm_head"), ("linear_logprobs", _SCORES | dict(bias=np.zeros(V, np.float32)), "bias"),
    ("linear_logprobs", _SCORES | dict(lora=_LORA), "lora"), ("linear_grpo_loss", _SCORES | _LOSS, "hidden lm_head"),
    ("linear_grpo_loss", _SCORES | _LOSS | dict(old_logp=ADVANTAGES), "old_logp"),
    ("linear_grpo_loss", _SCORES | _LOSS | dict(token_weights=ADVANTAGES), "token_weights"),
    ("linear_grpo_loss", _SCORES | _LOSS | _REFERENCE, "ref_hidden ref_lm_head"),
    ("policy_loss", dict(stats=token_stats(ADVANTAGES, ADVANTAGES)) | _LOSS, "stats"),
    ("rows_with_gradient", dict(objective=Objective(), mask=IDS >= 0) | _LOSS, "advantages"),
    ("group_advantages", dict(rewards=ADVANTAGES[0], group_size=3), "rewards"), ("pack", _PAIR | _LOSS, "advantages"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "arguments", "names"), FLOAT8, ids=[f"{c} {n}" for c, _, n in FLOAT8])
def test_float8_is_refused_by_name(call: str, arguments: dict[str, Any], names: str) -> None:
    """dlogits rounded to float8 are zeros: a finite loss without a gradient."""
    coarse = {n: jax.tree.map(lambda x: jnp.asarray(x).astype(F8), arguments[n]) for n in names.split()}
    with pytest.raises(TypeError, match=rf"{names.split()[0]}.* is float8_e4m3fn, .* float32"):
        getattr(flat_calls, call)(**arguments | coarse)


def test_one_advantage_a_row_in_a_column_is_one_advantage_a_row() -> None:
    logp, entropy, inputs = random_batch(1)
    o = Objective(level="sequence", clip_metrics="trl")
    column = inputs | dict(advantages=inputs["advantages"][:, None])
    known, got = (evaluate(o, logp, entropy, **x) for x in (inputs, column))
    assert got.loss == known.loss != 0
    np.testing.assert_array_equal(got.dlogp, known.dlogp)
    assert got.metrics == known.metrics  # which tell [B] from [B, T]
    rows = [np.asarray(logitless.rows_with_gradient(o, x["advantages"], x["mask"])) for x in (inputs, column)]
    np.testing.assert_array_equal(*rows)
    packed = [
        logitless.pack(IDS, IDS >= 0, IDS, IDS > 1, length=6, advantages=a)
        for a in (ADVANTAGES[:, 0], ADVANTAGES[:, :1])
    ]
    np.testing.assert_array_equal(*(p.arrays["advantages"] for p in packed))
    with pytest.raises(
        ValueError, match=r"advantages has shape \(4,\), but with segment_ids .* one advantage per token"
    ):
        evaluate(o, logp, entropy, **column, segment_ids=np.zeros((4, 6), int))


@pytest.mark.parametrize("backend", ["chunked", "reference"])
@pytest.mark.parametrize("level", ["head", "logits"])
def test_a_loss_scale_saves_small_gradients(backend: str, level: str) -> None:
    """With a denominator of 2e6 the gradients of a unit loss are below float16's smallest numbers; times 2^15 they are
    not."""
    rng = np.random.default_rng(0)
    h = jnp.asarray(rng.standard_normal((1, 32, 16)), jnp.float16)
    w = jnp.asarray(rng.standard_normal((64, 16)), jnp.float16)
    y = jnp.asarray(rng.integers(0, 64, (1, 32)), jnp.int32)
    rest = dict(advantages=jnp.array([1.0]), objective=Objective(aggregation="dapo"), denominator=2e6)

    def scaled(x: jax.Array, w: jax.Array, scale: float, backend: str) -> jax.Array:
        if level == "head":
            loss, _ = flat_calls.linear_grpo_loss(x, w, y, backend=backend, head_layout="vh", **rest)
        else:
            loss, _ = flat_calls.grpo_loss((x @ w.T).astype(x.dtype), y, backend=backend, **rest)
        return loss * scale

    def gradient(x: jax.Array, w: jax.Array, scale: float, backend: str) -> np.ndarray:
        return by_numpy(jax.grad(lambda x, w: scaled(x, w, scale, backend)), x, w)

    got = gradient(h, w, 2.0**15, backend)
    wide = gradient(h.astype(jnp.float32), w.astype(jnp.float32), 2.0**15, "reference")
    error = np.linalg.norm(np.asarray(got, np.float64) - np.asarray(wide)) / np.linalg.norm(np.asarray(wide))
    assert error < 0.02
