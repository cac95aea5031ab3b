"""Whether the arms of an A/B agree, by which test, and the same as text.

Rounding differs between two losses, and the first sampled token that it flips makes two runs of one. So an arm must
pass these tests against the baseline, all of them:

1. Losses. While both arms have sampled the same tokens (``rollout/tokens_crc32``), up to ``ab.loss_steps`` steps: every
   loss of a step (each inner update) differs by at most ``tolerance * max(1, |loss|)``. Where one of the arms has a
   sparse backward their gradients differ by what it leaves out, and with them every loss after the first update: that
   one alone is compared.
2. Rewards. Over all steps, the mean difference D of the two rewards is within ``ab.reward_sigmas`` standard errors of
   zero, or within ``ab.reward_tolerance``. The standard error is that of ten block means, for neighbouring steps are
   not independent. With random rollouts the rewards are drawn, not earned: this test then says nothing, and the first
   one runs over all ``loss_steps``.
3. KL to the initial policy, where it is measured (``train.kl_beta``, ``train.kl_report``): the same test of its k3 and
   of its k1 estimate, within the standard errors or ``ab.kl_tolerance`` of the baseline's mean. Two runs drift apart
   slowly, so that blocks are not independent either; that share is what keeps the drift from counting as a difference.
   (k3 has rare outliers, which make its standard error large; k1 is the sharper one.)
"""

from __future__ import annotations

import itertools
import math
from typing import Any

from logitless.tools.config import ConfigError
from logitless.train.config import TrainConfig

BLOCKS = 10
KL = {"kl": "train/kl", "kl_k1": "train/kl_k1"}
"""Prefix of the agreement's keys -> the metric."""


