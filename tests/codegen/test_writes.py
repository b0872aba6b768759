"""Writes at places that are data: eager's errors and order, whatever the threads; what is read before is whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autofuse.codegen.generator import FusionKernelGenerator
from autofuse.codegen.in_place import in_place
from autofuse.codegen.loops import check
from autofuse.codegen.lowering.lower import lower
from autofuse.errors import LoweringError
from tests.cases import CASES
from tests.codegen.conftest import Verify
from tests.codegen.test_in_place import Captured
from tests.codegen.test_indexed import outcome
from tests.tracing import trace

T = torch.Tensor
aten = torch.ops.aten
X, Y, IDS = torch.randn(5, 7), torch.randn(4, 7), torch.tensor([0, 2, 1, 2])


@pytest.fixture
def store(tmp_path: Any) -> str:
    return str(tmp_path / "store.sqlite3")


def wide(i: T) -> T:
    return i.unsqueeze(1).repeat(1, 7)


WRITES: dict[str, Callable[[T, T, T], T]] = {
    "index_add": lambda x, i, y: x.index_add(0, i, y * 2),
    "index_copy": lambda x, i, y: x.index_copy(0, i, y * 2),
    "index_fill": lambda x, i, y: x.index_fill(0, i, 2.0) + 1,
    "index_fill_columns": lambda x, i, y: x.index_fill(1, i, 2.0) + 1,
    "index_put": lambda x, i, y: x.index_put((i,), y * 2),
    "index_put_twice": lambda x, i, y: x.index_put((i, i), y[:, 0], accumulate=True) * 2,
    "put": lambda x, i, y: x.put(i, y[:, 0] * 2) + 1,
    "scatter_add": lambda x, i, y: x.scatter_add(0, wide(i), y * 2),
    "scatter": lambda x, i, y: x.scatter(0, wide(i), y * 2),
    "scatter_reduce": lambda x, i, y: x.scatter_reduce(0, wide(i), y * 2, "amax"),
    "embedding": lambda x, i, y: aten.embedding_dense_backward(y * 2, i, 5, -1, False),
}


@pytest.mark.parametrize("name", WRITES)
def test_an_index_out_of_bounds_raises_what_eager_raises(name: str, store: str) -> None:
    captured = Captured(WRITES[name], store)
    for bad in (None, 5, 7, 35, -1, -5, -6, -36, 2**62, -(2**63), None):
        ids = IDS.clone()
        if bad is not None:
            ids[2] = bad
        x = X.clone()
        expected, found = outcome(WRITES[name], X, ids, Y), outcome(captured.call, x, ids, Y)
        assert torch.equal(x, X), bad
        if isinstance(expected, T):
            assert isinstance(found, T), (bad, found)
            torch.testing.assert_close(found, expected, msg=lambda text, bad=bad: f"{bad}: {text}")
        else:
            assert found == expected, bad
    assert captured.session.totals().fused_calls > 0


ORDERED: dict[str, Callable[[T, T, T], T]] = {
    "index_add": lambda x, i, y: x.index_add(0, i, y),
    "index_copy": lambda x, i, y: x.index_copy(0, i, y),
    "index_add_columns": lambda x, i, y: x.index_add(1, i, y.t()),
    "scatter_add": lambda x, i, y: x.scatter_add(1, i.expand(9, 5000), y[:, :9].t()),
    "scatter_last": lambda x, i, y: x.scatter(1, i.expand(9, 5000), y[:, :9].t()),
    "embedding": lambda x, i, y: aten.embedding_dense_backward(y, i, 9, -1, False),
    "put": lambda x, i, y: x.put(i, y[:, 0], accumulate=True),
}


@pytest.mark.parametrize("name", ORDERED)
def test_what_goes_to_one_place_is_combined_in_eagers_order(name: str) -> None:
    """Bit by bit, by any number of threads: 5000 values go to 9 places."""
    x, i, y = torch.randn(9, 40), torch.randint(0, 9, (5000,)), torch.randn(5000, 40)
    x = x[:, :9].contiguous() if name == "index_add_columns" else x
    y = y[:, :9].contiguous() if name == "index_add_columns" else y
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        expected = ORDERED[name](x, i, y)
    finally:
        torch.set_num_threads(threads)
    kernel = FusionKernelGenerator().generate_generic_kernel(trace(ORDERED[name], (x, i, y), static=(9,)))
    for count in (1, 2, 3, 7):
        assert torch.equal(kernel(x, i, y, threads=count)[0], expected), count


SHAPES: dict[str, tuple[Callable[..., Any], tuple[T, ...]]] = {
    "values_are_the_tensor": (lambda x, i: x.index_add(0, i, x) * 2, (X, torch.tensor([1, 1, 0, 4, 2]))),
    "transposed": (lambda x, i, y: x.t().index_add(1, i, y.t() * 2) * 2, (X, IDS, Y)),
    "no_values": (lambda x, i, y: x.index_add(0, i, y) * 2, (X, IDS[:0], Y[:0])),
    "one_value": (lambda x, i, y: x.index_add(0, i, y) * 2, (X, IDS[:1], Y[:1])),
    "scalar_index": (lambda x, i, y: x.index_add(0, i, y) * 2, (X, IDS[1], Y[:1])),
    "one_dim": (lambda x, i, y: x.scatter_add(0, i, y) * 2, (X[0], IDS, Y[0, :4])),
    "broadcast": (lambda x, i, y: x.index_put((i,), y, accumulate=True) * 2, (X, IDS, Y[0])),
    "made": (lambda x, i, y: (x * 3).index_add(0, i, y).relu(), (X, IDS, Y)),
    "leaves": (lambda x, i, y: (lambda z: (z, z.relu() * 2, y * 2))(x.index_add(0, i, y * 2)), (X, IDS, Y)),
    "in_turn": (lambda x, i, y: x.index_add(0, i, y).index_fill(0, i[:1], 0.5) * 2, (X, IDS, Y)),
    "of_zeros": (lambda i, y: y.new_zeros(5, y.shape[1]).index_put((i,), y * 2, accumulate=True), (IDS, Y)),
    "of_ones": (lambda i, y: torch.full((5, y.shape[1]), 1.5).index_put((i,), y * 2, accumulate=True), (IDS, Y)),
    "bytes": (lambda x, i, y: x.index_add(0, i, y, alpha=3), (X.to(torch.int8), IDS, (Y * 90).to(torch.int8))),
    "bools": (lambda x, i, y: x.index_put((i,), y), (X > 0, IDS[:3], Y[:3] > 0)),
    "largest": (lambda x, i, y: x.scatter_reduce(0, i, y, "amin", include_self=False), (X.int(), wide(IDS), Y.int())),
    "unpooled_last": (
        lambda y, i: aten.max_unpool2d(y * 2, i, [4, 6]),
        F.max_pool2d(torch.randn(2, 3, 4, 6), 2, return_indices=True),
    ),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name: str, dynamic: bool, verify: Verify) -> None:
    function, inputs = SHAPES[name]
    form = trace(function, inputs, dynamic=dynamic)
    assert check(lower(form)) == []
    found = FusionKernelGenerator().generate_generic_kernel(form)(*inputs)
    expected = function(*inputs)
    for one, other in zip(found, expected if isinstance(expected, tuple) else (expected,), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", ["index_add", "scatter_reduces", "index_put", "embedding_backward"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_dtypes(name: str, dtype: torch.dtype, verify: Verify) -> None:
    """Sums of 16 bits are made in 32, so that they are at least as near as eager's."""
    form = CASES[name].form(dtype)
    verify(form, CASES[name].sizes[:3], ("normal", "special"), threads=2)
    verify(form, CASES[name].sizes[:1], ("normal",), specialise=True)


