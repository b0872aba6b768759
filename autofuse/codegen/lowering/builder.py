"""Building the body of a kernel: values over atoms, equal ones made once.

In: calls from the rule functions. Out: a list of `Node` in SSA order whose dims are atoms of the index algebra.
Guarantee: the same op on the same arguments is one value, constants are of the value's dtype, and a
reduction over no atoms is its argument.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from autofuse.codegen.dtypes import compute_dtype, dtype, is_float
from autofuse.codegen.loops import COMPARISONS
from autofuse.codegen.lowering.index import Atom, Indirect, Moved, Part, Word, resolve
from autofuse.errors import LoweringError
from autofuse.ir.shape import Dim, as_dim, product


@dataclass(frozen=True)
class Val:
    """A value of the body: its number and the dtype it is calculated in."""

    number: int
    dtype: str


Number: TypeAlias = bool | int | float
Operand: TypeAlias = Any  # Val, Number or Dim


@dataclass(frozen=True)
class AtomAccess:
    """An access whose dims are atoms; becomes a `loops.Access` when the loops are known."""

    param: int
    strides: tuple[tuple[Atom, Dim], ...]
    indirect: Dim = 0
    offset: Dim = 0


@dataclass(frozen=True)
class Node:
    """A body value before scheduling. ``attr`` of a ``reduce`` is (kind, atoms), of a ``scan`` also its direction."""

    op: str
    dtype: str
    args: tuple[int, ...]
    attr: object


class Builder:
    """Collects nodes; equal nodes are one."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._known: dict[Node, Val] = {}
        self.guard: Val | None = None  # loads are made only where it is true

    def node(self, op: str, dtype: str, args: Iterable[Val] = (), attr: object = None) -> Val:
        item = Node(op, dtype, tuple(a.number for a in args), attr)
        found = self._known.get(item)
        if found is None:
            found = Val(len(self.nodes), dtype)
            self.nodes.append(item)
            self._known[item] = found
        return found

    # ---- leaves

    def const(self, value: Number, name: str) -> Val:
        """A constant of the compute dtype of ``name``, rounded as aten rounds a Python number to it."""
        name = compute_dtype(name)
        text = "nan" if isinstance(value, float) and math.isnan(value) else None
        return self.node("const", name, (), text or _as_constant(value, name))

    def size(self, dim: Dim, name: str) -> Val:
        """A size, or an expression of sizes, as a value in the compute dtype of ``name``."""
        if isinstance(dim, int):
            return self.const(dim, name)
        return self.node("size", compute_dtype(name), (), dim)

    def load(self, param: int, memory_dtype: str, words: Iterable[Word], strides: Iterable[Dim]) -> Val:
        """A parameter's element at an index: a load, or a gather where a part of the index is read or calculated."""
        words, strides = tuple(words), tuple(strides)
        terms, indirect = linear_terms(words, strides)
        name, offset = compute_dtype(memory_dtype), linear_offset(words, strides)
        guard, suffix = ((), "") if self.guard is None else ((self.guard,), "_if")
        if not indirect:
            return self.node(f"load{suffix}", name, guard, AtomAccess(param, terms, 0, offset))
        value, stride = indirect[0] if len(indirect) == 1 else (self.places(indirect), 1)
        return self.node(f"gather{suffix}", name, (value, *guard), AtomAccess(param, terms, stride, offset))

    def index(self, word: Word) -> Val:
        """The position along a tensor dim, an int64."""
        terms, indirect = linear_terms((word,), (1,))
        offset = linear_offset((word,), (1,))
        place = self.node("index", "int64", (), terms) if terms else self.size(offset, "int64")
        if terms and offset != 0:
            place = self.add(place, offset)
        if not indirect:
            return place
        moved = self.places(indirect)
        return moved if not terms and offset == 0 else self.apply("add", place, moved)

    def places(self, indirect: Iterable[tuple[Val, Dim]]) -> Val:
        """The sum of indices that are read or calculated, each times its stride."""
        steps = [v if stride == 1 else self.apply("mul", v, self.size(stride, "int64")) for v, stride in indirect]
        return functools.reduce(lambda x, y: self.apply("add", x, y), steps)

    # ---- ops

    def checked(self, value: Val, size: Dim) -> Val:
        """An index (int64) into a dim of ``size``: 0 where it is outside, and the call then ends in eager."""
        return self.node("checked", "int64", (value,), size)

    def cast(self, value: Operand, name: str) -> Val:
        """The value in the compute dtype of ``name``; numbers become constants, sizes become values."""
        name = compute_dtype(name)
        if not isinstance(value, Val):
            if isinstance(value, bool | int | float):
                return self.const(value, name)
            return self.size(value, name)
        if value.dtype == name:
            return value
        return self.node("cast", name, (value,))

    def round_to(self, value: Val, name: str) -> Val:
        """Round to a 16-bit floating dtype while staying in its compute dtype."""
        if dtype(name).nbytes != 2 or not is_float(name):
            return value
        return self.node("round_to", value.dtype, (value,), name)

    def apply(self, op: str, *args: Val) -> Val:
        """A scalar op; comparisons give bool, others the dtype of the last argument."""
        return self.node(op, "bool" if op in COMPARISONS else args[-1].dtype, args)

    def where(self, condition: Val, yes: Val, no: Val) -> Val:
        return self.node("where", yes.dtype, (condition, yes, no))

    def reduce(self, kind: str, value: Val, atoms: Iterable[Atom]) -> Val:
        """Reduce over atoms (all of them must still be loops, none an indirect index).

        Raises LoweringError under a guard that tests one of these loops: it is about the place of one element, and the
        loads of all the others would be left out.
        """
        over = tuple(sorted(set(atoms), key=lambda a: a.number))
        if self.guard is not None and not self.reach(self.guard.number).isdisjoint(over):
            raise LoweringError("reduction", "expected a reduction of whole rows, found one under a test of its loop")
        hit = self._one_hot(value, frozenset(over)) if kind == "sum" else None
        if hit is not None:
            return hit
        return self.node("reduce", value.dtype, (value,), (kind, over)) if over else value

    def scan(self, kind: str, value: Val, atoms: Sequence[Atom], is_reversed: bool) -> Val:
        """At each place along the loops, outermost first, what a reduction has reached there."""
        return self.node("scan", value.dtype, (value,), (kind, tuple(atoms), is_reversed)) if atoms else value

    def _one_hot(self, value: Val, over: frozenset[Atom]) -> Val | None:
        """sum over c of where(c == t, x, 0) = where(0 <= t < size, x, 0), with t and x free of c; None for other sums.

        This is the gradient of a class index, summed over the classes: no loop is left of it.
        """
        node = self.nodes[value.number]
        if node.op != "where" or not over:
            return None
        test, yes, no = (Val(a, self.nodes[a].dtype) for a in node.args)
        equal, zero = self.nodes[test.number], self.nodes[no.number]
        if equal.op != "eq" or zero.op != "const" or zero.attr != 0:
            return None
        position, target = equal.args
        counted = self.nodes[position]
        if counted.op != "index" or frozenset(a for a, _ in counted.attr) != over:  # type: ignore[attr-defined]
            return None
        if over & (self.reach(target) | self.reach(yes.number)):
            return None
        t = Val(target, self.nodes[target].dtype)
        size = self.size(product(a.size for a in over), t.dtype)
        inside = self.apply("and", self.compare("ge", t, 0), self.apply("lt", t, size))
        return self.where(inside, yes, no)

    def reach(self, number: int) -> frozenset[Atom]:
        """The loops a value depends on."""
        node = self.nodes[number]
        own: frozenset[Atom] = frozenset()
        if isinstance(node.attr, AtomAccess):
            own = frozenset(a for a, _ in node.attr.strides)
        elif node.op == "index":
            own = frozenset(a for a, _ in node.attr)  # type: ignore[attr-defined]
        reached = own.union(*(self.reach(a) for a in node.args)) if node.args else own
        return reached - frozenset(node.attr[1]) if node.op == "reduce" else reached  # type: ignore[index]

    # ---- shorthands that rules are written in

    def add(self, a: Val, b: Operand) -> Val:
        return self.apply("add", a, self.cast(b, a.dtype))

    def sub(self, a: Val, b: Operand) -> Val:
        return self.apply("sub", a, self.cast(b, a.dtype))

    def mul(self, a: Val, b: Operand) -> Val:
        return self.apply("mul", a, self.cast(b, a.dtype))

    def div(self, a: Val, b: Operand) -> Val:
        return self.apply("div", a, self.cast(b, a.dtype))

    def compare(self, op: str, a: Val, b: Operand) -> Val:
        return self.apply(op, a, self.cast(b, a.dtype))

    def select(self, condition: Val, yes: Operand, no: Operand, name: str) -> Val:
        return self.where(condition, self.cast(yes, name), self.cast(no, name))


