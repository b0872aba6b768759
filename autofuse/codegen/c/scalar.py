"""C expressions: one row per scalar op, and the helpers a kernel's text needs.

In: an op, its dtype and the C text of its operands. Out: the C text of the result.
Guarantee: no ``fmaxf`` (it drops NaN and stays a scalar call), no reliance on fast-math; integer results are cast
back to their width, so they wrap as aten's do. Vector math comes from glibc's libmvec through own prototypes where
the toolchain defines AF_LIBMVEC, from scalar libm elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from autofuse.codegen.c.math import INLINE_CALLS, INLINE_MATH
from autofuse.codegen.c.register_transpose import TURN, WIDTH
from autofuse.codegen.dtypes import VALUE_TYPE, dtype, is_float
from autofuse.codegen.loops import LIBRARY_FUNCTIONS, LoopValue
from autofuse.codegen.scalar import INFIX, ScalarPrinter, normal_cdf

# ---- constants ------------------------------------------------------------------------------------------


def literal(value: object, name: str) -> str:
    """A C constant of a compute dtype."""
    if value == "nan":
        return "NAN" if name == "float32" else "(double)NAN"
    if name == "bool":
        return "1" if value else "0"
    if not is_float(name):
        number = int(value)  # type: ignore[call-overload]
        if name == "int64":
            return "INT64_MIN" if number == -(2**63) else f"INT64_C({number})"
        return f"(({VALUE_TYPE[name]}){number})" if number >= 0 else f"(({VALUE_TYPE[name]})({number}))"
    real = float(value)  # type: ignore[arg-type]
    if math.isinf(real):
        return "INFINITY" if real > 0 else "(-INFINITY)"
    text = f"{real:.9g}" if name == "float32" else f"{real:.17g}"
    if not any(ch in text for ch in ".en"):
        text += ".0"
    text += "f" if name == "float32" else ""
    return f"({text})" if text.startswith("-") else text


# ---- ops ------------------------------------------------------------------------------------------------

_CALLS = {
    **{op: op for op in (*LIBRARY_FUNCTIONS, "sqrt", "floor", "ceil", "pow", "atan2", "hypot")},
    **{op: op for op in ("lgamma", "copysign", "nextafter")},
    "round": "rint",
    "trunc": "trunc",
}


def _one(name: str) -> str:
    return "1.0f" if name == "float32" else "1.0"


def _sign(name: str, a: str) -> str:
    zero = literal(0, name)
    return f"({VALUE_TYPE[name]})(({a} > {zero}) - ({a} < {zero}))"


def _absolute(name: str, a: str) -> str:
    if is_float(name):
        return f"{'fabsf' if name == 'float32' else 'fabs'}({a})"
    return f"({VALUE_TYPE[name]})({a} < 0 ? -{a} : {a})"


_UNARY: Mapping[str, Callable[[str, str], str]] = {
    "neg": lambda n, a: f"-{a}" if is_float(n) else f"({VALUE_TYPE[n]})(-{a})",
    "abs": _absolute,
    "sign": _sign,
    "rsqrt": lambda n, a: f"{_one(n)} / {'sqrtf' if n == 'float32' else 'sqrt'}({a})",
    "reciprocal": lambda n, a: f"{_one(n)} / {a}",
    "not": lambda n, a: f"!{a}",
    "bitnot": lambda n, a: f"({VALUE_TYPE[n]})(~{a})",
    "isnan": lambda n, a: f"{a} != {a}",
    "isinf": lambda n, a: f"{_absolute(n, a)} == INFINITY",
}


class CScalars(ScalarPrinter):
    """Prints scalar ops in C. ``fast``: inlined functions of `c.math` in place of the library's."""

    unary = _UNARY

    def cast(self, a: str, source: str, name: str) -> str:
        if source == "bool" and name != "bool":
            # a select is a masked move; a conversion of _Bool is 8 times slower (gcc 12)
            return f"{a} ? {literal(1, name)} : {literal(0, name)}"
        return super().cast(a, source, name)

    def converted(self, a: str, name: str) -> str:
        return f"({VALUE_TYPE[name]}){a}"

    def rounded(self, a: str, memory: str, name: str) -> str:
        return f"af_round_{memory}({a})"

    def selected(self, condition: str, a: str, b: str) -> str:
        return f"{condition} ? {a} : {b}"

    def extreme(self, value: LoopValue, args: Sequence[str], operands: Sequence[LoopValue]) -> str:
        a, b = args
        sign, flipped = (">", "<") if value.op == "maximum" else ("<", ">")
        is_number = operands[1].op == "const" and operands[1].attr != "nan"
        if is_number or not is_float(value.dtype):  # the comparison alone lets NaN through
            return f"{a} {flipped} {b} ? {b} : {a}"
        return f"(({a} {sign} {b}) | ({a} != {a})) ? {a} : {b}"

    def of_integers(self, value: LoopValue, args: Sequence[str], operands: Sequence[LoopValue]) -> str:
        if value.op == "fmod":
            return f"{args[0]} % {args[1]}"
        return f"({VALUE_TYPE[value.dtype]})af_{value.op}_i64({args[0]}, {args[1]})"

    def function(self, op: str, name: str, args: Sequence[str]) -> str | None:
        if op in ("fmod", "remainder"):
            return f"af_{op}_{'f32' if name == 'float32' else 'f64'}({', '.join(args)})"
        if self.fast and (op, name) in INLINE_CALLS:
            return f"{INLINE_CALLS[op, name]}({args[0]})"
        if op == "exp_nonpositive":
            return self.function("exp", name, args)
        if op == "normal_cdf":
            return normal_cdf(args[0], lambda a: self.function("erf", name, [a]), lambda n: literal(n, name))
        return f"{_CALLS[op]}{'f' if name == 'float32' else ''}({', '.join(args)})" if op in _CALLS else None

    def infix(self, op: str, name: str, source: str, args: Sequence[str]) -> str:
        text = f"{args[0]} {INFIX[op]} {args[1]}"
        wraps = name != "bool" and not is_float(name)
        return f"({VALUE_TYPE[name]})({text})" if wraps else text


