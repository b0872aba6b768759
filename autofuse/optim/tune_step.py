"""Tuning one optimizer step: torch's own variants and generated kernels against what the script asked for.

In: a request whose node holds a step, the backend of its device, a worker. Out: an `Outcome`, as of any other job.
Guarantee: a candidate is timed only after it gave right results; a switch needs the margin, in a second race too unless
the first is clear; eager wins ties.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from autofuse.codegen.c.knobs import cpu_vector_bits
from autofuse.codegen.knobs import CONTRACT, Knob, contracts, printed
from autofuse.codegen.triton.source import Assumptions
from autofuse.errors import CompilerError, CompilerNotReady
from autofuse.ir.records import (
    EAGER,
    Candidate,
    Comparison,
    Config,
    Decision,
    KernelRecord,
    Measurement,
    Status,
    TuneRequest,
    make_config,
)
from autofuse.optim.c_printer import KNOBS, print_step
from autofuse.optim.candidate import StepCandidate
from autofuse.optim.form import StepForm
from autofuse.optim.triton_printer import KNOBS as TRITON_KNOBS
from autofuse.optim.triton_printer import print_triton_step
from autofuse.tuner.backends import Backend, CBackend, InterpreterBackend, TritonBackend
from autofuse.tuner.comparison import compare, decide, keeps_device_slower, why_eager
from autofuse.tuner.outcome import JobLimits, Outcome, given_up_in_words
from autofuse.tuner.timing import RaceRules
from autofuse.tuner.worker_process import CandidateProblem, WorkerProcess

C_MULTI, TRITON_MULTI = "c_multi", "triton_multi"  # one call for all tensors
_ALIGNED = (Assumptions(is_aligned=True),)  # a kernel's arguments are tables of ours
MOST_COPIES = 12  # copies of all tensors of a step that a check or a race holds at a time
LEAST_ELEMENTS = 1 << 14  # of a tensor that has so many, the fewest to keep: with fewer, a step is all overhead
CHECKED_ELEMENTS = 1 << 18  # of all tensors: they run the same code, and a script may need the machine
LONGEST_CHECKED = 3 * 65536  # of the largest tensor: several of the largest chunks of a thread


@dataclass(frozen=True)
class _Entrant:
    """A candidate with its kernel; torch's own have none."""

    candidate: Candidate
    kernel: KernelRecord | None = None
    difference: str = ""  # how its bits differ from eager's, in a strict run, where it may not win for that

    @property
    def digest(self) -> str | None:
        return self.kernel.key.digest if self.kernel is not None else None

    def to_json(self) -> dict[str, str]:
        return StepCandidate.of(self.candidate, self.kernel).to_json()


class _Raced(NamedTuple):
    """How an entrant compares with what the script asked for, in one race."""

    comparison: Comparison
    entrant: _Entrant
    is_dropped: bool  # it left the race early, as slower than the leader: its few rounds say little against eager
    is_slower_on_device: bool  # it takes the device longer than what the script asked for

    @property
    def place(self) -> tuple[bool, bool, float]:
        """Candidates come in the order of their places."""
        return self.is_slower_on_device, self.is_dropped, -self.comparison.speedup


