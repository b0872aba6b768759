"""Attention in C, forward and backward apart, with the operands and results of torch's flash kernels for CPUs.

In: a `NodeForm` that is one call of such a kernel in float32, and a configuration. Out: C text with the entry of every
generated kernel, or LoweringError with a reason code. Guarantee: a call leaves the work to eager where a result is not
finite (torch's exponential loses NaN, 2.13), where causal rows end before the keys do (torch multiplies zeros with the
masked values, NaN included), and where there is no work. No element outside of the operands is read.

Why: torch's kernels multiply blocks with MKL, whose calls have a high fixed cost for blocks of some 60 rows: 40 to 110
GFLOP/s, where register tiles reach twice that (EPYC, 2 threads). Here a head's keys are packed into panels once; then
each block of rows computes its scores, probabilities and results in the caches.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autofuse.codegen.c.knobs import cpu_vector_bits
from autofuse.codegen.c.math import INLINE_MATH
from autofuse.codegen.c.printer import INCLUDES, CSource
from autofuse.codegen.c.register_transpose import TURN
from autofuse.codegen.c.templates.common import fill, pointer_of, size_macros, spec_of
from autofuse.codegen.knobs import Knob, Sizes
from autofuse.codegen.templates import ATTENTION, Template
from autofuse.errors import LoweringError
from autofuse.ir.operation import NodeForm, Operation, TensorSpec
from autofuse.ir.optable import ATTENTION_BACKWARD, TORCH_ATTENTIONS
from autofuse.ir.records import Config
from autofuse.ir.shape import Dim, as_dim

# Sums that stay in registers, by the bits of the widest vectors: (rows, vectors) of scores; for results, rows by
# vectors, of which a head's width is a multiple.
SCORES: dict[int, tuple[int, int]] = {512: (12, 2), 256: (6, 2), 128: (6, 2)}
HEADS: dict[int, dict[int, int]] = {
    512: {4: 6, 3: 8, 2: 12, 1: 14},
    256: {2: 6, 1: 10},
    128: {2: 6, 1: 10},
}
LARGEST_SCALE = 1e30  # far below the largest float32
BLOCKS = (48, 24, 96)  # rows of queries whose scores are made together


@dataclass(frozen=True)
class Attention:
    """One call as a node: its sizes, and where its tensors lie."""

    is_backward: bool
    sizes: tuple[Dim, ...]  # batches, heads, queries, keys
    width: int  # of a head
    tensors: tuple[tuple[str, int, tuple[Dim, ...]], ...]  # name in C, number of the pointer, steps [B, H, T]
    mask: tuple[int, tuple[Dim, ...]] | None  # number of the pointer, steps [B, H, T, S]
    is_causal: bool
    scale: float


@functools.lru_cache(maxsize=256)
def plan_attention(form: NodeForm) -> Attention:
    """The attention that a node is. Raises LoweringError where it is none, or one that torch has to do."""
    op = form.operations[0]
    if len(form.operations) != 1 or op.target not in TORCH_ATTENTIONS:
        raise LoweringError(
            "anchor", f"expected one attention and nothing else, found {len(form.operations)} operations"
        )
    first, rest = TORCH_ATTENTIONS[op.target]
    is_backward = op.target == ATTENTION_BACKWARD
    query, key, value = (spec_of(form, ref) for ref in op.args[first : first + 3])
    (batches, heads, queries, width), keys = query.shape, key.shape[2]
    if op.arg(rest):
        raise LoweringError("dropout", f"expected no dropout, found {op.arg(rest)}")
    if {s.dtype for s in (query, key, value)} != {"float32"}:
        raise LoweringError("dtype", f"expected float32, found {query.dtype}, {key.dtype}, {value.dtype}")
    if tuple(key.shape) != (batches, heads, keys, width) or tuple(value.shape) != tuple(key.shape):
        raise LoweringError("shape", f"expected heads of one width and number, found {query.shape}, {key.shape}")
    lanes = cpu_vector_bits()[-1] // 32
    if not isinstance(width, int) or width % lanes or not width:
        raise LoweringError("width", f"expected heads as wide as a multiple of {lanes} elements, found {width}")
    is_causal = bool(op.arg(rest + 1))
    if is_causal and isinstance(queries, int) and isinstance(keys, int) and queries < keys:
        raise LoweringError("causal", f"expected no more keys than causal rows, found {keys} and {queries}")
    outputs = {ref.index: n for n, ref in enumerate(form.outputs)}
    rows = [("q", op.args[first]), ("k", op.args[first + 1]), ("v", op.args[first + 2])]
    results = ["dq", "dk", "dv"] if is_backward else ["out", "sums"]
    if is_backward:
        rows += [("g", op.args[0]), ("out", op.args[4]), ("sums", op.args[5])]
    if any(n not in outputs for n in range(3 if is_backward else 1)):
        raise LoweringError("outputs", "expected results that are all read")
    tensors = [(name, pointer_of(form, ref), _steps(name, spec_of(form, ref))) for name, ref in rows]
    tensors += [
        (name, len(form.inputs) + outputs[n], _steps(name, op.outputs[n]))
        for n, name in enumerate(results)
        if n in outputs
    ]
    return Attention(
        is_backward,
        (batches, heads, queries, keys),
        width,
        tuple(tensors),
        _mask(form, op, (batches, heads, queries, keys)),
        is_causal,
        _scale(op.kwarg("scale", None), width),
    )


def _scale(scale: object, width: int) -> float:
    """The scale of scores, 1 / sqrt(width) for None.

    Raises LoweringError where it is not positive, since torch hides causal scores before it scales them, which then
    gives NaN; and where it is too large.
    """
    if scale is None:
        return 1.0 / math.sqrt(width)
    if not isinstance(scale, int | float) or not 0.0 < scale < LARGEST_SCALE:
        raise LoweringError("scale", f"expected a number above 0 as scale, found {scale}")
    return float(scale)


def _steps(name: str, spec: TensorSpec) -> tuple[Dim, ...]:
    if spec.dtype != "float32" or (name != "sums" and spec.strides[-1] != 1):
        raise LoweringError("strides", f"expected float32 whose last dim is dense, found {spec.dtype} {spec.strides}")
    return tuple(spec.strides)[:3]


def _mask(form: NodeForm, op: Operation, sizes: Sequence[Dim]) -> tuple[int, tuple[Dim, ...]] | None:
    ref = op.kwarg("attn_mask", None)
    if ref is None:
        return None
    spec = spec_of(form, ref)
    if spec.dtype != "float32" or len(spec.shape) not in (2, 4):
        raise LoweringError("mask", f"expected a mask of float32 with 2 or 4 dims, found {spec.dtype} {spec.shape}")
    shape, strides = [*[1] * (4 - len(spec.shape)), *spec.shape], [*[0] * (4 - len(spec.shape)), *spec.strides]
    if any(found not in (1, wanted) for found, wanted in zip(shape, sizes, strict=True)):
        raise LoweringError("mask", f"expected a mask of {list(sizes)}, found {shape}")
    steps = tuple(as_dim(0 if size == 1 else step) for size, step in zip(shape, strides, strict=True))
    return pointer_of(form, ref), steps


# ---- knobs ------------------------------------------------------------------------------------------


def attention_knobs(form: NodeForm, *_sizes: Sizes | None) -> tuple[Knob, ...]:
    """The knobs: how many rows a block has."""
    plan_attention(form)
    return (Knob("rows", BLOCKS, BLOCKS[0], "queries whose scores are made together"),)


# ---- text -------------------------------------------------------------------------------------------


def print_attention(form: NodeForm, config: Config, constants: Mapping[str, int] | None = None) -> CSource:
    """The C text of an attention. Raises LoweringError where a size has no exact C form."""
    made, known = plan_attention(form), constants or {}
    bits = cpu_vector_bits()[-1]
    lanes = bits // 32
    vectors = next(n for n in HEADS[bits] if made.width // lanes % n == 0)
    text = {
        "BODY": _BACKWARD if made.is_backward else _FORWARD,
        "HEADER": " ".join(
            [
                "gradients of attention" if made.is_backward else "attention",
                "x".join(map(str, (*made.sizes, made.width))),
                *(f"{k}={v}" for k, v in (*config, *known.items())),
            ]
        ),
        "SIZES": "\n".join(_sizes(form, made, known)),
        "WIDTH": str(lanes),
        "HEAD": str(made.width),
        "ROWS": str(dict(config).get("rows", BLOCKS[0])),
        "SCORE_ROWS": str(SCORES[bits][0]),
        "SCORE_VECTORS": str(SCORES[bits][1]),
        "HEAD_ROWS": str(HEADS[bits][vectors]),
        "HEAD_VECTORS": str(vectors),
        "CAUSAL": str(int(made.is_causal)),
        "MASKED": str(int(made.mask is not None)),
        "SCALE": f"{made.scale!r}f",
        "TENSORS": "\n".join(f"  float* const {name} = ptrs[{number}];" for name, number, _ in made.tensors)
        + ("" if made.mask is None else f"\n  const float* const mask = ptrs[{made.mask[0]}];"),
        "MATH": INLINE_MATH["af_exp_f32"] + INLINE_MATH["af_exp_nonpositive_f32"],
        "KEEP": "sums[AF_AT(sums) + (r + i) * AF_sums_T] = logarithm;"
        if any(name == "sums" for name, *_ in made.tensors)
        else "",
    }
    return fill("attention", form, _TEXT, text)


def _sizes(form: NodeForm, made: Attention, known: Mapping[str, int]) -> list[str]:
    """Sizes and strides as macros; those that do not vary are constants wherever they are used."""
    dims: dict[str, Dim] = dict(zip(("BATCHES", "HEADS", "QUERIES", "KEYS"), made.sizes, strict=True))
    for name, _, steps in made.tensors:
        dims |= {f"{name}_{dim}": step for dim, step in zip("BHT", steps, strict=True)}
    if made.mask is not None:
        dims |= {f"mask_{dim}": step for dim, step in zip("BHTS", made.mask[1], strict=True)}
    return size_macros(form, known, dims)


_TEXT = (
    "/* @HEADER@ */\n"
    + INCLUDES
    + """
