"""Symbolic shapes: dims are ints or symbolic expressions.

In: sizes as ints, strings or sympy expressions. Out: immutable, hashable, JSON-serialisable shapes.
Guarantee: every symbol is a non-negative integer, so expressions simplify the way sizes do, and
two shapes compare equal exactly when their expanded expressions do.
Torch-free: the daemon, which never imports torch, reads the same shapes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import sympy

from autofuse.errors import LoweringError, ShapeError
from autofuse.ir.size_text import PYTHON, dim_text, parse
from autofuse.ir.validation import is_name

Dim: TypeAlias = int | sympy.Expr


@functools.cache
def symbol(name: str) -> sympy.Symbol:
    """The one symbol of that name; sizes are integers and at least 0. Generated code has it under the same name."""
    if not is_name(name):
        raise ShapeError(f"expected a name for a size, such as s0, found {name!r}")
    return sympy.Symbol(name, integer=True, nonnegative=True)


@functools.lru_cache(maxsize=65536)
def parse_dim(text: str) -> Dim:
    """Read a dim from its text form, such as ``"4"``, ``"s0"`` or ``"s0*s1 + 1"``."""
    return as_dim(parse(text, symbol))


def as_dim(value: Any) -> Dim:
    """Normalise: constants become ints, expressions are expanded so that equal sizes compare equal."""
    if isinstance(value, bool):
        raise ShapeError(f"expected a size, found the bool {value}")
    if isinstance(value, int):
        return value
    if isinstance(value, str):
        return parse_dim(value)
    if isinstance(value, sympy.Expr):
        return _expand(value)
    try:
        return int(value)  # numpy integers and torch.SymInt with a hint
    except (TypeError, ValueError):
        raise ShapeError(f"expected an int, a string or a sympy expression as a size, found {value!r}") from None


@functools.lru_cache(maxsize=65536)
def _expand(value: sympy.Expr) -> Dim:
    expanded = sympy.expand(value)
    return int(expanded) if expanded.is_Integer else expanded


def evaluate(dim: Dim, values: Mapping[str, int]) -> int:
    """The size of ``dim`` where each symbol has the given value."""
    if isinstance(dim, int):
        return dim
    names, function = _compiled(dim)
    try:
        return int(function(*[values[name] for name in names]))
    except KeyError:
        missing = sorted(name for name in names if name not in values)
        message = f"expected values for {missing}, found only {sorted(values)}; bind those symbols too"
        raise ShapeError(message) from None


@functools.lru_cache(maxsize=65536)
def _compiled(dim: sympy.Expr) -> tuple[tuple[str, ...], Callable[..., int]]:
    """The symbols of an expression and a function of them: 100 times faster than sympy's substitution."""
    names = free_symbols(dim)
    try:
        function: Callable[..., int] = eval(f"lambda {', '.join(names)}: {dim_text(dim, PYTHON)}")
    except LoweringError as error:
        raise ShapeError(f"expected a size that can be calculated: {error}") from None
    return names, function


@functools.lru_cache(maxsize=65536)
def free_symbols(dim: Dim) -> tuple[str, ...]:
    """Names of the symbols in a dim, sorted."""
    return () if isinstance(dim, int) else tuple(sorted(str(s) for s in dim.free_symbols))


def floors(dim: Dim) -> tuple[sympy.Expr, ...]:
    """The rounded quotients in a dim, such as ``floor(s0/2)``: what strided windows leave of a size."""
    return () if isinstance(dim, int) else tuple(sorted(dim.atoms(sympy.floor), key=str))


def divide(dim: Dim, by: Dim) -> Dim | None:
    """``dim / by`` where it is provably a whole expression for every size, else None."""
    if isinstance(dim, int) and isinstance(by, int):
        return dim // by if by and dim % by == 0 else None
    return _divide(sympy.sympify(dim), sympy.sympify(by))


@functools.lru_cache(maxsize=65536)
def _divide(dim: sympy.Expr, by: sympy.Expr) -> Dim | None:
    if by == 0:
        return None
    quotient = sympy.cancel(dim / by)
    numerator, denominator = quotient.as_numer_denom()
    return as_dim(numerator) if denominator == 1 else None


def product(dims: Iterable[Dim]) -> Dim:
    """The product of the dims; 1 for none."""
    total: Dim = 1
    for dim in dims:
        total = total * dim
    return as_dim(total)


def contiguous_strides(dims: Sequence[Dim]) -> tuple[Dim, ...]:
    """Row-major strides in elements. Dims of size 0 count as 1, as in torch."""
    strides: list[Dim] = []
    step: Dim = 1
    for dim in reversed(dims):
        strides.append(step)
        step = as_dim(step * (1 if dim == 0 else dim))
    return tuple(reversed(strides))


