"""Which calls the sparse backward of the TPU kernels serves, that it traces for every token count, and what a call gets
that the exact kernels serve instead."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

import flat_calls
from ahead_of_time import lines_of, needs_libtpu
from logitless import Objective, Sharding, metric_values, oracle
from logitless.head.dense_report import WithDenseReport
from logitless.head.sparse.backend import Sparse
from logitless.lab.bench import realistic
from logitless.lab.plan.mesh import parse_mesh, plan_mesh
from numerics import HeadCase, assert_same_bits
from sparse_cases import assert_as_good

KERNELS = dict(backend="pallas_tpu", interpret=True, sparse_backward="auto")
GSPO = Objective(level="sequence", eps_low=0.2, eps_high=0.2)
struct = jax.ShapeDtypeStruct


# -- every token count -------------------------------------------------------------------------------------------------

OPTIONS: list[dict[str, Any]] = [
    {},
    dict(mask=True),
    dict(objective=GSPO),
    dict(objective=Objective(entropy_coef=0.01), bias=True),
    dict(lora=True),
    dict(layout="hv"),
    dict(mask=True, objective=GSPO, bias=True),
]
UNEVEN = [1, 7, 64, 129, 200, 257, 300, 383, 511, 513, 700, 1000, 1025, 1300, 1537, 2000, 2047, 2049, 2100]


def trace(tokens: int, width: int, vocab: int, options: dict[str, Any]) -> None:
    """Loss and gradients of a call with ``sparse_backward="auto"``, traced and not compiled."""
    options = dict(options)
    vh = options.pop("layout", "vh") == "vh"
    arrays: dict[str, Any] = {
        "hidden": struct((1, tokens, width), jnp.bfloat16),
        "lm_head": struct((vocab, width) if vh else (width, vocab), jnp.bfloat16),
    }
    rest = {"targets": struct((1, tokens), jnp.int32), "advantages": struct((1,), jnp.float32)}
    if bias := options.pop("bias", False):
        (rest if bias == "frozen" else arrays)["bias"] = struct((vocab,), jnp.bfloat16)
    if options.pop("lora", False):
        rows, columns = arrays["lm_head"].shape
        arrays["lora"] = struct((rows, 4), jnp.bfloat16), struct((4, columns), jnp.bfloat16)
    if options.pop("mask", False):
        rest["mask"] = struct((1, tokens), jnp.bool_)

    def loss(arrays: Any, rest: Any) -> Any:
        return flat_calls.linear_grpo_loss(**arrays, **rest, head_layout="vh" if vh else "hv", **KERNELS, **options)[0]

    jax.eval_shape(jax.value_and_grad(loss), arrays, rest)


@pytest.mark.parametrize("sparse", ["off", 2.0**-8])
def test_gradients_trace_with_64_bit_numbers(sparse: str | float) -> None:
    """A count of int32 tokens stays int32; the sparse backward leaves such a call to the exact kernels."""
    h, w, y = jnp.ones((1, 7, 128), jnp.bfloat16), jnp.ones((300, 128), jnp.bfloat16), np.zeros((1, 7), np.int32)
    given = dict(
        advantages=np.ones(1, np.float32), mask=np.arange(7)[None] < 5, **KERNELS | {"sparse_backward": sparse}
    )
    with jax.enable_x64(True):
        gradients = jax.eval_shape(
            jax.grad(lambda h, w: flat_calls.linear_grpo_loss(h, w, y, **given)[0], (0, 1)), h, w
        )
    assert [g.dtype for g in gradients] == [jnp.bfloat16, jnp.bfloat16]


@pytest.mark.parametrize("tokens", [1, 300, 1000])
def test_token_counts_below_a_chunk_trace(tokens: int) -> None:
    """1000 and 300 are fewer than a group of hard rows, and no multiple of the kernels' token tile."""
    trace(tokens, 256, 6000, OPTIONS[tokens % 3])


@pytest.mark.parametrize("objective", [Objective(), GSPO], ids=["in forward", "later"])
def test_a_bias_without_a_gradient_traces(objective: Objective) -> None:
    """The sweep of the hard rows makes dbias beside dW, asked for or not."""
    trace(64, 128, 1024, dict(bias="frozen", objective=objective))


@pytest.mark.slow
@pytest.mark.parametrize("k", range(len(UNEVEN)), ids=UNEVEN.__getitem__)
def test_every_token_count_traces(k: int) -> None:
    for options in (OPTIONS[k % len(OPTIONS)], OPTIONS[(k + 3) % len(OPTIONS)]):
        trace(UNEVEN[k], 256, 6000, options)


