"""Decisions and kernels for the devices in use; the catalogue is imported on first use.

In: the context of a run. Out: the choice for a node on a device, and the place of its decisions. Guarantee: a device
that cannot be used is reported once, and its nodes run eager's kernels. Nothing is imported before the first use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from autofuse.locks import make_rlock
from autofuse.preserve_rng import untouched
from autofuse.runtime.run_context import RunContext

if TYPE_CHECKING:
    from autofuse.ir.records import Decision
    from autofuse.runtime.graphs.choice import Choice
    from autofuse.runtime.kernels.catalogue import Catalogue
    from autofuse.runtime.kernels.device_backends import Place

ABSORB_SECONDS = 2.0  # for decisions of a device that has just come into use


class DeviceKernels:
    """Of one session."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._unusable: set[torch.device] = set()
        self._lock = make_rlock()
        self._catalogue: Catalogue | None = None

    @property
    def is_loaded(self) -> bool:
        """Whether the catalogue has been made."""
        return self._catalogue is not None

    @property
    def catalogue(self) -> Catalogue:
        """Devices in use, decisions and kernels."""
        return self._catalogue or self._bring_catalogue()

    def _bring_catalogue(self) -> Catalogue:
        with self._lock, untouched():
            if self._catalogue is None:
                from autofuse.runtime.kernels.catalogue import Catalogue

                context = self._context
                self._catalogue = Catalogue(
                    context.settings.run,
                    context.device,
                    context.versions,
                    context.report_fallback,
                    context.notes_folder,
                    context.snapshot,
                )
            return self._catalogue

    @property
    def threads(self) -> int:
        """The number of threads that torch now uses on the CPU."""
        return int(torch.get_num_threads())

    def choose(self, fusion_id: str, values: Sequence[int], device: torch.device) -> Choice:
        return self.catalogue.choose(fusion_id, values, device)

    def decision(self, fusion_id: str, values: Sequence[int], device: torch.device) -> Decision | None:
        """The decision that stands for a node; None where none is known."""
        place = self.catalogue.backends.place(device)
        return self.catalogue.table.find(fusion_id, values, place) if place is not None else None

    def use_device(self, device: torch.device) -> None:
        """Called when the script has tensors on a device: read the decisions for its model."""
        try:
            is_new = self.catalogue.backends.use(device)
        except Exception as error:
            self._context.report_fallback("device_unknown", f"{device} runs on eager's kernels", error)
            return
        if is_new:
            self._context.store_thread.absorb_again(ABSORB_SECONDS)

    def tunable(self, device: torch.device) -> Place | None:
        """The place of a node's decisions; None where the device cannot be tuned for, which is reported once."""
        problem = self.catalogue.backends.problem(device)
        if problem is None:
            return self.catalogue.backends.place(device)
        if device not in self._unusable:
            self._unusable.add(device)
            self._context.say_once(*problem)
        return None
