"""Lists that are collected in C are those that torch's method makes, whatever the group is like."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from autofuse.codegen.c.build import find_toolchain
from autofuse.runtime.optimizers import collected_lists
from autofuse.runtime.optimizers.collected_lists import CollectedLists
from autofuse.wrapper.native_library import Collect, Runner, compile_runner, load_runner

Optimizer = torch.optim.Optimizer


@pytest.fixture(scope="module")
def runner() -> Runner:
    return load_runner(compile_runner(find_toolchain()).binary)


class Watched:
    """A runner; ``answers``: whether C has collected the lists, call by call."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.answers: list[bool] = []

    def collect(self, *states: str) -> Collect:
        own = self.runner.collect(*states)

        def collect(given: Any) -> Any:
            found = own(given)
            self.answers.append(found is not None)
            return found

        return collect


@pytest.fixture
def watched(runner: Runner) -> Iterator[Watched]:
    made, lists, before = Watched(runner), CollectedLists(), torch.optim.Adam._init_group
    lists.install(made)  # type: ignore[arg-type]
    assert torch.optim.Adam._init_group is not before
    yield made
    lists.close()
    assert torch.optim.Adam._init_group is before


def plain() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape)) for shape in ((3,), (2, 4), (), (0, 2))]


class Own(nn.Parameter):
    """A class of a script's own."""


