"""``autofuse fleet``: the server by which hosts share what they tune; the work is in ``autofuse.db.fleet_server``."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import click

from autofuse.cli.options import effort_options, load_settings, open_store, store_option
from autofuse.errors import SettingsError
from autofuse.settings.layers import Settings

if TYPE_CHECKING:
    from autofuse.db.fleet_server import FleetServer

EPILOG = """\
\b
Examples:
  autofuse fleet status        does the server answer, and what does it hold?
  autofuse fleet upgrade       make its tables, or bring them up to date; as their owner
"""


@click.group("fleet", epilog=EPILOG)
def command() -> None:
    """Prepare or look at the server by which hosts share what they have tuned.

    The server is a PostgreSQL database that fleet.url names. Daemons exchange with it by themselves; scripts and
    reports never do. docs/guides/fleet.md tells how to set one up.
    """


@command.command("status", epilog="\b\nExample:\n  autofuse fleet status\n")
@store_option
@effort_options
def status(store: Path | None, profile: str | None, assignments: tuple[str, ...]) -> None:
    """Tell whether the server answers, what it holds, and what became of proposals in this host's store."""
    from autofuse.db.fleet_queue import FleetQueue, counts

    settings = load_settings(assignments, store=store, profile=profile)
    with _server(settings) as server:
        server.check()
        found, queue = counts(server), FleetQueue(server).length()
    click.echo(f"{server.path} answers.")
    click.echo(f"{found.hosts} hosts, {found.decisions} decisions, {found.measurements} measurements")
    click.echo(f"requests: {queue.queued} wait, {queue.running} in work, {queue.done} done, {queue.failed} failed")
    if settings.run.store.exists():
        with open_store(settings) as opened:
            made = opened.proposals.counts()
        verdicts = ", ".join(f"{made.get(name, 0)} {name}" for name in ("adopted", "overridden", "refused"))
        click.echo(f"proposals here: {verdicts}, {made.get('open', 0)} not asked for yet")


@command.command(
    "upgrade",
    epilog="\b\nExample:\n  AUTOFUSE_FLEET_URL=postgresql+psycopg://owner@db.example/fleet autofuse fleet upgrade\n",
)
@effort_options
def upgrade(profile: str | None, assignments: tuple[str, ...]) -> None:
    """Make the server's tables, or bring those of an older autofuse up to date. Needs the role that owns them."""
    with _server(load_settings(assignments, profile=profile)) as server:
        is_changed = server.upgrade()
    click.echo(f"{server.path} {'is ready' if is_changed else 'was up to date'}.")


def _server(settings: Settings) -> contextlib.closing[FleetServer]:
    from autofuse.db.fleet_server import FleetServer  # imported when the command runs, not for its help

    if not settings.fleet.url:
        raise SettingsError(
            "expected a server in fleet.url, found none; type for example: "
            "AUTOFUSE_FLEET_URL=postgresql+psycopg://USER@HOST/DATABASE autofuse fleet status"
        )
    return contextlib.closing(FleetServer(settings.fleet.url, settings.fleet.connect_seconds))
