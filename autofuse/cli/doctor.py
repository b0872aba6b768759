"""``autofuse doctor``: what ``autofuse.doctor`` finds, one line a check."""

from __future__ import annotations

from pathlib import Path

import click

from autofuse.cli.options import load_settings, store_option
from autofuse.cli.output import out_console
from autofuse.doctor import examine

WIDE = 64  # columns from which names stand beside what was found

EPILOG = """\
\b
Example:
  autofuse doctor
"""


@click.command("doctor", epilog=EPILOG)
@store_option
def command(store: Path | None) -> int:
    """Check that this machine has what autofuse needs.

    Each line is one check; where something is missing, the line below says what to type. Ends with exit code 1 when
    something is missing without which nothing can be fused.
    """
    from rich.table import Table
    from rich.text import Text

    console = out_console()
    failed = 0
    with console.status("looking around"):
        findings = list(examine(load_settings(store=store)))
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    if console.width >= WIDE:
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        mark = ("ok", "green") if finding.ok else ("missing", "bold red") if finding.essential else ("note", "yellow")
        text = Text(finding.found)
        if not finding.ok and finding.remedy:
            text.append(f"\n-> {finding.remedy}", "bold")
        if console.width >= WIDE:
            table.add_row(Text(*mark), finding.name, text)
        else:
            table.add_row(Text(*mark), Text(finding.name, "bold").append("\n").append_text(text))
        failed += not finding.ok and finding.essential
    console.print(table)
    if failed:
        console.print(f"\n{failed} of {len(findings)} checks failed; scripts run, but on eager's kernels.")
    else:
        console.print("\nAll is well. Next: autofuse run YOUR_SCRIPT.py")
    return 1 if failed else 0
