"""Convolutions along lists of pairs of pixels: C that a convolution of row-by-row images and its gradients share.

For each tap of the window, a list says which pixel of the result was made from which pixel of the image. Along a list,
a convolution is a matmul of pixels and weights, whose rows are added to the results. So are the images' gradients, with
the two sides of a pair swapped; the weight's are a matmul of both sides. Taps outside of the image are in no list, so
they cost nothing: on an image of 2 x 2 pixels, a library's 3 x 3 convolution multiplies 36 pixels for every 16 that
there are.

Pixels are read with their channels side by side; where they lie row by row, they are turned once a call. Panels hold
AF_COLS lanes, the channels of what is made, side by side.
"""

from __future__ import annotations

from collections.abc import Mapping

from autofuse.codegen.c.printer import INCLUDES
from autofuse.codegen.c.register_transpose import TURN
from autofuse.codegen.c.templates.common import size_macros
from autofuse.codegen.c.templates.window import Window, last_strides
from autofuse.errors import LoweringError
from autofuse.ir.operation import NodeForm, TensorSpec
from autofuse.ir.shape import Dim, contiguous_strides

LARGEST_PANEL = 1 << 16  # taps times channels that are summed over: a thread's memory has as many rows of lanes


def is_last(name: str, spec: TensorSpec) -> bool:
    """Whether a tensor's channels lie side by side. Raises LoweringError where it is not dense."""
    if tuple(spec.strides) == tuple(contiguous_strides(spec.shape.dims)):
        return False
    if tuple(spec.strides) == last_strides(spec.shape.dims):
        return True
    raise LoweringError("layout", f"expected a dense {name}, row by row or channels last, found {spec.strides}")


def keep_in_caches(window: Window, channels: Dim) -> None:
    """Refuse a window whose panel of weights is too large for caches and for the memory of threads.

    ``channels``: those that are summed over. Raises LoweringError.
    """
    most = LARGEST_PANEL // int(channels)
    if window.taps > most:
        raise LoweringError(
            "window", f"expected windows of at most {most} elements for {channels} channels, found {window.size}"
        )


def sizes_text(
    form: NodeForm, known: Mapping[str, int], image: tuple[Dim, ...], result: tuple[Dim, ...], window: Window
) -> str:
    """Sizes as macros."""
    dims: dict[str, Dim] = {
        "IMAGES": image[0], "C": image[1], "HEIGHT": image[2], "WIDTH_IN": image[3],
        "N": result[1], "OUT_HEIGHT": result[2], "OUT_WIDTH": result[3],
    }  # fmt: skip
    return "\n".join(size_macros(form, known, dims | window.dims))


def remainder_tiles(tile_rows: int, tile: str) -> str:
    """C that goes through the rows that fill no whole tile, in smaller ones."""
    return "\n".join(f"  if (left & {n}) {{ {tile}({n}); at += {n}; }}" for n in (16, 8, 4, 2, 1) if n < tile_rows)


