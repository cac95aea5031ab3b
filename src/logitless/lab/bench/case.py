"""A benchmark case: configuration and arms.

An arm is a program over the case's inputs. ``naive`` and ``strong`` are dense (``strong/f32`` and ``strong/bf16``
override the logits dtype); ``default`` is the library's call without options; ``kernel`` is the call with the case's
options, if any; ``kernel, sparse backward`` adds the sparse backward. ``arms`` declares more arms as changes to an
existing arm, and ``peers`` adds PyTorch's losses.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from logitless.lab.bench import states
from logitless.lab.tools.baselines import HEAD_BASELINES, LOGITS_BASELINES
from logitless.lab.tools.command_config import (
    AT_LEAST_0,
    AT_LEAST_1,
    ConfigError,
    check_common,
    check_fields,
    number,
    one_of,
    sparse_backward_of,
)  # fmt: skip
from logitless.lab.tools.shapes import MODELS

BASELINES = {"logits": tuple(LOGITS_BASELINES), "head": HEAD_BASELINES}
DISTILLATION_BASELINES = ("naive", "strong")
PEERS = {
    "logits": ("liger, in place", "liger"),
    "head": ("torch eager", "torch.compile", "cut_cross_entropy", "liger"),
    "distillation": ("trl, reverse_kl", "trl, forward_kl", "trl, jsd", "liger, jsd"),
}
SHORT = {"float32": "f32", "bfloat16": "bf16"}
CALLS = ("gradients", "loss", "logprobs")
KINDS = ("baseline", "library", "peer", "copy")


@dataclasses.dataclass
class Kernel:
    """The A/B switch."""

    enabled: bool = True
    backend: str = ""  # empty: the best one here
    bwd_impl: str = one_of("pallas", "jax")  # logits level
    sparse_backward: Any = "off"  # off | auto | a mass (head level): an arm of its own beside the exact one


@dataclasses.dataclass
class BenchConfig:
    """Keys of a benchmark configuration."""

    name: str = "bench"
    level: str = one_of("head", "logits")
    kernel: Kernel = dataclasses.field(default_factory=Kernel)
    baselines: list[str] = dataclasses.field(default_factory=lambda: ["naive", "strong"])
    arms: dict[str, Any] = dataclasses.field(default_factory=dict)  # more arms: {name: {of: an arm, what differs}}
    gates: dict[str, Any] = dataclasses.field(default_factory=dict)  # {name: [what, arm, other arm, limit]}
    model: str = ""  # a name of the shape table, in place of hidden and vocab
    tokens: int = number(1024, AT_LEAST_1)
    hidden: int = number(256, AT_LEAST_1)
    vocab: int = number(32000, AT_LEAST_1)
    rows: int = number(8, AT_LEAST_1)
    batch_kind: str = one_of("uniform", "rl")
    inputs: str = one_of("flat", "realistic", "on_policy", "real")  # head level: a trained policy's kind, or its own
    states: str = ""  # an .npz of real states, head and targets, for inputs=real; hidden and vocab are the file's
    live: float = number(1.0, "(0, 1]")  # share of the tokens that are not masked
    moving: float = number(1.0, "[0, 1]")  # share of the tokens whose advantage is not zero
    dtype: str = one_of("float32", "bfloat16", "float16", default="bfloat16")
    logits_dtype: str = one_of("float32", "bfloat16")
    head_grad_dtype: str = one_of("float32", "param")
    objective: dict[str, Any] = dataclasses.field(default_factory=lambda: {"aggregation": "dapo"})
    teacher: int = number(0, AT_LEAST_0)  # width of a teacher's (or reference's) hidden states; 0: there is none
    distillation: dict[str, Any] = dataclasses.field(default_factory=dict)  # a Distillation's fields: that loss
    seed: int = 0
    verify: bool = True
    check_rows: int = number(0, AT_LEAST_0)  # gradient rows at the true shape, compared with float64
    peaks: bool = True  # the device's peak for each arm, in a separate process
    warmup: int = number(1, AT_LEAST_0)  # calls before each turn
    repeats: int = number(3, AT_LEAST_1)  # calls of a turn
    rounds: int = number(7, AT_LEAST_1)  # turns of each arm
    timeout_s: int = number(600, AT_LEAST_1)
    out: str = "runs/bench.jsonl"
    wandb_mode: str = "disabled"
    wandb_project: str = "logitless"


@dataclasses.dataclass(frozen=True)
class Arm:
    """A program. ``batch`` and ``objective`` override keys of the case and its objective (or ``distillation``) for this
    arm."""

    kind: str  # one of KINDS
    form: str = ""  # which baseline or peer
    options: dict[str, Any] = dataclasses.field(default_factory=dict)  # of the library's call
    logits_dtype: str = "float32"
    call: str = "gradients"  # one of CALLS
    frozen_head: bool = False
    batch: dict[str, Any] = dataclasses.field(default_factory=dict)
    objective: dict[str, Any] = dataclasses.field(default_factory=dict)
    against: str = ""  # the arm to compare times with; empty: the dense form of the same kind
    source: str = ""  # another tree's src, whose library runs


def check(c: BenchConfig) -> None:
    """Refuse by name what cannot be run."""
    from logitless.core import registry  # not above: another tree's worker has this file, too, and may have no registry

    check_common(c.seed, c.wandb_mode)
    check_fields(c)
    known = registry.BACKENDS[c.level]
    if c.kernel.backend not in ("", *known):
        raise ConfigError(f"kernel.backend: {c.kernel.backend!r}, expected one of nothing, {', '.join(known)}")
    baselines = DISTILLATION_BASELINES if c.distillation else BASELINES[c.level]
    for b in c.baselines:
        form, _, short = b.partition("/")
        if form not in baselines or (short and (c.level == "logits" or short not in SHORT.values())):
            more = "" if c.level == "logits" else ", each with /f32 or /bf16 behind it for another logits dtype"
            raise ConfigError(f"baselines: {b!r}, expected some of {', '.join(baselines)}{more}")
    _check_teacher(c)
    if c.model:
        if c.model not in MODELS:
            raise ConfigError(f"model: {c.model!r}, expected one of {', '.join(MODELS)}")
        c.hidden, c.vocab = MODELS[c.model].hidden, MODELS[c.model].vocab
    if bool(c.states) != (c.inputs == "real"):
        raise ConfigError(
            f"states: {c.states!r} with inputs={c.inputs}; a file of states is for inputs=real, which needs one"
        )
    if c.states:
        c.hidden, c.vocab = states.check(c.states, c.tokens)
    c.kernel.sparse_backward = sparse_backward_of("kernel.sparse_backward", c.kernel.sparse_backward)
    if c.level == "logits" and (c.inputs != "flat" or c.kernel.sparse_backward != "off"):
        raise ConfigError("level: logits, but inputs other than flat and kernel.sparse_backward are for level=head")
    if c.tokens % c.rows:
        raise ConfigError(f"tokens: {c.tokens} do not split into {c.rows} rows")
    if not c.kernel.enabled and not c.baselines:
        raise ConfigError("kernel.enabled is false and there are no baselines: nothing to run")
    for gate, (_, a, b, _) in c.gates.items():
        for name in (a, b):
            if name not in (there := arms(c, peers=True)):
                raise ConfigError(f"gates: {gate!r} names the arm {name!r}, expected one of {', '.join(there)}")


def _check_teacher(c: BenchConfig) -> None:
    """Refuse what a case with a teacher cannot have."""
    if c.distillation and not c.teacher:
        raise ConfigError("distillation: needs a teacher; give the width of its hidden states, teacher=4096")
    if c.teacher and c.level == "logits":
        raise ConfigError("teacher: is for level=head")
    if c.teacher and c.inputs != "flat" and c.teacher != c.hidden:
        raise ConfigError(f"teacher: {c.teacher}, but with inputs={c.inputs} it is the policy's own width, {c.hidden}")
    if c.teacher and not c.distillation and c.baselines:
        raise ConfigError("baselines: there is no dense form with a reference's hidden states; give baselines=[]")


def arms(c: BenchConfig, *, peers: bool = False, source: str = "") -> dict[str, Arm]:
    """The arms by name; with ``source``, each of the library's is there twice, the second with that tree's library."""
    out: dict[str, Arm] = {b: _dense(c, b) for b in c.baselines}
    if c.kernel.enabled:
        out |= _library(c, out)
    for name, fields in c.arms.items():
        out[name] = _declared(c, out, name, dict(fields))
    if peers:
        dtype = c.logits_dtype if c.level == "logits" else "bfloat16"
        known = PEERS["distillation" if c.distillation else c.level] if c.distillation or not c.teacher else ()
        out |= {f"peer: {p}": Arm("peer", p, logits_dtype=dtype, objective=_of_peer(c, p)) for p in known}
    if source:
        for name, arm in list(out.items()):
            out[name] = out.pop(name)  # in order, each twin right behind its arm
            if is_ours(arm):
                out[twin(name)] = dataclasses.replace(arm, source=source, against="")
    return out


def _of_peer(c: BenchConfig, name: str) -> dict[str, Any]:
    """How the loss of a peer's arm differs from the case's."""
    kind = name.partition(", ")[2]
    return dict(divergence=kind) if c.distillation and c.distillation.get("divergence") != kind else {}


def is_ours(arm: Arm) -> bool:
    """Whether this checkout's library runs the arm."""
    return arm.kind == "library" and not arm.source


