"""The C of single values: expressions, memory accesses and the pointers they go through.

In: a kernel, its passes and the chosen knobs. Out: text that the printer of loops puts into place.
Names in the text: ``x*`` values, ``r*`` row dims, ``c*`` column dims (``c`` is the vectorised one), ``i0_`` the row of
input i0, ``buf*`` row buffers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from autofuse.codegen.c.reduce import REDUCERS, Reducer
from autofuse.codegen.c.scalar import CScalars, literal, load_text, memory_type, store_text
from autofuse.codegen.c.scan import step_text
from autofuse.codegen.column_passes import ROW_RESULTS, Plan
from autofuse.codegen.dtypes import VALUE_TYPE
from autofuse.codegen.in_place import overlaps
from autofuse.codegen.loops import GUARDED, SINKS, Access, LoopKernel, Store, regions
from autofuse.codegen.scalar import INFIX
from autofuse.errors import LoweringError
from autofuse.ir.shape import Dim
from autofuse.ir.size_text import dim_text

_MIRRORED = {"eq": "eq", "ne": "ne", "lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}
_INLINE_LIMIT = 12  # most operations of a truth value that is written out at each use


class ValuePrinter:
    """Prints one kernel's values."""

    def __init__(self, kernel: LoopKernel, plan: Plan, knobs: Mapping[str, object]) -> None:
        self.kernel = kernel
        self.plan = plan
        self.regions = regions(kernel)
        self.scalars = CScalars(fast=knobs.get("math", "inline") == "inline")
        self.last = kernel.cols[-1]
        self._widened = frozenset(n for p in plan.phases for n in p.widened)
        self._place = "lin + c" if len(kernel.cols) > 1 else "c"  # a column's place in a row buffer
        self._cones: list[int] = []  # operations of the expression of each truth value; 0 for other values
        for value in kernel.values:
            own = 1 + sum(self._cones[a] for a in value.args) if value.dtype == "bool" else 0
            self._cones.append(own)
        self._pointers: dict[Access, str] = {}
        for access in self._accesses():
            name = kernel.params[access.param].name
            taken = sum(1 for a in self._pointers if a.param == access.param)
            self._pointers.setdefault(access, f"{name}_{taken}" if taken else f"{name}_")

    # ---- facts

    def _accesses(self) -> list[Access]:
        loads = [v.attr for v in self.kernel.values if isinstance(v.attr, Access)]
        return [*loads, *(s.access for s in self.kernel.stores)]

    def _reducer(self, number: int) -> Reducer:
        value = self.kernel.values[number]
        reducer = REDUCERS["sum" if value.op == "row_merge" else str(value.attr)](value.dtype)
        if value.op == "full_reduce" and reducer.widens:
            # A loss adds up a whole tensor and may cancel to almost nothing: it is in double from the first addition
            # on.
            return dataclasses.replace(reducer, accumulator=reducer.total, widens=False)
        return reducer

    def _sinks(self, op: str) -> list[int]:
        return [n for n in self.kernel.sinks if self.kernel.values[n].op == op]

    # ---- expressions

    def text(self, number: int) -> str:
        """The C text of a value where it is used: a literal, a variable, or an expression."""
        value = self.kernel.values[number]
        if value.op == "const":
            return literal(value.attr, value.dtype)
        return f"({self._inline(number)})" if self._is_inlined(number) else f"x{number}"

    def _is_inlined(self, number: int) -> bool:
        """Whether a value is written out where it is used: truth values in column loops, to save registers."""
        value = self.kernel.values[number]
        if value.dtype != "bool" or value.op in ("const", "scan", *SINKS) or self._cones[number] > _INLINE_LIMIT:
            return number in self._widened and value.dtype == "bool"
        return self.regions[number].cols

    def _inline(self, number: int) -> str:
        if number in self._widened:
            return f"buf{number}[{self._place}] != 0"
        return self.compute(number)

    def compute(self, number: int, c: str = "c") -> str:
        """The C expression that calculates a value."""
        value = self.kernel.values[number]
        if isinstance(value.attr, Access):
            access, gathers = value.attr, value.op.startswith("gather")
            place = self._product(self.text(value.args[0]), access.indirect) if gathers else ""
            loaded = load_text(self.element(access, c, place), self._memory(access))
            if value.op not in GUARDED:
                return loaded
            return f"{self.text(value.args[-1])} ? {loaded} : {literal(0, value.dtype)}"
        if value.op == "size":
            return f"({VALUE_TYPE[value.dtype]}){dim_text(value.attr)}"
        if value.op == "index":
            return " + ".join(self._product(self._loop(d, c), s) for d, s in value.attr)  # type: ignore[attr-defined]
        if value.op == "scan":
            return step_text(value, self.carried(number), self.text(value.args[0]))
        if value.op == "uniform":
            raise LoweringError(
                "random", "expected a mask drawn beforehand on a CPU, found one to be drawn in the kernel"
            )
        if (narrow := self._position_test(number, c)) is not None:
            return narrow
        if value.op == "exp" and self.scalars.fast and self._is_nonpositive(value.args[0]):
            value = dataclasses.replace(value, op="exp_nonpositive" if value.dtype == "float32" else "exp")
        operands = [self.kernel.values[a] for a in value.args]
        return self.scalars.expression(value, [self.text(a) for a in value.args], operands)

    def carried(self, number: int) -> str:
        """What a scan carries from column to column."""
        return f"run{number}"

    def _is_nonpositive(self, number: int) -> bool:
        """Whether a value is never above 0, being an element of a row minus the largest element of that row."""
        value = self.kernel.values[number]
        if value.op != "sub":
            return False
        each, top = value.args
        largest = self.kernel.values[top]
        return largest.op == "row_reduce" and largest.attr in ("peak", "max") and largest.args == (each,)

    def _position_test(self, number: int, c: str) -> str | None:
        """A comparison of the column's position with a value of the row, in 32 bits; None for other values.

        In 64 bits it would halve the vector length of a whole loop of floats. It is exact: the driver checks that there
        are fewer than 2^31 columns, and the row's value is clamped to the range of 32 bits.
        """
        value = self.kernel.values[number]
        if value.op not in ("eq", "ne", "lt", "le", "gt", "ge") or not self.kernel.rows:
            return None
        a, b = value.args
        for here, other, op in ((a, b, value.op), (b, a, _MIRRORED[value.op])):
            position = self.kernel.values[here]
            if position.op == "index" and position.attr == ((self.last, 1),) and not self.regions[other].cols:
                return f"(int32_t){c} {INFIX[op]} af_narrow({self.text(other)})"
        return None

    @property
    def tests_positions(self) -> bool:
        return any(self._position_test(n, "c") for n in range(len(self.kernel.values)))

    def _memory(self, access: Access) -> str:
        return self.kernel.params[access.param].dtype

    def _loop(self, dim: int, c: str) -> str:
        if dim == self.last:
            return c
        return f"{'r' if dim in self.kernel.rows else 'c'}{dim}"

    @staticmethod
    def _product(name: str, stride: Dim) -> str:
        return name if stride == 1 else f"{name} * {dim_text(stride)}"

    def element(self, access: Access, c: str, extra: str = "") -> str:
        """The lvalue of an access inside the innermost loop."""
        terms = [self._product(c, s) for d, s in access.strides if d == self.last]
        if extra:
            terms.append(extra)
        return f"{self._pointers[access]}[{' + '.join(terms) or '0'}]"

    def declare(self, number: int, c: str = "c") -> str:
        value = self.kernel.values[number]
        if value.op == "checked":
            index, size = self.text(value.args[0]), dim_text(value.attr)
            # The sign bit of ``out`` is set below 0 and beyond the end; two comparisons take half as long again (EPYC).
            beyond = f"(int64_t)((uint64_t)({size}) - 1 - (uint64_t){index})"
            return (
                f"const int64_t out{number} = {index} | {beyond}, "
                f"x{number} = {index} & ~(out{number} >> 63); bad |= out{number};"
            )
        return f"const {VALUE_TYPE[value.dtype]} x{number} = {self.compute(number, c)};"

    def _declare_all(self, numbers: Sequence[int], indent: str) -> list[str]:
        return [
            f"{indent}{self.declare(n)}"
            for n in numbers
            if self.kernel.values[n].op not in ("const", *ROW_RESULTS, *SINKS) and not self._is_inlined(n)
        ]

    def store(self, store: Store, c: str = "c") -> str:
        value = store_text(self.text(store.value), self._memory(store.access))
        return f"{self.element(store.access, c)} = {value};"

    # ---- pointers

    def _parameters(self) -> list[str]:
        lines = []
        outputs = [p.name for p in self.kernel.params if p.is_output]
        inputs = [p.name for p in self.kernel.params if not p.is_output]
        shared = {name for o, i in overlaps(self.kernel) for name in (outputs[o], inputs[i])}  # may be one tensor
        for n, param in enumerate(self.kernel.params):
            const = "" if param.is_output else "const "
            ctype = memory_type(param.dtype)
            restrict = "" if param.name in shared else "restrict "
            lines.append(
                f"  {const}{ctype}* {restrict}const {param.name} = ({const}{ctype}*)ptrs[{n}]; (void){param.name};"
            )
        return lines

    def _pointer_lines(self, where: str, indent: str) -> list[str]:
        """C lines of the pointers that move with the row (``where`` is "row"), or of those that do not ("entry")."""
        lines = []
        for access, name in self._pointers.items():
            moving = [(d, s) for d, s in access.strides if d in self.kernel.rows]
            if bool(moving) != (where == "row"):
                continue
            param = self.kernel.params[access.param]
            const = "" if param.is_output else "const "
            offset = "".join(f" + {self._product(f'r{d}', s)}" for d, s in moving)
            offset += f" + {dim_text(access.offset)}" if access.offset != 0 else ""
            label = name + ("b" if self._column_terms(access) else "")
            lines.append(
                f"{indent}{const}{memory_type(param.dtype)}* const {label} = {param.name}{offset}; (void){label};"
            )
        return lines

    def _column_terms(self, access: Access) -> list[tuple[int, Dim]]:
        """The outer column dims that an access moves with: its pointer is set anew in their loops."""
        return [(d, s) for d, s in access.strides if d in self.kernel.cols and d != self.last]

    def _column_pointers(self, indent: str, used: Sequence[Access]) -> list[str]:
        lines = []
        for access in dict.fromkeys(used):
            moving = self._column_terms(access)
            if moving:
                param = self.kernel.params[access.param]
                const = "" if param.is_output else "const "
                name = self._pointers[access]
                offset = "".join(f" + {self._product(f'c{d}', s)}" for d, s in moving)
                lines.append(f"{indent}{const}{memory_type(param.dtype)}* const {name} = {name}b{offset};")
        return lines
