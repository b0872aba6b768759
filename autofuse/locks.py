"""Locks, events and conditions that a fork leaves free in the child.

In: nothing. Out: objects of `threading`. Guarantee: a lock that another thread held when the process forked is free in
the child, where that thread does not exist. Otherwise a child that goes on with captured modules could wait for ever.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

made: weakref.WeakSet[Any] = weakref.WeakSet()  # all that are still in use


def make_lock() -> threading.Lock:
    lock = threading.Lock()
    made.add(lock)
    return lock


def make_rlock() -> threading.RLock:
    """One that its holder may take again."""
    lock = threading.RLock()
    made.add(lock)
    return lock


def make_event() -> threading.Event:
    event = threading.Event()
    made.add(event)
    return event


def make_condition() -> threading.Condition:
    condition = threading.Condition()
    made.add(condition)
    return condition


def _free_all() -> None:
    for one in list(made):
        one._at_fork_reinit()  # as threading and logging do with theirs


os.register_at_fork(after_in_child=_free_all)
