"""The protocol of lowering rules, and their view of the node that is lowered.

In: a `NodeForm` and the table of rules. Out: `Context`: the canonical index of each value, values at indices, loads.
Every rule has two methods: `infer` gives the loops over the dims of its outputs, `evaluate` gives the value of an
output at an index.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

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
from autofuse.errors import LoweringError
from autofuse.ir.composites import expanded
from autofuse.ir.operation import NodeForm, Operation, TensorSpec, ValueRef
from autofuse.ir.optable import OpKind, info
from autofuse.ir.shape import Dim, SymbolicShape, contiguous_strides

_REDUCES = (OpKind.REDUCTION, OpKind.NORMALISATION, OpKind.LOSS)
_ELEMENT_BY_ELEMENT = ("_native_batch_norm_legit_no_training",)  # of such a kind, yet element-wise
_MOST_STORES = 8  # of one output
_MAX_PULLS = 8  # evaluations of the outputs, repeated while views split atoms; views share most splits


class Rule(Protocol):
    """How an operator is lowered."""

    @property
    def counts(self) -> bool:
        """Whether the operator is worth naming in the kernel's name."""

    def infer(self, cx: Context, op: Operation) -> Sequence[Index | None]:
        """The canonical index of each output; None for an output that gets fresh loops."""

    def evaluate(self, cx: Context, op: Operation, output: int, index: Index) -> Val:
        """The value of output ``output`` at ``index``."""


class _Reading(NamedTuple):
    """A value at a place, under a guard."""

    ref: ValueRef
    place: Index
    guard: Val | None


