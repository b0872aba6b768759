"""``autofuse report``: loads the report of a run and prints or writes it; all of it is made in ``autofuse.report``."""

from __future__ import annotations

import json
from pathlib import Path

import click

from autofuse.cli.options import load_settings, open_store, store_option
from autofuse.cli.output import out_console, write_file

EPILOG = """\
\b
Examples:
  autofuse report                    the newest run
  autofuse report --run 3            an earlier one
  autofuse report --verbose          all tables
  autofuse report --html run.html    one file for a browser
  autofuse report --json > run.json  for programs
"""


@click.command("report", epilog=EPILOG)
@click.option(
    "--run", "run_id", type=click.IntRange(min=1), metavar="N", help="Number of the run. Default: the newest."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
@click.option("--json-schema", "is_schema", is_flag=True, help="Print the JSON Schema of what --json prints.")
@click.option(
    "--html",
    "page",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write one self-contained page to FILE.",
)
@click.option("--verbose", is_flag=True, help="Show all: shapes, modules, refusals, notes, where eager's time goes.")
@store_option
def command(
    run_id: int | None, as_json: bool, is_schema: bool, page: Path | None, verbose: bool, store: Path | None
) -> None:
    """Show what was fused, how much faster it is, and what tuning cost.

    The speedup compares steps on fused kernels with steps of the same run that were held out and ran eager. A run that
    gained nothing is said to have gained nothing, and why.
    """
    if page is not None and as_json:
        raise click.UsageError("expected one of --json and --html, found both")
    # Imported when the command runs: its help needs no rich, SQLAlchemy or report.
    from autofuse.report.as_json import SCHEMA, report_to_json
    from autofuse.report.brief import render_brief
    from autofuse.report.report import load_report
    from autofuse.report.terminal import render_report

    if is_schema:
        click.echo(SCHEMA.read_text(encoding="utf-8"), nl=False)
        return
    with open_store(load_settings(store=store)) as opened:
        if page is not None:
            from autofuse.report.html.page import html_report

            write_file(page, html_report(opened, run_id), "--html FILE")
            click.echo(f"written to {page}; open it in a browser")
            return
        report = load_report(opened, run_id)
    if as_json:
        click.echo(json.dumps(report_to_json(report), indent=2))
    else:
        (render_report if verbose else render_brief)(report, out_console())
