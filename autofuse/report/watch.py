"""What goes on now: the newest run, its daemon, the queue and the last decisions, drawn anew while a script runs.

In: a store, read twice a second. Out: a `Moment`, and its drawing. Guarantee: reads the store only; asks neither the
script nor the daemon. The script writes its counters every few seconds, so a figure may be as old as that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from autofuse.db.rows import DaemonState, QueueStatus, RequestRow, RunRow, StoredDecision
from autofuse.db.store import Store
from autofuse.errors import StoreError
from autofuse.ir.reasons import decision_words
from autofuse.ir.records import EAGER
from autofuse.report import wording
from autofuse.report.find import cut, name_of
from autofuse.report.table import plain_table, say

SILENT_SECONDS = 30.0  # a daemon whose last sign of life is older may have gone
EVERY_SECONDS = 0.5
MAX_WAITING, MAX_DECIDED = 5, 5


GoesOn = Callable[[RunRow], bool]


@dataclass(frozen=True)
class Waiting:
    """A request that is queued or in work."""

    name: str
    bucket: str
    status: str
    saving_us: float  # expected, of the calls seen so far


@dataclass(frozen=True)
class Decided:
    """A decision, the newest first."""

    name: str
    bucket: str
    outcome: str
    at: float


@dataclass(frozen=True)
class Moment:
    """The state of a store at a time."""

    at: float
    run: RunRow | None
    goes_on: bool  # whether the run's process may still write
    queue: QueueStatus  # of the run's requests
    daemon: DaemonState | None
    job: str  # what the daemon tunes, by its last sign of life; empty where it tunes nothing
    waiting: tuple[Waiting, ...]
    decided: tuple[Decided, ...]


def look(store: Store, at: float, goes_on: GoesOn = lambda run: run.finished_at is None) -> Moment:
    """The newest run, its requests, and the decisions made last."""
    run = store.runs.latest()
    open_requests = [row for row in store.queue.requests() if row.status in ("running", "queued")]
    open_requests.sort(key=lambda row: (row.status != "running", -row.expected_saving_us))
    waiting, decided = open_requests[:MAX_WAITING], store.results.history(newest=MAX_DECIDED)[::-1]
    daemon = store.daemon.state()
    digest, _, sizes = (daemon.job if daemon is not None else "").partition(" ")
    tuned = [row.key.fusion_id for row in open_requests if digest and row.key.fusion_id.startswith(digest)][:1]
    shown = {row.key.fusion_id for row in waiting} | {row.decision.key.fusion_id for row in decided} | {*tuned}
    names = {node.fusion_id: cut(name_of(node)) for fusion_id in shown for node in store.nodes.known(fusion_id)}
    return Moment(
        at=at,
        run=run,
        goes_on=run is not None and goes_on(run),
        queue=store.queue.length(run_id=run.id if run is not None else None),
        daemon=daemon,
        job=" ".join((names.get(tuned[0], digest) if tuned else digest, sizes)).strip(),
        waiting=tuple(_waiting(row, names) for row in waiting),
        decided=tuple(_decided(row, names) for row in decided),
    )


def _waiting(row: RequestRow, names: dict[str, str]) -> Waiting:
    name = names.get(row.key.fusion_id, row.key.fusion_id[:12])
    return Waiting(name, row.key.bucket, row.status, row.expected_saving_us)


def _decided(row: StoredDecision, names: dict[str, str]) -> Decided:
    decision = row.decision
    is_fused = decision.candidate.variant != EAGER
    outcome = f"fused, {wording.times(decision.speedup)}" if is_fused else f"eager: {decision_words(decision.reason)}"
    name = names.get(decision.key.fusion_id, decision.key.fusion_id[:12])
    return Decided(name, decision.key.bucket, outcome, row.at)


# ---- drawing -------------------------------------------------------------------------------------------


def draw(moment: Moment, before: Moment | None = None) -> RenderableType:
    """A moment; the pace needs an earlier one of the same run."""
    if moment.run is None:
        return Text("No run yet. Start one: autofuse run SCRIPT.py", "dim")
    parts: list[RenderableType] = [Text(line) for line in _run_lines(moment.run, moment, before)]
    parts += [Text(_daemon_line(moment)), Text(queue_line(moment.queue))]
    if moment.waiting:
        table = plain_table("Waiting")
        table.add_column("node", ratio=2, overflow="fold")
        table.add_column("sizes", ratio=1, overflow="fold")
        table.add_column("", no_wrap=True)
        table.add_column("expected gain", justify="right", no_wrap=True)
        for item in moment.waiting:
            state = "taken" if item.status == "running" else "queued"
            table.add_row(item.name, item.bucket, state, wording.microseconds(item.saving_us))
        parts += [Text(), table]
    if moment.decided:
        table = plain_table("Last decisions")
        table.add_column("node", ratio=2, overflow="fold")
        table.add_column("sizes", ratio=1, overflow="fold")
        table.add_column("outcome", ratio=2, overflow="fold")
        table.add_column("", justify="right", no_wrap=True)
        for made in moment.decided:
            table.add_row(made.name, made.bucket, made.outcome, f"{_age(moment.at - made.at)} ago")
        parts += [Text(), table]
    return Group(*parts)


def _run_lines(run: RunRow, moment: Moment, before: Moment | None) -> Sequence[str]:
    totals = run.totals
    if run.finished_at is not None:
        state = f"ended {_age(moment.at - run.finished_at)} ago"
    elif moment.goes_on:
        state = f"running for {_age(moment.at - run.started_at)}"
    else:
        state = "was ended from outside"
    calls = totals.fused_calls + totals.unfused_calls
    share = wording.percent(totals.fused_calls / calls) if calls else "none"
    pace = _pace(run, moment, before)
    return (
        f"run {run.id}: {wording.shorten(run.command, 60)}, {state}",
        f"steps: {totals.steps:,}{f', {pace:.1f} a second' if pace is not None else ''}; "
        f"node calls on fused kernels: {share}",
    )


def _pace(run: RunRow, moment: Moment, before: Moment | None) -> float | None:
    """Steps a second since an earlier moment, by the script's own clock; over the whole run without one."""
    seconds, steps = run.totals.run_seconds, run.totals.steps
    if before is not None and before.run is not None and before.run.id == run.id:
        passed = seconds - before.run.totals.run_seconds
        if passed > 0:
            return (steps - before.run.totals.steps) / passed
    return steps / seconds if seconds > 0 and moment.goes_on else None


