"""Correct before fast: a candidate against a float64 reference, relative to eager's own error.

In: a node, a function that makes the candidate's callable for an allocator, and cases (sizes and kinds of inputs).
Out: the largest ratio of the candidate's error to eager's own, or `Wrong`, which says how.
Criterion, for each output: the largest and the root-mean-square error are each at most twice eager's own plus four
units in the last place at the output's scale; NaN and Inf stand where eager or float64 have them; integers are those
of eager or of float64. Outputs are poisoned before each call and surrounded by guard bytes, inputs stay unchanged.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from autofuse.codegen.inputs import make_inputs
from autofuse.codegen.reference import run_unfused, to_float64, widen
from autofuse.ir.operation import NodeForm
from autofuse.tuner.cases import CheckCase

ULPS = 4.0  # libmvec's erf and log are within 4
ULPS_FLOAT64 = 64.0  # there eager is its own reference, so its error counts as 0
TIMES_EAGER = 2.0
GUARD_BYTES = 256
GUARD = 0xA5
REFERENCE_BYTES = 256 << 20  # references kept for the next candidate

# Their running formulas meet an infinite input with NaN or Inf by the order of elements, in eager as in ours.
_LOOSE_ON_SPECIALS = frozenset(
    {
        "var", "var_mean", "std", "native_layer_norm", "native_layer_norm_backward", "native_group_norm",
        "native_batch_norm", "native_batch_norm_backward", "_native_batch_norm_legit", "_fused_rms_norm_backward",
    }
)  # fmt: skip

MakeCall = Callable[["GuardedAllocator", Sequence[int]], Callable[..., Any]]


class Wrong(Exception):
    """The candidate's result is not acceptable; the message says how."""


