"""``autofuse explain``: the story of a node or a module, told by ``autofuse.report.explain``."""

from __future__ import annotations

from pathlib import Path

import click

from autofuse.cli.options import load_settings, open_store, store_option
from autofuse.cli.output import out_console

EPILOG = """\
\b
Examples:
  autofuse explain                 all nodes and modules that the store knows
  autofuse explain af_row_softmax  one node; the beginning of its name will do
"""


@click.command("explain", epilog=EPILOG)
@click.argument("node", required=False)
@store_option
def command(node: str | None, store: Path | None) -> None:
    """Tell why something was fused or left alone.

    NODE is a name from 'autofuse report', or its beginning: a group of operators that can run as one kernel, or a
    module. Shows its operators, all candidates that were measured, and the decision for each range of shapes.
    """
    from autofuse.report.explain import render_explain  # rich and SQLAlchemy: not for the help

    with open_store(load_settings(store=store)) as opened:
        render_explain(opened, out_console(), node)
