"""Graphs before and after fusion in a report: several captures are one line, sums are for a step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from report_records import DEVICE, VERSIONS
from rich.console import Console

from autofuse.db.store import Store
from autofuse.fusion.stats import FusionStats
from autofuse.ir.records import GRAPH_METRICS, Event, RootRecord, RunStart
from autofuse.report import wording
from autofuse.report.as_json import report_to_json
from autofuse.report.explain import render_graphs
from autofuse.report.report import Report, load_report
from autofuse.report.terminal import render_report


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store.db") as opened:
        yield opened


def size(nodes: int, edges: int, depth: int, nbytes: int = 1000) -> dict[str, float]:
    return {"nodes": nodes, "edges": edges, "depth": depth, "kernels": nodes - 2, "flops": 5e9, "bytes": nbytes}


def graph(
    phase: str,
    operators: str,
    calls: int,
    before: dict[str, float],
    after: dict[str, float],
    fusion: FusionStats | None = None,
) -> Event:
    data = {"phase": phase, "operators": operators, "calls": calls, "before": before, "after": after}
    data |= {"fusion": fusion.to_json()} if fusion is not None else {}
    return Event(GRAPH_METRICS, phase, data | {"source": "net.py:41 return self.body(x)"})


def run(store: Store, *events: Event) -> Report:
    run_id = store.runs.start(RunStart("net.py", DEVICE, VERSIONS, "off", 1))
    for event in events:
        store.notes.add_event(run_id, event)
    return load_report(store)


def text_of(render: Any, *arguments: Any, width: int = 80) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"), color_system=None)  # noqa: SIM115
    render(*arguments[:1], console, *arguments[1:])
    text = console.export_text()
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    return text


def test_captures_for_other_sizes_are_one_line(store: Store) -> None:
    report = run(
        store,
        graph("inference", "a", 1, size(22, 24, 8, 100), size(10, 12, 4, 50)),
        graph("inference", "a", 9, size(22, 24, 8, 900), size(10, 12, 4, 500)),
        graph("forward", "a", 2, size(3, 2, 2), size(3, 2, 2)),
    )
    first, second = report.graphs
    assert (first.captures, first.calls, first.before.nbytes, first.after.nbytes) == (2, 10, 900, 500)
    assert (second.phase, second.captures, second.calls) == ("forward", 1, 2)
    assert not report.events


def test_a_step_weighs_graphs_by_their_calls(store: Store) -> None:
    report = run(
        store,
        graph("forward", "f", 10, size(12, 14, 8, 1000), size(7, 8, 5, 600)),
        graph("backward", "b", 10, size(22, 30, 9, 3000), size(12, 15, 6, 1500)),
        graph("inference", "i", 5, size(6, 5, 5, 100), size(4, 3, 3, 60)),
    )
    found = report_to_json(report)
    assert [g["phase"] for g in found["graphs"]] == ["forward", "backward", "inference"]
    total = found["graph_sum"]
    assert total["steps"] == 10
    assert (total["before"]["nodes"], total["after"]["nodes"]) == (40, 23)
    assert (total["before"]["kernels"], total["after"]["kernels"]) == (10 + 20 + 0.5 * 4, 5 + 10 + 0.5 * 2)
    assert (total["before"]["bytes"], total["after"]["bytes"]) == (4050, 2130)
    text = text_of(render_report, report)
    assert "40 → 23" in text and "mean of 10" in text and "32 → 16" in text


def test_a_report_shows_the_change(store: Store) -> None:
    report = run(store, graph("inference", "a", 6, size(22, 24, 8, 22_000_000), size(10, 12, 4, 12_800_000)))
    for text in (text_of(render_report, report), text_of(render_graphs, report, "net.py", 0)):
        rows = text.splitlines()
        row = next(index for index, line in enumerate(rows) if line.startswith("inference"))
        assert rows[row].split("  ")[0] == "inference"
        for part in ("22 → 10", "24 → 12", "8 → 4", "20 → 8", "5.00 G", "22.0 M → 12.8 M"):
            assert part in rows[row]
        assert rows[row + 1].split() == ["6", "calls", "-55", "%", "-50", "%", "-50", "%", "-60", "%", "-42", "%"]
        assert "net.py:41" in rows[row + 2]
        assert "a step" not in text  # there is but one graph


def test_a_report_says_what_was_planned(store: Store) -> None:
    """Graphs add up; one that was captured again for other sizes counts as its most frequent capture."""
    sizes = size(22, 24, 8), size(10, 12, 4)
    first = FusionStats(20, 5, 3, 10, 4096, 9.0, 4, {"add_relu": 2, "bias_gelu": 1})
    report = run(
        store,
        graph("inference", "a", 1, *sizes, FusionStats(20, 1)),
        graph("inference", "a", 9, *sizes, first),
        graph("forward", "b", 2, *sizes, FusionStats(20, 3, 0, 2, 100, 3.0, 0, {"bias_gelu": 4})),
        graph("backward", "c", 2, *sizes),
    )
    for text in (text_of(render_report, report), text_of(render_graphs, report, "net.py", 0)):
        words = " ".join(text.split())
        assert "Planned: 8 fused kernels, 30.0 % fewer launches; 4 of them for sizes that are only known" in words
        assert "Patterns: bias_gelu (5), add_relu (2)." in words
    found = report_to_json(report)
    assert (found["fusion"]["num_fused"], found["fusion"]["efficiency"]) == (8, 0.3)
    assert found["fusion"]["patterns_used"] == {"add_relu": 2, "bias_gelu": 5}
    assert [g["fusion"]["memory_saved"] for g in found["graphs"]] == [4096, 100, 0]
    assert "Planned" not in text_of(render_report, run(store, graph("forward", "b", 2, *sizes)))


def test_events_of_another_version_are_left_out(store: Store) -> None:
    bad = [Event(GRAPH_METRICS, "", {}), Event(GRAPH_METRICS, "", {"phase": "f", "operators": "", "calls": "x"})]
    bad.append(graph("forward", "a", 3, {"nodes": 1}, {}))
    whole = graph("forward", "a", 3, size(4, 3, 3), size(3, 2, 2))
    bad.append(Event(whole.kind, "", {**whole.data, "fusion": {"applied": "many"}}))
    report = run(store, *bad)
    assert report.graphs == () and report_to_json(report)["graph_sum"] is None


def test_graphs_that_were_never_called_count_once(store: Store) -> None:
    total = report_to_json(run(store, graph("forward", "a", 0, size(4, 3, 3), size(3, 2, 2))))["graph_sum"]
    assert total["steps"] == 0 and total["before"]["kernels"] == 2


def test_nothing_captured_is_said_with_its_reason(store: Store) -> None:
    text = " ".join(text_of(render_graphs, Report("nowhere"), "net.py", 3).split())
    assert "ended with exit code 3" in text and "no run was recorded" in text and "autofuse doctor" in text
    run_id = store.runs.start(RunStart("net.py", DEVICE, VERSIONS, "off", 1))
    text = text_of(render_graphs, load_report(store), "net.py", 0)
    assert text.startswith("Nothing was captured of net.py: it called no nn.Module.")
    store.roots.put(run_id, RootRecord("k", "Net", "eager", "capture_failed", "Unsupported: generators"))
    text = " ".join(text_of(render_graphs, load_report(store), "net.py", 0).split())
    assert "Nothing was captured of net.py: Net: could not be captured. Unsupported: generators" in text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (812, "812"),
        (999.4, "999"),
        (1000, "1.00 k"),
        (16_225_664, "16.2 M"),
        (999_600, "1.00 M"),
        (2e17, "200 P"),
    ],
)
def test_amounts(value: float, text: str) -> None:
    assert wording.amount(value) == text
