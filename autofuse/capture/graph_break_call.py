"""Calls past Dynamo of a function that runs ``backward()``: the code before the break, the break, the code after it.

In: a function that Dynamo has compiled in pieces, and a call's arguments. Out: a `DirectCall` that runs the pieces one
after the other, each under its own guards. Guarantee: between two pieces there is only a call of a tensor's
``backward``. At any other break Dynamo may have compiled parts that would be missed. A later piece whose guards do not
hold runs as Python, as where Dynamo gives up.

Why: under Dynamo's frame evaluation all frames of a backward pass are looked at, and each piece is looked up; a step of
200 us in eager (layer norm of 64 by 512) lost 30 us of it to that.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import CodeType, FunctionType
from typing import Any

from torch._dynamo.eval_frame import _debug_get_cache_entry_list

from autofuse.capture.guarded_call import UTILITIES, DirectCall, Unrecorded, plain_call

_AT_BREAKS = {"backward"}
# What Dynamo's code takes from its utilities: marks for a profiler, and the sizes of inputs that vary.
_OF_UTILITIES = {
    "record_pregraph_bytecode_enter", "record_pregraph_bytecode_exit",
    "call_size", "call_stride", "call_storage_offset",
}  # fmt: skip
_PLAIN_ARGUMENTS = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS
_MAX_PIECES = 8  # versions of one piece, for other shapes and flags


def find_parted(function: Callable[..., Any], backend: Any, args: tuple[Any, ...]) -> DirectCall | None:
    """The compiled code of ``function`` for this call; None without such code. ``backend``: its compiler."""
    if not isinstance(function, FunctionType) or not _is_simple(function, len(args)):
        return None
    names = function.__code__.co_varnames[: len(args)]
    for entry in _debug_get_cache_entry_list(function.__code__)[:_MAX_PIECES]:
        manager = entry.guard_manager
        if entry.backend is not backend or not manager.root.check(dict(zip(names, args, strict=True))):
            continue
        piece = _piece(entry.code, function, backend)
        if piece is not None:
            return _direct(function, names, manager, piece)
    return None


def _direct(function: FunctionType, names: Sequence[str], manager: Any, piece: FunctionType) -> DirectCall:
    check, count = manager.root.check, len(names)

    def fits(scope: Mapping[str, Any]) -> bool:
        args = scope["args"]
        if scope["module"] is not function or scope["kwargs"] or len(args) != count:
            return False
        holds: bool = check(dict(zip(names, args, strict=True)))
        return holds

    return DirectCall(manager, fits, lambda _, *args: piece(*args))


def _is_simple(function: FunctionType, count: int) -> bool:
    code = function.__code__
    return (
        code.co_argcount == count
        and not code.co_kwonlyargcount
        and not code.co_flags & _PLAIN_ARGUMENTS
        and not code.co_freevars
        and not code.co_cellvars
    )


def _piece(code: CodeType, function: FunctionType, backend: Any) -> FunctionType | None:
    """Compiled code as a function of its own, None where it does more than run graphs and the next piece."""
    found = function.__globals__
    names: dict[str, Any] = {}
    for name in {i.argval for i in dis.get_instructions(code) if i.opcode in dis.hasname}:
        if name == UTILITIES:
            names[name] = Unrecorded()
        elif name.startswith("__compiled_fn") and name in found:
            names[name] = plain_call(found[name])
        elif name.startswith("__resume_at") and isinstance(found.get(name), FunctionType):
            names[name] = following = _Following(found[name], backend)
            if not following.is_whole:
                return None
        elif name not in _AT_BREAKS and name not in _OF_UTILITIES:
            return None
    return FunctionType(code, names, function.__name__, function.__defaults__, None)


class _Following:
    """The code after a break: compiled where its guards hold, else Python."""

    def __init__(self, function: FunctionType, backend: Any) -> None:
        code = function.__code__
        self._function = function
        self._backend = backend
        self._names = code.co_varnames[: code.co_argcount]
        self._is_simple = _is_simple(function, code.co_argcount)
        self._known: dict[int, tuple[Any, FunctionType]] = {}  # by the identity of the guards
        self._looks_left = _MAX_PIECES
        self.is_whole = self._look()

    def _look(self) -> bool:
        """Read what Dynamo has compiled; return whether all of it consists of pieces, too."""
        self._looks_left -= 1
        for entry in _debug_get_cache_entry_list(self._function.__code__)[:_MAX_PIECES]:
            manager = entry.guard_manager
            if entry.backend is self._backend and id(manager) not in self._known:
                found = _piece(entry.code, self._function, self._backend)
                if found is None:
                    return False
                self._known[id(manager)] = manager, found
        return True

    def _find(self, scope: Mapping[str, Any]) -> FunctionType | None:
        for manager, piece in self._known.values():
            if manager.cache_entry is not None and manager.root.check(scope):
                return piece
        return None

    def __call__(self, *args: Any) -> Any:
        if self._is_simple and len(args) == len(self._names):
            scope = dict(zip(self._names, args, strict=True))
            piece = self._find(scope)
            if piece is None and self._looks_left:
                self._look()
                piece = self._find(scope)
            if piece is not None:
                return piece(*args)
        return self._function(*args)
