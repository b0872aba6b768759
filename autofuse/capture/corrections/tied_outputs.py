"""Outputs of a captured graph that were computed from other outputs: their gradients with respect to those.

In: a graph of Dynamo's; what one call of its compiled form gives out. Out: the same tensors, of which each that was
computed from others has these behind it in autograd's graph, as in eager: hooks, ``retain_grad()`` and
``torch.autograd.grad`` find the gradient of an output that is on the way to another one. Guarantee: where nobody asks
for such a gradient, the compiled backward graph runs as without this; where somebody does, gradients are eager's, by a
second run of Dynamo's graph in which those outputs are cut off from what they were computed from.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

_PLAIN = ("non_alias", "unsafe_view_alias", "custom_function_view")  # outputs with memory of their own
Ties = tuple[tuple[int, tuple[int, ...]], ...]  # an output, and the outputs that it was computed from; in order

# Behind each tie, and never asked for a gradient: autograd runs it in a whole backward pass only.
_anywhere = torch.zeros((), requires_grad=True)
_anywhere_node = torch.autograd.graph.get_gradient_edge(_anywhere).node


def ties_of(module: fx.GraphModule) -> Ties:
    """The outputs that others were computed from, by their places among the graph's outputs."""
    (end,) = module.graph.find_nodes(op="output")
    outputs = end.args[0] if isinstance(end.args[0], tuple | list) else (end.args[0],)
    places: dict[fx.Node, int] = {}
    for place, node in enumerate(outputs):
        if isinstance(node, fx.Node) and node.op != "placeholder" and _has_gradient(node):
            places.setdefault(node, place)
    behind: dict[fx.Node, frozenset[int]] = {}
    found = []
    for node in module.graph.nodes:
        behind[node] = frozenset().union(
            *(behind[n] | ({places[n]} if n in places else set()) for n in node.all_input_nodes)
        )
        if node in places and behind[node]:
            found.append((places[node], tuple(sorted(behind[node]))))
    return tuple(found)


