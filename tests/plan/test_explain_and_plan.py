"""Which way a call goes, whether it says so, and whether the plan agrees with the compiler."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import logitless
from logitless import Objective
from logitless.core import registry
from logitless.lab.plan import head as planner
from logitless.lab.plan.chips import as_if_on, chip_of

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
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
    with pytest.raises(NotImplementedError, match=r"cannot serve this call.*LoRA of rank 0"):
        logitless.linear_logprobs(
            jnp.zeros((4, 128)), jnp.zeros((256, 128)), jnp.zeros(4, jnp.int32),
            lora=(jnp.zeros((256, 0)), jnp.zeros((0, 128))), backend="pallas_tpu", interpret=True,
        )  # fmt: skip


def test_a_kernel_whose_modules_do_not_import_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "logitless.logits.mosaic_gpu.backend", None)
    monkeypatch.setattr(registry, "backend_of", registry.backend_of.__wrapped__)  # as if it was never asked for
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
    for v, reads in ((280_000, 1), (290_000, 2)):  # a row of more columns does not fit VMEM at once
        wide = logitless.explain(
            logitless.grpo_loss, struct(1, 64, v, dtype=BF16), backend="pallas_tpu", interpret=True
        )
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


PLANS = {
    "all": {},
    "wide": dict(tokens=2048, hidden=1024, vocab=8192, chunk_size=128),
    "frozen": dict(gradients=("hidden",)),
    "forward": dict(gradients=()),
    "gspo": dict(objective=Objective(level="sequence")),
    "default chunk": dict(chunk_size=None),
    "budget": dict(chunk_size=None, memory_budget=8 << 20),
    "dense": dict(backend="reference"),
    "LoRA": dict(lora_rank=16, gradients=("hidden", "lora")),
    "LoRA and the head": dict(lora_rank=16, tokens=1024),
}


@pytest.mark.parametrize("name", PLANS)
def test_plan_agrees_with_the_compiler(name: str) -> None:
    o = dict(tokens=512, hidden=256, vocab=32000, chunk_size=64, gradients=None, lora_rank=None, objective=Objective())
    o.update(PLANS[name])
    tokens, hidden, vocab, gradients, rank = (o.pop(k) for k in ("tokens", "hidden", "vocab", "gradients", "lora_rank"))
    h, w = struct(2, tokens // 2, hidden), struct(vocab, hidden)
    lora = None if rank is None else (struct(vocab, rank), struct(rank, hidden))
    expected = logitless.plan(h, w, gradients=gradients, lora_rank=rank, **o)

    def loss(h: jax.Array, w: jax.Array, lora: Any, y: jax.Array, a: jax.Array) -> Any:
        return logitless.linear_grpo_loss(h, w, y, advantages=a, lora=lora, **o)

    names = ("hidden", "lm_head") if rank is None else ("hidden", "lm_head", "lora")
    wrt = tuple(i for i, k in enumerate(names) if gradients is None or k in gradients)
    f = jax.value_and_grad(loss, argnums=wrt, has_aux=True) if wrt else loss
    y = struct(2, tokens // 2, dtype=jnp.int32)
    memory = jax.jit(f).lower(h, w, lora, y, struct(2)).compile().memory_analysis()
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
    from logitless.core import chunk_size

    monkeypatch.setattr(planner, "platform", lambda: "gpu")
    monkeypatch.setattr(planner, "column_tile", lambda: None)
    monkeypatch.setattr(chunk_size, "platform", lambda: "gpu")
    files = [json.loads((RESULTS / f"gpu_h200_head{f}.json").read_text()) for f in ("", "_more_shapes")]
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


TPU_PEAKS = [
    # tokens, hidden, vocab, gradients, masked, entropy bonus, dtype, peak bytes that libtpu 0.0.50 reports for v6e
    # (logitless tpu compile --topology v6e:2x4 --hidden 4096 --vocab 151936, and so on)
    (8192, 4096, 151936, ("hidden", "lm_head"), False, False, "bfloat16", 2699411488),
    (8192, 4096, 151936, ("hidden", "lm_head"), True, False, "bfloat16", 2825140256),
    (8192, 4096, 151936, ("hidden",), False, False, "bfloat16", 1446103072),
    (8192, 4096, 151936, ("hidden",), True, False, "bfloat16", 1580410912),
    (8192, 4096, 151936, (), False, False, "bfloat16", 1320238688),
    (8192, 4096, 151936, (), True, False, "bfloat16", 1379056224),
    (8192, 4096, 151936, ("hidden", "lm_head"), False, True, "bfloat16", 2959517728),
    (8192, 4096, 151936, ("hidden", "lm_head"), True, True, "bfloat16", 2959547936),
    (65536, 3584, 152064, ("hidden", "lm_head"), False, False, "bfloat16", 3657185312),
    (65536, 3584, 152064, ("hidden", "lm_head"), True, False, "bfloat16", 4598020128),
    (8192, 1536, 151936, ("hidden", "lm_head"), False, False, "bfloat16", 1011348608),  # allocated; "peak" 1062842400
    (8192, 1536, 151936, ("hidden", "lm_head"), False, False, "float32", 2024652320),
]


@pytest.mark.parametrize("case", TPU_PEAKS, ids=lambda c: f"{c[0]}x{c[1]}-{'-'.join(c[3])}-{c[4:7]}")
def test_plan_agrees_with_what_the_tpu_compiler_said(case: Any) -> None:
    n, hidden, vocab, gradients, masked, entropy, dtype, peak = case
    p = logitless.plan(
        struct(1, n, hidden, dtype=dtype), struct(vocab, hidden, dtype=dtype), gradients=gradients, chip="v6e",
        live_tokens=n if masked else None, objective=Objective(entropy_coef=0.01 if entropy else None),
    )  # fmt: skip
    assert p.backend == "pallas_tpu" and p.chunk is None
    assert abs(p.peak / peak - 1) < 0.05, p.peak / peak


TPU_LORA_PEAKS = [
    # tokens, hidden, vocab, rank, gradients, masked, entropy bonus, peak bytes that libtpu 0.0.50 reports for v6e
    (8192, 4096, 151936, 16, ("hidden", "lora"), False, False, 1780488736),
    (8192, 4096, 151936, 16, None, True, False, 3148606496),
    (8192, 1536, 151936, 64, None, False, False, 1246934048),
    (8192, 1536, 151936, 16, ("hidden", "lora"), False, False, 750720032),
    (2048, 512, 32768, 16, ("hidden", "lora"), False, False, 71457824),
    (2048, 512, 32768, 16, ("hidden", "lora"), False, True, 65656864),
    (2048, 512, 32768, 16, None, False, False, 105012256),
    (2048, 512, 32768, 16, ("hidden",), False, False, 57717280),
]


@pytest.mark.parametrize("case", TPU_LORA_PEAKS, ids=lambda c: f"{c[1]}-{c[3:7]}")
def test_plan_agrees_with_what_the_tpu_compiler_said_of_lora(case: Any) -> None:
    n, hidden, vocab, rank, gradients, masked, entropy, peak = case
    p = logitless.plan(
        struct(1, n, hidden, dtype=BF16), struct(vocab, hidden, dtype=BF16), gradients=gradients, lora_rank=rank,
        chip="v6e", live_tokens=n if masked else None, objective=Objective(entropy_coef=0.01 if entropy else None),
    )  # fmt: skip
    assert abs(p.peak / peak - 1) < 0.05, p.peak / peak


def test_the_dense_plan_agrees_with_the_tpu_compiler() -> None:
    h, w = struct(1, 8192, 4096, dtype=BF16), struct(151936, 4096, dtype=BF16)
    for dtype, peak in (("bfloat16", 5.113e9), ("float32", 10.092e9)):  # logitless tpu compile, v6e, jax 0.10 and 0.11
        assert abs(logitless.plan(h, w, chip="v6e", logits_dtype=dtype).dense_peak / peak - 1) < 0.02


def test_plan_counts_the_matmuls_of_the_tpu_kernels() -> None:
    h, w = struct(1, 1024, 256, dtype=BF16), struct(32000, 256, dtype=BF16)

    def matmuls(**options: Any) -> int:
        p = logitless.plan(h, w, chip="v6e", **options)
        assert p.flops == 2 * 1024 * 256 * 32000 * p.matmuls
        return p.matmuls

    assert matmuls() == 4
    assert matmuls(gradients=("hidden",)) == 2
    assert matmuls(gradients=("lm_head",)) == 3
    assert matmuls(gradients=()) == 1
    assert matmuls(objective=Objective(entropy_coef=0.1)) == 5
    assert matmuls(objective=Objective(entropy_coef=0.1), gradients=("hidden",)) == 3
    assert matmuls(objective=Objective(level="sequence")) == 4  # recompute is nothing new here
    assert matmuls(objective=None) == 4
    assert logitless.plan(h, w, chip="v6e", backend="chunked").matmuls == 3


@pytest.mark.parametrize("chip", ["v6e", "h200", "b200"])  # TPU kernels, Hopper's, plain JAX
@pytest.mark.parametrize("objective", [Objective(), Objective(level="sequence"), Objective(entropy_coef=0.1)])
def test_plan_and_explain_agree_on_lora(chip: str, objective: Objective) -> None:
    """The same backend by the same route, and the matmuls that ``explain`` says in words."""
    n, hidden, vocab, rank = 2048, 512, 32000, 16
    h, w = struct(1, n, hidden, dtype=BF16), struct(vocab, hidden, dtype=BF16)
    lora = struct(vocab, rank, dtype=BF16), struct(rank, hidden, dtype=BF16)
    own = dict(objective=objective, backend="chunked" if chip == "b200" else None)
    with as_if_on(chip_of(chip)):
        route = logitless.explain(logitless.linear_grpo_loss, h, w, lora=lora, **own)
    numbers = [int(k) for k in re.findall(r"\d+", route.matmuls)]
    if chip == "v6e":
        both, trained, frozen, none = numbers
        assert "LoRA's factors" in route.way
    else:
        both, frozen, none, *_ = numbers
        trained = frozen  # no wide matmul is LoRA's alone
    wanted = {None: both, ("hidden", "lora"): trained, ("hidden",): frozen, (): none}
    for gradients, matmuls in wanted.items():
        p = logitless.plan(h, w, lora_rank=rank, gradients=gradients, chip=chip, **own)
        assert (p.backend, p.way, p.matmuls) == (route.backend, route.way, matmuls), gradients
        # LoRA's own matmuls are rank / H of a wide one (whole lanes on a TPU), at least one and at most two of each.
        more = p.flops / (2 * n * hidden * vocab) - p.matmuls
        part = (128 if chip == "v6e" else rank) / hidden
        assert part < more < 2.1 * max(matmuls, 1) * part, (gradients, more)
        without = logitless.plan(h, w, gradients=tuple(g for g in gradients or () if g != "lora"), chip=chip, **own)
        assert p.arguments - without.arguments >= 2 * rank * (vocab + hidden)
        assert p.seconds > without.seconds or gradients == ()
    alone = logitless.plan(h, w, lora_rank=rank, gradients=("lora",), chip=chip, **own)
    assert alone.outputs >= 2 * rank * (vocab + hidden) and alone.outputs < 2 * hidden * vocab


def test_what_plan_refuses_of_lora() -> None:
    h, w = struct(1, 64, 128), struct(512, 128)
    with pytest.raises(ValueError, match="gradients has 'lora', and lora_rank is not given"):
        logitless.plan(h, w, gradients=("hidden", "lora"))
    with pytest.raises(ValueError, match="lora_rank=0, expected a positive Python int"):
        logitless.plan(h, w, lora_rank=0)


def test_plan_for_a_chip_that_is_not_here() -> None:
    h, w = struct(1, 8192, 4096, dtype=BF16), struct(151936, 4096, dtype=BF16)
    v6e, v5p = (logitless.plan(h, w, chip=c) for c in ("v6e", "v5p"))
    assert v6e.tiles["dhead"] == "1024x1024" and v5p.tiles["dhead"] == "512x512"  # by the chip's VMEM
    assert v6e.seconds == pytest.approx(4 * 2 * 8192 * 4096 * 151936 / 918e12)
    assert v6e.dense_seconds == pytest.approx(3 * 2 * 8192 * 4096 * 151936 / 918e12)
    h200 = logitless.plan(h, w, chip="h200", logits_dtype="bfloat16", head_grad_dtype="param")
    assert h200.chunk == 2048 and h200.matmuls == 3
    assert "h200 roofline" in str(h200) and "compute" in str(h200)
    assert logitless.plan(h, w, chip="b200").backend == "chunked"  # no kernel of ours serves it
    few = logitless.plan(struct(1, 8, 4096, dtype=BF16), w, chip="h200")
    assert "(memory)" in str(few)  # a handful of tokens only reads the head
    assert logitless.plan(h, w).seconds is None
    with pytest.raises(ValueError, match=r"chip 'h20' is not known.*Did you mean 'h200'"):
        logitless.plan(h, w, chip="h20")
    with pytest.raises(ValueError, match="live_tokens=9000, expected 0 to 8192"):
        logitless.plan(h, w, live_tokens=9000)


def test_plan_says_why_it_did_not_take_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = struct(8, 1024, 4096, dtype=BF16), struct(151936, 4096, dtype=BF16)
    assert "chunked, since no kernel of ours serves this chip" in str(logitless.plan(*shapes, chip="a100"))
    assert "since" not in str(logitless.plan(*shapes, chip="v6e"))
    monkeypatch.setattr(jax, "__version__", "0.10.2")
    old = logitless.plan(*shapes, chip="h200")
    assert old.backend == "chunked" and "it needs jax 0.11 or newer, this is 0.10.2" in str(old)


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
