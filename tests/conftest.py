"""How the tests run (devices, compiler, hypothesis), and batches of statistics judged by the float64 oracle."""

from __future__ import annotations

import dataclasses
import functools
import gc
import os
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from interpreted import by_numpy
from logitless import Objective, TokenStats, policy_loss

ON_CPU = os.environ.get("JAX_PLATFORMS") == "cpu"

# Eight CPU devices, for the sharded tests; what runs on one of them gives the same bits in the same time.
DEVICES = 8
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    jax.config.update("jax_num_cpu_devices", DEVICES)

# Most of the suite's time is XLA compiling. Programs are kept: for the other worker of this run, for processes
# that a test starts, and for the next run. The key is the program with its compiler and options, so nothing is stale.
OWN_FOLDER = Path(__file__).parents[1] / ".jax_cache"
COMPILED = Path(os.environ.get("JAX_COMPILATION_CACHE_DIR", OWN_FOLDER))
jax.config.update("jax_compilation_cache_dir", str(COMPILED))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
CHILD_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_NUM_CPU_DEVICES": str(DEVICES),  # a part of a compiled program's key
    "JAX_COMPILATION_CACHE_DIR": str(COMPILED),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": str(int(ON_CPU)),
}
"""For a process that a test starts to compile as the tests do, and to find what they have compiled. Not for compiling
for a TPU, nor for measurements."""


def pytest_sessionstart(session: pytest.Session) -> None:
    """Compiled programs leave the repository's folder after a week."""
    if not hasattr(session.config, "workerinput"):
        for program in OWN_FOLDER.glob("*"):
            if time.time() - program.stat().st_mtime > 7 * 24 * 3600:
                program.unlink(missing_ok=True)


QUICK = (
    "objectives/test_objective_dataclass.py",
    "objectives/test_disagreements.py",
    "oracle/test_oracle.py",
    "head/test_tiles.py",
    "head/test_head_numerics.py::test_contract[",
    "head/test_head_numerics.py::test_contract_with_options[everything-",
    "head/test_head_numerics.py::test_three_and_four_matmuls_agree[f32]",
    "logits/test_logits_numerics.py::test_contract_on_every_family[",
    "logits/test_logits_numerics.py::test_contract_with_options[everything-",
    "logits/test_logits_numerics.py::test_token_loss_and_general_way_agree",
    "mesh/test_sharding_errors.py",
    "plan/test_explain_and_plan.py",
    "test_bad_input.py",
    "test_cli.py::test_bad_usage_exits_with_2",
    "test_never.py::test_masked_tokens_of_a_loss_change_nothing[",
)
"""The core of the tests, for ``make quick``: beginnings of their names."""

