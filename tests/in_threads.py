"""Calls of several threads at once, which take turns as often as Python lets them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable


def call_in_threads(call: Callable[[int], None], arguments: Iterable[int]) -> list[Exception]:
    """Call once in a thread for each argument, all at once. Returns what the threads raised."""
    failures: list[Exception] = []

    def run(argument: int) -> None:
        try:
            call(argument)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(argument,)) for argument in arguments]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    return failures
