"""The device of a root, and the device times of its calls on its stream.

In: a call. Out: the device of the root's parameters; on a GPU a measured stretch of the stream, which begins with the
next launch.
"""

from __future__ import annotations

from typing import Any

import torch

from autofuse.observer.device_timer import Stretch
from autofuse.observer.root_tracker import Target
from autofuse.runtime.roots.graph_trial import GraphTrial
from autofuse.runtime.roots.services import RootServices


class RootDevice:
    """Of one root."""

    def __init__(self, services: RootServices, trial: GraphTrial) -> None:
        self.found: torch.device | None = None  # None until it has been looked up
        self._timer = services.timer
        self._device_of = services.tools.device_of
        self._trial = trial

    def find(self, module: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
        """Find the device by the present call."""
        self.found = device = self._device_of(module, args, kwargs)
        self._trial.on_gpu = device.type == "cuda"
        return device

    def begin_stretch(self) -> Stretch | None:
        """Begin a stretch; None on a CPU, and while the device is not known."""
        device = self.found
        if device is None or device.type != "cuda":
            return None
        return self._timer.begin(device.index)
