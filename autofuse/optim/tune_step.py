"""Tuning one optimizer step: torch's own variants and generated kernels against what the script asked for.

In: a request whose node holds a step, the backend of its device, a worker. Out: an `Outcome`, as of any other job.
Guarantee: a candidate is timed only after it gave right results; a switch needs the margin, in a second race too unless
the first is clear; eager wins ties.
"""

from __future__ import annotations

import base64
import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any

from autofuse.codegen.triton.source import Assumptions
from autofuse.errors import CompilerError, CompilerNotReady
from autofuse.ir.records import EAGER, Candidate, Config, Decision, KernelRecord, Measurement, TuneRequest, make_config
from autofuse.optim.c_printer import KNOBS, print_step
from autofuse.optim.form import OPTIMIZER, StepForm
from autofuse.optim.triton_printer import KNOBS as TRITON_KNOBS
from autofuse.optim.triton_printer import print_triton_step
from autofuse.tuner.backends import Backend, CBackend, InterpreterBackend, TritonBackend
from autofuse.tuner.comparison import Comparison, compare, confirms, is_clear, keeps_device_slower, wins
from autofuse.tuner.timing import RaceRules
from autofuse.tuner.tune_node import JobLimits, Outcome
from autofuse.tuner.worker_process import CandidateProblem, WorkerProcess

C_MULTI, TRITON_MULTI = "c_multi", "triton_multi"  # one call for all tensors
_ALIGNED = (Assumptions(is_aligned=True),)  # what a kernel is given are tables of ours
MOST_COPIES = 12  # of all tensors of a step, that a check or a race holds at a time
LEAST_ELEMENTS = 1 << 14  # of a tensor, as far as it has so many: below, a step is all overhead
CHECKED_ELEMENTS = 1 << 18  # of all tensors together: each is a run of the same code, and a script may want the machine
LONGEST_CHECKED = 3 * 65536  # of the largest tensor: some of the largest chunks that a thread takes


