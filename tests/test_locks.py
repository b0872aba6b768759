"""A child of a fork takes the locks that other threads of its parent held."""

import os
import re
import threading
import types
from pathlib import Path

import pytest

from autofuse import locks
from autofuse.capture.kept import graph_cache
from autofuse.observer import module_calls
from autofuse.observer.device_timer import LateTimes
from autofuse.observer.observer import Observer
from autofuse.runtime import session
from autofuse.runtime.graphs.plan_limit import PlanLimit
from autofuse.runtime.graphs.router import GraphRouter
from autofuse.runtime.kernels.catalogue import KernelShelf
from autofuse.runtime.store_thread import StoreThread


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("make", [locks.make_lock, locks.make_rlock, locks.make_condition])
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


LOCKS = (type(threading.Lock()), type(threading.RLock()), threading.Event, threading.Condition)


def test_the_locks_of_a_session_are_such():
    stage = StoreThread(print, True, None, collect=print, absorb=print, report=print)
    router = GraphRouter(types.SimpleNamespace(slots=()), None, "inference", print)
    owners = [stage, router, KernelShelf(print), PlanLimit([]), Observer(), LateTimes(None)]
    for owner in (*owners, session, graph_cache, module_calls):
        found = [value for value in vars(owner).values() if isinstance(value, LOCKS)]
        assert found and all(lock in locks.made for lock in found), owner


def test_nothing_that_runs_in_a_script_has_a_lock_of_another_kind():
    folder = Path(locks.__file__).parent
    # The store frees its own; the daemon and the commands run no code of a script's, which may fork.
    others = ("db", "daemon", "tuner", "cli", "locks.py")
    ours = [p for p in folder.rglob("*.py") if p.relative_to(folder).parts[0] not in others]
    made = [p.name for p in ours if re.search(r"threading\.[A-Z]\w*(?<!Thread)\(", p.read_text())]
    assert len(ours) > 100 and not made


def test_captures_of_two_threads_leave_torch_as_it_was(tmp_path):
    """The second begins while the first is at work, and ends after it."""
    from torch._functorch._aot_autograd import autograd_cache

    names = ("CacheArtifactRecorder", "autograd_cache_key")
    before = [getattr(autograd_cache, name) for name in names]
    entered, began = threading.Event(), threading.Event()

    def keeping():
        return graph_cache.GraphCache(print, types.SimpleNamespace(prune=lambda: None), print)

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
