"""A root whose every call has a size of its own: its steps are compared with those of nearly the same size."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from autofuse.ir.records import StepSample
from autofuse.ir.steps import MAX_SIZE_RATIO, PAIR_STEPS, at_size, is_close
from autofuse.observer.signatures import call_signature, count_elements, without_sizes
from autofuse.report import words
from autofuse.report.statistics import measure_gain
from autofuse.runtime import roots
from autofuse.runtime.roots import MAX_EXACT, PAIRED, Sizes
from autofuse.runtime.session import Session
from autofuse.settings import load


def test_signatures_of_other_sizes_are_one_without_them() -> None:
    def signature(batch: int, length: int) -> Any:
        return call_signature((torch.empty(batch, length), 3), {"masks": [torch.empty(length, dtype=torch.bool)]})

    assert without_sizes(signature(2, 5)) == without_sizes(signature(3, 7)) != without_sizes(signature(2, 5)[:1])
    assert count_elements(signature(2, 5)) == 15
    assert count_elements(call_signature((torch.empty(0, 4),), {})) == 1
    assert words.signature(str((without_sizes(signature(2, 5)), False, False))) == "*×* * eval no_grad"


@given(st.integers(1, 10**9), st.integers(1, 10**9))
def test_close_sizes_are_close_both_ways_and_scale_there_and_back(one: int, other: int) -> None:
    assert is_close(one, other) is is_close(other, one)
    assert is_close(one, other) is (max(one, other) / min(one, other) <= MAX_SIZE_RATIO)
    assert at_size(at_size(80.0, one, other), other, one) == pytest.approx(80.0)
    assert at_size(80.0, one, one) == 80.0


def test_near_are_the_last_steps_of_about_the_size() -> None:
    sizes = Sizes("many", is_one=False)
    sizes.recent.extend([(100, 10.0), (120, 12.0), (200, 1.0), (80, 16.0), *[(1000, 5.0)] * PAIR_STEPS])
    assert sizes.near(100) == [20.0, 10.0, 10.0]
    assert sizes.near(1000) == [5.0] * PAIR_STEPS
    assert sizes.near(400) == []


def test_a_gain_is_measured_though_no_size_comes_twice(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps take 1 us an element in eager and half of that captured, by a clock that nothing else moves."""
    environment = {"AUTOFUSE_STORE": str(tmp_path / "s.sqlite3"), "AUTOFUSE_TUNE": "off", "AUTOFUSE_QUIET": "1"}
    of = Session(load(environ=environment), "test").roots
    clock = [0.0]
    monkeypatch.setattr(roots, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    model = nn.Identity()
    root = of.root_of(model)
    root.state = "captured"

    def run(us_per_element: float, x: torch.Tensor) -> torch.Tensor:
        clock[0] += x.numel() * us_per_element / 1e6
        return x

    monkeypatch.setattr(of.tracker, "call_original", lambda module, args, kwargs: run(1.0, *args))
    root._captured = SimpleNamespace(  # type: ignore[assignment]
        trace=lambda module, x: run(0.5, x),
        direct=SimpleNamespace(find=lambda *args: None),
    )
    root._dynamo = SimpleNamespace(  # type: ignore[assignment]
        mark_dynamic=lambda *a: None,
        capture_settings=lambda limit: torch.no_grad(),
        CAPTURE_ERRORS=(ZeroDivisionError,),
        graphs_read=lambda: 0,
    )
    monkeypatch.setattr(of.session, "fused_since_mark", lambda: 3)
    draw = random.Random(0)
    sizes = draw.sample(range(20_000, 80_000), 400)
    with torch.no_grad():
        for size in sizes:
            root.call(model, (torch.empty(size),), {})
    of.uninstall()
    samples = [StepSample(*fields) for fields in of.session.steps]
    assert len(samples) == 399 and len({s.signature for s in samples}) == MAX_EXACT + 1
    assert all(s.elements == sizes[s.index - 1] for s in samples)
    speedup = measure_gain(samples, 0.0).speedup
    assert speedup.pairs >= 5 * PAIRED and speedup.median == pytest.approx(2.0)
    assert root.state == "captured" and len(root._ratios) >= 12
