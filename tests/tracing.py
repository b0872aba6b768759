"""A function on tensors becomes a node, as capture would build it.

In: a Python function and example inputs. Out: a `NodeForm`, traced through `make_fx` with symbolic sizes: canonical
names, strides from the traced metadata, the decompositions of composite operators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._sympy.functions import FloorDiv

from autofuse.capture.graph_import import body_of
from autofuse.capture.graph_sizes import GraphSizes
from autofuse.ir.operation import NodeForm, NodeInput, Operation, TensorSpec, ValueRef
from autofuse.ir.optable import OpKind, info
from autofuse.ir.shape import SymbolicShape, symbol


def example(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """An example input; only its shape, strides and dtype matter."""
    if dtype == torch.bool:
        return torch.zeros(sizes, dtype=torch.bool)
    return torch.zeros(sizes, dtype=dtype) if not dtype.is_floating_point else torch.full(sizes, 0.5, dtype=dtype)


class _Sizes(GraphSizes):
    """Sizes as a case spells them."""

    def __init__(self, dim: Callable[[Any], Any]) -> None:
        super().__init__(None)
        self._dim = dim

    def __call__(self, size: Any, simplify: Callable[[sympy.Expr], sympy.Expr] = lambda e: e) -> Any:
        return self._dim(size)


def trace(
    function: Callable[..., Any],
    inputs: Sequence[torch.Tensor],
    dynamic: bool = True,
    static: Sequence[int] = (),
    device: str = "cpu",
) -> NodeForm:
    """The node that a function's aten calls make on these inputs.

    Sizes of 2 and more become symbols, but for those in ``static`` (the widths of layers, as in a real capture).
    ``device``: where the inputs are taken to be; "cuda" needs no GPU.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv())
    mode.cache_enabled = False  # no other node has these symbols: entries would take a third of a trace and serve none
    fakes = []
    for tensor in inputs:
        sizes = [DimDynamic.STATIC if not dynamic or s in (0, 1, *static) else DimDynamic.DUCK for s in tensor.shape]
        context = StatelessSymbolicContext(dynamic_sizes=sizes)
        fakes.append(mode.from_tensor(tensor, symbolic_context=context))
    with mode, enable_python_dispatcher(), torch.device(device):
        if device != "cpu":
            fakes = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for t in fakes]
        graph = make_fx(function, tracing_mode="real")(*fakes).graph
    names: dict[torch.fx.Node, ValueRef] = {}
    specs: dict[torch.fx.Node, list[TensorSpec]] = {}
    table: dict[sympy.Symbol, sympy.Symbol] = {}
    node_inputs: list[NodeInput] = []
    operations: list[Operation] = []
    outputs: tuple[ValueRef, ...] = ()

    def dim(value: Any) -> Any:
        if isinstance(value, torch.SymInt):
            expr = value.node.expr
            for s in sorted(expr.free_symbols, key=str):
                table.setdefault(s, symbol(f"s{len(table)}"))
            expr = expr.xreplace(table).replace(FloorDiv, lambda a, b: sympy.floor(a / b))
            return int(expr) if expr.is_Integer else expr
        return value

    def spec(tensor: torch.Tensor) -> TensorSpec:
        shape = SymbolicShape(dim(s) for s in tensor.shape)
        strides = SymbolicShape(dim(s) for s in tensor.stride())
        return TensorSpec(shape, str(tensor.dtype).removeprefix("torch."), strides, tensor.device.type)

    def arg(value: Any) -> Any:
        if isinstance(value, torch.fx.Node):
            meta = value.meta["val"]
            return names[value] if value in names else dim(meta)
        if isinstance(value, list | tuple):
            return tuple(arg(v) for v in value)
        if isinstance(value, torch.dtype):
            return str(value).removeprefix("torch.")
        if isinstance(value, torch.memory_format):
            return str(value).removeprefix("torch.")
        return dim(value)

    for node in graph.nodes:
        if node.op == "placeholder":
            if isinstance(node.meta["val"], torch.Tensor):
                names[node] = ValueRef(f"i{len(node_inputs)}")
                node_inputs.append(NodeInput(f"i{len(node_inputs)}", spec(node.meta["val"])))
        elif node.op == "output":
            found = node.args[0]
            outputs = tuple(names[n] for n in (found if isinstance(found, list | tuple) else (found,)))
        elif node.op == "call_function" and node.target.__name__ == "getitem":
            source = names[node.args[0]]
            names[node] = ValueRef(source.name, node.args[1])
        elif node.op == "call_function" and isinstance(node.meta["val"], torch.Tensor | tuple | list):
            meta = node.meta["val"]
            metas = [meta] if isinstance(meta, torch.Tensor) else list(meta)
            specs[node] = [spec(m) for m in metas if isinstance(m, torch.Tensor)]
            name = f"v{len(operations)}"
            names[node] = ValueRef(name)
            kwargs = {k: v for k, v in node.kwargs.items() if k not in ("device", "layout", "pin_memory")}
            target = str(node.target)
            if target.startswith("autofuse_test."):
                target = "autofuse." + target.split(".", 1)[1]
            args, named = tuple(map(arg, node.args)), tuple((k, arg(v)) for k, v in kwargs.items())
            made = Operation(name, target, args, named, tuple(specs[node]), source=f"cases.py {node.name}")
            is_composite = info(target).kind is OpKind.COMPOSITE
            operations.append(replace(made, body=body_of(node, made, _Sizes(dim))) if is_composite else made)
    symbols = tuple(str(s) for s in table.values())
    return NodeForm(tuple(node_inputs), tuple(operations), outputs, symbols)
