"""AOTAutograd's graphs, cached in files beside the store: the next run need not trace and differentiate again.

In: an AOTAutograd compilation, and a folder. Out: the same compilation. Where the folder holds an earlier run's graph
for the same Dynamo graph and the same kinds of inputs, that graph is planned and called, and nothing is traced.
Guarantee: a graph is the same where its code, the kinds of all its values and every switch that tracing reads are the
same, and where torch's guards hold for the present sizes. A graph that cannot be stored or read is traced. A kept graph
contains the shape environment of its trace, with all that was proved of its sizes.

Half of a capture is AOTAutograd's: see `docs/decisions/0018-traced-graphs-are-kept-across-runs.md`. Reading a pickle
runs code: files are sealed, and a file that another user may have written is not read (`private_files`).
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import pickle
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._dynamo.utils import GmWrapper
from torch._functorch._aot_autograd import autograd_cache
from torch._functorch._aot_autograd.autograd_cache import (
    AOTAutogradCache,
    AOTAutogradCachePickler,
    BypassAOTAutogradCache,
)
from torch._functorch._aot_autograd.schemas import SerializableAOTDispatchCompiler
from torch._guards import TracingContext
from torch._inductor.output_code import OutputCode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx._graph_pickler import GraphPickler, Options
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from autofuse.capture.corrections.aliased_inputs import written_inputs
from autofuse.capture.graph_import import note_parameters, parameters_of
from autofuse.capture.passes.joint_graph import backward_of, note_backward
from autofuse.capture.passes.repeated_blocks import free_symbols_of
from autofuse.capture.traced import being_traced
from autofuse.locks import make_rlock
from autofuse.private_files import PrivateFolder, Untrusted

log = logging.getLogger(__name__)

Call = Callable[[list[Any]], Any]

_READ = ("val", "desc", "stack_trace")  # what the stages after capture read of a node
_OPTIONS = Options(ops_filter=None, node_metadata_key_filter=lambda key: key in _READ)


@dataclass
class GraphCache:
    """The cache for one call of AOTAutograd: it compiles new graphs, and those that an earlier run has kept.

    ``compile_graph(graph, phase, is_plain)``: ``is_plain`` says whether AOTAutograd's wrapper has nothing to do for an
    inference graph (`is_plain_graph`), None where that is not yet known. Returns the callable, and the answer.
    """

    compile_graph: Callable[[fx.GraphModule, str, bool | None], tuple[Call, bool]]
    folder: PrivateFolder
    report: Callable[[str, str], None]  # ``report(kind, message)``: one line for each kind of trouble
    backward: fx.GraphModule | None = field(default=None, init=False)  # of a forward graph that was read

    def compile(self, graph: fx.GraphModule, phase: str) -> Call:
        """Compile a graph that AOTAutograd has just made."""
        is_apart = self._is_guarded_apart() or (phase != "backward" and written_inputs(graph))
        data = None if is_apart else _written(graph, phase)
        call, is_plain = self.compile_graph(graph, phase, None)
        call.__wrapped__ = CachedGraph(phase, data, is_plain)  # type: ignore[attr-defined]  # where torch looks for it
        return call

    @staticmethod
    def _is_guarded_apart() -> bool:
        """Whether inputs that share a storage are written to: AOTAutograd's guards on that are not stored."""
        context = TracingContext.try_get()
        return context is None or bool(context.guards_context.aotautograd_guards)

    def compiler(self, phase: str) -> Any:
        """As AOTAutograd wants it."""

        def compiler(graph: fx.GraphModule, inputs: Any) -> Any:
            return self.compile(graph, phase)

        return SerializableAOTDispatchCompiler(OutputCode, compiler)

    def compile_kept(self, kept: CachedGraph) -> Call:
        """Compile a graph of an earlier run. Raises what reading it raises."""
        if kept.phase == "backward":
            graph = self.backward
            if graph is None:
                raise BypassAOTAutogradCache("the forward graph came without its backward graph")
        else:
            graph, self.backward = _read(kept.data)
        return self.compile_graph(graph, kept.phase, kept.is_plain)[0]

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """While AOTAutograd compiles, let it look into the folder first and store its graphs there."""
        before = getattr(_active, "keeping", None)
        _active.keeping = self
        try:
            with (
                _one_at_a_time,
                torch._functorch.config.patch(_SETTINGS),
                replaced(autograd_cache, "CacheArtifactRecorder", _NoRecorder),
                replaced(AOTAutogradCache, "_write_to_local_cache", staticmethod(self._write)),
                replaced(AOTAutogradCache, "iterate_over_candidates", classmethod(self._candidates)),
                replaced(autograd_cache, "autograd_cache_key", key_of),
            ):
                yield
        finally:
            _active.keeping = before
            self.folder.prune()

    def _write(self, key: str, content: bytes) -> None:
        """As torch's cache calls it."""
        name = f"{version()}.{key}.{hashlib.sha256(content).hexdigest()[:16]}"
        try:
            self.folder.write(name, content)
            self._note(name)
        except (OSError, Untrusted) as error:
            self.report("graphs_not_kept", f"traced graphs are not kept: {error}")

    def _candidates(self, cls: type, local: bool, remote: Any, key: str) -> Iterator[tuple[Any, bytes, bool]]:
        """As torch's cache calls it: entry, its bytes, whether they came from this machine."""
        for name in self.folder.names():
            if name.startswith(f"{version()}.{key}."):
                try:
                    content = self.folder.read(name)
                    entry = pickle.loads(content)
                except Untrusted as error:
                    self.report("kept_graph_refused", f"a graph of an earlier run is traced anew: {error}")
                except Exception as error:
                    log.debug("a kept graph cannot be read: %s", error)
                else:
                    self._note(name)
                    yield entry, content, True
                    self._note("")  # another one was requested: this does not fit

    @staticmethod
    def _note(name: str) -> None:
        traced = being_traced()
        if traced is not None:
            traced.graphs = name


