"""The gradients of a 2-D convolution in C: of its images, its weight and its bias, in one kernel.

In: a `NodeForm` that is one float32 ``convolution_backward``, with images row by row or channels last, and a
configuration. Out: C text with the entry of every generated kernel, or LoweringError with a reason code. Guarantee:
each element of a weight's gradient is a sum of sums over at most 256 pixels, each in order; one of an image's is a sum
over taps of sums over at most 224 channels, each in order; whatever the number of threads. A call leaves the work to
eager where a window may be outside of the image and a gradient or a weight is not finite, because libraries differ in
whether they multiply such numbers with zeros. Memory for copies is bounded: images are worked off in groups.

Why: see `convolution_pairs`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from autofuse.codegen.c.printer import CSource
from autofuse.codegen.c.templates.common import fill, header, pointer_of, spec_of, tile_of
from autofuse.codegen.c.templates.convolution import tile_knob
from autofuse.codegen.c.templates.convolution_pairs import PAIRS, is_last, keep_in_caches, remainder_tiles, sizes_text
from autofuse.codegen.c.templates.window import Window, window_of
from autofuse.codegen.knobs import Knob, Sizes, default_config
from autofuse.codegen.templates import CONVOLUTION_BACKWARD as NAME
from autofuse.codegen.templates import Template
from autofuse.errors import LoweringError
from autofuse.ir.operation import NodeForm
from autofuse.ir.optable import CONVOLUTION_BACKWARD
from autofuse.ir.records import Config
from autofuse.ir.shape import Dim

RESULTS = ("images", "weight", "bias")


@dataclass(frozen=True)
class ConvolutionBackward:
    """The gradients of one convolution as a node: numbers of its pointers, where its tensors lie, and its sizes."""

    operands: tuple[int, int, int]  # pointers of the gradient, the images and the weight
    results: Mapping[str, int]  # pointers, of those of `RESULTS` that are asked for
    is_last: Mapping[str, bool]  # by operand, and result: whether its channels are contiguous
    images: tuple[Dim, ...]  # [N, C, H, W]
    gradient: tuple[Dim, ...]  # [N, C, H, W]
    window: Window


@functools.lru_cache(maxsize=256)
def plan_convolution_backward(form: NodeForm) -> ConvolutionBackward:
    """The gradients of a node. Raises LoweringError where it has none, or those that only a library can run."""
    op = form.operations[0]
    if len(form.operations) != 1 or op.target != CONVOLUTION_BACKWARD or len(op.args) != 11:
        raise LoweringError("anchor", f"expected one convolution_backward and nothing else, found {op.target}")
    if not form.outputs or any(ref.name != op.name or ref.index not in range(3) for ref in form.outputs):
        raise LoweringError("anchor", f"expected gradients as results, found {form.outputs}")
    specs = {name: spec_of(form, op.args[n]) for n, name in enumerate(("gradient", "image", "weights"))}
    results = {RESULTS[ref.index]: len(form.inputs) + place for place, ref in enumerate(form.outputs)}
    specs |= {RESULTS[ref.index]: op.outputs[ref.index] for ref in form.outputs}
    window = window_of(op, specs["weights"], specs.values(), 4)
    keep_in_caches(window, specs["weights"].shape[0])
    return ConvolutionBackward(
        (pointer_of(form, op.args[0]), pointer_of(form, op.args[1]), pointer_of(form, op.args[2])),
        results,
        {name: is_last(name, spec) for name, spec in specs.items() if name != "bias"},
        tuple(specs["image"].shape),
        tuple(specs["gradient"].shape),
        window,
    )


def convolution_backward_knobs(form: NodeForm, *_sizes: Sizes | None) -> tuple[Knob, ...]:
    """The knobs: the tile, from those whose width suits the number of the images' channels."""
    return (tile_knob(int(plan_convolution_backward(form).images[1])),)


