"""Units of a generated call, and the nodes of an imported FX graph that they stand for.

In: nodes, and names of values as fusion nodes have them. Out: what a node's target is named, its kind, whether it has
effects; whether units make what later ones read. Torch's operators are named as in the operator table; other callables
get names that no operator has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx

from autofuse.capture.random_ops import bernoulli_mask, philox_dropout
from autofuse.errors import ShapeError
from autofuse.ir.dims import PYTHON, dim_text
from autofuse.ir.operation import ValueRef
from autofuse.ir.optable import OpKind, info


@dataclass
class Unit:
    """What one line of the generated function does."""

    nodes: list[fx.Node]  # a single FX node, or those that a fusion node replaces
    slot: int | None = None
    inputs: list[fx.Node] = field(default_factory=list)
    outputs: list[fx.Node] = field(default_factory=list)
    position: int = 0
    inner: list[Unit] = field(default_factory=list)  # of a group: what runs one by one
    size: sympy.Expr | None = None  # what the line computes, where that is a size
    arity: int | None = None  # inputs that are arguments of its callable, the first ones; all if None
    half: int | None = None  # half of an attention: its number


def check_made(units: Sequence[Unit], placeholders: Sequence[fx.Node], output: fx.Node) -> None:
    """Raise ShapeError where a line reads what no line before it makes: a group that holds too much."""
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


def in_code(size: sympy.Expr) -> str:
    """A size in the names that the code has for symbols."""
    return dim_text(size.xreplace({s: sympy.Symbol(f"af_{s}") for s in size.free_symbols}), PYTHON)


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
    """Whether the operation draws random numbers or writes to an input."""
    if node.op in ("call_module", "call_method"):
        return True
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return torch.Tag.nondeterministic_seeded in target.tags or target._schema.is_mutable
    if isinstance(target, torch._ops.HigherOrderOperator):
        return True
    return target in (bernoulli_mask, philox_dropout)
