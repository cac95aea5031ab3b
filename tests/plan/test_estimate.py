"""The closed estimate against what compilers have said of H200s and v6e chips, and the numbers of the chips."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import pytest

from logitless import Objective, plan
from logitless.core.compat import mosaic_gpu_reason
from logitless.lab.plan.chips import CHIPS, chip_of_kind, roofline_seconds
from logitless.lab.plan.mesh import parse_mesh, plan_mesh
from logitless.lab.plan.plan import longest_context

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
WITHIN = 0.10
"""The accuracy that ``lab/plan/estimate.py`` and docs/tools.md state."""


def struct(*shape: int, dtype: Any = "bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def read(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


GPU_CASES = {
    "ours/bf16/dw_param": dict(logits_dtype="bfloat16", head_grad_dtype="param"),
    "ours/bf16/dw_float32": dict(logits_dtype="bfloat16"),
    "ours_frozen/bf16": dict(logits_dtype="bfloat16", gradients=("hidden",)),
    "ours_forward/bf16": dict(logits_dtype="bfloat16", gradients=()),
    "ours_gspo/bf16": dict(logits_dtype="bfloat16", head_grad_dtype="param", objective=Objective(level="sequence")),
    "ours/f32/dw_param": dict(head_grad_dtype="param"),
    "ours/f32/dw_float32": {},
    "strong_forward/bf16": dict(logits_dtype="bfloat16", backend="reference", gradients=()),
    "strong/bf16": dict(logits_dtype="bfloat16", backend="reference"),
    "strong/f32": dict(backend="reference"),
}


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


def worst(ratios: dict[Any, float]) -> float:
    """How far the farthest of the estimates is, which is printed."""
    name = max(ratios, key=lambda k: abs(ratios[k] - 1))
    print(f"worst of {len(ratios)}: {ratios[name]:.3f} of the compiler's peak, {name}")
    return abs(ratios[name] - 1)


def test_exact_and_dense_losses_on_an_h200() -> None:
    found = {}
    for file in ("gpu_h200_head.json", "gpu_h200_head_more_shapes.json"):
        for shape, result in read(file)["shapes"].items():
            tokens, width, vocab = map(int, shape.split(","))
            for name in GPU_CASES.keys() & result["cases"].keys():
                row, options = result["cases"][name], {"backend": "chunked", **GPU_CASES[name]}
                p = plan(struct(8, tokens // 8, width), struct(vocab, width), chip="h200", compile=False, **options)
                found[shape, name] = p.peak / sum(row[k] for k in ("arguments", "outputs", "temporaries"))
    assert len(found) > 20 and worst(found) < WITHIN


@pytest.mark.skipif(mosaic_gpu_reason() is not None, reason=f"another way is planned: {mosaic_gpu_reason()}")
def test_a_sparse_backward_on_an_h200() -> None:
    found = {}
    for record in read("gpu_sparse_suite.json")["records"]:
        row, c = record.get("arms", {}).get("default, sparse backward"), record.get("config", {})
        if row is not None:
            h, w = struct(8, c["tokens"] // 8, c["hidden"]), struct(151936, c["hidden"])
            p = plan(h, w, chip="h200", sparse_backward="auto", compile=False)
            found[record["name"]] = p.peak / row["mem/compiler"]["peak"]
    assert len(found) >= 5 and worst(found) < WITHIN
    flat = plan(h, w, chip="h200", sparse_backward="auto", active_columns=1.0, hard_rows=0.0, compile=False)
    assert (p.matmuls, flat.matmuls) == (pytest.approx(1 + 3 * 0.05 + 3 * 0.06), 4)  # no logits were kept


def test_a_v6e() -> None:
    found = {}
    rows = [(*c[:3], None, *c[3:]) for c in TPU_PEAKS] + [(*c[:7], "bfloat16", c[7]) for c in TPU_LORA_PEAKS]
    for n, width, vocab, rank, gradients, masked, entropy, dtype, peak in rows:
        p = plan(
            struct(1, n, width, dtype=dtype), struct(vocab, width, dtype=dtype), gradients=gradients, lora_rank=rank,
            chip="v6e", live_tokens=n if masked else None, compile=False,
            objective=Objective(entropy_coef=0.01 if entropy else None),
        )  # fmt: skip
        found[n, width, rank, gradients, masked, entropy, dtype] = p.peak / peak
    sparse = plan(struct(1, 8192, 4096), struct(151936, 4096), chip="v6e", sparse_backward="auto", compile=False)
    found["sparse"] = sparse.peak / read("tpu_v6e_sparse_estimate.json")["compiled"]["sparse"]["peak_bytes"]
    assert worst(found) < WITHIN


def test_eight_v6e() -> None:
    """A head of 1.2 GB over data, fsdp and tensor (benchmarks/tpu_sharded.py)."""
    found = {}
    for layout, forms in read("tpu_sharded.json")["slices"]["v6e:2x4"].items():
        for form, dtype in (("fused", "float32"), ("fused, dW summed in bfloat16", "param")):
            tokens, axes = (1 if layout == "tensor" else 8) * 8192, parse_mesh(f"{layout}=8")
            p = plan_mesh(4096, 151936, tokens, axes, chip="v6e", head_grad_dtype=dtype, compile=False)
            found[layout, form] = p.peak / forms[form]["peak_bytes"]
    assert worst(found) < WITHIN


def test_the_longest_context_fits_and_one_more_block_does_not() -> None:
    width, vocab = 3584, 152064
    fused, dense = longest_context(width, vocab, chip="v6e", reserved=16e9)
    room = CHIPS["v6e"].hbm_bytes - 16e9
    for tokens, peak in ((fused, "peak"), (dense, "dense_peak")):
        plans = (
            plan(struct(1, n, width), struct(vocab, width), chip="v6e", compile=False) for n in (tokens, tokens + 128)
        )
        fits, over = (getattr(p, peak) for p in plans)
        assert fits <= room < over
    assert fused > 10 * dense
    assert longest_context(width, vocab, chip="v6e", reserved=40e9) == (0, 0)


PUBLIC = {  # GB, GB/s, dense bfloat16 TFLOP/s: the makers' data sheets
    "v5e": (16, 819, 197),
    "v5p": (95, 2765, 459),
    "v6e": (32, 1640, 918),
    "a100": (80, 2039, 312),
    "h100": (80, 3350, 989),
    "h200": (141, 4800, 989),
    "b200": (180, 8000, 2250),
}


def test_chips_have_their_public_numbers() -> None:
    numbers = {k: (c.hbm_bytes / 1e9, c.hbm / 1e9, c.flops / 1e12) for k, c in CHIPS.items()}
    assert numbers == {k: pytest.approx(v, rel=0.02) for k, v in PUBLIC.items()}
    assert chip_of_kind("NVIDIA H200") is CHIPS["h200"] and chip_of_kind("cpu") is None
    chip = CHIPS["v6e"]
    assert roofline_seconds(chip, 2 * chip.flops, chip.hbm) == 2.0
    assert roofline_seconds(chip, chip.flops, 3 * chip.hbm) == 3.0
