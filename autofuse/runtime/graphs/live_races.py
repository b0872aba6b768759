"""Kernels on the script's own calls, beside eager's operations in calls of which single nodes are held out.

In: the timed calls of graphs on a CPU. Out: the nodes that run eager's operations in the next timed call; for each
kernel a verdict. Guarantee: a kernel is given up only where eager wins against it by the rule by which a kernel has to
win against eager; then that is the decision for its bucket, with the times as its evidence. Until there is a verdict
at most every other timed call of a node is held out, and after `MOST_PAIRS` none is any more.

A race in the worker has the caches to itself, and memory that it was given for the race. Steps of a script tell by all
nodes together, and often too little to tell one from another.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from autofuse.ir.records import EAGER, LIVE_RACES, Candidate, Comparison, Decision, Event
from autofuse.ir.shape import evaluate
from autofuse.ir.validation import one_line
from autofuse.tuner.comparison import LEAST_PAIRS, compare, confirms, is_clear, wins

if TYPE_CHECKING:
    from autofuse.runtime.graphs.plans import NodeState, Plan

LOOKS = (LEAST_PAIRS, 14, 20, 28, 40)  # numbers of pairs after which it is looked whether they tell
AGAIN = 14  # pairs that have to show a loss once more, unless it is clear
MOST_PAIRS = LOOKS[-1]
TOLD_ROWS = 100  # of the event at the end of a run

CONFIRMED, SLOWER, UNSURE, OPEN = "confirmed", "slower", "unsure", "open"


class Sample(NamedTuple):
    """One call of a node."""

    seconds: float
    elements: int  # of its first output: sizes of one bucket differ


@dataclass
class Race:
    """Of one kernel in one bucket of a node; pairs are a call that ran it and the next timed one, which was eager."""

    label: str
    fused: list[Sample] = field(default_factory=list)
    eager: list[Sample] = field(default_factory=list)
    is_warm: bool = False  # eager's operations have run once; that call prepares them and is not counted
    verdict: str = OPEN
    comparison: Comparison | None = None  # of the last look
    compared: int = 0  # pairs in it
    has_lost: bool = False  # once: the pairs since then decide

    @property
    def pairs(self) -> int:
        return len(self.eager)

    def look(self, margin: float) -> None:
        """Find the verdict where the pairs tell it, or are enough."""
        if self.pairs != AGAIN if self.has_lost else self.pairs not in LOOKS:
            return
        eager, fused = _scaled(self.eager), _scaled(self.fused[: self.pairs])
        self.comparison, reverse = compare(eager, fused), compare(fused, eager)
        self.compared = self.pairs
        if self.has_lost:
            self.verdict = SLOWER if confirms(reverse, margin) else UNSURE
        elif wins(reverse, margin):
            if is_clear(reverse):
                self.verdict = SLOWER
            else:
                self.has_lost, self.fused, self.eager = True, [], []
        elif self.comparison.low > 1.0:
            self.verdict = CONFIRMED
        elif self.pairs >= MOST_PAIRS:
            self.verdict = UNSURE


def _scaled(samples: Sequence[Sample]) -> list[float]:
    return [sample.seconds / sample.elements for sample in samples]


class LiveRaces:
    """Of one session."""

    def __init__(
        self, margin: float, decision_of: Callable[[NodeState], Decision | None], give_up: Callable[[Decision], None]
    ) -> None:
        """``margin``: by which eager must win; ``decision_of``: what stands for a node; ``give_up(decision)`` takes the
        decision against a kernel."""
        self._margin = margin
        self._decision_of = decision_of
        self._give_up = give_up
        self._races: dict[tuple[str, str, str], Race] = {}
        self._elements: dict[tuple[str, tuple[int, ...]], int] = {}

    def held_out(self, plan: Plan) -> frozenset[int]:
        """The nodes that run eager's operations in a timed call that begins now."""
        found = set()
        for index, node in enumerate(plan.nodes):
            race = self._race(plan, index, node)
            if race is not None and race.pairs < len(race.fused):
                found.add(index)
        return frozenset(found)

    def add(self, plan: Plan, held: frozenset[int], seconds: Sequence[float]) -> None:
        """A timed call has ended, in which the nodes ``held`` ran eager's operations; ``seconds``: of each node."""
        for index, node in enumerate(plan.nodes):
            race = self._race(plan, index, node)
            if race is None or seconds[index] <= 0.0:
                continue
            sample = Sample(seconds[index], self._elements_of(node))
            if index not in held:
                if len(race.fused) == race.pairs:
                    race.fused.append(sample)
            elif not race.is_warm:
                race.is_warm = True
            elif race.pairs < len(race.fused):
                race.eager.append(sample)
                race.look(self._margin)
                if race.verdict == SLOWER:
                    self._lose(node, race)
                if race.verdict != OPEN:
                    race.eager, race.fused = [], []  # a long run has thousands of races

    def _race(self, plan: Plan, index: int, node: NodeState) -> Race | None:
        """The open race of a node's kernel; None where there is none, or another call of the node is not like it."""
        # Calls that are checked, or run a half of an attention, are other ones.
        if not node.tag or node.covered or node.fused is None or plan.calls[index] is not node.fused:
            return None
        if node.slot.device.type != "cpu":  # its times come later
            return None
        key = (node.fusion_id, node.bucket.label, node.tag)
        race = self._races.get(key)
        if race is None:
            race = self._races[key] = Race(node.slot.node.label)
        return race if race.verdict == OPEN else None

    def _elements_of(self, node: NodeState) -> int:
        key = (node.fusion_id, node.values)
        if key not in self._elements:
            form = node.form
            sizes = dict(zip(form.symbols, node.values, strict=True))
            self._elements[key] = max(1, evaluate(form.spec(form.outputs[0]).numel, sizes))
        return self._elements[key]

    def _lose(self, node: NodeState, race: Race) -> None:
        decision, comparison = self._decision_of(node), race.comparison
        if decision is None or comparison is None or decision.compile_key != node.tag:
            return  # decided again meanwhile
        us = [statistics.median(s.seconds for s in samples) * 1e6 for samples in (race.eager, race.fused)]
        self._give_up(
            replace(
                decision,
                candidate=Candidate(EAGER),
                compile_key=None,
                unfused_us=us[0],
                fused_us=us[1],
                speedup=comparison.speedup,
                speedup_low=comparison.low,
                speedup_high=comparison.high,
                reason="slower_live",
                detail=one_line(
                    f"{us[1]:.3g} us against eager's {us[0]:.3g} us in {race.pairs} pairs of calls of the script; "
                    f"{decision.speedup:.2f}x in its race"
                ),
                trials=0,
                tuning_seconds=0.0,
                raced_threads=0,
            )
        )

    def told(self) -> Event | None:
        """All verdicts of the run; None where no kernel was raced."""
        races = {key: race for key, race in tuple(self._races.items()) if race.comparison is not None}
        if not races:
            return None
        counts = Counter(race.verdict for race in races.values())
        rows = sorted(races.items(), key=lambda item: item[1].verdict != SLOWER)[:TOLD_ROWS]
        return Event(LIVE_RACES, "kernels on the script's own calls", {
            **{verdict: counts[verdict] for verdict in (CONFIRMED, SLOWER, UNSURE, OPEN)},
            "rows": [_row(key, race) for key, race in rows],
        })  # fmt: skip


def _row(key: tuple[str, str, str], race: Race) -> dict[str, Any]:
    found = race.comparison
    assert found is not None
    numbers = {name: round(getattr(found, name), 4) for name in ("speedup", "low", "high")}
    finite = {name: value for name, value in numbers.items() if math.isfinite(value)}
    return {"node": race.label, "bucket": key[1], "verdict": race.verdict, "pairs": race.compared, **finite}


class HeldOutPlan:
    """A plan of which some nodes run eager's operations, for one call."""

    __slots__ = ("_plan", "calls")

    native = None

    def __init__(self, plan: Plan, held: frozenset[int]) -> None:
        self._plan = plan
        self.calls = tuple(plan.nodes[i].unfused if i in held else call for i, call in enumerate(plan.calls))

    @property
    def count(self) -> int:
        return self._plan.count

    @count.setter
    def count(self, calls: int) -> None:
        self._plan.count = calls

    @property
    def timers(self) -> Any:
        return self._plan.timers

    @property
    def skipped(self) -> list[int]:
        return self._plan.skipped
