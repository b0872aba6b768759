"""Lowering: a node of operations becomes one nest of loops.

In: a `NodeForm`. Out: a `LoopKernel`, or LoweringError with a reason code.
Two passes over the operations. Forward, each tensor gets a canonical index: which loops run over its dims.
Then every output is pulled at its canonical index: a value is evaluated at an index by evaluating its operands
at theirs, so views, broadcasts and permutations are nothing but index remaps, and one tensor may be read under
two indices (``x + x.t()``). Equal evaluations are shared.
Guarantee: torch-free, deterministic, and refuses rather than guesses.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from autofuse.codegen.loops import Access, LoopKernel, Param
from autofuse.codegen.lowering.builder import AtomAccess, Builder, Val, linear_offset, linear_terms
from autofuse.codegen.lowering.index import (
    Atom,
    Index,
    Moved,
    Word,
    atoms_of,
    fresh_index,
    join,
    regroup,
    resolve,
    resolve_index,
    word_size,
)
from autofuse.codegen.lowering.rules import RULES
from autofuse.codegen.lowering.schedule import schedule, schedule_tile
from autofuse.errors import LoweringError
from autofuse.ir.operation import NodeForm, Operation, TensorSpec, ValueRef
from autofuse.ir.optable import VIEWS, OpKind, info, is_move
from autofuse.ir.shape import Dim, SymbolicShape, contiguous_strides
from autofuse.ir.validation import one_line

_REDUCES = (OpKind.REDUCTION, OpKind.NORMALISATION, OpKind.LOSS)
_ELEMENT_BY_ELEMENT = ("_native_batch_norm_legit_no_training",)  # though of such a kind
_MOST_STORES = 8  # of one output
_MAX_PULLS = 8  # each repeats because a view split an atom; a handful of views share the same splits


class Context:
    """What rule functions see of a node while it is lowered."""

    def __init__(self, form: NodeForm) -> None:
        self.form = form
        self.builder = Builder()
        self._specs: dict[ValueRef, TensorSpec] = {ValueRef(i.name): i.spec for i in form.inputs}
        self._params = {item.name: n for n, item in enumerate(form.inputs)}
        self._operations = {op.name: op for op in form.operations}
        self._canonical: dict[ValueRef, Index] = {}
        self._values: dict[tuple[str, int, Index, Val | None], Val] = {}
        # A reduction runs over all units of what is put together; then so do the stores.
        self._unrolls = not any(
            info(op.target).kind in _REDUCES and op.short_name not in _ELEMENT_BY_ELEMENT for op in form.operations
        )
        for op in form.operations:
            for n, spec in enumerate(op.outputs):
                self._specs[ValueRef(op.name, n)] = spec

    # ---- facts

    def spec(self, ref: ValueRef) -> TensorSpec:
        return self._specs[ref]

    def shape(self, ref: ValueRef) -> SymbolicShape:
        return self._specs[ref].shape

    def canonical(self, ref: ValueRef) -> Index:
        """The loops that run over the dims of a value."""
        found = self._canonical.get(ref)
        if found is None:
            found = self._own(ref, fresh_index(self.shape(ref)))
        return found

    def _own(self, ref: ValueRef, index: Index) -> Index:
        self._canonical[ref] = index
        for atom in atoms_of(index):
            atom.owners.add(ref)
        return index

    # ---- forward

    def infer_all(self) -> None:
        """Give every value its canonical index, joining loops that operators tie together."""
        for item in self.form.inputs:
            self.canonical(ValueRef(item.name))
        for op in self.form.operations:
            rule = RULES.get(op.target)
            if rule is None:
                raise LoweringError("no_rule", f"expected an operator with a lowering rule, found {op.target}")
            for n, index in enumerate(rule.infer(self, op)):
                if index is not None and n < len(op.outputs):
                    self._own(ValueRef(op.name, n), index)
        self._join_unrelated()

    def _join_unrelated(self) -> None:
        """Tensors of one size that no operator ties together run over the same loops too."""
        indices = sorted(self._canonical.values(), key=lambda i: -len(atoms_of(i)))
        if not indices:
            return
        main: Word = atoms_of(indices[0])
        for index in indices[1:]:
            word = atoms_of(index)
            if word and not set(word) & set(resolve(main)) and word_size(word) == word_size(main):
                try:
                    join(main, word)
                except LoweringError:
                    continue  # they keep their own loops; the schedule decides whether that is possible

    # ---- pull

    def operand(self, ref: ValueRef, index: Index) -> Val:
        """The value of a tensor at an index."""
        key = (ref.name, ref.index, resolve_index(index), self.builder.guard)
        found = self._values.get(key)
        if found is None:
            found = self._evaluate(ref, index)
            self._values[key] = found
        return found

    def _evaluate(self, ref: ValueRef, index: Index) -> Val:
        param = self._params.get(ref.name)
        if param is not None:
            return self.load(ref, self._specs[ref], index)
        op = self._operations[ref.name]
        return RULES[op.target].evaluate(self, op, ref.index, index)

    def load(self, ref: ValueRef, spec: TensorSpec, index: Index) -> Val:
        """Read the memory of an input as a tensor of this spec."""
        return self.builder.load(self._params[ref.name], spec.dtype, index, spec.strides)

    def aliased_input(self, ref: ValueRef) -> ValueRef | None:
        """The input whose memory a value is, seen through views; None where something was calculated or copied."""
        while ref.name not in self._params:
            op = self._operations[ref.name]
            source = op.args[0] if op.args else None
            if op.short_name not in _ALIASES or not isinstance(source, ValueRef):
                return None
            if op.short_name == "reshape" and not _is_contiguous(self.spec(source)):
                return None  # may have copied
            ref = source
        return ref

    def pull_outputs(self) -> list[tuple[Val, AtomAccess]]:
        """Evaluate the outputs; repeats until no view splits an atom any more, so that all values agree."""
        for _ in range(_MAX_PULLS):
            before = self._splits()
            self.builder, self._values = Builder(), {}
            for op in self.form.operations:  # in order, so that a long chain needs no deep recursion
                self._try_evaluate(op)
            stores = [store for n, ref in enumerate(self.form.outputs) for store in self._stores(n, ref)]
            if self._splits() == before:
                return stores
        raise LoweringError("views", "expected views that settle on common loops, found that they keep splitting")

    def _try_evaluate(self, op: Operation) -> None:
        with contextlib.suppress(LoweringError):  # raised again if an output needs it
            self.operand(ValueRef(op.name), self.canonical(ValueRef(op.name)))

    def _stores(self, number: int, ref: ValueRef) -> Iterator[tuple[Val, AtomAccess]]:
        """The store of an output, or one for each unit of a tensor that is put together from several."""
        index, spec = self.canonical(ref), self.spec(ref)
        if ref.name in self._operations and info(self._operations[ref.name].target).kind is OpKind.PART:
            raise LoweringError("window", "expected an output with memory of its own, found a part of another tensor")
        if any(dim == 0 for dim in spec.shape):
            raise LoweringError("empty", f"expected an output with elements, found the shape {spec.shape}")
        _check_distinct(index, spec)
        for place in self._unrolled(resolve_index(index)):
            value = self.operand(ref, place)
            terms, _ = linear_terms(place, spec.strides)
            yield value, AtomAccess(len(self.form.inputs) + number, terms, 0, linear_offset(place, spec.strides))

    def _unrolled(self, index: Index) -> list[Index]:
        """The index with every known place of its unrolled loops; with the loops where those are too many."""
        atoms = [a for a in atoms_of(index) if a.is_unrolled]
        if not self._unrolls or math.prod(int(a.size) for a in atoms) > _MOST_STORES:
            return [index]
        found = []
        for places in itertools.product(*(range(int(a.size)) for a in atoms)):
            known = {a: Moved(k, a.size) for a, k in zip(atoms, places, strict=True)}
            found.append(tuple(tuple(known[p] if isinstance(p, Atom) and p in known else p for p in w) for w in index))
        return found

    def _splits(self) -> int:
        return sum(len(atoms_of(index)) for index in self._canonical.values())

    # ---- shared by rules

    def reduce_word(self, ref: ValueRef, dim: int, index: Index) -> Word:
        """The loops over dim ``dim`` of a tensor while its other dims are at ``index``."""
        word = resolve(self.canonical(ref)[dim])
        others = {p for n, w in enumerate(index) if n != dim for p in atoms_of((w,))}
        if any(p in others for p in word):
            raise LoweringError("reduction", f"expected loops of their own for dim {dim} of {ref.name}, found shared")
        return word

    def regroup_word(self, word: Word, sizes: Sequence[Dim]) -> Index:
        """Split one dim's word into dims of the given sizes."""
        return regroup((word,), SymbolicShape(sizes))


