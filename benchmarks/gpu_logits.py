"""The logits-level kernels on one Hopper GPU: check, then time, against XLA and Liger-Kernel, in one run.

    python benchmarks/gpu_logits.py --out results.json [--quick] [--jobs check,main,...] [--liger DIR]

It ends with the gates (``GATES``: PASS or FAIL each) and leaves with 1 if one fails. Gradients are judged as the tests
do it: against float64, at most 1.5 times the error of the plain-JAX path plus 4 float32 ulp.

Every job is a child process with a time limit that adds to its JSON after each case, so that a hang or a crash loses
one job's rest and nothing else; tracebacks go to ``results.log``. ``--liger`` names a folder with Liger-Kernel's
package (``liger_kernel/ops/grpo_loss.py`` is all that is read). Times are device times (CUPTI for JAX, CUDA events for
torch).
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

MAIN = (4096, 151936)
OTHERS = ((16384, 128256), (4096, 262144), (4096, 151643))
LIMITS = {"environment": 60, "check": 200, "tiles": 90, "main": 150, "liger": 80, "shapes": 200}
QUICK_JOBS = ("environment", "check", "main", "liger")
FACTOR, FLOOR = 1.5, 4 * 2.0**-23  # the contract on gradients: times the plain path's error, plus this relative part


def tile_choices() -> dict[str, Any]:
    """Variants of the kernel's tiles; ``fitted`` cuts slots down to what fits."""
    from logitless.logits.mosaic_gpu_layout import Tiles

    def t(wgs: int, columns: int, ring: int, lag: int, lanes: int = 512, slots: int = 32) -> Tiles:
        return Tiles(wgs, columns, slots, ring, lag, lanes, 132)

    return {
        "w4 c4096 ring3 lag1": t(4, 4096, 3, 1),
        "w4 c4096 ring2 lag1": t(4, 4096, 2, 1),
        "w4 c4608 ring2 lag1": t(4, 4608, 2, 1),
        "w4 c3072 ring4 lag1": t(4, 3072, 4, 1),
    }


class Report:
    """A job's results, written after every case."""

    def __init__(self, path: Path):
        self.path, self.cases = path, {}

    def case(self, name: str, f: Callable[[], dict[str, Any]]) -> None:
        start = time.perf_counter()
        try:
            value = f()
        except Exception as error:
            traceback.print_exc()
            value = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        value["wall_s"] = round(time.perf_counter() - start, 1)
        print(f"{name}: {json.dumps(value)}", flush=True)
        self.cases[name] = value
        self.path.write_text(json.dumps(self.cases, indent=1))


def allow_missing_annotations() -> None:
    """``jaxtyping`` only names shapes in signatures; a bare machine may do without."""
    if importlib.util.find_spec("jaxtyping") is None:

        class Any_:
            def __class_getitem__(cls, item: Any) -> Any:
                return Any

        fake = types.ModuleType("jaxtyping")
        fake.__getattr__ = lambda name: Any_  # type: ignore[method-assign]
        sys.modules["jaxtyping"] = fake


# Data.


def device_batch(n: int, v: int, dtype: str, *, spread: float = 3.0, seed: int = 0) -> dict[str, Any]:
    """Logits made on the device in slices (no float32 copy of everything), the rest on the host."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    rng = np.random.default_rng(seed)

    @jax.jit
    def logits(key: Any) -> Any:
        keys = jax.random.split(key, n)
        return jax.lax.map(lambda k: (jax.random.normal(k, (v,)) * spread).astype(dtype), keys, batch_size=min(n, 64))

    x = jax.block_until_ready(logits(jax.random.key(seed)))
    y = jnp.asarray(rng.integers(0, v, n), jnp.int32)
    return dict(logits=x, targets=y, **near_policy(x, y, rng))


def near_policy(x: Any, y: Any, rng: Any) -> dict[str, Any]:
    """Advantages, and old log-probabilities so near that nothing is clipped: every row has a gradient to compute."""
    import jax
    import jax.numpy as jnp

    from logitless.tools.baselines import strong_logp

    n = y.shape[0]
    noise = jnp.asarray(rng.uniform(-0.05, 0.05, n), jnp.float32)
    return dict(
        advantages=jnp.asarray(rng.standard_normal(n), jnp.float32), old_logp=jax.jit(strong_logp)(x, y) + noise
    )


def program_of(b: dict[str, Any], objective: Any = None, mask: Any = None) -> Any:
    """The objective's token program over flattened tokens."""
    from logitless import Objective
    from logitless.objectives.api import flat_inputs, loss_inputs
    from logitless.objectives.token_program import token_program

    objective = objective or Objective(aggregation="dapo")
    n = b["targets"].shape[0]
    objective, inputs = loss_inputs(
        "bench", objective, (1, n), mask, b["advantages"][None], b["old_logp"][None], None, None, None, None, None
    )
    return token_program(objective, flat_inputs(inputs))


