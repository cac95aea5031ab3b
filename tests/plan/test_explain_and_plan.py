"""Which way a call goes, whether it says so, and that the plan goes the same way."""

import dataclasses
import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import flat_calls
import logitless
from logitless import Objective, Sharding
from logitless.core import registry
from logitless.core.backend import Split
from logitless.core.compat import mosaic_gpu_reason
from logitless.core.problem import Call, HeadArrays, Linear, Problem
from logitless.core.stats import LogitTransform
from logitless.lab.plan.chips import as_if_on, chip_of, mesh_on
from logitless.lab.plan.estimate import CALIBRATED

pytestmark = pytest.mark.quick

F32, BF16 = jnp.float32, jnp.bfloat16
CALL = Call("test", 256, chunk=8)


def struct(*shape: int, dtype: Any = F32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def by(backend: str, **more: Any) -> dict[str, Any]:
    """The options of a call by a named backend."""
    return dict(options=logitless.Options(backend=backend, **more))


def logprobs_of_zeros(width: int = 128, lora: Any = None, **options: Any) -> Any:
    head = logitless.Head(jnp.zeros((256, width)), lora=lora)
    return logitless.linear_logprobs(jnp.zeros((4, width)), head, jnp.zeros(4, jnp.int32), **options)


ZEROS: Any = (jnp.zeros((1, 4, 256)), jnp.zeros((1, 4), jnp.int32))
NAMED: dict[str, Any] = {
    "logprobs": functools.partial(logitless.logprobs, *ZEROS),
    "grpo_loss": functools.partial(logitless.grpo_loss, *ZEROS, advantages=jnp.ones(1)),
    "linear_logprobs": logprobs_of_zeros,
}


@pytest.mark.parametrize("call", NAMED)
@pytest.mark.parametrize("backend", ["pallas_tpu", "mosaic_gpu"])
def test_a_named_kernel_that_cannot_run_here_says_why(call: str, backend: str) -> None:
    with pytest.raises(NotImplementedError, match=rf"backend='{backend}'.*default device here is a CPU"):
        NAMED[call](**by(backend))


def test_what_a_kernel_cannot_serve_is_refused_even_in_the_interpreter() -> None:
    interpreted = by("pallas_tpu", interpret=True)
    with pytest.raises(NotImplementedError, match=r"cannot serve this call.*100.*128"):
        logprobs_of_zeros(100, **interpreted)
    with pytest.raises(NotImplementedError, match=r"cannot serve this call.*LoRA of rank 0"):
        logprobs_of_zeros(lora=(jnp.zeros((256, 0)), jnp.zeros((0, 128))), **interpreted)


def test_a_kernel_whose_modules_do_not_import_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "logitless.logits.mosaic_gpu.backend", None)
    monkeypatch.setattr(registry, "load", registry.load.__wrapped__)  # as if it was never asked for
    with pytest.raises(NotImplementedError, match=r"cannot be loaded.*logitless\[gpu\]"):
        logitless.logprobs(jnp.zeros((4, 256)), jnp.zeros(4, jnp.int32), **by("mosaic_gpu", interpret=True))


@pytest.mark.parametrize("level", ["head", "logits"])
def test_every_candidate_says_what_it_serves(level: Any) -> None:
    """Of both lists: each loads under its name, serves a plain call or says why not, and plain JAX comes last."""
    for sparse in (False, True)[: 2 if level == "head" else 1]:
        candidates = registry.CANDIDATES[level, sparse]
        plain = [c.name for c in candidates if c.name not in registry.RUNS_ON]
        assert [c.name for c in candidates][-len(plain) :] == plain and set(plain) <= {"chunked", "reference"}
        for c in candidates:
            if c.name == "mosaic_gpu" and mosaic_gpu_reason() is not None:
                continue
            backend = registry.load(c)
            assert backend.name == c.name and (backend.kernels is None) == (c.name not in registry.RUNS_ON)
            p = Problem(Linear(struct(8, 128), HeadArrays(struct(256, 128))), struct(8), LogitTransform(), call=CALL)
            p = p if level == "head" else p.with_logits(struct(8, 256))
            why = backend.supports(p, Split())
            narrower = c.name in registry.RUNS_ON or c.teacher_on is not None
            assert why is None or (isinstance(why, str) and narrower)


