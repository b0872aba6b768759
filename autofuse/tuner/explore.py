"""Exploring: which configurations of a node are tried, and for how long.

In: a node's `Contest`, winners of its other buckets. Out: the entrants that ran, each binary once.
Guarantee: what comes after the first wave has to promise to pay; one entrant at least is checked however little time
there is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autofuse.ir.records import Candidate, Config
from autofuse.tuner.benchmark_provider import Built
from autofuse.tuner.entrants import Contest, Entrant
from autofuse.tuner.outcome import WAVE
from autofuse.tuner.search import ConfigSearch
from autofuse.tuner.timing import RaceRules

# Gain of the best configuration over the first wave's best, a bold guess: over 30 nodes of a GPT the median was 0 %.
USUAL_GAIN = 0.05
# The same where the winners of other buckets of the node are in the first wave.
GAIN_OVER_NEIGHBOURS = 0.02
CALLS_PER_TRIAL = 1000  # a profile with more trials expects kernels to be used longer: so many calls for each trial
TRIAL_SECONDS = 0.08  # a trial with compilation, on one core
SCREEN_ROUNDS = 5


class Explorer:
    """Screens configurations of one node, in waves."""

    def __init__(self, contest: Contest, seeds: Iterable[Config]) -> None:
        """``seeds``: winners of other buckets, nearest first."""
        self.tried = 0  # number of configurations
        self._contest = contest
        self._limits = contest.limits
        self._seeds = list(seeds)

    def explore(self, values: tuple[int, ...]) -> list[Entrant]:
        """Try configurations; the entrants that ran.

        Winners of other buckets and the default make a first wave of their own: the winners are compiled
        already, and usually one of the wave wins.
        """
        contest, bench, clock = self._contest, self._contest.bench, self._contest.clock
        variant = bench.variants[0 if contest.form.symbols else 1]
        starts = list(dict.fromkeys([bench.default(values), *self._seeds]))
        wave = min(len(starts), self._limits.wave) if self._seeds else self._limits.wave
        search = ConfigSearch(bench.knobs(values), starts, self._limits.trials, rank=bench.rank(values))
        entrants: dict[str, Entrant] = {}
        failed: set[str] = set()
        while configs := search.ask(wave):
            wave = self._limits.wave
            wave_began = clock.now()
            made = dict(zip(configs, contest.build([Candidate(variant, c) for c in configs], values), strict=True))
            fresh: dict[str, Built] = {}
            for built in made.values():
                if built is not None and built.digest not in entrants and built.digest not in failed:
                    fresh.setdefault(built.digest, built)
            checked = self._checked(fresh.values(), values, bool(entrants))
            self._screen(checked, values)
            entrants |= {e.built.digest: e for e in checked if e.comparison is not None}
            failed |= fresh.keys() - entrants.keys()
            for config, built in made.items():
                known = entrants.get(built.digest) if built is not None else None
                # Relative to eager in the same rounds, so that screenings at different times can be compared.
                search.tell(config, known.score if known is not None and not known.difference else None)
            if entrants and all(e.difference for e in entrants.values()):
                break  # a configuration changes where elements are computed, hardly ever in which order
            if clock.left <= 0 or not self._pays(entrants.values(), clock.now() - wave_began):
                break
        self.tried = search.tried
        return list(entrants.values())

    def try_one(self, candidate: Candidate, values: tuple[int, ...]) -> list[Entrant]:
        """Try one candidate and no other; the entrant, if it ran."""
        self.tried = 1
        made = [built for built in self._contest.build([candidate], values) if built is not None]
        checked = self._checked(made, values, False)
        self._screen(checked, values)
        return [entrant for entrant in checked if entrant.comparison is not None]

    def _checked(self, fresh: Iterable[Built], values: tuple[int, ...], has_entrants: bool) -> list[Entrant]:
        checked: list[Entrant] = []
        for built in fresh:
            if (has_entrants or checked) and self._contest.clock.left <= 0:
                break
            entrant = self._contest.first_check(built, values)
            checked += [entrant] if entrant is not None else []
        return checked

    def _screen(self, entrants: Sequence[Entrant], values: tuple[int, ...]) -> None:
        budget = min(1.0, max(0.05, self._contest.clock.left / 4))
        self._contest.race(entrants, values, RaceRules(SCREEN_ROUNDS, SCREEN_ROUNDS, budget, self._limits.margin))

    def _pays(self, entrants: Iterable[Entrant], wave_seconds: float) -> bool:
        """Whether another wave may save more than it costs, by the usual gain over the first wave.

        The number of calls to come is not known: it is taken from the profile's trials, or from the calls so far if
        more.
        """
        times_us = [e.comparison.median_us for e in entrants if e.comparison is not None]
        if not times_us:
            return True
        calls = max(self._contest.request.calls, CALLS_PER_TRIAL * self._limits.trials)
        cost_seconds = max(wave_seconds, WAVE * TRIAL_SECONDS)
        gain = GAIN_OVER_NEIGHBOURS if self._seeds else USUAL_GAIN
        return calls * min(times_us) * 1e-6 * gain > cost_seconds