def twin(name: str) -> str:
    """The name of an arm's second self in another tree."""
    return f"{name} (other tree)"


def _dense(c: BenchConfig, name: str) -> Arm:
    form, _, short = name.partition("/")
    dtype = next((k for k, v in SHORT.items() if v == short), c.logits_dtype)
    return Arm("baseline", form, logits_dtype=c.dtype if c.level == "logits" else dtype)


def _library(c: BenchConfig, dense: dict[str, Arm]) -> dict[str, Arm]:
    plain = Arm("library", logits_dtype=c.dtype if c.level == "logits" else "float32")
    out: dict[str, Arm] = {}
    if c.level == "head" and "strong" in dense and c.logits_dtype != "float32" and "strong/f32" not in dense:
        out["strong/f32"] = _dense(c, "strong/f32")  # like with like: a call without options has float32 logits
    out["default"] = plain
    name, options = "kernel", dict(backend=c.kernel.backend) if c.kernel.backend else {}
    dtype = plain.logits_dtype
    if c.level == "logits" and c.kernel.bwd_impl != "pallas":
        name, options = f"kernel ({c.kernel.bwd_impl} backward)", options | dict(bwd_impl=c.kernel.bwd_impl)
    if c.level == "head":
        dtype = c.logits_dtype
        for key in ("logits_dtype", "head_grad_dtype"):
            if getattr(c, key) != "float32":
                options[key] = getattr(c, key)
    kernel = dataclasses.replace(plain, options=options, logits_dtype=dtype)
    if options:
        out[name] = kernel
    if c.kernel.sparse_backward != "off":
        sparse = dict(options, sparse_backward=c.kernel.sparse_backward)
        out[f"{name if options else 'default'}, sparse backward"] = dataclasses.replace(kernel, options=sparse)
    return out


