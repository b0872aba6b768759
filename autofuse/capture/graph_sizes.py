"""Sizes of torch's shape environment in our spelling.

In: ints and symbolic integers of the fake tensors of one graph. Out: ints and polynomials of our symbols, likely values
of the symbols, and the rounded quotients that some of them stand for. Guarantee: two spellings of one size that the
shape environment proves equal read the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.functions import FloorDiv, Max

from autofuse.ir.shape import Dim, as_dim, evaluate, free_symbols, symbol


class GraphSizes:
    """Sizes of one graph."""

    def __init__(self, shape_env: ShapeEnv | None) -> None:
        self._env = shape_env
        self._known: dict[sympy.Expr, Dim] = {}
        self._by_hint: dict[int, list[tuple[sympy.Expr, Dim]]] = {}
        self.hints: dict[str, int] = {}
        self.derived: dict[str, sympy.Expr] = {}

    def stride(self, stride: Any) -> Dim | None:
        """A stride; what torch writes as ``Max(1, size)`` is the size, since no element of an empty tensor is read."""
        return self(stride, lambda expr: expr.replace(Max, _without_one))

    def __call__(self, size: Any, simplify: Callable[[sympy.Expr], sympy.Expr] = lambda e: e) -> Dim | None:
        """An int or expression; None for a size that is no polynomial of the symbols."""
        if isinstance(size, int) and not isinstance(size, bool):
            return size
        if not isinstance(size, torch.SymInt):
            return None
        expr = simplify(size.node.expr)
        if expr.is_Integer:
            return int(expr)
        if expr not in self._known:
            dim = self._unify(expr, size.node)
            if dim is None:
                return None
            self._known[expr] = dim
        return self._known[expr]

    def _unify(self, expr: sympy.Expr, node: Any) -> Dim | None:
        hint = node.hint if node.has_hint() else None
        if hint is not None:
            # Two spellings of one size (tokens of the input, tokens of the target) must read the same.
            for known, dim in self._by_hint.get(int(hint), []):
                if self._env is not None and self._env._maybe_evaluate_static(sympy.Eq(expr, known)) is sympy.true:
                    return dim
        dim = self._polynomial(expr)
        if dim is None:
            return None
        if hint is not None:
            self._by_hint.setdefault(int(hint), []).append((expr, dim))
        if self._env is not None:
            for item in expr.free_symbols:
                value = _hint_of(self._env, item)
                if value is not None:
                    self.hints.setdefault(str(item), value)
        return dim

    def _polynomial(self, expr: sympy.Expr) -> Dim | None:
        """The size in our symbols, with one of its own for each rounded quotient; None for any other function."""
        plain = expr.xreplace({s: symbol(str(s)) for s in expr.free_symbols})
        plain = plain.replace(FloorDiv, lambda a, b: sympy.floor(a / b))
        if not plain.free_symbols or plain.is_polynomial(*plain.free_symbols):
            return as_dim(plain)
        if plain.atoms(sympy.Function) - plain.atoms(sympy.floor):
            return None  # such as a size times 1.5, cut off, of an interpolation
        # Outermost first: what is inside of one is part of its definition.
        while quotients := [f for f in sympy.preorder_traversal(plain) if isinstance(f, sympy.floor)]:
            plain = plain.xreplace({quotients[0]: self._derived_symbol(quotients[0])})
        return as_dim(plain) if plain.is_polynomial(*plain.free_symbols) else None

    def _derived_symbol(self, quotient: sympy.Expr) -> sympy.Symbol:
        for name, known in self.derived.items():
            if known == quotient:
                return symbol(name)
        name = f"d{len(self.derived)}"
        self.derived[name] = quotient
        return symbol(name)

    def finish(self) -> None:
        """Likely values of the derived symbols too."""
        for name, quotient in self.derived.items():
            known = {s: self.hints.get(s) for s in free_symbols(quotient)}
            values = {s: value for s, value in known.items() if value is not None}
            if len(values) == len(known):
                self.hints[name] = evaluate(quotient, values)


def _without_one(*args: sympy.Expr) -> sympy.Expr:
    rest = [a for a in args if a != 1]
    return rest[0] if len(rest) == 1 < len(args) else Max(*args)


def _hint_of(env: ShapeEnv, item: sympy.Symbol) -> int | None:
    for table in ("backed_var_to_val", "var_to_val"):  # renamed in torch 2.12
        value = getattr(env, table, {}).get(item)
        if value is not None:
            return int(value)
    return None
