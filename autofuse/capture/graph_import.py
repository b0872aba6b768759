"""Turns an aten FX graph into operations, which are all that the planner sees of a captured graph.

In: a GraphModule from AOTAutograd with fake tensors in ``meta["val"]``. Out: an `ImportedGraph`: the operations in
program order, the specs of the inputs, likely values of the symbols. Guarantee: an operation that cannot be described
as data becomes opaque, never wrong. So does one whose tensors are on several devices (a number on the CPU beside
tensors of a GPU, two GPUs): all tensors of a node are on one device. Sizes that the shape environment proves equal get
one spelling, so that loops over them can be shared.
"""

from __future__ import annotations

import json
import logging
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import fx
from torch._guards import TracingContext
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from autofuse.capture.check_unfused import check_unfused, form_of_one
from autofuse.capture.decompose import NotTraced, decomposed, traced, without_writes
from autofuse.capture.graph_sizes import GraphSizes
from autofuse.capture.passes.random_ops import bernoulli_mask, dropout_scale, philox_dropout
from autofuse.errors import AutofuseError
from autofuse.fusion.graph import FusionGraph
from autofuse.ir.composites import accepts
from autofuse.ir.operation import NodeForm, NodeInput, Operation, TensorSpec, ValueRef
from autofuse.ir.optable import FUSIBLE, VIEWS, OpKind, info
from autofuse.ir.records import Refusal
from autofuse.ir.shape import Dim, SymbolicShape
from autofuse.library_operators import name_of, registered, target_of, with_defaults

log = logging.getLogger(__name__)

OURS = {
    bernoulli_mask: "autofuse.bernoulli_mask.default",
    dropout_scale: "autofuse.dropout_scale.default",
    philox_dropout: "autofuse.philox_dropout.default",
}
_NOTHING = TensorSpec(SymbolicShape([0]), "float32", SymbolicShape([1]))


@dataclass(frozen=True)
class ImportedGraph:
    """A captured graph as data, beside the FX graph it came from."""

    module: fx.GraphModule
    operations: tuple[Operation, ...]  # in program order
    inputs: dict[str, TensorSpec]
    outputs: tuple[ValueRef, ...]
    hints: dict[str, int]  # a likely value of each symbol
    derived: dict[str, sympy.Expr]  # our symbols for rounded quotients, such as a size divided by a stride
    refs: dict[fx.Node, ValueRef]  # FX nodes that hold tensors, as the operations name them
    dims: dict[fx.Node, Dim]  # FX nodes that hold sizes
    devices: dict[ValueRef, torch.device]  # the device of each tensor
    refusals: tuple[Refusal, ...]  # operations that could be fused if their tensors were on one device
    parameters: frozenset[str] = frozenset()  # inputs that are parameters or buffers

    def for_fusion(self) -> FusionGraph:
        """The graph as the planner takes it."""
        devices = {ref: str(device) for ref, device in self.devices.items()}
        return FusionGraph(
            self.operations, self.inputs, self.outputs, self.hints, self.parameters, devices, self.derived
        )


def import_graph(module: fx.GraphModule, with_libraries: bool = True) -> ImportedGraph:
    """Describe every tensor operation of ``module`` as data.

    ``with_libraries``: libraries' operators as what was registered for them, where that is right.
    """
    return _imported(module, GraphSizes(_shape_env(module)), with_libraries)


def _imported(module: fx.GraphModule, dims_of: GraphSizes, with_libraries: bool = False) -> ImportedGraph:
    refs: dict[fx.Node, ValueRef] = {}
    dims: dict[fx.Node, Dim] = {}
    inputs: dict[str, TensorSpec] = {}
    operations: list[Operation] = []
    outputs: list[ValueRef] = []
    devices: dict[ValueRef, torch.device] = {}
    refusals: list[Refusal] = []
    for node in module.graph.nodes:
        value = node.meta.get("val")
        if node.op == "output":
            outputs = [refs[n] for n in node.all_input_nodes if n in refs]
        elif isinstance(value, torch.SymInt | int) and not isinstance(value, bool):
            dim = dims_of(value)
            if dim is not None:
                dims[node] = dim
        elif node.op in ("placeholder", "get_attr"):
            if isinstance(value, torch.Tensor):
                refs[node] = ValueRef(node.name)
                inputs[node.name] = _spec(value, dims_of) or _NOTHING
        elif node.op == "call_function" and node.target is operator.getitem:
            parent = node.args[0]
            if parent in refs and isinstance(value, torch.Tensor):
                refs[node] = ValueRef(refs[parent].name, node.args[1])
            elif parent in refs and isinstance(value, list | tuple):  # several values in one output: higher-order ones
                operations.append(_opaque(node, value, refs, dims_of))
                refs[node] = ValueRef(node.name)
        elif node.op == "call_function":
            found = _devices_of(node)
            if len(found) == 1:
                operation = _operation(node, value, refs, dims_of, dims)
                operations.append(_of_library(node, operation, dims_of, refusals) if with_libraries else operation)
            else:
                operations.append(_opaque(node, value, refs, dims_of))
                refusals += _mixed(node, found)
            refs[node] = ValueRef(node.name)
        else:  # call_module and call_method do not occur below AOTAutograd
            operations.append(_opaque(node, value, refs, dims_of))
            refs[node] = ValueRef(node.name)
        for index, tensor in enumerate(_tensors(value)):
            if node in refs and isinstance(tensor, torch.Tensor):
                devices[ValueRef(refs[node].name, refs[node].index + index)] = _device(tensor)
    dims_of.finish()
    return ImportedGraph(
        module=module,
        operations=tuple(operations),
        inputs=inputs,
        outputs=tuple(outputs),
        hints=dims_of.hints,
        derived=dims_of.derived,
        refs=refs,
        dims=dims,
        devices=devices,
        refusals=tuple(refusals),
        parameters=parameters_of(module),
    )


