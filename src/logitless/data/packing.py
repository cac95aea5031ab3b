"""Pack prompts and completions into rows of equal length without padding, and unpack the results.

    padded     P P p p p | c c c . . .      B rows of P + C slots, of which a half is often empty
    packed     p p p c c | p p c c c c | .  fewer rows of ``length`` slots; a number for each sequence (segment_ids)

A causal model reads a sequence of ``n`` tokens to predict all but the first, so that ``n - 1`` of them are put into the
row; slot ``k`` of a sequence predicts its token ``k + 1``. A token attends to earlier tokens *of its own segment*, and
its position counts from the segment's begin: hidden states, loss and gradients equal those of the padded rows.

Shared prompts: completions of a prompt share one copy per row. The prompt without its last token is a segment of its
own; each completion's segment begins with that last token (it predicts the completion's first), and attends to itself
and to the prompt. A group of ``g`` completions saves ``(g - 1) (p - 1)`` of its ``g (p + c - 1)``
slots: at p = 120, c = 200, g = 8 a third of the model's work.

Where things go is decided on the host with NumPy: first fit, longest first. All results have the same shape for the
same ``length`` and ``rows``, whatever is in them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from logitless.core import validation
from logitless.core.promotion import own_promotion
from logitless.core.pytree import register, tree_of
from logitless.core.shapes import Bool, Float, Int

T = TypeVar("T")

_PER_TOKEN = ("advantages", "old_logp", "ref_logp", "rollout_logp", "token_weights")


@register
@dataclasses.dataclass(frozen=True)
class Packed:
    """Packed rows, ``[R, L]``; a pytree. :func:`logitless.pack` makes it.

    ``tokens``, ``positions`` and ``attention_mask()`` go into the model, ``targets`` and ``loss_arrays()`` into the
    loss.
    """

    tokens: Int[Array, "R L"]
    """Token ids that the model reads; 0 in empty slots."""
    positions: Int[Array, "R L"]
    """Each token's position within the sequence."""
    segment_ids: Int[Array, "R L"]
    """1, 2, ... for the sequences (and shared prompts) of a row; 0 where nothing is."""
    prefix_ids: Int[Array, "R L"] | None
    """Segment of the shared prompt that a token attends to besides its own; ``None`` without shared prompts."""
    targets: Int[Array, "R L"]
    """The token that follows."""
    mask: Bool[Array, "R L"]
    """Slots that predict a token of the loss."""
    arrays: dict[str, Float[Array, "R L"]]
    """Advantages, log-probabilities and weights that were given, at the slots that predict their tokens; ``support``
    ``[R, L, K]``, -1 elsewhere."""
    slots: Int[Array, "B C"]
    """Slot that predicts each completion token, as ``row * L + column``; -1 if absent."""

    def loss_arrays(self) -> dict[str, Array]:
        """Keyword arguments of the loss calls: the mask, the segments and all arrays that were given."""
        return {"mask": self.mask, "segment_ids": self.segment_ids, **self.arrays}

    def attention_mask(self) -> Bool[Array, "R L L"]:
        """For each slot, the slots (last axis) to attend to: earlier slots of its segment, and its shared prompt.

        Without shared prompts it is what attention kernels make of ``segment_ids`` and a causal mask.
        """
        return attention_mask(self.segment_ids, self.prefix_ids)

    def fill(self) -> float:
        """Share of the slots that hold a token, 0 without rows; on the host."""
        used = np.asarray(self.segment_ids) > 0
        return float(np.mean(used)) if used.size else 0.0


@own_promotion
def attention_mask(segment_ids: ArrayLike, prefix_ids: ArrayLike | None = None) -> Bool[Array, "R L L"]:
    """``mask[r, i, j]``: slot ``i`` attends to slot ``j``. Empty slots are a segment too: no row is all False."""
    ids = jnp.asarray(segment_ids)
    seen = ids[:, :, None] == ids[:, None, :]
    if prefix_ids is not None:
        seen |= jnp.asarray(prefix_ids)[:, :, None] == ids[:, None, :]
    return seen & jnp.tril(jnp.ones((ids.shape[1], ids.shape[1]), bool))


