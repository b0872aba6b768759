"""Generates the flat call of a captured graph (`graph_call`).

In: an imported graph, its fusion nodes and groups. Out: a `Program`. A group is a branch: its own callable where the
plan has one, else its nodes and products one by one.
Guarantee: random and in-place operations keep their order, and values die at their last use.
"""

from __future__ import annotations

import heapq
import itertools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import fx

from autofuse.capture.graph_import import ImportedGraph
from autofuse.capture.joint_graph import backward_of
from autofuse.codegen.in_place import FRESH, Pairs, Step, find_reuse
from autofuse.errors import ShapeError
from autofuse.fusion.node import FusionNode
from autofuse.ir.operation import ValueRef
from autofuse.ir.optable import OpKind
from autofuse.ir.shape import free_symbols, symbol
from autofuse.strategies.groups import Group
from autofuse.strategies.joint_attention import AttentionPass
from autofuse.wrapper.aten_call import render_call
from autofuse.wrapper.below_autograd import BELOW, kept_books
from autofuse.wrapper.graph_call import NodeSlot, Program, link
from autofuse.wrapper.graph_call_units import (
    Unit,
    attribute,
    check_made,
    has_effect,
    have_effects,
    in_code,
    kind_of,
    ref_of,
    short_name,
    target_name,
)
from autofuse.wrapper.liveness import deaths, deleted

LEAST_CALLS = 2  # into torch: to go below its bookkeeping takes 0.8 us, which each gives back


def build_program(
    imported: ImportedGraph,
    nodes: Sequence[FusionNode],
    groups: Sequence[Group] = (),
    halves: Sequence[AttentionPass] = (),
    is_backward: bool = False,
    reuses: bool = True,
) -> Program:
    """Generate the flat call. Raises ShapeError where a symbol is not among the inputs, or units need each other.

    ``halves``: of attentions in training; those of a backward graph run as wholes where forward kept what they read.
    ``reuses``: whether kernels may write to inputs that nobody needs afterwards.
    """
    return _Builder(imported, nodes, groups, halves, is_backward, reuses).build()