@dataclass(frozen=True)
class SymbolicShape:
    """A shape whose dims are ints or symbolic expressions (seed: operator fusion with dynamic shapes)."""

    dims: tuple[Dim, ...]

    def __init__(self, dims: Iterable[Dim | str] = ()) -> None:
        object.__setattr__(self, "dims", tuple(as_dim(d) for d in dims))

    def __len__(self) -> int:
        return len(self.dims)

    def __iter__(self) -> Iterator[Dim]:
        return iter(self.dims)

    def __getitem__(self, index: int) -> Dim:
        return self.dims[index]

    def __str__(self) -> str:
        return "[" + ", ".join(str(d) for d in self.dims) + "]"

    @property
    def symbols(self) -> tuple[str, ...]:
        """Names of the free symbols, in order of first appearance."""
        seen: dict[str, None] = {}
        for dim in self.dims:
            for name in free_symbols(dim):
                seen.setdefault(name)
        return tuple(seen)

    @property
    def numel(self) -> Dim:
        return product(self.dims)

    def bind(self, values: Mapping[str, int]) -> tuple[int, ...]:
        """Concrete sizes; raises ShapeError for a symbol without a value or a negative size."""
        sizes = tuple(evaluate(d, values) for d in self.dims)
        if any(size < 0 for size in sizes):
            raise ShapeError(f"expected sizes of 0 and more for {self}, found {sizes} with {dict(values)}")
        return sizes

    def substitute(self, values: Mapping[str, Dim]) -> SymbolicShape:
        """The same shape with some symbols replaced by sizes or expressions."""
        table = tuple(values.items())
        return SymbolicShape(_substitute(d, table) for d in self.dims)

    def unify(self, sizes: Sequence[int]) -> dict[str, int]:
        """Values of the symbols under which this shape has the given sizes.

        Plain-symbol dims bind; the others must then agree. Raises ShapeError where they cannot.
        """
        if len(sizes) != len(self.dims):
            raise ShapeError(f"expected {len(self.dims)} dims for {self}, found {len(sizes)}: {tuple(sizes)}")
        values: dict[str, int] = {}
        for dim, size in zip(self.dims, sizes, strict=True):
            if isinstance(dim, sympy.Symbol) and values.setdefault(str(dim), size) != size:
                raise ShapeError(f"expected one value for {dim} in {self}, found {values[str(dim)]} and {size}")
        for dim, size in zip(self.dims, sizes, strict=True):
            if isinstance(dim, int):
                found: int = dim
            elif all(str(s) in values for s in dim.free_symbols):
                found = evaluate(dim, values)
            else:
                values.update(_solve(dim, size, values, self))
                continue
            if found != size:
                raise ShapeError(f"expected sizes that fit {self}, found {tuple(sizes)}: {dim} is {found}, not {size}")
        return values

    def broadcast(self, other: SymbolicShape) -> SymbolicShape:
        """The broadcast shape of both; raises ShapeError where two dims are not provably compatible."""
        longer, shorter = (self, other) if len(self) >= len(other) else (other, self)
        padded = (1,) * (len(longer) - len(shorter)) + shorter.dims
        return SymbolicShape(_broadcast_dim(a, b, self, other) for a, b in zip(longer.dims, padded, strict=True))

    def to_json(self) -> list[int | str]:
        """Sizes as numbers and as text, in order."""
        return [d if isinstance(d, int) else str(d) for d in self.dims]

    @classmethod
    def from_json(cls, data: Iterable[int | str]) -> SymbolicShape:
        return cls(data)


@functools.lru_cache(maxsize=65536)
def _substitute(dim: Dim, table: tuple[tuple[str, Dim], ...]) -> Dim:
    if isinstance(dim, int):
        return dim
    return as_dim(dim.xreplace({symbol(name): sympy.sympify(value) for name, value in table}))


def _broadcast_dim(a: Dim, b: Dim, left: SymbolicShape, right: SymbolicShape) -> Dim:
    if a == b or b == 1:
        return a
    if a == 1:
        return b
    raise ShapeError(f"expected shapes that broadcast, found {left} and {right}: {a} against {b}")


def _solve(dim: sympy.Expr, size: int, values: Mapping[str, int], shape: SymbolicShape) -> dict[str, int]:
    """One unknown left in a linear expression such as ``2*s0 + 1``."""
    known = dim.subs({symbol(k): v for k, v in values.items()})
    unknown = sorted(known.free_symbols, key=str)
    if len(unknown) == 1:
        try:
            solutions = [s for s in sympy.solve(known - size, unknown[0]) if s.is_Integer and s >= 0]
        except NotImplementedError:  # of what is rounded
            solutions = []
        if len(solutions) == 1:
            return {str(unknown[0]): int(solutions[0])}
    raise ShapeError(f"expected one value for the symbols of {dim} in {shape}, found none or several for size {size}")