def pack(
    prompt: Int[Array, "B P"],
    prompt_mask: Array,
    completion: Int[Array, "B C"],
    completion_mask: Array,
    *,
    length: int,
    rows: int | None = None,
    keep: Bool[Array, "B"] | None = None,
    share_prompts: bool = False,
    completion_valid: Array | None = None,
    advantages: Float[Array, "B"] | Float[Array, "B 1"] | Float[Array, "B C"] | None = None,
    old_logp: Float[Array, "B C"] | None = None,
    ref_logp: Float[Array, "B C"] | None = None,
    rollout_logp: Float[Array, "B C"] | None = None,
    token_weights: Float[Array, "B"] | Float[Array, "B 1"] | Float[Array, "B C"] | None = None,
    support: Int[Array, "B C K"] | None = None,
) -> Packed:
    """Sequences in rows of ``length`` slots, with block-diagonal attention and all arrays of the loss; on the host.

    The loss of packed rows is that of the padded ones if it is divided by the same numbers: give it
    ``denominator=loss_denominator(objective, completion_mask)`` and, with an entropy bonus,
    ``entropy_denominator=completion_mask.sum()``. :func:`logitless.unpack` brings per-token results back.

    Args:
      prompt, prompt_mask: token ids and their mask; padding may be on either side.
      completion, completion_mask: sampled tokens, and the mask of the loss.
      length: slots of a packed row; a sequence of ``p + c`` tokens takes ``p + c - 1`` slots.
      rows: rows of the result, for constant shapes over steps; unused rows are empty. ``None``: as many as needed.
      keep: sequences to pack (:func:`logitless.rows_with_gradient`); others are left out. ``None``: all.
      share_prompts: neighbours with an equal prompt share a copy per row.
      completion_valid: tokens for the model to read, if more than the loss has (a tool's output inside a completion);
        ``None``: ``completion_mask``.
      advantages, old_logp, ref_logp, rollout_logp, token_weights: arrays of the loss call, in its shapes. Values per
        sequence are spread to tokens; with ``vespo``, which multiplies token weights, none may be per sequence.
      support: ids that each token was drawn from, padded with -1.

    >>> import numpy as np, logitless
    >>> prompt, completion = np.array([[5, 6], [5, 6], [0, 9]]), np.array([[1, 2], [3, 0], [4, 4]])
    >>> valid, mask = prompt > 0, completion > 0
    >>> packed = logitless.pack(prompt, valid, completion, mask, length=4, advantages=np.array([1.0, -1.0, 0.5]))
    >>> packed.tokens.tolist(), packed.targets.tolist()
    ([[5, 6, 1, 0], [5, 6, 9, 4]], [[6, 1, 2, 0], [6, 3, 4, 4]])
    >>> packed.segment_ids.tolist(), packed.arrays["advantages"].tolist()
    ([[1, 1, 1, 0], [1, 1, 2, 2]], [[0.0, 1.0, 1.0, 0.0], [0.0, -1.0, 0.5, 0.5]])
    >>> logitless.unpack(packed, packed.targets).tolist()
    [[1, 2], [3, 0], [4, 4]]
    >>> shared = logitless.pack(prompt, valid, completion, mask, length=4, share_prompts=True)
    >>> shared.tokens.tolist(), shared.segment_ids.tolist()
    ([[5, 6, 1, 6], [9, 4, 0, 0]], [[1, 2, 2, 3], [1, 1, 0, 0]])
    """
    given = locals()
    ids, live = _tokens("prompt", prompt), _mask("prompt_mask", prompt_mask, np.shape(prompt))
    done = _tokens("completion", completion)
    mask = _mask("completion_mask", completion_mask, done.shape)
    valid = mask if completion_valid is None else _mask("completion_valid", completion_valid, done.shape)
    if len(ids) != len(done):
        raise ValueError(f"pack: prompt has {len(ids)} rows and completion {len(done)}; expected as many.")
    if np.any(mask & ~valid):
        raise ValueError(
            "pack: completion_mask is set where completion_valid is not; the loss needs tokens that exist."
        )
    chosen = np.ones(len(ids), bool) if keep is None else _mask("keep", keep, (len(ids),))
    arrays = {name: _per_token(name, given[name], done.shape) for name in _PER_TOKEN if given[name] is not None}
    if support is not None:
        arrays["support"] = _ids_per_token("support", support, done.shape)

    sequences = [_Sequence(int(i), ids[i][live[i]], valid[i]) for i in np.flatnonzero(chosen & valid.any(axis=1))]
    placed = _place(sequences, length, share_prompts)
    if rows is not None and len(placed) > rows:
        raise ValueError(
            f"pack: {len(sequences)} sequences take {len(placed)} rows of {length} slots, but rows={rows}."
        )
    out = _Rows((len(placed) if rows is None else rows, length), done.shape)
    for row, units in enumerate(placed):
        for unit in units:
            out.put(row, unit, done, share_prompts)

    return out.packed(mask, arrays, share_prompts)


