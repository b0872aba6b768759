"""What the observer may spend and keep: one frozen record, torch-free.

In: values from the settings of the run. Out: the limits that every part of the observer reads.
Guarantee: an out-of-range value raises ``SettingsError`` when the record is made, never later in the user's script.
"""

from __future__ import annotations

from autofuse.settings.groups import CheckedGroup, ObserveSettings, declare


class ObserverConfig(CheckedGroup, ObserveSettings):
    """Limits of the observer: the settings of observation, and limits that no person needs to set."""

    first_steps: int = declare(3, "Steps sampled at the start of each root, before the regular ones.", low=0)
    skip_steps: int = declare(1, "Calls of a root before its first sampled step: the first warms caches up.", low=0)
    burst_seconds: float = declare(0.05, "May be spent ahead of time, so that short scripts are seen at all.", low=0.0)
    max_sizes: int = declare(64, "Sizes kept in the histogram of a dim; the rest is counted in a tail.", low=1)
    max_kinds: int = declare(4096, "Totals kept by op, module, phase and shapes; the rest is counted in a tail.", low=1)
    max_owners: int = declare(2048, "Ops and roots with statistics of their own.", low=1)
    max_events_per_step: int = declare(40_000, "Ops and module calls recorded in one sampled step.", low=1)
    max_calls_per_step: int = declare(
        32, "Calls of the anchor root in one sampled step, while no backward was seen.", low=1
    )
    max_step_seconds: float = declare(60.0, "A sampled step that is older stops recording.", low=0.0)
    settled_after: int = declare(4, "Sampled steps in a row without news before the interval doubles.", low=1)
