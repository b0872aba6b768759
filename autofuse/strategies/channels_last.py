"""Channels last: convolutions that read each other's results, with channels-last tensors between them.

In: a form with several convolutions. Out: the form in which convolutions and poolings read and return NCHW tensors in
memory order [N, H, W, C]. Inputs and outputs of the form keep their strides, with copies at the borders. Guarantee: the
same operations on the same elements; whether the copies pay is measured, as for every strategy.

A library's convolution of contiguous NCHW tensors reorders them before and after, each convolution by itself (oneDNN's,
for a module of Inception, twice as slow). Changing the layout for one convolution alone gains nothing, so a chain of
convolutions is a group.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from autofuse.errors import FusionError
from autofuse.fusion.graph import FusionGraph
from autofuse.ir.operation import NodeForm, Operation, TensorSpec, ValueRef, map_arg
from autofuse.ir.optable import FUSIBLE, VIEWS, OpKind, info
from autofuse.ir.shape import SymbolicShape, contiguous_strides
from autofuse.strategies.chains import is_contiguous, live
from autofuse.strategies.rewrites import Rewrite, rewrites
from autofuse.strategies.strategy import graph_of

LAST = "channels_last"  # the name of the strategy, and the prefix of others
CONVOLUTIONS = ("convolution",)
POOLINGS = ("max_pool2d_with_indices", "avg_pool2d", "_adaptive_avg_pool2d")
ATEN = "vendor.aten.default"  # an aten operation whose results are copied to the promised strides if they differ
LEAST_NET, LARGEST_NET = 2, 16  # convolutions in a group: a longer chain is several groups, with copies where they meet
# Depth of a chain. In deeper chains, large values overflow at other elements than in eager, which the verifier refuses;
# their convolutions are better groups of their own.
DEEPEST_NET = 4
_VENDOR = "vendor.convolution.default"
# Operators of these kinds work on images in any order of dims; of an index nobody knows that it takes images to images,
# and a decomposition was traced for one order.
_ON_IMAGES = FUSIBLE - VIEWS - {OpKind.INDEXED, OpKind.WRITE, OpKind.COMPOSITE}


def is_image(spec: TensorSpec) -> bool:
    """Whether a tensor is [N, C, H, W]."""
    return len(spec.shape) == 4


def keeps_images(op: Operation) -> bool:
    """Whether an operation maps NCHW tensors to NCHW tensors, in any memory layout."""
    if not any(is_image(spec) for spec in op.outputs):
        return False
    return op.short_name in (*CONVOLUTIONS, *POOLINGS) or info(op.target).kind in _ON_IMAGES


def channels_last(form: NodeForm) -> NodeForm | None:
    """The form with channels-last tensors between its operations; None where no tensor's layout would change."""
    writer = _Writer(graph_of(form))
    try:
        for op in form.operations:
            writer.add(op)
        outputs = tuple(writer.as_was(ref) for ref in form.outputs)
    except FusionError:
        return None
    if not writer.changed:
        return None
    operations = live(writer.operations, outputs)
    for name in writer.indexed:
        operations = _early(operations, name)
    return replace(form, operations=operations, outputs=outputs)


def layouts(form: NodeForm) -> list[Rewrite]:
    """The channels-last forms of this form and of each of its rewrites; none for a single convolution."""
    if sum(op.short_name in CONVOLUTIONS for op in form.operations) < LEAST_NET:
        return []
    bases = [Rewrite("", form, ""), *rewrites(form)]
    words = "images channels last from one convolution to the next"
    return [
        Rewrite("_".join(filter(None, (LAST, base.name))), made, ", ".join(filter(None, (words, base.detail))))
        for base in bases
        if (made := channels_last(base.form)) is not None
    ]


def _early(operations: Sequence[Operation], name: str) -> tuple[Operation, ...]:
    """Move an operation, and those that depend only on it, before all that it does not need."""
    inputs = {op.name: {ref.name for ref in op.inputs} for op in operations}
    if name not in inputs:
        return tuple(operations)
    first, open_names = {name}, [name]
    while open_names:
        needed = inputs[open_names.pop()] & inputs.keys() - first
        first |= needed
        open_names += needed
    branch = {name}
    for op in operations:
        if op.name not in first and inputs[op.name] & branch and inputs[op.name] & inputs.keys() <= first:
            branch.add(op.name)
            first.add(op.name)
    return tuple(sorted(operations, key=lambda op: op.name not in first))


