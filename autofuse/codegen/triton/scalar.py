"""Triton expressions: one row per scalar op.

In: an op, its dtype and the text of its operands. Out: the text of the result. Guarantee: division and square root
round as eager's CUDA kernels do (``div_rn``, ``sqrt_rn``); maximum and minimum keep NaN; functions come from the
target's device library, not from approximate instructions such as ``tl.exp``, unless the configuration selects these
(``math=fast``, which must pass the same check). Only functions that the device libraries of CUDA and ROCm both have are
used, in Triton 3.6 to 3.9.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from autofuse.codegen.dtypes import is_float
from autofuse.codegen.loops import LIBRARY_FUNCTIONS, LoopValue
from autofuse.codegen.scalar import INFIX, ScalarPrinter, normal_cdf
from autofuse.errors import LoweringError

TYPES: Mapping[str, str] = {
    "bool": "tl.int1", "uint8": "tl.uint8", "int8": "tl.int8", "int16": "tl.int16", "int32": "tl.int32",
    "int64": "tl.int64", "float16": "tl.float16", "bfloat16": "tl.bfloat16", "float32": "tl.float32",
    "float64": "tl.float64",
}  # fmt: skip

# Pointer types, by the dtype in memory; a bool is a byte there.
POINTERS: Mapping[str, str] = {
    "bool": "*u8", "uint8": "*u8", "int8": "*i8", "int16": "*i16", "int32": "*i32", "int64": "*i64",
    "float16": "*fp16", "bfloat16": "*bf16", "float32": "*fp32", "float64": "*fp64",
}  # fmt: skip

FAST = frozenset(["exp"])  # ops that ``math=fast`` changes
_LITERAL = frozenset(["float32", "int32", "int64"])  # dtypes in which a plain number in the text has the right type
_MAX_POWER = 64  # integer powers are unrolled


def literal(value: object, name: str) -> str:
    """A number as Python writes it."""
    if value == "nan":
        return 'float("nan")'
    if name == "bool":
        return "True" if value else "False"
    if not is_float(name):
        return str(int(value))  # type: ignore[call-overload]
    real = float(value)  # type: ignore[arg-type]
    if math.isinf(real):
        return 'float("inf")' if real > 0 else 'float("-inf")'
    text = f"{real:.9g}" if name == "float32" else repr(real)
    return text if any(mark in text for mark in ".en") else f"{text}.0"


def constant(value: object, name: str) -> str:
    """A number with its type, as a block of one element."""
    return f"tl.full([1, 1], {literal(value, name)}, {TYPES[name]})"


def can_be_literal(name: str) -> bool:
    return name in _LITERAL


# ---- ops ------------------------------------------------------------------------------------------------

TAKES_LITERALS = frozenset([*INFIX, "where", "maximum", "minimum"]) - {"div", "and", "or", "xor"}

_LIBRARY = {
    **{op: op for op in LIBRARY_FUNCTIONS},
    "floor": "floor", "ceil": "ceil", "trunc": "trunc", "round": "nearbyint", "rsqrt": "rsqrt", "pow": "pow",
    **{op: op for op in ("atan2", "fmod", "hypot", "copysign", "nextafter", "lgamma")},
}  # fmt: skip

_UNARY: Mapping[str, Callable[[str, str], str]] = {
    "neg": lambda n, a: f"-{a}",
    "abs": lambda n, a: f"tl.abs({a})",
    "sign": lambda n, a: f"({a} > 0).to({TYPES[n]}) - ({a} < 0).to({TYPES[n]})",
    "sqrt": lambda n, a: f"tl.sqrt_rn({a})" if n == "float32" else f"libdevice.sqrt({a})",
    "reciprocal": lambda n, a: _divide(n, constant(1, n), a),
    "not": lambda n, a: f"{a} ^ {constant(True, 'bool')}",
    "bitnot": lambda n, a: f"{a} ^ {constant(-1 if n != 'uint8' else 255, n)}",
    "isnan": lambda n, a: f"{a} != {a}",
    "isinf": lambda n, a: f'tl.abs({a}) == float("inf")',
}


def _divide(name: str, a: str, b: str) -> str:
    if name == "float32":
        return f"tl.div_rn({a}, {b})"
    return f"{a} / {b}" if is_float(name) else f"{a} // {b}"


def _exact_inverse(name: str, divisor: LoopValue) -> str:
    """One over a constant power of two, as text: x * 2**-k has the bits of x / 2**k; empty for other divisors.

    Means over 512 or 4096 elements divide so, and a division that rounds as IEEE says is some ten instructions.
    """
    if divisor.op != "const" or not is_float(name) or isinstance(divisor.attr, str):
        return ""
    mantissa, exponent = math.frexp(float(divisor.attr))  # type: ignore[arg-type]
    is_exact = abs(mantissa) == 0.5 and abs(exponent - 1) <= _LARGEST_EXPONENT[name]
    return literal(1.0 / float(divisor.attr), name) if is_exact else ""  # type: ignore[arg-type]


_LARGEST_EXPONENT = {"float32": 126, "float64": 1022}  # both the power and its inverse are normal numbers


class TritonScalars(ScalarPrinter):
    """Prints scalar ops in Triton. ``fast``: approximate instructions in place of the device library's functions."""

    unary = _UNARY

    def expression(self, value: LoopValue, args: Sequence[str], operands: Sequence[LoopValue]) -> str:
        if value.op == "div" and (inverse := _exact_inverse(value.dtype, operands[1])):
            return f"{args[0]} * {inverse}"
        return super().expression(value, args, operands)

    def converted(self, a: str, name: str) -> str:
        return f"{a}.to({TYPES[name]})"

    def rounded(self, a: str, memory: str, name: str) -> str:
        return f"{a}.to({TYPES[memory]}).to({TYPES[name]})"

    def selected(self, condition: str, a: str, b: str) -> str:
        return f"tl.where({condition}, {a}, {b})"

    def extreme(self, value: LoopValue, args: Sequence[str], operands: Sequence[LoopValue]) -> str:
        keep_nan = ", propagate_nan=tl.PropagateNan.ALL" if is_float(value.dtype) else ""
        return f"tl.{value.op}({', '.join(args)}{keep_nan})"

    def of_integers(self, value: LoopValue, args: Sequence[str], operands: Sequence[LoopValue]) -> str:
        """Raises LoweringError for a power that is no small constant."""
        a, b = args
        if value.op == "fmod":
            return f"{a} % {b}"  # its quotient rounds towards zero, as C's does
        if value.op == "remainder":
            return f"tl.where(({a} % {b} != 0) & (({a} % {b} < 0) != ({b} < 0)), {a} % {b} + {b}, {a} % {b})"
        exponent = operands[1]
        power = exponent.attr if exponent.op == "const" else None
        if not isinstance(power, int) or not 1 <= power <= _MAX_POWER:
            raise LoweringError("pow", f"expected a constant integer power of 1 to {_MAX_POWER}, found {power}")
        return " * ".join([a] * power)

    def function(self, op: str, name: str, args: Sequence[str]) -> str | None:
        if op == "div":
            return _divide(name, *args)
        if op == "remainder":
            rest = f"libdevice.fmod({args[0]}, {args[1]})"
            return f"tl.where(({rest} != 0) & (({rest} < 0) != ({args[1]} < 0)), {rest} + {args[1]}, {rest})"
        if self.fast and op in FAST and name == "float32":
            return f"tl.{op}({args[0]})"
        if op == "exp_nonpositive":
            return self.function("exp", name, args)
        if op == "normal_cdf":
            return normal_cdf(args[0], lambda a: self.function("erf", name, [a]), lambda n: literal(n, name))
        return f"libdevice.{_LIBRARY[op]}({', '.join(args)})" if op in _LIBRARY else None

    def infix(self, op: str, name: str, source: str, args: Sequence[str]) -> str:
        left, right = args
        if source == "bool" and op in ("lt", "le", "gt", "ge"):  # as a number of one bit, True would be -1
            left, right = f"{left}.to(tl.int32)", f"{right}.to(tl.int32)"
        return f"{left} {INFIX[op]} {right}"


