"""Exceptions that a script's signal handlers raise while we work, such as a time limit by ``signal.alarm``.

In: a block of our own work on a thread of the script. Out: the block, after which is raised what handlers have raised
during it. Python runs handlers between any two lines of the main thread, Dynamo's and ours too, where an exception
would be taken for a failure of a capture: the script would never learn that its time is up. Guarantee: handlers run at
once; Ctrl-C and ``sys.exit`` end the block at once; the handlers are the script's own when the block ends.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class _Holds:
    """Stands in for a handler; keeps what that raises while ``during()``."""

    def __init__(self, handler: Any, during: Callable[[], object], held: list[Exception]) -> None:
        self.handler = handler
        self._during = during
        self._held = held

    def __call__(self, number: int, frame: Any) -> Any:
        try:
            return self.handler(number, frame)
        except Exception as error:
            if not self._during():
                raise
            self._held.append(error)


@contextmanager
def held_back(during: Callable[[], object] = lambda: True) -> Iterator[None]:
    """Raises what a handler of the script raises in the block at its end, in place of what the block raises.

    ``during()``: whether the code that runs at a moment of it is ours. Of nested blocks the outermost one counts.
    """
    is_main = threading.get_ident() == threading.main_thread().ident
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()} if is_main else {}
    ours: list[Exception] = []
    if not any(isinstance(handler, _Holds) for handler in handlers.values()):
        for number, handler in handlers.items():
            if callable(handler) and handler is not signal.default_int_handler:
                signal.signal(number, _Holds(handler, during, ours))
    try:
        yield
    except Exception:
        if not ours:
            raise
    finally:
        for number, handler in handlers.items():
            held: Any = signal.getsignal(number)
            if isinstance(held, _Holds) and held.handler is handler:  # not one that the script has set meanwhile
                signal.signal(number, handler)
    if ours:
        before = ours[0].__context__
        try:
            raise ours[0]
        finally:
            ours[0].__context__ = before  # and not what the block has raised


def is_of_handler(error: BaseException) -> bool:
    """Whether a handler has raised this in such a block: the script is to get it."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code is _Holds.__call__.__code__:
            return True
        trace = trace.tb_next
    return False
