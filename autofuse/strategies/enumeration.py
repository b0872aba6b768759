"""The strategies of a node: every rewrite, with its remaining operations cut into kernels; and the cuts of one kernel.

In: a form. Out: `Strategy`s. The first is the program without the group: each matmul by aten, the other operations in
kernels. Guarantee: torch-free and deterministic, so that a name means the same in the daemon and in a script.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autofuse.codegen.c.templates.registry import C_TEMPLATES
from autofuse.codegen.matmul_operands import ANCHORS
from autofuse.codegen.templates import (
    ATTENTION,
    CONVOLUTION,
    CONVOLUTION_BACKWARD,
    CONVOLUTION_ROWS,
    LOOP,
    MATMUL,
    refusal,
    template_of,
)
from autofuse.codegen.triton.templates.registry import TRITON_TEMPLATES
from autofuse.fusion.analyzer import FusionCandidateAnalyzer, build_node
from autofuse.fusion.config import FusionConfig
from autofuse.fusion.graph import FusionGraph
from autofuse.ir.composites import has_librarys
from autofuse.ir.operation import NodeForm, Operation, TensorSpec
from autofuse.ir.optable import OpKind, info
from autofuse.ir.records import Bucket
from autofuse.ir.shape import evaluate
from autofuse.strategies.channels_last import ATEN, CONVOLUTIONS, LAST, LEAST_NET, channels_last, layouts
from autofuse.strategies.rewrites import BIAS_APART, LONE, rewrites
from autofuse.strategies.row_blocks import block_of
from autofuse.strategies.sdpa_training_match import passes_of
from autofuse.strategies.strategy import Part, Strategy, graph_of

PARTS, WHOLE, TILED, BLOCKS = "parts", "one_kernel", "tiled", "blocks"
GENERATED = "generated_product"
GENERATED_ATTENTION = "generated_attention"
GENERATED_ROWS, GENERATED_GRADIENTS = "generated_convolution_rows", "generated_gradients"
GENERATED_CONVOLUTION, LAST_GENERATED = "generated_convolution", f"{LAST}_generated"
LEAST_FLOPS = 2e6  # of a matmul, which takes some 20 us: with fewer, the Python cost of a call decides
MOST_CUTS = 2  # cuts of one kernel that are measured: those with the fewest bytes between the two sides
LEAST_CHANNELS = 4  # of images: with fewer, most lanes of a vector, or of a sum's time, would be wasted
LEAST_SIDE = 2  # operations on the smaller side of a cut


def strategies_of(form: NodeForm, has_tiles: bool = False) -> list[Strategy]:
    """The strategies of a group; ``has_tiles``: whether matmuls may be generated for the device."""
    found = [Strategy(PARTS, form, _parts(form), "each matmul by aten, the rest in kernels of their own")]
    found += [Strategy(r.name, r.form, _parts(r.form), r.detail) for r in rewrites(form)]
    found += layout_strategies(form)
    found += [] if has_tiles else generated_strategies(form)
    printer = tiles_of(form) if has_tiles else None
    if printer is not None:
        found.append(
            Strategy(TILED, form, (Part(_kernels(form), printer),), f"a generated {printer} with the rest inside")
        )
    return found


def generated_strategies(form: NodeForm) -> list[Strategy]:
    """The strategies of a CPU that use no library, or call it block by block."""
    return [
        *row_block_strategies(form),
        *matmul_strategies(form),
        *sdpa_strategies(form),
        *convolution_strategies(form),
        *row_convolution_strategies(form),
        *gradient_strategies(form),
    ]


_generated_names: dict[str, tuple[str, ...]] = {}  # by the text of a form


def generated_names(form: NodeForm) -> tuple[str, ...]:
    """Names of `generated_strategies`, for the search for groups: without parts, and once for equal forms.

    With parts, that search took 0.6 of the planning of a GPT-2 of 4 layers, most of it for unread parts.
    """
    text = form.text()
    if text not in _generated_names:
        names = [
            strategy.name
            for strategy in (
                *row_block_strategies(form),
                *sdpa_strategies(form),
                *convolution_strategies(form),
                *row_convolution_strategies(form),
                *gradient_strategies(form),
            )
        ]
        _generated_names[text] = (*names, *([GENERATED] if _printed_products(form) else []))
    return _generated_names[text]


def row_block_strategies(form: NodeForm) -> list[Strategy]:
    """The strategy in blocks of rows; none where rows depend on each other, or the epilogue is not one kernel."""
    found = block_of(next((r.form for r in rewrites(form) if r.name == BIAS_APART), form))
    parts = _parts(found[0]) if found is not None else ()
    # Escaping values must come from the kernel that writes into the node's outputs.
    if found is None or len(parts) != 1 or {ref.name for ref in found[0].outputs} - set(parts[0].operations):
        return []
    block, rows = found
    return [Strategy(BLOCKS, block, parts, f"blocks of {rows.count} rows, each read back from the caches", rows)]


def matmul_strategies(form: NodeForm) -> list[Strategy]:
    """The strategy with matmuls in C in place of the library's; none where there are no such matmuls."""
    printed = _printed_products(form)
    if not printed:
        return []
    parts = (*(Part((op.name,), MATMUL) for op in printed), *_parts(form))
    return [Strategy(GENERATED, form, parts, "a generated matmul, the rest in kernels of their own")]


