"""Deciding on a node: which of the entrants wins, if any.

In: entrants that were screened. Out: the winner and its decision; None and the reason where eager stays.
Guarantee: a winner has won a race after the screening that made it a finalist, and has passed all cases. In a strict
job it is eager's to the bit in all of them; the decision says what a faster one would have gained that is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from autofuse.ir.fused_operators import fused_operators
from autofuse.ir.records import Comparison, Decision, TuneRequest
from autofuse.tuner.cases import full_cases
from autofuse.tuner.comparison import LEAST_PAIRS, decide, why_eager
from autofuse.tuner.entrants import Contest, Entrant
from autofuse.tuner.outcome import Verdicts, given_up_in_words
from autofuse.tuner.timing import PROBES

THREADS_KNOB = "threads"  # a knob of generated C: the caller's number of threads, or one
FINALISTS = 4
CLOSE = 0.1  # finalists are at most this share slower than the first: the noise of a screening
TAKES = 3  # attempts to find a winner that passes all checks


class NodeDecider:
    """Decides on the entrants of one node, all of them timed on the same sizes."""

    def __init__(self, contest: Contest, verdicts: Verdicts, values: tuple[int, ...]) -> None:
        self._contest = contest
        self._verdicts = verdicts
        self._values = values
        self._margin = contest.limits.margin
        self.unsure: Entrant | None = None  # passed all cases, and may well be faster than eager

    def decide(self, entrants: Sequence[Entrant]) -> tuple[Entrant | None, Decision]:
        """The winner and its decision; None where eager stays."""
        winner, decision = self._decide([e for e in entrants if not e.difference])
        refused = [e for e in entrants if e.difference and e.comparison is not None and not e.trades(self._margin)]
        if not refused:
            return winner, decision
        fastest = max(refused, key=lambda e: e.speedup)
        assert fastest.comparison is not None
        given_up = given_up_in_words(fastest.built.candidate, fastest.comparison, fastest.difference)
        if winner is not None:
            is_faster = winner.comparison is not None and fastest.speedup > winner.speedup
            return winner, replace(decision, detail=f"{decision.detail}; {given_up}") if is_faster else decision
        if fastest.speedup >= 1.0 + self._margin:
            return None, self._verdicts.stay_eager("not_bit_equal", given_up, fastest.comparison)
        return None, decision if decision.unfused_us else self._stay(fastest.comparison)

    def _decide(self, entrants: Sequence[Entrant]) -> tuple[Entrant | None, Decision]:
        """Of entrants whose bits are not known to differ. Those that turn out to do so are left out from then on."""
        for _ in range(TAKES):
            able = (e for e in entrants if e.comparison is not None and not e.difference)
            ran = (e for e in able if not e.trades(self._margin))
            # An entrant that a screening race dropped comes last: it was slower than the leader in nearly every round,
            # whatever its few rounds say against eager.
            ranked = sorted(ran, key=lambda e: (e.dropped, -e.speedup))
            if not ranked:
                break
            best = self._final(ranked)
            if best is None or best.trades(self._margin):
                continue  # no finalist was left, or the best takes the device longer than the screening showed
            assert best.comparison is not None
            ruling = decide([best.comparison], self._margin, partial(self._race_again, best))
            if ruling is None:
                continue
            if not ruling.is_won:
                decision = self._stay(*ruling.comparisons, *ruling.unconfirmed)
                if decision.reason == "undecided" and self._is_whole(best):
                    self.unsure = best
                return None, decision
            if self._is_whole(best):
                return best, switch(self._verdicts, best, self._contest.request, self._values)
            if not best.difference:
                best.comparison = None
        return None, self._none_left(entrants)

    def _race_again(self, best: Entrant) -> list[Comparison] | None:
        self._contest.race([best], self._values, self._contest.at_length())
        return None if best.comparison is None or best.trades(self._margin) else [best.comparison]

    def _stay(self, last: Comparison, unconfirmed: Comparison | None = None) -> Decision:
        seen = f"{last.speedup:.2f}x ({last.low:.2f} to {last.high:.2f})"
        own = fused_operators(self._contest.form)
        stays = f"the script's own kernel ({', '.join(own)}) stays: " if own else ""
        reason, detail = why_eager(last, self._margin), f"{stays}the best kernel is {seen}"
        if reason == "below_margin":
            detail += f", a switch needs {1 + self._margin:.2f}x"
        elif reason == "undecided":
            detail += f" in {last.rounds} rounds, too few or too uneven to be sure of it"
        if unconfirmed is not None:
            detail += f"; a race before showed {unconfirmed.speedup:.2f}x"
        return self._verdicts.stay_eager(reason, detail, last)

    def _none_left(self, entrants: Sequence[Entrant]) -> Decision:
        traded = [e for e in entrants if e.comparison is not None and e.trades(self._margin)]
        if not traded:
            return self._verdicts.stay_eager(*self._verdicts.why_nothing_ran())
        best = max(traded, key=lambda e: e.speedup)
        assert best.on_device is not None
        return self._verdicts.stay_eager("device_slower", _on_device(best.on_device), best.comparison)

    def _final(self, ranked: Sequence[Entrant]) -> Entrant | None:
        """The best entrant of a long race of finalists; the first one, without a race, where screening shows a loss."""
        ranked = self._of_default_threads(ranked)
        first = ranked[0]
        assert first.comparison is not None
        if first.comparison.high < 1.0:
            return first
        close = [e for e in ranked if e.dropped == first.dropped and e.speedup >= first.speedup * (1.0 - CLOSE)]
        finalists = self._that_fit(sorted(close, key=lambda e: -e.device_speedup)[:FINALISTS])
        self._contest.race(finalists, self._values, self._contest.at_length())
        ran = [e for e in finalists if e.comparison is not None]
        stayed = [e for e in ran if not e.dropped] or ran  # all may have been dropped, where eager leads
        top = max((e.speedup for e in stayed), default=0.0)
        alike = [e for e in stayed if e.speedup * (1.0 + self._margin) >= top]
        return max(alike, key=lambda e: e.device_speedup, default=None)

    def _that_fit(self, finalists: Sequence[Entrant]) -> Sequence[Entrant]:
        """The first finalists for whom a deciding race has time: with fewer than LEAST_PAIRS rounds none can win."""
        found = [e.comparison for e in finalists if e.comparison is not None]
        seconds = found[0].eager_us / 1e6
        for count, comparison in enumerate(found):
            seconds += comparison.median_us / 1e6
            if count and (1 + PROBES + LEAST_PAIRS) * seconds > self._contest.at_length().longest_seconds:
                return finalists[:count]
        return finalists

    def _of_default_threads(self, ranked: Sequence[Entrant]) -> Sequence[Entrant]:
        """Only entrants that use threads as the default does, if the machine was busy and races ran on one thread.

        There a kernel that is made for one thread looks as good as one for many, which is faster as soon as the script
        has the machine to itself.
        """
        if all(e.threads in (0, self._contest.request.key.threads) for e in ranked):
            return ranked
        usual = dict(self._contest.bench.default(self._values)).get(THREADS_KNOB)
        return [e for e in ranked if dict(e.built.candidate.config).get(THREADS_KNOB) == usual] or ranked

    def _is_whole(self, entrant: Entrant) -> bool:
        """Whether an entrant is built for the whole bucket, and right in all of it."""
        contest = self._contest
        if not contest.complete(entrant, self._values):
            return False
        cases = full_cases(
            contest.form,
            contest.request.bucket,
            contest.request.shapes,
            self._values,
            is_known=contest.bench.has_passed(entrant.built),
            most_bytes=contest.limits.case_bytes,
        )
        if not contest.check(entrant, cases, self._values):
            return False
        contest.bench.note_passed(entrant.built)
        return contest.keeps_bits(entrant, contest.request.bucket, contest.request.shapes, self._values)


def switch(verdicts: Verdicts, entrant: Entrant, request: TuneRequest, values: tuple[int, ...]) -> Decision:
    """The decision that an entrant has won what ``request`` asks for; ``values``: the sizes of its race."""
    assert entrant.comparison is not None
    where = f" at {list(values)}" if values else ""
    return verdicts.switch(entrant.comparison, request, entrant.built.candidate, entrant.built.digest, where)


def _on_device(c: Comparison) -> str:
    return f"fewer launches, but the device itself takes {c.median_us:.1f} us instead of {c.eager_us:.1f}"