REPEATS = (
    "head/test_head_mosaic_gpu.py::test_statistics[one_tile]",
    "head/test_head_mosaic_gpu.py::test_statistics[temperature]",
    "head/test_head_numerics.py::test_all_dead_batch_and_one_live_token[bf16-",
    "head/test_head_numerics.py::test_all_dead_batch_and_one_live_token[f32-reference]",
    "head/test_head_numerics.py::test_chunk_size_matters_no_more_than_the_matmul[bf16]",
    "head/test_head_numerics.py::test_contract_with_options[everything-f32-hv]",
    "head/test_head_numerics.py::test_contract_with_options[mask-bf16-",
    "head/test_head_numerics.py::test_contract_with_options[mask-f32-",
    "head/test_head_numerics.py::test_contract_with_options[softcap and scale-bf16-",
    "head/test_head_numerics.py::test_contract_with_options[softcap and scale-f32-",
    "head/test_head_numerics.py::test_contract_with_options[temperature per token-bf16-",
    "head/test_head_numerics.py::test_contract_with_options[temperature per token-f32-",
    "head/test_head_numerics.py::test_forward_is_the_same_to_the_bit_with_and_without_gradient[sequence-",
    "head/test_head_numerics.py::test_forward_is_the_same_to_the_bit_with_and_without_gradient[statistics-",
    "head/test_head_numerics.py::test_forward_is_the_same_to_the_bit_with_and_without_gradient[token-",
    "head/test_head_numerics.py::test_lora[bf16-hv]",
    "head/test_head_numerics.py::test_lora[f32-hv]",
    "head/test_head_numerics.py::test_lora[f32-vh]",
    "head/test_head_numerics.py::test_on_policy_ratio_is_exactly_one[bf16-False]",
    "head/test_head_numerics.py::test_real_vocabularies[50257-f32]",
    "head/test_head_numerics.py::test_three_and_four_matmuls_agree[bf16]",
    "head/test_head_pallas_tpu.py::test_all_dead[hv]",
    "head/test_head_pallas_tpu.py::test_columns_at_targets_are_exact[float32]",
    "head/test_head_pallas_tpu.py::test_contract[bf16 hv]",
    "head/test_head_pallas_tpu.py::test_contract[bf16 logits]",
    "head/test_head_pallas_tpu.py::test_contract[bf16 vh]",
    "head/test_head_pallas_tpu.py::test_contract[dead tiles, hv]",
    "head/test_head_pallas_tpu.py::test_contract[dead tiles]",
    "head/test_head_pallas_tpu.py::test_contract[f32 vh]",
    "head/test_head_pallas_tpu.py::test_contract[one live token]",
    "head/test_head_pallas_tpu.py::test_contract[one token]",
    "head/test_head_pallas_tpu.py::test_contract[padding fills whole tiles]",
    "head/test_head_pallas_tpu.py::test_contract[peaked]",
    "head/test_head_pallas_tpu.py::test_contract[per-token temperature, bias]",
    "head/test_head_pallas_tpu.py::test_contract[ragged tokens, hv, per-token temperature, bias]",
    "head/test_head_pallas_tpu.py::test_contract[ragged tokens, hv]",
    "head/test_head_pallas_tpu.py::test_contract[ragged tokens]",
    "head/test_head_pallas_tpu.py::test_contract[temperature and scale]",
    "head/test_head_pallas_tpu.py::test_contract[tiny vocabulary]",
    "head/test_head_pallas_tpu.py::test_kernels_lower_whatever_the_default_precision_is[high]",
    "head/test_kept_exponentials.py::test_contract[[H, V], every option]",
    "head/test_kept_exponentials.py::test_contract[some, in dW's place]",
    "head/test_mosaic_gpu_sparse.py::test_gradients_are_as_good_as_the_exact_path_s[clip-collapsed]",
    "head/test_active_rows.py::test_rows_in_place_and_the_others_exact[640-640-384-last]",
    "head/test_active_rows.py::test_rows_in_place_and_the_others_exact[655-655-384-dense]",
    "head/test_sparse_backward.py::test_auto_is_as_good_as_the_ordinary_path[f32]",
    "head/test_sparse_backward.py::test_lora_over_a_frozen_head[gspo-vh]",
    "logits/test_constant_temperature.py::test_a_loss_of_logits[mosaic_gpu-",
    "logits/test_constant_temperature.py::test_statistics_of_logits[mosaic_gpu-",
    "logits/test_constant_temperature.py::test_statistics_of_logits[reference-",
    "logits/test_constant_temperature.py::test_statistics_of_the_head[reference-",
    "logits/test_logits_mosaic_gpu.py::test_statistics_and_dlogits_in_one_pass[3-523-523-float16-",
    "logits/test_logits_mosaic_gpu.py::test_statistics_and_dlogits_in_one_pass[3-640-640-float32-",
    "logits/test_logits_numerics.py::test_contract_with_options[mask-bf16]",
    "logits/test_logits_numerics.py::test_contract_with_options[padding-bf16]",
    "logits/test_logits_numerics.py::test_contract_with_options[scale-",
    "logits/test_logits_numerics.py::test_contract_with_options[softcap-",
    "logits/test_logits_numerics.py::test_contract_with_options[temperature per token-",
    "logits/test_logits_numerics.py::test_contract_with_options[temperature-bf16]",
    "logits/test_logits_numerics.py::test_forward_is_the_same_to_the_bit_with_and_without_gradient[bf16]",
    "logits/test_logits_numerics.py::test_real_vocabularies[50257-f32]",
    "logits/test_logits_pallas_tpu.py::test_contract[n16-v12365-",
    "logits/test_logits_pallas_tpu.py::test_contract[n33-v1187-dtypebfloat16-deadTrue]",
    "logits/test_logits_pallas_tpu.py::test_contract[n33-v1187-temperaturetoken-",
    "logits/test_logits_pallas_tpu.py::test_contract[n7-v12365]",
    "logits/test_logits_pallas_tpu.py::test_contract[n7-v300-dtypebfloat16-width128]",
    "logits/test_logits_pallas_tpu.py::test_contract[n7-v300]",
    "logits/test_logits_pallas_tpu.py::test_no_races[128]",
    "logits/test_logits_pallas_tpu.py::test_tiny_vocabularies[127]",
    "mesh/test_parallel_sparse.py::test_within_the_contract_and_dense_where_flat[data x fsdp, on the hidden dimension]",
    "mesh/test_parallel_sparse.py::test_within_the_contract_and_dense_where_flat[data x sequence x tensor",
    "mesh/test_parallel_sparse.py::test_within_the_contract_and_dense_where_flat[vocabulary-parallel]",
    "mesh/test_sharding.py::test_equals_one_device[chunked-data x sequence x tensor, fsdp over data-token]",
    "mesh/test_sharding.py::test_equals_one_device[pallas_tpu-data x sequence x tensor",
    "mesh/test_sharding_calls.py::test_a_head_that_is_gathered_in_parts[token]",
    "mesh/test_sharding_calls.py::test_fuzz_over_meshes_and_specs[1]",
    "mesh/test_sharding_calls.py::test_fuzz_over_meshes_and_specs[3]",
    "mesh/test_sharding_calls.py::test_fuzz_over_meshes_and_specs[4]",
    "mesh/test_sharding_calls.py::test_inside_a_users_own_shard_map[pallas_tpu]",
    "mesh/test_sharding_calls.py::test_logits[chunked-sequence-tensor]",
    "mesh/test_sharding_calls.py::test_logits[chunked-token-None]",
    "mesh/test_sharding_calls.py::test_logits[pallas_tpu-token-None]",
    "mesh/test_sharding_calls.py::test_logits[reference-token-None]",
    "mesh/test_sharding_calls.py::test_logits[reference-token-tensor]",
    "mesh/test_sharding_calls.py::test_plain_jit_over_sharded_arguments[reference]",
    "plan/test_tpu_aot_api.py::test_public_losses_compile_and_fit",
    "plan/test_tpu_aot_head.py::test_compiles_and_fits[",
    "plan/test_tpu_aot_logits.py::test_compiles_within_its_memory[v5",
    "plan/test_tpu_generations.py::test_one_token_and_wide_rows_compile_on_every_generation[",
    "test_transformations.py::test_transformations_agree_with_a_plain_loop[head-sequence-chunked]",
    "test_transformations.py::test_transformations_agree_with_a_plain_loop[head-statistics-reference]",
    "test_transformations.py::test_transformations_agree_with_a_plain_loop[logits-sequence-chunked]",
    "test_transformations.py::test_transformations_agree_with_a_plain_loop[logits-statistics-chunked]",
    "test_transformations.py::test_transformations_agree_with_a_plain_loop[logits-statistics-reference]",
    "train/test_train_arms.py::test_abc",
    "train/test_train_loop.py::test_micro_batches_add_up_to_one_batch[{aggregation: dapo}]",
    "train/test_train_packed.py::test_a_packed_update_is_the_padded_one[dapo]",
    "train/test_train_packed.py::test_a_trainer_that_packs_takes_the_same_steps",
    "train/test_train_packed.py::test_an_update_over_a_mesh_is_that_of_one_device[mesh0-dapo",
    "train/test_train_settings.py::test_the_kl_is_measured_to_the_initial_policy",
)
"""Beginnings of the names of what only repeats a case of ``make test`` at another shape, dtype or topology, and takes
seconds: ``make test-slow`` runs it."""


