"""``autofuse fleet``: the server by which hosts share what they tune; the work is in ``autofuse.db.fleet_server``."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import click

from autofuse.cli.options import effort_options, load_settings
from autofuse.errors import SettingsError

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
@effort_options
def status(profile: str | None, assignments: tuple[str, ...]) -> None:
    """Tell whether the server answers, and what it holds."""
    from autofuse.db.fleet_queue import FleetQueue, counts

    with _server(profile, assignments) as server:
        server.check()
        found, queue = counts(server), FleetQueue(server).length()
    click.echo(f"{server.path} answers.")
    click.echo(f"{found.hosts} hosts, {found.decisions} decisions, {found.measurements} measurements")
    click.echo(f"requests: {queue.queued} wait, {queue.running} in work, {queue.done} done, {queue.failed} failed")


@command.command(
    "upgrade",
    epilog="\b\nExample:\n  AUTOFUSE_FLEET_URL=postgresql+psycopg://owner@db.example/fleet autofuse fleet upgrade\n",
)
@effort_options
def upgrade(profile: str | None, assignments: tuple[str, ...]) -> None:
    """Make the server's tables, or bring those of an older autofuse up to date. Needs the role that owns them."""
    with _server(profile, assignments) as server:
        is_changed = server.upgrade()
    click.echo(f"{server.path} {'is ready' if is_changed else 'was up to date'}.")


def _server(profile: str | None, assignments: tuple[str, ...]) -> contextlib.closing[FleetServer]:
    from autofuse.db.fleet_server import FleetServer  # imported when the command runs, not for its help

    settings = load_settings(assignments, profile=profile)
    if not settings.fleet.url:
        raise SettingsError(
            "expected a server in fleet.url, found none; type for example: "
            "AUTOFUSE_FLEET_URL=postgresql+psycopg://USER@HOST/DATABASE autofuse fleet status"
        )
    return contextlib.closing(FleetServer(settings.fleet.url, settings.fleet.connect_seconds))
