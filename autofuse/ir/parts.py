"""Parts of a node that are independent of each other: each may have loops of its own in one kernel.

In: operations in program order. Out: their parts. Guarantee: no part reads what another one calculates. The planner and
the lowering ask the same question.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from autofuse.ir.operation import Operation, ValueRef
from autofuse.ir.optable import OpKind, info


def independent_parts(
    operations: Sequence[Operation], base: Callable[[ValueRef], ValueRef] = lambda ref: ref
) -> list[list[Operation]]:
    """The operations in parts, in the order of their first operations.

    An operation that cuts a tensor from outside into copies is in every part that reads one of them, and in none where
    nobody does. ``base``: the value that a chain of views looks at, where views are not among the operations.
    """
    cuts = cuts_of(operations, base)
    home: dict[str, list[str]] = {op.name: [op.name] for op in operations if op.name not in cuts}
    readers: dict[str, list[str]] = {}
    for op in operations:
        if op.name in cuts:
            continue
        for name in dict.fromkeys(base(ref).name for ref in op.inputs):
            first, second = home.get(name), home[op.name]
            if name in cuts:
                readers.setdefault(name, []).append(op.name)
            elif first is not None and first is not second:
                first += second
                home.update(dict.fromkeys(second, first))
    for cut, names in readers.items():
        for part in {id(home[name]): home[name] for name in names}.values():
            part.append(cut)
    parts = {id(names): set(names) for names in home.values()}.values()
    return [[op for op in operations if op.name in names] for names in parts]


def cuts_of(operations: Iterable[Operation], base: Callable[[ValueRef], ValueRef] = lambda ref: ref) -> set[str]:
    """The operations that cut a tensor from outside into copies, of which none depends on another."""
    operations = list(operations)
    inside = {op.name for op in operations}
    return {
        op.name
        for op in operations
        if info(op.target).kind is OpKind.MEMORY
        and len(op.outputs) > 1
        and not any(base(ref).name in inside for ref in op.inputs)
    }