def test_over_a_mesh_explain_says_why_nothing_is_screened() -> None:
    """A device's gradients are parts of a sum: the sparse backward over chunks serves the call, and explain says so."""
    h, w = struct(8, 512, 1024, dtype=BF16), struct(32000, 1024, dtype=BF16)
    mesh = mesh_on(chip_of("h200"), AbstractMesh((2,), ("data",)))
    sparse = logitless.Options(sparse_backward="auto")
    with as_if_on(chip_of("h200")):
        alone = logitless.explain(logitless.linear_grpo_loss, h, w, options=sparse)
    with as_if_on(chip_of("h200"), mesh):
        where = Sharding(mesh, tokens=P("data"))
        over = logitless.explain(logitless.linear_grpo_loss, h, w, options=sparse, sharding=where)
    if mosaic_gpu_reason() is None:
        assert "screen" in alone.way and alone.without == ()
        assert "no screen in the forward matmul: its gradients are parts of a sum" in over.way
        assert over.backend == alone.backend == "mosaic_gpu" and over.exact_because is None


def test_explain_tells_backend_way_tiles_bytes_and_matmuls() -> None:
    h, w, interpreted = struct(2, 512, 256), struct(32000, 256), by("pallas_tpu", interpret=True)
    uncoupled = logitless.explain(logitless.linear_grpo_loss, h, w, options=logitless.Options(chunk_size=128))
    assert uncoupled.backend == "chunked"
    assert uncoupled.matmuls.startswith("3 (2 with a frozen head")
    assert uncoupled.tiles["chunk"] == 128
    coupled = logitless.explain(logitless.linear_grpo_loss, h, w, objective=Objective(level="sequence"))
    assert coupled.matmuls.startswith("4 (3 with a frozen head")
    assert "whole sequence" in coupled.way
    assert logitless.explain(logitless.linear_logprobs, h, w).matmuls.startswith("4")
    assert "dense" in logitless.explain(logitless.linear_grpo_loss, h, w, **by("reference")).way
    kernel = logitless.explain(logitless.linear_grpo_loss, h, w, **interpreted)
    assert kernel.matmuls.startswith("4 (2 with a frozen head")
    assert "dhead" in kernel.tiles
    bonus = Objective(entropy_coef=0.1)
    assert logitless.explain(logitless.linear_grpo_loss, h, w, objective=bonus, **interpreted).matmuls.startswith("5")
    logits = logitless.explain(logitless.grpo_loss, struct(1, 64, 4096), **interpreted)
    assert "one pass" in logits.way and "read 1x" in logits.bytes_moved
    for v, reads in ((280_000, 1), (290_000, 2)):  # a row of more columns does not fit VMEM at once
        wide = logitless.explain(logitless.grpo_loss, struct(1, 64, v, dtype=BF16), **interpreted)
        assert f"read {reads}x" in wide.bytes_moved
        assert wide.tiles["hbm_bytes"] == (reads + 1) * 64 * v * 2
        assert ("one pass" in wide.way) == (reads == 1)
    two = logitless.explain(logitless.logprobs, struct(1, 64, 4096))
    assert "read 2x" in two.bytes_moved
    assert "chunked" in str(two) and "bytes" in str(two)


def test_explain_refuses_what_it_does_not_know() -> None:
    with pytest.raises(TypeError, match="not one of logprobs"):
        logitless.explain(print, struct(1, 2, 3))
    with pytest.raises(TypeError, match="logits is NoneType"):
        logitless.explain(logitless.grpo_loss)


SHARDED = Sharding(AbstractMesh((2, 2), ("data", "tensor")), tokens=P("data"), head=P("tensor"))
LORA = struct(4096, 16, dtype=BF16), struct(16, 512, dtype=BF16)
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sequence level": dict(objective=Objective(level="sequence")),
    "entropy": dict(objective=Objective(entropy_coef=0.1)),
    "lora": dict(lora=LORA),
    "budget": dict(memory_budget=64 << 20),
    "sparse": dict(sparse_backward="auto"),
    "sharded": dict(sharding=SHARDED),
    "reference head": dict(ref_hidden=struct(4, 512, 512, dtype=BF16), ref_lm_head=struct(4096, 512, dtype=BF16)),
    "reference with a bias": dict(
        ref_hidden=struct(4, 512, 512, dtype=BF16),
        ref_lm_head=logitless.Head(struct(4096, 512, dtype=BF16), bias=struct(4096, dtype=BF16)),  # type: ignore[arg-type]
        sharding=SHARDED,
    ),
    "named": dict(backend="reference"),
}


