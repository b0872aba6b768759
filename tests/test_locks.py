"""A child of a fork takes the locks that other threads of its parent held."""

import os
import threading
import types

import pytest

from autofuse import locks
from autofuse.capture import kept_graphs
from autofuse.runtime import session
from autofuse.runtime.backstage import Backstage
from autofuse.runtime.catalogue import KernelShelf
from autofuse.runtime.plan_limit import PlanLimit


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("make", [locks.make_lock, locks.make_rlock])
def test_a_lock_of_another_thread_is_free_in_a_child(make):
    lock, held, done = make(), threading.Event(), threading.Event()

    def hold():
        with lock:
            held.set()
            done.wait(60.0)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(60.0)
    child = os.fork()
    if child == 0:
        os._exit(0 if lock.acquire(timeout=10.0) else 1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    done.set()
    thread.join()
    assert code == 0, "the child would have waited for ever"
    assert lock.acquire(timeout=10.0), "the parent's own is as it was"
    lock.release()


def test_the_locks_of_a_session_are_such(tmp_path):
    stage = Backstage(tmp_path / "s", None, collect=print, absorb=print, report=print)
    found = [stage._lock, KernelShelf(print)._lock, PlanLimit([])._lock, session._lock, kept_graphs._one_at_a_time]
    assert all(lock in locks._made for lock in found)


def test_captures_of_two_threads_leave_torch_as_it_was(tmp_path):
    """The second begins while the first is at work, and ends after it."""
    from torch._functorch._aot_autograd import autograd_cache

    names = ("CacheArtifactRecorder", "autograd_cache_key")
    before = [getattr(autograd_cache, name) for name in names]
    entered, began = threading.Event(), threading.Event()

    def keeping():
        folder = types.SimpleNamespace(prune=lambda: None)
        found = kept_graphs.Keeping.__new__(kept_graphs.Keeping)
        found.folder = folder
        return found

    def second():
        began.set()
        with keeping().active():
            entered.set()

    thread = threading.Thread(target=second)
    with keeping().active():
        thread.start()
        began.wait(60.0)
        assert not entered.wait(0.2), "one at a time"
    thread.join()
    assert entered.is_set() and [getattr(autograd_cache, name) for name in names] == before
