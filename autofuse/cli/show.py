"""``autofuse show``: the source of a node's kernel; ``autofuse.report.show`` finds and prints it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from autofuse.cli.complete import nodes
from autofuse.cli.options import load_settings, open_store, store_option
from autofuse.cli.output import out_console
from autofuse.errors import UsageError

if TYPE_CHECKING:
    from autofuse.db.store import Store
    from autofuse.report.find import NodeStory

EPILOG = """\
\b
Examples:
  autofuse show af_row_softmax            the beginning of a node's name will do
  autofuse show af_row_softmax > kernel.c
"""


def bucket_option(function: click.decorators.FC) -> click.decorators.FC:
    help_text = "The range of shapes, as 'autofuse explain NODE' names it. Default: the one with the most calls."
    return click.option("--bucket", metavar="LABEL", help=help_text)(function)


def find_node(store: Store, name: str) -> NodeStory:
    """The node called ``name``. Errors: UsageError, also for a module."""
    from autofuse.report.find import NodeStory, find  # SQLAlchemy's rows, which a command's help does not need

    story = find(store, name)
    if not isinstance(story, NodeStory):
        raise UsageError(f"expected a node, found the module {name}; type: autofuse explain {name}")
    return story


@click.command("show", epilog=EPILOG)
@click.argument("node", shell_complete=nodes)
@bucket_option
@store_option
def command(node: str, bucket: str | None, store: Path | None) -> None:
    """Print the source of a node's kernel, C or Triton.

    NODE is a name from 'autofuse report', or its beginning. Above the source stand the compiler, its flags and the
    script's lines that the operations come from.
    """
    from autofuse.report.show import kernel_of, render_kernel

    with open_store(load_settings(store=store)) as opened:
        story = find_node(opened, node)
        render_kernel(story, kernel_of(story, bucket), out_console())
