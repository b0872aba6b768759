"""A 2-D convolution in C: a matmul whose rows are read directly from the NHWC input, tap by tap.

In: a `NodeForm` that is one float32 convolution of channels-last tensors, and a configuration. Out: C text with the
entry of every generated kernel, or LoweringError with a reason code. Guarantee: each element is a sum of sums over some
200 products, each in order, whatever the number of threads. A call leaves the work to eager where taps may be outside
of the input and a weight is not finite, because libraries differ in whether they multiply such weights with zeros. No
element outside of the operands is read.

Why: a library's convolution has a fixed cost of 40 us per call (oneDNN through torch 2.13), as much as a small
convolution takes; with few channels its tiles are half empty.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from autofuse.codegen.c.knobs import cpu_vector_bits
from autofuse.codegen.c.printer import INCLUDES, CSource
from autofuse.codegen.c.register_transpose import TURN
from autofuse.codegen.c.templates.common import (
    bias_of,
    bias_text,
    fill,
    header,
    pointer_of,
    size_macros,
    spec_of,
    tile_of,
)
from autofuse.codegen.c.templates.matmul import SHARE, STORE, TILES, remainders
from autofuse.codegen.c.templates.window import Window, last_strides, window_of
from autofuse.codegen.knobs import Knob, Sizes, default_config
from autofuse.codegen.templates import CONVOLUTION as NAME
from autofuse.codegen.templates import Template
from autofuse.errors import LoweringError
from autofuse.ir.operation import NodeForm, ValueRef
from autofuse.ir.optable import CONVOLUTION
from autofuse.ir.records import Config
from autofuse.ir.shape import Dim, contiguous_strides

DEEPEST = 224  # products of a sum before it is added to the result: a panel of them stays in the nearest cache
MOST_TAPS = 512
# Tiles of one vector, for few channels; the others are those of matmuls.
NARROW: dict[int, tuple[str, ...]] = {
    512: ("28x1x512", "14x1x512", "14x1x256"),
    256: ("12x1x256", "12x1x128"),
    128: ("12x1x128",),
}
MIDDLE: dict[int, tuple[str, ...]] = {512: ("9x3x512",), 256: (), 128: ()}  # three vectors


@dataclass(frozen=True)
class Convolution:
    """One convolution as a node: numbers of its pointers, where its tensors lie, and its sizes."""

    pointers: tuple[int, int, int | None]  # image, weight, bias
    image: tuple[Dim, ...]  # [N, C, H, W]
    steps: tuple[Dim, ...]  # elements from one image to the next, from row to row, from column to column
    result: tuple[Dim, ...]  # [N, C, H, W]
    window: Window
    is_weight_last: bool  # the channels of a tap are contiguous, not the taps of a channel

    @property
    def channels(self) -> tuple[int, int]:
        """Channels of the images, and of the results."""
        return int(self.image[1]), int(self.result[1])

    @property
    def is_even(self) -> bool:
        """Whether images are dense and pixel n of the results is made from pixel n of the images alone."""
        _, channels, height, width = self.image
        return self.window.is_point and self.steps == (height * width * channels, width * channels, channels)


@functools.lru_cache(maxsize=256)
def plan_convolution(form: NodeForm) -> Convolution:
    """The convolution of a node. Raises LoweringError where it has none, or one that only a library can run."""
    op = form.operations[0]
    if len(form.operations) != 1 or op.target != CONVOLUTION or form.outputs != (ValueRef(op.name),):
        raise LoweringError("anchor", f"expected one convolution and nothing else, found {len(form.operations)}")
    image, weight, result = spec_of(form, op.args[0]), spec_of(form, op.args[1]), op.outputs[0]
    window = window_of(op, weight, (image, weight, result), 3)
    if window.taps > MOST_TAPS:
        raise LoweringError("window", f"expected windows of at most {MOST_TAPS} elements, found {window.size}")
    if image.strides[1] != 1 and weight.shape[1] != 1:
        raise LoweringError("layout", f"expected the channels of a pixel side by side, found steps {image.strides}")
    if tuple(result.strides) != last_strides(result.shape.dims):
        raise LoweringError("strides", f"expected a result with its channels last, found {result.strides}")
    if tuple(weight.strides) not in (contiguous_strides(weight.shape.dims), last_strides(weight.shape.dims)):
        raise LoweringError("weight", f"expected a dense weight, found {weight.strides}")
    bias = None if op.args[2] is None else bias_of(form, op.args[2], weight.shape[0])
    return Convolution(
        (pointer_of(form, op.args[0]), pointer_of(form, op.args[1]), bias),
        tuple(image.shape),
        (image.strides[0], image.strides[2], image.strides[3]),
        tuple(result.shape),
        window,
        tuple(weight.strides) != contiguous_strides(weight.shape.dims),
    )


# ---- knobs ------------------------------------------------------------------------------------------


def convolution_knobs(form: NodeForm, *_sizes: Sizes | None) -> tuple[Knob, ...]:
    """The knobs: the tile, from those whose width suits the number of the result's channels."""
    return (tile_knob(plan_convolution(form).channels[1]),)


