"""The worker for one model of GPU: ``python -m autofuse.daemon.workers.gpu MEMORY PARENT DEVICE_KEY``.

It has a CUDA context of its own, so that what a kernel does to it, it does to nobody else (see `cpu`).
"""

from __future__ import annotations

import sys

from autofuse.daemon.workers.cpu import main
from autofuse.tuner.node_bench import DeviceRunner


def _rig(memory_bytes: int) -> DeviceRunner:
    from autofuse.tuner.gpu_rig import GpuRunner

    return GpuRunner(sys.argv[3], memory_bytes)


if __name__ == "__main__":
    main(_rig, *(int(text) for text in sys.argv[1:3]))
