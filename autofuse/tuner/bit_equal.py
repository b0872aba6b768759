"""Whether a candidate's results are eager's to the bit, which strict runs ask for beside the bound on errors.

In: a node, the function that makes the candidate's callable, cases, and the number of elements to compare besides.
Out: "" where all agree, else how they differ.
Two results agree where their bits do, those of -0.0 and 0.0 being different; and where both are NaN, whatever their
bits, since processors choose these by the order of operands. What is compared with is eager on the threads that it has
in the script. Dense differences show in any case; one in 65536 elements, as in 16 bits, shows in many draws only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from autofuse.codegen.inputs import PERIOD, make_inputs
from autofuse.codegen.reference import run_unfused
from autofuse.ir.operation import NodeForm
from autofuse.tuner.cases import CheckCase
from autofuse.tuner.verify import BITS, GuardedAllocator, MakeCall, begin_drawing, shifted

FIRST_DRAW = 1000  # seeds of the draws besides the cases, which no other check uses
LEAST_DRAWS, MOST_DRAWS = 4, 128


class BitCheck:
    """Compares the candidates of one node with eager."""

    def __init__(self, form: NodeForm, device: torch.device | None = None) -> None:
        """``device``: where inputs are made; None: the CPU."""
        self._form = form
        self._device = device

    def difference(
        self, make_call: MakeCall, cases: Sequence[CheckCase], elements: int = 0, budget_seconds: float = 1e9
    ) -> str:
        """How the candidate differs from eager in the first case that tells; "" where it does in none.

        After the cases come draws of normal inputs at their sizes, until so many ``elements`` were compared or the
        budget is spent.
        """
        for number, case in enumerate(cases):
            found = self._compare(make_call, case, 0, number % 2 == 0)[1]
            if found:
                return _at(found, case)
        sizes = list(dict.fromkeys(case.values for case in cases)) if elements else []
        began, compared = time.perf_counter(), 0
        for draw in range(MOST_DRAWS if sizes else 0):
            is_late = time.perf_counter() - began > budget_seconds and draw >= LEAST_DRAWS
            if compared >= elements or is_late:
                break
            case = CheckCase(sizes[draw % len(sizes)], "normal")
            count, found = self._compare(make_call, case, FIRST_DRAW + draw, draw % 2 == 0)
            compared += count
            if found:
                return _at(found, case)
        return ""

    def _compare(self, make_call: MakeCall, case: CheckCase, draw: int, bool_poison: bool) -> tuple[int, str]:
        """How many elements with numbers of their own were compared, and how they differ."""
        inputs = make_inputs(self._form, case.values, draw, case.kind, self._device)
        if case.shifted:
            inputs = [shifted(t) for t in inputs]
        begin_drawing(self._device)
        wanted = run_unfused(self._form, inputs, case.values)
        call: Callable[..., Any] = make_call(GuardedAllocator(bool_poison, self._device), case.values)
        begin_drawing(self._device)
        result = call(*inputs)
        results = result if isinstance(result, tuple) else (result,)
        for index, (found, eager) in enumerate(zip(results, wanted, strict=True)):
            differing = count_differing(found, eager)
            if differing:
                return 0, f"output {index} has other bits in {differing} of {eager.numel()} elements"
        return min(max((t.numel() for t in wanted), default=0), PERIOD), ""


def count_differing(found: torch.Tensor, eager: torch.Tensor) -> int:
    """In how many elements a tensor has other bits than eager's, NaN for NaN being the same."""
    if found.shape != eager.shape or found.dtype != eager.dtype:
        return max(1, int(eager.numel()))
    if eager.is_complex():
        found, eager = torch.view_as_real(found), torch.view_as_real(eager)
    bits: torch.dtype | None = BITS.get(eager.dtype)
    if bits is None:
        return int(torch.count_nonzero(found != eager))
    differs: torch.Tensor = (found.view(bits) != eager.view(bits)) & ~(found.isnan() & eager.isnan())
    return int(torch.count_nonzero(differs))


def _at(found: str, case: CheckCase) -> str:
    where = f"sizes {list(case.values)}, " if case.values else ""
    return f"{found} ({where}{case.kind} values)"
