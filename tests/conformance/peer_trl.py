"""TRL's own trainer, made for a model of a few numbers, whose ``_compute_loss`` is given log-probabilities.

The trainer is the real one, constructed from a ``GRPOConfig``. Only its forward pass is replaced, by leaves in float64,
so that the loss can be differentiated with respect to them; for the train/rollout weights, its generation as well.
"""

from __future__ import annotations

import functools
import logging
import os
import tempfile
from typing import Any

import numpy as np
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
logging.disable(logging.WARNING)

from datasets import Dataset  # noqa: E402
from tokenizers import Tokenizer, models  # noqa: E402
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

from peer_batches import ROWS, Answer, Batch  # noqa: E402

VOCABULARY = 32


@functools.cache
def _model_folder() -> str:
    """A model that the trainer can load again as its reference, without a hub."""
    folder = tempfile.mkdtemp(prefix="logitless-conformance-")
    torch.manual_seed(0)
    sizes = dict(vocab_size=VOCABULARY, hidden_size=8, intermediate_size=8, num_hidden_layers=1)
    config = Qwen2Config(**sizes, num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=False)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t0", eos_token="t1", unk_token="t0").save_pretrained(
        folder
    )
    return folder


def config(**settings: Any) -> GRPOConfig:
    """A ``GRPOConfig`` with these settings of the loss."""
    folder = _model_folder()
    plain = dict(output_dir=folder, report_to=[], use_cpu=True, bf16=False, per_device_train_batch_size=ROWS)
    return GRPOConfig(**plain, num_generations=2, **settings)


def trainer(settings: GRPOConfig) -> GRPOTrainer:
    """The trainer in training mode; with ``use_vllm``, as it is once an engine is there."""
    vllm = settings.use_vllm
    settings.use_vllm = False  # there is no engine to connect to
    made = GRPOTrainer(
        model=_model_folder(),
        reward_funcs=lambda completions, **_: [float(i) for i in range(len(completions))],
        args=settings,
        train_dataset=Dataset.from_dict({"prompt": ["t2", "t3"]}),
    )
    settings.use_vllm = made.use_vllm = vllm
    made.current_gradient_accumulation_steps = settings.gradient_accumulation_steps
    made.model.train()
    return made


def _tensor(x: np.ndarray | None) -> torch.Tensor | None:
    return None if x is None else torch.tensor(x)


def loss(made: GRPOTrainer, b: Batch, items: int | None = None, weights: np.ndarray | None = None) -> Answer:
    """``_compute_loss`` on given log-probabilities; ``items`` is ``num_items_in_batch``."""
    logp, entropy = (torch.tensor(x, requires_grad=True) for x in (b.logp, b.entropy))
    made._get_per_token_logps_and_entropies = lambda *_, **__: (logp, entropy, None)
    made._metrics["train"].clear()
    given: dict[str, Any] = {
        "prompt_ids": torch.zeros(ROWS, 1, dtype=torch.long),
        "prompt_mask": torch.ones(ROWS, 1, dtype=torch.long),
        "completion_ids": torch.zeros(b.mask.shape, dtype=torch.long),
        "completion_mask": _tensor(b.mask.astype(np.float64)),
        "advantages": _tensor(b.advantages),
        "old_per_token_logps": _tensor(b.old),
        "ref_per_token_logps": _tensor(b.ref),
        "num_items_in_batch": torch.tensor(float(b.mask.sum() if items is None else items)),
        "importance_sampling_ratio": _tensor(weights),
    }
    if made.use_vllm:
        given["sampling_per_token_logps"] = _tensor(b.rollout)
    value = made._compute_loss(made.model, {k: v for k, v in given.items() if v is not None})
    value.backward()
    gradients = (np.zeros(b.mask.shape) if x.grad is None else x.grad.numpy() for x in (logp, entropy))
    metrics = {k: float(v[-1]) for k, v in made._metrics["train"].items()}
    return Answer(float(value), *gradients, metrics=metrics)


def scored(made: GRPOTrainer, b: Batch) -> dict[str, np.ndarray]:
    """What the trainer makes of a generation: its weights for the train/rollout correction, advantages and counts.

    Completions are as long as the mask's rows; the engine's log-probabilities are ``b.rollout``, the
    policy's ``b.old``.
    """
    lengths = b.mask.sum(1)
    completions = [[2] * int(n) for n in lengths]
    sampled = [list(map(float, row[: int(n)])) for row, n in zip(b.rollout, lengths, strict=True)]
    made._get_per_token_logps_and_entropies = lambda *_, **__: (_tensor(b.old), None, None)
    made._generate = lambda prompts: ([[2]] * ROWS, completions, None, ["t2"] * ROWS, sampled, {}, None, [[]] * ROWS)
    out = made._generate_and_score_completions([{"prompt": f"t{2 + i // 2}"} for i in range(ROWS)])
    return {k: v.numpy() for k, v in out.items() if isinstance(v, torch.Tensor)}
