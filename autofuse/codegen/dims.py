"""Sizes as text: a symbolic dim becomes an integer expression of C or of Triton.

In: a dim built from symbols by +, *, floor, Mod, Max and Min. Out: text with the symbols' own names.
Guarantee: exact for sizes, which are not negative; LoweringError("dim") for a form with no exact text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import sympy

from autofuse.errors import LoweringError
from autofuse.ir.shape import Dim


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


def dim_text(dim: Dim, language: Language = C) -> str:
    """A size as an integer expression; raises LoweringError("dim") for a form with no exact text."""
    return language.constant(dim) if isinstance(dim, int) else _dim(dim, language)


def _dim(e: sympy.Expr, to: Language) -> str:
    if e.is_Integer:
        return to.constant(int(e))
    if e.is_Symbol:
        return str(e)
    if e.is_Add:
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
        top, bottom = sympy.together(e.args[0]).as_numer_denom()
        return f"({_dim(top, to)} {to.divide} {_dim(bottom, to)})"  # sizes are not negative
    if isinstance(e, sympy.Mod):
        return f"({_dim(e.args[0], to)} % {_dim(e.args[1], to)})"
    if isinstance(e, sympy.Max | sympy.Min):
        template = to.larger if isinstance(e, sympy.Max) else to.smaller
        left, *rest = e.args
        text = _dim(left, to)
        for other in rest:
            text = template.format(a=text, b=_dim(other, to))
        return text
    raise LoweringError("dim", f"expected a size built from +, *, floor and Mod, found {e}")


def _is_inverse(e: sympy.Expr) -> bool:
    return bool(e.is_Pow and e.exp.is_Integer and e.exp < 0)
