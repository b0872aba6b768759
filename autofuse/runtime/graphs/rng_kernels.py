"""Which kernels may compute random numbers: only those whose numbers are eager's, bit by bit.

In: the devices and dtypes of a session's graphs. Out: a generator for masks on the CPU, and whether kernels may compute
a GPU's dropout masks. Guarantee: where the numbers would differ from eager's, aten samples them.
"""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import _disable_current_modes

from autofuse.capture.passes.random_ops import use_generator
from autofuse.codegen.c.bernoulli import make_bernoulli
from autofuse.gpu import philox
from autofuse.ir.records import Event
from autofuse.runtime.kernels.device_kernels import DeviceKernels
from autofuse.runtime.run_context import RunContext


class RngKernels:
    """Of one session."""

    def __init__(self, context: RunContext, kernels: DeviceKernels) -> None:
        self._context = context
        self._kernels = kernels
        self._generator_ready = False
        self._draws: dict[tuple[torch.device, torch.dtype], bool] = {}

    def prepare_generator(self) -> None:
        """Use our generator for dropout masks, once it has proved bit-equal to aten's."""
        toolchain = self._kernels.catalogue.toolchain
        if self._generator_ready or toolchain is None:
            return
        self._generator_ready = True
        try:
            with _disable_current_modes():  # capture runs under a fake-tensor mode; the proof needs real tensors
                use_generator(make_bernoulli(toolchain, self._context.notes_folder))
        except Exception as error:
            self._context.report_fallback("generator_unusable", "dropout masks come from aten", error)

    def draws_as_eager(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether kernels may compute dropout masks on a device: only where they match eager's bit by bit."""
        key = (device, dtype)
        if key not in self._draws:
            self._draws[key] = False
            try:
                with _disable_current_modes():  # the proof needs real tensors
                    self._draws[key] = philox.draws_as_expected(device, dtype)
            except Exception as error:
                self._context.report_fallback("random_unknown", f"dropout on {device} stays eager's own kernel", error)
            if not self._draws[key]:
                message = f"eager draws other numbers than expected on {device} in {dtype}"
                self._context.store_thread.post_event(Event("random_differs", message))
        return self._draws[key]