class _Writer:
    """Writes each operation again; channels-last results get names of their own."""

    def __init__(self, graph: FusionGraph) -> None:
        self.graph = graph
        self.operations: list[Operation] = []
        self.last: dict[ValueRef, ValueRef] = {}  # values that exist channels last
        # Values in their original layout.
        self.was: dict[ValueRef, ValueRef] = {ValueRef(name): ValueRef(name) for name in graph.inputs}
        self.changed = False
        # Poolings that also return indices, unread and twice as large as the tensor, come early, so that no other
        # branch's results are in memory at that time.
        self.indexed: list[str] = []

    def add(self, op: Operation) -> None:
        weight = {op.args[1]} if op.target == _VENDOR or op.short_name in CONVOLUTIONS else set()
        if weight or (op.short_name in POOLINGS and not op.kwargs):
            if all(is_image(spec) for spec in op.outputs):
                self._add_last(op, {*op.inputs} - weight)
                return
        elif info(op.target).kind in _ON_IMAGES and any(ref in self.last for ref in op.inputs):
            if is_image(op.outputs[0]):  # all in the same layout, which aten then gives to the result
                self._add_last(op, {*op.inputs})
            else:
                self._add(op, {ref: self.last.get(ref) or self.as_was(ref) for ref in op.inputs})
            return
        self._add(op, {ref: self.as_was(ref) for ref in op.inputs})

    def _add(self, op: Operation, table: Mapping[ValueRef, ValueRef]) -> None:
        self.operations.append(replace(op, args=_renamed(op.args, table)))
        self.was |= {ValueRef(op.name, i): ValueRef(op.name, i) for i in range(len(op.outputs))}

    def _add_last(self, op: Operation, images: Collection[ValueRef]) -> None:
        """Add an operation with a channels-last result, which reads ``images`` channels last."""
        last = {ref for ref in images if is_image(self.graph.spec(ref))}
        table = {ref: self.as_last(ref) if ref in last else self.as_was(ref) for ref in op.inputs}
        outputs = tuple(_last(spec) if is_image(spec) else spec for spec in op.outputs)
        if outputs == op.outputs:  # they are channels last already
            self._add(op, table)
            self.last |= {ValueRef(op.name, i): ValueRef(op.name, i) for i in range(len(outputs))}
            return
        self.changed = True
        name, target, args = f"{op.name}_last", op.target, _renamed(op.args, table)
        if info(target).kind not in FUSIBLE and target != _VENDOR:
            target, args = ATEN, (target, *args)
        self.operations.append(replace(op, name=name, target=target, args=args, outputs=outputs))
        if len(outputs) > 1:
            self.indexed.append(name)
        for index, spec in enumerate(outputs):
            (self.last if is_image(spec) else self.was)[ValueRef(op.name, index)] = ValueRef(name, index)

    def as_last(self, ref: ValueRef) -> ValueRef:
        """The value if it is channels last already, else a channels-last copy."""
        if ref not in self.last:
            spec = self.graph.spec(ref)
            wanted = _last(spec)
            self.last[ref] = self._copy(ref, self.as_was(ref), "last", wanted) if wanted != spec else self.as_was(ref)
        return self.last[ref]

    def as_was(self, ref: ValueRef) -> ValueRef:
        """The value with the form's strides: itself or a copy. Raises FusionError where a copy cannot have them."""
        if ref not in self.was:
            spec = self.graph.spec(ref)
            if not is_contiguous(spec):
                raise FusionError(f"expected {ref.name} channels last or row by row, found strides {spec.strides}")
            self.was[ref] = self._copy(ref, self.last[ref], "rows", spec)
        return self.was[ref]

    def _copy(self, ref: ValueRef, source: ValueRef, order: str, spec: TensorSpec) -> ValueRef:
        name = f"{ref.name}_{ref.index}_{order}"
        memory_format = "channels_last" if order == "last" else "contiguous_format"
        kwargs = (("memory_format", memory_format),)
        self.operations.append(Operation(name, "aten.clone.default", (source,), kwargs, (spec,)))
        self.changed = True
        return ValueRef(name)


def _renamed(args: tuple[Any, ...], table: Mapping[ValueRef, ValueRef]) -> tuple[Any, ...]:
    found: tuple[Any, ...] = map_arg(args, lambda ref: table.get(ref, ref))
    return found


def _last(spec: TensorSpec) -> TensorSpec:
    batch, channels, height, width = spec.shape.dims
    strides = contiguous_strides((batch, height, width, channels))
    return replace(spec, strides=SymbolicShape((strides[0], strides[3], strides[1], strides[2])))
