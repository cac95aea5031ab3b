"""FLOPs and bytes that the TPU kernels say of themselves, worked by hand at small sizes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from logitless.core.problem import Call, HeadArrays, Linear, Problem
from logitless.head.pallas_tpu.backend import describe
from logitless.lab.plan.chips import as_if_on, chip_of


@pytest.mark.parametrize("layout", ["vh", "hv"])
def test_bytes_of_the_tpu_kernels(layout: str) -> None:
    """A sweep over tokens reads the head once for each of its token tiles; one over the vocabulary reads the hidden
    states once for each of its tiles (twice for ``[H, V]``, whose transposed copy stands beside them)."""
    n, width, vocab = 4096, 256, 32768
    shape = (vocab, width) if layout == "vh" else (width, vocab)
    weight, h = jax.ShapeDtypeStruct(shape, jnp.bfloat16), jax.ShapeDtypeStruct((n, width), jnp.bfloat16)
    with as_if_on(chip_of("v6e")):
        about = describe(Problem(Linear(h, HeadArrays(weight, layout=layout)), None, None, call=Call("test", vocab)))  # type: ignore[arg-type]
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
        about = describe(
            Problem(Linear(x["h"], HeadArrays(x["w"], None, x["a"], x["b"])), None, None, call=Call("test", vocab))
        )  # type: ignore[arg-type]
    both, dhead, lora = (about[k] for k in ("token_stats_and_direction", "dhead", "dhead_of_lora"))
    assert both["flops"] == 2 * 2 * n * (width + 128) * vocab and lora["flops"] == 2 * n * (width + 2 * 128) * vocab
    assert lora["matmuls"] == 1
    assert lora["hbm_bytes"] == dhead["hbm_bytes"] - 2 * vocab * (width + 128) + 4 * vocab * 128
