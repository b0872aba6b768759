"""Sizes that calls of a node can have, where some of its symbols depend on others.

In: a node, the sizes of a real call, a bucket, sizes that are wanted. Out: the wanted sizes, with symbols changed that
contradict others. In a graph with sizes s and s / 2, or with a tensor of the sizes a and b whose rows are a stride c
apart, a node has a symbol for each: its form does not say that they belong together.
Guarantee: all sizes are in the bucket; those that cannot be mended are left out. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autofuse.ir.operation import NodeForm, TensorSpec
from autofuse.ir.records import Bucket
from autofuse.ir.shape import Dim, as_dim, evaluate, free_symbols

Values = tuple[int, ...]
_REGROUPS = ("view", "_unsafe_view", "reshape")  # keep the number of elements


def possible_sizes(form: NodeForm, bucket: Bucket, real: Values, wanted: Sequence[Values]) -> list[Values]:
    """The wanted sizes as far as they are possible, no repeats; the real ones where none is."""
    ties = list(dict.fromkeys(_ties(form, real)))
    found = [_mended(ties, form.symbols, bucket, values) for values in wanted]
    return list(dict.fromkeys(values for values in found if values is not None)) or [real]


def _ties(form: NodeForm, real: Values) -> Iterator[Dim]:
    """Expressions that are 0 in each call."""
    table = dict(zip(form.symbols, real, strict=True))
    for op in form.operations:
        if op.short_name in _REGROUPS:
            difference = as_dim(form.spec(op.args[0]).numel - op.outputs[0].numel)
            if not isinstance(difference, int):
                yield difference
    for item in form.inputs:
        for difference in _steps(item.spec):
            if not isinstance(difference, int) and evaluate(difference, table) == 0:
                yield difference


def _steps(spec: TensorSpec) -> Iterator[Dim]:
    """For any two dims, what is 0 where the outer one begins right behind the inner one."""
    dims = list(zip(spec.shape, spec.strides, strict=True))
    for outer in dims:
        for inner in dims:
            if inner is not outer:
                yield as_dim(outer[1] - inner[0] * inner[1])


def _mended(ties: Sequence[Dim], symbols: Sequence[str], bucket: Bucket, values: Values) -> Values | None:
    """The values with one symbol of each contradiction calculated from the others; None where that does not help."""
    table = dict(zip(symbols, values, strict=True))
    for tie in ties:
        if evaluate(tie, table) != 0:
            table |= next(_solutions(tie, table, symbols, bucket), {})
    mended = tuple(table[name] for name in symbols)
    return mended if all(evaluate(tie, table) == 0 for tie in ties) and bucket.contains(mended) else None


def _solutions(tie: Dim, table: dict[str, int], symbols: Sequence[str], bucket: Bucket) -> Iterator[dict[str, int]]:
    """Values of single symbols of a tie under which it is 0, where it is linear in the symbol."""
    for name in free_symbols(tie):
        at_0, at_1, at_2 = (evaluate(tie, table | {name: value}) for value in (0, 1, 2))
        slope, (low, high) = at_1 - at_0, bucket.ranges[symbols.index(name)]
        if slope and at_2 - at_1 == slope and at_0 % slope == 0 and low <= -at_0 // slope <= high:
            yield {name: -at_0 // slope}