# Checks.


def truth(x: Any, y: Any, g: Any, transform: Any, vocab: int) -> tuple[dict[str, Any], Any]:
    """Statistics and dlogits of a few rows in float64, on the host."""
    import numpy as np

    x64 = np.asarray(x).astype(np.float64)
    t = np.asarray(1.0 if transform.temperature is None else transform.temperature, np.float64).reshape(-1, 1)
    scale = 1.0 if transform.scale is None else float(transform.scale)
    cap = None if transform.softcap is None else float(transform.softcap)
    raw = x64 * scale
    z = (raw if cap is None else cap * np.tanh(raw / cap)) / t
    slope = scale * (1.0 if cap is None else 1 - np.tanh(raw / cap) ** 2) / t
    z[:, vocab:] = -np.inf
    rows = np.arange(len(y))
    others = z.copy()
    others[rows, y] = -np.inf
    m = others.max(1)
    lse_others = m + np.log(np.exp(others - m[:, None]).sum(1))
    logp = -np.logaddexp(0.0, lse_others - z[rows, y])
    top = z.max(1)
    lse = top + np.log(np.exp(z - top[:, None]).sum(1))
    lp = z - lse[:, None]
    lp[rows, y] = logp
    p = np.exp(lp)
    entropy = -np.where(p > 0, p * np.where(p > 0, lp, 0), 0).sum(1)
    hit = np.zeros_like(z)
    hit[rows, y] = 1
    gl, ge, gs = (np.asarray(v, np.float64)[:, None] for v in g)
    one = -p
    one[rows, y] = -np.expm1(logp)
    d = gl * one - ge * np.where(p > 0, p * (np.where(p > 0, lp, 0) + entropy[:, None]), 0) + gs * p
    return dict(logp=logp, entropy=entropy, lse=lse), d * slope