def steps_of(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Records of training steps: without the evaluation before the first."""
    return [r for r in records if "train/loss" in r]


def ratios(baseline: dict[str, Any], other: dict[str, Any]) -> dict[str, float | None]:
    """Another arm's summary over the baseline's."""

    def ratio(key: str) -> float | None:
        a, b = baseline.get(key), other.get(key)
        return b / a if a and b else None

    return {
        "step_time": ratio("time/train/step_avg_last10_s"),
        "update_time": ratio("time/update_s/last10"),
        "temporaries": ratio("memory/update_temporaries_bytes"),
        "device_peak": ratio("memory/device_peak_bytes"),
    }


def agreement(
    config: TrainConfig, a: list[dict[str, Any]], b: list[dict[str, Any]], *, sparse: bool = False
) -> dict[str, Any]:
    """The tests of the module's docstring, on the records of the baseline and of another arm.

    ``sparse``: one of them has a sparse backward.
    """
    pairs = list(zip(steps_of(a), steps_of(b), strict=False))
    if not pairs:
        raise ConfigError("ab: the arms have no step in common to compare")
    c = config.ab
    low = "bfloat16" in (config.model.compute_dtype, config.train.loss.logits_dtype)
    tolerance = c.loss_tolerance or (2e-2 if low else 1e-4)
    split = next((x["step"] for x, y in pairs if x["rollout/tokens_crc32"] != y["rollout/tokens_crc32"]), None)
    same = [(x, y) for x, y in pairs[: 1 if sparse else c.loss_steps] if split is None or x["step"] < split]
    updates = slice(1) if sparse else slice(None)
    losses = [_loss_difference(x["train/losses"][updates], y["train/losses"][updates]) for x, y in same]
    reward = _mean_test([(x["train/reward"], y["train/reward"]) for x, y in pairs], c.reward_sigmas, c.reward_tolerance)
    kl = _kl_tests(config, pairs, tolerance)
    losses_agree = bool(losses) and max(losses) <= tolerance
    kl_agree = all(test["agree"] for test in kl.values()) if kl else None
    compared = (
        "loss of the first update (the gradients of a sparse backward differ, and with them all later losses)"
        if sparse
        else f"losses of the first {len(losses)} steps (those with the same tokens, at most {c.loss_steps})"
    )
    noise = f"{c.reward_sigmas:g} standard errors of {BLOCKS} block means"
    return {
        "agree": losses_agree and reward["agree"] and kl_agree is not False,
        "losses_agree": losses_agree,
        "rewards_agree": reward["agree"],
        "kl_agree": kl_agree,
        "loss_steps": len(losses),
        "loss_difference": max(losses, default=None),
        "loss_tolerance": tolerance,
        "reward_difference": reward["difference"],
        "reward_standard_error": reward["standard_error"],
        "reward_limit": reward["limit"],
        **{f"{name}_{key}": v for name, test in kl.items() for key, v in test.items() if key != "agree"},
        "first_grad_norm_ratio": _first_ratio(*pairs[0]),
        "first_difference": split,
        "test": (
            f"{compared} within {tolerance:g} x max(1, |loss|); mean reward difference over {len(pairs)} steps within "
            f"max({c.reward_tolerance:g}, {noise})"
            + (f"; mean KL difference within max({c.kl_tolerance:g} x the baseline's, {noise})" if kl else "")
        ),
    }


def _kl_tests(
    config: TrainConfig, pairs: list[tuple[dict[str, Any], dict[str, Any]]], rounding: float
) -> dict[str, dict[str, Any]]:
    """The test of each KL estimate that both arms have measured."""
    c, out = config.ab, {}
    for name, key in KL.items():
        if all(key in x and key in y for x, y in pairs):
            values = [(x[key], y[key]) for x, y in pairs]
            known = [x for x, _ in values if x is not None]
            mean = sum(known) / len(known) if known else 0.0
            # Before the first update the KL is rounding; a share of next to nothing would be no tolerance.
            out[name] = _mean_test(values, c.reward_sigmas, c.kl_tolerance * max(abs(mean), rounding))
    return out


def _mean_test(values: list[tuple[float | None, float | None]], sigmas: float, tolerance: float) -> dict[str, Any]:
    """Mean difference of two curves, its standard error, and whether it is noise; a missing value is none."""
    known = [(x, y) for x, y in values if x is not None and y is not None]
    complete = bool(known) and all((x is None) == (y is None) for x, y in values)
    mean, error = block_mean([y - x for x, y in known]) if known else (0.0, 0.0)
    limit = max(tolerance, sigmas * error)
    agree = complete and abs(mean) <= limit
    return {"agree": agree, "difference": mean, "standard_error": error, "limit": limit}


def _first_ratio(x: dict[str, Any], y: dict[str, Any]) -> float | None:
    """Gradient norms of the first step: reported, not tested. (An on-policy loss hardly depends on the loss's code.)"""
    a, b = x.get("train/grad_norm"), y.get("train/grad_norm")
    return b / a if a and b is not None else None


def _loss_difference(a: list[float | None], b: list[float | None]) -> float:
    """The largest relative difference of a step's losses; one that is missing in one arm alone is infinite."""
    worst = 0.0
    for x, y in zip(a, b, strict=True):
        if x is None or y is None:
            worst = worst if x is y else math.inf
        else:
            worst = max(worst, abs(x - y) / max(1.0, abs(x)))
    return worst


def block_mean(values: list[float]) -> tuple[float, float]:
    """Mean, and its standard error from the means of up to ten consecutive blocks."""
    n = min(BLOCKS, len(values))
    edges = [round(i * len(values) / n) for i in range(n + 1)]
    means = [sum(values[i:j]) / (j - i) for i, j in itertools.pairwise(edges)]
    overall = sum(values) / len(values)
    if n < 2:
        return overall, 0.0
    centre = sum(means) / n
    return overall, math.sqrt(sum((m - centre) ** 2 for m in means) / (n - 1) / n)


def agreements(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Agreement with the baseline of every other arm, by its name; of both forms that ``ab.json`` has."""
    found = result["agreement"]
    return {list(result["arms"])[1]: found} if "agree" in found else found


def all_agree(result: dict[str, Any]) -> bool:
    """Every arm agrees with the baseline."""
    return all(a["agree"] for a in agreements(result).values())


ROWS = (
    ("sampled reward, first 10 steps", "train/reward_first10", 1, ".3f"),
    ("sampled reward, last 10 steps", "train/reward_last10", 1, ".3f"),
    ("held-out reward at the end", "eval/last", 1, ".3f"),
    ("KL, last 10 steps", "train/kl_last10", 1, ".4f"),
    ("left-out mass, last 10 steps", "train/left_out_mass_last10", 1, ".1e"),
    ("left-out mass of a token, largest", "train/left_out_mass_max", 1, ".1e"),
    ("step, mean of the last 10 (s)", "time/train/step_avg_last10_s", 1, ".3f"),
    ("update phase, last 10 (s)", "time/update_s/last10", 1, ".3f"),
    ("update's temporaries (MiB)", "memory/update_temporaries_bytes", 2**20, ",.1f"),
    ("device peak (MiB)", "memory/device_peak_bytes", 2**20, ",.1f"),
)
"""Label, key of the summary, unit and format of the table's rows."""


def table(result: dict[str, Any]) -> str:
    """The comparison as text."""
    summaries = {name: arm["summary"] for name, arm in result["arms"].items()}
    first, *others = summaries
    heads = [f"{name} ({s['loss_backend']})" for name, s in summaries.items()]
    marks = ["ratio"] if len(others) == 1 else [f"{name}/{first}" for name in others]
    widths = [max(len(h) + 2, 14) for h in heads]
    lines = [f"{result['name']:36s}" + "".join(f"{h:>{w}s}" for h, w in zip(heads, widths, strict=True))]
    lines[0] += "".join(f"{m:>{len(m) + 2}s}" for m in marks)
    for label, key, unit, form in ROWS:
        values = [s.get(key) for s in summaries.values()]
        if all(v is None for v in values):
            continue
        cells = ["-" if v is None else format(v / unit, form) for v in values]
        shares = [f"{v / values[0]:.3f}" if v and values[0] else "" for v in values[1:]]
        line = f"{label:36s}" + "".join(f"{c:>{w}s}" for c, w in zip(cells, widths, strict=True))
        lines.append((line + "".join(f"{x:>{len(m) + 2}s}" for x, m in zip(shares, marks, strict=True))).rstrip())
    for name, a in agreements(result).items():
        lines += _agreement_lines(a, "" if len(others) == 1 else f"{name} against {first}: ")
    agree = all_agree(result)
    lines.append("the arms agree" if agree else "THE ARMS DISAGREE")
    return "\n".join(lines)


def _agreement_lines(a: dict[str, Any], heading: str) -> list[str]:
    def within(agree: bool) -> str:
        return "within" if agree else "ABOVE"

    lines = [f"{heading}test: {a['test']}"]
    if a["loss_steps"]:
        lines.append(
            f"  losses: largest difference {a['loss_difference']:.1e} "
            f"({within(a['losses_agree'])} {a['loss_tolerance']:g})"
        )
    else:
        lines.append("  losses: the arms sampled different tokens from the first step on: NOT COMPARABLE")
    lines.append(
        f"  rewards: mean difference {a['reward_difference']:+.4f} +- {a['reward_standard_error']:.4f} "
        f"({within(a['rewards_agree'])} {a['reward_limit']:.4f})"
        + ("" if a["first_difference"] is None else f"; the tokens differ from step {a['first_difference']} on")
    )
    if a.get("first_grad_norm_ratio") is not None:
        lines.append(f"  gradient norm of the first step: {a['first_grad_norm_ratio']:.6f} of the baseline's (no test)")
    for key in KL:
        if f"{key}_difference" in a:
            ok = abs(a[f"{key}_difference"]) <= a[f"{key}_limit"]
            lines.append(
                f"  {key}: mean difference {a[f'{key}_difference']:+.2e} +- {a[f'{key}_standard_error']:.1e} "
                f"({within(ok)} {a[f'{key}_limit']:.1e})"
            )
    return lines


def curve(result: dict[str, Any], width: int = 10) -> str:
    """Curves of reward, and of KL and left-out mass where there are any: the mean of every ``width`` steps."""
    lines = []
    for label, key, form in (
        ("sampled reward", "train/reward", "7.3f"),
        ("KL", "train/kl", "9.4f"),
        ("left-out mass", "train/left_out_mass", "9.1e"),
    ):
        curves = {n: [r.get(key) for r in steps_of(arm["metrics"])] for n, arm in result["arms"].items()}
        curves = {n: values for n, values in curves.items() if any(v is not None for v in values)}
        if curves:
            lines.append(f"{label}, mean of every {width} steps:")
        for name, values in curves.items():
            blocks = [[v for v in values[i : i + width] if v is not None] for i in range(0, len(values), width)]
            cells = (format(sum(b) / len(b), form) if b else "-".rjust(int(form.split(".")[0])) for b in blocks)
            lines.append(f"  {name:10s}" + "".join(cells))
    return "\n".join(lines)