@pytest.mark.slow
def test_token_counts_below_a_group_of_hard_rows_are_as_good_as_the_ordinary_path() -> None:
    """300 tokens, some of them hard: gradients against float64."""
    n, width, vocab = 300, 128, 4096
    h, w = realistic.realistic_head(n, width, vocab, 0, jnp.bfloat16)
    y = np.asarray(realistic.sample_targets(jnp.asarray(h), jnp.asarray(w), 0))
    case = HeadCase(h[None], w, y[None])
    rng = np.random.default_rng(0)
    rest = dict(advantages=rng.standard_normal((1, n)).astype(np.float32))

    def run(**options: Any) -> Any:
        def loss(h: Any, w: Any) -> Any:
            return flat_calls.linear_grpo_loss(
                h, w, jnp.asarray(case.targets), objective=Objective(), **rest, **options
            )

        return jax.jit(jax.grad(loss, (0, 1), has_aux=True))(*case.parameters())

    grads, metrics = run(**KERNELS)
    ordinary, _ = run(backend="chunked", chunk_size=64)
    values = metric_values(metrics)
    assert values["dense_chunks"] == 0 < values["hard_rows"] < 0.5 and values["backward_columns"] < 0.5
    _, *truth, _ = oracle.linear_grpo_loss(
        case.hidden, case.lm_head, case.targets, objective=Objective(), head_layout="vh", **rest
    )
    for name, got, off, true in zip(("dh", "dw"), grads, ordinary, truth, strict=True):
        assert_as_good(name, got, off, true)


_COMPILE = """
import jax, jax.numpy as jnp
from logitless import Options, linear_grpo_loss
from logitless.lab.tpu import aot

def f(h, w, y, a):
    def loss(h, w):
        return linear_grpo_loss(h, w, y, advantages=a, options=Options(sparse_backward="auto"))[0]

    return jax.value_and_grad(loss, (0, 1))(h, w)

for tokens, width, vocab in ((300, 256, 6000), (1000, 512, 20000)):
    shapes = [((1, tokens, width), jnp.bfloat16), ((vocab, width), jnp.bfloat16)]
    shapes += [((1, tokens), jnp.int32), ((1,), jnp.float32)]
    text = aot.compile_for("v6e:2x4", f, *(jax.ShapeDtypeStruct(*s) for s in shapes)).executable.as_text()
    assert "head_hard_" in text
print("compiled")
"""


@pytest.mark.slow
@needs_libtpu
def test_token_counts_below_a_group_of_hard_rows_compile_for_v6e() -> None:
    assert lines_of("-c", _COMPILE) == ["compiled"]


# -- what it does not serve --------------------------------------------------------------------------------------------

SMALL, LARGE = (128, 4096), (4096, 151936)
FSDP = Sharding(
    AbstractMesh((2, 4), ("data", "fsdp")),
    tokens=PartitionSpec(("data", "fsdp")),
    head=PartitionSpec("fsdp", None),
)
DATA = Sharding(AbstractMesh((8,), ("data",)), tokens=PartitionSpec("data"))
TENSOR = Sharding(AbstractMesh((8,), ("tensor",)), head=PartitionSpec("tensor", None))

NOT_SERVED: dict[str, tuple[tuple[int, int], dict[str, Any], str]] = {
    "an [H, V] head": (SMALL, dict(layout="hv"), "this one is [H, V]"),
    "LoRA": (SMALL, dict(lora=True), "does not serve LoRA"),
    "rounded logits": (SMALL, dict(logits_dtype="bfloat16"), "logits_dtype is bfloat16"),
    "a tiny tolerance": (SMALL, dict(sparse_backward=2.0**-13), "2^-13"),
    "a vocabulary shard": (SMALL, dict(sharding=TENSOR), "the vocabulary is sharded"),
    "FSDP": (SMALL, dict(sharding=FSDP), "under FSDP"),
    "a large dW over devices": (LARGE, dict(sharding=DATA), "8 parts one after the other"),
}


def explained(shape: tuple[int, int], options: dict[str, Any]) -> Any:
    options = KERNELS | options
    width, vocab = shape
    vh = options.pop("layout", "vh") == "vh"
    w = struct((vocab, width) if vh else (width, vocab), jnp.bfloat16)
    if options.pop("lora", False):
        options["lora"] = struct((w.shape[0], 4), jnp.bfloat16), struct((4, w.shape[1]), jnp.bfloat16)
    return flat_calls.explain(flat_calls.linear_grpo_loss, struct((8, 64, width), jnp.bfloat16), w, **options)


