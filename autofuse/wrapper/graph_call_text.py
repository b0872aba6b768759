"""The flat call of a graph as Python text.

In: a `CallPlan`. Out: the text of ``call`` and ``timed_call``, and the constants that it reads by name. A group is a
branch: its own callable where the call's plan has one, else its nodes and matmuls one by one. Only ``timed_call``
measures each node. ``call`` runs its plan in C where the plan has a program for that (`native_text`), or as a CUDA
graph (`runtime.replays.plan_replay`); the Python behind it is what both do.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, NamedTuple

import sympy
import torch
from torch import fx

from autofuse.wrapper.aten_call import render_call
from autofuse.wrapper.below_autograd import BELOW
from autofuse.wrapper.graph_call_plan import CallPlan
from autofuse.wrapper.graph_call_symbols import in_code, symbol_bindings
from autofuse.wrapper.graph_call_units import Unit, attribute, target_name
from autofuse.wrapper.liveness import deleted
from autofuse.wrapper.native_text import native_text
from autofuse.wrapper.operation_text import argument_text


class CallText(NamedTuple):
    """Two functions in one text, and the function that writes them down for the runner in C."""

    source: str
    native: str  # see `native_text`
    constants: dict[str, Any]  # by their names in the text


def call_text(plan: CallPlan, is_replayable: bool = False) -> CallText:
    """Raises ShapeError where a symbol is not among the graph's inputs. ``is_replayable``: as a CUDA graph."""
    return _Writer(plan).text(is_replayable)


class _Lines(NamedTuple):
    """Lines of the function, without and with measuring."""

    plain: list[str]
    timed: list[str]

    def add(self, plain: Iterable[str], timed: Iterable[str]) -> None:
        self.plain.extend(plain)
        self.timed.extend(timed)

    def indented(self) -> _Lines:
        return _Lines([f"    {line}" for line in self.plain], [f"    {line}" for line in self.timed])