class StepTuning:
    """Tunes one step."""

    def __init__(
        self,
        request: TuneRequest,
        form: StepForm,
        backend: Backend,
        worker: WorkerProcess,
        limits: JobLimits,
        rest: Callable[[], None] = lambda: None,
        compilers: int = 1,
        proposed: Candidate | None = None,
    ) -> None:
        """``form``: the step to tune. ``rest`` is called before each piece of work, to yield the machine;
        ``compilers``: how many may run at a time; ``proposed``: try this candidate and no other."""
        self._request = request
        self._form = form
        self._tried = self._form  # the step that is timed: cut if the whole takes too much memory
        self._checked = self._form  # the step that is checked: cut further
        self._backend = backend
        self._worker = worker
        self._limits = limits
        self._rest = rest
        self._compilers = compilers
        self._proposed = proposed
        self._outcome = Outcome()
        self._began = time.monotonic()

    def run(self) -> Outcome:
        """Tune the step. Raises only what stops the daemon itself."""
        width = 8 if self._form.dtype == "float64" else 4
        most = self._limits.memory_bytes // (width * (2 + len(self._form.states)) * MOST_COPIES)
        if most < sum(min(size, LEAST_ELEMENTS) for size in self._form.sizes):
            return self._stay_eager("out_of_memory", "checking it needs too much memory")
        self._tried = self._form.cut_to(most)
        self._checked = checked_form(self._tried)
        entrants = [found for found in map(self._checked_entrant, self._candidates()) if found is not None]
        if not entrants:
            found = next((m for m in self._outcome.measurements), None)
            return self._stay_eager("no_candidates", found.message if found else "")
        return self._choose(sorted(self._race(entrants), key=lambda raced: raced.place))

    def _choose(self, raced: Sequence[_Raced]) -> Outcome:
        """Decide on entrants, fastest first. Those whose bits differ cannot win; the decision says what they gain."""
        able = [one for one in raced if not one.entrant.difference]
        refused = next((one for one in raced if one.entrant.difference), None)
        if refused is None or (able and raced.index(able[0]) < raced.index(refused)):
            return self._settle(able[0], len(raced))
        lost = refused.comparison
        given_up = given_up_in_words(refused.entrant.candidate, lost, refused.entrant.difference)
        is_gain = lost.speedup >= 1.0 + self._limits.margin
        if able:
            outcome = self._settle(able[0], len(raced), given_up)
            if outcome.decisions[-1].reason == "won" or not is_gain:
                return outcome
            outcome.decisions.clear()
        if is_gain:
            return self._stay_eager("not_bit_equal", given_up, lost)
        return self._stay_eager(why_eager(lost, self._limits.margin), given_up, lost)

    def _settle(self, first: _Raced, count: int, given_up: str = "") -> Outcome:
        """Decide on the best of ``count`` entrants, which was compared with eager once."""
        best = first.entrant
        ruling = decide([first.comparison], self._limits.margin, lambda: [self._race([best])[0].comparison])
        assert ruling is not None, "a race of steps has a result or raises"
        (seen,) = ruling.comparisons
        if not ruling.is_won:
            words = f"the best is {best.candidate.variant} with {seen.speedup:.2f}x ({seen.low:.2f} to {seen.high:.2f})"
            return self._stay_eager(why_eager(seen, self._limits.margin), words + self._outcome.busy, seen)
        words = f"the fastest of {count}, {seen.rounds} paired rounds"
        if self._tried != self._form:
            words += f", on {sum(self._tried.sizes)} of {sum(self._form.sizes)} elements"
        if best.kernel is not None:
            self._outcome.kernels.append(self._read(best.kernel, best.candidate.config))
        words += self._outcome.busy + (f"; {given_up}" if given_up else "")
        return self._decide(seen, best.candidate, "won", words, best.digest)

    def _candidates(self) -> list[_Entrant]:
        found = [_Entrant(Candidate(name)) for name in self._form.vendors if self._is_tried(Candidate(name))]
        variant, knobs = (C_MULTI, KNOBS) if isinstance(self._backend, CBackend) else (TRITON_MULTI, TRITON_KNOBS)
        configs = [
            make_config({knob.name: choice for knob, choice in zip(knobs, choices, strict=True)})
            for choices in itertools.product(*map(_choices, knobs))
        ]
        if self._request.key.is_strict:
            configs = [make_config({**dict(c), CONTRACT.name: choice}) for choice in CONTRACT.choices for c in configs]
        configs = [config for config in configs if self._is_tried(Candidate(variant, config))]
        for config, made in zip(configs, self._compile_all(configs), strict=True):
            candidate = Candidate(variant, config)
            if isinstance(made, KernelRecord):
                found.append(_Entrant(candidate, made))
            else:
                self._outcome.fail(candidate, made.status, str(made))
        return found

    def _is_tried(self, candidate: Candidate) -> bool:
        return self._proposed is None or candidate == self._proposed

    def _compile_all(self, configs: list[Config]) -> list[KernelRecord | CandidateProblem]:
        """Compile each configuration; kernels or problems, in order."""

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

    def _read(self, kernel: KernelRecord, config: Config) -> KernelRecord:
        """The winner with what its machine code does, which is not read of each candidate."""
        if not isinstance(self._backend, TritonBackend):
            return kernel
        try:
            return replace(kernel, resources=self._compiled(config, is_final=True).resources)
        except (CompilerError, CandidateProblem):  # it has been compiled before; nobody needs what is read
            return kernel

    def _compiled(self, config: Config, is_final: bool = False) -> KernelRecord:
        """The kernel of a configuration. Raises CompilerError and CandidateProblem."""
        if isinstance(self._backend, CBackend):
            return self._backend.recipe_of(print_step(self._form, printed(config)), config).make()
        assert isinstance(self._backend, TritonBackend | InterpreterBackend)
        source = replace(print_triton_step(self._form, printed(config)), contracts=contracts(config))
        if isinstance(self._backend, InterpreterBackend):
            return self._backend.recipe_of(source, _ALIGNED).make()
        return self._backend.recipe_of(source, _ALIGNED, is_final).make()

    def _ask(self, do: str, form: StepForm, **arguments: Any) -> dict[str, Any]:
        self._rest()
        if self._worker.pid is None:
            self._worker.start()
        return self._worker.ask(do, step=form.to_json(), threads=self._request.key.threads, **arguments)

    def _checked_entrant(self, entrant: _Entrant) -> _Entrant | None:
        """The entrant, with how its bits differ from eager's where the run is strict; None where it is not right."""
        difference = ""
        try:
            self._ask("check_step", self._checked, candidate=entrant.to_json())
            if self._request.key.is_strict:
                reply = self._ask("compare_step_bits", self._checked, candidate=entrant.to_json())
                difference = str(reply["difference"])
        except CandidateProblem as problem:
            self._outcome.fail(entrant.candidate, problem.status, str(problem))
            return None
        return replace(entrant, difference=difference)

    def _race(self, entrants: Sequence[_Entrant]) -> list[_Raced]:
        rounds = max(15, self._limits.rounds)
        rules = RaceRules(rounds, 4 * rounds, self._limits.job_seconds, self._limits.margin, 15)
        candidates = [entrant.to_json() for entrant in entrants]
        reply = self._ask("race_steps", self._tried, candidates=candidates, rules=asdict(rules))
        samples, device = reply["samples"], reply["device"]
        self._outcome.note_threads(reply["threads"], self._request)
        comparisons = [compare(samples[0], own) for own in samples[1:]]
        slower = [False] * len(entrants)
        for n, own in enumerate(device[1:]):
            on_device = compare(device[0], own)
            if keeps_device_slower(on_device, self._limits.margin):
                slower[n] = True
                comparisons[n] = on_device  # saving host time at the cost of device time is no gain
        for c, entrant in zip(comparisons, entrants, strict=True):
            times = (c.median_us, c.eager_us, c.speedup, c.low, c.high)
            status: Status = "not_bit_equal" if entrant.difference else "ok"
            row = Measurement(
                entrant.candidate, status, (), *times, compile_key=entrant.digest, message=entrant.difference
            )
            self._outcome.measurements.append(row)
        return [_Raced(*one) for one in zip(comparisons, entrants, reply["dropped"][1:], slower, strict=True)]

    def _stay_eager(self, reason: str, detail: str, comparison: Comparison | None = None) -> Outcome:
        return self._decide(comparison, Candidate(EAGER), reason, detail)

    def _decide(
        self, comparison: Comparison | None, candidate: Candidate, reason: str, detail: str, digest: str | None = None
    ) -> Outcome:
        took = time.monotonic() - self._began
        trials = len(self._outcome.measurements)
        decision = Decision.of(
            comparison,
            self._request,
            candidate,
            reason,
            detail,
            compile_key=digest,
            trials=trials,
            tuning_seconds=took,
        )
        raced_threads = self._outcome.raced_threads if comparison else 0
        self._outcome.decisions.append(replace(decision, raced_threads=raced_threads))
        return self._outcome


def _choices(knob: Knob) -> tuple[Any, ...]:
    """The choices of a knob, without vectors wider than the processor's, which would give the same code again."""
    if knob.name != "vector_bits":
        return knob.choices
    return tuple(bits for bits in knob.choices if bits in cpu_vector_bits()) or knob.choices[:1]


def checked_form(form: StepForm) -> StepForm:
    """The same step on fewer elements, which are enough to check it."""
    if sum(form.sizes) <= CHECKED_ELEMENTS:
        return form
    sizes = list(form.cut_to(CHECKED_ELEMENTS).sizes)
    largest = form.sizes.index(max(form.sizes))
    sizes[largest] = max(sizes[largest], min(form.sizes[largest], LONGEST_CHECKED))
    return replace(form, sizes=tuple(sizes))
