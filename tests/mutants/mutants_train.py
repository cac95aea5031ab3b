"""Faults in the trainer: what a step is made of, the schedule, what a resumed run goes on with, and the A/B verdict."""

from __future__ import annotations

from mutation import Mutant

SETTINGS = "tests/train/test_train_settings.py"
LOOP = "tests/train/test_train_loop.py"
REPLAY = "tests/train/test_ab_replay.py"
FREE = "tests/train/test_ab_free.py"
BACKWARD = "tests/train/test_train_backward.py"
WEIGHTS = "tests/train/test_train_weights.py"
DECODE = "tests/train/test_train_decode.py"


def m(file: str, old: str, new: str, *tests: str, survives: str = "") -> Mutant:
    return Mutant(f"train/{file}.py", old, new, tests, survives)


MUTANTS = [
    m(
        "trainer",
        "reference = frozen.params if frozen.params is not None else params",
        "reference = params",
        f"{LOOP}::test_the_first_update_is_on_policy_to_the_bit_and_the_second_is_not",
    ),
    m(
        "collect",
        "key = jax.random.fold_in(jax.random.fold_in(t.key, _ROLLOUT), step)",
        "key = jax.random.fold_in(t.key, _ROLLOUT)",
        f"{SETTINGS}::test_a_step_has_noise_of_its_own",
    ),
    m(
        "trainer",
        "part.rows(i % t.minibatches * rows, rows)",
        "part.rows(0, rows)",
        f"{SETTINGS}::test_every_minibatch_has_rows_of_its_own",
    ),
    m(
        "trainer",
        "part = batch if i == 0 else batch.with_logp(old_logp=old)",
        "part = batch",
        f"{SETTINGS}::test_every_minibatch_has_rows_of_its_own",
    ),
    m(
        "trainer",
        "scale=t.advantage_scale, eps=t.advantage_eps)",
        "eps=t.advantage_eps)",
        f"{SETTINGS}::test_advantages_follow_their_scale_and_eps",
    ),
    m(
        "trainer",
        "scale=t.advantage_scale, eps=t.advantage_eps)",
        "scale=t.advantage_scale)",
        f"{SETTINGS}::test_advantages_follow_their_scale_and_eps",
    ),
    m(
        "update",
        "        optax.clip_by_global_norm(t.clip_norm),\n",
        "",
        f"{SETTINGS}::test_the_norm_is_clipped_before_the_moments",
    ),
    m(
        "update",
        ", weight_decay=t.weight_decay)",
        ", weight_decay=0.0)",
        f"{SETTINGS}::test_weight_decay_pulls_weights_without_a_gradient",
    ),
    m(
        "update",
        "step = count // inner",
        "step = count",
        f"{SETTINGS}::test_the_schedule_counts_steps_and_not_the_updates_inside_one",
    ),
    m(
        "update",
        "(step + 1) / max(t.warmup_steps, 1)",
        "step / max(t.warmup_steps, 1)",
        f"{SETTINGS}::test_the_schedule_counts_steps_and_not_the_updates_inside_one",
    ),
    m(
        "update",
        "(step - t.warmup_steps) / max(t.steps - t.warmup_steps, 1)",
        "step / max(t.steps, 1)",
        f"{SETTINGS}::test_schedules_begin_after_the_warm_up",
    ),
    m("update", "0.5 * (1.0 + jnp.cos(jnp.pi * x))", "1.0 - x", f"{SETTINGS}::test_schedules_begin_after_the_warm_up"),
    m(
        "records",
        "(groups.min(axis=1) != groups.max(axis=1)).mean()",
        "(groups.min(axis=1) == groups.max(axis=1)).mean()",
        f"{SETTINGS}::test_mixed_groups_are_those_whose_rewards_differ",
    ),
    m(
        "records",
        "rolled.rewards.reshape(-1, group_size)",
        "rolled.rewards.reshape(group_size, -1)",
        f"{SETTINGS}::test_mixed_groups_are_those_whose_rewards_differ",
    ),
    m("folder", 'if r["step"] <= last_step]', "if True]", f"{SETTINGS}::test_records_after_the_checkpoint_are_dropped"),
    m(
        "loop",
        'skipped_in_a_row = notes["skipped_in_a_row"]',
        "skipped_in_a_row = 0",
        f"{SETTINGS}::test_a_longer_run_goes_on_after_its_checkpoint_with_its_count_of_skipped_steps",
    ),
    m(
        "compare",
        "return b / a if a and b else None",
        "return a / b if a and b else None",
        f"{SETTINGS}::test_a_ratio_is_the_other_arm_over_the_baseline",
    ),
    # the verdict of an A/B
    m(
        "replay",
        "limit = config.ab.replay_factor * reach + ULPS",
        "limit = 3 * config.ab.replay_factor * reach + ULPS",
        f"{REPLAY}::test_the_limit_is_what_the_docstring_says",
    ),
    m(
        "replay",
        "reach = max(reach, c[key] if np.isfinite(c[key]) else 0.0)",
        "reach = c[key] if np.isfinite(c[key]) else 0.0",
        f"{REPLAY}::test_the_limit_is_what_the_docstring_says",
    ),
    m(
        "replay",
        "limit += DECISIONS / max(tokens[step - 1], 1) * way",
        "limit += DECISIONS * way",
        f"{REPLAY}::test_the_limit_is_what_the_docstring_says",
    ),
    m(
        "replay",
        '"weights": _rms(a.weights, b.weights),',
        '"weights": 0.0,',
        f"{REPLAY}::test_each_quantity_counts",
    ),
    m(
        "replay",
        '"logp": _rms(a.logp, b.logp),',
        '"logp": 0.0,',
        f"{REPLAY}::test_each_quantity_counts",
    ),
    m(
        "replay",
        "np.any(np.isfinite(a) != np.isfinite(b))",
        "False",
        f"{REPLAY}::test_what_is_not_finite_or_does_not_fit_is_a_difference",
    ),
    m(
        "replay",
        "True if forward_only or trained else None",
        "True",
        f"{REPLAY}::test_steps_without_a_gradient_prove_nothing",
    ),
    m(
        "replay",
        'judged = rows[: 1 if key == "logp" else 0] if forward_only else rows',
        "judged = rows[:0] if forward_only else rows",
        f"{REPLAY}::test_an_arm_that_is_approximate_by_design_is_judged_by_its_forward",
    ),
    m(
        "backward",
        "i = model.num_layers - 1 - n",
        "i = n",
        f"{BACKWARD}::test_gradients_are_those_of_plain_differentiation",
    ),
    m("backward", "s.at[i].add(d)", "s.at[i].set(d)", f"{BACKWARD}::test_gradients_are_those_of_plain_differentiation"),
    m(
        "backward",
        "name: sums[name] + dhead",
        "name: dhead",
        f"{BACKWARD}::test_gradients_are_those_of_plain_differentiation",
    ),
    m(
        "dequantise",
        "(low & 15) | ((a >> 2) & 48)",
        "(low & 15) | ((a >> 2) & 16)",
        f"{WEIGHTS}::test_every_kind_of_blocks_is_dequantised_to_the_same_bits",
    ),
    m(
        "dequantise",
        "_bits(low, 64, (0, 4), 15)",
        "_bits(low, 32, (0, 4), 15)",
        f"{WEIGHTS}::test_every_kind_of_blocks_is_dequantised_to_the_same_bits",
    ),
    m(
        "gguf",
        "_numbers(data, kind, permuted, out.dtype).T, i, 0)",
        "_numbers(data, kind, 0, out.dtype).T, i, 0)",
        f"{WEIGHTS}::test_a_gguf_dequantised_on_the_device_is_the_same",
    ),
    m(
        "decode",
        "left = jnp.argsort(state.done, stable=True)[:small]",
        "left = jnp.arange(small)",
        f"{DECODE}::test_stages_and_rows_that_make_room_change_nothing",
    ),
]
