"""Random public calls against the float64 oracle: dtypes, shapes, layouts, settings of JAX, backends and meshes.

Each run draws a fresh seed. A failure prints the seed of its case: ``LOGITLESS_FUZZ_SEED=<seed>`` makes that case the
first one. ``LOGITLESS_FUZZ_SECONDS`` is the time for each group of cases.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import flat_calls
import logitless
from interpreted import in_numpy
from logitless import Objective, Sharding, oracle
from loss_cases import AGGREGATIONS, POLICY_LEVELS, objective_of

pytestmark = pytest.mark.slow

SEED = int(os.environ.get("LOGITLESS_FUZZ_SEED", secrets.randbits(31)))
SECONDS = float(os.environ.get("LOGITLESS_FUZZ_SECONDS", 45))
GROUPS = ("reference", "chunked", "mesh", "pallas_tpu", "mosaic_gpu")
CALLS = ("linear_grpo_loss", "grpo_loss", "linear_logprobs", "logprobs")
ID_DTYPES = ("int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
ERROR = {"float32": 3e-5, "float16": 4e-3, "bfloat16": 2e-2}
"""Allowed error of a gradient, relative to the sum of its terms' sizes."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A public call: ``primals`` are differentiated, ``weights`` are the cotangents of statistics."""

    call: str
    primals: dict[str, Any]
    rest: dict[str, Any]
    options: dict[str, Any]
    settings: dict[str, bool]
    weights: np.ndarray
    objective: Objective | None

    @property
    def of_head(self) -> bool:
        return self.call.startswith("linear")

    @property
    def dtype(self) -> str:
        return str(next(iter(self.primals.values())).dtype)


# -- drawing a case --------------------------------------------------------------------------------------------------


