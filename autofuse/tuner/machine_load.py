"""How much of the machine is at work."""

from __future__ import annotations

import psutil

OTHERS_SHARE = 0.3  # of one core: more than a desktop at rest, less than any training


def busy_seconds() -> float:
    """CPU seconds that all processors together have worked since the machine started."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))
