"""The daemon: real processes on a real store; starting, stopping, dying, order of work, manners."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from autofuse.cli.app import parse
from autofuse.codegen.c.build import compile_source, find_toolchain
from autofuse.codegen.version import CODEGEN_VERSION, versions
from autofuse.daemon import control
from autofuse.daemon import files as daemon_files
from autofuse.daemon import loop as daemon_loop
from autofuse.daemon.files import DaemonFiles
from autofuse.daemon.loop import TuningLoop
from autofuse.daemon.peers import Peers, peers_folder
from autofuse.daemon.process_id import process_id, this_machine
from autofuse.daemon.throttle import (
    BURST_SECONDS,
    FULL_PERCENT,
    SETTLED_SECONDS,
    CpuThrottle,
    MachineLoad,
    allowed_percent,
    young_share,
)
from autofuse.db.rows import DaemonState
from autofuse.db.store import Store
from autofuse.db.tune_queue import NOT_READY
from autofuse.errors import CompilerError, CompilerNotReady, DaemonError
from autofuse.ir.device import cpu_device
from autofuse.ir.records import (
    Bucket,
    Candidate,
    Decision,
    DecisionKey,
    NodeUse,
    RunStart,
    RunTotals,
    StepSample,
    TuneRequest,
)
from autofuse.private_files import Untrusted
from autofuse.settings.layers import Settings, load
from tests.tuner.nodes import chain_form, matmul_form, request

FORM = chain_form()
PATIENCE_SECONDS = 60.0


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[Settings]:
    cli = {"run.store": tmp_path / "new" / "store.sqlite3", "run.profile": "quick", "tuner.trials": 2}
    cli["tuner.shared_folder"] = tmp_path / "shared"
    found = load(cli, environ={}, cwd=tmp_path)
    yield found
    with contextlib.suppress(DaemonError):
        control.stop(found)


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """A process of this user's that is no daemon."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def queue(settings: Settings, *requests: TuneRequest) -> None:
    settings.run.store.parent.mkdir(parents=True, exist_ok=True)
    with Store.open(settings.run.store) as store:
        store.queue.add(requests)


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def worker_of(pid: int) -> psutil.Process | None:
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(pid).children():
            if "autofuse.daemon.workers.cpu" in child.cmdline():
                return child
    return None


# ---- starting and stopping ------------------------------------------------------------------------------


def test_many_starters_start_one_that_works_and_ends_when_idle(settings: Settings) -> None:
    settings = settings.with_values({"tuner.idle_exit_seconds": 1.0}, "test")
    queue(settings, request(FORM, (24,)))
    assert control.status(settings) is None and control.stop(settings) is False
    with ThreadPoolExecutor(4) as pool:
        pids = list(pool.map(lambda _: control.ensure_running(settings), range(4)))
    assert len(set(pids)) == 1
    pid = pids[0]
    process = psutil.Process(pid)
    assert os.getsid(pid) != os.getsid(0) and process.ppid() != os.getpid()
    assert process.nice() == settings.tuner.nice
    assert not any("libtorch" in region.path for region in process.memory_maps())
    with Store.open(settings.run.store) as store:
        wait_until(lambda: store.queue.length().done == 1)
        worker = worker_of(pid)
        assert worker is None or worker.nice() == settings.tuner.nice  # not lower still
        ((_, decision),) = store.results.decisions(cpu_device().key, versions())
        measured = {row.measurement.status for row in store.results.measurements(decision.key.fusion_id)}
        assert "ok" in measured and measured <= {"ok", "pruned"}
        # A real race: beside whatever else runs here, eager may win it.
        assert decision.reason in ("won", "undecided", "below_margin", "no_gain")
        assert (decision.compile_key is not None) == (decision.reason == "won")
        if decision.compile_key is not None:
            kernel = store.kernels.get(decision.compile_key)
            assert kernel is not None and kernel.binary[:4] == b"\x7fELF"
    wait_until(lambda: control.running_pid(settings) is None)
    assert "ending" in control.log_path(settings).read_text()


def test_a_daemon_killed_in_mid_tuning_loses_nothing(settings: Settings) -> None:
    queue(settings, *(request(FORM, (size,)) for size in (24, 12)))
    pid = control.ensure_running(settings)
    wait_until(lambda: worker_of(pid))
    worker = worker_of(pid)
    assert worker is not None
    state = control.status(settings)
    assert state is not None and state.pid == pid
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: control.running_pid(settings) is None)
    wait_until(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE)  # it dies with the daemon
    with Store.open(settings.run.store) as store:
        assert store.queue.length().total == 2 and store.queue.length().open >= 1
        assert control.ensure_running(settings) != pid
        wait_until(lambda: store.queue.length().done == 2)
        assert len(store.results.decisions()) == 2


