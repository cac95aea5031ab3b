"""Faults in what carries a call: sweeps, chunks, the sparse backward's tolerance, the route, the custom gradients."""

from __future__ import annotations

from mutation import Mutant

FAULTS = "tests/head/test_planted_faults.py"
ROUTE = "tests/test_route.py"


def m(file: str, old: str, new: str, *tests: str, survives: str = "") -> Mutant:
    return Mutant(f"{file}.py", old, new, tests, survives)


MUTANTS = [
    m(
        "rows",
        "mask=part.inputs.mask & self.inside(n)",
        "mask=part.inputs.mask",
        f"{FAULTS}::test_the_padding_of_a_ragged_last_chunk_adds_nothing",
    ),
    m(
        "rows",
        "jnp.where(inside, self.take(a), 0.0)",
        "self.take(a)",
        f"{FAULTS}::test_the_padding_of_a_ragged_last_chunk_adds_nothing",
    ),
    m(
        "rows",
        "one_more = rest > (3 * self.small if self.rest_at_once else self.chunk // 2)",
        "one_more = rest > 3 * self.small",
        f"{FAULTS}::test_what_is_left_after_the_whole_chunks_is_at_most_two_quarters",
    ),
    m(
        "transform",
        "jnp.where(dz == 0, 0.0, dz * d)",
        "dz * d",
        f"{FAULTS}::test_a_softcap_hides_nan_in_masked_rows_from_the_gradient",
    ),
    m(
        "head/slabs",
        "return lambda mass, every=1: ~(mass <= limit[::every])",
        "return lambda mass, every=1: jnp.isnan(mass)",
        f"{FAULTS}::test_a_tolerance_counts_before_cotangents_are_known",
    ),
    m(
        "route",
        "coupled = loss.objective.coupling(old_known=loss.inputs.old is not None)",
        "coupled = loss.objective.coupling()",
        f"{ROUTE}::test_the_two_that_were_wrong",
    ),
    m(
        "route",
        'return "in float16 a loss scale has to act before dlogits are rounded"',
        "return None",
        f"{ROUTE}::test_float16_takes_its_scale_before_rounding",
        "tests/test_float16.py",
    ),
    m(
        "causal",
        "jnp.roll(live, -1, axis=1) & within",
        "live & within",
        "tests/test_causal.py::test_every_counted_position_predicts_the_token_after_it",
    ),
    m(
        "causal",
        "within = within & (segment_ids == jnp.roll(segment_ids, -1, axis=1))",
        "pass",
        "tests/test_causal.py::test_segments_do_not_predict_each_other",
    ),
    m(
        "logits/reference",
        "columns[1], k) * tangents[1], axis=-1",
        "columns[1], k) * tangents[1] * 0, axis=-1",
        "tests/logits/test_reference_entropy.py",
    ),
]