LONG = (
    "head/test_pallas_tpu_sparse.py::test_calibrated_rows_as_good",
    "mesh/test_distributed.py",
    "mesh/test_sharding_aot.py::test_eight_chips",
    "plan/test_tpu_aot_logits.py::test_compiles_within_its_memory",
    "plan/test_tpu_cli.py::test_compile_reports",
    "train/test_ab_replay.py",
    "train/test_train_checkpoints.py::test_killed_and_resumed",
    "train/test_train_loop.py::test_ab_runs_both_arms",
    "train/test_train_loop.py::test_the_tiny_run_learns",
)
"""Tests of ten seconds and more: they run first, so that no worker ends alone with one of them."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.nodeid.removeprefix("tests/").startswith(LONG))
    for item in items:
        name = item.nodeid.removeprefix("tests/")
        if name.startswith(QUICK):
            item.add_marker("quick")
        if name.startswith(REPEATS):
            item.add_marker("slow")


def pytest_collection_finish() -> None:
    """What was imported and collected stays: no garbage collection has to look at it again. What tracing makes goes by
    itself, nearly all of it: looking every 700 objects for cycles would be 4 % of a run."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """On a CPU, programs are compiled without LLVM's optimisations, in two thirds of the time.

    The maths is the same, its order of additions and its fused multiply-adds are not: what compares bits, or counts
    ulps, or measures, is marked ``optimized`` and is compiled as users compile it.
    """
    jax.config.update("jax_disable_most_optimizations", ON_CPU and item.get_closest_marker("optimized") is None)


# No deadline, since a first call compiles; derandomised, so that a run repeats.
hypothesis.settings.register_profile("logitless", deadline=None, derandomize=True)
hypothesis.settings.load_profile("logitless")

POLICY_LEVELS = [
    ("clip", "token"),
    ("clip", "sequence"),
    ("clip", "sequence_token"),
    ("cispo", "token"),
    ("cispo", "sequence"),
    ("sapo", "token"),
    ("sapo", "sequence"),
    ("vespo", "token"),
    ("vespo", "sequence"),
    ("gmpo", "token"),
    ("reinforce", "token"),
]
"""Every legal policy and level."""
AGGREGATIONS = ["grpo", "bnpo", "dr_grpo", "dapo", "luspo"]


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """A loss with its gradients and metrics, on the host. Metrics are made when they are read: operation by operation
    they are more than half of the time of a small loss."""

    loss: np.ndarray
    dlogp: np.ndarray
    dentropy: np.ndarray
    make_metrics: Callable[[], dict[str, Any]]

    @functools.cached_property
    def metrics(self) -> dict[str, Any]:
        return self.make_metrics()


def objective_of(policy: str, level: str = "token", aggregation: str = "grpo", **fields: Any) -> Objective:
    """An Objective with the numbers its policy and aggregation need to do something on ``random_batch``."""
    if aggregation == "dr_grpo":
        fields.setdefault("max_length", 7.0)
    if policy == "cispo":
        fields.setdefault("eps_high", 1.3 if fields.get("cispo_bound", "raw") == "raw" else 0.3)
    return Objective(policy=policy, level=level, aggregation=aggregation, **fields)


def random_batch(
    seed: int = 0, *, layout: str = "rows", shape: tuple[int, int] = (4, 6)
) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
    """``(logp, entropy, loss inputs)``, float32, with holes in the mask and (``rows``, 4 or more) an empty row.

    ``layout``: ``rows`` with advantages ``[B]``, ``tokens`` with ``[B, T]``, ``packed`` with contiguous segments, and
    ``scattered`` with segments whose tokens are not adjacent.
    """
    rng = np.random.default_rng(seed)

    def normal(scale: float) -> np.ndarray:
        return (scale * rng.normal(size=shape)).astype(np.float32)

    logp = -rng.exponential(size=shape).astype(np.float32)
    entropy = rng.exponential(size=shape).astype(np.float32)
    mask = rng.random(shape) < 0.8
    mask[0, 0] = True
    if shape[0] > 3:
        mask[2] = False
    advantages = normal(1.0)
    inputs: dict[str, Any] = {
        "advantages": advantages[:, 0] if layout == "rows" else advantages,
        "mask": mask,
        "old_logp": logp - normal(0.4),
        "ref_logp": logp + normal(0.9),
        "rollout_logp": logp - normal(0.5),
    }
    if layout == "packed":
        inputs["segment_ids"] = np.cumsum(rng.random(shape) < 0.4, axis=1).astype(np.int32)
    elif layout == "scattered":
        inputs["segment_ids"] = rng.integers(-1, 3, shape).astype(np.int32)
    return logp, entropy, inputs


def token_stats(logp: Any, entropy: Any) -> TokenStats:
    """Statistics as ``logprobs`` would return them; the fields that no loss reads are filled in."""
    logp, entropy = jnp.asarray(logp, jnp.float32), jnp.asarray(entropy, jnp.float32)
    unread = dict.fromkeys(STAT_FIELDS, jnp.zeros_like(logp))
    return TokenStats(**dict(unread, logp=logp, entropy=entropy, is_top1=jnp.zeros(logp.shape, bool)))


def _with_gradients(objective: Objective, logp: jax.Array, entropy: jax.Array, inputs: dict[str, Any]) -> Any:
    def loss(lp: jax.Array, h: jax.Array) -> Any:
        return policy_loss(token_stats(lp, h), objective=objective, **inputs)

    return jax.value_and_grad(loss, (0, 1), has_aux=True)(logp, entropy)


def without_metrics() -> AbstractContextManager[Any]:
    """Losses have none."""
    return mock.patch("logitless.objectives.metrics.loss_metrics", return_value={})


def metrics_of(objective: Objective, logp: Any, entropy: Any, **inputs: Any) -> dict[str, Any]:
    """Those of ``logitless.policy_loss``."""
    statistics = np.asarray(logp, np.float32), np.asarray(entropy, np.float32)
    return by_numpy(lambda lp, h: policy_loss(token_stats(lp, h), objective=objective, **inputs)[1], *statistics)


def evaluate(objective: Objective, logp: Any, entropy: Any, **inputs: Any) -> Evaluation:
    """``logitless.policy_loss`` and its gradients by ``logp`` and ``entropy``."""
    statistics = np.asarray(logp, np.float32), np.asarray(entropy, np.float32)
    with without_metrics():
        (value, _), gradients = by_numpy(lambda lp, h: _with_gradients(objective, lp, h, inputs), *statistics)
    return Evaluation(value, *gradients, functools.partial(metrics_of, objective, *statistics, **inputs))


def half(cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Every other case by default, every value of a parameter among them; the others only repeat: ``slow``."""
    return [pytest.param(*case, marks=pytest.mark.slow if i % 2 else ()) for i, case in enumerate(cases)]


