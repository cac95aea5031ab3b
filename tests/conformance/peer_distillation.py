"""Distillation losses of TRL, Liger and veRL over two small models, and ours over the same."""

from __future__ import annotations

import dataclasses
import os
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from liger_kernel.chunked_loss.jsd_loss import LigerFusedLinearJSDLoss

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from trl.experimental.gkd.gkd_trainer import GKDTrainer
    from trl.experimental.sdpo import loss_utils as sdpo
    from trl.trainer.distillation_trainer import _chunked_divergence_loss
    from verl.trainer.distillation.fsdp.losses import compute_forward_kl_topk

from logitless import Distillation, oracle
from logitless.oracle.rows import Rows
from peer_batches import MASKS, ROWS, WIDTH

VOCABULARY = 11
IGNORED = -100


@dataclasses.dataclass(frozen=True)
class Case:
    """A student and a teacher of other widths, in float64 values that float32 holds exactly."""

    hidden: np.ndarray
    head: np.ndarray
    bias: np.ndarray
    teacher_hidden: np.ndarray
    teacher_head: np.ndarray
    teacher_bias: np.ndarray
    targets: np.ndarray
    mask: np.ndarray

    def replace(self, **changes: Any) -> Case:
        return dataclasses.replace(self, **changes)

    @property
    def student(self) -> Rows:
        return oracle.linear_rows(self.hidden, self.head, bias=self.bias)

    @property
    def teacher(self) -> Rows:
        return oracle.linear_rows(self.teacher_hidden, self.teacher_head, bias=self.teacher_bias)

    def logits(self) -> tuple[np.ndarray, np.ndarray]:
        return (
            self.hidden @ self.head.T + self.bias,
            self.teacher_hidden @ self.teacher_head.T + self.teacher_bias,
        )


def case(mask: str = "ragged", seed: int = 0, teacher_columns: int = VOCABULARY) -> Case:
    """Logits of a few nats and divergences around one."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32).astype(np.float64)

    return Case(
        hidden=normal(ROWS, WIDTH, 5),
        head=normal(VOCABULARY, 5),
        bias=normal(VOCABULARY),
        teacher_hidden=normal(ROWS, WIDTH, 4),
        teacher_head=normal(teacher_columns, 4),
        teacher_bias=normal(teacher_columns),
        targets=rng.integers(0, VOCABULARY, (ROWS, WIDTH)),
        mask=MASKS[mask],
    )


def peaked(nats: float) -> Case:
    """One token whose student and teacher are both sure of column 3, by ``nats``."""
    rng = np.random.default_rng(0)
    logits, teacher = (rng.normal(size=VOCABULARY).astype(np.float32) for _ in range(2))
    logits[3], teacher[3] = nats, nats + 1
    one, none = np.ones((1, 1, 1)), np.zeros(VOCABULARY)
    columns = [x.astype(np.float64)[:, None] for x in (logits, teacher)]
    return Case(one, columns[0], none, one, columns[1], none, np.zeros((1, 1), int), np.ones((1, 1), bool))


@dataclasses.dataclass(frozen=True)
class Answer:
    """A loss with the gradients of the student's hidden states, head and bias."""

    loss: float
    dhidden: np.ndarray
    dhead: np.ndarray
    dbias: np.ndarray


def ours(c: Case, objective: Distillation, denominator: float | None = None) -> Answer:
    """The loss that a user gets who changes the call and keeps the settings."""
    loss, made = oracle.distillation_loss(
        c.student, c.teacher, objective=objective, targets=c.targets, mask=c.mask, denominator=denominator
    )
    assert made.head is not None and made.bias is not None
    return Answer(loss, made.inputs, made.head, made.bias)


# -- theirs ----------------------------------------------------------------------------------------------------------


def _leaves(c: Case, dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.tensor(x).to(dtype).requires_grad_() for x in (c.hidden, c.head, c.bias)]


def _constants(c: Case, dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.tensor(x).to(dtype) for x in (c.teacher_hidden, c.teacher_head, c.teacher_bias)]


def _answer(loss: torch.Tensor, leaves: list[torch.Tensor]) -> Answer:
    loss.backward()
    gradients = [np.zeros(tuple(x.shape)) if x.grad is None else x.grad.double().numpy() for x in leaves]
    return Answer(float(loss.detach()), *gradients)


