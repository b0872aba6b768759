"""A candidate that another host of a fleet has chosen, before and after it was tried here.

In: the candidate, the knobs that this host has for the node; later the outcome of its job. Out: why it does not fit,
and whether the outcome stands.
Guarantee: no name and no value reaches a printer of kernels that this host would not choose among by itself.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from autofuse.codegen.knobs import Knob
from autofuse.ir.records import EAGER, IN_ONE, Candidate
from autofuse.tuner.outcome import Outcome

RACED = ("no_gain", "below_margin", "device_slower", "not_bit_equal")  # it ran and was right, and eager stays
UNDECIDED = "undecided"  # the same, but it may well be faster: no other host is told, and it is raced again


def misfit(candidate: Candidate, variants: Collection[str], knobs: Sequence[Knob]) -> str:
    """Why a proposed candidate cannot be built here, in words; "" where it can."""
    if candidate.variant not in variants:
        return f"expected one of {', '.join(sorted(set(variants)))}, found {_short(candidate.variant)}"
    choices = {knob.name: knob.choices for knob in knobs}
    given = dict(candidate.config)
    for name, value in given.items():
        if name not in choices:
            return f"expected a knob of this version, found {_short(name)}"
        if not any(type(choice) is type(value) and choice == value for choice in choices[name]):
            return f"expected {name} of {', '.join(map(str, choices[name]))}, found {_short(value)}"
    missing = sorted(choices.keys() - given.keys())
    return f"expected a value of {missing[0]}, found none" if missing else ""


def is_eager(candidate: Candidate) -> bool:
    """Whether it is one of the two ways in which a node stays in eager."""
    return candidate.variant == EAGER and candidate.config in ((), IN_ONE)


def has_run(outcome: Outcome) -> bool:
    """Whether a proposed candidate was right here and was raced, whoever won; the outcome then stands."""
    reason = outcome.decisions[0].reason
    return reason in ("won", UNDECIDED) or reason in RACED


def _short(value: object) -> str:
    return repr(value)[:60]
