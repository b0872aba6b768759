"""Keeps Dynamo out of autofuse's own Python, wherever that runs: no frame of ours is ever traced.

In: the code of each module of the package, as it is imported, and generated programs (`define`). Out: each of their
code objects is marked, so that Dynamo's frame evaluation, which sees every frame below a function that torch.compile
runs (backward passes, hooks, code after a graph break), runs it untraced but still handles the functions that it calls.
The mark is torch's own, on the code object in C: it costs nothing where Dynamo is never imported, and holds whether
Dynamo comes before us or after. A trace of the user's code may still inline ours, as any function that it calls; skip
rules by folder (``torch._dynamo.trace_rules``) would break such traces, and take Dynamo's import.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import SOURCE_SUFFIXES, FileFinder, SourceFileLoader
from types import CodeType, FunctionType
from typing import Any

_EVAL_FRAME = "torch._C._dynamo.eval_frame"
_waiting: list[CodeType] = []  # until torch is there


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType | None:
        code = super().get_code(fullname)
        if code is not None:
            mark(code)
        return code


def install(folder: str) -> None:
    """From now on, mark what is imported from the package's folder."""

    def finder(path: str) -> FileFinder:
        if path != folder and not path.startswith((folder + "/", folder + "\\")):
            raise ImportError(path)  # somebody else's
        return FileFinder(path, (_Loader, SOURCE_SUFFIXES))

    sys.path_hooks.insert(0, finder)
    for path in [p for p in sys.path_importer_cache if p.startswith(folder)]:
        del sys.path_importer_cache[path]
    mark(sys._getframe(1).f_code)


def mark(code: CodeType) -> None:
    """Dynamo runs this code, and the functions that it defines, as they are."""
    _waiting.append(code)
    if _EVAL_FRAME in sys.modules:
        _mark_waiting()


def _mark_waiting() -> None:
    try:
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

        strategy = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT)
    except ImportError:  # a torch without this call traces our frames: slower, not wrong
        _waiting.clear()
        return
    while _waiting:
        code = _waiting.pop()
        set_code_exec_strategy(code, strategy)
        _waiting.extend(constant for constant in code.co_consts if isinstance(constant, CodeType))


def mark_all_below(*functions: Callable[..., Any]) -> None:
    """Dynamo runs these functions as they are, and all that they call too, whosever it is."""
    _mark_waiting()  # which knows no better of theirs
    try:
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
    except ImportError:
        return
    for function in functions:
        assert isinstance(function, FunctionType)
        set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))


def define(source: str, name: str, namespace: dict[str, Any]) -> None:
    """Run generated Python, whose functions come into ``namespace``."""
    code = compile(source, f"<autofuse {name}>", "exec")
    mark(code)
    exec(code, namespace)


mark(sys._getframe().f_code)
