"""Which way a call goes, whether it says so, and whether the plan agrees with the compiler."""

import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import logitless
from logitless import Objective
from logitless.planning import head as planner

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
F32, BF16 = jnp.float32, jnp.bfloat16


def struct(*shape: int, dtype: Any = F32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize("call", [logitless.logprobs, logitless.grpo_loss])
@pytest.mark.parametrize("backend", ["pallas_tpu", "mosaic_gpu"])
def test_a_named_kernel_that_cannot_run_here_says_why(call: Any, backend: str) -> None:
    logits, targets = jnp.zeros((1, 4, 256)), jnp.zeros((1, 4), jnp.int32)
    extra = {"advantages": jnp.ones(1)} if call is logitless.grpo_loss else {}
    with pytest.raises(NotImplementedError, match=rf"backend='{backend}'.*default device here is a CPU"):
        call(logits, targets, backend=backend, **extra)


@pytest.mark.parametrize("backend", ["pallas_tpu", "mosaic_gpu"])
def test_a_named_head_kernel_that_cannot_run_here_says_why(backend: str) -> None:
    with pytest.raises(NotImplementedError, match=rf"backend='{backend}'.*default device here is a CPU"):
        logitless.linear_logprobs(jnp.zeros((4, 128)), jnp.zeros((256, 128)), jnp.zeros(4, jnp.int32), backend=backend)


def test_what_a_kernel_cannot_serve_is_refused_even_in_the_interpreter() -> None:
    with pytest.raises(NotImplementedError, match=r"cannot serve this call.*100.*128"):
        logitless.linear_logprobs(
            jnp.zeros((4, 100)), jnp.zeros((256, 100)), jnp.zeros(4, jnp.int32), backend="pallas_tpu", interpret=True
        )
    with pytest.raises(NotImplementedError, match="LoRA"):
        logitless.linear_logprobs(
            jnp.zeros((4, 128)), jnp.zeros((256, 128)), jnp.zeros(4, jnp.int32),
            lora=(jnp.zeros((256, 2)), jnp.zeros((2, 128))), backend="pallas_tpu", interpret=True,
        )  # fmt: skip


def test_a_kernel_whose_modules_do_not_import_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "logitless.logits.mosaic_gpu", None)
    monkeypatch.delattr("logitless.logits.mosaic_gpu", raising=False)
    with pytest.raises(NotImplementedError, match=r"cannot be loaded.*logitless\[gpu\]"):
        logitless.logprobs(jnp.zeros((4, 256)), jnp.zeros(4, jnp.int32), backend="mosaic_gpu", interpret=True)


def test_explain_tells_backend_way_tiles_bytes_and_matmuls() -> None:
    h, w = struct(2, 512, 256), struct(32000, 256)
    uncoupled = logitless.explain(logitless.linear_grpo_loss, h, w, chunk_size=128)
    assert uncoupled.backend == "chunked"
    assert uncoupled.matmuls.startswith("3 (2 with a frozen head")
    assert uncoupled.tiles["chunk"] == 128
    coupled = logitless.explain(logitless.linear_grpo_loss, h, w, objective=Objective(level="sequence"))
    assert coupled.matmuls.startswith("4 (3 with a frozen head")
    assert "whole sequence" in coupled.way
    assert logitless.explain(logitless.linear_logprobs, h, w).matmuls.startswith("4")
    dense = logitless.explain(logitless.linear_grpo_loss, h, w, backend="reference")
    assert "dense" in dense.way
    kernel = logitless.explain(logitless.linear_grpo_loss, h, w, backend="pallas_tpu", interpret=True)
    assert kernel.matmuls.startswith("4 (2 with a frozen head")
    assert "dhead" in kernel.tiles
    with_entropy = logitless.explain(
        logitless.linear_grpo_loss, h, w, backend="pallas_tpu", interpret=True, objective=Objective(entropy_coef=0.1)
    )
    assert with_entropy.matmuls.startswith("5")
    logits = logitless.explain(logitless.grpo_loss, struct(1, 64, 4096), backend="pallas_tpu", interpret=True)
    assert "one pass" in logits.way and "read 1x" in logits.bytes_moved
    two = logitless.explain(logitless.logprobs, struct(1, 64, 4096))
    assert "read 2x" in two.bytes_moved
    assert "chunked" in str(two) and "bytes" in str(two)


def test_explain_refuses_what_it_does_not_know() -> None:
    with pytest.raises(TypeError, match="not one of logprobs"):
        logitless.explain(print, struct(1, 2, 3))
    with pytest.raises(TypeError, match="logits is NoneType"):
        logitless.explain(logitless.grpo_loss)


