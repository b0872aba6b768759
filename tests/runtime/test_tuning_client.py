"""What a session asks to be tuned, and when: shapes that come but once add up within their bucket."""

import os
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from autofuse.capture.backend import compile_with
from autofuse.daemon import throttle
from autofuse.daemon.peers import Peers
from autofuse.ir.records import EAGER, Bucket, Candidate, Decision, DecisionKey
from autofuse.pipeline import route_graph
from autofuse.sessions import make_session
from autofuse.settings.layers import load


class Chain(nn.Module):
    def forward(self, x, y):
        return (x * y + y).relu() * 0.5


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """``asked(mode, sizes)``: the buckets that are asked for after one call of each size."""
    monkeypatch.setattr("autofuse.daemon.control.ensure_running", lambda settings: None)

    def ask(mode, sizes):
        torch._dynamo.reset()
        values = {"run.store": tmp_path / "s.sqlite3", "run.tune": mode, "run.quiet": True}
        session = make_session(load(cli=values, environ={}, cwd=tmp_path), "test")
        posted = []
        assert session.tuning.enabled
        monkeypatch.setattr(
            session.context.store_thread, "post_requests", lambda requests: posted.extend(requests) or 0
        )
        monkeypatch.setattr(session.context.store_thread, "wait_written", lambda ticket, seconds: True)

        def backend(graph, inputs):
            return compile_with(graph, inputs, lambda module, phase, times: route_graph(module, phase, session, times))

        model = torch.compile(Chain(), backend=backend, dynamic=True)
        with torch.no_grad():
            for size in sizes:
                model(torch.ones(size, 64), torch.ones(size, 64))
        assert session.context.routers, session.context.said
        if mode == "background":
            session.tuning.post_new_work()
        else:
            session.tuning.hand_over()
        return [request.bucket.label for request in posted]

    return ask


def test_shapes_that_come_once_are_asked_for_by_their_bucket(asked):
    assert len(asked("background", [40, 50, 60])) == 1
    assert len(asked("background", [40, 50, 60, 100, 110, 120])) == 2


def test_a_daemon_is_started_beside_a_script_that_goes_on_and_after_one_that_ends(tmp_path, monkeypatch):
    began = []
    for name in ("ensure_running", "launch"):
        monkeypatch.setattr(f"autofuse.daemon.control.{name}", lambda settings, name=name: began.append(name))

    def session_with_work():
        values = {"run.store": tmp_path / "s.sqlite3", "run.tune": "background", "run.quiet": True}
        session = make_session(load(cli=values, environ={}, cwd=tmp_path), "test")
        monkeypatch.setattr(session.context.store_thread, "post_requests", lambda requests: 0)
        monkeypatch.setattr(session.tuning, "requests_for", lambda plans: [object()] if not began else [])
        return session

    session = session_with_work()
    session.tuning.post_new_work()
    assert began == [], "a young script has its cores to itself"
    session.context.started -= 61.0
    monkeypatch.setattr(session.tuning, "requests_for", lambda plans: [])
    session.tuning.post_new_work()
    session.tuning.post_new_work()
    assert began == ["ensure_running"], "what it asked for before is not forgotten"
    session.tuning.leave_to_daemon()
    assert began == ["ensure_running"]
    began.clear()
    session = session_with_work()
    session.tuning.leave_to_daemon()
    assert began == [], "nothing was asked for"
    session.tuning.post_new_work()
    assert session.tuning.lacks_daemon and began == []
    session.tuning.leave_to_daemon()
    assert began == ["launch"]
    began.clear()
    session = session_with_work()
    session.context.store_thread.has_leftovers = True
    session.tuning.post_new_work()
    assert began == ["ensure_running"], "of a run whose daemon ended with it"


