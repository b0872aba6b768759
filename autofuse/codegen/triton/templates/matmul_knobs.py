"""Knobs of tiled matmuls: the tile, the pipeline depth of loads, the order of programs; with defaults.

In: a node, the sizes it is timed on and the upper ends of its bucket. Out: the knobs, each with choices. Guarantee:
every configuration made of these choices is right for all sizes of the bucket; a configuration that does not fit a
device's shared memory or registers is pruned after it has been compiled (`targets.prune_reason`). Source of the
defaults: 128 x 64 tiles with 8 warps for 16-bit matrix units, half of a bare matmul's, because the epilogue needs
registers too; 64 x 64 for wider types; smaller ones where the result is too small to fill a device.
"""

from __future__ import annotations

from autofuse.codegen.dtypes import dtype
from autofuse.codegen.knobs import Knob, Sizes
from autofuse.codegen.triton.index_width import INDEX_BOUND
from autofuse.codegen.triton.scalar import FAST
from autofuse.codegen.triton.templates.matmul_plan import Matmul, plan_matmul
from autofuse.ir.operation import NodeForm
from autofuse.ir.shape import evaluate

FULL = 128  # tiles that keep a usual device busy
LEAST = 16  # of a side of a tile: what a matrix unit takes
WIDEST = {"float16": 256, "bfloat16": 256, "float32": 128, "float64": 64}  # more only spills, after 20 s of compiling


def matmul_knobs(form: NodeForm, values: Sizes, high: Sizes, allow_tf32: bool = False) -> tuple[Knob, ...]:
    """The knobs of a node. Raises LoweringError where it has no tiled matmul.

    ``allow_tf32``: whether torch.backends.cuda.matmul allows tf32, to which eager's own matmuls then round.
    """
    plan = plan_matmul(form)
    rows, cols = (_sides(max(evaluate(d, values), evaluate(d, high)), plan.dtype) for d in (plan.rows, plan.cols))
    row, col = _first_tile(plan, values)
    depth = _depths(plan.dtype)
    knobs = [
        Knob("BLOCK_M", rows, min(row, rows[-1]), "rows of a tile"),
        Knob("BLOCK_N", cols, min(col, cols[-1]), "columns of a tile"),
        Knob("BLOCK_K", depth, min(32, depth[-2]), "elements of each sum that a step takes"),
        Knob("GROUP_M", (1, 4, 8), 8, "tiles down before the next across, for the L2 cache"),
        Knob("num_warps", (2, 4, 8), _first_warps(plan, row * col), "warps of a program"),
        Knob("num_stages", (1, 2, 3, 4), 3 if plan.dtype != "float64" else 2, "steps whose loads are in flight"),
    ]
    if plan.dtype == "float32":
        precisions = ("ieee", "tf32") if allow_tf32 else ("ieee",)
        knobs.append(Knob("input_precision", precisions, precisions[-1], "how float32 is multiplied"))
    if any(v.op in FAST and v.dtype == "float32" for v in plan.rest.kernel.values):
        knobs.append(Knob("math", ("precise", "fast"), "precise", "the library's exp, or the approximate instruction"))
    needs_64 = any(evaluate(e, sizes) > INDEX_BOUND for e in plan.extents for sizes in (values, high))
    bits = 64 if needs_64 else 32
    knobs.append(Knob("index_bits", (bits,), bits, "width of positions"))
    return tuple(knobs)


def _sides(most: int, name: str) -> tuple[int, ...]:
    """Powers of two up to the first that holds ``most`` elements, at most the widest of the dtype."""
    needed = max(LEAST, 1 << max(0, most - 1).bit_length())
    return tuple(side for side in (16, 32, 64, 128, 256) if side <= min(needed, WIDEST[name]))


def _depths(name: str) -> tuple[int, ...]:
    return {2: (32, 64, 128), 4: (16, 32, 64), 8: (16, 32)}[dtype(name).nbytes]


def _first_tile(plan: Matmul, values: Sizes) -> tuple[int, int]:
    """The default sides of a tile: halved, the longer one first, until there are FULL tiles or no side is above 32."""
    rows, cols, batch = (max(1, evaluate(d, values)) for d in (plan.rows, plan.cols, plan.batch))
    sides = (128, 64) if dtype(plan.dtype).nbytes == 2 else (64, 64)
    row, col = (min(side, _sides(size, plan.dtype)[-1]) for side, size in zip(sides, (rows, cols), strict=True))
    while max(row, col) > 32 and batch * -(-rows // row) * -(-cols // col) < FULL:
        row, col = (row // 2, col) if row >= col else (row, col // 2)
    return row, col


def _first_warps(plan: Matmul, size: int) -> int:
    """The default number of warps, by the elements of a tile that a thread can hold besides the epilogue.

    Unaligned loads take most registers. With twice as many elements, an epilogue that reads whole tiles spills on sm_80
    and sm_90 (Triton 3.7.1).
    """
    held = 16 if plan.dtype == "float64" else 32
    return max(4, min(8, size // (32 * held)))
