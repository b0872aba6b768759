"""Turns the raw events of one sampled step into totals per op, per module and per root.

In: ``ObserverMode.events``. Out: a ``StepProfile``: calls and time per (op, module, phase, shapes), producers of each
op's inputs, and for each root its forward ops and its forward and backward time.
Guarantee: runs after the step, never in an op; an event that cannot be understood is counted and left out.

Backward ops are assigned to modules by autograd's sequence numbers: a node that forward made while module M ran has a
number from M's interval, and it is known when the node runs. Ops of hooks, gradient accumulation or a checkpoint's
recomputation have no such number; they count for the root whose backward is in progress.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from autofuse.observer.device_timer import Stretch
from autofuse.observer.mode import (
    ENTER,
    EXIT,
    FORWARD_OR_OTHER,
    MARK,
    NO_SEQUENCE,
    ROOT_ENTER,
    ROOT_EXIT,
)

# (op, module path, phase, identity of the description): what makes two calls the same within a step. Descriptions are
# interned by the mode, so no nested tuple is hashed or compared here.
OpKey = tuple[Any, str, str, int]
Paths = Callable[[int, str], str]  # identity and class name of a module -> its path for people


@dataclass
class OpTotals:
    description: tuple[Any, ...]  # see ``mode.OpEvent``
    producers: tuple[Any, ...] = ()  # op that made each tensor input, None where unknown
    calls: int = 0
    time_ns: int = 0
    of_run: Any = None  # the sums of the run that these went into


@dataclass
class RootTotals:
    """One root in one sampled step."""

    calls: int = 0
    forward_ops: int = 0
    forward_ns: int = 0
    backward_ops: int = 0
    backward_ns: int = 0
    wants_backward: bool = False  # gradients were on in a call
    late: int = 0  # calls whose times the device has not told yet
    untimed: int = 0  # calls on a GPU whose times will never be known

    @property
    def ops_per_call(self) -> int:
        return round(self.forward_ops / self.calls) if self.calls else 0


@dataclass(frozen=True)
class LateTime:
    """A call on a GPU, counted in the sums already; its time follows when the device tells it."""

    stretch: Stretch
    op: OpTotals
    root: RootTotals | None
    is_forward: bool

    def add(self, nanoseconds: int | None) -> None:
        """None: it will never be known."""
        if self.root is not None:
            self.root.late -= 1
            self.root.untimed += nanoseconds is None
        if nanoseconds is None:
            return
        self.op.time_ns += nanoseconds
        if self.op.of_run is not None:
            self.op.of_run.time_ns += nanoseconds
        if self.root is not None:
            if self.is_forward:
                self.root.forward_ns += nanoseconds
            else:
                self.root.backward_ns += nanoseconds


@dataclass
class StepProfile:
    """The sums of one sampled step."""

    ops: dict[OpKey, OpTotals] = field(default_factory=dict)
    roots: dict[str, RootTotals] = field(default_factory=dict)
    op_calls: int = 0
    not_understood: int = 0
    late: list[LateTime] = field(default_factory=list)
    untimed: int = 0  # calls on a GPU whose times will never be known

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
        self._made: dict[int, Sequence[Any]] = {}  # tensor identity -> the event that made it
        self._ops = self.profile.ops

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
        owner = self._owner
        if sequence != FORWARD_OR_OTHER:
            owner, phase = self._owner_of(sequence), "backward"
        else:
            phase = "other" if owner.root is None else "forward"
        key = (op, owner.module, phase, id(description))
        entry = self._ops.get(key)
        if entry is None:
            entry = self._ops[key] = OpTotals(description, self._producers(inputs, description))
        elapsed = 0 if stop is None else stop - start
        entry.calls += 1
        entry.time_ns += elapsed
        totals = None if owner.root is None else self.profile.roots[owner.root]
        if totals is not None:
            if phase == "forward":
                totals.forward_ops += 1
                totals.forward_ns += elapsed
            else:
                totals.backward_ops += 1
                totals.backward_ns += elapsed
        if stop is None:
            self._follow(start, entry, totals, phase == "forward")
        made = self._made
        if type(output) is int:
            made[output] = event
        else:
            for identity in output:
                made[identity] = event

    def _follow(self, stretch: Stretch | None, entry: OpTotals, totals: RootTotals | None, is_forward: bool) -> None:
        if stretch is not None:
            self.profile.late.append(LateTime(stretch, entry, totals, is_forward))
        else:
            self.profile.untimed += 1
        if totals is not None:
            totals.late += stretch is not None
            totals.untimed += stretch is None

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
        found: list[Any] = []
        for identity, spec in zip(inputs, description, strict=False):
            event = self._made.get(identity)
            if event is None:
                found.append(None)
                continue
            # An identity may have been reused by a tensor that no op made: its shape mostly gives it away.
            shape = event[5][-2]
            found.append(None if shape is not None and spec is not None and spec[0] != shape else event[0])
        return tuple(found)


def aggregate(events: Sequence[Any], path_of: Paths) -> StepProfile:
    """Sum a step's events up. About 2 us an event."""
    state = _Aggregation(path_of)
    understood = 0
    for event in events:
        try:
            if event[0] is MARK:
                state.mark(event[1], event[2], event[3])
            else:
                state.op(event)
                understood += 1
        except (TypeError, ValueError, KeyError, RuntimeError):
            state.profile.not_understood += 1
    state.profile.op_calls = understood
    return state.profile
