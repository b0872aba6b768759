"""Runs a script, a module, a folder or a zip file in this process, exactly as ``python`` would.

In: the command line after our own options. Out: how it ended, as an ``Ending``; the caller may still work (write
results, say where they are) before ``Ending.leave()`` ends the process the way ``python`` would have. Guarantee: the
script sees a fresh ``__main__`` and its own ``sys.argv`` and ``sys.path[0]``; uncaught exceptions go to
``sys.excepthook`` without frames of ours; an interrupt kills by SIGINT after the script's ``atexit`` handlers ran.
Every call between the interpreter's start and the script costs it a frame of its recursion limit, so there are few.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib.machinery
import importlib.util
import io
import os
import pkgutil
import runpy
import shlex
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any, NoReturn

from autofuse.errors import UsageError
from autofuse.startup import deferred_imports

_STANDARD = os.path.dirname(os.__file__) + os.sep
_OURS = (os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep, "<autofuse ")  # files, generated Python


@dataclass(frozen=True)
class Target:
    """What to run."""

    name: str  # a path, or a module's name
    arguments: tuple[str, ...] = ()
    is_module: bool = False

    @property
    def command(self) -> str:
        """For people and for the store: as a shell takes it."""
        return shlex.join((*(("-m",) if self.is_module else ()), self.name, *self.arguments))


@dataclass(frozen=True)
class Ending:
    """How a script ended."""

    exit_code: int  # as the shell shows it, 0..255
    interrupted: bool = False  # by an uncaught KeyboardInterrupt
    pid: int = 0  # of the process that ran it: a forked child of the script comes back here as well
    error_is_ours: bool = False  # whether an uncaught exception came out of code of autofuse, or made by it

    @property
    def in_forked_child(self) -> bool:
        return self.pid != os.getpid()

    def leave(self) -> NoReturn:
        """End this process; finalisation, and with it the script's ``atexit`` handlers, is the interpreter's."""
        if self.interrupted:
            # The interpreter finalises and then kills itself by SIGINT, so that a shell loop stops too.
            # The traceback has been printed already.
            sys.excepthook = lambda *_: None
            raise KeyboardInterrupt
        raise SystemExit(self.exit_code)


class _NotFound(UsageError):
    """There is no such module; a class of its own, for the script may raise any other error of autofuse."""


@dataclass(frozen=True)
class _Prepared:
    """Compiled code and the attributes of its ``__main__``."""

    code: CodeType
    attributes: dict[str, Any]
    argv0: str


def check_target(target: Target) -> None:
    """Refuse what is not there, before anything else is done. Of a module only the top package is looked for: looking
    deeper would import it."""
    if target.is_module:
        top = target.name.partition(".")[0]
        places = [os.getcwd(), *sys.path] if not sys.flags.safe_path else sys.path
        if top not in sys.stdlib_module_names and importlib.machinery.PathFinder.find_spec(top, places) is None:
            raise _no_module(target, f"No module named {top!r}")
        return
    path = Path(target.name)
    if not path.exists():
        raise UsageError(
            f"can't open the script {target.name!r}: there is no such file in {Path.cwd()}. "
            f"Type: autofuse run SCRIPT.py [ARGS], or autofuse run -m MODULE [ARGS]"
        )
    if path.is_dir() and not any((path / f"__main__.py{c}").exists() for c in ("", "c")):
        raise UsageError(f"can't run the folder {target.name!r}: expected a file __main__.py in it, found none.")
    if not os.access(path, os.R_OK):
        raise UsageError(f"can't open the script {target.name!r}: permission denied.")


def first_on_path(target: Target) -> str | None:
    """The folder or zip file whose modules the target imports before all others; None in safe-path mode."""
    if target.is_module:
        return None if sys.flags.safe_path else os.getcwd()
    if _is_folder_or_zip(target):
        return _absolute(target.name)
    return None if sys.flags.safe_path else os.path.dirname(os.path.realpath(target.name))


def _is_folder_or_zip(target: Target) -> bool:
    return pkgutil.get_importer(target.name) is not None


def run_target(target: Target) -> Ending:
    """Run it to its end. Raises ``UsageError`` where a module cannot be found."""
    pid = os.getpid()
    main = ModuleType("__main__")
    previous = sys.modules["__main__"]
    sys.modules["__main__"] = main
    try:
        prepared = _prepare(target)
        vars(main).update(prepared.attributes, __annotations__={}, __builtins__=builtins)
        sys.argv = [prepared.argv0, *target.arguments]
        exec(prepared.code, vars(main))
    except _NotFound as error:
        sys.modules["__main__"] = previous
        raise _no_module(target, str(error)) from None
    except SystemExit as error:
        return Ending(_system_exit_code(error), pid=pid)
    except BaseException as error:
        caught = error
    else:
        return Ending(0, pid=pid)
    # Outside of the handler: sys.excepthook runs while no exception is being handled.
    return _report_uncaught(caught, pid)


def _no_module(target: Target, reason: str) -> UsageError:
    return UsageError(f"can't run {target.command!r}: {reason}. Type: autofuse run -m MODULE [ARGS]")


# ---- finding the code -----------------------------------------------------------------------------


def _prepare(target: Target) -> _Prepared:
    first = first_on_path(target)
    if first is not None:
        _set_path(first)
    if target.is_module:
        # python shows "-m" while it imports the parent packages.
        sys.argv = ["-m", *target.arguments]
        return _prepare_module(target.name)
    if _is_folder_or_zip(target):
        sys.argv = [target.name, *target.arguments]
        prepared = _prepare_module("__main__")
        return _Prepared(prepared.code, prepared.attributes, target.name)
    return _prepare_script(target.name)


def _absolute(name: str) -> str:
    """As python does it: ``..`` stays, for it may follow a link."""
    return os.path.join(os.getcwd(), name)


def _prepare_script(name: str) -> _Prepared:
    path = _absolute(name)
    loader: importlib.machinery.SourcelessFileLoader | importlib.machinery.SourceFileLoader
    if path.endswith(".pyc"):
        loader = importlib.machinery.SourcelessFileLoader("__main__", path)
        code = loader.get_code("__main__")
        assert code is not None
    else:
        loader = importlib.machinery.SourceFileLoader("__main__", path)
        # Bytes, so that compile() honours the encoding cookie and a byte order mark.
        with io.FileIO(path) as file:  # closed, because python -W error reports open files
            code = compile(file.readall(), path, "exec", dont_inherit=True)
    attributes = {"__file__": path, "__cached__": None, "__loader__": loader, "__package__": None, "__spec__": None}
    return _Prepared(code, attributes, name)


def _prepare_module(name: str) -> _Prepared:
    """What ``python -m`` does, through the standard library's own function for it (pdb uses it too)."""
    if name == "__main__":
        _, spec, code = runpy._get_main_module_details(_NotFound)  # type: ignore[attr-defined]
    else:
        _, spec, code = runpy._get_module_details(name, _NotFound)  # type: ignore[attr-defined]
    attributes = {
        "__file__": spec.origin,
        "__cached__": spec.cached,
        "__loader__": spec.loader,
        "__package__": spec.parent,
        "__spec__": spec,
    }
    return _Prepared(code, attributes, str(spec.origin))


