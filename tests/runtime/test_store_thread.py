"""The background thread's store in trouble: how long the script waits for it, and what is kept for it."""

from __future__ import annotations

import gc
import os
import signal
import sqlite3
import threading
from dataclasses import replace

import pytest

from autofuse.codegen.c import bernoulli, build
from autofuse.codegen.c.build import find_toolchain
from autofuse.db.store import Store
from autofuse.errors import CompilerError
from autofuse.ir.device import cpu_device
from autofuse.ir.records import Event, RunStart, RunTotals, StepSample
from autofuse.private_files import PrivateFolder
from autofuse.runtime import session as session_module
from autofuse.runtime import store_thread
from autofuse.runtime.roots.steps import TimedStep
from autofuse.sessions import make_session
from autofuse.settings.layers import load


@pytest.fixture
def settings(tmp_path):
    path = tmp_path / "s.sqlite3"
    path.touch(0o600)  # of an earlier run
    values = {"run.store": path, "run.quiet": True, "tuner.shared_folder": tmp_path / "shared"}
    return load(values, environ={}, cwd=tmp_path)


@pytest.fixture
def session(settings):
    return make_session(settings, "test")


def test_all_who_wait_for_a_locked_store_wait_for_one_moment_together(settings, monkeypatch):
    clock, waited = [0.0], []

    class Never:
        def is_set(self):
            return False

        def wait(self, seconds):
            waited.append(seconds)
            clock[0] += seconds
            return False

    monkeypatch.setattr(store_thread.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(store_thread, "make_event", Never)
    session = make_session(settings, "test")
    for _ in range(50):  # a root each
        assert not session.context.store_thread.wait_ready(2.0)
    assert sum(waited) == store_thread.PATIENCE_SECONDS


@pytest.mark.parametrize("is_open", [False, True], ids=["at its begin", "at its end"])
def test_a_store_that_stays_locked_is_given_up_and_holds_nobody(settings, monkeypatch, is_open):
    path, waits = settings.run.store, []
    monkeypatch.setattr(session_module, "BUSY_SECONDS", 0.05)
    whole = Store.open
    monkeypatch.setattr(Store, "open", lambda *args, **given: waits.append(given) or whole(*args, **given))
    session = make_session(settings, "test")
    Store.open(path).close()
    other = sqlite3.connect(path, isolation_level=None)
    try:
        if is_open:
            session.context.store_thread.start()
            assert session.context.store_thread.absorb_again(60.0), "it is open"
        other.execute("BEGIN EXCLUSIVE")
        if not is_open:
            session.context.store_thread.start()
        session.finish(0)
    finally:
        other.close()
    assert not session.context.store_thread.thread.is_alive() and not session.context.store_thread.usable
    assert session.context.said["store_unusable"] == 1 and session.context.steps == []
    assert {"timeout_seconds": 0.05} in waits, "else SQLite waits for five seconds, at each of its calls"
    with Store.open(path) as store:
        assert [run.finished_at for run in store.runs.recent()] == [None] * is_open


def test_a_locked_store_costs_what_the_changelog_promises():
    assert (store_thread.PATIENCE_SECONDS, store_thread.BUSY_SECONDS) == (1.0, 2.0)


def test_a_store_that_never_answers_is_told_at_the_end(settings, monkeypatch):
    answers, whole = threading.Event(), Store.open
    monkeypatch.setattr(Store, "open", lambda *args, **given: answers.wait(60.0) and whole(*args, **given))
    session = make_session(settings, "test")
    session.context.store_thread.start()
    session.context.store_thread.stop(0.05)
    assert session.context.said["store_unusable"] == 1 and not session.is_stored
    answers.set()
    session.context.store_thread.thread.join(60.0)


def test_nothing_is_kept_for_a_store_that_is_lost(session):
    session.context.steps.append(TimedStep("root", "sizes", False, 0, 1, 1.0, 1))
    session.context.store_thread.post_event(Event("before", ""))
    session.context.settings.run.store.write_bytes(b"not a database" * 100)
    session.context.store_thread.start()
    session.context.store_thread.thread.join(60.0)
    assert session.context.steps == [] and session.context.said["store_unusable"] == 1
    for _ in range(9):
        session.context.say_once("after", "")
    assert not [found for found in gc.get_objects() if type(found) is Event and found.kind == "after"]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_that_ends_leaves_its_parents_session_alone(session):
    """Daemons would take the parent for gone, and no more yield to it."""
    with Store.open(session.context.settings.run.store) as store:
        session.tuning.announce(store)
    child = os.fork()
    if child == 0:
        try:
            session.finish(None)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    (script,) = session.tuning.neighbours.scripts()
    assert script.pid == os.getpid()
    session.finish(None)
    assert session.tuning.neighbours is not None and not session.tuning.neighbours.scripts()


def test_a_session_that_ends_forgets_old_runs(session):
    """Where nothing is tuned no daemon does."""
    session.context.settings = session.context.settings.with_values({"cache.history_days": 0.0}, "test")
    with Store.open(session.context.settings.run.store) as store:
        for name in ("old.py", "newer.py"):
            run_id = store.runs.start(RunStart(name, cpu_device(), "", "off", 1))
            store.steps.add(run_id, [StepSample("root", "sizes", False, 1, 1, 1.0)])
            store.runs.finish(run_id, RunTotals())
        session.context.store_thread.start()
        session.finish(0)
        assert [len(store.steps.of_run(run_id)) for run_id in (1, 2)] == [0, 1]
        assert store.runs.get(3).finished_at is not None and not session.context.said


@pytest.mark.parametrize("cc", ["env cc", "cc -pipe", "cc"])
def test_a_compiler_may_be_several_words(cc):
    toolchain = find_toolchain(cc)
    assert len(toolchain.command) == len(cc.split()) and toolchain.command[0].startswith("/")
    assert toolchain.path.endswith(cc.partition(" ")[2])


@pytest.mark.parametrize("cc", ["no-such-cc -pipe", '"', " "])
def test_a_compiler_that_is_none_is_named(cc):
    with pytest.raises(CompilerError, match="found none of"):
        find_toolchain(cc)


def test_what_a_compiler_can_do_is_noted_for_later_processes(tmp_path, monkeypatch):
    folder = PrivateFolder(tmp_path / "notes")
    found = find_toolchain("cc", folder)
    monkeypatch.setattr(build, "probe", lambda *_: pytest.fail("probed again"))
    assert find_toolchain("cc", folder) == found
    (note,) = folder.path.iterdir()
    note.write_bytes(note.read_bytes()[:-1] + b"?")
    probes = []
    monkeypatch.setattr(build, "probe", lambda *args: probes.append(args) or (found, True))
    assert find_toolchain("cc", folder) == found and len(probes) == 1, "an altered note is not believed"
    assert find_toolchain("cc -pipe", folder).command == found.command and len(probes) == 2, (
        "nor one of another command"
    )


@pytest.fixture
def compilers(tmp_path, monkeypatch):
    """A folder on PATH, and what writes a program there that is the real compiler behind some shell."""
    real = find_toolchain("cc").command[0]
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    (tmp_path / "bin").mkdir()

    def write(name, before, program=f'exec {real} "$@"'):
        path = tmp_path / "bin" / name
        path.write_text(f"#!/bin/sh\n{before}\n{program}\n")
        path.chmod(0o755)
        build.probe.cache_clear()

    yield write
    build.probe.cache_clear()


def test_a_new_compiler_behind_another_program_is_looked_at(tmp_path, compilers):
    folder = PrivateFolder(tmp_path / "notes")
    compilers("mycache", "", 'exec "$@"')
    compilers("mycc", "")
    find_toolchain("mycache mycc", folder)
    compilers("mycc", "# a newer one")
    find_toolchain("mycache mycc", folder)
    assert len(folder.names()) == 2


def test_a_probe_without_a_verdict_is_not_noted(tmp_path, compilers):
    folder = PrivateFolder(tmp_path / "notes")
    full = 'case "$*" in *fno-math-errno*) echo "fatal error: No space left on device" >&2; exit 1;; esac'
    compilers("mycc", full)
    assert find_toolchain("mycc", folder).libmvec == 0 and not folder.names()
    lacks = full.replace("fatal error: No space left on device", "ld: undefined reference to _ZGVbN4v_expf")
    compilers("mycc", lacks)
    assert find_toolchain("mycc", folder).libmvec == 0 and len(folder.names()) == 1


@pytest.mark.parametrize("asked", ["fno-math-errno", "-dM", "--version"])
def test_exit_codes_that_the_script_takes_are_no_verdict(tmp_path, compilers, asked):
    """Where a script ignores SIGCHLD nobody learns how a child has ended, and Python says: with 0."""
    folder = PrivateFolder(tmp_path / "notes")
    compilers("mycc", f'case "$*" in *{asked}*) exit 1;; esac')  # as one that is killed: without a word
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        found = find_toolchain("mycc", folder)
        assert not folder.names() and (asked != "fno-math-errno" or found.libmvec == 0)
        compilers("mycc", "")
        assert find_toolchain("mycc", folder) == replace(find_toolchain("cc"), command=found.command) and folder.names()
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_generator_is_compiled_once(tmp_path, monkeypatch):
    folder, compiled = PrivateFolder(tmp_path / "notes"), []
    compile_it = bernoulli.compile_source
    monkeypatch.setattr(bernoulli, "compile_source", lambda *args: compiled.append(args) or compile_it(*args))
    makes = [bernoulli.make_bernoulli(find_toolchain(), folder) for _ in range(3)]
    assert len(compiled) == 1 and len({make is None for make in makes}) == 1
    for path in folder.path.iterdir():
        path.chmod(0o666)
    bernoulli.make_bernoulli(find_toolchain(), folder)
    assert len(compiled) == 2, "others may have written it"
