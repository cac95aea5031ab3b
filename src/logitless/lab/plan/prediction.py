"""A plan: predicted bytes, FLOPs and times of one head call, in words and as JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

from logitless.core.chunk_size import MIB
from logitless.core.registry import ANYWHERE
from logitless.lab.plan.chips import Chip, roofline_seconds
from logitless.lab.plan.sparse import Shares


@dataclasses.dataclass(frozen=True)
class HeadPlan:
    """A prediction. Bytes are those of one device; ``flops`` counts matmuls only, two per multiply-add.

    ``moved`` is the traffic to and from device memory that the way implies, and ``passes`` the part of it that stands
    between matmuls; ``dense_*`` is the same for the dense loss in its strong form. ``chunk`` is ``None`` where no chunk
    of logits is ever in memory. Times need a chip.

    ``because`` says why this backend. With a sparse backward ``shares`` is what the plan assumes of the policy, and
    ``exact`` the plan without it.
    """

    backend: str
    way: str
    chunk: int | None
    tiles: dict[str, Any]
    matmuls: float
    flops: int
    moved: int
    passes: int
    arguments: int
    outputs: int
    temporaries: int
    dense_flops: int
    dense_moved: int
    dense_passes: int
    dense_temporaries: int
    chip: Chip | None = None
    shares: Shares | None = None
    exact: HeadPlan | None = None
    because: str = ""

    @property
    def peak(self) -> int:
        """Arguments, outputs and temporaries together."""
        return self.arguments + self.outputs + self.temporaries

    @property
    def dense_peak(self) -> int:
        """The same for the dense loss (strong form) with these logits."""
        return self.arguments + self.outputs + self.dense_temporaries

    @property
    def seconds(self) -> float | None:
        """The roofline's time on the chip: no kernel can take less for this way of doing it."""
        return None if self.chip is None else roofline_seconds(self.chip, self.flops, self.moved)

    @property
    def dense_seconds(self) -> float | None:
        """The roofline's time of the dense loss, which takes every token, masked or not."""
        return None if self.chip is None else roofline_seconds(self.chip, self.dense_flops, self.dense_moved)

    @property
    def seconds_in_turn(self) -> float | None:
        """The roofline's time if no pass overlaps a matmul, which is how these programs run: nearer to ratios of
        measured times, since a sparse backward saves matmuls and no pass."""
        return None if self.chip is None else self.flops / self.chip.flops + self.passes / self.chip.hbm

    @property
    def dense_seconds_in_turn(self) -> float | None:
        """The same for the dense loss."""
        return None if self.chip is None else self.dense_flops / self.chip.flops + self.dense_passes / self.chip.hbm

    def __str__(self) -> str:
        cut = "no logits in memory" if self.chunk is None else f"chunks of {self.chunk} tokens"
        tiles = ", ".join(f"{k} {v}" for k, v in self.tiles.items() if k not in ("chunk", "layout"))
        since = [f"  {self.backend}, since {self.because}"] if self.chip and self.backend == ANYWHERE else []
        lines = [
            f"{self.backend}, {cut}, {self.matmuls:.3g} matmuls ({self.way})",
            *since,
            *([f"  tiles {tiles}"] if tiles else []),
            f"  {self.flops / 1e12:.2f} TFLOP, {self.moved / 1e9:.1f} GB of memory traffic",
            f"  peak {self.peak / MIB:,.0f} MiB = arguments {self.arguments / MIB:,.0f} + outputs "
            f"{self.outputs / MIB:,.0f} + temporaries {self.temporaries / MIB:,.0f}",
            *self._exact_lines(),
            f"  dense: peak {self.dense_peak / MIB:,.0f} MiB, temporaries {self.dense_temporaries / MIB:,.0f}, "
            f"{self.dense_flops / 1e12:.2f} TFLOP",
            *self._time_lines(),
        ]
        if self.shares is not None:
            lines.append(f"  {self.shares.in_words()}")
        return "\n".join(lines)

    def _exact_lines(self) -> list[str]:
        if self.exact is None:
            return []
        e = self.exact
        return [
            f"  exact ({e.backend}, sparse_backward off): {e.matmuls:g} matmuls, peak {e.peak / MIB:,.0f} MiB, "
            f"temporaries {e.temporaries / MIB:,.0f}, {e.flops / 1e12:.2f} TFLOP, {e.moved / 1e9:.1f} GB"
        ]

    def _time_lines(self) -> list[str]:
        if self.chip is None or self.seconds is None or self.dense_seconds is None:
            return []
        bound = "compute" if self.flops / self.chip.flops >= self.moved / self.chip.hbm else "memory"
        exact = "" if self.exact is None or self.exact.seconds is None else f"exact {self.exact.seconds * 1e3:.2f}, "
        lines = [
            f"  {self.chip.name} roofline {self.seconds * 1e3:.2f} ms ({bound}), {exact}dense "
            f"{self.dense_seconds * 1e3:.2f} ms; memory {self.peak / self.chip.hbm_bytes:.1%} of "
            f"{self.chip.hbm_bytes / 1e9:.0f} GB, dense {self.dense_peak / self.chip.hbm_bytes:.1%}"
        ]
        if self.exact is not None:
            own, exactly, dense = self.seconds_in_turn, self.exact.seconds_in_turn, self.dense_seconds_in_turn
            assert own is not None and exactly is not None and dense is not None
            lines.append(
                f"  matmuls and passes in turn {own * 1e3:.2f} ms: {own / exactly:.2f} of exact ({exactly * 1e3:.2f}), "
                f"{own / dense:.2f} of dense ({dense * 1e3:.2f})"
            )
        return lines

    def after(self, first: HeadPlan) -> HeadPlan:
        """The plan of both, one after the other: ``first`` has inputs of its own, and its outputs are small."""
        work = ("matmuls", "flops", "moved", "passes", "dense_flops", "dense_moved", "dense_passes")
        both = {name: getattr(self, name) + getattr(first, name) for name in (*work, "arguments")}
        larger = {k: max(getattr(self, k), getattr(first, k)) for k in ("temporaries", "dense_temporaries")}
        exact = None if self.exact is None else self.exact.after(first)
        return dataclasses.replace(self, **both, **larger, exact=exact)

    def record(self) -> dict[str, Any]:
        """Everything as JSON."""
        out = dataclasses.asdict(self)
        out.update(chip=None if self.chip is None else self.chip.name, peak=self.peak, dense_peak=self.dense_peak)
        out.update(exact=None if self.exact is None else self.exact.record())
        out.update(seconds_in_turn=self.seconds_in_turn, dense_seconds_in_turn=self.dense_seconds_in_turn)
        return dict(out, seconds=self.seconds, dense_seconds=self.dense_seconds)