def load_text(pointer: str, memory: str, mask: str, policy: str = "") -> str:
    """A load from memory, converted to the compute dtype."""
    extra = (f", mask={mask}, other=0" if mask else "") + (f', eviction_policy="{policy}"' if policy else "")
    text = f"tl.load({pointer}{extra})"
    if memory in ("float16", "bfloat16"):
        return f"{text}.to(tl.float32)"
    return f"{text} != 0" if memory == "bool" else text


def store_text(pointer: str, value: str, memory: str, mask: str) -> str:
    stored = f"{value}.to({TYPES['uint8' if memory == 'bool' else memory]})" if memory in _NARROWED else value
    return f"tl.store({pointer}, {stored}{f', mask={mask}' if mask else ''})"


_NARROWED = ("float16", "bfloat16", "bool")


# ---- reductions -----------------------------------------------------------------------------------------


class Reducer:
    """How one kind of reduction over values of a dtype is written.

    Sums of float32 add up blocks by halving them. A sum over a whole tensor (``wide``) is in float64 from the first
    addition on, since a loss may cancel to almost nothing.
    """

    def __init__(self, kind: str, name: str, wide: bool = False) -> None:
        self.kind = kind
        self.name = name  # dtype of the result
        floating = is_float(name)
        if kind in ("any", "all") or name == "bool":
            self.total = "int32"
        elif kind in ("sum", "prod") and not floating:
            self.total = "int64"
        elif wide and kind == "sum" and floating:
            self.total = "float64"
        else:
            self.total = name
        self.keeps_nan = floating and kind in ("max", "min")

    @property
    def adds_floats(self) -> bool:
        return self.kind == "sum" and is_float(self.total)

    @property
    def neutral(self) -> str:
        if self.kind in ("sum", "any"):
            return literal(0, self.total)
        if self.kind in ("prod", "all"):
            return literal(1, self.total)
        low = self.kind in ("max", "peak")
        if is_float(self.total):
            return literal(-math.inf if low else math.inf, self.total)
        return str(_LIMITS["bool" if self.name == "bool" else self.total][0 if low else 1])

    def taken(self, x: str, source: str) -> str:
        """The element in the type of the total, as it is added."""
        if self.kind in ("any", "all"):
            return f"({x} != 0).to(tl.int32)" if source != "bool" else f"{x}.to(tl.int32)"
        return x if source == self.total else f"{x}.to({TYPES[self.total]})"

    def start(self, shape: str) -> str:
        return f"tl.full({shape}, {self.neutral}, {TYPES[self.total]})"

    def merged(self, a: str, x: str) -> str:
        """The accumulator joined with an element, lane by lane."""
        if self.kind in ("sum", "prod"):
            return f"{a} {'+' if self.kind == 'sum' else '*'} {x}"
        op = "maximum" if self.kind in ("max", "peak", "any") else "minimum"
        return f"tl.{op}({a}, {x}{', propagate_nan=tl.PropagateNan.ALL' if self.keeps_nan else ''})"

    def reduced(self, a: str, axis: int) -> str:
        """The reduction along an axis, which is kept with size 1."""
        if self.kind == "sum":
            return f"tl.sum({a}, axis={axis}, keep_dims=True)"
        if self.kind == "prod":
            return f"tl.reduce({a}, {axis}, af_multiply, keep_dims=True)"
        op = "max" if self.kind in ("max", "peak", "any") else "min"
        text = f"tl.{op}({a}, axis={axis}, keep_dims=True)"
        if not self.keeps_nan:
            return text
        flag = f"tl.max(({a} != {a}).to(tl.int32), axis={axis}, keep_dims=True)"
        return f'tl.where({flag} > 0, float("nan"), {text})'

    def finished(self, a: str) -> str:
        """The result in its own dtype."""
        if self.total == self.name:
            return a
        return f"{a} != 0" if self.name == "bool" else f"{a}.to({TYPES[self.name]})"


