"""Small models of Tunix' families, a batch, and a loss with its gradients: what the tests and the benchmark share."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import qwix
from flax import nnx
from tunix.models.gemma import model as gemma
from tunix.models.gemma3 import model as gemma3
from tunix.models.llama3 import model as llama3
from tunix.models.qwen2 import model as qwen2
from tunix.models.qwen3 import model as qwen3
from tunix.rl import common
from tunix.rl.grpo import grpo_learner

PAD, EOS = 0, 1
B, PROMPT, T, V = 6, 4, 7, 96
SMALL = {"num_layers": 1, "embed_dim": 32, "hidden_dim": 64, "num_heads": 2, "head_dim": 16, "num_kv_heads": 1}


def qwen2_config(vocab: int = V, tied: bool = True, dtype: Any = jnp.float32, **sizes: Any) -> Any:
    return qwen2.ModelConfig(
        **dict(SMALL, **sizes), vocab_size=vocab, rope_theta=10_000, norm_eps=1e-6, use_tied_embedding=tied,
        dtype=dtype, param_dtype=dtype,
    )  # fmt: skip


def _gemma_config(softcap: float | None) -> Any:
    sizes = {k: v for k, v in SMALL.items() if k != "num_layers"}
    return gemma.ModelConfig(
        **sizes, num_layers=2, num_embed=V, final_logit_softcap=softcap, use_post_attn_norm=softcap is not None,
        use_post_ffw_norm=softcap is not None, attn_logits_soft_cap=50.0 if softcap else None, sliding_window_size=4,
        attention_types=(gemma.AttentionType.LOCAL_SLIDING, gemma.AttentionType.GLOBAL),
    )  # fmt: skip


def _models() -> dict[str, Any]:
    def rngs() -> nnx.Rngs:
        return nnx.Rngs(params=0)

    llama = {"vocab_size": V, "rope_theta": 10_000, "norm_eps": 1e-5, **SMALL}
    qwen = {"vocab_size": V, "rope_theta": 10_000, "norm_eps": 1e-6, **SMALL, "dtype": jnp.float32}
    g3 = {"num_embed": V, "sliding_window_size": 4, "param_dtype": jnp.float32, **SMALL}
    return {
        "qwen2": lambda: qwen2.Qwen2(qwen2_config(), rngs=rngs()),
        "qwen2 untied": lambda: qwen2.Qwen2(qwen2_config(tied=False), rngs=rngs()),
        "qwen3": lambda: qwen3.Qwen3(
            qwen3.ModelConfig(**qwen, use_tied_embedding=True, param_dtype=jnp.float32), rngs=rngs()
        ),
        "llama3": lambda: llama3.Llama3(llama3.ModelConfig(**llama, weight_tying=True), rngs=rngs()),
        "llama3 untied": lambda: llama3.Llama3(llama3.ModelConfig(**llama, weight_tying=False), rngs=rngs()),
        "gemma": lambda: gemma.Gemma(_gemma_config(None), rngs=rngs()),
        "gemma2": lambda: gemma.Gemma(_gemma_config(30.0), rngs=rngs()),
        "gemma3": lambda: gemma3.Gemma3(gemma3.ModelConfig(**g3), rngs=rngs()),
    }


MODELS = _models()


def softened(made: Any) -> Any:
    """The model with logits of order one: a softmax that is neither flat nor collapsed."""
    head = made.embedder.input_embedding if not hasattr(made, "lm_head") else made.lm_head.w
    head.set_value(0.35 / jnp.std(head.get_value()) * head.get_value())
    return made


@functools.cache
def model(name: str) -> Any:
    return softened(MODELS[name]())


def with_lora(made: Any, where: str, alpha: float = 6.0, **rule: Any) -> Any:
    """LoRA by Qwix; its B is random, so that it does something."""
    provider = qwix.LoraProvider(module_path=where, rank=3, alpha=alpha, **rule)
    made = qwix.apply_lora_to_model(made, provider, **made.get_model_input(), rngs=nnx.Rngs(5))
    for i, (path, p) in enumerate(sorted(nnx.iter_graph(made), key=lambda x: str(x[0]))):
        if isinstance(p, nnx.LoRAParam) and str(path[-1]).endswith("lora_b"):
            p.set_value(0.1 * jax.random.normal(jax.random.key(i), p.get_value().shape, p.get_value().dtype))
    return made


def example(packed: bool = False, advantages: str = "rows", old: bool = True, **more: Any) -> Any:
    """Completions of several lengths, one of them masked throughout."""
    rng = np.random.default_rng(1)
    lengths = np.array([7, 3, 5, 0, 1, 6])[:B]
    prompt = rng.integers(2, V, (B, PROMPT))
    prompt[1, :2] = PAD
    completion = np.where(np.arange(T) < lengths[:, None], rng.integers(2, V, (B, T)), PAD)
    logp = -np.abs(rng.normal(4.0, 1.0, (B, T))).astype(np.float32)
    fields = {
        "prompt_ids": jnp.asarray(prompt, jnp.int32),
        "prompt_mask": jnp.asarray(prompt != PAD),
        "completion_ids": jnp.asarray(completion, jnp.int32),
        "completion_mask": jnp.asarray(completion != PAD),
        "advantages": jnp.asarray(rng.normal(size=B), jnp.float32),
        "ref_per_token_logps": jnp.asarray(logp + 0.5 * rng.normal(size=(B, T)), jnp.float32),
        "old_per_token_logps": jnp.asarray(logp, jnp.float32) if old else None,
    }
    if packed:
        fields.update(_packed(rng))
    return common.TrainExample(**{**fields, **more})


def _packed(rng: Any) -> dict[str, Any]:
    """Two sequences and padding in each row."""
    width = 12
    segments = np.array([[1] * 5 + [2] * 5 + [0] * 2, [1] * 7 + [2] * 4 + [0]])
    positions = np.array([[*range(5), *range(5), 0, 0], [*range(7), *range(4), 0]])
    mask = np.zeros((2, width), bool)
    mask[0, 2:5] = mask[0, 7:10] = mask[1, 3:7] = mask[1, 8:11] = True
    logp = -np.abs(rng.normal(4.0, 1.0, (2, width))).astype(np.float32)
    return {
        "prompt_ids": jnp.zeros((2, 0), jnp.int32),
        "prompt_mask": jnp.zeros((2, 0), bool),
        "completion_ids": jnp.asarray(np.where(segments > 0, rng.integers(2, V, (2, width)), PAD), jnp.int32),
        "completion_mask": jnp.asarray(mask),
        "advantages": jnp.asarray(rng.normal(size=(2, 3))[np.arange(2)[:, None], segments], jnp.float32),
        "ref_per_token_logps": jnp.asarray(logp + 0.3 * rng.normal(size=(2, width)), jnp.float32),
        "old_per_token_logps": jnp.asarray(logp, jnp.float32),
        "segment_ids": jnp.asarray(segments, jnp.int32),
        "segment_positions": jnp.asarray(positions, jnp.int32),
    }


def config(temperature: float = 1.0, **settings: Any) -> Any:
    """An ``algo_config``; settings that ``GRPOConfig`` does not declare are set as learners set them."""
    declared = {k: v for k, v in settings.items() if k in grpo_learner.GRPOConfig.__dataclass_fields__}
    made = grpo_learner.GRPOConfig(**declared)
    for name, value in {"temperature": temperature, **settings}.items():
        setattr(made, name, value)
    return made


def run(loss: Any, made: Any, batch: Any, settings: Any, lora: bool = False) -> Any:
    """``((loss, aux), gradients)`` on the host, of one jitted program."""
    wrt = nnx.DiffState(0, nnx.LoRAParam) if lora else 0

    def of_model(m: Any, x: Any) -> Any:
        out = loss(m, x, settings, PAD, EOS)
        if isinstance(out, tuple):
            return out
        aux = {k: v.compute() if hasattr(v, "compute") else v for k, v in out.aux_metrics.items()}
        return out.primary_loss.compute(), aux

    step = nnx.jit(nnx.value_and_grad(of_model, argnums=wrt, has_aux=True))
    return jax.tree.map(np.asarray, jax.device_get(step(made, batch)))


def relative(a: Any, b: Any) -> float:
    """The largest difference between two trees of gradients, relative to each array's largest number."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(float(np.max(np.abs(x - y)) / max(float(np.max(np.abs(x))), 1e-6)) for x, y in pairs)
