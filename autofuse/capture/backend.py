"""Dynamo's graph through AOTAutograd: forward, backward and inference graphs in aten operators.

In: a graph from Dynamo and a function that makes a callable of an aten graph. Out: the compiled callable.
Guarantee: no decomposition is applied, so the unfused graph runs exactly the kernels that eager runs,
dropout and all, and gradients are right by construction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
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