class _Builder:
    def __init__(
        self,
        imported: ImportedGraph,
        nodes: Sequence[FusionNode],
        groups: Sequence[Group],
        halves: Sequence[AttentionPass],
        is_backward: bool,
        reuses: bool,
    ) -> None:
        self.reuses = reuses
        self.imported = imported
        self.fx_nodes: list[fx.Node] = list(imported.module.graph.nodes)
        self.position = {n: i for i, n in enumerate(self.fx_nodes)}
        self.by_ref: dict[ValueRef, fx.Node] = {}
        for fx_node, ref in imported.refs.items():
            # For an operation with several outputs the tuple itself stands for output 0 only if nothing else does.
            self.by_ref.setdefault(ref, fx_node)
            if fx_node.op == "call_function" and ref.index == 0 and fx_node.name != ref.name:
                self.by_ref[ref] = fx_node
        slots = [NodeSlot(n, tuple(symbol(s) for s in n.symbols), self._device_of(n)) for n in nodes]
        self.first_group = len(slots)
        slots += [
            NodeSlot(g.node, tuple(symbol(s) for s in g.node.symbols), self._device_of(g.node), g.members, True)
            for g in groups
        ]
        self.by_name = {n.name: n for n in self.fx_nodes}
        self.first_half = len(slots)
        self.halves = list(halves)
        self.skips = tuple(self._members(half, slots) for half in halves)
        if not is_backward:  # the forward half decides: it alone has a callable that may be there or not
            slots += [
                NodeSlot(
                    h.pair.node, tuple(map(symbol, h.pair.node.symbols)), self._half_device(h), (), True, h, number
                )
                for number, h in enumerate(halves)
            ]
        self.slots = tuple(slots)
        # What a forward half keeps has not the sizes of the probabilities.
        self.unsized = {name for half in halves for name in half.kept_inputs} if is_backward else set()
        self.sources = self._sources()
        self.reuse: dict[int, Pairs] = {}
        self.is_below = False  # most of it runs below torch's bookkeeping
        self.namespace: dict[str, Any] = {"torch": torch}  # and what `link` adds

    def _device_of(self, node: FusionNode) -> torch.device:
        refs = [ref_of(name) for name in node.input_names]
        refs += [ValueRef(op.name, i) for op in node.operations for i in range(len(op.outputs))]
        return self._only_device(node, refs)

    def _half_device(self, half: AttentionPass) -> torch.device:
        return self._only_device(half.pair.node, [ValueRef(name) for name in half.names])

    def _only_device(self, node: FusionNode, refs: Iterable[ValueRef]) -> torch.device:
        found = {self.imported.devices[ref] for ref in refs if ref in self.imported.devices}
        if len(found) != 1:
            raise ShapeError(f"expected {node.label} on one device, found {sorted(map(str, found))}; report this")
        return found.pop()

    @staticmethod
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

    def build(self) -> Program:
        placeholders = [n for n in self.fx_nodes if n.op == "placeholder"]
        output = next(n for n in self.fx_nodes if n.op == "output")
        units = self._live(self._order(self._units()), output.all_input_nodes)
        check_made(units, placeholders, output)
        symbols, binding = self._bind_symbols(units)
        head = [f"    ({''.join(f'{n.name}, ' for n in placeholders)}) = args", "    args.clear()"]
        if not placeholders:
            head = []
        head += [f"    {line}" for line in binding]
        key = f"({''.join(f'af_{s}, ' for s in symbols)})"
        head += [f"    af_plan = plans.get({key})", "    if af_plan is None:", f"        af_plan = miss({key})"]
        head.append("    af_plan.count += 1")
        if self.slots:
            head.append(f"    ({''.join(f'af_n{i}, ' for i in range(len(self.slots)))}) = af_plan.calls")
        booked, units = self._booked(units)
        self.is_below = bool(units)
        body, timed = self._body([*booked, *units], output, len(booked) if units else None)
        lines = ["def call(plans, miss, args):", *head, *body, "", "def timed_call(plans, miss, args, times):"]
        lines += [*head, *timed]
        source = "\n".join(lines)
        del self.namespace["torch"]
        return link(self.slots, symbols, source, self.skips, self.reuse, self.namespace)

    def _booked(self, units: list[Unit]) -> tuple[list[Unit], list[Unit]]:
        """Those that run first, with torch's bookkeeping, and those that run below it. See `below_autograd`."""
        backward = backward_of(self.imported.module)
        nodes = kept_books(self.imported.module.graph, backward.results if backward is not None else None)
        calls = sum(bool(unit.inner) or (unit.slot is None and unit.size is None) for unit in units)
        if nodes is None or calls < LEAST_CALLS:
            return units, []
        producer = {n: unit for unit in units for n in unit.outputs}
        wanted = [producer[n] for n in nodes if n in producer]
        booked: set[int] = set()
        while wanted:
            unit = wanted.pop()
            if unit.slot is not None or unit.half is not None or have_effects(unit):
                return units, []  # what it reads is not there at the beginning
            if id(unit) not in booked:
                booked.add(id(unit))
                wanted += [producer[n] for n in unit.inputs if n in producer]  # sizes that are calculated
        return [u for u in units if id(u) in booked], [u for u in units if id(u) not in booked]

    # ---- units ---------------------------------------------------------------------------------------

    def _units(self) -> list[Unit]:
        fused: dict[str, int] = {}
        for index, slot in enumerate(self.slots[: self.first_group]):
            fused.update((op.name, index) for op in slot.node.kernels)
        units: list[Unit] = []
        groups: dict[int, Unit] = {}
        for fx_node in self.fx_nodes:
            if fx_node.op in ("placeholder", "output"):
                continue
            ref = self.imported.refs.get(fx_node)
            if ref is not None and ref.name in fused:
                index = fused[ref.name]
                if index not in groups:
                    groups[index] = Unit([], index)
                    units.append(groups[index])
                groups[index].nodes.append(fx_node)
                # As late as its last operation: the inputs of a node exist by then.
                groups[index].position = self.position[fx_node]
            else:
                units.append(self._unit(fx_node))
        for index, unit in groups.items():
            node = self.slots[index].node
            unit.inputs = [self._node_of(name) for name in node.input_names]
            unit.outputs = [self.by_ref[ref] for ref in node.outputs]
        for index in range(self.first_group, self.first_half):
            units = self._grouped(units, index)
        for number, half in enumerate(self.halves):
            place = self.first_half + number if self.first_half < len(self.slots) else None
            if place is None:
                self.namespace[f"af_half{number}"] = half.pair
            units = self._halved(units, half, Unit([], place, half=number))
        return units

    def _halved(self, units: list[Unit], half: AttentionPass, whole: Unit) -> list[Unit]:
        """The units with those of a half as one. Views of what comes from outside stay there as well."""
        inner = [u for u in units if any(self._operation_of(n) in half.names for n in u.nodes)]
        made = {n for u in inner for n in u.nodes}
        outer = [u for u in inner if u.slot is None and not made.intersection(u.inputs)]
        outer = [u for u in outer if all(kind_of(n) is OpKind.VIEW for n in u.nodes)]
        rest = [u for u in units if not any(u is i for i in inner) or any(u is o for o in outer)]
        whole.nodes = [n for u in inner for n in u.nodes]
        whole.position = max(u.position for u in inner)
        whole.outputs = [self.by_name[name] for name in half.outputs]
        whole.inner = self._live(self._order([replace(u) for u in inner]), whole.outputs)
        whole.inputs = [self.by_name[name] for name in half.inputs]
        whole.arity = len(whole.inputs)
        made = {n for u in whole.inner for n in u.nodes}
        outside = [n for u in whole.inner for n in u.inputs if n not in made]
        whole.inputs += [n for n in dict.fromkeys(outside) if n not in whole.inputs]
        return [*rest, whole]

    def _operation_of(self, node: fx.Node) -> str:
        ref = self.imported.refs.get(node)
        return ref.name if ref is not None else ""

    def _unit(self, node: fx.Node) -> Unit:
        """A line of its own. Sizes are computed from the inputs' sizes, so that no tensor has to be there for them."""
        size = self.imported.dims.get(node)
        if node.op == "call_function" and isinstance(size, sympy.Expr):
            known = all(str(s) in self.sources for s in free_symbols(size))
            if known and size.is_polynomial(*size.free_symbols):
                return Unit([node], None, [], [node], self.position[node], size=size)
        return Unit([node], None, list(node.all_input_nodes), [node], self.position[node])

    def _grouped(self, units: list[Unit], index: int) -> list[Unit]:
        """The units with those of a group as one. Views between them run inside too; others keep their own copy."""
        node = self.slots[index].node
        names = {op.name for op in node.operations}
        kernels = {op.name for op in node.kernels}

        inner = [u for u in units if any(self._operation_of(n) in kernels for n in u.nodes)]
        rest = [u for u in units if not any(u is i for i in inner)]
        views = [u for u in rest if u.slot is None and self._operation_of(u.nodes[0]) in names]
        group = Unit([n for u in inner for n in u.nodes], index, position=max(u.position for u in inner))
        copies = [Unit(list(u.nodes), None, list(u.inputs), list(u.outputs), u.position) for u in views]
        group.outputs = [self.by_ref[ref] for ref in node.outputs]
        # Without views of what stays inside a node.
        group.inner = self._live(self._order([*inner, *copies]), group.outputs)
        group.inputs = [self._node_of(name) for name in node.input_names]
        group.arity = len(group.inputs)
        made = {n for u in group.inner for n in u.nodes}
        outside = [n for u in group.inner for n in u.inputs if n not in made]  # sizes that a view asks for
        group.inputs += [n for n in dict.fromkeys(outside) if n not in group.inputs]
        return [*rest, group]

    def _node_of(self, name: str) -> fx.Node:
        """The FX node of a node input."""
        return self.by_ref[ref_of(name)]

    def _order(self, units: list[Unit]) -> list[Unit]:
        """Topological order that stays near the program's; effects keep their order among themselves."""
        producer = {n: unit for unit in units for n in unit.nodes}
        before: dict[int, set[int]] = {id(u): set() for u in units}
        after: dict[int, list[Unit]] = {id(u): [] for u in units}

        def edge(first: Unit, second: Unit) -> None:
            if first is not second and id(first) not in before[id(second)]:
                before[id(second)].add(id(first))
                after[id(first)].append(second)

        for unit in units:
            for n in unit.inputs:
                if n in producer:
                    edge(producer[n], unit)
        # A node runs at its last operation, but draws in the order of the one that draws.
        drawn = [(min(self.position[n] for n in u.nodes if has_effect(n)), u) for u in units if have_effects(u)]
        effects = [unit for _, unit in sorted(drawn, key=lambda item: item[0])]
        for first, second in itertools.pairwise(effects):
            edge(first, second)
        ready = [(u.position, i) for i, u in enumerate(units) if not before[id(u)]]
        heapq.heapify(ready)
        index_of = {id(u): i for i, u in enumerate(units)}
        ordered: list[Unit] = []
        while ready:
            unit = units[heapq.heappop(ready)[1]]
            ordered.append(unit)
            for other in after[id(unit)]:
                before[id(other)].discard(id(unit))
                if not before[id(other)]:
                    heapq.heappush(ready, (other.position, index_of[id(other)]))
        if len(ordered) != len(units):
            raise ShapeError("expected an acyclic graph of nodes, found a cycle; this is an error of the planner")
        return ordered

    def _live(self, units: list[Unit], leaving: Sequence[fx.Node]) -> list[Unit]:
        """Without what nothing reads any more, such as views of values that stayed inside a node."""
        needed = set(leaving)
        kept: list[Unit] = []
        for unit in reversed(units):
            if unit.slot is None and not needed.intersection(unit.outputs) and not have_effects(unit):
                continue
            needed.update(unit.inputs)
            kept.append(unit)
        return kept[::-1]

    # ---- symbols -------------------------------------------------------------------------------------

    def _sources(self) -> dict[str, str]:
        """Where the graph's inputs hold the value of each symbol."""
        sources: dict[str, str] = {}
        for n in self.fx_nodes:
            if n.op != "placeholder":
                continue
            dim = self.imported.dims.get(n)
            if isinstance(dim, sympy.Symbol):
                sources.setdefault(str(dim), n.name)
        for n in self.fx_nodes:
            ref = self.imported.refs.get(n)
            if n.op != "placeholder" or ref is None or n.name in self.unsized:
                continue
            for axis, size in enumerate(self.imported.inputs[ref.name].shape):
                if isinstance(size, sympy.Symbol):
                    sources.setdefault(str(size), f"{n.name}.size({axis})")
        return sources

    def _bind_symbols(self, units: Sequence[Unit]) -> tuple[tuple[str, ...], list[str]]:
        """The free symbols of all slots and the lines that read them, and those of sizes, off the inputs."""
        sources = self.sources
        wanted = dict.fromkeys(str(s) for slot in self.slots for s in slot.symbols)
        derived = {name: expr for name, expr in self.imported.derived.items() if name in wanted}
        needed = dict.fromkeys([s for s in wanted if s not in derived])
        needed |= dict.fromkeys(s for expr in derived.values() for s in free_symbols(expr))
        needed |= dict.fromkeys(s for u in units if u.size is not None for s in map(str, free_symbols(u.size)))
        leads = [dim for half in self.halves for dim in half.pair.lead]
        needed |= dict.fromkeys(s for dim in leads for s in map(str, free_symbols(dim)))
        missing = [s for s in needed if s not in sources]
        if missing:
            raise ShapeError(f"expected the sizes {missing} among the graph's inputs, found only {sorted(sources)}")
        lines = [f"af_{s} = {sources[s]}" for s in needed]
        for name, expr in derived.items():
            lines.append(f"af_{name} = {in_code(expr)}")
        return tuple(wanted), lines

    # ---- text ----------------------------------------------------------------------------------------

    def _body(self, units: list[Unit], output: fx.Node, start: int | None) -> tuple[list[str], list[str]]:
        """The lines of all units, without and with measuring; from unit ``start`` on, below torch's bookkeeping."""
        kept = set(output.all_input_nodes)
        live = {n for u in units for n in u.outputs} | {n for n in self.fx_nodes if n.op == "placeholder"}
        dead = self._deaths(units, live - kept)
        self._find_reuse(units, kept)
        plain: list[str] = []
        timed: list[str] = []
        outside: tuple[list[str], list[str]] = ([], [])
        for index, unit in enumerate(units):
            if index == start:
                plain, timed, outside = [], [], (plain, timed)
            if unit.inner:
                lines, timed_lines = self._branch(unit)
            else:
                lines = timed_lines = [f"    {self._line(unit)}"]
            plain += [*lines, *dead[index]]
            timed += [*self._measured(unit, timed_lines), *dead[index]]
        if start is not None:
            head = f"    with {BELOW}:"
            plain, timed = (
                [*first, head, *_indented(rest)] for first, rest in zip(outside, (plain, timed), strict=True)
            )
        back = f"    return {self._arg(output.args[0])}"
        return [*plain, back], [*timed, back]

    @staticmethod
    def _deaths(units: Sequence[Unit], mortal: set[fx.Node]) -> list[list[str]]:
        """The lines that free what dies behind each unit, if anything does."""
        dead = deaths([u.inputs for u in units], mortal.__contains__, [u.outputs for u in units])
        return [deleted([n.name for n in nodes], "    ") for nodes in dead]

    # ---- memory --------------------------------------------------------------------------------------

    def _find_reuse(self, units: Sequence[Unit], kept: set[fx.Node]) -> None:
        """Note which outputs of kernels may be written where an input lies that dies there."""
        if not self.reuses:
            return
        steps = []
        for unit in units:
            is_fresh = unit.slot is not None or unit.half is not None
            is_fresh = is_fresh or (len(unit.nodes) == 1 and short_name(unit.nodes[0]) in FRESH)
            is_kernel = unit.slot is not None and not unit.inner and self.slots[unit.slot].device.type == "cpu"
            form = self.slots[unit.slot].node.form if is_kernel and unit.slot is not None else None
            steps.append(Step(tuple(unit.inputs), tuple(unit.outputs), is_fresh, form))
        for unit, pairs in zip(units, find_reuse(steps, kept), strict=True):
            if pairs and unit.slot is not None:
                self.reuse[unit.slot] = pairs

    def _measured(self, unit: Unit, lines: list[str]) -> list[str]:
        """The lines of a unit, between those that take their time where it is a node or a group."""
        if unit.slot is None:
            return lines
        if self.slots[unit.slot].device.type == "cpu":
            start = f"af_t{unit.slot}"
            return [f"    {start} = clock()", *lines, f"    times[{unit.slot}] += clock() - {start}"]
        timer = f"    af_plan.timers[{unit.slot}]"
        return [f"{timer}.start()", *lines, f"{timer}.stop()"]

    def _branch(self, unit: Unit) -> tuple[list[str], list[str]]:
        """A group: its own callable, or what it is made of; without and with measuring."""
        kept = {*unit.outputs, *unit.inputs}
        made = {n for part in unit.inner for n in part.outputs}
        self._find_reuse(unit.inner, kept)
        plain, timed = [], []
        for part, clean in zip(unit.inner, self._deaths(unit.inner, made - kept), strict=True):
            lines = [f"    {self._line(part)}"]
            plain += [*lines, *clean]
            timed += [*self._measured(part, lines), *clean]
        head = [f"    if af_n{unit.slot} is None:"]
        tail = ["    else:", f"        {self._line(unit)}"]
        if unit.half is not None:
            head, tail = self._half_branch(unit, unit.half)
        return [*head, *_indented(plain), *tail], [*head, *_indented(timed), *tail]

    def _half_branch(self, unit: Unit, number: int) -> tuple[list[str], list[str]]:
        """A half of an attention: the lines before and behind its operations one by one."""
        inputs = [n.name for n in unit.inputs[: unit.arity]]
        outputs = ", ".join(n.name for n in unit.outputs)
        count = f"        af_plan.skipped[{number}] += 1"
        if unit.slot is None:  # what forward kept tells which half it ran
            lead = "".join(f"{in_code(sympy.sympify(dim))}, " for dim in self.halves[number].pair.lead)
            call = f"af_half{number}(({lead}), {', '.join(inputs)})"
            return [f"    if {inputs[0]}.dim() != 1:"], ["    else:", f"        {outputs} = {call}", count]
        whole = f"af_whole{number}"
        asked = f"    {whole} = None if af_n{unit.slot} is None else af_n{unit.slot}({', '.join(inputs)})"
        taken = ["    else:", f"        {outputs} = {whole}", f"        del {whole}", count]
        return [asked, f"    if {whole} is None:"], taken

    def _line(self, unit: Unit) -> str:
        if unit.slot is not None:
            inputs = ", ".join(n.name for n in unit.inputs[: unit.arity])
            return f"{', '.join(n.name for n in unit.outputs)} = af_n{unit.slot}({inputs})"
        node = unit.nodes[0]
        if unit.size is not None:
            return f"{node.name} = {in_code(unit.size)}"
        args = [self._arg(a) for a in node.args]
        kwargs = {k: self._arg(v) for k, v in node.kwargs.items()}
        if node.target is operator.getitem:
            return f"{node.name} = {args[0]}[{args[1]}]"
        if node.op == "get_attr":
            self.namespace[f"af_attr_{node.name}"] = attribute(self.imported.module, str(node.target))
            return f"{node.name} = af_attr_{node.name}"
        if node.op == "call_method":
            rest = [*args[1:], *(f"{k}={v}" for k, v in kwargs.items())]
            return f"{node.name} = {args[0]}.{node.target}({', '.join(rest)})"
        if node.op == "call_module":
            self.namespace[f"af_attr_{node.name}"] = self.imported.module.get_submodule(str(node.target))
            return f"{node.name} = af_attr_{node.name}({', '.join([*args, *(f'{k}={v}' for k, v in kwargs.items())])})"
        name = target_name(node)
        if name == "aten._unsafe_view.default" and self.is_below:  # it differs from a view in what is noted of it
            name = "aten.view.default"
        return f"{node.name} = {render_call(name, args, kwargs, self.namespace, node.target)}"

    def _arg(self, arg: Any) -> str:
        if isinstance(arg, fx.Node):
            return str(arg.name)
        if isinstance(arg, tuple | list):
            items = [self._arg(a) for a in arg]
            text = "".join(f"{i}, " for i in items)
            return f"({text})" if isinstance(arg, tuple) else f"[{text}]"
        if isinstance(arg, slice):
            return f"slice({self._arg(arg.start)}, {self._arg(arg.stop)}, {self._arg(arg.step)})"
        if isinstance(arg, dict):
            return "{" + ", ".join(f"{k!r}: {self._arg(v)}" for k, v in arg.items()) + "}"
        if isinstance(arg, float):
            return f"float('{arg}')" if arg != arg or arg in (float("inf"), float("-inf")) else repr(arg)
        if arg is None or isinstance(arg, bool | int | str):
            return repr(arg)
        name = f"af_c{len(self.namespace)}"  # dtypes, devices, layouts: constants of the function
        self.namespace[name] = arg
        return name


def _indented(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]
