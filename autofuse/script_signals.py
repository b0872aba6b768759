"""Exceptions that a script's signal handlers raise while we work, such as a time limit by ``signal.alarm``.

In: a block of our own work on a thread of the script. Out: the block, after which is raised what handlers have raised
during it. Python runs handlers between any two lines of the main thread, Dynamo's and ours too, where an exception
would be taken for a failure of a capture: the script would never learn that its time is up. Guarantee: handlers run at
once; Ctrl-C and ``sys.exit`` end the block at once; the handlers are the script's own when the block ends.
"""

from __future__ import annotations

import importlib
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# Of the main thread, where alone Python runs handlers.
_blocks: list[Callable[[], object]] = []  # those that are going on: whether what runs in one now is ours
_held: list[Exception] = []

_NUMBERS = range(1, signal.NSIG)
# The functions of C below `signal`, which turns numbers into names: 0.1 us in place of 1.4, for each of 64.
_handler_of: Callable[[int], Any] = importlib.import_module("_signal").getsignal


class _Holds:
    """Stands in for a handler of the script while a block goes on."""

    def __init__(self, handler: Any) -> None:
        self.handler = handler

    def __call__(self, number: int, frame: Any) -> Any:
        try:
            return self.handler(number, frame)
        except Exception as error:
            if not _is_ours(_blocks):
                raise
            _held.append(error)


@contextmanager
def held_back(during: Callable[[], object] = lambda: True) -> Iterator[None]:
    """Raises what a handler of the script raises in the block at its end, in place of what the block raises.

    ``during()``: whether the code that runs at a moment of it is ours. Inside of another block of ours it is raised at
    the end of that one.
    """
    if threading.get_ident() != threading.main_thread().ident:
        yield
        return
    if not _blocks:
        _stand_in()
    around = [*_blocks]
    _blocks.append(during)
    try:
        yield
    except Exception:
        if not _held or _is_ours(around):
            raise
    finally:
        _blocks[:] = around
        if not around:
            _step_back()
    if _held and not _is_ours(around):
        error, before = _held[0], _held[0].__context__
        _held.clear()
        try:
            raise error
        finally:
            error.__context__ = before  # and not what the block has raised


def _is_ours(blocks: list[Callable[[], object]]) -> bool:
    return any(during() for during in blocks)


def _stand_in() -> None:
    for number in _NUMBERS:
        handler = _handler_of(number)
        if callable(handler) and handler is not signal.default_int_handler:
            signal.signal(number, _Holds(handler))


def _step_back() -> None:
    for number in _NUMBERS:
        held: Any = _handler_of(number)
        if isinstance(held, _Holds):  # not one that the script has set meanwhile
            signal.signal(number, held.handler)


def is_of_handler(error: BaseException) -> bool:
    """Whether a handler of the script has raised this, in such a block or beside one: the script is to get it."""
    codes = {_Holds.__call__.__code__, *_codes_of_handlers()}
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in codes:
            return True
        trace = trace.tb_next
    return False


def _codes_of_handlers() -> Iterator[Any]:
    for number in _NUMBERS:
        handler: Any = _handler_of(number)
        if callable(handler):
            function = getattr(handler, "__func__", handler)
            yield getattr(function, "__code__", None) or getattr(_call_of(function), "__code__", None)


def _call_of(handler: object) -> Any:
    return vars(type(handler)).get("__call__")