def trl_gkd(c: Case, beta: float, temperature: float = 1.0, items: float | None = None) -> Answer:
    """TRL's ``generalized_jsd_loss`` of logits, in float64."""
    leaves, (teacher_hidden, teacher_head, teacher_bias) = _leaves(c, torch.float64), _constants(c, torch.float64)
    hidden, head, bias = leaves
    labels = torch.tensor(np.where(c.mask, c.targets, IGNORED))
    loss = GKDTrainer.generalized_jsd_loss(
        hidden @ head.T + bias,
        teacher_hidden @ teacher_head.T + teacher_bias,
        labels,
        beta=beta,
        temperature=temperature,
        num_items_in_batch=items,
    )
    return _answer(loss, leaves)


def trl_chunked(c: Case, beta: float, temperature: float = 1.0, items: float | None = None) -> Answer:
    """TRL's loss around ``ChunkedDivergenceFunction``, which computes in float32."""
    leaves, (teacher_hidden, teacher_head, teacher_bias) = _leaves(c, torch.float32), _constants(c, torch.float32)
    hidden, head, bias = leaves
    loss, _, _ = _chunked_divergence_loss(
        hidden,
        teacher_hidden,
        head,
        teacher_head,
        torch.tensor(c.mask),
        beta,
        num_items_in_batch=items,
        student_lm_head_bias=bias,
        teacher_lm_head_bias=teacher_bias,
        temperature=temperature,
    )
    return _answer(loss, leaves)


def liger(c: Case, dtype: torch.dtype = torch.float32, **settings: Any) -> Answer:
    """Liger's chunked loss without torch.compile; two tokens a chunk."""
    made = LigerFusedLinearJSDLoss(compiled=False, chunk_size=2, **settings)
    leaves, (teacher_hidden, teacher_head, teacher_bias) = _leaves(c, dtype), _constants(c, dtype)
    hidden, head, bias = leaves
    labels = torch.tensor(np.where(c.mask, c.targets, IGNORED)).reshape(-1)
    loss = made(
        hidden.flatten(0, 1), head, teacher_hidden.flatten(0, 1), teacher_head, labels, bias, teacher_bias
    )  # fmt: skip
    return _answer(loss, leaves)


def _logits(c: Case) -> tuple[torch.Tensor, torch.Tensor]:
    student, teacher = (torch.tensor(x) for x in c.logits())
    return student.requires_grad_(), teacher


def sdpo_top_k(c: Case, k: int, alpha: float, tail: bool) -> tuple[np.ndarray, np.ndarray]:
    """Per token, TRL's SDPO loss over the student's top-k, and the gradient of its sum by the logits, in float64."""
    student, teacher = _logits(c)
    loss = sdpo.compute_topk_self_distillation_loss(
        student, teacher, distillation_topk=k, distillation_alpha=alpha, distillation_add_tail=tail
    )
    loss.sum().backward()
    assert student.grad is not None
    return loss.detach().numpy(), student.grad.numpy()


def sdpo_full(c: Case, alpha: float) -> np.ndarray:
    """Per token, TRL's SDPO loss over the vocabulary, in float64."""
    student, teacher = _logits(c)
    return sdpo.compute_full_logit_self_distillation_loss(student, teacher, distillation_alpha=alpha).detach().numpy()


def verl_top_k(c: Case, k: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """veRL's ``forward_kl_topk`` of each token without its clamps, and the gradient of its sum by the logits."""
    student, _ = _logits(c)
    found = oracle.top_k(c.teacher, k)
    flat = student.reshape(1, -1, VOCABULARY)

    def nested(x: np.ndarray) -> torch.Tensor:
        return torch.nested.as_nested_tensor([torch.tensor(x.reshape(-1, k))], layout=torch.jagged)

    config = SimpleNamespace(distillation_loss=SimpleNamespace(log_prob_min_clamp=None, use_chunked_topk=False))
    out = compute_forward_kl_topk(flat, nested(found.logp), nested(found.ids), config, "thd")
    out["distillation_losses"].sum().backward()
    assert student.grad is not None
    return {k: v.detach().numpy().reshape(ROWS, WIDTH) for k, v in out.items()}, student.grad.numpy()