def unpack(packed: Packed, x: Array) -> Array:
    """``x [R, L, ...]`` of packed slots, gathered at the predicted completion tokens ``[B, C, ...]``; 0 for absent
    tokens, hence zeros for rows left out by :func:`rows_with_gradient`. Differentiable, and free to be jitted."""
    x = jnp.asarray(x)
    if x.shape[:2] != packed.tokens.shape:
        raise ValueError(f"unpack: x has shape {x.shape}, expected {packed.tokens.shape}, that of the packed rows.")
    slots = jnp.asarray(packed.slots)
    if not x.size:
        return jnp.zeros((*slots.shape, *x.shape[2:]), x.dtype)
    found = x.reshape(-1, *x.shape[2:])[jnp.maximum(slots, 0)]
    return jnp.where((slots >= 0).reshape(*slots.shape, *[1] * (x.ndim - 2)), found, jnp.zeros((), x.dtype))


# -- where things go -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Sequence:
    """A row of the padded arrays: prompt tokens, and flags for the existing completion tokens."""

    index: int
    prompt: np.ndarray
    valid: np.ndarray

    @property
    def new(self) -> int:
        """Tokens of the completion."""
        return int(self.valid.sum())


_Unit = list[_Sequence]
"""Sequences that stay together in a row: a single sequence, or completions with their shared prompt."""


def _slots(unit: _Unit) -> int:
    """Number of slots in a row: the prompt once, without its last token, and the completions."""
    return len(unit[0].prompt) - 1 + sum(s.new for s in unit)


def _place(sequences: list[_Sequence], length: int, share: bool) -> list[list[_Unit]]:
    """The units of each packed row."""
    if not isinstance(length, (int, np.integer)) or isinstance(length, bool) or length < 1:
        raise ValueError(f"pack: length is {length!r}, expected a positive Python int (it is static).")
    for s in sequences:
        if not len(s.prompt):
            raise ValueError(f"pack: sequence {s.index} has no prompt; its first token would follow from nothing.")
        if _slots([s]) > length:
            need = max(_slots([x]) for x in sequences)
            raise ValueError(
                f"pack: sequence {s.index} takes {_slots([s])} slots (prompt {len(s.prompt)} + "
                f"completion {s.new} - 1), but length={length}; the longest takes {need}. None is cut: "
                "make length larger."
            )
    units = [[s] for s in sequences]
    if share:
        groups = [list(group) for _, group in itertools.groupby(sequences, lambda s: s.prompt.tobytes())]
        units = [u for g in groups for u in _first_fit(g, [s.new for s in g], length - len(g[0].prompt) + 1)]
    return _first_fit(units, [_slots(u) for u in units], length)


def _first_fit(items: Sequence[T], sizes: list[int], room: int) -> list[list[T]]:
    """Items in bins of ``room``, longest first, each in the first bin where it fits; in their own order there."""
    left = np.full(len(items), room)
    bins: list[list[int]] = [[] for _ in items]  # as many as could be needed, of which the first are
    for i in sorted(range(len(items)), key=lambda i: -sizes[i]):
        b = int(np.argmax(left >= sizes[i]))
        left[b] -= sizes[i]
        bins[b].append(i)
    return [[items[i] for i in sorted(held)] for held in bins if held]


