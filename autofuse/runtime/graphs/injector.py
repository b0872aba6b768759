"""`RuntimeShapeInjector`: checks a node's inputs at run time, and makes the fallback for inputs that do not fit.

In: a node or its form, a kernel's callable. Out: the checks as operations (data); callables of the inputs of the node.
The router takes each node's first call and its fallback from here; its plans are the dispatch on shapes, one look-up
for all nodes of a graph. Guarantee: a call that fails a check, or a shape without a specialised kernel, still gets
eager's result. Only the first call of a fused callable is checked: sizes and strides of the calls that follow come from
the same plan.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from autofuse.errors import ShapeError
from autofuse.fusion.node import FusionNode
from autofuse.ir.operation import NodeForm, Operation, ValueRef
from autofuse.wrapper.node_call import NodeCall, device_type, make_unfused

CHECK = "autofuse.check_shape.default"
Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # sizes, strides in elements, dtype


class RuntimeShapeInjector:
    """Checks layouts and chooses the callable of a node (seed: operator fusion with dynamic shapes)."""

    def inject_shape_check(self, node: FusionNode) -> list[Operation]:
        """One ``autofuse.check_shape`` operation for each input of the node.

        Its arguments are the input, its symbolic sizes, its symbolic strides (in elements) and its dtype. They are what
        `checked_call` compares and `run_shape_check` solves for the node's symbols.
        """
        return list(_checks(node.form))

    def run_shape_check(self, node: FusionNode, inputs: Sequence[torch.Tensor]) -> dict[str, int]:
        """Values of the node's symbols for these inputs; raises ShapeError where they do not fit together."""
        checks, symbols = _checks(node.form), node.form.symbols
        if len(inputs) != len(checks):
            raise ShapeError(f"expected {len(checks)} inputs for {node.label}, found {len(inputs)}")
        values: dict[str, int] = {}
        for (ref, shape, *_), tensor in zip((check.args for check in checks), inputs, strict=True):
            for name, size in shape.unify(tuple(tensor.shape)).items():
                if values.setdefault(name, size) != size:
                    raise ShapeError(
                        f"expected one size for {name} in {node.label}, found {values[name]} and {size} in {ref.name}"
                    )
        missing = [name for name in symbols if name not in values]
        if missing:
            raise ShapeError(f"expected inputs that determine {missing} of {node.label}, found none that do")
        return values

    def generate_shape_dispatch(
        self, node: FusionNode, kernels: Mapping[tuple[int, ...], Callable[..., Any]] | None = None
    ) -> NodeCall:
        """A callable of the node's inputs: the kernel registered for the symbol values at hand, else the fallback.

        ``kernels``: values of the node's symbols, in order, to a callable of the inputs. A kernel runs only where
        strides and dtypes are as promised too. Raises ShapeError as `run_shape_check`.
        """
        table = dict(kernels or {})
        fallback = self.generate_generic_fallback(node)

        def dispatch(*inputs: torch.Tensor) -> Any:
            bound = self.run_shape_check(node, inputs)
            values = tuple(bound[name] for name in node.form.symbols)
            kernel = table.get(values)
            if kernel is None or self.problem_of(node.form, values, inputs) is not None:
                return fallback(*inputs)
            return kernel(*inputs)

        return dispatch

    def generate_generic_fallback(self, node: FusionNode) -> NodeCall:
        """A callable for any shape: the node's operations through aten, exactly as eager runs them.

        Raises ShapeError as `run_shape_check`.
        """
        form = node.form
        made: dict[tuple[int, ...], NodeCall] = {}

        def fallback(*inputs: torch.Tensor) -> Any:
            bound = self.run_shape_check(node, inputs)
            values = tuple(bound[name] for name in form.symbols)
            if values not in made:
                made[values] = self.fallback_at(form, values)
            return made[values](*inputs)

        return fallback

    # ---- at known sizes, as a plan has them -------------------------------------------------------

    def fallback_at(self, form: NodeForm, values: Sequence[int], device: torch.device | None = None) -> NodeCall:
        """The generic fallback at these values of the form's symbols: nothing is solved or looked up in a call.

        ``device``: as of `make_unfused`.
        """
        return make_unfused(form, values, device)

    def checked_call(
        self,
        form: NodeForm,
        values: Sequence[int],
        fused: NodeCall,
        fallback: NodeCall,
        settle: Callable[[str | None], None],
        device: torch.device | None = None,
    ) -> NodeCall:
        """The first call of a fused node: run the kernel only if the inputs are on ``device`` and as the form promises.

        ``values``: of the form's symbols. ``settle(problem)`` is called once with the outcome, None for success; it
        then installs the plain callable.
        """

        def first_call(*inputs: torch.Tensor) -> Any:
            problem = self.problem_of(form, values, inputs, device)
            settle(problem)
            return fallback(*inputs) if problem else fused(*inputs)

        return first_call

    def problem_of(
        self, form: NodeForm, values: Sequence[int], inputs: Sequence[torch.Tensor], device: torch.device | None = None
    ) -> str | None:
        """What is wrong with the inputs at these values of the form's symbols, None where nothing is."""
        wanted = device or torch.device(device_type(form))
        bound = dict(zip(form.symbols, values, strict=True))
        expected = [_layout(check, bound) for check in _checks(form)]  # all first: one that has no value raises
        problems = (
            layout_problem(index, tensor, *layout, wanted)
            for index, (tensor, layout) in enumerate(zip(inputs, expected, strict=True))
        )
        return next((problem for problem in problems if problem), None)


INJECTOR = RuntimeShapeInjector()  # it has no state


@functools.lru_cache(maxsize=4096)
def _checks(form: NodeForm) -> tuple[Operation, ...]:
    return tuple(
        Operation(
            name=f"check_{item.name}",
            target=CHECK,
            args=(ValueRef(item.name), item.spec.shape, item.spec.strides, item.spec.dtype),
            kwargs=(),
            outputs=(),
        )
        for item in form.inputs
    )


def _layout(check: Operation, values: Mapping[str, int]) -> Layout:
    _, shape, strides, dtype = check.args
    return shape.bind(values), strides.bind(values), getattr(torch, dtype)


def layout_problem(
    index: int,
    tensor: torch.Tensor,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> str | None:
    """What is wrong with an input, None where nothing is. Strides of dims of size 1 and of empty tensors are free."""
    if type(tensor) is not torch.Tensor and not isinstance(tensor, torch.nn.Parameter):
        return f"input {index} is a {type(tensor).__name__}, expected a plain tensor"
    found_device = tensor.device
    if found_device.type != device.type or (device.index is not None and found_device.index != device.index):
        return f"input {index} is on {found_device}, expected {device}"
    if tuple(tensor.shape) != shape or tensor.dtype is not dtype:
        return f"input {index} is {tensor.dtype}{list(tensor.shape)}, expected {dtype}{list(shape)}"
    if tensor.layout is not torch.strided or tensor.is_neg() or tensor.is_conj():
        return f"input {index} is not a plain strided tensor"
    for size, found, wanted in zip(shape, tensor.stride(), strides, strict=True):
        if size > 1 and found != wanted and tensor.numel():
            return f"input {index} has strides {list(tensor.stride())}, expected {list(strides)}"
    return None
