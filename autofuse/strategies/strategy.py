"""A strategy: one of several programs with the results of a node's operations.

In: a form with the node's inputs and outputs, some operations replaced by extern kernels, and the parts that run as one
generated kernel each. Out: the steps in order, and the form of each part. Guarantee: torch-free and serialisable;
operations in no part run one at a time, through aten or a library.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from graphlib import CycleError
from typing import Any

from autofuse.codegen import templates
from autofuse.codegen.templates import LOOP
from autofuse.errors import FusionError
from autofuse.fusion.analyzer import build_node
from autofuse.fusion.graph import FusionGraph
from autofuse.fusion.node import FusionNode
from autofuse.ir.operation import NodeForm, Operation, ValueRef
from autofuse.ir.ordering import ordered_near
from autofuse.ir.shape import Dim, as_dim, floors, symbol
from autofuse.ir.validation import one_line, one_of, stored_name, stored_number


@dataclass(frozen=True)
class Part:
    """Operations that run as one generated kernel."""

    operations: tuple[str, ...]  # their names in the strategy's form, without the views between them
    printer: str = LOOP  # the name of the template that prints them


@dataclass(frozen=True)
class Kernel:
    """A part as a node, with inputs named as in the strategy's form."""

    node: FusionNode
    sizes: tuple[Dim, ...]  # the node's symbols, as sizes of the strategy's form


@dataclass(frozen=True)
class Rows:
    """How a program for some rows of a node's outputs is run for all of them, block by block."""

    symbol: str  # the number of rows in the program's form
    count: int  # rows of a block; the last block may have fewer
    total: Dim  # the node's number of rows, in its own symbols
    is_cut: tuple[bool, ...]  # for each input: whether a block gets its rows, or the whole input


@dataclass(frozen=True)
class Strategy:
    """One program for a node."""

    name: str  # "parts", "vendor_linear", ...: unique among the strategies of a node
    form: NodeForm  # the node's form, rewritten, or that of a block of its rows
    parts: tuple[Part, ...]
    detail: str = ""  # readable description
    rows: Rows | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "form": self.form.to_json(),
            "parts": [[list(part.operations), part.printer] for part in self.parts],
            "detail": self.detail,
            "rows": self.rows and [self.rows.symbol, self.rows.count, str(self.rows.total), list(self.rows.is_cut)],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Strategy:
        """Raises FusionError and ShapeError for data that is no strategy."""
        form = NodeForm.from_json(data["form"])
        made = {op.name: op for op in form.operations}
        parts = tuple(
            Part(
                tuple(one_of(name, made, "an operation of it") for name in names),
                one_of(printer, templates.STORED_NAMES, "a template"),
            )
            for names, printer in data["parts"]
        )
        rows = data.get("rows")
        if rows is not None:
            rows = Rows(stored_name(rows[0]), stored_number(rows[1]), as_dim(rows[2]), tuple(map(bool, rows[3])))
        return cls(one_line(data["name"]), form, parts, one_line(data["detail"]), rows)

    def without(self, index: int) -> Strategy:
        """The same program, with part ``index`` run through aten."""
        return replace(self, parts=(*self.parts[:index], *self.parts[index + 1 :]))

    @property
    def has_extern(self) -> bool:
        """Whether it contains an extern kernel."""
        return any(op.target.startswith("vendor.") for op in self.form.operations)

    @functools.cached_property
    def graph(self) -> FusionGraph:
        return graph_of(self.form)

    @functools.cached_property
    def kernels(self) -> tuple[Kernel, ...]:
        """The parts as nodes of their own."""
        return tuple(
            _kernel(build_node(self.graph, [self.graph.by_name[name] for name in part.operations]))
            for part in self.parts
        )

    def sizes_of(self, index: int) -> tuple[Dim, ...]:
        """The symbols of part ``index``, in the node's symbols; of a whole block, where there are blocks."""
        sizes = self.kernels[index].sizes
        if self.rows is None:
            return sizes
        table = {symbol(self.rows.symbol): self.rows.count}
        return tuple(size if isinstance(size, int) else as_dim(size.xreplace(table)) for size in sizes)

    @functools.cached_property
    def steps(self) -> tuple[Operation | int, ...]:
        """The steps in order: operations, or numbers of parts. Raises FusionError for parts in a circle."""
        home = {name: index for index, part in enumerate(self.parts) for name in part.operations}
        unit_of = {op.name: home.get(op.name, op.name) for op in self.form.operations}
        waits: dict[Any, set[Any]] = {unit: set() for unit in unit_of.values()}
        for op in self.form.operations:
            unit = unit_of[op.name]
            reads = op.inputs if unit == op.name else self._read_by(home[op.name])
            waits[unit] |= {unit_of[r.name] for r in reads if r.name in unit_of} - {unit}
        place = {unit: number for number, unit in enumerate(waits)}
        try:
            ordered = ordered_near(waits, place.__getitem__)
        except CycleError:
            raise FusionError(f"expected parts without a circle in the strategy {self.name}, found one") from None
        return self._live([unit if isinstance(unit, int) else self.graph.by_name[unit] for unit in ordered])

    def _read_by(self, index: int) -> list[ValueRef]:
        return [flat_ref(name) for name in self.kernels[index].node.input_names]

    def _live(self, steps: Sequence[Operation | int]) -> tuple[Operation | int, ...]:
        """The operations without unread views of values that stay inside of a part."""
        needed = {ref.name for ref in self.form.outputs}
        kept: list[Operation | int] = []
        for step in reversed(steps):
            names = set(self.parts[step].operations) if isinstance(step, int) else {step.name}
            if not names & needed:
                continue
            reads = self._read_by(step) if isinstance(step, int) else step.inputs
            needed |= {ref.name for ref in reads}
            kept.append(step)
        return tuple(reversed(kept))


def _kernel(node: FusionNode) -> Kernel:
    """A part's node with plain symbols: each rounded quotient becomes one, except where the part reads windows."""
    if node.reads_windows:  # with windows, a size follows from the input tensor's
        return Kernel(node, tuple(map(symbol, node.symbols)))
    specs = [*node.inputs.values(), *(spec for op in node.operations for spec in op.outputs)]
    quotients = dict.fromkeys(f for spec in specs for dim in (*spec.shape, *spec.strides) for f in floors(dim))
    table = {quotient: symbol(f"d{n}") for n, quotient in enumerate(quotients)}
    if table:
        node = node.with_dims(table)
    back = {str(new): quotient for quotient, new in table.items()}
    return Kernel(node, tuple(back.get(name, symbol(name)) for name in node.symbols))


def graph_of(form: NodeForm) -> FusionGraph:
    """The operations of a form as a graph."""
    return FusionGraph(form.operations, {item.name: item.spec for item in form.inputs}, form.outputs)


def flat_ref(name: str) -> ValueRef:
    """The value behind a node's input; ``a@2`` is output 2 of operation ``a``."""
    base, _, index = name.partition("@")
    return ValueRef(base, int(index) if index else 0)


def kernel_id(form: NodeForm, printer: str) -> str:
    """The `FusionNode.fusion_id` of a part; a template's part has its own, since its form may be the whole group's."""
    text = form.text() if printer == LOOP else f"{printer}:{form.text()}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]
