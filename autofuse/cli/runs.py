"""``autofuse runs``: lists, compares and deletes the runs of a store; ``autofuse.report.runs`` prints them."""

from __future__ import annotations

from pathlib import Path

import click

from autofuse.cli.options import load_settings, open_store, store_option
from autofuse.cli.output import out_console
from autofuse.cli.store import prune

EPILOG = """\
\b
Examples:
  autofuse runs                the newest runs
  autofuse runs compare 3 5    two of them side by side
  autofuse runs delete 3       remove one and all its details
  autofuse runs prune          remove the details of old ones
"""


@click.group("runs", epilog=EPILOG, invoke_without_command=True)
@click.option("--limit", type=click.IntRange(min=1), default=20, metavar="N", help="At most so many. Default: 20.")
@store_option
@click.pass_context
def command(context: click.Context, limit: int, store: Path | None) -> None:
    """List the runs of a store, compare two, or delete some."""
    if context.invoked_subcommand is not None:
        return
    from autofuse.report.runs import render_runs  # here and below: imported when the command runs, not for its help

    with open_store(load_settings(store=store)) as opened:
        render_runs(opened, out_console(), limit)


@command.command("compare", epilog="\b\nExample:\n  autofuse runs compare 3 5\n")
@click.argument("first", type=click.IntRange(min=1))
@click.argument("second", type=click.IntRange(min=1))
@store_option
def compare(first: int, second: int, store: Path | None) -> None:
    """Show two runs side by side, and the nodes that ran otherwise.

    FIRST and SECOND are numbers from 'autofuse runs'.
    """
    from autofuse.report.runs import render_comparison

    with open_store(load_settings(store=store)) as opened:
        render_comparison(opened, out_console(), first, second)


@command.command("delete", epilog="\b\nExample:\n  autofuse runs delete 3 4\n")
@click.argument("numbers", nargs=-1, required=True, type=click.IntRange(min=1))
@store_option
def delete(numbers: tuple[int, ...], store: Path | None) -> None:
    """Remove runs with all their details.

    NUMBERS are from 'autofuse runs'. Decisions, measurements and kernels stay: later runs use them.
    """
    from autofuse.db.store import Store

    settings = load_settings(store=store)
    with open_store(settings) as opened:  # says what to type where there is no store
        for number in numbers:
            opened.runs.get(number)
    with Store.open(settings.run.store) as opened:
        for number in numbers:
            opened.history.remove(number)
    click.echo(f"Removed {len(numbers)} run{'s' if len(numbers) != 1 else ''}. Decisions and kernels are kept.")


command.add_command(prune, "prune")
