"""Compile-time temporaries of Tunix' steps: stock, without logits (``install``; in distillation our strategy) and
fused, at V = 151,936.

    .venv-tunix/bin/python benchmarks/tunix_memory.py            compiles, and writes results/tunix_memory.json
    .venv-tunix/bin/python benchmarks/tunix_memory.py --table    writes the table in docs/tunix.md from it

One decoder layer of Qwen2 with H = 256, 8 rows of 32 prompt and 224 completion tokens (1,792);
fine-tuning and distillation take all 256. Programs are compiled
for CPUs and not run; numbers are XLA's ``temp_size_in_bytes`` for one device.
"""

from __future__ import annotations

import functools
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
    "bfloat16, reference pass": {"dtype": "bfloat16", "what": "reference"},
    "float32, fsdp 2 x tp 2, per device": {"dtype": "float32", "mesh": (2, 2)},
    "SFT, float32": {"dtype": "float32", "what": "sft"},
    "SFT, bfloat16": {"dtype": "bfloat16", "what": "sft"},
    "DPO, bfloat16": {"dtype": "bfloat16", "what": "dpo"},
    "ORPO, bfloat16": {"dtype": "bfloat16", "what": "orpo"},
    "distillation, float32": {"dtype": "float32", "what": "distillation"},
    "distillation, bfloat16": {"dtype": "bfloat16", "what": "distillation"},
}


def temporaries(dtype: str, what: str = "grpo", frozen: bool = False, mesh: Any = None) -> dict[str, float]:
    """MiB of each way."""
    import contextlib

    import jax
    import jax.numpy as jnp
    import numpy as np
    from flax import nnx
    from tunix.models.qwen2 import model as qwen2

    import logitless.integrations.tunix as integration

    config = qwen2.ModelConfig(
        num_layers=1, vocab_size=V, embed_dim=H, hidden_dim=4 * H, num_heads=4, head_dim=64, num_kv_heads=4,
        rope_theta=10_000, norm_eps=1e-6, use_tied_embedding=True, dtype=jnp.dtype(dtype), param_dtype=jnp.dtype(dtype),
    )  # fmt: skip
    graphdef, state = nnx.split(nnx.eval_shape(lambda: qwen2.Qwen2(config, rngs=nnx.Rngs(params=0))))
    axes = None
    if mesh is not None:
        axes = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(mesh), ("fsdp", "tp"))
        named = nnx.get_named_sharding(state, axes)
        state = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, named)

    def shape(size: tuple[int, ...], kind: Any) -> Any:
        where = None if axes is None else jax.sharding.NamedSharding(axes, jax.sharding.PartitionSpec("fsdp"))
        return jax.ShapeDtypeStruct(size, kind, sharding=where)

    def measured(step: Any, *arguments: Any) -> float:
        if not hasattr(step, "lower"):
            step = jax.jit(step)
        return round(step.lower(*arguments).compile().memory_analysis().temp_size_in_bytes / 2**20, 1)

    def gradient(loss: Any) -> Any:
        """Of a loss of a model, with respect to all parameters, or all but the head's."""
        head, body = nnx.split_state(state, nnx.PathContains("embedder"), ...)

        def of(moving: Any, fixed: Any, *x: Any) -> Any:
            return loss(nnx.merge(graphdef, nnx.merge_state(moving, fixed)), *x)

        def train(head: Any, body: Any, *x: Any) -> Any:
            moving, fixed = (body, head) if frozen else (nnx.merge_state(head, body), nnx.State({}))
            return jax.value_and_grad(of, has_aux=True)(moving, fixed, *x)

        return lambda *x: measured(train, head, body, *x)

    with axes or contextlib.nullcontext():
        if what == "distillation":
            return _distillation(graphdef, state, shape, gradient)
        if what in ("sft", "dpo", "orpo"):
            program = functools.partial(_tuning, what, shape, gradient)
        elif what == "reference":
            program = functools.partial(_reference, graphdef, state, shape, measured)
        else:
            program = functools.partial(_grpo, "grpo", shape, gradient)
        found = {"stock": program()}
        with integration.install():
            found["install()"] = program()
        if what == "grpo":
            found["logitless"] = _grpo("logitless", shape, gradient)
    return found


