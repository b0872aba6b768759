"""Statistics of each op over the run: calls, times and shapes, in bounded memory.

In: the ``StepProfile`` of each sampled step. Out: ``OpProfile`` and ``DimHistogram`` records.
Guarantee: at most ``max_kinds`` kinds of call and the shapes of ``max_owners`` ops are kept; all calls are counted.
Text is made here, when records are asked for, and not in the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from autofuse.ir.records import DimHistogram, OpProfile
from autofuse.observer.config import ObserverConfig
from autofuse.observer.profile import StepProfile
from autofuse.observer.statistics import HeavyHitters, Leaf, ShapeStatistics


class _Total:
    """One kind of call over the run."""

    __slots__ = ("calls", "description", "producers", "time_ns")

    def __init__(self, description: tuple[Any, ...], producers: tuple[Any, ...]) -> None:
        self.description = description
        self.producers = producers
        self.calls = 0
        self.time_ns = 0


_Kind = tuple[Any, str, str, int]  # op, module, phase, number of the description


class OpStatistics:
    """Totals of all sampled steps."""

    def __init__(self, config: ObserverConfig) -> None:
        self._config = config
        self._kinds: HeavyHitters[_Kind] = HeavyHitters(config.max_kinds)
        self._totals: dict[_Kind, _Total] = {}
        self._numbers: dict[tuple[Any, ...], int] = {}  # descriptions, numbered: cheap to hash in kinds
        self._next_number = 0
        self._shapes: dict[Any, ShapeStatistics] = {}
        self.untracked_calls = 0  # of ops beyond ``max_owners``, without a histogram

    def add(self, profile: StepProfile) -> bool:
        """Add a step; True where it held a kind of call that was not known."""
        # A full table always has something "new"; that is no reason to keep looking.
        room = not self._kinds.is_full
        learnt = False
        number_of: dict[int, int] = {}  # by identity, within this step
        by_shape: dict[tuple[Any, int], list[Any]] = {}
        for (op, module, phase, identity), totals in profile.ops.items():
            number = number_of.get(identity)
            if number is None:
                number = number_of[identity] = self._number(totals.description)
            kind = (op, module, phase, number)
            known = self._totals.get(kind)
            if known is None:
                learnt = True
                known = self._totals[kind] = _Total(totals.description, totals.producers)
            totals.of_run = known
            known.calls += totals.calls
            known.time_ns += totals.time_ns
            gone = self._kinds.add(kind, totals.calls)
            if gone is not None:
                del self._totals[gone]
            seen = by_shape.get((op, identity))
            if seen is None:
                by_shape[op, identity] = [totals.calls, totals.description]
            else:
                seen[0] += totals.calls
        for (op, _), (calls, description) in by_shape.items():
            shapes = self._shapes.get(op) or self._add_op(op)
            if shapes is None:
                self.untracked_calls += calls
            else:
                shapes.add(_leaves(description), calls)
        if len(self._numbers) > 4 * self._config.max_kinds:
            self._numbers = {total.description: kind[3] for kind, total in self._totals.items()}
        return learnt and room

    def _number(self, description: tuple[Any, ...]) -> int:
        number = self._numbers.get(description)
        if number is None:
            number = self._numbers[description] = self._next_number
            self._next_number += 1
        return number

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
        found = [_to_record(kind, total) for kind, total in self._totals.items()]
        return sorted(found, key=lambda record: -record.time_us)

    def histograms(self) -> list[DimHistogram]:
        """Sizes of every dim of every tensor argument of every op."""
        return [record for shapes in self._shapes.values() for record in shapes.histograms()]


def _leaves(description: Sequence[Any]) -> list[Leaf]:
    return [(f"args[{index}]", tuple(spec[0])) for index, spec in enumerate(description[:-2]) if spec is not None]


def _to_record(kind: _Kind, total: _Total) -> OpProfile:
    op, module, phase, _ = kind
    specs, device = total.description[:-2], total.description[-1]
    described = [spec for spec in specs if spec is not None]
    return OpProfile(
        overload=str(op),
        module=module,
        phase=_phase(phase),
        shapes=tuple(tuple(spec[0]) for spec in described),
        dtypes=tuple(str(spec[1]).removeprefix("torch.") for spec in described),
        strides=tuple(tuple(spec[2]) for spec in described),
        device="" if device is None else str(device),
        calls=total.calls,
        time_us=total.time_ns / 1e3,
        producers=_names(total.producers),
    )


def _phase(text: str) -> Literal["forward", "backward", "other"]:
    return "forward" if text == "forward" else "backward" if text == "backward" else "other"


def _names(producers: Sequence[Any]) -> tuple[str, ...]:
    return tuple("" if op is None else str(op) for op in producers)