def draw(seed: int, group: str) -> Case:
    """The case of a seed; sixteen neighbours have one shape, for operations are compiled once for each."""
    rng, sizes = np.random.default_rng(seed), np.random.default_rng(seed // 16)

    def chance(p: float) -> bool:
        return bool(rng.random() < p)

    kernel = group in ("pallas_tpu", "mosaic_gpu")
    call = str(rng.choice(CALLS, p=[0.5, 0.2, 0.2, 0.1]))
    b, t, h = (int(sizes.integers(1, n)) for n in (5, 8, 20))
    v = int(sizes.integers(1, 4)) if sizes.random() < 0.25 else int(sizes.integers(2, 200))
    if group == "mesh":
        b, t, h, v = 4, 2 * int(sizes.integers(1, 4)), 8, 8 * int(sizes.integers(1, 8))
    if kernel:
        h = 128 if call.startswith("linear") else h
    if group == "mosaic_gpu":  # its rows take 64 bytes or more
        v = int(sizes.integers(32, 300))
    # The TPU kernels of the head have no float16.
    halves = ["bfloat16"] if group == "pallas_tpu" else ["bfloat16", "float16"]
    dtype = str(rng.choice(halves)) if chance(0.4) else "float32"

    def normal(*shape: int, scale: float = 1.0, kind: Any = np.float32) -> np.ndarray:
        return np.asarray(jnp.asarray(scale * rng.normal(size=shape), kind))

    options: dict[str, Any] = dict(backend="chunked" if group == "mesh" else group, interpret=kernel)
    if group == "mesh":
        options["sharding"] = sharding_of(rng, call)
    if chance(0.3) and v > 1:
        options["vocab_size"] = int(rng.integers(1, v + 1))
    if chance(0.3):
        options["softcap"] = float(rng.uniform(3, 20))
    if chance(0.3):
        options["scale"] = float(rng.uniform(0.3, 2))
    columns = options.get("vocab_size", v)

    if call.startswith("linear"):
        options["head_layout"] = layout = str(rng.choice(["vh", "hv"])) if group != "mesh" else "vh"
        shape = (v, h) if layout == "vh" else (h, v)
        spread = float(rng.choice([0.3, 1.0, 3.0])) / np.sqrt(h)
        primals: dict[str, Any] = dict(
            hidden=normal(b, t, h, kind=dtype), lm_head=normal(*shape, scale=spread, kind=dtype)
        )
        if chance(0.3):
            primals["bias"] = normal(v, kind=dtype)
        if chance(0.2) and group != "mesh":
            r = int(rng.integers(1, 4))
            primals["lora_a"], primals["lora_b"] = (
                normal(*s, scale=0.2, kind=dtype) for s in ((shape[0], r), (r, shape[1]))
            )
            options["lora_scale"] = float(rng.choice([0.5, 2.0]))
        if group in ("chunked", "mesh") and chance(0.5):
            options["chunk_size"] = int(rng.integers(1, 2 * b * t + 1))
        if group == "chunked" and chance(0.25) and "lora_a" not in primals:
            options["sparse_backward"] = "auto"
    else:
        primals = dict(logits=normal(b, t, v, scale=float(rng.choice([0.5, 3.0])), kind=dtype))

    mask = None if chance(0.2) else rng.random((b, t)) < float(rng.choice([0.0, 0.5, 0.9]))
    ids = rng.integers(0, columns, (b, t))
    if mask is not None and chance(0.5):
        ids = np.where(mask, ids, 255)
    rest: dict[str, Any] = dict(targets=ids.astype(str(rng.choice(ID_DTYPES[: None if v < 255 else 3]))))
    if mask is not None:
        rest["mask"] = mask.astype(str(rng.choice(["bool", "uint8", "int64", "float32"])))
    objective = None
    if call.endswith("loss"):
        objective, arrays = draw_loss(rng, (b, t))
        rest |= arrays
    elif chance(0.5):
        rest["temperature"] = rng.uniform(0.5, 2, (b, t)).astype(np.float32)
    settings = dict(
        x64=chance(0.25), strict=chance(0.3), rank=chance(0.3), jax_inputs=chance(0.4), traced=chance(0.4),
        jit=group not in ("reference", "chunked") or chance(0.1),
    )  # fmt: skip
    return Case(call, primals, rest, options, settings, rng.normal(size=(3, b, t)).astype(np.float32), objective)


def draw_loss(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[Objective, dict[str, Any]]:
    """An objective, and the arrays that it reads."""
    b, t = shape
    fields: dict[str, Any] = {}
    for p, more in (
        (0.3, dict(beta=0.1, kl=str(rng.choice(["k1", "k2", "k3", "k3+"])))),
        (0.3, dict(entropy_coef=0.05)),
        (0.3, dict(correction=str(rng.choice(["token", "sequence", "geometric"])), correction_max=2.0)),
        (0.2, dict(off_policy_threshold=0.2)),
        (0.2, dict(temperature=0.7)),
        (0.2, dict(count_rows="non_empty")),
    ):
        fields |= more if rng.random() < p else {}
    policy, level = POLICY_LEVELS[rng.integers(len(POLICY_LEVELS))]
    if policy == "vespo" and fields.get("correction") == "geometric":
        fields["correction"] = "token"
    objective = objective_of(policy, level, str(rng.choice(AGGREGATIONS)), **fields)

    def logp() -> np.ndarray:
        kind = str(rng.choice(["float32", "float64", "float16"]))
        return (-rng.exponential(size=shape) - 0.5).astype(np.float32).astype(kind)

    form = [(b,), (b, 1), (b, t), (b, t)][packed := int(rng.integers(4))]
    arrays: dict[str, Any] = dict(advantages=rng.normal(size=form).astype(str(rng.choice(["float32", "float64"]))))
    arrays["advantages"] = arrays["advantages"].astype(np.float32).astype(arrays["advantages"].dtype)
    if packed == 3:
        arrays["segment_ids"] = np.cumsum(rng.random(shape) < 0.4, axis=1)
        if rng.random() < 0.5:
            arrays["segment_ids"] = arrays["segment_ids"] * 2**32 + 5
    if rng.random() < 0.6:
        arrays["old_logp"] = logp()
    if objective.beta is not None:
        arrays["ref_logp"] = logp()
    if objective.correction is not None or (objective.off_policy_threshold is not None and rng.random() < 0.5):
        arrays["rollout_logp"] = logp()
    if rng.random() < 0.2:
        arrays["token_weights"] = rng.uniform(0.5, 2, shape).astype(np.float32)
    return objective, arrays


def sharding_of(rng: np.random.Generator, call: str) -> Sharding:
    mesh = jax.make_mesh((2, 2, 2), ("data", "seq", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    tokens = [P("data"), P("data", "seq"), P(("data", "model"), "seq")][rng.integers(3)]
    if not call.startswith("linear"):
        return Sharding(mesh, tokens=tokens, vocab=None if "model" in str(tokens) else "model", replicated="seq")
    head = [P("model"), P(None, "data"), P(None, None)][rng.integers(2 if "model" not in str(tokens) else 3)]
    return Sharding(mesh, tokens=tokens, head=head, replicated=("seq", "model"))


# -- what is right, and what comes out -------------------------------------------------------------------------------


def f64(x: Any) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def truth(case: Case, nudge: float = 1.0) -> dict[str, tuple[np.ndarray, float]]:
    """Loss and gradients in float64, each with the size of its terms; of logits that are ``nudge`` times as large."""
    p = {k: f64(v) for k, v in case.primals.items()}
    if case.of_head:
        w = p["lm_head"]
        s = case.options.get("lora_scale", 1.0)
        if "lora_a" in p:
            w = w + s * p["lora_a"] @ p["lora_b"]
        vh = case.options["head_layout"] == "vh"
        w = w if vh else w.T
        logits = p["hidden"] @ w.T + p.get("bias", 0.0)
    else:
        logits = p["logits"]
    names = ("softcap", "scale", "vocab_size")
    transform = {k: case.options[k] for k in names if k in case.options}
    rest = dict(case.rest)
    y = rest.pop("targets").astype(np.int64)
    if case.objective is not None:
        loss, dl = oracle.grpo_loss(nudge * logits, y, objective=case.objective, **transform, **rest)
    else:
        stats = oracle.token_stats(nudge * logits, y, **transform, **rest)
        dl = oracle.token_stats_vjp(nudge * logits, y, *case.weights, **transform, **rest)
        terms = zip(case.weights, (stats.logp, stats.entropy, stats.lse), strict=True)
        loss = float(sum(np.sum(f64(g) * s) for g, s in terms))
    size = np.abs(dl)
    floor = 1e-3 / y.size
    out = {"loss": (np.asarray(loss), 1.0 + abs(loss))}
    if not case.of_head:
        return out | {"logits": (dl, float(size.max()) + floor)}

    def add(name: str, product: Any, *operands: Any) -> None:
        scale = float(np.max(product(size, *map(np.abs, operands)), initial=0.0))
        out[name] = product(dl, *operands), scale + floor

    h = p["hidden"]
    add("hidden", lambda d, w: d @ w, w)

    def of_head(d: Any, h: Any) -> Any:
        g = np.einsum("btv,bth->vh", d, h)
        return g if vh else g.T

    add("lm_head", of_head, h)
    if "bias" in p:
        add("bias", lambda d: d.sum((0, 1)))
    if "lora_a" in p:
        add("lora_a", lambda d, h, b: s * of_head(d, h) @ b.T, h, p["lora_b"])
        add("lora_b", lambda d, h, a: s * a.T @ of_head(d, h), h, p["lora_a"])
    return out


def called(case: Case) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Loss, gradients and metrics of the public call, under the settings of the case."""
    on = case.settings
    with contextlib.ExitStack() as settings:
        if on["x64"]:
            settings.enter_context(jax.enable_x64(True))
        if on["strict"]:
            settings.enter_context(jax.numpy_dtype_promotion("strict"))
        if on["rank"]:
            settings.enter_context(jax.numpy_rank_promotion("raise"))
        # Segment ids of 64 bits are for NumPy alone, where JAX has no such arrays.
        wide = "segment_ids" in case.rest and case.rest["segment_ids"].max() > 2**31 and not on["x64"]
        rest = case.rest if wide or not (on["jax_inputs"] or on["traced"]) else jax.tree.map(jnp.asarray, case.rest)

        def loss(primals: dict[str, Any], rest: dict[str, Any]) -> Any:
            given = dict(primals)
            if "lora_a" in given:
                given["lora"] = given.pop("lora_a"), given.pop("lora_b")
            call = getattr(flat_calls, case.call)
            if case.objective is not None:
                return call(**given, **rest, **case.options, objective=case.objective)
            stats = call(**given, **rest, **case.options)
            terms = zip(case.weights, (stats.logp, stats.entropy, stats.lse), strict=True)
            return sum(jnp.sum(g * s) for g, s in terms), {}

        def step(primals: dict[str, Any], traced: dict[str, Any]) -> Any:
            return jax.value_and_grad(loss, has_aux=True)(primals, traced or rest)

        run = jax.jit(step) if on["jit"] else in_numpy(step)
        primals = jax.tree.map(jnp.asarray, case.primals)
        (value, metrics), gradients = jax.device_get(run(primals, rest if on["traced"] and not wide else {}))
        values = logitless.metric_values(metrics)
    return dict(gradients, loss=value), values


def judge(case: Case) -> None:
    got, metrics = called(case)
    want = truth(case)
    assert got.keys() == want.keys()
    nudged: list[dict[str, tuple[np.ndarray, float]]] = []
    for name, (right, size) in want.items():
        found = f64(got[name])
        assert found.shape == right.shape, name
        bound = (1e-4 if name == "loss" else ERROR[case.dtype]) * size
        if np.abs(found - right).max() <= bound:
            continue
        # At the edge of a clip, and where exponentials grow, a rounding of the logits is worth more than that.
        nudged = nudged or [truth(case, 1 + e) for e in (1e-5, -1e-5)]
        swing = max(float(np.abs(n[name][0] - right).max()) for n in nudged)
        error = float(np.abs(found - right).max())
        assert error <= bound + 3 * swing, f"{name} is off by {error:.2e}, allowed are {bound:.2e} + 3 x {swing:.2e}"
    if case.objective is not None and metrics["live_token_share"]:
        assert metrics["ratio_min"] <= metrics["ratio"] <= metrics["ratio_max"]
        assert all(np.isfinite(x) for x in metrics.values())


@pytest.mark.parametrize("group", GROUPS)
def test_random_calls(group: str) -> None:
    end, seed = time.monotonic() + SECONDS, SEED
    while seed == SEED or time.monotonic() < end:
        case = draw(seed, group)
        try:
            judge(case)
        except Exception as error:
            shapes = {k: (v.shape, str(v.dtype)) for k, v in (case.primals | case.rest).items()}
            text = f"LOGITLESS_FUZZ_SEED={seed}, {group}: {case.call} {shapes} {case.options} {case.settings}"
            raise AssertionError(f"{text} {case.objective}: {type(error).__name__}: {error}") from error
        seed += 1
    print(f"{seed - SEED} cases of {group} from LOGITLESS_FUZZ_SEED={SEED}")
