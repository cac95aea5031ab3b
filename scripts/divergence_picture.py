"""The picture of docs/distillation.md: a student that can have one peak only, fitted to a teacher with two.

    python scripts/divergence_picture.py [docs/pictures/divergences.svg]

The teacher is a distribution over 120 ids with two peaks. The student is a discretised normal distribution, whose mean
and width minimise each of the three divergences, by ``logitless.divergence`` on a grid.
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np

import logitless

OUT = Path(__file__).parents[1] / "docs" / "pictures" / "divergences.svg"
IDS = np.arange(120)
KINDS = {"forward_kl": "forward KL", "reverse_kl": "reverse KL", "jsd": "JSD, mix 0.5"}
PANEL, WIDE, HIGH, TOP = 250, 226, 150, 64


def bell(mean: np.ndarray, width: np.ndarray) -> np.ndarray:
    """Logits of discretised normal distributions ``[..., V]``."""
    return -0.5 * ((IDS - mean[..., None]) / width[..., None]) ** 2


def teacher() -> np.ndarray:
    peaks = np.exp(bell(np.array(36.0), np.array(7.0))) + 0.3 * np.exp(bell(np.array(84.0), np.array(9.0)))
    return np.log(peaks + 1e-9)


def fitted(kind: str) -> np.ndarray:
    """Probabilities of the student that has the least divergence."""
    mean, width = (x.ravel() for x in np.meshgrid(np.arange(20.0, 100.0, 1.0), np.arange(3.0, 40.0, 0.5)))
    students = jnp.asarray(bell(mean, width), jnp.float32)
    target = jnp.broadcast_to(jnp.asarray(teacher(), jnp.float32), students.shape)
    found = logitless.divergence(students, target, divergence=kind).divergence  # type: ignore[arg-type]
    best = int(np.argmin(found))
    return softmax(bell(mean[best], width[best]))


def softmax(z: np.ndarray) -> np.ndarray:
    p = np.exp(z - z.max())
    return p / p.sum()


def curve(p: np.ndarray, left: float, scale: float) -> str:
    x, y = left + IDS * WIDE / (len(IDS) - 1), TOP + HIGH - p * scale
    return " ".join(f"{a:.0f},{b:.0f}" for a, b in zip(x, y, strict=True))


def svg() -> str:
    q = softmax(teacher())
    students = {kind: fitted(kind) for kind in KINDS}
    scale = HIGH / max(p.max() for p in (q, *students.values()))
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 268" width="760" height="268" role="img" '
        'aria-labelledby="t d"><title id="t">What each divergence makes of a teacher with two peaks</title>'
        '<desc id="d">The forward KL covers both peaks with one wide bell. The reverse KL and JSD take the larger peak '
        "and leave the other.</desc>"
        "<style>svg {--ink:#1a2130;--muted:#5b6473;--line:#b9c0cc;--paper:#ffffff;--ours:#0b62c4;--hot:#a04a00} "
        "@media (prefers-color-scheme: dark) {svg {--ink:#e8ebf1;--muted:#a3adbd;--line:#4a5363;--paper:#161b24;"
        "--ours:#6fb1ff;--hot:#ffad66}} text {font-family:system-ui,sans-serif;font-size:14px;fill:var(--ink)} "
        ".m {fill:var(--muted);font-size:13px} .b {font-weight:600}</style>"
        '<rect x="1" y="1" width="758" height="266" rx="10" style="fill:var(--paper);stroke:var(--line)"/>'
    ]
    for i, (kind, name) in enumerate(KINDS.items()):
        left = 14 + i * PANEL
        base = TOP + HIGH
        parts += [
            f'<text x="{left}" y="34" class="b">{name}</text>',
            f'<path d="M{left},{base} h{WIDE}" style="stroke:var(--line)"/>',
            f'<polyline points="{curve(q, left, scale)}" style="fill:none;stroke:var(--hot);stroke-width:2"/>',
            f'<polyline points="{curve(students[kind], left, scale)}" '
            'style="fill:none;stroke:var(--ours);stroke-width:2.5;stroke-dasharray:6 3"/>',
        ]
    parts.append(
        '<text x="14" y="250" class="m"><tspan style="fill:var(--hot)">line</tspan>: the teacher; '
        '<tspan style="fill:var(--ours)">dashes</tspan>: the student with one peak that has the least divergence</text>'
    )
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    (Path(sys.argv[1]) if len(sys.argv) > 1 else OUT).write_text(svg())
