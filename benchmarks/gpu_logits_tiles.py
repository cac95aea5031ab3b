"""Tiles of the Hopper row kernel at the suite's main shape: each variant timed, and compared with plain JAX.

    python benchmarks/gpu_logits_tiles.py --out tiles.json

For tuning: tiles are no option of the public call, so that they are no arms of ``logitless bench --suite gpu-logits``.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from logitless.logits.mosaic_gpu_layout import Tiles

from logitless import Objective
from logitless.core.stats import StatCotangents
from logitless.core.transform import LogitTransform
from logitless.lab.bench.case_arrays import Data
from logitless.lab.tools import timing
from logitless.logits import chunked, mosaic_gpu
from logitless.objectives.policy_loss import flat_inputs, loss_inputs
from logitless.objectives.token_program import token_program

CASE = dict(
    level="logits", tokens=4096, rows=1, hidden=0, vocab=151936, dtype="bfloat16", inputs="flat", seed=0,
    batch_kind="uniform", live=1.0, moving=1.0,
)  # fmt: skip
VARIANTS = {
    "w4 c4096 ring3 lag1": (4, 4096, 3, 1),
    "w4 c4096 ring2 lag1": (4, 4096, 2, 1),
    "w4 c4608 ring2 lag1": (4, 4608, 2, 1),
    "w4 c3072 ring4 lag1": (4, 3072, 4, 1),
}
"""Warpgroups, columns, ring, lag; slots are cut down to what fits."""


def program(y: Any, a: Any, old: Any) -> Any:
    """The objective's token program over flattened tokens."""
    n = y.shape[0]
    given = dict(advantages=a, old_logp=old.reshape(1, n))
    objective, inputs = loss_inputs("tiles", Objective(aggregation="dapo"), (1, n), given)
    return token_program(objective, flat_inputs(inputs))


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=Path, required=True)
    args = p.parse_args()
    (x,), rest = Data().of(CASE, {})
    x, y, plain = x[0], rest["targets"].reshape(-1), LogitTransform()

    @jax.jit
    def reference(x: Any, a: Any, old: Any) -> Any:
        own = program(y, a, old)
        s = chunked.token_stats(x, y, plain, x.shape[1], None, chunk=256)
        gl, ge = own.run(own.scalars, own.columns, s.logp, s.entropy)
        return chunked.dlogits(x, y, plain, x.shape[1], None, s, StatCotangents(gl, ge, 0 * gl), chunk=256)

    @jax.jit
    def distance(a: Any, b: Any) -> Any:
        # In units of the expected entry: p is at least 1e-9 here, so that a relative distance means something.
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return jnp.max(jnp.abs(a - b) / (jnp.abs(b) + 1e-12))

    exact = reference(x, rest["advantages"], rest["old_logp"])
    rows: dict[str, Any] = {}
    for name, (warpgroups, columns, ring, lag) in VARIANTS.items():
        tiles = Tiles(warpgroups, columns, 32, ring, lag, 512, 132)

        def kernel(x: Any, a: Any, old: Any, tiles: Tiles = tiles) -> Any:
            own = program(y, a, old)
            return mosaic_gpu.stats_and_dlogits(x, y, plain, x.shape[1], None, own, tiles=tiles)

        compiled = jax.jit(kernel).lower(x, rest["advantages"], rest["old_logp"]).compile()
        given = (x, rest["advantages"], rest["old_logp"])
        ms = statistics.median(timing.device_times(compiled, *given, repeats=20))
        rows[name] = dict(ms=ms, max_relative_distance=float(distance(compiled(*given)[1], exact)))
        print(f"{name:24s} {ms:8.4f} ms  {rows[name]['max_relative_distance']:.1e} from plain JAX", flush=True)
    args.out.write_text(json.dumps(dict(environment=timing.environment(), tiles=rows), indent=1) + "\n")


if __name__ == "__main__":
    main()
