"""What a captured root needs of Dynamo: its function in three forms, settings for traces, its exceptions.

In: a module's call. Out: its captured call, from a trace of this run or of an earlier one. Importing this module
imports Dynamo: 1 s unless an optimizer has imported it (torch 2.13). A script without a capture never imports it. What
only a trace needs is in `backend`, which is imported with the first trace.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import linecache
import logging
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch._dynamo
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.mutation_guard import install_generation_tagging_init
from torch._guards import CompileContext, TracingContext
from torch._subclasses.fake_tensor import FakeTensorMode

from autofuse.capture.corrections import dynamo_gaps as dynamo_gaps
from autofuse.capture.corrections.class_guards import guard_classes
from autofuse.capture.corrections.conv_guards import without_batch_guards
from autofuse.capture.corrections.cuda_guard import keep_cuda_guard
from autofuse.capture.corrections.dynamo_patches import not_of_our_traces
from autofuse.capture.corrections.suppressed_errors import suppressed_behind_breaks as suppressed_behind_breaks
from autofuse.capture.corrections.suppressed_errors import suppressed_errors as suppressed_errors
from autofuse.capture.graph_break_call import find_parted
from autofuse.capture.guarded_call import DirectCalls
from autofuse.capture.traced import ROOT_FILE, Keeper, TracedElsewhere
from autofuse.preserve_rng import untouched
from autofuse.script_signals import held_back
from autofuse.startup import gc_pause
from autofuse.warning_filters import unchanged

if TYPE_CHECKING:
    from autofuse.capture.kept.trace_cache import Plans, TraceCache

log = logging.getLogger(__name__)

_read: Counter[str] = Counter()


def note_read(what: str = "trace") -> None:
    """Count a whole trace of an earlier run, or the graph of one phase, as read."""
    _read[what] += 1


def graphs_read() -> int:
    """Graphs of this process that an earlier run had kept."""
    return _read.total()


def graph_breaks() -> Counter[str]:
    """How often what, in a line, has broken a graph so far in this process."""
    found = Counter[str]()
    for message, times in torch._dynamo.utils.counters["unimplemented"].items():
        parts = message.split(_ANOTHER_BREAK)
        found["; ".join(part.strip().partition("\n")[0] for part in parts)] += times
    return found


def why_no_graph(target: Any, before: Counter[str]) -> str:
    """What broke the graphs of a call of a module or function in which no graph ran, "" where nothing is known.

    ``before``: all graph breaks before the call. Dynamo skips code that it could not trace without a word from then on.
    """
    function = type(target).forward if isinstance(target, torch.nn.Module) else target
    code = getattr(function, "__code__", None)
    found = [text for text in graph_breaks() - before if not text.startswith(_OUR_REFUSAL)]
    if code is None:  # of an object that can be called: nothing is known of its earlier calls
        return found[-1] if found else ""
    if found:
        _broken[code] = found[-1]
    return _broken.get(code, "")


# What Dynamo raises when it cannot capture; all other exceptions are the script's own.
CAPTURE_ERRORS = (TorchDynamoException,)

_broken: dict[Any, str] = {}  # by code
_OUR_REFUSAL = "Backend compiler exception"  # of a graph that was traced; another call's may be taken
_ANOTHER_BREAK = "*** While handling this graph break, another graph break occurred: ***"

# Said once in a process, mostly before a module is captured (transformers).
_SAID_ONCE = tuple(getattr(logging.Logger, name) for name in ("warning_once",) if hasattr(logging.Logger, name))
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class _Silent(set[Any]):
    """Functions that Dynamo leaves out of a trace, such as a logger's methods for levels that are off.

    A line that the logger does write is one graph break per call.
    """

    def __contains__(self, function: object) -> bool:
        logger = getattr(function, "__self__", None)
        if isinstance(logger, logging.Logger):
            level = _LEVELS.get(getattr(function, "__name__", ""))
            if level is not None and not logger.isEnabledFor(level):
                return True
        return super().__contains__(function)


class CapturedRoot(NamedTuple):
    """A root's function ``call(module, *args, **kwargs)`` in its three forms."""

    trace: Callable[..., Any]  # traces what is new
    settled: Callable[..., Any]  # runs what is traced, else the module as it is
    direct: DirectCalls  # calls traced code past Dynamo
    traces: TraceCache | None  # traces of earlier runs; None without a trace cache


