"""Lowering: a node of operations becomes one nest of loops.

In: a `NodeForm`. Out: a `LoopKernel`, or LoweringError with a reason code. Two passes over the operations. Forward,
each tensor gets a canonical index: which loops run over its dims. Then every output is evaluated at its canonical
index: a value is evaluated at an index by evaluating its operands at theirs, so views, broadcasts and permutations are
only index remaps, and one tensor may be read under two indices (``x + x.t()``). Equal evaluations are shared.
Guarantee: torch-free, deterministic, and refuses rather than guesses.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from autofuse.codegen.loops import Access, LoopKernel, Param
from autofuse.codegen.lowering.builder import AtomAccess, linear_terms
from autofuse.codegen.lowering.context import Context
from autofuse.codegen.lowering.index import (
    atoms_of,
)
from autofuse.codegen.lowering.joined_stages import join_stages
from autofuse.codegen.lowering.rules import RULES, rules_of
from autofuse.codegen.lowering.schedule import schedule, schedule_tile
from autofuse.codegen.lowering.stages import lower_stages
from autofuse.errors import LoweringError
from autofuse.ir.composites import expanded
from autofuse.ir.operation import NodeForm, Operation, TensorSpec, ValueRef
from autofuse.ir.optable import VIEWS, info, stands_beside
from autofuse.ir.parts import cuts_of, independent_parts
from autofuse.ir.shape import SymbolicShape
from autofuse.ir.validation import one_line
from autofuse.ir.writes import is_write

_FEW_STEPS = 8  # for which a value may be written anew
_OUTPUTS_APART = ("native_group_norm_backward",)  # sums over the rows of a group, and over all rows of a channel


def context_of(form: NodeForm) -> Context:
    """A node as the rules see it."""
    return Context(form, rules_of(form))


def lower(form: NodeForm) -> LoopKernel:
    """The loop form of a node; raises LoweringError(code, message) where it has none.

    A composite operator is lowered as what it decomposes into. A node that writes to places which are data becomes
    stages (`stages`). Element-wise operations that are independent of each other and share no loops become nests side
    by side; so do those of an output that has only some of the loops of the others, which would not be written where
    another loop is empty.
    """
    if form.stages:
        return _named(form, join_stages(form, lower))
    if any(map(is_write, form.operations)):
        return _staged(form, lower)
    try:
        kernel = _lower(form)
        partial = _partial_outputs(form, kernel)
        if not partial:
            return kernel
        parts = _apart(form, partial)
    except LoweringError as error:
        if _has_outputs_apart(form):
            return _staged(form, _lower)
        is_plain = all(stands_beside(op.target) for op in form.operations if info(op.target).kind not in VIEWS)
        parts = _independent(form) if is_plain and error.code == "disjoint" else []
        if len(parts) < 2:
            raise
    return _side_by_side(form, parts)


def _staged(form: NodeForm, part: Callable[[NodeForm], LoopKernel]) -> LoopKernel:
    """The node as stages; ``part`` lowers what is one."""
    form = expanded(form)
    return _named(form, lower_stages(form, RULES, part))


def _named(form: NodeForm, found: LoopKernel) -> LoopKernel:
    comments = tuple(describe(op) for op in form.operations)
    name = f"af_{found.kind}_{_label(form)}_{_digest(form)}"
    return dataclasses.replace(found, name=name, comments=comments)


def _has_outputs_apart(form: NodeForm) -> bool:
    """Whether outputs of one operator have nests of their own, which run one after another on a CPU."""
    is_apart = any(op.short_name in _OUTPUTS_APART for op in form.operations)
    return is_apart and len(form.outputs) > 1 and form.spec(form.outputs[0]).device == "cpu"


def lowered(form: NodeForm) -> LoopKernel:
    """`lower`, with its last results kept: one node's kernel is printed with many configurations."""
    return _lowered(form, tuple(op.source for op in form.operations))


@functools.lru_cache(maxsize=16)
def _lowered(form: NodeForm, sources: tuple[str | None, ...]) -> LoopKernel:
    """Sources are part of the cache's key: equal forms may come from different lines, which the text shows."""
    return lower(form)


def _independent(form: NodeForm) -> list[NodeForm]:
    """The parts of a form that read no value of each other, in the order of their first operations."""
    cuts = cuts_of(form.operations)
    found = [
        (
            operations,
            [ref for ref in form.outputs if ref.name not in cuts and ref.name in {op.name for op in operations}],
        )
        for operations in independent_parts(form.operations)
    ]
    made = {op.name: op for op in form.operations}
    found += [([made[ref.name]], [ref]) for ref in form.outputs if ref.name in cuts]
    parts = []
    for operations, outputs in found:
        if outputs:
            read = {ref.name for op in operations for ref in op.inputs}
            inputs = tuple(item for item in form.inputs if item.name in read)
            parts.append(NodeForm(inputs, tuple(operations), tuple(outputs), form.symbols))
    return parts


def _partial_outputs(form: NodeForm, kernel: LoopKernel) -> list[ValueRef]:
    """The outputs that element-wise loops would write once for each step of a further loop, of many steps or none."""
    if kernel.kind != "pointwise":
        return []
    loops = {number for number, size in enumerate(kernel.dims) if not isinstance(size, int) or size > _FEW_STEPS}
    partial = {
        store.access.param - len(form.inputs)
        for store in kernel.stores
        if not {number for number, stride in store.access.strides if stride != 0}.issuperset(loops)
    }
    return [ref for number, ref in enumerate(form.outputs) if number in partial]


