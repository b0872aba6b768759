"""Which GPUs a worker may see: those of the script that asks, not those of the one that happened to start the daemon.

In: the process of a script and the variables of ours. Out: variables for a worker.
Guarantee: what the script's process was started with decides; where it has ended or may not be read, our own do. A
script that hides devices from itself later on is not heard: its worker sees more, and picks by the model asked for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import psutil

# Variables that hide or renumber the devices of CUDA and ROCm.
VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL",
)  # fmt: skip


def as_seen_by(pid: int | None, variables: Mapping[str, str]) -> dict[str, str]:
    """``variables``, with the GPU settings that process ``pid`` was started with; unchanged for None."""
    if pid is not None:
        with contextlib.suppress(psutil.Error, OSError):
            theirs = psutil.Process(pid).environ()
            kept = {name: value for name, value in variables.items() if name not in VARIABLES}
            return kept | {name: theirs[name] for name in VARIABLES if name in theirs}
    return dict(variables)
