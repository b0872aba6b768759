"""What the arithmetic instructions of PTX compute, on vectors with one element a lane.

In: the words of an opcode, operands as numpy vectors of its type. Out: the result. Source: NVIDIA, "Parallel Thread
Execution ISA", chapter 9.7. Special functions (``ex2.approx``) are those of numpy in float64, rounded once; hardware
differs from them by up to 2 units in the last place. ``fma`` is computed in a wider type and rounded, so that it may
be off by one unit in rare cases.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ptx.text import Unsupported

Array = Any  # a vector with one element a lane
TYPES: dict[str, np.dtype[Any]] = {
    **{f"b{n}": np.dtype(f"u{n // 8}") for n in (8, 16, 32, 64)},
    **{f"u{n}": np.dtype(f"u{n // 8}") for n in (8, 16, 32, 64)},
    **{f"s{n}": np.dtype(f"i{n // 8}") for n in (8, 16, 32, 64)},
    "f16": np.dtype(np.float16), "f32": np.dtype(np.float32), "f64": np.dtype(np.float64), "pred": np.dtype(np.bool_),
    "bf16": np.dtype(np.uint16), "bf16x2": np.dtype(np.uint32), "f16x2": np.dtype(np.uint32),
    "tf32": np.dtype(np.uint32), "s16x2": np.dtype(np.uint32), "u16x2": np.dtype(np.uint32),
}  # fmt: skip
_PAIRS = {"s16x2": np.int16, "u16x2": np.uint16}  # of integers in a register
_TINY = np.float32(np.finfo(np.float32).tiny)


def bf16_to_f32(bits: Array) -> Array:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def f32_to_bf16(values: Array) -> Array:
    """Rounded to nearest even; NaN is 0x7fff, as hardware gives it."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FFF, rounded).astype(np.uint16)


def halves(packed: Array) -> tuple[Array, Array]:
    """The lower and the upper 16 bits of each."""
    return (packed & 0xFFFF).astype(np.uint16), (packed >> 16).astype(np.uint16)


def joined(low: Array, high: Array) -> Array:
    return low.astype(np.uint32) | (high.astype(np.uint32) << 16)


def flushed(x: Array) -> Array:
    """Denormal numbers of float32 as zeros of their sign."""
    return np.where(np.abs(x) < _TINY, np.copysign(np.float32(0), x), x) if x.dtype == np.float32 else x


def canonical(x: Array) -> Array:
    """Every NaN with the same bits: hardware gives no other, whatever it was made from."""
    return np.where(np.isnan(x), _NAN[x.dtype], x)


_NAN = {
    np.dtype(f"f{size}"): np.array((1 << (8 * size - 1)) - 1, f"u{size}").view(f"f{size}") for size in (2, 4, 8)
}  # all bits but the sign's


# ---- rounding -------------------------------------------------------------------------------------------

_WIDER = {np.dtype(np.float16): np.float64, np.dtype(np.float32): np.float64, np.dtype(np.float64): np.longdouble}


def rounded(exact: Array, dtype: np.dtype[Any], mode: str) -> Array:
    """A wider result in ``dtype``: to nearest even ("rn"), to zero ("rz"), down ("rm"), up ("rp")."""
    near = exact.astype(dtype)
    if mode == "rn":
        return near
    back = near.astype(exact.dtype)
    low, high = dtype.type(-np.inf), dtype.type(np.inf)
    if mode in ("rz", "rm"):
        is_above = back > exact if mode == "rm" else (back > exact) & (exact > 0)
        near = np.where(is_above, np.nextafter(near, low), near)
    if mode in ("rz", "rp"):
        is_below = back < exact if mode == "rp" else (back < exact) & (exact < 0)
        near = np.where(is_below, np.nextafter(near, high), near)
    return near


def _mode(words: Sequence[str]) -> str:
    return next((word for word in words if word in ("rn", "rz", "rm", "rp")), "rn")


def _float(function: Callable[..., Array]) -> Callable[..., Array]:
    """Compute in a wider type, round as the words say, flush and saturate where they do."""

    def computed(words: Sequence[str], kind: str, *operands: Array) -> Array:
        if kind in ("bf16", "bf16x2", "f16x2"):
            return _packed(computed, words, kind, *operands)
        dtype = TYPES[kind]
        given = [flushed(x) if "ftz" in words else x for x in operands]
        found = rounded(function(*(x.astype(_WIDER[dtype]) for x in given)), dtype, _mode(words))
        found = flushed(found) if "ftz" in words else found
        if "sat" in words:
            found = np.where(np.isnan(found), dtype.type(0), np.clip(found, 0, 1))
        return canonical(found.astype(dtype))

    return computed


