"""Rows of transformed logits: of given logits, or of hidden states under a head, in float64.

Two models that are compared, and ids that are gathered, need rows and not statistics. :class:`Rows` computes a block of
them, and takes the gradient of the rows back to what they were made from:

    x = logits        or        x = hidden @ W^T + bias
    z = transform(x) / temperature
    dhidden = dx @ W        dW = dx^T @ hidden        dbias = sum_n dx        with dx = dz * dz/dx
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from logitless.oracle.token_stats import (
    Bools,
    Floats,
    Ints,
    live_tokens,
    per_token,
    row_blocks,
    slope_of_rows,
    to_float64,
    transformed,
)

HeadLayout = Literal["vh", "hv"]


class Gradients(NamedTuple):
    """Gradients in the shapes of what the rows were made from; ``None`` for a head or bias that is not there."""

    inputs: Floats  # of the logits, or of the hidden states
    head: Floats | None = None
    bias: Floats | None = None

    def plus(self, other: Gradients) -> Gradients:
        """The sum of two gradients of the same model."""
        head = None if self.head is None or other.head is None else self.head + other.head
        bias = None if self.bias is None or other.bias is None else self.bias + other.bias
        return Gradients(self.inputs + other.inputs, head, bias)


@dataclasses.dataclass(frozen=True)
class Rows:
    """One model's logits, row by row; made by :func:`logits_rows` or :func:`linear_rows`."""

    inputs: NDArray[Any]  # [..., V], or [..., H] with a weight
    columns: int  # ids below it take part in the softmax
    weight: Floats | None = None  # [columns, H]
    bias: Floats | None = None  # [columns]
    head_columns: int = 0  # columns of the given head, padding included
    head_layout: HeadLayout = "vh"
    scale: ArrayLike | None = None
    softcap: ArrayLike | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tokens."""
        return self.inputs.shape[:-1]

    def first(self, columns: int) -> Rows:
        """The same rows cut to their first ``columns`` ids."""
        weight, bias = (x if x is None else x[:columns] for x in (self.weight, self.bias))
        return dataclasses.replace(self, columns=columns, weight=weight, bias=bias)

    def raw(self, i: Ints) -> Floats:
        """Raw logits ``x [n, columns]`` of the tokens ``i``, an index into the flat tokens."""
        block = to_float64(self._flat()[i])
        if self.weight is None:
            return block[:, : self.columns]
        return block @ self.weight.T + (0.0 if self.bias is None else self.bias)

    def transformed(self, i: Ints, temperature: Floats) -> Floats:
        """Transformed logits ``z [n, columns]`` of the tokens ``i`` at their temperatures."""
        return transformed(self.raw(i), temperature, self.softcap, self.scale)

    def live(self, mask: ArrayLike | None) -> Bools:
        """The mask as a flat bool array."""
        return live_tokens(mask, self.shape)

    def temperatures(self, temperature: ArrayLike | None) -> Floats:
        """The temperature of each token, flat."""
        return per_token(temperature, self.shape, 1.0)

    def blocks(self, selected: Bools) -> list[Ints]:
        """The selected tokens, in blocks whose rows fit into memory."""
        return list(row_blocks(selected, self.columns))

    def pull_back(self, temperature: ArrayLike | None, selected: Bools, dz: Callable[[Ints], Floats]) -> Gradients:
        """Gradients from ``dz(i) [n, columns]``, the cotangent of the transformed logits of the tokens ``i``.

        Tokens that are not selected are never read, and have a gradient of exactly zero.
        """
        flat, tau = self._flat(), self.temperatures(temperature)
        inputs = np.zeros(flat.shape)
        hidden_size = flat.shape[1]
        dweight, dbias = np.zeros((self.head_columns, hidden_size)), np.zeros(self.head_columns)
        for i in self.blocks(selected):
            with np.errstate(all="ignore"):
                dx = dz(i) * slope_of_rows(self.raw(i), tau[i], self.softcap, self.scale)
            if self.weight is None:
                inputs[i, : self.columns] = dx
                continue
            inputs[i] = dx @ self.weight
            dweight[: self.columns] += dx.T @ to_float64(flat[i])
            dbias[: self.columns] += dx.sum(axis=0)
        made = inputs.reshape(self.inputs.shape)
        if self.weight is None:
            return Gradients(made)
        head = dweight if self.head_layout == "vh" else dweight.T
        return Gradients(made, head, None if self.bias is None else dbias)

    def _flat(self) -> NDArray[Any]:
        return self.inputs.reshape(-1, self.inputs.shape[-1])


def _columns(given: int | None, there: int) -> int:
    if given is not None and not 0 < int(given) <= there:
        raise ValueError(f"vocab_size={given} does not lie in [1, {there}], the columns that are there.")
    return there if given is None else int(given)


def logits_rows(
    logits: ArrayLike,
    *,
    scale: ArrayLike | None = None,
    softcap: ArrayLike | None = None,
    vocab_size: int | None = None,
) -> Rows:
    """Rows of given ``logits [..., V]``; options as :func:`logitless.oracle.token_stats`."""
    raw = np.asarray(logits)
    return Rows(raw, _columns(vocab_size, raw.shape[-1]), scale=scale, softcap=softcap)


def linear_rows(
    hidden: ArrayLike,
    lm_head: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    head_layout: HeadLayout = "vh",
    scale: ArrayLike | None = None,
    softcap: ArrayLike | None = None,
    vocab_size: int | None = None,
) -> Rows:
    """Rows of ``hidden [..., H]`` under the head ``[V, H]`` (``"vh"``) or ``[H, V]`` (``"hv"``)."""
    if head_layout not in ("vh", "hv"):
        raise ValueError(f"head_layout={head_layout!r} is not known; expected 'vh' or 'hv'.")
    weight = to_float64(lm_head if head_layout == "vh" else np.asarray(lm_head).T)
    there = len(weight)
    rows = Rows(
        np.asarray(hidden),
        there,
        weight,
        None if bias is None else to_float64(bias),
        there,
        head_layout,
        scale,
        softcap,
    )
    return rows.first(_columns(vocab_size, there))
