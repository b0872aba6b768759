"""Kernels that write where a dead input lies: which may, and that results of whole graphs stay the same bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from autofuse.capture.backend import compile_with
from autofuse.codegen.generator import FusionKernelGenerator
from autofuse.codegen.in_place import Step, find_reuse, in_place
from autofuse.errors import LoweringError
from autofuse.ir.operation import NodeForm
from autofuse.pipeline import route_graph
from autofuse.runtime.graphs.choice import UNKNOWN, Choice
from autofuse.sessions import make_session
from autofuse.settings.layers import load
from tests.tracing import trace

T = torch.Tensor
GENERATOR = FusionKernelGenerator()


class Captured:
    """A function of tensors, captured; every node runs a generated kernel, groups run their nodes one by one."""

    def __init__(self, function: Callable[..., Any], store: str, reuses: bool = True, **environment: str) -> None:
        """``reuses``: whether kernels may write where an input lies."""
        torch._dynamo.reset()
        names = {"AUTOFUSE_STORE": store, "AUTOFUSE_TUNE": "off", "AUTOFUSE_FUSION_MIN_TENSOR_SIZE": "0"}
        names |= {"AUTOFUSE_TUNER_LIVE_RACES": "false", **environment}  # each call runs the same kernels
        self.session = make_session(load(environ=names), "test")
        self.session.kernels.choose = self.choose  # type: ignore[method-assign]

        def route(graph: Any, phase: str, times: int) -> Any:
            router = route_graph(graph, phase, self.session, times)
            if not reuses:
                router.program.reuse.clear()  # type: ignore[attr-defined]
            return router

        self.call = torch.compile(function, backend=lambda g, i: compile_with(g, i, route))

    def choose(self, fusion_id: str, values: Sequence[int], device: torch.device) -> Choice:
        slots = (slot for router in self.session.context.routers for slot in router.program.slots)
        form = next(slot.node.form for slot in slots if slot.node.fusion_id == fusion_id)
        try:
            return Choice(True, GENERATOR.generate_generic_kernel(form).load().entry, "kernel")
        except LoweringError:
            return UNKNOWN

    @property
    def reused(self) -> int:
        return sum(len(pairs) for router in self.session.context.routers for pairs in router.program.reuse.values())

    def form(self) -> NodeForm:
        (slot,) = (s for router in self.session.context.routers for s in router.program.slots if not s.is_group)
        return slot.node.form


@pytest.fixture
def store(tmp_path: Any) -> str:
    return str(tmp_path / "store.sqlite3")


def same(found: Any, expected: Any) -> None:
    found, expected = (x if isinstance(x, tuple | list) else [x] for x in (found, expected))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5 * max(1.0, float(other.abs().max())))


W = torch.randn(32, 32)
B = torch.randn(32)


def test_a_product_is_written_over_by_what_follows_it(store: str) -> None:
    function = lambda x: torch.relu(x @ W + B)  # noqa: E731
    captured = Captured(function, store)
    x = torch.randn(48, 32)
    same(captured.call(x), function(x))
    assert captured.reused == 1


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (torch.relu(x + 1) * 2, x.tanh()),
        lambda x: (y := x @ W, torch.relu(y + B)),
        lambda x: (y := x @ W, torch.relu(y + B) + 1)[1] @ y.t(),
        lambda x: torch.relu((x @ W).t() + torch.ones(48)).sum(0),
        lambda x: (y := x @ W, torch.softmax(y.view(4, 12, 32) * 2, -1), y.t()[:5] + 1)[1:],
        lambda x: (y := x @ W, (y + y.roll(1, 0)) * 2)[1],
    ],
    ids=["an input", "a result", "read again", "transposed", "seen in another way", "read elsewhere too"],
)
def test_what_somebody_still_needs_is_left_alone(store: str, function: Callable[[T], Any]) -> None:
    captured = Captured(function, store)
    x = torch.randn(48, 32)
    kept = x.clone()
    same(captured.call(x), function(x))
    assert torch.equal(x, kept)
    assert captured.reused == 0


def test_a_row_that_is_read_again_by_a_later_pass_is_left_alone(store: str) -> None:
    captured = Captured(lambda x: (torch.tanh(x * 2), torch.softmax(x * 3, -1)), store)
    captured.call(torch.randn(64, 128))
    form = captured.form()
    names = [next(op.short_name for op in form.operations if op.name == ref.name) for ref in form.outputs]
    assert [names[output] for output, _ in in_place(form)] == ["_softmax"]


def test_what_is_written_once_a_row_is_left_alone() -> None:
    """The next row reads it again: -p, as large as p, in the loops of x + p."""

    def both(x: T, p: T) -> tuple[T, T]:
        return x + p, torch.neg(p)

    form = trace(both, [torch.randn(12, 2, 64), torch.randn(12, 1, 64)], dynamic=False)
    assert in_place(form) == ((0, 0),)
    form = trace(both, [torch.randn(12, 2, 64), torch.randn(12, 2, 64)], dynamic=False)
    assert in_place(form) == ((0, 0), (0, 1), (1, 0), (1, 1))


def test_a_check_of_each_call_needs_the_inputs_as_they_were(store: str) -> None:
    captured = Captured(lambda x: torch.relu(x @ W + B), store, AUTOFUSE_RUN_CHECK="1")
    captured.call(torch.randn(48, 32))
    assert captured.reused == 0


def test_views_of_views_and_values_that_leave() -> None:
    form = _relu_form()
    make, view, again = Step([], ["a"], True), Step(["a"], ["b"], False), Step(["b"], ["c"], False)
    kernel = Step(["a"], ["r"], True, form)
    assert find_reuse([make, kernel], ["r"]) == [(), ((0, 0),)]
    assert find_reuse([make, kernel], ["a"]) == [(), ()]
    assert find_reuse([make, view, again, kernel, Step(["c"], ["z"], False)], []) == [()] * 5
    assert find_reuse([make, view, again, kernel], ["c"]) == [()] * 4
    assert find_reuse([make, view, again, Step(["c"], ["r"], True, form)], ["r"])[3] == ((0, 0),)
    assert find_reuse([Step([], ["a"], False), kernel], ["r"]) == [(), ()]


def _relu_form() -> NodeForm:
    return trace(lambda x: torch.relu(x * 2.0 + 1.0), [torch.zeros(16, 16)])


# ---- any graph ---------------------------------------------------------------------------------------------------

STEPS: dict[str, Callable[[T, T], T]] = {
    "mm": lambda a, b: a @ b * 0.1,
    "relu": lambda a, b: torch.relu(a),
    "gelu": lambda a, b: F.gelu(a),
    "add": lambda a, b: a + b,
    "gate": lambda a, b: torch.sigmoid(a) * b,
    "softmax": lambda a, b: torch.softmax(a, -1),
    "norm": lambda a, b: F.layer_norm(a + b, (24,)),
    "centred": lambda a, b: a - a.mean(-1, keepdim=True),
    "transpose": lambda a, b: a.t(),
    "reshape": lambda a, b: a.reshape(12, 48).reshape(24, 24),
    "half": lambda a, b: torch.cat((a[:12], b[12:])),
    "column": lambda a, b: a + b.sum(0),
}


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.integers(1, 4), st.integers(1, 4)), min_size=3, max_size=9),
    st.sets(st.integers(1, 4), min_size=1, max_size=3),
    st.booleans(),
)
def test_whatever_the_graph_writing_in_place_changes_no_bit(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, int]], wanted: set[int], trains: bool
) -> None:
    def function(x: T, w: T) -> tuple[T, ...]:
        values = [x, w, x @ w]
        for name, one, other in steps:
            values.append(STEPS[name](values[max(0, len(values) - one)], values[max(0, len(values) - other)]))
        return tuple(values[-n] for n in sorted(wanted))

    runs: list[list[T | None]] = []
    for reuses in (True, False):
        captured = Captured(function, str(tmp_path_factory.mktemp("store") / "store.sqlite3"), reuses)
        results: list[T | None] = []
        for seed in range(2):
            torch.manual_seed(seed)
            x, w = torch.randn(24, 24, requires_grad=trains), torch.randn(24, 24, requires_grad=trains)
            weight = torch.randn(24, 24)
            found = captured.call(x, w)
            results += [t.detach().clone() for t in found]
            if trains:
                losses = [(t * weight).sum() for t in found if t.requires_grad]
                results += torch.autograd.grad(losses, (x, w), allow_unused=True)
        runs.append(results)
    for one, other in zip(*runs, strict=True):
        assert (one is None) == (other is None)
        assert one is None or other is None or torch.equal(one, other), "the same kernels, in place and not"
