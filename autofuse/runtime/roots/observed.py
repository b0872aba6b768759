"""Watched calls of a root in eager: the time of each, on the accounts of the root and of the observer.

In: a call of a root that is neither captured nor decided. Out: its result; the seconds of its step, by host and device;
the cost of watching it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from autofuse.observer.device_timer import Stretch
from autofuse.observer.held_out import Held
from autofuse.observer.root_tracker import Target
from autofuse.runtime.roots.device import RootDevice
from autofuse.runtime.roots.graph_trial import GraphTrial
from autofuse.runtime.roots.life import RootLife
from autofuse.runtime.roots.policy import RootPolicy
from autofuse.runtime.roots.services import RootServices
from autofuse.runtime.roots.step_clock import Account
from autofuse.runtime.roots.unwatched import CountedCalls


class ObservedCalls:
    """Of one root."""

    def __init__(
        self,
        services: RootServices,
        trial: GraphTrial,
        account: Account,
        policy: RootPolicy,
        device: RootDevice,
        unwatched: CountedCalls,
        life: RootLife,
    ) -> None:
        self._observer = services.observer
        self._tracker = services.tracker
        self._timer = services.timer
        self._clock = services.tools.clock
        self._key = trial.key
        self._trial = trial
        self._account = account
        self._policy = policy
        self._device = device
        self._unwatched = unwatched
        self._life = life

    def call(
        self, module: Target, args: tuple[Any, ...], kwargs: dict[str, Any], number: int, entered: float, spent: float
    ) -> Any:
        """The ``number``-th of the root.

        ``entered``: when autofuse got the call, less the time of advice; ``spent``: the observer's account then.
        """
        clock = self._clock
        self._observer.before_root_call(self._key, module if isinstance(module, torch.nn.Module) else None)
        began = clock()
        self._trial.begin(None, Held.NO, number, began)
        self._account.begin(self._policy.last_elements, began, False)
        stretch = self._device.begin_stretch()
        result = None
        try:
            result = self._tracker.call_original(module, args, kwargs)
            return result
        finally:
            try:
                now = clock()
                self._returned(result, began, now, stretch)
                self._unwatched.watched(began - entered + clock() - now, spent)
            except Exception as error:
                self._life.give_up(module, error)

    def _returned(self, result: Any, began: float, now: float, stretch: Stretch | None) -> None:
        """``result``: None where the call raised."""
        seconds = now - began
        stretch = self._timer.end(stretch)
        was_plain = self._observer.after_root_call(self._key, None if stretch is not None else seconds)
        self._account.returned(result, now, not was_plain)
        if self._trial.on_gpu:
            self._add_on_gpu(seconds)
        if stretch is not None:
            self._trial.late.add(stretch, partial(self._add_device_time, seconds, was_plain))

    def _add_on_gpu(self, seconds: float) -> None:
        """Add a forward pass. The host's clock does not tell the device time of the backward pass."""
        ratio = self._observer.backward_ratio(self._key) if torch.is_grad_enabled() else None
        self._account.ledger.count(seconds * (1.0 + (ratio or 0.0)))

    def _add_device_time(self, host_seconds: float, was_plain: bool, nanoseconds: int | None) -> None:
        """Add device time: a call's time is the larger of the host's and the device's."""
        seconds = max(host_seconds, (nanoseconds or 0) / 1e9)
        if was_plain:
            self._observer.on_root_seconds(self._key, seconds)
        self._add_on_gpu(seconds - host_seconds)
