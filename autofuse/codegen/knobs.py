"""A knob: one thing that may vary in the code of a kernel. Each target has its own (`c.knobs`, `triton.knobs`)."""

from __future__ import annotations

from dataclasses import dataclass

Choice = int | str | bool


@dataclass(frozen=True)
class Knob:
    """One tunable."""

    name: str
    choices: tuple[Choice, ...]
    default: Choice
    doc: str