def _printed_products(form: NodeForm) -> list[Operation]:
    products = [op for op in form.operations if op.target in ANCHORS]
    graph = graph_of(form) if products else None
    return [op for op in products if graph and _is(MATMUL, build_node(graph, [op]).form)]


def sdpa_strategies(form: NodeForm) -> list[Strategy]:
    """The strategy with an attention printed in C in place of torch's; none where the attention does not fit."""
    if not _is(ATTENTION, form):
        return []
    part = Part((form.operations[0].name,), ATTENTION)
    return [Strategy(GENERATED_ATTENTION, form, (part,), "a generated attention")]


def convolution_strategies(form: NodeForm) -> list[Strategy]:
    """The strategy with convolutions in C, on channels-last tensors; none for a single one that would need copies."""
    if not any(op.short_name in CONVOLUTIONS for op in form.operations):
        return []
    last = channels_last(form)
    made = form if last is None else replace(last, operations=tuple(map(_plain, last.operations)))
    graph = graph_of(made)
    convolutions = [op for op in made.operations if op.short_name in CONVOLUTIONS]
    printed = [op for op in convolutions if _is(CONVOLUTION, build_node(graph, [op]).form)]
    if not printed or (last is not None and len(convolutions) < LEAST_NET):
        return []
    parts = (*(Part((op.name,), CONVOLUTION) for op in printed), *_parts(made))
    name = GENERATED_CONVOLUTION if last is None else LAST_GENERATED
    lying = "" if last is None else "images channels last from one to the next, "
    return [Strategy(name, made, parts, f"generated convolutions, {lying}the rest in kernels of their own")]


def row_convolution_strategies(form: NodeForm) -> list[Strategy]:
    """The strategy with convolutions in C of images that lie row by row; none where all lie channels last."""
    convolutions = [op for op in form.operations if op.short_name in CONVOLUTIONS]
    graph = graph_of(form) if convolutions else None
    printed = [
        op
        for op in convolutions
        if graph and _is(CONVOLUTION_ROWS, build_node(graph, [op]).form) and _has_channels(graph.spec(op.args[1]))
    ]
    if not printed:
        return []
    parts = (*(Part((op.name,), CONVOLUTION_ROWS) for op in printed), *_parts(form))
    detail = "generated convolutions of images row by row, the rest in kernels of their own"
    return [Strategy(GENERATED_ROWS, form, parts, detail)]


def gradient_strategies(form: NodeForm) -> list[Strategy]:
    """The strategy with a convolution's gradients printed in C in place of the library's."""
    if not _is(CONVOLUTION_BACKWARD, form) or not _has_channels(form.spec(form.operations[0].args[2])):
        return []
    part = Part((form.operations[0].name,), CONVOLUTION_BACKWARD)
    return [Strategy(GENERATED_GRADIENTS, form, (part,), "generated gradients of a convolution")]


def _has_channels(weight: TensorSpec) -> bool:
    """Whether a weight, [N, C, H, W], has channels enough for a generated convolution as fast as a library's."""
    return int(weight.shape[1]) >= LEAST_CHANNELS


def _plain(op: Operation) -> Operation:
    """An aten convolution as itself, with its result copied to the promised strides if they differ."""
    if op.target == ATEN and str(op.args[0]).split(".")[1] in CONVOLUTIONS:
        return replace(op, target=op.args[0], args=op.args[1:])
    return op


def layout_strategies(form: NodeForm) -> list[Strategy]:
    """The strategies with channels-last tensors between several convolutions; none where they are so already."""
    return [Strategy(r.name, r.form, _parts(r.form), r.detail) for r in layouts(form)]


