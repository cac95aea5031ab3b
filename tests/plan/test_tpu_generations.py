"""The public losses on every TPU generation that libtpu knows: both levels compile and fit, or fall back with a reason;
no setting of JAX and no number of tokens keeps a kernel from lowering. Compiled ahead of time, nothing is run."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

import flat_calls
from ahead_of_time import answer_of, needs_libtpu
from logitless.lab.tpu import aot

GENERATIONS = {
    "v2": "v2:2x2", "v3": "v3:2x2", "v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x4",
    "tpu7x": "tpu7x:2x2x1",
}  # fmt: skip
ONE_TOKEN: dict[str, Any] = {"level": "head", "n": 1, "width": 128, "vocab": 256}
WIDE_ROWS: dict[str, Any] = {"level": "logits", "n": 16, "vocab": 151936}
"""As float32 blocks a group of such rows takes more than the 16 MiB of VMEM that v2 to v4 have."""
PRECISIONS = ("default", "high", "highest", "bfloat16", "tensorfloat32", "float32", "BF16_BF16_F32", "F32_F32_F32")


def program(case: dict[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    """Loss and gradients at a level, by the default backend."""
    import jax
    import jax.numpy as jnp

    import logitless

    n, vocab, dtype = case["n"], case["vocab"], case.get("dtype", "bfloat16")
    s = jax.ShapeDtypeStruct
    tokens = (s((1, n), jnp.int32), s((1, n), jnp.float32), s((1,), jnp.float32))
    if case["level"] == "logits":

        def logits_loss(x: Any, y: Any, old: Any, advantages: Any) -> Any:
            return logitless.grpo_loss(x, y, old_logp=old, advantages=advantages)[0]

        return jax.value_and_grad(logits_loss), (s((1, n, vocab), dtype), *tokens)

    layout = case.get("layout", "vh")

    def head_loss(h: Any, w: Any, y: Any, old: Any, advantages: Any) -> Any:
        options: Any = dict(old_logp=old, advantages=advantages, head_layout=layout)
        objective = logitless.Objective(entropy_coef=case.get("entropy"))
        return flat_calls.linear_grpo_loss(h, w, y, objective=objective, **options)[0]

    head = (vocab, case["width"]) if layout == "vh" else (case["width"], vocab)
    return jax.value_and_grad(head_loss, (0, 1)), (s((1, n, case["width"]), dtype), s(head, dtype), *tokens)


def facts_of(case: dict[str, Any]) -> dict[str, Any]:
    """Kernels and bytes of the case's program, compiled for its topology."""
    import jax

    f, shapes = program(case)
    with jax.default_matmul_precision(case.get("precision", "default")):
        compiled = aot.compile_for(GENERATIONS[case["chip"]], f, *shapes)
    pairs = f"[{case['n']},{case['vocab']}]", f"[{case['vocab']},{case['n']}]"
    return {
        "kernels": compiled.kernels,
        "peak": compiled.peak_bytes,
        "outside": compiled.argument_bytes + compiled.output_bytes,
        "logits": any(pair in compiled.text for pair in pairs),
    }


@needs_libtpu
@pytest.mark.slow
def test_public_losses_compile_and_fit() -> None:
    head = {"level": "head", "n": 8192, "width": 4096, "vocab": 151936, "chip": "v6e"}
    logits = {"level": "logits", "n": 4096, "vocab": 151936, "chip": "v6e"}
    one, other = answer_of(__file__, json.dumps([head, logits]))
    assert one["kernels"] == 4 and not one["logits"]
    # Beyond inputs and outputs: E in float32, and the target rows. The compilers that come with jax 0.11 and 0.12 keep
    # one more array of the hidden states' size: 2,892,152,960 bytes in all with 0.12.
    older = aot.versions()["jax"].startswith("0.10.")
    assert one["peak"] <= one["outside"] + (6.25 if older else 8.25) * 8192 * 4096, one
    assert one["peak"] <= (2.75e9 if older else 2.9e9), one
    assert other["kernels"] == 1 and other["peak"] <= 1.01 * 2 * 4096 * 151936 * 2, other


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("chips", [("v3", "v4", "v6e"), ("v2", "v5e", "v5p", "tpu7x")])
def test_one_token_and_wide_rows_compile_on_every_generation(chips: tuple[str, ...]) -> None:
    """One token makes dW of a [V, H] head a matmul with one column; v2 and v3 have no 16-bit matmul in a kernel, and
    up to v4 a row of logits is swept in parts (statistics and dlogits are two kernels there)."""
    cases = [dict(c, chip=chip) for chip in chips for c in (ONE_TOKEN, WIDE_ROWS)]
    found = [case["kernels"] for case in answer_of(__file__, json.dumps(cases))]
    old = ("v2", "v3")
    expected = [
        (0 if c["chip"] in old else 2) if c["level"] == "head" else 1 + (c["chip"] in (*old, "v4")) for c in cases
    ]
    assert found == expected


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("chip", ["v4", "v5e", "v6e", "tpu7x"])
def test_no_default_precision_keeps_a_kernel_from_compiling(chip: str) -> None:
    small = {"n": 136, "width": 256, "vocab": 640, "chip": chip}
    cases = [
        dict(small, precision=precision, **case)
        for precision in PRECISIONS
        for case in (
            {"level": "head"},
            {"level": "head", "layout": "hv", "entropy": 0.1},
            {"level": "head", "dtype": "float32"},
            {"level": "logits"},
            {"level": "logits", "dtype": "float32"},
        )
    ]
    assert all(found["kernels"] >= 1 for found in answer_of(__file__, json.dumps(cases)))


def test_an_old_generation_falls_back_with_the_reason() -> None:
    import jax

    import logitless

    device = jax.sharding.AbstractDevice("TPU v3", 1, "tpu")
    mesh = jax.sharding.AbstractMesh((1,), ("chip",), abstract_device=device)
    h, w = (jax.ShapeDtypeStruct(s, "bfloat16") for s in ((1, 8, 128), (256, 128)))
    with jax.sharding.use_abstract_mesh(mesh):
        said = str(logitless.explain(logitless.linear_logprobs, h, w, jax.ShapeDtypeStruct((1, 8), "int32")))
    assert "no bfloat16 matmul on TPU v3" in said and "backend chunked" in said


if __name__ == "__main__":
    print(json.dumps([facts_of(case) for case in json.loads(sys.argv[1])]))