class Scanner:
    """How one kind of scan over values of a dtype is written. Sums and products of floats are in float64 inside."""

    def __init__(self, kind: str, name: str) -> None:
        self.total = "float64" if is_float(name) and kind not in ("max", "min") else name
        self.is_wider = self.total != name
        if kind in ("sum", "prod"):
            self.neutral = literal(0 if kind == "sum" else 1, self.total)
            self.function = "af_add" if kind == "sum" else "af_multiply"
        elif kind == "logsum":
            self.neutral, self.function = literal(-math.inf, self.total), "af_logaddexp"
        else:
            self.neutral, self.function = Reducer(kind, name).neutral, f"af_last_{kind}"
        self.name = name  # dtype of the result

    def start(self) -> str:
        """What a row carries before its first tile."""
        return f"tl.full([BLOCK_ROWS, 1], {self.neutral}, {TYPES[self.total]})"

    def taken(self, x: str) -> str:
        return f"({x}).to({TYPES[self.total]})" if self.is_wider else x

    def finished(self, a: str) -> str:
        return f"{a}.to({TYPES[self.name]})" if self.is_wider else a

    def scanned(self, x: str, is_reversed: bool) -> str:
        return f"tl.associative_scan({x}, 1, {self.function}, reverse={is_reversed})"


