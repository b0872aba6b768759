"""The page of a run: whole, self-contained, escaped, and true to the report; `test_html_in_a_browser` opens it."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from autofuse.cli.app import parse
from autofuse.cli.output import write_file
from autofuse.db.store import Store
from autofuse.ir.records import Bucket, CompileKey, Event, KernelRecord, RunStart
from autofuse.report.html.charts import balance_chart, node_chart, pairs_chart, shapes_chart
from autofuse.report.html.page import MOST_ROWS, html_report
from autofuse.report.html.shapes import MOST_COLUMNS, shape_columns, varying_dim
from autofuse.report.html.source import MOST_LINES, coloured
from autofuse.report.html.svg import ticks
from autofuse.report.report import load_report
from autofuse.report.statistics import Balance, Speedup, StepRow, summarise
from tests.report.report_records import COLD, DEVICE, GELU, HOT, SIGNATURE, VERSIONS, decision, fill, open_store, use

VOID = {"meta", "br", "input", "link", "img", "hr"}
NASTY = "</script><script>alert(1)</script>\"'&<b>"


class Page(HTMLParser):
    """The elements, attributes and text of a page; an element that is not closed in order is an error."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("script", "style"):
            self.text.append(data)

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(tmp_path / "store.sqlite3")
    yield opened
    opened.close()


def test_the_page_says_what_the_report_says(store: Store) -> None:
    fill(store)
    kernel = KernelRecord(
        CompileKey("t", "gcc 12.2", "-O3", "avx512"), GELU[1], "void f(int a) { if (a < 1) g(); }", b"\x7fELF"
    )
    store.kernels.put(kernel)
    store.results.put_decision(replace(decision(GELU, HOT, 2.16), compile_key=kernel.key.digest))
    page, report = Page(html_report(store)), load_report(store)
    assert f"{report.totals.speedup.median:.2f}x" in page.words
    for line in report.nodes:
        assert line.bucket in page.words and line.node in page.words
    assert "no candidate beat eager by the margin" in page.words
    assert "one cheap operation gains nothing" in page.words and "train_lm.py:52" in page.words
    assert kernel.source in "".join(page.text)
    assert len([name for tag, name, _ in page.attributes if tag == "svg" and name == "aria-label"]) == 4


def test_a_kernel_of_two_buckets_stands_on_the_page_once(store: Store) -> None:
    fill(store)
    kernel = KernelRecord(CompileKey("t", "gcc 12.2", "-O3", "avx512"), GELU[1], "void f(void) { g(1); }", b"\x7fELF")
    store.kernels.put(kernel)
    for bucket in (HOT, COLD):
        store.results.put_decision(replace(decision(GELU, bucket, 2.16), compile_key=kernel.key.digest))
    page = Page(html_report(store))
    assert "".join(page.text).count(kernel.source) == 1
    assert page.words.count("Its kernel has the source of") == 1


def test_it_refers_to_nothing_outside_of_itself(store: Store) -> None:
    fill(store)
    text = html_report(store)
    for tag, name, value in Page(text).attributes:
        assert name not in ("src", "srcset", "onload", "onclick"), (tag, name)
        assert name != "href" or value.startswith("#")
    assert "@import" not in text and "url(" not in text and "http" not in re.sub(r"http://www.w3.org\S*", "", text)


def test_links_lead_somewhere(store: Store) -> None:
    fill(store)
    attributes = Page(html_report(store)).attributes
    there = {value for _, name, value in attributes if name == "id"}
    assert {value[1:] for _, name, value in attributes if name == "href"} <= there


def test_a_store_without_runs_says_what_to_type(store: Store) -> None:
    page = Page(html_report(store))
    assert "holds no runs yet" in page.words and "autofuse run SCRIPT.py" in page.words


def test_a_run_that_ended_in_the_middle(store: Store) -> None:
    fill(store)
    run_id = store.runs.start(RunStart("train.py", DEVICE, VERSIONS, "wait", 1))
    page = Page(html_report(store, run_id))
    assert "Nothing ran fused. No call of an nn.Module was seen." in page.words and "not ended" in page.words


def test_names_are_text_whatever_they_are(store: Store) -> None:
    run_id = fill(store)
    node = (NASTY, GELU[1] + NASTY, NASTY, GELU[3])
    store.nodes.put_uses(
        run_id, [replace(use(GELU, HOT, 5, 1, 0.5), fusion_id="e" * 64, label=NASTY, operations=NASTY)]
    )
    store.notes.add_event(run_id, Event("note", NASTY))
    text = html_report(store)
    page = Page(text)
    assert "<script>alert" not in text and page.words.count("alert(1)") >= 3
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert data is not None and any(NASTY in row for row in json.loads(data[1]))
    assert node[2] in page.words


def test_ten_thousand_nodes(store: Store) -> None:
    """The rows beyond the first are data of the page's script; the browser's test opens such a page."""
    run_id = fill(store)
    many(store, run_id, 10_000)
    text = html_report(store)
    assert len(text) < 6_000_000
    page = Page(text)
    assert page.words.count("af_many_") >= MOST_ROWS and "10004 nodes" in page.words


def many(store: Store, run_id: int, count: int) -> None:
    like = use(GELU, HOT, 7, 3, 0.0)
    store.nodes.put_uses(
        run_id,
        [
            replace(like, fusion_id=f"{n:064x}", label=f"af_many_{n:06d}", bucket=Bucket(((8, 8), (n, n + 1))))
            for n in range(count)
        ],
    )


