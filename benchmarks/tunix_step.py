"""Tunix' own GRPO train step and reference pass on one accelerator, stock and without logits, in alternation.

    .venv-tunix/bin/python benchmarks/tunix_step.py            writes results/tunix_step.json
    .venv-tunix/bin/python benchmarks/tunix_step.py --small    a tiny model and nothing written: does it run

The model is Tunix' qwen2 with the shapes of Qwen2.5-0.5B and random bfloat16 weights; blocks are recomputed in the
backward pass. Three batches of 8 rows with 128 prompt and up to 896 completion tokens. A trainer is
``tunix.rl.trainer.Trainer`` with the loss, as ``GRPOLearner`` sets it up, and AdamW; all trainers share one model. The
peak of a process only grows: ``install()`` runs first, and the peak of the fused loss, which runs last, is not known.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import sys
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tunix.models.qwen2 import model as qwen2
from tunix.rl import common, function_registry, trainer
from tunix.rl.grpo.grpo_learner import GRPOConfig
from tunix.sft import peft_trainer

import harness
import logitless.integrations.tunix as integration
from harness import say

SMALL = "--small" in sys.argv
ROWS, PROMPT, COMPLETION, ROUNDS = (2, 8, 24, 2) if SMALL else (8, 128, 896, 5)
ARMS = {"install()": "grpo", "stock": "grpo", "fused": "logitless"}
"""Arms in the order of their first run, and the ``policy_loss_fn`` of each."""
LAST_COMPILATION = 90.0
"""Seconds after which the fused arm is left out."""


def config() -> Any:
    made = qwen2.ModelConfig.qwen2p5_0p5b()
    if SMALL:
        made = qwen2.ModelConfig(
            num_layers=2, vocab_size=512, embed_dim=64, hidden_dim=128, num_heads=4, head_dim=16, num_kv_heads=2,
            rope_theta=10_000, norm_eps=1e-6, use_tied_embedding=True,
        )  # fmt: skip
    made.dtype = made.param_dtype = jnp.bfloat16
    made.remat_config = qwen2.RematConfig.BLOCK
    return made


def example(seed: int, vocabulary: int) -> Any:
    """Completions of half to all of the width."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(COMPLETION // 2, COMPLETION + 1, ROWS)
    mask = np.arange(COMPLETION) < lengths[:, None]
    ids = np.where(mask, rng.integers(2, vocabulary, mask.shape), 0)
    logp = np.where(mask, -np.log(vocabulary) + 0.3 * rng.normal(size=mask.shape), 0.0)
    return common.TrainExample(
        prompt_ids=jnp.asarray(rng.integers(2, vocabulary, (ROWS, PROMPT)), jnp.int32),
        prompt_mask=jnp.ones((ROWS, PROMPT), bool),
        completion_ids=jnp.asarray(ids, jnp.int32),
        completion_mask=jnp.asarray(mask),
        advantages=jnp.asarray(rng.normal(size=ROWS), jnp.float32),
        ref_per_token_logps=jnp.asarray(logp, jnp.float32),
        old_per_token_logps=jnp.asarray(logp + 0.02 * mask * rng.normal(size=mask.shape), jnp.float32),
    )


def step_of(model: Any, arm: str) -> Callable[[Any], Any]:
    """The train step of Tunix' trainer."""
    integration.register()
    loss, algo = function_registry.get_policy_loss_fn(ARMS[arm]), GRPOConfig(num_generations=2, beta=0.04)
    algo.temperature = 1.0
    settings = peft_trainer.TrainingConfig(eval_every_n_steps=1000)
    made = trainer.Trainer(model, optax.adamw(1e-6), settings, dict)
    made = made.with_loss_fn(lambda m, x: loss(m, x, algo_config=algo, pad_id=0, eos_id=1), has_aux=True)
    made = made.with_gen_model_input_fn(lambda x: {"x": x})
    return made.jit_train_and_eval_step()[0]


def reference_of(model: Any) -> Callable[[Any], Any]:
    """The pass of the reference model, as Tunix' inference worker makes it."""
    graphdef, state = nnx.split(model)
    logps = common.compute_per_token_logps
    return lambda x: logps(graphdef, state, x.prompt_ids, x.completion_ids, 0, 1)


def model_of() -> Any:
    """The model with logits of order one: Tunix' random embedding makes them of order 30."""
    made = qwen2.Qwen2(config(), rngs=nnx.Rngs(params=0))
    table = made.embedder.input_embedding
    table.set_value(table.get_value() * (made.config.embed_dim**-0.5 / jnp.std(table.get_value())))
    return made


def milliseconds(run: Callable[[Any], Any], batch: Any) -> tuple[float, Any]:
    started = time.perf_counter()
    out = jax.block_until_ready(run(batch))
    return 1e3 * (time.perf_counter() - started), out


def memory(what: str) -> float:
    """MiB on the device; 0 where it does not tell."""
    return round((jax.local_devices()[0].memory_stats() or {}).get(what, 0) / 2**20, 1)


def alternated(runs: dict[str, Callable[[Any], Any]], batches: list[Any]) -> dict[str, list[float]]:
    """Milliseconds of each arm in each round, a batch after the other."""
    found = [harness.alternated({k: functools.partial(f, b) for k, f in runs.items()}, ROUNDS) for b in batches]
    return {arm: list(itertools.chain.from_iterable(of[arm] for of in found)) for arm in runs}


def main() -> None:
    model = model_of()
    batches = [example(seed, model.config.vocab_size) for seed in range(3)]
    steps: dict[str, Any] = {}
    passes: dict[str, Any] = {}
    peaks: dict[str, Any] = {}
    first: dict[str, Any] = {}
    for arm in ARMS:
        if arm == "fused" and time.perf_counter() - harness.STARTED > LAST_COMPILATION:
            say("fused: left out, compiling took too long")
            continue
        with contextlib.nullcontext() if arm == "stock" else integration.install():
            step, held = step_of(model, arm), memory("bytes_in_use")
            say(arm, "compiles and takes a step")
            _, (loss, _, norm) = milliseconds(step, batches[0])
            say(arm, "the reference pass")
            steps[arm], first[arm] = step, {"loss": float(loss), "gradient_norm": float(norm)}
            if arm != "fused":
                peaks[arm] = {"held_before": held, "step": memory("peak_bytes_in_use")}
                passes[arm] = reference_of(model)
                _, logps = milliseconds(passes[arm], batches[0])
                first[arm]["sum_of_reference_logps"] = float(jnp.sum(logps * batches[0].completion_mask))
        say(arm, first[arm], peaks.get(arm))
    times = {"step": alternated(steps, batches), "reference pass": alternated(passes, batches)}
    medians = {what: {arm: round(float(np.median(v)), 2) for arm, v in of.items()} for what, of in times.items()}
    say(medians)
    if SMALL:
        return
    record = {
        "what": "Tunix' GRPO train step and reference pass, stock and without logits, in alternation",
        "command": "python benchmarks/tunix_step.py",
        "versions": {k: metadata.version(k) for k in ("jax", "flax", "google-tunix")},
        "device": jax.devices()[0].device_kind,
        "model": "qwen2, shapes of Qwen2.5-0.5B, random bfloat16 weights, blocks recomputed",
        "rows": ROWS,
        "prompt": PROMPT,
        "completion": COMPLETION,
        "live_tokens": [int(b.completion_mask.sum()) for b in batches],
        "peak_mib": peaks,
        "first_step": first,
        "median_ms": medians,
        "ms": times,
    }
    harness.write("tunix_step.json", record)


if __name__ == "__main__":
    main()