# ---- memory ---------------------------------------------------------------------------------------------


def load_text(element: str, memory: str) -> str:
    if memory in ("float16", "bfloat16"):
        return f"af_load_{memory}({element})"
    return f"{element} != 0" if memory == "bool" else element


def store_text(value: str, memory: str) -> str:
    return f"af_store_{memory}({value})" if memory in ("float16", "bfloat16") else value


def memory_type(name: str) -> str:
    return {"float16": "uint16_t"}.get(name, dtype(name).memory_type)


# ---- helpers printed when used ------------------------------------------------------------------------------

HELPERS: tuple[tuple[str, str], ...] = (  # (name that must occur in the body, C text), in order of dependence
    (
        "bfloat16(",
        """static inline float af_load_bfloat16(uint16_t v) {
  const uint32_t u = (uint32_t)v << 16; float f; memcpy(&f, &u, 4); return f;
}
static inline uint16_t af_store_bfloat16(float f) {  /* nearest, ties to even; NaN stays NaN */
  uint32_t u; memcpy(&u, &f, 4);
  const uint32_t r = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  return f != f ? (uint16_t)0x7fc0u : (uint16_t)r;
}
static inline float af_round_bfloat16(float f) { return af_load_bfloat16(af_store_bfloat16(f)); }
""",
    ),
    (
        "float16(",
        """/* Integer conversions between IEEE half and float: gcc 12 does not vectorise _Float16. */
static inline float af_load_float16(uint16_t h) {
  const uint32_t w = (uint32_t)h << 16, two = w + w;
  const uint32_t nb = (two >> 4) + (UINT32_C(0xe0) << 23), db = (two >> 17) | (UINT32_C(126) << 23);
  float n, d; memcpy(&n, &nb, 4); memcpy(&d, &db, 4);
  n *= 0x1.0p-112f; d -= 0.5f;
  uint32_t nu, du; memcpy(&nu, &n, 4); memcpy(&du, &d, 4);
  const uint32_t r = (w & UINT32_C(0x80000000)) | (two < (UINT32_C(1) << 27) ? du : nu);
  float f; memcpy(&f, &r, 4); return f;
}
static inline uint16_t af_store_float16(float f) {  /* nearest, ties to even; NaN stays NaN */
  uint32_t w; memcpy(&w, &f, 4);
  const uint32_t two = w + w, sign = w & UINT32_C(0x80000000);
  float base = fabsf(f) * 0x1.0p+112f * 0x1.0p-110f;
  uint32_t bias = two & UINT32_C(0xff000000);
  bias = bias < UINT32_C(0x71000000) ? UINT32_C(0x71000000) : bias;
  const uint32_t add = (bias >> 1) + UINT32_C(0x07800000);
  float a; memcpy(&a, &add, 4);
  base = a + base;
  uint32_t bits; memcpy(&bits, &base, 4);
  const uint32_t h = ((bits >> 13) & UINT32_C(0x7c00)) + (bits & UINT32_C(0x0fff));
  return (uint16_t)((sign >> 16) | (two > UINT32_C(0xff000000) ? UINT32_C(0x7e00) : h));
}
static inline float af_round_float16(float f) { return af_load_float16(af_store_float16(f)); }
""",
    ),
    (
        "af_pack_float16(",
        """#if defined(__F16C__)  /* the builtins themselves: <immintrin.h> takes longer to compile than a kernel */
typedef float af_f32x4 __attribute__((vector_size(16)));
typedef float af_f32x8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef int16_t af_f16x8 __attribute__((vector_size(16), aligned(2), may_alias));
#if defined(__AVX512F__)
typedef float af_f32x16 __attribute__((vector_size(64), aligned(4), may_alias));
typedef int16_t af_f16x16 __attribute__((vector_size(32), aligned(2), may_alias));
#endif
#endif
static inline void af_pack_float16(uint16_t* to, const float* from, int64_t n) {  /* 0: nearest, ties to even */
  int64_t k = 0;
#if defined(__F16C__)
#if defined(__AVX512F__)
  for (; k + 16 <= n; k += 16)
    *(af_f16x16*)(to + k) = __builtin_ia32_vcvtps2ph512_mask(*(const af_f32x16*)(from + k), 0, (af_f16x16){0}, 0xffff);
#endif
  for (; k + 8 <= n; k += 8) *(af_f16x8*)(to + k) = __builtin_ia32_vcvtps2ph256(*(const af_f32x8*)(from + k), 0);
  for (; k < n; ++k) to[k] = (uint16_t)__builtin_ia32_vcvtps2ph((af_f32x4){from[k]}, 0)[0];
#else
  #pragma omp simd
  for (int64_t c = k; c < n; ++c) to[c] = af_store_float16(from[c]);
#endif
}
""",
    ),
    (
        "af_stream(",
        """#if defined(__AVX512F__)
#define AF_LINE 64
#define AF_STREAM __builtin_ia32_movntdq512
#elif defined(__AVX__)
#define AF_LINE 32
#define AF_STREAM __builtin_ia32_movntdq256
#endif
#if defined(AF_LINE)  /* the builtins themselves: <immintrin.h> takes longer to compile than a kernel */
typedef long long af_line __attribute__((vector_size(AF_LINE)));
typedef long long af_unaligned __attribute__((vector_size(AF_LINE), aligned(1), may_alias));
#if defined(__clang__)
#undef AF_STREAM
#define AF_STREAM(to, line) __builtin_nontemporal_store(line, to)
#endif
#endif
static inline void af_stream(void* to, const void* from, int64_t bytes) {  /* past the caches, line by line */
#if defined(AF_LINE)
  const int64_t odd = (int64_t)(-(uintptr_t)to & 63), head = odd < bytes ? odd : bytes;
  memcpy(to, from, (size_t)head);
  to = (char*)to + head, from = (const char*)from + head, bytes -= head;
  for (; bytes >= AF_LINE; bytes -= AF_LINE, to = (char*)to + AF_LINE, from = (const char*)from + AF_LINE)
    AF_STREAM((af_line*)to, (af_line)*(const af_unaligned*)from);
#endif
  memcpy(to, from, (size_t)bytes);
}
static inline void af_stream_fence(void) {
#if defined(__SSE2__)
  __builtin_ia32_sfence();
#endif
}
""",
    ),
    ("af_turn(", WIDTH + TURN),
    (
        "af_narrow(",
        """static inline int32_t af_narrow(int64_t v) {
  return v < INT32_MIN ? INT32_MIN : v > INT32_MAX ? INT32_MAX : (int32_t)v;
}
""",
    ),
    *INLINE_MATH.items(),
    (
        "af_logaddexp(",
        """static inline double af_logaddexp(double x, double y) {  /* ATen's _log_add_exp_helper */
  const double low = (y != y) | (y < x) ? y : x, high = (y != y) | (y > x) ? y : x;
  return (low != high) | (fabs(low) < INFINITY) ? log1p(exp(low - high)) + high : x;
}
""",
    ),
    (
        "af_fmod_f32",
        "static inline float af_fmod_f32(float a, float b) { return fmodf(a, b); }\n",
    ),
    (
        "af_fmod_f64",
        "static inline double af_fmod_f64(double a, double b) { return fmod(a, b); }\n",
    ),
    (
        "af_remainder_f32",
        """static inline float af_remainder_f32(float a, float b) {  /* sign of the divisor */
  const float m = fmodf(a, b);
  return (m != 0.0f && ((b < 0.0f) != (m < 0.0f))) ? m + b : m;
}
""",
    ),
    (
        "af_remainder_f64",
        """static inline double af_remainder_f64(double a, double b) {  /* sign of the divisor */
  const double m = fmod(a, b);
  return (m != 0.0 && ((b < 0.0) != (m < 0.0))) ? m + b : m;
}
""",
    ),
    (
        "af_remainder_i64",
        """static inline int64_t af_remainder_i64(int64_t a, int64_t b) {  /* sign of the divisor */
  const int64_t m = a % b;
  return (m != 0 && ((b < 0) != (m < 0))) ? m + b : m;
}
""",
    ),
    (
        "af_pow_i64",
        """static inline int64_t af_pow_i64(int64_t a, int64_t n) {
  uint64_t r = 1, x = (uint64_t)a;
  for (; n > 0; n >>= 1, x *= x) if (n & 1) r *= x;
  return (int64_t)r;
}
""",
    ),
)

