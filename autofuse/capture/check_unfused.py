"""Checks what a library says that its operator computes against the operator itself.

In: an operation with the registered form as its body, and likely values of the symbols. Out: nothing, or `NotTraced`
with the evidence. Guarantee: the operator is called on tensors of ours alone, with indices that are within bounds, and
the script's generators are as before. The same operation is checked once a process.

Criterion: in float64 the form is what it says; an element's distance from that is at most four times the largest
distance of the form in the operator's own dtypes, in the element's row or column, plus eight units in the last place.
16 bits, whose units are coarse, get three, and a bound of the mean. NaN and Inf stand in the same places, integers are
equal, shapes, dtypes and strides are those that were traced. A result that is finite and varies in no draw is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import _disable_current_modes

from autofuse.capture.decompose import NotTraced
from autofuse.codegen.inputs import Kind, ignored_classes, make_inputs, names_with_roles
from autofuse.codegen.reference import run_operation, run_unfused, to_float64, widen
from autofuse.errors import AutofuseError
from autofuse.ir.composites import without_librarys
from autofuse.ir.operation import BYTES_PER_ELEMENT, NodeForm, NodeInput, Operation, TensorSpec, ValueRef
from autofuse.ir.shape import evaluate
from autofuse.library_operators import Unfused
from autofuse.preserve_rng import generators, keep_generators, untouched

Draw = Literal["normal", "large", "special", "zeros", "rows"]
DRAWS: tuple[Draw, ...] = ("normal", "rows", "special", "large", "zeros")
_WORDS: dict[Draw, str] = {
    "normal": "normal numbers",
    "rows": "rows of normal, zero and small numbers",
    "special": "numbers with NaN and Inf",
    "large": "large numbers",
    "zeros": "zeros",
}
FEW_DRAWS: tuple[Draw, ...] = ("rows", "special")  # of large tensors
TIMES, ULPS = 4.0, 8.0
HALF_ULPS = 3.0  # which are 2 % in bfloat16
HALF_TIMES, HALF_MEAN_ULPS = 2.0, 0.5
ROW = 32  # fewer elements do not tell how large an error may be
CALLS = 2  # of an operator that seems to draw random numbers
MANY_BYTES, MOST_BYTES = 4 << 20, 16 << 20  # of all arguments and results: a check has about five of each
SECONDS = 5.0  # of a check after its first draw
UNKNOWN_SIZE = 8  # of a symbol without a likely value
_DRAWS = "draws"  # the key of an operator that draws, whatever its arguments


def check_unfused(op: Operation, unfused: Unfused, hints: Mapping[str, int]) -> None:
    """Raises NotTraced where the operator does not compute what its body says."""
    form = form_of_one(op)
    sizes = {name: hints.get(name, UNKNOWN_SIZE) for name in op.symbols}
    sizes |= {name: hints.get(name, UNKNOWN_SIZE) for item in form.inputs for name in item.spec.symbols}
    key = form.text(), str(sorted(sizes.items()))
    if key not in unfused.found:
        with untouched(), _disable_current_modes():  # capture runs under a fake-tensor mode
            try:
                unfused.found[key] = _problem(form, sizes, unfused)
            except Exception as error:  # such as too little memory: the operator is there
                unfused.found[key] = f"it could not be checked ({type(error).__name__}: {_first_line(error)})"
    if unfused.found[key]:
        raise NotTraced(unfused.found[key])


def form_of_one(op: Operation) -> NodeForm:
    """An operation of a library's as a node by itself, in the graph's symbols."""
    assert op.body is not None
    specs = dict(zip(op.inputs, (item.spec for item in op.body.inputs), strict=True))
    names = {ref: f"i{n}" for n, ref in enumerate(specs)}
    own = replace(op.reading(lambda ref: ValueRef(names[ref])), name="v0", source=None)
    inputs = tuple(NodeInput(names[ref], spec) for ref, spec in specs.items())
    return NodeForm(inputs, (own,), tuple(ValueRef("v0", n) for n in range(len(op.outputs))))


def _problem(form: NodeForm, sizes: dict[str, int], unfused: Unfused) -> str:
    """What is wrong with an operation; "" for nothing."""
    specs = [*(item.spec for item in form.inputs), *form.operations[0].outputs]
    if not all(spec.dtype in BYTES_PER_ELEMENT for spec in specs):
        return "it has a dtype that no kernel computes with"
    nbytes = _bytes_that_fit(specs, sizes)
    if nbytes > MOST_BYTES:
        return f"its tensors of {nbytes >> 20} MiB are too large to be checked"
    plain = without_librarys(form)
    unnamed = [n for n, item in enumerate(form.inputs) if is_int(item.spec.dtype)]
    unnamed = [n for n in unnamed if form.inputs[n].name not in names_with_roles(plain)]
    if unnamed:
        return f"random integers might be out of bounds: the function does not tell what argument {unnamed[0]} indexes"
    check, began = _Check(form, plain, sizes, unfused), perf_counter()
    draws = DRAWS if nbytes <= MANY_BYTES else FEW_DRAWS
    for seed, kind in enumerate(draws):
        problem = check.difference(seed, kind)
        if problem:
            return problem
        if seed == 0:
            began = perf_counter()  # a first call may compile the operator
        elif kind != draws[-1] and perf_counter() - began > SECONDS:
            return f"checking it takes longer than {SECONDS} s"
    return check.no_evidence()


def _bytes_that_fit(specs: Sequence[TensorSpec], sizes: dict[str, int]) -> int:
    """Bytes of all tensors, with the largest symbols made smaller until these fit."""
    while True:
        nbytes = sum(evaluate(spec.numel, sizes) * BYTES_PER_ELEMENT[spec.dtype] for spec in specs)
        largest = max(sizes, key=lambda name: sizes[name], default="")
        if nbytes <= MANY_BYTES or not largest or sizes[largest] <= UNKNOWN_SIZE:
            return nbytes
        sizes[largest] = max(UNKNOWN_SIZE, sizes[largest] // 2)


def safe_inputs(
    plain: NodeForm, sizes: Mapping[str, int] | Sequence[int], seed: int, kind: Kind, device: torch.device | None = None
) -> list[torch.Tensor]:
    """Inputs that an operator may be called on which checks no index: none is negative, but for ignored classes."""
    with torch.device("cpu"):  # a script may have another default
        found = make_inputs(plain, sizes, seed, kind, device)
    ignored = ignored_classes(plain)
    for item, tensor in zip(plain.inputs, found, strict=True):
        if is_int(item.spec.dtype):
            own = _once(tensor)
            own.masked_fill_((own < 0) & (own != ignored.get(item.name, 0)), 0)
    return found


def is_int(dtype: str) -> bool:
    return dtype != "bool" and "float" not in dtype


def _once(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with elements that share memory named once, so that it can be written to."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and stride == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _scale_rows(tensor: torch.Tensor) -> None:
    """One row as it is, one zero, one small, and so on: a norm's epsilon counts in the latter two."""
    own = _once(tensor)
    count = own[..., :1].numel() if own.dim() else 0
    if count:
        scales = torch.tensor([1.0, 0.0, 1e-3], dtype=own.dtype, device=own.device)
        own.mul_(scales[torch.arange(count, device=own.device) % 3].view(own[..., :1].shape))


