"""Compile-time temporaries of Tunix' steps: stock, without logits (``install``; in distillation our strategy) and
fused, at V = 151,936.

    .venv-tunix/bin/python benchmarks/tunix_memory.py

writes results/tunix_memory.json, from which ``python benchmarks/tables.py`` writes the table in docs/tunix.md. One
decoder layer of Qwen2 with H = 256, 8 rows of 32 prompt and 224 completion tokens (1,792); fine-tuning and distillation
take all 256. Programs are compiled for CPUs and not run; numbers are XLA's ``temp_size_in_bytes`` for one device.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.distillation.strategies.logit import LogitStrategy
from tunix.models.qwen2 import model as qwen2
from tunix.rl import common, function_registry
from tunix.rl.grpo.grpo_learner import GRPOConfig
from tunix.sft import peft_trainer
from tunix.sft.dpo import dpo_trainer

import harness
import logitless.integrations.tunix as integration
from logitless.integrations.tunix.distillation import DistillationStrategy

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


class Model:
    """The shapes of a model, and the temporaries (MiB) of programs over it."""

    def __init__(self, dtype: str, frozen: bool, mesh: tuple[int, int] | None):
        config = qwen2.ModelConfig(
            num_layers=1, vocab_size=V, embed_dim=H, hidden_dim=4 * H, num_heads=4, head_dim=64, num_kv_heads=4,
            rope_theta=10_000, norm_eps=1e-6, use_tied_embedding=True, dtype=jnp.dtype(dtype),
            param_dtype=jnp.dtype(dtype),
        )  # fmt: skip
        made = nnx.eval_shape(lambda: qwen2.Qwen2(config, rngs=nnx.Rngs(params=0)))
        self.graphdef, self.state = nnx.split(made)
        self.frozen, self.mesh = frozen, None
        if mesh is not None:
            self.mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(mesh), ("fsdp", "tp"))
            named = nnx.get_named_sharding(self.state, self.mesh)
            placed = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)  # noqa: E731
            self.state = jax.tree.map(placed, self.state, named)

    def shape(self, size: tuple[int, ...], kind: Any) -> jax.ShapeDtypeStruct:
        spec = jax.sharding.PartitionSpec("fsdp")
        where = None if self.mesh is None else jax.sharding.NamedSharding(self.mesh, spec)
        return jax.ShapeDtypeStruct(size, kind, sharding=where)

    def inputs(self) -> dict[str, Any]:
        """Of supervised fine-tuning."""
        width = PROMPT + COMPLETION
        tokens, masks = self.shape((ROWS, width), jnp.int32), self.shape((ROWS, width), bool)
        attention = self.shape((ROWS, width, width), bool)
        return {"input_tokens": tokens, "input_mask": masks, "positions": tokens, "attention_mask": attention}

    def gradient(self, loss: Callable[..., Any], *x: Any) -> float:
        """Of a loss of a model, with respect to all parameters, or all but the head's."""
        head, body = nnx.split_state(self.state, nnx.PathContains("embedder"), ...)

        def of(moving: Any, fixed: Any, *x: Any) -> Any:
            return loss(nnx.merge(self.graphdef, nnx.merge_state(moving, fixed)), *x)

        def train(head: Any, body: Any, *x: Any) -> Any:
            moving, fixed = (body, head) if self.frozen else (nnx.merge_state(head, body), nnx.State({}))
            return jax.value_and_grad(of, has_aux=True)(moving, fixed, *x)

        return temporaries_of(jax.jit(train), head, body, *x)


def temporaries_of(step: Any, *arguments: Any) -> float:
    return round(step.lower(*arguments).compile().memory_analysis().temp_size_in_bytes / 2**20, 1)


def temporaries(
    dtype: str, what: str = "grpo", frozen: bool = False, mesh: tuple[int, int] | None = None
) -> dict[str, float]:
    """MiB of each way."""
    model = Model(dtype, frozen, mesh)
    programs: dict[str, Callable[[Model], float]] = dict(reference=_reference, grpo=functools.partial(_grpo, "grpo"))
    with model.mesh or contextlib.nullcontext():
        if what == "distillation":
            return _distillation(model)
        program = programs.get(what) or functools.partial(_tuning, what)
        found = {"stock": program(model)}
        with integration.install():
            found["install()"] = program(model)
        if what == "grpo":
            found["logitless"] = _grpo("logitless", model)
    return found


