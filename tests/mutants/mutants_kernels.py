"""Faults in the statistics, the transform, the TPU and Hopper kernels, and what a mesh does between them."""

from __future__ import annotations

from mutation import Mutant

CONSTANT = "tests/logits/test_constant_temperature.py"
HAND = "tests/objectives/test_by_hand.py"
NUMERICS = "tests/logits/test_logits_numerics.py"
TPU_HEAD = "tests/head/test_head_pallas_tpu.py"
ROWS_AT = "tests/head/test_rows_at.py"
KEPT = "tests/head/test_kept_exponentials.py"
TPU_LORA = "tests/head/test_pallas_tpu_lora.py"
TPU_SPARSE_HEADS = "tests/head/test_pallas_tpu_sparse_heads.py"
TPU_SPARSE = "tests/head/test_pallas_tpu_sparse.py"
TPU_LOGITS = "tests/logits/test_logits_pallas_tpu.py"
GPU_HEAD = "tests/head/test_head_mosaic_gpu.py"
GPU_SPARSE = "tests/head/test_mosaic_gpu_sparse.py"
GPU_LOGITS = "tests/logits/test_logits_mosaic_gpu.py"
MESH = "tests/mesh/test_sharding_calls.py"
NEVER = "tests/test_never.py"
SPARSE = "tests/head/test_sparse_backward.py"


def m(file: str, old: str, new: str, *tests: str, survives: str = "") -> Mutant:
    return Mutant(f"{file}.py", old, new, tests, survives)


