"""A 2-D convolution in C of images that lie row by row, or with an image or a result that does.

In: a `NodeForm` that is one float32 convolution, and a configuration. Out: C text with the entry of every generated
kernel, or LoweringError with a reason code. Guarantee: each element is a sum over taps of sums over at most 224
channels, each in order, whatever the number of threads. A call leaves the work to eager where taps may be outside of
the input and a weight is not finite, because libraries differ in whether they multiply such weights with zeros. Memory
for copies is bounded: images are worked off in groups.

Why: see `convolution_pairs`. Where both the images and the result are channels last, `convolution` needs no copies.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from autofuse.codegen.c.printer import CSource
from autofuse.codegen.c.templates.common import bias_of, bias_text, fill, header, pointer_of, spec_of, tile_of
from autofuse.codegen.c.templates.convolution import tile_knob
from autofuse.codegen.c.templates.convolution_pairs import PAIRS, is_last, keep_in_caches, remainder_tiles, sizes_text
from autofuse.codegen.c.templates.window import Window, window_of
from autofuse.codegen.knobs import Knob, Sizes, default_config
from autofuse.codegen.templates import CONVOLUTION_ROWS as NAME
from autofuse.codegen.templates import Template
from autofuse.errors import LoweringError
from autofuse.ir.operation import NodeForm, ValueRef
from autofuse.ir.optable import CONVOLUTION
from autofuse.ir.records import Config
from autofuse.ir.shape import Dim


@dataclass(frozen=True)
class ConvolutionRows:
    """One convolution as a node: numbers of its pointers, where its tensors lie, and its sizes."""

    pointers: tuple[int, int, int | None]  # image, weight, bias
    is_last: tuple[bool, bool]  # whether the channels of the images, and of the result, are contiguous
    image: tuple[Dim, ...]  # [N, C, H, W]
    result: tuple[Dim, ...]  # [N, C, H, W]
    window: Window


@functools.lru_cache(maxsize=256)
def plan_convolution_rows(form: NodeForm) -> ConvolutionRows:
    """The convolution of a node. Raises LoweringError where it has none, or one that only a library can run."""
    op = form.operations[0]
    if len(form.operations) != 1 or op.target != CONVOLUTION or form.outputs != (ValueRef(op.name),):
        raise LoweringError("anchor", f"expected one convolution and nothing else, found {op.target}")
    image, weight, result = spec_of(form, op.args[0]), spec_of(form, op.args[1]), op.outputs[0]
    window = window_of(op, weight, (image, weight, result), 3)
    keep_in_caches(window, weight.shape[1])
    if is_last("weight", weight):
        raise LoweringError("weight", f"expected a weight whose taps lie side by side, found {weight.strides}")
    lies = is_last("image", image), is_last("result", result)
    if all(lies):
        raise LoweringError("layout", "expected an image or a result that lies row by row")
    return ConvolutionRows(
        (
            pointer_of(form, op.args[0]),
            pointer_of(form, op.args[1]),
            None if op.args[2] is None else bias_of(form, op.args[2], weight.shape[0]),
        ),
        lies,
        tuple(image.shape),
        tuple(result.shape),
        window,
    )


def convolution_rows_knobs(form: NodeForm, *_sizes: Sizes | None) -> tuple[Knob, ...]:
    """The knobs: the tile, from those whose width suits the number of the result's channels."""
    return (tile_knob(int(plan_convolution_rows(form).result[1])),)


