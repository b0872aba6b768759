"""Rules of the two families that need no code of their own, pointwise operators and views, and what rules share.

In: an operation and the index of one of its outputs. Out: the value there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from autofuse.codegen.dtypes import result_type
from autofuse.codegen.lowering.builder import Builder, Val
from autofuse.codegen.lowering.context import Context
from autofuse.codegen.lowering.index import Index, Word, atoms_of, broadcast_index, fresh_index, join
from autofuse.errors import LoweringError
from autofuse.ir.operation import Operation, ValueRef, map_arg
from autofuse.ir.shape import SymbolicShape


def infer_broadcast(cx: Context, op: Operation) -> Index:
    """The loops of a pointwise result: those of its operands, joined dim by dim.

    A value that is read along two dims (``v[:, None] + v``) gives its loops to one of them; the other has its own.
    """
    shape = op.outputs[0].shape
    words: list[Word | None] = [() if dim == 1 else None for dim in shape]
    for ref in op.inputs:
        operand, sizes = cx.canonical(ref), cx.shape(ref)
        for back in range(1, len(sizes) + 1):
            if back > len(words) or sizes[-back] == 1:
                continue
            current = words[-back]
            others = tuple(word for n, word in enumerate(words) if word and n != len(words) - back)
            if set(atoms_of(others)) & set(atoms_of((operand[-back],))):
                continue
            if current is None or not current:
                words[-back] = operand[-back]
            else:
                join(current, operand[-back])
    return tuple(fresh_index(SymbolicShape((dim,)))[0] if w is None else w for w, dim in zip(words, shape, strict=True))


Scalar = Callable[..., Any]  # (builder, dtype of the result, *args, **kwargs) -> Val or a tuple of them


@dataclass(frozen=True)
class Pointwise:
    """A rule that makes one element from one element of each operand.

    ``function`` takes the builder, the dtype of the result, and the arguments of the aten operator.
    """

    function: Scalar
    counts: bool = True

    def infer(self, cx: Context, op: Operation) -> Sequence[Index | None]:
        return [infer_broadcast(cx, op)] * len(op.outputs)

    def evaluate(self, cx: Context, op: Operation, output: int, index: Index) -> Val:
        args, kwargs = operands_at(cx, op, index)
        found = self.function(cx.builder, op.outputs[output].dtype, *args, **kwargs)
        value: Val = found[output] if isinstance(found, tuple) else found
        return value


@dataclass(frozen=True)
class Comparison:
    """A rule that compares operands in their common dtype, which the bool result does not tell."""

    op: str
    counts: bool = True

    def infer(self, cx: Context, op: Operation) -> Sequence[Index | None]:
        return [infer_broadcast(cx, op)]

    def evaluate(self, cx: Context, op: Operation, output: int, index: Index) -> Val:
        b = cx.builder
        common = common_dtype(cx, op)
        (left, right, *_), _ = operands_at(cx, op, index)
        # aten rounds both operands to the common dtype, a Python number too: 0.1 in bfloat16 is not 0.1
        x, y = (b.round_to(b.cast(v, common), common) for v in (left, right))
        return b.apply(self.op, x, y)


def common_dtype(cx: Context, op: Operation) -> str:
    """``torch.result_type`` of an operation's tensor and number arguments."""
    specs = [cx.spec(ref) for ref in op.inputs]
    numbers = [a for a in op.args if isinstance(a, bool | int | float)]
    return result_type((s.dtype for s in specs if len(s.shape)), (s.dtype for s in specs if not len(s.shape)), numbers)


def operands_at(cx: Context, op: Operation, index: Index) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with every tensor replaced by its value where the broadcast result has ``index``."""

    def read(ref: ValueRef) -> Val:
        return cx.operand(ref, broadcast_index(index, cx.shape(ref)))

    return map_arg(op.args, read), {name: map_arg(arg, read) for name, arg in op.kwargs}


Remap = Callable[["Context", Operation, Index], Index]


@dataclass(frozen=True)
class View:
    """A rule that gives the same elements under another index."""

    forward: Remap  # index of the source -> index of the result
    backward: Remap  # index of the result -> index of the source
    counts: bool = False

    def infer(self, cx: Context, op: Operation) -> Sequence[Index | None]:
        try:
            return [self.forward(cx, op, cx.canonical(op.args[0]))]
        except LoweringError:
            if cx.aliased_input(ValueRef(op.name)) is None:
                raise
            return [fresh_index(op.outputs[0].shape)]

    def evaluate(self, cx: Context, op: Operation, output: int, index: Index) -> Val:
        try:
            return cx.operand(op.args[0], self.backward(cx, op, index))
        except LoweringError:
            source = cx.aliased_input(ValueRef(op.name))
            if source is None:
                raise
            # A view of an input is the same memory under strides of its own, however its dims relate.
            return cx.load(source, op.outputs[0], index)


Infer = Callable[["Context", Operation], Sequence[Index | None]]
Evaluate = Callable[["Context", Operation, int, Index], Val]


@dataclass(frozen=True)
class Custom:
    """A rule of two functions."""

    infer_function: Infer
    evaluate_function: Evaluate
    counts: bool = True

    def infer(self, cx: Context, op: Operation) -> Sequence[Index | None]:
        return self.infer_function(cx, op)

    def evaluate(self, cx: Context, op: Operation, output: int, index: Index) -> Val:
        return self.evaluate_function(cx, op, output, index)


def normal_dim(dim: int, rank: int) -> int:
    """A dim counted from the front."""
    return dim + rank if dim < 0 else dim


def normal_dims(dims: Any, rank: int) -> tuple[int, ...]:
    """Dims counted from the front; None or an empty list means all of them."""
    if dims is None or dims == ():
        return tuple(range(rank))
    if isinstance(dims, int):
        dims = (dims,)
    return tuple(normal_dim(int(d), rank) for d in dims)


__all__ = [
    "Builder", "Comparison", "Custom", "Pointwise", "View", "common_dtype",
    "infer_broadcast", "normal_dim", "normal_dims", "operands_at",
]  # fmt: skip
