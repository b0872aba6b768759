"""How each kind of scan is written in C: what it carries from column to column, and its step.

In: a scan. Out: the type and the start of what it carries, ``run*`` in the text, and the expression that takes the next
element in and gives what has been reached. Guarantee: elements are taken in one by one, in aten's order and, where it
has a wider type for that, in double as aten's CPU kernels do.
"""

from __future__ import annotations

from autofuse.codegen.c.reduce import INTEGER_LIMITS
from autofuse.codegen.dtypes import VALUE_TYPE, is_float
from autofuse.codegen.loops import LoopValue, Scan


def carried_type(value: LoopValue) -> str:
    """C type of what a scan carries."""
    assert isinstance(value.attr, Scan)
    if value.attr.kind in ("max", "min"):
        return VALUE_TYPE[value.dtype]
    return "double" if is_float(value.dtype) else "int64_t"


def carried_start(value: LoopValue) -> str:
    """What it carries before the first element."""
    assert isinstance(value.attr, Scan)
    kind = value.attr.kind
    if kind in ("sum", "prod"):
        return "0" if kind == "sum" else "1"
    is_low = kind in ("max", "logsum")
    if is_float(value.dtype):
        return "-INFINITY" if is_low else "INFINITY"
    return INTEGER_LIMITS[value.dtype][0 if is_low else 1]


def step_text(value: LoopValue, carried: str, x: str) -> str:
    """C expression that takes an element in. ``carried``: the variable; ``x``: the element, as an expression."""
    assert isinstance(value.attr, Scan)
    kind, carry, own = value.attr.kind, carried_type(value), VALUE_TYPE[value.dtype]
    x = x if carry == own else f"({carry}){x}"
    if kind in ("sum", "prod"):
        taken = f"{carried} {'+' if kind == 'sum' else '*'}= {x}"
    elif kind == "logsum":
        taken = f"{carried} = af_logaddexp({x}, {carried})"
    else:
        test = f"{x} {'>=' if kind == 'max' else '<='} {carried}"
        test = f"({test}) | ({x} != {x})" if is_float(value.dtype) else test
        taken = f"{carried} = {test} ? {x} : {carried}"
    return f"({taken})" if carry == own else f"({own})({taken})"
