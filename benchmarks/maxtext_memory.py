"""Compile-time temporaries of Tunix' GRPO step over a MaxText model, at V = 151,936: stock, Tunix' chunks of the
sequence with recomputation, and without logits.

    PYTHONPATH=<checkout of google/tunix> .venv-tunix/bin/python benchmarks/maxtext_memory.py

needs Tunix 0.1.8 (its chunks), and writes ``memory`` of results/maxtext.json. The model is
tests/support/fake_maxtext.py, which has the adapter, the norm and the output head of MaxText and one layer below them:
H = 256, 8 rows of 32 prompt and 224 completion tokens. Programs are compiled for a CPU and not run; numbers are XLA's
``temp_size_in_bytes``.
"""

from __future__ import annotations

import contextlib
import sys
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from tunix.rl import algo_core
from tunix.rl.grpo.grpo_learner import GRPOConfig

import harness
import logitless.integrations.tunix as integration
from logitless.integrations.tunix.interface import interface
from tunix_memory import COMPLETION, ROWS, H, V

RECORD = "maxtext.json"
ARMS: dict[str, dict[str, Any]] = {
    "stock": {},
    "chunks of 128, recomputed": {"compute_logps_chunk_size": 128},
    "chunks of 32, recomputed": {"compute_logps_chunk_size": 32},
    "install()": {},
}


def temporaries(arm: str, head: str, dtype: Any) -> float:
    """MiB of loss and gradients of all parameters."""
    import fake_maxtext  # of tests/support

    settings = GRPOConfig(num_generations=2)
    settings.temperature = 1.0
    made = nnx.eval_shape(lambda: fake_maxtext.adapter(head, vocab_size=V, emb_dim=H, dtype=dtype))
    graphdef, state = nnx.split(made)

    def loss(state: Any, x: Any) -> Any:
        out = algo_core.grpo_loss_fn(nnx.merge(graphdef, state), x, settings, 0, 1, **ARMS[arm])
        return out.primary_loss.compute()

    with integration.install() if arm == "install()" else contextlib.nullcontext():
        compiled = (
            jax.jit(jax.value_and_grad(loss)).lower(state, tunix_memory.train_example(jax.ShapeDtypeStruct)).compile()
        )
    return round(compiled.memory_analysis().temp_size_in_bytes / 2**20, 1)


def main() -> None:
    sys.path.insert(0, str(harness.ROOT / "tests" / "support"))
    if interface() != "0.1.8":
        raise SystemExit("maxtext_memory: this Tunix has no chunks; put a checkout of google/tunix on PYTHONPATH.")
    found: dict[str, Any] = {}
    for head in ("logits_dense", "tied"):
        for dtype in ("float32", "bfloat16"):
            found[f"{head}, {dtype}"] = {arm: temporaries(arm, head, jnp.dtype(dtype)) for arm in ARMS}
            print(head, dtype, found[f"{head}, {dtype}"], flush=True)
    record = harness.read(RECORD)
    record["memory"] = {
        "what": "MiB of temporaries of Tunix' GRPO step over the fake of a MaxText model",
        "command": "PYTHONPATH=<checkout of google/tunix> python benchmarks/maxtext_memory.py",
        "versions": {"google-tunix": "main, 2026-08-21"} | {k: metadata.version(k) for k in ("jax", "flax")},
        "vocabulary": V,
        "hidden": H,
        "tokens": ROWS * COMPLETION,
        "temporaries_mib": found,
    }
    harness.write(RECORD, record)


if __name__ == "__main__":
    main()
