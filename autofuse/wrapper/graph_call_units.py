"""Units of a generated call, and the nodes of an imported FX graph that they replace.

In: nodes, and names of values as fusion nodes have them; units. Out: the name of a node's target, its kind, whether it
has effects; units in topological order, without unread ones. Torch's operators are named as in the operator table;
other callables get names that no operator has.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError
from typing import Any

import sympy
import torch
from torch import fx

from autofuse.capture.passes.random_ops import bernoulli_mask, philox_dropout
from autofuse.errors import ShapeError
from autofuse.ir.operation import ValueRef
from autofuse.ir.optable import OpKind, info
from autofuse.ir.ordering import ordered_near


@dataclass
class Unit:
    """One line of the generated function."""

    nodes: list[fx.Node]  # a single FX node, or those that a fusion node replaces
    slot: int | None = None
    inputs: list[fx.Node] = field(default_factory=list)
    outputs: list[fx.Node] = field(default_factory=list)
    position: int = 0
    inner: list[Unit] = field(default_factory=list)  # of a group: units that may run one by one
    size: sympy.Expr | None = None  # the size that the line computes, if it does
    arity: int | None = None  # inputs that are arguments of its callable, the first ones; all if None
    half: int | None = None  # half of an attention: its number
    dead: list[fx.Node] = field(default_factory=list)  # values that are dead after it


def in_order(units: list[Unit], position: Mapping[fx.Node, int]) -> list[Unit]:
    """Topological order that stays near the program's; effects keep their order among themselves.

    ``position``: of each node in the program. Raises ShapeError where units need each other.
    """
    producer = {n: number for number, unit in enumerate(units) for n in unit.nodes}
    before = {
        number: {producer[n] for n in unit.inputs if n in producer} - {number} for number, unit in enumerate(units)
    }
    # A node runs at its last operation, but its place in the random stream is that of its random operation.
    drawn = [(min(position[n] for n in u.nodes if has_effect(n)), i) for i, u in enumerate(units) if have_effects(u)]
    for (_, first), (_, second) in itertools.pairwise(sorted(drawn)):
        before[second].add(first)
    try:
        return [units[number] for number in ordered_near(before, lambda number: (units[number].position, number))]
    except CycleError:
        problem = "expected an acyclic graph of nodes, found a cycle; this is an error of the planner"
        raise ShapeError(problem) from None


def without_unread(units: list[Unit], leaving: Sequence[fx.Node]) -> list[Unit]:
    """The units without unread ones, such as views of values that stay inside of a node."""
    needed = set(leaving)
    kept: list[Unit] = []
    for unit in reversed(units):
        if unit.slot is None and not needed.intersection(unit.outputs) and not have_effects(unit):
            continue
        needed.update(unit.inputs)
        kept.append(unit)
    return kept[::-1]


def check_made(units: Sequence[Unit], placeholders: Sequence[fx.Node], output: fx.Node) -> None:
    """Raise ShapeError where a line reads a value that no earlier line makes: a group that holds too much."""
    made = set(placeholders)
    for unit in units:
        absent = [n.name for n in unit.inputs if n not in made]
        if absent:
            raise ShapeError(
                f"expected {', '.join(absent)} before {unit.nodes[0].name}, found them in no node's outputs"
            )
        made.update(unit.outputs)
    absent = [n.name for n in output.all_input_nodes if n not in made]
    if absent:
        raise ShapeError(f"expected {', '.join(absent)} among what the nodes make, found no such outputs")


def have_effects(unit: Unit) -> bool:
    return any(map(has_effect, unit.nodes))


def short_name(node: fx.Node) -> str:
    return target_name(node).split(".")[1] if node.op == "call_function" else ""


def kind_of(node: fx.Node) -> OpKind:
    """What kind of operator an FX node calls."""
    return info(target_name(node)).kind if node.op == "call_function" else OpKind.OPAQUE


def ref_of(name: str) -> ValueRef:
    """The value of a node input; ``a@2`` is output 2 of operation ``a``."""
    base, _, index = name.partition("@")
    return ValueRef(base, int(index) if index else 0)


def target_name(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return f"{target.namespace}.{target._schema.name.split('::')[1]}.{target._overloadname}"
    return f"py.{getattr(target, '__module__', '')}_{getattr(target, '__name__', 'call')}.{id(target)}"


def attribute(module: fx.GraphModule, path: str) -> Any:
    value: Any = module
    for part in path.split("."):
        value = getattr(value, part)
    return value


def has_effect(node: fx.Node) -> bool:
    """Whether the operation uses random numbers or writes to an input."""
    if node.op in ("call_module", "call_method"):
        return True
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return torch.Tag.nondeterministic_seeded in target.tags or target._schema.is_mutable
    if isinstance(target, torch._ops.HigherOrderOperator):
        return True
    return target in (bernoulli_mask, philox_dropout)
