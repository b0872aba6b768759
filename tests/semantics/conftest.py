"""A session in which every module is captured at its first call, and nothing is held out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from autofuse.runtime.session import Session
from autofuse.sessions import start_session
from autofuse.settings.layers import load

AT_ONCE = {
    "TUNE": "off",
    "QUIET": "1",
    "CAPTURE_AT_ONCE": "true",
    "CAPTURE_MIN_ROOT_US": "0",
    "CAPTURE_MIN_INFERENCE_ROOT_US": "0",
    "CAPTURE_HELD_OUT_SHARE": "0",
    "CAPTURE_KEEP_GRAPHS": "false",
}


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    for name, value in AT_ONCE.items():
        monkeypatch.setenv(f"AUTOFUSE_{name}", value)
    monkeypatch.setenv("AUTOFUSE_STORE", str(tmp_path / "store.sqlite3"))
    torch._dynamo.reset()
    session = start_session(load(), "test")
    yield session
    session.finish(None)
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def functions_are_on() -> Iterator[None]:
    """A guard that raises leaves ``__torch_function__`` off, for all that follows."""
    yield
    assert torch._C._is_torch_function_enabled()