def exact_cotangents(program: Any, rows: Any, logp: Any, entropy: Any) -> list[Any]:
    """The objective's cotangents of some rows in float64.

    At float64 statistics: the rounding of a float32 logp (1e-6 at -16, and that is the ratio's relative error) is an
    error of whoever computes with it.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    with jax.enable_x64(True):
        scalars = [jnp.asarray(np.asarray(s, np.float64)) for s in program.scalars]
        columns = [jnp.asarray(np.asarray(c, np.float64)[rows]) for c in program.columns]
        g = program.run(scalars, columns, jnp.asarray(logp, jnp.float64), jnp.asarray(entropy, jnp.float64))
        assert g[0].dtype == jnp.float64
        return [np.asarray(v, np.float64) for v in g]


def contract(ours: dict[str, float], plain: dict[str, float]) -> float:
    """Our error as a part of what is allowed, in the worse of the two norms: at most 1."""
    return max(ours[k] / (FACTOR * plain[k] + FLOOR) for k in ("norm", "max"))


def errors(d: Any, exact: Any) -> dict[str, float]:
    import numpy as np

    diff = np.asarray(d).astype(np.float64) - exact
    return dict(
        norm=float(np.linalg.norm(diff) / np.linalg.norm(exact)), max=float(np.abs(diff).max() / np.abs(exact).max())
    )


def check_case(
    n: int, v: int, vocab: int, dtype: str, tiles: Any, *, spread: float = 3.0, transform: dict | None = None,
    dead: float = 0.0, peaked: bool = False, donate: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """All three kernels against float64, beside the plain-JAX path's own error."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from logitless.logits import chunked, mosaic_gpu
    from logitless.stats import StatCotangents
    from logitless.transform import LogitTransform

    rng = np.random.default_rng(1)
    b = device_batch(n, v, dtype, spread=spread)
    x, y = b["logits"], jnp.asarray(rng.integers(0, vocab, n), jnp.int32)
    if peaked:
        x = x.at[jnp.arange(n), y].set(jnp.asarray(np.linspace(5, 80, n), x.dtype))
    live = None if not dead else jnp.asarray(rng.random(n) >= dead)
    t = LogitTransform(**{k: jnp.asarray(value, jnp.float32) for k, value in (transform or {}).items()})
    g = StatCotangents(*(jnp.asarray(rng.standard_normal(n), jnp.float32) for _ in range(3)))
    b = {"logits": x, "targets": y, **near_policy(x, y, rng)}
    program = program_of(b)
    alive = np.ones(n, bool) if live is None else np.asarray(live)
    rows = np.flatnonzero(alive)[:24]

    stats = jax.jit(lambda x: mosaic_gpu.token_stats(x, y, t, vocab, live, tiles=tiles))(x)
    plain = jax.jit(lambda x: chunked.token_stats(x, y, t, vocab, live, chunk=n))(x)
    d = jax.jit(lambda x, s: mosaic_gpu.dlogits(x, y, t, vocab, live, s, g, tiles=tiles))(x, stats)
    d_plain = jax.jit(lambda x, s: chunked.dlogits(x, y, t, vocab, live, s, g, chunk=n))(x, plain)
    fused = jax.jit(
        lambda x: mosaic_gpu.stats_and_dlogits(x, y, t, vocab, live, program, tiles=tiles, donate=donate),
        donate_argnums=(0,) if donate else (),
    )
    g2 = program.run(program.scalars, program.columns, plain.logp, plain.entropy)
    g2 = StatCotangents(g2[0], g2[1], jnp.zeros_like(g2[0]))
    d2_plain = jax.jit(lambda x, s: chunked.dlogits(x, y, t, vocab, live, s, g2, chunk=n))(x, plain)
    kept = np.asarray(x)[rows]
    stats2, d2 = fused(x)
    tr = LogitTransform(
        None if t.temperature is None else (t.temperature if t.temperature.ndim == 0 else t.temperature[rows]),
        t.softcap, t.scale,
    )  # fmt: skip
    y_rows = np.asarray(y)[rows]
    exact, ed = truth(kept, y_rows, [np.asarray(c)[rows] for c in (g.logp, g.entropy, g.lse)], tr, vocab)
    none = np.zeros(len(rows))
    own = exact_cotangents(program, rows, exact["logp"], exact["entropy"])
    _, ed2 = truth(kept, y_rows, [*own, none], tr, vocab)
    # The cotangents of the kernel's own statistics: what is left is the error of the objective and of sweep 2.
    own3 = exact_cotangents(
        program, rows, *(np.asarray(getattr(stats2, k), np.float64)[rows] for k in ("logp", "entropy"))
    )
    _, ed3 = truth(kept, y_rows, [*own3, none], tr, vocab)

    def stat_errors(s: Any) -> dict[str, float]:
        return {k: float(np.abs(np.asarray(getattr(s, k), np.float64)[rows] - e).max()) for k, e in exact.items()}

    same = all(
        np.array_equal(np.asarray(a)[alive], np.asarray(c)[alive], equal_nan=True)
        for a, c in zip(jax.tree.leaves(stats), jax.tree.leaves(stats2), strict=True)
    )
    ours = dict(
        stats=stat_errors(stats), dlogits=errors(np.asarray(d)[rows], ed), both=errors(np.asarray(d2)[rows], ed2),
        both_at_own_statistics=errors(np.asarray(d2)[rows], ed3),
    )  # fmt: skip
    bits = np.asarray(stats.logp)[rows].view(np.int32) - np.asarray(plain.logp)[rows].view(np.int32)
    theirs = dict(
        stats=stat_errors(plain),
        dlogits=errors(np.asarray(d_plain)[rows], ed),
        both=errors(np.asarray(d2_plain)[rows], ed2),
    )
    # Every row, not only those compared in float64: against the plain path.
    far = float(jnp.max(jnp.abs(d2.astype(jnp.float32) - d2_plain.astype(jnp.float32))) / jnp.max(jnp.abs(d2_plain)))
    dead_zero = bool(np.all(np.asarray(d2.astype(jnp.float32))[~alive] == 0)) if dead else True
    worst = max(contract(ours[k], theirs[k]) for k in ("dlogits", "both"))
    ok = worst <= 1 and same and dead_zero and far < 0.02
    return dict(
        ok=ok, contract=round(worst, 3), far=far, bits_equal=same, dead_zero=dead_zero, ours=ours, plain=theirs,
        logp_ulps_from_plain=[int(v) for v in bits],
    )  # fmt: skip


