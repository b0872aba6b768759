"""Dynamo's traces, cached in files beside AOTAutograd's graphs: the next run of a script starts with its fused graphs.

In: a root that is traced, and its planned graphs. Out: a file. In a later run, a call that the trace fits gets the same
code under guards of that process. Guarantee: a trace is used only where its guards, built anew on the objects that are
there (`guard_record`), have the text that they had in the trace and hold for the call, where all code that Dynamo
inlined is still in its place (`fingerprints`), and where torch, Python, autofuse and every switch are the same.
Otherwise the root is traced again. Not cached: code with a graph break, pieces of equal blocks (`repeated_blocks`),
graphs of a GPU.
"""

from __future__ import annotations

import hashlib
import logging
import marshal
import pickle
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, Protocol

import torch
from torch._dynamo import convert_frame
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.guards import CheckFunctionManager
from torch._guards import Guard, TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from autofuse.capture.corrections.aliased_inputs import unseen
from autofuse.capture.corrections.double_backward import Alone, CachedReplay, replayed
from autofuse.capture.guarded_call import (
    UTILITIES,
    DirectCall,
    Unrecorded,
    hold,
    note_plain_graph,
    note_plain_training,
    plain_call,
)
from autofuse.capture.kept.fingerprints import Place, Reference, Unknown, classes_text, find_places, refer_to
from autofuse.capture.kept.graph_cache import CachedGraph, Call, reading_with, replaced, switches
from autofuse.capture.kept.guard_record import Ambient, Built, GuardRecord, Listening, build_guards, note_guards
from autofuse.capture.traced import OF_THE_LOSS, Traced, noted_in, trace_prefix
from autofuse.private_files import PrivateFolder, Untrusted

log = logging.getLogger(__name__)

MOST_TRACES = 8  # of a root, the newest
_SUFFIX = ".trace"


@dataclass(frozen=True)
class CachedTrace:
    """One trace in its stored form."""

    dims: tuple[tuple[str, int], ...]  # marked as varying while it was traced
    places: tuple[Place, ...]  # of all code that Dynamo inlined
    classes: str  # the code of all that guards look at
    packages: tuple[tuple[str, str], ...]  # that it belongs to, with their versions
    guards: GuardRecord
    lines: bytes  # their tree, compressed
    ties: tuple[int, ...]
    code: bytes  # Dynamo's, marshalled, without
    constants: tuple[tuple[int, Any], ...]  # those of its constants that are values of torch, or have a `Reference`
    call: str  # the graph's name in it
    others: tuple[tuple[str, Reference], ...]  # what else it reads, by the names it has for them
    graphs: str  # the file of AOTAutograd's graphs
    plans: bytes  # of these, as the planner wrote them
    replay: CachedReplay  # Dynamo's graph, for gradients of gradients
    statistics: tuple[int, ...]  # of norms, among its inputs, that it writes to


@dataclass
class _Noted(Traced):
    """With Dynamo's guards."""

    manager: Any = None
    record: GuardRecord | None = None
    built: Built | None = None
    places: tuple[Place, ...] = ()
    classes: str = ""


class Plans(Protocol):
    """The planner's part: stores planned graphs and reads them."""

    def switches(self) -> dict[str, str]:
        """All settings that a plan depends on besides its graph, by name."""

    def to_bytes(self, plans: Mapping[str, Any]) -> bytes:
        """The planned graphs by phase, as bytes. Raises where they cannot be stored."""

    def from_bytes(self, data: bytes) -> Callable[[str], Call]:
        """A routed call for each phase."""


_OF_A_CALL = {"gradients", "autocast", "autocast's cache"}  # switches that differ between calls of one run


class _OtherState(Exception):
    """A trace for calls in another state, such as evaluation mode."""


