"""Sizes as text: a symbolic dim as an integer expression of C, of Triton or of Python, and stored text as a dim.

Writing (`dim_text`). In: a dim built from symbols by +, *, floor, ceiling, Mod, Max and Min. Out: text with the
symbols' own names. Guarantee: exact for sizes, which are not negative; LoweringError("dim") for a form with no exact
text. Never sympy's own text: it says ``floor(s0/3 - 1/3)``, which in floating-point numbers is 10 where s0 is 34.

Reading (`parse`). In: what `str` makes of a size, such as ``s0*s1 + floor(s0/2)``. Out: a sympy expression of the same
value. It has a grammar of its own because the text may come from a file of another user: nothing is evaluated and
nothing is looked up (sympy's own parser is Python's `eval`). Text with anything but whole numbers, symbols,
``+ - * / // % **`` and the functions below raises ShapeError. So does text that would take long: longer than `LONGEST`,
numbers beyond 64 bits, powers beyond the eighth.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import sympy

from autofuse.errors import LoweringError, ShapeError
from autofuse.ir.validation import is_name

# ---- writing ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Language:
    """How a language writes integer arithmetic."""

    constant: Callable[[int], str]
    divide: str  # rounds towards zero, or down: the same for sizes
    larger: str  # of {a} and {b}
    smaller: str


C = Language(
    lambda n: str(n) if abs(n) < 2**31 else f"INT64_C({n})",
    "/",
    "(({a}) > ({b}) ? ({a}) : ({b}))",
    "(({a}) < ({b}) ? ({a}) : ({b}))",
)
TRITON = Language(str, "//", "tl.maximum({a}, {b})", "tl.minimum({a}, {b})")
PYTHON = Language(str, "//", "max({a}, {b})", "min({a}, {b})")


def dim_text(dim: int | sympy.Expr, language: Language = C) -> str:
    """A size as an integer expression; raises LoweringError("dim") for a form with no exact text."""
    return language.constant(dim) if isinstance(dim, int) else _dim(dim, language)


def _dim(e: sympy.Expr, to: Language) -> str:
    if e.is_Integer:
        return to.constant(int(e))
    if e.is_Symbol:
        return str(e)
    if e.is_Add:
        if any(a.as_coeff_Mul()[0].q != 1 for a in e.args):  # each term cut off by itself would be another sum
            return _quotient(e, to)
        return "(" + " + ".join(_dim(a, to) for a in e.args) + ")"
    if e.is_Mul:
        whole = [a for a in e.args if not (a.is_Rational and not a.is_Integer) and not _is_inverse(a)]
        ratio = sympy.Mul(*[a for a in e.args if a not in whole])
        text = "*".join(_dim(a, to) for a in whole) or "1"
        if ratio == 1:
            return text
        top, bottom = ratio.as_numer_denom()
        return f"(({text}) * {_dim(top, to)} {to.divide} {_dim(bottom, to)})"
    if e.is_Pow and e.exp.is_Integer and e.exp > 0:
        return "(" + "*".join([_dim(e.base, to)] * int(e.exp)) + ")"
    if isinstance(e, sympy.floor):
        return _quotient(e.args[0], to)
    if isinstance(e, sympy.ceiling):
        top, bottom = sympy.together(e.args[0]).as_numer_denom()
        return _quotient((top + bottom - 1) / bottom, to)
    if isinstance(e, sympy.Mod):
        return f"({_dim(e.args[0], to)} % {_dim(e.args[1], to)})"
    if e.func.__name__ in ("Max", "Min"):  # sympy's, and torch's own
        template = to.larger if e.func.__name__ == "Max" else to.smaller
        left, *rest = e.args
        text = _dim(left, to)
        for other in rest:
            text = template.format(a=text, b=_dim(other, to))
        return text
    raise LoweringError("dim", f"expected a size built from +, *, floor and Mod, found {e}")


def _quotient(e: sympy.Expr, to: Language) -> str:
    """Whole above whole."""
    top, bottom = sympy.together(e).as_numer_denom()
    return f"({_dim(top, to)} {to.divide} {_dim(bottom, to)})"


def _is_inverse(e: sympy.Expr) -> bool:
    return bool(e.is_Pow and e.exp.is_Integer and e.exp < 0)


# ---- reading ------------------------------------------------------------------------------------

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
