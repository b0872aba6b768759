"""Trials until a search is within 5 % of the best, with an order by a model of time and without one. No speed of a GPU.

    python benchmarks/ranking.py                          # all landscapes, 20 seeds
    python benchmarks/ranking.py --quick                  # 3 seeds
    python benchmarks/ranking.py --only softmax

Landscapes: of compiled GPU kernels (`ranking_landscapes.py`), each by several models of a device, one of which makes
single times rough by 3 %; bowls with one optimum; what `regret.py` has measured of a CPU's kernels. Orders: `none` is
the search without a model; `model` is `codegen/triton/ranking.py`, which sees nothing of compiled code; `reversed` is
the model's turned round, or that of the times where there is no model; `random` says nothing. A run is one search as a
job makes it: in waves of four, with 2 % of noise, of 24 trials (`tuner.trials`) or of 100. A search that ends without
coming so near counts as all of its trials and one more. Bars: by the model no more trials than without in the median,
fewer at the 90th percentile; by wrong orders at most four more in the median. Writes benchmarks/results/ranking.json.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common import RESULTS, arguments, chosen, commit, encode_rows, parse, print_end, save

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # where the tests' cases are

from ranking_landscapes import OUT, TARGET, Device, times_of

from autofuse.codegen.knobs import Knob, Rank
from autofuse.codegen.lowering.lower import lower
from autofuse.codegen.triton.ranking import Ranking, rates_of
from autofuse.ir.records import Config, make_config
from tests.cases import CASES
from tests.tuner.replay import LARGE, bowl, trials_until_near, whole_space

BUDGETS = (24, 100)
SEEDS = 20
ORDERS = ("none", "model", "reversed", "random")
DEVICES: Mapping[str, tuple[Device, float]] = {  # and the share by which single times are rough
    "usual": (Device(), 0.0),
    "slow memory": (replace(Device(), latency=1300e-9, cache=3.35e12), 0.0),
    "no waiting": (replace(Device(), latency=0.0, dependent=0, barrier=0), 0.0),
    "nothing hidden": (replace(Device(), power=1.0, latency=400e-9), 0.0),
    "rough": (Device(), 0.03),
}


@dataclass(frozen=True)
class Landscape:
    """A space and what each configuration takes."""

    name: str
    kind: str
    knobs: tuple[Knob, ...]
    times: Mapping[Config, float | None]
    model: Rank | None = None  # what a model expects, if there is one


# ---- landscapes -----------------------------------------------------------------------------------------------------


def compiled(path: Path) -> Iterator[Landscape]:
    """Of compiled kernels, by each of the devices."""
    rates = rates_of(TARGET, Device().multiprocessors)
    assert rates is not None
    for row in json.loads(path.read_text()):
        form = CASES[row["case"]].form()
        model = Ranking(lower(form), dict(zip(form.symbols, row["sizes"], strict=True)), rates)
        costs = {config: model(config) for config in whole_space(knobs_of(row))}
        for name, (device, roughness) in DEVICES.items():
            chance = random.Random(f"{row['case']} {row['sizes']}")
            times = {
                config: None if us is None else us * chance.lognormvariate(0.0, roughness)
                for config, us in times_of(row, device).items()
            }
            sizes = "x".join(map(str, row["sizes"]))
            yield Landscape(f"{row['case']} {sizes}", f"compiled, {name}", knobs_of(row), times, costs.__getitem__)


def knobs_of(row: Mapping[str, Any]) -> tuple[Knob, ...]:
    return tuple(Knob(name, tuple(choices), row["defaults"][name], "") for name, choices in row["knobs"].items())


def bowls() -> Iterator[Landscape]:
    """Of 1,024 configurations, with one optimum."""
    for seed in range(10):
        yield Landscape(f"bowl {seed}", "bowls", LARGE, bowl(seed))


def recorded() -> Iterator[Landscape]:
    """Of a CPU's kernels, as `regret.py` has measured all configurations of them; equal binaries once."""
    for row in json.loads((RESULTS / "regret.json").read_text())["rows"]:
        found = [one for one in row["screened"] if one["variant"] == "c_generic"]
        names = sorted({name for one in found for name in one["configuration"]})
        choices = {name: sorted({one["configuration"][name] for one in found}) for name in names}
        knobs = tuple(Knob(name, tuple(c), c[0], "") for name, c in choices.items())
        timed = {make_config(one["configuration"]): 1.0 / one["over_eager"] for one in found}
        times = {config: timed.get(config) for config in whole_space(knobs)}
        if len(times) > 8:
            yield Landscape(f"{row['node']} {row['bucket']}", "recorded on a CPU", knobs, times)


# ---- searches -------------------------------------------------------------------------------------------------------


def rank_of(landscape: Landscape, order: str, seed: int) -> Rank | None:
    """The order of this name; None for none, also where the landscape has no model."""
    if order == "random":
        chance = random.Random(seed)
        return {config: 0.1 + chance.random() for config in landscape.times}.__getitem__
    if order == "reversed":
        times = landscape.model or (lambda config: landscape.times[config] or math.inf)
        return lambda config: 1.0 / times(config)
    return landscape.model if order == "model" else None


def searches(landscape: Landscape, seeds: int) -> dict[tuple[str, int], list[int]]:
    """Trials of each order and budget, over the seeds."""
    orders = [order for order in ORDERS if order != "model" or landscape.model is not None]
    return {
        (order, budget): [
            trials_until_near(landscape.knobs, landscape.times, rank_of(landscape, order, seed), budget, seed)
            for seed in range(seeds)
        ]
        for order in orders
        for budget in BUDGETS
    }


def summary_of(trials: Sequence[int], budget: int) -> dict[str, float]:
    ordered = sorted(trials)
    return {
        "median": statistics.median(ordered),
        "p90": ordered[math.ceil(0.9 * len(ordered)) - 1],
        "mean": round(statistics.mean(ordered), 2),
        "searches": len(ordered),
    }


def bars_of(found: Mapping[tuple[str, str, int], Sequence[int]]) -> dict[str, Any]:
    """By kind of landscape and budget: trials by each order."""
    bars: dict[str, Any] = {}
    for (kind, order, budget), trials in sorted(found.items()):
        told = summary_of(trials, budget)
        bars.setdefault(f"{kind}, {budget} trials", {})[order] = told
    return bars


def main() -> int:
    parser = arguments(__doc__, "ranking", quick="3 seeds", only="landscapes")
    parser.add_argument("--landscapes", type=Path, default=OUT, help="of compiled kernels")
    options = parse(parser)
    began, seeds = time.monotonic(), 3 if options.quick else SEEDS
    landscapes = [*compiled(options.landscapes), *bowls(), *recorded()]
    names = set(chosen(options.only, sorted({landscape.name for landscape in landscapes})))
    found: dict[tuple[str, str, int], list[int]] = defaultdict(list)
    rows = []
    for landscape in (one for one in landscapes if one.name in names):
        made = searches(landscape, seeds)
        for (order, budget), trials in made.items():
            found[landscape.kind, order, budget] += trials
        rows.append(
            {
                "landscape": landscape.name,
                "kind": landscape.kind,
                "configurations": len(landscape.times),
                "timed": sum(us is not None for us in landscape.times.values()),
                "trials": {f"{order}, {budget}": statistics.median(t) for (order, budget), t in made.items()},
            }
        )
    bars = bars_of(found)
    save(options.out, "ranking", encode=encode_rows, seeds=seeds, commit=commit(), bars=bars, rows=rows)
    print_end(bars, [], options.out, began)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
