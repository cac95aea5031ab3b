"""Two processes through ``jax.distributed`` on loopback: the numbers of one, and an error when one is killed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

HERE = Path(__file__).parent
DEVICES = 2  # of each process


def worker(rank: int, port: int, folder: Path) -> None:
    """One of the processes: a step whose results it writes; then number 1 dies and number 0 takes another step."""
    import jax

    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank, heartbeat_timeout_seconds=10)

    from jax.experimental import multihost_utils
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    import logitless
    from logitless import Sharding
    from test_sharding import SEQUENCE, batch, loss

    data: dict[str, Any] = batch()
    mesh = jax.make_mesh((2, 2), ("data", "tensor"))  # tokens apart over processes, the vocabulary within each
    sharding = Sharding(mesh, tokens=P("data"), head=P("tensor", None))

    def placed(x: np.ndarray, spec: P) -> Any:
        return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda i: x[i])

    h, w = placed(data.pop("hidden"), P("data")), placed(data.pop("lm_head"), P("tensor", None))
    data = {k: placed(v, P("data")) for k, v in data.items()}

    def f(h: Any, w: Any, data: Any) -> Any:
        return loss(h, w, data, SEQUENCE, sharding=sharding)

    step = jax.jit(jax.value_and_grad(f, argnums=(0, 1), has_aux=True))
    results = multihost_utils.process_allgather(step(h, w, data), tiled=True)
    tiles = str(logitless.explain(logitless.linear_grpo_loss, h, w, sharding=sharding))
    leaves = [np.asarray(x).tolist() for x in jax.tree.leaves(results)]
    (folder / f"{rank}.json").write_text(json.dumps({"leaves": leaves, "tiles": tiles}))
    multihost_utils.sync_global_devices("both are done")
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    jax.block_until_ready(step(h, w, data))
    (folder / "unreachable").touch()


@pytest.mark.long
def test_two_processes_and_one_killed(tmp_path: Path) -> None:
    import jax

    from conftest import CHILD_ENVIRONMENT
    from test_sharding import SEQUENCE, alone, assert_same, batch

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | CHILD_ENVIRONMENT
    paths = (HERE.parents[1] / "src", HERE, HERE.parent / "support")
    environment["PYTHONPATH"] = os.pathsep.join(map(str, paths))
    logs = [tmp_path / f"{rank}.log" for rank in range(2)]
    both = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(port), str(tmp_path)], env=environment,
            stdout=log.open("w"), stderr=subprocess.STDOUT,
        )
        for rank, log in enumerate(logs)
    ]  # fmt: skip
    try:
        ended = [p.wait(timeout=150) for p in both]  # a survivor that hangs is an error here
    finally:
        for p in both:
            p.kill()
    assert ended[1] == -signal.SIGKILL, logs[1].read_text()[-3000:]
    assert ended[0] not in (0, -signal.SIGKILL) and not (tmp_path / "unreachable").exists()

    said = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert said[0] == said[1], "the processes disagree about results or tiles"
    expected = alone(batch(), SEQUENCE)
    tree = jax.tree.structure(expected)
    got = jax.tree.unflatten(tree, [np.asarray(x, np.float32) for x in said[0]["leaves"]])
    assert_same(got, expected)


if __name__ == "__main__":
    worker(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