_NOTE = "autofuse_parameters"


def note_parameters(module: fx.GraphModule, names: frozenset[str]) -> None:
    """Record on a graph which placeholders are parameters, which is known only while AOTAutograd makes it."""
    module.meta[_NOTE] = names


def parameters_of(module: fx.GraphModule) -> frozenset[str]:
    """Placeholders that AOTAutograd knows to be the same tensors at each call: parameters and buffers."""
    noted = module.meta.get(_NOTE)
    if isinstance(noted, frozenset):
        return noted
    context = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    fixed = set(metadata.static_input_indices or ()) if metadata is not None else set()
    found = set()
    for node in module.graph.nodes:
        if node.op == "placeholder":
            description = node.meta.get("desc")  # of each traced input: its kind, and its place among all inputs
            kind = type(description).__name__
            if kind in ("ParamAOTInput", "BufferAOTInput") or (kind == "PlainAOTInput" and description.idx in fixed):
                found.add(node.name)
    return frozenset(found)


def _device(value: torch.Tensor) -> torch.device:
    """The device with the index that a GPU's tensor always has; CPUs have none."""
    return torch.device(value.device.type) if value.device.type == "cpu" else value.device


def _devices_of(node: fx.Node) -> set[torch.device]:
    """Devices of all tensors that an operation reads or makes; the CPU where it has no tensors."""
    values = [node.meta.get("val"), *(n.meta.get("val") for n in node.all_input_nodes)]
    flat = [t for v in values for t in _tensors(v)]
    return {_device(t) for t in flat if isinstance(t, torch.Tensor)} or {torch.device("cpu")}


def _tensors(value: Any) -> Sequence[Any]:
    """The values of an operation with one output or several."""
    return value if isinstance(value, list | tuple) else (value,)


def _mixed(node: fx.Node, found: set[torch.device]) -> list[Refusal]:
    target = _target(node)
    if target is None or info(target).kind not in FUSIBLE:
        return []
    detail = f"its tensors live on {' and '.join(sorted(map(str, found)))}; a kernel reaches one device"
    return [Refusal("mixed_devices", False, target.split(".")[1], detail, source=_source(node) or "")]


def _shape_env(module: fx.GraphModule) -> ShapeEnv | None:
    for node in module.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            return value.node.shape_env
        if isinstance(value, torch.Tensor):
            for size in value.shape:
                if isinstance(size, torch.SymInt):
                    return size.node.shape_env
    return None


def _spec(value: torch.Tensor, dims_of: GraphSizes) -> TensorSpec | None:
    """The spec of a fake tensor; None where it is no plain strided tensor or a size is no polynomial."""
    if value.layout is not torch.strided or value.is_quantized:
        return None
    sizes = [dims_of(s) for s in value.shape]
    strides = [dims_of.stride(s) for s in value.stride()]
    if None in sizes or None in strides:
        return None
    return TensorSpec(SymbolicShape(sizes), _dtype(value.dtype), SymbolicShape(strides), value.device.type)


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_PLACEMENT = ("device", "layout", "pin_memory")  # a node runs on one device, on strided tensors


class _NotData(Exception):
    """An argument that has no form as data."""