SIDE_BY_SIDE = 4
"""Always as many, for operations are compiled once for each shape."""


def evaluate_all(cases: list[tuple[Objective, Any, Any, dict[str, Any]]], *, metrics: bool = False) -> list[Evaluation]:
    """:func:`evaluate` for cases ``(objective, logp, entropy, inputs)``.

    Those that differ in numbers alone, not in a choice, a shape or in what is given, run side by side in the time of
    one: the objective's numbers are leaves, too.
    """
    alike: dict[Any, list[int]] = {}
    flat = [jax.tree.flatten(jax.tree.map(np.asarray, case)) for case in cases]
    for i, (leaves, structure) in enumerate(flat):
        alike.setdefault((structure, tuple(x.shape for x in leaves)), []).append(i)
    out: dict[int, Evaluation] = {}
    for (structure, _), members in alike.items():
        if len(members) == 1:
            objective, logp, entropy, inputs = cases[members[0]]
            out[members[0]] = evaluate(objective, logp, entropy, **inputs)
            continue
        for start in range(0, len(members), SIDE_BY_SIDE):
            some = (members[start : start + SIDE_BY_SIDE] + SIDE_BY_SIDE * members[-1:])[:SIDE_BY_SIDE]
            stacked = [np.stack(same) for same in zip(*(flat[i][0] for i in some), strict=True)]
            floats = [x.astype(np.float32) if x.dtype == np.float64 else x for x in stacked]
            with nullcontext() if metrics else without_metrics():
                given = jax.tree.unflatten(structure, floats)
                (value, found), (dlogp, dentropy) = by_numpy(jax.vmap(_with_gradients), *given)
            host = (value, dlogp, dentropy, found)
            for place, i in enumerate(some):
                value, dlogp, dentropy, found = jax.tree.map(lambda x, j=place: x[j], host)
                out[i] = Evaluation(value, dlogp, dentropy, lambda m=found: m)
    return [out[i] for i in range(len(cases))]


def evaluate_each(objective: Objective, batches: list[tuple[Any, Any, dict[str, Any]]]) -> list[Evaluation]:
    """:func:`evaluate` for batches ``(logp, entropy, inputs)`` of one shape, side by side, metrics included."""
    return evaluate_all([(objective, *batch) for batch in batches], metrics=True)