def job_check(report: Report, quick: bool) -> None:
    bent = {"temperature": 0.7, "softcap": 30.0, "scale": 0.8}
    cases: dict[str, tuple[tuple[int, int, int, str], dict[str, Any]]] = {
        "bf16 64x151936 in place, padded": ((64, 151936, 151643, "bfloat16"), {"donate": True}),
        "bf16 64x151643 in place": ((64, 151643, 151643, "bfloat16"), {"donate": True}),
        "f32 64x4096": ((64, 4096, 4096, "float32"), {}),
        "bf16 |z|<=100": ((64, 32000, 32000, "bfloat16"), {"spread": 25.0}),
        "f32 dead rows": ((300, 8192, 8190, "float32"), {"dead": 0.4}),
        "bf16 63x50257, padded, dead rows": ((63, 50257, 50000, "bfloat16"), {"dead": 0.3}),
    }
    if not quick:
        cases |= {
            "f32 40x151936": ((40, 151936, 151936, "float32"), {}),
            "f32 |z|<=100": ((64, 32000, 32000, "float32"), {"spread": 25.0}),
            "f32 61x50257": ((61, 50257, 50257, "float32"), {}),
            "bf16 peaked": ((64, 50304, 50304, "bfloat16"), {"peaked": True}),
            "bf16 64x50257, softcap, scale, temperature": ((64, 50257, 50257, "bfloat16"), {"transform": bent}),
            "f16 64x32000, temperature": ((64, 32000, 32000, "float16"), {"transform": {"temperature": 0.7}}),
            "bf16 1x50257": ((1, 50257, 50257, "bfloat16"), {}),
            "bf16 200x1000": ((200, 1000, 1000, "bfloat16"), {}),
        }
    for name, (shape, options) in cases.items():
        report.case(name, lambda shape=shape, options=options: check_case(*shape, None, **options))


# Times.


def timed(f: Any, *args: Any, repeats: int = 20) -> dict[str, Any]:
    """Median device time, temporaries and the kernels behind it."""
    import jax
    from jax.experimental.mosaic.gpu import profiler

    start = time.perf_counter()
    compiled = f.lower(*args).compile()
    compile_s = time.perf_counter() - start
    memory = compiled.memory_analysis()
    jax.block_until_ready(compiled(*args))
    _, runs = profiler.measure(f, aggregate=False, iterations=repeats)(*args)
    totals = [sum(ms for _, ms in run) for run in runs]
    kernels = {f"{i} {name[:40]}": round(ms, 4) for i, (name, ms) in enumerate(runs[-1])}
    return dict(
        ms=round(statistics.median(totals), 4), min_ms=round(min(totals), 4),
        temporaries_mib=round(memory.temp_size_in_bytes / 2**20, 2), compile_s=round(compile_s, 1), kernels=kernels,
    )  # fmt: skip


def shaped(b: dict[str, Any]) -> tuple[Any, ...]:
    return b["logits"][None], b["targets"][None], b["advantages"][None], b["old_logp"][None]


def baseline(kind: str) -> Any:
    import jax

    from logitless import Objective
    from logitless.tools import baselines

    def loss(x: Any, y: Any, a: Any, old: Any) -> Any:
        return baselines.logits_loss(kind, x, y, objective=Objective(aggregation="dapo"), advantages=a, old_logp=old)

    return jax.jit(jax.value_and_grad(loss))


