"""Reads at places that are data: errors of indices out of bounds are eager's, nothing is refused or read by guess."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autofuse.codegen.c.load import LoadedKernel
from autofuse.codegen.generator import FusionKernelGenerator
from autofuse.codegen.in_place import in_place
from autofuse.codegen.lowering.lower import lower
from autofuse.codegen.reference import make_inputs, run_unfused
from autofuse.errors import LoweringError
from tests.cases import CASES
from tests.codegen.test_in_place import Captured
from tests.tracing import trace

T = torch.Tensor
IDS = torch.tensor([0, 2, 1, 3])
X = torch.randn(5, 7)
READS: dict[str, tuple[Callable[..., T], Callable[[T], T]]] = {  # a function, and how the index enters
    "embedding": (lambda w, i: F.embedding(i, w) * 2 + 1, lambda i: i),
    "embedding_int32": (lambda w, i: F.embedding(i, w) * 2 + 1, lambda i: i.int()),
    "index_select": (lambda x, i: x.index_select(0, i) * 2 + 1, lambda i: i),
    "index_select_columns": (lambda x, i: x.index_select(1, i) * 2 + 1, lambda i: i),
    "gather": (lambda x, i: x.gather(1, i) * 2 + 1, lambda i: i.expand(5, 4).contiguous()),
    "gather_rows": (lambda x, i: x.gather(0, i) * 2 + 1, lambda i: i.unsqueeze(1).repeat(1, 7)),
    "take": (lambda x, i: torch.take(x, i) * 2 + 1, lambda i: i),
    "index": (lambda x, i: x[i] * 2 + 1, lambda i: i),
    "index_columns": (lambda x, i: x[:, i] * 2 + 1, lambda i: i),
    "index_twice": (lambda x, i: x[i, i] * 2 + 1, lambda i: i),
    "summed": (lambda x, i: (x[i] * 2).sum(0), lambda i: i),
    "normalised": (lambda x, i: F.layer_norm(F.embedding(i, x), (7,)) + 1, lambda i: i),
}


@pytest.fixture
def store(tmp_path: Any) -> str:
    return str(tmp_path / "store.sqlite3")


def outcome(call: Callable[..., T], *inputs: T) -> T | tuple[type, str]:
    try:
        return call(*inputs)
    except Exception as error:
        assert error.__context__ is None
        return type(error), str(error)


@pytest.mark.parametrize("name", READS)
def test_an_index_out_of_bounds_raises_what_eager_raises(name: str, store: str) -> None:
    function, enter = READS[name]
    captured = Captured(function, store)
    for bad in (None, 5, 7, 35, -1, -5, -6, -36, 2**31 + 1, 2**62, -(2**63), None):
        ids = IDS.clone()
        if bad is not None:
            ids[2] = bad
        ids = enter(ids)
        expected, found = outcome(function, X, ids), outcome(captured.call, X, ids)
        if isinstance(expected, T):
            assert isinstance(found, T), (bad, found)
            torch.testing.assert_close(found, expected, msg=lambda text, bad=bad: f"{bad}: {text}")
        else:
            assert found == expected, bad
    assert captured.session.totals().fused_calls > 0


def kernel_of(function: Callable[..., Any], *inputs: T) -> LoadedKernel:
    return FusionKernelGenerator().generate_generic_kernel(trace(function, inputs)).load()


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("at", [0, 1, 70_000, 99_999])
def test_each_share_of_the_work_reports(threads: int, at: int) -> None:
    def read(x: T, i: T) -> T:
        return x[i] * 2 + 1

    x, ids = torch.randn(9), torch.zeros(100_000, dtype=torch.int64)
    out = torch.empty(100_000)
    kernel = kernel_of(read, x, ids)
    pointers = [t.data_ptr() for t in (x, ids, out)]
    sizes = [9, 100_000, threads]
    kernel.call(sizes, pointers)
    assert torch.equal(out, read(x, ids))
    ids[at] = 9
    with pytest.raises(IndexError, match="bounds"):
        kernel.call(sizes, pointers)


def test_a_table_without_rows_is_not_read() -> None:
    kernel = kernel_of(lambda w, i: F.embedding(i, w) * 2 + 1, X, IDS)
    out = torch.empty(4, 7)
    with pytest.raises(IndexError):
        kernel.call([0, 7, 4, 1], [0, IDS.data_ptr(), out.data_ptr()])


def test_what_may_be_repeated_overwrites_no_input() -> None:
    form = trace(lambda x, i, y: x[i] + y, (X, IDS, torch.randn(4, 7)))
    assert in_place(form) == ()
    assert in_place(trace(lambda x, y: x * 2 + y, (X, X.clone()))) != ()


REFUSED: dict[str, tuple[str, Callable[..., Any], tuple[T, ...]]] = {
    "part": ("unread", lambda w, i: F.embedding(i, w)[:2] * 2, (X, IDS)),
    "diagonal": ("unread", lambda w, i: F.embedding(i, w).diagonal() * 2, (X, torch.zeros(9, dtype=torch.int64))),
    "diagonal_of_indices": (
        "unread",
        lambda w, i: F.embedding(i, w).diagonal() * 2,
        (X, IDS.expand(4, 4).contiguous()),
    ),
    "row": ("unread", lambda w, i: F.embedding(i, w)[1] * 2, (X, IDS)),
    "index_of_read": ("table", lambda w, i, j: F.embedding(i, w)[j] * 2, (X, IDS, torch.tensor([1, 2]))),
    "lost": ("unread", lambda i: torch.ones(5)[i] + 1, (IDS,)),
    "softmax": ("table", lambda x, i: torch.softmax(x, 1).gather(0, i) + 1, (X, torch.zeros(5, 7, dtype=torch.int64))),
    "costly": ("table", lambda x, i: torch.sin(x)[i] + 1, (X, IDS)),
    "calculated": ("indices", lambda x, i: x[i * 2] + 1, (X, IDS)),
    "empty": ("empty", lambda w, i: F.embedding(i, w) * 2, (torch.zeros(0, 7), IDS[:0])),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    code, function, inputs = REFUSED[name]
    with pytest.raises(LoweringError) as caught:
        lower(trace(function, inputs, dynamic=False))
    assert caught.value.code == code


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "indexed" in case.tags])
def test_reads_are_fused_on_a_gpu(name: str) -> None:
    """The lowering sees the same loops there; what becomes of a bad index is in `triton/test_indexed.py`."""
    form = CASES[name].form()
    inputs = tuple(replace(item, spec=replace(item.spec, device="cuda")) for item in form.inputs)
    moved = [replace(o, outputs=tuple(replace(s, device="cuda") for s in o.outputs)) for o in form.operations]
    assert lower(replace(form, inputs=inputs, operations=tuple(moved))).values == lower(form).values


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.tags & {"indexed", "writes"}])
def test_random_inputs_are_within_bounds(name: str) -> None:
    form = CASES[name].form()
    for seed in range(3):
        values = [3 + 2 * n for n in range(len(form.symbols))]
        run_unfused(form, make_inputs(form, values, seed=seed), values)


# ---- whole models ---------------------------------------------------------------------------------


class Words(nn.Module):
    """Embeddings of words and places, a norm, a layer, and the scores of the next word."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(50, 32), nn.Embedding(40, 32)
        self.norm, self.layer, self.scores = nn.LayerNorm(32), nn.Linear(32, 32), nn.Linear(32, 50)

    def forward(self, ids: T, places: T) -> T:
        x = self.norm(self.words(ids) * 2.0 + self.places(places))
        return self.scores(F.gelu(self.layer(x)) + x)