MUTANTS = [
    # the same z in every pass
    m(
        "stats",
        "return times(k, u - s.peak) + s.max_logp",
        "return (times(k, u) - s.max_logit) + s.max_logp",
        f"{CONSTANT}::test_statistics_of_logits[chunked-known-64]",
    ),
    m(
        "stats",
        "times(k, jnp.where(seen, shifted, 0.0))",
        "jnp.where(seen, shifted, 0.0)",
        f"{CONSTANT}::test_statistics_of_logits[chunked-known-64]",
    ),
    m(
        "stats",
        "lead = _product(k, u_y - jnp.where(others_seen, m, 0.0))",
        "lead = u_y - jnp.where(others_seen, m, 0.0)",
        f"{CONSTANT}::test_statistics_of_logits[chunked-known-64]",
    ),
    m(
        "stats",
        "lse = jnp.where(margin > 0, _product(k, m) + gap",
        "lse = jnp.where(margin > 0, m + gap",
        f"{CONSTANT}::test_statistics_of_logits[chunked-known-64]",
    ),
    m(
        "stats",
        "max_logit=known(_product(k, jnp.maximum(m, u_y)))",
        "max_logit=known(jnp.maximum(m, u_y))",
        f"{GPU_HEAD}::test_the_merge_of_runs",
    ),
    m(
        "transform",
        "k = transform.scale if transform.softcap is None else transform.softcap",
        "k = transform.scale",
        f"{CONSTANT}::test_with_a_scale_a_softcap_a_temperature_of_each_token",
    ),
    m(
        "transform",
        "return jnp.tanh(u * (scale / jnp.asarray(transform.softcap, jnp.float32)))",
        "return u * (scale / jnp.asarray(transform.softcap, jnp.float32))",
        f"{CONSTANT}::test_with_a_scale_a_softcap_a_temperature_of_each_token",
    ),
    m(
        "transform",
        "times(k, 1.0 - jnp.square(swept(x, transform)))",
        "k",
        f"{CONSTANT}::test_with_a_scale_a_softcap_a_temperature_of_each_token",
    ),
    m(
        "head/slabs",
        "index[None, :] == p.targets[:, None], stats, g, factor(t))",
        "index[None, :] == p.targets[:, None], stats, g)",
        f"{SPARSE}::test_logprobs_with_every_option",
    ),
    # passes over rows that a CPU's cache holds
    m(
        "rows",
        "others = jnp.where(moves, known.e * (a - b * known.shifted), 0.0)",
        "others = known.e * (a - b * known.shifted)",
        f"{NEVER}::test_masked_tokens_of_a_loss_change_nothing[grpo_loss-chunked-False]",
    ),
    m(
        "rows",
        "jnp.where((e == 0) | ~moves, 0.0, e * (a - b * difference))",
        "jnp.where(e == 0, 0.0, e * (a - b * difference))",
        f"{NEVER}::test_masked_tokens_of_a_loss_change_nothing[grpo_loss-chunked-True]",
    ),
    m(
        "rows",
        "target = jnp.where(here, own, 0.0)",
        "target = own",
        f"{MESH}::test_logits[chunked-token-tensor]",
    ),
    m(
        "rows",
        "(a, b), at_target, moves = _row_terms(centre[:, None], p, stats, g)",
        "(a, b), at_target, moves = _row_terms(stats.peak[:, None], p, stats, g)",
        f"{NUMERICS}::test_token_loss_and_general_way_agree",
    ),
    # cotangents
    m(
        "vjp",
        "    g = _instantiate(ct[0])\n",
        "    g = jnp.float32(1.0)\n",
        f"{HAND}::test_the_gradient_of_three_times_a_loss_is_three_times_its_gradient",
    ),
    m(
        "stats",
        "(self.logp != 0) | (self.entropy != 0) | (self.lse != 0)",
        "(self.logp != 0) | (self.lse != 0)",
        f"{HAND}::test_an_entropy_bonus_alone_moves_the_head",
    ),
    m(
        "stats",
        "at_target = p * g.lse + g.logp * rest - g.entropy * spread",
        "at_target = p * g.lse + g.logp * rest",
        f"{CONSTANT}::test_statistics_of_logits[chunked-known-64]",
    ),
    m(
        "stats",
        "rest = -jnp.expm1(s.logp) if rest is None else rest",
        "rest = 1.0 - jnp.exp(s.logp) if rest is None else rest",
        f"{NUMERICS}::test_collapsed_rows_keep_their_relative_precision",
    ),
    m(
        "stats",
        "others_seen = m != NEG_INF",
        "others_seen = m > NEG_INF",
        f"{NUMERICS}::test_a_nan_in_one_column_is_in_every_statistic_of_its_row",
    ),
    # TPU
    m(
        "head/pallas_tpu/forward",
        "(acc.total, acc.centred, acc.squares, acc.target)",
        "(acc.total, acc.centred, acc.target)",
        f"{TPU_HEAD}::test_contract[ragged tokens, hv, per-token temperature, bias]",
    ),
    m(
        "head/pallas_tpu/forward",
        "step = times(k, sums.maximum - m)",
        "step = sums.maximum - m",
        f"{TPU_HEAD}::test_contract[ragged tokens, hv, per-token temperature, bias]",
    ),
    m(
        "head/pallas_tpu/forward",
        "u = jnp.where(column < limit - at, u, NEG_INF)",
        "u = jnp.where(column <= limit - at, u, NEG_INF)",
        f"{TPU_HEAD}::test_contract[dead tiles, padding fills whole tiles]",
    ),
    m(
        "head/pallas_tpu/backward",
        "values = [times(k, v) for v in values]",
        "values = [v for v in values]",
        f"{TPU_HEAD}::test_contract[ragged tokens, hv, per-token temperature, bias]",
    ),
    m(
        "head/pallas_tpu/backward",
        "token(TARGET).astype(jnp.int32) - (j * vocab + part.first)",
        "token(TARGET).astype(jnp.int32) - j * vocab",
        f"{TPU_HEAD}::test_contract_in_parts_of_a_tile[vh]",
    ),
    m(
        "head/pallas_tpu/operands",
        "axis) < kept - first",
        "axis) < kept",
        f"{TPU_HEAD}::test_contract_in_parts_of_a_tile[vh]",
    ),
    m(
        "head/pallas_tpu/kept",
        "own = jnp.where(own == 0, 0.0, own * bend)",
        "own = jnp.where(own == 0, 0.0, own)",
        f"{KEPT}::test_contract[[H, V], every option]",
    ),
    m(
        "head/pallas_tpu/forward",
        "is_own = at == j * len(blocks_of(vocab)) + n",
        "is_own = at >= 0",
        f"{KEPT}::test_contract[some, in dW's place]",
    ),
    m(
        "head/pallas_tpu/forward",
        "is_own = at == j * len(blocks_of(vocab)) + n",
        "is_own = at == j",
        f"{KEPT}::test_several_blocks_in_a_tile",
    ),
    m(
        "head/pallas_tpu/forward",
        "is_target = column == target - at",
        "is_target = column == target",
        f"{TPU_HEAD}::test_contract_in_blocks_of_a_tile[vh]",
    ),
    m(
        "head/pallas_tpu/forward",
        "lambda new, old: jnp.where(j > 0, new, old), found, sums) if first < 0 else found",
        "lambda new, old: new, found, sums) if first < 0 else found",
        f"{TPU_HEAD}::test_contract_in_blocks_of_a_tile[vh]",
    ),
    m(
        "head/pallas_tpu/forward",
        "spec.tail - before.start if flush and spec.tail % LANES else None",
        "spec.tail if flush and spec.tail % LANES else None",
        f"{TPU_HEAD}::test_contract_in_blocks_of_a_tile[vh]",
    ),
    m(
        "head/pallas_tpu/forward",
        "put_maxima(rows, sums, s, 0 if flush else first - before.start + vocab)",
        "put_maxima(rows, sums, s, 0 if flush else max(first, 0))",
        f"{TPU_SPARSE}::test_maxima_of_several_blocks_in_a_tile",
    ),
    m(
        "head/pallas_tpu/kept",
        "other = steps if spec.spare else steps - 1",
        "other = steps - 1",
        f"{KEPT}::test_two_cores_do_not_write_over_each_other",
    ),
    m(
        "head/pallas_tpu/forward",
        "lambda part: (of(part) - upper_half(of(part)))",
        "lambda part: (upper_half(of(part)) - upper_half(of(part)))",
        f"{TPU_HEAD}::test_the_direction_leaves_in_halves_and_dh_is_made_in_parts",
    ),
    m(
        "head/pallas_tpu/forward",
        "jnp.minimum(i * spec.leaving + jnp.maximum(j - spec.vocab_steps, 0), last), 0",
        "jnp.minimum(i * spec.leaving, last), 0",
        f"{TPU_HEAD}::test_the_direction_leaves_in_halves_and_dh_is_made_in_parts",
    ),
    m(
        "head/pallas_tpu/kernels",
        "(scale * number(2)) * e",
        "number(2) * e",
        f"{TPU_HEAD}::test_the_direction_leaves_in_halves_and_dh_is_made_in_parts",
    ),
    m(
        "rows",
        "lax.dynamic_slice_in_dim(a, first, count)",
        "lax.dynamic_slice_in_dim(a, 0, count)",
        f"{ROWS_AT}::test_in_parts",
    ),
    m(
        "head/pallas_tpu/rows_at",
        "words & -0x10000, words << 16",
        "words << 16, words & -0x10000",
        f"{ROWS_AT}::test_gather",
    ),
    m("head/pallas_tpu/rows_at", "fetch(following, 1 - slot)", "fetch(following, slot)", f"{ROWS_AT}::test_gather"),
    m("head/pallas_tpu/rows_at", "x.shape[0] % 2 == 0", "True", f"{ROWS_AT}::test_gather"),
    m("head/pallas_tpu/rows_at", "lambda k: number(1 + k)", "number", f"{ROWS_AT}::test_made_of_rows"),
    m(
        "head/pallas_tpu/kernels",
        "others = jnp.exp(log_probability(sums.maximum, factor(p.transform), stats))",
        "others = jnp.exp(log_probability(sums.maximum, None, stats))",
        f"{TPU_HEAD}::test_contract[ragged tokens, hv, per-token temperature, bias]",
    ),
    m(
        "head/pallas_tpu/lora",
        "return scale_of(p) * (swept[:, :rank]",
        "return (swept[:, :rank]",
        f"{TPU_LORA}::test_contract[[H, V], all trained, every option, dead tokens]",
    ),
    m(
        "head/pallas_tpu/operands",
        "x = x + refs.scalars[3] * dot(refs.low[rows, :]",
        "x = x + dot(refs.low[rows, :]",
        f"{TPU_LORA}::test_contract[[H, V], all trained, every option, dead tokens]",
    ),
    m(
        "head/pallas_tpu/backend",
        "return Residual(total(both[0]), both[1])",
        "return Residual(total(both[0]), None if both[1] is None else total(both[1]))",
        f"{TPU_LORA}::test_over_a_mesh[tokens1-head1]",
    ),
    m(
        "head/pallas_tpu/gathered",
        "(x - MASS_ERROR).astype(dtype)",
        "x.astype(dtype)",
        f"{TPU_SPARSE_HEADS}::test_logits_made_again_are_never_taken_too_large",
    ),
    m(
        "head/pallas_tpu/columns_at",
        "out_ref[...] = jnp.where(hit, own, out_ref[...])",
        "out_ref[...] = own",
        f"{TPU_SPARSE_HEADS}::test_columns_are_put_into_place",
    ),
    m(
        "head/pallas_tpu/sparse_shard",
        "jnp.where(valid_targets(p.targets, p.call.vocab_size), jnp.exp(out.logp), 0.0)",
        "jnp.exp(out.logp)",
        f"{TPU_SPARSE_HEADS}::test_what_a_shard_leaves_out_by_the_definition",
    ),
    m(
        "head/pallas_tpu/slabs",
        "all_rows(low, exact_low, jnp.float32)",
        "all_rows(low, jnp.zeros_like(exact_low), jnp.float32)",
        f"{TPU_SPARSE_HEADS}::test_as_good_as_the_ordinary_path[[H, V], LoRA and the head]",
    ),
    m(
        "logits/pallas_tpu/kernels",
        "return times(rows.step_factor(group, columns), u - rows.across(centre, columns))",
        "return u - rows.across(centre, columns)",
        f"{CONSTANT}::test_statistics_of_logits[pallas_tpu-known-64]",
    ),
    m(
        "logits/pallas_tpu/rows",
        "s = times(step_factor(group, columns), group.u[:, pl.ds(start, columns)] - across(c, columns))",
        "s = group.u[:, pl.ds(start, columns)] - across(c, columns)",
        f"{CONSTANT}::test_statistics_of_logits[pallas_tpu-known-64]",
    ),
    # Hopper
    m(
        "logits/mosaic_gpu/row_terms",
        "a * (self.centred + step * self.total)",
        "a * self.centred",
        f"{GPU_LOGITS}::test_statistics_with_padding_dead_rows_and_a_bad_target",
    ),
    m(
        "logits/mosaic_gpu/tiles",
        "self.k = tr.times(tr.factor(transform), jnp.float32(self.power.unit))",
        "self.k = jnp.float32(self.power.unit)",
        f"{CONSTANT}::test_rounded_dlogits_of_the_hopper_row_kernel",
    ),
    m(
        "logits/mosaic_gpu/row_terms",
        "first, second = tr.times(k, first), tr.times(k, second)",
        "first, second = tr.times(k, first), second",
        f"{CONSTANT}::test_rounded_dlogits_of_the_hopper_row_kernel",
    ),
    m(
        "logits/mosaic_gpu/row_terms",
        "second, s.entropy * power.unit, own",
        "second, s.max_logp * power.unit, own",
        f"{CONSTANT}::test_rounded_dlogits_of_the_hopper_row_kernel",
    ),
    m(
        "logits/mosaic_gpu/tiles",
        "return lax.rem(number, jnp.int32(self.t.out))",
        "return lax.rem(number, jnp.int32(self.t.slots))",
        f"{GPU_LOGITS}::test_rounded_dlogits_of_float32_logits[1032-bfloat16-tiles0-transform0]",
    ),
    m(
        "head/mosaic_gpu/epilogue",
        "jnp.where(column < vocab_size - first, jnp.where(is_target, low, u), low)",
        "jnp.where(is_target, low, u)",
        f"{GPU_HEAD}::test_statistics[ragged]",
    ),
    m(
        "head/mosaic_gpu/epilogue",
        "a * (sums.centred + step * sums.total) +",
        "a * sums.centred +",
        f"{GPU_HEAD}::test_statistics[ragged]",
    ),
    m(
        "head/mosaic_gpu/epilogue",
        "a * sums.total + jnp",
        "sums.total + jnp",
        f"{GPU_HEAD}::test_statistics[ragged]",
    ),
    m(
        "head/mosaic_gpu/epilogue",
        "across(k, columns) if",
        "jnp.max(k) if",
        f"{GPU_HEAD}::test_statistics[temperature]",
    ),
    m(
        "head/mosaic_gpu/epilogue",
        "half // LANES * len(parts)",
        "half // LANES",
        f"{GPU_SPARSE}::test_bits_are_the_comparison_of_every_logit",
    ),
    m(
        "head/mosaic_gpu/epilogue",
        "st.rescale(whole, jnp.max(whole.maximum, axis=0), k)",
        "st.rescale(whole, jnp.max(whole.maximum, axis=0))",
        f"{GPU_HEAD}::test_the_merge_of_runs",
    ),
    m(
        "head/mosaic_gpu/epilogue",
        "seen = written & ~(m <= LOW)",
        "seen = ~(m <= LOW)",
        f"{GPU_HEAD}::test_the_merge_of_runs",
    ),
    # all active columns at once
    *(
        m(f"head/mosaic_gpu/{file}", old, new, f"{GPU_SPARSE}::{test}")
        for test, faults in {
            "test_gradients_are_as_good_as_the_exact_path_s[clip-calibrated]": (
                ("hard", "mine.take(hidden).astype(jnp.float32) + own)", "mine.take(hidden).astype(jnp.float32))"),
                ("hard", "others = ~active & (", "others = (active | ~active) & ("),
                ("hard", "dweight(f.p, dx, h, ", "dweight(f.p, dx, 2 * h, "),
                ("hard", "jnp.maximum(n, i - 1)", "0 * n"),
                ("dx", "where.at[rows.targets]", "where.at[rows.targets + 1]"),
                ("at_once", "(which & (first < live.tokens))[:, None]", "(which & (first < 64))[:, None]"),
                ("at_once", "second = held.tokens + jnp", "second = held.tokens + 1 + jnp"),
                ("at_once", "first=held.token_tiles * held.across", "first=0"),
                ("room", "first = jnp.where(is_hard, n, first)", "first = jnp.where(is_hard & False, n, first)"),
            ),
            "test_with_just_enough_room_all_goes_at_once": (
                ("at_once", "fits & (hard.count <= held.hard)", "fits & (hard.count < held.hard)"),
                ("room", "return columns < self.columns", "return columns + 256 < self.columns"),
            ),
            "test_hard_rows_in_groups": (
                ("hard", "blank & (jnp.asarray(i) == 0)", "blank"),
                ("hard", "lax.dynamic_slice_in_dim(self.rows, first, size)", "self.rows[:size]"),
            ),
            # what does not go at once
            "test_more_columns_than_go_at_once": (
                ("at_once", "jnp.where(ok, index, p.head.vocab", "jnp.where(ok | True, index, p.head.vocab"),
                ("in_chunks", "last = jnp.where(begin < 0, grads.weight[: len(last)], last)", "last = 0 * last"),
                ("in_chunks", "lacks, last, kept + mass", "lacks, last, mass"),
                ("in_chunks", "(which & (place < f.count))[:, None]", "(place < f.count)[:, None]"),
                (
                    "in_chunks",
                    "hard_rows(hard, held.hard), everything",
                    "hard_rows(hard & False, held.hard), everything",
                ),
                (
                    "in_chunks",
                    "        weight = _spread(weight, index, chosen, count, held.columns)\n",
                    "",
                ),
            ),
            "test_more_hard_rows_than_go_at_once": (("at_once", "fits & (hard.count <= held.hard)", "fits"),),
            "test_every_column_has_one_turn_and_dx_none_of_the_finished_rows": (
                ("in_chunks", "tile_count(jnp.maximum(begin, 0) * self.width, TOKENS)", "jnp.maximum(begin, 0)"),
                ("room", "-(-(held.token_tiles + 2) * TOKENS // width)", "1"),
                ("room", "return columns < self.columns", "return columns <= self.columns"),
            ),
            "test_dh_of_every_tile_is_in_one_of_the_halves[5-2-live0]": (
                ("room", "begin + place - hard)", "begin + place)"),
            ),
            "test_rows_side_by_side_are_spread": (("in_chunks", "(trips - 1 - i) * size", "i * size"),),
            "test_a_sum_in_two_numbers_has_the_digits_of_both": (
                ("in_chunks", "(whole - near).astype(total.dtype)", "(0 * near).astype(total.dtype)"),
            ),
            "test_gradients_are_as_good_as_the_exact_path_s[clip-leaning]": (
                ("hard", "without(known.g, hard), p.transform)", "without(known.g, ~hard), p.transform)"),
            ),
            "test_a_flat_policy_goes_in_chunks": (
                ("sparse", "apart > screen.MOST_APART * f.count", "apart > f.count"),
            ),
            "test_gradients_are_as_good_as_the_exact_path_s[gspo-calibrated]": (
                ("sparse", "some(kept, j * visit, visit) + mass", "mass"),
            ),
            "test_dx_fits_into_the_place_of_dw[151936]": (
                ("room", "held.in_dw >= held.rows // TOKENS * held.across", "held.in_dw >= 0"),
                ("room", "fits = p.head.axis == 0 and ", "fits = "),
            ),
            "test_dx_is_no_larger_than_it_must_be_without_dw[True]": (
                ("room", "return bool(want.weight and self.in_dw)", "return bool(self.in_dw)"),
            ),
            "test_other_heads[at once]": (
                ("hard", "jnp.where(there[..., None], dx,", "jnp.where(~there[..., None], dx,"),
                ("room", "dbias(dx.tiles(*both.tiles.shape), there)", "dbias(0 * dx.tiles(*both.tiles.shape), there)"),
            ),
            "test_where_logits_are_stored": (
                ("room", "if width % TILE_K or vocab % 8:", "if width % TILE_K:"),
                ("hard", "head.weight.shape[0] % TILE_K == 0", "head.weight.shape[0] % 8 == 0"),
            ),
            # which tiles are visited
            "test_common_columns_come_first_and_rare_ones_by_their_tiles": (
                ("blocks", "jnp.where(common, end - s.last,", "jnp.where(common, s.last,"),
                ("blocks", "s.last - s.first >= _NEAR", "s.last - s.first > _NEAR"),
            ),
            "test_a_tile_is_visited_where_a_column_of_it_is_active": (
                ("blocks", "(first <= tile) & (tile <= last)", "first <= tile"),
                ("blocks", "tiles = tiles.at[:, 0].set(True)", "tiles = tiles"),
                ("blocks", "return Visits(tiles & everything.tiles)", "return Visits(tiles)"),
            ),
            "test_all_tiles_are_listed_as_any_are[20-3-live2]": (
                ("blocks", "place // (group * columns) * group", "place // (group * columns)"),
            ),
            "test_spans_by_the_definition": (
                ("screen", "first.at[target].min(token_tile", "first.at[target].min(token_tile + 1"),
                ("screen", "lax.bitwise_or, (2,))", "lax.bitwise_and, (2,))"),
            ),
            "test_a_product_by_lists[False]": (
                ("schedule", "self.lists[which, 0] * share", "which * share"),
                ("schedule", "* size + lax.rem(step, size)", "* size"),
                ("schedule", "self.lists[part, 1] * self.steps", "self.lists[part, 1]"),
                ("product", "m.rows_of(row - behind)", "m.rows_of(row)"),
                ("slots", "slot = self.first + lax.div(row", "slot = lax.div(row"),
                ("slots", "jnp.int32(TOKENS)) * self.across", "jnp.int32(TOKENS)) * (self.across - 1)"),
            ),
            "test_a_product_is_added_if_the_device_says_so[shape0]": (
                ("product", "jnp.logical_and(adds != 0, inside)", "inside"),
                ("product", "narrow=adds and shape[1] * dtype.itemsize % pipeline.PIECE != 0", "narrow=False"),
            ),
            "test_sums_lie_in_the_piece_of_their_own_warpgroup[True]": (
                ("dx", "t.rows * piece.shape[-1] * jnp", "t.rows * 128 * jnp"),
            ),
        }.items()
        for file, old, new in faults
    ),
    m(
        "head/order",
        "most - jnp.clip(bits, 0, most)",
        "jnp.clip(bits, 0, most)",
        f"{GPU_SPARSE}::test_tokens_that_are_least_sure_come_first",
    ),
    m(
        "head/mosaic_gpu/dx",
        "jnp.where(visit.inside(n), some, 0.0)",
        "some",
        f"{GPU_SPARSE}::test_gradients_are_as_good_as_the_exact_path_s[clip-calibrated]",
        survives="hidden states are zeros there: it matters only where the token that stands there is NaN",
    ),
    m(
        "head/mosaic_gpu/at_once",
        "(at > 0) & (at < live.columns)",
        "at < live.columns",
        f"{GPU_SPARSE}::test_gradients_are_as_good_as_the_exact_path_s[clip-calibrated]",
        survives="the mean row's own probability is about 1/V: no more than the mass is rounded by",
    ),
    m(
        "head/order",
        "place = inverse(order)",
        "place = order",
        f"{GPU_SPARSE}::test_gradients_are_as_good_as_the_exact_path_s[clip-calibrated]",
    ),
    m(
        "head/order",
        "read = self.order.at[visit.read].get",
        "read = visit.read.at[jnp.arange(visit.read.size)].get",
        f"{GPU_SPARSE}::test_gradients_are_as_good_as_the_exact_path_s[clip-calibrated]",
    ),
    # products whose extents the device knows
    *(
        m(f"head/mosaic_gpu/{file}", old, new, f"{GPU_SPARSE}::{test}")
        for file, old, new, test in (
            ("product", "tile * parts + part, 0)", "tile + part, 0)", "test_a_deep_product_in_parts[129]"),
            ("product", "row * m.walk.parts + part", "row + part", "test_a_deep_product_in_parts[129]"),
            (
                "product",
                "(tile < live_rows) & (part < parts)",
                "(tile >= 0) & (part < parts)",
                "test_a_deep_product_in_parts[1]",
            ),
            (
                "product",
                "(x + (size - 1)) // size for x",
                "x // size for x",
                "test_a_product_is_as_large_as_the_device_says[False-True]",
            ),
            (
                "schedule",
                "size = jnp.minimum(group, rows - first)",
                "size = group",
                "test_every_tile_once_and_in_groups[13-20-1]",
            ),
            (
                "schedule",
                "lax.div((part + 1) * whole, parts)",
                "lax.div(part * whole, parts) + 1",
                "test_a_deep_product_in_parts[129]",
            ),
            (
                "pipeline",
                "self.left_read.at[slot, :, mine]",
                "self.left_read.at[slot, :, pl.ds(0, t.rows)]",
                "test_a_product_is_as_large_as_the_device_says[True-True]",
            ),
        )
    ),
    # dx without logits
    *(
        m("head/mosaic_gpu/dx", old, new, f"{GPU_SPARSE}::test_dx_is_that_of_logits_in_memory[{case}]")
        for old, new, case in (
            ("jnp.where(rows[1] == 0.0, ", "jnp.where(rows[1] == -1.0, ", "one tile"),
            ("jnp.where(column >= least, jnp.max", "jnp.where(column >= -3.0, jnp.max", "one tile"),
            ("mass = mass + jnp.sum(e, axis=1)", "mass = jnp.sum(e, axis=1)", "bent"),
            ("e * (a - b * power))", "e * a)", "one tile"),
            ("column >= least, 1.0 - own * own", "column >= least, 1.0 + 0.0 * own", "bent"),
            ("column == target, at_target", "column == target + 1.0, at_target", "ragged"),
            ("own = slope * dz_at_target(s, g)", "own = dz_at_target(s, g)", "temperature"),
            ("jnp.repeat(visited.T, t.tokens, axis=1)", "jnp.repeat(visited.T | True, t.tokens, axis=1)", "ragged"),
        )
    ),
    # a flat policy is seen early
    m(
        "head/mosaic_gpu/screen",
        "rows & (before < UNLIKELY)",
        "rows & (before > UNLIKELY)",
        f"{GPU_SPARSE}::test_a_flat_policy_is_seen_before_the_forward_matmul[True]",
    ),
    m(
        "head/mosaic_gpu/screen",
        "before = expected_lse(p, None) - _logsumexp_of_few(p, rows)",
        "before = expected_lse(p, None)",
        f"{GPU_SPARSE}::test_a_flat_policy_is_seen_before_the_forward_matmul[False]",
    ),
    m(
        "head/mosaic_gpu/sparse",
        "lax.cond(screen.looks_flat(p, moving, before), exact, sparse)",
        "sparse()",
        f"{GPU_SPARSE}::test_with_room_for_logits_a_flat_policy_takes_the_exact_path",
    ),
    # a mesh
    m(
        "mesh/over_mesh",
        "                head = collectives.reduce_grads(place, found.head, p.head)\n",
        "                half = jax.tree.map(lambda x: x.astype(p.h.dtype), found.head)\n"
        "                head = collectives.reduce_grads(place, half, p.head)\n",
        f"{MESH}::test_bfloat16_sums_of_a_recompute_leave_devices_in_float32",
    ),
    m(
        "mesh/over_mesh",
        "Gradients(hidden, collectives.reduce_grads(place, found.head, p.head))",
        "Gradients(hidden, collectives.reduce_grads(place, jax.tree.map(lambda x: x.astype(p.h.dtype), found.head), "
        "p.head))",
        f"{MESH}::test_bfloat16_sums_leave_devices_in_float32",
    ),
    m(
        "mesh/collectives",
        "own = rescale(sums, m, k)",
        "own = rescale(sums, m)",
        f"{MESH}::test_statistics_and_every_cotangent",
    ),
    m(
        "mesh/collectives",
        "return jnp.where((local >= 0) & (local < width), local, -1)",
        "return jnp.clip(local, 0, width - 1)",
        f"{MESH}::test_statistics_and_every_cotangent",
    ),
]
