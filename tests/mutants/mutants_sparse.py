"""Faults in the sparse backward without logits: on TPU in one pass, on Hopper by a screen, and what both share."""

from __future__ import annotations

from mutation import Mutant

READY = "tests/head/test_ready_rows.py"
TPU = "tests/head/test_pallas_tpu_sparse.py"
TPU_HEAD = "tests/head/test_head_pallas_tpu.py"
GPU = "tests/head/test_mosaic_gpu_sparse.py"
GPU_HEAD = "tests/head/test_head_mosaic_gpu.py"
GPU_LOGITS = "tests/logits/test_logits_mosaic_gpu.py"

CALIBRATED = f"{TPU}::test_calibrated_rows_as_good_as_the_ordinary_path_and_by_the_definition"
COLLAPSED = f"{TPU}::test_collapsed_rows"
OPTIONS = f"{TPU}::test_logprobs_with_every_option"
SAMPLE = f"{TPU}::test_a_sample_of_the_columns_judges_as_all_do"
PLACES = f"{TPU}::test_positions_in_order_without_a_sort[1000-230]"
SCATTERED = f"{READY}::test_rows_in_place_and_the_others_exact[656-600-256-scattered]"
DENSE = f"{READY}::test_rows_in_place_and_the_others_exact[655-655-384-dense]"
DEFINED = f"{GPU}::test_guess_and_screen_by_the_definition"
TRUE = f"{GPU}::test_what_it_reports_is_true"
GRADIENTS = f"{GPU}::test_gradients_are_as_good_as_the_exact_path_s[clip-adversarial]"


def m(file: str, old: str, new: str, *tests: str, survives: str = "") -> Mutant:
    return Mutant(f"{file}.py", old, new, tests, survives)