def _declared(c: BenchConfig, known: dict[str, Arm], name: str, fields: dict[str, Any]) -> Arm:
    """An arm of ``c.arms``: the arm ``of`` with some fields changed; ``options`` are added to those it has."""
    of = fields.pop("of", "default")
    if of == "copy":
        return Arm("copy", logits_dtype=c.dtype)
    if of not in known:
        raise ConfigError(f"arms.{name}.of: {of!r}, expected copy or one of {', '.join(known)}")
    unknown = set(fields) - {f.name for f in dataclasses.fields(Arm)}
    if unknown:
        raise ConfigError(f"arms.{name}: {sorted(unknown)[0]!r} is not known")
    base = known[of]
    for key in ("options", "batch", "objective"):
        fields[key] = {**getattr(base, key), **dict(fields.get(key, {}))}
    fields.setdefault("logits_dtype", fields["options"].get("logits_dtype", base.logits_dtype))
    arm = dataclasses.replace(base, **fields)
    if arm.call not in CALLS:
        raise ConfigError(f"arms.{name}.call: {arm.call!r}, expected one of {', '.join(CALLS)}")
    return arm


def reference_of(name: str, all_arms: dict[str, Arm]) -> str | None:
    """The arm that ``name`` is compared with: the one it names, else the strongest dense form of the same logits dtype
    over the same call, else any dense form."""
    arm = all_arms[name]
    if arm.against:
        return arm.against if arm.against in all_arms else None
    dense = {k: a for k, a in all_arms.items() if a.kind == "baseline" and a.call == arm.call}
    same = {k: a for k, a in dense.items() if (a.logits_dtype, a.frozen_head) == (arm.logits_dtype, arm.frozen_head)}
    for pool in (same, dense):
        found = next((k for k, a in pool.items() if a.form == "strong"), next(iter(pool), None))
        if found is not None:
            return None if found == name else found
    return None


def source_of(path: str | Path) -> str:
    """The ``src`` of a checkout, or the folder itself, that holds another ``logitless``."""
    for candidate in (Path(path) / "src", Path(path)):
        if (candidate / "logitless" / "__init__.py").is_file():
            return str(candidate.resolve())
    raise ConfigError(f"--against {path}: no src/logitless in it; expected a checkout of this repository")