class TraceCache:
    """The kept traces of one root.

    ``report(kind, message)`` says a line.
    """

    def __init__(
        self,
        root: str,
        function: FunctionType,
        folder: PrivateFolder,
        report: Callable[[str, str], None],
        plans: Plans,
    ) -> None:
        self._function = function
        self._folder = folder
        self._report = report
        self._plans = plans
        self._prefix = trace_prefix(root)
        self._files: list[str] | None = None  # newest first; listed on first use
        self._kept: dict[str, CachedTrace] = {}  # those read, by file
        self._refused: dict[str, str] = {}  # why, by file
        self.used = 0

    # ---- writing ------------------------------------------------------------------------------------------------

    @contextmanager
    def watching(self, dims: Sequence[tuple[str, int]]) -> Iterator[None]:
        """Wrap a call that may trace the root; store its traces afterwards."""
        traced = _Noted()

        def listen(manager: CheckFunctionManager, code: CodeType, guards: list[Guard], output: Any) -> None:
            if code is self._function.__code__ and traced.manager is None:
                traced.manager = manager.guard_manager
                self._note(traced, manager, guards, output)
            else:
                traced.spoil("a graph break, or more than one trace at once")

        listening: type[Listening] = type("Listening", (Listening,), {"listener": staticmethod(listen)})
        try:
            with noted_in(traced), replaced(convert_frame, "CheckFunctionManager", listening):
                yield
        finally:
            listening.listener = None  # Dynamo keeps its guards' manager, which would keep the script's classes
        if traced.manager is not None:
            try:
                self._write(traced, tuple(dims))
            except (OSError, Untrusted) as error:
                self._report("graphs_not_kept", f"traced graphs are not kept: {error}")
            except Exception as error:
                log.info("a trace is not kept: %s: %s", type(error).__name__, error)

    def _note(self, traced: _Noted, manager: CheckFunctionManager, guards: list[Guard], output: Any) -> None:
        """Record the guards right after Dynamo has built them, while all objects are as it saw them."""
        if traced.problem:
            return
        try:
            traced.record = pickle.loads(pickle.dumps(note_guards(manager, guards, output)))
            scope = dict(output.local_scope)
            traced.built = build_guards(traced.record, self._function.__code__, scope, Ambient.of_trace(output))
            if not hold(traced.built.manager.root.check, scope):
                raise Unknown("guards that do not hold once they are built anew")
            traced.places = tuple(find_places(output.tracing_context.traced_code, traced.built.types))
            traced.classes = classes_text((*traced.built.types, torch.nn.Parameter))
        except Exception as error:
            traced.spoil(f"{type(error).__name__}: {error}")

    def _write(self, traced: _Noted, dims: tuple[tuple[str, int], ...]) -> None:
        if traced.problem:
            raise Unknown(traced.problem)
        assert traced.record is not None and traced.built is not None
        if traced.replay is None or not traced.plans or not traced.graphs:
            raise Unknown("a graph that is not kept, or has no plan")
        entries = _debug_get_cache_entry_list(self._function.__code__)
        (code,) = [entry.code for entry in entries if entry.guard_manager is traced.manager]
        graphs = [name for name in code.co_names if name.startswith("__compiled_fn")]
        present = self._function.__globals__
        others = {n for n in code.co_names if n in present} - {*traced.built.names, *graphs}
        if len(graphs) != 1:
            raise Unknown("code with several graphs")
        text = "\n".join(traced.built.lines)
        if " at 0x" in text:
            raise Unknown("guards on a text with an address")
        kept = CachedTrace(
            dims,
            traced.places,
            traced.classes,
            _packages(traced.places),
            traced.record,
            zlib.compress(text.encode(), 1),
            traced.built.ties,
            *_code_apart(code),
            graphs[0],
            tuple((name, refer_to(present[name])) for name in sorted(others)),
            traced.graphs,
            self._plans.to_bytes(traced.plans),
            traced.replay.kept(),
            traced.statistics,
        )
        data = pickle.dumps((self._switches(), kept))
        name = f"{self._prefix}{hashlib.sha256(data).hexdigest()[:16]}{_SUFFIX}"
        self._folder.write(name, data)
        self._folder.prune()

    def _switches(self) -> dict[str, str]:
        return switches() | _dynamo_settings() | self._plans.switches()

    # ---- reading ------------------------------------------------------------------------------------------------

    def _names(self) -> list[str]:
        """Files of this root, newest first."""
        if self._files is None:
            found = self._folder.newest()
            own = [name for name in found if name.startswith(self._prefix) and name.endswith(_SUFFIX)]
            self._files = own[:MOST_TRACES]
        return self._files

    def find(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Mapping[str, Any]
    ) -> DirectCall | None:
        """The code of an earlier run for this call; None where none fits. ``tensors``: the call's tensors, by path."""
        scope = {"module": module, "args": args, "kwargs": kwargs}
        for name in self._names():
            if name in self._refused:
                continue
            try:
                kept = self._read(name)
                found = self._fit(kept, scope, tensors)
                if isinstance(found, str):
                    if found:
                        self._refuse(name, found)
                    continue
                direct = self._install(kept, found)
            except _OtherState:
                continue
            except FileNotFoundError:
                self._refused[name] = "gone"
            except Exception as error:
                self._refuse(
                    name, f"{type(error).__name__}: {error}" if not isinstance(error, Untrusted) else str(error)
                )
            else:
                self._refused[name] = "in use"
                self.used += 1
                return direct
        return None

    def _refuse(self, name: str, why: str) -> None:
        self._refused[name] = why
        log.info("kept trace %s: %s", name, why)
        self._report("kept_trace_refused", f"a trace of an earlier run is made anew: {why}")

    def _read(self, name: str) -> CachedTrace:
        found = self._kept.get(name)
        if found is None:
            written, found = pickle.loads(self._folder.read(name))
            present = self._switches()
            changed = [name for name in {**written, **present} if written.get(name) != present.get(name)]
            if {*changed} <= _OF_A_CALL and changed:
                raise _OtherState
            if changed:
                raise Untrusted(f"changed since: {', '.join(changed[:4])}")
            for place in found.places:
                if not place.holds():
                    what = ".".join(str(which) for kind, which in place.steps if kind == "attr")
                    raise Untrusted(f"the code of {place.module}.{what.removesuffix('.__code__')} has changed since")
            for package, version in found.packages:
                if _version(package) != version:
                    raise Untrusted(f"{package} was {version} then")
            self._kept[name] = found
        return found

    def _fit(self, kept: CachedTrace, scope: dict[str, Any], tensors: Mapping[str, Any]) -> Built | str:
        """The guards for this call, or why there are none; "" where the trace may fit another call."""
        with _marked(tensors, kept.dims):
            try:
                built = build_guards(kept.guards, self._function.__code__, scope, Ambient.of_now())
            except Exception as error:  # an object that guards read is missing
                log.info("a kept trace does not fit this call: %s: %s", type(error).__name__, error)
                return ""
        expected = zlib.decompress(kept.lines).decode().split("\n")
        if list(built.lines) != expected:
            log.info("a kept trace does not fit this call: %s", _first_difference(expected, built.lines))
            return ""
        if classes_text((*built.types, torch.nn.Parameter)) != kept.classes:
            return "a method of one of its classes, or of their bases, has changed since"
        if built.ties != kept.ties:
            log.info("a kept trace does not fit this call: other tensors are the same or share memory")
            return ""
        if not hold(built.manager.root.check, scope):
            log.info("a kept trace does not fit this call: its sizes are others")
            return ""
        return built

    def _install(self, kept: CachedTrace, built: Built) -> DirectCall:
        """Make the code a function under its guards. Raises what reading graphs raises."""
        entry = pickle.loads(self._folder.read(kept.graphs))
        entry.guards_expr = None  # Dynamo's guards hold them
        plain: list[Call] = []
        route = self._plans.from_bytes(kept.plans)

        def compile_kept(graph: CachedGraph) -> Call:
            call = route(graph.phase)
            if graph.is_plain:
                plain.append(call)
            return call

        context = TracingContext(FakeTensorMode(shape_env=ShapeEnv()))
        with (
            torch._functorch.config.patch(donated_buffer=False),
            tracing(context),
            replayed(kept.replay) as replay,
            reading_with(compile_kept),
        ):
            whole = entry.wrap_post_compile([], entry.sanitized_aot_config, {})

        def compiled(*args: Any) -> Any:
            return whole(list(args))

        if len(plain) == 1:
            note_plain_graph(compiled, plain[0])
        if replay is not None and replay.apply is not None:
            note_plain_training(compiled, replay.apply, replay.inputs)
        if replay is not None and kept.replay.alone is not None:
            replay.alone = Alone(kept.replay.alone, route(OF_THE_LOSS))
        around = plain_call(compiled) if replay is None else replay.around(plain_call(compiled))
        names = dict(built.names) | {name: reference.find() for name, reference in kept.others}
        names[kept.call] = unseen(around, kept.statistics)
        if UTILITIES in names:
            names[UTILITIES] = Unrecorded()
        code: CodeType = marshal.loads(kept.code)
        constants = list(code.co_consts)
        for index, reference in kept.constants:
            constants[index] = reference.find() if isinstance(reference, Reference) else reference
        run = FunctionType(code.replace(co_consts=tuple(constants)), names, self._function.__name__)
        return DirectCall(built.manager, built.manager.root.check, run)


