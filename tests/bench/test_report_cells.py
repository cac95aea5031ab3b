"""Every cell of the report: distinct numbers go in, and each is looked for under its own name."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from logitless.lab.bench import ratios, report, text_table
from report_records import MIB, ab_record, bench_record, bench_row, gradcheck_record, plan_record

Rows = list[dict[str, str]]


def page(tmp_path: Path, *records: dict[str, Any], name: str = "ab") -> ET.Element:
    folder = tmp_path / "run"
    folder.mkdir(exist_ok=True)
    paths = []
    for i, record in enumerate(records):
        paths.append(folder / (f"{name}.json" if record.get("kind") == "ab" else f"r{i}.json"))
        paths[-1].write_text(json.dumps(record))
    report.write(paths, tmp_path / "page.html")
    return ET.fromstring((tmp_path / "page.html").read_text().removeprefix("<!DOCTYPE html>"))


def text(e: ET.Element | None) -> str:
    return "" if e is None else "".join(e.itertext())


def tables(tree: ET.Element) -> dict[str, Rows]:
    """Caption -> rows, each a dictionary by the column's heading."""
    out = {}
    for table in tree.iter("table"):
        heads = [text(th) for th in table.iter("th")]
        body = table.find("tbody")
        assert body is not None
        out[text(table.find("caption"))] = [
            dict(zip(heads, [text(td) for td in tr.findall("td")], strict=True)) for tr in body.findall("tr")
        ]
    return out


def paragraphs(tree: ET.Element) -> str:
    return " ".join(text(p) for p in tree.iter("p"))


def test_benchmarks(tmp_path: Path) -> None:
    tree = page(tmp_path, bench_record())
    found = tables(tree)
    assert found["All cases"] == [
        {"case": "case", "arm": arm, "median ms": ms, "p10 to p90": spread, "ms a call": call, "ms back to back": back,
         "temporaries MiB, plan": plan, "temporaries MiB, device": device, "TFLOP/s": tflops, "GB/s": speed,
         "x roofline": roofline}
        for arm, ms, spread, call, back, plan, device, tflops, speed, roofline in (
            ("strong", "3.21", "2.98 to 4.56", "5.67", "6.78", "33.0", "44.0", "7.77", "888", "2.14"),
            ("default", "6.42", "5.96 to 9.12", "11.3", "13.6", "66.0", "88.0", "15.5", "1,776", "4.28"),
            ("naive", "out of memory", *[""] * 8),
        )
    ]  # fmt: skip
    assert [list(r.values()) for r in found["Ratios"]] == [
        ["case", "default", "strong", "device", "0.500", "0.450 to 0.550", "faster"],
        ["case", "default", "strong", "a call", "0.980", "0.900 to 1.070", "no difference"],
    ]
    assert list(found["Ratios"][0]) == ["case", "arm", "to", "clock", "ratio", "95 % interval", "verdict"]
    assert [list(r.values()) for r in found["Bars"]] == [
        ["case", "time / strong", "0.810", "0.800 to 0.820", "0.7", "FAIL"],
        ["case", "memory / strong", "0.300", "", "0.4", "PASS"],
        ["case", "time / naive", "0.900", "0.700 to 1.100", "1", "undecided"],
    ]
    assert found["Time: case (ms)"] == [
        {"": "strong", "median": "3.21"}, {"": "default", "median": "6.42"}, {"": "naive", "median": "out of memory"}
    ]  # fmt: skip
    # All peaks are the device's own: they are shown, part by part, and called that.
    assert found["Memory: case (MiB)"][:2] == [
        {"": "strong", "inputs": "11.0", "outputs": "22.0", "temporaries": "44.0"},
        {"": "default", "inputs": "22.0", "outputs": "44.0", "temporaries": "88.0"},
    ]
    assert "the device's peak" in paragraphs(tree) and "the compiler's plan" not in paragraphs(tree)


def test_without_the_devices_peak_it_is_the_compilers_plan_and_no_column_is_empty(tmp_path: Path) -> None:
    record = bench_record()
    record["arms"]["default"]["mem/device"]["from_compile"] = True  # an upper bound is no peak to draw
    for strong, shown in ((record["arms"]["strong"]["mem/device"], "44.0"), (None, "")):
        record["arms"]["strong"]["mem/device"] = strong
        found = tables(page(tmp_path, record))
        assert [r["temporaries MiB, device"] for r in found["All cases"]] == [shown, "88.0+", ""]
        planned = {"": "default", "inputs": "20.0", "outputs": "40.0", "temporaries": "66.0"}
        assert found["Memory: case (MiB)"][1] == planned
    for row in record["arms"].values():
        row.pop("mem/device", None)
    tree = page(tmp_path, record)
    assert "the compiler's plan" in paragraphs(tree)
    assert "temporaries MiB, device" not in tables(tree)["All cases"][0]


