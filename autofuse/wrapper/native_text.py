"""The flat call of a graph as text for the runner in C: what `graph_call_text` writes as Python, step by step.

In: a `CallPlan`, and the texts of its operations. Out: the text of ``native(b, key, calls)``, which gives the steps of
a plan to a `NativeBuilder`, each with its Python callable; "" where the graph is left to Python. Guarantee: the steps,
their order and the deaths of values are those of the Python text.

A plan's sizes are numbers here, and each group either runs as a whole or has no callable: the plan's callables tell.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from autofuse.ir.shape import free_symbols
from autofuse.wrapper.graph_call_plan import CallPlan, split_by_books
from autofuse.wrapper.graph_call_symbols import in_code
from autofuse.wrapper.graph_call_units import Unit, target_name
from autofuse.wrapper.native_build import PRODUCTS, VIEWS


def native_text(plan: CallPlan, operation: Callable[[fx.Node], str], argument: Callable[[Any], str]) -> str:
    """``operation`` and ``argument`` give the Python text of an FX node and of an argument, which is an expression."""
    module = plan.imported.module
    (output,) = module.graph.find_nodes(op="output")
    results = output.args[0]
    if plan.halves or any(device.type != "cpu" for device in plan.imported.devices.values()):
        return ""
    booked, below = plan.booked, plan.units
    if not below:  # going there costs nothing in C
        booked, below = split_by_books(module, [*plan.booked], 0)
    if not below or [*booked, *below] != [*plan.booked, *plan.units]:  # values die in this order
        return ""
    if not isinstance(results, tuple | list) or any(isinstance(r, tuple | list | dict | slice) for r in results):
        return ""
    if any(spec.dtype.startswith("complex") for spec in plan.imported.inputs.values()):  # a product may be conjugated
        return ""
    if not {str(s) for size in plan.sizes for s in free_symbols(size)} <= set(plan.symbols):
        return ""  # one plan serves several sizes
    return _Writer(plan, operation, argument).text(booked, below, results)


class _Writer:
    def __init__(self, plan: CallPlan, operation: Callable[[fx.Node], str], argument: Callable[[Any], str]) -> None:
        self.plan = plan
        self.operation = operation
        self.argument = argument
        self.registers: dict[fx.Node, int] = {}
        self.constants = 0
        self.sizes: set[fx.Node] = set()  # known when the steps are written down, and names of the text

    def text(self, booked: Sequence[Unit], below: Sequence[Unit], results: Sequence[Any]) -> str:
        inputs = [n for n in self.plan.imported.module.graph.nodes if n.op == "placeholder"]
        kinds = [isinstance(n.meta.get("val"), torch.Tensor) for n in inputs]
        for n in inputs:
            self._register(n)
        lines = ["def native(b, key, calls):", f"    b.take({kinds})"]
        if self.plan.symbols:
            lines.append(f"    ({''.join(f'af_{s}, ' for s in self.plan.symbols)}) = key")
        if self.plan.slots:
            lines.append(f"    ({''.join(f'af_n{i}, ' for i in range(len(self.plan.slots)))}) = calls")
        for unit in booked:
            lines += self._lines(unit, self._call)
        lines.append("    b.below()")
        for unit in below:
            lines += self._lines(unit)
        found = []
        for result in results:  # each in a register by then
            if isinstance(result, fx.Node) and result not in self.sizes:
                found.append(self._register(result))
                continue
            found.append(len(self.registers) + self.constants)
            self.constants += 1  # behind the registers of all nodes, which are known by now
            lines.append(f"    b.constant({found[-1]}, {self.argument(result)})")
        lines.append(f"    b.result({found}, {isinstance(results, list)})")
        return "\n".join(lines)

    def _register(self, node: fx.Node) -> int:
        return self.registers.setdefault(node, len(self.registers))

    def _lines(self, unit: Unit, operator_line: Callable[[fx.Node], str] | None = None) -> list[str]:
        if unit.inner:
            parts = [line for part in unit.inner for line in self._lines(part)]
            head, tail = f"    if af_n{unit.slot} is None:", "    else:"
            lines = [head, *(f"    {line}" for line in parts), tail, f"        {self._node(unit)}"]
        elif unit.slot is not None:
            lines = [f"    {self._node(unit)}"]
        elif unit.size is not None:
            (node,) = unit.outputs
            self.sizes.add(node)
            return [f"    {node.name} = {in_code(unit.size)}"]
        else:
            lines = [f"    {(operator_line or self._operator)(unit.nodes[0])}"]
        dead = [self.registers[n] for n in unit.dead if n in self.registers]
        return [*lines, *([f"    b.drop({', '.join(map(str, dead))})"] if dead else [])]

    def _node(self, unit: Unit) -> str:
        inputs = [self._register(n) for n in unit.inputs[: unit.arity]]
        return f"b.node(af_n{unit.slot}, {inputs}, {[self._register(n) for n in unit.outputs]})"

    def _call(self, node: fx.Node) -> str:
        """By Python: a view that autograd keeps has the version of what it views, which no step in C gives it."""
        given = [n for n in node.all_input_nodes if n not in self.sizes]
        function = f"lambda {', '.join(n.name for n in given)}: {self.operation(node)}"
        return f"b.call({function}, {[self._register(n) for n in given]}, [{self._register(node)}])"

    def _operator(self, node: fx.Node) -> str:
        given = [n for n in node.all_input_nodes if n not in self.sizes]
        function = f"lambda {', '.join(n.name for n in given)}: {self.operation(node)}"
        inputs, output = [self._register(n) for n in given], self._register(node)
        if node.target is operator.getitem and len(given) == 1 and isinstance(node.args[1], int):
            return f"b.item({function}, {inputs[0]}, {output}, {node.args[1]})"
        name = target_name(node) if node.op == "call_function" else ""
        if (name in PRODUCTS or name in VIEWS) and not node.kwargs:
            tensors = [a for a in node.args if isinstance(a, fx.Node) and a not in self.sizes]
            numbers = node.args[len(tensors) :]
            if tensors == given and [*node.args[: len(tensors)]] == tensors:
                own = "".join(f"{self.argument(a)}, " for a in numbers)
                return f"b.operator({name!r}, {function}, {inputs}, {output}, ({own}))"
        return self._call(node)
