"""What the commands print fits a terminal of 80 columns, and no line ends inside a number."""

from __future__ import annotations

import pytest

import report_records
from logitless.lab import cli, shipped_configs
from logitless.lab.bench import text_table
from logitless.lab.tools.text import WIDTH, wrapped


def test_a_line_ends_between_parts() -> None:
    parts = ["  an arm", *(f"{i} and {i}.25 MiB" for i in range(9)), "x" * 90]
    lines = wrapped(parts, 6).splitlines()
    assert [part for line in lines for part in line.strip().split("  ")] == [part.strip() for part in parts]
    assert all(len(line) <= WIDTH for line in lines[:-1]) and len(lines) > 3
    assert all(line.startswith(" " * 6) for line in lines[1:]), "a part that is too long has a line of its own"


def test_tables_of_benchmarks_fit() -> None:
    record = report_records.bench_record("case")
    record["arms"]["default"]["ratios"]["strong"]["device_ms"] |= dict(low=0.123456, high=12.3)
    record["gates"]["bf16, dW in param dtype: memory / strong, of the first shape"] = record["gates"]["time / strong"]
    text = text_table.table(record)
    assert max(map(len, text.splitlines())) <= WIDTH
    assert "[0.123, 12.300] cannot tell" in text and "of strong: " in text
    assert "plan 33.0 MiB" in text and "wall 5.67" in text


@pytest.mark.parametrize(("vocab", "said"), [(2048, True), (151936, False)])
def test_a_shape_that_is_too_small_to_tell_says_so(vocab: int, said: bool) -> None:
    record = report_records.bench_record("case")
    record["config"] |= dict(tokens=512, vocab=vocab)
    text = text_table.table(record)
    assert ("too small a shape" in text) == ("--config cpu_head" in text) == said
    assert "cpu_head" in shipped_configs.names("bench")


@pytest.mark.parametrize(
    "arguments",
    [["configs"], *(["plan", "--model", "qwen2.5-7b", "--chip", chip, "--no-compile"] for chip in ("v6e", "h200"))],
)
def test_what_commands_print_fits(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 5 and max(map(len, lines)) <= WIDTH, max(lines, key=len)
