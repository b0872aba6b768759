"""Checks what a library says that its operator computes against the operator itself.

In: an operation with the registered form as its body, and likely values of the symbols. Out: nothing, or `NotTraced`
with the evidence. Guarantee: the operator is called on tensors of ours alone, with indices that are within bounds, and
the script's generators are as before. The same operation is checked once a process.

Criterion: in float64 the form is what it says; the operator's distance from that is at most four times the distance of
the form in the operator's own dtypes, plus sixteen units in the last place at the result's scale. NaN and Inf stand in
the same places, integers are equal, shapes, dtypes and strides are those that were traced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch.utils._python_dispatch import _disable_current_modes

from autofuse.capture.decompose import NotTraced
from autofuse.codegen.inputs import Kind, make_inputs, names_with_roles
from autofuse.codegen.reference import run_operation, run_unfused, to_float64, widen
from autofuse.errors import AutofuseError
from autofuse.ir.composites import without_librarys
from autofuse.ir.operation import BYTES_PER_ELEMENT, NodeForm, NodeInput, Operation, ValueRef
from autofuse.ir.shape import evaluate
from autofuse.library_operators import Unfused
from autofuse.preserve_rng import generators, untouched

DRAWS: tuple[Kind, ...] = ("normal", "large", "special")
TIMES, ULPS = 4.0, 16.0
CALLS = 3  # of an operator that seems to draw random numbers
MOST_BYTES = 256 << 20  # of all arguments and results: a check has about five of each
UNKNOWN_SIZE = 8  # of a symbol without a likely value
IGNORED = -100  # torch's class that counts for nothing


def check_unfused(op: Operation, unfused: Unfused, hints: Mapping[str, int]) -> None:
    """Raises NotTraced where the operator does not compute what its body says."""
    form = form_of_one(op)
    sizes = {name: hints.get(name, UNKNOWN_SIZE) for name in op.symbols}
    sizes |= {name: hints.get(name, UNKNOWN_SIZE) for item in form.inputs for name in item.spec.symbols}
    key = form.text(), str(sorted(sizes.items()))
    if key not in unfused.found:
        with untouched(), _disable_current_modes():  # capture runs under a fake-tensor mode
            try:
                unfused.found[key] = _problem(form, sizes)
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


def _problem(form: NodeForm, sizes: Mapping[str, int]) -> str:
    """What is wrong with an operation; "" for nothing."""
    specs = [*(item.spec for item in form.inputs), *form.operations[0].outputs]
    if not all(spec.dtype in BYTES_PER_ELEMENT for spec in specs):
        return "it has a dtype that no kernel computes with"
    nbytes = sum(evaluate(spec.numel, sizes) * BYTES_PER_ELEMENT[spec.dtype] for spec in specs)
    if nbytes > MOST_BYTES:
        return f"its tensors of {nbytes >> 20} MiB are too large to be checked"
    plain = without_librarys(form)
    unnamed = [n for n, item in enumerate(form.inputs) if _is_int(item.spec.dtype)]
    unnamed = [n for n in unnamed if form.inputs[n].name not in names_with_roles(plain)]
    if unnamed:
        return f"random integers might be out of bounds: the function does not tell what argument {unnamed[0]} indexes"
    for seed, kind in enumerate(DRAWS):
        problem = _difference(form, plain, sizes, seed, kind)
        if problem:
            return problem
    return ""


def safe_inputs(
    plain: NodeForm, sizes: Mapping[str, int] | Sequence[int], seed: int, kind: Kind, device: torch.device | None = None
) -> list[torch.Tensor]:
    """Inputs that an operator may be called on which checks no index: none is negative, but for ignored classes."""
    with torch.device("cpu"):  # a script may have another default
        found = make_inputs(plain, sizes, seed, kind, device)
    for tensor in found:
        if not tensor.is_floating_point() and tensor.dtype is not torch.bool:
            tensor.masked_fill_((tensor < 0) & (tensor != IGNORED), 0)
    return found


def _is_int(dtype: str) -> bool:
    return dtype != "bool" and "float" not in dtype


def _difference(form: NodeForm, plain: NodeForm, sizes: Mapping[str, int], seed: int, kind: Kind) -> str:
    op = form.operations[0]
    device = torch.device(op.outputs[0].device)
    inputs = safe_inputs(plain, sizes, seed, kind, device)
    copies = [t.clone() for t in inputs]
    values = {ValueRef(item.name): t for item, t in zip(form.inputs, inputs, strict=True)}
    for number in range(CALLS):
        marks = _generators()
        try:
            with torch.no_grad(), torch.autocast(device.type, enabled=False):
                made = run_operation(op, values, sizes, device)
        except Exception as error:
            return f"the operator raised {type(error).__name__} on random numbers: {_first_line(error)}"
        if _generators() == marks:
            break
        if number + 1 == CALLS:  # another thread of the script does not draw each time
            return "the operator draws random numbers"
    if not all(_same(a, b) for a, b in zip(inputs, copies, strict=True)):
        return "the operator writes to its arguments"
    results = made if isinstance(made, tuple | list) else (made,)
    storages = {t.untyped_storage().data_ptr() for t in inputs if t.numel()}
    if any(t.numel() and t.untyped_storage().data_ptr() in storages for t in results):
        return "the operator returns a part of an argument"
    try:
        ours = run_unfused(plain, copies, sizes)
        exact = run_unfused(to_float64(plain), widen(copies), sizes)
    except (AutofuseError, RuntimeError, IndexError, TypeError, ValueError) as error:
        return f"the function raised {type(error).__name__}: {_first_line(error)}"
    for number, spec in enumerate(op.outputs):
        shape, strides = spec.shape.bind(sizes), spec.strides.bind(sizes)
        problem = _laid_otherwise(results[number], shape, strides, getattr(torch, spec.dtype))
        problem = problem or _apart(results[number], ours[number], exact[number])
        if problem:
            return f"result {number} of {kind} numbers: {problem}"
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
    o, f, x = o[finite], f[finite], x[finite]
    about = torch.finfo(operator.dtype)
    unit = max(float(x.abs().max()) * about.eps, about.tiny)
    distance, own = float((o - x).abs().max()), float((f - x).abs().max())
    bound = TIMES * own + ULPS * unit
    return f"the operator is {distance:.3g} away from the function, allowed are {bound:.3g}" if distance > bound else ""


def _same_kind(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Both finite, both NaN, or the same infinity."""
    return (a == b) | (a.isfinite() & b.isfinite()) | (a.isnan() & b.isnan())
