"""PyTorch peers of the fused head on one GPU, at the shapes of gpu_head.py, one after another in this process.

    python benchmarks/gpu_head_peers.py --out peers.json [--shape 8192,4096,151936] [--peers DIR]

``--peers`` is a folder with the unpacked wheels of liger_kernel and cut_cross_entropy. Times are CUDA events, medians;
memory is the allocator's peak above inputs and gradients.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROWS = 8


def batch(tokens: int, hidden: int, vocab: int) -> dict[str, Any]:
    """The distribution of gpu_head.py's inputs, made on the device in bfloat16."""
    g = torch.Generator("cuda").manual_seed(0)
    width = tokens // ROWS

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g, device="cuda", dtype=torch.bfloat16)

    return dict(
        h=normal(ROWS, width, hidden).requires_grad_(),
        w=(normal(vocab, hidden) * (3.0 / hidden**0.5)).requires_grad_(),
        y=torch.randint(0, vocab, (ROWS, width), generator=g, device="cuda"),
        a=torch.randn((ROWS,), generator=g, device="cuda"),
        old=-12.0 + 0.3 * torch.randn((ROWS, width), generator=g, device="cuda"),
    )


def clip_loss(logp: torch.Tensor, b: dict[str, Any]) -> torch.Tensor:
    """Token-level clip, mean over tokens."""
    ratio = torch.exp(logp - b["old"])
    a = b["a"][:, None]
    return -torch.minimum(ratio * a, torch.clamp(ratio, 0.8, 1.2) * a).mean()


def dense(b: dict[str, Any]) -> torch.Tensor:
    logits = b["h"] @ b["w"].T
    logp = torch.log_softmax(logits.float(), -1).gather(-1, b["y"][..., None])[..., 0]
    return clip_loss(logp, b)


def liger(b: dict[str, Any]) -> Callable[[], torch.Tensor]:
    from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOLoss

    f = LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, loss_type="dapo", compiled=True)
    mask = torch.ones_like(b["old"])
    return lambda: f(b["h"], b["w"], b["y"], mask, b["a"], old_per_token_logps=b["old"])[0]


def cce(b: dict[str, Any]) -> Callable[[], torch.Tensor]:
    from cut_cross_entropy import linear_cross_entropy

    return lambda: clip_loss(-linear_cross_entropy(b["h"], b["w"], b["y"], reduction="none"), b)


def measure(f: Callable[[], torch.Tensor], b: dict[str, Any], repeats: int) -> dict[str, float]:
    def step() -> None:
        b["h"].grad = b["w"].grad = None
        f().backward()

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    b["h"].grad = b["w"].grad = None
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    grads = sum(b[k].grad.numel() * b[k].grad.element_size() for k in ("h", "w"))
    extra = torch.cuda.max_memory_allocated() - held - grads
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return dict(median_ms=statistics.median(times), min_ms=min(times), max_ms=max(times), temporaries=extra)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", required=True)
    p.add_argument("--shape", action="append", default=[])
    p.add_argument("--peers", default="carry")
    p.add_argument("--repeats", type=int, default=8)
    args = p.parse_args()
    for name in ("liger_kernel", "cut_cross_entropy"):
        sys.path.insert(0, str(Path(args.peers) / name))
    result: dict[str, Any] = dict(
        torch=torch.__version__, device=torch.cuda.get_device_name(), numpy=np.__version__, shapes={}
    )
    for shape in args.shape or ["8192,4096,151936"]:
        b = batch(*(int(x) for x in shape.split(",")))
        compiled = torch.compile(dense)
        makers: dict[str, Callable[[], Callable[[], torch.Tensor]]] = {
            "torch eager": lambda b=b: lambda: dense(b),
            "torch.compile": lambda b=b, c=compiled: lambda: c(b),
            "cut_cross_entropy": lambda b=b: cce(b),
            "liger fused linear GRPO": lambda b=b: liger(b),
        }
        rows: dict[str, Any] = {}
        for name, make in makers.items():
            try:
                rows[name] = measure(make(), b, args.repeats)
                row = rows[name]
                print(
                    f"{shape} {name:24s} {row['median_ms']:9.2f} ms {row['temporaries'] / 2**20:9.0f} MiB", flush=True
                )
            except Exception as error:
                traceback.print_exc()
                rows[name] = dict(error=f"{type(error).__name__}: {error}"[:500])
            torch.cuda.empty_cache()
        result["shapes"][shape] = rows
        Path(args.out).write_text(json.dumps(result, indent=1))
        del b
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