def print_convolution_backward(form: NodeForm, config: Config, constants: Mapping[str, int] | None = None) -> CSource:
    """The C text of the gradients. Raises LoweringError where a size has no exact C form."""
    made, known = plan_convolution_backward(form), constants or {}
    tile_rows, vectors, bits = tile_of((*default_config(convolution_backward_knobs(form)), *config))
    gradient, image, weight = made.operands
    text = {
        "HEADER": header(
            f"gradients of {', '.join(made.results)}: images {'x'.join(map(str, made.images))}, gradient "
            f"{'x'.join(map(str, made.gradient))}, window {made.window.size}, {made.window.moves}",
            config,
            known,
        ),
        "ROWS": str(tile_rows),
        "VECTORS": str(vectors),
        "WIDTH": str(bits // 32),
        "SIZES": sizes_text(form, known, made.images, made.gradient, made.window),
        "ROLES": _ROLES,
        "GRADIENT": str(gradient),
        "IMAGE": str(image),
        "WEIGHT": str(weight),
        "IS_EVEN": str(int(made.window.is_point)),
        "IS_CHECKED": str(int(not made.window.is_point)),
        "MADE_LAST": str(int(made.is_last.get("images", False))),
        "WEIGHT_TILES": remainder_tiles(tile_rows, "AF_WEIGHT_TILE"),
        "PIXEL_TILES": remainder_tiles(tile_rows, "AF_PIXEL_TILE"),
    }
    for name in RESULTS:
        text[f"HAS_{name.upper()}"] = str(int(name in made.results))
        text[f"TO_{name.upper()}"] = f"ptrs[{made.results[name]}]" if name in made.results else "NULL"
    for name in ("gradient", "image", "weights", "weight"):
        text[f"{name.upper()}_LAST"] = str(int(made.is_last.get(name, False)))
    return fill("convolution_backward", form, _TEXT, text)


_ROLES = """
#define AF_DEEP AF_N
#define AF_LANES AF_C
#define AF_PIXELS AF_IN
#define AF_READ out
#define AF_MADE in
#define AF_DEEP_STEP (AF_C * AF_TAPS)
#define AF_LANE_STEP AF_TAPS
"""

_TEXT = (
    "/* @HEADER@ */\n"
    + PAIRS
    + """
/* The channels of a panel, pixel by pixel. */
static void af_pack_image(
    const int64_t* const sizes, float* const to, const float* const from, const int64_t channels) {
  (void)sizes;
#if @IMAGE_LAST@
  for (int64_t p = 0; p < AF_IN; ++p) memcpy(to + p * AF_COLS, from + p * AF_C, 4 * channels);
#else
  af_turn(to, AF_COLS, from, AF_IN, AF_IN, channels);
#endif
  if (channels < AF_COLS)
    for (int64_t p = 0; p < AF_IN; ++p) memset(to + p * AF_COLS + channels, 0, 4 * (AF_COLS - channels));
}

/* sums[i][c] += the sum over the pairs of gradient[pixel][i] times image[pixel][c]. */
static inline __attribute__((always_inline)) void af_weight_tile(
    const int64_t* const sizes, const int rows, const af_pairs* const pairs, const float* restrict const gradient,
    const float* restrict const image, float* restrict const sums) {
  (void)sizes;
  af_vec sum[AF_ROWS][AF_VECTORS];
#pragma GCC unroll 32
  for (int i = 0; i < rows; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < AF_VECTORS; ++j) sum[i][j] = (af_vec){0};
  for (int64_t k = 0; k < pairs->count; ++k) {
    const float* const left = gradient + (int64_t)pairs->out[k] * AF_N;
    const float* const at = image + (int64_t)pairs->in[k] * AF_COLS;
    af_vec right[AF_VECTORS];
#pragma GCC unroll 8
    for (int j = 0; j < AF_VECTORS; ++j) right[j] = *(const af_vec*)(at + j * AF_WIDTH);
#pragma GCC unroll 32
    for (int i = 0; i < rows; ++i)
#pragma GCC unroll 8
      for (int j = 0; j < AF_VECTORS; ++j) sum[i][j] += left[i] * right[j];
  }
#pragma GCC unroll 32
  for (int i = 0; i < rows; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < AF_VECTORS; ++j) *(af_vec*)(sums + i * AF_COLS + j * AF_WIDTH) += sum[i][j];
}

#define AF_WEIGHT_TILE(n) af_weight_tile(sizes, n, pairs, gradient + at, image, sums + at * AF_COLS)
static __attribute__((noinline)) void af_weight_rows(
    const int64_t* const sizes, const int64_t rows, const af_pairs* const pairs, const float* const gradient,
    const float* const image, float* const sums) {
  int64_t at = 0;
  for (; at + AF_ROWS <= rows; at += AF_ROWS) AF_WEIGHT_TILE(AF_ROWS);
  const int64_t left = rows - at;
@WEIGHT_TILES@
  (void)left;
}

/* A vector of sums of channel n of the gradient, tap by tap, into the weight's gradient. */
static void af_unpack(
    const int64_t* const sizes, float* const weight, const float* const sums, const int64_t n, const int64_t channel,
    const int is_first) {
  (void)sizes;
  const int64_t left = AF_C - channel, count = left < 0 ? 0 : left < AF_WIDTH ? left : AF_WIDTH;
  for (int64_t tap = 0; tap < AF_TAPS; tap += @WEIGHT_LAST@ ? 1 : AF_WIDTH) {
    const float* const at = sums + tap * AF_TAP;
#if @WEIGHT_LAST@
    float* const to = weight + (n * AF_TAPS + tap) * AF_C + channel;
    for (int64_t k = 0; k < count; ++k) to[k] = is_first ? at[k] : to[k] + at[k];
#else
    const int64_t taps = AF_TAPS - tap < AF_WIDTH ? AF_TAPS - tap : AF_WIDTH;
    float* const to = weight + (n * AF_C + channel) * AF_TAPS + tap;
    if (taps * 4 <= AF_WIDTH) {
      for (int64_t k = 0; k < count; ++k)
        for (int64_t t = 0; t < taps; ++t)
          to[k * AF_TAPS + t] = is_first ? at[t * AF_TAP + k] : to[k * AF_TAPS + t] + at[t * AF_TAP + k];
      continue;
    }
    af_vec square[AF_WIDTH];
    for (int k = 0; k < AF_WIDTH; ++k) square[k] = k < taps ? *(const af_vec*)(at + k * AF_TAP) : (af_vec){0};
    af_turn_square(square);
    for (int64_t k = 0; k < count; ++k) {
      /* A whole vector is written where the next channels, which are written after it, take the rest of it. */
      if (is_first && AF_TAPS <= AF_WIDTH && k * AF_TAPS + AF_WIDTH <= count * AF_TAPS) {
        *(af_vec*)(to + k * AF_TAPS) = square[k];
        continue;
      }
      af_vec before = {0};
      if (!is_first) memcpy(&before, to + k * AF_TAPS, 4 * taps);
      before += square[k];
      memcpy(to + k * AF_TAPS, &before, 4 * taps);
    }
#endif
  }
}

/* What the threads share. Panels hold AF_COLS channels of the images each. */
typedef struct {
  const float *gradients, *images; /* of a group: [pixel][n], [panel][pixel][c] */
  int64_t group;                   /* images that there is memory for */
} af_copies;

/* The part of the weight's gradient that belongs to a panel and to `rows` channels of the gradient. `sums` is the
   memory of a thread: [tap][n][c]. */
static void af_weight_task(
    const int64_t* const sizes, const af_copies* const copies, float* const sums, const int64_t panel,
    const int64_t first, const int64_t rows, const int64_t images, float* const to, const int is_first) {
  const int64_t pixels = images * AF_OUT;
  const float* const image = copies->images + panel * copies->group * AF_IN * AF_COLS;
  for (int64_t tap = 0; tap < AF_TAPS; ++tap) memset(sums + tap * AF_TAP, 0, 4 * rows * AF_COLS);
  af_pairs pairs;
  for (int64_t from = 0; from < pixels; from += AF_LIST) {
    const int64_t count = pixels - from < AF_LIST ? pixels - from : AF_LIST;
    for (int64_t tap = 0; tap < AF_TAPS; ++tap) {
      af_find(sizes, from, count, tap / AF_WINDOW_X, tap % AF_WINDOW_X, &pairs);
      if (pairs.count)
        af_weight_rows(sizes, rows, &pairs, copies->gradients + first, image, sums + tap * AF_TAP);
    }
  }
  for (int64_t n = 0; n < rows; ++n)
    for (int64_t c = 0; c < AF_COLS; c += AF_WIDTH)
      af_unpack(sizes, to, sums + n * AF_COLS + c, first + n, panel * AF_COLS + c, is_first);
}

static int @NAME@(const int64_t* const sizes, void** const ptrs) {
  const float* const gradient = ptrs[@GRADIENT@];
  const float* const image = ptrs[@IMAGE@];
  const float* const weight = ptrs[@WEIGHT@];
  float *const to_images = @TO_IMAGES@, *const to_weight = @TO_WEIGHT@, *const to_bias = @TO_BIAS@;
  (void)image, (void)weight, (void)to_images, (void)to_weight, (void)to_bias;
  int64_t threads = @THREADS@;
  if (threads < 1 || AF_IMAGES * AF_OUT * AF_N * AF_C * AF_TAPS < AF_SERIAL_BELOW) threads = 1;

  const int64_t panels = (AF_C + AF_COLS - 1) / AF_COLS, image_floats = panels * AF_IN * AF_COLS;
  const int64_t each = (@GRADIENT_LAST@ ? 0 : AF_OUT * AF_N) + @HAS_WEIGHT@ * image_floats;
  int64_t group = AF_GROUP / (each + 1);
  if (group > AF_IMAGES) group = AF_IMAGES;
  if (group < 1) group = 1;
  if (group * (AF_OUT > AF_IN ? AF_OUT : AF_IN) > INT32_MAX) return -3;
  /* Parts of a task's panel: of the gradient's channels, and of the images. */
  int64_t parts = threads == 1 ? 1 : (AF_TASKS * threads + panels - 1) / panels;
  const int64_t rows = ((AF_N + parts - 1) / parts + AF_ROWS - 1) / AF_ROWS * AF_ROWS;
  if (parts > group) parts = group;
  const int64_t some = (group + parts - 1) / parts;

  const int64_t own = AF_ALIGNED(4 * (AF_TAPS * AF_TAP + @HAS_IMAGES@ * some * AF_IN * AF_COLS));
  const int64_t of_images = @HAS_WEIGHT@ * AF_ALIGNED(4 * group * image_floats);
  const int64_t of_gradients = @GRADIENT_LAST@ ? 0 : AF_ALIGNED(4 * group * AF_OUT * AF_N);
  char* const memory = malloc(threads * own + of_images + of_gradients + 8 * AF_N + 64);
  if (memory == NULL) return -1;
  char* const begin = (char*)(((uintptr_t)memory + 63) / 64 * 64);
  float* const images = (float*)(begin + threads * own);
  float* const gradients = (float*)(begin + threads * own + of_images);
  double* const biases = (double*)(begin + threads * own + of_images + of_gradients);
  for (int64_t n = 0; n < AF_N; ++n) biases[n] = 0.0;
  af_copies copies = {gradients, images, group};
  int failed = 0;
#if @HAS_WEIGHT@
  if (AF_IMAGES == 0) memset(to_weight, 0, 4 * AF_N * AF_C * AF_TAPS);
#endif

  for (int64_t first = 0; first < AF_IMAGES && !failed; first += group) {
    const int64_t count = AF_IMAGES - first < group ? AF_IMAGES - first : group;
    if (@GRADIENT_LAST@) copies.gradients = gradient + first * AF_OUT * AF_N;
    const int64_t both = 1 + @HAS_WEIGHT@ * panels;
#ifdef _OPENMP
#pragma omp parallel for num_threads((int)threads) schedule(static) if (threads > 1)
#endif
    for (int64_t task = 0; task < count * both; ++task) {
      const int64_t i = task / both, panel = task % both - 1;
      if (panel >= 0) {
        const int64_t channel = panel * AF_COLS, channels = AF_C - channel < AF_COLS ? AF_C - channel : AF_COLS;
        const float* const from = image + (first + i) * AF_C * AF_IN + channel * (@IMAGE_LAST@ ? 1 : AF_IN);
        af_pack_image(sizes, images + (panel * group + i) * AF_IN * AF_COLS, from, channels);
        continue;
      }
      const float* const from = gradient + (first + i) * AF_N * AF_OUT;
      if (!@GRADIENT_LAST@) af_turn(gradients + i * AF_OUT * AF_N, AF_N, from, AF_OUT, AF_OUT, AF_N);
      if (!@IS_EVEN@ && !af_is_finite(from, AF_N * AF_OUT)) {
#ifdef _OPENMP
#pragma omp atomic write
#endif
        failed = -3;
      }
    }
    if (failed) break;

    /* Parts of the weight's gradient, then of the images', then of the bias's. */
    const int64_t weight_tasks = @HAS_WEIGHT@ * panels * ((AF_N + rows - 1) / rows);
    const int64_t image_tasks = @HAS_IMAGES@ * panels * ((count + some - 1) / some);
    const int64_t tasks = weight_tasks + image_tasks + @HAS_BIAS@ * ((AF_N + 63) / 64);
#ifdef _OPENMP
#pragma omp parallel for num_threads((int)threads) schedule(dynamic) if (threads > 1)
#endif
    for (int64_t task = 0; task < tasks; ++task) {
      float* mine = (float*)begin;
#ifdef _OPENMP
      mine = (float*)(begin + omp_get_thread_num() * own);
#endif
      (void)mine;
#if @HAS_WEIGHT@
      if (task < weight_tasks) {
        const int64_t from = task / panels * rows, left = AF_N - from;
        af_weight_task(sizes, &copies, mine, task % panels, from, left < rows ? left : rows, count, to_weight,
                       first == 0);
        continue;
      }
#endif
#if @HAS_IMAGES@
      if (task < weight_tasks + image_tasks) {
        const int64_t at = task - weight_tasks, from = at / panels * some, left = count - from;
        if (af_pixel_task(sizes, copies.gradients, mine, weight, NULL, at % panels, from, left < some ? left : some,
                          to_images + first * AF_C * AF_IN)) {
#ifdef _OPENMP
#pragma omp atomic write
#endif
          failed = -3;
        }
        continue;
      }
#endif
      const int64_t from = (task - weight_tasks - image_tasks) * 64, end = from + 64 < AF_N ? from + 64 : AF_N;
      for (int64_t p = 0; p < count * AF_OUT; ++p)
        for (int64_t n = from; n < end; ++n) biases[n] += copies.gradients[p * AF_N + n];
    }
  }
#if @HAS_BIAS@
  for (int64_t n = 0; n < AF_N; ++n) to_bias[n] = (float)biases[n];
#endif
  free(memory);
  return failed;
}
"""
)

TEMPLATE = Template(NAME, plan_convolution_backward, convolution_backward_knobs, print_convolution_backward)
