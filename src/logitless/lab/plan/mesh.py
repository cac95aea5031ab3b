"""What the fused loss needs on each chip of a mesh, and what the chips have to tell each other.

    data     each chip has its own tokens and the whole head; dW is all-reduced
    fsdp     tokens and head are both split: one all-gather of the head before, one reduce-scatter of dW after; TPU
             kernels gather a large head in parts, in each pass, and never have it whole (mesh/head_pieces.py)
    tensor   the vocabulary is split, tokens are not: per-token scalars and dH (in float32) are all-reduced; off TPUs
             the gradient is by recompute, four matmuls (with a sparse backward each shard has columns of its own)

dW is summed over chips as it is over chunks: in float32, or in the parameter's dtype (``head_grad_dtype="param"``).

Axes nest as they are laid out: ``tensor`` innermost, then ``fsdp``, then ``data``. A collective runs over the fast
interconnect as far as it reaches, and over the network between such groups for the part that is left (what a chip sends
there is its own share). Nothing is assumed to overlap with compute. A prediction from public numbers, no measurement.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from logitless.core.registry import ANYWHERE, KERNELS
from logitless.lab.plan.chips import Chip, chip_of
from logitless.lab.plan.head import HeadPlan, asked_for, plan
from logitless.mesh import head_pieces

AXES = ("data", "fsdp", "tensor")
"""Outermost first."""

SCALARS = 5
"""Float32 numbers per token that shards of the vocabulary exchange: a maximum and four sums."""


@dataclasses.dataclass(frozen=True)
class Collective:
    """What one chip sends, in bytes, over the fast interconnect and over the network, and how long that takes."""

    what: str
    axis: str
    link_bytes: float
    network_bytes: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class MeshPlan:
    """One step of loss and gradients on every chip of a mesh. Bytes and FLOPs are those of one chip."""

    axes: dict[str, int]
    chip: Chip
    tokens: int  # of one chip
    head: HeadPlan  # of one chip, its share of the tokens and of the vocabulary
    shards: int
    """Bytes beside those of one chip alone: shards of head and dW next to the whole ones, dW in float32."""
    collectives: tuple[Collective, ...]

    @property
    def chips(self) -> int:
        return self.axes["data"] * self.axes["fsdp"] * self.axes["tensor"]

    @property
    def peak(self) -> int:
        """Bytes on one chip."""
        return self.head.peak + self.shards

    @property
    def dense_peak(self) -> int:
        return self.head.dense_peak + self.shards

    @property
    def compute_seconds(self) -> float:
        assert self.head.seconds is not None
        return self.head.seconds

    @property
    def collective_seconds(self) -> float:
        return sum(c.seconds for c in self.collectives)

    @property
    def efficiency(self) -> float:
        """Roofline time of the compute alone over that with every collective exposed."""
        return self.compute_seconds / (self.compute_seconds + self.collective_seconds)

    @property
    def efficiency_overlapped(self) -> float:
        """The same if all communication could hide behind compute."""
        return self.compute_seconds / max(self.compute_seconds, self.collective_seconds)

    def __str__(self) -> str:
        mesh = " x ".join(f"{k} {v}" for k, v in self.axes.items())
        lines = [
            f"{mesh} = {self.chips} {self.chip.name}, {self.tokens} tokens on each",
            f"  peak {self.peak / 2**20:,.0f} MiB of {self.chip.hbm_bytes / 2**20:,.0f} on each chip, of which for the "
            f"mesh {self.shards / 2**20:,.0f}; dense {self.dense_peak / 2**20:,.0f}",
            f"  {self.head.flops / 1e12:.2f} TFLOP, roofline {self.compute_seconds * 1e3:.2f} ms",
            *self._exact_lines(),
        ]
        for c in self.collectives:
            lines.append(
                f"  {c.what} over {c.axis}: {c.link_bytes / 1e6:,.1f} MB by interconnect, "
                f"{c.network_bytes / 1e6:,.1f} MB by network, {c.seconds * 1e3:.2f} ms"
            )
        lines.append(
            f"  predicted efficiency {self.efficiency:.1%} with nothing overlapped, {self.efficiency_overlapped:.1%} "
            "with all of it overlapped"
        )
        if self.head.shares is not None:
            lines.append(f"  {self.head.shares.in_words()}")
        return "\n".join(lines)

    def _exact_lines(self) -> list[str]:
        e = self.head.exact
        if e is None or e.seconds is None:
            return []
        return [
            f"  exact ({e.backend}, sparse_backward off): peak {(e.peak + self.shards) / 2**20:,.0f} MiB, "
            f"{e.flops / 1e12:.2f} TFLOP, roofline {e.seconds * 1e3:.2f} ms; the same is sent"
        ]

    def record(self) -> dict[str, Any]:
        """Everything as JSON."""
        return dict(
            axes=self.axes,
            chips=self.chips,
            chip=self.chip.name,
            tokens_per_chip=self.tokens,
            head=self.head.record(),
            peak=self.peak,
            dense_peak=self.dense_peak,
            collectives=[dataclasses.asdict(c) for c in self.collectives],
            compute_seconds=self.compute_seconds,
            collective_seconds=self.collective_seconds,
            efficiency=self.efficiency,
            efficiency_overlapped=self.efficiency_overlapped,
        )


def parse_mesh(text: str) -> dict[str, int]:
    """``data=8,fsdp=4,tensor=2`` as numbers; axes that are not named have size 1."""
    axes = dict.fromkeys(AXES, 1)
    seen = set()
    for part in text.split(","):
        name, _, size = part.partition("=")
        if name not in axes:
            raise ValueError(f"mesh {text!r}: {name!r} is not an axis; expected data=N,fsdp=N,tensor=N.")
        if name in seen:
            raise ValueError(f"mesh {text!r}: {name} is given twice.")
        if not size.isdecimal() or int(size) < 1:
            raise ValueError(f"mesh {text!r}: {name}={size}, expected a positive number.")
        axes[name] = int(size)
        seen.add(name)
    return axes


Sent = tuple[str, str, str, float]
"""What, ``gather`` or ``reduce``, over which axis, and the bytes of the array."""


def _collective(what: str, kind: str, axis: str, size: float, axes: dict[str, int], chip: Chip) -> Collective:
    """A ring over ``axis`` on an array of ``size`` bytes: ``gather`` (or reduce-scatter) or ``reduce`` (both)."""
    n = axes[axis]
    inner = 1
    for name in reversed(AXES[AXES.index(axis) + 1 :]):
        inner *= axes[name]
    near = max(min(n, chip.group // inner), 1)
    far = -(-n // near)
    passes = 2 if kind == "reduce" else 1
    link = passes * size * (near - 1) / near
    network = passes * size / near * (far - 1) / far
    return Collective(what, axis, link, network, link / chip.link + network / chip.network)


def _of_lora(rank: int, columns: int, width: int, item: int, wanted: bool, axes: dict[str, int]) -> list[Sent]:
    """The factor that meets the vocabulary is cut as the head is, the other one is whole; gradients in float32."""
    outer, inner = rank * columns, rank * width
    found: list[Sent] = [("all-gather of LoRA's factor", "gather", "fsdp", outer * item)]
    if wanted:
        found.append(("reduce-scatter of LoRA's gradient", "gather", "fsdp", 4 * outer))
        for axis in AXES:
            size = inner + (outer / axes["fsdp"] if axis == "data" else 0)
            found.append(("all-reduce of LoRA's gradients", "reduce", axis, 4 * size))
    return found


def plan_mesh(
    width: int,
    vocab: int,
    tokens: int,
    axes: dict[str, int],
    *,
    chip: str,
    dtype: Any = "bfloat16",
    gradients: tuple[str, ...] | None = None,
    lora_rank: int | None = None,
    live_tokens: int | None = None,
    head_grad_dtype: str = "float32",
    **options: Any,
) -> MeshPlan:
    """A step of ``tokens`` tokens in all on a mesh; ``options`` are those of :func:`logitless.plan`.

    >>> from logitless.lab.plan.mesh import parse_mesh, plan_mesh
    >>> p = plan_mesh(3584, 152064, 8 * 8192, parse_mesh("fsdp=8"), chip="v6e")
    >>> p.chips, p.tokens, [c.what for c in p.collectives]
    (8, 8192, ['all-gather of the head', 'reduce-scatter of dW'])
    """
    where = chip_of(chip)
    rows, shards = axes["data"] * axes["fsdp"], axes["tensor"]
    if tokens % rows:
        raise ValueError(f"plan: {tokens} tokens do not split over data x fsdp = {rows} chips.")
    if vocab % shards:
        raise ValueError(
            f"plan: a vocabulary of {vocab} does not split over tensor = {shards} chips; pad the head to "
            f"{-(-vocab // shards) * shards} rows and give vocab_size={vocab} to the call."
        )
    if live_tokens is not None:
        live_tokens = -(-live_tokens // rows)
    item = jnp.dtype(dtype).itemsize
    if where.platform == "tpu" and shards > 1 and options.get("sparse_backward", "off") != "off":
        options = {"backend": ANYWHERE, **{k: v for k, v in options.items() if k != "backend" or v is not None}}
    local, columns = tokens // rows, vocab // shards

    def on_one_device(**options: Any) -> HeadPlan:
        return plan(
            jax.ShapeDtypeStruct((1, local, width), dtype),
            jax.ShapeDtypeStruct((columns, width), dtype),
            gradients=gradients,
            lora_rank=lora_rank,
            live_tokens=live_tokens,
            head_grad_dtype=head_grad_dtype,
            head_layout="vh",
            chip=chip,
            vocabulary_shard=shards > 1,
            **options,
        )

    head = on_one_device(**options)
    if head.backend == KERNELS["tpu"] and options.get("memory_budget") is not None:
        head = on_one_device(**{**options, "memory_budget": None})  # over a mesh its kernels keep no exponentials
    part = columns * width * item
    dw = columns * width * (item if head_grad_dtype == "param" else 4)
    wanted = asked_for(gradients, lora_rank)
    wants_head, wants_hidden, wants_lora = (name in wanted for name in ("lm_head", "hidden", "lora"))
    rank = lora_rank or 0
    exact = options.get("sparse_backward", "off") == "off"
    in_parts = leaves_in = 1
    # With LoRA a part of dW would need the whole of dlow.
    if exact and head.backend == KERNELS["tpu"] and columns % axes["fsdp"] == 0 and not rank:
        own = columns // axes["fsdp"]
        in_parts = head_pieces.number(columns * width, own) if axes["fsdp"] > 1 and shards == 1 else 1
        leaves_in = head_pieces.number(columns * width, own)
    passes = 2 if in_parts > 1 and wants_head else 1
    sent: list[Sent] = [("all-gather of the head", "gather", "fsdp", passes * part)]
    if wants_head:
        sent.append(("reduce-scatter of dW", "gather", "fsdp", dw))
        sent.append(("all-reduce of dW", "reduce", "data", dw / axes["fsdp"]))
    sent.append(("all-reduce of per-token scalars", "reduce", "tensor", 4 * SCALARS * local))
    if wants_hidden:
        sent.append(("all-reduce of dH", "reduce", "tensor", 4 * local * width))
    if rank:
        sent += _of_lora(rank, columns, width, item, wants_lora, axes)
    found = tuple(_collective(*s, axes, where) for s in sent if axes[s[2]] > 1)
    beside, reduced = part // axes["fsdp"] * (1 + wants_head) if axes["fsdp"] > 1 else 0, 0
    if rows > 1 and wants_head and head.backend == KERNELS["tpu"]:
        # The kernel leaves dW in the dtype it is summed in: beside the result, which is whole, a part of it at a time,
        # or only a shard. Of 16 bits a part and its sum.
        reduced = 4 * columns * width // leaves_in if leaves_in > 1 else dw
        reduced = reduced if axes["fsdp"] == 1 else dw - part
    if in_parts > 1:
        # Neither the head nor dW is ever whole. Forward: a part of the head, two accumulators of the direction and the
        # targets' head rows twice; backward: a part of dW beside that of the head, and the hidden states in order.
        forward = local * width * (8 + 2 * item) if wants_hidden else 0
        backward = dw // in_parts + local * width * item if wants_head else 0
        shard = part // axes["fsdp"]
        beside = (shard - part) * (1 + wants_head) + part // in_parts + max(forward, backward) - head.temporaries
    elif shards > 1 and wants_hidden and head.backend == KERNELS["tpu"]:
        # By the compiler's figures: two [tokens, H] in float32 (of the sweep's accumulator, the direction and its sum
        # over devices) and one of the operands' dtype, the targets' rows.
        beside += max(reduced, (8 + item) * local * width - head.temporaries)
    else:
        beside += reduced
    return MeshPlan(dict(axes), where, local, head, beside, found)
