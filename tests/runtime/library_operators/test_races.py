"""The race in the script between a library's own kernel and ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autofuse import register_unfused
from autofuse.ir.composites import without_librarys
from autofuse.runtime.graphs import own_kernels
from autofuse.runtime.graphs.debug_texts import routes_text
from autofuse.wrapper.node_call import make_unfused
from tests.runtime.graphs.test_routed_graphs import routed
from tests.runtime.library_operators.shared import (
    CALLS,
    Fused,
    _scaled,
    node,
    races_of,
    scaled,
    state_of,
)


def test_a_race_that_raises_leaves_the_operator(catalogue: Fused, monkeypatch: pytest.MonkeyPatch) -> None:
    form = node(catalogue)
    races, events = races_of(catalogue)
    state, calls = state_of(catalogue, form), []

    def raises(*inputs: torch.Tensor) -> Any:
        calls.append(inputs)
        raise RuntimeError("no memory")

    assert races.stay(state, raises, "c") and races.stay(state, raises, "c")
    assert len(calls) == 1 and "RuntimeError: no memory" in events[0].message
    monkeypatch.setattr(own_kernels, "MOST_BYTES", 100)
    races, events = races_of(catalogue)
    assert races.stay(state, raises, "c") and len(calls) == 1 and "too large to be raced" in events[0].message


def test_a_long_call_is_raced_once(catalogue: Fused, monkeypatch: pytest.MonkeyPatch) -> None:
    form = node(catalogue)
    races, events = races_of(catalogue)
    state = state_of(catalogue, form)
    monkeypatch.setattr(own_kernels, "SECONDS", 0.0)
    CALLS.clear()
    races.stay(state, make_unfused(without_librarys(form), ()), "c")
    assert len(CALLS) == 2 and len(events) == 1


def test_a_better_kernel_may_still_run(catalogue: Fused) -> None:
    register_unfused(scaled, _scaled)
    catalogue.keeps = True
    w, x = torch.rand(40), torch.randn(6, 40)
    fast = routed(lambda x: torch.relu(scaled(x, w)) * 2, catalogue)
    fast(x)
    (router,) = catalogue.routers
    (plan,) = router.all_plans()
    assert "with the script's own kernel" in routes_text("forward", (), plan) and not router.refresh(plan)
    catalogue.keeps = False
    assert not router.refresh(plan), "the same kernel is not raced again"
    catalogue.tag = "another"
    assert router.refresh(plan) and "kernel another" in routes_text("forward", (), plan)
    CALLS.clear()
    torch.testing.assert_close(fast(x), torch.relu(_scaled(x, w, 1e-6)) * 2)
    catalogue.tag = "c"
    assert router.refresh(plan) and "with the script's own kernel" in routes_text("forward", (), plan)
    assert torch.equal(fast(x), torch.relu(scaled(x, w)) * 2) and not catalogue.failed


def test_whatever_is_raised_for_a_kernel_its_node_runs(catalogue: Fused, monkeypatch: pytest.MonkeyPatch) -> None:
    register_unfused(scaled, _scaled)

    def raises(*args: Any) -> bool:
        raise ZeroDivisionError("of a host")

    monkeypatch.setattr(catalogue, "keeps_own", raises)
    w, x = torch.rand(40), torch.randn(6, 40)
    fast = routed(lambda x: torch.relu(scaled(x, w)) * 2, catalogue)
    for _ in range(2):
        assert torch.equal(fast(x), torch.relu(scaled(x, w)) * 2)
    assert catalogue.failed


@pytest.mark.parametrize(("ours", "stays"), [(0.5, False), (0.99, True), (1.2, True)])
def test_the_faster_of_the_two_runs(
    catalogue: Fused, monkeypatch: pytest.MonkeyPatch, ours: float, stays: bool
) -> None:
    form = node(catalogue)
    state = state_of(catalogue, form)
    fused = make_unfused(without_librarys(form), ())
    monkeypatch.setattr(own_kernels, "_seconds", lambda call, *rest: ours if call is fused else 1.0)
    races, events = races_of(catalogue)
    before = torch.get_rng_state()
    assert races.stay(state, fused, "c") is stays and races.stay(state, fused, "c") is stays
    assert torch.equal(before, torch.get_rng_state()) and len(events) == 1
    assert ("the script's own kernel stays" in events[0].message) is stays
    assert "autofuse_lib::scaled" in events[0].message and events[0].kind == "own_kernel"
