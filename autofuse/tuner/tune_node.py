"""One request from beginning to end: search, check, race, decide.

In: a `TuneRequest` and the bench of its node. Out: an `Outcome` with decisions, measurements and kernels to keep.
Guarantee: eager is in every race and wins ties; a candidate is timed only after it gave right results on one case,
and wins only after all cases; screening races choose finalists, a fresh race decides, and unless its gain is clear one
more confirms it; whatever a candidate does is a recorded outcome and costs the others nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from autofuse.errors import LoweringError
from autofuse.ir.operation import NodeForm
from autofuse.ir.reasons import REFUSED
from autofuse.ir.records import Candidate, Config, TuneRequest
from autofuse.tuner.benchmark_provider import Bench
from autofuse.tuner.cases import call_bytes, is_empty
from autofuse.tuner.decide_node import NodeDecider
from autofuse.tuner.entrants import Contest
from autofuse.tuner.explore import Explorer
from autofuse.tuner.outcome import Clock, JobLimits, Outcome, Verdicts
from autofuse.tuner.proposed import misfit
from autofuse.tuner.specialise import specialise


class Job:
    """Tunes one node in one bucket: explores, decides, specialises."""

    def __init__(
        self,
        request: TuneRequest,
        bench: Bench,
        limits: JobLimits,
        seeds: Iterable[Config] = (),
        clock: Callable[[], float] = time.monotonic,
        proposed: Candidate | None = None,
    ) -> None:
        """``seeds``: winners of other buckets, nearest first; ``clock``: the seconds by which the job's time is
        counted; ``proposed``: try this candidate and no other."""
        self.request = request
        self.form = NodeForm.from_json(dict(request.node))
        self.limits = limits
        self._bench = bench
        self._proposed = proposed
        self._outcome = Outcome()
        used = Clock(clock, limits.job_seconds)
        self._contest = Contest(request, self.form, bench, limits, self._outcome, used)
        self._verdicts = Verdicts(request, self._outcome, used)
        self._explorer = Explorer(self._contest, seeds)

    def run(self) -> Outcome:
        """Tune the node. Raises only what stops the daemon itself."""
        values = self.timed_values()
        if is_empty(self.form, values):
            return self._give_up("too_small", "its outputs have no elements")
        if call_bytes(self.form, values) > self.limits.memory_bytes:
            return self._give_up("out_of_memory", "one call needs more memory than tuner.memory_bytes allows")
        try:
            knobs = self._bench.knobs(values)
        except LoweringError as error:
            return self._give_up(f"{REFUSED}{error.code}", str(error))
        if self._proposed is None:
            entrants = self._explorer.explore(values)
        elif problem := misfit(self._proposed, self._bench.variants, knobs):
            return self._give_up("refused", problem)
        else:
            entrants = self._explorer.try_one(self._proposed, values)
        self._verdicts.tried = self._explorer.tried
        if not entrants:
            return self._give_up(*self._verdicts.why_nothing_ran())
        decider = NodeDecider(self._contest, self._verdicts, values)
        winner, decision = decider.decide(entrants)
        self._outcome.decisions.append(decision)
        self._outcome.unsure = decider.unsure.built.record if decider.unsure is not None else None
        if winner is not None:
            self._outcome.kernels.append(winner.built.record)
            specialise(self._contest, self._verdicts, winner)
        self._outcome.measurements += [e.measurement(values) for e in entrants if e.comparison is not None]
        return self._outcome

    def timed_values(self) -> tuple[int, ...]:
        """The sizes to time: the most frequent ones in the bucket, else its upper end."""
        seen = [s for s in self.request.shapes if self.request.bucket.contains(s.symbol_values)]
        if seen:
            return max(seen, key=lambda s: s.calls).symbol_values
        return tuple(high for _, high in self.request.bucket.ranges)

    def _give_up(self, reason: str, detail: str) -> Outcome:
        self._outcome.decisions.append(self._verdicts.stay_eager(reason, detail))
        return self._outcome