def _operation(
    node: fx.Node, value: Any, refs: dict[fx.Node, ValueRef], dims_of: GraphSizes, dims: dict[fx.Node, Dim]
) -> Operation:
    target = _target(node)
    if target is None:
        return _opaque(node, value, refs, dims_of)
    outputs = _output_specs(node, value, dims_of)
    values = [t for n in node.all_input_nodes for t in _tensors(n.meta.get("val")) if isinstance(t, torch.Tensor)]
    try:
        if None in outputs or None in [_spec(t, dims_of) for t in values]:
            raise _NotData("a size that is no polynomial of the symbols")
        args = tuple(_arg(a, refs, dims_of, dims) for a in node.args)
        dropped = () if target_of(node.target) else _PLACEMENT  # a library's may mean anything by such a name
        kwargs = tuple((k, _arg(v, refs, dims_of, dims)) for k, v in node.kwargs.items() if k not in dropped)
    except _NotData:
        return _opaque(node, value, refs, dims_of)
    op = Operation(node.name, target, args, kwargs, tuple(o or _NOTHING for o in outputs), _source(node))
    return replace(op, body=body_of(node, op, dims_of)) if info(target).kind is OpKind.COMPOSITE else op


def body_of(node: fx.Node, op: Operation, dims_of: GraphSizes) -> NodeForm | None:
    """What a composite operator decomposes into, with the sizes of its graph; None where no kernel can be made of it.

    Its inputs are the tensors that the operator reads, repeats included.
    """
    try:
        return _body(decomposed(node), op, dims_of)
    except NotTraced:
        return None


def _of_library(node: fx.Node, op: Operation, dims_of: GraphSizes, refusals: list[Refusal]) -> Operation:
    """An operation of a library's as what it has registered; itself where there is nothing, or where that differs."""
    target = target_of(node.target)
    if target is None or op.target.startswith("opaque."):
        return op
    unfused = registered(target)
    assert unfused is not None
    try:
        if op.outputs[0].device != "cpu":
            raise NotTraced("on a GPU libraries' operators stay as they are: no race is run there")
        _refuse_placement(node)
        body = _body(traced(node, with_defaults(unfused), without_writes), op, dims_of)
        own = replace(op, target=target, body=body)
        _refuse_unstorable(own)
        check_unfused(own, unfused, dims_of.hints)
    except NotTraced as error:
        name = name_of(unfused.operator)
        refusals.append(Refusal("unfused_form", False, name, str(error), source=op.source or ""))
        return op
    return own


def _refuse_placement(node: fx.Node) -> None:
    """Dtypes and devices among the arguments of an aten operator are known by their names, a library's have others."""
    for arg in (*node.args, *node.kwargs.values()):
        if isinstance(arg, torch.dtype | torch.layout | torch.memory_format | torch.device):
            raise NotTraced(f"it is called with {arg}: an operator that takes that kind of argument is not followed")


def _refuse_unstorable(op: Operation) -> None:
    """A node that no store reads back would never get a kernel. Such are texts of more than words."""
    form = form_of_one(op)
    try:
        is_same = NodeForm.from_json(json.loads(json.dumps(form.to_json()))) == form
    except (AutofuseError, TypeError, ValueError) as error:
        raise NotTraced(f"the call cannot be stored: {error}") from None
    if not is_same:
        raise NotTraced("the call cannot be stored: it reads back as another")


_IN_BODIES = FUSIBLE - {OpKind.RANDOM, OpKind.COMPOSITE}


def _body(graph: fx.GraphModule, op: Operation, dims_of: GraphSizes) -> NodeForm:
    """A traced function as the body of an operation. Raises NotTraced where no kernel can be made of it."""
    found = _imported(graph, dims_of)
    for part in found.operations:
        if info(part.target).kind not in _IN_BODIES:
            raise NotTraced(_why_outside(part))
    if len(found.inputs) != len(op.inputs):
        raise NotTraced(f"the function has tensors beside its {len(op.inputs)} arguments")
    if len(found.outputs) != len(op.outputs):
        raise NotTraced(f"the function returns {len(found.outputs)} tensors, the operator {len(op.outputs)}")
    if not accepts(op, list(found.inputs.values())):
        raise NotTraced("eager refuses these arguments")
    made = {part.name: part for part in found.operations}
    operations, outputs = list(found.operations), list[ValueRef]()
    for ref, wanted in zip(found.outputs, op.outputs, strict=True):
        spec = made[ref.name].outputs[ref.index] if ref.name in made else found.inputs[ref.name]
        if (spec.shape, spec.dtype) != (wanted.shape, wanted.dtype):
            shapes = [f"{s.dtype}{list(map(str, s.shape))}".replace("'", "") for s in (spec, wanted)]
            raise NotTraced(f"the function returns {shapes[0]}, the operator {shapes[1]}")
        if spec != wanted or ref.name not in made or info(made[ref.name].target).kind in VIEWS:
            copy = Operation(f"{op.name}_copy{len(outputs)}", "aten.clone.default", (ref,), (), (wanted,))
            operations.append(copy)
            ref = ValueRef(copy.name)
        outputs.append(ref)
    return _canonical(
        NodeForm(tuple(NodeInput(*item) for item in found.inputs.items()), tuple(operations), tuple(outputs)), op
    )


