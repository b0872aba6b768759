"""Who else works on this machine: registered scripts, turns, the account of each script, standing still."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from autofuse.codegen.c.build import compile_source, find_toolchain
from autofuse.daemon import control
from autofuse.daemon.peers import Peers, Script, peers_folder
from autofuse.daemon.scheduler import Scheduler, halted
from autofuse.daemon.throttle import (
    LONGEST_EXPECTED_SECONDS,
    SAVED_SHARE,
    SETTLED_SECONDS,
    SLICE_SECONDS,
    CpuThrottle,
    MachineLoad,
    cpu_seconds,
    room_beside,
)
from autofuse.db.store import Store
from autofuse.errors import CompilerError, DaemonError
from autofuse.ir.device import cpu_device
from autofuse.ir.records import RunStart, RunTotals
from autofuse.settings.layers import Settings, load
from autofuse.tuner.worker_process import WorkerProcess
from tests.tuner.nodes import chain_form, request

PATIENCE_SECONDS = 240.0
PERCENT = 1.5


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


# ---- the folder -----------------------------------------------------------------------------------------


def settings_with(tmp_path: Path, folder: Path, store: str = "store.sqlite3") -> Settings:
    cli = {"run.store": tmp_path / store, "tuner.shared_folder": folder, "run.profile": "quick", "tuner.trials": 2}
    return load(cli, environ={}, cwd=tmp_path)


def test_a_folder_that_others_could_write_to_is_not_used(tmp_path: Path) -> None:
    private, open_to_all, link = tmp_path / "private", tmp_path / "open", tmp_path / "link"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    link.symlink_to(tmp_path / "elsewhere")
    (tmp_path / "file").touch()
    assert peers_folder(settings_with(tmp_path, private)) == private
    assert private.stat().st_mode & 0o777 == 0o700
    beside = tmp_path / "store.sqlite3.neighbours"
    for refused in (open_to_all, link, tmp_path / "file", tmp_path / "missing" / "deeper"):
        assert peers_folder(settings_with(tmp_path, refused)) == beside
    assert not list((tmp_path / "elsewhere").iterdir())
    beside.rmdir()
    beside.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="only ours"):
        peers_folder(settings_with(tmp_path, link))


def test_scripts_are_seen_while_they_run(tmp_path: Path) -> None:
    mine, other = Peers(tmp_path), Peers(tmp_path)
    assert other.take_turn()
    other.add_spent(2.0)
    script = mine.announce(600.0)
    assert other.scripts() == [script] and script.pid == os.getpid() and script.spent == 2.0
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    written = json.loads((tmp_path / f"script-{os.getpid()}").read_text())
    (tmp_path / f"script-{ended.pid}").write_text(json.dumps({**written, "pid": ended.pid}))
    (tmp_path / "script-1").write_text(json.dumps({**written, "pid": 1}))  # that number was another process's before
    for number, text in enumerate(("", "nothing", "[1]", '{"pid": 1}', '{"pid": 1, "other": 2}')):
        (tmp_path / f"script-x{number}").write_text(text)
    assert other.scripts() == [script]
    assert [path.name for path in tmp_path.glob("script-*")] == [f"script-{os.getpid()}"], "the others are removed"
    mine.withdraw()
    assert other.scripts() == []


def test_the_turn_is_one_daemons_and_free_when_it_dies(tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from autofuse.daemon.peers import Peers
import time
peers = Peers(Path({str(tmp_path)!r}))
print(peers.take_turn(), flush=True)
time.sleep(600)
"""
    mine, second = Peers(tmp_path), Peers(tmp_path)
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "True\n"
        assert not mine.take_turn()
        holder.kill()
        holder.wait()
        assert mine.take_turn() and mine.take_turn() and not second.take_turn()
        mine.give_turn()
        assert second.take_turn()
    finally:
        holder.kill()
        holder.wait()


def test_what_was_spent_adds_up_over_daemons(tmp_path: Path) -> None:
    first, second = Peers(tmp_path), Peers(tmp_path)
    assert first.spent() == 0.0
    first.add_spent(0.5)
    second.add_spent(0.25)
    assert first.spent() == second.spent() == 0.75
    (tmp_path / "spent").write_text("broken")
    assert first.spent() == 0.0


def test_a_run_that_ended_tells_how_long_the_next_one_may_take(tmp_path: Path) -> None:
    with Store.open(tmp_path / "store.sqlite3") as store:

        def run(command: str, mode: str = "background") -> int:
            return store.runs.start(RunStart(command, cpu_device(), "v", mode, os.getpid()))

        assert store.runs.last_seconds("train.py") == 0.0
        store.runs.finish(run("train.py"), RunTotals())
        time.sleep(0.05)
        usual = store.runs.last_seconds("train.py")
        assert 0.0 <= usual < 60.0
        long = run("train.py")
        time.sleep(0.2)
        assert store.runs.last_seconds("train.py") == usual, "it has not ended"
        store.runs.finish(long, RunTotals())
        assert store.runs.last_seconds("train.py") >= 0.2
        store.runs.finish(run("train.py", "wait"), RunTotals())
        assert store.runs.last_seconds("train.py") >= 0.2, "that one waited for tuning"
        assert store.runs.last_seconds("other.py") == 0.0