@SIZES@
enum { AF_WIDTH = @WIDTH@, AF_HEAD = @HEAD@, AF_ROWS = @ROWS@, AF_CAUSAL = @CAUSAL@, AF_MASKED = @MASKED@ };
enum { AF_SCORE_ROWS = @SCORE_ROWS@, AF_SCORE_VECTORS = @SCORE_VECTORS@, AF_COLS = AF_SCORE_VECTORS * AF_WIDTH };
enum { AF_HEAD_ROWS = @HEAD_ROWS@, AF_HEAD_VECTORS = @HEAD_VECTORS@, AF_MOST_VECTORS = 4, AF_TASKS = 4 };
enum { AF_SERIAL_BELOW = 1 << 16, AF_EAGERS = -3, AF_DEPTH = 256 };
static const float af_scale = @SCALE@;
"""
    + TURN
    + """@MATH@
/* Sums of `rows` by `vectors` of a product: a lies in steps of a_row and a_col, the rows of b are dense. */
static inline __attribute__((always_inline)) void af_tile(
    const int rows, const int vectors, const float* const a, const int64_t a_row, const int64_t a_col,
    const float* const b, const int64_t b_row, const int64_t depth, float* const c, const int64_t c_row,
    const int adds) {
  af_vec sum[16][AF_MOST_VECTORS];
#pragma GCC unroll 16
  for (int i = 0; i < rows; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < vectors; ++j) sum[i][j] = (af_vec){0};
  for (int64_t k = 0; k < depth; ++k) {
    af_vec right[AF_MOST_VECTORS];
#pragma GCC unroll 4
    for (int j = 0; j < vectors; ++j) right[j] = *(const af_vec*)(b + k * b_row + j * AF_WIDTH);
#pragma GCC unroll 16
    for (int i = 0; i < rows; ++i) {
      const float left = a[i * a_row + k * a_col];
#pragma GCC unroll 4
      for (int j = 0; j < vectors; ++j) sum[i][j] += left * right[j];
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < rows; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < vectors; ++j) {
      af_vec* const to = (af_vec*)(c + i * c_row + j * AF_WIDTH);
      if (adds) sum[i][j] += *to;
      *to = sum[i][j];
    }
}

/* All rows of a product for one panel of b: whole tiles, then smaller ones. */
#define AF_TILE(n, v) af_tile(n, v, a + at * a_row, a_row, a_col, b, b_row, depth, c + at * c_row, c_row, adds)
#define AF_ALL_ROWS(n, v) \\
  int64_t at = 0; \\
  for (; at + n <= rows; at += n) AF_TILE(n, v); \\
  const int64_t left = rows - at; \\
  if (left & 8) { AF_TILE(8, v); at += 8; } \\
  if (left & 4) { AF_TILE(4, v); at += 4; } \\
  if (left & 2) { AF_TILE(2, v); at += 2; } \\
  if (left & 1) AF_TILE(1, v);

static __attribute__((noinline)) void af_score_rows(
    const int64_t rows, const float* const a, const int64_t a_row, const float* const b, float* const c,
    const int64_t c_row) {
  const int64_t a_col = 1, b_row = AF_COLS, depth = AF_HEAD;
  const int adds = 0;
  AF_ALL_ROWS(AF_SCORE_ROWS, AF_SCORE_VECTORS)
}

static __attribute__((noinline)) void af_head_rows(
    const int64_t rows, const float* const a, const int64_t a_row, const int64_t a_col, const float* const b,
    const int64_t b_row, const int64_t depth, float* const c, const int64_t c_row, const int adds) {
  AF_ALL_ROWS(AF_HEAD_ROWS, AF_HEAD_VECTORS)
}

/* Scores of some rows with the first keys. */
static void af_scores(
    const int64_t rows, const int64_t keys, const float* const a, const int64_t a_row, const float* const panels,
    float* const c, const int64_t wide) {
  for (int64_t j = 0; j < keys; j += AF_COLS) af_score_rows(rows, a, a_row, panels + j * AF_HEAD, c + j, wide);
}

/* Rows as wide as a head. One running sum of thousands would round too often: each takes AF_DEPTH terms. */
static void af_heads(
    const int64_t rows, const float* const a, const int64_t a_row, const int64_t a_col, const float* const b,
    const int64_t b_row, const int64_t depth, float* const c, const int64_t c_row, const int adds) {
  for (int64_t k = 0; k < depth; k += AF_DEPTH)
    for (int j = 0; j < AF_HEAD; j += AF_HEAD_VECTORS * AF_WIDTH)
      af_head_rows(rows, a + k * a_col, a_row, a_col, b + k * b_row + j, b_row,
                   depth - k < AF_DEPTH ? depth - k : AF_DEPTH, c + j, c_row, adds || k > 0);
}

/* Whether some of a head's rows hold Inf or NaN. */
static int af_is_odd(const int64_t rows, const float* const x, const int64_t row) {
  int is_odd = 0;
  for (int64_t i = 0; i < rows; ++i) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < AF_HEAD; ++j) sum += 0.0f * x[i * row + j];
    is_odd |= sum != 0.0f;
  }
  return is_odd;
}

