"""The table of tensors that a kernel of an optimizer step reads: what printers and callables must agree on.

In C a row has seven int64: elements, addresses of parameter, gradient, three states and step counter. In Triton its
columns depend on the step.
"""

from __future__ import annotations

from collections.abc import Sequence

from autofuse.optim.form import StepForm
from autofuse.optim.update_rules import constants

COLUMNS = 7  # of a row in C
MOST_STATES = 3


def columns(form: StepForm) -> tuple[str, ...]:
    """The columns of Triton's table: elements, the tensor's first block, addresses, constants as float64.

    With counters on the device, the counter's address and the scalars from which the constants follow are added.
    """
    found = ("elements", "first", "p", "g", *(f"s{n}" for n in range(len(form.states))))
    found += tuple(name for name, _ in constants(form))
    return found if form.counters == "host" else (*found, "counter", *(f"scalar_{name}" for name in form.rule.scalars))


def block_counts(sizes: Sequence[int], block: int) -> list[int]:
    """The number of programs of each tensor; at least one, which counts the step."""
    return [max(1, -(-size // block)) for size in sizes]


def grid_values(block_counts: Sequence[int]) -> dict[str, int]:
    """The values of the Triton module's symbols, from the number of blocks of each tensor."""
    return {"tensors": len(block_counts), "programs": sum(block_counts)}
