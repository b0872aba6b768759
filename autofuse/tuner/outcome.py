"""What a job may use, and the records of what it found.

In: a `TuneRequest`, what became of candidates. Out: an `Outcome`.
Guarantee: a candidate that did not run leaves a measurement with its status and its message.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from autofuse.ir.records import (
    DETAIL_CHARACTERS,
    EAGER,
    Candidate,
    Comparison,
    Decision,
    KernelRecord,
    Measurement,
    Status,
    TuneRequest,
)
from autofuse.tuner.cases import CASE_BYTES

WAVE = 4  # configurations that are built and screened together: at first the default and its likeliest changes


@dataclass(frozen=True)
class JobLimits:
    """What one job may use."""

    trials: int
    rounds: int
    margin: float
    job_seconds: float
    memory_bytes: int = 2 << 30
    case_bytes: int = CASE_BYTES
    wave: int = WAVE  # configurations that are built and screened together


@dataclass
class Outcome:
    """What a job found."""

    decisions: list[Decision] = field(default_factory=list)
    measurements: list[Measurement] = field(default_factory=list)
    kernels: list[KernelRecord] = field(default_factory=list)
    unsure: KernelRecord | None = None  # right, and undecided against eager: strategies may be raced with it inside
    raced_threads: int = 0  # in the last race, where others used the cores; 0: those of the request

    def note_threads(self, threads: int, request: TuneRequest) -> None:
        """Note the threads of a race; 0: not known."""
        self.raced_threads = 0 if threads == request.key.threads else threads

    @property
    def busy(self) -> str:
        """How others at work changed the last race, in words; "" where they did not."""
        return " on one thread, for the machine was busy" if self.raced_threads else ""

    def fail(
        self,
        candidate: Candidate,
        status: Status,
        message: str,
        values: tuple[int, ...] = (),
        digest: str | None = None,
    ) -> None:
        """Add a measurement of a candidate that did not run, or not as it should; ``values``: the sizes."""
        row = Measurement(candidate, status, values, compile_key=digest, message=message[:DETAIL_CHARACTERS])
        self.measurements.append(row)


class Clock:
    """The seconds of one job that are used and left."""

    def __init__(self, clock: Callable[[], float], job_seconds: float) -> None:
        self.now = clock
        self._began = clock()
        self._job_seconds = job_seconds

    @property
    def used(self) -> float:
        return self.now() - self._began

    @property
    def left(self) -> float:
        return self._job_seconds - self.used


class Verdicts:
    """Makes the decisions of one job, each with the number of trials and the time so far."""

    def __init__(self, request: TuneRequest, outcome: Outcome, clock: Clock) -> None:
        self.tried = 0  # number of configurations
        self._request = request
        self._outcome = outcome
        self._clock = clock

    def stay_eager(self, reason: str, detail: str, comparison: Comparison | None = None) -> Decision:
        """The decision that no candidate wins; ``comparison``: that of the best candidate."""
        return self._decision(comparison, self._request, Candidate(EAGER), reason, detail)

    def switch(
        self, comparison: Comparison, request: TuneRequest, candidate: Candidate, digest: str, where: str
    ) -> Decision:
        """The decision that a candidate wins what ``request`` asks for."""
        detail = f"the fastest of {self.tried}, {comparison.rounds} paired rounds{where}{self._outcome.busy}"
        return self._decision(comparison, request, candidate, "won", detail, digest)

    def why_nothing_ran(self) -> tuple[str, str]:
        """The reason code and the words for eager where no candidate is left."""
        found = {m.status: m.message for m in reversed(self._outcome.measurements) if m.status != "ok"}
        for status, reason in _REASONS.items():
            if status in found:
                return reason, found[status]
        return "no_candidates", "no candidate was made"

    def _decision(
        self,
        comparison: Comparison | None,
        request: TuneRequest,
        candidate: Candidate,
        reason: str,
        detail: str,
        digest: str | None = None,
    ) -> Decision:
        used = self._clock.used
        decision = Decision.of(
            comparison,
            request,
            candidate,
            reason,
            detail,
            compile_key=digest,
            trials=self.tried,
            tuning_seconds=used,
        )
        return replace(decision, raced_threads=self._outcome.raced_threads if comparison else 0)


def given_up_in_words(candidate: Candidate, comparison: Comparison, difference: str) -> str:
    """What a strict job gives up with a candidate that is right and fast, but not eager's to the bit."""
    return f"{candidate.variant} would be {comparison.speedup:.2f}x as fast as eager, but {difference}"


_REASONS = {
    "wrong": "all_wrong",
    "crash": "crashed",
    "timeout": "timeout",
    "out_of_memory": "out_of_memory",
    "compile_error": "compile_failed",
    "pruned": "does_not_fit",
    "refused": "refused",
}
