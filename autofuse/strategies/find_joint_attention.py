"""Finds attentions of training in the two graphs of a capture (`joint_attention`).

In: the forward and the backward graph. Out: for each attention one `AttentionPass` in each graph, both of which refer
to one `Pair`; for each attention that was not taken, the reason.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from autofuse.capture.graph_import import ImportedGraph, import_graph
from autofuse.capture.passes.joint_graph import BothPasses, Counterpart, join
from autofuse.errors import FusionError
from autofuse.ir.records import Refusal
from autofuse.ir.shape import free_symbols
from autofuse.strategies.chains import is_contiguous
from autofuse.strategies.joint_attention import AttentionPass, Pair
from autofuse.strategies.sdpa_training_match import (
    DEVICES,
    SOFTMAX_BACKWARD,
    TrainingAttention,
    find_training_attention,
)

_NOTE = "autofuse_halves"


@dataclass
class Halves:
    """The halves of a forward graph and of its backward graph, and the reasons for attentions that were not taken."""

    forward: list[AttentionPass] = field(default_factory=list)
    backward: list[AttentionPass] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)


def find_joint_attention(imported: ImportedGraph, counterpart: Counterpart) -> Halves:
    """The attentions of a forward graph; those of the backward graph are recorded on it, see `attention_passes_of`."""
    found = Halves()
    softmaxes = [op for op in imported.operations if op.short_name == "_softmax"]
    backward_nodes = counterpart.backward.graph.nodes
    if not softmaxes or not any(SOFTMAX_BACKWARD in str(node.target) for node in backward_nodes):
        return found
    other = import_graph(counterpart.backward)
    try:
        both = join(imported, other, counterpart.results)
    except FusionError as error:
        found.refusals.append(Refusal("attention", False, "_softmax", str(error)))
        return found
    for softmax in softmaxes:
        attention = find_training_attention(both.graph, softmax, len(imported.operations))
        if attention == "":
            continue
        halves = (
            attention if isinstance(attention, str) else _halves(both, attention, {*imported.derived, *other.derived})
        )
        if isinstance(halves, str):
            found.refusals.append(Refusal("attention", False, "_softmax", halves, source=softmax.source or ""))
            continue
        found.forward.append(halves[0])
        found.backward.append(halves[1])
    counterpart.backward.meta[_NOTE] = found.backward
    return found


def attention_passes_of(backward_graph: torch.fx.GraphModule) -> list[AttentionPass]:
    """The halves that were found when the forward graph was planned."""
    found: list[AttentionPass] = backward_graph.meta.get(_NOTE, [])
    return found


def _halves(
    both: BothPasses, attention: TrainingAttention, derived: set[str]
) -> tuple[AttentionPass, AttentionPass] | str:
    graph, scores = both.graph, attention.scores
    node = attention.node(graph)
    devices = {spec.device for spec in node.inputs.values()}
    if len(devices) != 1 or not devices <= {*DEVICES}:
        return (
            f"torch's attention in training is called on {' or '.join(DEVICES)}, not on {' and '.join(sorted(devices))}"
        )
    specs = [*node.inputs.values(), *(spec for op in node.operations for spec in op.outputs)]
    if derived & {s for spec in specs for dim in (*spec.shape, *spec.strides) for s in free_symbols(dim)}:
        return "its sizes are rounded quotients of others"
    kept = {name: ref for name, ref in both.kept.items() if ref.name in attention.probabilities}
    if not kept or not all(is_contiguous(graph.spec(ref)) for ref in kept.values()):
        return "the probabilities are kept for the backward pass in another order"
    if scores.bias is not None and len(kept) < 2:
        return "there is no place to keep the mask for the backward pass"
    pair = Pair(node, attention, tuple(graph.spec(ref).shape.dims for ref in kept.values()))
    masked = [scores.masked] if scores.masked is not None else []
    operands = [scores.query, scores.key, attention.value]
    bias = [scores.bias] if scores.bias is not None else []
    first = AttentionPass(
        pair,
        frozenset(op.name for op in attention.forward),
        tuple(both.names[ref] for ref in (*operands, *bias, *masked)),
        (both.names[attention.results[0]], *kept),
    )
    second = AttentionPass(
        pair,
        frozenset(op.name for op in attention.backward),
        (*kept, *(both.names[ref] for ref in (attention.gradient, *operands, *masked))),
        tuple(both.names[ref] for ref in attention.results[1:]),
    )
    return first, second
