"""`RuntimeShapeInjector`: the seeds' names for what the router does with shapes at run time.

In: a fusion node. Out: operations (as data) that check shapes, and callables that dispatch on them.
Guarantee: a call that fails the check, or a shape without a specialised kernel, still gets an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from autofuse.errors import ShapeError
from autofuse.fusion.node import FusionNode
from autofuse.ir.operation import Operation, ValueRef
from autofuse.wrapper.node_call import NodeCall, make_unfused


class RuntimeShapeInjector:
    """Checks shapes and chooses the kernel of a node (seed: operator fusion with dynamic shapes)."""

    def inject_shape_check(self, node: FusionNode) -> list[Operation]:
        """One ``autofuse.check_shape`` operation for each input: its name and the symbolic shape it must fit.

        `run_shape_check` runs them. Empty for a node without symbols, whose shapes the graph's guards cover.
        """
        if not node.symbols:
            return []
        form = node.form
        return [
            Operation(
                name=f"check_{item.name}",
                target="autofuse.check_shape.default",
                args=(ValueRef(item.name), tuple(item.spec.shape.dims)),
                kwargs=(),
                outputs=(),
            )
            for item in form.inputs
        ]

    def run_shape_check(self, node: FusionNode, inputs: tuple[torch.Tensor, ...]) -> dict[str, int]:
        """Values of the node's symbols for these inputs; raises ShapeError where they do not fit together."""
        form = node.form
        if len(inputs) != len(form.inputs):
            raise ShapeError(f"expected {len(form.inputs)} inputs for {node.label}, found {len(inputs)}")
        values: dict[str, int] = {}
        for item, tensor in zip(form.inputs, inputs, strict=True):
            for name, size in item.spec.shape.unify(tuple(tensor.shape)).items():
                if values.setdefault(name, size) != size:
                    raise ShapeError(
                        f"expected one size for {name} in {node.label}, found {values[name]} and {size} in {item.name}"
                    )
        missing = [name for name in form.symbols if name not in values]
        if missing:
            raise ShapeError(f"expected inputs that determine {missing} of {node.label}, found none that do")
        return values

    def generate_shape_dispatch(
        self, node: FusionNode, kernels: Mapping[tuple[int, ...], Callable[..., Any]] | None = None
    ) -> NodeCall:
        """A callable of the node's inputs: the kernel registered for the symbol values at hand, else the fallback.

        ``kernels``: values of the node's symbols, in order, to a callable of the inputs.
        """
        table = dict(kernels or {})
        fallback = self.generate_generic_fallback(node)

        def dispatch(*inputs: torch.Tensor) -> Any:
            values = self.run_shape_check(node, inputs)
            kernel = table.get(tuple(values[name] for name in node.form.symbols))
            return kernel(*inputs) if kernel is not None else fallback(*inputs)

        return dispatch

    def generate_generic_fallback(self, node: FusionNode) -> NodeCall:
        """A callable for any shape: the node's operations through aten, exactly as eager runs them."""
        form = node.form
        made: dict[tuple[int, ...], NodeCall] = {}

        def fallback(*inputs: torch.Tensor) -> Any:
            bound = self.run_shape_check(node, inputs)
            values = tuple(bound[name] for name in form.symbols)
            if values not in made:
                made[values] = make_unfused(form, values)
            return made[values](*inputs)

        return fallback