def _why_outside(part: Operation) -> str:
    """Why no body of an operator may have this operation."""
    name = part.target.removeprefix("opaque.").removeprefix("aten.").removesuffix(".default")
    schema = getattr(getattr(torch.ops.aten, part.short_name, None), "default", None)
    if schema is not None and torch.Tag.nondeterministic_seeded in schema.tags:
        return f"the function draws random numbers ({name})"
    if part.short_name.endswith("_"):
        return f"the function writes to a tensor ({name})"
    return f"the function uses {name}, which no kernel of loops computes"


def _canonical(body: NodeForm, op: Operation) -> NodeForm:
    """The body with the names of a node's form.

    Raises NotTraced where it has a size that the operator's tensors do not tell.
    """
    names = {item.name: f"i{n}" for n, item in enumerate(body.inputs)}
    names |= {part.name: f"v{n}" for n, part in enumerate(body.operations)}

    def renamed(ref: ValueRef) -> ValueRef:
        return ValueRef(names[ref.name], ref.index)

    found = NodeForm(
        tuple(NodeInput(names[item.name], item.spec) for item in body.inputs),
        tuple(replace(part.reading(renamed), name=names[part.name], source=None) for part in body.operations),
        tuple(map(renamed, body.outputs)),
    )
    known = {*op.symbols, *(name for item in body.inputs for name in item.spec.symbols)}
    sizes = {name for part in body.operations for name in part.symbols}
    if not sizes <= known:
        raise NotTraced("it calculates sizes that no argument tells")
    return found


def _target(node: fx.Node) -> str | None:
    """The name of the operator; None for operators that are neither aten's nor ours."""
    if node.target in OURS:
        return OURS[node.target]
    if isinstance(node.target, torch._ops.OpOverload):
        return f"{node.target.namespace}.{node.target._schema.name.split('::')[1]}.{node.target._overloadname}"
    return None


def _opaque(node: fx.Node, value: Any, refs: dict[fx.Node, ValueRef], dims_of: GraphSizes) -> Operation:
    name = getattr(node.target, "__name__", str(node.target)).replace(".", "_")
    outputs = _output_specs(node, value, dims_of)
    read = tuple(refs[n] for n in node.all_input_nodes if n in refs)
    specs = tuple(o or _NOTHING for o in outputs)
    return Operation(node.name, f"opaque.{name}.default", read, (), specs, _source(node))


def _output_specs(node: fx.Node, value: Any, dims_of: GraphSizes) -> list[TensorSpec | None]:
    """Specs of the outputs; None for one with a size that is no polynomial, `_NOTHING` for what is no tensor."""
    values: list[Any] = list(value) if isinstance(value, list | tuple) else [value]
    for user in node.users:  # higher-order operators may describe their outputs only where these are read
        if user.target is operator.getitem and isinstance(user.args[1], int) and user.args[1] >= 0:
            values += [None] * (user.args[1] + 1 - len(values))
            values[user.args[1]] = user.meta.get("val", values[user.args[1]])
    return [_spec(v, dims_of) if isinstance(v, torch.Tensor) else _NOTHING for v in values]


def _arg(arg: Any, refs: dict[fx.Node, ValueRef], dims_of: GraphSizes, dims: dict[fx.Node, Dim]) -> Any:
    if isinstance(arg, fx.Node):
        if arg in refs:
            return refs[arg]
        if arg in dims:
            return dims[arg]
        raise _NotData(str(arg))
    if isinstance(arg, list | tuple):
        return tuple(_arg(a, refs, dims_of, dims) for a in arg)
    if isinstance(arg, torch.SymInt):
        dim = dims_of(arg)
        if dim is None:
            raise _NotData(str(arg))
        return dim
    if arg is None or isinstance(arg, bool | int | float | str):
        return arg
    if isinstance(arg, torch.dtype):
        return _dtype(arg)
    if isinstance(arg, torch.memory_format):
        return str(arg).removeprefix("torch.")
    if isinstance(arg, torch.device | torch.layout):
        return str(arg)
    raise _NotData(repr(arg))


def _source(node: fx.Node) -> str | None:
    """The user's line, as "file.py:12 code"; the last frame of the recorded stack."""
    trace = node.meta.get("stack_trace")
    if not trace:
        return None
    lines = [line.strip() for line in trace.strip().splitlines()]
    for index in range(len(lines) - 1, -1, -1):
        if lines[index].startswith("File "):
            parts = lines[index].split('"')
            number = lines[index].split("line ")[-1].split(",")[0]
            code = lines[index + 1] if index + 1 < len(lines) else ""
            return f"{parts[1].rsplit('/', 1)[-1]}:{number} {code}".strip()
    return None
