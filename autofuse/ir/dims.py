"""Sizes as text: a symbolic dim becomes an integer expression of C, of Triton or of Python.

In: a dim built from symbols by +, *, floor, ceiling, Mod, Max and Min. Out: text with the symbols' own names.
Guarantee: exact for sizes, which are not negative; LoweringError("dim") for a form with no exact text.
Never sympy's own text: it says ``floor(s0/3 - 1/3)``, which in floating-point numbers is 10 where s0 is 34.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import sympy

from autofuse.errors import LoweringError


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
