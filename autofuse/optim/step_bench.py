"""A step on the worker's bench: checked against float64, then raced against what the script asked torch for.

In: a `StepForm`, kernels as bytes, the worker's rig. Out: what became of each candidate.
Guarantee: the criterion is that of any other kernel (`tuner.verify`); each callable has tensors of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from autofuse.ir.records import EAGER
from autofuse.optim.calls import ExternCall, StepCall, make_call
from autofuse.optim.candidate import AS_ASKED, StepCandidate
from autofuse.optim.form import StepForm
from autofuse.optim.tensors import copied, make_arguments, torch_function, with_variant, written
from autofuse.tuner.node_bench import DeviceRunner, torch_threads
from autofuse.tuner.timing import RaceResult, RaceRules, race
from autofuse.tuner.verify import Wrong, answer, output_error

KINDS = ("normal", "special", "large", "zeros")
LEAST_STEPS = (0, 1000)  # done before: the corrections of Adam are largest at the first


def prepared(
    form: StepForm, candidate: StepCandidate, arguments: dict[str, Any], threads: int, rig: DeviceRunner
) -> Callable[[], None]:
    """A candidate as a call on these arguments. Raises ValueError where it may not have them."""
    function = torch_function(form.algorithm)
    if candidate.variant == EAGER:
        asked = with_variant(form, arguments, form.asked) if form.asked else arguments
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


def check(form: StepForm, candidate: StepCandidate, threads: int, rig: DeviceRunner) -> float:
    """The worst error over eager's own. Raises `Wrong`."""
    with torch_threads(rig.usable_threads(threads)), torch.no_grad():  # a kernel itself uses all of its threads
        return max(_check_kind(form, candidate, threads, rig, number) for number in range(len(KINDS)))


def _check_kind(form: StepForm, candidate: StepCandidate, threads: int, rig: DeviceRunner, number: int) -> float:
    kind, worst = KINDS[number], 0.0
    start = make_arguments(form, number, kind, LEAST_STEPS[number % 2], rig.device)
    eager, exact, found = copied(start), copied(start, torch.float64), copied(start)
    prepared(form, AS_ASKED, eager, threads, rig)()
    torch_function(form.algorithm)(**with_variant(form, exact, ""))
    prepared(form, candidate, found, threads, rig)()
    triples = zip(written(form, eager), written(form, exact), written(form, found), strict=True)
    for index, (e, x, f) in enumerate(triples):
        try:
            worst = max(worst, output_error(index, f, answer(e, x), False))
        except Wrong as error:
            raise Wrong(f"{error} ({kind} gradients)") from None
    for ours, before in zip(found[form.rule.grads], start[form.rule.grads], strict=True):
        if not torch.equal(ours.nan_to_num(), before.nan_to_num()):
            raise Wrong("a gradient was changed")
    return worst


def race_steps(
    form: StepForm, candidates: Sequence[StepCandidate], threads: int, rules: RaceRules, rig: DeviceRunner
) -> RaceResult:
    """Seconds a step: of what the script asked for, then of each candidate; on one thread beside a busy script."""
    usable = rig.usable_threads(threads)
    calls = [
        prepared(form, candidate, make_arguments(form, 1, device=rig.device), usable, rig)
        for candidate in (AS_ASKED, *candidates)
    ]
    with torch_threads(usable), torch.no_grad():
        return replace(race(calls, rules, sampler=rig.sampler(usable != threads)), threads=usable)