class Context:
    """What rule functions see of a node while it is lowered; a composite operator is what it decomposes into."""

    def __init__(self, form: NodeForm, rules: Mapping[str, Rule]) -> None:
        whole, form = form, expanded(form)
        self.form = form
        self._parts = {op.name for op in form.operations} - {op.name for op in whole.operations}
        self._rules = rules
        self.builder = Builder()
        self._specs: dict[ValueRef, TensorSpec] = {ValueRef(i.name): i.spec for i in form.inputs}
        self._params = {item.name: n for n, item in enumerate(form.inputs)}
        self._operations = {op.name: op for op in form.operations}
        self._canonical: dict[ValueRef, Index] = {}
        self._values: dict[_Reading, Val] = {}
        self._bounds: dict[tuple[str, int], set[int]] = {}  # operation, number of the index -> its checked values
        # A reduction runs over all units of a concatenation in a loop; then the stores do so too.
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

    def is_input(self, ref: ValueRef) -> bool:
        """Whether a value comes from outside of the node."""
        return ref.name in self._params

    def operation_of(self, ref: ValueRef) -> Operation | None:
        """The operation that makes a value; None for an input."""
        return self._operations.get(ref.name)

    def is_part(self, op: Operation) -> bool:
        """Whether an operation is one of those that a composite operator decomposes into."""
        return op.name in self._parts

    def reads_inputs(self, op: Operation) -> bool:
        """Whether an operation's result depends on inputs of the node."""
        return any(r.name in self._params or self.reads_inputs(self._operations[r.name]) for r in op.inputs)

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
            rule = self._rules.get(op.target)
            if rule is None:
                raise LoweringError("no_rule", f"expected an operator with a lowering rule, found {op.target}")
            for n, index in enumerate(rule.infer(self, op)):
                if index is not None and n < len(op.outputs):
                    self._own(ValueRef(op.name, n), index)
        self._join_unrelated()

    def _join_unrelated(self) -> None:
        """Let tensors of one size that no operator ties together run over the same loops too."""
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
        key = _Reading(ref, resolve_index(index), self.builder.guard)
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
        return self._rules[op.target].evaluate(self, op, ref.index, index)

    def load(self, ref: ValueRef, spec: TensorSpec, index: Index) -> Val:
        """Read the memory of an input as a tensor of this spec."""
        return self.builder.load(self._params[ref.name], spec.dtype, index, spec.strides)

    def load_flat(self, ref: ValueRef, place: Word) -> Val:
        """Read a contiguous input at a place among all of its elements."""
        return self.builder.load(self._params[ref.name], self._specs[ref].dtype, (place,), (1,))

    def aliased_input(self, ref: ValueRef) -> ValueRef | None:
        """The input whose memory a value shows through views alone; None where the value is calculated or copied."""
        while ref.name not in self._params:
            op = self._operations[ref.name]
            source = op.args[0] if op.args else None
            if op.short_name not in _ALIASES or not isinstance(source, ValueRef):
                return None
            if op.short_name == "reshape" and not _is_contiguous(self.spec(source)):
                return None  # it may have copied
            ref = source
        return ref

    def pull_outputs(self) -> list[tuple[Val, AtomAccess]]:
        """Evaluate the outputs."""
        return self.pull(lambda: [store for n, ref in enumerate(self.form.outputs) for store in self._stores(n, ref)])

    def pull(self, make: Callable[[], list[tuple[Val, AtomAccess]]]) -> list[tuple[Val, AtomAccess]]:
        """Make stores; repeats until no view splits an atom any more, so that all values agree."""
        for _ in range(_MAX_PULLS):
            before = self._splits()
            self.builder, self._values, self._bounds = Builder(), {}, {}
            for op in self.form.operations:  # in order, so that a long chain needs no deep recursion
                self._try_evaluate(op)
            stores = make()
            if self._splits() == before:
                return stores
        raise LoweringError("views", "expected views that settle on common loops, found that they keep splitting")

    def _try_evaluate(self, op: Operation) -> None:
        with contextlib.suppress(LoweringError):  # raised again if an output needs it
            self.operand(ValueRef(op.name), self.canonical(ValueRef(op.name)))

    def _stores(self, number: int, ref: ValueRef) -> Iterator[tuple[Val, AtomAccess]]:
        """The store of an output, or one for each unit of a concatenated tensor."""
        index, spec = self.canonical(ref), self.spec(ref)
        if ref.name in self._operations and info(self._operations[ref.name].target).kind is OpKind.PART:
            raise LoweringError("window", "expected an output with memory of its own, found a part of another tensor")
        if spec.is_empty:
            if spec.device != "cpu" and not all(self.spec(other).is_empty for other in self.form.outputs):
                return  # a GPU's log sigmoid has such a result beside its own
            raise LoweringError("empty", f"expected an output with elements, found the shape {spec.shape}")
        _check_distinct(index, spec)
        for place in self._unrolled(resolve_index(index)):
            value = self.operand(ref, place)
            terms, _ = linear_terms(place, spec.strides)
            yield value, AtomAccess(len(self.form.inputs) + number, terms, 0, linear_offset(place, spec.strides))

    def _unrolled(self, index: Index) -> list[Index]:
        """One index for each combination of places in unrolled loops; the index itself where these are too many."""
        atoms = [a for a in atoms_of(index) if a.is_unrolled]
        if not self._unrolls or math.prod(int(a.size) for a in atoms) > _MOST_STORES:
            return [index]
        found = []
        for places in itertools.product(*(range(int(a.size)) for a in atoms)):
            known = {a: Moved(k, a.size) for a, k in zip(atoms, places, strict=True)}
            found.append(tuple(tuple(known[p] if isinstance(p, Atom) and p in known else p for p in w) for w in index))
        return found

    def checked(self, op: Operation, number: int, value: Val, size: Dim) -> Val:
        """Index ``number`` of an operation, which eager refuses outside of [0, size)."""
        found = self.builder.checked(value, size)
        self._bounds.setdefault((op.name, number), set()).add(found.number)
        return found

    def check_bounds(self, stores: Sequence[tuple[Val, AtomAccess]]) -> None:
        """Raise LoweringError where no output depends on an index that eager would look at."""
        live = {value.number for value, _ in stores}
        for number in range(len(self.builder.nodes) - 1, -1, -1):
            if number in live:
                live.update(self.builder.nodes[number].args)
        for (name, _), numbers in self._bounds.items():
            if not numbers & live:
                raise LoweringError("unread", f"expected every index to be looked at, found one of {name} that is not")

    def _splits(self) -> int:
        return sum(len(atoms_of(index)) for index in self._canonical.values())

    # ---- shared by rules

    def reduce_word(self, ref: ValueRef, dim: int, index: Index) -> Word:
        """The loops over dim ``dim`` of a tensor while its other dims are at ``index``.

        Raises LoweringError where ``index`` has some of these loops.
        """
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
    """Raise LoweringError where elements of an output share memory (stride 0): they cannot be written in parallel.

    So it is where one loop runs over two dims, which would leave elements out.
    """
    atoms = atoms_of(index)
    if len(set(atoms)) < len(atoms):
        raise LoweringError("overlap", f"expected a loop for each dim of {spec.shape}, found one that is shared")
    for word, stride in zip(index, spec.strides, strict=True):
        if resolve(word) and stride == 0:
            raise LoweringError("overlap", f"expected an output with memory of its own, found strides {spec.strides}")
