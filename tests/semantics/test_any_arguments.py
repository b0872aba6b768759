"""Arguments of every kind: none makes a call fail, and what is noted of them costs the same however long they are."""

from __future__ import annotations

import dataclasses
import sys
from collections import OrderedDict, UserDict, namedtuple
from typing import Any

import pytest
import torch
from torch import nn

from autofuse.observer.signatures import call_signature, count_elements, tensor_leaves, tensors_by_path
from autofuse.runtime.roots import captured as root_captured
from autofuse.runtime.roots import root as root_module
from autofuse.runtime.session import Session

Pair = namedtuple("Pair", "a b")


@dataclasses.dataclass
class Record:
    a: Any
    b: Any = None


class Hostile(dict):
    def items(self):
        raise RuntimeError("read")

    __iter__ = values = keys = items


class Angry:
    def __getattr__(self, name):
        raise RuntimeError(name)

    def __eq__(self, other):
        raise RuntimeError("compared")

    __hash__ = None  # type: ignore[assignment]


def cyclic() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


def tree(depth: int) -> Any:
    return {str(i): tree(depth - 1) for i in range(8)} if depth else torch.randn(2)


def jagged() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.randn(2, 8), torch.randn(3, 8)], layout=torch.jagged)


def strided() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.randn(2, 8), torch.randn(3, 8)])


X = torch.randn(3, 4)
ARGUMENTS = {
    "lists": lambda: [list(range(512)) for _ in range(64)],
    "long": lambda: list(range(200_000)),
    "tree": lambda: tree(4),
    "dictionary": lambda: {i: i for i in range(5000)},
    "tensors": lambda: [X] * 2000,
    "cyclic": cyclic,
    "hostile": lambda: Hostile(a=X),
    "angry": Angry,
    "jagged": jagged,
    "strided": strided,
    "sparse": lambda: torch.eye(3).to_sparse(),
    "complex": lambda: X.to(torch.complex64),
    "meta": lambda: torch.empty(3, device="meta"),
    "quantised": lambda: torch.quantize_per_tensor(X, 0.1, 0, torch.qint8),
    "lazy": lambda: nn.UninitializedParameter(),
}


def lines_run(function: Any, *args: Any) -> int:
    """How many lines of Python it takes."""
    count = 0

    def trace(frame: Any, event: str, arg: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    sys.settrace(trace)
    try:
        function(*args)
    finally:
        sys.settrace(None)
    return count


@pytest.mark.parametrize("name", ARGUMENTS)
def test_signatures_raise_nothing_and_are_bounded(name: str) -> None:
    args, kwargs = (ARGUMENTS[name](), X), {"last": X}
    signature = call_signature(args, kwargs)
    hash(signature)
    assert signature[1:] == (X.shape, "last", X.shape)
    assert count_elements(signature) >= 24
    assert {"args[1]", "kwargs['last']"} <= set(tensors_by_path(args, kwargs))
    assert tensor_leaves(args, kwargs)
    assert lines_run(call_signature, args, kwargs) < 2500
    assert lines_run(tensors_by_path, args, kwargs) < 2500


def test_paths_and_signatures_tell_tensors_apart() -> None:
    args = ({"k": X, 3: [X, 1]}, Pair(X, 2), Record(X), UserDict(u=X), OrderedDict(o=(X,)))
    assert list(tensors_by_path(args, {})) == [
        *("args[0]['k']", "args[0][3][0]", "args[1].a", "args[2].a", "args[3]['u']", "args[4]['o'][0]"),
    ]
    keys = {call_signature((value,), {}) for value in ({"a": X}, {"b": X}, [X, X], {"a": X.new_empty(5)}, X, 1)}
    assert len(keys) == 6


class Sum(nn.Module):
    """Of all dense tensors, its argument being what it may."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, other: Any) -> torch.Tensor:
        return self.linear(x).sum() + (other.values().sum() if type(other) is not torch.Tensor else 0)


@pytest.mark.parametrize("name", ["jagged", "strided"])
def test_nested_tensors(name: str, session: Session) -> None:
    model, x, other = Sum(), torch.randn(3, 8), ARGUMENTS[name]()
    wanted = model.forward(x, other)
    for training in (True, True, False, False):
        model.train(training)
        torch.testing.assert_close(model(x, other), wanted)
    inside = nn.Linear(8, 4)
    for _ in range(4):
        found = inside(other)
        wanted = inside.forward(other)
        torch.testing.assert_close(found.unbind()[1], wanted.unbind()[1])


def test_bookkeeping_that_fails_lets_the_module_go(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Linear(8, 4), torch.randn(3, 8)
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    model(x)

    def broken(*args: Any) -> Any:
        raise RuntimeError("broken")

    for where, name in ((root_module, "call_signature"), (root_captured, "needs_gradients")):
        torch._dynamo.reset()
        monkeypatch.setattr(where, name, broken)
        model = nn.Linear(8, 4 + len(name))
        model.register_forward_hook(lambda *_: calls.append(1))
        before = len(calls)
        for _ in range(3):
            torch.testing.assert_close(model(x), model.forward(x))
        assert len(calls) == before + 3
        assert session.roots.root_of(model).reason == "bookkeeping_failed"
        monkeypatch.undo()


def test_what_forward_raises_is_raised_once(session: Session) -> None:
    class Raises(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            if len(calls) % 2 == 0:
                raise KeyError("mine")
            return x + 1

    calls: list[int] = []
    model, x = Raises(), torch.randn(3)
    for count in range(1, 9):
        if count % 2 == 0:
            with pytest.raises(KeyError, match="mine"):
                model(x)
        else:
            model(x)
        assert len(calls) == count
