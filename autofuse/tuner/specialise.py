"""Specialising: a kernel with the sizes of the dominant shape built in, beside the winner for the whole bucket.

In: the generic winner of a node. Out: a decision for the one shape, where such a kernel beats the winner as well.
Guarantee: it beats eager and the generic winner each as surely as eager alone has to be beaten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autofuse.ir.buckets import dominant_shape, exact_bucket
from autofuse.ir.records import Candidate, Comparison, ObservedShape
from autofuse.tuner.cases import first_cases, full_cases
from autofuse.tuner.comparison import compare, decide
from autofuse.tuner.decide_node import switch
from autofuse.tuner.entrants import Contest, Entrant
from autofuse.tuner.outcome import Verdicts

# A race against the generic winner takes up to this many times its rounds. The two kernels are mostly alike, which no
# number of rounds decides; with `entrants.LONGER` times the rounds these races took half of a job's samples.
LONGER_AGAINST_WINNER = 2
SPECIALISE_CALLS = 32  # calls of the dominant shape from which its own kernel can pay for the compilation


def specialise(contest: Contest, verdicts: Verdicts, generic: Entrant) -> None:
    """Try a kernel with the dominant shape's sizes built in, and add the results to the job's outcome."""
    asked, outcome = contest.request, contest.outcome
    values = dominant_shape(asked.shapes)
    calls = max((s.calls for s in asked.shapes), default=0)
    if values is None or calls < SPECIALISE_CALLS or not contest.form.symbols or contest.clock.left <= 0:
        return
    if len(set(contest.bench.variants)) == 1:
        return  # strategies have no other form
    bucket = exact_bucket(values)
    key, shapes = replace(asked.key, bucket=bucket.label), (ObservedShape(values, calls),)
    request = replace(asked, key=key, bucket=bucket, shapes=shapes)
    (built,) = contest.build([Candidate(contest.bench.variants[1], generic.built.candidate.config)], values)
    if built is None:
        return
    entrant, rival = Entrant(built, 0.0), Entrant(generic.built, 0.0)
    if not contest.complete(entrant, values):
        return
    cases = [
        *first_cases(contest.form, bucket, values),
        *full_cases(contest.form, bucket, (), values, most_bytes=contest.limits.case_bytes),
    ]
    if not contest.check(entrant, cases, values) or not contest.keeps_bits(entrant, bucket, (), values):
        return
    is_won = _beats(contest, entrant, rival, values)
    if entrant.comparison is None or rival.comparison is None:
        return
    outcome.measurements.append(entrant.measurement(values))
    if is_won:
        outcome.kernels.append(entrant.built.record)
        decision = switch(verdicts, entrant, request, values)
        detail = f"sizes built in; the generic kernel takes {rival.comparison.median_us:.1f} us"
        outcome.decisions.append(replace(decision, detail=detail, trials=1, tuning_seconds=entrant.seconds))


def _beats(contest: Contest, entrant: Entrant, rival: Entrant, values: tuple[int, ...]) -> bool:
    """Whether a candidate beats both eager and the rival."""
    margin = contest.limits.margin

    def race() -> Sequence[Comparison] | None:
        rules = replace(contest.at_length(LONGER_AGAINST_WINNER), incumbent=1)
        result = contest.race([rival, entrant], values, rules)
        if result is None or entrant.comparison is None or entrant.trades(margin):
            return None
        return entrant.comparison, compare(result.samples[1], result.samples[2])

    first = race()
    ruling = decide(first, margin, race) if first is not None else None
    return ruling is not None and ruling.is_won
