"""How each kind of reduction is written in C: start value, step, OpenMP clause, and the type it accumulates in.

In: a reduction kind and a dtype. Out: a `Reducer`, whose methods print statements.
Guarantee: sums of 16- and 32-bit floats are blocks in float added up in double; max and min keep NaN, which
OpenMP's own ``max`` and ``min`` reductions lose; integer sums are 64 bits wide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from autofuse.codegen.c_scalar import suffix
from autofuse.codegen.dtypes import VALUE_TYPE, is_float


@dataclass(frozen=True)
class Reducer:
    """One reduction: ``a`` is the accumulator's C name, ``x`` the new value's."""

    partial_type: str  # accumulates inside a block
    total_type: str  # accumulates blocks and threads
    start: str
    clause: str  # of ``#pragma omp simd reduction``
    step: Callable[[str, str], str]
    result_type: str
    has_total: bool = False  # partial sums are added to a wider total

    def update(self, a: str, x: str) -> str:
        return self.step(a, x)

    def update_total(self, a: str, x: str) -> str:
        return self.step(a, x)

    def finish(self, a: str) -> str:
        return a if self.total_type == self.result_type else f"({self.result_type}){a}"


def _sum(name: str) -> Reducer:
    ctype = VALUE_TYPE[name]
    step = lambda a, x: f"{a} += {x};"  # noqa: E731
    if is_float(name):
        return Reducer(ctype, "double", "0", "+", step, ctype, has_total=True)
    return Reducer("int64_t", "int64_t", "0", "+", step, ctype)


def _prod(name: str) -> Reducer:
    ctype = VALUE_TYPE[name] if is_float(name) else "int64_t"
    return Reducer(ctype, ctype, "1", "*", lambda a, x: f"{a} *= {x};", VALUE_TYPE[name])


_INTEGER_LIMITS = {
    "int8": ("INT8_MIN", "INT8_MAX"), "int16": ("INT16_MIN", "INT16_MAX"), "int32": ("INT32_MIN", "INT32_MAX"),
    "int64": ("INT64_MIN", "INT64_MAX"), "uint8": ("0", "UINT8_MAX"), "bool": ("0", "1"),
}  # fmt: skip


def _extreme(kind: str) -> Callable[[str], Reducer]:
    def make(name: str) -> Reducer:
        ctype = VALUE_TYPE[name]
        if is_float(name):
            function = f"af_{kind}_{suffix(name)}"
            start = "-INFINITY" if kind == "max" else "INFINITY"
            return Reducer(ctype, ctype, start, function, lambda a, x: f"{a} = {function}({a}, {x});", ctype)
        sign = ">" if kind == "max" else "<"
        start = _INTEGER_LIMITS[name][0 if kind == "max" else 1]
        wide = "uint8_t" if name == "bool" else ctype
        return Reducer(wide, wide, start, kind, lambda a, x: f"{a} = {x} {sign} {a} ? {x} : {a};", ctype)

    return make


def _logical(kind: str) -> Callable[[str], Reducer]:
    def make(name: str) -> Reducer:
        zero, start = ("|", "0") if kind == "any" else ("&", "1")
        return Reducer("int32_t", "int32_t", start, zero, lambda a, x: f"{a} {zero}= ({x} != 0);", VALUE_TYPE[name])

    return make


REDUCERS: Mapping[str, Callable[[str], Reducer]] = {
    "sum": _sum,
    "prod": _prod,
    "max": _extreme("max"),
    "min": _extreme("min"),
    "any": _logical("any"),
    "all": _logical("all"),
}


def declare_reductions(used: Iterable[tuple[str, str]]) -> str:
    """Functions and OpenMP reductions for max and min that keep NaN."""
    lines = []
    for kind, name in sorted(used):
        if kind in ("max", "min") and is_float(name):
            lines += extreme_function(kind, name)
            function, sign = f"af_{kind}_{suffix(name)}", "-" if kind == "max" else ""
            lines.append(
                f"#pragma omp declare reduction({function} : {VALUE_TYPE[name]} : "
                f"omp_out = {function}(omp_out, omp_in)) initializer(omp_priv = {sign}INFINITY)"
            )
    return "\n".join([*lines, ""])


def extreme_function(kind: str, name: str) -> list[str]:
    ctype, sign = VALUE_TYPE[name], ">" if kind == "max" else "<"
    return [
        f"static inline {ctype} af_{kind}_{suffix(name)}({ctype} a, {ctype} b) {{",
        f"  return ((a {sign} b) | (a != a)) ? a : b;  /* NaN on either side wins */",
        "}",
    ]
