"""``logitless gradcheck``: is the kernel's loss and gradient the reference's, and how far is each from the truth?

Deterministic. Compares a backend with ``reference`` on the same inputs, and both with the float64 oracle where that
fits. Inputs are synthetic, or hidden states and head of a model's forward pass. With ``mesh`` the backend runs over
several devices, and the reference on one; on a CPU they are virtual ones, in a process of its own.

Gates: the loss difference, the gradient difference relative to its norm, and (with the oracle) the backend's error at
most ``contract`` times the reference's own, in norm and in the largest element (docs/numerics.md). With
``sparse_backward`` also the largest mass that it left out of a row, which must be within the tolerance.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from logitless import oracle
from logitless.bench import inputs, model_inputs, realistic
from logitless.head.api import linear_grpo_loss
from logitless.head.sparse import auto_tolerance
from logitless.head.sparse_report import SPARSE_METRICS
from logitless.logits.api import grpo_loss
from logitless.objectives.metrics import metric_values
from logitless.objectives.objective import Objective
from logitless.parallel.spec import Sharding
from logitless.planning.mesh import AXES, parse_mesh
from logitless.tools import child, timing
from logitless.tools.config import ConfigError, sparse_backward_of

ORACLE_ELEMENTS = 100_000_000
"""Of an array that the float64 oracle is asked for: it keeps a few of its size."""
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}


@dataclasses.dataclass
class GradcheckConfig:
    """Keys of a gradcheck configuration."""

    name: str = "gradcheck"
    level: str = "head"  # logits | head
    backend: str = "chunked"  # or reference, pallas_tpu, mosaic_gpu; auto: the best one here
    interpret: bool = False
    bwd_impl: str = "pallas"
    preset: str = ""  # trl | liger | verl | tunix | mllm-jax, or empty for a plain Objective
    objective: dict[str, Any] = dataclasses.field(default_factory=dict)
    batch: int = 2
    tokens: int = 64
    hidden: int = 128
    vocab: int = 1024
    dtype: str = "float32"
    logits_dtype: str = "float32"
    sparse_backward: Any = "off"  # off | auto | a mass (head level)
    inputs: str = "ordinary"  # ordinary | peaked | extreme | realistic (head level) | model
    model: str = ""  # inputs=model: an architecture's name (random weights), a folder of weights, or a .gguf file
    layers: int = 0  # inputs=model: only so many layers; 0: all
    mesh: str = ""  # data=2,fsdp=2,tensor=2: the backend over so many devices; empty: one
    temperature: float = 1.0
    old_logp_noise_scale: float = 0.1
    seed: int = 0
    oracle: bool = True
    max_abs_diff_loss: float = 1e-3  # relative to max(1, |loss|)
    max_rel_diff_grad: float = 2e-2  # of the difference in norm
    contract: float = 1.5
    timeout_s: int = 600  # of a process with virtual devices
    out: str = "runs/gradcheck.jsonl"
    wandb_mode: str = "disabled"  # online | offline | disabled
    wandb_project: str = "logitless"


def objective_of(c: GradcheckConfig) -> Objective:
    """The configured objective; its own errors become configuration errors."""
    fields = dict(c.objective)
    if c.temperature != 1.0:
        fields.setdefault("temperature", c.temperature)
    try:
        return Objective.preset(c.preset, **fields) if c.preset else Objective().replace(**fields)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"objective: {error}") from None


def _check(c: GradcheckConfig) -> None:
    for key, allowed in (
        ("level", ("logits", "head")),
        ("inputs", (*inputs.KINDS, "realistic", "model")),
        ("dtype", tuple(DTYPES)),
        ("logits_dtype", ("float32", "bfloat16")),
        ("wandb_mode", ("online", "offline", "disabled")),
    ):
        if getattr(c, key) not in allowed:
            raise ConfigError(f"{key}: {getattr(c, key)!r}, expected one of {', '.join(allowed)}")
    of_model = c.inputs == "model"
    if of_model != bool(c.model):
        raise ConfigError("inputs: 'model' needs model=NAME or a path, and model= needs inputs=model")
    for key in ("batch", "tokens", "hidden", "vocab"):
        least = 0 if key == "vocab" and of_model else 1  # 0: the model's own
        if getattr(c, key) < least:
            raise ConfigError(f"{key}: {getattr(c, key)}, expected at least {least}")
    c.sparse_backward = sparse_backward_of("sparse_backward", c.sparse_backward)
    if c.level == "logits" and (c.inputs == "realistic" or c.sparse_backward != "off"):
        raise ConfigError("level: logits, but inputs=realistic and sparse_backward are for level=head")
    if c.layers < 0:
        raise ConfigError(f"layers: {c.layers}, expected 0 or more")


def _axes(c: GradcheckConfig) -> dict[str, int]:
    try:
        axes = parse_mesh(c.mesh)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if c.batch % (axes["data"] * axes["fsdp"]):
        raise ConfigError(
            f"batch: {c.batch} rows do not split over data x fsdp = {axes['data'] * axes['fsdp']} devices"
        )
    return axes


def _sharding(c: GradcheckConfig) -> Sharding:
    """Rows over data and fsdp; the vocabulary over tensor, and that part of the head over fsdp."""
    mesh = jax.make_mesh(tuple(_axes(c).values()), AXES, axis_types=(AxisType.Auto,) * len(AXES))
    if c.level == "logits":
        return Sharding(mesh, tokens=P(("data", "fsdp")), vocab="tensor")
    return Sharding(mesh, tokens=P(("data", "fsdp")), head=P(("tensor", "fsdp")))


def _arrays(c: GradcheckConfig, objective: Objective) -> tuple[tuple[np.ndarray, ...], dict[str, Any]]:
    """``(differentiable arrays, the rest)``, on the host."""
    rng = np.random.default_rng(c.seed)
    rest = inputs.token_inputs(c.batch, c.tokens, max(c.vocab, 1), rng)
    dtype = DTYPES[c.dtype]
    hidden = None
    if c.inputs == "model":
        found = model_inputs.hidden_and_head(c.model, c.layers, c.vocab, c.batch, c.tokens, c.seed)
        hidden, rest["targets"] = found[:2], found[2]
    if c.level == "logits":
        z = inputs.logits(c.inputs, rest["targets"], c.vocab, rng) if hidden is None else hidden[0] @ hidden[1].T
        x: tuple[np.ndarray, ...] = (z.astype(dtype),)
        logp = oracle.token_stats(x[0], rest["targets"], temperature=c.temperature).logp
    else:
        if c.inputs == "realistic":
            states, head = realistic.realistic_head(c.batch * c.tokens, c.hidden, c.vocab, c.seed, dtype)
            rest["targets"] = np.asarray(
                realistic.sample_targets(jnp.asarray(states), jnp.asarray(head), c.seed)
            ).reshape(c.batch, c.tokens)
            hidden = states.reshape(c.batch, c.tokens, -1), head
        made = hidden or inputs.hidden_and_head(c.inputs, rest["targets"], c.hidden, c.vocab, rng)
        x = tuple(a.astype(dtype) for a in made)
        h, w = x
        logp = oracle.linear_token_stats(h, w, rest["targets"], temperature=c.temperature, head_layout="vh").logp
    noise = rng.standard_normal(rest["targets"].shape)
    rest["old_logp"] = (logp + c.old_logp_noise_scale * noise).astype(np.float32)
    if objective.beta is not None:
        rest["ref_logp"] = (logp + 0.1 * rng.standard_normal(noise.shape)).astype(np.float32)
    if objective.correction is not None:
        rest["rollout_logp"] = (rest["old_logp"] + 0.05 * rng.standard_normal(noise.shape)).astype(np.float32)
    return x, rest


def _run(
    c: GradcheckConfig, backend: str, objective: Objective, x: Any, rest: dict[str, Any]
) -> tuple[float, list[np.ndarray], dict[str, float]]:
    """``(loss, gradients, metrics)``."""
    kernel = backend in ("pallas_tpu", "mosaic_gpu")
    options: dict[str, Any] = dict(backend=None if backend == "auto" else backend, interpret=c.interpret and kernel)
    if c.mesh and backend != "reference":
        options["sharding"] = _sharding(c)
    if c.level == "logits":

        def loss(*arrays: jax.Array) -> Any:
            return grpo_loss(arrays[0], objective=objective, bwd_impl=c.bwd_impl, **rest, **options)  # type: ignore
    else:
        options |= dict(head_layout="vh", logits_dtype=c.logits_dtype)
        options |= {} if backend == "reference" else dict(sparse_backward=c.sparse_backward)

        def loss(*arrays: jax.Array) -> Any:
            return linear_grpo_loss(arrays[0], arrays[1], objective=objective, **rest, **options)

    step = jax.jit(jax.value_and_grad(loss, argnums=tuple(range(len(x))), has_aux=True))
    (value, metrics), grads = step(*(jnp.asarray(a) for a in x))
    return float(value), [np.asarray(g, np.float64) for g in grads], metric_values(metrics)


def _differences(name: str, a: np.ndarray, b: np.ndarray) -> dict[str, float]:
    gap = np.abs(a - b)
    largest = np.max(np.abs(a), initial=0.0)
    return {
        f"max_abs_diff_{name}": float(gap.max(initial=0.0)),
        f"max_rel_diff_{name}": float(gap.max(initial=0.0) / largest) if largest else 0.0,
        f"mean_abs_diff_{name}": float(gap.mean()),
        f"norm_rel_diff_{name}": float(np.linalg.norm(gap) / (np.linalg.norm(a) or 1.0)),
    }


def run(c: GradcheckConfig, say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Numbers and gates as one flat record; ``passed`` says whether every gate is met."""
    _check(c)
    objective = objective_of(c)
    if c.mesh and jax.device_count() < (devices := math.prod(_axes(c).values())):
        return _on_virtual_devices(c, devices, say)
    say("inputs" if c.inputs != "model" else f"the forward pass of {c.model}")
    x, rest = _arrays(c, objective)
    names = ["dlogits"] if c.level == "logits" else ["dhidden", "dlm_head"]
    try:
        say("reference")
        loss_ref, grads_ref, _ = _run(c, "reference", objective, x, rest)
        say(c.backend + (f" over {c.mesh}" if c.mesh else ""))
        loss_kernel, grads_kernel, metrics = _run(c, c.backend, objective, x, rest)
    except (NotImplementedError, TypeError, ValueError) as error:
        raise ConfigError(str(error)) from None
    record: dict[str, Any] = dict(timing.environment(), **{f"config/{k}": v for k, v in dataclasses.asdict(c).items()})
    record.update(loss_ref=loss_ref, loss_kernel=loss_kernel, abs_diff_loss=abs(loss_ref - loss_kernel))
    gates = {"loss": (record["abs_diff_loss"] / max(1.0, abs(loss_ref)), c.max_abs_diff_loss)}
    for name, a, b in zip(names, grads_ref, grads_kernel, strict=True):
        record.update(_differences(name, a, b))
        gates[f"{name} difference"] = (record[f"norm_rel_diff_{name}"], c.max_rel_diff_grad)
    if c.sparse_backward != "off":
        tolerance = auto_tolerance(DTYPES[c.dtype]) if c.sparse_backward == "auto" else c.sparse_backward
        record.update({k: None if math.isnan(metrics[k]) else metrics[k] for k in SPARSE_METRICS})
        gates["largest left-out mass"] = (metrics["left_out_mass_max"], tolerance)
    record["oracle"] = "compared" if c.oracle else "not asked for"
    if c.oracle and max(a.size for a in x) > ORACLE_ELEMENTS:
        record["oracle"] = f"left out: more than {ORACLE_ELEMENTS:,} elements"
    elif c.oracle:
        say("float64 oracle")
        if c.level == "logits":
            loss_true, *grads_true = oracle.grpo_loss(x[0], objective=objective, **rest)
        else:
            loss_true, dh, dw, _ = oracle.linear_grpo_loss(x[0], x[1], objective=objective, head_layout="vh", **rest)
            grads_true = [dh, dw]
        record["loss_oracle"] = loss_true
        for name, truth, a, b in zip(names, grads_true, grads_ref, grads_kernel, strict=True):
            _contract(record, gates, name, truth, a, b, x[0].dtype, c.contract)
    record["gates"] = {k: dict(value=v, limit=limit, ok=bool(v <= limit)) for k, (v, limit) in gates.items()}
    record["passed"] = all(g["ok"] for g in record["gates"].values())
    return record


