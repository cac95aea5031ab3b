"""Training on one GPU, baseline against kernel, in fresh processes; writes one JSON file for each case.

    python benchmarks/train_h200.py random --out results          # qwen2.5-1.5b shape: time and memory of the update
    python benchmarks/train_h200.py arithmetic --out results --weights SmolLM2-135M-Instruct.Q4_1.gguf
    python benchmarks/train_h200.py abc --out results --weights SmolLM2-135M-Instruct.Q4_1.gguf   # and sparse backward
    python benchmarks/train_h200.py largest --out results         # the longest completions that fit, both arms
    python benchmarks/train_h200.py rollout --out results         # a few steps with real sampling, kernel arm

Each case is made to end within ten minutes; ``--work`` keeps the runs, so that a second call with ``--resume`` goes on
where a first one was cut off. Arms run one after the other, so that their times are their own; ``ab.parallel=true``
runs them side by side. Further arguments are ``key=value`` overrides of the configuration. Exit code 1 if the arms
disagree or a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from logitless.train import ab
from logitless.train.config import load, save
from logitless.train.folder import read_records

CONFIGS = Path(__file__).parent.parent / "configs" / "train"
BARS = {"device_peak": 0.60, "step_time": 1.00, "update_time": 0.85, "update_time_to_naive": 0.85}
"""Kernel over baseline (the last one: over naive), ``random``."""
RISE = 0.1
"""Sampled reward, last 10 steps over first 10, every arm, ``arithmetic`` and ``abc``."""
CONTEXTS = {"kernel": (8960, 11904, 14848), "baseline": (1920, 2432, 2944)}
"""Completion tokens a row, ``largest``: the arms' peaks grow by 0.2 and 0.9 MB a token of the batch, from 30 and 57 GiB
at 36 rows of 1024 tokens, so that no shorter one has to be tried."""


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def compare(name: str, args: argparse.Namespace, extra: list[str]) -> dict[str, Any]:
    """An A/B of a shipped configuration."""
    settings = [f"run_dir={args.work / name}", *extra, *args.overrides]
    result = ab.run(load(CONFIGS / f"{name}.yaml", settings), resume=args.resume, say=say)
    print(ab.table(result))
    print(ab.curve(result), flush=True)
    return result


def random_case(args: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """The kernel against the strong dense loss (``baseline``), and its update against the naive one too."""
    arms = {"baseline": "reference", "naive": "naive", "kernel": args.kernel}
    result = compare("qwen2.5-1.5b-random", args, [f"ab.arms.{k}.backend={v}" for k, v in arms.items()])
    against_naive = ab.ratios(*(result["arms"][name]["summary"] for name in ("naive", "kernel")))
    result["ratios_to_naive"] = {"kernel": against_naive}
    values = {**result["ratios"]["kernel"], "update_time_to_naive": against_naive["update_time"]}
    result["bars"] = {k: {"value": values[k], "limit": limit} for k, limit in BARS.items()}
    met = all(b["value"] is not None and b["value"] <= b["limit"] for b in result["bars"].values())
    for key, bar in result["bars"].items():
        say(f"{key}: {bar['value']} (bar {bar['limit']})")
    return result, met


def _weights(args: argparse.Namespace) -> list[str]:
    return [f"model.weights={args.weights}"] if args.weights else []


def _reward_rises(result: dict[str, Any]) -> bool:
    """Put the bar of the learning runs into ``result``; whether every arm meets it."""
    rises = {
        name: arm["summary"]["train/reward_last10"] - arm["summary"]["train/reward_first10"]
        for name, arm in result["arms"].items()
    }
    result["bars"] = {f"reward_rise/{name}": {"value": rise, "at_least": RISE} for name, rise in rises.items()}
    return all(rise >= RISE for rise in rises.values())


def arithmetic_case(args: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    result = compare("smollm2-135m-arithmetic", args, [f"ab.kernel={args.kernel}", *_weights(args)])
    return result, _reward_rises(result)


def abc_case(args: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """Dense, fused exact and fused sparse: reward and KL within noise of the dense arm's, left-out mass on record."""
    kernel = [f"ab.arms.{arm}.backend={args.kernel}" for arm in ("exact", "sparse")]
    result = compare("smollm2-135m-abc", args, [*kernel, *_weights(args)])
    return result, _reward_rises(result)


