"""What the GSM8K run costs, on one GPU: update phase padded against packed, decode, the largest batch and context.

    python benchmarks/train_gsm8k.py update --out results --rollouts runs/gsm8k/dense    # its recorded completions
    python benchmarks/train_gsm8k.py decode --out results
    python benchmarks/train_gsm8k.py largest --out results --what context --arm fused    # a bisection; --what batch
    python benchmarks/train_gsm8k.py long --out results                                  # updates of 16k-token rows

The run itself is ``logitless ab --config qwen2.5-1.5b-gsm8k``. ``update`` takes the same completions through padded
micro-batches of ``--padded`` rows (the way before packing) and through packed ones, in alternation. Without
``--rollouts`` they are random ones of like lengths, a third of the groups without a spread. ``decode`` times a loop
that no end token stops. ``largest`` doubles and then halves until the step between what fits and what does not is below
a sixteenth (``--start``, or ``--between`` two sizes, the first of which is thought to fit). ``long`` times updates of
so many rows in turns (``--rows dense=6 dense=5 fused=18``), of each arm the first number that fits.

Everything runs at a small size too: ``--small`` is for a CPU, where ``largest`` counts ``--memory`` bytes of the
compiler's plan. Further arguments are ``key=value`` overrides of the configuration. Exit code 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import harness
from harness import say
from logitless.data.group_advantages import group_advantages
from logitless.lab.tools import timing
from logitless.train import recorded
from logitless.train.architectures import preset
from logitless.train.collect import random_rollouts
from logitless.train.config import TrainConfig, load, save
from logitless.train.rollout import Sampling, generate
from logitless.train.run_records import Rollouts
from logitless.train.task import build_task
from logitless.train.trainer import Trainer
from logitless.train.update import Batch, Policy

CONFIG = harness.ROOT / "configs" / "train" / "qwen2.5-1.5b-gsm8k.yaml"
BARS = {"update": 0.45, "decode_ms": 3.0, "long_rows": 3.0, "long_rate": 1.15}
RANDOM = ["rollout.kind=random", "model.weights=''", "model.architecture=qwen2.5-1.5b", "eval.every=0"]
"""The run's shapes without its weights and data."""
SMALL = [
    "model.architecture=tiny", "model.compute_dtype=float32", "model.remat=false", "rollout.max_prompt_tokens=12",
    "rollout.max_completion_tokens=20", "train.pack_length=40", "train.prompts_per_step=6", "train.group_size=4",
    "train.microbatch=2", "train.microbatch_tail=1", "ab.arms.fused.backend=chunked", "ab.arms.sparse.backend=chunked",
    "checkpoint.every=0",
]  # fmt: skip


def configured(args: argparse.Namespace, *settings: str) -> TrainConfig:
    return load(CONFIG, [*settings, *(SMALL if args.small else []), *args.overrides])


# -- update ----------------------------------------------------------------------------------------------------------


def _rollouts(args: argparse.Namespace, c: TrainConfig) -> list[Rollouts]:
    vocab = 16 if args.small else 151_936
    if not args.rollouts:
        return [random_rollouts(c, vocab, step) for step in range(1, args.steps + 1)]
    widths = c.rollout.max_prompt_tokens, c.rollout.max_completion_tokens
    steps = min(args.steps, recorded.steps_in(Path(args.rollouts)))
    rows = c.train.prompts_per_step * c.train.group_size
    return [recorded.load_rollouts(Path(args.rollouts), step, rows, widths, vocab) for step in range(1, steps + 1)]


def _batch(c: TrainConfig, rolled: Rollouts) -> Batch:
    t, done = c.train, rolled.completions
    advantages = group_advantages(jnp.asarray(rolled.rewards), t.group_size, scale=t.advantage_scale)  # type: ignore[arg-type]
    return Batch(rolled.prompts.tokens, rolled.prompts.valid, done.tokens, done.mask, np.asarray(advantages))  # type: ignore[arg-type]