def test_a_store_that_is_put_aside_ends_its_daemon(settings: Settings) -> None:
    control.ensure_running(settings)
    process = DaemonFiles(settings).running()
    assert process is not None and process.is_alive
    assert parse(["store", "reset", "--store", str(settings.run.store)]) == 0
    assert not process.is_alive and control.running_pid(settings) is None
    aside = settings.run.store.with_name("store.sqlite3.old")
    assert aside.exists() and not settings.run.store.exists()
    with Store.open(aside) as store:
        assert store.daemon.state() is not None


def test_a_launched_daemon_is_found_before_it_has_begun(settings: Settings) -> None:
    queue(settings, request(FORM, (12,)))
    control.launch(settings)
    pid = control.running_pid(settings)
    assert pid is not None
    control.launch(settings)
    assert control.running_pid(settings) == pid, "no second one"
    assert control.stop(settings) is True and control.running_pid(settings) is None
    control.launch(settings)
    with Store.open(settings.run.store) as store:
        wait_until(lambda: store.queue.length().done == 1)


def test_stop_gives_the_request_back(settings: Settings) -> None:
    queue(settings, request(FORM, (24,)))
    pid = control.ensure_running(settings)
    wait_until(lambda: worker_of(pid))  # in the middle of its first job: torch is imported now
    assert control.stop(settings) is True and control.status(settings) is None
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    with Store.open(settings.run.store) as store:
        assert store.queue.length().queued == 1 and store.results.decisions() == []
        state = store.daemon.state()
        assert state is not None and state.state == "stopped"


def test_a_store_that_is_garbage_is_left_alone_and_said(settings: Settings) -> None:
    settings.run.store.parent.mkdir(parents=True)
    settings.run.store.write_bytes(b"not a store" * 1000)
    with pytest.raises(DaemonError, match=r"tail .*daemon\.log"):
        control.ensure_running(settings)
    assert settings.run.store.read_bytes() == b"not a store" * 1000
    assert "store" in control.log_path(settings).read_text()


def test_no_place_to_write(tmp_path: Path, settings: Settings) -> None:
    blocked = settings.with_values({"run.store": Path("/proc/nobody/store")}, "test")
    with pytest.raises(DaemonError, match="expected to start"):
        control.ensure_running(blocked)


BUSY = "import time\nwhile time.process_time() < 3.0: pass\n"


@pytest.mark.parametrize(
    ("begins", "is_waited_for"),
    [(BUSY, True), ("import time\ntime.sleep(60)\n", False)],
    ids=["starved", "stuck"],
)
def test_a_daemon_that_is_slow_to_start_is_waited_for_while_it_gets_on(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, begins: str, is_waited_for: bool
) -> None:
    monkeypatch.setattr(control, "START_SECONDS", 1.0)
    settings.run.store.parent.mkdir(parents=True)
    announce = f"{begins}from autofuse.settings.layers import load\nfrom autofuse.daemon.files import DaemonFiles\n"
    announce += f"import os, time\nfiles = DaemonFiles(load({{'run.store': {str(settings.run.store)!r}}}))\n"
    announce += "files.announce(os.getpid())\ntime.sleep(60)"
    started = []

    def spawn(settings: Settings) -> int:
        started.append(subprocess.Popen([sys.executable, "-c", announce]))
        return started[0].pid

    monkeypatch.setattr(control, "spawn_daemon", spawn)
    if is_waited_for:
        assert control.ensure_running(settings) == started[0].pid
        started[0].kill()
    else:
        with pytest.raises(DaemonError, match="to start within"):
            control.ensure_running(settings)
        assert started[0].wait() == -signal.SIGKILL


def test_a_stale_pid_file_is_no_daemon(settings: Settings, bystander: subprocess.Popen[bytes]) -> None:
    files = DaemonFiles(settings)
    path = files.pid_path(files.kind)
    path.parent.mkdir(parents=True, mode=0o700)
    files.announce(bystander.pid)
    ours = json.loads(path.read_text())
    assert control.running_pid(settings) == bystander.pid and path.stat().st_mode & 0o777 == 0o600
    changed = [{"ticks": ours["ticks"] + 1}, {"machine": "another start of it"}, {"pid": 2**22 - 1}, {"pid": "x"}]
    for text in ("", "77", "[]", *(json.dumps(ours | change) for change in changed)):
        path.write_text(text)
        assert control.running_pid(settings) is None and control.status(settings) is None
        assert control.stop(settings) is False and bystander.poll() is None