def _apart(form: NodeForm, partial: Sequence[ValueRef]) -> list[NodeForm]:
    """A form in parts with loops of their own: most outputs together, partial ones by their sizes.

    What several parts need is calculated in each.
    """
    groups: dict[SymbolicShape | None, list[ValueRef]] = {None: []}
    for ref in form.outputs:
        groups.setdefault(form.spec(ref).shape if ref in partial else None, []).append(ref)
    return [_part(form, outputs) for outputs in groups.values() if outputs]


def _part(form: NodeForm, outputs: Sequence[ValueRef]) -> NodeForm:
    """The operations that some outputs need, and the inputs of these."""
    wanted = {ref.name for ref in outputs}
    for op in reversed(form.operations):
        if op.name in wanted:
            wanted.update(ref.name for ref in op.inputs)
    operations = tuple(op for op in form.operations if op.name in wanted)
    inputs = tuple(item for item in form.inputs if item.name in wanted)
    return NodeForm(inputs, operations, tuple(outputs), form.symbols)


def _side_by_side(form: NodeForm, parts: Sequence[NodeForm]) -> LoopKernel:
    """One kernel of several nests, each over the loops of its part."""
    nests = [_lower(part) for part in parts]
    if any(nest.kind != "pointwise" for nest in nests):
        raise LoweringError(
            "several_nests",
            f"expected one nest of loops, found {len(parts)}: only plain element-wise work shares one so",
        )
    specs = {ValueRef(op.name, n): spec for op in form.operations for n, spec in enumerate(op.outputs)}
    params = _params(form, specs.__getitem__)
    name = f"af_pointwise_{_label(form)}_{_digest(form)}"
    whole: list[LoopKernel] = []
    for part, nest in zip(parts, nests, strict=True):
        places = [form.inputs.index(item) for item in part.inputs]
        places += [len(form.inputs) + form.outputs.index(ref) for ref in part.outputs]
        values = tuple(dataclasses.replace(v, attr=_moved_access(v.attr, places)) for v in nest.values)
        stores = tuple(dataclasses.replace(s, access=_moved_access(s.access, places)) for s in nest.stores)
        number = f"_{len(whole)}" if whole else ""
        whole.append(dataclasses.replace(nest, name=f"{name}{number}", params=params, values=values, stores=stores))
    return dataclasses.replace(whole[0], comments=tuple(describe(op) for op in form.operations), rest=tuple(whole[1:]))


def _moved_access(attr: Any, places: Sequence[int]) -> Any:
    return dataclasses.replace(attr, param=places[attr.param]) if isinstance(attr, Access) else attr


def _label(form: NodeForm) -> str:
    ops = "_".join(dict.fromkeys(_short(op) for op in expanded(form).operations if RULES[op.target].counts))
    return ops[:48].strip("_") or "copy"


def _digest(form: NodeForm) -> str:
    return hashlib.sha256(form.text().encode()).hexdigest()[:10]


def _lower(form: NodeForm) -> LoopKernel:
    """The loop form of a node whose operations share one nest."""
    context = context_of(form)
    form = context.form
    context.infer_all()
    stores = context.pull_outputs()
    context.check_bounds(stores)
    return schedule(
        nodes=context.builder.nodes,
        stores=stores,
        params=_params(form, context.spec),
        symbols=form.symbols,
        label=_label(form),
        digest=_digest(form),
        comments=tuple(describe(op) for op in form.operations),
    )


def lower_tile(form: NodeForm, tile: ValueRef, name: str) -> tuple[LoopKernel, tuple[tuple[int, ...], ...]]:
    """The loop form of a node that works on tiles of an input, and reads each element of it only where it is used.

    Returns the kernel, and the dims of it that the input's leading dims, its last but one and its last have become.
    Raises LoweringError where a value is reduced, or where the input is read at another place than it is used for.
    """
    context = context_of(form)
    form = context.form
    context.infer_all()
    stores = context.pull_outputs()
    params = _params(form, context.spec)
    own, index = params.index(Param(tile.name, context.spec(tile).dtype, False)), context.canonical(tile)
    here = AtomAccess(own, linear_terms(index, context.spec(tile).strides)[0])
    for node in context.builder.nodes:
        if node.op == "checked":
            raise LoweringError("indexed", "expected no index that is read from a tensor beside a tile, found one")
        reads = isinstance(node.attr, AtomAccess) and node.attr.param == own
        if reads and (node.op, node.attr) != ("load", here):
            raise LoweringError("index", f"expected {tile.name} at the place of each element, found it at another")
    nest = [atoms_of(part) for part in (index[:-2], index[-2:-1], index[-1:])]
    comments = tuple(describe(op) for op in form.operations)
    return schedule_tile(nest, context.builder.nodes, stores, params, form.symbols, name, comments)


def _params(form: NodeForm, spec_of: Callable[[ValueRef], TensorSpec]) -> tuple[Param, ...]:
    params = [Param(item.name, item.spec.dtype, False) for item in form.inputs]
    for number, spec in enumerate(map(spec_of, form.outputs)):
        params.append(Param(f"o{number}", spec.dtype, True, spec.is_empty))
    return tuple(params)


def _short(op: Operation) -> str:
    return op.short_name.strip("_").removeprefix("native_")


def describe(op: Operation) -> str:
    """One line of C comment for an operation, with the user's line."""
    reads = ", ".join(f"{r.name}.{r.index}" if r.index else r.name for r in op.inputs)
    shape = op.outputs[0].shape if op.outputs else ""
    line = f"{op.name} = {op.target}({reads}) {shape}"
    source = one_line(op.source or "").replace("*/", "* /")
    return f"{line}  # {source}" if source else line
