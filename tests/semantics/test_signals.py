"""A script's signal handlers: what they raise reaches the script, whatever runs at that moment."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from autofuse.runtime.session import Session
from autofuse.script_signals import held_back, is_of_handler

T = torch.Tensor


class TimeUp(Exception):
    pass


def end(number: int, frame: Any) -> None:
    raise TimeUp


def ring() -> None:
    signal.raise_signal(signal.SIGUSR1)


@pytest.fixture(autouse=True)
def alarm() -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, end)
    yield
    signal.signal(signal.SIGUSR1, before)


def test_what_a_handler_raises_is_raised_at_the_end() -> None:
    steps: list[str] = []

    def work() -> None:
        with held_back():
            ring()
            steps.append("after")
            raise ValueError("which is not told")

    with pytest.raises(TimeUp) as raised:
        work()
    assert steps == ["after"] and is_of_handler(raised.value)
    assert raised.value.__context__ is None and raised.value.__cause__ is None
    assert signal.getsignal(signal.SIGUSR1) is end


def test_it_is_raised_at_the_end_of_all_work_of_ours() -> None:
    steps: list[str] = []
    with pytest.raises(TimeUp), held_back():
        with held_back(lambda: False):
            ring()
        steps.append("outside")
    with pytest.raises(TimeUp), held_back(lambda: False):
        with held_back():
            ring()
            steps.append("inside")
        steps.append("not reached")
    assert steps == ["outside", "inside"]


def test_errors_of_ours_are_told() -> None:
    with pytest.raises(ValueError, match="ours"), held_back():
        raise ValueError("ours")
    assert signal.getsignal(signal.SIGUSR1) is end


def test_nothing_is_held_back_where_the_script_runs() -> None:
    with held_back(lambda: False):
        with pytest.raises(TimeUp) as raised:
            ring()
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    assert raised.value.args == ()


def test_an_exit_is_not_held_back() -> None:
    def leave(number: int, frame: Any) -> None:
        raise SystemExit(3)

    signal.signal(signal.SIGUSR1, leave)
    with pytest.raises(SystemExit), held_back():
        ring()
        raise AssertionError("expected to have left the block")


def test_time_that_is_up_during_a_trace(session: Session) -> None:
    """The fake of an operator runs in a trace only."""
    rings = [True, False]

    @torch.library.custom_op("autofuse_tests::doubled", mutates_args=())
    def doubled(x: T) -> T:
        return x * 2

    @doubled.register_fake
    def _(x: T) -> T:
        if rings.pop(0) if rings else False:
            ring()
        return torch.empty_like(x)

    class Model(nn.Module):
        def forward(self, x: T) -> T:
            doubled_x: T = doubled(x)
            return doubled_x.relu() + 1

    model, x = Model(), torch.linspace(-1, 1, 12).view(3, 4)
    with pytest.raises(TimeUp):
        model(x)
    assert not rings or rings == [False]
    for _ in range(3):
        assert torch.equal(model(x), (x * 2).relu() + 1)
    assert sum(router.calls() for router in session.context.routers) > 0
