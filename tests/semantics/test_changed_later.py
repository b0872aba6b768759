"""Code that a script replaces in classes after a module has been captured, or between two runs: calls are python's."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autofuse.runtime.roots.traces import MAX_FORGOTTEN
from autofuse.runtime.session import Session
from autofuse.sessions import start_session
from autofuse.settings.layers import load

T = torch.Tensor
X = torch.linspace(-1, 1, 32).reshape(4, 8)


class Scale:
    """An object that is no module."""

    def apply(self, x: T) -> T:
        return x * 1.75


class Base(nn.Module):
    def inherited(self, x: T) -> T:
        return x * 0.75


class Act(nn.Module):
    def forward(self, x: T) -> T:
        return self.inner(x)

    def inner(self, x: T) -> T:
        return torch.tanh(x)


class Other(Act):
    def inner(self, x: T) -> T:
        return x * x


class Net(Base):
    level = 1.5

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.act, self.scale = nn.Linear(8, 8), Act(), Scale()

    def forward(self, x: T) -> T:
        x = self.act(self.a(x)) + x.sin() * self.level
        return self.own(x) + self.inherited(x) + self.of_class(x) + self.scale.apply(x)

    def own(self, x: T) -> T:
        return x * 0.25

    @classmethod
    def of_class(cls, x: T) -> T:
        return x * 0.625


def halved(self: Any, x: T) -> T:
    return x * 0.5


def doubled(of: Any) -> Any:
    return lambda self, *args, **kwargs: of(self, *args, **kwargs) * (2 if isinstance(self, nn.Linear | Net) else 1)


CHANGES: dict[str, tuple[Any, str, Any]] = {
    "method": (Net, "own", halved),
    "inherited method": (Base, "inherited", halved),
    "overridden method": (Net, "inherited", halved),
    "class method": (Net, "of_class", classmethod(halved)),
    "number": (Net, "level", 4.0),
    "property": (Net, "level", property(lambda self: 4.0)),
    "method of an object": (Scale, "apply", halved),
    "method of a submodule": (Act, "inner", halved),
    "call of layers": (nn.Linear, "__call__", doubled(nn.Module.__call__)),
    "call of all modules": (nn.Module, "__call__", doubled(nn.Module.__call__)),
    "call of the root": (Net, "__call__", doubled(nn.Module.__call__)),
    "inner call": (nn.Linear, "_call_impl", doubled(nn.Module._call_impl)),
    "method of tensors": (T, "sin", lambda self: self + 5),
    "operator of tensors": (T, "__mul__", lambda self, other: self + other),
}


def agree(session: Session, model: nn.Module) -> T:
    """A call's result, which is python's."""
    tracker = session.roots.tracker
    ours = model(X)
    handler, tracker.handler = tracker.handler, tracker.call_original
    try:
        theirs = model(X)
    finally:
        tracker.handler = handler
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    return theirs.detach()


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_replaced_after_capture(name: str, session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    before = agree(session, model)
    assert session.roots.root_of(model).state == "captured"
    with monkeypatch.context() as patch:
        patch.setattr(*CHANGES[name], raising=False)
        assert not torch.allclose(agree(session, model), before)
    torch.testing.assert_close(agree(session, model), before)


def test_a_submodule_that_comes_later_is_watched_too(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    agree(session, model)
    model.act = Other()
    agree(session, model)
    monkeypatch.setattr(Other, "inner", halved)
    agree(session, model)
    assert session.roots.root_of(model).state == "captured", "traced anew"


def test_calls_that_are_not_timed(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    with torch.no_grad():
        for _ in range(400):
            model(X)
        assert session.roots.root_of(model).untimed.is_on
        monkeypatch.setattr(Net, "own", halved)
        agree(session, model)


def test_data_that_a_class_counts_costs_no_trace(session: Session) -> None:
    model = Net()
    agree(session, model)
    captured = session.roots.root_of(model).traces.captured
    for number in range(5):
        Net.counted = number  # type: ignore[attr-defined]
        agree(session, model)
    assert session.roots.root_of(model).traces.captured is captured


def test_what_dynamo_changes_at_its_first_trace_costs_no_other(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It puts a function around ``nn.Module.__init__``, once in a process: here as if it had not done so yet."""
    monkeypatch.setattr(nn.Module, "___needs_generation_tag_patch", True, raising=False)
    for name in ("__init__", "__setstate__"):
        monkeypatch.setattr(nn.Module, name, getattr(nn.Module, name))  # put back afterwards
    model = Net()
    agree(session, model)
    root = session.roots.root_of(model)
    captured = root.traces.captured
    for _ in range(3):
        agree(session, model)
    assert root.state == "captured" and root.traces.captured is captured


