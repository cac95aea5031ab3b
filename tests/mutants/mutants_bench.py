"""Faults in what measures and what is held to be measured: clocks, arms, ratios, gates, verification, baselines."""

from __future__ import annotations

from mutation import Mutant

CLOCKS = "tests/tools/test_clocks.py"
TURNS = "tests/bench/test_bench_turns.py"
BENCH = "tests/bench/test_bench.py"
PROGRAMS = "tests/bench/test_bench_programs.py"
CHECK = "tests/bench/test_gradcheck.py"


def m(file: str, old: str, new: str, *tests: str, survives: str = "") -> Mutant:
    return Mutant(f"{file}.py", old, new, tests, survives)


MUTANTS = [
    # clocks
    m(
        "tools/timing",
        "        jax.block_until_ready(f(*args))\n        times",
        "        f(*args)\n        times",
        CLOCKS,
    ),
    m("tools/timing", "    jax.block_until_ready(out)\n    return", "    return", CLOCKS),
    m("tools/timing", "* 1e3 / repeats", "* 1e3", CLOCKS),
    m("tools/timing", "    for _ in range(calls):\n        jax", "    for _ in range(0):\n        jax", CLOCKS),
    m("tools/timing", "p10_ms=ordered[round(0.1 * last)]", "p10_ms=ordered[round(0.9 * last)]", CLOCKS),
    m("tools/timing", "median_ms=statistics.median(ordered)", "median_ms=statistics.fmean(ordered)", CLOCKS),
    m("tools/timing", "float(sum(ms for _, ms in run)) for run in runs", "float(run[0][1]) for run in runs", CLOCKS),
    # arms and rounds
    m("bench/programs", 'gradients if arm.call == "gradients" else alone', "alone", PROGRAMS),
    m(
        "bench/programs",
        "return dict(loss=value, metrics=metrics, grads=grads)",
        "return dict(loss=value, metrics=metrics)",
        PROGRAMS,
    ),
    m("bench/programs", "(x[:1], x[1:]) if arm.frozen_head else (x, ())", "(x, ())", PROGRAMS),
    m("bench/microbench", 'took = part["turns"]', 'took = part["turns"][:1]', TURNS),
    m("bench/turns", "for i in range(rounds):", "for i in range(1):", TURNS),
    m("bench/microbench", "if all(k in turn for turn in took)]", "if any(k in turn for turn in took)]", TURNS),
    m(
        "bench/microbench",
        "agree = finite and record",
        "agree = record",
        f"{TURNS}::test_arms_whose_losses_disagree_do_not_pass",
    ),
    m(
        "bench/microbench",
        "<= tolerance * max(1.0,",
        "<= 1e9 * max(1.0,",
        f"{TURNS}::test_arms_whose_losses_disagree_do_not_pass",
    ),
    m(
        "bench/microbench",
        '["passed"] and agree and ran and met',
        '["passed"] and ran and met',
        f"{TURNS}::test_arms_whose_losses_disagree_do_not_pass",
    ),
    m(
        "bench/microbench",
        '["passed"] and agree and ran and met',
        '["passed"] and agree and ran',
        f"{TURNS}::test_a_missed_gate_fails_the_run_and_one_without_its_arm_does_not",
    ),
    m(
        "bench/microbench",
        '["passed"] and agree and ran and met',
        '["passed"] and agree and met',
        f"{TURNS}::test_an_arm_that_fails_fails_the_run",
    ),
    m(
        "bench/microbench",
        'record.get("verify", {"passed": True})["passed"] and agree',
        "agree",
        f"{BENCH}::test_a_kernel_that_does_not_verify_fails_the_run",
    ),
    m(
        "bench/microbench",
        "not (chosen[k].batch or chosen[k].objective)",
        "True",
        f"{TURNS}::test_an_arm_over_another_batch_has_a_loss_of_its_own",
    ),
    m(
        "bench/microbench",
        "6.0 * live * c.hidden",
        "6.0 * c.tokens * c.hidden",
        f"{BENCH}::test_roofline_and_what_is_achieved",
    ),
    m(
        "bench/arm",
        "temporaries=max(peak - size_in - size_out, 0)",
        "temporaries=max(peak - size_in, 0)",
        f"{BENCH}::test_device_memory_is_split",
    ),
    m(
        "bench/arm",
        "denominator=float(live.sum())",
        "denominator=float(live.size)",
        f"{BENCH}::test_wrong_rows_at_the_true_shape_are_seen",
    ),
    # ratios and bars
    m("bench/ratios", "math.log(x / y)", "math.log(y / x)", TURNS),
    m(
        "bench/ratios",
        "FASTER if high < 1 else SLOWER if low > 1 else NONE",
        "FASTER if middle < 0 else SLOWER",
        f"{TURNS}::test_a_difference_inside_its_interval_is_none",
    ),
    m(
        "bench/ratios",
        "len(T_95)) - 1]",
        "len(T_95)) - 1] * 0.5",
        f"{TURNS}::test_the_interval_covers_the_truth_as_often_as_it_says",
    ),
    m(
        "bench/ratios",
        "/ math.sqrt(len(d))",
        "/ len(d)",
        f"{TURNS}::test_the_interval_covers_the_truth_as_often_as_it_says",
    ),
    m("bench/ratios", "MET if most <= limit else", "MET if least <= limit else", f"{TURNS}::test_gates"),
    m("bench/ratios", "ok=state != MISSED", "ok=True", f"{TURNS}::test_gates"),
    m(
        "bench/ratios",
        "dict(value=None, limit=limit, state=UNMEASURED, ok=False)",
        "dict(value=None, limit=limit, state=UNMEASURED, ok=True)",
        f"{TURNS}::test_a_gate_whose_arm_failed_is_not_met",
    ),
    m(
        "bench/results",
        'ratio = y["median_ms"] / x["median_ms"]',
        'ratio = x["median_ms"] / y["median_ms"]',
        f"{BENCH}::test_compare_is_b_over_a",
    ),
    m("bench/results", 'f"{tb / ta:.3f}"', 'f"{ta / tb:.3f}"', f"{BENCH}::test_compare_is_b_over_a"),
    # verification and gradcheck
    m(
        "bench/verification",
        "checks.setdefault(repr(one), (name, one))",
        "checks.setdefault(one.level, (name, one))",
        f"{BENCH}::test_no_two_cases_share_a_verification_that_is_not_the_same",
    ),
    m(
        "bench/verification",
        "        dtype=c.dtype,\n",
        "",
        f"{BENCH}::test_no_two_cases_share_a_verification_that_is_not_the_same",
    ),
    m(
        "bench/verification",
        'backend=options.pop("backend", "auto")',
        'backend=options.pop("backend", "") and "auto" or "auto"',
        f"{BENCH}::test_no_two_cases_share_a_verification_that_is_not_the_same",
    ),
    m(
        "bench/gradcheck",
        '(record["abs_diff_loss"] / max(1.0, abs(ref.loss)), c.max_abs_diff_loss)',
        "(0.0, c.max_abs_diff_loss)",
        f"{CHECK}::test_a_wrong_loss_fails_although_its_gradient_is_right",
    ),
    m(
        "bench/gradcheck",
        'all(g["ok"] for g in record["gates"].values())',
        'any(g["ok"] for g in record["gates"].values())',
        f"{CHECK}::test_a_wrong_gradient_fails",
    ),
    m(
        "bench/gradcheck",
        "(error_kernel / max(error_ref, floor), c.contract)",
        "(0.0, c.contract)",
        f"{CHECK}::test_a_small_loss_of_accuracy_fails_the_contract",
    ),
    m(
        "bench/gradcheck",
        '(metrics["left_out_mass_max"], tolerance)',
        "(0.0, tolerance)",
        f"{CHECK}::test_more_left_out_than_allowed_fails",
    ),
    # baselines
    m(
        "tools/baselines",
        "(jnp.where(hit, 1.0, 0.0) - jnp.exp(z - lse[:, None]))",
        "(jnp.where(hit, 1.0, 0.0) + jnp.exp(z - lse[:, None]))",
        f"{PROGRAMS}::test_every_arm_has_the_loss_and_the_gradients_of_float64",
    ),
    m(
        "tools/baselines",
        "return target - jax.nn.logsumexp(z, axis=-1)",
        "return target",
        f"{PROGRAMS}::test_every_arm_has_the_loss_and_the_gradients_of_float64",
    ),
    m(
        "tools/baselines",
        "parts = lax.map(part, (h.reshape",
        "parts = lax.map(part, (h[::-1].reshape",
        f"{PROGRAMS}::test_every_arm_has_the_loss_and_the_gradients_of_float64",
    ),
]