def compile_root(
    name: str, backend: Callable[..., Any], key: str = "", keeper: Keeper | None = None, plans: Plans | None = None
) -> CapturedRoot:
    """A function of its own for each root: Dynamo's recompile limit counts per code object.

    ``key``: the root's key, the same in every run. The function also gives modules whose forward is torch's own a frame
    that Dynamo does not skip.
    """
    # Dynamo's first trace wraps Module.__init__; do so before classes are recorded or compared.
    install_generation_tagging_init()
    keep_cuda_guard()
    guard_classes()
    namespace: dict[str, Any] = {}
    exec(compile(_CALL_ROOT, f"{ROOT_FILE} {name}>", "exec"), namespace)
    call_root = namespace["call_root"]
    traces = _traces(key, call_root, keeper, plans) if keeper is not None and plans is not None else None

    @functools.cache
    def compiled() -> Callable[..., Any]:
        # It imports functorch and networkx: 0.1 s that a run on kept traces never pays.
        with untouched(), _as_from_a_file(call_root):
            made: Callable[..., Any] = torch.compile(call_root, backend=backend)
            return made

    def trace(*args: Any, **kwargs: Any) -> Any:
        if not _has_arrays(
            args, kwargs
        ):  # numpy functions of plain numbers, such as `np.sqrt(width)`, may become torch's
            return _unless_traced_elsewhere(compiled(), args, kwargs)
        with torch._dynamo.config.patch(trace_numpy=False):  # results of numpy arrays stay numpy arrays
            return _unless_traced_elsewhere(compiled(), args, kwargs)

    with _as_from_a_file(call_root):
        run = torch._dynamo.run(call_root)

    def settled(*args: Any, **kwargs: Any) -> Any:
        try:
            return _unless_traced_elsewhere(run, args, kwargs)
        except TracedElsewhere:
            return call_root(*args, **kwargs)

    return CapturedRoot(trace, settled, DirectCalls(call_root, find_parted), traces)


