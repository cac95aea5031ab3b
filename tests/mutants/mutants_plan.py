"""Faults in the plan: bytes, FLOPs, chips."""

from __future__ import annotations

from mutation import Mutant

HAND = "tests/plan/test_plan_by_hand.py"
PLAN = "tests/plan/test_explain_and_plan.py"
SPARSE = "tests/plan/test_plan_sparse.py"


def m(file: str, old: str, new: str, *tests: str, survives: str = "") -> Mutant:
    return Mutant(f"{file}.py", old, new, tests, survives)


MUTANTS = [
    m("planning/head", "(2 * w.logit + ((w.logit + w.item", "(w.logit + ((w.logit + w.item", HAND),
    m("planning/head", "((w.logit + w.item * (1 + w.gradients)) if", "((w.logit + w.item * w.gradients) if", HAND),
    m("planning/head", "return plane + (1 + w.gradients) * (w.head + w.rows)", "return plane + w.head + w.rows", HAND),
    m("planning/head", "((2 * w.logit + w.item) if w.gradients else", "((w.logit + w.item) if w.gradients else", HAND),
    m("planning/work", "return self.vocab * self.width * self.item", "return self.vocab * self.width", HAND),
    m("planning/work", "return self.tokens * self.width * self.item", "return self.live * self.item", HAND),
    m("planning/sparse", "w.live * columns * (w.logit + w.item)", "w.live * columns * w.logit", HAND),
    m("planning/sparse", "(8 * w.live * w.width * (columns // slab)", "(8 * w.live * w.width", HAND),
    m("planning/sparse", "(8 * w.live * w.width", "(4 * w.live * w.width", HAND),
    m("head/pallas_tpu/backend", "moved = pl.cdiv(n, t.tokens) * head + rows", "moved = head + rows", HAND),
    m("head/pallas_tpu/backend", '(1 if p.head.layout == "vh" else 2) + 2 * head', "+ 2 * head", HAND),
    m("head/pallas_tpu/backend", "else 2) + 2 * head", "else 2) + head", HAND),
    m("head/pallas_tpu/backend", 'stats["hbm_bytes"] - 4 * n * width', 'stats["hbm_bytes"]', HAND),
    m("planning/chips", "95 * GB, 2765e9, 459e12", "95 * GB, 1382e9, 459e12", HAND),
    m("planning/chips", "32 * GB, 1640e9, 918e12", "32 * GB, 1640e9, 459e12", HAND),
    m("planning/chips", "141 * GB, 4800e9", "80 * GB, 4800e9", HAND),
    m("planning/chips", "max(flops / chip.flops, moved / chip.hbm)", "flops / chip.flops + moved / chip.hbm", HAND),
    m("planning/chips", "max(flops / chip.flops, moved / chip.hbm)", "min(flops / chip.flops, moved / chip.hbm)", HAND),
    m(
        "planning/head",
        "flops=round(one * w.live * way.matmuls)",
        "flops=round(one * w.tokens * way.matmuls)",
        f"{PLAN}::test_plan_counts_matmuls_and_live_tokens",
    ),
    m(
        "planning/head",
        "dense_flops=one * tokens * (1 + w.gradients)",
        "dense_flops=one * tokens * w.gradients",
        f"{PLAN}::test_plan_for_a_chip_that_is_not_here",
    ),
    m(
        "planning/head",
        "again = 0 if route.in_forward or not w.gradients else 1",
        "again = 0",
        f"{PLAN}::test_plan_counts_matmuls_and_live_tokens",
    ),
    m(
        "planning/head",
        'matmuls=sum(about[k]["matmuls"] for k in used)',
        "matmuls=len(used)",
        f"{PLAN}::test_plan_counts_the_matmuls_of_the_tpu_kernels",
    ),
    m(
        "planning/sparse",
        "(again + b) * columns / w.vocab + (1 + b) * shares.hard_rows",
        "(again + b) * columns / w.vocab + b * shares.hard_rows",
        f"{SPARSE}::test_matmuls_are_those_of_the_table_in_the_docs",
    ),
    m(
        "planning/sparse",
        "whole, again = 2 if shard else 1,",
        "whole, again = 1,",
        f"{SPARSE}::test_matmuls_are_those_of_the_table_in_the_docs",
    ),
    m(
        "planning/sparse",
        "return -(-active // slab) * slab",
        "return active",
        f"{SPARSE}::test_matmuls_are_those_of_the_table_in_the_docs",
    ),
]
