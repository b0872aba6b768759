"""Turns the raw events of one sampled step into totals per op, per module and per root.

In: ``ObserverMode.events``. Out: a ``StepProfile``: calls and time per (op, module, phase, shapes), producers of each
op's inputs, and for each root its forward ops and its forward and backward time.
Guarantee: runs after the step, never in an op; an event that cannot be understood is counted and left out.

Backward ops are given to modules by autograd's sequence numbers: a node that forward made while module M ran has a
number from M's interval, and the node says its number when it runs. Ops that hooks, gradient accumulation or a
checkpoint's recomputation make have none from there; they count for the root whose backward is in progress.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from autofuse.observe.mode import (
    ENTER,
    EXIT,
    FORWARD_OR_OTHER,
    MARK,
    NO_SEQUENCE,
    ROOT_ENTER,
    ROOT_EXIT,
)

# (op, module path, phase, description): what makes two calls the same. The description holds the specs of the inputs,
# the shape of the output and the device.
OpKey = tuple[Any, str, str, tuple[Any, ...]]
Paths = Callable[[int, str], str]  # identity and class name of a module -> its path for people


@dataclass
class OpTotals:
    calls: int = 0
    time_ns: int = 0
    producers: tuple[Any, ...] = ()  # op that made each tensor input, None where unknown


@dataclass
class RootTotals:
    """One root in one sampled step."""

    calls: int = 0
    forward_ops: int = 0
    forward_ns: int = 0
    backward_ops: int = 0
    backward_ns: int = 0
    wants_backward: bool = False  # gradients were on in a call

    @property
    def ops_per_call(self) -> int:
        return round(self.forward_ops / self.calls) if self.calls else 0


@dataclass
class StepProfile:
    """The sums of one sampled step."""

    ops: dict[OpKey, OpTotals] = field(default_factory=dict)
    roots: dict[str, RootTotals] = field(default_factory=dict)
    op_calls: int = 0
    not_understood: int = 0

    @property
    def saw_backward(self) -> bool:
        return any(key[2] == "backward" for key in self.ops)


@dataclass(frozen=True)
class _Owner:
    module: str
    root: str | None


_NOBODY = _Owner("", None)


class _Aggregation:
    """The state of one pass over the events."""

    def __init__(self, path_of: Paths) -> None:
        self.profile = StepProfile()
        self._path_of = path_of
        self._stack: list[_Owner] = []
        self._owner = _NOBODY
        # From which sequence number on which owner's nodes were made; both lists ascend together.
        self._starts: list[int] = []
        self._owners: list[_Owner] = []
        self._backward_owner: _Owner = _NOBODY
        self._made: dict[int, tuple[Any, Any]] = {}  # tensor identity -> (op, shape)

    def mark(self, kind: int, payload: Any, sequence: int) -> None:
        if kind == ENTER:
            self._stack.append(self._owner)
            self._owner = _Owner(self._path_of(*payload), self._owner.root)
        elif kind == EXIT:
            self._owner = self._stack.pop() if self._stack else _NOBODY
        elif kind == ROOT_ENTER:  # roots do not nest: whatever an exception left open is closed here
            root, name, with_gradients = payload
            totals = self.profile.roots.setdefault(root, RootTotals())
            totals.calls += 1
            totals.wants_backward = totals.wants_backward or with_gradients
            self._stack, self._owner = [], _Owner(name, root)
        elif kind == ROOT_EXIT:
            self._stack, self._owner = [], _NOBODY
        self._starts.append(sequence)
        self._owners.append(self._owner)
        self._backward_owner = _NOBODY

    def op(self, event: Sequence[Any]) -> None:
        op, start, stop, sequence, inputs, description, output = event
        took = stop - start
        profile = self.profile
        owner, phase = self._owner, "other"
        if sequence != FORWARD_OR_OTHER:
            owner, phase = self._owner_of(sequence), "backward"
        elif owner.root is not None:
            phase = "forward"
        if owner.root is not None:
            totals = profile.roots.setdefault(owner.root, RootTotals())
            if phase == "forward":
                totals.forward_ops += 1
                totals.forward_ns += took
            else:
                totals.backward_ops += 1
                totals.backward_ns += took
        key = (op, owner.module, phase, description)
        entry = profile.ops.get(key)
        if entry is None:
            entry = profile.ops[key] = OpTotals(producers=self._producers(inputs, description))
        entry.calls += 1
        entry.time_ns += took
        profile.op_calls += 1
        if type(output) is int:
            self._made[output] = (op, description[-2])
        else:
            for identity in output:
                self._made[identity] = (op, None)

    def _owner_of(self, sequence: int) -> _Owner:
        if sequence != NO_SEQUENCE and self._starts:
            index = bisect_right(self._starts, sequence) - 1
            if index < 0:  # made before the step began
                self._backward_owner = _NOBODY
                return _NOBODY
            if self._owners[index].root is not None:
                self._backward_owner = _Owner("", self._owners[index].root)
                return self._owners[index]
        return self._backward_owner

    def _producers(self, inputs: tuple[int, ...], description: tuple[Any, ...]) -> tuple[Any, ...]:
        found = []
        for identity, spec in zip(inputs, description, strict=False):
            op, shape = self._made.get(identity, (None, None))
            # An identity may have been reused by a tensor that no op made: its shape mostly gives it away.
            found.append(None if op is None or (shape is not None and spec and spec[0] != shape) else op)
        return tuple(found)


def aggregate(events: Sequence[Any], path_of: Paths) -> StepProfile:
    """Sum a step's events up. About 1.5 us an event."""
    state = _Aggregation(path_of)
    for event in events:
        try:
            if event[0] is MARK:
                state.mark(event[1], event[2], event[3])
            else:
                state.op(event)
        except (TypeError, ValueError, RuntimeError):
            state.profile.not_understood += 1
    return state.profile
