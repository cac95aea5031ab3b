"""The recipes of docs/recipes.md: value and gradients against a dense softmax in float64, and matmul counts against
``explain``."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import logitless
from interpreted import by_numpy
from logitless import Objective, explain, linear_distillation_loss, linear_grpo_loss, linear_logprobs

PAGE = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()
B, T, H, V = 4, 7, 12, 40
TOLERANCE = 2e-5


def page() -> SimpleNamespace:
    """The functions of the page."""
    names: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(code, names)
    return SimpleNamespace(**names)


RECIPES = page()
RNG = np.random.default_rng(4)
LENGTHS = np.array([7, 4, 6, 2])
IDS = RNG.integers(0, V, (B, T))
ROW = np.array([1.0, -0.5, 0.0, 2.0])
MASK = np.arange(T) < LENGTHS[:, None]
WEIGHTS = RNG.uniform(0.1, 2.0, (B, T))
REF = RNG.normal(-3.5, 0.4, (B, T))
ARRAYS = {
    "hidden": RNG.normal(size=(B, T, H)),
    "lm_head": 0.6 * RNG.normal(size=(V, H)),
    "teacher": RNG.normal(size=(B, T, H)),
    "teacher_head": 0.6 * RNG.normal(size=(V, H)),
    "hiddens": RNG.normal(size=(3, B, T, H)),
}


def log_p(hidden: Any, lm_head: Any) -> Any:
    return jax.nn.log_softmax(hidden @ lm_head.T, axis=-1)


def picked(rows: Any, ids: Any = IDS) -> Any:
    return jnp.take_along_axis(rows, jnp.asarray(ids)[..., None], axis=-1)[..., 0]


def average(x: Any, mask: Any = MASK) -> Any:
    return jnp.sum(jnp.where(mask, x, 0.0)) / mask.sum()


# -- the same in the plain way ---------------------------------------------------------------------------------------


def dense_smoothed(h: Any, w: Any) -> Any:
    z = h @ w.T
    labels = 0.9 * jax.nn.one_hot(jnp.asarray(IDS), V, dtype=z.dtype) + 0.1 / V
    return average(-jnp.sum(labels * log_p(h, w), -1) + 1e-4 * jax.nn.logsumexp(z, axis=-1) ** 2)


def dense_dft(h: Any, w: Any) -> Any:
    p = picked(jax.nn.softmax(h @ w.T, axis=-1))
    return average(-jax.lax.stop_gradient(p) * picked(log_p(h, w)))


def log_ratios(h: Any, w: Any, of: Any = None) -> tuple[Any, Any]:
    """Of the chosen and the rejected row of each pair."""
    x = jnp.where(MASK, picked(log_p(h, w)) - (REF if of is None else of), 0.0).sum(1)
    return x[:2], x[2:]


def dense_dpo(kind: str, h: Any, w: Any) -> Any:
    (a, b), beta = log_ratios(h, w), 0.1
    if kind == "sigmoid":
        return jnp.log1p(jnp.exp(-beta * (a - b))).mean()
    if kind == "ipo":
        return ((a - b - 1 / (2 * beta)) ** 2).mean()
    return jnp.maximum(0.0, 1 - beta * (a - b)).mean()


def dense_orpo(h: Any, w: Any) -> Any:
    a, b = (x / n for x, n in zip(log_ratios(h, w, 0.0), (LENGTHS[:2], LENGTHS[2:]), strict=True))
    odds = jnp.exp(a) / (1 - jnp.exp(a)) * (1 - jnp.exp(b)) / jnp.exp(b)
    return (-a + 0.1 * jnp.log1p(1 / odds)).mean()


def dense_simpo(h: Any, w: Any) -> Any:
    a, b = (x / n for x, n in zip(log_ratios(h, w, 0.0), (LENGTHS[:2], LENGTHS[2:]), strict=True))
    return jnp.log1p(jnp.exp(-(2.0 * (a - b) - 1.0))).mean()


WANTED = np.array([True, False, False, True])


def dense_kto(h: Any, w: Any) -> Any:
    x = 0.1 * (jnp.concatenate(log_ratios(h, w)) - 0.3)
    return jnp.where(WANTED, 1 / (1 + jnp.exp(x)), 1 / (1 + jnp.exp(-x))).mean()


def dense_multi(hs: Any, w: Any) -> Any:
    total, count = 0.0, 0
    for k in range(3):
        for b in range(B):
            for t in range(T - k - 1):
                if MASK[b, t + k + 1]:
                    total, count = total - log_p(hs[k, b, t], w)[IDS[b, t + k + 1]], count + 1
    return total / count


def divergence(h: Any, w: Any, th: Any, tw: Any) -> Any:
    lp, lq = log_p(h, w), log_p(th, tw)
    return jnp.sum(jnp.exp(lp) * (lp - lq), -1)


def dense_grpo(h: Any, w: Any, th: Any, tw: Any) -> Any:
    ratio, a = jnp.exp(picked(log_p(h, w)) - REF), ROW[:, None]
    policy = -jnp.minimum(ratio * a, jnp.clip(ratio, 0.8, 1.2) * a)
    rows = jnp.where(MASK, policy + 0.04 * divergence(h, w, th, tw), 0.0).sum(1) / LENGTHS
    return rows.mean()


TEACHER = ("hidden", "lm_head", "teacher", "teacher_head")
PAIR = ("hidden", "lm_head")
IDS32, REF32, ROW32 = (jnp.asarray(IDS, jnp.int32), jnp.asarray(REF, jnp.float32), jnp.asarray(ROW, jnp.float32))


def of_stats(recipe: Callable[..., Any], *given: Any, **more: Any) -> Callable[..., Any]:
    def loss(h: Any, w: Any) -> Any:
        return recipe(linear_logprobs(h, w, IDS32, mask=jnp.asarray(MASK)), *given, **more)

    return loss


def smoothed(h: Any, w: Any) -> Any:
    stats = linear_logprobs(h, w, IDS32, mask=jnp.asarray(MASK))
    return RECIPES.smoothed_nll(stats, h, w, jnp.asarray(MASK))


M = jnp.asarray(MASK)
R = RECIPES
CASES: dict[str, tuple[Any, Any, tuple[str, ...]]] = {
    "nll": (
        lambda h, w: R.nll(h, w, IDS32, M, jnp.asarray(WEIGHTS, jnp.float32)),
        lambda h, w: average(-WEIGHTS * picked(log_p(h, w))),
        PAIR,
    ),
    "smoothed_nll": (smoothed, dense_smoothed, PAIR),
    "dft": (of_stats(R.dft, M), dense_dft, PAIR),
    "dpo": (of_stats(R.dpo, REF32, M), functools.partial(dense_dpo, "sigmoid"), PAIR),
    "dpo, ipo": (of_stats(R.dpo, REF32, M, kind="ipo"), functools.partial(dense_dpo, "ipo"), PAIR),
    "dpo, hinge": (of_stats(R.dpo, REF32, M, kind="hinge"), functools.partial(dense_dpo, "hinge"), PAIR),
    "orpo": (of_stats(R.orpo, M), dense_orpo, PAIR),
    "simpo": (of_stats(R.simpo, M), dense_simpo, PAIR),
    "kto": (of_stats(R.kto, REF32, M, jnp.asarray(WANTED), 0.3), dense_kto, PAIR),
    "reward_weighted_nll": (
        lambda h, w: R.reward_weighted_nll(h, w, IDS32, M, ROW32),
        lambda h, w: average(-ROW[:, None] * picked(log_p(h, w))),
        PAIR,
    ),
    "multi_token_nll": (lambda h, w: R.multi_token_nll(h, w, IDS32, M), dense_multi, ("hiddens", "lm_head")),
    "grpo_with_exact_kl": (
        lambda h, w, th, tw: R.grpo_with_exact_kl((h, w), IDS32, M, ROW32, REF32, (th, tw)),
        dense_grpo,
        TEACHER,
    ),
    "on_policy_distillation": (
        lambda h, w, th, tw: R.on_policy_distillation((h, w), (th, tw), M),
        lambda *x: average(divergence(*x)),
        TEACHER,
    ),
    "rl_with_distillation": (
        lambda h, w, th, tw: R.rl_with_distillation((h, w), IDS32, M, ROW32, (th, tw)),
        lambda h, w, th, tw: average(-ROW[:, None] * picked(log_p(h, w)) + 0.5 * divergence(h, w, th, tw)),
        TEACHER,
    ),
}


@pytest.mark.parametrize("name", list(CASES))
def test_value_and_gradients(name: str) -> None:
    recipe, dense, names = CASES[name]
    arrays = [ARRAYS[n] for n in names]
    with jax.enable_x64(True):
        truth, gradients = by_numpy(jax.value_and_grad(dense, argnums=(0, 1)), *arrays)
    value, found = by_numpy(jax.value_and_grad(recipe, argnums=(0, 1)), *(x.astype(np.float32) for x in arrays))
    assert truth.dtype == np.float64 and value.dtype == np.float32
    assert abs(float(value) - truth) <= TOLERANCE * max(1.0, abs(truth))
    for mine, true in zip(found, gradients, strict=True):
        assert np.abs(true).max() > 1e-4
        assert np.abs(np.asarray(mine) - true).max() <= TOLERANCE * np.abs(true).max()


def test_accuracy() -> None:
    h, w = (jnp.asarray(ARRAYS[n], jnp.float32) for n in PAIR)
    targets = jnp.where(jnp.arange(T) % 2 == 0, jnp.argmax(h @ w.T, -1), IDS32)
    found = R.accuracy(linear_logprobs(h, w, targets, mask=M), M)
    assert float(found) == float(average((jnp.argmax(h @ w.T, -1) == targets) * 1.0))


SHAPES = {n: jax.ShapeDtypeStruct(x.shape, jnp.float32) for n, x in ARRAYS.items()}
STATISTICS = functools.partial(explain, linear_logprobs, SHAPES["hidden"], SHAPES["lm_head"])
LOSS = functools.partial(explain, linear_grpo_loss, SHAPES["hidden"], SHAPES["lm_head"])
REFERENCE = {"ref_hidden": SHAPES["teacher"], "ref_lm_head": SHAPES["teacher_head"]}
REINFORCE = Objective.reinforce(aggregation="bnpo")
EXPLAINED: dict[str, Callable[[], Any]] = {
    **dict.fromkeys(("smoothed_nll", "dft", "dpo", "orpo", "simpo", "kto"), STATISTICS),
    **dict.fromkeys(("nll", "reward_weighted_nll", "multi_token_nll"), lambda: LOSS(objective=REINFORCE)),
    "grpo_with_exact_kl": lambda: LOSS(objective=Objective.grpo(beta=0.04, kl="full"), **REFERENCE),
    "on_policy_distillation": lambda: explain(linear_distillation_loss, *(SHAPES[n] for n in TEACHER)),
    "rl_with_distillation": lambda: LOSS(objective=REINFORCE.replace(beta=0.5, kl="full"), **REFERENCE),
}


def test_the_page_states_what_explain_says() -> None:
    stated = dict(re.findall(r"^\| .* \| `(\w+)` \| (\d) \|$", PAGE, re.MULTILINE))
    assert stated.keys() == EXPLAINED.keys() == {name.partition(",")[0] for name in CASES}
    for name, count in stated.items():
        assert EXPLAINED[name]().matmuls.startswith(f"{count} ("), name


def test_a_wrong_shift_is_seen_under_context_parallelism() -> None:
    """Zigzag over two devices: targets made before the reorder give the loss of the natural order; after it, not."""
    order = np.array([0, 1, 6, 7, 2, 3, 4, 5])
    ids, hidden = (
        jnp.asarray(RNG.integers(0, V, (B, 8)), jnp.int32),
        jnp.asarray(RNG.normal(size=(B, 8, H)), jnp.float32),
    )
    head, live = jnp.asarray(ARRAYS["lm_head"], jnp.float32), jnp.arange(8) < jnp.asarray([[8], [5], [7], [3]])

    def loss(h: Any, targets: Any, mask: Any) -> Any:
        arrays = {"advantages": ROW32, "mask": mask, "objective": Objective.grpo(entropy_coef=0.1)}
        return linear_grpo_loss(h, head, targets, **arrays)[0]

    natural, gradient = by_numpy(jax.value_and_grad(loss), hidden, *logitless.next_tokens(ids, live))
    found, own = by_numpy(jax.value_and_grad(loss), hidden[:, order], *R.in_order(ids, live, order))
    np.testing.assert_allclose(found, natural, rtol=1e-6)
    np.testing.assert_allclose(own, gradient[:, order], atol=1e-7)
    wrong = by_numpy(loss, hidden[:, order], *logitless.next_tokens(ids[:, order], live[:, order]))
    assert abs(float(wrong) - float(natural)) > 1e-2
