"""Writes docs/scaling.md, predictions for meshes of up to 4096 chips: ``python -m logitless.lab.plan.scaling FILE``."""

from __future__ import annotations

import sys
from pathlib import Path

from logitless.lab.plan.chips import CHIPS
from logitless.lab.plan.head import longest_context
from logitless.lab.plan.mesh import parse_mesh, plan_mesh
from logitless.lab.tools.shapes import MODELS

CONTEXTS = (8192, 32768, 131072)
MESHES = {
    "qwen2.5-1.5b": ("data=8", "data=64", "data=256", "data=1024", "data=4096"),
    "qwen2.5-7b": ("fsdp=8", "data=8,fsdp=8", "data=32,fsdp=8", "data=128,fsdp=8", "data=512,fsdp=8"),
    "qwen2.5-72b": (
        "fsdp=8",
        "fsdp=16,tensor=4",
        "data=4,fsdp=16,tensor=4",
        "data=16,fsdp=16,tensor=4",
        "data=64,fsdp=16,tensor=4",
    ),
}
"""How each model's head would be laid out on 8, 64, 256, 1024 and 4096 chips."""
SHOWN = ("v6e", "v5p", "h100")


def _contexts() -> list[str]:
    out = [
        "## The longest context of one chip",
        "",
        "Tokens whose loss, dH and dW fit into the chip's memory beside a bf16 head, if nothing else is there: an",
        "upper bound to compare the two forms by. The model's own weights, optimiser state and activations come on",
        "top; `logitless plan --model M --chip C --reserve-gb N` takes them off first.",
        "",
        "| model | chip | fused | dense, f32 logits | |",
        "|---|---|---|---|---|",
    ]
    for model in MESHES:
        for chip in CHIPS:
            fused, dense = longest_context(MODELS[model].hidden, MODELS[model].vocab, chip=chip)
            times = f"{fused / dense:.0f}x" if dense else "-"
            out.append(f"| {model} | {chip} | {fused:,} | {dense:,} | {times} |")
    return [*out, ""]


def _meshes(model: str) -> list[str]:
    shape = MODELS[model]
    out = [
        f"## {model} (H {shape.hidden}, V {shape.vocab:,})",
        "",
        "| chip | chips | mesh | context | peak MiB | dense MiB | TFLOP | ms | link MB | network MB | ms "
        "| efficiency |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for chip in SHOWN:
        for mesh in MESHES[model]:
            axes = parse_mesh(mesh)
            rows = axes["data"] * axes["fsdp"]
            for context in CONTEXTS:
                p = plan_mesh(shape.hidden, shape.vocab, rows * context, axes, chip=chip)
                link = sum(c.link_bytes for c in p.collectives) / 1e6
                network = sum(c.network_bytes for c in p.collectives) / 1e6
                fits = "" if p.peak <= p.chip.hbm_bytes else " (too much)"
                dense = "" if p.dense_peak <= p.chip.hbm_bytes else " (too much)"
                out.append(
                    f"| {chip} | {p.chips} | {mesh} | {context // 1024}k | {p.peak / 2**20:,.0f}{fits} | "
                    f"{p.dense_peak / 2**20:,.0f}{dense} | {p.head.flops / 1e12:.1f} | {p.compute_seconds * 1e3:.1f} | "
                    f"{link:,.0f} | {network:,.0f} | {p.collective_seconds * 1e3:.1f} | {p.efficiency:.0%} |"
                )
    return [*out, ""]


def render() -> str:
    """The whole page."""
    head = [
        "# Scaling: predictions for meshes",
        "",
        "Written by `python -m logitless.lab.plan.scaling docs/scaling.md`. **Predictions from public chip numbers,",
        "not measurements.** Per chip: one sequence of the given context on each of the data x fsdp rows, bf16 head,",
        "every token live, loss, dH and dW in one step. The first `ms` is the roofline time of the compute, the second",
        "that of the collectives; `efficiency` is the first over their sum, with nothing overlapped: what the",
        "interconnect costs at worst, and nothing about what share of the roofline a kernel reaches. How a mesh is",
        "used, and what is sent, is in `src/logitless/lab/plan/mesh.py`; chip numbers are in `lab/plan/chips.py`. One",
        "mesh of your own:",
        "",
        "    logitless plan --model qwen2.5-7b --tokens 2097152 --chip v6e --mesh data=8,fsdp=8",
        "",
        "What the tables say: the head's gradient is what a larger data axis sends, and its size does not grow with",
        "the context, so long contexts scale and short ones do not; between pods or nodes the network is what counts,",
        "and accumulating gradients over k micro-batches before the reduction divides that column by k.",
        "",
    ]
    return "\n".join([*head, *_contexts(), *(line for m in MESHES for line in _meshes(m))]).rstrip() + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(render())