def train_example(shape: Callable[..., Any]) -> Any:
    """A batch of GRPO, in shapes."""
    logps, masks = shape((ROWS, COMPLETION), jnp.float32), shape((ROWS, COMPLETION), bool)
    return common.TrainExample(
        prompt_ids=shape((ROWS, PROMPT), jnp.int32), prompt_mask=shape((ROWS, PROMPT), bool),
        completion_ids=shape((ROWS, COMPLETION), jnp.int32), completion_mask=masks,
        advantages=shape((ROWS,), jnp.float32), ref_per_token_logps=logps, old_per_token_logps=logps,
    )  # fmt: skip


def _grpo(loss: str, model: Model) -> float:
    integration.register()
    settings, policy_loss = GRPOConfig(num_generations=2), function_registry.get_policy_loss_fn(loss)
    settings.temperature = 1.0
    return model.gradient(lambda m, x: policy_loss(m, x, settings, 0, 1), train_example(model.shape))


def _reference(model: Model) -> float:
    tokens = model.shape((ROWS, PROMPT), jnp.int32), model.shape((ROWS, COMPLETION), jnp.int32)
    return temporaries_of(common.compute_per_token_logps, model.graphdef, model.state, *tokens, 0, 1)


def _tuning(what: str, model: Model) -> float:
    if what == "sft":
        return model.gradient(lambda m, x: (peft_trainer._default_loss_fn(m, **x), None), model.inputs())

    def loss(m: Any, x: dict[str, Any], completion_mask: Any) -> Any:
        example = dpo_trainer.TrainExample(
            input_ids=x["input_tokens"], positions=x["positions"], attention_mask=x["attention_mask"],
            ref_chosen_logps=None, ref_rejected_logps=None, completion_mask=completion_mask, logits_to_keep=COMPLETION,
        )  # fmt: skip
        return dpo_trainer.dpo_loss_fn(m, example, algorithm=what)

    return model.gradient(loss, model.inputs(), model.shape((ROWS, COMPLETION), jnp.int32))


def _distillation(model: Model) -> dict[str, float]:
    """A step of ``LogitStrategy`` and of ours, given the outputs of the teacher, which is a model of the same shape."""

    def forward(m: Any, input_tokens: Any, input_mask: Any, positions: Any, attention_mask: Any) -> Any:
        return m(input_tokens, positions, None, attention_mask)[0][:, :-1]

    def one_hot(input_tokens: Any, input_mask: Any, **_: Any) -> Any:
        return jax.nn.one_hot(input_tokens[:, 1:], V) * input_mask[:, 1:, None]

    def ids(input_tokens: Any, input_mask: Any, **_: Any) -> Any:
        return input_tokens[:, 1:], input_mask[:, 1:]

    given = model.inputs()

    def step(strategy: Any) -> float:
        teacher = lambda state, x: strategy.get_teacher_outputs(nnx.merge(model.graphdef, state), x)  # noqa: E731
        return model.gradient(strategy.get_train_loss, jax.eval_shape(teacher, model.state, given), given)

    ours = DistillationStrategy(forward, forward, ids)
    return {"stock": step(LogitStrategy(forward, forward, one_hot)), "install()": step(ours)}


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 4)
    record: dict[str, Any] = {
        "what": "compile-time temporaries of Tunix' losses, stock and without logits",
        "versions": {k: importlib.metadata.version(k) for k in ("jax", "flax", "google-tunix")},
        "platform": "cpu", "vocabulary": V, "hidden": H, "rows": ROWS, "prompt": PROMPT, "completion": COMPLETION,
    }  # fmt: skip
    record["temporaries_mib"] = {name: temporaries(**options) for name, options in CASES.items()}
    harness.write("tunix_memory.json", record)
