"""What runs below torch's bookkeeping: nothing whose memory the script can reach; what eager refuses is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from autofuse.wrapper.below_autograd import BELOW, kept_books
from tests.runtime.graphs.test_routed_graphs import Undecided, routed

T = torch.Tensor


def traced(function: Callable[..., Any], *inputs: T) -> fx.Graph:
    return make_fx(function)(*inputs).graph


def booked(function: Callable[..., Any], results: int | None = None) -> list[str] | None:
    """Targets of the nodes that run with bookkeeping, None where all do."""
    nodes = kept_books(traced(function, torch.randn(4, 6)), results)
    return None if nodes is None else sorted(str(node.target) for node in nodes)


def test_values_that_stay_inside_need_no_books() -> None:
    assert booked(lambda x: (x.t() @ x).view(36).exp()) == []
    assert booked(lambda x: (x.exp().t(),)) == []  # the only one that looks at its memory


def test_views_of_inputs_that_leave_are_booked() -> None:
    assert booked(lambda x: (x.exp(), x.view(24))) == ["aten.view.default"]
    assert booked(lambda x: (x.exp(), x.t()[1:]), 1) == ["aten.slice.Tensor", "aten.t.default"]
    assert booked(lambda x: (x.exp(), x.split(2)[1]), 1) == ["<built-in function getitem>", "aten.split.Tensor"]


def test_results_that_share_memory_keep_all_books() -> None:
    def shared(x: T) -> tuple[T, T]:
        y = x.exp()
        return y.view(24), y

    assert booked(shared) is None
    assert booked(shared, 1) is None  # the second is kept for backward, the first may be written to
    assert booked(shared, 0) == []  # both are kept: nobody can write to them


def test_a_graph_that_writes_keeps_all_books() -> None:
    assert booked(lambda x: x.exp().add_(1)) is None
    assert booked(lambda x: x.copy_(x.exp())) is None


def flat_product(x: T, w: T) -> T:
    return x.view(-1, 6) @ w


def seen_flat(x: T, w: T) -> T:
    return torch.tanh(x.reshape(-1, 6) @ w).view(-1)


def turned(x: T, w: T) -> T:
    return (x.transpose(0, 1).reshape(-1, 6) @ w).sigmoid().t()


def gated(x: T, w: T) -> T:
    a, b = (x.view(-1, 6) @ w).chunk(2, -1)
    return a.sigmoid() * b


def inside(x: T, w: T) -> T:
    return ((x.view(-1, 6) @ w).exp().t() @ x.view(-1, 6)).relu()


FUNCTIONS = [flat_product, seen_flat, turned, gated, inside]
WRITES: dict[str, Callable[[T, T, T], object]] = {
    "nothing": lambda x, w, out: None,
    "the input": lambda x, w, out: x.mul_(2),
    "a view of the input": lambda x, w, out: x.view(-1)[:3].zero_(),
    "the weight": lambda x, w, out: w.detach().mul_(2),
    "the result": lambda x, w, out: out.detach().mul_(2),
    "a row of the result": lambda x, w, out: out.detach()[:1].zero_(),
}


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("write", WRITES)
def test_backward_refuses_what_eager_refuses(function: Callable[..., T], write: str) -> None:
    def outcome(call: Callable[..., T]) -> tuple[str, list[T]]:
        torch.manual_seed(0)
        x, w = torch.randn(3, 4, 6), torch.randn(6, 8, requires_grad=True)
        out = call(x, w)
        WRITES[write](x, w, out)
        try:
            out.backward(torch.ones_like(out))
        except RuntimeError as error:
            return str(error).split(":")[0], []
        assert w.grad is not None
        return "", [out.detach(), w.grad]

    torch._dynamo.reset()
    catalogue = Undecided()
    ours, wanted = outcome(routed(function, catalogue)), outcome(function)
    if "result" in write:  # AOTAutograd's own wrapper forgets that a result is a view of what it keeps (torch 2.13)
        wanted = outcome(torch.compile(lambda x, w: function(x, w), backend="aot_eager"))
    assert catalogue.routers and ours[0] == wanted[0]
    assert all(map(torch.equal, ours[1], wanted[1]))


def test_a_graph_runs_below_its_books() -> None:
    torch._dynamo.reset()
    catalogue = Undecided()
    routed(inside, catalogue)(torch.randn(3, 4, 6), torch.randn(6, 8, requires_grad=True)).sum().backward()
    assert len(catalogue.routers) == 2
    assert all(f"with {BELOW}:" in router.program.source for router in catalogue.routers)


def test_tangents_are_carried_along() -> None:
    def function(x: T) -> T:
        return (x.t() @ x).view(-1)

    torch._dynamo.reset()
    run = routed(function, Undecided())
    x, tangent = torch.randn(4, 6), torch.randn(4, 6)
    run(x)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, tangent)
        ours, eagers = forward_ad.unpack_dual(run(dual)), forward_ad.unpack_dual(function(dual))
    assert ours.tangent is not None and torch.equal(ours.tangent, eagers.tangent)


def test_operators_of_others_keep_their_autograd() -> None:
    library = torch.library.Library("autofuse_test_books", "DEF")
    try:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CPU")
        library.impl("twice", torch.empty_like, "Meta")
        operator = torch.ops.autofuse_test_books.twice
        assert kept_books(traced(lambda x: operator(x.exp()).view(-1), torch.randn(4, 6))) is None
    finally:
        library._destroy()


def test_sizes_that_are_calculated_come_first() -> None:
    def function(x: T, m: T) -> tuple[T, T]:
        rows = int((m.float() * 2).sum().item())
        torch._check(rows > 0)
        return x.view(rows, -1), m + 1

    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        run = routed(function, Undecided())
        for count in (2, 3):
            x, m = torch.randn(12), torch.ones(count, dtype=torch.int64)
            ours, eagers = run(x, m), function(x, m)
            assert all(map(torch.equal, ours, eagers))


def test_a_value_may_be_called_floor() -> None:
    def function(x: T) -> T:
        rows = x[: x.shape[0] // 2]
        return torch.floor(rows * 3) + rows.reshape(-1, 2, 3).sum(1, keepdim=True).view(-1, 3).repeat_interleave(2, 0)

    torch._dynamo.reset()
    run = routed(function, Undecided())
    for size in (8, 12, 20):
        x = torch.randn(size, 3)
        assert torch.equal(run(x), function(x))