def update_case(args: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """Seconds of the update phase, padded and packed in turn; the first step of each compiles and does not count."""
    packed = configured(args, *RANDOM, f"train.loss.backend={args.backend}")
    rows = 6 if args.small else args.padded
    plain = dict(packing="off", pack_length=0, skip_rows=False, microbatch_tail=0, microbatch=rows)
    padded = dataclasses.replace(packed, train=dataclasses.replace(packed.train, **plain))
    configs = {"padded": padded, "packed": packed}
    steps, task = _rollouts(args, packed), build_task(packed)
    params = task.load_params()
    trainers = {name: Trainer(c, task) for name, c in configs.items()}
    states = {name: trainer.initial(params) for name, trainer in trainers.items()}
    seconds: dict[str, list[float]] = {name: [] for name in configs}
    last: dict[str, Any] = {}
    for i, rolled in enumerate([steps[0], *steps]):
        for name in list(configs)[:: 1 if i % 2 else -1]:
            trainer, (state, frozen) = trainers[name], states[name]
            batch = _batch(configs[name], rolled)
            jax.block_until_ready(state)
            trainer.times = {}
            state, info = trainer._updates(state, frozen, batch if trainer.packed else jax.device_put(batch), None)
            states[name], last[name] = (state, frozen), info[0]
            seconds[name] += [trainer.times["update"]] if i else []
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    metrics = {k: float(v.sum) / max(float(v.count), 1) for k, v in last["packed"]["metrics"].items()}
    result = {
        "kind": "train_update",
        "seconds": seconds,
        "median": medians,
        "ratio": medians["packed"] / medians["padded"],
        "losses": {name: float(info["loss"]) for name, info in last.items()},
        "last": {k: metrics[k] for k in ("update_rows", "packed_fill", "zero_gradient_tokens")},
        "config": dataclasses.asdict(packed),
        "environment": timing.environment(),
    }
    say(f"update: {medians}, ratio {result['ratio']:.3f}")
    return result, args.small or result["ratio"] <= BARS["update"]


# -- decode ----------------------------------------------------------------------------------------------------------


def decode_case(args: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """Milliseconds of a decoded token at a step's rows: a loop to the end, less a loop of one token."""
    c = configured(args, *RANDOM)
    task = build_task(c)
    params = task.load_params()
    dtype = jnp.dtype(c.model.compute_dtype)
    rng = np.random.default_rng(0)
    shape = (c.train.prompts_per_step, c.rollout.max_prompt_tokens)
    prompts = jnp.asarray(rng.integers(0, task.model.vocab_size, shape), jnp.int32)
    valid = jnp.asarray(np.arange(shape[1]) >= rng.integers(0, shape[1] // 2, (shape[0], 1)))
    times: dict[int, list[float]] = {}
    compile_s = {}
    for new in (1, c.rollout.max_completion_tokens):
        s = Sampling(new, c.rollout.temperature, c.rollout.top_p, c.train.group_size, (), 0)
        run = jax.jit(functools.partial(generate, config=task.model, sampling=s, compute_dtype=dtype))
        begin = time.perf_counter()
        compiled = run.lower(params, None, prompts, valid, jax.random.key(0)).compile()
        compile_s[new] = time.perf_counter() - begin
        times[new] = []
        for i in range(args.repeats + 1):
            begin = time.perf_counter()
            jax.block_until_ready(compiled(params, None, prompts, valid, jax.random.key(i)))
            times[new].append(time.perf_counter() - begin)
    one, many = (statistics.median(t[1:]) for t in times.values())
    rows = shape[0] * c.train.group_size
    per_token = (many - one) / (c.rollout.max_completion_tokens - 1) * 1e3
    say(f"decode: {per_token:.3f} ms a token at {rows} rows; the prompts {one * 1e3:.1f} ms; compiling {compile_s}")
    result = {
        "kind": "train_decode", "rows": rows, "ms_per_token": per_token, "prompt_s": one, "seconds": times,
        "compile_s": compile_s, "config": dataclasses.asdict(c), "environment": timing.environment(),
    }  # fmt: skip
    return result, args.small or per_token <= BARS["decode_ms"]


# -- largest ---------------------------------------------------------------------------------------------------------


def _tried(args: argparse.Namespace, size: int) -> dict[str, Any]:
    """Two steps with rows of ``size`` completion tokens, or ``size`` rows in one gradient, in a process of its own."""
    folder = args.work / f"largest-{args.arm}-{args.what}-{size}"
    c = _sized(args, args.arm, args.what, size, folder)
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    save(c, folder.with_suffix(".yaml"))
    command = [sys.executable, "-m", "logitless", "train", "--config", str(folder.with_suffix(".yaml"))]
    environment = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95", **os.environ}  # JAX alone would take three quarters
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    rows = c.train.prompts_per_step * c.train.group_size
    row: dict[str, Any] = {"size": size, "rows": rows, "tokens": c.rollout.max_completion_tokens}
    row["ran"] = row["fits"] = done.returncode == 0
    if row["ran"]:
        summary = json.loads((folder / "summary.json").read_text())
        plan = summary["memory/compiler"]["update"]
        row["peak_bytes"] = summary["memory/device_peak_bytes"]
        row["planned_bytes"] = plan["temporaries"] + plan["arguments"]
        row["fits"] = not args.memory or row["planned_bytes"] <= args.memory
    else:
        row["error"] = (done.stderr.strip().splitlines() or ["no message"])[-1][:300]
        if not re.search("RESOURCE_EXHAUSTED|out of memory", done.stderr, re.IGNORECASE):
            raise SystemExit(f"size {size} failed, and not for memory: {row['error']}")
    say(f"{args.arm}, {args.what}: {row}")
    return row


def _sized(args: argparse.Namespace, arm: str, what: str, size: int, folder: Path) -> TrainConfig:
    """Two steps of an arm on padded rows, one gradient for all of them."""
    c = configured(args, *RANDOM, "train.steps=2", f"run_dir={folder}", "checkpoint.every=0")
    tokens = size if what == "context" else 20 if args.small else 512
    return dataclasses.replace(
        c,
        run_dir=str(folder),
        rollout=dataclasses.replace(c.rollout, max_completion_tokens=tokens),
        train=dataclasses.replace(
            c.train,
            packing="off",
            pack_length=0,
            microbatch_tail=0,
            skip_rows=False,
            prompts_per_step=2 if what == "context" else -(-size // c.train.group_size),
            microbatch=0,
            loss=dataclasses.replace(c.train.loss, **c.ab.arms[arm]),
        ),
        ab=dataclasses.replace(c.ab, arms={}),
    )


def largest_case(args: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """Bisection: the largest size that fits, and the smallest that does not."""
    unit = 8 if args.what == "batch" or args.small else 128
    low, high, size = 0, 0, args.between[0] if args.between else args.start or unit
    c, tried = configured(args, *RANDOM), []
    positions = preset(c.model.architecture).max_position - c.rollout.max_prompt_tokens
    while not high or (high - low > unit and high - low > low // 16):
        tried.append(row := _tried(args, size))
        low, high = (size, high) if row["fits"] else (low, size)
        size = 2 * low if not high else (low + high) // 2 // unit * unit
        if not high and args.between and args.between[1] > low:
            size = args.between[1]
        size = min(size, positions) if args.what == "context" else size  # where the last one fits, nothing fails
        if size <= low:
            break
    result = {
        "kind": "train_largest", "arm": args.arm, "what": args.what, "fits": low, "fails": high, "tried": tried,
        "environment": timing.environment(),
    }  # fmt: skip
    return result, low > 0


# -- long -------------------------------------------------------------------------------------------------------------


def _long_batch(c: TrainConfig, vocab: int) -> Batch:
    """Rows without an empty slot."""
    rows, r = c.train.prompts_per_step * c.train.group_size, c.rollout
    rng = np.random.default_rng(0)
    widths = r.max_prompt_tokens, r.max_completion_tokens
    prompts, done = (rng.integers(0, vocab, (rows, n), np.int32) for n in widths)
    whole = [np.ones(x.shape, bool) for x in (prompts, done)]
    return Batch(prompts, whole[0], done, whole[1], rng.standard_normal(rows, np.float32))  # type: ignore[arg-type]


def long_case(args: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """Tokens a second of updates of 16k-token completions, in turns; what does not fit is recorded and left out."""
    tokens = 40 if args.small else 16_384
    result: dict[str, Any] = {
        "kind": "train_long", "tokens": tokens, "asked": args.rows, "failed": {}, "rows": {}, "seconds": {},
        "environment": timing.environment(),
    }  # fmt: skip
    made: dict[str, tuple[Trainer, Batch]] = {}
    state: Any = None

    def update(arm: str) -> float:
        nonlocal state
        trainer, batch = made[arm]
        trainer.times = {}
        state = state or trainer.initial(trainer.task.load_params())[0]
        given, state = state, None  # what is given to an update is gone, also where that fails
        state, _ = trainer._updates(given, Policy(None, None), jax.device_put(batch), None)
        say(f"{arm}: {result['rows'][arm]} rows in {trainer.times['update']:.2f} s")
        return trainer.times["update"]

    for arm, rows in (given.split("=") for given in args.rows):
        c = _sized(args, arm, "context", tokens, args.work)
        c = dataclasses.replace(c, train=dataclasses.replace(c.train, prompts_per_step=1, group_size=int(rows)))
        trainer = Trainer(c, build_task(c))
        if arm in result["rows"]:
            continue
        made[arm], result["rows"][arm] = (trainer, _long_batch(c, trainer.task.model.vocab_size)), int(rows)
        try:
            update(arm)
        except Exception as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            result["failed"][f"{arm} {result['rows'].pop(arm)}"] = str(error)[:300]
    for _ in range(args.repeats):
        for arm in result["rows"]:
            result["seconds"].setdefault(arm, []).append(update(arm))
            _write(args, result)
    median = {arm: statistics.median(seconds) for arm, seconds in result["seconds"].items()}
    result["tokens_per_s"] = {arm: rows * tokens / median[arm] for arm, rows in result["rows"].items()}
    result["ratio"] = {key: result[key]["fused"] / result[key]["dense"] for key in ("rows", "tokens_per_s")}
    say(f"fused over dense: {result['ratio']}")
    met = result["ratio"]["rows"] >= BARS["long_rows"] and result["ratio"]["tokens_per_s"] >= BARS["long_rate"]
    return result, args.small or met


CASES = {"update": update_case, "decode": decode_case, "largest": largest_case, "long": long_case}


def _write(args: argparse.Namespace, result: dict[str, Any]) -> None:
    """The record, also of what is not complete."""
    name = f"train_gsm8k_{args.case}" + (f"_{args.arm}_{args.what}" if args.case == "largest" else "")
    harness.write(f"{args.out}/{name}.json", result)


def main() -> int:
    p = harness.options(
        __doc__, out="benchmarks/results", work="runs/train_gsm8k", backend="auto", rollouts="", steps=20, padded=32,
        repeats=5, arm="fused", start=0, memory=0, rows=["dense=6", "dense=5", "fused=18"],
    )  # fmt: skip
    p.add_argument("case", choices=CASES)
    p.add_argument("--small", action="store_true", help="a size for a CPU; no bar on times")
    p.add_argument("--what", choices=("batch", "context"), default="context", help="largest: rows, or tokens")
    p.add_argument("--between", type=int, nargs=2, help="largest: a size that should fit, and one that should not")
    p.add_argument("overrides", nargs="*", metavar="key=value")
    args = p.parse_intermixed_args()
    args.work = Path(args.work)
    result, met = CASES[args.case](args)
    _write(args, result)
    say(f"bars {'met' if met else 'MISSED'}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
