"""Everything that needs Dynamo and AOTAutograd: what is captured, with which settings, and what may go wrong.

In: a module's call, or a graph from Dynamo, and a function that makes a callable of an aten graph. Out: the
compiled callable, which runs forward, backward and inference graphs in aten operators.
Importing this takes 2 s of Dynamo (torch 2.13), so a script in which nothing is captured never does.
Guarantee: no decomposition is applied, so the unfused graph runs exactly the kernels that eager runs (some
element-wise ones twice, see ``recompute``), dropout and all, and gradients are right by construction.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch._dynamo
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import RestartAnalysis, TorchDynamoException
from torch._functorch.aot_autograd import make_boxed_func

from autofuse import collector
from autofuse.capture.conv_guards import without_batch_guards
from autofuse.capture.direct import DirectCalls, has_subclasses, is_plain_graph, note_plain_graph, plain_call
from autofuse.capture.overlaps import Writes
from autofuse.capture.recompute import partition
from autofuse.capture.repeats import take_apart
from autofuse.capture.second_gradients import replayed
from autofuse.capture.simplify import simplify
from autofuse.capture.traced import ROOT_FILE, being_traced
from autofuse.private_files import PrivateFolder
from autofuse.untouched import untouched

if TYPE_CHECKING:
    from autofuse.capture.kept_graphs import Keeping
    from autofuse.capture.kept_traces import Plans, TraceKeeper

log = logging.getLogger(__name__)

Call = Callable[[list[Any]], Any]
CompileGraph = Callable[[fx.GraphModule, str, int], Call]
CompilePhase = Callable[[fx.GraphModule, str, bool | None], tuple[Call, bool]]  # see `kept_graphs.Keeping`


class Keeper(NamedTuple):
    """Where traces are kept from one run to the next, and who is told what was refused there."""

    folder: PrivateFolder
    report: Callable[[str, str], None]  # kind, message


def compile_with(
    module: fx.GraphModule,
    example_inputs: Sequence[torch.Tensor],
    compile_graph: CompileGraph,
    min_blocks: int = 0,
    keeper: Keeper | None = None,
) -> Callable[..., Any]:
    """``compile_graph(aten graph, phase, times)`` gets "forward", "backward" or "inference".

    ``times``: how often the graph is called for one call of the whole; from ``min_blocks`` equal blocks in a row on (0:
    never) one of them is compiled for all; ``keeper``: of graphs of earlier runs, None to keep none.
    """
    if min_blocks and not has_subclasses(module, example_inputs):
        try:
            pieces = take_apart(module, example_inputs, min_blocks)
            if pieces is not None:
                if (traced := being_traced()) is not None:
                    traced.spoil("equal blocks")
                return pieces.compile(
                    lambda piece, inputs, times: plain_call(_compile_whole(piece, inputs, compile_graph, times, keeper))
                )
        except RestartAnalysis:  # Dynamo traces once more
            raise
        except Exception as error:
            log.debug("equal blocks are captured one by one: %s", error)
    return _compile_whole(module, example_inputs, compile_graph, 1, keeper)


def _compile_whole(
    module: fx.GraphModule,
    example_inputs: Sequence[torch.Tensor],
    compile_graph: CompileGraph,
    times: int,
    keeper: Keeper | None,
) -> Callable[..., Any]:
    def compile_phase(graph: fx.GraphModule, phase: str, is_plain: bool | None) -> tuple[Call, bool]:
        if phase == "forward" and replay is not None:
            replay.note_graph(graph)
        if phase == "backward" and replay is not None:
            replay.note_backward(graph)
        if phase != "backward":
            writes.note(graph)
        if phase == "inference":  # the other two were simplified as one
            simplify(graph.graph)
            graph.recompile()
        if is_plain is not None:
            _read[phase] += 1
        else:
            is_plain = phase == "inference" and not needs_wrapper and is_plain_graph(graph, example_inputs)
        call = compile_graph(graph, phase, times)
        if is_plain and not needs_wrapper:
            plain.append(call)
        return call, is_plain

    plain: list[Call] = []
    writes = Writes(example_inputs)
    has_gradients = any(isinstance(t, torch.Tensor) and t.requires_grad for t in example_inputs)
    needs_no_switch = not (torch.is_grad_enabled() and has_gradients) and not torch._C._is_any_autocast_enabled()
    of_subclasses = has_subclasses(module, example_inputs)
    needs_wrapper = not needs_no_switch or of_subclasses
    keeping = _keeping(compile_phase, None if of_subclasses else keeper)

    def compiler(phase: str) -> Any:
        if keeping is not None:
            return keeping.compiler(phase)
        return lambda graph, inputs: compile_phase(graph, phase, None)[0]

    backend = aot_autograd(
        fw_compiler=compiler("forward"),
        bw_compiler=compiler("backward"),
        inference_compiler=compiler("inference"),
        partition_fn=partition,
    )
    # A donated buffer would be lost for a second backward pass (retain_graph=True), and none of our kernels takes one.
    with (
        torch._functorch.config.patch(donated_buffer=False),
        replayed(module) as replay,
        contextlib.ExitStack() as stack,
    ):
        if (traced := being_traced()) is not None:
            if traced.replay is not None:
                traced.spoil("more than one graph")
            traced.replay = replay
        if keeping is not None:  # torch's cache warns of each file that it cannot read or write
            stack.enter_context(_not_of_our_traces.active())
            stack.enter_context(keeping.active())
        compiled: Callable[..., Any] = backend(module, example_inputs)
    if len(plain) == 1:
        note_plain_graph(compiled, plain[0])
    if writes.are_watched and traced is not None:
        traced.spoil("inputs that are written to")
    return writes.around(compiled if replay is None else replay.around(compiled), lambda: as_it_is(module))


_read: Counter[str] = Counter()


def note_read() -> None:
    """A whole trace of an earlier run has been read."""
    _read["trace"] += 1


def graphs_read() -> int:
    """Graphs of this process that an earlier run had kept."""
    return _read.total()


def _keeping(compile_phase: CompilePhase, keeper: Keeper | None) -> Keeping | None:
    """Where graphs are kept and with which they may be; needs much of torch that other versions may not have."""
    if keeper is None:
        return None
    try:
        with untouched():
            from autofuse.capture.kept_graphs import IS_SUPPORTED, Keeping
    except ImportError as error:
        log.debug("graphs are not kept with this torch: %s", error)
        return None
    return Keeping(compile_phase, keeper.folder, keeper.report) if IS_SUPPORTED else None


def as_it_is(module: fx.GraphModule) -> Callable[..., Any]:
    """Dynamo's graph, operator by operator in eager."""
    if hasattr(module, "real_recompile"):  # else each call of a lazy one asks whether it is compiled
        module.real_recompile()
    forward: Callable[..., Any] = module.forward
    return forward


