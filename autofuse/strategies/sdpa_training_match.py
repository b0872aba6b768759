"""Matches hand-written attention in training: forward and backward as one node, for torch's own attention.

In: a graph that holds both passes. Out: the attention around a softmax, the operations of each pass, and its form with
one extern call in place of everything; or the reason against it. Guarantee: the backward operations are the derivative
of the forward ones, operand by operand. The probabilities have no other reader, so another tensor may be saved in their
place (see ``sdpa_calls``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from autofuse.fusion.graph import FusionGraph
from autofuse.fusion.node import FusionNode
from autofuse.ir.operation import NodeForm, Operation, ValueRef
from autofuse.strategies.chains import is_free, keep_order, number
from autofuse.strategies.sdpa_match import DROPOUT_INSIDE, Scores, find_scores
from autofuse.strategies.strategy import graph_of

SDPA_TRAINING = "sdpa_training"  # the name of the strategy
TRAINING = "vendor.attention_training.default"
DEVICES = ("cpu", "cuda")  # types of devices on which torch's attention has a forward and a backward kernel
SOFTMAX_BACKWARD = "_softmax_backward_data"
_DROPOUTS = ("native_dropout", "dropout_scale", "bernoulli_mask", "philox_dropout")
_TRANSPOSE = "aten.transpose.int"


@dataclass(frozen=True)
class TrainingAttention:
    """One attention in a graph of both passes. N: heads of all batches; T queries, S keys, D elements each."""

    forward: tuple[Operation, ...]  # operations from the scores to the result, and every view of the probabilities
    backward: tuple[Operation, ...]
    scores: Scores  # query [N, T, D], key [N, D, S], scale and masks
    value: ValueRef  # [N, S, D]
    gradient: ValueRef  # of the result, [N, T, D]
    results: tuple[ValueRef, ...]  # names of the result and of the gradients of query, key and value
    probabilities: frozenset[str]  # the probabilities and all their views

    def node(self, graph: FusionGraph) -> FusionNode:
        """Both passes as one node."""
        inside = {op.name for op in (*self.forward, *self.backward)}
        needed = _read_by(graph, [ref.name for ref in self.results], inside)
        operations = [op for op in graph.operations if op.name in needed]
        inputs = [ref for op in operations for ref in op.inputs if ref.name not in inside]
        return FusionNode(operations, {ref.name: graph.spec(ref) for ref in inputs}, self.results)


def training_rewrite(form: NodeForm) -> NodeForm | None:
    """The form as one extern call; None where it is no attention in training."""
    graph = graph_of(form)
    softmax = next((op for op in form.operations if op.short_name == "_softmax"), None)
    found = find_training_attention(graph, softmax) if softmax is not None else ""
    if isinstance(found, str) or set(found.results) != set(form.outputs):
        return None
    scores = found.scores
    args = (
        found.gradient, scores.query, scores.key, found.value,
        scores.lead, scores.scale, scores.bias, scores.masked, scores.fill,
    )  # fmt: skip
    name = found.results[0].name
    specs = tuple(graph.spec(ref) for ref in found.results)
    made = Operation(name, TRAINING, args, (), specs, softmax.source if softmax is not None else None)
    outputs = tuple(ValueRef(name, found.results.index(ref)) for ref in form.outputs)
    return NodeForm(form.inputs, (made,), outputs, form.symbols)


def passes_of(form: NodeForm) -> tuple[frozenset[str], frozenset[str]] | None:
    """Names of the operations of each pass; None for a form of one pass. No kernel may hold some of both."""
    if not any(op.short_name == SOFTMAX_BACKWARD for op in form.operations):
        return None
    graph = graph_of(form)
    for op in form.operations:
        if op.short_name == "_softmax":
            found = find_training_attention(graph, op)
            if not isinstance(found, str):
                return frozenset(o.name for o in found.forward), frozenset(o.name for o in found.backward)
    return None


def find_training_attention(
    graph: FusionGraph, softmax: Operation, begin: int | None = None
) -> TrainingAttention | str:
    """The attention of both passes around a softmax, or why it cannot be taken: "" where it is no such thing.

    ``begin``: the number of forward operations in the graph, where it matters which pass makes a view.
    """
    rank = len(softmax.outputs[0].shape)
    if rank not in (3, 4) or softmax.arg(1) not in (-1, rank - 1) or softmax.arg(2):
        return ""
    views = list(_views(graph, softmax))
    probabilities = frozenset([softmax.name, *(op.name for op in views)])
    readers = _readers(graph, probabilities)
    backward = next((op for op in readers if op.short_name == SOFTMAX_BACKWARD), None)
    products = [op for op in readers if op.short_name == "bmm"]
    if backward is None:
        return ""
    if any(op.short_name in _DROPOUTS for op in readers):
        return DROPOUT_INSIDE
    if not products:
        return ""
    if len(readers) != 3 or len(products) != 2 or any(ref.name in probabilities for ref in graph.outputs):
        return "the probabilities are needed by somebody else"
    scores = find_scores(graph, softmax)
    if scores is None:
        return "what scales and masks the scores is no chain that torch's attention knows"
    return _Matcher(graph, softmax, backward, products, scores, views).find(begin)


class _Matcher:
    """Follows the backward pass from the probabilities to the three gradients."""

    def __init__(
        self,
        graph: FusionGraph,
        softmax: Operation,
        backward: Operation,
        products: Sequence[Operation],
        scores: Scores,
        views: Sequence[Operation],
    ) -> None:
        self.graph = graph
        self.softmax = softmax
        self.softmax_backward = backward
        self.products = products
        self.scores = scores
        self.views = views
        self.names = frozenset([softmax.name, *(op.name for op in views)])

    def find(self, begin: int | None) -> TrainingAttention | str:
        no = "its backward pass is not the one that torch's attention has"
        every = self._as_made()
        sides = {op.args[0] in every: op for op in self.products}
        if set(sides) != {False, True} or not self._is_transpose_of(sides[False].args[0], *every):
            return no
        result, grad_value = sides[True], sides[False]
        value, gradient = result.args[1], grad_value.args[1]
        dims = [self.graph.spec(ref).shape.dims[-1] for ref in (self.scores.query, value)]
        if dims[0] != dims[1]:
            return "its values are not as wide as its keys"
        rank = len(self.softmax.outputs[0].shape)
        if self.softmax_backward.args[1] not in every or self.softmax_backward.arg(2) not in (-1, rank - 1):
            return no
        grad_product = self._before(self.softmax_backward.args[0])
        if grad_product is None or not self._is_product(grad_product, gradient, value):
            return no
        passed = self._through_masks()
        if passed is None:
            return no
        middle, readers = passed
        end = middle[-1].name if middle else self.softmax_backward.name
        grad_query = self._gradient_of(self.scores.key, 0, readers, end)
        grad_key = self._gradient_of(self.scores.query, 1, readers, end)
        if grad_query is None or grad_key is None or len(readers) != 2:
            return no
        results = tuple(ValueRef(op.name) for op in (result, grad_query, grad_key, grad_value))
        ends = [grad_product, self.softmax_backward, *middle, grad_query, grad_key, grad_value]
        # Views that are made before the backward pass begins: some may be saved for it.
        if begin is None:
            begin = min(self.graph.position[op.name] for op in ends)
        views = [op for op in self.views if self.graph.position[op.name] < begin]
        forward = [*self.scores.chain, self.softmax, *views, result]
        backward = self._with_views(ends, {op.name for op in forward}, (value, gradient))
        if {o.name for o in backward} & {o.name for o in forward}:
            return no
        return TrainingAttention(
            tuple(self._in_order(forward)),
            tuple(self._in_order(backward)),
            self.scores,
            value,
            gradient,
            results,
            self.names,
        )

    def _in_order(self, operations: Iterable[Operation]) -> list[Operation]:
        unique = {op.name: op for op in operations}
        return sorted(unique.values(), key=lambda op: self.graph.position[op.name])

    # ---- operands

    def _as_made(self) -> list[ValueRef]:
        """The probabilities in any shape, contiguous as the softmax returns them."""
        rows = self.softmax.outputs[0].shape.dims[-2:]
        paths: dict[str, list[Operation]] = {self.softmax.name: []}
        for view in self.views:  # each after what it reads
            paths[view.name] = [*paths[view.inputs[0].name], view]
        ordered = [ValueRef(name) for name, path in paths.items() if keep_order(self.graph, path)]
        return [ref for ref in ordered if self.graph.spec(ref).shape.dims[-2:] == rows]

    def _is_transpose_of(self, ref: ValueRef, *others: ValueRef) -> bool:
        op = self.graph.by_name.get(ref.name)
        return op is not None and _swaps_last(op) and op.inputs[0] in others

    def _is_product(self, op: Operation, gradient: ValueRef, value: ValueRef) -> bool:
        """Whether it is the gradient of the probabilities: the matmul of the result's gradient and the value."""
        return op.short_name == "bmm" and op.args[0] == gradient and self._is_transpose_of(op.args[1], value)

    def _gradient_of(
        self, operand: ValueRef, place: int, readers: Sequence[Operation], scores: str
    ) -> Operation | None:
        """The matmul of the scores' gradient, at ``place``, and the transposed operand of the scores."""
        for op in readers:
            is_product = op.short_name == "bmm" and op.args[place] == ValueRef(scores)
            if is_product and self._is_transpose_of(op.args[1 - place], operand):
                return op
        return None

    # ---- the way down

    def _before(self, ref: ValueRef) -> Operation | None:
        """The producer, behind views, of a value that only one operation reads."""
        views: list[Operation] = []
        while ref.name in self.graph.by_name:
            op = self.graph.by_name[ref.name]
            if len(self.graph.consumers[op.name]) != 1 or any(ref.name == op.name for ref in self.graph.outputs):
                return None
            if not is_free(self.graph, op):
                return op if keep_order(self.graph, views[::-1]) else None
            views.append(op)
            ref = op.inputs[0]
        return None

    def _through_masks(self) -> tuple[list[Operation], list[Operation]] | None:
        """From the softmax's gradient to that of the scores: its masks, its scale and its readers."""
        passed: list[Operation] = []
        scale, is_masked = 1.0, False
        views: list[Operation] = []
        current = self.softmax_backward
        while not any(ref.name == current.name for ref in self.graph.outputs):
            readers = self.graph.consumers[current.name]
            if len(readers) != 1:
                fits = math.isclose(scale, self.scores.scale, rel_tol=1e-9) and is_masked == bool(self.scores.masked)
                return (passed, readers) if fits and keep_order(self.graph, views) else None
            current = readers[0]
            passed.append(current)
            if is_free(self.graph, current):
                views.append(current)
                continue
            if not keep_order(self.graph, views):
                return None
            views = []
            if current.target in ("aten.mul.Tensor", "aten.div.Tensor", "aten.mul.Scalar", "aten.div.Scalar"):
                factor = number(current.args[1])
                if not factor:
                    return None
                scale *= factor if current.short_name == "mul" else 1.0 / factor
            elif current.target == "aten.masked_fill.Scalar":
                if is_masked or current.args[1] != self.scores.masked or number(current.args[2]) != 0.0:
                    return None
                is_masked = True
            else:
                return None
        return None

    # ---- views

    def _with_views(self, ends: Sequence[Operation], forward: set[str], others: Sequence[ValueRef]) -> list[Operation]:
        """The operations, and the views through which they read, of both passes or of the forward pass."""
        stop = {*forward, *(ref.name for ref in (self.scores.query, self.scores.key, *others))}
        found = list(ends)
        for op in ends:
            for ref in op.inputs:
                while ref.name in self.graph.by_name and ref.name not in stop:
                    view = self.graph.by_name[ref.name]
                    if not is_free(self.graph, view):
                        break
                    found.append(view)
                    ref = view.inputs[0]
        return found


def _swaps_last(op: Operation) -> bool:
    rank = len(op.outputs[0].shape)
    return op.target == _TRANSPOSE and {int(d) % rank for d in op.args[1:3]} == {rank - 2, rank - 1}


def _views(graph: FusionGraph, op: Operation) -> Iterator[Operation]:
    """All views of the result, and copies that change nothing."""
    for reader in graph.consumers[op.name]:
        if is_free(graph, reader):
            yield reader
            yield from _views(graph, reader)


def _readers(graph: FusionGraph, names: Iterable[str]) -> list[Operation]:
    found = {r.name: r for name in names for r in graph.consumers[name] if not is_free(graph, r)}
    return list(found.values())


def _read_by(graph: FusionGraph, names: Iterable[str], inside: set[str]) -> set[str]:
    """Inner operations that these values need."""
    needed: set[str] = set()
    stack = [name for name in names if name in inside]
    while stack:
        name = stack.pop()
        if name not in needed:
            needed.add(name)
            stack += [ref.name for ref in graph.by_name[name].inputs if ref.name in inside]
    return needed