@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("chip", ["V6e", "h200", "a100", "cpu"])  # TPU kernels, Hopper's, plain JAX
@pytest.mark.parametrize("call", [logitless.linear_grpo_loss, logitless.linear_logprobs])
def test_the_plan_takes_the_route_that_explain_says(call: Any, chip: str, options: dict[str, Any]) -> None:
    if call is logitless.linear_logprobs:
        options = {k: v for k, v in options.items() if k not in ("objective", "ref_hidden", "ref_lm_head")}
    if chip == "a100":  # the kernels that a Hopper GPU would take do not run there
        options = {"backend": "chunked", **options}
    h, w = struct(4, 512, 512, dtype=BF16), struct(4096, 512, dtype=BF16)
    p = flat_calls.plan(call, h, w, chip=chip, compile=False, **options)
    assert p.chip is not None
    mesh = mesh_on(p.chip, SHARDED.mesh)
    own = options | ({"sharding": dataclasses.replace(SHARDED, mesh=mesh)} if "sharding" in options else {})
    with as_if_on(p.chip, mesh if "sharding" in options else None):
        assert p.route == flat_calls.explain(call, h, w, **own)


@pytest.mark.parametrize("call", [logitless.logprobs, logitless.grpo_loss])
@pytest.mark.parametrize("chip", ["v6e", "h200", "cpu"])
def test_the_plan_takes_the_route_that_explain_says_of_logits(call: Any, chip: str) -> None:
    x = struct(2, 64, 4096, dtype=BF16)
    p = logitless.plan(call, x, chip=chip, compile=False)
    with as_if_on(p.chip):
        assert p.route == logitless.explain(call, x)
    assert p.flops == 0 and p.outputs == 2 * 2 * 64 * 4096 and p.dense is None


def test_plan_counts_the_matmuls_of_the_route() -> None:
    """Of each backend, for each set of gradients; LoRA is as many columns more of the hidden states as its rank."""
    h, w = struct(1, 1024, 256, dtype=BF16), struct(32000, 256, dtype=BF16)
    one = 2 * 1024 * 256 * 32000

    def matmuls(chip: str, **options: Any) -> list[float]:
        sets = (None, ("hidden",), ("lm_head",), ())
        plans = [logitless.plan(h, w, chip=chip, gradients=g, compile=False, **options) for g in sets]
        assert all(p.flops == one * p.matmuls for p in plans)
        return [p.matmuls for p in plans]

    assert matmuls("v6e") == [4, 2, 3, 1]
    assert matmuls("v6e", objective=Objective(entropy_coef=0.1)) == [5, 3, 3, 1]
    assert matmuls("v6e", objective=None) == [4, 2, 3, 1]
    for chip in ("h200", "cpu"):
        assert matmuls(chip) == [3, 2, 2, 1]
        assert matmuls(chip, objective=Objective(level="sequence")) == [4, 3, 3, 1]
    assert matmuls("v6e", backend="reference") == [3, 2, 2, 1]
    assert logitless.plan(h, w, live_tokens=256, compile=False).flops == 3 * one // 4
    assert logitless.plan(h, w, reference=True, compile=False).flops == 4 * one
    for chip, wide in (("v6e", 3), ("h200", 2)):
        lora = logitless.plan(h, w, lora_rank=16, gradients=("hidden", "lora"), chip=chip, compile=False)
        assert lora.matmuls == wide and lora.flops == one * wide * (256 + 16) / 256


def test_a_time_is_the_roofline_of_the_chip() -> None:
    h, w = struct(1, 8192, 4096, dtype=BF16), struct(151936, 4096, dtype=BF16)
    p = logitless.plan(h, w, chip="v6e", compile=False)
    assert p.seconds == pytest.approx(4 * 2 * 8192 * 4096 * 151936 / 918e12) and p.fits
    assert "v6e roofline 44.43 ms (compute)" in str(p) and "pallas_tpu, 4 matmuls" in str(p)
    few = logitless.plan(struct(1, 8, 4096, dtype=BF16), w, chip="h200", compile=False)
    assert few.seconds == pytest.approx(few.work.moved / 4800e9) and "(memory)" in str(few)
    assert logitless.plan(h, w, compile=False).seconds is None
    assert logitless.plan(struct(1, 1 << 22, 4096, dtype=BF16), w, chip="v5e", compile=False).fits is False