class CachedGraph(OutputCode):  # type: ignore[misc]
    """A graph as torch's cache stores it: bytes in the file, a callable once it was read."""

    def __init__(self, phase: str, data: bytes | None, is_plain: bool) -> None:
        super().__init__()
        self._boxed_call = True
        self.phase = phase
        self.data = data
        self.is_plain = is_plain
        self._call: Call | None = None

    def __call__(self, inputs: Any) -> Any:
        assert self._call is not None
        return self._call(inputs)

    def prepare_for_serialization(self) -> None:
        if self.data is None:
            raise BypassAOTAutogradCache(f"a {self.phase} graph that cannot be written")

    def post_compile(self, example_inputs: Any, constants: Any, graph_kwargs: Any) -> None:
        keeping = getattr(_active, "keeping", None)
        if keeping is None:
            raise BypassAOTAutogradCache("read outside of a capture")
        self._call = keeping.compile_kept(self)
        self.data = None


@dataclass
class _Reading:
    """Stands for a `GraphCache` where no graph is compiled."""

    compile_kept: Callable[[CachedGraph], Call]


@contextlib.contextmanager
def reading_with(compile_kept: Callable[[CachedGraph], Call]) -> Iterator[None]:
    """While torch rebuilds a kept entry: the function that compiles its graphs."""
    before = getattr(_active, "keeping", None)
    _active.keeping = _Reading(compile_kept)
    try:
        yield
    finally:
        _active.keeping = before


# ---- writing and reading -------------------------------------------------------------------------------------------


