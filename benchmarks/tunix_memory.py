"""Compile-time temporaries of Tunix' GRPO step: stock, without logits (``install``) and fused, at V = 151,936.

    .venv-tunix/bin/python benchmarks/tunix_memory.py            compiles, and writes results/tunix_memory.json
    .venv-tunix/bin/python benchmarks/tunix_memory.py --table    writes the table in docs/tunix.md from it

One decoder layer of Qwen2 with H = 256, 8 rows of 32 prompt and 224 completion tokens (1,792). Programs are compiled
for CPUs and not run; numbers are XLA's ``temp_size_in_bytes`` for one device.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RECORD = ROOT / "benchmarks" / "results" / "tunix_memory.json"
PAGE = ROOT / "docs" / "tunix.md"
ROWS, PROMPT, COMPLETION, V, H = 8, 32, 224, 151_936, 256
CASES: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16, frozen head": {"dtype": "bfloat16", "frozen": True},
    "bfloat16, reference pass": {"dtype": "bfloat16", "reference": True},
    "float32, fsdp 2 x tp 2, per device": {"dtype": "float32", "mesh": (2, 2)},
}


def temporaries(dtype: str, frozen: bool = False, reference: bool = False, mesh: Any = None) -> dict[str, float]:
    """MiB of each way."""
    import contextlib

    import jax
    import jax.numpy as jnp
    import numpy as np
    from flax import nnx
    from tunix.models.qwen2 import model as qwen2
    from tunix.rl import algo_core, common, function_registry
    from tunix.rl.grpo.grpo_learner import GRPOConfig

    import logitless.integrations.tunix as integration

    integration.register()
    config = qwen2.ModelConfig(
        num_layers=1, vocab_size=V, embed_dim=H, hidden_dim=4 * H, num_heads=4, head_dim=64, num_kv_heads=4,
        rope_theta=10_000, norm_eps=1e-6, use_tied_embedding=True, dtype=jnp.dtype(dtype), param_dtype=jnp.dtype(dtype),
    )  # fmt: skip
    graphdef, state = nnx.split(nnx.eval_shape(lambda: qwen2.Qwen2(config, rngs=nnx.Rngs(params=0))))
    axes = None
    if mesh is not None:
        axes = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(mesh), ("fsdp", "tp"))

    def shape(size: tuple[int, ...], kind: Any) -> Any:
        where = None if axes is None else jax.sharding.NamedSharding(axes, jax.sharding.PartitionSpec("fsdp"))
        return jax.ShapeDtypeStruct(size, kind, sharding=where)

    if axes is not None:
        named = nnx.get_named_sharding(state, axes)
        state = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, named)
    prompt, completion = shape((ROWS, PROMPT), jnp.int32), shape((ROWS, COMPLETION), jnp.int32)
    logps = shape((ROWS, COMPLETION), jnp.float32)
    example = common.TrainExample(
        prompt_ids=prompt, prompt_mask=shape((ROWS, PROMPT), bool), completion_ids=completion,
        completion_mask=shape((ROWS, COMPLETION), bool), advantages=shape((ROWS,), jnp.float32),
        ref_per_token_logps=logps, old_per_token_logps=logps,
    )  # fmt: skip
    settings = GRPOConfig(num_generations=2)
    settings.temperature = 1.0
    head, body = nnx.split_state(state, nnx.PathContains("embedder"), ...)

    def step(loss: Any) -> Any:
        def of(moving: Any, fixed: Any, x: Any) -> Any:
            return loss(nnx.merge(graphdef, nnx.merge_state(moving, fixed)), x, settings, 0, 1)

        def train(head: Any, body: Any, x: Any) -> Any:
            if frozen:
                return jax.value_and_grad(of, has_aux=True)(body, head, x)
            return jax.value_and_grad(of, has_aux=True)(nnx.merge_state(head, body), nnx.State({}), x)

        return jax.jit(train).lower(head, body, example)

    def reference_pass() -> Any:
        return common.compute_per_token_logps.lower(graphdef, state, prompt, completion, 0, 1)

    def measured(lowered: Any) -> float:
        return round(lowered.compile().memory_analysis().temp_size_in_bytes / 2**20, 1)

    with axes or contextlib.nullcontext():
        stock = reference_pass() if reference else step(algo_core.grpo_loss_fn)
        found = {"stock": measured(stock)}
        with integration.install():
            found["install()"] = measured(reference_pass() if reference else step(algo_core.grpo_loss_fn))
        if not reference:
            found["logitless"] = measured(step(function_registry.get_policy_loss_fn("logitless")))
    return found


def table(record: dict[str, Any]) -> str:
    """As the page has it."""
    head = '| MiB | stock | `install()` | `policy_loss_fn="logitless"` |'
    lines = [head, "|---|---:|---:|---:|"]
    for name, found in record["temporaries_mib"].items():
        cells = (f"{found[k]:,.0f}" if k in found else "-" for k in ("stock", "install()", "logitless"))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def page(text: str, record: dict[str, Any]) -> str:
    """The page with its table made anew."""
    marks = r"(<!-- memory: begin -->\n).*?(<!-- memory: end -->)"
    return re.sub(marks, lambda m: m.group(1) + table(record) + "\n" + m.group(2), text, flags=re.DOTALL)


def main() -> None:
    if "--table" not in sys.argv:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        import jax

        jax.config.update("jax_num_cpu_devices", 4)
        versions = {k: importlib.metadata.version(k) for k in ("jax", "flax", "google-tunix")}
        what = "compile-time temporaries of Tunix' losses, stock and without logits"
        record: dict[str, Any] = {"what": what, "versions": versions, "platform": "cpu", "vocabulary": V, "hidden": H}
        record |= {"rows": ROWS, "prompt": PROMPT, "completion": COMPLETION, "temporaries_mib": {}}
        for name, options in CASES.items():
            record["temporaries_mib"][name] = temporaries(**options)
            print(name, record["temporaries_mib"][name], flush=True)
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
    PAGE.write_text(page(PAGE.read_text(), json.loads(RECORD.read_text())))


if __name__ == "__main__":
    main()
