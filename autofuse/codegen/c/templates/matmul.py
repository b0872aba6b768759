"""A matmul in C: tiles of the result that stay in vector registers.

In: a `NodeForm` that is one float32 matmul (mm, addmm, bmm, baddbmm) of its inputs, through views; and a configuration.
Out: C text with the entry of every generated kernel, or LoweringError with a reason code. Guarantee: each element is a
sum of sums over blocks of at most 192 of the depth, each in order, whatever the number of threads: about as far from
the exact value as a library's matmul. No element outside of the operands is read.

Why: libraries copy both operands into panels first, which takes a fifth of the matmul time in a small model's step
(MKL, Xeon), and a library that is made for another maker's processors is slower in the rest too (MKL, EPYC). Here the
left operand is read in place. The right one is read in place where its rows are contiguous, else copied panel by panel
by the thread that uses it, once for each part of up to 512 rows. Sizes that do not vary are constants of the code.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autofuse.codegen.c.knobs import cpu_vector_bits
from autofuse.codegen.c.printer import INCLUDES, CSource
from autofuse.codegen.c.register_transpose import TURN
from autofuse.codegen.c.templates.common import bias_of, bias_text, fill, header, size_macros, tile_of
from autofuse.codegen.knobs import Knob, Sizes, default_config
from autofuse.codegen.matmul_operands import ANCHORS, Operand, read_operand
from autofuse.codegen.templates import MATMUL, Template
from autofuse.errors import LoweringError
from autofuse.ir.operation import NodeForm, ValueRef
from autofuse.ir.records import Config, make_config
from autofuse.ir.shape import Dim, contiguous_strides, evaluate
from autofuse.ir.size_text import dim_text

# Rows, vectors and bits of tiles, by the bits of the widest vectors. A tile has as many sums as there are registers
# for; shapes suit processors that load fast, or that add fast. The narrowest has the fewest columns to fill.
TILES: dict[int, tuple[str, ...]] = {
    512: ("14x2x512", "6x4x512", "8x3x512", "6x2x256"),
    256: ("6x2x256", "4x3x256"),
    128: ("8x2x128", "6x4x128"),
}


@dataclass(frozen=True)
class MatmulPlan:
    """A node of one matmul: its operands' strides, and its sizes."""

    left: Operand
    right: Operand
    bias: int | None  # the pointer of a row with one number a column
    batch: Dim
    rows: Dim
    cols: Dim
    depth: Dim


@functools.lru_cache(maxsize=256)
def plan_c_matmul(form: NodeForm) -> MatmulPlan:
    """The matmul of a node. Raises LoweringError where the node is not exactly one matmul."""
    found = [op for op in form.operations if op.target in ANCHORS]
    if len(found) != 1 or form.outputs != (ValueRef(found[0].name),):
        raise LoweringError("anchor", f"expected one product of matrices and no other result, found {len(found)}")
    (op,) = found
    left, right, bias = ANCHORS[op.target]
    spec = op.outputs[0]
    if op.kwargs:
        raise LoweringError("factor", f"expected a product without factors, found {op.kwargs}")
    # The dtypes of the inputs count too, since operands are read there: a copy in between may be a conversion.
    dtypes = {spec.dtype, *(item.spec.dtype for item in form.inputs)}
    if dtypes != {"float32"}:
        raise LoweringError("dtype", f"expected a product of float32 inputs, found {', '.join(sorted(dtypes))}")
    if tuple(spec.strides) != tuple(contiguous_strides(spec.shape.dims)):
        raise LoweringError("strides", "expected a product that is written row by row")
    return MatmulPlan(
        read_operand(form, op.args[left]),
        read_operand(form, op.args[right]),
        None if bias is None else bias_of(form, op.args[bias], spec.shape[-1]),
        spec.shape[0] if len(spec.shape) == 3 else 1,
        spec.shape[-2],
        spec.shape[-1],
        form.spec(op.args[left]).shape[-1],
    )


def c_matmul_flops(form: NodeForm, values: Sequence[int]) -> int:
    """Additions and multiplications at these values of the node's symbols."""
    made, named = plan_c_matmul(form), dict(zip(form.symbols, values, strict=True))
    return 2 * math.prod(evaluate(dim, named) for dim in (made.batch, made.rows, made.cols, made.depth))