def test_a_clock_that_is_set_hides_no_daemon(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, bystander: subprocess.Popen[bytes]
) -> None:
    settings.run.store.parent.mkdir(parents=True, mode=0o700)
    DaemonFiles(settings).announce(bystander.pid)
    began = psutil.boot_time()
    monkeypatch.setattr(psutil._pslinux, "boot_time", lambda: began + 3600.0)
    monkeypatch.setattr(time, "time", lambda: began - 3600.0)
    assert control.running_pid(settings) == bystander.pid


def test_a_mark_of_the_future_is_no_hurry_for_ever(settings: Settings) -> None:
    settings.run.store.parent.mkdir(parents=True, mode=0o700)
    mark = control.urgent_path(settings)
    mark.touch()
    assert control.someone_waits(settings)
    for away in (-60.0, 3600.0):
        os.utime(mark, (time.time() + away,) * 2)
        assert not control.someone_waits(settings)


def test_requests_of_other_cores_and_versions_have_a_daemon_of_their_own(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, bystander: subprocess.Popen[bytes]
) -> None:
    """One that a pinned script has started, or one of another environment, cannot do what we ask."""
    settings.run.store.parent.mkdir(parents=True, mode=0o700)
    theirs = DaemonFiles(settings)
    theirs.announce(bystander.pid)
    queue(settings, request(FORM, (24,)))
    with theirs.lock(), Store.open(settings.run.store) as store:
        assert store.queue.take(cpu_device().key, kind=theirs.kind) is not None
        for what, value in (
            ("cpu_device", lambda: replace(cpu_device(), cores=77)),
            ("versions", lambda: "torch 1.0, codegen 0"),
        ):
            with monkeypatch.context() as other:
                other.setattr(daemon_files, what, value)
                assert control.running_pid(settings) is None, "we would wait for it in vain"
                assert [state.pid for state in control.statuses(settings)] == [bystander.pid], "but it is known"
                loop, ours = make_loop(settings), DaemonFiles(settings)
                assert ours.kind != theirs.kind
                with ours.lock():
                    assert loop.queue.take_up() == 0, "it is still at work"
                loop.close()
    loop = make_loop(settings)
    with theirs.lock():
        assert loop.queue.take_up() == 1
    loop.close()


@pytest.mark.parametrize("bits", [0o002, 0o022])
def test_where_others_may_write_no_daemon_is_believed_or_started(
    settings: Settings, bits: int, bystander: subprocess.Popen[bytes]
) -> None:
    folder = settings.run.store.parent
    folder.mkdir(parents=True, mode=0o700)
    DaemonFiles(settings).announce(bystander.pid)
    folder.chmod(0o755 | bits)
    assert control.running_pid(settings) is None and control.stop(settings) is False
    assert bystander.poll() is None
    for start in (control.ensure_running, control.launch, control.drain):
        with pytest.raises(DaemonError, match=f"chmod go-w {folder}"):
            start(settings)


