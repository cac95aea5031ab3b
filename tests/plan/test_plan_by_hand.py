"""The plan's bytes worked by hand at small sizes, and the public numbers of the chips that it divides by."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from logitless import plan
from logitless.core.problem import Call, Head, Problem
from logitless.head.pallas_tpu.backend import describe
from logitless.lab.plan import head, sparse
from logitless.lab.plan.chips import CHIPS, as_if_on, chip_of, roofline_seconds
from logitless.lab.plan.work import Work

# 6 tokens (all live), hidden size 4, vocabulary 10; bfloat16 operands, float32 logits.
WORK = Work(6, 6, 4, 10, item=2, logit=4, wants_hidden=True, wants_head=True, sum_item=4, masked=False)


def test_bytes_of_the_work() -> None:
    assert WORK.head == 10 * 4 * 2 and WORK.rows == 6 * 4 * 2 and WORK.gradients == 2


def test_traffic_of_the_dense_form() -> None:
    """Logits (240 B) are written, read for the statistics and read for dlogits (120 B), which are written and read by
    two matmuls; each of three matmuls reads or writes the head (80 B) and the hidden states (48 B)."""
    assert head._dense_traffic(WORK) == 3 * 240 + 3 * 120 + 3 * (80 + 48)
    frozen = dataclasses.replace(WORK, wants_head=False)
    assert head._dense_traffic(frozen) == 3 * 240 + 2 * 120 + 2 * (80 + 48)
    alone = dataclasses.replace(WORK, wants_head=False, wants_hidden=False)
    assert head._dense_traffic(alone) == 2 * 240 + 80 + 48
    assert [head._dense_passes(w) for w in (WORK, frozen, alone)] == [2 * 240 + 120, 2 * 240 + 120, 240]


def test_matmuls_and_passes_of_lora() -> None:
    """Rank 1 at H = 4, V = 10. Over the vocabulary (1/4 of a matmul each): low A^T for each time that logits are made,
    dx A, dx^T low. Over the hidden size (1/10): low for each, (dx A) B for dH, (dx A)^T h."""
    w = dataclasses.replace(WORK, rank=1, wants_lora=True)
    assert w.factors == (10 + 4) * 2 and w.backward
    assert w.narrow(1) == pytest.approx(3 / 4 + 3 / 10) and w.narrow(2) == pytest.approx(4 / 4 + 4 / 10)
    frozen = dataclasses.replace(w, wants_lora=False, wants_head=False)
    assert frozen.narrow(1) == pytest.approx(2 / 4 + 2 / 10)
    alone = dataclasses.replace(w, wants_hidden=False, wants_head=False)
    assert alone.backward and alone.narrow(1) == pytest.approx(3 / 4 + 2 / 10)
    nothing = dataclasses.replace(frozen, wants_hidden=False)
    assert not nothing.backward and nothing.narrow(1) == pytest.approx(1 / 4 + 1 / 10)
    # Logits are added to (read and written in float32), and dlogits (2 B) read by two matmuls more.
    h, head_ = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((1, 64, 128), (1024, 128)))
    with_it, without = (
        plan(h, head_, backend="chunked", lora_rank=r, gradients=("hidden", *("lora",) * bool(r))) for r in (8, None)
    )
    assert with_it.passes - without.passes == with_it.moved - without.moved == 64 * 1024 * (8 + 2 * 2)


def test_passes_over_slabs() -> None:
    """Two slabs of four columns: their logits (4 B) and dlogits (2 B), and dH in float32 read and written for each."""
    assert sparse._slab_passes(WORK, 8, 4) == 6 * 8 * (4 + 2) + 2 * (2 * 4 * 6 * 4)
    assert sparse._slab_passes(dataclasses.replace(WORK, wants_hidden=False), 8, 4) == 6 * 8 * (4 + 2)


@pytest.mark.parametrize("layout", ["vh", "hv"])
def test_bytes_of_the_tpu_kernels(layout: str) -> None:
    """A sweep over tokens reads the head once for each of its token tiles; one over the vocabulary reads the hidden
    states once for each of its tiles (twice for ``[H, V]``, whose transposed copy stands beside them)."""
    n, width, vocab = 4096, 256, 32768
    shape = (vocab, width) if layout == "vh" else (width, vocab)
    weight, h = jax.ShapeDtypeStruct(shape, jnp.bfloat16), jax.ShapeDtypeStruct((n, width), jnp.bfloat16)
    with as_if_on(chip_of("v6e")):
        about = describe(Problem(h, Head(weight, layout=layout), None, None, call=Call("test", vocab)))  # type: ignore[arg-type]
    head_bytes, rows, wide = 2**24, 2**21, 2**22  # of W, of H and of a float32 [N, H]
    for name in ("token_stats_and_direction", "dhidden"):
        tiles = n // about[name]["token_tile"]
        assert tiles > 1 and about[name]["hbm_bytes"] == tiles * head_bytes + rows + wide
    both, stats, dhead = (about[k] for k in ("token_stats_and_direction", "token_stats", "dhead"))
    assert stats["hbm_bytes"] == both["hbm_bytes"] - wide
    tiles = vocab // dhead["vocab_tile"]
    assert dhead["hbm_bytes"] == tiles * rows * (1 if layout == "vh" else 2) + 2 * head_bytes
    assert (stats["matmuls"], both["matmuls"], dhead["matmuls"]) == (1, 2, 2)
    assert stats["flops"] == 2 * n * width * vocab and dhead["flops"] == 2 * stats["flops"]


def test_flops_and_bytes_of_lora_on_tpu() -> None:
    """At rank 16 every sweep is 128 wider. With the head frozen the sweep that would make dW makes dA ``[V, 128]``
    float32: it reads the head and writes no dW."""
    n, width, vocab = 4096, 256, 32768
    shapes = dict(w=(vocab, width), a=(vocab, 16), b=(16, width), h=(n, width))
    x = {k: jax.ShapeDtypeStruct(s, jnp.bfloat16) for k, s in shapes.items()}
    with as_if_on(chip_of("v6e")):
        about = describe(Problem(x["h"], Head(x["w"], None, x["a"], x["b"]), None, None, call=Call("test", vocab)))  # type: ignore[arg-type]
    both, dhead, lora = (about[k] for k in ("token_stats_and_direction", "dhead", "dhead_of_lora"))
    assert both["flops"] == 2 * 2 * n * (width + 128) * vocab and lora["flops"] == 2 * n * (width + 2 * 128) * vocab
    assert lora["matmuls"] == 1
    assert lora["hbm_bytes"] == dhead["hbm_bytes"] - 2 * vocab * (width + 128) + 4 * vocab * 128
    one = 2 * n * width * vocab
    for gradients, wide, more in ((("hidden", "lora"), 3, 2), (("lora",), 3, 1)):
        p = plan(
            jax.ShapeDtypeStruct((1, n, width), jnp.bfloat16), x["w"], lora_rank=16, gradients=gradients, chip="v6e"
        )
        swept = both["flops"] + lora["flops"]
        assert p.matmuls == wide
        assert p.flops == pytest.approx(swept + one * 16 * (2 + more) / vocab, rel=1e-6)  # low twice, dH's part, dB


PUBLIC = {  # GB, GB/s, dense bfloat16 TFLOP/s: the makers' data sheets
    "v5e": (16, 819, 197),
    "v5p": (95, 2765, 459),
    "v6e": (32, 1640, 918),
    "a100": (80, 2039, 312),
    "h100": (80, 3350, 989),
    "h200": (141, 4800, 989),
    "b200": (180, 8000, 2250),
}


@pytest.mark.parametrize("name", PUBLIC)
def test_chips_have_their_public_numbers(name: str) -> None:
    chip = CHIPS[name]
    assert (chip.hbm_bytes / 1e9, chip.hbm / 1e9, chip.flops / 1e12) == pytest.approx(PUBLIC[name], rel=0.02)


def test_the_slower_of_compute_and_memory_counts() -> None:
    chip = CHIPS["v6e"]
    assert roofline_seconds(chip, 2 * chip.flops, chip.hbm) == 2.0
    assert roofline_seconds(chip, chip.flops, 3 * chip.hbm) == 3.0
