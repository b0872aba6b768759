"""A script is shown each of its warnings once, whatever autofuse imports and traces meanwhile."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from autofuse.preserve_rng import untouched
from autofuse.sessions import start_session
from autofuse.settings.layers import load
from autofuse.warning_filters import unchanged
from tests.semantics.conftest import AT_ONCE


def warn_here() -> None:
    warnings.warn("of the script", UserWarning, stacklevel=1)


def change_filters() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)


def test_work_of_ours_is_no_change() -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        warn_here()
        with untouched():
            change_filters()
        warn_here()
        with unchanged(lambda: False):
            warn_here()
        assert len(said) == 1
        change_filters()  # by the script
        warn_here()
        assert len(said) == 2


def test_the_scripts_code_inside_of_a_block_counts() -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        warn_here()
        with unchanged(lambda: False):
            change_filters()
        warn_here()
    assert len(said) == 2


def test_a_capture_is_no_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in AT_ONCE.items():
        monkeypatch.setenv(f"AUTOFUSE_{name}", value)
    monkeypatch.setenv("AUTOFUSE_STORE", str(tmp_path / "store.sqlite3"))
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    torch._dynamo.reset()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        session = start_session(load(), "test")
        for rows in (2, 3, 3):
            warn_here()
            model(torch.ones(rows, 4)).sum().backward()
        graphs = sum(router.calls() for router in session.context.routers)
        session.finish(None)
    assert graphs > 0
    assert [str(w.message) for w in said] == ["of the script"]