# Functions with vector variants in glibc's libmvec: {name: (arguments, AF_LIBMVEC level that has them)}.
# Level 1 is glibc 2.22 (x86), level 2 is glibc 2.35.
VECTOR_MATH: dict[str, tuple[int, int]] = {
    **dict.fromkeys(("exp", "log", "sin", "cos"), (1, 1)),
    "pow": (2, 1),
    **{f: (1, 2) for f in LIBRARY_FUNCTIONS if f not in ("exp", "log", "sin", "cos")},
    **dict.fromkeys(("atan2", "hypot"), (2, 2)),
}  # fmt: skip


def vector_prototypes(body: str) -> str:
    """Prototypes with vector variants for the math functions that occur in a kernel."""
    lines: dict[int, list[str]] = {1: [], 2: []}
    for function, (arity, level) in VECTOR_MATH.items():
        for ctype, end in (("float", "f"), ("double", "")):
            if f" {function}{end}(" in body or f"({function}{end}(" in body or f"-{function}{end}(" in body:
                arguments = ", ".join([ctype] * arity)
                lines[level] += [
                    "#pragma omp declare simd notinbranch",
                    f"extern {ctype} {function}{end}({arguments});",
                ]
    text = ""
    for level, found in lines.items():
        if found:
            guard = f"#if defined(AF_LIBMVEC) && AF_LIBMVEC >= {level}"
            text += "\n".join([guard, *found, "#endif", ""])
    return text
