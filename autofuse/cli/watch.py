"""``autofuse watch``: a live view of the newest run; ``autofuse.report.watch`` reads and draws it."""

from __future__ import annotations

from pathlib import Path

import click

from autofuse.cli.options import load_settings, open_store, store_option
from autofuse.cli.output import out_console

EPILOG = """\
\b
Examples:
  autofuse watch          in a second terminal, while a script runs
  autofuse watch --once   how it stands now
"""


@click.command("watch", epilog=EPILOG)
@click.option("--once", is_flag=True, help="Print the state once, and end.")
@store_option
def command(once: bool, store: Path | None) -> None:
    """Watch the newest run while it goes on.

    Shows its steps, what the tuner does, what waits, and what was decided last. Reads the store only. Ends with the
    run, once nothing is queued; Ctrl-C ends it sooner.
    """
    from autofuse.daemon.open_runs import may_go_on
    from autofuse.report.watch import watch  # imports rich and SQLAlchemy, which the help does not need

    with open_store(load_settings(store=store)) as opened:
        watch(opened, out_console(), may_go_on, once=once)