def largest_case(args: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """Two steps at ever longer completions until the device's memory is too small."""
    found: dict[str, Any] = {}
    for name, backend in (("kernel", args.kernel), ("baseline", "reference")):
        found[name] = {}
        for context in CONTEXTS[name]:
            folder = args.work / f"largest-{name}-{context}"
            settings = ["train.steps=2", f"train.loss.backend={backend}", f"run_dir={folder}", *args.overrides]
            config = load(CONFIGS / "qwen2.5-1.5b-random.yaml", [*settings, f"rollout.max_completion_tokens={context}"])
            folder.parent.mkdir(parents=True, exist_ok=True)
            save(config, folder.with_suffix(".yaml"))
            command = [sys.executable, "-m", "logitless", "train", "--config", str(folder.with_suffix(".yaml"))]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            fits = done.returncode == 0
            row = {"fits": fits, "rows": config.train.prompts_per_step * config.train.group_size}
            if fits:
                row["peak_bytes"] = json.loads((folder / "summary.json").read_text())["memory/device_peak_bytes"]
            else:
                row["error"] = done.stderr.strip().splitlines()[-1][:300] if done.stderr.strip() else "no message"
            found[name][context] = row
            say(f"{name}, {context} completion tokens a row: {row}")
            if not fits:
                break
    return {"kind": "largest", "arms": found}, all(any(r["fits"] for r in arm.values()) for arm in found.values())


def rollout_case(args: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """Real sampling with random weights: what the rollout phase costs beside the update."""
    settings = [
        "rollout.kind=sample",
        "model.tokenizer=char",
        "rollout.max_prompt_tokens=8",
        "rollout.max_completion_tokens=256",
        "train.prompts_per_step=16",
        "train.steps=4",
        f"train.loss.backend={args.kernel}",
        f"run_dir={args.work / 'rollout'}",
    ]
    config = load(CONFIGS / "qwen2.5-1.5b-random.yaml", [*settings, *args.overrides])
    args.work.mkdir(parents=True, exist_ok=True)
    save(config, args.work / "rollout.yaml")
    command = [sys.executable, "-m", "logitless", "train", "--config", str(args.work / "rollout.yaml")]
    code = subprocess.run(command, check=False).returncode
    records = read_records(args.work / "rollout" / "metrics.jsonl")
    for r in records:
        say(f"step {r['step']}: rollout {r['time/rollout_s']:.2f} s, update {r['time/update_s']:.2f} s")
    return {"kind": "rollout", "metrics": records}, code == 0


CASES = {
    "random": random_case,
    "arithmetic": arithmetic_case,
    "abc": abc_case,
    "largest": largest_case,
    "rollout": rollout_case,
}


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("case", choices=CASES)
    p.add_argument("--out", type=Path, required=True, help="folder of the JSON file")
    p.add_argument("--work", type=Path, default=Path("runs/train_h200"), help="folder of the runs themselves")
    p.add_argument(
        "--weights", default="", help="arithmetic, abc: a hub folder or .gguf, where the name cannot be fetched"
    )
    p.add_argument("--kernel", default="mosaic_gpu", help="backend of the kernel arms")
    p.add_argument("--resume", action="store_true")
    p.add_argument("overrides", nargs="*", metavar="key=value")
    args = p.parse_intermixed_args()
    # The dense arm needs more than the three quarters of the memory that JAX takes by default.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    result, met = CASES[args.case](args)
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / f"train_{args.case}.json"
    file.write_text(json.dumps(result) + "\n")
    agree = "agreement" not in result or not ab.disagreeing(result)
    say(f"wrote {file}; bars {'met' if met else 'MISSED'}{'' if agree else '; THE ARMS DISAGREE'}")
    return 0 if met and agree else 1


if __name__ == "__main__":
    sys.exit(main())
