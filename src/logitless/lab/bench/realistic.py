"""Hidden states and heads whose softmax looks like a trained policy's, at any shape, without a trained policy.

Logits of a freshly initialised head are flat: no probability is ever small enough to leave out. What a policy trained
on language gives is nearly empty, and not in the same columns in every row. This generator is fitted to Qwen2.5-Coder-
1.5B-Instruct on GSM8K (V=151936, 1024 tokens; :data:`MEASURED`), and is a true product ``hidden @ head.T`` with every
entry a number of its own. Relative to a row's mean, the logits are

    z_tv = b_v                 a part that all rows share: frequent tokens, with an exponential upper tail
         + u_t . w_v           a part of the row's own
         + l_vm  (m = m_t)     a topic: a few hundred columns that rise together, the k-th of them by ``a - c log k``
         + (L_t - ...) [v=y_t] one leading token, whose level L_t sets the row's entropy

Topics are drawn from a few hundred with Zipf's frequencies, which is why a chunk's columns grow so much slower than
its rows. All rows of the head share a component, as real heads do: a softmax does not see it, the error of a gradient
with columns left out does. In a smaller vocabulary the topics are as much smaller and the leading tokens lower, so that
the mass outside a given share of the columns stays what it is.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

MEASURED_VOCAB = 151936
EPSILONS = (1e-3, 2.0**-12, 1e-4, 1e-5, 1e-6)
WIDTHS = (4096, 8192, 12288, 24576)
CHUNKS = (256, 512, 1024)
MEASURED: dict[str, Any] = {
    "entropy": {"mean": 0.52, "median": 0.11},
    "entries": [6.6, 13.1, 20.7, 79, 376],
    "active": {
        "256": [460, 890, 1410, 5398, 22763],
        "512": [671, 1281, 2023, 7861, 34766],
        "1024": [1127, 2105, 3258, 11772, 45637],
    },
    "left_out": {
        "4096": {"mean": 1.5e-3, "p90": 4.3e-3, "p99": 1.5e-2, "max": 5.0e-2, "above_8": 0.113, "above_9": 0.207},
        "8192": {"mean": 9.8e-4, "p90": 2.8e-3, "p99": 9.7e-3, "max": 3.9e-2, "above_8": 0.061, "above_9": 0.143},
        "12288": {"mean": 7.7e-4, "p90": 2.1e-3, "p99": 7.8e-3, "max": 3.3e-2, "above_8": 0.044, "above_9": 0.112},
        "24576": {"mean": 4.9e-4, "p90": 1.3e-3, "p99": 4.9e-3, "max": 2.1e-2, "above_8": 0.015, "above_9": 0.058},
    },
}  # fmt: skip
"""Entries per token with p > eps; columns active for any token of a chunk; mass left out of a row when the K columns of
largest column maximum over 1024 tokens are kept, and the share of rows above 2^-8 and 2^-9."""


@dataclasses.dataclass(frozen=True)
class Policy:
    """The fitted numbers, in nats."""

    shared: float = 0.9  # deviation of b's bell
    tail: float = 0.75  # mean of b's exponential tail
    own: float = 1.6  # deviation of u . w
    level: float = 22.6  # of the leading token: mean
    level_sd: float = 3.0
    topic: float = 13.2  # of a topic's first column: mean
    topic_sd: float = 1.5
    slope: float = 1.9  # decay of a topic per e-fold of columns
    members: int = 1100  # columns of a topic
    topics: int = 170
    topic_head: float = 1.3  # topic m is drawn in proportion to 1 / (m + topic_head)
    member_power: float = 1.2  # columns join a topic in proportion to exp(member_power * b)
    common: float = 2.0  # length of the component shared by all head rows


POLICY = Policy()
"""Teacher-forced text: a model on others' solutions (:data:`MEASURED`)."""

ON_POLICY = Policy(level=24.6, level_sd=2.5)
"""A model on its own completions, as RL has them (:data:`MEASURED_ON_POLICY`): the leading token is surer of itself."""

MEASURED_ON_POLICY = {"entropy": 0.21, "threshold": 3e-5, "active": 2444, "hard": 0.0078}
"""The same model on its own completions, with targets drawn from its softmax (V=151936, 1024 tokens): mean entropy,
columns with p > 3e-5 for a token, and the share of rows with more than 2^-8 outside these columns."""

POLICIES = {"realistic": POLICY, "on_policy": ON_POLICY}
"""By the name that ``inputs`` has in benchmarks."""


def _logits_factors(
    tokens: int, vocab: int, width: int, rng: np.random.Generator, o: Policy
) -> tuple[np.ndarray, np.ndarray]:
    """``(left [T, width + 2], right [V, width + 2])`` whose product is the logits; the first of ``left`` is zero."""
    scale = vocab / MEASURED_VOCAB
    b = o.shared * rng.standard_normal(vocab, np.float32) + o.tail * (rng.exponential(size=vocab) - 1)
    w = rng.standard_normal((vocab, width), np.float32) / np.float32(width**0.5)
    u = rng.standard_normal((tokens, width), np.float32)

    frequency = 1.0 / (np.arange(o.topics) + o.topic_head)
    of_row = rng.choice(o.topics, tokens, p=frequency / frequency.sum())
    direction = rng.standard_normal((o.topics, width), np.float32)
    direction /= np.linalg.norm(direction, axis=1, keepdims=True)
    members = max(round(o.members * scale), 8)
    joins = np.exp(o.member_power * b)
    joins /= joins.sum()
    ladder = np.maximum(1.0 - (o.slope / o.topic) * np.log((np.arange(members) + 1) / scale), 0.0)
    for m in np.unique(of_row):
        who = rng.choice(vocab, members, p=joins)
        w[who] += (ladder[:, None] * direction[m]).astype(np.float32)
    height = o.topic + o.topic_sd * rng.standard_normal(tokens)
    states = height[:, None] * direction[of_row]

    lead = rng.choice(vocab, tokens, p=joins)
    level = o.level + o.level_sd * rng.standard_normal(tokens) + np.log(scale)
    rows = w[lead] / np.sum(w[lead] ** 2, 1, keepdims=True)
    boost = level - b[lead] - np.sum(states * w[lead], 1)
    u -= np.sum(u * w[lead], 1, keepdims=True) * rows
    # What topic and leading token spread over all other columns counts towards the row's own part.
    spread = (height**2 + boost**2 * np.sum(rows**2, 1)) / width
    states += np.sqrt(np.maximum(o.own**2 - spread, 0.0))[:, None] * u + boost[:, None] * rows
    left = np.concatenate([np.zeros((tokens, 1)), np.ones((tokens, 1)), states], 1).astype(np.float32)
    right = np.concatenate([np.full((vocab, 1), o.common), b[:, None], w], 1).astype(np.float32)
    return left, right


