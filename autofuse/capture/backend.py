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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch._dynamo
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import RestartAnalysis, TorchDynamoException
from torch._functorch.aot_autograd import make_boxed_func

from autofuse.capture.direct import DirectCalls, has_subclasses, is_plain_graph, note_plain_graph, plain_call
from autofuse.capture.recompute import partition
from autofuse.capture.repeats import take_apart
from autofuse.capture.second_gradients import replayed

log = logging.getLogger(__name__)

CompileGraph = Callable[[fx.GraphModule, str, int], Callable[[list[Any]], Any]]


def compile_with(
    module: fx.GraphModule,
    example_inputs: Sequence[torch.Tensor],
    compile_graph: CompileGraph,
    min_blocks: int = 0,
) -> Callable[..., Any]:
    """``compile_graph(aten graph, phase, times)`` gets "forward", "backward" or "inference".

    ``times``: how often the graph is called for one call of the whole; from ``min_blocks`` equal blocks in a row on (0:
    never) one of them is compiled for all.
    """
    if min_blocks and not has_subclasses(module, example_inputs):
        try:
            pieces = take_apart(module, example_inputs, min_blocks)
            if pieces is not None:
                return pieces.compile(
                    lambda piece, inputs, times: plain_call(_compile_whole(piece, inputs, compile_graph, times))
                )
        except RestartAnalysis:  # Dynamo traces once more
            raise
        except Exception as error:
            log.debug("equal blocks are captured one by one: %s", error)
    return _compile_whole(module, example_inputs, compile_graph, 1)


def _compile_whole(
    module: fx.GraphModule, example_inputs: Sequence[torch.Tensor], compile_graph: CompileGraph, times: int
) -> Callable[..., Any]:
    def compile_forward(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        if replay is not None:
            replay.note_graph(graph)
        return compile_graph(graph, "forward", times)

    def compile_backward(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return compile_graph(graph, "backward", times)

    def compile_inference(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        call = compile_graph(graph, "inference", times)
        if not needs_wrapper and is_plain_graph(graph, example_inputs):
            plain.append(call)
        return call

    plain: list[Callable[[list[Any]], Any]] = []
    has_gradients = any(isinstance(t, torch.Tensor) and t.requires_grad for t in example_inputs)
    needs_no_switch = not (torch.is_grad_enabled() and has_gradients) and not torch._C._is_any_autocast_enabled()
    needs_wrapper = not needs_no_switch or has_subclasses(module, example_inputs)
    backend = aot_autograd(
        fw_compiler=compile_forward,
        bw_compiler=compile_backward,
        inference_compiler=compile_inference,
        partition_fn=partition,
    )
    # A donated buffer would be lost for a second backward pass (retain_graph=True), and none of our kernels takes one.
    with torch._functorch.config.patch(donated_buffer=False), replayed(module) as replay:
        compiled: Callable[..., Any] = backend(module, example_inputs)
    if len(plain) == 1:
        note_plain_graph(compiled, plain[0])
    return compiled


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


def compile_root(name: str, backend: Callable[..., Any]) -> CapturedRoot:
    """A function of its own for each root: Dynamo's recompile limit counts per code object.

    The call also gives modules whose forward lives in torch itself a frame that Dynamo does not skip.
    """
    namespace: dict[str, Any] = {}
    text = "def call_root(module, /, *args, **kwargs):\n    return module(*args, **kwargs)\n"
    exec(compile(text, f"<autofuse root {name}>", "exec"), namespace)
    call_root = namespace["call_root"]
    return CapturedRoot(torch.compile(call_root, backend=backend), torch._dynamo.run(call_root), DirectCalls(call_root))


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
    """Dynamo's settings while a root of ours may be traced; the user's own are untouched outside."""
    config = torch._dynamo.config
    ignored = {*config.ignore_logging_functions, *IGNORED_LOGGING}
    # Hooks that come or go after capture: eager would see them. 0.13 us a module of each call.
    hooks = {"skip_nnmodule_hook_guards": False} if hasattr(config, "skip_nnmodule_hook_guards") else {}
    patched = config.patch(ignore_logging_functions=ignored, recompile_limit=recompile_limit, **hooks)
    with patched, _not_of_our_traces.active():
        yield


def mark_dynamic(tensors: Mapping[str, torch.Tensor], dims: Sequence[tuple[str, int]]) -> None:
    """Dims seen to vary are symbols from the first trace on; sizes 0 and 1 are always traced as they are."""
    for path, dim in dims:
        tensor = tensors.get(path)
        if tensor is not None and dim < tensor.dim() and tensor.shape[dim] > 1:
            torch._dynamo.maybe_mark_dynamic(tensor, dim)
