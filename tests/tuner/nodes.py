"""Nodes and requests for the tests of the tuner."""

from __future__ import annotations

import hashlib

from autofuse.codegen.version import versions
from autofuse.ir.buckets import bucket_of
from autofuse.ir.device import cpu_device
from autofuse.ir.operation import NodeForm, NodeInput, Operation, TensorSpec, ValueRef
from autofuse.ir.records import DecisionKey, ObservedShape, TuneRequest
from autofuse.ir.shape import SymbolicShape, contiguous_strides


def spec(*dims: int | str, dtype: str = "float32") -> TensorSpec:
    shape = SymbolicShape(dims)
    return TensorSpec(shape, dtype, SymbolicShape(contiguous_strides(shape.dims)))


def chain_form(length: int = 8, width: int = 512) -> NodeForm:
    """A long element-wise chain: fusing it wins by far on any machine."""
    full = spec("s0", width)
    targets = ("aten.mul.Tensor", "aten.add.Tensor")
    last, operations = "i0", []
    for number in range(length):
        args = (ValueRef(last), ValueRef("i1"))
        operations.append(Operation(f"v{number}", targets[number % 2], args, (), (full,)))
        last = f"v{number}"
    return NodeForm((NodeInput("i0", full), NodeInput("i1", full)), tuple(operations), (ValueRef(last),), ("s0",))


def group_form(length: int = 8) -> NodeForm:
    """A product with a long element-wise chain after it: whichever strategy fuses the chain wins by far."""
    full = spec("s0", 512)
    operations = [Operation("v0", "aten.mm.default", (ValueRef("i0"), ValueRef("i1")), (), (full,))]
    for number in range(1, length + 1):
        target = ("aten.mul.Tensor", "aten.add.Tensor")[number % 2]
        operations.append(Operation(f"v{number}", target, (ValueRef(f"v{number - 1}"), ValueRef("i2")), (), (full,)))
    inputs = (NodeInput("i0", spec("s0", 16)), NodeInput("i1", spec(16, 512)), NodeInput("i2", full))
    return NodeForm(inputs, tuple(operations), (ValueRef(f"v{length}"),), ("s0",))


def matmul_form() -> NodeForm:
    """A node without a loop form, of a dtype that no vendor but aten has a product for."""
    square = spec("s0", "s0", dtype="float64")
    product = Operation("v0", "aten.mm.default", (ValueRef("i0"), ValueRef("i0")), (), (square,))
    return NodeForm((NodeInput("i0", square),), (product,), (ValueRef("v0"),), ("s0",))


def request(
    form: NodeForm, values: tuple[int, ...], *, calls: int = 5, unfused_us: float = 50.0, threads: int = 1,
    run_id: int | None = None,
) -> TuneRequest:  # fmt: skip
    bucket = bucket_of(values)
    fusion_id = hashlib.sha256(form.text().encode()).hexdigest()
    key = DecisionKey(fusion_id, bucket.label, cpu_device().key, threads, versions())
    shapes = (ObservedShape(values, calls),)
    return TuneRequest(key, form.to_json(), bucket, shapes, calls, unfused_us, 2.0, run_id)