class _Check:
    """The comparison of one operation with its body, and how far its results have varied."""

    def __init__(self, form: NodeForm, plain: NodeForm, sizes: Mapping[str, int], unfused: Unfused) -> None:
        self._op, self._form, self._plain, self._sizes = form.operations[0], form, plain, sizes
        self._unfused = unfused
        self._seen: list[set[float]] = [set() for _ in self._op.outputs]  # least and largest numbers of each result

    def difference(self, seed: int, kind: Draw) -> str:
        op, sizes = self._op, self._sizes
        device = torch.device(op.outputs[0].device)
        inputs = safe_inputs(self._plain, sizes, seed, "normal" if kind == "rows" else kind, device)
        if kind == "rows":
            named = names_with_roles(self._plain)
            for item, tensor in zip(self._form.inputs, inputs, strict=True):
                if tensor.is_floating_point() and item.name not in named:
                    _scale_rows(tensor)
        copies = [t.clone() for t in inputs]
        try:  # first: torch's operators look at indices
            ours = run_unfused(self._plain, copies, sizes)
            exact = run_unfused(to_float64(self._plain), widen(copies), sizes)
        except (AutofuseError, RuntimeError, IndexError, TypeError, ValueError) as error:
            return f"the function raised {type(error).__name__}: {_first_line(error)}"
        values = {ValueRef(item.name): t for item, t in zip(self._form.inputs, inputs, strict=True)}
        made, problem = _called(op, values, sizes, self._unfused)
        results = made if isinstance(made, tuple | list) else (made,)
        problem = problem or _how_impure(inputs, copies, results)
        if problem:
            return problem
        for number, spec in enumerate(op.outputs):
            shape, strides = spec.shape.bind(sizes), spec.strides.bind(sizes)
            problem = _laid_otherwise(results[number], shape, strides, getattr(torch, spec.dtype))
            problem = problem or _apart(results[number], ours[number], exact[number])
            if problem:
                return f"result {number} of {_WORDS[kind]}: {problem}"
            found = exact[number].double()
            found = found[found.isfinite()]
            if found.numel():
                self._seen[number] |= {float(found.min()), float(found.max())}
        return ""

    def no_evidence(self) -> str:
        """Which result no draw has told anything of; "" where there is none."""
        for number, (spec, seen) in enumerate(zip(self._op.outputs, self._seen, strict=True)):
            if evaluate(spec.numel, self._sizes) and len(seen) < 2:
                what = f"is {seen.pop():g} for" if seen else "has no finite number for"
                return f"result {number} {what} all random numbers, which shows nothing"
        return ""