PLANS = {
    "all": {},
    "wide": dict(tokens=2048, hidden=1024, vocab=8192, chunk_size=128),
    "frozen": dict(gradients=("hidden",)),
    "forward": dict(gradients=()),
    "gspo": dict(objective=Objective(level="sequence")),
    "default chunk": dict(chunk_size=None),
    "budget": dict(chunk_size=None, memory_budget=8 << 20),
    "dense": dict(backend="reference"),
}


@pytest.mark.parametrize("name", PLANS)
def test_plan_agrees_with_the_compiler(name: str) -> None:
    o = dict(tokens=512, hidden=256, vocab=32000, chunk_size=64, gradients=("hidden", "lm_head"), objective=Objective())
    o.update(PLANS[name])
    tokens, hidden, vocab, gradients = (o.pop(k) for k in ("tokens", "hidden", "vocab", "gradients"))
    h, w = struct(2, tokens // 2, hidden), struct(vocab, hidden)
    expected = logitless.plan(h, w, gradients=gradients, **o)

    def loss(h: jax.Array, w: jax.Array, y: jax.Array, a: jax.Array) -> Any:
        return logitless.linear_grpo_loss(h, w, y, advantages=a, **o)

    wrt = tuple(i for i, k in enumerate(("hidden", "lm_head")) if k in gradients)
    f = jax.value_and_grad(loss, argnums=wrt, has_aux=True) if wrt else loss
    memory = jax.jit(f).lower(h, w, struct(2, tokens // 2, dtype=jnp.int32), struct(2)).compile().memory_analysis()
    peak = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    assert abs(expected.peak / peak - 1) < 0.05
    assert "TFLOP" in str(expected)


GPU_CASES = {
    "ours/bf16/dw_param": dict(logits_dtype="bfloat16", head_grad_dtype="param"),
    "ours/bf16/dw_float32": dict(logits_dtype="bfloat16"),
    "ours_frozen/bf16": dict(logits_dtype="bfloat16", gradients=("hidden",)),
    "ours_forward/bf16": dict(logits_dtype="bfloat16", gradients=()),
    "ours_gspo/bf16": dict(logits_dtype="bfloat16", head_grad_dtype="param", objective=Objective(level="sequence")),
    "ours/f32/dw_param": dict(head_grad_dtype="param"),
    "ours/f32/dw_float32": {},
    "strong/bf16": dict(logits_dtype="bfloat16", backend="reference"),
    "strong/f32": dict(backend="reference"),
}


def test_plan_agrees_with_what_the_gpu_compiler_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from logitless import tiles

    monkeypatch.setattr(planner, "platform", lambda: "gpu")
    monkeypatch.setattr(planner, "column_tile", lambda: None)
    monkeypatch.setattr(tiles, "platform", lambda: "gpu")
    files = [json.loads((RESULTS / f"gpu_h200_head{f}.json").read_text()) for f in ("", "_whole_chunks")]
    recorded = [item for f in files for item in f["shapes"].items()]
    assert len(recorded) >= 3
    for shape, result in recorded:
        tokens, hidden, vocab = (int(x) for x in shape.split(","))
        h, w = struct(8, tokens // 8, hidden, dtype=BF16), struct(vocab, hidden, dtype=BF16)
        for name, options in GPU_CASES.items():
            if name not in result["cases"]:  # a run may have left it out
                continue
            row = result["cases"][name]
            options = {"backend": "chunked", **options}
            expected = logitless.plan(h, w, **options)
            peak = row["arguments"] + row["outputs"] + row["temporaries"]
            assert abs(expected.peak / peak - 1) < 0.05, (shape, name, expected.peak / peak)


def test_plan_counts_matmuls_and_live_tokens() -> None:
    h, w = struct(2, 512, 256), struct(32000, 256)
    one = 2 * 1024 * 256 * 32000
    assert logitless.plan(h, w).flops == 3 * one
    assert logitless.plan(h, w, gradients=("hidden",)).flops == 2 * one
    assert logitless.plan(h, w, objective=None).flops == 4 * one
    assert logitless.plan(h, w, objective=None, gradients=()).flops == one
    assert logitless.plan(h, w, live_tokens=256).flops == 3 * one // 4
    with pytest.raises(ValueError, match="gradients has 'lm_haed'"):
        logitless.plan(h, w, gradients=("lm_haed",))
    with pytest.raises(ValueError, match="memory_budget=100 bytes is less"):
        logitless.plan(h, w, memory_budget=100)
