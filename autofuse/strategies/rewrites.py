"""Rewrites: chains for which a library has one kernel, each a row of a table.

In: the form of a group. Out: forms with the chain replaced by one operation ``vendor.<name>.default``. Guarantee:
inputs and outputs stay the same. Whether the extern kernel is right and faster is measured later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from autofuse.fusion.graph import FusionGraph
from autofuse.ir.operation import NodeForm, Operation, TensorSpec, ValueRef
from autofuse.ir.optable import FUSIBLE, info
from autofuse.ir.shape import SymbolicShape, contiguous_strides
from autofuse.strategies.chains import Link, as_shape, is_contiguous, keep_order, next_link, number, replaced, result_of
from autofuse.strategies.joined_matmuls import joined_products
from autofuse.strategies.sdpa_match import attention_rewrites
from autofuse.strategies.sdpa_training_match import DEVICES, SDPA_TRAINING, training_rewrite
from autofuse.strategies.strategy import graph_of

LINEARS = ("addmm", "mm")
BIAS_APART = "bias_apart"
LONE = ("onednn_product", "onednn_product_rows")  # names of rewrites of a matmul that take in nothing else


@dataclass(frozen=True)
class Rewrite:
    """A form with the same results through an extern kernel."""

    name: str
    form: NodeForm
    detail: str


# Activations: oneDNN's names, and the arguments beside the tensor, with eager's defaults.
ONEDNN_UNARY: dict[str, tuple[str, tuple[float, ...]]] = {
    "relu": ("relu", ()),
    "silu": ("swish", ()),
    "tanh": ("tanh", ()),
    "sigmoid": ("sigmoid", ()),
    "hardswish": ("hardswish", ()),
    "leaky_relu": ("leaky_relu", (0.01,)),
    "hardtanh": ("hardtanh", (-1.0, 1.0)),  # ReLU6 too
}
ONEDNN_DTYPES = ("float32", "bfloat16", "float16")
ONEDNN_BINARY = {"add": "add", "mul": "mul"}


def activation(op: Operation) -> tuple[str, str, tuple[float, ...]] | None:
    """oneDNN's name, algorithm and numbers of an element-wise operation."""
    if op.short_name == "gelu":
        return "gelu", str(op.kwarg("approximate", "none")), ()
    if op.short_name not in ONEDNN_UNARY or op.kwargs:
        return None
    name, defaults = ONEDNN_UNARY[op.short_name]
    found = [number(arg) for arg in op.args[1:]]
    given = tuple(value for value in found if value is not None)
    if len(given) != len(found) or len(given) > len(defaults):
        return None
    return name, "none", (*given, *defaults[len(given) :])


def rewrites(form: NodeForm) -> list[Rewrite]:
    """All rewrites of a form, each of one chain of it; a form with equal chains has all of them replaced."""
    found: dict[str, Rewrite] = {}
    for rule in (_linears, _sums, _convolutions, _attentions):
        for rewrite in rule(form):
            found.setdefault(rewrite.name, rewrite)
    return list(found.values())


Step = Callable[[FusionGraph, Operation], tuple[list[Operation], list[Operation], str] | None]


def _each(form: NodeForm, name: str, anchors: Callable[[Operation], bool], step: Step) -> Iterator[Rewrite]:
    """One rewrite, with every chain replaced that ``step`` can replace: (chain, new operations, words)."""
    current, words = form, list[str]()
    for anchor in [op.name for op in form.operations if anchors(op)]:
        graph = graph_of(current)
        if anchor not in graph.by_name:
            continue
        made = step(graph, graph.by_name[anchor])
        if made is not None:
            current = replaced(current, made[0], made[1])
            words.append(made[2])
    if words:
        yield Rewrite(name, current, "; ".join(dict.fromkeys(words)))


# ---- matmuls ----------------------------------------------------------------------------------------


def _linears(form: NodeForm) -> Iterator[Rewrite]:
    device = _device(form)
    if device == "cpu":
        yield from _each(form, "onednn_linear", lambda op: op.short_name in LINEARS, _onednn_linear)
        steps = (_onednn_product, _onednn_product_of_rows)
        for name, step in zip(LONE, steps, strict=True):
            yield from _each(form, name, lambda op: op.short_name in LINEARS, step)
        yield from _each(form, BIAS_APART, lambda op: op.short_name == "addmm", _bias_apart)
    elif device == "cuda":
        yield from _each(form, "cublas_epilogue", lambda op: op.short_name == "addmm", _addmm_activation)


