"""The tensors of a step, as they are checked before each one."""

from __future__ import annotations

from autofuse.optim.form import StepForm
from autofuse.optim.tensors import CPU, NOT_MADE, StepTensors, make_arguments


def test_a_state_that_is_not_made_yet_is_not_that_of_an_optimizer_that_is_gone() -> None:
    """A weak reference to what is gone gives None, and None is what a new optimizer has for momentum."""
    form = StepForm("sgd", ("momentum",), "float32", (3, 4))
    step = StepTensors(form, CPU)
    arguments = make_arguments(form, 0)
    assert step.take(arguments) is None
    (states,) = form.states
    for number in range(len(form.sizes)):
        arguments[states][number] = None
    assert step.take(arguments) == NOT_MADE
    arguments |= {name: made for name, made in make_arguments(form, 1).items() if name == states}
    assert step.take(arguments) is None