def boxed(function: Callable[..., Any]) -> Callable[[list[Any]], Any]:
    """A function of positional arguments as one of a list, which AOTAutograd calls."""
    result: Callable[[list[Any]], Any] = make_boxed_func(function)
    return result


# What Dynamo raises when it cannot capture; anything else is the user's own.
CAPTURE_ERRORS = (TorchDynamoException,)

# A Dynamo graph break a call is what a log line costs, and the module around it is then traced twice.
IGNORED_LOGGING = tuple(
    getattr(logging.Logger, name)
    for name in ("debug", "info", "warning", "warning_once")
    if hasattr(logging.Logger, name)
)


class CapturedRoot(NamedTuple):
    """A root's function ``call(module, *args, **kwargs)`` in its three forms."""

    trace: Callable[..., Any]  # traces what is new
    settled: Callable[..., Any]  # runs what is traced, else the module as it is
    direct: DirectCalls  # what is traced, past Dynamo
    traces: TraceKeeper | None  # those of earlier runs, None where none are kept


def compile_root(
    name: str, backend: Callable[..., Any], key: str = "", keeper: Keeper | None = None, plans: Plans | None = None
) -> CapturedRoot:
    """A function of its own for each root: Dynamo's recompile limit counts per code object.

    ``key``: the root's, which is the same in every run. The call also gives modules whose forward lives in torch itself
    a frame that Dynamo does not skip.
    """
    namespace: dict[str, Any] = {}
    text = "def call_root(module, /, *args, **kwargs):\n    return module(*args, **kwargs)\n"
    exec(compile(text, f"{ROOT_FILE} {name}>", "exec"), namespace)
    call_root = namespace["call_root"]
    traces = _traces(key, call_root, keeper, plans) if keeper is not None and plans is not None else None
    traced = torch.compile(call_root, backend=backend)
    return CapturedRoot(traced, torch._dynamo.run(call_root), DirectCalls(call_root), traces)


