"""Parses sizes from text with our own grammar, because the text may come from a file of another user.

In: what `str` makes of a size, such as ``s0*s1 + floor(s0/2)``. Out: a sympy expression of the same value. Guarantee:
nothing is evaluated and nothing is looked up (sympy's own parser is Python's `eval`). Text with anything but whole
numbers, symbols, ``+ - * / // % **`` and the functions below raises ShapeError. So does text that would take long:
longer than `LONGEST`, numbers beyond 64 bits, powers beyond the eighth.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import sympy

from autofuse.errors import ShapeError
from autofuse.ir.validation import is_name

LONGEST, DEEPEST = 4096, 32
LARGEST_POWER = 8
_TOKENS = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_]*|[0-9]+|\*\*|//|[-+*/%(),])")
_FUNCTIONS: Mapping[str, tuple[Callable[..., sympy.Expr], int | None]] = {  # and how many arguments, None for any
    "floor": (sympy.floor, 1),
    "ceiling": (sympy.ceiling, 1),
    "Mod": (sympy.Mod, 2),
    "Max": (sympy.Max, None),
    "Min": (sympy.Min, None),
}
_SUMS: Mapping[str, Callable[[sympy.Expr, sympy.Expr], sympy.Expr]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
}
_PRODUCTS: Mapping[str, Callable[[sympy.Expr, sympy.Expr], sympy.Expr]] = {
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
    "//": lambda a, b: sympy.floor(a / b),
    "%": sympy.Mod,
}


def parse(text: str, symbol: Callable[[str], sympy.Symbol]) -> sympy.Expr:
    """The size that a text means; ``symbol`` makes its symbols. Raises ShapeError."""
    return _Reader(text, symbol).read()


class _Reader:
    """Recursive descent, one method a level of the grammar."""

    def __init__(self, text: str, symbol: Callable[[str], sympy.Symbol]) -> None:
        self._text = text
        self._symbol = symbol
        self._depth = 0
        if len(text) > LONGEST:
            raise self._refusal(f"{len(text)} characters")
        self._tokens = self._split(text)
        self._at = 0

    def _split(self, text: str) -> list[str]:
        found, at, end = [], 0, len(text.rstrip())
        while at < end:
            match = _TOKENS.match(text, at)
            if match is None:
                raise self._refusal(repr(text[at : at + 16]))
            found.append(match[1])
            at = match.end()
        return found

    def read(self) -> sympy.Expr:
        found = self._sum()
        if self._at < len(self._tokens):
            raise self._refusal(repr(self._tokens[self._at]))
        return found

    def _sum(self) -> sympy.Expr:
        self._depth += 1
        if self._depth > DEEPEST:
            raise self._refusal(f"more than {DEEPEST} parentheses in each other")
        found = self._chain(_SUMS, lambda: self._chain(_PRODUCTS, self._factor))
        self._depth -= 1
        return found

    def _chain(
        self, operators: Mapping[str, Callable[[sympy.Expr, sympy.Expr], sympy.Expr]], part: Callable[[], sympy.Expr]
    ) -> sympy.Expr:
        found = part()
        while (operator := self._next()) in operators:
            self._at += 1
            other = part()
            if other == 0 and operator not in ("+", "-", "*"):
                raise self._refusal("a division by 0")
            found = operators[operator](found, other)
        return found

    def _factor(self) -> sympy.Expr:
        signs = 0
        while self._next() == "-":
            self._at += 1
            signs += 1
        base = self._atom()
        if self._next() == "**":
            self._at += 1
            base = self._power(base)
        return -base if signs % 2 else base

    def _power(self, base: sympy.Expr) -> sympy.Expr:
        exponent = self._factor() if self._next() == "-" else self._atom()
        if not exponent.is_Integer or abs(exponent) > LARGEST_POWER or not (base.is_Symbol or base.is_Function):
            raise self._refusal(f"the power {base}**{exponent}")
        return base**exponent

    def _atom(self) -> sympy.Expr:
        token = self._next()
        self._at += 1
        if token.isdigit():
            if len(token) > 19 or int(token) >= 2**63:
                raise self._refusal(f"a number of {len(token)} digits")
            return sympy.Integer(int(token))
        if token == "(":
            found = self._sum()
            self._take(")")
            return found
        if is_name(token):
            return self._call(token) if self._next() == "(" else self._symbol(token)
        raise self._refusal(repr(token) if token else "its end")

    def _call(self, name: str) -> sympy.Expr:
        if name not in _FUNCTIONS:
            raise self._refusal(f"a call of {name}")
        function, count = _FUNCTIONS[name]
        self._take("(")
        arguments = [self._sum()]
        while self._next() == ",":
            self._at += 1
            arguments.append(self._sum())
        self._take(")")
        if count not in (None, len(arguments)) or (name == "Mod" and arguments[1] == 0):
            raise self._refusal(f"{name} of {', '.join(map(str, arguments))}")
        return function(*arguments)

    def _next(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _take(self, token: str) -> None:
        if self._next() != token:
            raise self._refusal(repr(self._next()) if self._next() else "its end")
        self._at += 1

    def _refusal(self, found: str) -> ShapeError:
        shown = self._text if len(self._text) <= 80 else self._text[:80] + "..."
        return ShapeError(
            f"expected a size made of whole numbers, symbols, + - * / % and {', '.join(_FUNCTIONS)}, "
            f"found {found} in {shown!r}"
        )
