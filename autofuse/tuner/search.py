"""The search over configurations: Optuna proposes, measurements answer.

In: knobs, seeds (defaults and neighbours' winners), a budget of trials. Out: configurations, one after the
other, none twice. Guarantee: an in-memory study with a fixed seed, so equal answers give equal searches;
a small space is enumerated, a large one sampled; the search ends when it stops getting better.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from math import prod

import optuna
from optuna.samplers import TPESampler
from optuna.trial import TrialState

from autofuse.codegen.knobs import Knob
from autofuse.ir.records import Config, make_config

optuna.logging.set_verbosity(optuna.logging.ERROR)

PATIENCE = 8  # trials without a better one, after which a sampled search ends


class ConfigSearch:
    """Proposes configurations of one variant. Call ``tell`` for each that ``ask`` gave."""

    def __init__(self, knobs: Sequence[Knob], seeds: Iterable[Config], trials: int, seed: int = 0) -> None:
        self._knobs = tuple(knobs)
        self._choices = {knob.name: knob.choices for knob in knobs}
        self.cardinality = prod(len(knob.choices) for knob in knobs)
        self._trials = min(trials, self.cardinality)
        sampler = TPESampler(seed=seed, multivariate=True, n_startup_trials=max(4, self._trials // 4))
        self._study = optuna.create_study(sampler=sampler, direction="minimize")
        self._open: dict[Config, optuna.trial.Trial] = {}
        self._told: dict[Config, float | None] = {}
        self._since_best = 0
        self._seeds = [s for s in dict.fromkeys(seeds) if self._fits(s)]
        first = list(self._seeds)
        if self.cardinality <= trials:  # small enough to try everything; Optuna's own enumeration needs its own loop
            names = [knob.name for knob in self._knobs]
            every = product(*(knob.choices for knob in self._knobs))
            first += [make_config(dict(zip(names, values, strict=True))) for values in every]
        for config in dict.fromkeys(first):
            values = {name: _encode(self._choices[name], value) for name, value in config}
            self._study.enqueue_trial(values, skip_if_exists=True)

    def _fits(self, config: Config) -> bool:
        """Whether a configuration from elsewhere lies in this space."""
        values = dict(config)
        return set(values) == set(self._choices) and all(values[k] in self._choices[k] for k in values)

    def ask(self, count: int) -> list[Config]:
        """Up to ``count`` new configurations; empty when the search is over."""
        found: list[Config] = []
        attempts = 0
        while len(found) < count and not self._is_over(len(found)) and attempts < 8 * count:
            attempts += 1
            trial = self._study.ask()
            config = make_config({knob.name: _suggest(trial, knob) for knob in self._knobs})
            if config in self._told:
                # The sampler repeats itself: give it the known answer.
                self._finish(trial, self._told[config])
            elif config in self._open:
                self._study.tell(trial, state=TrialState.FAIL)
            else:
                self._open[config] = trial
                found.append(config)
        return found

    def _is_over(self, pending: int) -> bool:
        if len(self._told) + len(self._open) >= self._trials:
            return True
        return self.cardinality > self._trials and self._since_best >= PATIENCE and pending == 0

    def tell(self, config: Config, microseconds: float | None) -> None:
        """The answer for one configuration; None for one that failed."""
        best = self.best()
        self._told[config] = microseconds
        trial = self._open.pop(config, None)
        if trial is not None:
            self._finish(trial, microseconds)
        improved = microseconds is not None and (best is None or microseconds < best[1])
        self._since_best = 0 if improved else self._since_best + 1

    def _finish(self, trial: optuna.trial.Trial, microseconds: float | None) -> None:
        if microseconds is None:
            self._study.tell(trial, state=TrialState.FAIL)
        else:
            self._study.tell(trial, microseconds)

    def best(self) -> tuple[Config, float] | None:
        """The fastest so far."""
        answered = [(config, us) for config, us in self._told.items() if us is not None]
        return min(answered, key=lambda item: item[1], default=None)

    def ranking(self) -> Iterator[tuple[Config, float]]:
        """Answered configurations, fastest first."""
        answered = [(config, us) for config, us in self._told.items() if us is not None]
        yield from sorted(answered, key=lambda item: item[1])


def _suggest(trial: optuna.trial.Trial, knob: Knob) -> int | str | bool:
    """A choice. Numbers have an order that a sampler can learn from, so it picks their index."""
    if _is_ordered(knob.choices):
        return knob.choices[trial.suggest_int(knob.name, 0, len(knob.choices) - 1)]
    choice: int | str | bool = trial.suggest_categorical(knob.name, list(knob.choices))
    return choice


def _encode(choices: tuple[int | str | bool, ...], value: int | str | bool) -> int | str | bool:
    return choices.index(value) if _is_ordered(choices) else value


def _is_ordered(choices: tuple[int | str | bool, ...]) -> bool:
    return all(isinstance(choice, int) and not isinstance(choice, bool) for choice in choices)


def replay(knobs: Sequence[Knob], recorded: dict[Config, float], seeds: Iterable[Config], trials: int) -> ConfigSearch:
    """Run a search on recorded timings (us a call), to judge it without hardware."""
    search = ConfigSearch(knobs, seeds, trials)
    while configs := search.ask(4):
        for config in configs:
            search.tell(config, recorded.get(config))
    return search