class _Rows:
    """The packed arrays while they are filled."""

    def __init__(self, shape: tuple[int, int], padded: tuple[int, ...]):
        arrays = (np.zeros(shape, np.int32) for _ in range(5))
        self.tokens, self.targets, self.positions, self.segments, self.prefixes = arrays
        self.slots = np.full(padded, -1, np.int64)
        self._used = np.zeros(shape[0], np.int64)
        self._count = np.zeros(shape[0], np.int32)

    def put(self, row: int, unit: _Unit, completions: np.ndarray, share: bool) -> None:
        """Write a unit behind what the row has already."""
        prompt = unit[0].prompt
        prefix = 0
        if share and len(prompt) > 1:
            self._write(row, prompt[:-1], prompt[1:], 0)
            prefix = int(self._count[row])
            self.prefixes[row, self._used[row] - len(prompt) + 1 : self._used[row]] = prefix
        for s in unit:
            whole = np.concatenate([prompt[-1:] if share else s.prompt, completions[s.index][s.valid]])
            start = self._write(row, whole[:-1], whole[1:], len(prompt) - 1 if share else 0)
            first = start + len(whole) - 1 - s.new  # predicts the completion's first token
            self.slots[s.index, s.valid] = row * self.tokens.shape[1] + np.arange(first, first + s.new)
            self.prefixes[row, start : start + len(whole) - 1] = prefix or self._count[row]

    def _write(self, row: int, tokens: np.ndarray, targets: np.ndarray, position: int) -> int:
        """Write a segment and return its first column."""
        start, n = int(self._used[row]), len(tokens)
        at = slice(start, start + n)
        self._count[row] += 1
        self.tokens[row, at], self.targets[row, at] = tokens, targets
        self.positions[row, at] = np.arange(position, position + n)
        self.segments[row, at] = self._count[row]
        self._used[row] += n
        return start

    def packed(self, mask: np.ndarray, arrays: dict[str, np.ndarray], share: bool) -> Packed:
        """The result; tokens outside the loss's ``mask``, which were read alone, predict nothing that counts."""
        where = self.slots[mask]

        def spread(x: np.ndarray) -> np.ndarray:
            flat = np.full((self.tokens.size, *x.shape[2:]), -1 if x.ndim > 2 else 0, x.dtype)
            flat[where[where >= 0]] = x[mask][where >= 0]
            return flat.reshape(*self.tokens.shape, *x.shape[2:])

        return tree_of(
            Packed,
            tokens=self.tokens,
            positions=self.positions,
            segment_ids=self.segments,
            prefix_ids=self.prefixes if share else None,
            targets=self.targets,
            mask=spread(mask),
            arrays={name: spread(x) for name, x in arrays.items()},
            slots=np.where(mask, self.slots, -1).astype(np.int32),
        )


# -- checks ----------------------------------------------------------------------------------------------------------


def _host(name: str, value: object) -> np.ndarray:
    if isinstance(value, jax.core.Tracer):
        raise TypeError(f"pack: {name} is traced; pack on the host, outside jit: where things go depends on the data.")
    return np.asarray(value)


def _tokens(name: str, value: object) -> np.ndarray:
    array = _host(name, value)
    if array.ndim != 2 or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"pack: {name} is {array.dtype}{list(array.shape)}, expected integer ids with two dimensions.")
    return validation.host_int32_ids(array)


def _mask(name: str, value: object, shape: tuple[int, ...]) -> np.ndarray:
    array = _host(name, value)
    if array.shape != shape:
        raise ValueError(f"pack: {name} has shape {array.shape}, expected {shape}.")
    return array != 0


def _per_token(name: str, value: object, shape: tuple[int, ...]) -> np.ndarray:
    array = _host(name, value)
    validation.float_dtype("pack", name, array.dtype)
    allowed = [shape, *([(shape[0],), (shape[0], 1)] if name in ("advantages", "token_weights") else [])]
    if array.shape not in allowed:
        raise ValueError(f"pack: {name} has shape {array.shape}, expected {' or '.join(map(str, allowed))}.")
    return np.broadcast_to(array[:, None] if array.ndim == 1 else array, shape).astype(np.float32)


def _ids_per_token(name: str, value: object, shape: tuple[int, ...]) -> np.ndarray:
    array = _host(name, value)
    if array.ndim != 3 or array.shape[:2] != shape or not np.issubdtype(array.dtype, np.integer):
        expected = f"integer ids of shape ({shape[0]}, {shape[1]}, K)"
        raise ValueError(f"pack: {name} is {array.dtype}{list(array.shape)}, expected {expected}.")
    return validation.host_int32_ids(array)