def _daemon_line(moment: Moment) -> str:
    state = moment.daemon
    if state is None or state.state == "stopped":
        return "daemon: none"
    age = moment.at - state.heartbeat_at
    if age > SILENT_SECONDS:
        return f"daemon: no sign of life for {_age(age)}"
    return f"daemon: {work_of(moment)}"


def work_of(moment: Moment) -> str:
    """What the daemon does."""
    state = moment.daemon.state if moment.daemon is not None else "idle"
    return f"{state} {moment.job}".strip()


def queue_line(queue: QueueStatus) -> str:
    """A daemon holds on to requests of a run whose budget is spent, so several may be taken."""
    open_ones = f"{queue.running} taken by the daemon, {queue.queued} waiting"
    return f"queue: {open_ones}, {queue.done} done, {queue.failed} failed"


def _age(seconds: float) -> str:
    return wording.seconds(max(0.0, round(seconds)))


# ---- the loop --------------------------------------------------------------------------------------------


def watch(
    store: Store,
    console: Console,
    goes_on: GoesOn,
    *,
    once: bool = False,
    clock: Callable[[], float] = time.time,
) -> None:
    """Draw until the newest run has ended and nothing of it is queued, or until interrupted; ``once``: one moment.

    A store that another process writes to is looked at again only once it has changed.
    """
    moment = look(store, clock(), goes_on)
    if once or not console.is_terminal:
        console.print(draw(moment), highlight=False)
        return
    earlier, version = moment, store.data_version()
    with Live(draw(moment), console=console, auto_refresh=False) as live:
        while not is_over(moment):
            time.sleep(EVERY_SECONDS)
            if store.was_moved:
                say(console, "The store was put aside. To watch the new one: autofuse watch")
                return
            try:
                is_new, version = store.data_version() != version, store.data_version()
                is_left = not is_new and moment.goes_on and not goes_on(moment.run)  # type: ignore[arg-type]
                moment = look(store, clock(), goes_on) if is_new or is_left else replace(moment, at=clock())
            except StoreError:  # locked for long; the next look may find it free
                continue
            live.update(draw(moment, earlier), refresh=True)
            if moment.run and earlier.run and moment.run.totals.run_seconds - earlier.run.totals.run_seconds > 10:
                earlier = moment


def is_over(moment: Moment) -> bool:
    return moment.run is not None and not moment.goes_on and not moment.queue.open
