"""What the observer may spend and keep: one frozen record, torch-free.

In: values from the settings of the run. Out: the limits that every part of the observer reads.
Guarantee: an out-of-range value raises ``SettingsError`` when the record is made, never later in the user's script.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from autofuse.errors import SettingsError


@dataclass(frozen=True)
class ObserverConfig:
    """Limits of the observer. Times in seconds, sizes as counts."""

    enabled: bool = True  # False: shapes of root calls are still counted, no step is ever sampled
    first_steps: int = 3  # steps sampled at the start of each root, before the regular ones
    skip_steps: int = 1  # calls of a root before its first sampled step: the first call warms caches up
    sample_every: int = 50  # calls of a root between sampled steps, once the first steps are done
    max_overhead_percent: float = 1.0  # of the run's wall time, averaged over the run
    burst_seconds: float = 0.05  # what may be spent ahead of time, so that short scripts are seen at all
    max_shapes: int = 64  # exact shapes kept per op and per root; the rest is counted in a tail
    max_sizes: int = 64  # sizes kept in the histogram of a dim; the rest is counted in a tail
    max_kinds: int = 4096  # (op, module, phase, shapes) with totals of their own; the rest is counted in a tail
    max_owners: int = 2048  # ops and roots with statistics of their own
    max_events_per_step: int = 40_000  # ops and module calls recorded in one sampled step
    max_calls_per_step: int = 32  # calls of the anchor root in one sampled step, while no backward was seen
    max_step_seconds: float = 60.0  # a sampled step that is older stops recording
    settled_after: int = 4  # sampled steps in a row without news before the interval doubles

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name in ("enabled", "first_steps", "skip_steps", "burst_seconds") else 1
            if field.name in ("max_overhead_percent", "max_step_seconds"):
                least = 0
            if value < least:
                raise SettingsError(f"observer.{field.name} must be at least {least}, found {value}")
        if self.max_overhead_percent > 100.0:
            raise SettingsError(f"observer.max_overhead_percent must be at most 100, found {self.max_overhead_percent}")
