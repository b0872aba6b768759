"""What a strict run gives up: kernels that are faster than what runs, but not equal to eager to the bit.

In: how a run used its nodes, their decisions, and all that was measured of them. Out: a ``StrictCost``.
Guarantee: only what was timed counts, so it is the least that is given up: in a strict run no program is tried that is
made of kernels of which one is refused. Where no strategy of a group runs, the gains of the group's programs and those
of its nodes' kernels both count, for they are of different operations.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autofuse.db.rows import StoredMeasurement
from autofuse.ir.records import EAGER, Candidate, Decision, Measurement, NodeUse


@dataclass(frozen=True)
class StrictCost:
    """The kernels of a strict run that were refused for their bits."""

    refused_nodes: int = 0  # nodes and buckets whose fastest kernel was refused
    step_us: float | None = None  # of a step, which these kernels would save; None where no step was counted


def given_up_us(use: NodeUse, decision: Decision, measured: Iterable[StoredMeasurement]) -> float:
    """Microseconds that the fastest refused kernel of a node would have saved over all calls of a run."""
    latest = {row.measurement.candidate: row.measurement for row in measured if row.key == decision.key}
    fastest = _fastest(latest)
    if fastest is None or not fastest.speedup:
        return 0.0
    now = decision.speedup if decision.candidate.variant != EAGER else 1.0
    eager_us = decision.unfused_us or fastest.eager_us or 0.0
    calls = max(use.calls, sum(shape.calls for shape in use.shapes))  # a group that ran as single nodes has no calls
    return calls * eager_us * max(0.0, 1.0 / now - 1.0 / fastest.speedup)


def _fastest(latest: dict[Candidate, Measurement]) -> Measurement | None:
    refused = [m for m in latest.values() if m.status == "not_bit_equal"]
    return max(refused, key=lambda m: m.speedup or 0.0, default=None)


def strict_cost(gains_us: Sequence[float], steps: int) -> StrictCost:
    """The sum over the nodes of a run; ``gains_us``: `given_up_us` of each."""
    return StrictCost(sum(gain > 0.0 for gain in gains_us), sum(gains_us) / steps if steps else None)