@pytest.mark.parametrize(
    "verify, said", [(None, "not verified"), (True, "verified before it was timed"), (False, "NOT")]
)
def test_verified_is_said_where_it_was(tmp_path: Path, verify: bool | None, said: str) -> None:
    record = bench_record()
    record.pop("verify")
    if verify is not None:
        record["verify"] = dict(passed=verify, gates={})
    words = paragraphs(page(tmp_path, record))
    assert said in words and ("before it was timed" in words) == (verify is True)
    assert ("Not verified: case" in words) == (verify is not True) and "took turns" in words


def test_results_from_before_arms_took_turns_say_so(tmp_path: Path) -> None:
    record = bench_record()
    for row in record["arms"].values():
        row.pop("ratios", None)
    tree = page(tmp_path, record)
    assert "from before arms took turns" in paragraphs(tree) and "Ratios" not in tables(tree)


def test_gradient_checks_with_a_gate_that_fails(tmp_path: Path) -> None:
    tree = page(tmp_path, gradcheck_record())
    found = tables(tree)
    assert [list(r.values()) for r in found["Gates"]] == [
        ["check", "loss", "0.25", "0.5", "PASS"],
        ["check", "dhidden difference", "3", "2", "FAIL"],
    ]
    marks = {text(td): td.get("class") for td in tree.iter("td") if td.get("class")}
    assert marks == {"PASS": "good", "FAIL": "bad"}
    assert [r["value / limit"] for r in found["Gates (x limit)"]] == ["0.500", "1.50"]
    fills = [r.get("style") for r in tree.iter("path")]
    assert any("var(--good)" in str(f) for f in fills) and any("var(--bad)" in str(f) for f in fills)


def test_plans(tmp_path: Path) -> None:
    found = tables(page(tmp_path, plan_record()))
    assert found["m on c, 16 tokens"] == [
        {"": what, "fused": fused, "dense": dense}
        for what, fused, dense in (
            ("backend", "chunked", "dense"), ("matmuls", "4", "3"), ("TFLOP", "5.00", "6.00"), ("peak MiB", "7", "8"),
            ("temporaries MiB", "9", "12"), ("roofline ms", "13.00", "14.00"), ("longest context", "900", "100"),
        )
    ]  # fmt: skip
    assert found["Memory against context length: m on c (peak MiB)"] == [
        {"tokens": "16", "fused": "16.0", "dense": "80.0"},
        {"tokens": "32", "fused": "32.0", "dense": "160"},
    ]


def test_training(tmp_path: Path) -> None:
    found = tables(page(tmp_path, ab_record()))
    steps = ["10", "20", "30"]
    reward = found["Reward by step: run (mean reward of the step's completions)"]
    assert [r["step"] for r in reward] == steps
    assert [r["reference"] for r in reward] == ["1.00", "1.12", "1.25"]
    assert [r["chunked"] for r in reward] == ["2.00", "2.12", "2.25"]
    kl = found["KL by step: run (KL to the initial policy, k3)"]
    assert [(r["reference"], r["chunked"]) for r in kl] == [
        ("0.0100", "0.0200"),
        ("0.0200", "0.0400"),
        ("0.0300", "0.0600"),
    ]
    k1 = found["KL (k1) by step: run (KL to the initial policy, k1)"]
    assert [(r["reference"], r["chunked"]) for r in k1] == [("-1.00", "-2.00"), ("-2.00", "-4.00"), ("-3.00", "-6.00")]
    assert found["Step time by step: run (seconds)"][0] == {"step": "10", "reference": "7.00", "chunked": "14.0"}
    assert found["Update time by step: run (seconds)"][0] == {"step": "10", "reference": "5.00", "chunked": "10.0"}
    assert found["run: summary"] == [
        {"": "held-out reward at the end", "reference": "0.250", "chunked": "0.500"},
        {"": "step, mean of the last 10 (s)", "reference": "7.000", "chunked": "14.000"},
    ]
    assert [list(r.values()) for r in found["run: agreement of the arms"]] == [
        ["agree", "yes"], ["largest difference", "0.125"]
    ]  # fmt: skip


def test_times_of_arms_that_ran_at_the_same_time_are_not_compared(tmp_path: Path) -> None:
    tree = page(tmp_path, ab_record(parallel=True))
    found = tables(tree)
    assert "Reward by step: run (mean reward of the step's completions)" in found
    assert not [k for k in found if "time" in k.lower()]
    assert [r[""] for r in found["run: summary"]] == ["held-out reward at the end"]
    assert "ran at the same time: nothing is said about their speed" in paragraphs(tree)


def verdict(tree: ET.Element) -> list[tuple[str, ...]]:
    """Question, answer, basis and mark of each tile."""
    return [
        (*(text(e) for e in tile), str(tile.get("class")).removeprefix("tile").strip())
        for tile in tree.iter("li")
        if str(tile.get("class")).startswith("tile")
    ]


