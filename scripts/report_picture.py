"""Draws a run's report for the README: ``scripts/report_picture.py STORE [RUN]`` writes both pictures in docs/images.

In: a store and the number of a run, the newest without it. Out: report.svg, `autofuse report` on 80 columns; page.png,
the beginning of the page of `autofuse report --html`, which needs Debian's chromium.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from io import StringIO
from pathlib import Path

from autofuse.db.store import Store
from autofuse.report.brief import render_brief
from autofuse.report.console import PlainConsole
from autofuse.report.html.page import html_report
from autofuse.report.report import load_report

IMAGES = Path(__file__).resolve().parents[1] / "docs/images"
COLUMNS = 80
WINDOW = "1100,840"  # in pixels
FONT = re.compile(r"^ *@font-face \{.*?\}\n", re.MULTILINE | re.DOTALL)  # it would be fetched from elsewhere
BLANKS = re.compile(r"[ \t]+$", re.MULTILINE)


def terminal(store: Store, run: int | None) -> str:
    """The report on a terminal, as SVG."""
    console = PlainConsole(record=True, width=COLUMNS, file=StringIO(), force_terminal=True, highlight=False)
    render_brief(load_report(store, run), console)
    return BLANKS.sub("", FONT.sub("", console.export_svg(title="autofuse report", unique_id="report")))


def photograph(page: str, out: Path) -> None:
    """The top of a page, as a window of `WINDOW` shows it."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        sys.exit("expected chromium, found none; type: sudo apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "page.html")
        path.write_text(page)
        command = [
            chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
            "--no-first-run", f"--user-data-dir={folder}/profile", f"--window-size={WINDOW}",
            f"--screenshot={out}", path.as_uri(),
        ]  # fmt: skip
        subprocess.run(command, check=True, capture_output=True, timeout=300)


def main(path: str, run: str = "") -> None:
    number = int(run) if run else None
    with Store.open(Path(path), readonly=True) as store:
        (IMAGES / "report.svg").write_text(terminal(store, number))
        photograph(html_report(store, number), IMAGES / "page.png")


if __name__ == "__main__":
    main(*sys.argv[1:])