def _packed(computed: Callable[..., Array], words: Sequence[str], kind: str, *operands: Array) -> Array:
    if kind == "bf16":
        return f32_to_bf16(computed(words, "f32", *map(bf16_to_f32, operands)))
    parts = zip(*map(halves, operands), strict=True)
    if kind == "f16x2":
        low, high = (computed(words, "f16", *(x.view(np.float16) for x in part)).view(np.uint16) for part in parts)
    else:
        low, high = (_packed(computed, words, "bf16", *part) for part in parts)
    return joined(low, high)


# ---- integers -------------------------------------------------------------------------------------------


def _product(words: Sequence[str], kind: str, a: Array, b: Array) -> Array:
    if "wide" in words:
        wide = TYPES[f"{kind[0]}{2 * int(kind[1:])}"]
        return a.astype(wide) * b.astype(wide)
    if "hi" in words:
        return _high(kind, a, b)
    return a * b


def _high(kind: str, a: Array, b: Array) -> Array:
    """The upper half of a product."""
    bits = int(kind[1:])
    if bits < 64:
        wide = TYPES[f"{kind[0]}{2 * bits}"]
        return ((a.astype(wide) * b.astype(wide)) >> bits).astype(TYPES[kind])
    exact = a.astype(object) * b.astype(object)
    low = -(1 << 63) if kind[0] == "s" else 0
    return np.array([((int(x) >> 64) - low) % (1 << 64) + low for x in exact], TYPES[kind])


def _quotient(kind: str, a: Array, b: Array) -> Array:
    """Towards zero. By zero hardware gives all ones."""
    safe = np.where(b == 0, np.ones_like(b), b)
    if kind[0] == "u":
        found = a // safe
    else:
        down = a // safe
        found = down + ((down * safe != a) & ((a < 0) != (safe < 0))).astype(a.dtype)
    return np.where(b == 0, TYPES[kind].type(-1 if kind[0] == "s" else np.iinfo(TYPES[kind]).max), found)


def _multiply_add(words: Sequence[str], kind: str, a: Array, b: Array, c: Array) -> Array:
    return _product(words, kind, a, b) + c


def _shift_left(words: Sequence[str], kind: str, a: Array, b: Array) -> Array:
    bits = a.dtype.itemsize * 8
    amount = np.minimum(b, bits - 1).astype(a.dtype)
    return np.where(b >= bits, a.dtype.type(0), a << amount)


def _shift_right(words: Sequence[str], kind: str, a: Array, b: Array) -> Array:
    bits = a.dtype.itemsize * 8
    amount = np.minimum(b, bits - 1).astype(a.dtype)
    beyond = np.where(a < 0, -1, 0).astype(a.dtype) if kind[0] == "s" else a.dtype.type(0)
    return np.where(b >= bits, beyond, a >> amount)


def _funnel(words: Sequence[str], kind: str, a: Array, b: Array, c: Array) -> Array:
    """Of the 64 bits b:a, 32 from the top after a shift to the left, or from the bottom after one to the right."""
    amount = (c & 31 if "wrap" in words else np.minimum(c, 32)).astype(np.uint64)
    both = (b.astype(np.uint64) << np.uint64(32)) | a.astype(np.uint64)
    found = (both << amount) >> np.uint64(32) if "l" in words else both >> amount
    return (found & np.uint64(0xFFFFFFFF)).astype(np.uint32)


def _extract(words: Sequence[str], kind: str, a: Array, place: Array, count: Array) -> Array:
    """``count`` bits from ``place`` on; with a sign, the topmost of them is repeated."""
    bits = a.dtype.itemsize * 8
    if kind[0] == "u":
        ones = (np.uint64(1) << np.minimum(count, 63).astype(np.uint64)) - np.uint64(1)
        mask = np.where(count >= bits, np.uint64(0xFFFFFFFFFFFFFFFF), ones)
        moved = np.where(place >= bits, np.uint64(0), a.astype(np.uint64) >> np.minimum(place, 63).astype(np.uint64))
        return (moved & mask).astype(a.dtype)
    left = bits - np.minimum(place.astype(np.int64) + count.astype(np.int64), bits)
    right = np.minimum(bits - count.astype(np.int64), bits - 1)
    found = (a << left.astype(a.dtype)) >> right.astype(a.dtype)
    return np.where(count == 0, a.dtype.type(0), found)


