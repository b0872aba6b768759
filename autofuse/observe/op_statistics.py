"""What was seen of each op over the run: calls, times and shapes, in bounded memory.

In: the ``StepProfile`` of each sampled step. Out: ``OpProfile`` and ``DimHistogram`` records.
Guarantee: at most ``max_kinds`` kinds of call and the shapes of ``max_owners`` ops are kept; all calls are counted.
Text is made here, when records are asked for, and not in the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from autofuse.ir.records import DimHistogram, OpProfile
from autofuse.observe.config import ObserverConfig
from autofuse.observe.profile import OpKey, OpTotals, StepProfile
from autofuse.observe.statistics import HeavyHitters, Leaf, ShapeStatistics


class OpStatistics:
    """Totals of all sampled steps."""

    def __init__(self, config: ObserverConfig) -> None:
        self._config = config
        self._kinds: HeavyHitters[OpKey] = HeavyHitters(config.max_kinds)
        self._totals: dict[OpKey, OpTotals] = {}
        self._shapes: dict[Any, ShapeStatistics] = {}
        self.untracked_calls = 0  # of ops beyond ``max_owners``, without a histogram

    def add(self, profile: StepProfile) -> bool:
        """Add a step; True where it held a kind of call that was not known."""
        # A full table always has something "new"; that is no reason to keep looking.
        room = not self._kinds.is_full
        learnt = False
        by_shape: dict[tuple[Any, Any], int] = {}
        for key, totals in profile.ops.items():
            known = self._totals.get(key)
            if known is None:
                learnt = True
                known = self._totals[key] = OpTotals(producers=totals.producers)
            known.calls += totals.calls
            known.time_ns += totals.time_ns
            gone = self._kinds.add(key, totals.calls)
            if gone is not None:
                del self._totals[gone]
            site = (key[0], key[3])
            by_shape[site] = by_shape.get(site, 0) + totals.calls
        for (op, description), calls in by_shape.items():
            shapes = self._shapes.get(op) or self._add_op(op)
            if shapes is None:
                self.untracked_calls += calls
            else:
                shapes.add(_leaves(description), calls)
        return learnt and room

    def _add_op(self, op: Any) -> ShapeStatistics | None:
        if len(self._shapes) >= self._config.max_owners:
            return None
        shapes = self._shapes[op] = ShapeStatistics(str(op), self._config.max_shapes, self._config.max_sizes)
        return shapes

    @property
    def calls(self) -> int:
        """Op calls in sampled steps."""
        return self._kinds.total

    @property
    def tail_calls(self) -> int:
        """Calls that no kept profile can claim for sure."""
        return self._kinds.tail

    def profiles(self) -> list[OpProfile]:
        """One record per kind of call, longest total time first."""
        found = [_to_record(key, totals) for key, totals in self._totals.items()]
        return sorted(found, key=lambda record: -record.time_us)

    def histograms(self) -> list[DimHistogram]:
        """Sizes of every dim of every tensor argument of every op."""
        return [record for shapes in self._shapes.values() for record in shapes.histograms()]


def _leaves(description: Sequence[Any]) -> list[Leaf]:
    return [(f"args[{index}]", tuple(spec[0])) for index, spec in enumerate(description[:-2]) if spec is not None]


def _to_record(key: OpKey, totals: OpTotals) -> OpProfile:
    op, module, phase, description = key
    specs, device = description[:-2], description[-1]
    described = [spec for spec in specs if spec is not None]
    return OpProfile(
        overload=str(op),
        module=module,
        phase=_phase(phase),
        shapes=tuple(tuple(spec[0]) for spec in described),
        dtypes=tuple(str(spec[1]).removeprefix("torch.") for spec in described),
        strides=tuple(tuple(spec[2]) for spec in described),
        device="" if device is None else str(device),
        calls=totals.calls,
        time_us=totals.time_ns / 1e3,
        producers=_names(totals.producers),
    )


def _phase(text: str) -> Literal["forward", "backward", "other"]:
    return "forward" if text == "forward" else "backward" if text == "backward" else "other"


def _names(producers: Sequence[Any]) -> tuple[str, ...]:
    return tuple("" if op is None else str(op) for op in producers)
