"""Random inputs of a node from its specs alone: shapes, strides, dtypes, and ranges that suit each input's role.

In: a `NodeForm`, symbol values, a seed, and a kind of values. Out: tensors.
Kinds: ``normal`` (unit scale), ``large`` (up to 1e4), ``zeros``, ``special`` (some NaN, Inf and signed zeros).
Guarantee: inputs whose meaning restricts their range get values within it: class targets, softmax results, masks,
standard deviations; expanded dims (stride 0) share memory as they do in a real run.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

import torch
from torch.nn import functional as F

from autofuse.codegen.call import torch_dtype
from autofuse.ir.composites import expanded
from autofuse.ir.indices import passes_indices
from autofuse.ir.operation import NodeForm, Operation, TensorSpec, ValueRef
from autofuse.ir.optable import OpKind, info
from autofuse.ir.shape import Dim, evaluate
from autofuse.ir.writes import indexed_sizes, is_write, needs_distinct, wraps

Kind = Literal["normal", "large", "zeros", "special"]
PERIOD = 65_521  # numbers drawn for a large tensor, then repeated; a prime, so that shorter rows all differ


def make_inputs(
    form: NodeForm,
    symbol_values: Mapping[str, int] | Sequence[int],
    seed: int = 0,
    kind: Kind = "normal",
    device: torch.device | None = None,
) -> list[torch.Tensor]:
    """Inputs for a node, on a device (the CPU if None); equal arguments give equal values."""
    if not isinstance(symbol_values, Mapping):
        symbol_values = dict(zip(form.symbols, symbol_values, strict=True))
    roles = _roles(form) | (_masks(form) if kind == "normal" else {})
    made = []
    for number, item in enumerate(form.inputs):
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{number}".encode()))
        role = roles.get(item.name)
        spec = item.spec
        sizes = spec.shape.bind(symbol_values)
        values = role(form, spec, sizes, symbol_values, generator) if role else _plain(spec, sizes, generator, kind)
        made.append(_place(values.to(torch_dtype(spec.dtype)), spec, symbol_values, device))
    return made


def _place(
    values: torch.Tensor, spec: TensorSpec, symbols: Mapping[str, int], device: torch.device | None
) -> torch.Tensor:
    """Copy values into memory with the spec's strides."""
    strides = tuple(evaluate(s, symbols) for s in spec.strides)
    tensor = torch.empty_strided(tuple(values.shape), strides, dtype=values.dtype, device=device)
    for dim, stride in enumerate(strides):  # elements that share memory get one value
        if stride == 0 and values.shape[dim] > 1:
            values = values.narrow(dim, 0, 1)
    base = tensor
    for dim, stride in enumerate(strides):
        if stride == 0 and base.shape[dim] > 1:
            base = base.narrow(dim, 0, 1)
    base.copy_(values)
    return tensor


def _plain(spec: TensorSpec, sizes: tuple[int, ...], generator: torch.Generator, kind: Kind) -> torch.Tensor:
    if spec.dtype == "bool":
        fill = torch.zeros(sizes) if kind == "zeros" else torch.rand(sizes, generator=generator)
        return fill > 0.4
    if not torch_dtype(spec.dtype).is_floating_point:
        low, high = (0, 1) if kind == "zeros" else (0, 20) if spec.dtype == "uint8" else (-20, 20)
        return torch.randint(low, max(high, low + 1), sizes, generator=generator)
    if kind == "zeros":
        return torch.zeros(sizes, dtype=torch.float64)
    values = _normal(sizes, generator)
    if kind == "large":
        values = values * 10 ** (4 * torch.rand(sizes, generator=generator, dtype=torch.float64))
    if kind == "special" and values.numel():
        chosen = torch.rand(sizes, generator=generator)
        for bound, special in ((0.01, float("nan")), (0.02, float("inf")), (0.03, float("-inf")), (0.04, -0.0)):
            values = torch.where((chosen < bound) & (chosen >= bound - 0.01), torch.full_like(values, special), values)
    return values


