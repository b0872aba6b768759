"""``autofuse fleet``: the server by which hosts share what they tune; the work is in ``autofuse.db.fleet_server``."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from autofuse.cli.options import effort_options, load_settings, open_store, store_option
from autofuse.errors import SettingsError
from autofuse.settings.layers import Settings

if TYPE_CHECKING:
    from autofuse.db.fleet_queue import FleetQueue
    from autofuse.db.fleet_server import FleetServer
    from autofuse.integrations.fleet_workers import FleetWorkers

LOOK_SECONDS = 5.0

EPILOG = """\
\b
Examples:
  autofuse fleet status        does the server answer, and what does it hold?
  autofuse fleet upgrade       make its tables, or bring them up to date; as their owner
  autofuse fleet up --ray auto   keep workers on a Ray cluster, as many as the queue needs
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
    from autofuse.db.fleet_retention import last_sweep_seconds

    settings = load_settings(assignments, store=store, profile=profile)
    with _server(settings) as server:
        server.check()
        found, queue, swept = counts(server), FleetQueue(server).length(), last_sweep_seconds(server)
    click.echo(f"{server.path} answers.")
    click.echo(f"{found.hosts} hosts, {found.decisions} decisions, {found.measurements} measurements")
    click.echo(f"requests: {queue.queued} wait, {queue.running} in work, {queue.done} done, {queue.failed} failed")
    when = "never: no daemon's role may delete rows" if swept is None else f"{swept / 3600:.1f} h ago"
    click.echo(f"looked through for what nobody uses: {when}")
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


@command.command("up", epilog="\b\nExample:\n  autofuse fleet up --ray auto --most 8 --cores 16\n")
@click.option("--ray", "address", required=True, metavar="ADDRESS", help="The cluster, as Ray has it: auto, HOST:6379.")
@click.option("--least", type=click.IntRange(0), default=0, help="Workers that stay while nothing waits.")
@click.option("--most", type=click.IntRange(1), default=4, help="Workers at most.")
@click.option("--requests-each", type=click.IntRange(1), default=8, help="Requests for which one worker is started.")
@click.option(
    "--cores", type=click.IntRange(1), help="Cores that a worker asks for. Default: all of the smallest host."
)
@click.option("--accelerator-type", default="", metavar="TYPE", help="Ask for a GPU of this type, such as H100.")
@effort_options
def up(
    address: str,
    cores: int | None,
    accelerator_type: str,
    profile: str | None,
    assignments: tuple[str, ...],
    **scale: int,
) -> None:
    """Keep workers on a Ray cluster, until this command is ended.

    More while more requests wait, fewer when it has been less for a minute. Ray places them, and starts one anew where
    a host has died. Each is 'autofuse daemon serve --fleet-worker'.
    """
    from autofuse.db.fleet_queue import FleetQueue
    from autofuse.integrations.fleet_workers import FleetWorkers, Scale
    from autofuse.integrations.ray_cluster import Place, RayCluster

    settings = load_settings(assignments, profile=profile)
    with _server(settings) as server:
        server.check()
        queue = FleetQueue(server)
        options = [option for text in assignments for option in ("--set", text)]
        options += ["--profile", profile] if profile else []
        environment = {"AUTOFUSE_FLEET_URL": settings.fleet.url}
        with contextlib.closing(RayCluster(address, Place(cores or 0, accelerator_type), options, environment)) as ray:
            workers = FleetWorkers(lambda: _open(queue), ray, Scale(**scale), click.echo, time.monotonic)
            _keep(workers)


def _open(queue: FleetQueue) -> int:
    length = queue.length()
    return length.queued + length.running


def _keep(workers: FleetWorkers) -> None:
    """Look every few seconds, until SIGINT or SIGTERM; then end all workers."""
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    try:
        while not ended.is_set():
            workers.look()
            ended.wait(LOOK_SECONDS)
    finally:
        workers.close()
    click.echo("All workers have ended.")


def _server(settings: Settings) -> contextlib.closing[FleetServer]:
    from autofuse.db.fleet_server import FleetServer  # imported when the command runs, not for its help

    if not settings.fleet.url:
        raise SettingsError(
            "expected a server in fleet.url, found none; type for example: "
            "AUTOFUSE_FLEET_URL=postgresql+psycopg://USER@HOST/DATABASE autofuse fleet status"
        )
    return contextlib.closing(FleetServer(settings.fleet.url, settings.fleet.connect_seconds))
