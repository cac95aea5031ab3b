"""The generator of realistic heads: what makes it realistic, at a small shape, and its table at the full vocabulary."""

from __future__ import annotations

import functools
import importlib.util
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from logitless.lab.bench import realistic

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
N, WIDTH, VOCAB = 512, 128, 8192


@functools.cache
def small() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    h, w = realistic.realistic_head(N, WIDTH, VOCAB)
    return h, w, np.asarray(realistic.sample_targets(jnp.asarray(h), jnp.asarray(w)))


def table(h: Any, w: Any, y: Any) -> dict[str, Any]:
    return realistic.measure(h, w, y, (256, N))


def test_the_same_seed_gives_the_same_policy() -> None:
    h, w, _ = small()
    assert h.shape == (N, WIDTH) and w.shape == (VOCAB, WIDTH) and h.dtype == w.dtype == jnp.bfloat16
    again = realistic.realistic_head(N, WIDTH, VOCAB)
    np.testing.assert_array_equal(h, again[0])
    np.testing.assert_array_equal(w, again[1])
    assert (realistic.realistic_head(8, WIDTH, VOCAB, seed=1)[1] != w).mean() > 0.9


def test_no_entry_of_the_matrices_is_special() -> None:
    """A factor that stood in a coordinate of its own would make matmuls and their rounding unlike real ones."""
    for x in small()[:2]:
        rms = np.sqrt(np.mean(np.square(x.astype(np.float32)), 0))
        assert rms.max() < 5 * np.median(rms)
        assert (x == 0).mean() < 1e-3


def test_nearly_empty_softmax_in_columns_that_rows_share() -> None:
    """The small version is of the same kind: peaked rows, a long tail, columns that grow much slower than rows."""
    t = table(*small())
    assert 0.1 < t["entropy"]["mean"] < 1.0
    assert t["entropy"]["median"] < 0.4 * t["entropy"]["mean"]  # a few rows have most of the entropy
    entries = t["entries"]
    assert entries[-1] > 4 * entries[-2] and entries[-1] < 2000  # the tail: more columns at every step down
    grown = np.array(t["active"][str(N)]) / np.array(t["active"]["256"])
    assert (grown > 1.1).all() and (grown < 1.8).all()
    share = t["left_out"]["12288"]  # 8 % of the columns
    assert 5e-4 < share["mean"] < 6e-3 and 0.02 < share["above_8"] < 0.25


def test_flat_logits_are_not_taken_for_realistic() -> None:
    rng = np.random.default_rng(0)
    h, w = rng.standard_normal((N, WIDTH)), 3 / WIDTH**0.5 * rng.standard_normal((VOCAB, WIDTH))
    t = table(h, w, rng.integers(0, VOCAB, N))
    assert t["entropy"]["median"] > 3
    assert t["left_out"]["12288"]["mean"] > 0.1


def test_measure_by_hand() -> None:
    """Two rows over ``V = 4`` columns with known probabilities; widths and thresholds are shares of the vocabulary."""
    p = np.array([[0.7, 0.2, 0.1 - 1e-9, 1e-9], [0.1, 0.6, 1e-9, 0.3 - 1e-9]])
    t = realistic.measure(np.eye(2), np.log(p).T, np.array([0, 1]), (1, 2))
    entropy = -(p * np.log(p)).sum(1)
    assert t["entropy"]["mean"] == pytest.approx(entropy.mean(), rel=1e-5)
    scale = realistic.MEASURED_VOCAB / 4  # by which thresholds grow: only the last two are below 1
    expected = [scale * np.mean((p > e * scale).sum(1)) for e in realistic.EPSILONS]
    assert t["entries"] == pytest.approx(expected)
    assert t["active"]["1"][-1] == pytest.approx(scale * (p[0] > 1e-6 * scale).sum())
    assert t["left_out"]["4096"]["mean"] == pytest.approx(1.0)  # none of four columns is 2.7 % of them
    assert t["left_out"]["24576"]["max"] == pytest.approx(0.9)  # one is kept: the first target's, of 0.7 and 0.1


def test_targets_are_samples_of_the_rows_own_softmax() -> None:
    h, w, y = small()
    x = h.astype(np.float32) @ w.astype(np.float32).T
    p = np.exp(x - x.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    own = p[np.arange(N), y]
    assert own.mean() == pytest.approx(np.square(p).sum(1).mean(), abs=0.04)
    assert (y == p.argmax(1)).mean() == pytest.approx(p.max(1).mean(), abs=0.04)
    # a number of tokens that is no multiple of the chunk: every row still gets a target of its own
    sure = jnp.asarray(np.eye(64)[:50] * 80.0)
    np.testing.assert_array_equal(realistic.sample_targets(sure, jnp.eye(64), chunk=16), np.arange(50))


def test_recorded_table_fits_what_was_measured() -> None:
    """The generator's own table at V=151936 against that of Qwen2.5-Coder-1.5B on GSM8K, as recorded."""
    fit = json.loads((RESULTS / "realistic_fit.json").read_text())
    assert fit["aim"] == json.loads(json.dumps(realistic.MEASURED))
    assert fit["vocab"] == realistic.MEASURED_VOCAB
    assert_fits(fit["table"])
    own, aim = (fit["on_policy"][k] for k in ("table", "aim"))
    assert aim == realistic.MEASURED_ON_POLICY and own["threshold"] == aim["threshold"]
    assert own["entropy"] == pytest.approx(aim["entropy"], rel=0.2)
    assert own["active"] == pytest.approx(aim["active"], rel=0.2)
    assert own["hard"] == pytest.approx(aim["hard"], rel=0.5)


def assert_fits(t: dict[str, Any]) -> None:
    aim = realistic.MEASURED
    assert t["entropy"]["mean"] == pytest.approx(aim["entropy"]["mean"], rel=0.5)
    # From 1e-4 on: entries above it are few, and cost nothing.
    np.testing.assert_allclose(np.log(t["entries"][2:]), np.log(aim["entries"][2:]), atol=np.log(2))
    for chunk, columns in aim["active"].items():
        np.testing.assert_allclose(np.log(t["active"][chunk][2:]), np.log(columns[2:]), atol=np.log(2))
    for width, row in aim["left_out"].items():
        for name in ("mean", "p90", "p99", "above_8", "above_9"):
            ratio = t["left_out"][width][name] / row[name]
            assert 0.4 < ratio < 2.5, (width, name, ratio)


@pytest.mark.slow
def test_the_recorded_table_is_the_generators() -> None:
    spec = importlib.util.spec_from_file_location("real", ROOT / "benchmarks" / "sparse_real_weights.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    recorded = json.loads((RESULTS / "realistic_fit.json").read_text())
    t = script.fit(recorded["hidden"])["table"]
    assert_fits(t)
    for name in ("entries", "entropy", "active", "left_out"):
        a, b = (np.array(_numbers(x[name])) for x in (t, recorded["table"]))
        np.testing.assert_allclose(a, b, rtol=0.05, atol=1e-3)


def _numbers(tree: Any) -> list[float]:
    if isinstance(tree, dict):
        return [x for key in sorted(tree) for x in _numbers(tree[key])]
    return [x for v in tree for x in _numbers(v)] if isinstance(tree, list) else [float(tree)]
