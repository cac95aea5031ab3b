"""``logitless.plan``: a call's route, its memory by the compiler or by an estimate, its FLOPs, a roofline time."""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from logitless import api
from logitless.core.arguments import by_name, distillation_calls
from logitless.core.chunk_size import MIB
from logitless.core.explanation import CALLS, call_arguments, route_of
from logitless.core.options import Head, grouped
from logitless.core.problem import Layout
from logitless.core.registry import ANYWHERE
from logitless.core.route import Route
from logitless.lab.plan import estimate, program
from logitless.lab.plan.chips import Chip, as_if_on, chip_of, mesh_on
from logitless.lab.plan.estimate import Shares, Work
from logitless.lab.tools.text import wrapped
from logitless.mesh import sharding
from logitless.objectives.checks import did_you_mean
from logitless.objectives.objective import Objective

_DIFFERENTIABLE = ("logits", "hidden", "lm_head", "bias", "lora")


@dataclasses.dataclass(frozen=True)
class Plan:
    """Requirements of a call on a single device. Bytes are the compiler's own if ``compiled``, else estimated
    (``source`` says by whom); ``work`` and ``dense`` (the dense loss in its strong form, for calls from hidden states)
    are estimates.

    ``shares`` is what the FLOPs of a sparse backward assume of the policy; ``collectives`` are those of a program that
    was compiled for a TPU mesh.
    """

    route: Route
    chip: Chip | None
    arguments: int
    outputs: int
    temporaries: int
    peak: int
    work: Work
    dense: Work | None
    shares: Shares | None = None
    compiled: bool = False
    source: str = "estimate"
    refused: bool = False
    """The compiler says that the program does not fit."""
    collectives: tuple[dict[str, Any], ...] = ()

    @property
    def backend(self) -> str:
        return self.route.backend

    @property
    def devices(self) -> int:
        """Number of devices in the mesh; 1 without a mesh."""
        return 1 if self.route.placement is None else self.route.placement.mesh.size

    @property
    def matmuls(self) -> float:
        """Matmuls ``[live tokens, H] x [H, V]``."""
        return self.work.matmuls

    @property
    def flops(self) -> int:
        """FLOPs of the matmuls, two per multiply-add."""
        return self.work.flops

    @property
    def seconds(self) -> float | None:
        """The roofline's time on the chip."""
        return self.work.seconds(self.chip)

    @property
    def dense_peak(self) -> int | None:
        """The peak of the dense loss (estimate)."""
        return None if self.dense is None else self.arguments + self.outputs + self.dense.temporaries

    @property
    def fits(self) -> bool | None:
        """Whether the peak is within the chip's memory; ``None`` without an accelerator."""
        if self.chip is None or not self.chip.hbm_bytes:
            return None
        return self.peak <= self.chip.hbm_bytes and not self.refused

    def __str__(self) -> str:
        chip, matmuls, because = self.chip, f"{self.backend}, {self.matmuls:.3g} matmuls", self.route.because
        lines = [wrapped([matmuls, *f"({self.route.way})".split()], 4, " ")]
        if chip is not None and self.backend == ANYWHERE:
            lines.append(wrapped([f"  {self.backend},", *f"since {because}".split()], 4, " "))
        tiles = [f"{k} {v}" for k, v in self.route.tiles.items() if k != "layout"]
        lines.append(wrapped(["  tiles " + (tiles or ["none"])[0], *tiles[1:]], 4, ", "))
        lines.append(f"  {self.flops / 1e12:.2f} TFLOP, {self.work.moved / 1e9:.1f} GB of memory traffic (estimate)")
        lines.append(self.memory_line())
        if self.dense is not None:
            peak, flops = (self.dense_peak or 0) / MIB, self.dense.flops / 1e12
            lines.append(f"  dense: peak {peak:,.0f} MiB, {flops:.2f} TFLOP (estimate)")
        if chip is not None and self.seconds is not None:
            bound = "compute" if self.flops / chip.flops >= self.work.moved / chip.hbm else "memory"
            beside = "" if self.dense is None else f", dense {(self.dense.seconds(chip) or 0) * 1e3:.2f} ms"
            share = f"memory {self.peak / chip.hbm_bytes:.1%} of {chip.hbm_bytes / 1e9:.0f} GB"
            time = f"  {chip.name} roofline {self.seconds * 1e3:.2f} ms ({bound}){beside}"
            lines.append(wrapped([time, share], 4, "; "))
        if self.shares is not None:
            assumed = " and ".join(f"{k} {v:g}" for k, v in dataclasses.asdict(self.shares).items())
            words = f"for a policy with {assumed}, which are assumed: a run's metrics of these names say the true ones"
            lines.append(wrapped(["  " + words[:17], *words[18:].split()], 4, " "))
        return "\n".join(lines)

    def memory_line(self) -> str:
        """The memory, where its numbers come from, and what is sent over a mesh."""
        sizes = ", ".join(f"{k} {getattr(self, k) / MIB:,.0f}" for k in ("arguments", "outputs", "temporaries"))
        memory = wrapped([f"  peak {self.peak / MIB:,.0f} MiB ({sizes}):", *self.source.split()], 4, " ")
        sent = (f"\n  {c['kind']} of {c['bytes'] / MIB:,.1f} MiB, {c['times']}x" for c in self.collectives)
        return memory + "".join(sent)

    def record(self) -> dict[str, Any]:
        """Everything as JSON."""
        names = ("arguments", "outputs", "temporaries", "peak", "compiled", "source", "collectives", "backend",
                 "matmuls", "flops", "seconds", "dense_peak", "fits")  # fmt: skip
        dense = self.dense
        return {k: getattr(self, k) for k in names} | dict(
            chip=None if self.chip is None else self.chip.name,
            way=self.route.way,
            because=self.route.because,
            tiles=self.route.tiles,
            moved=self.work.moved,
            shares=None if self.shares is None else dataclasses.asdict(self.shares),
            dense_flops=None if dense is None else dense.flops,
            dense_temporaries=None if dense is None else dense.temporaries,
            dense_seconds=None if dense is None else dense.seconds(self.chip),
        )


