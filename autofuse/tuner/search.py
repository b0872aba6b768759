"""The search over configurations: Optuna proposes, measurements answer.

In: knobs, seeds (the default and neighbours' winners), a budget of trials. Out: configurations, none twice.
Guarantee: the study lives in memory and has a fixed seed, so equal answers give equal searches; seeds come first; a
space that fits the budget is tried in full. In a larger one the sampler (TPE) and single steps from the best take
turns, until neither finds better: on recorded bowls of 1024 points TPE alone needs three times the trials.
The only importer of Optuna.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from math import prod

import optuna
from optuna.samplers import TPESampler
from optuna.trial import Trial, TrialState

from autofuse.codegen.knobs import Choice, Knob
from autofuse.ir.records import Config, make_config

optuna.logging.set_verbosity(optuna.logging.ERROR)

PATIENCE = 8  # answers without a better one after which a sampled search ends
BETTER = 0.01  # the share by which an answer must be better to count as such: below is noise
_ATTEMPTS = 8  # proposals for each new one: the sampler repeats itself in small spaces


class ConfigSearch:
    """Proposes configurations of one variant; every one that ``ask`` gives wants a ``tell``."""

    def __init__(self, knobs: Sequence[Knob], seeds: Iterable[Config], trials: int, seed: int = 0) -> None:
        """``trials``: configurations at most; ``seed``: of the sampler. Seeds outside of the space are left out."""
        self._knobs = tuple(knobs)
        self._choices = {knob.name: knob.choices for knob in knobs}
        self.cardinality = prod(len(knob.choices) for knob in knobs)
        self.is_exhaustive = self.cardinality <= trials
        self._trials = min(trials, self.cardinality)
        startup = max(4, self._trials // 4)
        sampler = TPESampler(seed=seed, multivariate=True, n_startup_trials=startup)
        self._study = optuna.create_study(sampler=sampler, direction="minimize")
        self._open: dict[Config, Trial] = {}
        self._told: dict[Config, float | None] = {}
        self._best: float | None = None
        self._since_better = 0
        first = [config for config in seeds if self.fits(config)]
        if self.is_exhaustive:
            # Nearest to the first seed first: should the search be cut short, each knob has been tried alone.
            near = dict(first[0]) if first else {knob.name: knob.default for knob in knobs}
            first += sorted(self._whole_space(), key=lambda c: sum(near[name] != value for name, value in c))
        for config in list(dict.fromkeys(first))[: self._trials]:
            self._enqueue(config)

    def fits(self, config: Config) -> bool:
        """Whether a configuration, perhaps from another version or machine, lies in this space."""
        values = dict(config)
        return set(values) == set(self._choices) and all(values[name] in self._choices[name] for name in values)

    def _whole_space(self) -> list[Config]:
        names = list(self._choices)
        return [make_config(dict(zip(names, values, strict=True))) for values in product(*self._choices.values())]

    def _enqueue(self, config: Config) -> None:
        self._study.enqueue_trial({name: _encode(self._choices[name], value) for name, value in config})

    def _steps(self) -> list[Config]:
        """Untried configurations that differ from the best in one knob, by one step where it has an order."""
        best = self.best()
        if best is None or self.is_exhaustive:
            return []
        steps = [
            make_config({**dict(best[0]), name: choices[index]})
            for name, choices in self._choices.items()
            for index in _next_to(choices, dict(best[0])[name])
        ]
        return [config for config in steps if config not in self._told and config not in self._open]

    @property
    def is_over(self) -> bool:
        """Whether there is nothing left to try, or further trials are unlikely to pay."""
        if len(self._told) + len(self._open) >= self._trials:
            return True
        return not self.is_exhaustive and self._since_better >= PATIENCE and not self._steps()

    def ask(self, count: int) -> list[Config]:
        """Up to ``count`` new configurations; none when the search is over."""
        found: list[Config] = []
        for _ in range(_ATTEMPTS * count):
            if len(found) == count or self.is_over:
                break
            steps = self._steps()
            if steps and len(found) % 2 == 0:
                self._enqueue(steps[0])
            trial = self._study.ask()
            config = make_config({knob.name: _suggest(trial, knob) for knob in self._knobs})
            if config in self._told:
                self._finish(trial, self._told[config])  # the known answer moves the sampler on
            elif config in self._open:
                self._study.tell(trial, state=TrialState.FAIL)
            else:
                self._open[config] = trial
                found.append(config)
        return found

    def tell(self, config: Config, cost: float | None) -> None:
        """What a configuration costs, as a time or relative to eager; None for one that failed."""
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

    def _finish(self, trial: Trial, cost: float | None) -> None:
        if cost is None:
            self._study.tell(trial, state=TrialState.FAIL)
        else:
            self._study.tell(trial, cost)

    @property
    def tried(self) -> int:
        return len(self._told)

    def best(self) -> tuple[Config, float] | None:
        """The cheapest so far."""
        answered = [(config, cost) for config, cost in self._told.items() if cost is not None]
        return min(answered, key=lambda item: item[1], default=None)


def _suggest(trial: Trial, knob: Knob) -> Choice:
    """A choice. Numbers have an order that a sampler can learn from, so it picks their index."""
    if _is_ordered(knob.choices):
        return knob.choices[int(trial.suggest_int(knob.name, 0, len(knob.choices) - 1))]
    choice: Choice = trial.suggest_categorical(knob.name, list(knob.choices))
    return choice


def _encode(choices: tuple[Choice, ...], value: Choice) -> Choice:
    return choices.index(value) if _is_ordered(choices) else value


def _next_to(choices: tuple[Choice, ...], value: Choice) -> list[int]:
    """Indices one step from a value; all others where the choices have no order."""
    at = choices.index(value)
    if not _is_ordered(choices):
        return [index for index in range(len(choices)) if index != at]
    return [index for index in (at - 1, at + 1) if 0 <= index < len(choices)]


def _is_ordered(choices: tuple[Choice, ...]) -> bool:
    return all(isinstance(choice, int) and not isinstance(choice, bool) for choice in choices)


def search_all(search: ConfigSearch, costs: dict[Config, float], wave: int = 4) -> ConfigSearch:
    """Run a search on recorded costs, to judge it without hardware; configurations not recorded count as failed."""
    while configs := search.ask(wave):
        for config in configs:
            search.tell(config, costs.get(config))
    return search
