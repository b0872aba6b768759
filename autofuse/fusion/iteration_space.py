"""The iteration space of an operation: which loop nest it needs, and what becomes of its outputs there.

In: an operation and the specs of its inputs. Out: an `IterationSpace`: how many elements it iterates over, how
that splits into rows (kept) and columns (reduced), and per output whether it is a full tensor, one
value a row, or only complete when all rows are done.
Guarantee: two operations with compatible spaces can share one loop nest; the lowering has the last word.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from autofuse.ir.operation import Operation, TensorSpec, ValueRef
from autofuse.ir.optable import FUSIBLE, VIEWS, OpKind, info
from autofuse.ir.reductions import reduced_dims
from autofuse.ir.shape import Dim, product
from autofuse.ir.writes import operands_of, written_elements

Level = Literal["full", "row", "terminal"]


@dataclass(frozen=True)
class IterationSpace:
    """Iteration space of one operation."""

    numel: Dim  # elements iterated over
    rows: Dim | None  # elements kept when columns are reduced; None: no split requested
    levels: tuple[Level, ...]  # per output
    general: tuple[object, ...] = ()  # not empty: an unusual reduction that only matches itself
    parts: tuple[Dim, ...] = ()  # elements of operands that are read at other places: a piece, or a whole that is cut
    along: tuple[Dim, ...] = ()  # those of the parts that run over some of the loops
    spread: tuple[Dim, ...] = ()  # elements of operands that stay the same along all of the last dims: one a row
    again: tuple[Dim, ...] = ()  # elements of operands that stay the same along other dims: made anew at each step


def iteration_space_of(op: Operation, spec: Callable[[ValueRef], TensorSpec]) -> IterationSpace | None:
    """The iteration space of a fusible operation, None for one that has none (opaque, random)."""
    kind = info(op.target).kind
    rule = _RULES.get(op.short_name)
    if rule is not None:
        return rule(op, [spec(ref) for ref in op.inputs])
    levels: tuple[Level, ...] = tuple(["full"] * len(op.outputs))
    if kind is OpKind.POOLING and op.short_name.endswith("_backward"):
        numel, pooled = op.outputs[0].numel, spec(op.inputs[0]).numel
        return IterationSpace(numel, None, levels, parts=(pooled,) if pooled != numel else ())
    if kind in (OpKind.POINTWISE, OpKind.POOLING, OpKind.CREATION):
        return IterationSpace(op.outputs[0].numel, None, levels)
    if kind is OpKind.MEMORY:
        numel = op.outputs[0].numel
        pieces = dict.fromkeys(spec(ref).numel for ref in op.inputs)
        return IterationSpace(numel, None, levels, parts=tuple(piece for piece in pieces if piece != numel))
    if kind is OpKind.INDEXED:
        return _indexed(op, spec)
    if kind is OpKind.WRITE:
        return _written(op, spec)
    if kind is OpKind.REDUCTION:
        return _reduction(op, spec(op.inputs[0]))
    return None


def is_constant(op: Operation) -> bool:
    """Whether an operation makes one known number, such as the zero of a ``where``; loops of any size may hold it."""
    return info(op.target).kind is OpKind.CREATION and not op.inputs and op.outputs[0].numel == 1


def _indexed(op: Operation, spec: Callable[[ValueRef], TensorSpec]) -> IterationSpace:
    """The space of the result; indices may be made beside it, the table is of another size and given."""
    numel, (table, *indices) = op.outputs[0].numel, op.inputs
    sizes = dict.fromkeys(spec(ref).numel for ref in indices if ref != table)
    parts = tuple(size for size in sizes if size != numel)
    return IterationSpace(numel, None, ("full",), parts=parts, along=parts)


def _written(op: Operation, spec: Callable[[ValueRef], TensorSpec]) -> IterationSpace:
    """The space of the elements that are written; the result is complete only after them."""
    numel = written_elements(op, spec)
    sizes = dict.fromkeys(spec(ref).numel for ref in operands_of(op))
    return IterationSpace(numel, None, ("terminal",), parts=tuple(size for size in sizes if size != numel))


def with_parts(
    space: IterationSpace | None,
    op: Operation,
    operations: Mapping[str, Operation],
    spec: Callable[[ValueRef], TensorSpec],
) -> IterationSpace | None:
    """The iteration space with what the operation reads of other operations through slices, or broadcasts."""
    if space is not None and info(op.target).kind is OpKind.POINTWISE:
        smaller = dict.fromkeys(_broadcast_operand(op, ref, operations, spec) for ref in op.inputs)
        found = [operand for operand in smaller if operand is not None]
        space = replace(
            space,
            spread=tuple(operand.numel for operand in found if operand.is_row),
            again=tuple(operand.numel for operand in found if not operand.is_row),
        )
    pieces: dict[Dim, None] = {}
    for ref in op.inputs:
        is_cut = False
        while ref.name in operations and info(operations[ref.name].target).kind in VIEWS:
            is_cut |= info(operations[ref.name].target).kind is OpKind.PART
            ref = operations[ref.name].inputs[0]
        if is_cut and ref.name in operations and info(operations[ref.name].target).kind in FUSIBLE:
            pieces[spec(ref).numel] = None
    if space is None or not pieces:
        return space
    along = tuple(part for part in space.along if part not in pieces)
    return replace(space, parts=(*space.parts, *pieces), along=along)


class _Smaller(NamedTuple):
    """An operand that is broadcast."""

    numel: Dim
    is_row: bool  # along all of the last dims, and no others


def _broadcast_operand(
    op: Operation, ref: ValueRef, operations: Mapping[str, Operation], spec: Callable[[ValueRef], TensorSpec]
) -> _Smaller | None:
    """An operand of several elements that another operation makes and this one broadcasts; None for any other."""
    shape = op.outputs[0].shape.dims
    while ref.name in operations:
        own = spec(ref).shape.dims
        if product(own) not in (1, product(shape)):
            break
        if info(operations[ref.name].target).kind is not OpKind.VIEW:
            return None
        shape, ref = own, operations[ref.name].inputs[0]
    else:
        return None
    while ref.name in operations and info(operations[ref.name].target).kind is OpKind.VIEW:
        ref = operations[ref.name].inputs[0]
    padded = (1,) * (len(shape) - len(own)) + own
    kept = max((n + 1 for n, dim in enumerate(padded) if dim != 1), default=0)
    is_made = ref.name in operations and info(operations[ref.name].target).kind in FUSIBLE
    if not is_made or spec(ref).numel != product(own):
        return None
    return _Smaller(product(own), padded[:kept] == shape[:kept])


def _normalised_dim(op: Operation, rank: int) -> tuple[int, ...]:
    """The dim of a softmax or of its gradient, counted from the front."""
    dim = int(op.arg(2 if op.short_name.endswith("_backward_data") else 1))
    return (dim % rank if rank else 0,)


def _split(shape: Sequence[Dim], dims: Sequence[int]) -> tuple[Dim | None, Level, tuple[object, ...]]:
    """How reducing ``dims`` splits the space: (rows, level of the result, general key)."""
    rank = len(shape)
    kept = [i for i in range(rank) if i not in dims]
    sized = [i for i in range(rank) if shape[i] != 1]  # dims of size 1 belong to either side
    reduced_sized = [i for i in sized if i in dims]
    if not [i for i in sized if i in kept]:
        return None, "terminal", ()
    if sized[len(sized) - len(reduced_sized) :] == reduced_sized:
        return product(shape[i] for i in kept), "row", ()
    if sized[: len(reduced_sized)] == reduced_sized:
        return product(shape[i] for i in dims), "terminal", ()
    return product(shape[i] for i in kept), "row", ("dims", tuple(dims), tuple(map(str, shape)))


def _reduction(op: Operation, source: TensorSpec) -> IterationSpace:
    rows, level, general = _split(source.shape.dims, reduced_dims(op, len(source.shape)).dims)
    levels: tuple[Level, ...] = tuple([level] * len(op.outputs))
    return IterationSpace(source.numel, rows, levels, general)


def _softmax(op: Operation, inputs: list[TensorSpec]) -> IterationSpace:
    shape = inputs[0].shape
    dims = _normalised_dim(op, len(shape))
    rows, level, general = _split(shape.dims, dims)
    if level == "terminal":  # softmax over a leading dim: its rows lie across memory
        general = ("softmax", dims, tuple(map(str, shape.dims)))
        rows = product(d for i, d in enumerate(shape.dims) if i not in dims)
    return IterationSpace(shape.numel, rows, ("full",), general)


def _scan(op: Operation, inputs: list[TensorSpec]) -> IterationSpace:
    levels: tuple[Level, ...] = tuple(["full"] * len(op.outputs))
    return replace(_softmax(op, inputs), levels=levels)


def _layer_norm(op: Operation, inputs: list[TensorSpec]) -> IterationSpace:
    shape = inputs[0].shape.dims
    rows = product(shape[: len(shape) - len(op.args[1])])
    return IterationSpace(product(shape), rows, ("full", "row", "row"))


def _layer_norm_backward(op: Operation, inputs: list[TensorSpec]) -> IterationSpace:
    shape = inputs[0].shape.dims
    rows = product(shape[: len(shape) - len(op.args[2])])
    return IterationSpace(product(shape), rows, ("full", "terminal", "terminal"))


def _rms_norm(op: Operation, inputs: list[TensorSpec]) -> IterationSpace:
    shape = inputs[0].shape.dims
    rows = product(shape[: len(shape) - len(op.args[1])])
    return IterationSpace(product(shape), rows, ("full", "row"))


def _rms_norm_backward(op: Operation, inputs: list[TensorSpec]) -> IterationSpace:
    shape = inputs[0].shape.dims
    rows = product(shape[: len(shape) - len(op.args[2])])
    return IterationSpace(product(shape), rows, ("full", "terminal"))


def _nll_forward(op: Operation, inputs: list[TensorSpec]) -> IterationSpace | None:
    shape = inputs[0].shape.dims
    if len(shape) != 2:
        return None
    level: Level = "row" if op.arg(3) == 0 else "terminal"
    return IterationSpace(product(shape), shape[0], (level, "terminal"))


def _nll_backward(op: Operation, inputs: list[TensorSpec]) -> IterationSpace | None:
    shape, rows = inputs[1].shape.dims, inputs[0].numel  # of the classes' scores, and of the losses
    spread = () if rows == 1 else (rows,)
    return IterationSpace(product(shape), None, ("full",), spread=spread) if len(shape) == 2 else None


def _mse(op: Operation, inputs: list[TensorSpec]) -> IterationSpace:
    level: Level = "full" if op.arg(2, 1) == 0 else "terminal"
    return IterationSpace(inputs[0].numel, None, (level,))


def _elements_backward(op: Operation, inputs: list[TensorSpec]) -> IterationSpace:
    """The gradient of a loss of elements, whichever its reduction."""
    return IterationSpace(op.outputs[0].numel, None, ("full",))


def _bce_of_logits(op: Operation, inputs: list[TensorSpec]) -> IterationSpace:
    level: Level = "full" if op.arg(4, 1) == 0 else "terminal"
    return IterationSpace(inputs[0].numel, None, (level,))


def _bce(op: Operation, inputs: list[TensorSpec]) -> IterationSpace:
    level: Level = "full" if op.arg(3, 1) == 0 else "terminal"
    return IterationSpace(inputs[0].numel, None, (level,))


def _channels(op: Operation, inputs: list[TensorSpec]) -> IterationSpace:
    """Batch norm: everything but dim 1 is reduced.

    It shares loops with what works element by element, and among norms only with those of the same shape.
    """
    shape = inputs[0].shape.dims
    key = ("channels", tuple(map(str, shape)))
    statistics: list[Level] = ["row"] * (len(op.outputs) - 1)
    return IterationSpace(product(shape), shape[1], ("full", *statistics), key)


def _group_norm(op: Operation, inputs: list[TensorSpec]) -> IterationSpace:
    shape = inputs[0].shape.dims
    rows = product((shape[0], op.args[6]))
    return IterationSpace(product(shape), rows, ("full", "row", "row"), ("group_norm", tuple(map(str, shape))))


def _group_norm_backward(op: Operation, inputs: list[TensorSpec]) -> IterationSpace:
    """The gradients of weight and bias are sums over other loops: each output has a nest of its own."""
    shape = inputs[0].shape.dims
    key = ("group_norm", tuple(map(str, shape)))
    return IterationSpace(product(shape), product((shape[0], op.args[8])), ("full", "terminal", "terminal"), key)


_RULES: dict[str, Callable[[Operation, list[TensorSpec]], IterationSpace | None]] = {
    **dict.fromkeys(("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"), _scan),
    "_softmax": _softmax,
    "_log_softmax": _softmax,
    "_safe_softmax": _softmax,
    "_softmax_backward_data": _softmax,
    "_log_softmax_backward_data": _softmax,
    "native_layer_norm": _layer_norm,
    "native_layer_norm_backward": _layer_norm_backward,
    "_fused_rms_norm": _rms_norm,
    "_fused_rms_norm_backward": _rms_norm_backward,
    "nll_loss_forward": _nll_forward,
    "nll_loss_backward": _nll_backward,
    "mse_loss": _mse,
    "huber_loss": _mse,
    "smooth_l1_loss": _mse,
    "mse_loss_backward": _elements_backward,
    "huber_loss_backward": _elements_backward,
    "smooth_l1_loss_backward": _elements_backward,
    "binary_cross_entropy_with_logits": _bce_of_logits,
    "binary_cross_entropy": _bce,
    "binary_cross_entropy_backward": _elements_backward,
    "soft_margin_loss": _mse,
    "soft_margin_loss_backward": _elements_backward,
    "_native_batch_norm_legit": _channels,
    "_native_batch_norm_legit_functional": _channels,
    "_native_batch_norm_legit_no_training": lambda op, i: IterationSpace(
        i[0].numel, None, ("full", "terminal", "terminal")
    ),
    "native_batch_norm_backward": _channels,
    "native_group_norm": _group_norm,
    "native_group_norm_backward": _group_norm_backward,
}