_VALUES = (torch.device, torch.dtype, torch.layout, torch.memory_format, torch.Size)


def _code_apart(code: CodeType) -> tuple[bytes, tuple[tuple[int, Any], ...]]:
    """Code as bytes, and those of its constants that are not plain values. Raises Unknown, or marshal's ValueError."""
    constants = list(code.co_consts)
    apart: list[tuple[int, Any]] = []
    for index, value in enumerate(constants):
        if isinstance(value, type | FunctionType | BuiltinFunctionType | ModuleType):
            constants[index] = None
            apart.append((index, refer_to(value)))
        elif isinstance(value, _VALUES):
            constants[index] = None
            apart.append((index, value))
    try:
        return marshal.dumps(code.replace(co_consts=tuple(constants))), tuple(apart)
    except ValueError as error:
        raise Unknown(f"code with the constants {constants}") from error


_NOT_OF_TRACES = ("debug_dir_root",)  # Dynamo's settings that depend on the current folder; no trace depends on them


def _dynamo_settings() -> dict[str, str]:
    """All of Dynamo's settings; functions among them by their names."""
    found = torch._dynamo.config.get_config_copy()
    for name in _NOT_OF_TRACES:
        found.pop(name, None)
    ignored = found.pop("ignore_logging_functions", ())
    names = sorted(f"{f.__module__}.{f.__qualname__}" for f in ignored)
    texts = {name: repr(sorted(map(repr, v)) if isinstance(v, set | frozenset) else v) for name, v in found.items()}
    return {f"torch._dynamo.config.{name}": text for name, text in texts.items()} | {
        "torch._dynamo.config.ignore_logging_functions": repr(names)
    }


