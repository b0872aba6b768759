"""Plans the flat call of a graph: its units, their order, the values that die after each, reused memory.

In: an imported graph, its fusion nodes, groups and halves of attention. Out: a `CallPlan`, which `graph_call_text`
writes as Python. A group is a unit that contains its members; a half of an attention is a unit that contains its
operations. Guarantee: random and in-place operations keep their order; a unit reads only values of earlier units;
values die at their last use.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import sympy
import torch
from torch import fx

from autofuse.capture.graph_import import ImportedGraph
from autofuse.capture.passes.joint_graph import backward_of
from autofuse.codegen.in_place import FRESH, Pairs, Step, find_reuse
from autofuse.errors import ShapeError
from autofuse.fusion.node import FusionNode
from autofuse.ir.operation import ValueRef
from autofuse.ir.optable import OpKind
from autofuse.ir.shape import Dim, free_symbols, symbol
from autofuse.strategies.groups import Group
from autofuse.strategies.joint_attention import AttentionPass
from autofuse.wrapper.below_autograd import kept_books
from autofuse.wrapper.graph_call import NodeSlot
from autofuse.wrapper.graph_call_symbols import symbol_sources
from autofuse.wrapper.graph_call_units import (
    Unit,
    check_made,
    have_effects,
    in_order,
    kind_of,
    ref_of,
    short_name,
    without_unread,
)
from autofuse.wrapper.liveness import deaths

LEAST_CALLS = 2  # calls into torch: going below autograd takes 0.8 us, which each call gains back


@dataclass(frozen=True)
class Fused:
    """Parts of the graph that run as fewer calls than they have operations."""

    nodes: Sequence[FusionNode]
    groups: Sequence[Group] = ()
    halves: Sequence[AttentionPass] = ()  # of attentions in training
    is_backward: bool = (
        False  # whether the graph is a backward graph: its halves run where forward has saved their inputs
    )


@dataclass(frozen=True)
class CallPlan:
    """A flat call, before it is text."""

    imported: ImportedGraph
    slots: tuple[NodeSlot, ...]  # of nodes, groups, and a forward graph's halves
    halves: tuple[AttentionPass, ...]
    skips: tuple[tuple[int, ...], ...]  # of each half: the slots inside of it
    symbols: tuple[str, ...]  # of all slots: a plan's key
    sizes: tuple[Dim, ...]  # further sizes that the call computes
    sources: Mapping[str, str]  # the graph input that holds the value of each symbol
    booked: Sequence[Unit]  # units that run first, with autograd's bookkeeping of views and versions
    units: Sequence[Unit]  # units that run then, below autograd; if there are none, all are in ``booked``
    reuse: Mapping[int, Pairs]  # of slots: outputs that may be written into the memory of an input that dies there

    @property
    def is_below(self) -> bool:
        """Whether most of it runs below autograd."""
        return bool(self.units)


def plan_call(imported: ImportedGraph, fused: Fused, reuses: bool) -> CallPlan:
    """Raises ShapeError where units need each other, or a node spans devices or halves.

    ``reuses``: whether kernels may write to inputs that are dead afterwards.
    """
    output = next(n for n in imported.module.graph.nodes if n.op == "output")
    slots = make_slots(imported, fused)
    planner = _Planner(imported, fused, slots)
    units = without_unread(in_order(planner.units(), planner.position), output.all_input_nodes)
    placeholders = [n for n in planner.fx_nodes if n.op == "placeholder"]
    check_made(units, placeholders, output)
    booked, below = split_by_books(imported.module, units)
    leaving = set(output.all_input_nodes)
    note_deaths([*booked, *below], leaving, placeholders)
    inside = slots[: len(fused.nodes) + len(fused.groups)]
    leads = [dim for half in fused.halves for dim in half.pair.lead]
    return CallPlan(
        imported=imported,
        slots=slots,
        halves=tuple(fused.halves),
        skips=tuple(_members(half, inside) for half in fused.halves),
        symbols=tuple(dict.fromkeys(str(s) for slot in slots for s in slot.symbols)),
        sizes=(*(unit.size for unit in units if unit.size is not None), *leads),
        sources=planner.sources,
        booked=booked,
        units=below,
        reuse=find_memory_reuse([*booked, *below], slots, leaving) if reuses else {},
    )


# ---- slots -------------------------------------------------------------------------------------------


def make_slots(imported: ImportedGraph, fused: Fused) -> tuple[NodeSlot, ...]:
    """Nodes, then groups, then the halves of a forward graph; a backward half has no callable in the plan."""

    def device(node: FusionNode) -> torch.device:
        refs = [ref_of(name) for name in node.input_names]
        refs += [ValueRef(op.name, i) for op in node.operations for i in range(len(op.outputs))]
        return _only_device(imported, node, refs)

    slots = [NodeSlot(n, tuple(map(symbol, n.symbols)), device(n)) for n in fused.nodes]
    slots += [
        NodeSlot(g.node, tuple(map(symbol, g.node.symbols)), device(g.node), g.members, True) for g in fused.groups
    ]
    if fused.is_backward:
        return tuple(slots)
    for number, half in enumerate(fused.halves):
        node = half.pair.node
        place = _only_device(imported, node, [ValueRef(name) for name in half.names])
        slots.append(NodeSlot(node, tuple(map(symbol, node.symbols)), place, (), True, half, number))
    return tuple(slots)


def _only_device(imported: ImportedGraph, node: FusionNode, refs: Iterable[ValueRef]) -> torch.device:
    found = {imported.devices[ref] for ref in refs if ref in imported.devices}
    if len(found) != 1:
        raise ShapeError(f"expected {node.label} on one device, found {sorted(map(str, found))}; report this")
    return found.pop()


def _members(half: AttentionPass, slots: Sequence[NodeSlot]) -> tuple[int, ...]:
    """The slots inside of a half. Raises ShapeError where one is only partly inside."""
    found = []
    for index, slot in enumerate(slots):
        names = {op.name for op in slot.node.kernels}
        if names <= half.names:
            found.append(index)
        elif names & half.names:
            raise ShapeError(f"expected {slot.node.label} inside of an attention or outside, found it across")
    return tuple(found)


# ---- units -------------------------------------------------------------------------------------------


class _Planner:
    """Makes units of a graph's nodes."""

    def __init__(self, imported: ImportedGraph, fused: Fused, slots: Sequence[NodeSlot]) -> None:
        self.imported = imported
        self.fused = fused
        self.slots = slots
        self.fx_nodes: list[fx.Node] = list(imported.module.graph.nodes)
        self.position = {n: i for i, n in enumerate(self.fx_nodes)}
        self.by_name = {n.name: n for n in self.fx_nodes}
        self.by_ref: dict[ValueRef, fx.Node] = {}
        for fx_node, ref in imported.refs.items():
            # For an operation with several outputs the tuple itself stands for output 0 only if nothing else does.
            self.by_ref.setdefault(ref, fx_node)
            if fx_node.op == "call_function" and ref.index == 0 and fx_node.name != ref.name:
                self.by_ref[ref] = fx_node
        # The tensor that a forward half saves has other sizes than the probabilities.
        unsized = {name for half in fused.halves for name in half.kept_inputs} if fused.is_backward else set()
        self.sources = symbol_sources(imported, unsized)

    def units(self) -> list[Unit]:
        """The units, not yet ordered."""
        nodes, groups = len(self.fused.nodes), len(self.fused.groups)
        units = self._of_nodes(self.slots[:nodes])
        for index in range(nodes, nodes + groups):
            units = self._grouped(units, index)
        for number, half in enumerate(self.fused.halves):
            slot = None if self.fused.is_backward else nodes + groups + number
            units = self._halved(units, half, Unit([], slot, half=number))
        return units

    def _of_nodes(self, slots: Sequence[NodeSlot]) -> list[Unit]:
        """A unit for each fusion node, and for each operation that is in none."""
        fused = {op.name: index for index, slot in enumerate(slots) for op in slot.node.kernels}
        units: list[Unit] = []
        of_slot: dict[int, Unit] = {}
        for fx_node in self.fx_nodes:
            if fx_node.op in ("placeholder", "output"):
                continue
            index = fused.get(self._operation_of(fx_node))
            if index is None:
                units.append(self._unit(fx_node))
                continue
            if index not in of_slot:
                of_slot[index] = Unit([], index)
                units.append(of_slot[index])
            of_slot[index].nodes.append(fx_node)
            # Placed at its last operation: the inputs of a node exist by then.
            of_slot[index].position = self.position[fx_node]
        for index, unit in of_slot.items():
            node = slots[index].node
            unit.inputs = [self._node_of(name) for name in node.input_names]
            unit.outputs = [self.by_ref[ref] for ref in node.outputs]
        return units

    def _unit(self, node: fx.Node) -> Unit:
        """A unit for one operation. Sizes are computed from the inputs' sizes, so that they need no tensor."""
        size = self.imported.dims.get(node)
        if node.op == "call_function" and isinstance(size, sympy.Expr):
            derived = self.imported.derived
            read = {s for name in free_symbols(size) for s in free_symbols(derived.get(name, symbol(name)))}
            if read <= self.sources.keys() and size.is_polynomial(*size.free_symbols):
                return Unit([node], None, [], [node], self.position[node], size=size)
        return Unit([node], None, list(node.all_input_nodes), [node], self.position[node])

    def _grouped(self, units: list[Unit], index: int) -> list[Unit]:
        """The units, with those of a group as one. Views between them run inside too; others keep their own copy."""
        node = self.slots[index].node
        names = {op.name for op in node.operations}
        kernels = {op.name for op in node.kernels}

        inner = [u for u in units if any(self._operation_of(n) in kernels for n in u.nodes)]
        rest = [u for u in units if not any(u is i for i in inner)]
        views = [u for u in rest if u.slot is None and self._operation_of(u.nodes[0]) in names]
        copies = [Unit(list(u.nodes), None, list(u.inputs), list(u.outputs), u.position) for u in views]
        group = Unit([n for u in inner for n in u.nodes], index, position=max(u.position for u in inner))
        group.inputs = [self._node_of(name) for name in node.input_names]
        group.outputs = [self.by_ref[ref] for ref in node.outputs]
        self._fill(group, [*inner, *copies])
        return [*rest, group]

    def _halved(self, units: list[Unit], half: AttentionPass, whole: Unit) -> list[Unit]:
        """The units, with those of a half as one unit. Views of outside values also stay outside."""
        inner = [u for u in units if any(self._operation_of(n) in half.names for n in u.nodes)]
        made = {n for u in inner for n in u.nodes}
        outer = [u for u in inner if u.slot is None and not made.intersection(u.inputs)]
        outer = [u for u in outer if all(kind_of(n) is OpKind.VIEW for n in u.nodes)]
        rest = [u for u in units if not any(u is i for i in inner) or any(u is o for o in outer)]
        whole.nodes = [n for u in inner for n in u.nodes]
        whole.position = max(u.position for u in inner)
        whole.inputs = [self.by_name[name] for name in half.inputs]
        whole.outputs = [self.by_name[name] for name in half.outputs]
        self._fill(whole, [replace(u) for u in inner])
        return [*rest, whole]

    def _fill(self, whole: Unit, parts: list[Unit]) -> None:
        """Give a unit the units that may run in its place, without views of values that stay inside of a node."""
        whole.inner = without_unread(in_order(parts, self.position), whole.outputs)
        whole.arity = len(whole.inputs)
        made = {n for u in whole.inner for n in u.nodes}
        outside = [n for u in whole.inner for n in u.inputs if n not in made]  # sizes that a view reads
        whole.inputs += [n for n in dict.fromkeys(outside) if n not in whole.inputs]

    def _operation_of(self, node: fx.Node) -> str:
        ref = self.imported.refs.get(node)
        return ref.name if ref is not None else ""

    def _node_of(self, name: str) -> fx.Node:
        """The FX node of a node input."""
        return self.by_ref[ref_of(name)]


