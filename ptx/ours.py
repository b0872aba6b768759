"""Our kernels of a function's graphs, as a session would plan them for a GPU before anything is tuned.

In: a function and its arguments on the CPU. Out: what one call of its forward graph, and one of its backward graph,
would launch by default settings: nodes as planned, each as its default configuration prints it, for the sizes of the
call; products and convolutions by libraries, as where a group's parts run one by one. Nothing is run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autofuse.capture.backend import compile_with
from autofuse.capture.graph_import import ImportedGraph, import_graph
from autofuse.capture.passes.random_ops import split_dropout
from autofuse.codegen.call import torch_dtype
from autofuse.codegen.in_place import why_not
from autofuse.codegen.knobs import default_config
from autofuse.codegen.triton.compile import compiled_kernels
from autofuse.codegen.triton.generator import TritonKernelGenerator
from autofuse.codegen.triton.source import natural_assumptions, resolve
from autofuse.fusion.config import FusionConfig
from autofuse.fusion.engine import FusionEngine
from autofuse.fusion.graph import FusionGraph
from autofuse.ir.operation import NodeForm, TensorSpec, ValueRef
from autofuse.ir.optable import FUSIBLE, VIEWS, info
from autofuse.ir.shape import evaluate
from autofuse.strategies.strategy import flat_ref
from ptx.inductor import Compiled, install, on_device, until_compiled
from ptx.static_kernels import ARCHITECTURE, Buffer, Kernel, Launches, from_triton

_GENERATOR = TritonKernelGenerator()


def launches(function: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> list[Launches]:
    """What a call of each of the function's graphs launches, the forward one first."""
    install()
    found: list[Launches] = []

    def compile_graph(module: fx.GraphModule, phase: str, times: int) -> Callable[[list[Any]], Any]:
        found.append(_planned(module, "backward" if phase == "backward" else "forward"))

        def call(arguments: list[Any]) -> Any:
            raise Compiled

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    def backend(module: fx.GraphModule, example: Sequence[torch.Tensor]) -> Callable[..., Any]:
        return compile_with(module, example, compile_graph)

    until_compiled(function, on_device(tensors), backend)
    return found


def _planned(module: fx.GraphModule, phase: str) -> Launches:
    split_dropout(module)
    imported = import_graph(module)
    graph = imported.for_fusion()
    nodes = FusionEngine(FusionConfig(), lowerable=why_not, groups_follow=True).fuse(graph)
    found, inside = Launches(phase), {op.name for node in nodes for op in node.operations}
    for op in graph.operations:
        kind = info(op.target).kind
        if op.name not in inside and kind in FUSIBLE - VIEWS:
            specs = [*map(graph.spec, op.inputs), *op.outputs]
            found.eager.append((op.short_name, sum(_nbytes(spec, graph.hints) for spec in specs)))
        elif op.name not in inside and kind not in VIEWS:
            found.library.append(op.short_name)
    tensors = _Tensors(imported, graph)
    for node in nodes:
        inputs = [tensors.of(flat_ref(name)) for name in node.input_names]
        outputs = [tensors.of(ref) for ref in node.outputs]
        found.kernels += kernels_of(node.form, graph.hints, [*inputs, *outputs])
    return found


class _Tensors:
    """Where a graph's tensors are: views are in the memory of what they look at."""

    def __init__(self, imported: ImportedGraph, graph: FusionGraph) -> None:
        self._graph = graph
        self._storages: dict[ValueRef, int] = {}
        self._offsets = {
            ref: int(node.meta["val"].storage_offset()) * node.meta["val"].element_size()
            for node, ref in imported.refs.items()
            if isinstance(node.meta.get("val"), torch.Tensor)
        }

    def of(self, ref: ValueRef) -> Buffer:
        base, hints = self._graph.base(ref), self._graph.hints
        storage = self._storages.setdefault(base, len(self._storages))
        offset = 0 if ref == base else self._offsets.get(ref, 0)
        return Buffer(
            storage, max(_nbytes(self._graph.spec(base), hints), offset + _nbytes(self._graph.spec(ref), hints)), offset
        )


def kernels_of(form: NodeForm, values: Mapping[str, int], params: Sequence[Buffer]) -> list[Kernel]:
    """The launches of a node; ``params``: its inputs, then its outputs. Raises LoweringError and CompilerError."""
    config = default_config(_GENERATOR.knobs(form, values, values))
    source = _GENERATOR.source(form, config, {})
    call = resolve(source, values)
    scratch = [Buffer(-1 - n, count * torch_dtype(dtype).itemsize) for n, (dtype, count) in enumerate(call.scratch)]
    assumed = natural_assumptions(source.symbols, values)
    made = {found.number: found.kernel for found in compiled_kernels(source, ARCHITECTURE, [assumed])}
    kernels = []
    for launch in call.launches:
        scalars = iter(launch.scalars)
        arguments: list[int | Buffer] = []
        for a in source.passes[launch.number].arguments:
            given = {"param": params, "scratch": scratch}.get(a.kind)
            arguments.append(next(scalars) if given is None else given[a.index])
        kernels.append(from_triton(made[launch.number], (launch.grid, 1, 1), arguments))
    return kernels


def _nbytes(spec: TensorSpec, values: Mapping[str, int]) -> int:
    """Bytes that a tensor spans."""
    sizes, strides = spec.shape.bind(values), [evaluate(s, values) for s in spec.strides]
    extent = 0 if 0 in sizes else 1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
    return extent * torch_dtype(spec.dtype).itemsize
