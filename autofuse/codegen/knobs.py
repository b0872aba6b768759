"""A knob: one thing that may vary in the code of a kernel, with its default.

In: the knobs that a target (`c.knobs`, `triton.knobs`), a template or an optimizer's step lists. Out: `Knob`, and the
configuration of all defaults; `CONTRACT`, a knob of every kernel, whatever prints it, which only strict runs turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from autofuse.ir.records import Config, make_config

Choice = int | str | bool
Sizes = Mapping[str, int]  # values of a node's symbols
Rank = Callable[[Config], float]  # the cost that a model expects of a configuration, in any unit


@dataclass(frozen=True)
class Knob:
    """One tunable."""

    name: str
    choices: tuple[Choice, ...]
    default: Choice  # suits the sizes that the knob was made for
    doc: str


# A product and a sum of different operators are rounded twice in eager. Usual kernels round once, which is faster.
CONTRACT = Knob("contract", (False, True), False, "multiply and add in one rounding, where eager has two")


def contracts(config: Config) -> bool:
    """Whether a compiler may make one instruction of a multiplication and an addition."""
    return dict(config).get(CONTRACT.name, True) is not False


def printed(config: Config) -> Config:
    """The part of a configuration that shapes the text of a kernel."""
    return tuple(pair for pair in config if pair[0] != CONTRACT.name)


def default_config(knobs: Iterable[Knob]) -> Config:
    """The configuration in which every knob has its default."""
    return make_config({knob.name: knob.default for knob in knobs})
