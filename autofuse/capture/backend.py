"""Everything that needs Dynamo and AOTAutograd: what is captured, with which settings, and what may go wrong.

In: a module's call, or a graph from Dynamo, and a function that makes a callable of an aten graph. Out: the
compiled callable, which runs forward, backward and inference graphs in aten operators.
Importing this takes 2 s of Dynamo (torch 2.13), so a script in which nothing is captured never does.
Guarantee: no decomposition is applied, so the unfused graph runs exactly the kernels that eager runs,
dropout and all, and gradients are right by construction.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch._dynamo
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import TorchDynamoException
from torch._functorch.aot_autograd import make_boxed_func

CompileGraph = Callable[[fx.GraphModule, str], Callable[[list[Any]], Any]]


def compile_with(
    module: fx.GraphModule, example_inputs: Sequence[torch.Tensor], compile_graph: CompileGraph
) -> Callable[..., Any]:
    """``compile_graph(aten graph, phase)`` gets "forward", "backward" or "inference"."""

    def compiler(phase: str) -> Callable[..., Any]:
        return lambda graph, inputs: compile_graph(graph, phase)

    backend = aot_autograd(
        fw_compiler=compiler("forward"),
        bw_compiler=compiler("backward"),
        inference_compiler=compiler("inference"),
    )
    compiled: Callable[..., Any] = backend(module, example_inputs)
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


def compile_root(name: str, backend: Callable[..., Any]) -> Callable[..., Any]:
    """``call(module, *args, **kwargs)``, captured: a function of its own for each root.

    Dynamo's recompile limit counts per code object.

    The call also gives modules whose forward lives in torch itself a frame that Dynamo does not skip.
    """
    namespace: dict[str, Any] = {}
    text = "def call_root(module, /, *args, **kwargs):\n    return module(*args, **kwargs)\n"
    exec(compile(text, f"<autofuse root {name}>", "exec"), namespace)
    compiled: Callable[..., Any] = torch.compile(namespace["call_root"], backend=backend)
    return compiled


@contextlib.contextmanager
def capture_settings(recompile_limit: int) -> Iterator[None]:
    """Dynamo's settings while a root of ours may be traced; the user's own are untouched outside."""
    config = torch._dynamo.config
    ignored = {*config.ignore_logging_functions, *IGNORED_LOGGING}
    with config.patch(ignore_logging_functions=ignored, recompile_limit=recompile_limit):
        yield


def mark_dynamic(tensors: Mapping[str, torch.Tensor], dims: Sequence[tuple[str, int]]) -> None:
    """Dims seen to vary are symbols from the first trace on; sizes 0 and 1 are always traced as they are."""
    for path, dim in dims:
        tensor = tensors.get(path)
        if tensor is not None and dim < tensor.dim() and tensor.shape[dim] > 1:
            torch._dynamo.maybe_mark_dynamic(tensor, dim)
