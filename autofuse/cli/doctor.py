"""``autofuse doctor``: what ``autofuse.doctor`` finds, one line a check."""

from __future__ import annotations

from pathlib import Path

import click

from autofuse.cli.options import load_settings, store_option
from autofuse.cli.output import out_console
from autofuse.doctor import examine

WIDE = 64  # columns from which names stand beside what was found
NAME_WIDTH = len("torch's private names")  # the longest

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
    failed = passed = 0
    # Each line as soon as it is known: where torch was never imported before, that takes a quarter of a minute.
    for finding in examine(load_settings(store=store)):
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True, min_width=len("missing"))
        if console.width >= WIDE:
            table.add_column(no_wrap=True, min_width=NAME_WIDTH)
        table.add_column(overflow="fold")
        mark = ("ok", "green") if finding.ok else ("missing", "bold red") if finding.essential else ("note", "yellow")
        text = Text(finding.found)
        if not finding.ok and finding.remedy:
            text.append(f"\n-> {finding.remedy}", "bold")
        if console.width >= WIDE:
            table.add_row(Text(*mark), finding.name, text)
        else:
            table.add_row(Text(*mark), Text(finding.name, "bold").append("\n").append_text(text))
        is_failure = not finding.ok and finding.essential
        failed, passed = failed + is_failure, passed + (not is_failure)
        console.print(table)
    if failed:
        console.print(f"\n{failed} of {failed + passed} checks failed; scripts run, but on eager's kernels.")
    else:
        console.print("\nAll is well. Next: autofuse run YOUR_SCRIPT.py")
    return 1 if failed else 0