def test_the_verdict_is_on_top(tmp_path: Path) -> None:
    found = verdict(page(tmp_path, bench_record(), gradcheck_record()))
    assert found == [
        ("Do they agree?", "NO", "1 of 2 gates of gradient checks met", "bad"),
        (
            "Time",
            "0.50x",
            "case: default (the call without options) / strong (the best dense form), 95 % interval 0.450 to 0.550",
            "good",
        ),
        (
            "Memory",
            "2.00x",
            "temporaries (beyond inputs and outputs), "
            "case: default (the call without options) / strong (the best dense form), by the device's peak",
            "bad",
        ),
    ]
    agree = ab_record()
    agree["agreement"]["test"] = "by replay"
    for said, answer, mark in ((True, "yes", "good"), (False, "NO", "bad"), (None, "cannot be judged", "")):
        agree["agreement"]["agree"] = said
        assert verdict(page(tmp_path, agree, gradcheck_record())) == [("Do they agree?", answer, "by replay", mark)]
    record = bench_record()
    ratio = record["arms"]["default"]["ratios"]["strong"]
    record["arms"]["default"]["ratios"]["strong"] = {"wall_ms": ratio["wall_ms"]}
    record["arms"]["strong"]["mem/device"] = None
    found = verdict(page(tmp_path, record))
    assert found[0] == ("Do they agree?", "yes", "1 benchmarks, verified before they were timed", "good")
    assert found[1][1:] == (
        "no difference",
        "case: default (the call without options) / strong (the best dense form), 95 % interval 0.900 to 1.070",
        "",
    )
    assert found[2][2].endswith("by the compiler's plan")
    assert verdict(page(tmp_path, plan_record())) == []


def test_the_page_says_how_it_came_about(tmp_path: Path) -> None:
    from logitless.lab.tools import result_files as records

    made = records.provenance()
    assert made["date"].endswith("UTC") and made["command"] and made["version"]
    words = paragraphs(
        page(tmp_path, bench_record(made=dict(made, command="logitless bench --suite x", commit="abc123")))
    )
    assert (
        f"logitless bench --suite x; {made['date']}; logitless {made['version']} (abc123); Python {made['python']}"
        in words
    )


def test_cases_that_differ_in_tokens_make_a_line_for_each_arm(tmp_path: Path) -> None:
    def record(tokens: int, kernel: float, strong: float | None) -> dict[str, Any]:
        r = bench_record(f"at {tokens}", gates={})
        r["config"]["tokens"] = tokens
        r["arms"] = {"strong": bench_row(1.0) if strong else {"error": "out of memory"}, "default": bench_row(1.0)}
        for arm, mib in (("strong", strong), ("default", kernel)):
            if mib:
                r["arms"][arm]["mem/compiler"]["temporaries"] = mib * MIB
        return r

    found = tables(page(tmp_path, record(131072, 1790, None), record(32768, 1787, 28488)))
    assert found["Temporaries against tokens: at 131072 (MiB)"] == [
        {"tokens": "32,768", "strong (out of memory at 131,072)": "28,488", "default": "1,787"},
        {"tokens": "131,072", "strong (out of memory at 131,072)": "", "default": "1,790"},
    ]


@pytest.mark.parametrize(
    ("low", "high", "said", "mark"),
    [
        (0.52, 3.27, "cannot tell", ""),
        (0.95, 1.2, "cannot tell", ""),
        (0.91, 1.09, "no difference", ""),
        (0.5, 0.99, "0.70x", "good"),
        (1.01, 4.0, "0.70x", "bad"),
        (None, None, "0.70x", ""),
    ],
)
def test_a_verdict_on_time_follows_from_the_interval(
    tmp_path: Path, low: float | None, high: float | None, said: str, mark: str
) -> None:
    """By the same rule in the tile, in the table and on the terminal, whatever the record calls it."""
    record = bench_record()
    found = dict(ratio=0.7, low=low, high=high, verdict="no difference")
    record["arms"]["default"]["ratios"]["strong"] = {"device_ms": found}
    tree = page(tmp_path, record)
    (tile,) = [t for t in verdict(tree) if t[0] == "Time"]
    assert (tile[1], tile[3]) == (said, mark)
    assert [r["verdict"] for r in tables(tree)["Ratios"]] == [ratios.verdict(low, high)]
    assert (said in ratios.shown(found)) == (said in (ratios.NONE, ratios.UNSURE))


@pytest.mark.parametrize(("busy", "platform", "shown"), [(3.1, "cpu", True), (0.4, "cpu", False), (3.1, "gpu", False)])
def test_a_busy_machine_is_said_on_the_page_and_on_the_terminal(
    tmp_path: Path, busy: float, platform: str, shown: bool
) -> None:
    record = bench_record(busy=busy)
    record["arms"]["strong"]["environment"]["platform"] = platform
    tree, said = page(tmp_path, record), "not alone: 3.1 cores were busy before the start"
    assert (said in paragraphs(tree)) == (said in verdict(tree)[1][2]) == (said in text_table.table(record)) == shown
