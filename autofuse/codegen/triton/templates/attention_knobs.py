"""Knobs of attention kernels: rows of queries and keys at a time, with defaults.

In: a node, the sizes it is timed on and the upper ends of its bucket. Out: the knobs, each with choices. Guarantee:
every configuration made of these choices is right for all sizes of the bucket; a configuration that does not fit a
device is pruned after it has been compiled.
"""

from __future__ import annotations

from autofuse.codegen.dtypes import dtype
from autofuse.codegen.knobs import Knob, Sizes
from autofuse.codegen.triton.index_width import INDEX_BOUND
from autofuse.codegen.triton.templates.attention_plan import plan_attention
from autofuse.ir.operation import NodeForm
from autofuse.ir.shape import evaluate

# Default numbers of queries and keys, by whether elements have 16 bits. Kernels for masks at odd addresses spill on
# sm_80 with 64 keys, and some bytes of them with a stage less (Triton 3.7.1).
FIRST = {True: (64, 32), False: (32, 32)}


def attention_knobs(form: NodeForm, values: Sizes, high: Sizes, allow_tf32: bool = False) -> tuple[Knob, ...]:
    """The knobs of a node. Raises LoweringError where it is no attention.

    ``allow_tf32``: whether torch.backends.cuda.matmul allows tf32, to which eager's own matmuls then round.
    """
    plan = plan_attention(form)
    narrow = dtype(plan.dtype).nbytes == 2
    side = 128 if narrow else 64
    rows, keys = (_sides(max(evaluate(d, values), evaluate(d, high)), side) for d in (plan.rows, plan.keys))
    row, key = FIRST[narrow]
    row = min(row, _sides(max(1, evaluate(plan.rows, values)), side)[-1])
    knobs = [
        Knob("BLOCK_M", rows, min(row, rows[-1]), "queries of a program"),
        Knob("BLOCK_N", keys, min(key, keys[-1]), "keys of a step"),
        Knob("num_warps", (2, 4, 8) if narrow else (4, 8), 4, "warps of a program"),
        Knob("num_stages", (1, 2, 3), 3 if narrow else 2, "steps whose loads are in flight"),
    ]
    if plan.dtype == "float32":
        precisions = ("ieee", "tf32") if allow_tf32 else ("ieee",)
        knobs.append(Knob("input_precision", precisions, precisions[-1], "how float32 is multiplied"))
    knobs.append(Knob("math", ("precise", "fast"), "precise", "the library's exp, or the approximate instruction"))
    needs_64 = any(evaluate(e, sizes) > INDEX_BOUND for e in plan.extents for sizes in (values, high))
    bits = 64 if needs_64 else 32
    knobs.append(Knob("index_bits", (bits,), bits, "width of positions"))
    return tuple(knobs)


def _sides(most: int, widest: int) -> tuple[int, ...]:
    """Powers of two up to the first that holds ``most`` elements, at most ``widest``."""
    needed = max(16, 1 << max(0, most - 1).bit_length())
    return tuple(side for side in (16, 32, 64, 128) if side <= min(widest, needed))