def _set_path(folder: str) -> None:
    """Give the script its own ``sys.path[0]`` in place of ours, which is not there in safe-path mode."""
    if "autofuse.runtime.session" in sys.modules:
        deferred_imports.import_now_for(folder)
    if sys.flags.safe_path:  # python puts a folder or zip file that it runs on the path even then
        sys.path.insert(0, folder)
    else:
        sys.path[0] = folder
    _forget_shadowed(folder)


def _forget_shadowed(folder: str) -> None:
    """Let a module beside the script win over an installed one of the same name that we have imported already."""
    loaded = {name.partition(".")[0] for name in sys.modules} - sys.stdlib_module_names - {"__main__"}
    for name in loaded:
        with contextlib.suppress(ImportError, ValueError, AttributeError):
            spec = importlib.machinery.PathFinder.find_spec(name, [folder])
            module_spec = sys.modules[name].__spec__
            if spec is None or spec.loader is None or module_spec is None or spec.origin == module_spec.origin:
                continue
            for loaded_name in [n for n in sys.modules if n == name or n.startswith(name + ".")]:
                del sys.modules[loaded_name]


# ---- how it ended -----------------------------------------------------------------------------------


def _system_exit_code(error: SystemExit) -> int:
    """The exit code of ``sys.exit(...)``; a text is printed as ``python`` prints it."""
    code = error.code
    if code is None:
        return 0
    if isinstance(code, int):
        # A C long cut to a byte; where it does not fit, python ends with -1.
        return code & 0xFF if -(1 << 63) <= code < 1 << 63 else 255
    with contextlib.suppress(Exception):
        if sys.stdout is not None:
            sys.stdout.flush()
    with contextlib.suppress(Exception):
        print(code, file=sys.stderr or io.StringIO(), flush=True)
    return 1


def _report_uncaught(error: BaseException, pid: int) -> Ending:
    """Hand an uncaught exception to ``sys.excepthook``, as the interpreter does."""
    frames = _without_our_frames(error.__traceback__)
    if isinstance(error, KeyboardInterrupt):
        _cut_our_end(frames)
    error = error.with_traceback(frames)
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, frames
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    try:
        sys.excepthook(type(error), error, frames)
    except SystemExit as leave:
        return Ending(_system_exit_code(leave), pid=pid)
    except BaseException as failure:
        with contextlib.suppress(Exception):
            print("Error in sys.excepthook:", file=sys.stderr)
            traceback.print_exception(failure.with_traceback(_without_our_frames(failure.__traceback__)))
            print("\nOriginal exception was:", file=sys.stderr)
            traceback.print_exception(error)
    with contextlib.suppress(Exception):
        sys.stderr.flush()
    if isinstance(error, KeyboardInterrupt):
        return Ending(130, interrupted=True, pid=pid)
    return Ending(1, pid=pid, error_is_ours=_ends_in_our_code(frames))


def _cut_our_end(frames: TracebackType | None) -> None:
    """Cut the innermost frames off from the first of ours on, below which is no frame of the script's or of torch."""
    cut, last = None, None
    while frames is not None:
        file = frames.tb_frame.f_code.co_filename
        if file.startswith(_OURS):
            cut = cut or last
        elif not file.startswith(_STANDARD) or "site-packages" in file:
            cut = None
        last, frames = frames, frames.tb_next
    if cut is not None:
        cut.tb_next = None


def _ends_in_our_code(frames: TracebackType | None) -> bool:
    """Whether the innermost frame is one of autofuse, or of Python that it has generated."""
    while frames is not None and frames.tb_next is not None:
        frames = frames.tb_next
    return frames is not None and frames.tb_frame.f_code.co_filename.startswith(_OURS)


def _without_our_frames(frames: TracebackType | None) -> TracebackType | None:
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return frames
