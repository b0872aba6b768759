"""Correct before fast: a candidate against a float64 reference, relative to eager's own error.

In: a node, a function that makes the candidate's callable for an allocator, and cases (sizes and kinds of inputs).
Out: the largest ratio of the candidate's error to eager's own, or `Wrong`, which says how.
Criterion, for each output: the largest and the root-mean-square error are each at most twice eager's own plus four
units in the last place at the output's scale; NaN and Inf stand where eager or float64 have them; integers are those
of eager or of float64. Outputs are poisoned before each call and surrounded by guard bytes, inputs stay unchanged.
Eager's own error is one draw of many: where a candidate's is too large beside it, other inputs decide (`judge`).
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch

from autofuse.codegen.inputs import make_inputs
from autofuse.codegen.reference import run_unfused, to_float64, widen
from autofuse.errors import ShapeError
from autofuse.ir.operation import NodeForm, ValueRef
from autofuse.tuner.cases import CheckCase
from autofuse.wrapper.node_call import expected_outputs

ULPS = 4.0  # libmvec's erf and log are within 4
ULPS_FLOAT64 = 64.0  # for float64 eager itself is the reference, so its error counts as 0
TIMES_EAGER = 2.0
GUARD_BYTES = 256
GUARD = 0xA5
PASSED, REFUSED = 10, 8  # draws that decide where one was refused, including it
FAR = 16.0  # so many times the bound is no chance (7 was the most in 20,000 draws of attentions of 2 to 48 keys)
_SEED = 20_240_229
REFERENCE_BYTES = 256 << 20  # references that are kept for the next candidates

# For an infinite input, the running formulas of these give NaN or Inf by the order of elements, in eager as in ours.
_LOOSE_ON_SPECIALS = frozenset(
    {
        "var", "var_mean", "std", "native_layer_norm", "native_layer_norm_backward", "native_group_norm",
        "native_batch_norm", "native_batch_norm_backward", "_native_batch_norm_legit", "_fused_rms_norm_backward",
    }
)  # fmt: skip

MakeCall = Callable[["GuardedAllocator", Sequence[int]], Callable[..., Any]]


class Wrong(Exception):
    """The candidate's result is not acceptable; the message says how."""


class Inaccurate(Wrong):
    """The candidate's error is too large beside eager's on these inputs."""

    def __init__(self, message: str, times: float) -> None:
        """``times``: the error divided by the bound."""
        super().__init__(message)
        self.times = times


class Impossible(Exception):
    """Eager refuses a case, or has results of other sizes than the node says.

    The node's symbols depend on each other, or it computes indices, which random values put out of bounds.
    """


T = TypeVar("T")


def judge(draw: Callable[[int], T]) -> T:
    """The result of a draw that passes; raises Inaccurate where one error is far too large, or several are.

    ``draw`` takes a number, makes inputs from it, and raises Inaccurate where the error is over the bound. A single
    draw tells little: eager's error on the same inputs may happen to be small, the likelier the fewer terms it sums. A
    candidate as accurate as eager is refused in one draw of eight at worst, a less accurate one in nearly all draws.
    """
    passed = refused = 0
    while True:
        try:
            answer = draw(passed + refused)
        except Inaccurate as error:
            refused += 1
            if error.times > FAR or refused == REFUSED:
                raise
        else:
            passed += 1
            if not refused or passed == PASSED:
                return answer


