"""Random calls of the Hopper kernels on a Hopper GPU, against float64 and against the dense path on the same device.

``pytest -m gpu tests/head/test_gpu_fuzz.py``. Seeds change with the run and are part of a test's name;
``LOGITLESS_FUZZ_SEED=7`` repeats those from 7 on, ``LOGITLESS_FUZZ_CASES=20`` asks for so many. Each case is one
program, run on three batches: masks, targets and advantages of the last two are drawn anew.
"""

from __future__ import annotations

import dataclasses
import os
import time
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flat_calls
from logitless import Objective, oracle
from logitless.lab.bench import realistic
from numerics import f64

FOUND = f"{jax.devices()[0].device_kind}, {getattr(jax.devices()[0], 'compute_capability', 'no GPU')}"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason=f"it runs on a Hopper GPU; here is {FOUND}"),
]

RUN = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(time.time()))  # xdist's processes have to draw the same cases
FIRST = int(os.environ.get("LOGITLESS_FUZZ_SEED", zlib.crc32(RUN.encode()) % 10**8))
SEEDS = range(FIRST, FIRST + int(os.environ.get("LOGITLESS_FUZZ_CASES", 12)))
BATCHES = 3
FACTOR = 1.5
OBJECTIVES: dict[str, dict[str, Any]] = {
    "clip": dict(aggregation="dapo"),
    "entropy": dict(aggregation="bnpo", entropy_coef=0.05),
    "cispo": dict(policy="cispo", eps_high=5.0),
    "sapo": dict(policy="sapo"),
    "temperature": dict(aggregation="dapo", temperature=0.7),
    "GSPO": dict(level="sequence"),
    "GSPO, entropy": dict(level="sequence", entropy_coef=0.05),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """The static side of a call."""

    seed: int
    shape: tuple[int, int]  # sequences, tokens
    width: int
    vocab: int
    kind: str  # of logits
    dtype: str
    objective: str
    options: dict[str, Any]
    head: dict[str, Any]  # numbers of the head; "bias" is added with the arrays

    @property
    def sparse(self) -> bool:
        return "sparse_backward" in self.options

    @property
    def rounded(self) -> bool:
        return "logits_dtype" in self.options


def drawn(seed: int) -> Case:
    """The case of a seed."""
    rng = np.random.default_rng(seed)

    def one(*choices: Any) -> Any:
        return choices[rng.integers(len(choices))]

    sparse = rng.random() < 0.5
    tokens = int(one(rng.integers(1, 40), 100, rng.integers(40, 400), rng.integers(400, 1500)))
    rows = int(one(1, rng.integers(1, 8)))
    width = int(64 * rng.integers(1, 9) if sparse or rng.random() < 0.5 else 8 * rng.integers(2, 40))
    vocab = int(8 * rng.integers(32, 1000) if sparse or rng.random() < 0.5 else rng.integers(64, 6000))
    if rng.random() < 0.5:
        vocab = -(-vocab // 64) * 64
    layout = "hv" if vocab % 64 == 0 and rng.random() < 0.4 else "vh"
    options: dict[str, Any] = dict(head_layout=layout)
    chunk = one(None, 1, 9, 128, 256, 1024, rng.integers(1, tokens * rows + 1))
    if chunk is not None:
        options["chunk_size"] = max(int(chunk), tokens * rows // 40)  # no more than 40 chunks
    if rng.random() < 0.35:
        options["logits_dtype"] = "bfloat16"
    if sparse:
        options["sparse_backward"] = "auto"
        if chunk is None and rng.random() < 0.3:
            options["memory_budget"] = tokens * rows * vocab * 8
    head: dict[str, Any] = {}
    if rng.random() < 0.3:
        head["scale"] = float(one(0.5, 1.5, 2.0))
    if rng.random() < 0.3:
        head["softcap"] = float(one(8.0, 30.0))
    if rng.random() < 0.3:
        head["vocab_size"] = int(rng.integers(vocab // 2, vocab))
    if rng.random() < 0.4:
        head["bias"] = True
    kind = one("flat", "realistic", "peaked")
    dtype = one("bfloat16", "bfloat16", "bfloat16", "float32")
    shape = (rows, max(tokens // rows, 1))
    return Case(seed, shape, width, vocab, kind, dtype, one(*OBJECTIVES), options, head)


def parameters(c: Case) -> dict[str, np.ndarray]:
    """Hidden states, a head ``[V, H]`` and perhaps its bias."""
    rng, n, dtype = np.random.default_rng([c.seed, 1]), int(np.prod(c.shape)), jnp.dtype(c.dtype)
    if c.kind == "realistic":
        h, w = realistic.realistic_head(n, c.width, c.vocab, c.seed, dtype)
    else:
        w = rng.standard_normal((c.vocab, c.width)) * (2.0 / c.width**0.5)
        h = rng.standard_normal((n, c.width))
        if c.kind == "peaked":
            lead = w[rng.integers(0, c.vocab, n)]
            h += rng.uniform(4, 20, (n, 1)) * lead / np.sum(lead**2, 1, keepdims=True)
    out = dict(hidden=h.reshape(*c.shape, -1).astype(dtype), lm_head=w.astype(dtype))
    if c.head.get("bias"):
        out["bias"] = (0.5 * rng.standard_normal(c.vocab)).astype(dtype)
    return out


def fixed(c: Case, objective: Objective) -> dict[str, Any]:
    """What is the same for all forms of a call but the oracle's layout."""
    return dict({k: v for k, v in c.head.items() if k != "bias"}, objective=objective)


def batch(c: Case, x: dict[str, np.ndarray], at: int) -> dict[str, np.ndarray]:
    """Targets that the policy might have drawn, masks from empty to full, and old log-probabilities off every edge."""
    rng, real = np.random.default_rng([c.seed, 2, at]), c.head.get("vocab_size", c.vocab)
    y = rng.integers(0, real, c.shape).astype(np.int32)
    if c.kind != "flat":
        z = f64(x["hidden"]).reshape(-1, c.width) @ f64(x["lm_head"])[:real].T
        likely = np.argmax(z, 1).reshape(c.shape)
        y = np.where(rng.random(c.shape) < 0.9, likely, y).astype(np.int32)
    live = rng.choice([0.02, 0.3, 0.9, 1.0, 1.0])
    o = Objective(**OBJECTIVES[c.objective])
    given = {k: v for k, v in fixed(c, o).items() if k != "objective"}
    logp = oracle.linear_token_stats(
        x["hidden"], x["lm_head"], y, bias=x.get("bias"), head_layout="vh", temperature=o.temperature, **given
    ).logp
    far = np.where(rng.random(c.shape) < 0.2, 1.5, 0.02) if o.level == "token" else 0.02
    advantages = rng.standard_normal(c.shape[0]).astype(np.float32)
    advantages[rng.random(c.shape[0]) < 0.2] = 0
    return dict(
        targets=y,
        mask=rng.random(c.shape) < live,
        advantages=advantages,
        old_logp=(logp + far * rng.choice([-1.0, 1.0], c.shape)).astype(np.float32),
    )


def program(c: Case, backend: str) -> Any:
    """``(loss, gradients)`` of the parameters and a batch."""
    o = Objective(**OBJECTIVES[c.objective])
    options = {k: v for k, v in c.options.items() if k in ("head_layout", "logits_dtype")}
    options = dict(options if backend == "reference" else c.options, backend=backend)

    @jax.jit
    def run(x: dict[str, Any], rest: dict[str, Any]) -> Any:
        def loss(x: dict[str, Any]) -> Any:
            return flat_calls.linear_grpo_loss(**x, **rest, **fixed(c, o), **options)[0]

        return jax.value_and_grad(loss)(x)

    return run


def largest_row(a: np.ndarray) -> float:
    """The largest norm of a row."""
    return float(np.max(np.linalg.norm(np.atleast_2d(a), axis=-1)))


def left_out(c: Case, x: dict[str, np.ndarray], rest: dict[str, np.ndarray]) -> dict[str, float]:
    """What a sparse backward's gradients may lack in norm: of every token 2^-8 (half an ulp of float32 operands) of the
    sum of its cotangents' magnitudes."""
    if not c.sparse:
        return dict.fromkeys(("hidden", "lm_head", "bias"), 0.0)
    o = Objective(**OBJECTIVES[c.objective])
    given = dict({k: v for k, v in c.head.items() if k != "bias"}, temperature=o.temperature, bias=x.get("bias"))
    stats = oracle.linear_token_stats(
        x["hidden"], x["lm_head"], rest["targets"], mask=rest["mask"], head_layout="vh", **given
    )
    inputs = {k: v for k, v in rest.items() if k != "targets"}
    _, dlogp, dentropy = oracle.policy_loss_grad(stats.logp, stats.entropy, objective=o, **inputs)
    tolerance = 2.0**-8 if c.dtype == "bfloat16" else 2.0**-24
    lost = tolerance * (np.abs(dlogp) + np.abs(dentropy)) * c.head.get("scale", 1.0) / (o.temperature or 1.0)
    rows, columns = (np.linalg.norm(f64(x[k]), axis=-1) for k in ("hidden", "lm_head"))
    return dict(
        hidden=float(np.linalg.norm(lost) * columns.max()),
        lm_head=float(np.sum(lost * rows)),
        bias=float(np.sum(lost)),
    )


def judge(label: str, c: Case, got: Any, plain: Any, true: Any, lost: float) -> list[str]:
    """What is further from the truth than the dense path may be: in norm, and in the largest error of a row."""
    if not np.isfinite(f64(got)).all():
        return [f"{label}: not finite"]
    dtype = jnp.dtype(c.dtype)
    floor = max(2 * float(jnp.finfo(jnp.float32).eps), float(jnp.finfo(dtype).eps) / 4)
    floor += 2.0**-8 if c.rounded else 0.0  # with a token or two either of them may be lucky
    true, wrong = f64(true), []
    for name, size in {"norm": np.linalg.norm, "row": largest_row}.items():
        error, ordinary, whole = (float(size(a)) for a in (f64(got) - true, f64(plain) - true, true))
        bound = FACTOR * ordinary + 2 * floor * whole + lost
        if error > bound:
            wrong.append(f"{label}, {name}: {error:.3e} above {bound:.3e} (dense {ordinary:.3e}, of {whole:.3e})")
    return wrong


def as_given(c: Case, x: dict[str, np.ndarray], mask: np.ndarray) -> dict[str, Any]:
    """For the device: NaN in half of the masked tokens, the head in its layout."""
    hidden = np.array(x["hidden"])
    dead = ~mask & (np.arange(mask.size).reshape(mask.shape) % 2 == 0)
    hidden[dead] = np.nan
    w = x["lm_head"] if c.options["head_layout"] == "vh" else np.ascontiguousarray(x["lm_head"].T)
    return jax.tree.map(jnp.asarray, {**x, "hidden": hidden, "lm_head": w})


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_call_is_as_good_as_the_dense_one(seed: int) -> None:
    c = drawn(seed)
    print(c)
    x, wrong = parameters(c), []
    kernel, dense = program(c, "mosaic_gpu"), program(c, "reference")
    for at in range(BATCHES):
        rest = batch(c, x, at)
        arrays = as_given(c, x, rest["mask"])
        got, plain = (jax.device_get(f(arrays, rest)) for f in (kernel, dense))
        o = Objective(**OBJECTIVES[c.objective])
        loss, *grads = oracle.linear_grpo_loss(
            x["hidden"], x["lm_head"], bias=x.get("bias"), head_layout="vh", **rest, **fixed(c, o)
        )
        floor = (2.0**-8 if c.rounded else 4e-6) * (1 + abs(loss))
        if not abs(got[0] - loss) <= FACTOR * abs(plain[0] - loss) + floor:
            wrong.append(f"batch {at}, loss: {got[0]} for {loss} (dense {plain[0]})")
        lost = left_out(c, x, rest)
        for name, true in zip(("hidden", "lm_head", "bias"), grads, strict=True):
            if true is not None:
                turned = true.T if (name, c.options["head_layout"]) == ("lm_head", "hv") else true
                wrong += [f"batch {at}, {w}" for w in judge(name, c, got[1][name], plain[1][name], turned, lost[name])]
    assert not wrong, f"{c}\n" + "\n".join(wrong)