def some_without_gradients(optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["params"][1].grad = None


def none_with_gradients(optimizer: Optimizer) -> None:
    optimizer.zero_grad()


def states_in_another_order(optimizer: Optimizer) -> None:
    for param in reversed(optimizer.param_groups[0]["params"]):
        optimizer.state[param] = optimizer.state.pop(param)


def loaded_again(optimizer: Optimizer) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def another_state(optimizer: Optimizer) -> None:
    optimizer.state[optimizer.param_groups[0]["params"][2]]["exp_avg"] = torch.ones(())


def a_state_gone(optimizer: Optimizer) -> None:
    del optimizer.state[optimizer.param_groups[0]["params"][1]]


def a_state_emptied(optimizer: Optimizer) -> None:
    optimizer.state[optimizer.param_groups[0]["params"][1]].clear()


def a_part_of_a_state_gone(optimizer: Optimizer) -> None:
    del optimizer.state[optimizer.param_groups[0]["params"][1]]["exp_avg_sq"]


def one_more_parameter(optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["params"].append(with_gradients([nn.Parameter(torch.randn(5))])[0])


def a_sparse_gradient(optimizer: Optimizer) -> None:
    param = optimizer.param_groups[0]["params"][1]
    param.grad = param.grad.to_sparse()


def with_gradients(params: list[nn.Parameter]) -> list[nn.Parameter]:
    for param in params:
        param.grad = torch.randn_like(param)
    return params


def answer(optimizer: Optimizer) -> Any:
    """The lists of a group by identity, or the error; whether there are complex ones."""
    lists: list[list[Any]] = [[] for _ in range(6)]
    try:
        is_complex = optimizer._init_group(optimizer.param_groups[0], *lists)  # type: ignore[attr-defined]
    except Exception as error:
        return type(error), str(error)
    return is_complex, lists


def same(found: Any, known: Any) -> bool:
    if isinstance(known[0], type):
        return found == known
    # A state that is made by the call is another tensor each time.
    pairs = [(a, b) for ours, theirs in zip(found[1], known[1], strict=True) for a, b in zip(ours, theirs, strict=True)]
    return found[0] == known[0] and all(a is b for a, b in pairs)


CHANGES: dict[Callable[[Optimizer], None], bool] = {  # and whether C does it then
    lambda optimizer: None: True,
    some_without_gradients: True,
    none_with_gradients: True,
    states_in_another_order: True,
    loaded_again: True,
    another_state: True,
    a_state_gone: False,
    a_state_emptied: False,
    a_part_of_a_state_gone: False,
    one_more_parameter: False,
    a_sparse_gradient: False,
}


@pytest.mark.parametrize(("change", "in_c"), CHANGES.items())
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_lists_are_those_of_torch(kind: Any, change: Any, in_c: bool, watched: Watched) -> None:
    optimizer = kind(with_gradients(plain()))
    optimizer.step()
    assert watched.answers == [False], "states are made by torch"
    change(optimizer)
    found = answer(optimizer)
    assert watched.answers == [False, in_c]
    theirs = collected_lists._CLASSES[0]._init_group.__wrapped__  # type: ignore[attr-defined]
    lists: list[list[Any]] = [[] for _ in range(6)]
    try:
        known = theirs(optimizer, optimizer.param_groups[0], *lists), lists
    except Exception as error:
        known = type(error), str(error)
    assert same(found, known)


@pytest.mark.parametrize("options", [{"amsgrad": True}, {"lr": torch.tensor(1e-3)}])
def test_groups_that_torch_checks_are_torchs(options: dict[str, Any], watched: Watched) -> None:
    optimizer = torch.optim.Adam(with_gradients(plain()), **options)
    optimizer.step()
    optimizer.step()
    assert watched.answers == [] and len(answer(optimizer)[1][0]) == 4


@pytest.mark.parametrize(
    "param",
    [
        lambda: Own(torch.randn(3)),
        lambda: nn.Parameter(torch.randn(3, dtype=torch.complex64)),
    ],
)
def test_unusual_parameters_are_torchs(param: Callable[[], nn.Parameter], watched: Watched) -> None:
    optimizer = torch.optim.Adam(with_gradients([*plain(), param()]))
    optimizer.step()
    optimizer.step()
    assert watched.answers == [False, False]


def test_what_is_in_a_list_stays_there(watched: Watched) -> None:
    optimizer = torch.optim.Adam(with_gradients(plain()))
    optimizer.step()
    lists: list[list[Any]] = [[1], [2], [], [], [], []]
    optimizer._init_group(optimizer.param_groups[0], *lists)
    assert watched.answers == [False] and [len(found) for found in lists] == [5, 5, 4, 4, 0, 4]


def test_steps_are_torchs_to_the_bit(watched: Watched) -> None:
    """Of a class of a script's own, whose method calls torch's; saved and loaded in the middle."""

    class Counting(torch.optim.AdamW):
        calls = 0

        def _init_group(self, *arguments: Any) -> Any:
            self.calls += 1
            return super()._init_group(*arguments)

    ours, theirs = plain(), plain()
    optimizer, other = Counting(ours, lr=0.1), torch.optim.AdamW(theirs, lr=0.1)
    original = torch.optim.Adam._init_group.__wrapped__  # type: ignore[attr-defined]
    other._init_group = original.__get__(other)  # type: ignore[method-assign]
    for number in range(6):
        for params, one in ((ours, optimizer), (theirs, other)):
            torch.manual_seed(number)
            with_gradients(params)
            one.step()
            if number == 3:
                one.load_state_dict(copy.deepcopy(one.state_dict()))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert optimizer.calls == 6 and watched.answers == [False, *[True] * 5]


def test_what_a_script_watches_is_torchs(watched: Watched) -> None:
    """A mode sees the calls that torch makes, and may change what they find."""

    class Shortens(TorchFunctionMode):
        seen = 0

        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen += 1
            return function(*args, **kwargs or {})

    optimizer = torch.optim.Adam(with_gradients(plain()))
    optimizer.step()
    with Shortens() as mode:
        answer(optimizer)
    assert mode.seen > 3 and watched.answers == [False]


def test_a_hook_that_is_closed_stays_so(runner: Runner) -> None:
    lists, before = CollectedLists(), torch.optim.Adam._init_group
    lists.install(runner)
    ours = torch.optim.Adam._init_group
    theirs = functools.wraps(ours)(lambda *arguments: ours(*arguments))
    torch.optim.Adam._init_group = theirs  # type: ignore[method-assign]
    try:
        lists.close()
        assert torch.optim.Adam._init_group is theirs, "what was put over ours stays"
        lists.install(runner)
        assert torch.optim.Adam._init_group is theirs and not lists.is_installed
        optimizer = torch.optim.Adam(with_gradients(plain()))
        optimizer.step()
        assert len(answer(optimizer)[1][0]) == 4
    finally:
        torch.optim.Adam._init_group = before  # type: ignore[method-assign]


def test_the_runner_proves_itself_under_another_default_dtype() -> None:
    binary = compile_runner(find_toolchain()).binary
    try:
        for dtype in (torch.float64, torch.bfloat16):
            torch.set_default_dtype(dtype)
            assert load_runner(binary)
    finally:
        torch.set_default_dtype(torch.float32)


def test_nothing_is_kept_alive(watched: Watched) -> None:
    optimizer = torch.optim.Adam(with_gradients(plain()))
    optimizer.step()
    param = optimizer.param_groups[0]["params"][1]
    held = (param, param.grad, optimizer.state[param]["exp_avg"], optimizer.state[param]["step"])
    before = [*map(sys.getrefcount, held)]
    for _ in range(50):
        optimizer.step()
        a_sparse_gradient(optimizer)
        answer(optimizer)
        param.grad = held[1]
    assert [*map(sys.getrefcount, held)] == before and watched.answers.count(False) == 51
