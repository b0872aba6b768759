"""A knob: one thing that may vary in the code of a kernel, with its default.

In: the knobs that a target (`c.knobs`, `triton.knobs`), a template or an optimizer's step lists. Out: `Knob`, and the
configuration of all defaults.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from autofuse.ir.records import Config, make_config

Choice = int | str | bool
Sizes = Mapping[str, int]  # values of a node's symbols


@dataclass(frozen=True)
class Knob:
    """One tunable."""

    name: str
    choices: tuple[Choice, ...]
    default: Choice  # suits the sizes that the knob was made for
    doc: str


def default_config(knobs: Iterable[Knob]) -> Config:
    """The configuration in which every knob has its default."""
    return make_config({knob.name: knob.default for knob in knobs})