def _unless_traced_elsewhere(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function of Dynamo's. Raises TracedElsewhere where it has refused to begin.

    torch.fx marks its traces for the whole process, AOTAutograd's among them, and Dynamo's functions refuse to run
    then: they cannot tell a trace of this thread, in which no call of ours gets here, from one of another thread.
    """
    try:
        return function(*args, **kwargs)
    except RuntimeError as error:
        trace = error.__traceback__
        own = trace.tb_next if trace is not None else None
        has_begun = own is None or own.tb_next is not None or own.tb_frame.f_code is not function.__code__
        if has_begun or _REFUSAL not in str(error):
            raise
        del trace, own
        raise TracedElsewhere(str(error)) from None


_REFUSAL = "you are using FX to symbolically trace"


_CALL_ROOT = "def call_root(module, /, *args, **kwargs):\n    return module(*args, **kwargs)\n"


@contextlib.contextmanager
def _as_from_a_file(function: Any) -> Iterator[None]:
    """Meanwhile `inspect` finds the source of a root's function.

    Torch 2.11 calls a function without a source through one of its own, whose code all of them would share: its limit
    of recompilations, too (https://github.com/pytorch/pytorch/issues/124269).
    """
    name = function.__code__.co_filename
    linecache.cache[name] = (len(_CALL_ROOT), None, _CALL_ROOT.splitlines(keepends=True), name)
    try:
        yield
    finally:
        linecache.cache.pop(name, None)


def _has_arrays(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether arguments are arrays of numpy's, or lists, tuples and dicts of them."""
    numpy: Any = sys.modules.get("numpy")
    array = getattr(numpy, "ndarray", None)
    if array is None:
        return False
    for value in (*args, *kwargs.values()):
        inside = dict.values(value) if isinstance(value, dict) else value if type(value) in (list, tuple) else (value,)
        if any(isinstance(item, array) for item in inside):
            return True
    return False


def reset_root(root: CapturedRoot) -> None:
    """Drop all traces, with the guards that hold weak references to parameters and code."""
    torch._dynamo.eval_frame.reset_code(root.direct.function.__code__)
    root.direct.forget()


def let_tensors_go() -> None:
    """After `reset_root`: drop the weak references to parameters that torch keeps as long as a graph's fake tensors."""
    gc.collect()
    for context in list(_contexts):
        context.tensor_to_context.clear()
    for mode in list(_modes):
        converter = mode.fake_tensor_converter.meta_converter
        converter.tensor_memo.clear()
        converter.describer.lookup_tensor.clear()


# Of traces of roots; a script may have some of its own.
_contexts: weakref.WeakSet[TracingContext] = weakref.WeakSet()
_modes: weakref.WeakSet[FakeTensorMode] = weakref.WeakSet()


def note_trace(module: torch.fx.GraphModule) -> None:
    """Called by the backend while a root is traced: the backend runs in another mode than Dynamo."""
    context = TracingContext.try_get()
    if context is not None:
        _contexts.add(context)
    values = [node.meta.get("example_value") for node in module.graph.nodes]
    found = [context and context.fake_mode, *(getattr(value, "fake_mode", None) for value in values)]
    _modes.update(mode for mode in found if mode is not None)


def _traces(key: str, function: Any, keeper: Keeper, plans: Plans) -> TraceCache | None:
    """The trace cache; like `_keeping`, it needs parts of torch, and of Dynamo, that other versions may lack."""
    try:
        with untouched():
            from autofuse.capture.kept.graph_cache import IS_SUPPORTED
            from autofuse.capture.kept.trace_cache import TraceCache
    except ImportError as error:
        log.debug("traces are not kept with this torch: %s", error)
        return None
    return TraceCache(key, function, keeper.folder, keeper.report, plans) if IS_SUPPORTED else None


@contextlib.contextmanager
def capture_settings(recompile_limit: int) -> Iterator[None]:
    """Dynamo's settings while a root of ours may be traced; the user's own are untouched outside.

    The garbage collector is off meanwhile: in a process with many imports it takes a tenth of a trace.
    """
    config = torch._dynamo.config
    ignored = _Silent({*config.ignore_logging_functions, *_SAID_ONCE})
    # Hooks that come or go after capture: eager would see them. 0.13 us a module of each call.
    hooks = {"skip_nnmodule_hook_guards": False} if hasattr(config, "skip_nnmodule_hook_guards") else {}
    # For a forward with numpy's random numbers, Dynamo would use torch's generator instead.
    patched = config.patch(
        ignore_logging_functions=ignored, recompile_limit=recompile_limit, use_numpy_random_stream=True, **hooks
    )
    is_compiling = CompileContext.try_get  # None where the script's own code runs
    with (
        held_back(is_compiling),
        unchanged(is_compiling),
        patched,
        not_of_our_traces.active(),
        gc_pause.paused(),
        without_batch_guards(),
    ):
        yield


def mark_dynamic(tensors: Mapping[str, torch.Tensor], dims: Sequence[tuple[str, int]]) -> None:
    """Dims seen to vary are symbols from the first trace on; sizes 0 and 1 are always traced as they are."""
    for path, dim in dims:
        tensor = tensors.get(path)
        if tensor is not None and dim < tensor.dim() and tensor.shape[dim] > 1:
            torch._dynamo.maybe_mark_dynamic(tensor, dim)