def _insert(words: Sequence[str], kind: str, a: Array, b: Array, place: Array, count: Array) -> Array:
    mask = ((np.uint64(1) << count.astype(np.uint64)) - np.uint64(1)) << place.astype(np.uint64)
    return ((b & ~mask) | ((a.astype(np.uint64) << place.astype(np.uint64)) & mask)).astype(b.dtype)


def _permute(words: Sequence[str], kind: str, a: Array, b: Array, choice: Array) -> Array:
    """Four bytes out of the eight of b:a, each chosen by four bits; the fourth of them repeats the byte's sign."""
    both = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
    found = np.zeros(len(a), np.uint32)
    for n in range(4):
        wanted = (choice >> (4 * n)) & 0xF
        byte = (both >> ((wanted & 7).astype(np.uint64) * np.uint64(8))).astype(np.uint8)
        byte = np.where(wanted & 8, np.where(byte & 0x80, 0xFF, 0), byte)
        found |= byte.astype(np.uint32) << np.uint32(8 * n)
    return found


def _logic(words: Sequence[str], kind: str, a: Array, b: Array, c: Array, table: Array) -> Array:
    found = np.zeros_like(a)
    for n in range(8):
        if int(table[0]) >> n & 1:
            found |= (a if n & 4 else ~a) & (b if n & 2 else ~b) & (c if n & 1 else ~c)
    return found


def _count_ones(x: Array) -> Array:
    return np.array([int(value).bit_count() for value in x], np.uint32)


def _leading_zeros(x: Array) -> Array:
    bits = x.dtype.itemsize * 8
    return np.array([bits - int(value).bit_length() for value in x], np.uint32)


def _reversed(x: Array) -> Array:
    bits = x.dtype.itemsize * 8
    return np.array([int(f"{int(value):0{bits}b}"[::-1], 2) for value in x], x.dtype)


# ---- smallest and largest -------------------------------------------------------------------------------


def _extreme(is_least: bool) -> Callable[..., Array]:
    def found(words: Sequence[str], kind: str, a: Array, b: Array) -> Array:
        if kind in ("bf16", "bf16x2", "f16x2"):
            return _packed(found, words, kind, a, b)
        if a.dtype.kind != "f":
            return np.minimum(a, b) if is_least else np.maximum(a, b)
        if "ftz" in words:
            a, b = flushed(a), flushed(b)
        is_first = (a < b) | ((a == b) & np.signbit(a)) if is_least else (a > b) | ((a == b) & ~np.signbit(a))
        picked = np.where(is_first | np.isnan(b), a, b)
        if "NaN" in words:
            return np.where(np.isnan(a) | np.isnan(b), a.dtype.type(np.nan), picked)
        return picked

    return found


# ---- comparisons ----------------------------------------------------------------------------------------

_COMPARE: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip


def compared(words: Sequence[str], kind: str, a: Array, b: Array) -> Array:
    if kind == "bf16":
        a, b = bf16_to_f32(a), bf16_to_f32(b)
    if "ftz" in words:
        a, b = flushed(a), flushed(b)
    word = words[1]
    is_nan = np.isnan(a) | np.isnan(b) if a.dtype.kind == "f" else np.zeros(len(a), np.bool_)
    if word in ("num", "nan"):
        return is_nan if word == "nan" else ~is_nan
    if word in _COMPARE:
        return _COMPARE[word](a, b) & ~is_nan
    return _COMPARE[word.removesuffix("u")](a, b) | is_nan


# ---- conversions ----------------------------------------------------------------------------------------

_INTEGRAL = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def converted(words: Sequence[str], *operands: Array) -> Array:
    """``cvt``: the last two words are the types of the result and of the operand."""
    to, source = words[-2], words[-1]
    if to in ("bf16x2", "f16x2"):
        high, low = operands
        if to == "bf16x2":
            return joined(f32_to_bf16(low), f32_to_bf16(high))
        return joined(low.astype(np.float16).view(np.uint16), high.astype(np.float16).view(np.uint16))
    (x,) = operands
    if source == "bf16":
        x = bf16_to_f32(x)
    if "ftz" in words:
        x = flushed(x)
    integral = next((_INTEGRAL[word] for word in words if word in _INTEGRAL), None)
    if x.dtype.kind == "f" and integral is not None:
        x = integral(x)
    if to == "tf32":
        bits = np.ascontiguousarray(x).view(np.uint32)
        return ((bits + 0x1000) & np.uint32(0xFFFFE000)).astype(np.uint32)
    if to == "bf16":
        return f32_to_bf16(x)
    dtype = TYPES[to]
    if dtype.kind == "f":
        found = rounded(x.astype(np.longdouble), dtype, _mode(words)) if x.dtype.kind == "f" else x.astype(dtype)
        if "sat" in words:
            found = np.where(np.isnan(found), dtype.type(0), np.clip(found, 0, 1)).astype(dtype)
        return flushed(found) if "ftz" in words else found
    return _to_integer(x, dtype) if x.dtype.kind == "f" else x.astype(dtype)


