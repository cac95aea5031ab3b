"""The suites that were made for one Hopper GPU: every arm of the head, of the sparse backward and of given logits, with
the bars that the project holds itself to."""

from __future__ import annotations

from typing import Any

from logitless.lab.bench.case import BenchConfig
from logitless.lab.bench.gradcheck_config import GradcheckConfig

Case = BenchConfig | GradcheckConfig
GSPO = dict(level="sequence", aggregation="grpo")
BF16: dict[str, Any] = dict(dtype="bfloat16", logits_dtype="bfloat16", head_grad_dtype="param")
HEAD_SHAPES = ((8192, 4096, 151936), (16384, 1536, 151936), (8192, 2304, 256000))
LOGITS_SHAPES = ((4096, 151936), (16384, 128256), (4096, 262144), (4096, 151643))
PEERS = "peer: "
ROOM = 2_600_000_000
"""Bytes for logits and dlogits of the chunks that the exact head takes by itself at the first of these shapes."""


def gpu_head() -> list[Case]:
    """The fused head: gradients, loss alone, log-probabilities, frozen head, few live or moving tokens, GSPO."""
    arms: dict[str, Any] = {
        "strong, frozen head": dict(of="strong", frozen_head=True),
        "strong, loss alone": dict(of="strong", call="loss"),
        "strong/f32, loss alone": dict(of="strong/f32", call="loss"),
        "kernel, dW in float32": dict(of="kernel", options=dict(head_grad_dtype="float32")),
        "kernel, frozen head": dict(of="kernel", frozen_head=True),
        "kernel, half live": dict(of="kernel", batch=dict(live=0.5), against="strong"),
        "kernel, a quarter live": dict(of="kernel", batch=dict(live=0.25), against="strong"),
        "kernel, half moving": dict(of="kernel", batch=dict(moving=0.5), against="kernel"),
    }
    for name, dense in (("kernel", "strong"), ("default", "strong/f32")):
        arms[f"{name}, GSPO"] = dict(of=name, objective=GSPO, against=dense)
        arms[f"{name}, loss alone"] = dict(of=name, call="loss")
        arms[f"{name}, log-probabilities"] = dict(of=name, call="logprobs", against=f"{dense}, loss alone")
    gates: dict[str, Any] = {
        "no options: time / strong, f32": ("time", "default", "strong/f32", 1.00),
        "no options: time / naive, f32": ("time", "default", "naive/f32", 0.55),
        "no options: memory / strong, f32": ("memory", "default", "strong/f32", 0.43),
        "bf16, dW in param dtype: time / strong": ("time", "kernel", "strong", 1.00),
        "bf16, dW in param dtype: time / naive": ("time", "kernel", "naive", 0.95),
        "bf16, dW in param dtype: memory / strong": ("memory", "kernel", "strong", 0.16),
        "bf16, dW in float32: time / strong": ("time", "kernel, dW in float32", "strong", 1.04),
        "bf16, dW in float32: memory / strong": ("memory", "kernel, dW in float32", "strong", 0.53),
        "50 % live: time / strong": ("time", "kernel, half live", "strong", 0.55),
        "25 % live: time / strong": ("time", "kernel, a quarter live", "strong", 0.29),
        "half zero cotangents: time / without": ("time", "kernel, half moving", "kernel", 0.72),
        "frozen head: time / strong frozen": ("time", "kernel, frozen head", "strong, frozen head", 1.00),
        "frozen head: memory / strong frozen": ("memory", "kernel, frozen head", "strong, frozen head", 0.16),
        "GSPO: time / strong": ("time", "kernel, GSPO", "strong", 1.40),
        "GSPO: memory / strong": ("memory", "kernel, GSPO", "strong", 0.40),
        "forward only: time / strong": ("time", "kernel, loss alone", "strong, loss alone", 1.00),
        "forward only: memory / strong": ("memory", "kernel, loss alone", "strong, loss alone", 0.30),
        "log-probabilities, f32 logits: time / strong": (
            "time", "default, log-probabilities", "strong/f32, loss alone", 1.00),
        "log-probabilities, f32 logits: memory / strong": (
            "memory", "default, log-probabilities", "strong/f32, loss alone", 0.30),
    }  # fmt: skip
    baselines = ["naive", "strong", "checkpointed", "naive/f32", "strong/f32"]
    shared: dict[str, Any] = dict(baselines=baselines, arms=arms, gates=gates, rows=8, peaks=False, rounds=5, **BF16)
    return [BenchConfig(f"head {t}x{h}x{v}", tokens=t, hidden=h, vocab=v, **shared) for t, h, v in HEAD_SHAPES]