def realistic_head(
    tokens: int, hidden: int, vocab: int, seed: int = 0, dtype: Any = jnp.bfloat16, policy: Policy = POLICY
) -> tuple[np.ndarray, np.ndarray]:
    """``(hidden [tokens, H], lm_head [V, H])`` of a trained policy's kind, made on the host.

    The work is one ``V x 1024 x H`` matmul at most, not one over tokens times vocabulary.
    """
    rng = np.random.default_rng(seed)
    width = max(min(1024, hidden - 2), 1)
    left, right = _logits_factors(tokens, vocab, width, rng, policy)
    # rotated: no matrix entry is special
    basis = np.linalg.qr(rng.standard_normal((hidden, width + 2)))[0].T.astype(np.float32)
    head = np.empty((vocab, hidden), dtype)
    for i in range(0, vocab, 8192):  # in slices: the host need not hold it all in float32
        head[i : i + 8192] = (right[i : i + 8192] @ basis).astype(dtype)
    return (left @ basis).astype(dtype), head


def _probabilities(z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``(p [T, V], entropy [T])`` from logits; overwrites the logits."""
    z -= z.max(1, keepdims=True)
    z -= np.log(np.exp(z).sum(1, keepdims=True))
    entropy = -np.einsum("tv,tv->t", np.exp(z), z)
    return np.exp(z, out=z), entropy


def measure_columns(hidden: Any, lm_head: Any, threshold: float = 3e-5, tolerance: float = 2.0**-8) -> dict[str, Any]:
    """The numbers of :data:`MEASURED_ON_POLICY` for some tokens, in float32."""
    p, entropy = _probabilities(np.asarray(hidden, np.float32) @ np.asarray(lm_head, np.float32).T)
    active = p.max(0) > threshold
    hard = p[:, ~active].sum(1) > tolerance
    return dict(entropy=float(entropy.mean()), threshold=threshold, active=int(active.sum()), hard=float(np.mean(hard)))


def sample_targets(hidden: Array, lm_head: Array, seed: int = 0, chunk: int = 512) -> Array:
    """One token a row from its own softmax, ``[N]`` int32; on whatever device the arrays are, a chunk at a time."""
    n = hidden.shape[0]
    chunk = min(chunk, n)

    @jax.jit
    def some(h: Array, w: Array, key: Array) -> Array:
        logits = jax.lax.dot_general(h, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        return jax.random.categorical(key, logits).astype(jnp.int32)

    keys = jax.random.split(jax.random.key(seed), -(-n // chunk))
    starts = [min(i * chunk, n - chunk) for i in range(len(keys))]
    parts = [some(hidden[s : s + chunk], lm_head, k) for s, k in zip(starts, keys, strict=True)]
    last = n - (len(parts) - 1) * chunk
    return jnp.concatenate([*parts[:-1], parts[-1][chunk - last :]])


def measure(hidden: Any, lm_head: Any, targets: Any, chunks: tuple[int, ...] = CHUNKS) -> dict[str, Any]:
    """The table of :data:`MEASURED` for some tokens (the last chunk size is how many), in float32.

    For another vocabulary, probabilities, widths, entries and columns are those of the same share of the columns.
    """
    n = chunks[-1]
    h, w, y = np.asarray(hidden, np.float32)[:n], np.asarray(lm_head, np.float32), np.asarray(targets)[:n]
    vocab = len(w)
    z = h @ w.T
    z_max = float(np.abs(z - z.mean(1, keepdims=True)).max())
    p, entropy = _probabilities(z)
    scale = MEASURED_VOCAB / vocab
    out: dict[str, Any] = {
        "entropy": {"mean": float(entropy.mean()), "median": float(np.median(entropy))},
        "largest_logit": z_max,
        "entries": [scale * float(np.mean(np.count_nonzero(p > e * scale, axis=1))) for e in EPSILONS],
        "active": {str(c): [scale * int(np.sum(p[:c].max(0) > e * scale)) for e in EPSILONS] for c in chunks},
        "left_out": {},
    }
    best = p.max(0)
    best[y] = np.inf
    order = np.argsort(-best)
    for width in WIDTHS:
        u = p[:, order[round(width / scale) :]].sum(1, dtype=np.float64)
        q = np.quantile(u, (0.9, 0.99, 1.0))
        out["left_out"][str(width)] = {
            "mean": float(u.mean()), "p90": float(q[0]), "p99": float(q[1]), "max": float(q[2]),
            "above_8": float(np.mean(u > 2.0**-8)), "above_9": float(np.mean(u > 2.0**-9)),
        }  # fmt: skip
    return out