class StepTuning:
    """Tunes one step."""

    def __init__(
        self,
        request: TuneRequest,
        backend: Backend,
        worker: WorkerProcess,
        limits: JobLimits,
        rest: Callable[[], None] = lambda: None,
        compilers: int = 1,
    ) -> None:
        """``rest`` is called before each piece of work, to yield the machine; ``compilers``: how many may run at a
        time."""
        self._request = request
        self._form = StepForm.from_json(request.node[OPTIMIZER])
        self._tried = self._form  # what is timed: cut, where the whole would take too much memory
        self._checked = self._form  # what is checked: cut further
        self._backend = backend
        self._worker = worker
        self._limits = limits
        self._rest = rest
        self._compilers = compilers
        self._threads = 0  # of the last race; 0: not known
        self._outcome = Outcome()

    def run(self) -> Outcome:
        """Tune. Raises only what stops the daemon itself."""
        began = time.monotonic()
        width = 8 if self._form.dtype == "float64" else 4
        most = self._limits.memory_bytes // (width * (2 + len(self._form.states)) * MOST_COPIES)
        if most < sum(min(size, LEAST_ELEMENTS) for size in self._form.sizes):
            return self._decide(
                None, Candidate(EAGER), None, "out_of_memory", "checking it needs too much memory", began
            )
        self._tried = self._form.cut_to(most)
        self._checked = checked_form(self._tried)
        entrants = [
            (candidate, kernel) for candidate, kernel in self._candidates() if self._is_right(candidate, kernel)
        ]
        if not entrants:
            found = next((m for m in self._outcome.measurements), None)
            return self._decide(None, Candidate(EAGER), None, "no_candidates", found.message if found else "", began)
        comparisons = self._race(entrants)
        best, (candidate, kernel) = max(zip(comparisons, entrants, strict=True), key=lambda item: item[0].speedup)
        won = wins(best, self._limits.margin)
        if won and not is_clear(best):
            (best,) = self._race([(candidate, kernel)])
            won = confirms(best, self._limits.margin)
        busy = "" if self._threads in (0, self._request.key.threads) else ", on one thread, for the machine was busy"
        if not won:
            words = f"the best is {candidate.variant} with {best.speedup:.2f}x ({best.low:.2f} to {best.high:.2f})"
            return self._decide(best, Candidate(EAGER), None, "below_margin", words + busy, began)
        if kernel is not None:
            self._outcome.kernels.append(kernel)
        words = f"the fastest of {len(entrants)}, {best.rounds} paired rounds"
        if self._tried != self._form:
            words += f", on {sum(self._tried.sizes)} of {sum(self._form.sizes)} elements"
        return self._decide(best, candidate, kernel, "won", words + busy, began)

    def _candidates(self) -> list[tuple[Candidate, KernelRecord | None]]:
        found: list[tuple[Candidate, KernelRecord | None]] = [(Candidate(name), None) for name in self._form.vendors]
        variant, knobs = (C_MULTI, KNOBS) if isinstance(self._backend, CBackend) else (TRITON_MULTI, TRITON_KNOBS)
        configs = [
            make_config({knob.name: choice for knob, choice in zip(knobs, choices, strict=True)})
            for choices in itertools.product(*(knob.choices for knob in knobs))
        ]
        for config, made in zip(configs, self._compile_all(configs), strict=True):
            candidate = Candidate(variant, config)
            if isinstance(made, KernelRecord):
                found.append((candidate, made))
            else:
                self._outcome.measurements.append(Measurement(candidate, made.status, message=str(made)[:500]))
        return found

    def _compile_all(self, configs: list[Config]) -> list[KernelRecord | CandidateProblem]:
        """Kernels, in order."""

        def one(config: Config) -> KernelRecord | CandidateProblem:
            try:
                return self._compiled(config)
            except CandidateProblem as problem:
                return problem
            except CompilerNotReady:  # no fault of the candidate
                raise
            except CompilerError as error:
                return CandidateProblem("compile_error", str(error))

        if self._compilers > 1:
            self._rest()
            with ThreadPoolExecutor(self._compilers) as pool:
                return list(pool.map(one, configs))
        found = []
        for config in configs:
            self._rest()
            found.append(one(config))
        return found

    def _compiled(self, config: Config) -> KernelRecord:
        """Raises CompilerError and CandidateProblem."""
        if isinstance(self._backend, CBackend):
            return self._backend.recipe_of(print_step(self._form, config), config).make()
        assert isinstance(self._backend, TritonBackend | InterpreterBackend)
        return self._backend.recipe_of(print_triton_step(self._form, config), _ALIGNED).make()

    def _ask(self, do: str, form: StepForm, **arguments: Any) -> dict[str, Any]:
        self._rest()
        if self._worker.pid is None:
            self._worker.start()
        return self._worker.ask(do, step=form.to_json(), threads=self._request.key.threads, **arguments)

    def _is_right(self, candidate: Candidate, kernel: KernelRecord | None) -> bool:
        try:
            self._ask("check_step", self._checked, candidate=_as_json(candidate, kernel))
        except CandidateProblem as problem:
            self._outcome.measurements.append(Measurement(candidate, problem.status, message=str(problem)[:500]))
            return False
        return True

    def _race(self, entrants: list[tuple[Candidate, KernelRecord | None]]) -> list[Comparison]:
        rounds = max(15, self._limits.rounds)
        rules = RaceRules(rounds, 4 * rounds, self._limits.job_seconds, self._limits.margin, 15)
        reply = self._ask("race_steps", self._tried, candidates=[_as_json(*e) for e in entrants], rules=asdict(rules))
        samples, device, self._threads = reply["samples"], reply["device"], reply["threads"]
        comparisons = [compare(samples[0], own) for own in samples[1:]]
        for n, own in enumerate(device[1:]):
            on_device = compare(device[0], own)
            if keeps_device_slower(on_device, self._limits.margin):
                comparisons[n] = on_device  # saves the host's time at the cost of the device's: no gain
        for c, (candidate, kernel) in zip(comparisons, entrants, strict=True):
            self._outcome.measurements.append(
                Measurement(
                    candidate,
                    "ok",
                    (),
                    c.median_us,
                    c.eager_us,
                    c.speedup,
                    c.low,
                    c.high,
                    compile_key=kernel.key.digest if kernel else None,
                )
            )
        return comparisons

    def _decide(
        self, c: Comparison | None, candidate: Candidate, kernel: KernelRecord | None, reason: str, detail: str,
        began: float,
    ) -> Outcome:  # fmt: skip
        self._outcome.decisions.append(
            Decision(
                key=self._request.key,
                bucket=self._request.bucket,
                candidate=candidate,
                compile_key=kernel.key.digest if kernel else None,
                unfused_us=c.eager_us if c else 0.0,
                fused_us=c.median_us if c else 0.0,
                speedup=c.speedup if c else 1.0,
                speedup_low=c.low if c else 1.0,
                speedup_high=c.high if c else 1.0,
                reason=reason,
                detail=detail[:500],
                trials=len(self._outcome.measurements),
                tuning_seconds=time.monotonic() - began,
            )
        )
        return self._outcome


def checked_form(form: StepForm) -> StepForm:
    """The same step on as many elements as show that it is right."""
    if sum(form.sizes) <= CHECKED_ELEMENTS:
        return form
    sizes = list(form.cut_to(CHECKED_ELEMENTS).sizes)
    largest = form.sizes.index(max(form.sizes))
    sizes[largest] = max(sizes[largest], min(form.sizes[largest], LONGEST_CHECKED))
    return replace(form, sizes=tuple(sizes))


def _as_json(candidate: Candidate, kernel: KernelRecord | None) -> dict[str, str]:
    binary = base64.b64encode(kernel.binary).decode() if kernel else ""
    name, digest = (kernel.name, kernel.key.digest) if kernel else ("", "")
    return {"variant": candidate.variant, "binary": binary, "name": name, "digest": digest}
