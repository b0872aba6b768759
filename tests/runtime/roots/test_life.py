"""The states of a root: what each move leaves behind, and what later runs read of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from autofuse.observer.capture_policy import CaptureAdvice
from autofuse.observer.release_policy import Loss
from autofuse.runtime.roots.life import RootLife
from autofuse.runtime.roots.root import Root
from autofuse.runtime.roots.services import RootTools
from autofuse.sessions import make_session
from autofuse.settings.layers import load
from tests.runtime.fake_capturer import fake_capturer

LOSS = Loss("slower_than_eager", 0.5, frozenset({3}))


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Root]:
    environment = {"AUTOFUSE_STORE": str(tmp_path / "s.sqlite3"), "AUTOFUSE_TUNE": "off", "AUTOFUSE_QUIET": "1"}
    capturer = fake_capturer(lambda module, x: x + 1)
    tools = RootTools(load_capturer=lambda: capturer)
    roots = make_session(load(environ=environment), "test", tools=tools).roots
    yield roots.root_of(nn.Identity())
    roots.uninstall()


@pytest.mark.parametrize(
    "is_captured, move, state, reason",
    [
        (False, lambda life: life.capture(), "captured", "paid_off"),
        (False, lambda life: life.decline(), "eager", "paid_off"),
        (False, lambda life: life.await_kernels(), "observing", "nothing_to_run"),
        (False, lambda life: life.fail(ValueError("no"), False), "eager", "capture_failed"),
        (False, lambda life: life.give_up(nn.Identity(), ValueError("no")), "eager", "bookkeeping_failed"),
        (True, lambda life: life.lose(LOSS, 64, True), "eager", "slower_than_eager"),
        (True, lambda life: life.lose(LOSS, 64, False), "captured", "paid_off"),
        (True, lambda life: life.release("replaced"), "eager", "code_replaced"),
        (True, lambda life: life.find_nothing("a loop"), "eager", "no_graph"),
        (True, lambda life: life.fail(ValueError("no"), True), "eager", "kept_graph_failed"),
        (True, lambda life: life.give_up(nn.Identity(), ValueError("no")), "eager", "bookkeeping_failed"),
        (True, lambda life: life.reopen(), "observing", "not_yet"),
    ],
)
def test_a_move_leaves_state_and_reason(
    root: Root, is_captured: bool, move: Callable[[RootLife], None], state: str, reason: str
) -> None:
    root.life.note(CaptureAdvice(True, "paid_off", "it pays"))
    if is_captured:
        root.life.capture()
        assert root.trial.is_on
    move(root.life)
    assert (root.state, root.reason) == (state, reason)
    assert root.trial.is_on == (state == "captured"), "steps are compared as long as it is captured"


def test_what_is_known_of_some_sizes_is_told_until_others_are_captured(root: Root) -> None:
    root.life.capture()
    root.life.lose(LOSS, 64, True)
    lost = ("eager", "slower_than_eager", root.detail)
    assert root.life.told() == lost
    root.life.reopen_sizes()
    assert root.state == "observing" and root.life.told() == lost
    root.life.note(CaptureAdvice(False, "too_small", "tiny", final=True))
    root.life.decline()
    root.life.reopen_sizes()
    assert root.life.told() == lost, "the first verdict"
    root.life.note(CaptureAdvice(True, "paid_off", "it pays"))
    root.life.capture()
    assert root.life.told() == ("captured", "paid_off", "it pays")


def test_failures_are_counted_and_told_with_their_first_line(root: Root) -> None:
    root.life.fail(RuntimeError("first\nsecond"), from_kept=False)
    root.life.fail(RuntimeError(), from_kept=False)
    assert root.life.failures == 2 and root.detail == "RuntimeError: "


def test_a_captured_root_runs_what_its_capturer_made(root: Root) -> None:
    root.capture()
    x = torch.zeros(3)
    assert root.call(nn.Identity(), (x,), {}).eq(1).all() and root.calls == 1
    assert root.traces.captured is not None and root.state == "captured"
