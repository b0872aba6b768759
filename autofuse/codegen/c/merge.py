"""How a merge is written in C: a sum over distances from a row's maximum or mean, made in the pass that makes these.

In: a kernel whose passes were merged (`one_pass`). Out: statements for a block of columns that lies in a tile, and for
bringing the parts of a row together. Guarantee: totals are in double; parts are merged in their order. Names in the
text: ``t*`` a merge's total; ``mid*`` and ``seen*`` the mean and the number of the elements that its squares are of;
``tile*`` the elements of a block.
"""

from __future__ import annotations

from typing import NamedTuple

from autofuse.codegen.c.scalar import CScalars
from autofuse.codegen.dtypes import VALUE_TYPE
from autofuse.codegen.loops import LoopKernel, LoopValue


class Element(NamedTuple):
    """What makes an element at a column."""

    lines: list[str]  # statements
    text: str  # the expression of its value
    clause: str  # OpenMP's clause for what the statements note


def merges_of(kernel: LoopKernel, numbers: tuple[int, ...]) -> list[int]:
    """Those of the values that are merges."""
    return [n for n in numbers if kernel.values[n].op == "row_merge"]


def fields(kernel: LoopKernel, number: int) -> list[str]:
    """The variables, all double, that a merge carries from block to block."""
    return [f"t{number}", *([f"mid{number}", f"seen{number}"] if kernel.values[number].attr == "squares" else [])]


def block_lines(kernel: LoopKernel, number: int, scalars: CScalars, element: Element) -> list[str]:
    """Statements after those that take a block of ``c`` in [b, b_end) into what the merge is relative to.

    ``old*`` is that before the block.
    """
    value = kernel.values[number]
    beside, ctype = value.args[1], VALUE_TYPE[value.dtype]
    if value.attr == "squares":
        return [
            f"const {ctype} a{number} = p{beside} / ({ctype})(b_end - b);  /* near the block's mean */",
            f"{ctype} q{number} = 0, o{number} = 0;",
            f"#pragma omp simd reduction(+:q{number}) reduction(+:o{number}){element.clause}",
            "for (int64_t c = b; c < b_end; ++c) {",
            *(f"  {line}" for line in element.lines),
            f"  const {ctype} off = {element.text} - a{number};",
            f"  q{number} += off * off; o{number} += off;",
            "}",
            f"af_merge_block(&t{number}, &mid{number}, &seen{number}, q{number}, o{number}, a{number}, b_end - b);",
        ]
    top = f"t{beside}"
    is_finite = f"{top} - {top} == 0" if value.attr == "exp_finite" else f"{top} != -INFINITY"
    op = "exp_nonpositive" if value.attr == "exp" and scalars.fast and value.dtype == "float32" else "exp"
    text = scalars.expression(LoopValue(op, value.dtype, (0,)), ["off"], [kernel.values[value.args[0]]])
    return [
        f"const {ctype} low{number} = {is_finite} ? {top} : 0;",
        f"{ctype} p{number} = 0;",
        f"#pragma omp simd reduction(+:p{number}){element.clause}",
        "for (int64_t c = b; c < b_end; ++c) {",
        *(f"  {line}" for line in element.lines),
        f"  const {ctype} off = {element.text} - low{number};",
        f"  p{number} += {text};",
        "}",
        f"t{number} = af_rescaled(t{number}, old{beside}, {top}) + p{number};",
    ]


def join_lines(kernel: LoopKernel, number: int, part: dict[str, str]) -> list[str]:
    """Statements that take a part of the row in. ``part``: that of each variable.

    They come before the part of what the merge is relative to is taken in.
    """
    value = kernel.values[number]
    t = f"t{number}"
    if value.attr == "squares":
        mid, seen = fields(kernel, number)[1:]
        return [f"af_merge_squares(&{t}, &{mid}, &{seen}, {part[t]}, {part[mid]}, {part[seen]});"]
    top = f"t{value.args[1]}"
    return [
        f"if ({part[top]} > {top}) {t} = af_rescaled({t}, {top}, {part[top]}) + {part[t]};",
        f"else {t} += af_rescaled({part[t]}, {part[top]}, {top});",
    ]


def finish_lines(kernel: LoopKernel, number: int) -> list[str]:
    """Statements after the whole row: exp(x - top) of a row of nothing but -inf is NaN."""
    value = kernel.values[number]
    if value.attr != "exp":
        return []
    return [f"if (t{value.args[1]} == -INFINITY && ncols > 0) t{number} = NAN;"]


MERGE_HELPERS: tuple[tuple[str, str], ...] = (
    (
        "af_chunks(",
        """static inline int64_t af_chunks(int64_t wanted, int64_t by_length, int64_t size) {
  const int64_t most = by_length < size ? by_length : size, chunks = wanted < most ? wanted : most;
  return chunks > 1 ? chunks : 1;
}
""",
    ),
    (
        "af_rescaled(",
        """static inline double af_rescaled(double sum, double from, double to) {  /* a sum of exp(x - from) */
  return from == to ? sum : sum * exp(from - to);
}
""",
    ),
    (
        "af_merge_",
        """static inline void af_merge_squares(double* t, double* mid, double* seen, double q, double m, double n) {
  const double all = *seen + n, apart = m - *mid;
  if (n == 0) return;
  *t += q + apart * apart * (*seen * n / all);
  *mid += apart * (n / all);
  *seen = all;
}
static inline void af_merge_block(double* t, double* mid, double* seen, double q, double o, double a, int64_t count) {
  const double n = (double)count, shift = o / n, own = q - o * shift;  /* squares from a, and distances from it */
  af_merge_squares(t, mid, seen, own < 0 ? 0 : own, a + shift, n);
}
""",
    ),
)
