"""Element types: how each is stored, computed with, and promoted.

In: torch's dtype names without the prefix. Out: the C type in memory, the type arithmetic runs in, and
aten's promotion rules for operators whose result type does not tell (comparisons).
Guarantee: 16-bit floats are computed in float32, integers wrap in their own width, bool is a truth value.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autofuse.errors import LoweringError


@dataclass(frozen=True)
class DType:
    """Facts about an element type."""

    name: str
    memory_type: str  # C type in memory
    compute: str  # dtype of the values a kernel calculates with
    category: int  # 0 bool, 1 integer, 2 floating
    nbytes: int
    rank: int  # the higher rank wins within a category


_TABLE: tuple[DType, ...] = (
    DType("bool", "uint8_t", "bool", 0, 1, 0),
    DType("uint8", "uint8_t", "uint8", 1, 1, 1),
    DType("int8", "int8_t", "int8", 1, 1, 1),
    DType("int16", "int16_t", "int16", 1, 2, 2),
    DType("int32", "int32_t", "int32", 1, 4, 3),
    DType("int64", "int64_t", "int64", 1, 8, 4),
    DType("float16", "af_half", "float32", 2, 2, 1),
    DType("bfloat16", "uint16_t", "float32", 2, 2, 1),
    DType("float32", "float", "float32", 2, 4, 2),
    DType("float64", "double", "float64", 2, 8, 3),
)
DTYPES: dict[str, DType] = {d.name: d for d in _TABLE}

# C types of values in registers. A truth value is 32 bits wide: gcc vectorises a loop for its narrowest type, and
# a _Bool beside floats means vectors of 64 lanes, four registers for each float value, and spills.
VALUE_TYPE = {
    "bool": "int32_t", "uint8": "uint8_t", "int8": "int8_t", "int16": "int16_t", "int32": "int32_t",
    "int64": "int64_t", "float32": "float", "float64": "double",
}  # fmt: skip


def dtype(name: str) -> DType:
    """The facts about a dtype; raises LoweringError("dtype") for one without a C form (complex, float8)."""
    found = DTYPES.get(name)
    if found is None:
        raise LoweringError("dtype", f"expected one of {', '.join(DTYPES)}, found {name}")
    return found


def compute_dtype(name: str) -> str:
    """The dtype in which values of this dtype are calculated."""
    return dtype(name).compute


def is_float(name: str) -> bool:
    return dtype(name).category == 2


def promote(a: str, b: str) -> str:
    """``torch.promote_types``."""
    if a == b:
        return a
    x, y = dtype(a), dtype(b)
    if x.category != y.category:
        return a if x.category > y.category else b
    if x.rank != y.rank:
        return a if x.rank > y.rank else b
    return "float32" if x.category == 2 else "int16"  # float16 with bfloat16, uint8 with int8


def scalar_dtype(value: bool | int | float) -> str:
    """The dtype that a Python number contributes to a promotion."""
    if isinstance(value, bool):
        return "bool"
    return "int64" if isinstance(value, int) else "float32"


def result_type(dim: Iterable[str], zero_dim: Iterable[str], scalars: Iterable[bool | int | float]) -> str:
    """``torch.result_type``: tensors with dims decide; 0-dim ones, then numbers, matter if their category is higher.

    Raises LoweringError("dtype") where there is no operand.
    """
    result: str | None = None
    for group in (list(dim), list(zero_dim), [scalar_dtype(s) for s in scalars]):
        joined: str | None = None
        for item in group:
            joined = item if joined is None else promote(joined, item)
        if joined is None:
            continue
        if result is None:
            result = joined
        elif dtype(joined).category > dtype(result).category:
            result = promote(result, joined)
    if result is None:
        raise LoweringError("dtype", "expected at least one operand to take a dtype from, found none")
    return result
