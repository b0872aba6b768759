"""A thread of ours is none of the script's."""

import os
import threading

import pytest

from autofuse.hidden_thread import HiddenThread, hides


def test_it_is_not_listed_and_not_traced():
    begun, may_end, traced = threading.Event(), threading.Event(), []
    before = threading.enumerate()
    threading.settrace(lambda *_: traced.append(threading.get_ident()))
    try:
        thread = HiddenThread(lambda: (begun.set(), may_end.wait(60.0)))
        assert not thread.is_alive()
        thread.start()
        assert begun.wait(60.0) and thread.is_alive() and not thread.is_current
    finally:
        threading.settrace(None)
    assert threading.enumerate() == before
    may_end.set()
    thread.join()
    assert not thread.is_alive() and traced == []


def test_it_is_taken_off_the_list_where_a_library_asks_for_the_current_thread():
    listed, hidden, may_end = threading.Event(), threading.Event(), threading.Event()
    before = threading.enumerate()

    def work():
        threading.current_thread()
        listed.set()
        assert may_end.wait(60.0)
        thread.hide()
        hidden.set()

    thread = HiddenThread(work)
    thread.start()
    assert listed.wait(60.0)
    (ours,) = [found for found in threading.enumerate() if found not in before]
    assert hides(ours.ident) and not hides(threading.get_ident())
    may_end.set()
    assert hidden.wait(60.0) and threading.enumerate() == before
    thread.join(60.0)
    assert not hides(ours.ident)


def test_it_knows_itself_and_ends_by_an_exception(monkeypatch):
    told, found = [], []
    monkeypatch.setattr("sys.unraisablehook", told.append)
    thread = HiddenThread(lambda: found.append(thread.is_current) or 1 / 0)
    thread.start()
    thread.join(60.0)
    assert found == [True] and not thread.is_alive()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_no_such_thread():
    may_end = threading.Event()
    thread = HiddenThread(lambda: may_end.wait(60.0))
    thread.start()
    child = os.fork()
    if child == 0:
        thread.join(60.0)
        os._exit(int(thread.is_alive()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 and thread.is_alive()
    may_end.set()
    thread.join(60.0)
