"""Faults in the plan: bytes, FLOPs, chips."""

from __future__ import annotations

from mutation import Mutant

HAND = "tests/plan/test_plan_by_hand.py"
PLAN = "tests/plan/test_explain_and_plan.py"
MESH = "tests/plan/test_plan_mesh.py::test_what_lora_sends"
LARGE = "tests/plan/test_plan_mesh.py::test_the_plan_agrees_with_the_compiler_about_a_large_head"
CALLS = "tests/mesh/test_sharding_calls.py"
LORA = f"{PLAN}::test_plan_and_explain_agree_on_lora"
SPARSE = "tests/plan/test_plan_sparse.py"


def m(file: str, old: str, new: str, *tests: str, survives: str = "") -> Mutant:
    return Mutant(f"{file}.py", old, new, tests, survives)


MUTANTS = [
    # LoRA
    m("planning/work", "over_vocabulary = sweeps + self.backward", "over_vocabulary = self.backward", HAND),
    m("planning/work", "over_hidden = sweeps + self.wants_hidden", "over_hidden = self.wants_hidden", HAND),
    m("planning/work", "return (self.vocab + self.width) * self.rank", "return self.vocab * self.rank", HAND),
    m(
        "planning/head",
        "w.live * w.vocab * (8 * (1 + again) + w.item * (w.backward",
        "w.live * w.vocab * (w.item * (w.backward",
        HAND,
    ),
    m(
        "planning/head",
        "lora = 4 * chunk * w.vocab * (1 + w.backward)",
        "lora = 4 * chunk * w.vocab",
        f"{PLAN}::test_plan_agrees_with_the_compiler[LoRA]",
    ),
    m("planning/tpu", "moves_rows = w.wants_hidden or w.wants_lora", "moves_rows = w.wants_hidden", HAND),
    m("planning/tpu", 'else ["dhead_of_lora"] * w.wants_lora', "else []", LORA),
    m("planning/tpu", "narrow=swept - matmuls + outside if", "narrow=swept - matmuls if", HAND),
    m("head/pallas_tpu/backend", "flops=one + 2 * n * lanes * vocab", "flops=one", HAND),
    m("head/pallas_tpu/backend", 'moved = dhead["hbm_bytes"] - head + 4', 'moved = dhead["hbm_bytes"] + 4', HAND),
    m("planning/mesh", 'size = inner + (outer / axes["fsdp"] if axis == "data" else 0)', "size = inner", MESH),
    m("planning/mesh", "== 0 and not rank:", "== 0:", MESH),
    m(
        "planning/tpu",
        "last = 4 * outer + rows",
        "last = rows",
        f"{PLAN}::test_plan_agrees_with_what_the_tpu_compiler_said_of_lora",
    ),
    m(
        "planning/mesh",
        "beside += max(reduced, (8 + item) * local * width - head.temporaries)",
        "beside += reduced",
        LARGE,
    ),
    m("planning/mesh", "4 * columns * width // leaves_in if leaves_in > 1", "dw if leaves_in > 1", LARGE),
    m("planning/mesh", "max(forward, backward) - head.temporaries", "forward + backward - head.temporaries", LARGE),
    m(
        "mesh/parts",
        "while 4 * size // parts",
        "while size // parts",
        f"{CALLS}::test_parts_of_a_head",
    ),
    # the rest
    m("planning/head", "(2 * w.logit + ((w.logit + w.item", "(w.logit + ((w.logit + w.item", HAND),
    m("planning/head", "((w.logit + w.item * (1 + w.gradients)) if", "((w.logit + w.item * w.gradients) if", HAND),
    m("planning/head", "return plane + (1 + w.gradients) * (w.head + w.rows)", "return plane + w.head + w.rows", HAND),
    m("planning/head", "((2 * w.logit + w.item) if w.backward else", "((w.logit + w.item) if w.backward else", HAND),
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
        "flops=round(one * w.live * (way.matmuls + way.narrow))",
        "flops=round(one * w.tokens * (way.matmuls + way.narrow))",
        f"{PLAN}::test_plan_counts_matmuls_and_live_tokens",
    ),
    m(
        "planning/head",
        "dense_flops=round(one * tokens * (1 + w.gradients + w.narrow(1)))",
        "dense_flops=round(one * tokens * (w.gradients + w.narrow(1)))",
        f"{PLAN}::test_plan_for_a_chip_that_is_not_here",
    ),
    m(
        "planning/head",
        "again = 0 if route.in_forward or not w.backward else 1",
        "again = 0",
        f"{PLAN}::test_plan_counts_matmuls_and_live_tokens",
    ),
    m(
        "planning/tpu",
        'matmuls = sum(about[k]["matmuls"] for k in used)',
        "matmuls = len(used)",
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
