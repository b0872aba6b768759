"""``autofuse trace``: writes a step of a run for Perfetto; ``autofuse.report.trace`` makes the document."""

from __future__ import annotations

import json
from pathlib import Path

import click

from autofuse.cli.options import load_settings, open_store, store_option
from autofuse.cli.output import write_file

EPILOG = """\
\b
Examples:
  autofuse trace step.json           of the newest run
  autofuse trace step.json --run 3   of an earlier one
"""


@click.command("trace", epilog=EPILOG)
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--run", "run_id", type=click.IntRange(min=1), metavar="N", help="Number of the run. Default: the newest."
)
@store_option
def command(file: Path, run_id: int | None, store: Path | None) -> None:
    """Write a step of a run, node by node, as a Chrome trace.

    Open FILE at https://ui.perfetto.dev (it stays on this machine) or in chrome://tracing. One lane shows the step in
    eager, one with fused kernels. Each slice says whether its time was recorded in one step or put together, and how.
    """
    from autofuse.report.trace import trace_of  # imports SQLAlchemy, which the help does not need

    with open_store(load_settings(store=store)) as opened:
        document = trace_of(opened, run_id)
    write_file(file, json.dumps(document, separators=(",", ":")), "autofuse trace FILE")
    click.echo(f"written to {file}; open it at https://ui.perfetto.dev")