def _written(graph: fx.GraphModule, phase: str) -> bytes | None:
    """A graph as bytes, a forward graph with its backward graph; None where it cannot be pickled."""
    counterpart = backward_of(graph) if phase == "forward" else None
    if phase == "backward":
        return b""  # stored with its forward graph, which found the halves of attentions in it
    if phase == "forward" and counterpart is None:
        return None
    if _has_higher_order(graph) or (counterpart is not None and _has_higher_order(counterpart.backward)):
        return None  # tokens of effects, which torch's cache does not put back; graphs within graphs
    backward, results = (counterpart.backward, counterpart.results) if counterpart is not None else (None, 0)
    try:
        with _without_meta(graph, backward):
            found: bytes = GraphPickler.dumps((graph, parameters_of(graph), backward, results), _OPTIONS)
        return found
    except Exception as error:
        log.debug("a %s graph is not kept: %s", phase, error)
        return None


def _has_higher_order(graph: fx.GraphModule) -> bool:
    return any(isinstance(node.target, torch._ops.HigherOrderOperator) for node in graph.graph.nodes)


def _read(data: bytes | None) -> tuple[fx.GraphModule, fx.GraphModule | None]:
    graph, parameters, backward, results = GraphPickler.loads(data, FakeTensorMode(shape_env=ShapeEnv()))
    note_parameters(graph, parameters)
    graph.recompile()
    if backward is not None:
        backward.recompile()
        note_backward(graph, backward, results)
    return graph, backward


@contextlib.contextmanager
def _without_meta(*graphs: fx.GraphModule | None) -> Iterator[None]:
    """Notes on whole graphs refer to much that does not belong to them."""
    present = [graph for graph in graphs if graph is not None]
    before = [graph.meta for graph in present]
    for graph in present:
        graph.meta = {}
    try:
        yield
    finally:
        for graph, meta in zip(present, before, strict=True):
            graph.meta = meta


# ---- torch's cache, for one compilation ------------------------------------------------------------------------------

# The names replaced below are torch's, for all threads: overlapping users would restore them in the wrong order.
_one_at_a_time = make_rlock()
_active = threading.local()
_SETTINGS = {
    "enable_autograd_cache": True,
    "bundled_autograd_cache": True,
    "strict_autograd_cache": False,
    "enable_remote_autograd_cache": False,
    "force_non_lazy_backward_lowering": True,  # both graphs lie in one file
}
# This uses private names of torch. A torch that lacks some of them caches nothing, nor does an older torch, in which
# the names may mean something else (not tried).
IS_SUPPORTED = (
    torch.__version__ >= (2, 13)
    and all(hasattr(torch._functorch.config, name) for name in _SETTINGS)
    and all(
        hasattr(autograd_cache, name)
        for name in ("autograd_cache_key", "check_cacheable", "sanitize_gm_for_cache", "CacheArtifactRecorder")
    )
    and all(hasattr(AOTAutogradCache, name) for name in ("_write_to_local_cache", "iterate_over_candidates"))
)


def key_of(
    module: Any, inputs: Sequence[Any], config: Any, extra: Any = None, act_input_paths: Sequence[Any] = ()
) -> tuple[str, list[str]]:
    """Replaces torch's key, which depends on all settings of Inductor and imports it: 1 s and more.

    Raises where the graph cannot be cached. Unlike torch's key, this one has the fake values of all nodes, which hold
    what Dynamo found in the trace, such as dtypes that follow from a default.
    """
    graph = module.gm if isinstance(module, GmWrapper) else module
    with autograd_cache.sanitize_gm_for_cache(graph):
        autograd_cache.check_cacheable(graph)
        problem = next(filter(None, map(_problem, graph.graph.nodes)), "") or _unguarded(inputs)
        if problem:
            raise BypassAOTAutogradCache(problem)
        values = [(node.op, _kinds(node.meta.get("example_value"))) for node in graph.graph.nodes]
        details = (graph, list(inputs), config, values, _sharing(inputs), switches(), *act_input_paths)
        return f"autofuse-{AOTAutogradCachePickler(graph).get_hash(details)}", []