def test_plan_says_why_it_did_not_take_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = struct(8, 1024, 4096, dtype=BF16), struct(151936, 4096, dtype=BF16)
    assert "chunked, since no kernel of ours serves this chip" in str(logitless.plan(*shapes, chip="a100"))
    monkeypatch.setattr(jax, "__version__", "0.10.2")
    old = logitless.plan(*shapes, chip="h200")
    assert old.backend == "chunked" and "it needs jax 0.11 or newer, this is 0.10.2" in str(old)
    assert not old.compiled and "a program for h200 is compiled where that GPU is" in str(old)


def test_a_sparse_plan_assumes_shares_of_the_policy() -> None:
    """One matmul for the statistics, a share of the columns, all of them for hard rows; the exact way where that is
    less."""
    h, w = struct(8, 1024, 4096, dtype=BF16), struct(151936, 4096, dtype=BF16)

    def matmuls(chip: str, **options: Any) -> float:
        options = {"active_columns": 0.08, "hard_rows": 0.06, "sparse_backward": "auto"} | options
        return logitless.plan(h, w, chip=chip, compile=False, **options).matmuls

    kept, made = 1 + 2 * 0.08 + 3 * 0.06, 1 + 3 * 0.08 + 3 * 0.06
    assert matmuls("h200", backend="chunked") == pytest.approx(kept)
    assert matmuls("h200", backend="chunked", objective=None) == pytest.approx(made)
    assert matmuls("v6e") == pytest.approx(made)
    assert matmuls("v6e", gradients=("hidden",)) == pytest.approx(made - 0.08 - 0.06)
    assert matmuls("h200", backend="chunked", active_columns=1.0) == 3
    assert matmuls("v6e", active_columns=0.01, hard_rows=1.0) == matmuls("v6e", active_columns=1.0) == 4
    assert matmuls("h200", gradients=()) == 1
    p = logitless.plan(h, w, chip="h200", sparse_backward="auto", compile=False)
    assert p.shares == CALIBRATED and "active_columns 0.05" in str(p) and p.record()["shares"]["hard_rows"] == 0.06


H, W = struct(1, 64, 128), struct(512, 128)
SPARSE = dict(sparse_backward="auto")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(chip="h20"), "chip 'h20' is not known.*Did you mean 'h200'"),
        (dict(live_tokens=65), "live_tokens=65, expected 0 to 64"),
        (dict(gradients=("lm_haed",)), "gradients has 'lm_haed'; expected some of.*Did you mean 'lm_head'"),
        (dict(gradients=("hidden", "lora")), "gradients has 'lora', which the call is not given"),
        (dict(lora_rank=0), "lora_rank=0, expected a positive Python int"),
        (dict(memory_budget=100), "memory_budget=100 bytes is less"),
        (dict(sparse_backward="on"), "sparse_backward='on', expected 'off', 'auto'"),
        (dict(active_columns=0.1), "active_columns=0.1 is for a sparse backward"),
        (dict(SPARSE, active_columns=1.5), "active_columns=1.5, expected a share from 0 to 1"),
        (dict(SPARSE, hard_rows=float("nan")), "hard_rows=nan, expected a share"),
        (dict(SPARSE, hard_rows=True), "hard_rows=True, expected a share"),
        (dict(SPARSE), "calibrated shares are for 0.00391.*give active_columns and hard_rows"),  # 2^-24 in float32
    ],
)
def test_what_plan_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        logitless.plan(H, W, **options)


@pytest.mark.parametrize(
    ("call", "options", "message"),
    [
        (print, {}, "'print' is not one of logprobs"),
        (H, dict(vocabulary_shard=True), "give the whole head, and sharding="),
        (logitless.linear_grpo_loss, dict(chunksize=1), r"plan\(linear_grpo_loss\).*chunksize"),
    ],
)
def test_what_plan_refuses_of_a_call(call: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        logitless.plan(call, *((W,) if call is H else (H, W)), **options)
