"""``logitless plan``: the command, the longest context, meshes, and the page of predictions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from logitless.lab import cli
from logitless.lab.plan import scaling
from logitless.lab.plan.chips import CHIPS, chip_of_kind
from logitless.lab.plan.head import longest_context
from logitless.lab.plan.mesh import MeshPlan, parse_mesh, plan_mesh
from logitless.lab.tools.shapes import MODELS

ROOT = Path(__file__).parents[2]
H, V = MODELS["qwen2.5-7b"].hidden, MODELS["qwen2.5-7b"].vocab
HEAD = H * V * 2


def mesh(text: str, tokens: int = 8192, chip: str = "v6e", **options: Any) -> MeshPlan:
    axes = parse_mesh(text)
    return plan_mesh(H, V, tokens * axes["data"] * axes["fsdp"], axes, chip=chip, **options)


def sent(p: MeshPlan) -> dict[str, float]:
    return {c.what: c.link_bytes + c.network_bytes for c in p.collectives}


def test_a_mesh_of_one_chip_is_a_plan() -> None:
    p = mesh("data=1")
    assert p.chips == 1 and p.collectives == () and p.efficiency == 1.0 and p.peak == p.head.peak


def test_what_each_axis_sends() -> None:
    assert sent(mesh("data=8")) == pytest.approx({"all-reduce of dW": 2 * 2 * HEAD * 7 / 8})  # in float32
    assert sent(mesh("data=8", head_grad_dtype="param")) == pytest.approx({"all-reduce of dW": 2 * HEAD * 7 / 8})
    assert sent(mesh("fsdp=8")) == pytest.approx(  # in parts, gathered in each pass
        {"all-gather of the head": 2 * HEAD * 7 / 8, "reduce-scatter of dW": 2 * HEAD * 7 / 8}
    )
    assert sent(mesh("fsdp=8", chip="h100"))["all-gather of the head"] == pytest.approx(HEAD * 7 / 8)
    tensor = sent(mesh("tensor=4"))
    assert tensor["all-reduce of dH"] == pytest.approx(2 * 8192 * H * 4 * 3 / 4)
    assert tensor["all-reduce of per-token scalars"] < 0.01 * tensor["all-reduce of dH"]
    assert "all-reduce of dW" not in tensor  # each chip has its own columns
    assert set(sent(mesh("data=2,fsdp=2", gradients=("hidden",)))) == {"all-gather of the head"}
    assert sent(mesh("data=2,fsdp=4,tensor=2"))["all-reduce of dW"] == pytest.approx(2 * 2 * HEAD / 8 / 2)


def test_what_lora_sends() -> None:
    """Its outer factor, [V, 16], is cut as the head is; the inner one, [16, H], is whole. Gradients in float32."""
    outer, inner, frozen = 16 * V, 16 * H, dict(lora_rank=16, gradients=("hidden", "lora"))
    names = "all-gather of LoRA's factor", "reduce-scatter of LoRA's gradient", "all-reduce of LoRA's gradients"
    assert sent(mesh("data=8", **frozen)) == pytest.approx({names[2]: 2 * 4 * (outer + inner) * 7 / 8})
    fsdp = {"all-gather of the head": HEAD * 7 / 8}  # whole, once
    fsdp |= dict(zip(names, (2 * outer * 7 / 8, 4 * outer * 7 / 8, 2 * 4 * inner * 7 / 8), strict=True))
    assert sent(mesh("fsdp=8", **frozen)) == pytest.approx(fsdp)
    assert sent(mesh("fsdp=8", lora_rank=16))["all-gather of the head"] == pytest.approx(HEAD * 7 / 8)
    assert sent(mesh("tensor=4", **frozen))[names[2]] == pytest.approx(2 * 4 * inner * 3 / 4)
    assert set(sent(mesh("data=8", lora_rank=16, gradients=("hidden",)))) == set()
    assert {"all-reduce of dW", names[2]} == set(sent(mesh("data=8", lora_rank=16)))


def test_each_chip_has_its_share() -> None:
    whole, rows, columns = mesh("data=1"), mesh("data=64"), mesh("tensor=8")
    assert rows.head.flops == whole.head.flops  # weak scaling: as many tokens on each
    assert columns.head.flops * 8 == whole.head.flops
    assert columns.peak < whole.peak / 3
    assert (columns.head.matmuls, mesh("tensor=8", chip="h100").head.matmuls) == (4, 4)  # by recompute off TPUs
    # Shards of head and dW, an eighth of the head; two accumulators of the direction, the targets' rows twice.
    more = HEAD // 8 + 12 * 8192 * H
    assert mesh("fsdp=8").peak == whole.head.arguments + whole.head.outputs - 2 * (HEAD * 7 // 8) + more
    frozen = mesh("data=1", gradients=("hidden",)).head
    assert mesh("fsdp=8", gradients=("hidden",)).peak == frozen.arguments + frozen.outputs - HEAD * 7 // 8 + more
    # A small head is gathered whole, and dW is whole until it is reduced.
    small, alone = (plan_mesh(1024, 32768, n * 2048, parse_mesh(f"fsdp={n}"), chip="v6e") for n in (8, 1))
    assert small.peak == alone.peak + 2 * 1024 * 32768 + 2 * 2 * 1024 * 32768 // 8


@pytest.mark.parametrize(
    "axes, peak, sent_by_compiler",
    # logitless tpu compile --mesh ... --hidden 1024 --vocab 32768 --tokens 16384, libtpu 0.0.48, v6e:2x4
    [
        ("fsdp=8", 220, {"all-gather": 64, "reduce-scatter": 16}),
        ("data=2,fsdp=2,tensor=2", 152, {}),
        ("data=8", 268, {}),
    ],
)
def test_the_plan_agrees_with_the_compiler(axes: str, peak: float, sent_by_compiler: dict[str, float]) -> None:
    p = plan_mesh(1024, 32768, 16384, parse_mesh(axes), chip="v6e")
    assert abs(p.peak / 2**20 / peak - 1) < 0.12
    for c in p.collectives:  # a chip sends 7/8 of what it gathers, and 7 times what it keeps of a reduction
        if sent_by_compiler and c.what.startswith("all-gather"):
            assert c.link_bytes == sent_by_compiler["all-gather"] * 2**20 * 7 / 8
        if sent_by_compiler and c.what.startswith("reduce-scatter"):
            assert c.link_bytes == sent_by_compiler["reduce-scatter"] * 2**20 * 7


@pytest.mark.parametrize("layout", ["data", "fsdp", "tensor"])
def test_the_plan_agrees_with_the_compiler_about_a_large_head(layout: str) -> None:
    """What libtpu said of eight v6e chips (benchmarks/tpu_sharded.py): the peak, and what is sent, loops counted."""
    record = json.loads((ROOT / "benchmarks" / "results" / "tpu_sharded.json").read_text())
    found = record["slices"]["v6e:2x4"][layout]
    rows = 1 if layout == "tensor" else 8
    for form, dtype in (("fused", "float32"), ("fused, dW summed in bfloat16", "param")):
        axes = parse_mesh(f"{layout}=8")
        p = plan_mesh(4096, 151936, rows * 8192, axes, chip="v6e", head_grad_dtype=dtype)
        assert abs(p.peak / found[form]["peak_bytes"] - 1) < 0.05, (form, p.peak)
        large = [c for c in found[form]["collectives"] if c["kind"] != "collective-permute" and c["bytes"] > 1e6]
        passes = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1}
        sent_there = sum(passes[c["kind"]] * c["bytes"] * c["times"] for c in large) * 7 / 8
        own = sum(c.link_bytes for c in p.collectives if "scalars" not in c.what)
        assert own == pytest.approx(sent_there, rel=0.03), form  # the compiler's parts are whole tiles


def test_the_network_is_used_beyond_the_interconnect() -> None:
    inside, outside = mesh("data=256"), mesh("data=4096")
    assert all(c.network_bytes == 0 for c in inside.collectives)
    (c,) = outside.collectives
    assert c.network_bytes == pytest.approx(2 * 2 * HEAD / 256 * 15 / 16)
    assert outside.efficiency < inside.efficiency
    assert outside.chips == 4096
    gpus = mesh("data=64", chip="h100")
    assert gpus.collectives[0].network_bytes == pytest.approx(2 * 2 * HEAD / 8 * 7 / 8)  # NVLink joins eight
    # tensor is innermost: eight of them fill a node, and data is left with the network alone.
    split = mesh("data=8,tensor=8", chip="h100")
    dw = next(c for c in split.collectives if c.axis == "data")
    assert dw.link_bytes == 0 and dw.network_bytes > 0


def test_longer_contexts_scale_better() -> None:
    found = [mesh("data=64", tokens=t, chip="h100").efficiency for t in (2048, 8192, 32768, 131072)]
    assert found == sorted(found) and found[-1] > 0.95
    assert all(0 < e <= 1 for e in found)
    assert mesh("data=64", chip="h100").efficiency_overlapped >= found[1]


@pytest.mark.parametrize(
    "text, message",
    [
        ("dta=8", "'dta' is not an axis"),
        ("data=0", "data=0, expected a positive number"),
        ("data=x", "data=x, expected"),
        ("data", "data=, expected"),
        ("data=2,data=2", "data is given twice"),
        ("", "'' is not an axis"),
    ],
)
def test_a_mesh_that_is_none(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_mesh(text)


def test_longest_context_fits_and_one_more_block_does_not() -> None:
    import jax

    from logitless import plan

    fused, dense = longest_context(H, V, chip="v6e", reserved=16e9)
    room = CHIPS["v6e"].hbm_bytes - 16e9
    w = jax.ShapeDtypeStruct((V, H), "bfloat16")
    for tokens, peak in ((fused, "peak"), (dense, "dense_peak")):
        fits, over = (
            getattr(plan(jax.ShapeDtypeStruct((1, n, H), "bfloat16"), w, chip="v6e"), peak)
            for n in (tokens, tokens + 128)
        )
        assert fits <= room < over
    assert fused > 10 * dense
    assert longest_context(H, V, chip="v6e", reserved=40e9) == (0, 0)


def test_chips_are_found_by_the_name_jax_gives_them() -> None:
    assert chip_of_kind("NVIDIA H200") is CHIPS["h200"]
    assert chip_of_kind("cpu") is None
    for chip in CHIPS.values():
        assert chip.platform in ("tpu", "gpu") and chip.network < chip.link < chip.hbm


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "a" / "plan.jsonl"
    assert cli.main(["plan", "--model", "qwen2.5-7b", "--chip", "v6e", "--out", str(out)]) == 0
    text = capsys.readouterr().out
    for word in ("pallas_tpu", "4 matmuls", "tiles", "roofline", "dense", "longest context"):
        assert word in text
    assert cli.main(["plan", "--model", "qwen2.5-7b", "--chip", "v6e", "--mesh", "data=8", "--out", str(out)]) == 0
    assert "predicted efficiency" in capsys.readouterr().out
    one, many = map(json.loads, out.read_text().splitlines())
    assert one["kind"] == many["kind"] == "plan"
    assert one["longest_context"]["fused"] > one["longest_context"]["dense"]
    assert [p["tokens"] for p in one["contexts"]][-1] == 131072
    assert many["mesh"]["chips"] == 8
    assert cli.main(["plan", "--hidden", "4096", "--vocab", "151936"]) == 0
    assert "30.59 TFLOP" in capsys.readouterr().out
    assert cli.main(["plan", "--model", "qwen2.5-7b", "--chip", "v6e", "--lora-rank", "16", "--frozen-head"]) == 0
    assert "3 matmuls" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "give --model, or --hidden and --vocab"),
        (["--model", "qwen9"], "--model 'qwen9' is not known"),
        (["--model", "qwen2.5-7b", "--hidden", "4"], "not both"),
        (["--model", "qwen2.5-7b", "--chip", "v6"], "Did you mean 'v6e'"),
        (["--model", "qwen2.5-7b", "--mesh", "data=8"], "need --chip"),
        (["--model", "qwen2.5-7b", "--chip", "v6e", "--mesh", "data=7"], "8192 tokens do not split over"),
        (["--model", "qwen2.5-7b", "--chip", "v6e", "--mesh", "tensor=7"], "does not split over tensor"),
        (["--model", "qwen2.5-7b", "lora_rank=0"], "lora_rank=0, expected a positive"),
        (["--model", "qwen2.5-7b", "--tokens", "0"], "--tokens 0, expected at least 1"),
        (["--model", "qwen2.5-7b", "--memory-budget", "10"], "memory_budget=10 bytes is less"),
        (["--model", "qwen2.5-7b", "--backend", "pallas_tpu"], "runs on a TPU"),
        (["--model", "qwen2.5-7b", "--chip", "v6e", "--reserve-gb", "-1"], "expected at least 0"),
    ],
)
def test_bad_usage_exits_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and not captured.out


def test_the_page_of_predictions_is_current() -> None:
    page = (ROOT / "docs" / "scaling.md").read_text()
    assert page == scaling.render(), "run `python -m logitless.lab.plan.scaling docs/scaling.md`"
    for word in ("qwen2.5-1.5b", "qwen2.5-72b", "| 4096 |", "| 128k |", "not measurements"):
        assert word in page