def gpu_sparse() -> list[Case]:
    """The sparse backward as a user gets it (``sparse_backward="auto"`` and nothing else): on data of a trained
    policy's kind, its own completions and others' text; on an RL batch, and on flat logits, where it has nothing to
    leave out. ``kernel`` is the form that stores bfloat16 logits."""
    sparse = ", sparse backward"
    own = f"default{sparse}"
    asked: dict[str, Any] = dict(of="default", options=dict(sparse_backward="auto"))
    few: dict[str, Any] = {
        own: asked,
        f"{own}, RL batch": dict(asked, batch=dict(batch_kind="rl", rows=32, live=0.25), against="strong"),
    }
    more: dict[str, Any] = {
        **few,
        "default, flat": dict(of="default", batch=dict(inputs="flat")),
        f"{own}, flat": dict(asked, batch=dict(inputs="flat"), against="default, flat"),
        f"{own}, flat, with room": dict(
            of="default", options=dict(sparse_backward="auto", memory_budget=ROOM), batch=dict(inputs="flat"),
            against="default, flat"),
        f"{own}, GSPO": dict(asked, objective=GSPO, against="strong"),
    }  # fmt: skip

    def gates(bar: float, flat: bool) -> dict[str, Any]:
        out: dict[str, Any] = {
            "time / strong": ("time", own, "strong", bar),
            "temporaries / strong": ("memory", own, "strong", 0.05),
            "RL batch: time / strong": ("time", f"{own}, RL batch", "strong", 0.12),
        }
        if flat:
            out["no sparse backward, no options: time / strong, f32"] = ("time", "default", "strong/f32", 1.00)
            out["flat: time / exact"] = ("time", f"{own}, flat", "default, flat", 1.03)
            out["flat, with room: time / exact"] = ("time", f"{own}, flat, with room", "default, flat", 1.03)
        return out

    shared: dict[str, Any] = dict(baselines=["strong", "strong/f32"], rows=8, peaks=False, rounds=5, **BF16)
    checks = (
        ("stored, bf16 logits", "bfloat16", 256, 16384),
        ("screened, f32 logits", "float32", 256, 16384),
        ("screened, f32 logits, a whole vocabulary", "float32", 640, 151936),  # no larger: float64
    )
    wide, long = HEAD_SHAPES[:2]
    real = (8192, 1536, 151936)

    def name(shape: tuple[int, int, int], policy: str) -> str:
        return f"sparse {'x'.join(map(str, shape))}, {policy}"

    def sizes_of(shape: tuple[int, int, int]) -> dict[str, Any]:
        return dict(zip(("tokens", "hidden", "vocab"), shape, strict=True))

    def case(shape: tuple[int, int, int], policy: str, inputs: str, arms: Any, bar: float) -> BenchConfig:
        bars = gates(bar, arms is more)
        return BenchConfig(name(shape, policy), arms=arms, gates=bars, inputs=inputs, **sizes_of(shape), **shared)

    return [
        *(
            GradcheckConfig(
                name=f"sparse, {form}", inputs="realistic", sparse_backward="auto", dtype="bfloat16",
                logits_dtype=dtype, batch=8, tokens=32, hidden=hidden, vocab=vocab, chunk_size=128, backend="auto",
                objective=dict(aggregation="dapo"),
            )
            for form, dtype, hidden, vocab in checks
        ),
        case(wide, "on-policy", "on_policy", more, 0.37),
        case(long, "on-policy", "on_policy", few, 0.42),
        case(wide, "teacher-forced", "realistic", few, 0.45),
        # A model's own states (states=FILE.npz) beside the generator's at their shape: recorded, no bar.
        BenchConfig(name(real, "real states"), arms=few, inputs="real", tokens=real[0], **shared),
        BenchConfig(name(real, "on-policy"), arms=few, inputs="on_policy", **sizes_of(real), **shared),
        BenchConfig(name(real, "teacher-forced"), arms=few, inputs="realistic", **sizes_of(real), **shared),
    ]  # fmt: skip


