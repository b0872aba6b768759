"""Counts the kernels of a planned graph, with each group's strategy of the fewest kernels.

In: nodes, groups among them. Out: for each kernel the names of its operations, as `measure_graph` takes them.
Guarantee: an operation that no extern kernel takes in keeps its own node's kernel. Winners are measured later, so this
is the smallest count of a plan, not the count that runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autofuse.fusion.node import FusionNode
from autofuse.ir.operation import NodeForm, Operation
from autofuse.ir.optable import FUSIBLE, OpKind, info
from autofuse.strategies.rewrites import rewrites
from autofuse.strategies.strategy import graph_of


def planned_kernels(nodes: Iterable[FusionNode], wholes: Iterable[set[str]] = ()) -> list[set[str]]:
    """Names of the operations of each kernel, without lone operations that eager runs.

    ``wholes``: names that one extern kernel each takes in, whatever nodes they are in.
    """
    taken = list(wholes)
    plain: list[set[str]] = []
    groups: list[FusionNode] = []
    for node in nodes:
        if all(info(op.target).kind in FUSIBLE for op in node.kernels):
            plain.append({op.name for op in node.kernels})
        else:
            groups.append(node)
    for group in groups:
        inside = {op.name for op in group.kernels}
        members = [names for names in plain if names & inside]
        best = min((_kernels(group, taken, members) for taken in _vendor_kernels(group)), key=len, default=members)
        plain = [names for names in plain if not names & inside] + best
    plain = [names.difference(*taken) for names in plain]
    return [names for names in [*plain, *taken] if names]


def _kernels(group: FusionNode, taken: Sequence[set[str]], members: Sequence[set[str]]) -> list[set[str]]:
    """The extern kernels, and the remaining operations of the group's nodes and lone operations."""
    gone = set().union(*taken)
    rest = [names - gone for names in members]
    lone = {op.name for op in group.kernels} - gone - set().union(*members)
    return [*taken, *(names for names in rest if names), *({name} for name in lone)]


def _vendor_kernels(group: FusionNode) -> list[list[set[str]]]:
    """For each rewrite, the operations (by the graph's names) that each extern kernel takes in."""
    form = group.form
    names = {canonical.name: op.name for canonical, op in zip(form.operations, group.operations, strict=True)}
    return [[{names[name] for name in kernel} for kernel in _taken(form, rewrite.form)] for rewrite in rewrites(form)]


def _taken(form: NodeForm, rewritten: NodeForm) -> list[set[str]]:
    after = {op.name: op for op in rewritten.operations}
    gone = {op.name for op in form.operations if after.get(op.name) != op and info(op.target).kind is not OpKind.VIEW}
    vendors = [op for op in rewritten.operations if op.target.startswith("vendor.")]
    if len(vendors) == 1:
        return [gone]
    # Chains end where an extern kernel returns its result, under the old name of that value.
    graph = graph_of(form)
    kernels: list[set[str]] = []
    for op in form.operations:
        if op.name in gone and not any(op.name in kernel for kernel in kernels):
            kernels.append(_chain(graph.readers, op, gone, set(after)))
    return kernels


def _chain(readers: dict[str, list[Operation]], op: Operation, gone: set[str], kept: set[str]) -> set[str]:
    chain = {op.name}
    while op.name not in kept:
        following = [reader for reader in readers[op.name] if reader.name in gone]
        if not following:
            break
        op = following[0]
        chain.add(op.name)
    return chain