def _normal(sizes: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Normal random numbers of unit scale, float64.

    A tensor of more than `PERIOD` elements repeats the first ones, because drawing all of them takes longer than a
    kernel's check.
    """
    count = math.prod(sizes)
    if count <= PERIOD:
        return torch.randn(sizes, generator=generator, dtype=torch.float64)
    block = torch.randn(PERIOD, generator=generator, dtype=torch.float64)
    return block.repeat(-(-count // PERIOD))[:count].view(sizes)


def names_with_roles(form: NodeForm) -> frozenset[str]:
    """The inputs that an operator gives a meaning: indices, classes, probabilities."""
    return frozenset(_roles(form))


def ignored_classes(form: NodeForm) -> dict[str, int]:
    """The inputs that hold classes, each with the class that counts for nothing, which need not exist."""
    found, sources, indices = dict[str, int](), _view_sources(form), dict(_index_roles(expanded(form)))
    for op in form.operations:
        for _, target, ignore in _classes(op):
            name = sources.get(target.name, target.name)
            if name not in indices:
                found.setdefault(name, ignore)
    return found


# ---- roles ------------------------------------------------------------------------------------------

Role = Callable[[NodeForm, TensorSpec, tuple[int, ...], Mapping[str, int], torch.Generator], torch.Tensor]


def _positive(
    form: NodeForm, spec: TensorSpec, sizes: tuple[int, ...], symbols: Mapping[str, int], generator: torch.Generator
) -> torch.Tensor:
    return torch.rand(sizes, generator=generator, dtype=torch.float64) + 0.5


def _probabilities(dim: int, log: bool) -> Role:
    def role(
        form: NodeForm, spec: TensorSpec, sizes: tuple[int, ...], symbols: Mapping[str, int], generator: torch.Generator
    ) -> torch.Tensor:
        scores = torch.randn(sizes, generator=generator, dtype=torch.float64)
        if not sizes:
            return torch.zeros(()) if log else torch.ones(())
        return scores.log_softmax(dim) if log else scores.softmax(dim)

    return role


def _unit(
    form: NodeForm, spec: TensorSpec, sizes: tuple[int, ...], symbols: Mapping[str, int], generator: torch.Generator
) -> torch.Tensor:
    return torch.rand(sizes, generator=generator, dtype=torch.float64)


def _targets(scores: ValueRef, ignore: int) -> Role:
    def role(
        form: NodeForm, spec: TensorSpec, sizes: tuple[int, ...], symbols: Mapping[str, int], generator: torch.Generator
    ) -> torch.Tensor:
        shape = form.spec(scores).shape.bind(symbols)
        classes = max(1, shape[min(1, len(shape) - 1)])
        labels = torch.randint(0, classes, sizes, generator=generator)
        ignored = torch.rand(sizes, generator=generator) < 0.15
        if ignored.ndim and ignored.numel():
            ignored.view(-1)[0] = False
        elif not ignored.ndim:
            ignored = torch.zeros(sizes, dtype=torch.bool)
        return torch.where(ignored, torch.full_like(labels, ignore), labels)

    return role


def _indices(sizes_of: Sequence[Dim], wraps: bool, is_distinct: bool = False) -> Role:
    """Places in dims of all these sizes; some are negative where all readers count those from the end.

    ``is_distinct``: no place twice, where there are as many places as elements.
    """

    def role(
        form: NodeForm, spec: TensorSpec, sizes: tuple[int, ...], symbols: Mapping[str, int], generator: torch.Generator
    ) -> torch.Tensor:
        limit = max(1, min(evaluate(size, symbols) for size in sizes_of))
        found = torch.randint(-limit if wraps else 0, limit, sizes, generator=generator)
        if is_distinct and found.numel() <= limit:
            found = torch.randperm(limit, generator=generator)[: found.numel()].view(sizes)
        return found

    return role


def _maxima(op: Operation) -> Role:
    """Places of maxima as a forward pass over such an image finds them: aten's backward pass checks no bounds."""
    rank = 3 if "3d" in op.short_name else 2

    def role(
        form: NodeForm, spec: TensorSpec, sizes: tuple[int, ...], symbols: Mapping[str, int], generator: torch.Generator
    ) -> torch.Tensor:
        image = torch.rand(op.outputs[0].shape.bind(symbols), generator=generator)
        if op.short_name.startswith("adaptive"):
            forward: Callable[..., tuple[torch.Tensor, torch.Tensor]] = getattr(F, f"adaptive_max_pool{rank}d")
            return forward(image, sizes[-rank:], return_indices=True)[1]
        forward = getattr(torch.ops.aten, f"max_pool{rank}d_with_indices")
        return forward(image, *op.args[2:7])[1]

    return role


def _total(
    form: NodeForm, spec: TensorSpec, sizes: tuple[int, ...], symbols: Mapping[str, int], generator: torch.Generator
) -> torch.Tensor:
    return torch.full(sizes, 7.0)


_POSITIVE_ARGUMENTS = {
    "native_layer_norm_backward": (4,),
    "_fused_rms_norm_backward": (3,),
    "_native_batch_norm_legit_no_training": (4,),
    "native_batch_norm_backward": (4, 6),
    "native_group_norm_backward": (3,),
}  # argument positions of standard deviations and variances
_MAXIMA_ARGUMENTS = {
    "max_pool2d_with_indices_backward": 7,
    "max_pool3d_with_indices_backward": 7,
    "adaptive_max_pool2d_backward": 2,
    "adaptive_max_pool3d_backward": 2,
}


def _roles(form: NodeForm) -> dict[str, Role]:
    """The role of each input, found at the operators that read it, directly or through views."""
    sources = _view_sources(form)
    roles: dict[str, Role] = dict(_index_roles(expanded(form)))

    def note(ref: object, role: Role) -> None:
        if isinstance(ref, ValueRef):
            roles.setdefault(sources.get(ref.name, ref.name), role)

    for op in form.operations:
        for position in _POSITIVE_ARGUMENTS.get(op.short_name, ()):
            note(op.arg(position), _positive)
        for scores, target, ignore in _classes(op):
            note(target, _targets(scores, ignore))
            if op.short_name == "nll_loss_backward":
                note(op.args[6], _total)
        if op.short_name in ("_softmax_backward_data", "_log_softmax_backward_data"):
            note(op.args[1], _probabilities(int(op.args[2]), op.short_name.startswith("_log")))
        if op.short_name in ("tanh_backward", "sigmoid_backward"):
            note(op.args[1], _unit)
        if op.short_name.startswith("binary_cross_entropy") and not op.short_name.endswith("logits"):
            at = 1 if op.short_name.endswith("backward") else 0
            note(op.args[at], _unit)
            note(op.args[at + 1], _unit)
        if op.short_name == "log_sigmoid_backward":
            note(op.args[2], _unit)
        if op.short_name in _MAXIMA_ARGUMENTS:
            note(op.args[_MAXIMA_ARGUMENTS[op.short_name]], _maxima(op))
    return roles


def _classes(op: Operation) -> Iterator[tuple[ValueRef, ValueRef, int]]:
    """The scores, the classes and the ignored class of a loss."""
    if op.short_name in ("nll_loss_forward", "nll_loss2d_forward"):
        yield op.args[0], op.args[1], int(op.args[4])
    if op.short_name == "nll_loss_backward":
        yield op.args[1], op.args[2], int(op.args[5])


_ANY_INDEX = ("bucketize", "searchsorted", "_unsafe_masked_index")  # look values up, or clamp their places


def _index_roles(form: NodeForm) -> Iterator[tuple[str, Role]]:
    """The roles of inputs that index other tensors."""
    operations = {op.name: op for op in form.operations}
    limits: dict[str, list[Dim]] = {}
    strict: set[str] = set()
    distinct: set[str] = set()
    for op in form.operations:
        if not is_write(op) and (info(op.target).kind is not OpKind.INDEXED or op.short_name in _ANY_INDEX):
            continue
        shape, named = form.spec(op.args[0]).shape, op.arg(1)
        if is_write(op):
            pairs = indexed_sizes(op)
        elif isinstance(named, tuple):
            pairs = [(ref, shape[dim]) for dim, ref in enumerate(named) if ref is not None]
        elif op.short_name == "embedding":
            pairs = [(named, shape[0])]
        else:
            pairs = [(named, shape.numel)] if op.short_name == "take" else [(op.arg(2), shape[int(named)])]
        for ref, size in pairs:
            while ref.name in operations and operations[ref.name].inputs and passes_indices(operations[ref.name]):
                ref = operations[ref.name].inputs[0]
            name = ref.name
            limits.setdefault(name, []).append(size)
            if op.short_name in ("embedding", "index_select", "gather") or (is_write(op) and not wraps(op)):
                strict.add(name)
            if is_write(op) and needs_distinct(op):
                distinct.add(name)
    for name, sizes in limits.items():
        yield name, _indices(sizes, name not in strict, name in distinct)


def _masks(form: NodeForm) -> dict[str, Role]:
    """Roles for square masks of scores. They are most likely causal, which some kernels exploit."""
    sources = _view_sources(form)
    scores = {form.spec(op.args[0]).shape for op in form.operations if op.short_name == "_softmax"}
    found: dict[str, Role] = {}
    for op in form.operations:
        if op.target in ("aten.masked_fill.Scalar", "aten.add.Tensor") and isinstance(op.args[1], ValueRef):
            dims = form.spec(op.args[1]).shape.dims
            is_square = len(dims) > 1 and dims[-1] == dims[-2] and set(dims[:-2]) <= {1}
            if is_square and op.outputs[0].shape in scores:
                found[sources.get(op.args[1].name, op.args[1].name)] = _causal
    return found


def _causal(
    form: NodeForm, spec: TensorSpec, sizes: tuple[int, ...], symbols: Mapping[str, int], generator: torch.Generator
) -> torch.Tensor:
    hidden = torch.ones(sizes, dtype=torch.bool).triu(1)
    return hidden if spec.dtype == "bool" else torch.zeros(sizes).masked_fill(hidden, float("-inf"))


def _view_sources(form: NodeForm) -> dict[str, str]:
    """For each view or copy, the name of the value that it shows, followed through earlier views."""
    sources: dict[str, str] = {}
    for op in form.operations:
        if _is_view(op) and isinstance(op.args[0], ValueRef):
            name = op.args[0].name
            sources[op.name] = sources.get(name, name)
    return sources


_VIEWS = frozenset(
    [
        "view",
        "_unsafe_view",
        "reshape",
        "unsqueeze",
        "squeeze",
        "expand",
        "permute",
        "transpose",
        "t",
        "alias",
        "_to_copy",
        "clone",
    ]
)


def _is_view(op: Operation) -> bool:
    return op.short_name in _VIEWS