_ALIASES = frozenset(
    (
        "view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "expand", "permute", "transpose", "t", "alias",
        "detach",
    )
)  # fmt: skip


def _is_contiguous(spec: TensorSpec) -> bool:
    return spec.strides.dims == contiguous_strides(spec.shape.dims)


def _check_distinct(index: Index, spec: TensorSpec) -> None:
    """An output whose elements share memory (stride 0) cannot be written in parallel."""
    for word, stride in zip(index, spec.strides, strict=True):
        if resolve(word) and stride == 0:
            raise LoweringError("overlap", f"expected an output with memory of its own, found strides {spec.strides}")


def lower(form: NodeForm) -> LoopKernel:
    """The loop form of a node; raises LoweringError(code, message) where it has none.

    Copies and the like that have nothing to do with each other and share no loops become nests side by side.
    """
    try:
        return _lower(form)
    except LoweringError as error:
        moves = all(is_move(op.target) for op in form.operations if info(op.target).kind not in VIEWS)
        parts = _independent(form) if moves and error.code == "disjoint" else []
        if len(parts) < 2:
            raise
    return _side_by_side(form, parts)


def _independent(form: NodeForm) -> list[NodeForm]:
    """The parts of a form that read no value of each other, in the order of their first operations."""
    home = {op.name: [op.name] for op in form.operations}
    for op in form.operations:
        for ref in op.inputs:
            first, second = home.get(ref.name), home[op.name]
            if first is not None and first is not second:
                first += second
                home.update(dict.fromkeys(second, first))
    parts = []
    for names in {id(names): set(names) for names in home.values()}.values():
        operations = tuple(op for op in form.operations if op.name in names)
        read = {ref.name for op in operations for ref in op.inputs}
        outputs = tuple(ref for ref in form.outputs if ref.name in names)
        if outputs:
            inputs = tuple(item for item in form.inputs if item.name in read)
            parts.append(NodeForm(inputs, operations, outputs, form.symbols))
    return parts


