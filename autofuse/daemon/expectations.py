"""What a request is expected to bring for the time that it takes, by what its node has brought before.

In: a waiting request; the decisions so far on its node, in other buckets, on this device. Out: a number by which the
queue is ordered: the microseconds that are expected to be saved for a second of tuning. Guarantee: it orders and
nothing else: whatever is asked for is tuned in the end. The planner's estimate counts while a node has no decision.

Why: matmuls that eager keeps took a third of the time that a script waited for, in one bucket after the other, while
element-wise nodes with gains of 3 to 10x stood behind them in the queue.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import median

from autofuse.db.results import TuneResults
from autofuse.db.tune_queue import WaitingRequest
from autofuse.ir.records import EAGER, Decision, DecisionKey

LEAST_GAIN = 1.01  # the least speedup to expect: a node that eager has won may gain at other sizes
TYPICAL_SECONDS = 0.5  # expected of a job before any was done
RECENT = 64  # latest decisions whose median time is expected of a node without decisions


class Expectations:
    """The savings to expect from one store's requests."""

    def __init__(self, results: TuneResults) -> None:
        self._results = results
        self._gains: dict[str, list[float]] = {}  # speedups of decisions, 1 for eager, by family of keys
        self._seconds: dict[str, list[float]] = {}  # tuning time of the same decisions
        self._recent_seconds = deque[float](maxlen=RECENT)  # tuning time of the latest decisions of all nodes

    def note(self, decisions: Iterable[Decision]) -> None:
        """Add decisions that were just stored."""
        for decision in decisions:
            if decision.key.family in self._gains:
                self._add(decision)

    def saving_a_second(self, waiting: WaitingRequest) -> float:
        """Microseconds that a request is expected to save for each second of its tuning."""
        family = self._read(waiting.key)
        gains, seconds = self._gains[family], self._seconds[family]
        speedup = max(median(gains), LEAST_GAIN) if gains else waiting.estimated_speedup
        saving = waiting.calls * waiting.unfused_us * max(0.0, 1.0 - 1.0 / max(speedup, 1e-9))
        typical = median(self._recent_seconds) if self._recent_seconds else TYPICAL_SECONDS
        return saving / max(median(seconds) if seconds else typical, 1e-3)

    def _read(self, key: DecisionKey) -> str:
        """The key of a node's past decisions, which are read from the store on first use."""
        family = key.family
        if family not in self._gains:
            self._gains[family], self._seconds[family] = [], []
            for stored in self._results.history(key.fusion_id):
                if stored.decision.key.family == family:
                    self._add(stored.decision)
        return family

    def _add(self, decision: Decision) -> None:
        family = decision.key.family
        self._gains[family].append(1.0 if decision.candidate.variant == EAGER else decision.speedup)
        self._seconds[family].append(decision.tuning_seconds)
        self._recent_seconds.append(decision.tuning_seconds)
