"""What a sparse backward leaves out of real policies' gradients, and of the generator's; in NumPy, on a CPU.

    python benchmarks/sparse_real_weights.py --fit benchmarks/results/realistic_fit.json
    python benchmarks/sparse_real_weights.py --states qwen.npz --model qwen.gguf --gsm8k test.jsonl
    python benchmarks/sparse_real_weights.py --states own.npz --model qwen.gguf --rollouts runs/gsm8k/dense
    python benchmarks/sparse_real_weights.py --real benchmarks/results/sparse_real_weights.json NAME=qwen.npz...

The first records the table of ``logitless.lab.bench.realistic`` at the full vocabulary; the second runs a model over
GSM8K questions with their solutions and keeps ``h`` (final hidden states that predict the solutions' tokens), ``y``
(those tokens) and ``head``; the third takes a run's recorded completions of its first step instead, which this model
itself has sampled; the fourth records the same table for such states, and the errors of dH and dW with cotangent 1 at
every log-probability: of the ordinary path (float32 logits, bfloat16 operands and dlogits), and with all but the K
columns of largest column maximum left out, with the mean head row in their place, as the library does. Rows that would
leave out more than 2^-8 go through all columns. Truth is float32 from the same bfloat16 inputs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

import harness
from logitless.lab.bench import realistic
from logitless.lab.tools import timing

TOLERANCE = 2.0**-8


def rounded(x: np.ndarray) -> np.ndarray:
    """To bfloat16 and back."""
    return np.asarray(x).astype(jnp.bfloat16).astype(np.float32)


def norms(x: np.ndarray) -> np.ndarray:
    return np.linalg.norm(x, axis=1).astype(np.float64)


def gradient_errors(h: np.ndarray, w: np.ndarray, y: np.ndarray, widths: tuple[int, ...]) -> dict[str, Any]:
    """Errors relative to the truth's norm, and to the ordinary path's own errors."""
    rows = np.arange(len(h))
    p = h @ w.T
    p -= p.max(1, keepdims=True)
    np.exp(p, out=p)
    p /= p.sum(1, keepdims=True)
    best = p.max(0)
    best[y] = np.inf
    order = np.argsort(-best)
    dx = np.negative(p, out=p)
    dx[rows, y] += 1
    low = rounded(dx)
    truth, dw_truth = dx @ w, dx.T @ h
    ordinary, dw = rounded(low @ w), rounded(low.T @ h)
    own, size_of_row = norms(ordinary - truth), norms(truth)
    size = float(np.linalg.norm(size_of_row))
    dw_own, dw_size = float(np.linalg.norm(dw - dw_truth)), float(np.linalg.norm(dw_truth))
    del dw
    out: dict[str, Any] = {"ordinary": {"dh": float(np.linalg.norm(own)) / size, "dw": dw_own / dw_size}, "kept": {}}
    mean = w[:: len(w) // 4096][:4096].mean(0)
    for width in widths:
        keep = np.sort(order[:width])
        inactive = np.ones(len(w), bool)
        inactive[keep] = False
        mass = -dx[:, inactive].sum(1, dtype=np.float64).astype(np.float32)
        hard = mass > TOLERANCE
        partial = low[:, keep] @ w[keep]
        row: dict[str, Any] = {"hard_rows": float(hard.mean()), "left_out_mass": float(mass[~hard].mean())}
        got = np.where(hard[:, None], ordinary, rounded(partial - mass[:, None] * mean))
        error = norms(got - truth)
        ratio = error[~hard] / own[~hard]
        above = ~hard & (error > 1.5 * own)
        row["mean_row"] = {
            "dh": float(np.linalg.norm(error)) / size,
            "dh_to_ordinary": float(np.linalg.norm(error) / np.linalg.norm(own)),
            "largest_row_to_ordinary": float(error.max() / own.max()),
            "rows_above_1.5x_their_own": float(np.mean(ratio > 1.5)),
            "worst_row_to_its_own": float(ratio.max()),
            "their_median_1_minus_p": float(np.median(dx[rows, y][above])),
            "their_share_of_dh_squared": float(np.sum(size_of_row[above] ** 2) / size**2),
        }
        if width == widths[1]:
            dw = low.T @ np.where(hard[:, None], h, 0.0)
            dw[keep] += low[:, keep].T @ np.where(hard[:, None], 0.0, h)
            error = float(np.linalg.norm(rounded(dw) - dw_truth))
            row["dw"], row["dw_to_ordinary"] = error / dw_size, error / dw_own
            del dw
        out["kept"][str(width)] = row
    return out


def real_weights(path: str, tokens: int) -> dict[str, Any]:
    with np.load(path) as f:
        h, y, w = rounded(f["h"][:tokens]), f["y"][:tokens], rounded(f["head"].astype(np.float32))
    if len(h) < tokens:
        raise SystemExit(f"{path} has {len(h)} tokens, expected at least {tokens}; give a smaller --tokens.")
    chunks = (*(c for c in realistic.CHUNKS if c < tokens), tokens)
    table = realistic.measure(h, w, y, chunks)
    widths = tuple(round(k * len(w) / realistic.MEASURED_VOCAB) for k in realistic.WIDTHS)
    errors = gradient_errors(h, w, y, widths)
    harness.say(path)
    return dict(tokens=tokens, hidden=h.shape[1], vocab=len(w), table=table, errors=errors)


def fit(hidden: int) -> dict[str, Any]:
    n, vocab = realistic.CHUNKS[-1], realistic.MEASURED_VOCAB
    states, head = realistic.realistic_head(n, hidden, vocab)
    y = realistic.sample_targets(jnp.asarray(states), jnp.asarray(head))
    own = realistic.realistic_head(n, hidden, vocab, policy=realistic.ON_POLICY)
    return dict(
        hidden=hidden, vocab=vocab, seed=0, table=realistic.measure(states, head, y), aim=realistic.MEASURED,
        on_policy=dict(table=realistic.measure_columns(*own), aim=realistic.MEASURED_ON_POLICY),
    )  # fmt: skip


def states(model: str, gsm8k: str, tokens: int, length: int = 512) -> dict[str, np.ndarray]:
    """Final hidden states of a model (a folder or a ``.gguf`` file) over questions with their solutions."""
    import jax

    from logitless.train import data, tokenizer, weights
    from logitless.train import model as models

    config, params = weights.load_model(model)
    text = tokenizer.load_tokenizer(model)
    run = jax.jit(lambda p, *args: models.hidden_states(p, config, *args))
    hidden: list[np.ndarray] = []
    targets: list[int] = []
    for problem in data.gsm8k(gsm8k, instruction=""):
        prompt, solution = text.encode_prompt(problem.prompt, chat=True), text.encode(str(problem.meta["solution"]))
        ids = prompt + solution
        if len(ids) > length:
            continue
        padded = np.zeros((1, length), np.int32)
        padded[0, : len(ids)] = ids
        at = np.arange(length)[None]
        h = run(params, padded, at, at < len(ids))[0]
        hidden.append(np.asarray(h[len(prompt) - 1 : len(ids) - 1], np.float32))
        targets += solution
        harness.say(f"{len(targets)} tokens")
        if len(targets) >= tokens:
            break
    return _arrays(hidden, targets, models.lm_head(params, config), tokens)


def own_states(model: str, run: str, tokens: int, rows: int = 8) -> dict[str, np.ndarray]:
    """The same over completions that a run's sampler drew in its first step (``rollout.record``)."""
    import jax

    from logitless.train import model as models
    from logitless.train import recorded, weights
    from logitless.train.update import Batch, completion_parts

    config, params = weights.load_model(model)
    rolled = recorded.read_rollouts(Path(run), 1)
    done = rolled.completions
    whole = Batch(rolled.prompts.tokens, rolled.prompts.valid, done.tokens, done.mask, np.asarray(rolled.rewards))  # type: ignore[arg-type]
    compute = jax.jit(lambda p, b: completion_parts(None, config, b, jnp.float32).hidden(p, None, remat=False))
    hidden: list[np.ndarray] = []
    targets: list[np.ndarray] = []
    for begin in range(0, len(done.tokens), rows):
        batch = jax.tree.map(lambda x, begin=begin: x[begin : begin + rows], whole)
        mask = np.asarray(batch.mask)
        hidden.append(np.asarray(compute(params, batch))[mask])
        targets.append(np.asarray(batch.completion)[mask])
        if sum(map(len, targets)) >= tokens:
            break
    return _arrays(hidden, np.concatenate(targets), models.lm_head(params, config), tokens)


