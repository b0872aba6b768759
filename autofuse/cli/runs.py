"""``autofuse runs``: lists, compares and deletes the runs of a store; ``autofuse.report.runs`` prints them."""

from __future__ import annotations

from pathlib import Path

import click

from autofuse.cli.options import load_settings, open_store, store_option
from autofuse.cli.output import out_console
from autofuse.cli.store import prune
from autofuse.errors import UsageError

EPILOG = """\
\b
Examples:
  autofuse runs                the newest runs
  autofuse runs compare 3 5    two of them side by side
  autofuse runs delete 3       remove one and all its details
  autofuse runs prune          remove the details of old ones
"""


@click.group("runs", epilog=EPILOG, invoke_without_command=True)
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="At most so many. Default: 20.")
@store_option
@click.pass_context
def command(context: click.Context, limit: int | None, store: Path | None) -> None:
    """List the runs of a store, compare two, or delete some."""
    if context.invoked_subcommand is not None:
        if store is not None or limit is not None:
            found = "--store" if store is not None else "--limit"
            raise click.UsageError(f"expected options behind {context.invoked_subcommand}, found {found} before it")
        return
    from autofuse.report.runs import render_runs  # here and below: imported when the command runs, not for its help

    with open_store(load_settings(store=store)) as opened:
        render_runs(opened, out_console(), limit or 20)


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

    NUMBERS are from 'autofuse runs'. Decisions, measurements, kernels and what is known of modules stay: later runs use
    them. All of the runs are removed, or none.
    """
    from autofuse.daemon.open_runs import may_go_on
    from autofuse.db.store import Store

    settings = load_settings(store=store)
    chosen = list(dict.fromkeys(numbers))
    with open_store(settings) as opened:  # says what to type where there is no store
        for number in chosen:
            if may_go_on(opened.runs.get(number)):
                raise UsageError(
                    f"expected runs that are over, found {number}, which may still go on; type: autofuse runs"
                )
    with Store.open(settings.run.store) as opened:
        opened.history.remove(chosen)
    click.echo(f"Removed {len(chosen)} run{'s' if len(chosen) != 1 else ''}. Decisions and kernels are kept.")


command.add_command(prune, "prune")
