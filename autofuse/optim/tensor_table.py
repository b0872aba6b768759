"""The table of tensors that a kernel of an optimizer step reads: what printers and callables must agree on.

In C a row has seven int64: elements, addresses of parameter, gradient, three states and step counter. In Triton its
columns depend on the step.
"""

from __future__ import annotations

from collections.abc import Sequence

from autofuse.optim.form import StepForm
from autofuse.optim.update_rules import constants

COLUMNS = 7  # in C
MOST_STATES = 3


def columns(form: StepForm) -> tuple[str, ...]:
    """What a row of the table holds: elements, the tensor's first block, addresses, constants as float64.

    With counters on the device also their addresses, and the scalars that the constants follow from.
    """
    found = ("elements", "first", "p", "g", *(f"s{n}" for n in range(len(form.states))))
    found += tuple(name for name, _ in constants(form))
    return found if form.counters == "host" else (*found, "counter", *(f"scalar_{name}" for name in form.rule.scalars))


def block_counts(sizes: Sequence[int], block: int) -> list[int]:
    """Programs of each tensor; one without elements has one too, which counts the step."""
    return [max(1, -(-size // block)) for size in sizes]


def grid_values(block_counts: Sequence[int]) -> dict[str, int]:
    """Values of the module's symbols."""
    return {"tensors": len(block_counts), "programs": sum(block_counts)}
