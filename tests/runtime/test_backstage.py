"""The background thread's store in trouble: how long the script waits for it, and what is kept for it."""

from __future__ import annotations

import pytest

from autofuse.codegen.c.build import find_toolchain
from autofuse.errors import CompilerError
from autofuse.ir.records import Event
from autofuse.runtime import backstage
from autofuse.runtime.session import Session
from autofuse.settings import load


@pytest.fixture
def session(tmp_path):
    path = tmp_path / "s.sqlite3"
    path.touch(0o600)  # of an earlier run
    return Session(load({"run.store": path, "run.quiet": True}, environ={}, cwd=tmp_path), "test")


def test_all_who_wait_for_a_locked_store_wait_for_one_moment_together(session, monkeypatch):
    clock, waited = [0.0], []

    class Never:
        def is_set(self):
            return False

        def wait(self, seconds):
            waited.append(seconds)
            clock[0] += seconds
            return False

    monkeypatch.setattr(backstage.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(session.backstage, "_ready", Never())
    for _ in range(50):  # a root each
        assert not session.backstage.wait_ready(2.0)
    assert sum(waited) == backstage.PATIENCE_SECONDS


def test_nothing_is_kept_for_a_store_that_is_lost(session):
    session.steps.append(("root", "sizes", False, 0, 1, 1.0, 1))
    session.backstage.post_event(Event("before", ""))
    session.backstage._fail("garbage.")
    assert session.steps == [] and session._said["store_unusable"] == 1
    kept = len(session.backstage._events)
    for _ in range(9):
        session.say_once("after", "")
    assert len(session.backstage._events) == kept


@pytest.mark.parametrize("cc", ["env cc", "cc -pipe", "cc"])
def test_a_compiler_may_be_several_words(cc):
    toolchain = find_toolchain(cc)
    assert len(toolchain.command) == len(cc.split()) and toolchain.command[0].startswith("/")
    assert toolchain.path.endswith(cc.partition(" ")[2])


@pytest.mark.parametrize("cc", ["no-such-cc -pipe", '"', " "])
def test_a_compiler_that_is_none_is_named(cc):
    with pytest.raises(CompilerError, match="found none of"):
        find_toolchain(cc)