def _traces(key: str, function: Any, keeper: Keeper, plans: Plans) -> TraceKeeper | None:
    """As `_keeping`, and with much of Dynamo too."""
    try:
        with untouched():
            from autofuse.capture.kept_graphs import IS_SUPPORTED
            from autofuse.capture.kept_traces import TraceKeeper
    except ImportError as error:
        log.debug("traces are not kept with this torch: %s", error)
        return None
    return TraceKeeper(key, function, keeper.folder, keeper.report, plans) if IS_SUPPORTED else None


class _NotOfOurTraces(logging.Filter):
    """Keeps back what torch says about traces that the person never asked for, unless its logs are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.tracing = threading.local()

    def filter(self, record: logging.LogRecord) -> bool:
        ours = getattr(self.tracing, "ours", False) and record.levelno >= logging.WARNING
        return not ours or logging.getLogger(record.name).isEnabledFor(logging.INFO)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """While a root of ours is traced on this thread."""
        for name, logger in list(logging.root.manager.loggerDict.items()):
            if name.partition(".")[0] == "torch" and isinstance(logger, logging.Logger):
                for handler in logger.handlers:
                    handler.addFilter(self)  # which adds it once
        before = getattr(self.tracing, "ours", False)
        self.tracing.ours = True
        try:
            yield
        finally:
            self.tracing.ours = before


_not_of_our_traces = _NotOfOurTraces()


@contextlib.contextmanager
def capture_settings(recompile_limit: int) -> Iterator[None]:
    """Dynamo's settings while a root of ours may be traced; the user's own are untouched outside.

    The garbage collector rests meanwhile: in a process that has imported much it takes a tenth of a trace.
    """
    config = torch._dynamo.config
    ignored = {*config.ignore_logging_functions, *IGNORED_LOGGING}
    # Hooks that come or go after capture: eager would see them. 0.13 us a module of each call.
    hooks = {"skip_nnmodule_hook_guards": False} if hasattr(config, "skip_nnmodule_hook_guards") else {}
    # A forward that draws from numpy's generator: Dynamo would draw from torch's in its place.
    patched = config.patch(
        ignore_logging_functions=ignored, recompile_limit=recompile_limit, use_numpy_random_stream=True, **hooks
    )
    with patched, _not_of_our_traces.active(), collector.paused(), without_batch_guards():
        yield


def suppressed_errors() -> contextlib.AbstractContextManager[None]:
    """What Dynamo cannot trace runs in eager, frame by frame."""
    found: contextlib.AbstractContextManager[None] = torch._dynamo.config.patch(suppress_errors=True)
    return found


def mark_dynamic(tensors: Mapping[str, torch.Tensor], dims: Sequence[tuple[str, int]]) -> None:
    """Dims seen to vary are symbols from the first trace on; sizes 0 and 1 are always traced as they are."""
    for path, dim in dims:
        tensor = tensors.get(path)
        if tensor is not None and dim < tensor.dim() and tensor.shape[dim] > 1:
            torch._dynamo.maybe_mark_dynamic(tensor, dim)