def _problem(node: fx.Node) -> str:
    """Why a node may be compiled otherwise though its graph is the same; "" where it cannot."""
    if node.op == "call_module":
        return "a module that is called as a whole"
    if isinstance(node.meta.get("example_value"), torch.SymFloat):
        return "a number of the script's: what was computed from it may be a constant of the graph, which guards tell"
    target = node.target
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"{target}: checkpoints, branches, autograd functions and kernels of the script's own"
    if isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        is_own = str(target).partition(".")[0] not in _OPERATORS
        return f"{target}: an operator whose gradient the script may define" if is_own else ""
    if callable(target) and (getattr(target, "__module__", None) or "torch").partition(".")[0] not in _FUNCTIONS:
        return f"{target}: a function of the script's own"
    return ""


_OPERATORS = ("aten", "prims", "prim")
_FUNCTIONS = ("torch", "_operator", "operator", "math", "builtins", "einops")


def _unguarded(inputs: Sequence[Any]) -> str:
    """Symbolic sizes that are not inputs themselves: the cache's guards cannot mention them."""
    plain = {t.node.expr for t in inputs if isinstance(t, torch.SymInt)}
    unknown = {symbol for t in inputs for symbol in free_symbols_of(t)} - plain
    return f"sizes that are no inputs: {unknown}" if unknown else ""


def _sharing(inputs: Sequence[Any]) -> tuple[int, ...]:
    """Inputs that share a storage: for each input the index of the first one in its storage."""
    plain = [t for t in inputs if isinstance(t, torch.Tensor) and t.layout is torch.strided]
    storages = [t.untyped_storage()._cdata for t in plain]
    return tuple(map(storages.index, storages))


def _kinds(value: Any) -> Any:
    """Shape, strides, dtype and so on of fake tensors; sizes as they are written, which guards tell apart."""
    if isinstance(value, torch.Tensor):
        kind = (str(value.layout), str(value.dtype), str(value.device), value.requires_grad)
        is_plain = value.layout is torch.strided
        return (*kind, str(tuple(value.shape)), str(tuple(value.stride())) if is_plain else "")
    if isinstance(value, list | tuple):
        return tuple(map(_kinds, value))
    return str(value) if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) else repr(type(value))


def switches() -> dict[str, str]:
    """Global switches by which AOTAutograd's trace may choose operators, by name."""
    devices = torch._C._autocast_supported_devices()
    einsum, cuda = torch.backends.opt_einsum, torch.backends.cuda
    found = {
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "autocast": [(d, str(torch.get_autocast_dtype(d))) for d in devices if torch.is_autocast_enabled(d)],
        "autocast's cache": torch.is_autocast_cache_enabled(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "torch.backends": (torch.backends.mkldnn.enabled, torch.backends.cudnn.enabled),
        "scaled dot product attention": (
            cuda.flash_sdp_enabled(),
            cuda.mem_efficient_sdp_enabled(),
            cuda.math_sdp_enabled(),
            cuda.cudnn_sdp_enabled(),
            cuda.fp16_bf16_reduction_math_sdp_allowed(),
            torch._C._get_sdp_priority_order(),
        ),
        "opt_einsum": (einsum.is_available(), einsum.enabled, einsum.strategy),
        "the processor": torch.backends.cpu.get_cpu_capability(),
        "the GPU": torch.cuda.is_available() and torch.cuda.get_device_name(),
        "torch._functorch.config": torch._functorch.config.save_config(),
        "torch, Python or autofuse.capture": version(),
    }
    return {name: str(value) for name, value in found.items()}


class _NoRecorder:
    """Keeps entries out of torch's in-memory cache, and out of the artifacts that a script may save."""

    def __init__(self, kind: str, key: str) -> None:
        pass

    def record(self, content: Any) -> None:
        pass

    record_if_present = record


_ABSENT = object()


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = vars(owner).get(name, _ABSENT)  # absent where it is inherited
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


@cache
def version() -> str:
    """The version of all code that shapes a graph."""
    digest = hashlib.sha256(f"{torch.__version__} {torch.version.git_version} {sys.version}".encode())
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
