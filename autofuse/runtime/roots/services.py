"""The services that roots and graphs of a session use.

In: the observer of a session and other watchers of calls. Out: one record that each root and graph takes; `RootTools`,
their dependencies from outside of the session, which tests replace. Guarantee: nothing here refers to a root; values
that depend on all roots are functions.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import fx

from autofuse.gpu.devices import event_timer
from autofuse.ir.records import RootRecord
from autofuse.observer.capture_policy import Budget
from autofuse.observer.device_timer import EventTimer
from autofuse.observer.observer import Observer
from autofuse.observer.root_tracker import RootTracker, Target
from autofuse.preserve_rng import untouched
from autofuse.runtime.kernels.device_kernels import DeviceKernels
from autofuse.runtime.roots.step_clock import BackwardClock
from autofuse.runtime.roots.traits import device_of
from autofuse.runtime.run_context import RunContext
from autofuse.runtime.tuning_client import TuningClient

if TYPE_CHECKING:
    from autofuse.capture.dynamo import CapturedRoot
    from autofuse.capture.traced import Keeper
    from autofuse.runtime.graphs.plan_cache import PlanCache

RootBackend = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]


class Capturer(Protocol):
    """The interface that captures a root; `capture.dynamo` implements and documents it."""

    @property
    def CAPTURE_ERRORS(self) -> tuple[type[BaseException], ...]: ...

    def compile_root(
        self, name: str, backend: RootBackend, key: str, keeper: Keeper | None, plans: PlanCache, /
    ) -> CapturedRoot: ...

    def reset_root(self, root: CapturedRoot, /) -> None: ...

    def capture_settings(self, recompile_limit: int, /) -> AbstractContextManager[None]: ...

    def suppressed_errors(self) -> AbstractContextManager[None]: ...

    def suppressed_behind_breaks(self) -> AbstractContextManager[None]: ...

    def mark_dynamic(self, tensors: Mapping[str, torch.Tensor], dims: Sequence[tuple[str, int]], /) -> None: ...

    def note_read(self) -> None: ...

    def graphs_read(self) -> int: ...

    def graph_breaks(self) -> Counter[str]: ...

    def why_no_graph(self, target: Target, before: Counter[str], /) -> str: ...


def _load_dynamo() -> Capturer:
    """Import Dynamo: 1 s that a script without a root worth capturing never pays."""
    with untouched():
        from autofuse.capture import dynamo

    return dynamo


@dataclass(frozen=True)
class RootTools:
    """Dependencies from outside of a session."""

    clock: Callable[[], float] = time.perf_counter  # seconds
    load_capturer: Callable[[], Capturer] = _load_dynamo
    device_of: Callable[..., torch.device] = device_of  # of a module's, or a function's, call
    event_timer: Callable[[], EventTimer] = event_timer


USUAL_TOOLS = RootTools()


@dataclass(slots=True)
class RootServices:
    """Of one session."""

    context: RunContext
    kernels: DeviceKernels
    tuning: TuningClient
    backend: RootBackend  # Dynamo's, for modules that are captured
    plan_cache: Callable[[], PlanCache]
    observer: Observer
    tracker: RootTracker
    timer: EventTimer
    budget: Callable[[], Budget]  # seconds that captures may cost so far
    cost_factor: Callable[[], float]  # slowness factor of captures on this machine
    tools: RootTools = USUAL_TOOLS
    backwards: BackwardClock = field(default_factory=BackwardClock)
    known: dict[str, RootRecord] = field(default_factory=dict)  # findings of earlier runs
