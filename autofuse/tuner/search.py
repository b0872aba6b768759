"""The search over configurations: Optuna proposes, measurements answer.

In: knobs, seeds (the default and neighbours' winners), a budget of trials, perhaps a rank: what a model expects each
configuration to cost. Out: configurations, none twice.
Guarantee: equal answers give equal searches; seeds come first, and none is given twice. In a space that fits the budget
single steps from the best follow, until none is left: each knob is tried by itself at least, a single knob in full. In
a larger one the sampler (TPE, in memory, with a fixed seed) and single steps take turns, until neither finds better: on
recorded bowls of 1024 points TPE alone needs three times the trials. A rank decides nothing: the best ranked follow the
seeds, and single steps are taken in its order for as long as measurements agree with it.
The only importer of Optuna.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from math import prod

import optuna
from optuna.samplers import TPESampler
from optuna.trial import Trial, TrialState

from autofuse.codegen.knobs import Choice, Knob, Rank, default_config
from autofuse.ir.records import Config, make_config

optuna.logging.set_verbosity(optuna.logging.ERROR)

PATIENCE = 8  # a sampled search ends after so many answers without a better one
BETTER = 0.01  # an answer is better only by at least this share: less is noise
STEP = 0.02  # steps start from a new base if it is better by this share: a search that follows noise tries everything
LEADS = (
    2  # of the best ranked that are tried at first; a third gains nothing, and costs a trial where the rank is wrong
)
MOST_RANKED = 4096  # configurations of which the best ranked are found; of a larger space, so many at random
_ATTEMPTS = 8  # proposals for each new configuration: the sampler repeats itself in small spaces


class ConfigSearch:
    """Proposes configurations of one variant; each one that ``ask`` returns must be answered by ``tell``."""

    def __init__(
        self, knobs: Sequence[Knob], seeds: Iterable[Config], trials: int, seed: int = 0, rank: Rank | None = None
    ) -> None:
        """``knobs``: the likeliest to gain first; ``seeds``: the search starts from the first, the others are tried
        next, with the first one's values where they lack a knob; ``trials``: configurations at most; ``seed``: of the
        sampler; ``rank``: for the order alone."""
        self._knobs = tuple(knobs)
        self._choices = {knob.name: knob.choices for knob in knobs}
        self.cardinality = prod(len(knob.choices) for knob in knobs)
        self.is_small = self.cardinality <= trials
        self._trials = min(trials, self.cardinality)
        self._study = None if self.is_small else _study(seed, max(4, self._trials // 4))
        self._open: dict[Config, Trial | None] = {}
        self._told: dict[Config, float | None] = {}
        self._best: float | None = None
        self._since_better = 0
        default = default_config(knobs)
        first, *others = [*seeds] or [default]
        self._base = self._moved(default, first)  # from which steps start
        self._base_cost: float | None = None
        self._seeds = list(dict.fromkeys([self._base, *(self._moved(self._base, config) for config in others)]))
        self._rank = None if rank is None else cache(rank)
        self._agreed = 0  # pairs of answers that are in the order of their ranks, less those that are not
        self._leads = [] if self._rank is None else self._best_ranked(self._rank, seed)

    def _moved(self, start: Config, config: Config) -> Config:
        """``start`` with the valid values of ``config``, which may be of other sizes or from another version."""
        known: Mapping[str, Choice] = {n: value for n, value in config if value in self._choices.get(n, ())}
        return make_config({**dict(start), **known})

    def _best_ranked(self, rank: Rank, seed: int) -> list[Config]:
        """The configurations of the lowest ranks, no two of them one step apart: steps are tried later anyway.

        Of equal ranks the nearest to the base comes first: what a model does not see had better stay as it is.
        """
        space: Iterator[tuple[Choice, ...]] = itertools.product(*self._choices.values())
        if self.cardinality > MOST_RANKED:
            chance = random.Random(seed)
            space = (tuple(map(chance.choice, self._choices.values())) for _ in range(MOST_RANKED))
        configs = [make_config(dict(zip(self._choices, choices, strict=True))) for choices in space]
        found: list[Config] = []
        for config in sorted(configs, key=lambda config: (rank(config), _apart(config, self._base))):
            if config not in self._seeds and all(_apart(config, other) > 1 for other in found):
                found.append(config)
            if len(found) == LEADS:
                break
        return found

    def _agreement(self, config: Config, cost: float) -> int:
        """Of the answers so far how many more are to this one as their ranks are, than the other way round."""
        if self._rank is None:
            return 0
        told = [(self._rank(other) - self._rank(config), its - cost) for other, its in self._told.items() if its]
        return sum(1 if ranks * costs > 0 else -1 for ranks, costs in told if ranks and abs(costs) > STEP * cost)

    def _steps(self) -> list[Config]:
        """Untried configurations that differ from the base in one knob, by one step if its choices are ordered.

        In a small space, steps from failed configurations follow, so that these do not cut off parts of the space.
        """
        failed = [config for config, cost in self._told.items() if cost is None] if self.is_small else []
        near, others = self._steps_from([self._base]), self._steps_from(failed)
        if self._rank is not None and self._agreed >= 0:
            near, others = sorted(near, key=self._rank), sorted(others, key=self._rank)
        return [*near, *others]

    def _steps_from(self, starts: Iterable[Config]) -> list[Config]:
        steps = [
            make_config({**dict(start), name: choices[index]})
            for start in starts
            for name, choices in self._choices.items()
            for index in _next_to(choices, dict(start)[name])
        ]
        return [config for config in dict.fromkeys(steps) if config not in self._told and config not in self._open]

    @property
    def is_over(self) -> bool:
        """Whether there is nothing left to try, or further trials are unlikely to pay."""
        if len(self._told) + len(self._open) >= self._trials:
            return True
        is_stuck = self.is_small or self._since_better >= PATIENCE
        return is_stuck and not self._seeds and not self._leads and not self._steps()

    def ask(self, count: int) -> list[Config]:
        """Up to ``count`` new configurations; none when the search is over."""
        found: list[Config] = []
        for _ in range(_ATTEMPTS * count):
            if len(found) == count or self.is_over:
                break
            config, trial = self._proposal(len(found) % 2 == 0)
            if config not in self._told and config not in self._open:
                self._open[config] = trial
                found.append(config)
            elif trial is not None:
                self._finish(trial, self._told.get(config))  # the known answer makes the sampler propose others
        return found

    def _proposal(self, may_step: bool) -> tuple[Config, Trial | None]:
        """A seed, else one of the best ranked, else a step if ``may_step`` or without a sampler, else the sampler's
        proposal; its trial, if any."""
        first = self._seeds or self._leads
        wanted = first.pop(0) if first else None
        if wanted is None and (may_step or self._study is None):
            wanted = next(iter(self._steps()), None)
        if self._study is None:
            assert wanted is not None  # else the search is over
            return wanted, None
        if wanted is not None:
            self._study.enqueue_trial({name: _encode(self._choices[name], value) for name, value in wanted})
        trial = self._study.ask()
        return make_config({knob.name: _suggest(trial, knob) for knob in self._knobs}), trial

    def tell(self, config: Config, cost: float | None) -> None:
        """Answer a configuration with its cost, a time or a ratio to eager's; None for one that failed."""
        if cost is not None:
            self._agreed += self._agreement(config, cost)
        self._told[config] = cost
        trial = self._open.pop(config, None)
        if trial is not None:
            self._finish(trial, cost)
        if cost is not None and (self._best is None or cost < self._best * (1.0 - BETTER)):
            self._since_better = 0
        else:
            self._since_better += 1
        if cost is not None:
            self._best = cost if self._best is None else min(self._best, cost)
            if self._base_cost is None or cost < self._base_cost * (1.0 - STEP):
                self._base, self._base_cost = config, cost

    def _finish(self, trial: Trial, cost: float | None) -> None:
        assert self._study is not None
        if cost is None:
            self._study.tell(trial, state=TrialState.FAIL)
        else:
            self._study.tell(trial, cost)

    @property
    def tried(self) -> int:
        return len(self._told)

    def best(self) -> tuple[Config, float] | None:
        """The cheapest configuration so far and its cost."""
        answered = [(config, cost) for config, cost in self._told.items() if cost is not None]
        return min(answered, key=lambda item: item[1], default=None)


