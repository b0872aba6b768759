"""Operations, tensors and fusion nodes: what passes from planning to code generation, tuning and routing.

In: the operations that capture read from a graph. Out: plain data that can be run op by op through aten (the unfused
variant and the reference), printed as C, sent to another process as JSON and rebuilt from the store. Guarantee: a
node's text form is canonical (inputs ``i0..``, values ``v0..``, symbols ``s0..``), so equal code in different layers
has one ``fusion_id``.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy

from autofuse.errors import FusionError, ShapeError
from autofuse.ir.shape import Dim, SymbolicShape, as_dim, evaluate
from autofuse.ir.validation import one_line, stored_name, stored_number, stored_operator, stored_word

BYTES_PER_ELEMENT = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip


@dataclass(frozen=True)
class TensorSpec:
    """What is known of a tensor before it exists."""

    shape: SymbolicShape  # sizes
    dtype: str  # torch's name without the prefix, such as "float32"
    strides: SymbolicShape  # in elements, as the traced metadata promises
    device: str = "cpu"  # device type, never an index

    def to_json(self) -> list[Any]:
        return [self.shape.to_json(), self.dtype, self.strides.to_json(), self.device]

    @classmethod
    def from_json(cls, data: Sequence[Any]) -> TensorSpec:
        return cls(SymbolicShape(data[0]), stored_name(data[1]), SymbolicShape(data[2]), stored_name(data[3]))

    def with_dims(self, change: Callable[[Dim], Dim]) -> TensorSpec:
        """The tensor with every size changed; numbers stay."""
        shape, strides = (
            SymbolicShape([d if isinstance(d, int) else change(d) for d in dims]) for dims in (self.shape, self.strides)
        )
        return replace(self, shape=shape, strides=strides)

    @property
    def symbols(self) -> tuple[str, ...]:
        """Names of the free symbols, in order of first appearance."""
        return tuple(dict.fromkeys((*self.shape.symbols, *self.strides.symbols)))

    @property
    def numel(self) -> Dim:
        return self.shape.numel

    @property
    def is_empty(self) -> bool:
        """Whether it has no elements, whatever the sizes are."""
        return any(dim == 0 for dim in self.shape)

    @property
    def nbytes(self) -> Dim:
        """Bytes of the elements, without gaps between strides."""
        return as_dim(self.numel * BYTES_PER_ELEMENT[self.dtype])


@dataclass(frozen=True)
class ValueRef:
    """A use of a tensor: output ``index`` of the operation or input called ``name``."""

    name: str
    index: int = 0


# An argument is a ValueRef, a Dim, a plain constant, a dtype/memory format as {"torch": "float32"}-like
# tagged tuple ("dtype", "float32"), or a tuple of arguments.
Arg = Any


@dataclass(frozen=True)
class Operation:
    """One aten call on named values."""

    name: str  # name of its result
    target: str  # overload, such as "aten.add.Tensor"
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    outputs: tuple[TensorSpec, ...]  # several for native_layer_norm and its like
    source: str | None = None  # "file.py:12 code" of the user's line
    body: NodeForm | None = None  # of a composite operator: what it is decomposed into, for the lowering alone

    @functools.cached_property
    def inputs(self) -> tuple[ValueRef, ...]:
        """Tensors read, in order of the arguments, repeats included."""
        return tuple(_refs((self.args, tuple(v for _, v in self.kwargs))))

    @property
    def short_name(self) -> str:
        """``aten.native_layer_norm.default`` is ``native_layer_norm``."""
        return self.target.split(".")[1]

    def kwarg(self, name: str, default: Arg = None) -> Arg:
        return dict(self.kwargs).get(name, default)

    def arg(self, index: int, default: Arg = None) -> Arg:
        return self.args[index] if index < len(self.args) else default

    @property
    def symbols(self) -> tuple[str, ...]:
        """Names of the free symbols of its outputs and arguments, in order of first appearance."""
        found = dict.fromkeys(name for spec in self.outputs for name in spec.symbols)

        def note(dim: Dim) -> Dim:
            found.update(dict.fromkeys(SymbolicShape([dim]).symbols))
            return dim

        map_arg((self.args, tuple(v for _, v in self.kwargs)), _same, note)
        return tuple(found)

    def reading(self, rename: Callable[[ValueRef], ValueRef]) -> Operation:
        """The operation on other values."""
        kwargs = tuple((k, map_arg(v, rename)) for k, v in self.kwargs)
        return replace(self, args=map_arg(self.args, rename), kwargs=kwargs)

    def with_dims(self, change: Callable[[Dim], Dim]) -> Operation:
        """The operation with every size changed."""
        return replace(
            self,
            args=map_arg(self.args, _same, change),
            kwargs=tuple((k, map_arg(v, _same, change)) for k, v in self.kwargs),
            outputs=tuple(spec.with_dims(change) for spec in self.outputs),
            body=None if self.body is None else self.body.with_dims(change),
        )

    def to_json(self) -> dict[str, Any]:
        data = {
            "name": self.name,
            "target": self.target,
            "args": [encode_arg(a) for a in self.args],
            "kwargs": {k: encode_arg(v) for k, v in self.kwargs},
            "outputs": [o.to_json() for o in self.outputs],
        }
        if self.source:
            data["source"] = self.source
        if self.body is not None:
            data["body"] = self.body.to_json()
        return data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Operation:
        source, body = data.get("source"), data.get("body")
        return cls(
            name=stored_name(data["name"]),
            target=stored_operator(data["target"]),
            args=tuple(decode_arg(a) for a in data["args"]),
            kwargs=tuple((stored_name(k), decode_arg(v)) for k, v in data["kwargs"].items()),
            outputs=tuple(TensorSpec.from_json(o) for o in data["outputs"]),
            source=None if source is None else one_line(source),
            body=None if body is None else _stored_body(body),
        )


def _stored_body(data: dict[str, Any]) -> NodeForm:
    if any("body" in op for op in data["operations"]):
        raise FusionError("expected a decomposition into operators without one, found one within another")
    return NodeForm.from_json(data)


def map_arg(arg: Arg, on_ref: Any, on_dim: Any = lambda d: d) -> Arg:
    """Rebuild an argument with each ValueRef and each symbolic dim replaced."""
    if isinstance(arg, ValueRef):
        return on_ref(arg)
    if isinstance(arg, sympy.Expr):
        return on_dim(arg)
    if isinstance(arg, tuple):
        return tuple(map_arg(a, on_ref, on_dim) for a in arg)
    return arg


def _same(ref: ValueRef) -> ValueRef:
    return ref


def _refs(arg: Arg) -> Iterable[ValueRef]:
    if isinstance(arg, ValueRef):
        yield arg
    elif isinstance(arg, tuple):
        for item in arg:
            yield from _refs(item)


def encode_arg(arg: Arg) -> Any:
    """To JSON. Floats keep inf and nan, which JSON has no numbers for."""
    if isinstance(arg, ValueRef):
        return {"ref": arg.name, "index": arg.index}
    if isinstance(arg, sympy.Expr):
        return {"dim": str(arg)}
    if isinstance(arg, float):
        return {"float": arg.hex() if arg == arg and abs(arg) != float("inf") else str(arg)}
    if isinstance(arg, tuple):
        return [encode_arg(a) for a in arg]
    if arg is None or isinstance(arg, bool | int | str):
        return arg
    raise TypeError(f"expected a value, a size or a plain constant as an argument, found {arg!r}")


def decode_arg(data: Any) -> Arg:
    if isinstance(data, dict):
        if "ref" in data:
            return ValueRef(stored_name(data["ref"]), stored_number(data["index"]))
        if "dim" in data:
            return as_dim(data["dim"])
        text = data["float"]
        return float(text) if text in ("inf", "-inf", "nan") else float.fromhex(text)
    if isinstance(data, list):
        return tuple(decode_arg(a) for a in data)
    if data is None or isinstance(data, bool):
        return data
    return stored_word(data) if isinstance(data, str) else stored_number(data)


@dataclass(frozen=True)
class NodeInput:
    """A tensor that enters a node."""

    name: str
    spec: TensorSpec


@dataclass(frozen=True)
class NodeForm:
    """The canonical, immutable content of a fusion node."""

    inputs: tuple[NodeInput, ...]
    operations: tuple[Operation, ...]
    outputs: tuple[ValueRef, ...]  # the values that leave, in order
    symbols: tuple[str, ...] = field(default=())  # free symbols s0.., in the order kernels take them
    # Operations that are a nest of their own, by their names, in the order of the nests; empty where all are one. Views
    # and constants are in none: each nest has those that it needs.
    stages: tuple[tuple[str, ...], ...] = field(default=())

    def __eq__(self, other: object) -> bool:
        # By text: 0.0 equals -0.0 and 1 equals True, which are other code. And at once: for every new shape of every
        # node its form is looked up.
        return self is other or (isinstance(other, NodeForm) and self._text == other._text)

    def __hash__(self) -> int:
        return hash(self._text)

    def spec(self, ref: ValueRef) -> TensorSpec:
        for item in self.inputs:
            if item.name == ref.name:
                return item.spec
        for op in self.operations:
            if op.name == ref.name:
                return op.outputs[ref.index]
        raise KeyError(ref)

    def with_dims(self, change: Callable[[Dim], Dim]) -> NodeForm:
        """The content of a composite operator with every size changed; it has no symbols of its own."""
        inputs = tuple(NodeInput(item.name, item.spec.with_dims(change)) for item in self.inputs)
        return NodeForm(inputs, tuple(op.with_dims(change) for op in self.operations), self.outputs)

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "inputs": [[i.name, i.spec.to_json()] for i in self.inputs],
            "operations": [op.to_json() for op in self.operations],
            "outputs": [[o.name, o.index] for o in self.outputs],
            "symbols": list(self.symbols),
        }
        return found | {"stages": [list(names) for names in self.stages]} if self.stages else found

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> NodeForm:
        """Raises FusionError and ShapeError for data that is no node."""
        found = cls(
            inputs=tuple(NodeInput(stored_name(name), TensorSpec.from_json(spec)) for name, spec in data["inputs"]),
            operations=tuple(Operation.from_json(op) for op in data["operations"]),
            outputs=tuple(ValueRef(stored_name(name), stored_number(index)) for name, index in data["outputs"]),
            symbols=tuple(map(stored_name, data["symbols"])),
            stages=tuple(tuple(map(stored_name, names)) for names in data.get("stages", ())),
        )
        found._check_refs()
        return found

    def _check_refs(self) -> None:
        """Check that all read values exist: in generated code another name could belong to something else."""
        counts = {item.name: 1 for item in self.inputs}
        for reads, name, count in [
            *((op.inputs, op.name, len(op.outputs)) for op in self.operations),
            (self.outputs, "", 0),
        ]:
            absent = [ref for ref in reads if not 0 <= ref.index < counts.get(ref.name, 0)]
            if absent:
                raise FusionError(
                    f"expected {absent[0].name}[{absent[0].index}] before it is read, found no such value"
                )
            counts[name] = count
        made = {op.name for op in self.operations}
        unknown = [name for names in self.stages for name in names if name not in made]
        if unknown:
            raise FusionError(f"expected stages of operations of the node, found {unknown[0]}")

    def text(self) -> str:
        """Canonical JSON text without source lines: equal text means equal code."""
        return self._text

    @functools.cached_property
    def _text(self) -> str:
        data = self.to_json()
        for op in data["operations"]:
            op.pop("source", None)
        return json.dumps(data, sort_keys=True, separators=(",", ":"))


def form_of(node: Any) -> NodeForm:
    """The node's form, whether it is one or has one."""
    return node if isinstance(node, NodeForm) else node.form


def bind_shapes(form: NodeForm, shapes: Sequence[Sequence[int]]) -> dict[str, int]:
    """Values of the node's symbols under which its inputs have these shapes; raises ShapeError where none fit."""
    if len(shapes) != len(form.inputs):
        raise ShapeError(f"expected {len(form.inputs)} shapes, one for each input, found {len(shapes)}")
    values: dict[str, int] = {}
    pending = list(zip(form.inputs, shapes, strict=True))
    # plain symbols first: an expression such as 2*s0 can then be checked, not solved
    for item, sizes in sorted(
        pending, key=lambda p: any(getattr(d, "is_Symbol", True) is False for d in p[0].spec.shape)
    ):
        for name, value in item.spec.shape.substitute(values).unify(sizes).items():
            values[name] = value
    missing = [s for s in form.symbols if s not in values]
    if missing:
        raise ShapeError(f"expected shapes that tell the values of {missing}, found only {values}")
    for item, sizes in pending:
        found = tuple(evaluate(d, values) for d in item.spec.shape)
        if found != tuple(sizes):
            raise ShapeError(f"expected the shape {found} for {item.name}, found {tuple(sizes)}")
    return values