def _onednn_linear(graph: FusionGraph, op: Operation) -> tuple[list[Operation], list[Operation], str] | None:
    parts = _linear_parts(graph, op)
    link = next_link(graph, op)
    if parts is None or link is None or op.outputs[0].dtype not in ONEDNN_DTYPES or not keep_order(graph, link.views):
        return None
    bias, x, weight = parts
    name = f"{op.name}_fused"
    unary = activation(link.operation) if link.operand == 0 else None
    if unary is not None:
        args: tuple[object, ...] = (x, weight, bias, None, *unary)
        words = f"oneDNN's matmul with {link.operation.short_name} inside"
    else:
        other = _other_operand(graph, link, ONEDNN_BINARY)
        seen = as_shape(graph, other, op.outputs[0], f"{name}_other") if other is not None else None
        if seen is None:
            return None
        ref, extra = seen
        args = (x, weight, bias, ref, ONEDNN_BINARY[link.operation.short_name], "none", ())
        words = f"oneDNN's matmul with {link.operation.short_name} inside"
        return _chain(op, link), [*extra, *_vendor(op, link, "linear", name, args)], words
    return _chain(op, link), _vendor(op, link, "linear", name, args), words


def _onednn_product(graph: FusionGraph, op: Operation) -> tuple[list[Operation], list[Operation], str] | None:
    """oneDNN's matmul alone.

    In 16 bits aten itself calls oneDNN; in float32 it calls MKL, which is made for Intel's processors: on an AMD EPYC
    with AVX-512 oneDNN is 1.1 to 1.7 times as fast.
    """
    parts = _linear_parts(graph, op)
    if parts is None or op.outputs[0].dtype != "float32":
        return None
    bias, x, weight = parts
    args = (x, weight, bias, None, "none", "none", ())
    made = Operation(op.name, "vendor.linear.default", args, (), op.outputs, op.source)
    return [op], [made], "oneDNN's matmul"


def _onednn_product_of_rows(graph: FusionGraph, op: Operation) -> tuple[list[Operation], list[Operation], str] | None:
    """oneDNN's matmul of a copy of a transposed left operand (gradients of weights), which oneDNN copies slowly."""
    made = _onednn_product(graph, op)
    if made is None or is_contiguous(graph.spec(made[1][0].args[0])):
        return None
    chain, (product,), words = made
    x, *rest = product.args
    copy = Operation(
        f"{op.name}_rows",
        "aten.clone.default",
        (x,),
        (("memory_format", "contiguous_format"),),
        (_contiguous(graph.spec(x)),),
    )
    return chain, [copy, replace(product, args=(ValueRef(copy.name), *rest))], f"{words} of a contiguous copy"


def _bias_apart(graph: FusionGraph, op: Operation) -> tuple[list[Operation], list[Operation], str] | None:
    """Let the kernel that reads the matmul add the bias.

    Aten writes the bias into the whole result first, and its matmul reads that again. Not in 16 bits: there the matmul
    would be rounded once more than eager's.
    """
    parts = _linear_parts(graph, op)
    if parts is None or parts[0] is None or op.outputs[0].dtype not in ("float32", "float64"):
        return None
    if not any(info(reader.target).kind in FUSIBLE for reader in graph.readers[op.name]):
        return None
    bias, *operands = parts
    product = Operation(f"{op.name}_product", "aten.mm.default", tuple(operands), (), op.outputs, op.source)
    total = Operation(op.name, "aten.add.Tensor", (ValueRef(product.name), bias), (), op.outputs, op.source)
    return [op], [product, total], "the bias is added by the kernel that follows"


def _addmm_activation(graph: FusionGraph, op: Operation) -> tuple[list[Operation], list[Operation], str] | None:
    parts = _linear_parts(graph, op)
    link = next_link(graph, op)
    if parts is None or link is None or link.operand != 0 or not keep_order(graph, link.views):
        return None
    unary = activation(link.operation)
    if unary is None or unary[:2] not in (("relu", "none"), ("gelu", "tanh")):
        return None
    args = (parts[0], parts[1], parts[2], unary[0] == "gelu")
    new = _vendor(op, link, "addmm_activation", f"{op.name}_fused", args)
    return _chain(op, link), new, f"cuBLASLt's matmul with {link.operation.short_name} inside"


def _linear_parts(graph: FusionGraph, op: Operation) -> tuple[ValueRef | None, ValueRef, ValueRef] | None:
    """Bias, input and the weight as stored for eager, [K, N]; None for scaled sums and biases that are not a row."""
    if op.kwargs:
        return None
    if op.short_name == "mm":
        return None, op.args[0], op.args[1]
    bias, x, weight = op.args[:3]
    spec = graph.spec(bias)
    return (bias, x, weight) if len(spec.shape) == 1 and is_contiguous(spec) else None


def _other_operand(graph: FusionGraph, link: Link, names: dict[str, str]) -> ValueRef | None:
    """The second operand of an addition or multiplication of two tensors of one size and dtype."""
    op = link.operation
    if op.short_name not in names or op.target.split(".")[2] != "Tensor" or len(op.args) != 2 or op.kwargs:
        return None
    other = op.args[1 - link.operand]
    if not isinstance(other, ValueRef):
        return None
    spec, out = graph.spec(other), op.outputs[0]
    return other if (spec.shape, spec.dtype) == (out.shape, out.dtype) else None


def _chain(op: Operation, *links: Link) -> list[Operation]:
    return [op, *(o for link in links for o in (*link.views, link.operation))]