def test_a_process_of_another_user_is_not_ended(
    bystander: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root could, and a process number may be an old one."""
    found, user = process_id(bystander.pid), os.geteuid()
    with monkeypatch.context() as other:
        other.setattr(os, "geteuid", lambda: user + 1)
        with pytest.raises(DaemonError, match=f"process {bystander.pid} is another user's"):
            control.end_process(found)
    assert bystander.poll() is None
    control.end_process(found)
    assert bystander.wait() == -signal.SIGTERM


@pytest.mark.parametrize("name", [".daemon.log", ".start.lock", "pid.new"])
def test_nothing_is_written_through_a_link(settings: Settings, tmp_path: Path, name: str) -> None:
    settings.run.store.parent.mkdir(parents=True, mode=0o700)
    target = tmp_path / "precious"
    target.write_text("precious")
    files = DaemonFiles(settings)
    pid = files.pid_path(files.kind)
    link = pid.with_name(pid.name + ".new") if name == "pid.new" else files.beside(name)
    link.symlink_to(target)
    with pytest.raises((DaemonError, Untrusted), match="is a link"):
        if name == "pid.new":
            files.announce(os.getpid())
        else:
            control.ensure_running(settings)
    assert target.read_text() == "precious"


def test_the_daemon_is_no_child_of_the_script(settings: Settings) -> None:
    """One that waits for all of its children would wait for it."""
    settings.run.store.parent.mkdir(parents=True, mode=0o700)
    before = psutil.Process().children()
    process = psutil.Process(control.spawn_daemon(settings))
    try:
        assert psutil.Process().children() == before and process.ppid() != os.getpid()
        assert "serve" in process.cmdline()
    finally:
        process.kill()


def test_looking_at_the_daemon_imports_no_torch() -> None:
    code = "import sys, autofuse.daemon.control; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_versions_are_those_that_sessions_write() -> None:
    minor = ".".join(torch.__version__.split(".")[:2])
    assert versions() == f"torch {minor}, codegen {CODEGEN_VERSION}"


# ---- the queue ------------------------------------------------------------------------------------------


def test_drain_takes_the_largest_saving_first_and_tells_how_far_it_is(settings: Settings) -> None:
    sizes = {(24,): 10.0, (12,): 1000.0, (6,): 100.0}
    queue(settings, request(matmul_form(), (8,)), *(request(FORM, v, unfused_us=us) for v, us in sizes.items()))
    told: list[tuple[int, int]] = []
    assert control.drain(settings, lambda done, total: told.append((done, total))) == (4, 0, 0)
    assert told == [(0, 4), (1, 4), (2, 4), (3, 4)]
    with Store.open(settings.run.store) as store:
        assert store.queue.length().done == 4
        found = [decision for _, decision in store.results.decisions()]
    assert [d.bucket.label for d in found] == ["s0=9..16", "s0=5..8", "s0=5..8", "s0=17..32"]
    assert found[2].reason.startswith("refused:")
    assert control.running_pid(settings) is None


def won(key: DecisionKey, bucket: Bucket, gain_us: float) -> Decision:
    """A kernel that takes 10 us."""
    return Decision(key, bucket, Candidate("c_generic"), "digest", 10.0 + gain_us, 10.0, 1.2, 1.1, 1.3, "won")


def make_loop(settings: Settings) -> TuningLoop:
    settings.run.store.parent.mkdir(parents=True, exist_ok=True)
    return TuningLoop(settings, is_urgent=lambda: False)


def test_a_daemon_that_begins_forgets_old_runs(settings: Settings) -> None:
    loop = make_loop(settings.with_values({"cache.history_days": 0.0}, "test"))
    with Store.open(settings.run.store) as store:
        for name in ("old.py", "newer.py"):
            run_id = store.runs.start(RunStart(name, cpu_device(), versions(), "off", 1))
            store.steps.add(run_id, [StepSample("root", "sizes", False, 1, 1, 1.0)])
            store.runs.finish(run_id, RunTotals())
        loop.is_stopping = True
        loop.serve()
        loop.close()
        assert [len(store.steps.of_run(run_id)) for run_id in (1, 2)] == [0, 1]


@pytest.mark.parametrize("is_busy", [False, True])
def test_a_daemon_whose_store_is_moved_ends(settings: Settings, is_busy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By whatever program, and also with work left: it would go on for a store that nobody asks any more."""
    queue(settings, *(request(FORM, (size,)) for size in (24, 12) if is_busy))
    loop, path, worked = make_loop(settings), settings.run.store, []

    def move(*_: object) -> None:
        os.rename(path, path.with_name("elsewhere.sqlite3"))

    def work(taken: TuneRequest) -> None:
        worked.append(taken)
        move()

    monkeypatch.setattr(loop, "work", work)
    monkeypatch.setattr(daemon_loop.time, "sleep", move)  # it is idle
    loop.serve()
    loop.close()
    assert len(worked) == is_busy and not path.exists()


def test_requests_of_other_machines_and_versions_wait(settings: Settings) -> None:
    mine = request(FORM, (24,))
    others = [{"device": "cpu:other:2:avx2"}, {"versions": "torch 1.0, codegen 0"}]
    queue(settings, *(TuneRequest(**{**vars(mine), "key": type(mine.key)(**{**vars(mine.key), **o})}) for o in others))
    loop = make_loop(settings)
    assert loop.queue.next() is None
    loop.close()


def test_a_process_of_another_machine_is_not_looked_for_here(settings: Settings) -> None:
    """Two machines with one store: a run's process number means another process, or none, on the other one."""
    loop, peers = make_loop(settings), Peers(peers_folder(settings))
    start = RunStart("x.py", cpu_device(), versions(), "background", os.getpid(), machine="another boot of another")
    with Store.open(settings.run.store) as store:
        there, here = (store.runs.start(replace(start, machine=m)) for m in (start.machine, this_machine()))
        asked = request(FORM, (24,), calls=5_000_000)
        fused = NodeUse(
            asked.key.fusion_id, asked.node, "", "", asked.bucket, asked.calls, asked.calls, 0.0, 0.0, asked.shapes
        )
        store.nodes.put_uses(there, [fused])
        loop.runs.asking = here
        assert loop.runs.asking_pid() is None, "it is not announced"
        script = peers.announce(10.0)
        assert loop.runs.asking_pid() == os.getpid()
        loop.runs.asking = there
        assert loop.runs.asking_pid() is None, "it runs there, and ours has its number by chance"
        loop.runs.note(won(asked.key, asked.bucket, gain_us=2.0), at=script.began + 1.0)
        assert loop.runs.saved([script]) == {os.getpid(): 0.0}
        store.nodes.put_uses(here, [fused])
        assert loop.runs.saved([script]) == {os.getpid(): 10.0}
    peers.withdraw()
    loop.close()


def test_what_a_daemon_of_another_machine_says_is_not_ours(
    settings: Settings, bystander: subprocess.Popen[bytes]
) -> None:
    settings.run.store.parent.mkdir(parents=True, mode=0o700)
    DaemonFiles(settings).announce(bystander.pid)
    with Store.open(settings.run.store) as store:
        for host, state in (("another", "idle"), (socket.gethostname(), "tuning")):
            store.daemon.heartbeat(DaemonState(bystander.pid, host, 0.0, "tuning"))
            found = control.status(settings)
            assert found is not None and found.state == state


def test_a_run_whose_budget_is_spent_waits_and_the_others_do_not(settings: Settings) -> None:
    first = settings.with_values({"tuner.budget_seconds": 0.5}, "test")
    with_runs = [request(matmul_form(), (size,), run_id=run) for size, run in ((64, 1), (32, 2), (16, 1))]
    settings.run.store.parent.mkdir(parents=True, exist_ok=True)
    with Store.open(settings.run.store) as store:
        for _ in range(2):
            store.runs.start(RunStart("x.py", cpu_device(), versions(), "background", 2**22 - 1))
        store.queue.add(with_runs)
        loop = make_loop(first)
        loop.queue.charge(1, 1.0)
        taken = loop.queue.next()
        assert taken is not None and taken.run_id == 2
        loop.work(taken)
        assert loop.queue.next() is None
        assert (store.queue.length().done, store.queue.length().running) == (1, 2)
        loop.close()
        assert store.queue.length().queued == 2  # for the next daemon


def test_a_job_that_fails_is_noted_and_the_next_one_is_done(settings: Settings) -> None:
    broken = request(FORM, (24,), unfused_us=1e6)
    node = {**broken.node, "operations": [{"name": "v0"}]}
    queue(settings, TuneRequest(**{**vars(broken), "node": node}), request(matmul_form(), (8,)))
    assert sum(control.drain(settings)[:2]) == 2
    with Store.open(settings.run.store) as store:
        assert (store.queue.length().failed, store.queue.length().done) == (1, 1)
        assert any("KeyError" in row.message for row in store.queue.requests())


def test_a_failure_of_the_moment_is_tried_again(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder for temporary files that went with its batch job, a disk that was full, a compiler that was killed."""
    queue(settings, request(FORM, (24,)))
    monkeypatch.setattr(tempfile, "tempdir", str(settings.run.store.parent / "gone"))
    assert control.drain(settings) == (0, 1, 0)
    with Store.open(settings.run.store) as store:
        assert store.queue.requests()[0].message.startswith(NOT_READY) and "gone" in store.queue.requests()[0].message
        assert store.results.decisions() == [], "eager has not won"
    monkeypatch.undo()
    loop = make_loop(settings)
    loop.queue.take_up()
    assert loop.queue.next() is not None
    loop.close()


def test_a_compiler_that_cannot_work_is_told_from_a_kernel_that_does_not_compile(tmp_path: Path) -> None:
    toolchain = find_toolchain()
    with pytest.raises(CompilerError, match="expected the generated C to compile") as refused:
        compile_source("int f(void) { return x; }", toolchain, ["-shared", "-fPIC"])
    assert not isinstance(refused.value, CompilerNotReady)
    full = tmp_path / "cc"
    full.write_text("#!/bin/sh\necho 'fatal error: error writing to /tmp/x.s: No space left on device' >&2\nexit 1\n")
    full.chmod(0o755)
    for path in (full, tmp_path / "gone"):
        with pytest.raises(CompilerNotReady):
            compile_source("int f(void) { return 0; }", replace(toolchain, command=(str(path),)), [])


def test_winners_of_other_buckets_are_known_after_a_restart(settings: Settings) -> None:
    queue(settings, request(FORM, (24,)))
    control.drain(settings)
    loop = make_loop(settings)
    ((bucket, config),) = loop.results.winners(request(FORM, (12,)).key).items()
    assert bucket.label == "s0=17..32" and config
    assert loop.results.winners(request(FORM, (12,), threads=7).key) == {}
    loop.close()


# ---- manners --------------------------------------------------------------------------------------------


class Clock:
    """Time that passes only when somebody sleeps or works."""

    def __init__(self) -> None:
        self.now = self.used = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def work(self, seconds: float) -> None:
        self.now += seconds
        self.used += seconds


def test_the_share_of_a_core_is_kept() -> None:
    clock = Clock()
    share = CpuThrottle(lambda: 25.0, lambda: clock.used, lambda: clock.now, clock.sleep)
    for _ in range(40):
        share.rest(lambda: True)
        clock.work(0.1)
    assert clock.used <= 0.25 * clock.now + BURST_SECONDS + 0.1
    assert share.rested_seconds == pytest.approx(clock.now - clock.used)


def test_little_is_taken_beside_a_script_that_has_only_begun() -> None:
    clock = Clock()
    share = CpuThrottle(lambda: 50.0 * young_share(clock.now), lambda: clock.used, lambda: clock.now, clock.sleep)
    used = {}
    while clock.now < 4 * SETTLED_SECONDS:
        share.rest(lambda: True)
        clock.work(0.1)
        used[round(clock.now)] = clock.used
    minute = max(seconds for seconds in used if seconds <= SETTLED_SECONDS / 2)
    assert used[minute] <= 0.5 * minute / 4 + 2 * BURST_SECONDS  # the mean of the shares so far is a quarter
    assert clock.used == pytest.approx(0.5 * (clock.now - SETTLED_SECONDS / 2), rel=0.02)
    assert young_share(-5.0) == 1.0 and young_share(1e9) == 1.0


def test_a_script_that_fills_all_cores_loses_a_tenth_of_one_at_most() -> None:
    assert allowed_percent(50.0, SETTLED_SECONDS, is_full=True) == FULL_PERCENT
    assert allowed_percent(50.0, 0.0, is_full=True) == FULL_PERCENT  # its account says how long
    assert allowed_percent(5.0, SETTLED_SECONDS, is_full=True) == 5.0  # less where less was asked for
    assert allowed_percent(50.0, SETTLED_SECONDS, is_full=False) == 50.0
    assert allowed_percent(50.0, SETTLED_SECONDS / 4, is_full=False) == 12.5
    assert allowed_percent(50.0, None, is_full=True) == 50.0  # whatever fills them, it is no script of ours


def test_nobody_rests_while_somebody_waits_and_nothing_is_owed_for_it() -> None:
    clock = Clock()
    share = CpuThrottle(lambda: 10.0, lambda: clock.used, lambda: clock.now, clock.sleep)
    clock.work(100.0)
    share.rest(lambda: False)
    assert share.rested_seconds == 0.0
    share.rest(lambda: True)
    assert share.rested_seconds == 0.0


def test_other_work_is_told_from_our_own() -> None:
    clock = Clock()
    spinner = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        others = MachineLoad(lambda: 0.0, lambda: clock.now)
        own = MachineLoad(lambda: psutil.Process(spinner.pid).cpu_times().user + 1e6 * clock.now, lambda: clock.now)
        assert not others.is_busy()
        wait_until(lambda: psutil.Process(spinner.pid).cpu_times().user > 0.5)
        clock.now = 1.0
        assert others.is_busy() and not own.is_busy()
        assert own.is_full() == others.is_full()  # whoever it is that fills the cores
    finally:
        spinner.kill()
        spinner.wait()


def test_an_idle_daemon_costs_next_to_nothing(settings: Settings) -> None:
    pid = control.ensure_running(settings)
    process = psutil.Process(pid)
    time.sleep(0.5)
    before = process.cpu_times()
    time.sleep(2.0)
    after = process.cpu_times()
    used = after.user + after.system - before.user - before.system
    assert used <= 0.06  # 3 %: the clock ticks in hundredths of a second; 0.4 % measured over minutes
