"""How each kind of reduction is written in C: accumulators, step, OpenMP clauses, and the type it adds up in.

In: a reduction kind, a dtype and the number of the value. Out: a `Reducer`, whose methods print statements. Guarantee:
sums of floats are blocks in the compute dtype added up in double; max and min keep NaN, which a plain comparison loses:
a second accumulator records whether there was one (a user-defined OpenMP reduction would keep it too, at twice the time
and a scalar combination of lanes). Integer sums are 64 bits wide.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from autofuse.codegen.dtypes import VALUE_TYPE, is_float


@dataclass(frozen=True)
class Reducer:
    """One reduction over values of a dtype. ``{a}`` is an accumulator (a C lvalue), ``{x}`` the new value."""

    accumulator: str  # C type inside a block of columns, and of column sums over a few rows
    total: str  # C type across blocks, rows and threads
    start: str
    clause: str  # OpenMP's name of the reduction
    step: str  # statement inside a vectorised loop that reduces
    result: str  # C type of the result
    join: str = ""  # statement everywhere else, where it differs from ``step``
    nan_flag: bool = False  # a second accumulator, an int, tells whether NaN was seen
    widens: bool = False  # block sums are added to a wider total

    def update(self, a: str, x: str) -> str:
        return self.step.format(a=a, x=x)

    def merge(self, a: str, x: str) -> str:
        return (self.join or self.step).format(a=a, x=x)

    def update_flag(self, a: str, x: str) -> str:
        return f"{a} |= {x} != {x};"

    def finish(self, a: str) -> str:
        return a if self.total == self.result else f"({self.result}){a}"

    def noted(self, a: str, flag: str) -> str:
        """A statement after the loop: the total becomes NaN where the flag says that one was seen."""
        return f"if ({flag}) {a} = NAN;"


def _sum(name: str) -> Reducer:
    ctype = VALUE_TYPE[name]
    if is_float(name):
        return Reducer(ctype, "double", "0", "+", "{a} += {x};", ctype, widens=True)
    return Reducer("int64_t", "int64_t", "0", "+", "{a} += {x};", ctype)


def _prod(name: str) -> Reducer:
    ctype = VALUE_TYPE[name] if is_float(name) else "int64_t"
    return Reducer(ctype, ctype, "1", "*", "{a} *= {x};", VALUE_TYPE[name])


INTEGER_LIMITS = {
    "int8": ("INT8_MIN", "INT8_MAX"), "int16": ("INT16_MIN", "INT16_MAX"), "int32": ("INT32_MIN", "INT32_MAX"),
    "int64": ("INT64_MIN", "INT64_MAX"), "uint8": ("0", "UINT8_MAX"), "bool": ("0", "1"),
}  # fmt: skip


def _extreme(clause: str, keep_nan: bool = True) -> Callable[[str], Reducer]:
    def make(name: str) -> Reducer:
        ctype = "uint8_t" if name == "bool" else VALUE_TYPE[name]
        step = "{a} = {x} " + (">" if clause == "max" else "<") + " {a} ? {x} : {a};"
        if is_float(name):
            start = "-INFINITY" if clause == "max" else "INFINITY"
        else:
            start = INTEGER_LIMITS[name][0 if clause == "max" else 1]
        if not keep_nan or not is_float(name):
            return Reducer(ctype, ctype, start, clause, step, VALUE_TYPE[name])
        join = "{a} = (({a} " + (">" if clause == "max" else "<") + " {x}) | ({a} != {a})) ? {a} : {x};"
        return Reducer(ctype, ctype, start, clause, step, VALUE_TYPE[name], join, nan_flag=True)

    return make


def _logical(operator: str, start: str) -> Callable[[str], Reducer]:
    def make(name: str) -> Reducer:
        step = "{a} " + operator + "= ({x} != 0);"
        return Reducer("int32_t", "int32_t", start, operator, step, VALUE_TYPE[name])

    return make


REDUCERS: Mapping[str, Callable[[str], Reducer]] = {
    "sum": _sum,
    "prod": _prod,
    "max": _extreme("max"),
    "min": _extreme("min"),
    "peak": _extreme("max", keep_nan=False),
    "any": _logical("|", "0"),
    "all": _logical("&", "1"),
}
