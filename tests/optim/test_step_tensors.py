"""The tensors of a step, as they are checked before each one."""

from __future__ import annotations

import pytest
import torch

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


def test_another_tensor_with_the_identity_of_one_that_is_gone_is_looked_at() -> None:
    form = StepForm("sgd", (), "float32", (4,))
    step = StepTensors(form, CPU)
    arguments = make_arguments(form, 0)
    assert step.take(arguments) is None
    was = id(arguments["params"][0])
    storage = arguments["params"].pop().untyped_storage()  # at the same address still
    others = [torch.empty(0).set_(storage, 0, (4,), (0,)) for _ in range(50)]
    (other,) = [t for t in others if id(t) == was]  # CPython gives the place of an object that is gone to a new one
    arguments["params"].append(other)
    assert step.take(arguments) == "the elements of a parameter do not lie side by side"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda grad: grad.double(), "no plain float32 tensor"),
        (lambda grad: torch.view_as_complex(torch.stack([grad, grad], -1)).conj().imag, "no plain float32 tensor"),
        (lambda grad: torch.nn.Parameter(grad), "no plain float32 tensor"),
        (lambda grad: grad.to_mkldnn(), "no plain float32 tensor"),
        (lambda grad: grad[:3], "laid out unlike"),
        (lambda grad: grad.repeat(2)[::2], "laid out unlike"),
    ],
)
def test_gradients_of_other_kinds_are_refused(change, problem) -> None:
    form = StepForm("sgd", (), "float32", (3, 4))
    step = StepTensors(form, CPU)
    arguments = make_arguments(form, 0)
    assert step.take(arguments) is None
    grads = arguments[form.rule.grads]
    plain, grads[1] = grads[1], change(grads[1])
    assert problem in step.take(arguments)
    grads[1] = plain
    assert step.take(arguments) is None