/* n rows turned into panels of AF_COLS columns, the last filled up with zeros. */
static void af_panels(float* const panels, const float* const x, const int64_t row, const int64_t n) {
  for (int64_t j = 0; j < n; j += AF_COLS) {
    float* const to = panels + j * AF_HEAD;
    const int64_t cols = n - j < AF_COLS ? n - j : AF_COLS;
    af_turn(to, AF_COLS, x + j * row, row, AF_HEAD, cols);
    for (int64_t k = 0; k < AF_HEAD; ++k)
      for (int64_t i = cols; i < AF_COLS; ++i) to[k * AF_COLS + i] = 0.0f;
  }
}

#define AF_AT(x) (batch * AF_##x##_B + head * AF_##x##_H)
#if @MASKED@
#define AF_MASK(j) + mask_row[(j) * AF_mask_S]
#else
#define AF_MASK(j)
#endif

static int @NAME@(const int64_t* const sizes, void** const ptrs) {
  (void)sizes;
@TENSORS@
  int64_t threads = @THREADS@;
  const int64_t matrices = AF_BATCHES * AF_HEADS;
  if (matrices * AF_QUERIES * AF_KEYS == 0 || (AF_CAUSAL && AF_QUERIES < AF_KEYS)) return AF_EAGERS;
  if (threads < 1 || matrices * AF_QUERIES * AF_KEYS * AF_HEAD < AF_SERIAL_BELOW) threads = 1;
  const int64_t wide = (AF_KEYS + AF_COLS - 1) / AF_COLS * AF_COLS;
  int has_failed = 0, is_odd = 0;
@BODY@
  return has_failed ? -1 : is_odd ? AF_EAGERS : 0;
}
"""
)

_FORWARD = """
  /* Few heads: their rows are shared out too, and each task turns the keys anew. */
  int64_t parts = (AF_TASKS * threads + matrices - 1) / matrices, most = (AF_QUERIES + AF_ROWS - 1) / AF_ROWS;
  if (threads == 1) parts = 1;
  if (parts > most) parts = most;
  const int64_t share = (most + parts - 1) / parts * AF_ROWS;
