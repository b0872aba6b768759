"""Inputs that are written to, and others that lie in the same memory: as eager, whichever calls came first."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx, nn

from autofuse.capture.corrections.shared_elements import _overlap, writes_shared_elements
from autofuse.runtime.session import Session

T = torch.Tensor


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, a: T, b: T) -> T:
        a.mul_(2)
        return (b * self.scale).sum() + a.sum()


class Keeps(nn.Module):
    """Its state is written to, and given away."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.ones(12))

    def forward(self, a: T, b: T) -> T:
        self.state.add_(a)
        return (b * 2).sum() + self.state.sum()


def overlapping(model: nn.Module) -> tuple[T, T]:
    if isinstance(model, Keeps):
        return torch.arange(12.0), model.state[2:]
    base = torch.arange(16.0)
    return base[:12], base[4:]


def apart(model: nn.Module) -> tuple[T, T]:
    return torch.arange(12.0), torch.arange(12.0) + 4


def beside(model: nn.Module) -> tuple[T, T]:
    base = torch.arange(24.0)
    return base[:12], base[12:]


def same(model: nn.Module) -> tuple[T, T]:
    a = torch.arange(12.0)
    return a, a


KINDS = [overlapping, apart, beside, same]


def run(model: nn.Module, order: Any) -> list[Any]:
    found: list[Any] = []
    for kind in order:
        for _ in range(3):
            a, b = kind(model)
            result = model(a, b)
            if result.requires_grad:
                result.backward()
            found += [
                result.detach(),
                a.clone(),
                b.clone(),
                *(p.grad.clone() for p in model.parameters() if p.grad is not None),
            ]
    return found


@pytest.mark.parametrize("make", [Writes, Keeps])
@pytest.mark.parametrize("order", list(itertools.permutations(KINDS, 3))[::3])
def test_any_order(make: Any, order: Any, session: Session) -> None:
    session.roots.uninstall()
    wanted = run(make(), order)
    session.roots.install()
    torch.testing.assert_close(run(make(), order), wanted)
    with torch.no_grad():
        found = run(make(), order)
        session.roots.uninstall()
        torch.testing.assert_close(found, run(make(), order))


class WritesOneRow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, a: T) -> T:
        a[0].add_(1)
        return (a * self.scale).sum()


SHARING = {
    "expanded": lambda: torch.zeros(1, 4).expand(3, 4),
    "windows": lambda: torch.zeros(8).unfold(0, 4, 2),
    "rows": lambda: torch.zeros(3, 4),
}


@pytest.mark.parametrize("kind", SHARING)
def test_an_input_whose_elements_share_memory(kind: str, session: Session) -> None:
    """AOTAutograd writes the whole input where the function writes one row, which torch refuses."""
    model = WritesOneRow()
    for _ in range(4):
        a, twin = SHARING[kind](), SHARING[kind]()
        result = model(a)
        session.roots.uninstall()
        expected = model(twin)
        session.roots.install()
        assert torch.equal(result, expected) and torch.equal(a, twin)


def test_an_input_whose_strides_have_varied(session: Session) -> None:
    """No guard holds its strides, by which it is told whether its elements share memory."""

    def written(a: T, places: T) -> T:
        a[places] = a[places].relu() + 1
        return a.clamp_(max=5).sum(1)

    class WritesRows(nn.Module):
        def forward(self, a: T, places: T) -> T:
            return written(a, places)

    model = WritesRows()
    base = torch.linspace(-3, 8, 100)
    apart = [((9, 5), (10, 2)), ((8, 5), (10, 1)), ((7, 4), (12, 3))]
    for sizes, strides in [*apart, ((4, 5), (3, 1)), ((6, 3), (2, 1))] * 2:
        one, twin = base.clone(), base.clone()
        result = model(one.as_strided(sizes, strides), torch.tensor([0, 2]))
        assert torch.equal(result, written(twin.as_strided(sizes, strides), torch.tensor([0, 2])))
        assert torch.equal(one, twin)