def _grpo(loss: str, shape: Any, gradient: Any) -> float:
    import jax.numpy as jnp
    from tunix.rl import common, function_registry
    from tunix.rl.grpo.grpo_learner import GRPOConfig

    import logitless.integrations.tunix as integration

    integration.register()
    logps, masks = shape((ROWS, COMPLETION), jnp.float32), shape((ROWS, COMPLETION), bool)
    example = common.TrainExample(
        prompt_ids=shape((ROWS, PROMPT), jnp.int32), prompt_mask=shape((ROWS, PROMPT), bool),
        completion_ids=shape((ROWS, COMPLETION), jnp.int32), completion_mask=masks,
        advantages=shape((ROWS,), jnp.float32), ref_per_token_logps=logps, old_per_token_logps=logps,
    )  # fmt: skip
    settings, policy_loss = GRPOConfig(num_generations=2), function_registry.get_policy_loss_fn(loss)
    settings.temperature = 1.0
    return gradient(lambda model, x: policy_loss(model, x, settings, 0, 1))(example)


def _reference(graphdef: Any, state: Any, shape: Any, measured: Any) -> float:
    import jax.numpy as jnp
    from tunix.rl import common

    tokens = shape((ROWS, PROMPT), jnp.int32), shape((ROWS, COMPLETION), jnp.int32)
    return measured(common.compute_per_token_logps, graphdef, state, *tokens, 0, 1)


def _inputs(shape: Any) -> dict[str, Any]:
    """Of supervised fine-tuning."""
    import jax.numpy as jnp

    width = PROMPT + COMPLETION
    tokens, masks = shape((ROWS, width), jnp.int32), shape((ROWS, width), bool)
    attention = shape((ROWS, width, width), bool)
    return {"input_tokens": tokens, "input_mask": masks, "positions": tokens, "attention_mask": attention}


def _tuning(what: str, shape: Any, gradient: Any) -> float:
    import jax.numpy as jnp
    from tunix.sft import peft_trainer
    from tunix.sft.dpo import dpo_trainer

    given = _inputs(shape)
    if what == "sft":
        return gradient(lambda model, x: (peft_trainer._default_loss_fn(model, **x), None))(given)

    def loss(model: Any, x: dict[str, Any], completion_mask: Any) -> Any:
        example = dpo_trainer.TrainExample(
            input_ids=x["input_tokens"], positions=x["positions"], attention_mask=x["attention_mask"],
            ref_chosen_logps=None, ref_rejected_logps=None, completion_mask=completion_mask, logits_to_keep=COMPLETION,
        )  # fmt: skip
        return dpo_trainer.dpo_loss_fn(model, example, algorithm=what)

    return gradient(loss)(given, shape((ROWS, COMPLETION), jnp.int32))


def _distillation(graphdef: Any, state: Any, shape: Any, gradient: Any) -> dict[str, float]:
    """A step of ``LogitStrategy`` and of ours, given the outputs of the teacher, which is a model of the same shape."""
    import jax
    from flax import nnx
    from tunix.distillation.strategies.logit import LogitStrategy

    from logitless.integrations.tunix.distillation import DistillationStrategy

    def forward(model: Any, input_tokens: Any, input_mask: Any, positions: Any, attention_mask: Any) -> Any:
        return model(input_tokens, positions, None, attention_mask)[0][:, :-1]

    def one_hot(input_tokens: Any, input_mask: Any, **_: Any) -> Any:
        return jax.nn.one_hot(input_tokens[:, 1:], V) * input_mask[:, 1:, None]

    def ids(input_tokens: Any, input_mask: Any, **_: Any) -> Any:
        return input_tokens[:, 1:], input_mask[:, 1:]

    found, given = {}, _inputs(shape)
    for name, strategy in (
        ("stock", LogitStrategy(forward, forward, one_hot)),
        ("install()", DistillationStrategy(forward, forward, ids)),
    ):

        def teacher(state: Any, x: Any, of: Any = strategy) -> Any:
            return of.get_teacher_outputs(nnx.merge(graphdef, state), x)

        found[name] = gradient(strategy.get_train_loss)(jax.eval_shape(teacher, state, given), given)
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