def gpu_distill() -> list[Case]:
    """Distillation losses and the exact KL to a reference: dense forms, the library's own, few live tokens; on data of
    a trained policy's kind the sparse backward beside them."""
    arms: dict[str, Any] = {"default, a quarter live": dict(of="default", batch=dict(live=0.25), against="strong/f32")}
    for kind in ("forward_kl", "jsd"):
        for base in ("strong", "strong/f32", "default"):
            against = {} if base != "default" else dict(against=f"strong/f32, {kind}")
            arms[f"{base}, {kind}"] = dict(of=base, objective=dict(divergence=kind), **against)
    gates: dict[str, Any] = {
        "reverse KL: time / strong, f32": ("time", "default", "strong/f32", 0.95),
        "reverse KL: memory / strong, f32": ("memory", "default", "strong/f32", 0.15),
        "forward KL: time / strong, f32": ("time", "default, forward_kl", "strong/f32, forward_kl", 0.95),
        "JSD: time / strong, f32": ("time", "default, jsd", "strong/f32, jsd", 0.95),
        "reverse KL: time / TRL": ("time", "default", f"{PEERS}trl, reverse_kl", 0.65),
        "forward KL: time / TRL": ("time", "default, forward_kl", f"{PEERS}trl, forward_kl", 0.65),
        "JSD: time / TRL": ("time", "default, jsd", f"{PEERS}trl, jsd", 0.55),
        "25 % live: time / strong, f32": ("time", "default, a quarter live", "strong/f32", 0.27),
    }
    asked = dict(of="kernel", options=dict(sparse_backward="auto"))
    few = dict(sparse_backward="auto", chunk_size=256)  # few rows of logits
    sparse: dict[str, Any] = {
        "kernel, sparse backward": dict(asked, against="strong/f32"),
        "default, sparse backward": dict(of="default", options=dict(sparse_backward="auto"), against="strong/f32"),
        "default, sparse backward, 256 tokens": dict(of="default", options=few, against="strong/f32"),
        "kernel, sparse backward, forward_kl": dict(
            asked, objective=dict(divergence="forward_kl"), against="strong/f32"),
    }  # fmt: skip
    near: dict[str, Any] = {
        "sparse: time / strong, f32": ("time", "kernel, sparse backward", "strong/f32", 0.50),
        "sparse: temporaries, MiB": ("mib", "default, sparse backward, 256 tokens", "strong/f32", 500),
    }
    full = dict(beta=0.04, kl="full", aggregation="dapo")
    beside: dict[str, Any] = {
        f"{name}, k3": dict(of=name, objective=dict(kl="k3"), against=name) for name in ("default", "kernel")
    }
    bars: dict[str, Any] = {f"{name}: time / k3": ("time", name, f"{name}, k3", 1.45) for name in ("default", "kernel")}
    shared: dict[str, Any] = dict(
        tokens=8192, hidden=4096, vocab=151936, teacher=4096, rows=8, peaks=False, rounds=5, **BF16
    )
    return [
        BenchConfig(
            "distill 8192x4096x151936", distillation=dict(divergence="reverse_kl"), arms=arms, gates=gates,
            baselines=["strong", "strong/f32", "naive", "naive/f32"], **shared,
        ),
        BenchConfig(
            "distill on-policy 8192x4096x151936", distillation=dict(divergence="reverse_kl"), inputs="on_policy",
            arms=sparse, gates=near, baselines=["strong/f32"], **shared,
        ),
        BenchConfig("GRPO, KL to a reference", objective=full, baselines=[], arms=beside, gates=bars, **shared),
    ]  # fmt: skip