def _has_gradient(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    return isinstance(value, torch.Tensor) and value.requires_grad


class Cut(NamedTuple):
    """One run of Dynamo's graph in eager, whose outputs on the way to others were given on as leaves."""

    outputs: Sequence[Any]
    leaves: Mapping[int, torch.Tensor]

    def through(self, number: int, ancestors: Sequence[int], gradient: torch.Tensor) -> tuple[Any, ...]:
        """The gradients of the outputs that an output was computed from, along no other of them."""
        leaves = [self.leaves[i] for i in ancestors]
        return tuple(torch.autograd.grad(self.outputs[number], leaves, gradient, retain_graph=True, allow_unused=True))

    def behind(self, inputs: Sequence[Any], gradients: Sequence[Any]) -> tuple[Any, ...]:
        """The gradients of the graph's inputs along none of them."""
        # Behind the gradients of the outputs are those of tensors that several of them are views of.
        pairs = [(o, g) for o, g in zip(self.outputs, gradients, strict=False) if g is not None and o.requires_grad]
        wanted = [i for i, value in enumerate(inputs) if isinstance(value, torch.Tensor) and value.requires_grad]
        result: list[Any] = [None] * len(inputs)
        if pairs and wanted:
            outputs, given = zip(*pairs, strict=True)
            found = torch.autograd.grad(
                outputs, [inputs[i] for i in wanted], given, retain_graph=True, allow_unused=True
            )
            for i, gradient in zip(wanted, found, strict=True):
                result[i] = gradient
        return tuple(result)


def cut(module: fx.GraphModule, inputs: Sequence[Any], ties: Ties) -> Cut:
    """Run Dynamo's graph in eager; gradients have to be on."""
    (end,) = module.graph.find_nodes(op="output")
    outputs = end.args[0] if isinstance(end.args[0], tuple | list) else (end.args[0],)
    places = {outputs[i]: i for _, ancestors in ties for i in ancestors}
    whole: dict[int, torch.Tensor] = {}
    leaves: dict[int, torch.Tensor] = {}

    class Cutting(fx.Interpreter):  # type: ignore[misc]
        def run_node(self, n: fx.Node) -> Any:
            result = super().run_node(n)
            if n not in places:
                return result
            whole[places[n]] = result
            leaf = leaves[places[n]] = result.detach().requires_grad_()
            return leaf

    found = Cutting(module).run(*inputs)
    flat = list(found) if isinstance(found, tuple | list) else [found]
    return Cut([whole[places[n]] if n in places else value for n, value in zip(outputs, flat, strict=True)], leaves)


class Tied:
    """Ties the outputs of each call of one compiled graph."""

    def __init__(self, ties: Ties, run: Callable[[Any, Ties], Cut | None], metadata: Any) -> None:
        """``run(node, ties)``: a `Cut` of the call that made this node of autograd's graph; None where there is none.

        ``metadata``: AOTAutograd's, of whose function the results are inputs that were written to, then the outputs.
        """
        plain = {i for i, info in enumerate(metadata.output_info) if info.output_type.name in _PLAIN}
        shared = ((number, tuple(i for i in ancestors if i in plain)) for number, ancestors in ties if number in plain)
        self._ties = tuple((number, ancestors) for number, ancestors in shared if ancestors)
        self._between = sorted({i for _, ancestors in self._ties for i in ancestors})
        self._first = len(metadata.mutated_inp_runtime_indices)
        self._run = run

    def around(self, apply: Callable[..., Any]) -> Callable[..., Any]:
        """The autograd function with its results tied."""

        def call(*args: Any) -> Any:
            found = apply(*args)
            if not torch.is_grad_enabled():
                return found
            results, between, first = list(found), list[weakref.ref[torch.Tensor]](), self._first
            for number, ancestors in self._ties:
                raw = results[first + number]
                if raw.requires_grad:
                    place = _Place(self, number, ancestors, between)
                    others = [results[first + i] for i in ancestors]
                    results[first + number] = _Tie.apply(place, raw, _anywhere, *others)
            between += [weakref.ref(results[first + i]) for i in self._between]
            return tuple(results)

        return call

    def cut_of(self, node: Any, between: Sequence[weakref.ref[torch.Tensor]]) -> Cut | None:
        """The second run for this backward pass, where somebody asks for the gradient of one of the outputs."""
        task = torch._C._current_graph_task_id()
        known = getattr(node, "autofuse_cut", None)
        if known is None or known[0] != task:
            is_asked = not torch.is_grad_enabled() and _is_asked([output() for output in between])
            known = node.autofuse_cut = (task, self._run(node, self._ties) if is_asked else None)
        found: Cut | None = known[1]
        return found


class _Place(NamedTuple):
    """Of one output of one call."""

    tied: Tied
    number: int
    ancestors: tuple[int, ...]
    between: Sequence[weakref.ref[torch.Tensor]]  # all outputs of the call that others were computed from


def cut_for(ctx: Any) -> Cut | None:
    """The second run that the ties in front of a node have made in this backward pass."""
    task, found = getattr(ctx, "autofuse_cut", None) or (-1, None)
    ctx.autofuse_cut = None
    return found if task == torch._C._current_graph_task_id() else None


def _is_asked(between: Sequence[torch.Tensor | None]) -> bool:
    alive = [tensor for tensor in between if tensor is not None]
    if any(tensor.retains_grad or tensor._backward_hooks for tensor in alive):
        return True
    try:
        return bool(alive) and not torch._C._will_engine_execute_node(_anywhere_node)
    except RuntimeError:
        return False


class _Tie(torch.autograd.Function):  # type: ignore[misc]
    """The identity, for one output; its other inputs get a gradient where somebody asks for it."""

    @staticmethod
    def forward(ctx: Any, place: _Place, raw: torch.Tensor, _: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.place, ctx.node = place, raw.grad_fn
        return raw.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[Any, ...]:
        tied, number, ancestors, between = ctx.place
        found = None if gradient is None else tied.cut_of(ctx.node, between)
        if found is None:
            return None, gradient, None, *[None] * len(ancestors)
        return None, gradient, None, *found.through(number, ancestors, gradient)