# ---- the account ----------------------------------------------------------------------------------------


def script(began: float = 0.0, expected: float = 0.0, spent: float = 0.0, pid: int = 1) -> Script:
    return Script(pid, 0.0, began, expected, spent)


def test_a_script_pays_with_a_part_of_its_time() -> None:
    assert room_beside([], 10.0, 5.0, PERCENT) == float("inf")
    assert room_beside([script()], 100.0, 0.0, PERCENT) == pytest.approx(1.5)
    assert room_beside([script(spent=3.0)], 100.0, 3.5, PERCENT) == pytest.approx(1.0)
    assert room_beside([script(began=200.0)], 100.0, 0.0, PERCENT) == 0.0  # the clock was set back
    assert room_beside([script(spent=3.0)], 100.0, 0.0, PERCENT) == pytest.approx(1.5)  # the account began anew


def test_a_script_that_is_expected_to_go_on_for_long_pays_ahead() -> None:
    assert room_beside([script(expected=1000.0)], 0.0, 0.0, PERCENT) == pytest.approx(15.0)
    assert room_beside([script(expected=1000.0)], 500.0, 0.0, PERCENT) == pytest.approx(15.0), "no more than once"
    assert room_beside([script(expected=1000.0)], 2000.0, 0.0, PERCENT) == pytest.approx(30.0)
    most = PERCENT / 100.0 * LONGEST_EXPECTED_SECONDS
    assert room_beside([script(expected=1e6)], 0.0, 0.0, PERCENT) == pytest.approx(most)


def test_a_short_script_keeps_what_a_long_one_would_give() -> None:
    both = [script(expected=1000.0), script(began=90.0, expected=20.0, spent=1.0, pid=2)]
    assert room_beside(both, 100.0, 1.2, PERCENT) == pytest.approx(0.3 - 0.2)


def test_kernels_that_save_time_pay_for_more_of_them() -> None:
    saved = {1: 8.0, 2: 1000.0}
    assert room_beside([script()], 100.0, 1.5, PERCENT, saved) == pytest.approx(8.0 * SAVED_SHARE)


class Clock:
    """Time that passes only when somebody sleeps or works; an account that it fills."""

    def __init__(self, script: Script) -> None:
        self.now = self.used = self.charged = 0.0
        self.script = script

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def work(self, seconds: float) -> None:
        self.now += seconds
        self.used += seconds

    def charge(self, seconds: float) -> None:
        self.charged += seconds

    def room(self) -> float:
        return room_beside([self.script], self.now, self.charged, PERCENT)


@pytest.mark.parametrize("expected", [0.0, 60.0, 1000.0])
@pytest.mark.parametrize("piece", [0.02, 0.3])
def test_over_a_run_the_share_is_kept_however_long_it_was_expected_to_be(expected: float, piece: float) -> None:
    clock = Clock(script(expected=expected))
    share = CpuThrottle(lambda: 10.0, lambda: clock.used, lambda: clock.now, clock.sleep, clock)
    while clock.now < 1200.0:
        share.rest(lambda: True)
        clock.work(piece)
        assert clock.used <= PERCENT / 100.0 * max(clock.now, expected) + piece + SLICE_SECONDS
        assert clock.used <= 0.1 * clock.now + 0.25 + piece, "nor is it taken all at once"
    assert clock.used == pytest.approx(PERCENT / 100.0 * clock.now, rel=0.05), "and all of it is used"


def test_a_piece_that_takes_much_waits_until_it_is_paid_for() -> None:
    clock = Clock(script())
    share = CpuThrottle(lambda: 10.0, lambda: clock.used, lambda: clock.now, clock.sleep, clock)
    halts = []

    @contextlib.contextmanager
    def halted() -> Iterator[None]:
        halts.append(clock.now)
        yield
        halts.append(clock.now)

    assert share.rest(lambda: True, 3.0, halted) == pytest.approx(200.0, abs=1.0)
    assert halts == [0.0, clock.now]
    assert share.rest(lambda: True, 3.0, halted) == 0.0 and len(halts) == 2
    assert share.rest(lambda: clock.now < 300.0, 6.0) == pytest.approx(100.0, abs=1.0), "until nobody is disturbed"


# ---- standing still -------------------------------------------------------------------------------------

SPIN = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"