def tiles_of(form: NodeForm) -> str | None:
    """The template with one tiled kernel for the whole form; None without such a template."""
    name = template_of(TRITON_TEMPLATES, form).name
    return None if name == LOOP else name


def _kernels(form: NodeForm) -> tuple[str, ...]:
    return tuple(op.name for op in form.operations if info(op.target).kind is not OpKind.VIEW)


def cut_strategies(form: NodeForm) -> list[Strategy]:
    """One kernel and the cheapest cuts of it into two; empty where there is nothing to cut."""
    if has_librarys(form):  # between two kernels a worker would have to call them
        return []
    graph = graph_of(form)
    kernels = [graph.by_name[name] for name in _kernels(form)]
    cuts = []
    for at in range(LEAST_SIDE, len(kernels) - LEAST_SIDE + 1):
        sides = kernels[:at], kernels[at:]
        if all(_lowers(graph, side) for side in sides):
            cuts.append((_crossing_bytes(graph, *sides), at))
    strategies = [Strategy(WHOLE, form, (Part(tuple(op.name for op in kernels)),), "all of it in one kernel")]
    for nbytes, at in sorted(cuts)[:MOST_CUTS]:
        parts = tuple(Part(tuple(op.name for op in side)) for side in (kernels[:at], kernels[at:]))
        name = kernels[at].short_name.strip("_")
        detail = f"two kernels, cut before {name}, {nbytes / 1e6:.2f} MB between them at the planner's sizes"
        strategies.append(Strategy(f"cut_{at}_{name}", form, parts, detail))
    return strategies if len(strategies) > 1 else []


def is_group(form: NodeForm) -> bool:
    """Whether a form has operations that cannot be loops, so that it has strategies instead of one kernel."""
    return any(info(op.target).kind in (OpKind.OPAQUE, OpKind.RANDOM) for op in form.operations)


def is_large(strategy: Strategy, form: NodeForm, bucket: Bucket) -> bool:
    """Whether a bucket's sizes are worth a strategy: several blocks of rows, or a matmul that takes its time."""
    largest = dict(zip(form.symbols, (high for _, high in bucket.ranges), strict=True))
    if strategy.name == GENERATED:
        return max(_flops(strategy, largest)) >= LEAST_FLOPS
    if strategy.name in LONE or (strategy.name == TILED and len(_kernels(form)) == 1):
        graph = FusionGraph(form.operations, {item.name: item.spec for item in form.inputs}, form.outputs, largest)
        return max(map(graph.operation_flops, form.operations)) >= LEAST_FLOPS
    return strategy.rows is None or evaluate(strategy.rows.total, largest) > strategy.rows.count


def _flops(strategy: Strategy, values: Mapping[str, int]) -> list[int]:
    """The FLOPs of each part of a CPU's strategy, as far as its template counts them."""
    counters = [C_TEMPLATES[part.printer].flops for part in strategy.parts]
    return [
        count(kernel.node.form, [evaluate(size, values) for size in kernel.sizes])
        for count, kernel in zip(counters, strategy.kernels, strict=True)
        if count is not None
    ]


def _parts(form: NodeForm) -> tuple[Part, ...]:
    analyzer = FusionCandidateAnalyzer(FusionConfig(), _refusal)
    nodes = analyzer.find_fusible_operations(graph_of(form), apart=passes_of(form) or ())
    return tuple(Part(tuple(op.name for op in node.kernels)) for node in nodes)


def _refusal(form: NodeForm) -> tuple[str, str] | None:
    return refusal(C_TEMPLATES[LOOP], form)


def _is(name: str, form: NodeForm) -> bool:
    """Whether a template for CPUs can print a node."""
    return refusal(C_TEMPLATES[name], form) is None


def _lowers(graph: FusionGraph, side: Sequence[Operation]) -> bool:
    return _refusal(build_node(graph, side).form) is None


def _crossing_bytes(graph: FusionGraph, first: Sequence[Operation], second: Sequence[Operation]) -> int:
    """Bytes that the first side writes only for the second."""
    inside = {op.name for op in second}
    made = {op.name for op in first}
    crossing = {
        ref
        for ref, readers in graph.value_readers.items()
        if ref.name in made and ref not in graph.leaving and inside.intersection(readers)
    }
    return sum(graph.nbytes(graph.spec(ref)) for ref in crossing)
