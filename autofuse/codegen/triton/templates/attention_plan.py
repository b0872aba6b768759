"""The plan of hand-written attention: matmul, operations on each score, softmax, matmul, epilogue.

In: a `NodeForm` with exactly that chain: ``softmax(f(q @ k)) @ v`` and operations on single elements after it. Out:
`Attention`: the operands q, k and v, with ``f`` and the epilogue as `LoopKernel`s; or LoweringError with a reason code.
Guarantee: scores and probabilities have no other readers, and the softmax runs over the keys.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from autofuse.codegen.loops import Access
from autofuse.codegen.matmul_operands import ANCHORS, Operand, live, read_operand
from autofuse.codegen.triton.index_width import extents
from autofuse.codegen.triton.templates.epilogue import Epilogue, follow, kernel_name
from autofuse.errors import LoweringError
from autofuse.ir.operation import NodeForm, Operation, TensorSpec, ValueRef
from autofuse.ir.shape import Dim

DTYPES = ("float16", "bfloat16", "float32")  # without float64, in which Triton 3.7.1 does not compile all kernels
WIDEST_HEAD = 128  # most elements of a query, which a program holds for each of its rows
SAME_PLACE = frozenset(["view", "_unsafe_view", "reshape", "expand", "alias", "clone", "_to_copy"])


@dataclass(frozen=True)
class Attention:
    """Attention, and what is done to its scores and to its result."""

    scores: Epilogue  # the first matmul's epilogue; its only output is the softmax's input
    result: Epilogue  # the second matmul's epilogue
    query: Operand  # [rows, depth]
    key: Operand  # [depth, keys]
    value: Operand  # [keys, width]
    batch: Dim
    rows: Dim
    keys: Dim
    depth: int
    width: int
    dtype: str  # of query, key and value

    @property
    def score(self) -> int:
        """The value of ``scores`` that the softmax reads."""
        return self.scores.kernel.stores[0].value

    @property
    def extents(self) -> tuple[Dim, ...]:
        """The flat sizes and memory extents that 32-bit indices must reach."""
        operands = (
            self.query.extent(self.rows, self.depth),
            self.key.extent(self.depth, self.keys),
            self.value.extent(self.keys, self.width),
        )
        return tuple(dict.fromkeys((*extents(self.scores.kernel), *extents(self.result.kernel), *operands)))


@functools.lru_cache(maxsize=256)
def plan_attention(form: NodeForm) -> Attention:
    """The attention of a node. Raises LoweringError where it has no such form."""
    by_name = {op.name: op for op in form.operations}
    softmax, first, second = _chain(form, by_name)
    query, key = (first.args[n] for n in ANCHORS[first.target][:2])
    value = second.args[1]
    specs = [form.spec(ref) for ref in (query, key, value)]
    if {s.dtype for s in specs} != {specs[0].dtype} or specs[0].dtype not in DTYPES:
        found = ", ".join(s.dtype for s in specs)
        raise LoweringError(
            "dtype", f"expected query, key and value of one dtype of {', '.join(DTYPES)}, found {found}"
        )
    depth, width = (_head(spec) for spec in (specs[0], specs[2]))
    name = kernel_name("attention", form)
    before = live(form.operations, softmax.args[:1])
    scores = follow(replace(form, operations=tuple(before), outputs=softmax.args[:1]), first, f"{name}_scores")
    _check_place(form, scores, softmax.args[0], first)
    result = follow(form, second, name)
    batches = [op.outputs[0].shape.dims[:-2] for op in (first, second)]
    if batches[0] != batches[1]:
        raise LoweringError("batch", f"expected one batch of both products, found {batches[0]} and {batches[1]}")
    return Attention(
        scores=scores,
        result=result,
        query=read_operand(form, query),
        key=read_operand(form, key),
        value=read_operand(form, value),
        batch=batches[0][0] if batches[0] else 1,
        rows=first.outputs[0].shape[-2],
        keys=first.outputs[0].shape[-1],
        depth=depth,
        width=width,
        dtype=specs[0].dtype,
    )


def _chain(form: NodeForm, by_name: dict[str, Operation]) -> tuple[Operation, Operation, Operation]:
    """The softmax, the matmul before it and the one after it."""
    softmaxes = [op for op in form.operations if op.target == "aten._softmax.default"]
    products = [op for op in form.operations if op.target in ANCHORS]
    if len(softmaxes) != 1 or len(products) != 2:
        found = f"{len(softmaxes)} and {len(products)}"
        raise LoweringError("anchor", f"expected one softmax and two products, found {found}")
    (softmax,) = softmaxes
    rank = len(softmax.outputs[0].shape)
    if softmax.arg(1) not in (-1, rank - 1):
        raise LoweringError("softmax", f"expected a softmax over the keys, found it over dim {softmax.arg(1)}")
    before = {op.name for op in live(form.operations, softmax.args[:1])}
    first = [op for op in products if op.name in before]
    second = [op for op in products if op.name not in before]
    if len(first) != 1 or second[0].target not in ("aten.mm.default", "aten.bmm.default"):
        raise LoweringError("anchor", "expected a product before the softmax and a plain one after it, found others")
    current: ValueRef = second[0].args[0]
    while current.name != softmax.name:
        op = by_name.get(current.name)
        if op is None or op.short_name not in SAME_PLACE:
            between = current.name if op is None else op.target
            raise LoweringError("between", f"expected the softmax as operand of the second product, found {between}")
        current = op.args[0]
    weights, made = form.spec(second[0].args[0]), softmax.outputs[0]
    if weights.shape.dims[-2:] != made.shape.dims[-2:] or weights.numel != made.numel:
        raise LoweringError("between", f"expected probabilities of {made.shape}, found {weights.shape}")
    needed = live([op for op in form.operations if op is not second[0]], form.outputs)
    if softmax in needed:
        raise LoweringError("probabilities", "expected probabilities that only the second product reads, found others")
    return softmax, first[0], second[0]


def _check_place(form: NodeForm, scores: Epilogue, ref: ValueRef, first: Operation) -> None:
    """The softmax must read the scores in the order in which the matmul makes them."""
    shape, made = form.spec(ref).shape.dims, first.outputs[0].shape.dims
    loads = [v.attr for v in scores.kernel.values if isinstance(v.attr, Access) and v.attr.param == scores.product]
    written = [replace(store.access, param=scores.product) for store in scores.kernel.stores]
    if shape[-2:] != made[-2:] or loads[:1] != written:
        raise LoweringError("layout", f"expected scores in the order of {first.name}, found another")


def _head(spec: TensorSpec) -> int:
    size = spec.shape[-1]
    if not isinstance(size, int) or not 1 <= size <= WIDEST_HEAD:
        raise LoweringError("head", f"expected heads of 1 to {WIDEST_HEAD} elements that no call changes, found {size}")
    return size