def plan(
    call: Any,
    *args: Any,
    gradients: tuple[str, ...] | None = None,
    chip: str | None = None,
    compile: bool | None = None,
    live_tokens: int | None = None,
    active_columns: float | None = None,
    hard_rows: float | None = None,
    **kwargs: Any,
) -> Plan:
    """Memory and work of a call with its gradients, before anything runs.

    Takes one of the public calls and its arguments, as :func:`logitless.explain` does; arrays may be
    ``jax.ShapeDtypeStruct``, and ``targets`` and ``advantages`` may be left out. The backend, way and tiles are those
    that ``explain`` gives. Where the device's compiler is at hand the real program is compiled, and memory is what that
    compiler says; elsewhere memory is a closed estimate (``lab/plan/estimate.py``), and ``source`` names which.

    Args:
      call: ``logprobs``, ``grpo_loss``, ``divergence`` or one whose name begins with ``linear_``. Hidden states in its
        place, and then the head, mean ``linear_grpo_loss`` (``linear_logprobs`` with ``objective=None``); only there
        ``lora_rank=`` stands for ``lora=``, ``reference=True`` for ``ref_hidden=`` and ``ref_lm_head=`` of the same
        shapes, and ``teacher=WIDTH`` for ``linear_distillation_loss`` with a teacher of this hidden size.
      args, kwargs: the arguments of the call, ``sharding=`` included: then all bytes are those of one device.
      gradients: the arguments whose gradients are asked for, such as ``("hidden",)`` with a frozen head. ``None``: all
        that have one, of logits, hidden, lm_head, bias and lora.
      chip: ``v5e``, ``v5p``, ``v6e``, ``a100``, ``h100``, ``h200``, ``b200`` or ``cpu``, here or not. ``None``: the
        default device. TPU programs are compiled on any machine that has libtpu; a GPU's need that GPU.
      compile: ``False``: the estimate, at once. ``True``: raise where it cannot be compiled. A CPU's compiler takes
        1 to 5 s; a TPU's 5 to 60 s.
      live_tokens: number of unmasked tokens, for the FLOPs (default: all).
      active_columns, hard_rows: with a sparse backward, the shares that its FLOPs assume of the policy, as the metrics
        of these names have them. Default: those of a policy calibrated to Qwen2.5 on GSM8K at the tolerance of
        ``"auto"`` with bfloat16.

    >>> import jax, jax.numpy as jnp, logitless
    >>> h = jax.ShapeDtypeStruct((8, 1024, 4096), jnp.bfloat16)
    >>> w = jax.ShapeDtypeStruct((151936, 4096), jnp.bfloat16)
    >>> p = logitless.plan(logitless.linear_grpo_loss, h, w, chip="v6e", compile=False)
    >>> p.backend, p.matmuls, round(p.flops / 1e12, 1), round(p.seconds * 1e3, 1)
    ('pallas_tpu', 4, 40.8, 44.4)
    """
    where = None if chip is None else chip_of(chip)
    call, given = _given(call, args, kwargs)
    tokens = math.prod(given["targets"].shape)
    if live_tokens is not None:
        if not 0 <= live_tokens <= tokens:
            raise ValueError(f"plan: live_tokens={live_tokens}, expected 0 to {tokens}, the number of tokens.")
        if given.get("mask") is None:
            given["mask"] = jax.ShapeDtypeStruct(given["targets"].shape, jnp.bool_)
    wanted = _wanted(given, gradients)
    without_kernels = where is not None and where.platform == "gpu" and not where.kernels and given["backend"] is None
    if without_kernels:
        given["backend"] = ANYWHERE
    there = None
    if where is not None and given["sharding"] is not None:
        there = mesh_on(where, sharding.mesh_of(call.__name__, given["sharding"]))
        given["sharding"] = dataclasses.replace(given["sharding"], mesh=there)
    with as_if_on(where, there):
        route = route_of(call.__name__, given)
        shares = estimate.shares_of(route.way_taken.mass, active_columns, hard_rows)
        work, dense = _work(given, wanted, route, tokens if live_tokens is None else live_tokens, shares)
    if without_kernels:
        route = dataclasses.replace(route, because="no kernel of ours serves this chip")
    arrays = program.arrays_of(given)
    if route.placement is not None:
        arrays = program.on_mesh(arrays, program.specs_of(arrays, given, route.placement), route.placement.mesh)
    size_in, size_out = program.bytes_of(arrays), program.bytes_of([arrays[k] for k in wanted])
    peak = size_in + size_out + work.temporaries
    out = Plan(route, where, size_in, size_out, work.temporaries, peak, work, dense, shares)
    return out if compile is False else _compiled(out, call, given, wanted, compile)


