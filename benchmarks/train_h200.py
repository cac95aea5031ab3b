"""Training on one GPU, baseline against kernel, with the bars that it is held to; writes one JSON file for each case.

    python benchmarks/train_h200.py random --out results          # qwen2.5-1.5b shape: time and memory of the update
    python benchmarks/train_h200.py arithmetic --out results --weights SmolLM2-135M-Instruct.Q4_1.gguf
    python benchmarks/train_h200.py abc --out results --weights SmolLM2-135M-Instruct.Q4_1.gguf   # and sparse backward

Each case is `logitless ab` with a shipped configuration, made to end within ten minutes; ``--work`` keeps the runs, so
that a second call with ``--resume`` goes on where a first one was cut off. Arms run one after the other, so that their
times are their own. Further arguments are ``key=value`` overrides of the configuration. Exit code 1 if the arms
disagree or a bar is missed. The largest batch and context: ``train_gsm8k.py largest``; sampling: its ``decode``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from logitless.train import ab
from logitless.train.config import load

CONFIGS = Path(__file__).parent.parent / "configs" / "train"
ARMS = "ab.arms.{}.backend={}".format
CASES = {
    "random": ("qwen2.5-1.5b-random", [ARMS("kernel", "{}"), ARMS("baseline", "reference"), ARMS("naive", "naive")]),
    "arithmetic": ("smollm2-135m-arithmetic", ["ab.kernel={}"]),
    "abc": ("smollm2-135m-abc", [ARMS("exact", "{}"), ARMS("sparse", "{}")]),
}
"""Shipped configuration, and its arms' backends, with ``--kernel`` in the place of ``{}``."""
BARS = {"device_peak": 0.60, "step_time": 1.00, "update_time": 0.85, "update_time_to_naive": 0.85}
"""Kernel over baseline (the last one: over naive), ``random``."""
RISE = 0.1
"""Sampled reward, last 10 steps over first 10, every arm, ``arithmetic`` and ``abc``."""


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def cost_bars(result: dict[str, Any]) -> dict[str, Any]:
    """Time and memory of the kernel against the strong dense loss, and its update against the naive one too."""
    to_naive = ab.ratios(*(result["arms"][name]["summary"] for name in ("naive", "kernel")))
    result["ratios_to_naive"] = {"kernel": to_naive}
    values = {**result["ratios"]["kernel"], "update_time_to_naive": to_naive["update_time"]}
    return {k: {"value": values[k], "limit": limit} for k, limit in BARS.items()}


def reward_bars(result: dict[str, Any]) -> dict[str, Any]:
    """How much every arm has learned."""
    summaries = {name: arm["summary"] for name, arm in result["arms"].items()}
    rises = {name: s["train/reward_last10"] - s["train/reward_first10"] for name, s in summaries.items()}
    return {f"reward_rise/{name}": {"value": rise, "at_least": RISE} for name, rise in rises.items()}


def met(bar: dict[str, Any]) -> bool:
    value = bar["value"]
    return value is not None and bar.get("at_least", value) <= value <= bar.get("limit", value)


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("case", choices=CASES)
    p.add_argument("--out", type=Path, required=True, help="folder of the JSON file")
    p.add_argument("--work", type=Path, default=Path("runs/train_h200"), help="folder of the runs themselves")
    p.add_argument("--weights", default="", help="arithmetic, abc: a folder or .gguf, where the name is not fetched")
    p.add_argument("--kernel", default="mosaic_gpu", help="backend of the kernel arms")
    p.add_argument("--resume", action="store_true")
    p.add_argument("overrides", nargs="*", metavar="key=value")
    args = p.parse_intermixed_args()
    # The dense arm needs more than the three quarters of the memory that JAX takes by default.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    name, backends = CASES[args.case]
    settings = [f"run_dir={args.work / name}", *(b.format(args.kernel) for b in backends)]
    settings += [f"model.weights={args.weights}"] if args.weights else []
    result = ab.run(load(CONFIGS / f"{name}.yaml", [*settings, *args.overrides]), resume=args.resume, say=say)
    print(ab.table(result))
    print(ab.curve(result), flush=True)
    result["bars"] = (cost_bars if args.case == "random" else reward_bars)(result)
    for key, bar in result["bars"].items():
        say(f"{key}: {bar['value']} ({'met' if met(bar) else 'MISSED'}; bar {bar.get('limit', bar.get('at_least'))})")
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / f"train_{args.case}.json"
    file.write_text(json.dumps(result) + "\n")
    agree = not ab.disagreeing(result)
    say(f"wrote {file}{'' if agree else '; THE ARMS DISAGREE'}")
    return 0 if agree and all(map(met, result["bars"].values())) else 1


if __name__ == "__main__":
    sys.exit(main())
