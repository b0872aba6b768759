"""A step on the worker's bench: checked against float64, then raced against what the script asked torch for.

In: a `StepForm`, kernels as bytes, the worker's rig. Out: what became of each candidate.
Guarantee: the criteria are those of any other kernel (`tuner.verify`, in a strict run `tuner.bit_equal` too); each
callable has tensors of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from autofuse.ir.records import EAGER
from autofuse.optim.calls import ExternCall, StepCall, make_call
from autofuse.optim.candidate import AS_ASKED, StepCandidate
from autofuse.optim.form import StepForm
from autofuse.optim.tensors import copied, make_arguments, torch_function, with_variant, written
from autofuse.tuner.bit_equal import count_differing
from autofuse.tuner.node_bench import DeviceRunner, torch_threads
from autofuse.tuner.timing import RaceResult, RaceRules, race
from autofuse.tuner.verify import Answer, Wrong, answer, output_error

KINDS = ("normal", "special", "large", "zeros")
STRICT_STEPS = (1, 2, 7, 50, 333, 12345)
LEAST_STEPS = (0, 1000)  # steps done before: Adam's corrections are largest in the first step


def prepared(
    form: StepForm, candidate: StepCandidate, arguments: dict[str, Any], threads: int, rig: DeviceRunner
) -> Callable[[], None]:
    """A candidate as a function that makes a step on these arguments; it raises ValueError where it cannot."""
    function = torch_function(form.algorithm)
    if candidate.variant == EAGER:
        asked = _as_asked(form, arguments)
        return lambda: function(**asked)
    call: StepCall
    if candidate.binary:
        call = make_call(form, rig.load(candidate.digest, candidate.name, candidate.binary), rig.device)
    else:
        call = ExternCall(form, function, candidate.variant, rig.device)

    def run() -> None:
        problem = call.pack(arguments, threads)
        if problem is not None:
            raise ValueError(problem)
        call.run()

    return run


def _as_asked(form: StepForm, arguments: dict[str, Any]) -> dict[str, Any]:
    return with_variant(form, arguments, form.asked) if form.asked else arguments


def check(form: StepForm, candidate: StepCandidate, threads: int, rig: DeviceRunner) -> float:
    """The worst ratio of the candidate's error to eager's own. Raises `Wrong`."""
    with torch_threads(rig.usable_threads(threads)), torch.no_grad():  # a kernel itself gets all of its threads
        return max(_check_kind(form, candidate, threads, rig, number) for number in range(len(KINDS)))


def _check_kind(form: StepForm, candidate: StepCandidate, threads: int, rig: DeviceRunner, number: int) -> float:
    kind, worst = KINDS[number], 0.0
    reference = _reference(form, number, rig.device)
    found = copied(reference.start)
    prepared(form, candidate, found, threads, rig)()
    for index, (f, known) in enumerate(zip(written(form, found), reference.answers, strict=True)):
        try:
            worst = max(worst, output_error(index, f, known, False))
        except Wrong as error:
            raise Wrong(f"{error} ({kind} gradients)") from None
    for ours, before in zip(found[form.rule.grads], reference.start[form.rule.grads], strict=True):
        if not torch.equal(ours.nan_to_num(), before.nan_to_num()):
            raise Wrong("a gradient was changed")
    return worst


def compare_bits(form: StepForm, candidate: StepCandidate, threads: int, rig: DeviceRunner) -> str:
    """How a candidate's results differ from those of what the script asked for, in bits; "" where they do not.

    Besides the kinds of gradients, after several numbers of steps: corrections depend on them.
    """
    draws = [(number, kind, LEAST_STEPS[number % 2]) for number, kind in enumerate(KINDS)]
    draws += [(len(KINDS) + number, "normal", steps) for number, steps in enumerate(STRICT_STEPS)]
    function = torch_function(form.algorithm)
    with torch_threads(threads), torch.no_grad():
        for seed, kind, steps in draws:
            start = make_arguments(form, seed, kind, steps, rig.device)
            eager, found = copied(start), copied(start)
            function(**_as_asked(form, eager))
            prepared(form, candidate, found, threads, rig)()
            for index, (ours, theirs) in enumerate(zip(written(form, found), written(form, eager), strict=True)):
                differing = count_differing(ours, theirs)
                if differing:
                    where = f"{differing} of {theirs.numel()} elements ({kind} gradients, after {steps} steps)"
                    return f"output {index} has other bits in {where}"
    return ""


@dataclass(frozen=True)
class _Reference:
    """Arguments of a step, and the results of eager and float64 for each tensor that it writes."""

    start: dict[str, Any]
    answers: list[Answer]


@functools.lru_cache(maxsize=len(KINDS))
def _reference(form: StepForm, number: int, device: torch.device) -> _Reference:
    """The reference, made once for all candidates: it takes several times as long as a step. `race_steps` drops it."""
    start = make_arguments(form, number, KINDS[number], LEAST_STEPS[number % 2], device)
    eager, exact = copied(start), copied(start, torch.float64)
    function = torch_function(form.algorithm)
    function(**_as_asked(form, eager))
    function(**with_variant(form, exact, ""))
    return _Reference(start, [answer(e, x) for e, x in zip(written(form, eager), written(form, exact), strict=True)])


def race_steps(
    form: StepForm, candidates: Sequence[StepCandidate], threads: int, rules: RaceRules, rig: DeviceRunner
) -> RaceResult:
    """Seconds a step of what the script asked for, then of each candidate; on one thread if others use the cores."""
    _reference.cache_clear()
    usable = rig.usable_threads(threads)
    calls = [
        prepared(form, candidate, make_arguments(form, 1, device=rig.device), usable, rig)
        for candidate in (AS_ASKED, *candidates)
    ]
    with torch_threads(usable), torch.no_grad():
        return replace(race(calls, rules, sampler=rig.sampler(usable != threads)), threads=usable)