# ---- bookkeeping and memory --------------------------------------------------------------------------


def split_by_books(
    module: fx.GraphModule, units: list[Unit], least_calls: int = LEAST_CALLS
) -> tuple[list[Unit], list[Unit]]:
    """The units that run first, with autograd's bookkeeping, and those that run below it. See `below_autograd`.

    All run with it where there are fewer than ``least_calls`` calls into torch.
    """
    backward = backward_of(module)
    nodes = kept_books(module.graph, backward.results if backward is not None else None)
    calls = sum(bool(unit.inner) or (unit.slot is None and unit.size is None) for unit in units)
    if nodes is None or calls < least_calls:
        return units, []
    producer = {n: unit for unit in units for n in unit.outputs}
    wanted = [producer[n] for n in nodes if n in producer]
    booked: set[int] = set()
    while wanted:
        unit = wanted.pop()
        if unit.slot is not None or unit.half is not None or have_effects(unit):
            return units, []  # its inputs do not exist at the beginning
        if id(unit) not in booked:
            booked.add(id(unit))
            wanted += [producer[n] for n in unit.inputs if n in producer]  # computed sizes
    return [u for u in units if id(u) in booked], [u for u in units if id(u) not in booked]


def note_deaths(units: Sequence[Unit], leaving: set[fx.Node], given: Iterable[fx.Node]) -> None:
    """Note after each unit the values that are dead: values that units make and, with ``given``, inputs."""
    mortal = {n for u in units for n in u.outputs}.union(given) - leaving
    for unit, dead in zip(
        units, deaths([u.inputs for u in units], mortal.__contains__, [u.outputs for u in units]), strict=True
    ):
        unit.dead = dead
        note_deaths(unit.inner, {*unit.outputs, *unit.inputs}, ())


def find_memory_reuse(units: Sequence[Unit], slots: Sequence[NodeSlot], leaving: set[fx.Node]) -> dict[int, Pairs]:
    """Outputs of kernels that may be written into the memory of an input that dies there, by slot."""
    steps = []
    for unit in units:
        is_fresh = unit.slot is not None or unit.half is not None
        is_fresh = is_fresh or (len(unit.nodes) == 1 and short_name(unit.nodes[0]) in FRESH)
        is_kernel = unit.slot is not None and not unit.inner and slots[unit.slot].device.type == "cpu"
        form = slots[unit.slot].node.form if is_kernel and unit.slot is not None else None
        steps.append(Step(tuple(unit.inputs), tuple(unit.outputs), is_fresh, form))
    reuse = {}
    for unit, pairs in zip(units, find_reuse(steps, leaving), strict=True):
        if pairs and unit.slot is not None:
            reuse[unit.slot] = pairs
        if unit.inner:
            reuse |= find_memory_reuse(unit.inner, slots, {*unit.outputs, *unit.inputs})
    return reuse