REFUSED: dict[str, tuple[str, Callable[..., Any], tuple[T, ...]]] = {
    "calculated": ("indices", lambda x, i, y: x.index_add(0, i * 2, y), (X, IDS, Y)),
    "bytes": ("indices", lambda x, m: x.index_put((m,), torch.tensor(0.5)), (X, torch.ones(5, dtype=torch.bool))),
    "one_element": ("indices", lambda x, i, y: x.index_add(0, i, y), (X[0, 0], IDS[0], Y[0, 0])),
    "frequency": ("indices", lambda i, y: aten.embedding_dense_backward(y, i, 5, -1, True), (IDS, Y)),
    "reduced": ("reduction", lambda x, i, y: x.index_add(0, i, torch.softmax(y, 1)), (X, IDS, Y)),
    "integers": ("dtype", lambda x, i, y: x.index_reduce(0, i, y, "mean"), (X.int(), IDS, Y.int())),
    # What eager's own kernel refuses, and no fake tensor looks at.
    "values": ("sizes", lambda x, i, y: x.index_put((i,), y[1:] * 2), (X, IDS, Y)),
    "rows": ("sizes", lambda x, i, y: aten.index_reduce(x, 0, i, y[1:], "amax"), (X, IDS, Y)),
    "gradients": ("sizes", lambda i, y: aten.embedding_dense_backward(y[1:] * 2, i, 5, -1, False), (IDS, Y)),
    "short_indices": ("indices", lambda x, i: x.index_fill(0, i.int(), 2.0), (X, IDS)),
    "mixed": ("dtype", lambda x, i: x.index_fill(0, i, torch.tensor(2.0)), (X.int(), IDS)),
    "overflow": ("dtype", lambda x, i: x.index_fill(0, i, 300), (X.to(torch.int8), IDS)),
    "not_a_number": ("dtype", lambda x, i: x.scatter(0, i[:, None], float("nan")), (X.int(), IDS)),
    "half_overflow": ("dtype", lambda x, i: x.index_fill(0, i, 1e30), (X.half(), IDS)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    code, function, inputs = REFUSED[name]
    with pytest.raises(LoweringError) as caught:
        lower(trace(function, inputs, dynamic=False))
    assert caught.value.code == code


def test_on_a_gpu_nothing_is_written_by_an_index() -> None:
    form = CASES["index_add"].form()
    moved = [replace(o, outputs=tuple(replace(s, device="cuda") for s in o.outputs)) for o in form.operations]
    with pytest.raises(LoweringError) as caught:
        lower(replace(form, operations=tuple(moved)))
    assert caught.value.code == "device_bounds"


def test_what_may_be_repeated_overwrites_no_input() -> None:
    assert in_place(CASES["index_add"].form()) == ()


class Messages(nn.Module):
    """A layer of a graph network: messages along edges, added up where they end."""

    def __init__(self) -> None:
        super().__init__()
        self.names, self.layer = nn.Embedding(30, 16), nn.Linear(16, 16)

    def forward(self, ids: T, source: T, target: T) -> T:
        x = self.names(ids)
        sent = torch.relu(self.layer(x)[source] * 0.5) + 1
        return torch.tanh(torch.zeros_like(x).index_add(0, target, sent) + x)


def test_gradients_of_a_graph_network_are_eagers(store: str) -> None:
    torch.manual_seed(0)
    model = Messages()
    captured = Captured(model, store)
    for edges in (40, 40, 90):
        inputs = torch.randint(0, 30, (12,)), torch.randint(0, 12, (edges,)), torch.randint(0, 12, (edges,))
        found = []
        for call in (captured.call, model):
            model.zero_grad()
            result = call(*inputs)
            result.square().sum().backward()
            found.append([result.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
        torch.testing.assert_close(found[0], found[1])
    labels = [slot.node.label for router in captured.session.context.routers for slot in router.program.slots]
    assert any("dense_backward" in label for label in labels), labels