@dataclass
class GuardedAllocator:
    """Allocates poisoned outputs between guard bytes."""

    bool_poison: bool = True  # either value may happen to be right, so it alternates
    device: torch.device | None = None
    blocks: list[tuple[torch.Tensor, int]] = field(default_factory=list)

    def __call__(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        extent = 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        nbytes = extent * dtype.itemsize
        padded = -(-nbytes // 64) * 64
        block = torch.empty(padded + 2 * GUARD_BYTES, dtype=torch.uint8, device=self.device)
        block[:GUARD_BYTES] = GUARD
        block[GUARD_BYTES + nbytes :] = GUARD
        self.blocks.append((block, nbytes))
        inside = block[GUARD_BYTES : GUARD_BYTES + nbytes].view(dtype)
        inside.fill_(self._poison(dtype))
        return torch.as_strided(inside, shape, strides)

    def _poison(self, dtype: torch.dtype) -> Any:
        if dtype.is_floating_point:
            return float("nan")
        return self.bool_poison if dtype is torch.bool else 99

    def check(self) -> None:
        """Check the guard bytes. Raises Wrong where one has changed."""
        for block, nbytes in self.blocks:
            before, after = block[:GUARD_BYTES], block[GUARD_BYTES + nbytes :]
            if bool((before != GUARD).any()) or bool((after != GUARD).any()):
                raise Wrong("wrote outside of an output")


@dataclass(frozen=True)
class _Norms:
    """Eager's own error against float64 and the scale of the output, each as largest value and root mean square."""

    own: tuple[float, float]
    scale: tuple[float, float]


@dataclass(frozen=True)
class Answer:
    """One output as eager and as float64 compute it; comparing a candidate with it takes one pass."""

    eager: torch.Tensor
    exact: torch.Tensor
    norms: _Norms | None  # None where an element is not finite, or the output has no floats


@dataclass(frozen=True)
class _Reference:
    inputs: list[torch.Tensor]
    copies: list[torch.Tensor]  # of the inputs, to see whether a candidate changes them
    answers: list[Answer]

    @property
    def nbytes(self) -> int:
        tensors = [*self.inputs, *self.copies, *(t for a in self.answers for t in (a.eager, a.exact))]
        return sum(t.numel() * t.element_size() for t in tensors)


class Verifier:
    """Checks the candidates of one node; results of eager and float64 are computed once for all of them."""

    def __init__(self, form: NodeForm, device: torch.device | None = None) -> None:
        """``device``: where inputs are made; None: the CPU."""
        self._form = form
        self._device = device
        self._wide = to_float64(form)
        self._loose = any(op.short_name in _LOOSE_ON_SPECIALS for op in form.operations)
        self._references: OrderedDict[tuple[CheckCase, int], _Reference] = OrderedDict()

    def check(
        self, make_call: MakeCall, cases: Sequence[CheckCase], budget_seconds: float = 1e9, least: int = 1
    ) -> float:
        """The worst error ratio over the cases; those after the first ``least`` are left out once the budget is spent.

        Cases that cannot be are passed over. Raises Wrong, and Impossible where no case can be.
        """
        began = time.perf_counter()
        worst, passed = 0.0, 0
        impossible: Impossible | None = None
        for number, case in enumerate(cases):
            if passed >= least and time.perf_counter() - began > budget_seconds:
                break
            try:
                worst = max(worst, judge(partial(self._check, make_call, case, number % 2 == 0)))
                passed += 1
            except Impossible as error:
                impossible = error
            except Wrong as error:
                where = f"sizes {list(case.values)}, " if case.values else ""
                text = f"{error} ({where}{case.kind} values)"
                raise (Inaccurate(text, error.times) if isinstance(error, Inaccurate) else Wrong(text)) from None
        if impossible is not None and not passed:
            raise impossible
        return worst

    def _check(self, make_call: MakeCall, case: CheckCase, bool_poison: bool, draw: int) -> float:
        reference = self._reference(case, draw)
        allocator = GuardedAllocator(bool_poison, self._device)
        call = make_call(allocator, case.values)
        begin_drawing(self._device)
        result = call(*reference.inputs)
        outputs = result if isinstance(result, tuple) else (result,)
        allocator.check()
        for index, (tensor, copy) in enumerate(zip(reference.inputs, reference.copies, strict=True)):
            if not _same(tensor, copy):
                self._references.clear()
                raise Wrong(f"changed input {index}")
        if len(outputs) != len(reference.answers):
            raise Wrong(f"{len(outputs)} outputs, eager has {len(reference.answers)}")
        for index, (found, (_, strides, _)) in enumerate(
            zip(outputs, expected_outputs(self._form, case.values), strict=True)
        ):
            _check_strides(index, found, strides)
        loose = self._loose and case.kind == "special"
        ratios, too_large = [0.0], []
        for index, (found, known) in enumerate(zip(outputs, reference.answers, strict=True)):
            try:
                ratios.append(output_error(index, found, known, loose))
            except Inaccurate as error:
                too_large.append(error)
        if too_large:
            raise max(too_large, key=lambda error: error.times)
        return max(ratios)

    def _reference(self, case: CheckCase, draw: int) -> _Reference:
        found = self._references.get((case, draw))
        if found is None:
            try:
                inputs = make_inputs(self._form, case.values, draw, case.kind, self._device)
            except ShapeError as error:  # a size that is a difference may be below 0 elsewhere in the bucket
                raise Impossible(str(error)) from error
            if case.shifted:
                inputs = [shifted(t) for t in inputs]
            masks: list[torch.Tensor] = []
            begin_drawing(self._device)
            eager = self._eager(inputs, case, masks)
            exact = run_unfused(self._wide, widen(inputs), case.values, masks)
            answers = [answer(e, x) for e, x in zip(eager, exact, strict=True)]
            found = _Reference(inputs, [t.clone() for t in inputs], answers)
            self._references[case, draw] = found
            while len(self._references) > 1 and sum(r.nbytes for r in self._references.values()) > REFERENCE_BYTES:
                self._references.popitem(last=False)
        return found

    def _eager(
        self, inputs: Sequence[torch.Tensor], case: CheckCase, masks: list[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        try:
            eager = run_unfused(self._form, inputs, case.values, masks)
        except IndexError as error:  # indices that the node computes itself
            raise Impossible(f"{error} ({case.kind} values)") from error
        except KeyError as error:
            if not isinstance(error.args[0], ValueRef):
                raise
            raise Impossible(f"fewer results than the node says (sizes {list(case.values)})") from error
        except RuntimeError as error:
            if "size" not in str(error) or isinstance(error, torch.cuda.OutOfMemoryError):
                raise
            raise Impossible(f"{error} (sizes {list(case.values)})") from error
        said = [shape for shape, _, _ in expected_outputs(self._form, case.values)]
        if [tuple(t.shape) for t in eager] != said:
            found = [list(t.shape) for t in eager]
            raise Impossible(f"expected results of {[*map(list, said)]}, found {found} (sizes {list(case.values)})")
        return eager

    def forget(self) -> None:
        """Free the references."""
        self._references.clear()


def _check_strides(index: int, found: torch.Tensor, strides: Sequence[int]) -> None:
    """Raises Wrong where an output has other strides than in the captured graph: its readers rely on them."""
    steps = [(own, wanted) for size, own, wanted in zip(found.shape, found.stride(), strides, strict=False) if size > 1]
    if found.numel() and any(own != wanted for own, wanted in steps):
        raise Wrong(f"output {index} has strides {found.stride()}, eager's {tuple(strides)}")


def begin_drawing(device: torch.device | None) -> None:
    """Reset a GPU's generator, so that eager and a candidate that uses random numbers begin with the same state."""
    if device is not None and device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(_SEED)


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that begins one element behind an aligned address, as slices of larger tensors do."""
    extent = (
        0 if 0 in tensor.shape else 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    )
    block = torch.empty(extent + 1, dtype=tensor.dtype, device=tensor.device)
    block[1:] = tensor.as_strided((extent,), (1,))
    return block.as_strided(tuple(tensor.shape), tensor.stride(), 1)


# ---- comparing ------------------------------------------------------------------------------------------


BITS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    bits = BITS.get(left.dtype)  # compare bits, by which NaN equals itself
    return bool(torch.equal(left, right) if bits is None else torch.equal(left.view(bits), right.view(bits)))


def answer(eager: torch.Tensor, exact: torch.Tensor) -> Answer:
    """The `Answer` for one output, from the results of eager and float64."""
    if not eager.is_floating_point() or not eager.numel():
        return Answer(eager, exact, None)
    e, x = eager.double(), exact.double()
    finite = bool(torch.isfinite(e.sum() + x.sum()))  # an overflow of the sum only makes the comparison slower
    return Answer(eager, x, _norms(e, x) if finite else None)


def _norms(eager: torch.Tensor, exact: torch.Tensor) -> _Norms:
    own = eager - exact
    return _Norms((_largest(own), _rms(own)), (_largest(exact), _rms(exact)))


def output_error(index: int, found: torch.Tensor, answer: Answer, loose: bool) -> float:
    """The ratio of an output's error to eager's own; raises Wrong where the error is too large."""
    eager, exact, norms = answer.eager, answer.exact, answer.norms
    if found.shape != eager.shape or found.dtype != eager.dtype:
        raise Wrong(f"output {index} is {found.dtype}{list(found.shape)}, eager's {eager.dtype}{list(eager.shape)}")
    if not eager.numel():
        return 0.0
    if not eager.is_floating_point():
        # Comparing two nearly equal floats may go either way, so float64's result is right too.
        wrong = (found != eager) & (found != exact.to(eager.dtype))
        if bool(wrong.any()):
            raise Wrong(f"output {index}: {int(wrong.sum())} of {eager.numel()} elements differ from eager's")
        return 0.0
    f, x = found.double(), exact
    if norms is None or not bool(torch.isfinite(f.sum())):
        e = eager.double()
        _check_kinds(index, f, e, exact.to(eager.dtype).double(), loose)
        finite = f.isfinite() & e.isfinite() & x.isfinite()
        if not bool(finite.any()):
            return 0.0
        f, x = f[finite], x[finite]
        norms = _norms(e[finite], x)
    error = f - x
    info = torch.finfo(eager.dtype)
    ulps = ULPS_FLOAT64 if eager.dtype is torch.float64 else ULPS
    worst = 0.0
    rows = zip(("largest", "root-mean-square"), (_largest(error), _rms(error)), norms.own, norms.scale, strict=True)
    for name, ours, own, scale in rows:
        unit = max(scale * info.eps, info.tiny)
        bound = TIMES_EAGER * own + ulps * unit
        if ours > bound:
            text = f"output {index}: {name} error {ours:.3g}, eager's own {own:.3g}, scale {scale:.3g}"
            raise Inaccurate(text, ours / bound)
        worst = max(worst, ours / max(own, unit))
    return worst


def _check_kinds(index: int, f: torch.Tensor, e: torch.Tensor, x: torch.Tensor, loose: bool) -> None:
    """Raises Wrong where NaN and Inf are neither eager's nor float64's, which may differ (gelu(inf) in float32)."""
    same = _both_or_neither_finite if loose else _same_kind
    wrong = ~(same(f, e) | same(f, x))
    if bool(wrong.any()):
        raise Wrong(f"output {index} has {_count(f)}, eager {_count(e)}")


def _both_or_neither_finite(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.isfinite() == b.isfinite()


def _same_kind(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Both finite, both NaN, or the same infinity."""
    return (a == b) | (a.isfinite() & b.isfinite()) | (a.isnan() & b.isnan())


def _count(t: torch.Tensor) -> str:
    return f"{int(t.isnan().sum())} NaN and {int(t.isinf().sum())} Inf"


def _largest(values: torch.Tensor) -> float:
    return float(values.abs().max())


def _rms(values: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(values)) / float(values.numel() ** 0.5)