def public(backend: str, entropy: bool = False, masked: Any = None, **options: Any) -> Any:
    import jax

    import logitless

    objective = logitless.Objective(aggregation="dapo", **({"entropy_coef": 0.01} if entropy else {}))

    def loss(x: Any, y: Any, a: Any, old: Any) -> Any:
        return logitless.grpo_loss(
            x, y, advantages=a, old_logp=old, mask=masked, objective=objective, backend=backend, **options
        )

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def at_shape(b: dict[str, Any], f: Any, rows: int = 32) -> dict[str, Any]:
    """Gradient of the public call ``f`` at the true shape: some rows against float64, beside the strong baseline."""
    import numpy as np

    from logitless.transform import LogitTransform

    n, v = b["logits"].shape
    picked = np.sort(np.random.default_rng(2).choice(n, rows, replace=False))
    kept, y = np.asarray(b["logits"][picked]), np.asarray(b["targets"])[picked]
    exact, _ = truth(kept, y, [np.zeros(rows)] * 3, LogitTransform(), v)
    g = exact_cotangents(program_of(b), picked, exact["logp"], exact["entropy"])
    _, ed = truth(kept, y, [*g, np.zeros(rows)], LogitTransform(), v)

    def error(f: Any) -> dict[str, float]:
        return errors(np.asarray(f(*shaped(b))[1][0][picked]), ed)

    ours, plain = error(f), error(baseline("strong"))
    worst = contract(ours, plain)
    return dict(ok=worst <= 1, contract=round(worst, 3), rows=rows, ours=ours, plain=plain)


def direct(b: dict[str, Any], tiles: Any) -> Any:
    """The kernel alone."""
    import jax

    from logitless.logits import mosaic_gpu
    from logitless.transform import LogitTransform

    def f(x: Any, y: Any, a: Any, old: Any) -> Any:
        p = program_of({"targets": y, "advantages": a, "old_logp": old})
        return mosaic_gpu.stats_and_dlogits(x, y, LogitTransform(), x.shape[1], None, p, tiles=tiles)

    return jax.jit(f)


def flat(b: dict[str, Any]) -> tuple[Any, ...]:
    return b["logits"], b["targets"], b["advantages"], b["old_logp"]


def job_main(report: Report, quick: bool) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np

    b = device_batch(*MAIN, "bfloat16")
    report.case("copy (floor)", lambda: timed(jax.jit(lambda x: x + jnp.ones((), x.dtype)), b["logits"]))
    for kind in ("naive", "strong", "gather"):
        report.case(f"xla {kind}", lambda kind=kind: timed(baseline(kind), *shaped(b)))
    ours = public("mosaic_gpu")
    report.case("ours, grpo_loss", lambda: timed(ours, *shaped(b)))
    report.case("contract", lambda: at_shape(b, ours))
    report.case("ours, grpo_loss + entropy", lambda: timed(public("mosaic_gpu", entropy=True), *shaped(b)))
    half = jnp.asarray(np.random.default_rng(0).random((1, MAIN[0])) < 0.5)
    report.case("ours, grpo_loss, half masked", lambda: timed(public("mosaic_gpu", masked=half), *shaped(b)))
    report.case("ours, two passes (bwd_impl=jax)", lambda: timed(public("chunked"), *shaped(b)))

    def stats_only() -> dict[str, Any]:
        from logitless.logits import mosaic_gpu
        from logitless.transform import LogitTransform

        f = jax.jit(lambda x, y: mosaic_gpu.token_stats(x, y, LogitTransform(), x.shape[1], None))
        return timed(f, b["logits"], b["targets"])

    report.case("ours, statistics only", stats_only)


def job_tiles(report: Report, quick: bool) -> None:
    import jax
    import jax.numpy as jnp

    from logitless.logits import chunked
    from logitless.stats import StatCotangents
    from logitless.transform import LogitTransform

    b = device_batch(*MAIN, "bfloat16")
    x, y = b["logits"], b["targets"]
    p = program_of(b)

    @jax.jit
    def reference(x: Any) -> Any:
        s = chunked.token_stats(x, y, LogitTransform(), x.shape[1], None, chunk=256)
        gl, ge = p.run(p.scalars, p.columns, s.logp, s.entropy)
        return chunked.dlogits(x, y, LogitTransform(), x.shape[1], None, s, StatCotangents(gl, ge, 0 * gl), chunk=256)

    @jax.jit
    def distance(a: Any, c: Any) -> Any:
        # In units of the expected entry: p is at least 1e-9 here, so a relative distance means something.
        gap = jnp.abs(a.astype(jnp.float32) - c.astype(jnp.float32))
        return jnp.max(gap / (jnp.abs(c.astype(jnp.float32)) + 1e-12)), jnp.max(gap)

    exact = reference(x)
    for name, tiles in tile_choices().items():

        def one(tiles: Any = tiles) -> dict[str, Any]:
            f = direct(b, tiles)
            value = timed(f, *flat(b))
            rel, gap = distance(f(*flat(b))[1], exact)
            return {**value, "max_relative_distance": float(rel), "max_distance": float(gap)}

        report.case(name, one)