def _study(seed: int, startup: int) -> optuna.Study:
    sampler = TPESampler(seed=seed, multivariate=True, n_startup_trials=startup)
    return optuna.create_study(sampler=sampler, direction="minimize")


def _suggest(trial: Trial, knob: Knob) -> Choice:
    """The trial's choice for a knob. Ordered choices are picked by index, so that the sampler learns from the order."""
    if _is_ordered(knob.choices):
        return knob.choices[int(trial.suggest_int(knob.name, 0, len(knob.choices) - 1))]
    choice: Choice = trial.suggest_categorical(knob.name, list(knob.choices))
    return choice


def _encode(choices: tuple[Choice, ...], value: Choice) -> Choice:
    return choices.index(value) if _is_ordered(choices) else value


def _next_to(choices: tuple[Choice, ...], value: Choice) -> list[int]:
    """Indices of the choices one step from a value; of all other choices where they have no order."""
    at = choices.index(value)
    if not _is_ordered(choices):
        return [index for index in range(len(choices)) if index != at]
    return [index for index in (at - 1, at + 1) if 0 <= index < len(choices)]


def _apart(one: Config, other: Config) -> int:
    """In how many knobs two configurations differ."""
    return sum(a != b for a, b in zip(one, other, strict=True))


def _is_ordered(choices: tuple[Choice, ...]) -> bool:
    return all(isinstance(choice, int) and not isinstance(choice, bool) for choice in choices)
