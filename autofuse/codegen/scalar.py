"""Scalar ops as text: the common part of the printers for all targets.

In: an op, its dtype, and its operands as text. Out: the text of the result. A target adds what its language writes
differently: tables for ops of one operand, and the methods that are abstract here.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from autofuse.codegen.dtypes import dtype, is_float
from autofuse.codegen.loops import LoopValue

INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">",
    "ge": ">=", "and": "&", "or": "|", "xor": "^", "bitand": "&", "bitor": "|", "bitxor": "^",
}  # fmt: skip


def normal_cdf(a: str, erf: Callable[[str], str | None], number: Callable[[float], str]) -> str:
    """(1 + erf(a / sqrt(2))) / 2 as text. ``erf``: the text of a call of erf; ``number``: that of a constant."""
    return f"({erf(f'{a} * {number(math.sqrt(0.5))}')} + {number(1.0)}) * {number(0.5)}"


class ScalarPrinter(ABC):
    """Prints scalar ops in the language of one target."""

    unary: ClassVar[Mapping[str, Callable[[str, str], str]]]  # op -> function of the operand's dtype and text

    def __init__(self, fast: bool = False) -> None:
        """``fast``: use faster functions than the library's, where the target has some."""
        self.fast = fast

    def expression(self, value: LoopValue, args: Sequence[str], operands: Sequence[LoopValue]) -> str:
        """The text of a scalar op. ``args``: the texts of ``operands``."""
        op, name = value.op, value.dtype
        source = operands[0].dtype if operands else name
        if op == "cast":
            return self.cast(args[0], source, name)
        if op == "round_to":
            return self.rounded(args[0], str(value.attr), name)
        if op == "where":
            return self.selected(*args)
        if op in ("maximum", "minimum"):
            return self.extreme(value, args, operands)
        if op in self.unary:
            return self.unary[op](source, args[0])
        if op in ("fmod", "remainder", "pow") and not is_float(name):
            return self.of_integers(value, args, operands)
        return self.function(op, name, args) or self.infix(op, name, source, args)

    def cast(self, a: str, source: str, name: str) -> str:
        """A conversion between compute dtypes, as C++ and aten do it."""
        if source == name:
            return a
        if name == "bool":
            return f"{a} != 0"
        if is_float(source) and not is_float(name) and dtype(name).nbytes < 4:
            # out of range, the result is undefined; aten's kernels convert through a wider integer
            a = self.converted(a, "int64" if name == "uint8" else "int32")
        return self.converted(a, name)

    @abstractmethod
    def converted(self, a: str, name: str) -> str:
        """``a`` converted to the compute dtype ``name``, by the language's own conversion."""

    @abstractmethod
    def rounded(self, a: str, memory: str, name: str) -> str:
        """``a`` rounded to the 16-bit float dtype ``memory``, and back in the compute dtype ``name``."""

    @abstractmethod
    def selected(self, condition: str, a: str, b: str) -> str:
        """``a`` where the condition is true, else ``b``."""

    @abstractmethod
    def extreme(self, value: LoopValue, args: Sequence[str], operands: Sequence[LoopValue]) -> str:
        """Maximum or minimum; as in aten, the result is NaN where either operand is."""

    @abstractmethod
    def of_integers(self, value: LoopValue, args: Sequence[str], operands: Sequence[LoopValue]) -> str:
        """fmod, remainder and pow of integers."""

    @abstractmethod
    def function(self, op: str, name: str, args: Sequence[str]) -> str | None:
        """The call of a function; None where the op is an operator of the language."""

    @abstractmethod
    def infix(self, op: str, name: str, source: str, args: Sequence[str]) -> str:
        """An operator between its two operands, whose dtype is ``source``."""
