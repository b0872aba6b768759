"""The tensors of a step, as they are checked before each one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from autofuse.codegen.c.build import find_toolchain
from autofuse.optim.form import StepForm
from autofuse.optim.tensors import CPU, NOT_MADE, StepTensors, look_in_c, make_arguments
from autofuse.wrapper.native_library import Look, compile_runner, load_runner


@pytest.fixture(scope="module")
def look() -> Look:
    return load_runner(compile_runner(find_toolchain()).binary).look


@pytest.fixture(autouse=True, params=["python", "c"])
def where(request: pytest.FixtureRequest, look: Look) -> Iterator[str]:
    """Tensors are looked at in Python, then in C."""
    look_in_c(look if request.param == "c" else None)
    yield request.param
    look_in_c(None)


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


def replaced(name: str, make: Callable[[torch.Tensor], Any]) -> Callable[[dict[str, Any]], None]:
    """Another object in the place of the second tensor of a list."""

    def change(arguments: dict[str, Any]) -> None:
        arguments[name][1] = make(arguments[name][1])

    return change


def swapped(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict[str, Any]], None]:
    """The same object with other data."""

    def change(arguments: dict[str, Any]) -> None:
        arguments[name][1].data = make(arguments[name][1].data)

    return change


def all_turned(arguments: dict[str, Any]) -> None:
    """Parameter and gradient lie otherwise than the states now, at the addresses of before."""
    for name in ("params", "grads"):
        arguments[name][1].data = arguments[name][1].data.t()


def in_tuples(arguments: dict[str, Any]) -> None:
    arguments.update({name: tuple(found) for name, found in arguments.items() if isinstance(found, list)})


def shortened(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda arguments: arguments.update({name: arguments[name][:-1]})


CHANGES = {
    "nothing": lambda arguments: None,
    "another parameter": replaced("params", lambda t: t.clone()),
    "a parameter of another dtype": replaced("params", lambda t: t.double()),
    "a parameter with other data": swapped("params", lambda t: t.clone()),
    "a parameter turned around": swapped("params", lambda t: t.t()),
    "parameter and gradient turned around": all_turned,
    "another state": replaced("exp_avgs", lambda t: t.clone()),
    "a state with other data": swapped("exp_avgs", lambda t: t.clone()),
    "a state that is no tensor": replaced("exp_avgs", lambda t: None),
    "a state that lies otherwise": replaced("exp_avg_sqs", lambda t: t.t().contiguous().t()),
    "a state of fewer elements": replaced("exp_avg_sqs", lambda t: t[:1]),
    "another counter": replaced("state_steps", lambda t: t.clone()),
    "a counter of another dtype": replaced("state_steps", lambda t: t.double()),
    "another gradient": replaced("grads", lambda t: t.clone()),
    "a sparse gradient": replaced("grads", lambda t: t.to_sparse()),
    "a gradient without data": replaced("grads", lambda t: t.to("meta")),
    "a negated gradient": replaced("grads", torch._neg_view),
    "no gradient": replaced("grads", lambda t: None),
    "a gradient too few": shortened("grads"),
    "a counter too few": shortened("state_steps"),
    "tuples": in_tuples,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_c_sees_what_python_sees(change: Callable[[dict[str, Any]], None], where: str, look: Look) -> None:
    form = StepForm("adam", (), "float32", (12, 6, 0))
    arguments = make_arguments(form, 0)
    for name in ("params", "grads", "exp_avgs", "exp_avg_sqs"):
        for number, shape in enumerate(((12,), (2, 3), (0, 4))):
            arguments[name][number] = arguments[name][number].view(shape)
    in_python, step = StepTensors(form, CPU), StepTensors(form, CPU)
    kept = dict(arguments)  # what a change replaces is not gone
    verdicts = []
    for _ in range(3):  # the second and the third time, C has something to compare with
        look_in_c(None)
        expected = _verdict(in_python, arguments)
        look_in_c(look if where == "c" else None)
        verdicts.append(_verdict(step, arguments))
        assert verdicts[-1] == expected
        if len(verdicts) == 1:
            kept.update({name: [*found] for name, found in arguments.items() if isinstance(found, list)})
            change(arguments)
    assert verdicts[0][0] is None
    if verdicts[1][0] is None:
        held = [*map(torch.Tensor.data_ptr, arguments["params"])]
        assert step.pointers[0] == held and [*step.grads] == [*map(torch.Tensor.data_ptr, arguments["grads"])]


def _verdict(step: StepTensors, arguments: dict[str, Any]) -> tuple[str | None, list[list[int]], list[int]]:
    try:
        return step.take(arguments), step.pointers, [*step.grads]
    except Exception as error:
        return type(error).__name__, [], []


def test_a_step_that_is_as_before_is_looked_at_in_c_alone(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    form = StepForm("adam", (), "float32", (3, 4))
    step, arguments = StepTensors(form, CPU), make_arguments(form, 0)
    assert step.take(arguments) is None
    checked = []
    check = StepTensors._check
    monkeypatch.setattr(StepTensors, "_check", lambda *given: checked.append(1) or check(*given))
    arguments["grads"] = [torch.randn(3), torch.randn(4)]
    assert step.take(arguments) is None and len(checked) == (where == "python")
    arguments["exp_avgs"][1] = arguments["exp_avgs"][1].clone()
    assert step.take(arguments) is None and len(checked) == 1 + (where == "python")
