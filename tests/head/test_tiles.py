"""Chunk sizes: equal parts on a CPU, multiples of the tiles elsewhere, and never more than fits."""

from __future__ import annotations

import pytest

from logitless.core import chunk_size
from logitless.lab.plan.chips import as_if_on, chip_of

pytestmark = pytest.mark.quick

QWEN = 151936


def test_a_cpu_cuts_tokens_into_equal_chunks() -> None:
    assert chunk_size.platform() == "cpu"
    assert chunk_size.head_chunk(256, QWEN) == 52  # 55 fit, and five of 55 would be filled up to 275
    assert chunk_size.head_chunk(55, QWEN) == 55
    assert chunk_size.head_chunk(56, QWEN) == 28
    assert chunk_size.head_chunk(512, 32000) == 256
    assert chunk_size.head_chunk(3, QWEN) == 3
    # Beside a large head the logits of more rows are small: a third of its bytes, 256 rows at most.
    assert chunk_size.head_chunk(512, QWEN, head_bytes=4 * QWEN * 896) == 256
    assert chunk_size.head_chunk(512, QWEN, head_bytes=2 * QWEN * 896) == 128  # of 149, in equal parts
    assert chunk_size.head_chunk(256, QWEN, head_bytes=4 * QWEN * 64) == 52
    assert chunk_size.head_chunk(4096, 512, head_bytes=1 << 30) == 2048


@pytest.mark.parametrize("vocab", [1000, 32000, QWEN, 2_000_000])
@pytest.mark.parametrize("budget", [None, 64 << 20])
def test_equal_chunks_fit_and_waste_less_than_one_token_each(vocab: int, budget: int | None) -> None:
    largest = chunk_size.head_chunk(1 << 20, vocab, memory_budget=budget)
    for n in (1, 7, 100, 255, 256, 257, 1000, 4097):
        chunk = chunk_size.head_chunk(n, vocab, memory_budget=budget)
        chunks = -(-n // chunk)
        assert 1 <= chunk <= max(largest, 1)
        assert chunks * chunk - n < chunks
        if budget is not None:
            assert chunk * vocab * 8 <= budget


@pytest.mark.parametrize(
    "n, most, part", [(256, 48, 43), (256, 256, 256), (1, 48, 1), (96, 48, 48), (97, 48, 33), (5, 1, 1)]
)
def test_equal_parts(n: int, most: int, part: int) -> None:
    assert chunk_size.equal_part(n, most) == part


@pytest.mark.parametrize("chip", ["h200", "v6e"])
def test_an_accelerator_keeps_its_whole_chunks(chip: str) -> None:
    with as_if_on(chip_of(chip)):
        assert chunk_size.column_tile() is None
        assert chunk_size.head_chunk(8192, QWEN, logits_bytes=2) == 2048
        assert chunk_size.head_chunk(8193, QWEN) == 2048  # not 1639: the sweep cuts what is left over
        assert chunk_size.head_chunk(8192, 256000, memory_budget=1 << 30) == 512
        assert chunk_size.head_chunk(100, QWEN) == 100


def test_a_budget_below_one_token_is_refused() -> None:
    with pytest.raises(ValueError, match=r"memory_budget=100 bytes is less than one token's row.*give at least that"):
        chunk_size.head_chunk(256, QWEN, memory_budget=100)
