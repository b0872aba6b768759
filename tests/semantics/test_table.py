"""The table of semantics: each small program shows under autofuse, in each state, what it shows under plain python.

A program runs captured, and in one further state that its place in the table chooses; with ``--every-state`` in all.
Where eager's kernels run all numbers are equal to the bit, in tuned graphs within a bound of rounding (`seen`).
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.semantics import (
    programs_calls,
    programs_effects,
    programs_gradients,
    programs_hooks,
    programs_kinds,
    programs_modes,
    programs_modules,
    programs_nests,
    programs_tensors,
    programs_tools,
    programs_training,
)
from tests.semantics.seen import differences, seen
from tests.semantics.states import EAGER, KERNELS, ROUNDED, Program, play

MODULES = (
    *(programs_hooks, programs_tensors, programs_kinds, programs_gradients, programs_modes),
    *(programs_modules, programs_nests, programs_calls, programs_effects, programs_tools, programs_training),
)
TABLE = {row.name: row for module in MODULES for row in vars(module).values() if isinstance(row, Program)}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "state" not in metafunc.fixturenames:
        return
    cases = []
    for number, row in enumerate(TABLE.values()):
        first, *further = row.states
        some = (first,) if row.is_slow else (first, further[number % len(further)])
        chosen = row.states if metafunc.config.getoption("--every-state") else some
        for state in chosen:
            cases.append(pytest.param(row, state, id=f"{row.name}-{state}"))
    metafunc.parametrize("row, state", cases)


@cache
def under_python(name: str, folder: Path) -> Any:
    folder.mkdir(exist_ok=True)
    return play(TABLE[name], "python", folder)[0]


def test_shows_the_same(row: Program, state: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    python = under_python(row.name, tmp_path_factory.getbasetemp() / "python")
    ours, reached = play(row, state, tmp_path)
    found = list(differences(python, ours, rounding=row.precision if state in ROUNDED or row.rounds else None))
    if row.differs and state in row.differs_in:
        assert found, f"{row.name} shows the same now, although {row.differs}"
    else:
        assert not found, "\n".join(found)
    assert (reached.graphs > 0) == (row.comes_to != EAGER and state != "cold"), reached
    if state != "grouped":
        assert (reached.kernels > 0) == (row.comes_to == KERNELS and state == "tuned"), reached
    if state == "released":
        assert reached.released or row.comes_to == EAGER, reached
    if state == "warm":
        assert reached.read, reached


def test_what_differs_is_found() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    nan, near = torch.tensor([float("nan"), 1.0]), torch.tensor([1.0, 1.0 + 2e-6])
    differ = [
        *((x, x.detach()), (x, x * 1), (x.detach(), x.detach().t().contiguous().t()), (None, x), (1, True), (1, 1.0)),
        *((torch.zeros(1), -torch.zeros(1)), (nan, near), ({"a": 1, "b": 2}, {"b": 2, "a": 1}), ([1], (1,))),
        *((ValueError("a"), ValueError("b")), (ValueError("a"), KeyError("a")), (torch.ones(2), near)),
        (1.0, 1.0 + 2**-52),
    ]
    for a, b in differ:
        assert list(differences(seen(a), seen(b), None)), (a, b)
        assert not list(differences(seen(a), seen(a), None)), a
    for a, b, is_equal in ((torch.ones(2), near, True), (torch.ones(2), near + 1e-3, False), (nan, near, False)):
        assert bool(list(differences(seen(a), seen(b), torch.float32))) is not is_equal


def test_the_document_counts_them() -> None:
    text = (Path(__file__).parents[2] / "docs" / "SEMANTICS.md").read_text()
    kept = sum(row.is_kept for row in TABLE.values())
    assert f"{len(TABLE)} programs" in text and f"({kept} of them;" in text
    differs = text.split("\n## Where it differs from eager\n")[1].split("\n## ")[0]
    assert sum(bool(row.differs or row.rounds) for row in TABLE.values()) >= differs.count("\n| ") - 1 > 5