def gpu_logits() -> list[Case]:
    """Given logits: the kernels at awkward shapes against float64, then time at true ones."""
    return [*_logits_checks(), *(_logits_case(*shape, first=i == 0) for i, shape in enumerate(LOGITS_SHAPES))]


def _logits_checks() -> list[Case]:
    """Padded, ragged, in place, dead rows, large logits, bent logits, 16-bit floats, one row; statistics, too."""
    bent = dict(temperature=0.7, softcap=30.0, scale=0.8)
    checks: dict[str, tuple[str, int, int, dict[str, Any]]] = {
        "bf16 64x151936 in place, padded": ("bfloat16", 64, 151936, dict(donate=True, vocab_size=151643)),
        "bf16 64x151643 in place": ("bfloat16", 64, 151643, dict(donate=True)),
        "f32 64x4096": ("float32", 64, 4096, {}),
        "bf16 |z|<=100": ("bfloat16", 64, 32000, dict(spread=25.0)),
        "f32 300x8192, padded": ("float32", 300, 8192, dict(vocab_size=8190)),
        "bf16 63x50257, padded": ("bfloat16", 63, 50257, dict(vocab_size=50000)),
        "f32 40x151936": ("float32", 40, 151936, {}),
        "f32 |z|<=100": ("float32", 64, 32000, dict(spread=25.0)),
        "f32 61x50257": ("float32", 61, 50257, {}),
        "bf16 peaked": ("bfloat16", 64, 50304, dict(inputs="peaked")),
        "bf16 64x50257, softcap, scale, temperature": ("bfloat16", 64, 50257, bent),
        "f16 64x32000, temperature": ("float16", 64, 32000, dict(temperature=0.7)),
        "bf16 1x50257": ("bfloat16", 1, 50257, {}),
        "bf16 200x1000": ("bfloat16", 200, 1000, {}),
    }
    shared: dict[str, Any] = dict(level="logits", backend="mosaic_gpu", batch=1, objective=dict(aggregation="dapo"))
    out: list[Case] = []
    for name, (dtype, n, v, more) in checks.items():
        own = {**shared, **dict(dtype=dtype, tokens=n, vocab=v), **more}
        # No token is clipped: every live token has a gradient.
        out.append(GradcheckConfig(name=name, old_logp_noise_scale=0.05, same_without_gradient=not more, **own))
        out.append(GradcheckConfig(name=f"{name}, statistics", call="logprobs", **{**own, "donate": False}))
    return out


def _logits_case(tokens: int, vocab: int, *, first: bool) -> Case:
    slack = 1.0 if first else 1.1
    arms: dict[str, Any] = {"copy": dict(of="copy")}
    if first:
        arms |= {
            "default, entropy": dict(of="default", objective=dict(entropy_coef=0.01), against="default"),
            "default, half live": dict(of="default", batch=dict(live=0.5)),
            "two passes": dict(of="default", options=dict(backend="chunked")),
            "statistics alone": dict(of="default", call="logprobs"),
        }
    gates: dict[str, Any] = {
        "time / XLA logsumexp": ("time", "default", "strong", 0.65 * slack),
        "time / XLA log_softmax": ("time", "default", "naive", 0.33 * slack),
        "time / Liger": ("time", "default", f"{PEERS}liger", 0.75 * slack),
        "time / Liger, in place": ("time", "default", f"{PEERS}liger, in place", 0.75 * slack),
        "temporaries, MiB": ("mib", "default", "default", 16),
        "gradient error / contract": ("rows", "default", "strong", 1.0),
    }
    if first:
        gates["with entropy / without"] = ("time", "default, entropy", "default", 1.10)
    return BenchConfig(
        f"logits {tokens}x{vocab}", level="logits", tokens=tokens, vocab=vocab, rows=1, arms=arms, gates=gates,
        baselines=["naive", "strong", *(["gather"] if first else [])], check_rows=32, peaks=False, rounds=5,
    )  # fmt: skip
