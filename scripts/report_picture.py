"""Draws the beginning of a run's report as an SVG: ``scripts/report_picture.py STORE docs/images/report.svg [RUN]``.

In: a store and the number of a run, the newest without it. Out: its header, totals and first nodes, as
`autofuse report` prints them.
"""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path

from autofuse.db.store import Store
from autofuse.report.console import PlainConsole
from autofuse.report.report import load_report
from autofuse.report.terminal import render_report

COLUMNS, NODES = 92, 6
FONT = re.compile(r"^ *@font-face \{.*?\}\n", re.MULTILINE | re.DOTALL)  # it would be fetched from elsewhere


def draw(store: Path, run: int | None) -> str:
    with Store.open(store, readonly=True) as opened:
        report = load_report(opened, run)
    beginning = replace(
        report, nodes=report.nodes[:NODES], steps=(), graphs=(), roots=(), settings=(), refusals=(), events=()
    )
    console = PlainConsole(record=True, width=COLUMNS, file=StringIO(), force_terminal=True)
    render_report(beginning, console)
    return FONT.sub("", console.export_svg(title="autofuse report", unique_id="report"))


if __name__ == "__main__":
    store, out, *run = sys.argv[1:]
    Path(out).write_text(re.sub(r"[ \t]+$", "", draw(Path(store), int(run[0]) if run else None), flags=re.MULTILINE))