def _compiled(p: Plan, call: Callable[..., Any], given: dict[str, Any], wanted: tuple[str, ...], must: Any) -> Plan:
    """The plan with the compiler's numbers, if a compiler is available."""
    place = p.route.placement
    devices, why = program.devices_for(p.chip, p.devices)
    if why:
        if must:
            raise RuntimeError(f"plan: compile=True, but the program cannot be compiled here: {why}.")
        return dataclasses.replace(p, source=f"estimate, since {why}")
    try:
        found = program.compiled(call, given, wanted, devices, place)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        why = str(error).strip().splitlines()[0]
        return dataclasses.replace(p, refused=True, source=f"estimate; the compiler refuses: {why}")
    from logitless.lab.tpu.hlo import collectives_of

    return dataclasses.replace(
        p, compiled=True, source=f"compiled for {devices[0].device_kind} in {found.seconds:.1f} s",
        arguments=found.argument_bytes, outputs=found.output_bytes, temporaries=found.temporary_bytes,
        peak=found.peak_bytes,
        collectives=() if place is None else tuple(collectives_of(found.text)),
    )  # fmt: skip


def _given(call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The public call and its arguments by name, from either form of the arguments of :func:`plan`."""
    if "vocabulary_shard" in kwargs:
        raise TypeError(
            "plan: vocabulary_shard is gone; give the whole head, and sharding= with an axis on its vocabulary."
        )
    if callable(call):
        known = {c.__name__: c for c in CALLS}
        if call not in known.values():
            raise TypeError(f"plan: {getattr(call, '__name__', call)!r} is not one of {', '.join(known)}.")
        return call, _one_call(call, call_arguments(call, args, kwargs, "plan"))
    hidden, options = call, dict(kwargs)
    lm_head: Any = args[0] if args else options.get("lm_head")
    weight = lm_head.weight if isinstance(lm_head, Head) else lm_head
    rank, reference = options.pop("lora_rank", None), options.pop("reference", False)
    if rank is not None:
        if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
            raise ValueError(f"plan: lora_rank={rank!r}, expected a positive Python int.")
        first, second = weight.shape
        options["lora"] = tuple(jax.ShapeDtypeStruct(s, weight.dtype) for s in ((first, rank), (rank, second)))
    if reference:
        options |= {"ref_hidden": hidden, "ref_lm_head": lm_head}
    width, chosen = options.pop("teacher", None), _loss_of(options)
    if width is not None:
        if not isinstance(width, int) or isinstance(width, bool) or width < 1:
            raise ValueError(
                f"plan: teacher={width!r}, expected the width of its hidden states, a positive Python int."
            )
        vocab = weight.shape[0 if weight.shape[1] == hidden.shape[-1] else 1]
        shapes = (*hidden.shape[:-1], width), (vocab, width)
        theirs: list[Any] = [jax.ShapeDtypeStruct(s, x.dtype) for s, x in zip(shapes, (hidden, weight), strict=True)]
        options |= dict(teacher_hidden=theirs[0], teacher_lm_head=Head(theirs[1], layout="vh"))
        chosen = api.linear_distillation_loss
    options |= dict(zip(("hidden", "lm_head", "targets"), (hidden, *args), strict=False))
    return chosen, _one_call(chosen, call_arguments(chosen, (), grouped(options), "plan"))


def _loss_of(options: dict[str, Any]) -> Callable[..., Any]:
    """The call that hidden states and a head mean."""
    return api.linear_logprobs if options.get("objective", Objective()) is None else api.linear_grpo_loss


def _one_call(call: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a distillation loss, rewritten for its single sweep; other arguments unchanged."""
    if "distillation" not in given:
        return given
    name = call.__name__
    own, apart = distillation_calls(name, given)
    if apart is not None:
        raise ValueError(
            "plan: a hard part beside a temperature is a second call over the student alone. Plan the soft part "
            "(hard_weight=None), and linear_grpo_loss for the hard one."
        )
    return by_name(name, own)


def _wanted(given: dict[str, Any], gradients: tuple[str, ...] | None) -> tuple[str, ...]:
    """The arguments whose gradients are asked for."""
    there = tuple(k for k in _DIFFERENTIABLE if given.get(k) is not None)
    for name in gradients or ():
        if name not in there:
            absent = ", which the call is not given" if name in _DIFFERENTIABLE else ""
            hint = did_you_mean(name, there)
            raise ValueError(f"plan: gradients has {name!r}{absent}; expected some of {', '.join(there)}.{hint}")
    return there if gradients is None else tuple(k for k in there if k in gradients)


def _work(
    given: dict[str, Any], wanted: tuple[str, ...], route: Route, live: int, shares: Shares | None
) -> tuple[Work, Work | None]:
    """``(by the route, dense)``, after the log-probabilities of the reference where the call computes them."""
    rows = shards = gathered = 1
    if route.placement is not None:
        at = route.placement
        axes = at.token_axes, at.vocab, (*at.vocab_gathered, *at.hidden_gathered)
        rows, shards, gathered = map(at.count, axes)
    if "logits" in given:
        size = given["logits"].size * jnp.dtype(given["logits"].dtype).itemsize // (rows * shards)
        theirs = 0 if given.get("teacher_logits") is None else size * (2 if wanted else 1)
        return Work(0, 0, size * (3 if wanted else 1) + theirs, size * (len(wanted) + 1) if route.dense else 0), None

    def sizes(h: Any, w: Any, wanted: tuple[str, ...], rank: int) -> estimate.Sizes:
        width, item = h.shape[-1], jnp.dtype(h.dtype).itemsize
        layout: Layout = "vh" if given["head_layout"] == "vh" or w.shape[1] == width else "hv"
        vocab = w.shape[0 if layout == "vh" else 1]
        logit, sum_item = jnp.dtype(given["logits_dtype"]).itemsize, item if given["head_grad_dtype"] == "param" else 4
        return estimate.Sizes(
            math.prod(h.shape[:-1]) // rows, -(-live // rows), width, vocab // shards, rank, item, logit, sum_item,
            wanted, given["mask"] is not None, rows, gathered, layout=layout,
        )  # fmt: skip

    rank = 0 if given["lora"] is None else given["lora"][1].shape[0]
    s = sizes(given["hidden"], given["lm_head"], wanted, rank)
    if route.reference is None:  # otherwise a reference's states serve an estimate of the KL
        theirs = next((given[k] for k in ("teacher_hidden", "ref_hidden") if given.get(k) is not None), None)
        s = s if theirs is None else dataclasses.replace(s, teacher=theirs.shape[-1])
    work, dense = estimate.fused(s, route, shares), estimate.dense(s)
    if route.reference is not None:
        reference = given["ref_lm_head"]
        s = sizes(given["ref_hidden"], reference.weight if isinstance(reference, Head) else reference, (), 0)
        work, dense = work + estimate.fused(s, route.reference, None), dense + estimate.dense(s)
    return work, dense


def longest_context(
    width: int, vocab: int, *, chip: str, dtype: Any = "bfloat16", reserved: float = 0.0, **options: Any
) -> tuple[int, int]:
    """``(fused, dense)``: the most tokens, in multiples of 128, whose loss and gradients fit by the estimate into what
    ``reserved`` bytes (weights, optimiser state, activations) leave of a chip's memory. Zero where not even 128 do."""
    room = chip_of(chip).hbm_bytes - reserved
    lm_head = jax.ShapeDtypeStruct((vocab, width), dtype)

    def at(blocks: int) -> Plan:
        hidden = jax.ShapeDtypeStruct((1, 128 * blocks, width), dtype)
        return plan(hidden, lm_head, chip=chip, head_layout="vh", compile=False, **options)

    blocks = range(1, 1 << 17)
    fused = bisect.bisect_right(blocks, room, key=lambda n: at(n).peak)
    dense = bisect.bisect_right(blocks[:fused], room, key=lambda n: at(n).dense_peak or 0)
    return 128 * fused, 128 * dense