def _called(
    op: Operation, values: Mapping[ValueRef, torch.Tensor], sizes: Mapping[str, int], unfused: Unfused
) -> tuple[Any, str]:
    """The operator's results, or what is wrong with them. What it drew is put back."""
    if _DRAWS in unfused.found:
        return (), unfused.found[_DRAWS]
    device = torch.device(op.outputs[0].device)
    for _ in range(CALLS):
        marks, restore = _generators(), keep_generators()
        try:
            with torch.no_grad(), torch.autocast(device.type, enabled=False):
                made = run_operation(op, values, sizes, device)
        except Exception as error:
            restore()
            return (), f"the operator raised {type(error).__name__} on random numbers: {_first_line(error)}"
        if _generators() == marks:
            return made, ""
        restore()  # also where another thread is alive: it would find other numbers than in eager
    unfused.found[_DRAWS] = "the operator draws random numbers"  # another thread does not draw each time
    return (), unfused.found[_DRAWS]


def _how_impure(inputs: Sequence[torch.Tensor], copies: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> str:
    """What an operator does beside returning new tensors; "" for nothing."""
    if not all(_same(a, b) for a, b in zip(inputs, copies, strict=True)):
        return "the operator writes to its arguments"
    storages = {t.untyped_storage().data_ptr() for t in inputs if t.numel()}
    if any(t.numel() and t.untyped_storage().data_ptr() in storages for t in results):
        return "the operator returns a part of an argument"
    return ""


def _generators() -> list[object]:
    return [generator.mark(generator.state()) for generator in generators()]


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0]


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(torch.equal(a, b)) or bool(((a == b) | ((a != a) & (b != b))).all())


def _laid_otherwise(found: torch.Tensor, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> str:
    """How a result is not as its operator's fake implementation says; "" where it is."""
    if (tuple(found.shape), found.dtype) != (tuple(shape), dtype):
        return f"the operator gives {found.dtype}{list(found.shape)}, its fake implementation {dtype}{list(shape)}"
    steps = zip(found.shape, found.stride(), strides, strict=True)
    if found.numel() and any(own != wanted for size, own, wanted in steps if size > 1):
        return f"the operator gives strides {list(found.stride())}, its fake implementation {list(strides)}"
    return ""


def _apart(operator: torch.Tensor, ours: torch.Tensor, exact: torch.Tensor) -> str:
    """How far the operator is from the function, where that is too far; "" where it is not."""
    if not operator.numel():
        return ""
    if not operator.is_floating_point():
        wrong = int((operator != ours).sum())
        return f"{wrong} of {operator.numel()} elements differ" if wrong else ""
    o, f, x = operator.double(), ours.double(), exact.double()
    rounded = exact.to(operator.dtype).double()  # what is finite in float64 alone
    odd = int((~(_same_kind(o, f) | _same_kind(o, rounded))).sum())
    if odd:
        return f"NaN or Inf in {odd} other places"
    finite = o.isfinite() & f.isfinite() & x.isfinite()
    if not bool(finite.any()):
        return ""
    about, is_half = torch.finfo(operator.dtype), operator.dtype in (torch.float16, torch.bfloat16)
    distance, own = ((t - x).abs().masked_fill_(~finite, 0.0) for t in (o, f))
    x = x.abs().masked_fill_(~finite, 0.0)
    bound = TIMES * _around(own, finite) + (HALF_ULPS if is_half else ULPS) * about.eps * x + about.tiny
    worst = int((distance - bound).argmax())
    found, allowed = float(distance.reshape(-1)[worst]), float(bound.reshape(-1)[worst])
    if found > allowed:
        return f"the operator is {found:.3g} away from the function, allowed are {allowed:.3g}"
    if is_half and int(finite.sum()) >= ROW:
        found, allowed = float(distance.mean()), float((HALF_TIMES * own + HALF_MEAN_ULPS * about.eps * x).mean())
        if found > allowed:
            return f"the operator is {found:.3g} away from the function in the mean, allowed are {allowed:.3g}"
    return ""


def _around(own: torch.Tensor, finite: torch.Tensor) -> torch.Tensor:
    """The largest error in an element's row, column and so on: those of another scale say nothing of it."""
    overall = own.max()
    found = overall.expand(own.shape)
    for dim in range(own.dim()):
        if own.shape[dim] >= ROW:
            counts = finite.sum(dim, keepdim=True)
            found = torch.minimum(found, own.amax(dim, keepdim=True).where(counts >= ROW, overall))
    return found


def _same_kind(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Both finite, both NaN, or the same infinity."""
    return (a == b) | (a.isfinite() & b.isfinite()) | (a.isnan() & b.isnan())