def _to_integer(x: Array, dtype: np.dtype[Any]) -> Array:
    """The nearest number that the type has; 0 for NaN."""
    limits = np.iinfo(dtype)
    wide = np.where(np.isnan(x), 0, x).astype(np.longdouble)
    return np.clip(wide, limits.min, limits.max).astype(dtype)


# ---- the table ------------------------------------------------------------------------------------------

_Rule = Callable[..., Array]  # (words of the opcode, type, operands)


def _plain(function: Callable[..., Array]) -> _Rule:
    return lambda words, kind, *operands: function(*operands)


def _either(of_floats: _Rule, of_others: Callable[..., Array]) -> _Rule:
    def found(words: Sequence[str], kind: str, *operands: Array) -> Array:
        is_float = kind.startswith(("f", "bf"))
        if kind in _PAIRS:
            parts = zip(*map(halves, operands), strict=True)
            return joined(*(of_others(*(x.view(_PAIRS[kind]) for x in part)).view(np.uint16) for part in parts))
        return of_floats(words, kind, *operands) if is_float else of_others(*operands)

    return found


def _absolute(words: Sequence[str], kind: str, x: Array) -> Array:
    return _sign_bits(words, kind, x, lambda bits, top: bits & ~top) if kind.startswith(("f", "bf")) else np.abs(x)


def _negative(words: Sequence[str], kind: str, x: Array) -> Array:
    return _sign_bits(words, kind, x, lambda bits, top: bits ^ top) if kind.startswith(("f", "bf")) else -x


def _sign_bits(words: Sequence[str], kind: str, x: Array, change: Callable[[Array, Any], Array]) -> Array:
    if "ftz" in words:
        x = flushed(x)
    bits = np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}")
    top = 0x80008000 if kind.endswith("x2") else 1 << (8 * bits.dtype.itemsize - 1)
    return change(bits, bits.dtype.type(top)).view(x.dtype)


def _copied_sign(words: Sequence[str], kind: str, a: Array, b: Array) -> Array:
    """``b`` with the sign of ``a``."""
    return np.copysign(b, a)


RULES: dict[str, _Rule] = {
    "add": _either(_float(np.add), np.add), "sub": _either(_float(np.subtract), np.subtract),
    "mul": lambda w, k, a, b: _float(np.multiply)(w, k, a, b) if k[0] in "fb" else _product(w, k, a, b),
    "mad": _multiply_add, "fma": _float(lambda a, b, c: a * b + c),
    "div": lambda w, k, a, b: _float(np.divide)(w, k, a, b) if k[0] == "f" else _quotient(k, a, b),
    "rem": lambda w, k, a, b: a - _quotient(k, a, b) * b,
    "min": _extreme(True), "max": _extreme(False), "abs": _absolute, "neg": _negative, "copysign": _copied_sign,
    "rcp": _float(lambda x: 1 / x), "sqrt": _float(np.sqrt), "rsqrt": _float(lambda x: 1 / np.sqrt(x)),
    "ex2": _float(np.exp2), "lg2": _float(np.log2), "sin": _float(np.sin), "cos": _float(np.cos),
    "tanh": _float(np.tanh),
    "and": _plain(np.bitwise_and), "or": _plain(np.bitwise_or), "xor": _plain(np.bitwise_xor),
    "not": _plain(np.invert), "cnot": _plain(lambda x: (x == 0).astype(x.dtype)),
    "shl": _shift_left, "shr": _shift_right, "shf": _funnel, "bfe": _extract, "bfi": _insert, "prmt": _permute,
    "lop3": _logic, "popc": _plain(_count_ones), "clz": _plain(_leading_zeros), "brev": _plain(_reversed),
}  # fmt: skip


def rule_of(name: str) -> _Rule:
    if name not in RULES:
        raise Unsupported(name)
    return RULES[name]