# ---- knobs ------------------------------------------------------------------------------------------


def c_matmul_knobs(form: NodeForm, *_sizes: Sizes | None) -> tuple[Knob, ...]:
    """The knobs: the tile, and whether a right operand whose rows are contiguous is still copied into panels."""
    tiles = TILES[cpu_vector_bits()[-1]]
    knobs = [Knob("tile", tiles, tiles[0], "rows, vectors and bits of the sums that stay in registers")]
    if _is_dense(plan_c_matmul(form).right):
        knobs.append(Knob("panels", (False, True), False, "copy the right operand into panels before it is read"))
    return tuple(knobs)


def _is_dense(right: Operand) -> bool:
    return right.cols == 1


# ---- text -------------------------------------------------------------------------------------------


def print_c_matmul(form: NodeForm, config: Config, constants: Mapping[str, int] | None = None) -> CSource:
    """The C text of a matmul. Raises LoweringError where a size has no exact C form."""
    made, known = plan_c_matmul(form), constants or {}
    knobs = {**dict(default_config(c_matmul_knobs(form))), **dict(config)}
    tile_rows, vectors, bits = tile_of(make_config(knobs))
    names = [item.name for item in form.inputs]
    in_panels = bool(knobs.get("panels", False)) or not _is_dense(made.right)
    is_transposed = made.right.rows == 1 and not _is_dense(made.right)
    text = {
        "HEADER": header(
            f"{'x'.join(map(str, (made.rows, made.depth)))} by {'x'.join(map(str, (made.depth, made.cols)))}",
            config,
            known,
        ),
        "ROWS": str(tile_rows),
        "VECTORS": str(vectors),
        "WIDTH": str(bits // 32),
        "SIZES": "\n".join(_sizes(form, made, known)),
        "LEFT": str(names.index(made.left.name)),
        "RIGHT": str(names.index(made.right.name)),
        "BIAS": bias_text(made.bias),
        "OUT": str(len(names)),
        "IN_PANELS": str(int(in_panels)),
        "COPY": _TRANSPOSED if is_transposed else _COPIED,
        "REMAINDERS": remainders(tile_rows),
    }
    return fill("product", form, _TEXT, text)


def _sizes(form: NodeForm, made: MatmulPlan, known: Mapping[str, int]) -> list[str]:
    """Sizes and strides as macros; those that do not vary are constants wherever they are used."""
    dims: dict[str, Dim] = {
        "M": made.rows, "N": made.cols, "K": made.depth,
        "LEFT_ROW": made.left.rows, "LEFT_COL": made.left.cols,
        "RIGHT_ROW": made.right.rows, "RIGHT_COL": made.right.cols,
    }  # fmt: skip
    lines = size_macros(form, known, {**dims, "BATCH": made.batch}, _places(made))
    for key, operand in (("LEFT", made.left), ("RIGHT", made.right)):
        lines.append(f"#define AF_{key}_AT(b) ({_batch_text(operand)})")
    return lines


def _places(made: MatmulPlan) -> list[Dim]:
    """The dims that say where the matrices of a batch begin."""
    found: list[Dim] = []
    for operand in (made.left, made.right):
        found += [operand.offset, *(dim for step in operand.batch for dim in step)]
    return found


def _batch_text(operand: Operand) -> str:
    """A C expression: the elements before matrix ``b`` of a batch."""
    terms = [f"(int64_t)({dim_text(operand.offset)})"]
    rest = "(b)"
    for at, (size, stride) in reversed(list(enumerate(operand.batch))):
        index = rest if at == 0 else f"({rest} % ({dim_text(size)}))"
        terms.append(f"{index} * ({dim_text(stride)})")
        rest = f"({rest} / ({dim_text(size)}))"
    return " + ".join(terms)


_COPIED = """
  for (int64_t k = 0; k < depth; ++k) {
    const float* const from = b + k * AF_RIGHT_ROW;
    float* const to = panel + k * AF_COLS;
    if (cols == AF_COLS && AF_RIGHT_COL == 1) memcpy(to, from, sizeof(float) * AF_COLS);
    else for (int64_t n = 0; n < AF_COLS; ++n) to[n] = n < cols ? from[n * AF_RIGHT_COL] : 0.0f;
  }"""

# Transposed in registers: element by element, the copy took 4 % of a matmul of 400 rows.
_TRANSPOSED = """
  af_turn(panel, AF_COLS, b, AF_RIGHT_COL, depth, cols);
  for (int64_t k = 0; k < depth; ++k)
    for (int64_t n = cols; n < AF_COLS; ++n) panel[k * AF_COLS + n] = 0.0f;"""


def remainders(tile_rows: int) -> str:
    """C that goes through the rows that fill no whole tile, in smaller ones."""
    return "\n".join(f"  if (left & {n}) {{ AF_TILE({n}); at += {n}; }}" for n in (16, 8, 4, 2, 1) if n < tile_rows)


# C after the sums of a tile: it adds the result of earlier blocks of the depth, or the bias, and writes. A row of the
# result has AF_N elements.
STORE = """  if (cols == AF_COLS) {
#pragma GCC unroll 32
    for (int i = 0; i < rows; ++i)
#pragma GCC unroll 8
      for (int j = 0; j < AF_VECTORS; ++j) {
        af_vec* const to = (af_vec*)(c + i * AF_N + j * AF_WIDTH);
        if (!is_first) sum[i][j] += *to;
        else if (bias != NULL) sum[i][j] += *(const af_vec*)(bias + j * AF_WIDTH);
        *to = sum[i][j];
      }
    return;
  }
  float edge[AF_ROWS][AF_COLS];
#pragma GCC unroll 32
  for (int i = 0; i < rows; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < AF_VECTORS; ++j) *(af_vec*)&edge[i][j * AF_WIDTH] = sum[i][j];
  for (int i = 0; i < rows; ++i)
    for (int64_t n = 0; n < cols; ++n)
      c[i * AF_N + n] = edge[i][n] + (!is_first ? c[i * AF_N + n] : bias != NULL ? bias[n] : 0.0f);
"""

# C that divides the rows of a matmul among threads: `parts` of `rows` each, for every panel of AF_COLS columns.
SHARE = """  if (threads < 1 || AF_BATCH * m * n * k < AF_SERIAL_BELOW) threads = 1;
  /* Few rows a task, where threads would wait for each other else; not more than fit the caches. */
  int64_t parts = (AF_TASKS * threads + AF_BATCH * panels - 1) / (AF_BATCH * panels);
  if (threads == 1) parts = 1;
  if (parts < (m + AF_MOST_ROWS - 1) / AF_MOST_ROWS) parts = (m + AF_MOST_ROWS - 1) / AF_MOST_ROWS;
  int64_t rows = (m + parts - 1) / parts;
  rows = (rows + AF_ROWS - 1) / AF_ROWS * AF_ROWS;
  parts = (m + rows - 1) / rows;
"""

_TEXT = (
    "/* @HEADER@ */\n"
    + INCLUDES
    + """
@SIZES@
enum { AF_ROWS = @ROWS@, AF_VECTORS = @VECTORS@, AF_WIDTH = @WIDTH@, AF_COLS = AF_VECTORS * AF_WIDTH };
enum { AF_DEPTH = 192, AF_MOST_ROWS = 512, AF_TASKS = 4, AF_SERIAL_BELOW = 1 << 19 };
"""
    + TURN
    + """
/* Sums of `rows` by AF_COLS, whose columns from `cols` on do not exist; `row` floats from one row of b to the next. */
static inline __attribute__((always_inline)) void af_tile(
    const int64_t* const sizes, const int rows, const float* restrict const a, const float* restrict const b,
    const int64_t row, const int64_t depth, float* restrict const c, const float* const bias, const int is_first,
    const int64_t cols) {
  (void)sizes;
  af_vec sum[AF_ROWS][AF_VECTORS];
#pragma GCC unroll 16
  for (int i = 0; i < rows; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < AF_VECTORS; ++j) sum[i][j] = (af_vec){0};
  for (int64_t k = 0; k < depth; ++k) {
    af_vec right[AF_VECTORS];
#pragma GCC unroll 8
    for (int j = 0; j < AF_VECTORS; ++j) right[j] = *(const af_vec*)(b + k * row + j * AF_WIDTH);
#pragma GCC unroll 16
    for (int i = 0; i < rows; ++i) {
      const float left = a[i * AF_LEFT_ROW + k * AF_LEFT_COL];
#pragma GCC unroll 8
      for (int j = 0; j < AF_VECTORS; ++j) sum[i][j] += left * right[j];
    }
  }
"""
    + STORE
    + """}

/* All rows of a task for one panel: whole tiles, then smaller ones. */
#define AF_TILE(n) af_tile(sizes, n, a + at * AF_LEFT_ROW, b, row, depth, c + at * AF_N, bias, is_first, cols)
static inline __attribute__((always_inline)) void af_rows(
    const int64_t* const sizes, const int64_t rows, const float* const a, const float* const b, const int64_t row,
    const int64_t depth, float* const c, const float* const bias, const int is_first, const int64_t cols) {
  int64_t at = 0;
  for (; at + AF_ROWS <= rows; at += AF_ROWS) AF_TILE(AF_ROWS);
  const int64_t left = rows - at;
@REMAINDERS@
  (void)left;
}

static __attribute__((noinline)) void af_panel_rows(
    const int64_t* const sizes, const int64_t rows, const float* const a, const float* const b, const int64_t depth,
    float* const c, const float* const bias, const int is_first, const int64_t cols) {
  af_rows(sizes, rows, a, b, AF_COLS, depth, c, bias, is_first, cols);
}

#if !@IN_PANELS@
static __attribute__((noinline)) void af_plain_rows(
    const int64_t* const sizes, const int64_t rows, const float* const a, const float* const b, const int64_t depth,
    float* const c, const float* const bias, const int is_first) {
  af_rows(sizes, rows, a, b, AF_RIGHT_ROW, depth, c, bias, is_first, AF_COLS);
}
#endif

static void af_copy(
    const int64_t* const sizes, const float* const b, float* restrict const panel, const int64_t depth,
    const int64_t cols) {
  (void)sizes;@COPY@
}

static int @NAME@(const int64_t* const sizes, void** const ptrs) {
  const float* const left = ptrs[@LEFT@];
  const float* const right = ptrs[@RIGHT@];
  const float* const biases = @BIAS@;
  float* const out = ptrs[@OUT@];
  int64_t threads = @THREADS@;
  const int64_t m = AF_M, n = AF_N, k = AF_K, panels = (n + AF_COLS - 1) / AF_COLS;
  if (m == 0 || n == 0 || AF_BATCH == 0) return 0;
"""
    + SHARE
    + """  const int64_t blocks = k > 0 ? (k + AF_DEPTH - 1) / AF_DEPTH : 1, depth = (k + blocks - 1) / blocks;
  const int64_t tasks = AF_BATCH * parts * panels;
#ifdef _OPENMP
#pragma omp parallel for num_threads((int)threads) schedule(dynamic) if (threads > 1)
#endif
  for (int64_t task = 0; task < tasks; ++task) {
    const int64_t j = task % panels, i = task / panels % parts, matrix = task / panels / parts;
    const int64_t first = i * rows, count = m - first < rows ? m - first : rows;
    const int64_t cols = n - j * AF_COLS < AF_COLS ? n - j * AF_COLS : AF_COLS;
    const float* const bias = biases == NULL ? NULL : biases + j * AF_COLS;
    float* const c = out + (matrix * m + first) * AF_N + j * AF_COLS;
    float panel[AF_DEPTH * AF_COLS] __attribute__((aligned(64)));
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t from = block * depth, deep = k - from < depth ? k - from : depth;
      const float* const a = left + AF_LEFT_AT(matrix) + first * AF_LEFT_ROW + from * AF_LEFT_COL;
      const float* const b = right + AF_RIGHT_AT(matrix) + from * AF_RIGHT_ROW + j * AF_COLS * AF_RIGHT_COL;
#if !@IN_PANELS@
      if (cols == AF_COLS) {
        af_plain_rows(sizes, count, a, b, deep, c, bias, block == 0);
        continue;
      }
#endif
      af_copy(sizes, b, panel, deep, cols);
      af_panel_rows(sizes, count, a, panel, deep, c, bias, block == 0, cols);
    }
  }
  return 0;
}
"""
)

TEMPLATE = Template(MATMUL, plan_c_matmul, c_matmul_knobs, print_c_matmul, c_matmul_flops)