@dataclass
class GuardedAllocator:
    """Allocates poisoned outputs between guard bytes."""

    bool_poison: bool = True  # either value is right half of the time: alternate
    blocks: list[tuple[torch.Tensor, int]] = field(default_factory=list)

    def __call__(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        extent = 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        nbytes = extent * dtype.itemsize
        padded = -(-nbytes // 64) * 64
        block = torch.full((padded + 2 * GUARD_BYTES,), GUARD, dtype=torch.uint8)
        self.blocks.append((block, nbytes))
        inside = block[GUARD_BYTES : GUARD_BYTES + nbytes].view(dtype)
        inside.fill_(self._poison(dtype))
        return torch.as_strided(inside, shape, strides)

    def _poison(self, dtype: torch.dtype) -> Any:
        if dtype.is_floating_point:
            return float("nan")
        return self.bool_poison if dtype is torch.bool else 99

    def check(self) -> None:
        """Raises Wrong where a guard byte changed."""
        for block, nbytes in self.blocks:
            before, after = block[:GUARD_BYTES], block[GUARD_BYTES + nbytes :]
            if bool((before != GUARD).any()) or bool((after != GUARD).any()):
                raise Wrong("wrote outside of an output")


@dataclass(frozen=True)
class _Reference:
    inputs: list[torch.Tensor]
    copies: list[torch.Tensor]  # of the inputs
    eager: tuple[torch.Tensor, ...]
    exact: tuple[torch.Tensor, ...]  # in float64

    @property
    def nbytes(self) -> int:
        groups = (self.inputs, self.copies, self.eager, self.exact)
        return sum(t.numel() * t.element_size() for group in groups for t in group)


class Verifier:
    """Checks the candidates of one node; what eager and float64 answer is computed once for all of them."""

    def __init__(self, form: NodeForm) -> None:
        self._form = form
        self._wide = to_float64(form)
        self._loose = any(op.short_name in _LOOSE_ON_SPECIALS for op in form.operations)
        self._references: OrderedDict[CheckCase, _Reference] = OrderedDict()

    def check(
        self, make_call: MakeCall, cases: Sequence[CheckCase], budget_seconds: float = 1e9, least: int = 1
    ) -> float:
        """The worst error ratio over the cases; those beyond ``least`` are left out once the budget is spent.

        Raises Wrong.
        """
        began = time.perf_counter()
        worst = 0.0
        for number, case in enumerate(cases):
            if number >= least and time.perf_counter() - began > budget_seconds:
                break
            try:
                worst = max(worst, self._check(make_call, case, number % 2 == 0))
            except Wrong as error:
                where = f"sizes {list(case.values)}, " if case.values else ""
                raise Wrong(f"{error} ({where}{case.kind} values)") from None
        return worst

    def _check(self, make_call: MakeCall, case: CheckCase, bool_poison: bool) -> float:
        reference = self._reference(case)
        allocator = GuardedAllocator(bool_poison)
        found = make_call(allocator, case.values)(*reference.inputs)
        outputs = found if isinstance(found, tuple) else (found,)
        allocator.check()
        for index, (tensor, copy) in enumerate(zip(reference.inputs, reference.copies, strict=True)):
            if not _same(tensor, copy):
                self._references.clear()
                raise Wrong(f"changed input {index}")
        loose = self._loose and case.kind == "special"
        triples = zip(outputs, reference.eager, reference.exact, strict=True)
        return max((_output_error(i, *three, loose) for i, three in enumerate(triples)), default=0.0)

    def _reference(self, case: CheckCase) -> _Reference:
        found = self._references.get(case)
        if found is None:
            inputs = make_inputs(self._form, case.values, 0, case.kind)
            if case.shifted:
                inputs = [_shift(t) for t in inputs]
            found = _Reference(
                inputs,
                [t.clone() for t in inputs],
                run_unfused(self._form, inputs, case.values),
                run_unfused(self._wide, widen(inputs), case.values),
            )
            self._references[case] = found
            while len(self._references) > 1 and sum(r.nbytes for r in self._references.values()) > REFERENCE_BYTES:
                self._references.popitem(last=False)
        return found

    def forget(self) -> None:
        """Free the references."""
        self._references.clear()


def _shift(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor one element behind an aligned address, as slices of larger tensors are."""
    extent = (
        0 if 0 in tensor.shape else 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    )
    block = torch.empty(extent + 1, dtype=tensor.dtype)
    block[1:] = tensor.as_strided((extent,), (1,))
    return block.as_strided(tuple(tensor.shape), tensor.stride(), 1)


# ---- comparing ------------------------------------------------------------------------------------------


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    if not left.is_floating_point():
        return bool(torch.equal(left, right))
    same = (left == right) | (left.isnan() & right.isnan())
    return bool(same.all())


def _output_error(index: int, found: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor, loose: bool) -> float:
    """The error over eager's own; raises Wrong where it is too large."""
    if found.shape != eager.shape or found.dtype != eager.dtype:
        raise Wrong(f"output {index} is {found.dtype}{list(found.shape)}, eager's {eager.dtype}{list(eager.shape)}")
    if not eager.numel():
        return 0.0
    if not eager.is_floating_point():
        # A comparison of two nearly equal floats may fall either way, as float64 shows.
        wrong = (found != eager) & (found != exact.to(eager.dtype))
        if bool(wrong.any()):
            raise Wrong(f"output {index}: {int(wrong.sum())} of {eager.numel()} elements differ from eager's")
        return 0.0
    f, e, x = found.double(), eager.double(), exact.double()
    _check_kinds(index, f, e, exact.to(eager.dtype).double(), loose)
    finite = f.isfinite() & e.isfinite() & x.isfinite()
    if not bool(finite.any()):
        return 0.0
    if not bool(finite.all()):
        f, e, x = f[finite], e[finite], x[finite]
    info = torch.finfo(eager.dtype)
    ulps = ULPS_FLOAT64 if eager.dtype is torch.float64 else ULPS
    worst = 0.0
    for name, norm in (("largest", _largest), ("root-mean-square", _rms)):
        own, ours, scale = norm(e - x), norm(f - x), norm(x)
        unit = max(scale * info.eps, info.tiny)
        if ours > TIMES_EAGER * own + ulps * unit:
            raise Wrong(f"output {index}: {name} error {ours:.3g}, eager's own {own:.3g}, scale {scale:.3g}")
        worst = max(worst, ours / max(own, unit))
    return worst


def _check_kinds(index: int, f: torch.Tensor, e: torch.Tensor, x: torch.Tensor, loose: bool) -> None:
    """NaN and Inf as in eager; where eager itself disagrees with float64 (gelu(inf) in float32), as in either."""
    kind = torch.isfinite if loose else _kind
    wrong = (kind(f) != kind(e)) & (kind(f) != kind(x))
    if bool(wrong.any()):
        raise Wrong(f"output {index} has {_count(f)}, eager {_count(e)}")


def _kind(t: torch.Tensor) -> torch.Tensor:
    """0 finite, 1 NaN, 2 Inf, -2 -Inf."""
    return t.isnan() * 1 + (t == float("inf")) * 2 - (t == float("-inf")) * 2


def _count(t: torch.Tensor) -> str:
    return f"{int(t.isnan().sum())} NaN and {int(t.isinf().sum())} Inf"


def _largest(values: torch.Tensor) -> float:
    return float(values.abs().max())


def _rms(values: torch.Tensor) -> float:
    return float(values.square().mean().sqrt())