# ---- the command --------------------------------------------------------------------------------------------


def test_the_command_writes_one_file(store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(store)
    page = tmp_path / "run.html"
    page.write_text("earlier")
    assert not parse(["report", "--store", str(store.path), "--html", str(page)])
    assert capsys.readouterr().out == f"written to {page}; open it in a browser\n"
    assert "<!doctype html>" in page.read_text() and not list(tmp_path.glob(".run*"))


def test_links_and_pipes_stay_what_they_are(tmp_path: Path) -> None:
    target, link, pipe = tmp_path / "target.txt", tmp_path / "link.txt", tmp_path / "pipe"
    target.write_text("old")
    link.symlink_to(target)
    write_file(link, "new", "--x")
    assert link.is_symlink() and target.read_text() == "new" and target.stat().st_mode & 0o777 == 0o644
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_file(pipe, "told", "--x")
    assert os.read(reader, 100) == b"told" and pipe.is_fifo()
    os.close(reader)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.txt", "pipe", "target.txt"]


def test_a_place_that_cannot_be_written(store: Store, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fill(store)
    options = ["report", "--store", str(store.path), "--html"]
    assert parse([*options, str(tmp_path / "none" / "run.html")])
    found = capfd.readouterr().err
    assert "expected a file that can be written" in found and "--html FILE" in found
    assert parse([*options, str(tmp_path / "x.html"), "--json"]) == 2
    assert "found both" in capfd.readouterr().err


# ---- parts of it ----------------------------------------------------------------------------------------------


def row(size: int, ratios: tuple[float, ...] = (1.5,) * 5, share: float = 0.1, steps: int = 10) -> StepRow:
    return StepRow("M", SIGNATURE.format(size), steps, 5, 100.0, 150.0, share, True, summarise(ratios), ratios)


def test_columns_are_sizes_of_the_dim_that_varies() -> None:
    rows = [row(256), row(64, ()), row(128)]
    assert varying_dim(rows) == (0, 1)
    columns = shape_columns(rows)
    assert [column.label for column in columns] == ["64", "128", "256"]
    assert columns[0].speedup == Speedup() and columns[1].speedup.median == 1.5
    assert sum(column.steps for column in columns) == 45


def test_many_sizes_share_columns_and_lose_none() -> None:
    rows = [row(size, share=0.01) for size in range(1, 101)]
    columns = shape_columns(rows)
    assert len(columns) == MOST_COLUMNS
    assert sum(column.steps for column in columns) == 1500
    assert sum(column.speedup.pairs for column in columns) == 500
    assert columns[0].label == "1–7"


def test_steps_whose_sizes_do_not_vary_have_a_column_each() -> None:
    assert [column.label for column in shape_columns([row(64)])] == ["8×64 8×64"]
    assert shape_columns([]) == []


def test_a_loss_is_drawn_as_a_loss() -> None:
    chart = str(shapes_chart(shape_columns([row(64, (0.8,) * 6), row(128)])))
    assert chart.count('class="dot loss"') == 1 and chart.count('class="dot gain"') == 1
    dots = str(pairs_chart([0.9, 1.2, 1.3, 1.4, 1.5], summarise([0.9, 1.2, 1.3, 1.4, 1.5])))
    assert dots.count('class="dot loss"') == 1 and dots.count('class="dot gain"') == 4


def test_a_break_even_is_marked_where_it_lies() -> None:
    balance = (Balance(0, -5.0), Balance(50, -1.0), Balance(100, 3.0))
    assert "paid back at step 75" in str(balance_chart(balance, 75))
    assert "not paid back within this run" in str(balance_chart(balance[:2], None))


def test_a_node_of_one_operation_and_of_many() -> None:
    one = {"inputs": [], "operations": [{"name": "v0", "target": "aten.relu.default", "args": []}], "outputs": []}
    assert "relu" in str(node_chart(one, 1.0, None))
    many_of_them = {**one, "operations": [{**one["operations"][0], "name": f"v{n}"} for n in range(40)]}
    assert "and 28 more" in str(node_chart(many_of_them, 1.0, 2.0))


@example(0.0, 5e-324)
@given(
    st.floats(-1e6, 1e6, allow_nan=False),
    st.floats(0, 1e6, allow_nan=False),
)
def test_ticks_are_few_and_within(low: float, span: float) -> None:
    found = ticks(low, low + span)
    assert 1 <= len(found) <= 12
    assert all(
        low - 1e-6 * (1 + abs(low) + span) <= tick <= low + span + 1e-6 * (1 + abs(low) + span) for tick in found
    )


@given(st.lists(st.floats(0.2, 8.0), min_size=1, max_size=40))
def test_every_pair_is_a_dot_within_the_drawing(ratios: list[float]) -> None:
    chart = str(pairs_chart(ratios, summarise(ratios)))
    places = [float(x) for x in re.findall(r'cx="([\d.-]+)"', chart)]
    assert len(places) == len(ratios) and all(0 <= x <= 520 for x in places)


def test_source_is_coloured_and_cut() -> None:
    assert "k-" in coloured("int main(void) { return 0; }") and "&lt;" in coloured("a < b")
    assert "5 lines more" in coloured("x\n" * (MOST_LINES + 5))


def test_the_page_of_many_steps_takes_no_time(store: Store) -> None:
    """Not a figure, only that nothing goes with the square of the steps."""
    run_id = fill(store)
    began = time.process_time()
    html_report(store, run_id)
    assert time.process_time() - began < 20