@pytest.mark.parametrize("name", NOT_SERVED)
def test_explain_says_why_the_exact_kernels_serve_a_call(name: str) -> None:
    shape, options, reason = NOT_SERVED[name]
    route, exact = explained(shape, options), explained(shape, options | dict(sparse_backward="off"))
    assert reason in route.exact_because and f"exact, and not by a sparse backward: {route.exact_because}" in route.way
    assert exact.exact_because is None and "sparse" not in str(exact)
    assert (route.backend, route.matmuls, route.tiles) == (exact.backend, exact.matmuls, exact.tiles)
    assert isinstance(route.runs, WithDenseReport) and route.runs.own == exact.runs


@pytest.mark.parametrize("options", [{}, dict(sharding=DATA), dict(objective=GSPO)], ids=str)
def test_explain_of_a_call_that_is_served(options: dict[str, Any]) -> None:
    route = explained(SMALL, options)
    assert route.exact_because is None and "K active columns" in route.way


@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("axes", ["data=8", "fsdp=8", "tensor=8", "data=2,fsdp=4"])
def test_the_plan_takes_the_path_of_the_call(axes: str, shape: tuple[int, int]) -> None:
    sizes = parse_mesh(axes)
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    head = PartitionSpec("fsdp" if sizes["fsdp"] > 1 else "tensor", None)
    where = Sharding(mesh, tokens=PartitionSpec(("data", "fsdp")), head=head)
    route = explained(shape, dict(sharding=where))
    plan, exact = (
        plan_mesh(*shape, 8 * 64, sizes, chip="v6e", compile=False, sparse_backward=mode) for mode in ("auto", "off")
    )
    assert plan.backend == route.backend
    assert (plan.work == exact.work) == (plan.shares is None) == (route.exact_because is not None)


def gradients(backend: dict[str, Any], *modes: Any) -> tuple[list[Any], np.ndarray]:
    """Of a small call of an [H, V] head, ``(metrics, gradients)`` under each ``sparse_backward``; and its mask."""
    rng = np.random.default_rng(0)
    h = jnp.asarray(rng.standard_normal((2, 16, 128)), jnp.bfloat16)
    w = jnp.asarray(rng.standard_normal((128, 256)), jnp.bfloat16)
    y, mask = jnp.asarray(rng.integers(0, 256, (2, 16))), np.arange(32).reshape(2, 16) % 3 > 0
    call = dict(advantages=jnp.array([1.0, -1.0]), mask=jnp.asarray(mask), head_layout="hv", **backend)

    def loss(mode: Any, h: Any, w: Any) -> Any:
        return flat_calls.linear_grpo_loss(h, w, y, sparse_backward=mode, **call)

    def run(h: Any, w: Any) -> Any:
        found = [jax.grad(functools.partial(loss, mode), (0, 1), has_aux=True)(h, w) for mode in modes]
        return found, loss(modes[0], h, w)[1]

    (found, alone) = jax.jit(run)(h, w)
    assert float(alone["dense_chunks"].count) == 0 == float(alone["left_out_mass"].count)  # no gradient was taken
    return found, mask


def assert_dense(found: list[Any], mask: np.ndarray) -> None:
    """The first is the second to the bit, and reports that nothing is left out of any live row."""
    (grads, metrics), (off_grads, off_metrics) = found
    assert_same_bits(grads, off_grads)
    values, off = metric_values(metrics), metric_values(off_metrics)
    assert values["dense_chunks"] == values["backward_columns"] == 1
    assert values["left_out_mass"] == values["left_out_mass_max"] == values["hard_rows"] == 0
    assert int(metrics["left_out_mass"].count) == mask.sum()
    assert {k: values[k] for k in off} == off


@pytest.mark.slow  # that it is the same backend and report, explain above and a cheaper backend below show
def test_the_exact_kernels_serve_it_with_their_own_bits_and_report_a_dense_pass() -> None:
    assert_dense(*gradients(dict(backend="pallas_tpu", interpret=True), "auto", "off"))


def test_an_exact_backend_reports_a_dense_pass() -> None:
    with mock.patch.object(Sparse, "supports", return_value="a test says so"):
        assert_dense(*gradients(dict(backend="chunked"), 2.0**-8, "off"))