class WritesView(nn.Module):
    """Writes to a view that it has made itself, in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.way = way

    def forward(self, a: T) -> T:
        rows = a * torch.ones(3, 1)
        match self.way:
            case "zero_":
                a.expand(3, 4)[::2].zero_()
            case "assigned":
                a.unfold(1, 2, 1)[0, 1] = 7.0
            case "of a result":
                b = (a * 2).expand(3, 4)
                b[1:].fill_(-1.0)
                return (b * self.scale).sum()
            case "refused":
                a.expand(3, 4).add_(1)
            case "its own column":
                rows -= rows[:, 1:2]
            case "its own start":
                rows[:, 1:] += rows[:, :-1]
            case "its own transpose":
                rows[:, :3].add_(rows[:, :3].t())
            case "its neighbour":
                rows[:, 2:].add_(rows[:, :2])
                rows[:, 0] = rows[:, 3]
                rows[:, a.shape[0] : a.shape[1] - 1] = rows[:, torch.tensor([0, 3])]
                rows[rows > 4] = 0.5
                rows[torch.tensor([0, 2])] = rows[torch.tensor([1, 2])]
            case "its own rows":
                rows[torch.tensor([0, 2])] = rows[1:]
            case "shifted by a size":
                rows[:, a.shape[0] :] = rows[:, : -a.shape[0]]
        return (rows * self.scale).sum() + (a * self.scale).sum()


WAYS = [
    "zero_", "assigned", "of a result", "refused", "its own column", "its own start", "its own transpose",
    "its neighbour", "shifted by a size", "its own rows",
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_a_view_whose_elements_share_memory(way: str, session: Session) -> None:
    """AOTAutograd brings a write to a copy back to the base, which gives other numbers, and does not refuse."""
    model = WritesView(way)
    for _ in range(4):
        found: list[Any] = []
        for is_ours in (True, False):
            a = torch.arange(1.0, 5.0).view(1, 4)
            if not is_ours:
                session.roots.uninstall()
            try:
                found.append((model(a), a))
            except RuntimeError as error:
                found.append((str(error).partition(".")[0], a))
            session.roots.install()
        (result, a), (expected, twin) = found
        assert torch.equal(a, twin)
        assert result == expected if isinstance(expected, str) else torch.equal(result, expected)
    assert way != "refused" or "single memory location" in expected


def half(x: T) -> None:
    x[:, :2].mul_(x[:, 2:])


def column(x: T) -> None:
    x[:, 0] = x[:, 3]
    x[..., 1:3] = x[..., 2:].exp()
    x[x > 1] = 0.5
    x += x


def rolled(x: T) -> None:
    x[1:] = x[:-1]


def shared(x: T) -> None:
    x.sub_(x[:1])


@pytest.mark.parametrize(("function", "is_found"), [(half, False), (column, False), (rolled, True), (shared, True)])
def test_which_graphs_are_left_in_eager(function: Any, is_found: bool) -> None:
    found: list[bool] = []

    def note(module: fx.GraphModule, inputs: Any) -> Any:
        found.append(writes_shared_elements(module))
        return module.forward

    torch._dynamo.reset()
    with contextlib.suppress(RuntimeError):  # eager refuses some
        torch.compile(function, backend=note, dynamic=True)(torch.randn(4, 4))
    assert found and set(found) == {is_found}


@st.composite
def views(draw: st.DrawFn) -> T:
    dims = draw(st.lists(st.tuples(st.integers(1, 4), st.sampled_from((0, 1, 2, 3, 4, 7, 12, 30))), max_size=3))
    extent = sum((size - 1) * stride for size, stride in dims)
    return (
        torch.zeros(0)
        .set_(BASE)
        .as_strided([size for size, _ in dims], [stride for _, stride in dims], draw(st.integers(0, 299 - extent)))
    )


BASE = torch.zeros(300).untyped_storage()


@given(views(), views())
def test_which_views_have_elements_in_common(one: T, other: T) -> None:
    marks = torch.zeros(300, dtype=torch.bool)
    where = [(t.shape, t.stride(), t.storage_offset()) for t in (one, other)]
    marks.as_strided(*where[0]).fill_(True)
    is_shared = bool(marks.as_strided(*where[1]).any()) and where[0] != where[1]
    assert _overlap(one, other) is is_shared