def _packages(places: Sequence[Place]) -> tuple[tuple[str, str], ...]:
    names = {place.module.partition(".")[0] for place in places}
    return tuple((name, _version(name)) for name in sorted(names))


def _version(package: str) -> str:
    return str(getattr(sys.modules.get(package), "__version__", ""))


def _first_difference(expected: Sequence[str], found: Sequence[str]) -> str:
    for one, other in zip(expected, found, strict=False):
        if one != other:
            return f"expected {one.strip(' |+-')!r}, found {other.strip(' |+-')!r}"
    return f"expected {len(expected)} lines of guards, found {len(found)}"


_MARK = "_dynamo_weak_dynamic_indices"


@contextmanager
def _marked(tensors: Mapping[str, Any], dims: Sequence[tuple[str, int]]) -> Iterator[None]:
    """Mark tensors as varying as they were for the trace, and restore their marks afterwards."""
    before = {path: vars(tensor).get(_MARK) for path, tensor in tensors.items()}
    for tensor in tensors.values():
        vars(tensor).pop(_MARK, None)
    for path, dim in dims:
        tensor = tensors.get(path)
        if tensor is not None and dim < tensor.dim() and tensor.shape[dim] > 1:
            torch._dynamo.maybe_mark_dynamic(tensor, dim)
    try:
        yield
    finally:
        for path, tensor in tensors.items():
            vars(tensor).pop(_MARK, None)
            if before[path] is not None:
                setattr(tensor, _MARK, before[path])