def _on_virtual_devices(c: GradcheckConfig, devices: int, say: Callable[[str], None]) -> dict[str, Any]:
    """The same in a fresh process with so many virtual CPU devices; JAX cannot add them to a running one."""
    if jax.default_backend() != "cpu":
        raise ConfigError(f"mesh: {c.mesh} needs {devices} devices, there are {jax.device_count()}")
    say(f"a process with {devices} virtual CPU devices")
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}".strip()
    found = child.ask(
        "logitless.bench.arm",
        dict(gradcheck=dataclasses.asdict(c)),
        c.timeout_s,
        dict(XLA_FLAGS=flags, JAX_PLATFORMS="cpu"),
    )
    if "error" in found:
        raise ConfigError(found["error"].removeprefix("ConfigError: "))
    return found


def _contract(
    record: dict[str, Any],
    gates: dict[str, tuple[float, float]],
    name: str,
    truth: np.ndarray,
    ref: np.ndarray,
    kernel: np.ndarray,
    dtype: Any,
    limit: float,
) -> None:
    """The backend's error against float64 in units of the reference's.

    The reference may be lucky, so that its error has a floor: two units in the last place of float32 (a probability's
    and its cotangent's), or a quarter of one in the gradient's own dtype.
    """
    floor = max(2 * float(jnp.finfo(jnp.float32).eps), float(jnp.finfo(dtype).eps) / 4)
    for what, size in (("norm", np.linalg.norm), ("max", lambda v: np.max(np.abs(v), initial=0.0))):
        scale = float(size(truth)) or 1.0
        error_ref, error_kernel = (float(size(g - truth)) / scale for g in (ref, kernel))
        record[f"error_{what}_{name}_ref"] = error_ref
        record[f"error_{what}_{name}_kernel"] = error_kernel
        gates[f"{name} error / reference's ({what})"] = (error_kernel / max(error_ref, floor), limit)