def tile_knob(cols: int) -> Knob:
    """The tiles for rows of so many channels."""
    bits = cpu_vector_bits()[-1]
    lanes = bits // 32
    tiles = NARROW[bits] if cols <= lanes else TILES[bits] if cols <= 2 * lanes else (*MIDDLE[bits], *TILES[bits])
    if cols > 2 * lanes and cols % (3 * lanes):  # three vectors waste as much as two, or more
        tiles = TILES[bits]
    return Knob("tile", tiles, tiles[0], "rows, vectors and bits of the sums that stay in registers")


# ---- text -------------------------------------------------------------------------------------------


def print_convolution(form: NodeForm, config: Config, constants: Mapping[str, int] | None = None) -> CSource:
    """The C text of a convolution. Raises LoweringError where a size has no exact C form."""
    made, known = plan_convolution(form), constants or {}
    tile_rows, vectors, bits = tile_of((*default_config(convolution_knobs(form)), *config))
    channels, cols = made.channels
    taps = made.window.taps
    blocks = -(-channels * taps // DEEPEST)
    block = -(-channels // blocks)
    image, weight, bias = made.pointers
    text = {
        "HEADER": header(
            f"{'x'.join(map(str, made.image))} by "
            f"{'x'.join(map(str, (cols, channels, *made.window.size)))}, {made.window.moves}, channels last",
            config,
            known,
        ),
        "ROWS": str(tile_rows),
        "VECTORS": str(vectors),
        "WIDTH": str(bits // 32),
        "BLOCK": str(block),
        "TAPS": str(taps),
        "TAP_STEP": f"{block} * AF_COLS" if made.is_weight_last else "AF_COLS",
        "CHANNEL_STEP": "AF_COLS" if made.is_weight_last else f"{taps} * AF_COLS",
        "SIZES": "\n".join(_sizes(form, made, known)),
        "IMAGE": str(image),
        "WEIGHT": str(weight),
        "BIAS": bias_text(bias),
        "OUT": str(len(form.inputs)),
        "COPY": _TAPS_APART if made.is_weight_last else _TAPS_TOGETHER,
        "IS_EVEN": str(int(made.is_even)),
        "IS_PADDED": str(int(any(made.window.padding))),
        "REMAINDERS": remainders(tile_rows),
    }
    return fill("convolution", form, _TEXT, text)


def _sizes(form: NodeForm, made: Convolution, known: Mapping[str, int]) -> list[str]:
    """Sizes and strides as macros; those that do not vary are constants wherever they are used."""
    dims: dict[str, Dim] = {
        "IMAGES": made.result[0], "HEIGHT": made.image[2], "WIDTH_IN": made.image[3],
        "OUT_HEIGHT": made.result[2], "OUT_WIDTH": made.result[3], "C": made.channels[0], "N": made.channels[1],
        "IMAGE_STEP": made.steps[0], "ROW_STEP": made.steps[1], "COL_STEP": made.steps[2],
    }  # fmt: skip
    return size_macros(form, known, dims | made.window.dims)


# A panel is [channel][tap][column] or [tap][channel][column], in the order of the weights.
_TAPS_TOGETHER = """
  af_turn(panel, AF_COLS, weight + first * AF_TAPS, AF_C * AF_TAPS, channels * AF_TAPS, cols);"""

_TAPS_APART = """
  for (int64_t tap = 0; tap < AF_TAPS; ++tap)
    af_turn(panel + tap * AF_TAP_STEP, AF_COLS, weight + tap * AF_C + first, AF_C * AF_TAPS, channels, cols);"""

_TEXT = (
    "/* @HEADER@ */\n"
    + INCLUDES
    + """
@SIZES@
#define AF_TAPS (AF_WINDOW_Y * AF_WINDOW_X)
enum { AF_ROWS = @ROWS@, AF_VECTORS = @VECTORS@, AF_WIDTH = @WIDTH@, AF_COLS = AF_VECTORS * AF_WIDTH };
enum { AF_BLOCK = @BLOCK@, AF_TAP_STEP = @TAP_STEP@, AF_CHANNEL_STEP = @CHANNEL_STEP@ };
enum { AF_BATCH = 1, AF_MOST_ROWS = 512, AF_TASKS = 4, AF_SERIAL_BELOW = 1 << 19 };
"""
    + TURN
    + """
/* Where the windows of some pixels of the result begin: elements from the first pixel of all, row and column. */
typedef struct {
  int64_t from[AF_MOST_ROWS + AF_ROWS], y[AF_MOST_ROWS + AF_ROWS], x[AF_MOST_ROWS + AF_ROWS];
} af_pixels;

static const float af_zeros[AF_BLOCK];  /* a pixel outside of the image */

static inline __attribute__((always_inline)) void af_sum(
    const int rows, const float* const* const at, const float* const b, const int64_t channels,
    af_vec sum[AF_ROWS][AF_VECTORS]) {
  for (int64_t k = 0; k < channels; ++k) {
    af_vec right[AF_VECTORS];
#pragma GCC unroll 8
    for (int j = 0; j < AF_VECTORS; ++j) right[j] = *(const af_vec*)(b + k * AF_CHANNEL_STEP + j * AF_WIDTH);
#pragma GCC unroll 32
    for (int i = 0; i < rows; ++i) {
#if @IS_EVEN@
      const float left = at[0][i * AF_C + k];
#else
      const float left = at[i][k];
#endif
#pragma GCC unroll 8
      for (int j = 0; j < AF_VECTORS; ++j) sum[i][j] += left * right[j];
    }
  }
}

/* `rows` pixels by AF_COLS, whose columns from `cols` on do not exist, over `channels` channels. */
static inline __attribute__((always_inline)) void af_tile(
    const int64_t* const sizes, const int rows, const float* restrict const image, const af_pixels* const pixels,
    const int64_t first, const float* restrict const panel, const int64_t channels, float* restrict const c,
    const float* const bias, const int is_first, const int64_t cols) {
  (void)sizes;
  af_vec sum[AF_ROWS][AF_VECTORS];
#pragma GCC unroll 32
  for (int i = 0; i < rows; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < AF_VECTORS; ++j) sum[i][j] = (af_vec){0};
  for (int64_t ty = 0; ty < AF_WINDOW_Y; ++ty)
    for (int64_t tx = 0; tx < AF_WINDOW_X; ++tx) {
      const float* at[AF_ROWS];
      const int64_t dy = ty * AF_DILATION_Y, dx = tx * AF_DILATION_X;
      const int64_t step = dy * AF_ROW_STEP + dx * AF_COL_STEP;
      for (int i = 0; i < rows; ++i) {
        const int64_t from = pixels->from[first + i] + step;
#if @IS_PADDED@
        const uint64_t y = (uint64_t)(pixels->y[first + i] + dy), x = (uint64_t)(pixels->x[first + i] + dx);
        at[i] = (y < (uint64_t)AF_HEIGHT) & (x < (uint64_t)AF_WIDTH_IN) ? image + from : af_zeros;
#else
        at[i] = image + from;
#endif
      }
      af_sum(rows, at, panel + (ty * AF_WINDOW_X + tx) * AF_TAP_STEP, channels, sum);
    }
"""
    + STORE
    + """}

/* All pixels of a task for one panel: whole tiles, then smaller ones. */
#define AF_TILE(n) \\
  af_tile(sizes, n, image, pixels, at, panel, channels, c + at * AF_N, bias, is_first, cols)
static __attribute__((noinline)) void af_rows(
    const int64_t* const sizes, const int64_t rows, const float* const image, const af_pixels* const pixels,
    const float* const panel, const int64_t channels, float* const c, const float* const bias, const int is_first,
    const int64_t cols) {
  int64_t at = 0;
  for (; at + AF_ROWS <= rows; at += AF_ROWS) AF_TILE(AF_ROWS);
  const int64_t left = rows - at;
@REMAINDERS@
  (void)left;
}

static void af_find(const int64_t* const sizes, const int64_t first, const int64_t rows, af_pixels* const pixels) {
  (void)sizes;
  int64_t ox = first % AF_OUT_WIDTH, oy = first / AF_OUT_WIDTH % AF_OUT_HEIGHT;
  int64_t n = first / AF_OUT_WIDTH / AF_OUT_HEIGHT;
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t y = oy * AF_STRIDE_Y - AF_PADDING_Y, x = ox * AF_STRIDE_X - AF_PADDING_X;
    pixels->from[i] = n * AF_IMAGE_STEP + y * AF_ROW_STEP + x * AF_COL_STEP;
    pixels->y[i] = y;
    pixels->x[i] = x;
    if (++ox == AF_OUT_WIDTH) {
      ox = 0;
      if (++oy == AF_OUT_HEIGHT) oy = 0, ++n;
    }
  }
}

/* Whether all weights of the panel are finite. */
static int af_copy(
    const int64_t* const sizes, const float* const weight, float* restrict const panel, const int64_t first,
    const int64_t channels, const int64_t cols) {
  (void)sizes;
  memset(panel, 0, sizeof(float) * AF_BLOCK * AF_TAPS * AF_COLS);@COPY@
#if @IS_PADDED@
  af_vec odd = {0};
  for (int64_t i = 0; i < AF_BLOCK * AF_TAPS * AF_VECTORS; ++i) odd += *(const af_vec*)(panel + i * AF_WIDTH) * 0.0f;
  for (int i = 0; i < AF_WIDTH; ++i)
    if (odd[i] != 0.0f) return 0;
#endif
  return 1;
}

static int @NAME@(const int64_t* const sizes, void** const ptrs) {
  const float* const image = ptrs[@IMAGE@];
  const float* const weights = ptrs[@WEIGHT@];
  const float* const biases = @BIAS@;
  float* const out = ptrs[@OUT@];
  int64_t threads = @THREADS@;
  const int64_t m = AF_IMAGES * AF_OUT_HEIGHT * AF_OUT_WIDTH, n = AF_N, k = AF_C * AF_TAPS;
  const int64_t panels = (n + AF_COLS - 1) / AF_COLS;
  if (m == 0) return 0;
"""
    + SHARE
    + """  const int64_t tasks = parts * panels;
  int failed = 0;
#ifdef _OPENMP
#pragma omp parallel for num_threads((int)threads) schedule(dynamic) if (threads > 1)
#endif
  for (int64_t task = 0; task < tasks; ++task) {
    const int64_t j = task % panels, i = task / panels;
    const int64_t first = i * rows, count = m - first < rows ? m - first : rows;
    const int64_t cols = n - j * AF_COLS < AF_COLS ? n - j * AF_COLS : AF_COLS;
    const float* const bias = biases == NULL ? NULL : biases + j * AF_COLS;
    float panel[AF_BLOCK * @TAPS@ * AF_COLS] __attribute__((aligned(64)));
    af_pixels pixels;
    af_find(sizes, first, count, &pixels);
    for (int64_t from = 0; from < AF_C; from += AF_BLOCK) {
      const int64_t channels = AF_C - from < AF_BLOCK ? AF_C - from : AF_BLOCK;
      if (!af_copy(sizes, weights + j * AF_COLS * AF_C * AF_TAPS, panel, from, channels, cols)) {
#ifdef _OPENMP
#pragma omp atomic write
#endif
        failed = -3;
      }
      af_rows(sizes, count, image + from, &pixels, panel, channels, out + first * AF_N + j * AF_COLS, bias, from == 0,
              cols);
    }
  }
  return failed;
}
"""
)

TEMPLATE = Template(NAME, plan_convolution, convolution_knobs, print_convolution)
