"""Building nodes by hand, for operators that tracing decomposes and for generated chains of views.

In: overloads and arguments. Out: a `NodeForm` with static sizes, its specs taken from running it on real tensors.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from autofuse.codegen.reference import run_operation
from autofuse.ir.operation import NodeForm, NodeInput, Operation, TensorSpec, ValueRef
from autofuse.ir.shape import SymbolicShape


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(
        SymbolicShape(tensor.shape), str(tensor.dtype).removeprefix("torch."), SymbolicShape(tensor.stride())
    )


class NodeBuilder:
    """Records operations while it runs them."""

    def __init__(self) -> None:
        self.inputs: list[NodeInput] = []
        self.operations: list[Operation] = []
        self.tensors: dict[ValueRef, torch.Tensor] = {}

    def input(self, tensor: torch.Tensor) -> ValueRef:
        ref = ValueRef(f"i{len(self.inputs)}")
        self.inputs.append(NodeInput(ref.name, spec_of(tensor)))
        self.tensors[ref] = tensor
        return ref

    def call(self, target: str, *args: Any, **kwargs: Any) -> ValueRef:
        """Add an operation; lists in arguments become tuples."""
        encoded = tuple(tuple(a) if isinstance(a, list) else a for a in args)
        op = Operation(f"v{len(self.operations)}", target, encoded, tuple(kwargs.items()), ())
        found = run_operation(op, self.tensors, {}, torch.device("cpu"))
        results = found if isinstance(found, tuple) else (found,)
        for n, result in enumerate(results):
            self.tensors[ValueRef(op.name, n)] = result
        self.operations.append(replace(op, outputs=tuple(spec_of(r) for r in results)))
        return ValueRef(op.name)

    def form(self, *outputs: ValueRef) -> NodeForm:
        return NodeForm(tuple(self.inputs), tuple(self.operations), outputs)