def step(call: Callable[..., T], model: nn.Module, ids: T, places: T) -> list[T]:
    model.zero_grad()
    loss = F.cross_entropy(call(ids, places).flatten(0, -2), ids.roll(1, -1).flatten())
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def check_training(store: str, batches: list[tuple[T, T]]) -> None:
    torch.manual_seed(0)
    eager = Words()
    exact, fused = copy.deepcopy(eager).double(), copy.deepcopy(eager)
    captured = Captured(fused, store)
    for ids, places in batches:
        found, own = step(captured.call, fused, ids, places), step(eager, eager, ids, places)
        for one, other, right in zip(found, own, step(exact, exact, ids, places), strict=True):
            error, allowed = (one - right).square().mean().sqrt(), (other - right).square().mean().sqrt()
            assert error <= 2 * allowed + 4 * torch.finfo(torch.float32).eps * right.square().mean().sqrt()
    assert captured.session.totals().fused_calls > 0
    labels = [slot.node.label for router in captured.session.context.routers for slot in router.program.slots]
    assert any("embedding" in label for label in labels), labels
    bad = batches[0][0].clone()
    bad.view(-1)[3] = 50
    assert outcome(captured.call, bad, batches[0][1]) == outcome(eager, bad, batches[0][1])


def test_a_model_with_embeddings_trains_as_in_eager(store: str) -> None:
    batches = [torch.randint(0, 50, (3, length)) for length in (8, 8, 12, 12)]
    check_training(store, [(ids, torch.arange(ids.shape[1])) for ids in batches])


def test_packed_sequences_train_as_in_eager(store: str) -> None:
    """Sequences of several lengths one behind the other, without padding: each token has its place as data."""
    batches = []
    for lengths in ((3, 9, 4), (5, 5, 6), (1, 20, 2)):
        places = torch.cat([torch.arange(length) for length in lengths])
        batches.append((torch.randint(0, 50, (len(places),)), places))
    check_training(store, batches)
