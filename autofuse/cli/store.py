"""``autofuse store``: care of the file that keeps all results; the work is in ``autofuse.db.archive``."""

from __future__ import annotations

from pathlib import Path

import click

from autofuse.cli.options import effort_options, load_settings, store_option

EPILOG = """\
\b
Examples:
  autofuse store reset         put the store aside whole, and begin a new one with the next run
  autofuse store prune         remove the details of old runs now, and give their room back
"""


@click.group("store", epilog=EPILOG)
def command() -> None:
    """Put the store aside, or shorten its history.

    The store is one SQLite file and what lies beside it. Do not move the file alone: most of what it holds may still be
    in its log.
    """


@command.command("reset", epilog="\b\nExample:\n  autofuse store reset --store ./tuned.sqlite3\n")
@store_option
def reset(store: Path | None) -> None:
    """Put the store aside with all that belongs to it; the next run begins a new one.

    Ends its daemons first. Nothing is deleted: look into what was put aside with --store.
    """
    from autofuse.daemon import control
    from autofuse.db.archive import set_aside  # here and below: imported when the command runs, not for its help

    settings = load_settings(store=store)
    control.stop(settings)
    aside = set_aside(settings.run.store)
    if aside is None:
        click.echo(f"There is no store at {settings.run.store}.")
    else:
        click.echo(f"The store is now {aside}. The next 'autofuse run' begins a new one at {settings.run.store}.")


@command.command("prune", epilog="\b\nExample:\n  autofuse store prune --set cache.history_days=7\n")
@store_option
@effort_options
def prune(store: Path | None, profile: str | None, assignments: tuple[str, ...]) -> None:
    """Remove the details of old runs now, and give their room back.

    Keeps decisions, kernels and each run's totals, and of its command line the script's name; of runs beyond
    cache.history_runs it keeps what later runs learn from. cache.history_days and cache.history_bytes say what is old.
    Daemons keep to all three too, when they begin, and runs when they end.
    """
    from autofuse.db.store import Store

    settings = load_settings(assignments, store=store, profile=profile)
    before = settings.run.store.stat().st_size if settings.run.store.exists() else 0
    with Store.open(settings.run.store) as opened:
        cache = settings.cache
        count = opened.history.prune(cache.history_days, cache.history_bytes, cache.history_runs)
        opened.history.compact()
    after = settings.run.store.stat().st_size
    runs = f"{count} run{'s' if count != 1 else ''}"
    click.echo(f"Removed the details of {runs}; {before / 1e6:.1f} MB before, {after / 1e6:.1f} MB now.")