def _vendor(op: Operation, last: Link, kind: str, name: str, args: tuple[object, ...]) -> list[Operation]:
    """The extern operation with the sizes of ``op``, returned as the result of the last link."""
    spec = _contiguous(op.outputs[0])
    end = last.operation
    named = end.name if end.outputs[0].shape == spec.shape else name
    if named == end.name:
        spec = end.outputs[0]
    made = Operation(named, f"vendor.{kind}.default", args, (), (spec,), op.source)
    return [made, *result_of(end, ValueRef(named), spec)]


def _contiguous(spec: TensorSpec) -> TensorSpec:
    return replace(spec, strides=SymbolicShape(contiguous_strides(spec.shape.dims)))


def _sums(form: NodeForm) -> Iterator[Rewrite]:
    found = joined_products(form)
    if found is not None:
        yield Rewrite("joined_products", found, "matmuls that are added up as one of concatenated operands")


# ---- convolutions -----------------------------------------------------------------------------------


def _convolutions(form: NodeForm) -> Iterator[Rewrite]:
    device = _device(form)
    is_plain: Callable[[Operation], bool] = lambda op: op.short_name == "convolution" and op.arg(6) is False  # noqa: E731
    if device == "cpu":
        known: Callable[[Operation], bool] = lambda op: is_plain(op) and op.outputs[0].dtype in ONEDNN_DTYPES  # noqa: E731
        yield from _each(form, "onednn_conv", known, _fused_convolution)
        yield from _each(form, "onednn_conv_packed", known, _packed_convolution)
    elif device == "cuda":
        yield from _each(form, "cudnn_conv", is_plain, _fused_convolution)


def _packed_convolution(graph: FusionGraph, op: Operation) -> tuple[list[Operation], list[Operation], str] | None:
    """The convolution with weights in oneDNN's own layout: it is faster, but its result is channels last."""
    spec = op.outputs[0]
    made = _fused_convolution(graph, op) if len(spec.shape) == 4 and spec.dtype == "float32" else None
    if made is None:
        return None
    chain, (new,), words = made
    return chain, [replace(new, args=(*new.args[:-1], True))], f"{words}, weights packed"


def _fused_convolution(graph: FusionGraph, op: Operation) -> tuple[list[Operation], list[Operation], str] | None:
    """Convolution, inference batch norm, residual, activation: as many of them as follow each other."""
    x, weight, bias, stride, padding, dilation = op.args[:6]
    groups = op.args[8]
    if isinstance(bias, ValueRef) and not is_contiguous(graph.spec(bias)):
        return None  # oneDNN reads its memory from the first element on, whatever its stride
    link = next_link(graph, op)
    norm: tuple[object, ...] = ()
    links: list[Link] = []
    last = op
    if link is not None and link.operation.short_name == "_native_batch_norm_legit_no_training" and not link.views:
        bn = link.operation
        if any(ValueRef(bn.name, n) in {*graph.value_readers, *graph.leaving} for n in (1, 2)):
            return None
        norm = (*bn.args[1:5], bn.args[6])
        links.append(link)
        last, link = bn, next_link(graph, bn)
    other: ValueRef | None = None
    if link is not None and not link.views and op.outputs[0].dtype == link.operation.outputs[0].dtype:
        other = _other_operand(graph, link, {"add": "add"})
        if other is not None:
            links.append(link)
            last, link = link.operation, next_link(graph, link.operation)
    unary: tuple[str, str, tuple[float, ...]] = ("none", "none", ())
    if link is not None and link.operand == 0 and not link.views:
        found = activation(link.operation)
        # Beside a residual no activation with numbers: oneDNN is called without them (`extern_kernels`).
        on_cpu = _device(graph) == "cpu" and not (found and found[2] and other is not None)
        if found is not None and (on_cpu or found[0] == "relu"):
            links.append(link)
            unary, last = found, link.operation
    if not links:
        return None
    args = (x, weight, bias, norm, other, stride, padding, dilation, groups, *unary, False)
    made = Operation(last.name, "vendor.convolution.default", args, (), (last.outputs[0],), op.source)
    names = [
        o.short_name.strip("_").removeprefix("native_").removesuffix("_legit_no_training") for o in _chain(op, *links)
    ]
    folded = ", batch norm folded into the weights" if norm else ""
    return _chain(op, *links), [made], f"one convolution for {' + '.join(names)}{folded}"


# ---- attention --------------------------------------------------------------------------------------


def _attentions(form: NodeForm) -> Iterator[Rewrite]:
    found = attention_rewrites(form)
    if found is not None:
        yield Rewrite("sdpa", found, "scaled_dot_product_attention instead of matmul, softmax, matmul")
    found = training_rewrite(form) if _device(form) in DEVICES else None
    if found is not None:
        yield Rewrite(SDPA_TRAINING, found, "scaled_dot_product_attention forward and backward, no probabilities kept")


def _device(source: NodeForm | FusionGraph) -> str:
    if isinstance(source, FusionGraph):
        return source.operations[0].outputs[0].device
    return source.operations[0].outputs[0].device
