"""Faults in the objectives, their float64 oracle, and what carries their gradients."""

from __future__ import annotations

from mutation import Mutant

HAND = "tests/objectives/test_by_hand.py"
NAN = "tests/objectives/test_nan.py"
FAMILY = "tests/objectives/test_objectives.py"
METRICS = "tests/objectives/test_metrics.py"
DATACLASS = "tests/objectives/test_objective_dataclass.py"
NEVER = "tests/test_never.py"


def m(file: str, old: str, new: str, *tests: str, survives: str = "") -> Mutant:
    return Mutant(f"{file}.py", old, new, tests, survives)


MUTANTS = [
    # -- metrics as the peers log them, a reference head, the state of a loop
    m(
        "objectives/metrics",
        "total + of_nothing * (rows - count), rows",
        "total, rows",
        f"{METRICS}::test_sequence_level_metrics_as_trl_logs_them",
    ),
    m(
        "objectives/metrics",
        "total + of_nothing * (rows - count), rows",
        "total + of_nothing * (rows - count), count",
        f"{METRICS}::test_sequence_level_metrics_as_trl_logs_them",
    ),
    m(
        "objectives/metrics",
        'not x.counted.one_advantage and o.clip_metrics == "trl"',
        "False",
        f"{METRICS}::test_sequence_level_metrics_as_trl_logs_them",
    ),
    m(
        "objectives/metrics",
        "(~jnp.any(mask, axis=1, keepdims=True) if _whole_rows(o, x) else False)",
        "(~jnp.any(mask, axis=1, keepdims=True))",
        f"{METRICS}::test_sequence_level_metrics_as_trl_logs_them",
    ),
    m(
        "objectives/metrics",
        "jnp.sum(terms.policy) * counted.denominator",
        "jnp.sum(terms.policy) * counted.own_denominator",
        f"{METRICS}::test_the_kl_of_the_loss_policy_loss_and_coefficient",
    ),
    m(
        "objectives/metrics",
        "mask if terms.high_entropy is None else terms.high_entropy",
        "mask",
        "tests/objectives/test_loop_state.py",
    ),
    m(
        "objectives/loss",
        "kl = kl * exp(w) if o.kl_bias_correction else kl",
        "kl = kl",
        f"{METRICS}::test_the_kl_of_the_loss_policy_loss_and_coefficient",
    ),
    m(
        "objectives/policy_terms",
        "k2 = 0.5 * raw * raw",
        "k2 = 0.5 * d * d",
        f"{HAND}::test_k3_plus_has_the_gradient_of_an_unclamped_k2",
    ),
    m(
        "oracle/policy_terms",
        'if inside or o.kl == "k3+" else',
        "if inside else",
        f"{HAND}::test_k3_plus_has_the_gradient_of_an_unclamped_k2",
    ),
    m(
        "objectives/adaptive_entropy",
        "<= self.target, self.coef, 0.0",
        "<= self.target, self.coef, self.coef",
        "tests/objectives/test_loop_state.py",
    ),
    m(
        "objectives/adaptive_entropy",
        "entropy <= self.target, up",
        "entropy < self.target, up",
        "tests/objectives/test_loop_state.py",
    ),
    m(
        "arguments",
        "hidden, head, bias = jax.lax.stop_gradient(tuple(arrays))",
        "hidden, head, bias = tuple(arrays)",
        "tests/head/test_reference_head.py",
        survives="a second guard: the reference's log-probabilities carry no gradient either; this one spares work",
    ),
    m(
        "arguments",
        "logp = logp / jnp.asarray(o.temperature, jnp.float32)",
        "pass",
        "tests/head/test_reference_head.py",
    ),
    # -- NaN
    m(
        "objectives/policy_terms",
        "(a <= b) | jnp.isnan(a)",
        "a <= b",
        f"{NAN}::test_bounds_pass_a_nan_on_and_keep_their_tie_rules",
    ),
    m(
        "objectives/policy_terms",
        "(a >= b) | jnp.isnan(a)",
        "a >= b",
        f"{NAN}::test_bounds_pass_a_nan_on_and_keep_their_tie_rules",
    ),
    m("objectives/policy_terms", "(a <= b)", "(a < b)", f"{NAN}::test_bounds_pass_a_nan_on_and_keep_their_tie_rules"),
    m("objectives/policy_terms", "(a >= b)", "(a > b)", f"{NAN}::test_bounds_pass_a_nan_on_and_keep_their_tie_rules"),
    m(
        "objectives/loss",
        "contribution = contribution + jnp.where(unknown, jnp.nan, 0.0) * jnp.where(unknown, logp, 0.0)",
        "pass",
        f"{NAN}::test_a_nan_in_a_live_token_is_a_nan_in_the_loss",
    ),
    m(
        "objectives/loss",
        "unknown |= jnp.isnan(entropy)",
        "pass",
        f"{NAN}::test_a_nan_stays_in_the_quantile_and_on_the_right_side_of_every_bound",
    ),
    m(
        "objectives/loss",
        "entropy = jnp.where(x.mask, entropy, 0.0)",
        "pass",
        f"{NEVER}::test_masked_positions_change_nothing[clip-token-tokens]",
    ),
    m(
        "objectives/loss",
        "if o.entropy_coef is not None or o.top_entropy is not None:",
        "if True:",
        f"{NAN}::test_a_nan_entropy_that_nobody_reads_changes_nothing",
    ),
    m(
        "objectives/inputs",
        "weight = jnp.where(jnp.isnan(x), jnp.nan, weight)",
        "pass",
        f"{NAN}::test_a_nan_in_an_input_of_a_live_token_is_a_nan_in_the_loss",
    ),
    m(
        "objectives/inputs",
        "None if objective.beta is None else ref)",
        "ref)",
        f"{NAN}::test_a_reference_that_nobody_reads_and_a_temperature_of_a_masked_token_change_nothing",
    ),
    m(
        "objectives/correction",
        "sequences.mask & ~jnp.isnan(rollout)",
        "sequences.mask",
        f"{NAN}::test_a_missing_rollout_value_is_no_correction_for_its_token",
    ),
    m(
        "objectives/correction",
        "~(drift > objective",
        "(drift <= objective",
        f"{NAN}::test_a_nan_stays_in_the_quantile_and_on_the_right_side_of_every_bound",
    ),
    m(
        "objectives/correction",
        " | (mask & jnp.isnan(entropy))",
        "",
        f"{NAN}::test_a_nan_stays_in_the_quantile_and_on_the_right_side_of_every_bound",
    ),
    m(
        "objectives/correction",
        "jnp.where(jnp.isnan(sampler), 0.0, sampler",
        "jnp.where(False, 0.0, sampler",
        f"{NAN}::test_a_missing_rollout_value_is_no_correction_for_its_token",
    ),
    m(
        "objectives/policy_terms",
        "jnp.where(jnp.isinf(phi), 0.0, phi)",
        "phi",
        f"{HAND}::test_vespo_phi_that_overflows_is_zero",
    ),
    m(
        "oracle/losses",
        "    if unknown.any():\n",
        "    if False:\n",
        f"{NAN}::test_a_nan_in_a_live_token_is_a_nan_in_the_loss",
    ),
    m(
        "oracle/losses",
        "0.0 if np.isnan(rollout) else old - rollout",
        "old - rollout",
        f"{NAN}::test_a_missing_rollout_value_is_no_correction_for_its_token",
    ),
    m(
        "oracle/losses",
        "0.0 if np.isnan(b) else b - logp",
        "b - logp",
        f"{NAN}::test_a_missing_rollout_value_is_no_correction_for_its_token",
    ),
    # -- the policy term
    m(
        "objectives/policy_terms",
        "exp(sequences.mean(q))",
        "exp(sequences.total(q))",
        f"{HAND}::test_gmpo_is_a_geometric_mean_over_the_tokens_of_a_sequence",
    ),
    m(
        "oracle/losses",
        "gmpo_mean = sum(q for q, _ in gmpo_logs) / n",
        "gmpo_mean = sum(q for q, _ in gmpo_logs)",
        f"{HAND}::test_gmpo_is_a_geometric_mean_over_the_tokens_of_a_sequence",
    ),
    m(
        "oracle/losses",
        "d_gmpo_mean * gmpo_logs[t][1] * moves[t] / n",
        "d_gmpo_mean * gmpo_logs[t][1] * moves[t]",
        f"{HAND}::test_gmpo_is_a_geometric_mean_over_the_tokens_of_a_sequence",
    ),
    m(
        "objectives/policy_terms",
        "jnp.where(advantage > 0, minimum",
        "jnp.where(advantage < 0, minimum",
        f"{HAND}::test_gmpo_is_a_geometric_mean_over_the_tokens_of_a_sequence",
    ),
    m(
        "objectives/policy_terms",
        "1.0 - jnp.asarray(o.eps_low), 1.0 + jnp.asarray(o.eps_high))\n    if o.delta",
        "1.0 - jnp.asarray(o.eps_high), 1.0 + jnp.asarray(o.eps_low))\n    if o.delta",
        f"{FAMILY}::test_clip_options[token]",
    ),
    m(
        "objectives/policy_terms",
        "clip(c1, None, o.delta)",
        "clip(c1, o.delta, None)",
        f"{FAMILY}::test_clip_options[token]",
    ),
    m(
        "objectives/policy_terms",
        "advantage < 0, minimum(loss",
        "advantage > 0, minimum(loss",
        f"{FAMILY}::test_clip_options[token]",
    ),
    m(
        "objectives/policy_terms",
        "jnp.minimum(c1, o.eps_high)",
        "jnp.minimum(c1, 1.0 + o.eps_high)",
        f"{FAMILY}::test_cispo_bounds[token]",
    ),
    m(
        "objectives/policy_terms",
        "tau = jnp.where(advantage > 0, o.tau_pos, o.tau_neg)",
        "tau = jnp.where(advantage > 0, o.tau_neg, o.tau_pos)",
        f"{FAMILY}::test_sapo_and_vespo_numbers",
    ),
    m("objectives/policy_terms", "(4.0 / tau)", "4.0", f"{FAMILY}::test_sapo_and_vespo_numbers"),
    m(
        "objectives/policy_terms",
        "k = jnp.where(advantage >= 0, o.vespo_k_pos, o.vespo_k_neg)",
        "k = jnp.where(advantage >= 0, o.vespo_k_neg, o.vespo_k_pos)",
        f"{FAMILY}::test_sapo_and_vespo_numbers",
    ),
    m("objectives/policy_terms", "jnp.clip(total, math.log(1e-8), 20.0)", "total", f"{HAND}::test_vespo_clamps"),
    m(
        "objectives/policy_terms",
        "jnp.clip(jax.lax.stop_gradient(r), -20.0, 20.0)",
        "jax.lax.stop_gradient(r)",
        f"{HAND}::test_vespo_clamps",
    ),
    m(
        "objectives/policy_terms",
        "safe_w = jnp.where(moves, w, 0.0)",
        "safe_w = w",
        f"{FAMILY}::test_zero_advantage_is_zero_even_where_the_ratio_overflows[clip-token]",
        f"{FAMILY}::test_zero_advantage_is_zero_even_where_the_ratio_overflows[sapo-token]",
        survives="a second guard: the select at the end and the finite slope of exp keep 0 * inf out as well",
    ),
    m(
        "objectives/policy_terms",
        "w = (logp - frozen) + jax.lax.stop_gradient(w)",
        "w = (logp - frozen) + w",
        f"{HAND}::test_gspo_and_gspo_token_take_the_mean_log_ratio",
    ),
    m(
        "objectives/policy_terms",
        "clip(w, None, objective.sequence_log_ratio_max)",
        "w",
        f"{HAND}::test_log_ratio_clamps",
    ),
    m(
        "objectives/policy_terms",
        "r = clip(r, -jnp.asarray(objective.log_ratio_clamp), objective.log_ratio_clamp)",
        "r = clip(r, None, objective.log_ratio_clamp)",
        f"{HAND}::test_log_ratio_clamps",
    ),
    m(
        "objectives/policy_terms",
        "jnp.where(jnp.isinf(y), jnp.finfo(y.dtype).max, y)",
        "y",
        f"{FAMILY}::test_an_overflowing_ratio_meets_its_bound_without_nan",
    ),
    m(
        "oracle/policy_terms",
        "if phi == np.inf:\n        phi = 0.0",
        "if phi == np.inf:\n        phi = 1.0",
        f"{HAND}::test_vespo_phi_that_overflows_is_zero",
    ),
    # -- KL
    m("objectives/policy_terms", "kl = -d\n", "kl = d\n", f"{FAMILY}::test_kl[k1-False]"),
    m(
        "objectives/policy_terms",
        "kl = jax.lax.stop_gradient(kl) + (k2 - jax.lax.stop_gradient(k2))",
        "kl = k2",
        f"{FAMILY}::test_kl[k3+-False]",
    ),
    m(
        "objectives/policy_terms",
        "jnp.abs(d) < 0.5",
        "jnp.abs(d) < 5.0",
        f"{FAMILY}::test_k3_keeps_its_digits_where_training_lives",
    ),
    m(
        "objectives/policy_terms",
        "small = jnp.abs(d) < 0.5",
        "small = jnp.abs(d) < 0.0",
        f"{FAMILY}::test_k3_keeps_its_digits_where_training_lives",
    ),
    m(
        "objectives/policy_terms",
        "clip(kl, -jnp.asarray(clamp), clamp)",
        "clip(kl, None, clamp)",
        f"{FAMILY}::test_kl[k1-False]",
    ),
    m(
        "objectives/loss",
        "kl * exp(w) if o.kl_bias_correction",
        "kl * exp(r) if o.kl_bias_correction",
        f"{FAMILY}::test_kl[k3-True]",
    ),
    # -- weights, masks
    m(
        "objectives/loss",
        "loss = jnp.where(correction != 0, loss, 0.0) * correction",
        "loss = loss * correction",
        f"{FAMILY}::test_a_dropped_token_is_dropped_even_where_its_loss_is_infinite",
    ),
    m(
        "objectives/loss",
        "loss = jnp.where(keep, loss, 0.0)",
        "loss = loss * jnp.where(keep, 1.0, 0.0)",
        f"{FAMILY}::test_a_dropped_token_is_dropped_even_where_its_loss_is_infinite",
    ),
    m(
        "objectives/loss",
        "correction = own if correction is None else correction * own",
        "correction = own",
        f"{HAND}::test_token_weights_of_a_row_are_those_of_its_tokens",
    ),
    m(
        "objectives/loss",
        "own if log_correction is None else log_correction + own",
        "own",
        f"{HAND}::test_vespo_folds_token_weights_in",
    ),
    m(
        "objectives/loss",
        'per_token=o.correction != "sequence"',
        "per_token=True",
        f"{HAND}::test_vespo_folds_token_weights_in",
    ),
    m(
        "objectives/inputs",
        "given if correction is None else correction * given",
        "given",
        f"{HAND}::test_token_weights_of_a_row_are_those_of_its_tokens",
    ),
    m(
        "objectives/inputs",
        "per_token=as_given.shape == sequences.mask.shape",
        "per_token=True",
        f"{HAND}::test_vespo_folds_token_weights_in",
    ),
    m(
        "objectives/inputs",
        'per_token=objective.correction != "sequence"',
        "per_token=True",
        f"{FAMILY}::test_correction[sequence-truncate]",
    ),
    m(
        "objectives/correction",
        "inside &= ~(weight < low)",
        "pass",
        f"{FAMILY}::test_correction[token-mask]",
    ),
    m(
        "objectives/correction",
        'rollout is None or objective.off_policy_from == "old"',
        "rollout is None",
        f"{HAND}::test_the_off_policy_mask_measures_from_rollout_or_old_and_drops_nothing_without_either",
    ),
    m(
        "objectives/correction",
        "(advantage >= 0) | ",
        "(advantage > 0) | ",
        f"{HAND}::test_the_off_policy_mask_keeps_a_token_without_an_advantage",
    ),
    m(
        "objectives/correction",
        "delta = sequences.mean(delta)",
        "delta = sequences.total(delta)",
        f"{FAMILY}::test_correction[geometric-truncate]",
    ),
    m(
        "objectives/correction",
        "kept = (ordered >= threshold)",
        "kept = (ordered > threshold)",
        f"{FAMILY}::test_top_entropy_and_entropy_bonus[None]",
    ),
    m(
        "objectives/correction",
        "jnp.where(low < high, low + (position - below) * (high - low), low)",
        "low + (position - below) * (high - low)",
        f"{FAMILY}::test_equal_entropies_are_all_on_the_quantile",
        survives="in this form equal finite numbers interpolate exactly; compilers may choose another",
    ),
    m(
        "objectives/loss",
        "count = x.entropy_denominator\n    if count is None:",
        "count = None\n    if count is None:",
        f"{HAND}::test_the_entropy_denominator_replaces_the_kept_tokens_of_top_entropy",
    ),
    m(
        "objectives/loss",
        "return moving if x.correction is None else moving & (x.correction != 0)",
        "return moving",
        f"{NAN}::test_a_nan_or_a_bad_live_target_is_a_nan_in_every_loss",
        survives="a token less to skip: slower, to the same result",
    ),
    m(
        "objectives/loss",
        "if o.beta is not None or o.entropy_coef is not None:\n        return x.mask\n",
        "if o.beta is not None:\n        return x.mask\n",
        f"{HAND}::test_an_entropy_bonus_alone_moves_the_head",
    ),
    # -- aggregation
    m(
        "objectives/aggregate",
        "share = share / sequences.lengths()",
        "pass",
        f"{FAMILY}::test_policy_level_aggregation[clip-token]",
    ),
    m(
        "objectives/aggregate",
        "return count * jnp.asarray(objective.max_length, jnp.float32)",
        "return jnp.asarray(objective.max_length, jnp.float32)",
        f"{HAND}::test_empty_rows_count_or_do_not",
    ),
    m(
        "objectives/aggregate",
        'objective.count_rows == "non_empty"',
        "False",
        f"{HAND}::test_empty_rows_count_or_do_not",
    ),
    m(
        "objectives/aggregate",
        "jnp.any(self.mask, axis=1)",
        "jnp.all(self.mask, axis=1)",
        f"{HAND}::test_empty_rows_count_or_do_not",
    ),
    m(
        "objectives/aggregate",
        "jnp.maximum(jnp.round(jnp.sum(share)), 1.0)",
        "jnp.sum(share) + 1.0",
        f"{FAMILY}::test_segments_without_valid_tokens_do_not_count",
    ),
    m(
        "objectives/aggregate",
        "index + width * jnp.arange(rows)[:, None]",
        "index",
        f"{FAMILY}::test_segments_of_a_row_are_the_sequences_of_unpacked_rows",
    ),
    m(
        "objectives/aggregate",
        "(accumulation / steps_per_generation)",
        "(steps_per_generation / accumulation)",
        f"{FAMILY}::test_dapo_denominator",
    ),
    m("oracle/losses", 'if s or o.count_rows == "all"', "", f"{HAND}::test_empty_rows_count_or_do_not"),
    # -- inputs
    m(
        "objectives/inputs",
        "jnp.asarray(v, jnp.float32), objective)",
        "jnp.asarray(v), objective)",
        f"{HAND}::test_the_loss_is_float32_under_x64",
    ),
    m(
        "objectives/inputs",
        "live & (beta != 0)",
        "live & (beta == 0)",
        "tests/test_bad_input.py::test_a_missing_ref_with_a_traced_beta[policy_loss]",
    ),
    m(
        "objectives/inputs",
        "temperature = jnp.where(mask, jnp.asarray(temperature, jnp.float32), 1.0)",
        "pass",
        f"{NAN}::test_a_reference_that_nobody_reads_and_a_temperature_of_a_masked_token_change_nothing",
    ),
    m(
        "objectives/advantages",
        "jnp.where(centred == 0, 0.0, centred / (std + eps))",
        "centred / (std + eps)",
        f"{HAND}::test_equal_rewards_have_no_advantage_even_without_eps",
    ),
    m(
        "objectives/advantages",
        "(group_size / (group_size - 1))",
        "(group_size / (group_size + 1))",
        f"{HAND}::test_a_leave_one_out_baseline",
    ),
    m(
        "objectives/advantages",
        "shifted = r - r[:, :1]",
        "shifted = r",
        f"{FAMILY}::test_a_group_of_equal_rewards_has_no_advantage",
    ),
    m(
        "validation",
        "positive and known and not value > 0",
        "positive and isinstance(value, (int, float)) and not value > 0",
        "tests/test_bad_input.py::test_bad_input",
    ),
    # -- metrics
    m(
        "objectives/metrics",
        "(a < 0) & (raw > o.dual_clip)",
        "(a < 0) & (ratio > o.dual_clip)",
        f"{HAND}::test_the_dual_clip_counts_negative_advantages_beyond_its_constant_before_delta",
    ),
    m(
        "objectives/metrics",
        "(a < 0) & (raw > o.dual_clip)",
        "raw > o.dual_clip",
        f"{HAND}::test_the_dual_clip_counts_negative_advantages_beyond_its_constant_before_delta",
    ),
    m(
        "objectives/metrics",
        "stats.logp if x.logp_temperature is None else stats.logp / x.logp_temperature",
        "stats.logp",
        f"{HAND}::test_the_kl_of_the_metrics_is_that_of_the_loss_under_a_temperature_of_logp",
    ),
    m(
        "objectives/metrics",
        "1.0 if per_token else 1.0 / sequences.lengths()",
        "1.0",
        "tests/objectives/test_disagreements.py::test_6_clip_metrics",
        "tests/objectives/test_disagreements.py",
    ),
    m(
        "objectives/metrics",
        'if name.endswith("_min"):',
        'if name.endswith("_mini"):',
        f"{METRICS}::test_reduce_metrics_takes_extremes_and_refuses_different_sets",
    ),
    m(
        "objectives/metrics",
        "(g_logp == 0) & (g_entropy == 0)",
        "g_logp == 0",
        f"{METRICS}::test_zero_gradient_tokens_counts_clipped_dropped_and_unrewarded_tokens",
    ),
    m(
        "objectives/metrics",
        "            values[name] = 0.0\n",
        '            values[name] = float("nan")\n',
        f"{METRICS}::test_a_micro_batch_with_nothing_in_it_changes_no_metric",
    ),
    m(
        "objectives/metrics",
        "Metric(counted.rollout_missing, tokens)",
        "Metric(tokens - counted.rollout_missing, tokens)",
        f"{NAN}::test_a_missing_rollout_value_is_no_correction_for_its_token",
    ),
    m(
        "objectives/metrics",
        "jnp.minimum(ratio, o.delta)",
        "ratio",
        "tests/objectives/test_disagreements.py::test_6_clip_metrics",
        "tests/objectives/test_disagreements.py",
    ),
    # -- what carries the gradients
    m(
        "stats",
        "(self.logp != 0) | (self.entropy != 0) | (self.lse != 0)",
        "(self.logp != 0) | (self.entropy != 0)",
        f"{HAND}::test_an_lse_cotangent_alone_moves_the_logits_and_the_head",
    ),
    m(
        "vjp",
        "(d.astype(jnp.float32) * g).astype(d.dtype)",
        "d",
        f"{HAND}::test_the_gradient_of_three_times_a_loss_is_three_times_its_gradient",
    ),
    m(
        "oracle/linear",
        "dw[: len(w)] += dx.T @ block",
        "dw[: len(w)] = dx.T @ block",
        f"{HAND}::test_the_oracle_adds_up_its_blocks_of_rows",
    ),
    m(
        "oracle/linear",
        "db[: len(w)] += dx.sum(axis=0)",
        "db[: len(w)] = dx.sum(axis=0)",
        f"{HAND}::test_the_oracle_adds_up_its_blocks_of_rows",
    ),
    # -- the Objective
    m(
        "objectives/objective",
        "if not plain or value != f.default:",
        "if value is not None:",
        f"{DATACLASS}::test_its_repr_shows_what_differs_from_the_defaults",
    ),
    m(
        "objectives/presets",
        'fields["sequence_log_ratio_max"] = 10.0',
        "pass",
        "tests/objectives/test_disagreements.py::test_presets_verl_and_tunix",
    ),
    m(
        "objectives/presets",
        'fields.pop("log_ratio_clamp")',
        "pass",
        "tests/objectives/test_disagreements.py::test_presets_verl_and_tunix",
    ),
]
