"""The live view: what it reads, what it says of a run that goes on, has ended, or has a daemon that is silent."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest

from autofuse.cli.app import parse
from autofuse.daemon import control
from autofuse.daemon.open_runs import may_go_on
from autofuse.daemon.process_id import this_machine
from autofuse.db.rows import DaemonState
from autofuse.db.store import Store
from autofuse.ir.records import RunStart, RunTotals
from autofuse.report import watch as watching
from autofuse.report.console import PlainConsole
from autofuse.report.watch import draw, is_over, look
from tests.report.report_records import DEVICE, GELU, VERSIONS, fill, open_store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(tmp_path / "store.sqlite3")
    yield opened
    opened.close()


def words(renderable: object, width: int = 80) -> str:
    out = StringIO()
    PlainConsole(file=out, width=width, highlight=False).print(renderable)
    assert all(len(line) <= width for line in out.getvalue().splitlines())
    return " ".join(out.getvalue().split())


def test_an_empty_store(store: Store) -> None:
    moment = look(store, 1.0)
    assert "No run yet" in words(draw(moment)) and not is_over(moment)


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_run_that_has_ended(store: Store, width: int) -> None:
    fill(store)
    moment = look(store, time.time())
    text = words(draw(moment), width)
    assert "steps: 400" in text and "93.8 %" in text and "daemon: none" in text
    assert "queue: 0 taken by the daemon, 1 waiting, 3 done, 0 failed" in text and "ended" in text
    assert not is_over(moment)  # something waits


def test_what_waits_and_what_was_decided(store: Store) -> None:
    fill(store)
    moment = look(store, time.time())
    (waiting,) = moment.waiting
    assert (waiting.name, waiting.status) == (GELU[1], "queued") and waiting.saving_us > 0
    assert [made.outcome for made in moment.decided] == [
        "eager: no candidate beat eager by the margin",
        "fused, 1.52x",
        "fused, 2.16x",
    ]
    assert "expected gain" in words(draw(moment), 120)


def test_the_pace_is_that_since_an_earlier_moment(store: Store) -> None:
    run_id = store.runs.start(RunStart("train.py", DEVICE, VERSIONS, "background", 1))
    store.runs.update_totals(run_id, RunTotals(steps=100, run_seconds=50.0))
    first = look(store, time.time())
    assert "100, 2.0 a second" in words(draw(first))
    store.runs.update_totals(run_id, RunTotals(steps=180, run_seconds=60.0))
    second = look(store, time.time())
    assert "180, 8.0 a second" in words(draw(second, first))
    assert "180, 3.0 a second" in words(draw(second, second))


def test_a_daemon_at_work_and_one_that_is_silent(store: Store) -> None:
    fill(store)
    store.daemon.heartbeat(DaemonState(4, "here", time.time(), "idle"))
    assert "daemon: idle" in words(draw(look(store, time.time())))
    store.daemon.heartbeat(DaemonState(4, "here", time.time(), "tuning", f"{GELU[0][:12]} [s0=8 s1=65..128]"))
    moment = look(store, time.time())
    assert f"daemon: tuning {GELU[1]} [s0=8 s1=65..128]" in words(draw(moment))
    later = replace(moment, at=moment.at + 90)
    assert "no sign of life for 1 min 30 s" in words(draw(later))


def test_the_daemons_own_status_says_the_same(
    store: Store, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    fill(store)
    at = time.time()
    store.daemon.heartbeat(DaemonState(4, "here", at, "tuning", f"{GELU[0][:12]} [s0=8 s1=65..128]"))
    assert store.queue.take() is not None
    found = [DaemonState(4, "here", at, "idle", heartbeat_at=at), DaemonState(5, "here", at, "idle")]
    monkeypatch.setattr(control, "statuses", lambda settings: found)
    assert not parse(["daemon", "status", "--store", str(store.path)])
    text = " ".join(capfd.readouterr().out.split())
    assert f"process 4: tuning {GELU[1]} [s0=8 s1=65..128]" in text and "process 5: idle" in text
    assert "queue: 1 taken by the daemon, 0 waiting, 3 done, 0 failed" in text


def test_the_loop_ends_with_the_run(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    run_id = store.runs.start(RunStart("train.py", DEVICE, VERSIONS, "background", os.getpid(), machine=this_machine()))
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            store.runs.finish(run_id, RunTotals(steps=5, run_seconds=2.0))

    monkeypatch.setattr(watching.time, "sleep", sleep)
    with Store.open(store.path, readonly=True) as other:  # as the command opens it; one's own writes change no version
        watching.watch(other, terminal(), may_go_on)
    assert len(waits) == 3


def terminal() -> PlainConsole:
    return PlainConsole(file=StringIO(), width=80, force_terminal=True)


def test_a_killed_run_and_a_store_that_was_put_aside_end_the_loop(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.runs.start(RunStart("train.py", DEVICE, VERSIONS, "background", 2**22 + 1, machine=this_machine()))
    assert "was ended from outside" in words(draw(look(store, time.time(), may_go_on)))
    watching.watch(store, terminal(), may_go_on)
    store.runs.start(RunStart("train.py", DEVICE, VERSIONS, "background", os.getpid(), machine=this_machine()))
    monkeypatch.setattr(watching.time, "sleep", lambda seconds: store.path.rename(store.path.with_name("aside")))
    console = terminal()
    watching.watch(store, console, may_go_on)
    assert "The store was put aside" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_store_that_does_not_change_is_not_read_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    run_id = store.runs.start(RunStart("train.py", DEVICE, VERSIONS, "background", 1))
    looks: list[float] = []
    waits = iter(range(20))

    def sleep(seconds: float) -> None:
        if next(waits) == 10:
            store.runs.finish(run_id, RunTotals())

    real = watching.look
    monkeypatch.setattr(watching.time, "sleep", sleep)
    monkeypatch.setattr(watching, "look", lambda *args: looks.append(1.0) or real(*args))
    with Store.open(store.path, readonly=True) as other:
        watching.watch(other, terminal(), lambda run: run.finished_at is None)
    assert len(looks) == 2


def test_the_command(store: Store, capfd: pytest.CaptureFixture[str]) -> None:
    fill(store)
    assert not parse(["watch", "--once", "--store", str(store.path)])
    assert "queue: 0 taken by the daemon, 1 waiting" in capfd.readouterr().out
    assert parse(["watch", "--store", str(store.path.parent / "none.sqlite3")])
    assert "there are no results yet" in capfd.readouterr().err
