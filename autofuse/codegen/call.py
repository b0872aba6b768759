"""Calling a compiled kernel on tensors: the slow, checked way, for tests and the tuner's verification.

In: a compiled kernel and input tensors. Out: freshly allocated outputs.
Guarantee: inputs must have the dtypes and strides of the node's specs, else ShapeError; nothing is copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from autofuse.errors import ShapeError
from autofuse.ir.operation import NodeForm, TensorSpec, bind_shapes
from autofuse.ir.shape import evaluate


class Kernel(Protocol):
    """A compiled kernel, of any generator."""

    @property
    def name(self) -> str: ...

    @property
    def form(self) -> NodeForm: ...

    @property
    def constants(self) -> tuple[tuple[str, int], ...]:
        """The symbols that the kernel has built in, with their values."""

    def load(self) -> Any:
        """The kernel in this process, with a method ``call(sizes, pointers)``."""


def torch_dtype(name: str) -> torch.dtype:
    """``"float32"`` is torch.float32."""
    found: torch.dtype = getattr(torch, name)
    return found


def allocate(spec: TensorSpec, values: Mapping[str, int], poison: bool = False) -> torch.Tensor:
    """An uninitialised CPU tensor of a spec; a poisoned one holds values that no kernel would write by chance."""
    sizes = spec.shape.bind(values)
    strides = tuple(evaluate(s, values) for s in spec.strides)
    tensor = torch.empty_strided(sizes, strides, dtype=torch_dtype(spec.dtype))
    if poison:
        tensor.fill_(float("nan") if tensor.is_floating_point() else (True if tensor.dtype == torch.bool else 99))
    return tensor


def check_inputs(form: NodeForm, inputs: Sequence[torch.Tensor], values: Mapping[str, int]) -> None:
    """Raise ShapeError where an input does not have the dtype or the strides of the node's spec."""
    for item, tensor in zip(form.inputs, inputs, strict=True):
        if str(tensor.dtype) != f"torch.{item.spec.dtype}":
            raise ShapeError(f"expected {item.spec.dtype} for {item.name}, found {tensor.dtype}")
        for size, stride, wanted in zip(tensor.shape, tensor.stride(), item.spec.strides, strict=True):
            if size > 1 and tensor.numel() and stride != evaluate(wanted, values):
                raise ShapeError(f"expected strides {item.spec.strides} for {item.name}, found {tensor.stride()}")


def call_kernel(kernel: Kernel, inputs: Sequence[torch.Tensor], threads: int | None = None) -> tuple[torch.Tensor, ...]:
    """Run a kernel on CPU tensors, with ``threads`` threads (None: torch's number), and return new outputs.

    Outputs are poisoned first, so that an element that the kernel does not write shows. Raises ShapeError where the
    inputs do not fit the node, or sizes differ from those that the kernel has built in.
    """
    form = kernel.form
    values = {**bind_shapes(form, [tuple(t.shape) for t in inputs])}
    wrong = {n: v for n, v in kernel.constants if values[n] != v}
    if wrong:
        raise ShapeError(f"expected the sizes {dict(kernel.constants)} that {kernel.name} has built in, found {values}")
    check_inputs(form, inputs, values)
    outputs = tuple(allocate(form.spec(ref), values, poison=True) for ref in form.outputs)
    sizes = [*(values[s] for s in form.symbols), threads or torch.get_num_threads()]
    kernel.load().call(sizes, [t.data_ptr() for t in (*inputs, *outputs)])
    return outputs
