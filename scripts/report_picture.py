"""Draws the beginning of a run's report as an SVG: ``scripts/report_picture.py STORE docs/images/report.svg``.

In: a store. Out: the header, the totals and the first nodes of its newest run, as `autofuse report` prints them.
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


def draw(store: Path) -> str:
    with Store.open(store, readonly=True) as opened:
        report = load_report(opened, None)
    beginning = replace(
        report, nodes=report.nodes[:NODES], steps=(), graphs=(), roots=(), settings=(), refusals=(), events=()
    )
    console = PlainConsole(record=True, width=COLUMNS, file=StringIO(), force_terminal=True)
    render_report(beginning, console)
    return FONT.sub("", console.export_svg(title="autofuse report", unique_id="report"))


if __name__ == "__main__":
    store, out = map(Path, sys.argv[1:])
    out.write_text(re.sub(r"[ \t]+$", "", draw(store), flags=re.MULTILINE))