def _arrays(hidden: list[np.ndarray], targets: Any, head: Any, tokens: int) -> dict[str, np.ndarray]:
    """What the file of a model's states holds."""
    y = np.asarray(targets)[:tokens]
    return dict(h=np.concatenate(hidden)[:tokens], y=y, head=np.asarray(head).astype(np.float16))


def main() -> None:
    p = harness.options(__doc__, fit="", real="", states="", model="", gsm8k="", rollouts="", tokens=1024, hidden=1536)
    p.add_argument("npz", nargs="*", metavar="NAME=FILE", help="states to measure, for --real")
    args = p.parse_args()
    if not (args.fit or args.real or args.states):
        p.error("nothing to do: give --fit, --real or --states")
    if args.states:
        if not args.model or bool(args.gsm8k) == bool(args.rollouts):
            p.error("--states needs --model, and --gsm8k or --rollouts")
        found = (states, args.gsm8k) if args.gsm8k else (own_states, args.rollouts)
        np.savez(args.states, **found[0](args.model, found[1], args.tokens))  # type: ignore[arg-type]
    environment = timing.environment()
    if args.fit:
        harness.write(args.fit, dict(environment=environment, **fit(args.hidden)))
    if args.real:
        named = dict(item.split("=", 1) for item in args.npz)
        weights = {name: real_weights(path, args.tokens) for name, path in named.items()}
        harness.write(args.real, dict(environment=environment, tolerance=TOLERANCE, weights=weights))


if __name__ == "__main__":
    main()