def test_all_that_we_started_counts_while_it_runs() -> None:
    parent = subprocess.Popen([sys.executable, "-c", SPIN], process_group=0)
    try:
        wait_until(lambda: cpu_seconds(parent.pid) > 0.5)  # it is the grandchild that works
        assert cpu_seconds() > 0.5
        with halted(parent.pid):
            (child,) = psutil.Process(parent.pid).children()
            wait_until(lambda: child.status() == psutil.STATUS_STOPPED)
            before = cpu_seconds(parent.pid)
            time.sleep(0.3)
            assert cpu_seconds(parent.pid) <= before + 0.02
        wait_until(lambda: cpu_seconds(parent.pid) > before + 0.1)
    finally:
        os.killpg(parent.pid, signal.SIGKILL)
        parent.wait()


def test_time_that_a_compiler_stands_still_is_not_its_own() -> None:
    toolchain = find_toolchain()
    source = "int f(int x) { return x; }\n" + "".join(f"int f{i}(int x) {{ return x * {i}; }}\n" for i in range(4000))
    stood = []

    def tend(group: int) -> float:
        if len(stood) < 3:
            with halted(group):
                time.sleep(0.5)
            stood.append(group)
            return 0.5
        return 0.0

    assert compile_source(source, toolchain, ("-O1", "-shared", "-fPIC"), 30.0, tend)[:4] == b"\x7fELF"
    assert len(set(stood)) == 1, "it was looked at"
    with pytest.raises(CompilerError, match=r"within 0\.2 s"):
        compile_source(source, toolchain, ("-O3", "-shared", "-fPIC"), 0.2, lambda group: 0.0)
    with pytest.raises(CompilerError, match="error"):
        compile_source("int f(", toolchain, ("-shared", "-fPIC"), 30.0, lambda group: 0.0)
    children = [child for child in psutil.Process().children(recursive=True) if "cc" in child.name()]
    assert not children, "a compiler that took too long is ended"


def test_time_that_a_worker_stands_still_is_not_its_own() -> None:
    stood: list[float] = []

    def tend(group: int) -> float:
        with halted(group):
            time.sleep(0.1)
        stood.append(0.1)
        return 0.1

    worker = WorkerProcess(memory_bytes=1 << 30, timeout_seconds=1.0, tend=tend)
    try:
        form = chain_form()
        assert worker.ask("open", node="n", form=form.to_json(), threads=1)["is_new"]
        assert sum(stood) > 0.1
    finally:
        worker.kill()


# ---- daemons --------------------------------------------------------------------------------------------


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Settings, Settings]]:
    """Two stores of one user."""
    first, second = (settings_with(tmp_path, tmp_path / "shared", name) for name in ("a.sqlite3", "b.sqlite3"))
    yield first, second
    for settings in (first, second):
        with contextlib.suppress(DaemonError):
            control.stop(settings)


def test_daemons_of_two_stores_take_turns_beside_a_script(pair: tuple[Settings, Settings]) -> None:
    values = {"tuner.cpu_percent": 100.0, "tuner.busy_percent": 60.0}
    pair = tuple(settings.with_values(values, "test") for settings in pair)
    peers = Peers(peers_folder(pair[0]))
    # This test: a script of a third store, which can pay for all of it, and so old that daemons may use a whole core.
    peers.announce(1e6, began=time.time() - 2 * SETTLED_SECONDS)
    for settings in pair:
        with Store.open(settings.run.store) as store:
            store.queue.add([request(chain_form(), (24,))])  # one takes seconds
    assert peers.take_turn()
    pids = [control.ensure_running(settings) for settings in pair]
    with Store.open(pair[0].run.store) as first, Store.open(pair[1].run.store) as second:
        time.sleep(1.5)
        assert [store.queue.length().queued for store in (first, second)] == [1, 1], "neither has the turn"
        assert not any(psutil.Process(pid).children() for pid in pids)
        peers.give_turn()
        both = 0
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (done := [store.queue.length().done for store in (first, second)]) != [1, 1]:
            both += all(store.queue.length().running for store in (first, second))
            assert time.monotonic() < deadline, f"waited in vain: {done}"
            time.sleep(0.02)  # a request takes seconds
        assert not both, "one at a time"
    peers.withdraw()


class FullMachine(MachineLoad):
    def is_full(self) -> bool:
        return True


def test_a_daemon_that_may_take_nothing_does_nothing_until_the_script_has_ended(
    pair: tuple[Settings, Settings],
) -> None:
    """On a machine that is full; a scheduler in this process, so that it can be told so."""
    settings = pair[0].with_values({"tuner.busy_percent": 0.0}, "test")
    peers, script = Peers(peers_folder(settings)), Peers(peers_folder(settings))
    script.announce(1e6)
    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 5:
            script.withdraw()

    yielding = Scheduler(
        settings.tuner,
        peers,
        is_urgent=lambda: False,
        is_stopping=lambda: False,
        clock=lambda: 2.0 * len(naps),  # the scripts are looked for anew after each
        sleep=nap,
        load=FullMachine(cpu_seconds),
    )
    yielding.rest()
    assert len(naps) >= 5
    yielding.end()
    assert Peers(peers_folder(settings)).take_turn(), "it has given the turn back"
