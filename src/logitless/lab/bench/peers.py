"""PyTorch's arms, on the same inputs: what people use who do not use JAX. Optional: torch, Liger-Kernel, TRL and
cut-cross-entropy are not dependencies, and one that is missing is an arm that is not there.

Device times are CUDA events. ``$LOGITLESS_PEERS`` may name a folder with the unpacked wheels ``liger_kernel``,
``cut_cross_entropy`` and ``trl``.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from logitless.lab.bench import case_arrays
from logitless.lab.bench.case import Arm
from logitless.lab.bench.microbench import NOT_HERE
from logitless.lab.tools import timing

Batch = dict[str, Any]
"""``h`` and ``w`` (a teacher's ``th`` and ``tw``), or ``logits``; targets ``y``, ``mask``, advantages ``a`` of each
row, ``old`` log-probabilities."""


def clip_loss(logp: Any, b: Batch) -> Any:
    """Token-level clip, mean over live tokens, as ``Objective(aggregation="dapo")``."""
    import torch

    ratio = torch.exp(logp - b["old"])
    a = b["a"][:, None]
    return -(torch.minimum(ratio * a, torch.clamp(ratio, 0.8, 1.2) * a) * b["mask"]).sum() / b["mask"].sum()


def dense(b: Batch) -> Any:
    """log_softmax over all logits."""
    import torch

    logits = b["h"] @ b["w"].T
    return clip_loss(torch.log_softmax(logits.float(), -1).gather(-1, b["y"][..., None])[..., 0], b)


def _compiled(b: Batch) -> Callable[[], Any]:
    import torch

    f = torch.compile(dense)
    return lambda: f(b)


def _cut_cross_entropy(b: Batch) -> Callable[[], Any]:
    from cut_cross_entropy import linear_cross_entropy

    return lambda: clip_loss(-linear_cross_entropy(b["h"], b["w"], b["y"], reduction="none"), b)


def _liger_head(b: Batch) -> Callable[[], Any]:
    from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOLoss

    f = LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, loss_type="dapo", compiled=True)
    return lambda: f(b["h"], b["w"], b["y"], b["mask"], b["a"], old_per_token_logps=b["old"])[0]


def _liger_logits(b: Batch, in_place: bool) -> Callable[[], Any]:
    """The kernel takes one position more than targets; only the kernel's file is read."""
    found = importlib.util.find_spec("liger_kernel")
    places = [] if found is None else [Path(p) for p in found.submodule_search_locations or []]
    path = next((p / "ops" / "grpo_loss.py" for p in places if (p / "ops" / "grpo_loss.py").exists()), None)
    if path is None:
        raise ModuleNotFoundError("No module named 'liger_kernel'")
    spec = importlib.util.spec_from_file_location("liger_grpo_loss", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    call = module.GrpoLossFunction.apply
    return lambda: call(b["logits"], b["old"], None, b["y"], b["a"], None, 1.0, 0.0, 0.2, 0.2, in_place, "dapo")[0]


def _own_logits(b: Batch) -> Batch:
    """The batch with a private copy of the logits, for losses that overwrite logits with gradients."""
    return b | dict(logits=b["logits"].detach().clone().requires_grad_())


def _trl(beta: float) -> Callable[[Batch], Callable[[], Any]]:
    """TRL's ``_chunked_divergence_loss`` on live rows; importing its module needs all of TRL, the function needs two
    files."""

    def make(b: Batch) -> Callable[[], Any]:
        from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

        live = b["mask"].flatten() != 0
        th = b["th"].flatten(0, 1)[live]

        def loss() -> Any:
            h = b["h"].flatten(0, 1)[live]
            divergence, _ = ChunkedDivergenceFunction.apply(h, b["w"], None, th, b["tw"], None, beta)
            return divergence.sum() / live.sum()

        return loss

    return make


def _liger_jsd(b: Batch) -> Callable[[], Any]:
    from liger_kernel.ops.fused_linear_jsd import LigerFusedLinearJSDFunction

    labels = b["y"].masked_fill(b["mask"] == 0, -100).flatten()
    th = b["th"].flatten(0, 1)
    call = LigerFusedLinearJSDFunction.apply
    return lambda: call(b["h"].flatten(0, 1), b["w"], th, b["tw"], labels, 0.5, -100, 1.0)


MAKERS: dict[tuple[str, str], Callable[[Batch], Callable[[], Any]]] = {
    ("head", "torch eager"): lambda b: lambda: dense(b),
    ("head", "torch.compile"): _compiled,
    ("head", "cut_cross_entropy"): _cut_cross_entropy,
    ("head", "liger"): _liger_head,
    ("distillation", "trl, reverse_kl"): _trl(1.0),
    ("distillation", "trl, forward_kl"): _trl(0.0),
    ("distillation", "trl, jsd"): _trl(0.5),
    ("distillation", "liger, jsd"): _liger_jsd,
    ("logits", "liger"): lambda b: _liger_logits(b, False),
    ("logits", "liger, in place"): lambda b: _liger_logits(b, True),
}


def batch_of(level: str, inputs: case_arrays.Inputs) -> Batch:
    """The case's inputs as torch tensors on the GPU."""
    import torch

    def tensor(x: Any) -> Any:
        host = np.array(x)
        if host.dtype.name == "bfloat16":
            return torch.from_numpy(host.view(np.int16)).cuda().view(torch.bfloat16)
        return torch.from_numpy(host).cuda()

    x, rest = inputs
    b = {k: tensor(a) for k, a in zip(("logits",) if level == "logits" else ("h", "w"), x, strict=True)}
    if level == "logits":  # the position behind the last target, which is not looked at
        b["logits"] = torch.cat([b["logits"], b["logits"][:, :1]], 1).contiguous()
    for value in b.values():
        value.requires_grad_()
    if "teacher_hidden" in rest:
        b |= dict(th=tensor(rest["teacher_hidden"]), tw=tensor(rest["teacher_lm_head"]))
    if rest["advantages"].ndim != 1:
        raise ValueError("peers have one advantage for each row: moving must be 1")
    return b | dict(
        y=tensor(rest["targets"]).long(),
        mask=tensor(rest["mask"]).float(),
        a=tensor(rest["advantages"]),
        old=tensor(rest["old_logp"]),
    )


class Peers:
    """PyTorch arms of a case, with the interface of :class:`logitless.lab.bench.arm.Bench`."""

    def __init__(self) -> None:
        for name in ("liger_kernel", "cut_cross_entropy", "trl"):
            if folder := os.environ.get("LOGITLESS_PEERS"):
                sys.path.insert(0, str(Path(folder) / name))
        self._data: Batch | None = None
        self._ready: dict[str, Callable[[], Any]] = {}

    def prepare(self, case: dict[str, Any], name: str, arm: dict[str, Any]) -> dict[str, Any]:
        """Build the arm and run it a few times: its loss, and the allocator's peak above inputs and gradients."""
        own = Arm(**arm)
        try:
            import torch

            if not torch.cuda.is_available():
                return dict(error=f"{NOT_HERE}torch sees no GPU")
            if self._data is None:
                self._data = batch_of(case["level"], case_arrays.Data().of(case, {}))
            b = _own_logits(self._data) if own.form.endswith("in place") else self._data
            kind = "distillation" if case["distillation"] else case["level"]
            loss = MAKERS[kind, own.form](b)
        except ImportError as error:
            return dict(error=f"{NOT_HERE}{error}")
        moved = [v for v in b.values() if v.requires_grad]

        def step() -> Any:
            for v in moved:
                v.grad = None
            value = loss()
            value.backward()
            return value

        value = float(step())  # from the first step: an in-place loss spoils the inputs
        for _ in range(2):
            step()
        torch.cuda.synchronize()
        for v in moved:
            v.grad = None
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        grads = sum(v.grad.numel() * v.grad.element_size() for v in moved)
        extra = torch.cuda.max_memory_allocated() - held - grads
        self._ready[name] = step
        return dict(
            environment=dict(torch=torch.__version__, device=torch.cuda.get_device_name(), platform="gpu"),
            compiler=None,  # PyTorch has no plan, only its allocator's account
            device=dict(peak=held + grads + extra, inputs=held, outputs=grads, temporaries=extra, from_compile=False),
            loss=value,
            live=int(b["mask"].sum()),
        )

    def turn(self, case: dict[str, Any], name: str) -> dict[str, Any]:
        """One turn's times."""
        import torch

        step = self._ready[name]
        for _ in range(case["warmup"]):
            step()
        torch.cuda.synchronize()
        device, wall = [], []
        for _ in range(case["repeats"]):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin = time.perf_counter()
            start.record()
            step()
            end.record()
            torch.cuda.synchronize()
            wall.append((time.perf_counter() - begin) * 1e3)
            device.append(start.elapsed_time(end))
        in_a_row = timing.BACK_TO_BACK * case["repeats"]
        begin = time.perf_counter()
        for _ in range(in_a_row):
            step()
        torch.cuda.synchronize()
        return dict(device_ms=device, wall_ms=wall, back_to_back_ms=(time.perf_counter() - begin) * 1e3 / in_a_row)
