"""Tells the daemon the GPUs that torch sees here: ``python -m autofuse.daemon.workers.list_gpus``.

In: nothing. Out: a line of JSON on stdout, whether each model is free, by its key. Of several GPUs of one model the
first counts, which is the one that a worker takes.
"""

from __future__ import annotations

import json

import torch

from autofuse.gpu.devices import device_count, gpu_device

OWN_BYTES = 1 << 30  # our own context has less, and whoever works on a GPU has more


def free_models() -> dict[str, bool]:
    """Whether nobody but us has memory on the first GPU of each model, by its key."""
    found: dict[str, bool] = {}
    for index in range(device_count()):
        left, total = torch.cuda.mem_get_info(index)
        found.setdefault(gpu_device(index).key, total - left <= OWN_BYTES)
    return found


if __name__ == "__main__":
    print(json.dumps(free_models()))