class _Writer:
    """Writes one call."""

    def __init__(self, plan: CallPlan) -> None:
        self.plan = plan
        self.namespace: dict[str, Any] = {"torch": torch}  # and names that `link` adds
        for number, half in enumerate(plan.halves):
            if not any(slot.half is half for slot in plan.slots):
                self.namespace[_half_name(number)] = half.pair

    def text(self, is_replayable: bool) -> CallText:
        nodes = self.plan.imported.module.graph.nodes
        output = next(n for n in nodes if n.op == "output")
        inputs = [n.name for n in nodes if n.op == "placeholder"]
        body = self._body()
        native = native_text(self.plan, self._operation, self._argument)
        back = f"    return {self._argument(output.args[0])}"
        lines = [
            "def call(plans, miss, args):",
            *self._head(inputs, bool(native) or is_replayable),
            *body.plain,
            back,
            "",
        ]
        lines += ["def timed_call(plans, miss, args, times):", *self._head(inputs, False), *body.timed, back]
        del self.namespace["torch"]
        return CallText("\n".join(lines), native, self.namespace)

    def _head(self, inputs: list[str], can_run: bool) -> list[str]:
        """The lines that bind the symbols, look up the plan, run it in C or as a CUDA graph where it can, else take
        the inputs."""
        plan = self.plan
        sources = {name: _in_list(source, inputs) for name, source in plan.sources.items()}
        bindings = symbol_bindings(plan.symbols, plan.sizes, plan.imported.derived, sources)
        lines = [f"    {line}" for line in bindings]
        key = f"({_tuple(f'af_{s}' for s in plan.symbols)})"
        lines += [f"    af_plan = plans.get({key})", "    if af_plan is None:", f"        af_plan = miss({key})"]
        lines.append("    af_plan.count += 1")
        if can_run:
            lines += ["    if af_plan.native is not None and af_dual._current_level < 0:"]
            lines += ["        af_found = af_plan.native(args)", "        if af_found is not None: return af_found"]
        lines += [f"    ({_tuple(inputs)}) = args", "    args.clear()"] if inputs else []
        if plan.slots:
            lines.append(f"    ({_tuple(f'af_n{i}' for i in range(len(plan.slots)))}) = af_plan.calls")
        return lines

    def _body(self) -> _Lines:
        """The lines of all units."""
        body = _Lines([], [])
        for unit in self.plan.booked:
            body.add(*self._lines(unit))
        if self.plan.is_below:
            below = _Lines([], [])
            for unit in self.plan.units:
                below.add(*self._lines(unit))
            head = [f"    with {BELOW}:"]
            body.add(head, head)
            body.add(*below.indented())
        return body

    # ---- units

    def _lines(self, unit: Unit) -> _Lines:
        """The lines of a unit, and the deletion of values that die there."""
        if unit.inner:
            found = self._branch(unit)
        else:
            line = [f"    {self._call(unit)}"]
            found = _Lines(line, line)
        dead = deleted([n.name for n in unit.dead], "    ")
        return _Lines([*found.plain, *dead], [*self._measured(unit, found.timed), *dead])

    def _measured(self, unit: Unit, lines: list[str]) -> list[str]:
        """The lines of a unit, with timing around them where it is a node or a group."""
        if unit.slot is None:
            return lines
        if self.plan.slots[unit.slot].device.type == "cpu":
            start = f"af_t{unit.slot}"
            return [f"    {start} = clock()", *lines, f"    times[{unit.slot}] += clock() - {start}"]
        timer = f"    af_plan.timers[{unit.slot}]"
        return [f"{timer}.start()", *lines, f"{timer}.stop()"]

    def _branch(self, unit: Unit) -> _Lines:
        """A group: its own callable, or its members."""
        parts = _Lines([], [])
        for part in unit.inner:
            parts.add(*self._lines(part))
        head, tail = self._ends_of_group(unit) if unit.half is None else self._ends_of_half(unit, unit.half)
        plain, timed = parts.indented()
        return _Lines([*head, *plain, *tail], [*head, *timed, *tail])

    def _ends_of_group(self, unit: Unit) -> tuple[list[str], list[str]]:
        """The lines before and after the members that run one by one."""
        return [f"    if af_n{unit.slot} is None:"], ["    else:", f"        {self._call(unit)}"]

    def _ends_of_half(self, unit: Unit, number: int) -> tuple[list[str], list[str]]:
        """A half of an attention: the lines before and after its operations that run one by one."""
        inputs = [n.name for n in unit.inputs[: unit.arity]]
        outputs = ", ".join(n.name for n in unit.outputs)
        count = f"        af_plan.skipped[{number}] += 1"
        if unit.slot is None:  # the saved tensor tells which half forward ran
            lead = _tuple(in_code(sympy.sympify(dim)) for dim in self.plan.halves[number].pair.lead)
            call = f"{_half_name(number)}(({lead}), {', '.join(inputs)})"
            return [f"    if {inputs[0]}.dim() != 1:"], ["    else:", f"        {outputs} = {call}", count]
        whole = f"af_whole{number}"
        asked = f"    {whole} = None if af_n{unit.slot} is None else af_n{unit.slot}({', '.join(inputs)})"
        taken = ["    else:", f"        {outputs} = {whole}", f"        del {whole}", count]
        return [asked, f"    if {whole} is None:"], taken

    def _call(self, unit: Unit) -> str:
        """The line of a unit without units inside."""
        if unit.slot is not None:
            inputs = ", ".join(n.name for n in unit.inputs[: unit.arity])
            return f"{', '.join(n.name for n in unit.outputs)} = af_n{unit.slot}({inputs})"
        node = unit.nodes[0]
        return f"{node.name} = {self._operation(node) if unit.size is None else in_code(unit.size)}"

    def _operation(self, node: fx.Node) -> str:
        """An operation as eager runs it."""
        args = [self._argument(a) for a in node.args]
        kwargs = {k: self._argument(v) for k, v in node.kwargs.items()}
        named = [f"{k}={v}" for k, v in kwargs.items()]
        if node.target is operator.getitem:
            return f"{args[0]}[{args[1]}]"
        if node.op == "call_method":
            return f"{args[0]}.{node.target}({', '.join([*args[1:], *named])})"
        module = self.plan.imported.module
        if node.op == "get_attr":
            return self._constant(f"af_attr_{node.name}", attribute(module, str(node.target)))
        if node.op == "call_module":
            callee = self._constant(f"af_attr_{node.name}", module.get_submodule(str(node.target)))
            return f"{callee}({', '.join([*args, *named])})"
        name = target_name(node)
        if name == "aten._unsafe_view.default" and self.plan.is_below:  # it differs from a view in autograd's records
            name = "aten.view.default"
        return render_call(name, args, kwargs, self.namespace, node.target)

    # ---- arguments

    def _argument(self, arg: Any) -> str:
        return argument_text(arg, self._leaf)

    def _leaf(self, arg: Any) -> str | None:
        if isinstance(arg, fx.Node):
            return str(arg.name)
        if arg is None or isinstance(arg, bool | int | float | str | tuple | list | slice | dict):
            return None
        return self._constant(f"af_c{len(self.namespace)}", arg)  # dtypes, devices, layouts

    def _constant(self, name: str, value: Any) -> str:
        """Record an object that the text reads by name."""
        self.namespace[name] = value
        return name


def _in_list(source: str, inputs: list[str]) -> str:
    """The expression of an input, as one of the list of all."""
    name, point, rest = source.partition(".")
    return f"args[{inputs.index(name)}]{point}{rest}"


def _half_name(number: int) -> str:
    return f"af_half{number}"


def _tuple(items: Iterable[str]) -> str:
    """The text between the brackets of a tuple."""
    return "".join(f"{item}, " for item in items)