@pytest.mark.parametrize("runs", ["groups", "graphs"])  # modules, or what the script's own torch.compile has made
@pytest.mark.parametrize("is_full", [True, False])
def test_no_daemon_is_started_before_the_steps_have_shown_whether_they_fill_all_cores(
    tmp_path, monkeypatch, is_full, runs
):
    began, now, busy = [], [0.0], [0.0]
    monkeypatch.setattr("autofuse.daemon.control.ensure_running", lambda settings: began.append(settings))
    monkeypatch.setattr(throttle, "busy_seconds", lambda: busy[0])

    def machine(own, look_seconds):
        return throttle.MachineLoad(own, lambda: now[0], look_seconds)

    monkeypatch.setattr("autofuse.runtime.tuning_client.MachineLoad", machine)
    values = {"run.store": tmp_path / "s.sqlite3", "run.tune": "background", "run.quiet": True}
    session = make_session(load(cli=values, environ={}, cwd=tmp_path), "test")
    monkeypatch.setattr(session.tuning, "requests_for", lambda plans: [object()])
    monkeypatch.setattr(session.context.store_thread, "post_requests", lambda requests: 0)
    session.context.store_thread.has_leftovers = True
    session.tuning.neighbours = peers = Peers(tmp_path / "met")
    (tmp_path / "met").mkdir(mode=0o700)
    session.tuning.script = peers.announce(0.0)
    now[0] += 60.0
    session.tuning.post_new_work()
    assert not began, "one core was busy with imports"
    getattr(session.roots, runs)["model"] = object()
    session.tuning.post_new_work()
    now[0], busy[0] = now[0] + 4.0, busy[0] + 8.0
    session.tuning.post_new_work()
    assert not began, "it has not been looked at for long enough"
    now[0] += 4.0
    busy[0] += 8.0 * (os.cpu_count() or 1) if is_full else 0.0
    session.tuning.post_new_work()
    assert bool(began) is not is_full


def test_a_bucket_that_is_seldom_called_is_not(asked):
    assert asked("background", [40, 50]) == []
    assert asked("background", [20, 40, 80, 160]) == [], "each in a bucket of its own"
    assert len(asked("after", [40, 50])) == 1 and asked("after", [40]) == []


def test_the_bar_tells_what_the_winners_so_far_save(tmp_path):
    values = {"run.store": tmp_path / "s.sqlite3", "run.tune": "wait", "run.quiet": True}
    session = make_session(load(cli=values, environ={}, cwd=tmp_path), "test")
    cpu = torch.device("cpu")
    place = session.kernels.catalogue.backends.place(cpu)

    def decide(fusion_id, variant, unfused_us, fused_us):
        key = DecisionKey(fusion_id, Bucket(()).label, place.key, place.threads, session.context.versions)
        found = Decision(key, Bucket(()), Candidate(variant), None, unfused_us, fused_us, 2.0, 1.9, 2.1, "won")
        session.kernels.catalogue.table.update([found])

    def node(fusion_id, tag, covered=False):
        return SimpleNamespace(
            fusion_id=fusion_id, values=(), tag=tag, covered=covered, slot=SimpleNamespace(device=cpu)
        )

    decide("won", "c_generic", 30.0, 10.0)
    decide("group", "way", 100.0, 60.0)
    decide("lost", EAGER, 30.0, 40.0)
    nodes = [node("won", "k"), node("won", "k"), node("group", "g"), node("won", "k", covered=True), node("lost", "")]
    assert session.tuning._saving_us([SimpleNamespace(nodes=nodes)]) == 20.0 + 20.0 + 40.0, "not that of covered nodes"


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 10)), max_size=8))
def test_what_several_threads_wait_at_once_counts_once(pauses):
    """Five threads that each waited for the same minute were told to have waited for five, all of the budget."""
    session = make_session(load(cli={"run.tune": "off", "run.quiet": True}, environ={}), "test")
    changes = [(began, 1) for began, seconds in pauses] + [(began + seconds, -1) for began, seconds in pauses]
    for now, change in sorted(changes, key=lambda one: (one[0], -one[1])):
        session.tuning._count_pauses(change, float(now))
    waited = {second for began, seconds in pauses for second in range(began, began + seconds)}
    assert session.context.paused_seconds == len(waited)