def print_convolution_rows(form: NodeForm, config: Config, constants: Mapping[str, int] | None = None) -> CSource:
    """The C text of a convolution. Raises LoweringError where a size has no exact C form."""
    made, known = plan_convolution_rows(form), constants or {}
    tile_rows, vectors, bits = tile_of((*default_config(convolution_rows_knobs(form)), *config))
    image, weight, bias = made.pointers
    sizes = f"{'x'.join(map(str, made.image))} to {'x'.join(map(str, made.result))}"
    text = {
        "HEADER": header(f"{sizes}, window {made.window.size}, {made.window.moves}", config, known),
        "ROWS": str(tile_rows),
        "VECTORS": str(vectors),
        "WIDTH": str(bits // 32),
        "SIZES": sizes_text(form, known, made.image, made.result, made.window),
        "ROLES": _ROLES,
        "IMAGE": str(image),
        "WEIGHT": str(weight),
        "BIAS": bias_text(bias),
        "OUT": str(len(form.inputs)),
        "IMAGE_LAST": str(int(made.is_last[0])),
        "MADE_LAST": str(int(made.is_last[1])),
        "WEIGHTS_LAST": "0",
        "IS_CHECKED": str(int(any(made.window.padding))),
        "PIXEL_TILES": remainder_tiles(tile_rows, "AF_PIXEL_TILE"),
    }
    return fill("convolution_rows", form, _TEXT, text)


_ROLES = """
#define AF_DEEP AF_C
#define AF_LANES AF_N
#define AF_PIXELS AF_OUT
#define AF_READ in
#define AF_MADE out
#define AF_DEEP_STEP AF_TAPS
#define AF_LANE_STEP (AF_C * AF_TAPS)
"""

_TEXT = (
    "/* @HEADER@ */\n"
    + PAIRS
    + """
static int @NAME@(const int64_t* const sizes, void** const ptrs) {
  const float* const image = ptrs[@IMAGE@];
  const float* const weight = ptrs[@WEIGHT@];
  const float* const bias = @BIAS@;
  float* const out = ptrs[@OUT@];
  int64_t threads = @THREADS@;
  if (threads < 1 || AF_IMAGES * AF_OUT * AF_N * AF_C * AF_TAPS < AF_SERIAL_BELOW) threads = 1;

  const int64_t panels = (AF_N + AF_COLS - 1) / AF_COLS;
  int64_t group = AF_GROUP / (AF_IN * AF_C + 1);
  if (group > AF_IMAGES) group = AF_IMAGES;
  if (group < 1) group = 1;
  if (group * (AF_OUT > AF_IN ? AF_OUT : AF_IN) > INT32_MAX) return -3;
  int64_t parts = threads == 1 ? 1 : (AF_TASKS * threads + panels - 1) / panels;
  if (parts > group) parts = group;
  const int64_t some = (group + parts - 1) / parts;  /* images of a task */

  const int64_t own = AF_ALIGNED(4 * (AF_TAPS * AF_TAP + some * AF_OUT * AF_COLS));
  char* const memory = malloc(threads * own + 4 * (@IMAGE_LAST@ ? 0 : group * AF_IN * AF_C) + 64);
  if (memory == NULL) return -1;
  char* const begin = (char*)(((uintptr_t)memory + 63) / 64 * 64);
  float* const turned = (float*)(begin + threads * own);
  int failed = 0;
  for (int64_t first = 0; first < AF_IMAGES && !failed; first += group) {
    const int64_t count = AF_IMAGES - first < group ? AF_IMAGES - first : group;
    const float* const from = image + first * AF_C * AF_IN;
#if !@IMAGE_LAST@
#ifdef _OPENMP
#pragma omp parallel for num_threads((int)threads) schedule(static) if (threads > 1)
#endif
    for (int64_t i = 0; i < count; ++i)
      af_turn(turned + i * AF_IN * AF_C, AF_C, from + i * AF_C * AF_IN, AF_IN, AF_IN, AF_C);
#endif
    const float* const read = @IMAGE_LAST@ ? from : turned;
    const int64_t tasks = panels * ((count + some - 1) / some);
#ifdef _OPENMP
#pragma omp parallel for num_threads((int)threads) schedule(dynamic) if (threads > 1)
#endif
    for (int64_t task = 0; task < tasks; ++task) {
      float* mine = (float*)begin;
#ifdef _OPENMP
      mine = (float*)(begin + omp_get_thread_num() * own);
#endif
      const int64_t at = task / panels * some, left = count - at;
      if (af_pixel_task(sizes, read, mine, weight, bias, task % panels, at, left < some ? left : some,
                        out + first * AF_N * AF_OUT)) {
#ifdef _OPENMP
#pragma omp atomic write
#endif
        failed = -3;
      }
    }
  }
  free(memory);
  return failed;
}
"""
)

TEMPLATE = Template(NAME, plan_convolution_rows, convolution_rows_knobs, print_convolution_rows)