def test_what_changes_again_and_again_stays_in_eager(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    for number in range(MAX_FORGOTTEN + 2):
        agree(session, model)
        monkeypatch.setattr(Net, "own", (lambda factor: lambda self, x: x * factor)(number))
    agree(session, model)
    root = session.roots.root_of(model)
    assert (root.state, root.reason) == ("eager", "code_replaced")


# ---- traces of an earlier run ------------------------------------------------------------------------------------


@pytest.fixture
def anew(session: Session, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Begins the next run, on what this one keeps."""
    runs = [session]
    monkeypatch.setenv("AUTOFUSE_CAPTURE_KEEP_GRAPHS", "true")

    def begin() -> Session:
        runs[-1].finish(None)
        torch._dynamo.reset()
        runs.append(start_session(load(), "test"))
        return runs[-1]

    yield begin
    runs[-1].finish(None)


@pytest.mark.parametrize("name", ["", "overridden method", "call of layers", "method of tensors"])
def test_what_is_replaced_between_runs(name: str, anew: Callable[[], Session], monkeypatch: pytest.MonkeyPatch) -> None:
    session, model = anew(), Net()
    before = agree(session, model)
    session, model = anew(), Net()
    if name:
        monkeypatch.setattr(*CHANGES[name], raising=False)
    after = agree(session, model)
    captured = session.roots.root_of(model).traces.captured
    assert captured is not None and captured.traces is not None and captured.traces.used == (not name)
    assert torch.allclose(before, after) == (not name)
    monkeypatch.undo()


def test_a_trace_that_no_nested_tensor_fits_leaves_functions_on(anew: Callable[[], Session]) -> None:
    agree(anew(), nn.Tanh())
    anew()
    nested = torch.nested.nested_tensor([torch.ones(2, 8), torch.ones(3, 8)], layout=torch.strided)
    result = nn.Tanh()(nested)
    assert torch._C._is_torch_function_enabled()
    torch.testing.assert_close(result.unbind()[1], torch.ones(3, 8).tanh())


# ---- parameters that change places ---------------------------------------------------------------------------------


def test_parameters_may_be_swapped(session: Session) -> None:
    model = Net()
    agree(session, model).sum()
    model(X).sum().backward()
    model.zero_grad()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        weight = model.a.weight
        model.double().float()
        assert model.a.weight is weight
        agree(session, model)
        model.load_state_dict(Net().state_dict())
        agree(session, model)
        held = weakref.ref(weight)
        with pytest.raises(RuntimeError, match="swap"):  # the script's own weak reference
            model.double()
        assert held() is weight
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert session.roots.root_of(model).state == "captured"


class Broken(Net):
    def forward(self, x: T) -> T:
        x = self.own(x)
        torch._dynamo.graph_break()
        return self.scale.apply(x)


def test_an_object_behind_a_graph_break(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Broken()
    before = agree(session, model)
    with monkeypatch.context() as patch:
        patch.setattr(Scale, "apply", halved)
        for _ in range(3):
            assert not torch.equal(agree(session, model), before)


class Listed(nn.Module):
    """Plain python lets a module have a list of that name."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.modules = nn.BatchNorm1d(8), [1, 2]

    def forward(self, x: T) -> T:
        return self.norm(x)


def test_a_call_is_made_once_whatever_a_module_calls_its_attributes(session: Session) -> None:
    model = Listed()
    for count in range(1, 5):
        model(X)
        assert int(model.norm.num_batches_tracked) == count  # type: ignore[arg-type]


def test_bookkeeping_that_fails_after_a_trace_keeps_the_result(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("types are not to be had")

    monkeypatch.setattr("autofuse.capture.guarded_call.DirectCall.types", fail)
    model = nn.BatchNorm1d(8)
    for count in range(1, 5):
        model(X)
        assert int(model.num_batches_tracked) == count  # type: ignore[arg-type]
    assert session.roots.root_of(model).state == "eager"


def test_how_tensors_are_printed_is_nobodys_business(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(T, "__repr__", lambda self, **_: "a tensor")
    model = Net()
    agree(session, model)
    assert session.roots.root_of(model).state == "captured"