MUTANTS = [
    # TPU: rows that are ready
    m(
        "head/pallas_tpu/ready",
        "return jnp.where((slot >= first) & (slot < end), rows[part.rows, :], jnp.zeros((), rows.dtype))",
        "return rows[part.rows, :]",
        SCATTERED,
    ),
    m(
        "head/pallas_tpu/ready",
        "self._copy(self._first_part(j + 1), (j + 1) % 2).start()",
        "self._copy(self._first_part(j), (j + 1) % 2).start()",
        SCATTERED,
        DENSE,
    ),
    m("head/pallas_tpu/ready", ":] += find(k, own)", ":] = find(k, own)", DENSE),
    m(
        "head/pallas_tpu/ready",
        "used = k * part + jnp.arange(part) >= slots - ready.count",
        "used = k * part + jnp.arange(part) > slots - ready.count",
        SCATTERED,
    ),
    m(
        "head/pallas_tpu/ready",
        "out[own.rows, :] += self._placed(k, own).astype(out.dtype)",
        "out[own.rows, :] = self._placed(k, own).astype(out.dtype)",
        DENSE,
    ),
    m(
        "head/pallas_tpu/ready",
        "return jnp.concatenate([n_live, first[None], first + before, ends])",
        "return jnp.concatenate([n_live, first[None], before, ends])",
        SCATTERED,
    ),
    m(
        "head/pallas_tpu/ready",
        "lax.fori_loop(here + 1, pl.cdiv(end, self.slots.shape[2])",
        "lax.fori_loop(here + 1, end // self.slots.shape[2]",
        DENSE,
    ),
    # TPU: dW around them
    m(
        "head/pallas_tpu/around",
        "counts = counts & (scratch.is_ready[part.rows, :] == 0)",
        "pass",
        SCATTERED,
    ),
    m(
        "head/pallas_tpu/around",
        "counts = column < end",
        "counts = column >= 0",
        SCATTERED,
    ),
    m(
        "head/pallas_tpu/around",
        "is_target = column == refs.token[TARGET : TARGET + 1, :].astype(jnp.int32) - j * vocab",
        "is_target = column == refs.token[TARGET : TARGET + 1, :].astype(jnp.int32)",
        SCATTERED,
    ),
    m(
        "head/pallas_tpu/around",
        "            clear_dead(refs.weight, 0, end)\n",
        "            pass\n",
        SCATTERED,
    ),
    m(
        "head/pallas_tpu/around",
        "taken, dead = spec.live(i, n_live) | (i == 0)",
        "taken, dead = spec.live(i, n_live)",
        SCATTERED,
    ),
    m(
        "head/pallas_tpu/around",
        "dh[rows, part.rows] += dot(",
        "dh[rows, part.rows] = dot(",
        SCATTERED,
    ),
    m(
        "head/pallas_tpu/around",
        "acc[part.rows, :] = jnp.where(i == 0, 0.0, acc[part.rows, :]) + own",
        "acc[part.rows, :] = own",
        SCATTERED,
    ),
    m(
        "head/pallas_tpu/around",
        "            dbias[...] = jnp.zeros_like(dbias)\n",
        "            pass\n",
        SCATTERED,
    ),
    m(
        "head/pallas_tpu/around",
        "x = x + jnp.broadcast_to(refs.bias[:, part.rows], (8, part.size)).T[:, :1]",
        "x = x",
        SCATTERED,
    ),
    # TPU: the look
    m("head/pallas_tpu/look", " + np.log(vocab_size / ids.size), target_logits(", ", target_logits(", SAMPLE),
    m(
        "head/pallas_tpu/look",
        "others = jnp.where(ids[None, :] == few.targets[:, None], NEG_INF, z)",
        "others = z",
        SAMPLE,
    ),
    m("head/pallas_tpu/look", "few.share * jnp.matmul(probability", "jnp.matmul(probability", SAMPLE),
    m("head/pallas_tpu/look", "jnp.exp(z - few.lse[:, None]), few.share)", "jnp.exp(z - few.lse[:, None]))", SAMPLE),
    m("head/pallas_tpu/look", "beyond = (some[:, None] > jnp", "beyond = (some[:, None] >= jnp", CALIBRATED),
    m(
        "head/pallas_tpu/look",
        "own = jnp.where(counts & valid_targets(p.targets, vocab_size), p.targets, width)",
        "own = jnp.full_like(p.targets, width)",
        COLLAPSED,
    ),
    m(
        "head/pallas_tpu/look",
        "jnp.where(counts & valid_targets(p.targets, p.call.vocab_size) & (floor < jnp.inf), floor, jnp.inf)",
        "jnp.where(valid_targets(p.targets, p.call.vocab_size) & (floor < jnp.inf), floor, jnp.inf)",
        CALIBRATED,
    ),
    m(
        "head/pallas_tpu/look",
        "positions((level <= best) & ~dense,",
        "positions((level < best) & ~dense,",
        CALIBRATED,
    ),
    m(
        "head/pallas_tpu/sparse_columns",
        "before = ends[None, :] <= k[:, None]",
        "before = ends[None, :] < k[:, None]",
        PLACES,
    ),
    m("head/pallas_tpu/sparse_columns", "find(wanted), own)", "find(wanted), find(wanted))", PLACES),
    m("head/pallas_tpu/sparse_columns", "empty = size - count if last", "empty = size - count - 1 if last", PLACES),
    # TPU: one pass
    m(
        "head/pallas_tpu/one_pass",
        "floor = look.lse_floor(f.p, counts, None if before is None else f.take(before))",
        "floor = look.lse_floor(f.p, counts, before)",
        CALIBRATED,
    ),
    m(
        "head/pallas_tpu/one_pass",
        "few = few_rows(p, counts, before)",
        "few = few_rows(p, None, before)",
        COLLAPSED,
    ),
    m(
        "head/pallas_tpu/one_pass",
        "_some(out, few.at), _some(g, few.at))",
        "_some(stats, few.at), _some(g, few.at))",
        CALIBRATED,
    ),
    m(
        "head/pallas_tpu/one_pass",
        "known = Known(stats, jax.tree.map(f.take, g))",
        "known = Known(stats, g)",
        CALIBRATED,
    ),
    m(
        "head/pallas_tpu/one_pass",
        "known = Known(*jax.tree.map(f.take, (out, g)))",
        "known = Known(out, jax.tree.map(f.take, g))",
        OPTIONS,
    ),
    # TPU: slabs and hard rows
    m(
        "head/pallas_tpu/ordered_slabs",
        "at = rule.most - slots + i * rule.slab",
        "at = i * rule.slab",
        CALIBRATED,
    ),
    m(
        "head/pallas_tpu/ordered_slabs",
        "by_columns + out.hidden, size, 0)",
        "out.hidden, size, 0)",
        CALIBRATED,
    ),
    m(
        "head/pallas_tpu/ordered_slabs",
        " + by[:, None] * c).astype(dtype)",
        ").astype(dtype)",
        CALIBRATED,
    ),
    m(
        "head/pallas_tpu/ordered_slabs",
        "rows = lax.dynamic_slice_in_dim(order, k * part, part)",
        "rows = lax.dynamic_slice_in_dim(order, 0, part)",
        f"{TPU}::test_many_hard_rows_take_the_exact_kernels",
    ),
    m(
        "head/pallas_tpu/ordered_slabs",
        "at = k * group + jnp.arange(group, dtype=jnp.int32)",
        "at = jnp.arange(group, dtype=jnp.int32)",
        f"{TPU}::test_many_hard_rows_take_the_exact_kernels",
    ),
    m(
        "head/pallas_tpu/ordered_slabs",
        "jnp.clip(count - k * group, 0, group)",
        "jnp.int32(group)",
        f"{TPU}::test_many_hard_rows_take_the_exact_kernels",
        survives="rows beyond the hard ones are dropped where they are put; computing them takes time, nothing else",
    ),
    m(
        "head/pallas_tpu/ordered_slabs",
        "chunks = (count + (chunk - 1)) // chunk",
        "chunks = count // chunk",
        CALIBRATED,
    ),
    m(
        "head/pallas_tpu/ordered_slabs",
        "bias = bias.at[active.index].set(slabs.bias, mode=",
        "bias = bias.at[active.index].add(0 * slabs.bias, mode=",
        OPTIONS,
    ),
    m(
        "head/pallas_tpu/ordered_slabs",
        "(mass + MASS_ERROR)\n",
        "(0 * mass)\n",
        f"{TPU}::test_adversarial_rows_stay_within_the_tolerance",
    ),
    # TPU: the other form, and the exact kernel
    m(
        "head/pallas_tpu/dhidden",
        "is_target = column == token[rows, TARGET : TARGET + 1].astype(jnp.int32) - j * spec.tiles.vocab",
        "is_target = column == token[rows, TARGET : TARGET + 1].astype(jnp.int32)",
        f"{TPU_HEAD}::test_contract[ragged tokens, hv, per-token temperature, bias]",
    ),
    m(
        "head/pallas_tpu/dhidden",
        "d = jnp.where(column < spec.tail, d, 0.0)",
        "d = d",
        f"{TPU_HEAD}::test_contract[dead tiles, padding fills whole tiles]",
        survives="a second guard: the head's rows there are zeros by then",
    ),
    m(
        "head/pallas_tpu/sparse_columns",
        "return jnp.maximum(least, mass - e * room)",
        "return jnp.maximum(least, mass)",
        SAMPLE,
    ),
    # what both have
    m(
        "head/expected",
        "target - jnp.where(jnp.isnan(before), 0.0, before)",
        "target - before",
        f"{GPU}::test_a_guess_from_known_log_probabilities_is_the_logsumexp",
    ),
    m("head/expected", "jnp.where(inside, forward(x, p.transform), 0.0)", "jnp.where(inside, x, 0.0)", DEFINED),
    m("head/order", "order_by_rank(first, live & ~first, ~live)", "order_by_rank(first, ~first)", CALIBRATED),
    m(
        "head/order",
        "keep = jnp.arange(order.size) < alive",
        "keep = jnp.arange(order.size) >= 0",
        COLLAPSED,
    ),
    m(
        "head/order",
        "jnp.where(jnp.arange(self.p.n) < self.live, x, jnp.zeros((), x.dtype))",
        "x",
        CALIBRATED,
        survives="a second guard: a dead token has zero cotangents, and its hidden state is zero",
    ),
    # Hopper: the screen
    m("head/mosaic_gpu/screen", "jnp.log(p.tolerance * threshold(rows))", "jnp.log(p.tolerance)", DEFINED),
    m("head/mosaic_gpu/screen", "jnp.sqrt(count / ENOUGH)", "jnp.sqrt(count / count)", DEFINED),
    m("head/mosaic_gpu/screen", "z if k is None else z / k, jnp.inf", "z, jnp.inf", DEFINED),
    m("head/mosaic_gpu/screen", "z = times(factor(t), swept_columns(", "z = times(None, swept_columns(", DEFINED),
    m(
        "head/mosaic_gpu/screen",
        'chosen.at[jnp.where(rows, p.targets, width)].set(True, mode="drop")\n    return',
        "chosen\n    return",
        DEFINED,
    ),
    m(
        "head/mosaic_gpu/screen",
        "bit_of(jnp.arange(0, tile, LANES, dtype=jnp.int32), tile)",
        "jnp.arange(tile // LANES, dtype=jnp.int32)",
        f"{GPU}::test_bits_are_the_comparison_of_every_logit",
    ),
    m(
        "head/mosaic_gpu/screen",
        "chooses = jnp.pad(rows & ~wide,",
        "chooses = jnp.pad(rows,",
        f"{GPU}::test_rows_that_let_everything_through_choose_no_columns",
    ),
    m(
        "head/mosaic_gpu/screen",
        "last.at[target].max(token_tile",
        "last.at[target].max(0 * token_tile - 1",
        f"{GPU}::test_rows_that_let_everything_through_choose_no_columns",
    ),
    # Hopper: the matmul and who computes what
    m(
        "head/mosaic_gpu/matmul",
        "row = jnp.arange(n) // t.rows",
        "row = jnp.arange(n) // t.tokens",
        f"{GPU_HEAD}::test_statistics[ragged]",
    ),
    m("head/mosaic_gpu/matmul", "special = special.at[:, -1].set(1)", "pass", f"{GPU_HEAD}::test_statistics[ragged]"),
    m(
        "head/mosaic_gpu/matmul",
        "x = x.astype(logits_dtype).astype(jnp.float32)",
        "pass",
        f"{GPU_HEAD}::test_rounded_logits",
    ),
    m(
        "head/mosaic_gpu/pipeline",
        "jnp.maximum(bias.astype(jnp.float32)[:columns], LOW)",
        "bias.astype(jnp.float32)[:columns]",
        f"{GPU_HEAD}::test_live_tokens_bad_targets_bias_and_the_other_layout",
    ),
    m(
        "head/mosaic_gpu/matmul",
        "return masked_stats(out, live), None if words is None else jnp.where(live[:, None], words, 0)",
        "return masked_stats(out, live), words",
        f"{GPU}::test_bits_are_the_comparison_of_every_logit",
    ),
    m(
        "head/mosaic_gpu/schedule",
        "last=xp.where(main, (run + 1) * rest // runs, vocab_tiles)",
        "last=xp.where(main, run * rest // runs + rest // runs, vocab_tiles)",
        f"{GPU_HEAD}::test_the_schedule_covers_every_tile_once",
    ),
    m(
        "head/mosaic_gpu/schedule",
        "parts=(runs + (tail > 0))[",
        "parts=(runs + (tail >= 0))[",
        f"{GPU_HEAD}::test_the_schedule_covers_every_tile_once",
    ),
    # Hopper: rows of logits
    m(
        "logits/mosaic_gpu/scalars",
        "r = (bounded - nf * _LN2_HIGH) - nf * _LN2_LOW",
        "r = bounded - nf * _LN2_HIGH",
        f"{GPU_LOGITS}::test_scalar_functions_to_a_few_units_in_the_last_place[exp]",
    ),
    m(
        "logits/mosaic_gpu/scalars",
        "near = jnp.where(x > -0.33, x < 1.01, False)",
        "near = jnp.where(x > 0.5, x < 1.01, False)",
        f"{GPU_LOGITS}::test_scalar_functions_to_a_few_units_in_the_last_place[log1p]",
    ),
    m(
        "logits/mosaic_gpu/kernels",
        "u_y = scalar.run(swept, target.x, sweep.transform)",
        "u_y = target.x",
        f"{GPU_LOGITS}::test_statistics_and_dlogits_in_one_pass",
    ),
]
