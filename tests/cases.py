"""One table of fusion cases that feeds code generation, numerics and whatever else needs real nodes.

In: a Python function on tensors. Out: a `NodeForm`, traced through `make_fx` with symbolic sizes, as capture
would build it: canonical names, strides from the traced metadata.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from autofuse.ir.operation import NodeForm, NodeInput, Operation, TensorSpec, ValueRef
from autofuse.ir.shape import SymbolicShape, symbol

aten = torch.ops.aten


def trace(function: Callable[..., Any], inputs: Sequence[torch.Tensor], dynamic: bool = True) -> NodeForm:
    """The node that a function's aten calls make on these inputs; sizes of 2 and more become symbols."""
    graph = make_fx(function, tracing_mode="symbolic" if dynamic else "fake")(*inputs).graph
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
            expr = expr.xreplace(table)
            return int(expr) if expr.is_Integer else expr
        return value

    def spec(tensor: torch.Tensor) -> TensorSpec:
        shape = SymbolicShape(dim(s) for s in tensor.shape)
        strides = SymbolicShape(dim(s) for s in tensor.stride())
        return TensorSpec(shape, str(tensor.dtype).removeprefix("torch."), strides)

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
            operations.append(
                Operation(
                    name,
                    target,
                    tuple(arg(a) for a in node.args),
                    tuple((k, arg(v)) for k, v in kwargs.items()),
                    tuple(specs[node]),
                    source=f"cases.py {node.name}",
                )
            )
    symbols = tuple(str(s) for s in table.values())
    return NodeForm(tuple(node_inputs), tuple(operations), outputs, symbols)


@dataclass(frozen=True)
class Case:
    """A function, the inputs it is traced on, and the sizes it is checked with."""

    name: str
    function: Callable[..., Any]
    example: tuple[torch.Tensor, ...]  # sizes that differ become different symbols
    sizes: tuple[tuple[int, ...], ...] = ()  # values of the symbols, in order; the example's own always too
    dynamic: bool = True
    tags: frozenset[str] = field(default=frozenset())

    def form(self) -> NodeForm:
        return trace(self.function, self.example, self.dynamic)