#ifdef _OPENMP
#pragma omp parallel num_threads((int)threads) reduction(|: has_failed, is_odd) if (threads > 1)
#endif
  {
    float* const panels = aligned_alloc(64, (size_t)AF_ALIGNED(sizeof(float) * wide * (AF_HEAD + AF_ROWS)));
    float* const scores = panels + wide * AF_HEAD;
    has_failed = panels == NULL;
#ifdef _OPENMP
#pragma omp for schedule(dynamic)
#endif
    for (int64_t task = 0; task < matrices * parts; ++task) {
      if (panels == NULL) continue;
      const int64_t head = task / parts % AF_HEADS, batch = task / parts / AF_HEADS, first = task % parts * share;
      const int64_t last = first + share < AF_QUERIES ? first + share : AF_QUERIES;
      const int64_t needed = AF_CAUSAL && last < AF_KEYS ? last : AF_KEYS;
      if (first >= last) continue;
      af_panels(panels, k + AF_AT(k), AF_k_T, needed);
      for (int64_t r = first; r < last; r += AF_ROWS) {
        const int64_t rows = last - r < AF_ROWS ? last - r : AF_ROWS;
        const int64_t keys = AF_CAUSAL && r + rows < AF_KEYS ? r + rows : AF_KEYS;
        af_scores(rows, keys, q + AF_AT(q) + r * AF_q_T, AF_q_T, panels, scores, wide);
        float* const to = out + AF_AT(out) + r * AF_out_T;
        for (int64_t i = 0; i < rows; ++i) {
          float* const row = scores + i * wide;
          const int64_t seen = AF_CAUSAL && r + i + 1 < keys ? r + i + 1 : keys;
#if @MASKED@
          const float* const mask_row = mask + AF_AT(mask) + (r + i) * AF_mask_T;
#endif
          float largest = -INFINITY, sum = 0.0f;
#pragma omp simd reduction(max : largest)
          for (int64_t j = 0; j < seen; ++j) {
            row[j] = row[j] * af_scale AF_MASK(j);
            largest = row[j] > largest ? row[j] : largest;
          }
          int64_t hidden = 0;
          for (int64_t j = 0; AF_MASKED && largest == -INFINITY && j < seen; ++j) hidden += row[j] == -INFINITY;
#pragma omp simd reduction(+ : sum)
          for (int64_t j = 0; j < seen; ++j) {
            row[j] = af_exp_nonpositive_f32(row[j] - largest);
            sum += row[j];
          }
          const float factor = 1.0f / sum;
          float logarithm = largest + logf(sum);
          if (hidden == seen) {  /* a row without keys, which padding makes: zeros, as torch's */
            logarithm = 0.0f;
            memset(row, 0, sizeof(float) * seen);
          } else {
            is_odd |= !(logarithm > -INFINITY && logarithm < INFINITY);
            for (int64_t j = 0; j < seen; ++j) row[j] *= factor;
          }
          for (int64_t j = seen; j < keys; ++j) row[j] = 0.0f;
          @KEEP@
        }
        af_heads(rows, scores, wide, 1, v + AF_AT(v), AF_v_T, keys, to, AF_out_T, 0);
        is_odd |= af_is_odd(rows, to, AF_out_T);
      }
    }
    free(panels);
  }"""

_BACKWARD = """
#ifdef _OPENMP
#pragma omp parallel num_threads((int)threads) reduction(|: has_failed, is_odd) if (threads > 1)
#endif
  {
    float* const keys_turned = aligned_alloc(64, (size_t)AF_ALIGNED(sizeof(float) * wide * 2 * (AF_HEAD + AF_ROWS)));
    float* const values_turned = keys_turned + wide * AF_HEAD;
    float* const p = values_turned + wide * AF_HEAD;
    float* const d = p + wide * AF_ROWS;
    has_failed = keys_turned == NULL;
#ifdef _OPENMP
#pragma omp for schedule(dynamic)
#endif
    for (int64_t task = 0; task < matrices; ++task) {
      if (keys_turned == NULL) continue;
      const int64_t head = task % AF_HEADS, batch = task / AF_HEADS;
      af_panels(keys_turned, k + AF_AT(k), AF_k_T, AF_KEYS);
      af_panels(values_turned, v + AF_AT(v), AF_v_T, AF_KEYS);
      for (int64_t r = 0; r < AF_QUERIES; r += AF_ROWS) {
        const int64_t rows = AF_QUERIES - r < AF_ROWS ? AF_QUERIES - r : AF_ROWS;
        const int64_t keys = AF_CAUSAL && r + rows < AF_KEYS ? r + rows : AF_KEYS;
        const float* const gradients = g + AF_AT(g) + r * AF_g_T;
        const float* const results = out + AF_AT(out) + r * AF_out_T;
        const float* const queries = q + AF_AT(q) + r * AF_q_T;
        af_scores(rows, keys, queries, AF_q_T, keys_turned, p, wide);
        af_scores(rows, keys, gradients, AF_g_T, values_turned, d, wide);
        for (int64_t i = 0; i < rows; ++i) {
          float* const probabilities = p + i * wide;
          float* const slopes = d + i * wide;
          const int64_t seen = AF_CAUSAL && r + i + 1 < keys ? r + i + 1 : keys;
          const float logarithm = sums[AF_AT(sums) + (r + i) * AF_sums_T];
#if @MASKED@
          const float* const mask_row = mask + AF_AT(mask) + (r + i) * AF_mask_T;
#endif
          float mean = 0.0f, sum = 0.0f;
#pragma omp simd reduction(+ : mean)
          for (int64_t j = 0; j < AF_HEAD; ++j) mean += gradients[i * AF_g_T + j] * results[i * AF_out_T + j];
          /* Stored first, rounded as in the forward pass: of a row's only key the probability is 1. */
          for (int64_t j = 0; j < seen; ++j) probabilities[j] = probabilities[j] * af_scale AF_MASK(j);
#pragma omp simd reduction(+ : sum)
          for (int64_t j = 0; j < seen; ++j) {
            probabilities[j] = af_exp_f32(probabilities[j] - logarithm);
            slopes[j] = probabilities[j] * (slopes[j] - mean) * af_scale;
            sum += 0.0f * slopes[j];
          }
          is_odd |= sum != 0.0f || !(logarithm > -INFINITY && logarithm < INFINITY);
          for (int64_t j = seen; j < keys; ++j) probabilities[j] = slopes[j] = 0.0f;
        }
        float* const to_keys = dk + AF_AT(dk);
        float* const to_values = dv + AF_AT(dv);
        float* const to_queries = dq + AF_AT(dq) + r * AF_dq_T;
        af_heads(rows, d, wide, 1, k + AF_AT(k), AF_k_T, keys, to_queries, AF_dq_T, 0);
        af_heads(keys, d, 1, wide, queries, AF_q_T, rows, to_keys, AF_dk_T, r > 0);
        af_heads(keys, p, 1, wide, gradients, AF_g_T, rows, to_values, AF_dv_T, r > 0);
        /* Keys that the first block does not see are begun by those that do. */
        for (int64_t j = keys; r == 0 && j < AF_KEYS; ++j) {
          memset(to_keys + j * AF_dk_T, 0, sizeof(float) * AF_HEAD);
          memset(to_values + j * AF_dv_T, 0, sizeof(float) * AF_HEAD);
        }
        is_odd |= af_is_odd(rows, to_queries, AF_dq_T);
      }
      is_odd |= af_is_odd(AF_KEYS, dk + AF_AT(dk), AF_dk_T) | af_is_odd(AF_KEYS, dv + AF_AT(dv), AF_dv_T);
    }
    free(keys_turned);
  }"""

TEMPLATE = Template(ATTENTION, plan_attention, attention_knobs, print_attention)
