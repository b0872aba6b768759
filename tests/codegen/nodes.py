"""Building nodes by hand, for operators that tracing decomposes and for generated chains of views.

In: overloads and arguments. Out: a `NodeForm` with static sizes, its specs taken from running it on real tensors.
"""

from __future__ import annotations

from typing import Any

import torch

from autofuse.codegen.reference import _OURS, _restore, overload
from autofuse.ir.operation import NodeForm, NodeInput, Operation, TensorSpec, ValueRef, map_arg
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
        function = _OURS.get(target) or overload(target)

        def real(arg: Any) -> Any:
            return _restore(map_arg(arg, lambda r: self.tensors[r]))

        found = function(*[real(a) for a in encoded], **{k: real(v) for k, v in kwargs.items()})
        results = found if isinstance(found, tuple) else (found,)
        ref = ValueRef(f"v{len(self.operations)}")
        for n, result in enumerate(results):
            self.tensors[ValueRef(ref.name, n)] = result
        self.operations.append(
            Operation(ref.name, target, encoded, tuple(kwargs.items()), tuple(spec_of(r) for r in results))
        )
        return ref

    def form(self, *outputs: ValueRef) -> NodeForm:
        return NodeForm(tuple(self.inputs), tuple(self.operations), outputs)
