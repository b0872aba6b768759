"""The page of a run in headless Chromium, at a desk's and a phone's width: it renders, fits, filters and sorts."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from html import unescape
from pathlib import Path

import pytest

from autofuse.db.store import Store
from autofuse.report.html.page import html_report
from tests.report.report_records import fill, open_store
from tests.report.test_html import NASTY, many

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None and not os.environ.get("CI"), reason="needs Debian's chromium")

# Reports what a person would see: errors, whether the page is wider than its window, what a filter and a sort leave.
PROBE = """<script>
addEventListener("error", (event) => errors.push(String(event.message)));
const errors = [];
addEventListener("load", () => {
  const rows = () => [...document.querySelectorAll("#table tbody tr")].map((row) => row.cells[0].textContent);
  const found = {width: document.documentElement.scrollWidth, window: innerWidth, errors};
  const began = performance.now();
  if (document.getElementById("table")) {
    found.all = rows().length;
    const filter = document.getElementById("filter"), decision = document.getElementById("decision");
    const type = (text) => { filter.value = text; filter.dispatchEvent(new Event("input")); };
    type("log_softmax nll"); found.filtered = rows(); type("");
    decision.value = "fused"; decision.dispatchEvent(new Event("change")); found.fused = rows().length;
    decision.value = "other"; decision.dispatchEvent(new Event("change")); found.other = rows().length;
    decision.value = ""; decision.dispatchEvent(new Event("change"));
    const heads = [...document.querySelectorAll("#table th")];
    heads[2].querySelector("button").click(); found.most = rows()[0]; found.sort = heads[2].getAttribute("aria-sort");
    heads[2].querySelector("button").click(); found.least = rows()[0];
    found.count = document.getElementById("count").textContent;
    found.more = !document.getElementById("more").hidden;
    const link = document.querySelector("#table a");
    if (link) { location.hash = link.getAttribute("href"); }
  }
  setTimeout(() => {
    found.opened = document.querySelectorAll("details[open]").length;
    found.boxes = [...document.querySelectorAll("svg")].map((svg) => svg.getBoundingClientRect().width > 100);
    found.ms = performance.now() - began;
    const out = document.createElement("pre");
    out.id = "probe"; out.textContent = JSON.stringify(found);
    document.body.append(out);
  }, 50);
});
</script>"""


def look(text: str, folder: Path, width: int) -> dict[str, object]:
    assert CHROMIUM is not None, "expected chromium in continuous integration, found none: apt-get install chromium"
    page = folder / "page.html"
    page.write_text(text.replace("</head>", f"{PROBE}</head>"))
    command = [
        CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        f"--user-data-dir={folder / 'profile'}", f"--window-size={width},2000", "--virtual-time-budget=20000",
        "--dump-dom", page.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    found = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout, re.S)
    assert found is not None, done.stderr[-2000:]
    told: dict[str, object] = json.loads(unescape(found[1]))
    assert told["errors"] == []
    assert "CONSOLE" not in done.stderr, done.stderr
    return told


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(tmp_path / "store.sqlite3")
    yield opened
    opened.close()


@pytest.mark.parametrize("width", [1440, 390])
def test_it_fits_filters_sorts_and_opens_a_node(store: Store, tmp_path: Path, width: int) -> None:
    fill(store)
    told = look(html_report(store), tmp_path, width)
    assert told["width"] <= told["window"]  # type: ignore[operator]
    assert told["all"] == 4 and told["fused"] == 2 and told["other"] == 1 and not told["more"]
    assert len(told["filtered"]) == 1 and "log_softmax" in told["filtered"][0]  # type: ignore[arg-type, index]
    assert "layer_norm" in str(told["most"]) and "log_softmax" in str(told["least"]) and told["sort"] == "descending"
    assert told["opened"] == 1
    assert told["boxes"] == [True] * 4


def test_ten_thousand_nodes_open(store: Store, tmp_path: Path) -> None:
    run_id = fill(store)
    many(store, run_id, 10_000)
    told = look(html_report(store), tmp_path, 1440)
    assert told["all"] == 25 and told["more"] and told["count"] == "10004 nodes"


def test_an_empty_store_and_names_with_markup(store: Store, tmp_path: Path) -> None:
    assert "all" not in look(html_report(store), tmp_path, 390)
    run_id = fill(store)
    many(store, run_id, 3)
    text = html_report(store).replace("af_many_000001", NASTY.replace("<", "\\u003c").replace('"', '\\"'))
    assert look(text, tmp_path, 1440)["all"] == 7