def _as_constant(value: Number, name: str) -> Number:
    category = dtype(name).category
    if category == 0:
        return bool(value)
    if category == 1:
        if isinstance(value, float) and (math.isnan(value) or math.isinf(value)):
            raise LoweringError("constant", f"expected a finite number for {name}, found {value}")
        bits = 8 * dtype(name).nbytes
        wrapped = int(value) % (1 << bits)
        return wrapped - (1 << bits) if name != "uint8" and wrapped >= 1 << (bits - 1) else wrapped
    number = float(value)
    if name == "float32" and math.isfinite(number):
        try:
            return float(struct.unpack("f", struct.pack("f", number))[0])
        except OverflowError:
            return math.copysign(math.inf, number)
    return number


def linear_terms(
    words: Iterable[Word], strides: Iterable[Dim]
) -> tuple[tuple[tuple[Atom, Dim], ...], tuple[tuple[Val, Dim], ...]]:
    """The stride of each atom of a tensor index, and its indirect parts with their strides.

    A dim that covers parts (p1..pk) with stride s gives pk the stride s, p(k-1) the stride s x size of pk, ...
    """
    terms: dict[Atom, Dim] = {}
    indirect: list[tuple[Val, Dim]] = []
    for part, step in _steps(words, strides):
        if isinstance(part, Indirect):
            assert isinstance(part.value, Val)
            indirect.append((part.value, step))
        elif isinstance(part, Atom):
            terms[part] = as_dim(terms.get(part, 0) + step)
    kept = sorted(((a, s) for a, s in terms.items() if s != 0), key=lambda t: t[0].number)
    return tuple(kept), tuple(indirect)


def linear_offset(words: Iterable[Word], strides: Iterable[Dim]) -> Dim:
    """The part of an index's place in memory that no loop changes, in elements."""
    return as_dim(sum(part.start * step for part, step in _steps(words, strides) if isinstance(part, Moved)))


def _steps(words: Iterable[Word], strides: Iterable[Dim]) -> Iterator[tuple[Part, Dim]]:
    """Each part of an index with its stride in elements; a moved part comes before the parts of its word."""
    for word, stride in zip(words, strides, strict=True):
        step = stride
        for part in reversed(resolve(word)):
            yield part, step
            if isinstance(part, Moved):
                yield from _steps((part.word,), (as_dim(step * part.step),))
            step = as_dim(step * part.size)
