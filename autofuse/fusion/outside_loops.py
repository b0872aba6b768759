"""Operations that a node calculates once, before or after its loops.

In: the kernels of a node in program order, each with its iteration space. Out: leaders, which calculate one element
from single elements (``(g * 2).expand(5, 7) * x`` has one) or make the zeros that are written into by an index,
followers, which are element-wise operations on values that are complete only after the loops (``relu(x.sum()) * 2`` has
two), and whether no other operation reads such a value.
Guarantee: a follower has as many elements as the value that it follows, and beside it reads nothing that the loops
make.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from autofuse.fusion.iteration_space import IterationSpace
from autofuse.ir.guarded import GUARDED, keeps_nan
from autofuse.ir.operation import Operation, ValueRef
from autofuse.ir.optable import OpKind, info
from autofuse.ir.shape import Dim
from autofuse.ir.writes import base_of, is_write, operands_of


class Kernel(NamedTuple):
    """An operation and its loops."""

    op: Operation
    space: IterationSpace


class Outside(NamedTuple):
    """What is calculated outside the loops of a node."""

    leaders: frozenset[str]
    followers: frozenset[str]
    is_sound: bool  # whether no other operation reads what is complete only after the loops

    def has(self, name: str) -> bool:
        """Whether an operation is calculated there."""
        return name in self.leaders or name in self.followers


def find_outside(
    kernels: Sequence[Kernel],
    base: Callable[[ValueRef], ValueRef],
    numel: Callable[[ValueRef], Dim | None],
) -> Outside:
    """The leaders and followers among the kernels of a node, in program order.

    ``base``: the value that a chain of views looks at; ``numel``: elements of a value, None for an unknown one.
    """
    leaders: set[str] = set()
    if not any("terminal" in kernel.space.levels for kernel in kernels):
        loops = {op.name for op, _ in kernels}
        for op, _ in kernels:
            if _is_single(op, numel) and all(base(ref).name not in loops - leaders for ref in op.inputs):
                leaders.add(op.name)  # a number that the loops make, such as the mean of the only row, leads none
        return Outside(frozenset(leaders), frozenset(), True)
    late: dict[ValueRef, Dim] = {}  # elements of the values that are complete only after the loops
    leaders.update(_only_written_into(kernels))
    inside = {op.name for op, _ in kernels if info(op.target).kind is not OpKind.CREATION}
    names: set[str] = set()
    guarded = {op.name for op, _ in kernels if op.short_name in GUARDED}
    is_sound = True
    for op, space in kernels:
        values = [(ValueRef(op.name, number), spec.numel) for number, spec in enumerate(op.outputs)]
        read = [base(ref) for ref in op.inputs if base(ref) in late]
        if not read:
            levels = zip(values, space.levels, strict=False)
            late.update(value for value, level in levels if level == "terminal")
            if _is_single(op, numel):
                leaders.add(op.name)
            continue
        elements = op.outputs[0].numel
        fits = info(op.target).kind is OpKind.POINTWISE and elements in [late[ref] for ref in read]
        for ref in op.inputs:
            source, own = base(ref), numel(ref)
            is_at_hand = own == late[source] if source in late else source.name not in inside - leaders
            fits = fits and is_at_hand and own in (elements, 1)
        if guarded.intersection(ref.name for ref in read):
            guarded.add(op.name)
            fits = fits and keeps_nan(op)
        if fits:
            names.add(op.name)
            late.update(values)
        else:
            is_sound = False
    return Outside(frozenset(leaders), frozenset(names), is_sound)


def _only_written_into(kernels: Sequence[Kernel]) -> set[str]:
    """Constants that are only there to be written into, before the loops of the values that are written."""
    bases = [base_of(op) for op, _ in kernels if is_write(op)]
    named = {ref.name for ref in bases if ref is not None}
    read = {ref.name for op, _ in kernels for ref in (operands_of(op) if is_write(op) else op.inputs)}
    return {op.name for op, _ in kernels if op.name in named - read and info(op.target).kind is OpKind.CREATION}


def _is_single(op: Operation, numel: Callable[[ValueRef], Dim | None]) -> bool:
    """Whether an operation makes one element from single elements."""
    return (
        info(op.target).kind in (OpKind.POINTWISE, OpKind.CREATION)
        and all(spec.numel == 1 for spec in op.outputs)
        and all(numel(ref) == 1 for ref in op.inputs)
    )
