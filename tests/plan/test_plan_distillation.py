"""``plan`` of calls with a teacher: matmuls and FLOPs of both widths, memory of both models' logits, the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import logitless as L
from logitless.lab import cli
from logitless.lab.plan.plan import plan

N, H, H2, V = 8192, 4096, 2048, 151936
MIB = 1 << 20


def struct(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


HIDDEN, HEAD, THEIRS, TEACHER = struct(8, N // 8, H), struct(V, H), struct(8, N // 8, H2), struct(V, H2)


def test_matmuls_flops_and_memory_of_both_models() -> None:
    """Three matmuls of the student's width and one of the teacher's; on an H200 the dense form keeps logits of both and
    dlogits, 11,870 MiB of temporaries with float32 logits (measured)."""
    common = dict(chip="h200", compile=False)
    p = plan(L.linear_distillation_loss, HIDDEN, HEAD, THEIRS, TEACHER, **common)
    assert p.matmuls == 4 and p.flops == 2 * N * V * (3 * H + H2)
    assert p.dense is not None and p.dense.flops == p.flops
    assert p.dense.temporaries / MIB == pytest.approx(11870, rel=0.001)
    bf16 = plan(L.linear_distillation_loss, HIDDEN, HEAD, THEIRS, TEACHER, options=L.Options(logits_dtype="bfloat16"),
                **common)  # fmt: skip
    assert bf16.dense is not None and bf16.dense.temporaries / MIB == pytest.approx(7122, rel=0.001)
    chunk = p.route.tiles["chunk"]
    assert p.temporaries >= 2 * 4 * chunk * V
    quarter = plan(L.linear_distillation_loss, HIDDEN, HEAD, THEIRS, TEACHER, live_tokens=N // 4, **common)
    assert quarter.flops == p.flops // 4
    frozen = plan(L.linear_distillation_loss, HIDDEN, HEAD, THEIRS, TEACHER, gradients=("hidden",), **common)
    assert frozen.matmuls == 3 and frozen.flops == 2 * N * V * (2 * H + H2)


def test_other_calls_with_a_second_model() -> None:
    """Statistics by recompute take six matmuls; a reference's states serve the exact KL in the same sweep, and an
    estimate of it in one before."""
    common = dict(chip="h200", compile=False)
    p = plan(L.linear_divergence, HIDDEN, HEAD, THEIRS, TEACHER, **common)
    assert p.matmuls == 6 and p.flops == 2 * N * V * (4 * H + 2 * H2)
    reference = dict(ref_hidden=THEIRS, ref_lm_head=TEACHER)
    full, k3 = (
        plan(L.linear_grpo_loss, HIDDEN, HEAD, objective=L.Objective(beta=0.1, kl=kl), **reference, **common)
        for kl in ("full", "k3")
    )
    assert full.flops == k3.flops == 2 * N * V * (3 * H + H2) and full.matmuls == k3.matmuls == 4
    assert (
        plan(HIDDEN, HEAD, teacher=H2, **common).record()
        == plan(L.linear_distillation_loss, HIDDEN, HEAD, THEIRS, L.Head(TEACHER, layout="vh"), **common).record()
    )
    sparse = plan(HIDDEN, HEAD, teacher=H2, sparse_backward="auto", backend="chunked", **common)
    assert 2 < sparse.matmuls < 3
    hot = L.Distillation(hard_weight=0.5, temperature=2.0)
    with pytest.raises(ValueError, match="a second call over the student alone"):
        plan(L.linear_distillation_loss, HIDDEN, HEAD, THEIRS, TEACHER, distillation=hot, **common)
    with pytest.raises(ValueError, match="teacher='4096', expected the width"):
        plan(HIDDEN, HEAD, teacher="4096", **common)


def test_the_real_program_on_this_machine() -> None:
    """Compiled for a CPU: bytes are the compiler's, with two heads among the arguments."""
    h, w, th, tw = (struct(*s, dtype=jnp.float32) for s in ((1, 64, 32), (512, 32), (1, 64, 48), (512, 48)))
    p = plan(L.linear_distillation_loss, h, w, th, tw, chip="cpu", compile=True)
    assert p.compiled and p.arguments >= 4 * (64 * 80 + 512 * 80)
    from_logits = plan(L.divergence, struct(1, 8, 64, dtype=jnp.float32), struct(1, 8, 64, dtype=jnp.float32))
    assert from_logits.compiled


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.jsonl"
    sizes = ["--hidden", "4096", "--vocab", "151936", "--chip", "h200", "--no-compile"]
    assert cli.main(["plan", *sizes, "--teacher", "2048", "--divergence", "jsd", "--out", str(out)]) == 0
    assert "4 matmuls" in capsys.readouterr().out
    assert json.loads(out.read_text())["plan"]["flops"] == 2 * N * V * (3 * H + H2)
    mesh = ["--mesh", "data=2,tensor=2", "--chip", "v6e"]
    assert cli.main(["plan", "--hidden", "256", "--vocab", "4096", "--teacher", "128", "--no-compile", *mesh]) == 0
    assert cli.main(["plan", *sizes, "--divergence", "jsd"]) == 2
    assert "--divergence is from a teacher" in capsys.readouterr().err
    assert cli.main(["plan", *sizes, "--teacher", "64", "--sequence-level"]) == 2


def test_slabs_of_columns_on_a_tpu() -> None:
    """Both KLs on a v6e: the estimate is near what libtpu says (benchmarks/results/tpu_distill.json)."""
    record = json.loads((Path(__file__).parents[2] / "benchmarks" / "results" / "tpu_distill.json").read_text())
    common = dict(chip="v6e", compile=False, options=L.Options(head_grad_dtype="param"))
    p = plan(L.linear_distillation_loss, HIDDEN, HEAD, HIDDEN, HEAD, **common)
    assert p.matmuls == 6 and p.flops == 12 * N * V * H and "slabs" in p.route.way
    beside = record["programs"]["slabs, default"]["beside_bytes"]
    assert beside / 1.6 < p.temporaries < 2 * beside
    jsd = L.Distillation(divergence="jsd")
    rows = plan(L.linear_distillation_loss, HIDDEN, HEAD, HIDDEN, HEAD, distillation=jsd, **common)
    assert rows.temporaries > 3 * p.temporaries