# Needs macros: AF_DEEP channels are summed over and AF_LANES are made, for AF_PIXELS pixels of an image; AF_READ and
# AF_MADE name the two sides of a pair; AF_DEEP_STEP and AF_LANE_STEP are floats between channels and lanes of a weight.
PAIRS = (
    INCLUDES
    + """
@SIZES@
#define AF_TAPS (AF_WINDOW_Y * AF_WINDOW_X)
#define AF_IN (AF_HEIGHT * AF_WIDTH_IN)       /* pixels of an image */
#define AF_OUT (AF_OUT_HEIGHT * AF_OUT_WIDTH) /* and of its result */
@ROLES@
enum { AF_ROWS = @ROWS@, AF_VECTORS = @VECTORS@, AF_WIDTH = @WIDTH@, AF_COLS = AF_VECTORS * AF_WIDTH };
/* From one tap to the next in a panel: no power of two, or all taps of a channel would share a place in the caches. */
#define AF_TAP (AF_DEEP * AF_COLS + AF_WIDTH)
enum { AF_LIST = 256, AF_DEPTH = 224, AF_TASKS = 2, AF_SERIAL_BELOW = 1 << 19, AF_GROUP = 1 << 21 };
"""
    + TURN
    + """
/* For one tap, which pixels of the result were made from which of the images. */
typedef struct {
  int64_t count;
  int32_t out[AF_LIST + 1], in[AF_LIST + 1];
} af_pairs;

static void af_find(
    const int64_t* const sizes, const int64_t first, const int64_t count, const int64_t ty, const int64_t tx,
    af_pairs* const pairs) {
  (void)sizes;
  int64_t ox = first % AF_OUT_WIDTH, oy = first / AF_OUT_WIDTH % AF_OUT_HEIGHT, image = first / AF_OUT * AF_IN;
  int64_t found = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t y = oy * AF_STRIDE_Y - AF_PADDING_Y + ty * AF_DILATION_Y;
    const int64_t x = ox * AF_STRIDE_X - AF_PADDING_X + tx * AF_DILATION_X;
    pairs->out[found] = (int32_t)(first + i);
    pairs->in[found] = (int32_t)(image + y * AF_WIDTH_IN + x);
    found += ((uint64_t)y < (uint64_t)AF_HEIGHT) & ((uint64_t)x < (uint64_t)AF_WIDTH_IN);
    if (++ox == AF_OUT_WIDTH) {
      ox = 0;
      if (++oy == AF_OUT_HEIGHT) oy = 0, image += AF_IN;
    }
  }
  pairs->count = found;
}

static int af_is_finite(const float* const numbers, const int64_t count) {
  af_vec odd = {0};
  int64_t i = 0;
  for (; i + AF_WIDTH <= count; i += AF_WIDTH) odd += *(const af_vec*)(numbers + i) * 0.0f;
  float rest = 0.0f;
  for (; i < count; ++i) rest += numbers[i] * 0.0f;
  for (int k = 0; k < AF_WIDTH; ++k) rest += odd[k];
  return rest == 0.0f;
}

/* made[pixel][lane] += the sum over channels of read[pixel][channel] times weight[channel][lane], for `rows` pairs. */
static inline __attribute__((always_inline)) void af_pixel_tile(
    const int64_t* const sizes, const int rows, const int32_t* const from, const int32_t* const to,
    const float* restrict const read, const float* restrict const weight, const int64_t depth,
    float* restrict const made) {
  (void)sizes;
  af_vec sum[AF_ROWS][AF_VECTORS];
  const float* at[AF_ROWS];
#pragma GCC unroll 32
  for (int i = 0; i < rows; ++i) {
    at[i] = read + (int64_t)from[i] * AF_DEEP;
#pragma GCC unroll 8
    for (int j = 0; j < AF_VECTORS; ++j) sum[i][j] = (af_vec){0};
  }
  for (int64_t n = 0; n < depth; ++n) {
    af_vec right[AF_VECTORS];
#pragma GCC unroll 8
    for (int j = 0; j < AF_VECTORS; ++j) right[j] = *(const af_vec*)(weight + n * AF_COLS + j * AF_WIDTH);
#pragma GCC unroll 32
    for (int i = 0; i < rows; ++i) {
      const float left = at[i][n];
#pragma GCC unroll 8
      for (int j = 0; j < AF_VECTORS; ++j) sum[i][j] += left * right[j];
    }
  }
#pragma GCC unroll 32
  for (int i = 0; i < rows; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < AF_VECTORS; ++j)
      *(af_vec*)(made + (int64_t)to[i] * AF_COLS + j * AF_WIDTH) += sum[i][j];
}

#define AF_PIXEL_TILE(n) \\
  af_pixel_tile(sizes, n, pairs->AF_READ + at, pairs->AF_MADE + at, read, weight, depth, made)
static __attribute__((noinline)) void af_pixel_rows(
    const int64_t* const sizes, const af_pairs* const pairs, const float* const read, const float* const weight,
    const int64_t depth, float* const made) {
  int64_t at = 0;
  for (; at + AF_ROWS <= pairs->count; at += AF_ROWS) AF_PIXEL_TILE(AF_ROWS);
  const int64_t left = pairs->count - at;
@PIXEL_TILES@
  (void)left;
}

/* A vector of lanes of the weights of a channel, tap by tap. `af_turn` would move so few taps one by one. */
static void af_pack(
    const int64_t* const sizes, float* const to, const float* const weight, const int64_t channel, const int64_t lane) {
  (void)sizes;
  const int64_t left = AF_LANES - lane, count = left < 0 ? 0 : left < AF_WIDTH ? left : AF_WIDTH;
  for (int64_t tap = 0; tap < AF_TAPS; tap += @WEIGHTS_LAST@ ? 1 : AF_WIDTH) {
    float* const at = to + tap * AF_TAP;
#if @WEIGHTS_LAST@
    memset(at, 0, 4 * AF_WIDTH);
    memcpy(at, weight + (channel * AF_TAPS + tap) * AF_LANES + lane, 4 * count);
#else
    const int64_t taps = AF_TAPS - tap < AF_WIDTH ? AF_TAPS - tap : AF_WIDTH;
    const int64_t begin = channel * AF_DEEP_STEP + lane * AF_LANE_STEP + tap;
    const float* const from = weight + begin;
    if (taps * 4 <= AF_WIDTH) {
      for (int64_t t = 0; t < taps; ++t)
        for (int64_t k = 0; k < AF_WIDTH; ++k) at[t * AF_TAP + k] = k < count ? from[k * AF_LANE_STEP + t] : 0.0f;
      continue;
    }
    /* Whole vectors are read, as long as there is a tensor to read: what does not belong to the taps is not written. */
    const int64_t rest = AF_DEEP * AF_LANES * AF_TAPS - begin;
    af_vec square[AF_WIDTH];
    for (int k = 0; k < AF_WIDTH; ++k) {
      square[k] = (af_vec){0};
      if (k < count && k * AF_LANE_STEP + AF_WIDTH <= rest) square[k] = *(const af_vec*)(from + k * AF_LANE_STEP);
      else if (k < count) memcpy(&square[k], from + k * AF_LANE_STEP, 4 * taps);
    }
    af_turn_square(square);
    for (int64_t k = 0; k < taps; ++k) *(af_vec*)(at + k * AF_TAP) = square[k];
#endif
  }
}

/* The results of some images of a group, of the lanes of a panel. `read`: [pixel][channel], of the first image of the
   group; `to`: its result; `memory` is a thread's: the weights, [tap][channel][lane], and results, [pixel][lane]. */
static int af_pixel_task(
    const int64_t* const sizes, const float* const read, float* const memory, const float* const weights,
    const float* const bias, const int64_t panel, const int64_t first, const int64_t images, float* const to) {
  float* const made = memory + AF_TAPS * AF_TAP;
  const int64_t lane = panel * AF_COLS, lanes = AF_LANES - lane < AF_COLS ? AF_LANES - lane : AF_COLS;
  for (int64_t channel = 0; channel < AF_DEEP; ++channel)
    for (int64_t c = 0; c < AF_COLS; c += AF_WIDTH)
      af_pack(sizes, memory + channel * AF_COLS + c, weights, channel, lane + c);
#if @IS_CHECKED@
  for (int64_t tap = 0; tap < AF_TAPS; ++tap)
    if (!af_is_finite(memory + tap * AF_TAP, AF_DEEP * AF_COLS)) return -3;
#endif
  memset(made, 0, 4 * images * AF_PIXELS * AF_COLS);
  if (bias != NULL)
    for (int64_t p = 0; p < images * AF_PIXELS; ++p) memcpy(made + p * AF_COLS, bias + lane, 4 * lanes);
  const int64_t blocks = (AF_DEEP + AF_DEPTH - 1) / AF_DEPTH, most = (AF_DEEP + blocks - 1) / blocks;
  const int64_t end = (first + images) * AF_OUT;
  af_pairs pairs;
  for (int64_t from = first * AF_OUT, count; from < end; from += count) {
    count = AF_LIST - from % AF_LIST;  /* lists end where they would without parts, so that sums stay the same */
    if (count > end - from) count = end - from;
    for (int64_t tap = 0; tap < AF_TAPS; ++tap) {
      af_find(sizes, from, count, tap / AF_WINDOW_X, tap % AF_WINDOW_X, &pairs);
      for (int64_t channel = 0; channel < AF_DEEP; channel += most)
        af_pixel_rows(sizes, &pairs, read + channel, memory + tap * AF_TAP + channel * AF_COLS,
                      AF_DEEP - channel < most ? AF_DEEP - channel : most, made - first * AF_PIXELS * AF_COLS);
    }
  }
  for (int64_t i = 0; i < images; ++i) {
    const float* const from = made + i * AF_PIXELS * AF_COLS;
#if @MADE_LAST@
    for (int64_t p = 0; p < AF_PIXELS; ++p)
      memcpy(to + ((first + i) * AF_PIXELS + p) * AF_LANES + lane, from + p * AF_COLS, 4 * lanes);
#else
    af_turn(to + ((first + i) * AF_LANES + lane) * AF_PIXELS, AF_PIXELS, from, AF_COLS, lanes, AF_PIXELS);
#endif
  }
  return 0;
}
"""
)