_LIMITS = {
    "int8": (-(2**7), 2**7 - 1), "int16": (-(2**15), 2**15 - 1), "int32": (-(2**31), 2**31 - 1),
    "int64": (-(2**63), 2**63 - 1), "uint8": (0, 255), "bool": (0, 1),
}  # fmt: skip

# One number of Philox4x32-10 for the element at a place, as eager's dropout samples it (see codegen/philox.py). The
# last line is exact except for its sum: multiplication by a power of two does not round.
_UNIFORM = """@triton.jit
def af_uniform(place, rng_seed, rng_offset, rng_threads, rng_vec, rng_draws):
    chunk = place // rng_vec
    drawn = chunk // rng_threads * rng_draws + place % rng_vec
    block = rng_offset.to(tl.int64) // 4 + drawn // 4
    lane = drawn % 4
    stream = (chunk % rng_threads).to(tl.uint32)
    low, high = (block & 0xFFFFFFFF).to(tl.uint32), (block >> 32).to(tl.uint32)
    n0, n1, n2, n3 = tl.philox(rng_seed, low, high, stream, stream * 0)
    bits = tl.where(lane < 2, tl.where(lane == 0, n0, n1), tl.where(lane == 2, n2, n3))
    return bits.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10
"""

# An index that is data: outside of its bounds the device stops as eager's kernels stop it, and nothing is read there.
# Beyond the ends of the tile (``mask``) an index is what memory holds beside the tensor, or nothing.
_CHECKED = """@triton.jit
def af_checked(index, size, mask):
    is_inside = (index >= 0) & (index < size)
    tl.device_assert(is_inside, "index out of bounds", mask)
    return tl.where(is_inside, index, 0)
"""

# A value of which the compiler does not know what it is: a program's second number is always 0. Where each lane holds
# one product, the compiler would round once for it and the first addition of a sum over lanes, so that two lanes get
# different sums: fma(x, x, y * y) here, fma(y, y, x * x) there. All lanes of a row are to hold the same bits.
_APART = """@triton.jit
def af_apart(x):
    return tl.where(tl.program_id(1) == 0, x, 0.0)
"""

_LOGADDEXP = """@triton.jit
def af_logaddexp(a, b):
    low = tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)
    high = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    is_sum = (low != high) | (tl.abs(low) < float("inf"))
    return tl.where(is_sum, libdevice.log1p(libdevice.exp(low - high)) + high, a)
"""

HELPERS: tuple[tuple[str, str], ...] = (  # (name that must occur in the text, its definition)
    ("af_multiply", "@triton.jit\ndef af_multiply(a, b):\n    return a * b\n"),
    ("af_add", "@triton.jit\ndef af_add(a, b):\n    return a + b\n"),
    ("af_last_max", "@triton.jit\ndef af_last_max(a, b):\n    return tl.where((b >= a) | (b != b), b, a)\n"),
    ("af_last_min", "@triton.jit\ndef af_last_min(a, b):\n    return tl.where((b <= a) | (b != b), b, a)\n"),
    ("af_logaddexp", _LOGADDEXP),
    ("af_uniform", _UNIFORM),
    ("af_checked", _CHECKED),
    ("af_apart", _APART),
)