def job_shapes(report: Report, quick: bool) -> None:
    import jax
    import jax.numpy as jnp

    for n, v in OTHERS:
        b = device_batch(n, v, "bfloat16")
        tag = f"{n}x{v}"
        report.case(f"{tag} copy", lambda b=b: timed(jax.jit(lambda x: x + jnp.ones((), x.dtype)), b["logits"]))
        report.case(f"{tag} xla naive", lambda b=b: timed(baseline("naive"), *shaped(b), repeats=5))
        report.case(f"{tag} xla strong", lambda b=b: timed(baseline("strong"), *shaped(b)))
        ours = public("mosaic_gpu")
        report.case(f"{tag} ours", lambda b=b, f=ours: timed(f, *shaped(b)))
        report.case(f"{tag} contract", lambda b=b, f=ours: at_shape(b, f))
        del b


def job_liger(report: Report, quick: bool, folder: str = "carry/liger") -> None:
    import torch

    path = Path(folder) / "liger_kernel" / "ops" / "grpo_loss.py"
    spec = importlib.util.spec_from_file_location("liger_grpo_loss", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def run(n: int, v: int, inplace: bool) -> dict[str, Any]:
        torch.manual_seed(0)
        logits = torch.randn(1, n + 1, v, device="cuda", dtype=torch.bfloat16).mul_(3).requires_grad_()
        ids = torch.randint(0, v, (1, n), device="cuda")
        with torch.no_grad():
            old = module.fused_selective_log_softmax(logits, ids, 1.0, None)  # on-policy: nothing is clipped
        advantages = torch.randn(1, device="cuda")

        def step() -> None:
            logits.grad = None
            out = module.GrpoLossFunction.apply(
                logits, old, None, ids, advantages, None, 1.0, 0.0, 0.2, 0.2, inplace, "dapo"
            )
            out[0].backward()

        for _ in range(3):
            step()
        torch.cuda.synchronize()
        base = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        times = []
        for _ in range(20):
            a, c = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record()
            step()
            c.record()
            torch.cuda.synchronize()
            times.append(a.elapsed_time(c))
        extra = (torch.cuda.max_memory_allocated() - base) / 2**20
        return dict(ms=round(statistics.median(times), 4), min_ms=round(min(times), 4), extra_mib=round(extra, 1))

    for n, v in (MAIN,) if quick else (MAIN, *OTHERS):
        for inplace in (True, False):
            report.case(f"{n}x{v} inplace={inplace}", functools.partial(run, n, v, inplace))
            torch.cuda.empty_cache()


def job_environment(report: Report, quick: bool) -> None:
    from logitless.tools.timing import environment

    report.case("environment", lambda: dict(environment()))


# Gates.


def gates(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Each bar as ``name, value, limit, pass``; a missing measurement fails."""
    out: list[dict[str, Any]] = []

    def case(job: str, name: str) -> dict[str, Any]:
        return results.get(job, {}).get("cases", {}).get(name, {})

    def gate(name: str, value: float | None, limit: float) -> None:
        out.append({"name": name, "value": value, "limit": limit, "pass": value is not None and value <= limit})

    def ratio(a: dict[str, Any], b: dict[str, Any]) -> float | None:
        return round(a["ms"] / b["ms"], 4) if "ms" in a and "ms" in b else None

    def liger(tag: str) -> dict[str, Any]:
        both = [case("liger", f"{tag} inplace={flag}") for flag in (True, False)]
        return min((c for c in both if "ms" in c), key=lambda c: c["ms"], default={})

    shapes = [(MAIN, "main", "", 1.0)] + [(shape, "shapes", "{}x{} ".format(*shape), 1.1) for shape in OTHERS]
    for (n, v), job, prefix, slack in shapes:
        if job not in results:
            continue
        tag = f"{n}x{v}"
        ours = case(job, "ours, grpo_loss" if job == "main" else f"{prefix}ours")
        gate(f"{tag}: time / XLA logsumexp", ratio(ours, case(job, f"{prefix}xla strong")), 0.65 * slack)
        gate(f"{tag}: time / XLA log_softmax", ratio(ours, case(job, f"{prefix}xla naive")), 0.33 * slack)
        gate(f"{tag}: time / Liger", ratio(ours, liger(tag)), 0.75 * slack)
        gate(f"{tag}: temporaries, MiB", ours.get("temporaries_mib"), 16)
        gate(f"{tag}: gradient error / contract", case(job, f"{prefix}contract").get("contract"), 1.0)
    if "main" in results:
        with_entropy, without = case("main", "ours, grpo_loss + entropy"), case("main", "ours, grpo_loss")
        gate("with entropy / without", ratio(with_entropy, without), 1.10)
    for name, value in results.get("check", {}).get("cases", {}).items():
        gate(f"check {name}", value.get("contract") if value.get("ok") else None, 1.0)
    for name, job in results.items():
        if isinstance(job, dict) and "exit" in job:
            gate(f"job {name} ends well", 0.0 if job["exit"] == 0 else None, 0.0)
    return out


# Parent.

JOBS = {
    "environment": job_environment,
    "check": job_check,
    "tiles": job_tiles,
    "main": job_main,
    "liger": job_liger,
    "shapes": job_shapes,
}


def run_jobs(args: argparse.Namespace) -> bool:
    out = Path(args.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    log = out.with_suffix(".log")
    log.write_text("")
    names = args.jobs.split(",") if args.jobs else (QUICK_JOBS if args.quick else tuple(JOBS))
    results: dict[str, Any] = {"command": " ".join(sys.argv)}
    for name in names:
        part = out.with_name(f"{out.stem}.{name}.part")
        command = [sys.executable, __file__, "--job", name, "--out", str(part), "--liger", args.liger]
        start = time.perf_counter()
        with log.open("a") as sink:
            print(f"\n===== {name}", file=sink, flush=True)
            try:
                code: Any = subprocess.run(
                    command + (["--quick"] if args.quick else []),
                    stdout=sink,
                    stderr=subprocess.STDOUT,
                    timeout=LIMITS[name],
                ).returncode
            except subprocess.TimeoutExpired:
                code = f"stopped after {LIMITS[name]} s"
        cases = json.loads(part.read_text()) if part.exists() else {}
        part.unlink(missing_ok=True)
        results[name] = {"exit": code, "wall_s": round(time.perf_counter() - start, 1), "cases": cases}
        out.write_text(json.dumps(results, indent=1))
        table(name, results[name])
    results["environment"] = results.get("environment", {}).get("cases", {}).get("environment", {})
    results["gates"] = gates(results)
    out.write_text(json.dumps(results, indent=1))
    print("--- gates")
    for g in results["gates"]:
        print(f"  {'PASS' if g['pass'] else 'FAIL'}  {g['name']:50s} {g['value']} <= {g['limit']:.4g}")
    sys.stdout.flush()
    return all(g["pass"] for g in results["gates"])


def table(name: str, job: dict[str, Any]) -> None:
    print(f"--- {name} (exit {job['exit']}, {job['wall_s']} s)")
    for case, value in job["cases"].items():
        keys = (
            "error",
            "ok",
            "contract",
            "far",
            "bits_equal",
            "ms",
            "min_ms",
            "temporaries_mib",
            "max_relative_distance",
            "extra_mib",
        )
        print(f"  {case:40s} " + "  ".join(f"{k}={value[k]}" for k in keys if k in value))
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--quick", action="store_true", help="the main shape only")
    parser.add_argument("--jobs", help=f"some of {','.join(JOBS)}")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--liger", default="carry/liger", help="folder with Liger-Kernel's package")
    args = parser.parse_args()
    if args.job is None:
        sys.exit(0 if run_jobs(args) else 1)
    allow_missing_annotations()
    extra = {"folder": args.liger} if args.job == "liger" else {}
    JOBS[args.job](Report(Path(args.out)), args.quick, **extra)


if __name__ == "__main__":
    main()
