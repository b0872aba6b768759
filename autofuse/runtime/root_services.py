"""What the roots and graphs of a session work with.

In: the observer of a session and what else watches calls. Out: one record that each root and graph takes. Guarantee: it
knows no root; what depends on all of them comes as a function.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import fx

from autofuse.ir.records import RootRecord
from autofuse.observer.capture_policy import Budget
from autofuse.observer.device_timer import EventTimer
from autofuse.observer.observer import Observer
from autofuse.observer.root_tracker import RootTracker
from autofuse.runtime.device_kernels import DeviceKernels
from autofuse.runtime.run_context import RunContext
from autofuse.runtime.step_clock import BackwardClock
from autofuse.runtime.tuning_client import TuningClient

if TYPE_CHECKING:
    from autofuse.runtime.plan_cache import PlanCache

RootBackend = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]


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
    budget: Callable[[], Budget]  # what captures may cost so far
    cost_factor: Callable[[], float]  # how slow captures are on this machine
    backwards: BackwardClock = field(default_factory=BackwardClock)
    known: dict[str, RootRecord] = field(default_factory=dict)  # what earlier runs found out