def _side_by_side(form: NodeForm, parts: Sequence[NodeForm]) -> LoopKernel:
    """One kernel of several nests, each over the loops of its part."""
    nests = [_lower(part) for part in parts]
    if any(nest.kind != "pointwise" for nest in nests):
        raise LoweringError(
            "several_nests", f"expected one nest of loops, found {len(parts)}: only copies share a kernel so"
        )
    specs = {ValueRef(op.name, n): spec for op in form.operations for n, spec in enumerate(op.outputs)}
    params = [Param(item.name, item.spec.dtype, False) for item in form.inputs]
    params += [Param(f"o{n}", specs[ref].dtype, True) for n, ref in enumerate(form.outputs)]
    name = f"af_pointwise_{_label(form)}_{_digest(form)}"
    whole: list[LoopKernel] = []
    for part, nest in zip(parts, nests, strict=True):
        places = [form.inputs.index(item) for item in part.inputs]
        places += [len(form.inputs) + form.outputs.index(ref) for ref in part.outputs]
        values = tuple(dataclasses.replace(v, attr=_moved_access(v.attr, places)) for v in nest.values)
        stores = tuple(dataclasses.replace(s, access=_moved_access(s.access, places)) for s in nest.stores)
        number = f"_{len(whole)}" if whole else ""
        whole.append(
            dataclasses.replace(nest, name=f"{name}{number}", params=tuple(params), values=values, stores=stores)
        )
    return dataclasses.replace(whole[0], comments=tuple(describe(op) for op in form.operations), rest=tuple(whole[1:]))


def _moved_access(attr: Any, places: Sequence[int]) -> Any:
    return dataclasses.replace(attr, param=places[attr.param]) if isinstance(attr, Access) else attr


def _label(form: NodeForm) -> str:
    ops = "_".join(dict.fromkeys(_short(op) for op in form.operations if RULES[op.target].counts))
    return ops[:48].strip("_") or "copy"


def _digest(form: NodeForm) -> str:
    return hashlib.sha256(form.text().encode()).hexdigest()[:10]


def _lower(form: NodeForm) -> LoopKernel:
    """The loop form of a node whose operations share one nest."""
    context = Context(form)
    context.infer_all()
    stores = context.pull_outputs()
    params = [Param(item.name, item.spec.dtype, False) for item in form.inputs]
    params += [Param(f"o{n}", context.spec(ref).dtype, True) for n, ref in enumerate(form.outputs)]
    return schedule(
        nodes=context.builder.nodes,
        stores=stores,
        params=tuple(params),
        symbols=form.symbols,
        label=_label(form),
        digest=_digest(form),
        comments=tuple(describe(op) for op in form.operations),
    )


def lower_tile(form: NodeForm, tile: ValueRef, name: str) -> tuple[LoopKernel, tuple[tuple[int, ...], ...]]:
    """The loop form of a node that works on tiles of an input: on the places where the input is read, nowhere else.

    Out: the kernel, and the dims of it that the input's leading dims, its last but one and its last have become.
    Raises LoweringError where a value is reduced, or where the input is read at another place than it is used for.
    """
    context = Context(form)
    context.infer_all()
    stores = context.pull_outputs()
    params = [Param(item.name, item.spec.dtype, False) for item in form.inputs]
    params += [Param(f"o{n}", context.spec(ref).dtype, True) for n, ref in enumerate(form.outputs)]
    own, index = params.index(Param(tile.name, context.spec(tile).dtype, False)), context.canonical(tile)
    here = AtomAccess(own, linear_terms(index, context.spec(tile).strides)[0])
    for node in context.builder.nodes:
        reads = isinstance(node.attr, AtomAccess) and node.attr.param == own
        if reads and (node.op, node.attr) != ("load", here):
            raise LoweringError("index", f"expected {tile.name} at the place of each element, found it at another")
    nest = [atoms_of(part) for part in (index[:-2], index[-2:-1], index[-1:])]
    comments = tuple(describe(op) for op in form.operations)
    return schedule_tile(nest, context.builder.nodes, stores, tuple(params), form.symbols, name, comments)


def _short(op: Operation) -> str:
    return op.short_name.strip("_").removeprefix("native_")


def describe(op: Operation) -> str:
    """One line of C comment for an operation, with the user's line."""
    reads = ", ".join(f"{r.name}.{r.index}" if r.index else r.name for r in op.inputs)
    shape = op.outputs[0].shape if op.outputs else ""
    line = f"{op.name} = {op.target}({reads}) {shape}"
    source = one_line(op.source or "").replace("*/", "* /")
    return f"{line}  # {source}" if source else line
