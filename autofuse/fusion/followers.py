"""Followers: element-wise operations on values that are complete only after a node's loops.

In: the kernels of a node in program order, each with its iteration space. Out: which of them are calculated once, after
the loops, and whether no other reads such a value. ``relu(x.sum()) * 2`` is one reduction with two followers.
Guarantee: a follower has as many elements as the value that it follows, and beside it reads nothing that the loops
make.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from autofuse.fusion.iteration_space import IterationSpace
from autofuse.ir.operation import Operation, ValueRef
from autofuse.ir.optable import KEEPS_NAN, OpKind, info
from autofuse.ir.shape import Dim

# What eager refuses, such as a class that does not exist, makes these losses NaN, by which the runtime finds it
# (`runtime/loss_guard.py`); what follows them must keep the NaN.
_GUARDED = ("nll_loss_forward", "binary_cross_entropy")


class Kernel(NamedTuple):
    """An operation and its loops."""

    op: Operation
    space: IterationSpace


class Followers(NamedTuple):
    """What is calculated after the loops of a node."""

    names: frozenset[str]
    is_sound: bool  # whether nothing else reads what is complete only then


_NONE = Followers(frozenset(), True)


def find_followers(
    kernels: Sequence[Kernel],
    base: Callable[[ValueRef], ValueRef],
    numel: Callable[[ValueRef], Dim | None],
) -> Followers:
    """The followers among the kernels of a node, in program order.

    ``base``: the value that a chain of views looks at; ``numel``: elements of a value, None for an unknown one.
    """
    if not any("terminal" in kernel.space.levels for kernel in kernels):
        return _NONE
    late: dict[ValueRef, Dim] = {}  # elements of the values that are complete only after the loops
    inside = {op.name for op, _ in kernels if info(op.target).kind is not OpKind.CREATION}
    names: set[str] = set()
    guarded = {op.name for op, _ in kernels if op.short_name in _GUARDED}
    is_sound = True
    for op, space in kernels:
        values = [(ValueRef(op.name, number), spec.numel) for number, spec in enumerate(op.outputs)]
        read = [base(ref) for ref in op.inputs if base(ref) in late]
        if not read:
            levels = zip(values, space.levels, strict=False)
            late.update(value for value, level in levels if level == "terminal")
            continue
        elements = op.outputs[0].numel
        fits = info(op.target).kind is OpKind.POINTWISE and elements in [late[ref] for ref in read]
        for ref in op.inputs:
            source, own = base(ref), numel(ref)
            is_at_hand = own == late[source] if source in late else source.name not in inside
            fits = fits and is_at_hand and own in (elements, 1)
        if guarded.intersection(ref.name for ref in read):
            guarded.add(op.name)
            fits = fits and op.short_name in KEEPS_NAN
        if fits:
            names.add(op.name)
            late.update(values)
        else:
            is_sound = False
    return Followers(frozenset(names), is_sound)
