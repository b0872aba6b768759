"""What our traces leave out of Dynamo's own work, and what a script's own traces keep."""

from __future__ import annotations

import functools

import torch
import torch._dynamo

from autofuse.capture import dynamo
from autofuse.capture.corrections import dynamo_patches


def test_only_the_guards_of_other_traces_are_timed() -> None:
    times: list[float] = []

    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) + 1.0

    def measure(*args: object) -> float:
        times.append(1.0)
        return 1.0

    before = torch._dynamo.guards.profile_guard_manager
    try:
        dynamo_patches._time_guards_of_others(measure)
        torch._dynamo.reset()
        with dynamo.capture_settings(8):
            torch.compile(step, backend="eager")(torch.ones(3))
        assert not times
        torch._dynamo.reset()
        torch.compile(step, backend="eager")(torch.ones(3))
        assert len(times) == 1
    finally:
        torch._dynamo.guards.profile_guard_manager = before
        torch._dynamo.reset()


def test_graph_breaks_are_told_in_a_line_each() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = x + x.sum().item()
        return x

    torch._dynamo.reset()
    seen = dynamo.graph_breaks()
    with dynamo.capture_settings(8):
        torch.compile(step, backend="eager")(torch.ones(3))
    found = dynamo.graph_breaks() - seen
    assert found and all("\n" not in line for line in found)
    assert any("item()" in line and "graph break in loop" in line for line in found), found
    now, callable_object = dynamo.graph_breaks(), functools.partial(step)
    assert "item()" in dynamo.why_no_graph(step, seen) and "item()" in dynamo.why_no_graph(step, now), "of its code"
    assert "item()" in dynamo.why_no_graph(callable_object, seen)
    assert dynamo.why_no_graph(functools.partial(print), now) == "", "not another object's"
    torch._dynamo.reset()
