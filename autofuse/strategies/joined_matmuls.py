"""A sum of matmuls of one size, as one matmul of concatenated operands.

In: a form. Out: the form with each such sum as one extern operation, or None. Guarantee: terms that are not matmuls are
added as before. The order of the sum changes, within the rounding of a longer matmul.

The gradient of a weight that is used at every time step is such a sum: each matmul reads and writes the whole gradient
for a few rows of input. Concatenated, the gradient is written once.
"""

from __future__ import annotations

from autofuse.fusion.graph import FusionGraph
from autofuse.ir.operation import NodeForm, Operation, ValueRef
from autofuse.strategies.chains import replaced
from autofuse.strategies.strategy import graph_of

LEAST = 3  # matmuls: with two, concatenation costs as much as it saves
SUM = "vendor.sum_of_products.default"


def joined_products(form: NodeForm) -> NodeForm | None:
    """The form with its longest sums as one matmul each; None without such sums."""
    current, count = form, 0
    for name in [op.name for op in reversed(form.operations) if _is_sum(op)]:
        graph = graph_of(current)
        op = graph.by_name.get(name)
        if op is None:
            continue
        inner, terms = _terms(graph, op)
        found = {ref: chain for ref in terms if (chain := _product(graph, ref, op)) is not None}
        for is_transposed in (False, True):
            products = {ref: chain for ref, chain in found.items() if len(chain) % 2 != is_transposed}
            if len(products) >= LEAST:
                gone = [*inner, *(o for chain in products.values() for o in chain), op]
                current = replaced(current, gone, _joined(op, terms, products, is_transposed))
                count += 1
                break
    return current if count else None


def _is_sum(op: Operation) -> bool:
    return op.target == "aten.add.Tensor" and len(op.args) == 2 and not op.kwargs


def _terms(graph: FusionGraph, op: Operation) -> tuple[list[Operation], list[ValueRef]]:
    """The sums that only this sum reads, transitively, and their terms."""
    inner: list[Operation] = []
    terms: list[ValueRef] = []
    for arg in op.args:
        if not isinstance(arg, ValueRef):
            return [], []
        maker = graph.by_name.get(arg.name)
        if maker is not None and _is_sum(maker) and graph.has_single_consumer(maker) and _is_like(graph, arg, op):
            more, found = _terms(graph, maker)
            inner += [*more, maker]
            terms += found
        else:
            terms.append(arg)
    return inner, terms


def _is_like(graph: FusionGraph, ref: ValueRef, op: Operation) -> bool:
    spec, out = graph.spec(ref), op.outputs[0]
    return (spec.shape, spec.dtype) == (out.shape, out.dtype)


def _product(graph: FusionGraph, ref: ValueRef, op: Operation) -> list[Operation] | None:
    """The matmul behind a term, and the transposes between, where nothing else reads any of them."""
    if not _is_like(graph, ref, op):
        return None
    chain: list[Operation] = []
    while ref.name in graph.by_name and graph.has_single_consumer(graph.by_name[ref.name]):
        maker = graph.by_name[ref.name]
        chain.insert(0, maker)
        if maker.short_name == "mm":
            return chain if not maker.kwargs else None
        if maker.short_name != "t":
            return None
        ref = maker.inputs[0]
    return None


def _joined(
    op: Operation, terms: list[ValueRef], products: dict[ValueRef, list[Operation]], is_transposed: bool
) -> list[Operation]:
    """The operations in place of the sum: the concatenated matmul, then the other terms."""
    left, right = (tuple(chain[0].args[side] for chain in products.values()) for side in (0, 1))
    rest = [ref for ref in terms if ref not in products]
    spec = op.outputs[0]
    names = [*(f"{op.name}_sum{n}" for n in range(len(rest))), op.name]
    made = [Operation(names[0], SUM, (left, right, is_transposed), (), (spec,), op.source)]
    for ref, name in zip(rest, names[1:], strict=True):
        made.append(Operation(name, "aten.add.Tensor", (ValueRef(made[-1].name), ref), (), (spec,), op.source))
    return made
