"""The bar while a script waits: what it tells, that it fits the terminal, and that it leaves nothing behind."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import sys
import termios

import pytest

from autofuse.report import progress


def test_it_tells_what_is_done_how_long_it_may_take_and_what_it_saves() -> None:
    assert progress.line(0, 40, 1.0) == f"autofuse: tuning 0/40 nodes {'─' * 30} 0:01"
    assert progress.line(10, 40, 61.0) == f"autofuse: tuning 10/40 nodes {'━' * 7}{'─' * 23} 1:01, 3:03 left"
    assert progress.line(10, 40, 61.0, 1840.0) == (
        f"autofuse: tuning 10/40 nodes {'━' * 3}{'─' * 9} 1:01, 3:03 left, saves 1.84 ms a call"
    )
    assert progress.line(41, 40, 3600.0).endswith(f"40/40 nodes {'━' * 30} 1:00:00")
    assert progress.line(0, 0, 0.0).endswith("0/0 nodes " + "━" * 30 + " 0:00")


def test_it_fits_terminals_of_any_width() -> None:
    for width in range(120):
        for numbers in ((0, 40, 1.0, 0.0), (12, 40, 12.0, 1840.0), (9_999, 10_000, 7_200.0, 2.5e6), (0, 0, 0.0, 0.0)):
            assert len(progress.line(*numbers, width)) <= width
    assert progress.line(12, 40, 12.0, 1840.0, 39) == "tuning 12/40 nodes ━───── saves 1.84 ms"


def drawn(columns: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a terminal of so many columns is sent, between the clearings of the line."""
    now, written, (ours, theirs) = [0.0], b"", os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with os.fdopen(theirs, "w") as terminal, monkeypatch.context() as patch:
        patch.setattr(sys, "__stderr__", terminal)
        with progress.TuningProgress(4, clock=lambda: now[0]) as bar:
            for done, at in ((1, 0.1), (2, 0.3), (3, 0.35), (4, 0.6)):
                now[0] = at
                bar.update(done, lambda done=done: 10.0 * done)  # type: ignore[misc]
    with os.fdopen(ours, "rb", 0) as seen, contextlib.suppress(OSError):  # how a terminal's other side ends
        while piece := seen.read(4096):
            written += piece
    return written.decode().split("\r\x1b[2K")


def test_it_is_drawn_now_and_then_and_wiped_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    before, *bars, last = drawn(100, monkeypatch)
    assert [bar.split(" nodes")[0].split()[-1] for bar in bars] == ["0/4", "2/4", "4/4"]
    assert [bar.partition("saves ")[2] for bar in bars] == ["", "20.0 µs a call", "40.0 µs a call"]
    assert before == last == "", "it is wiped"


@pytest.mark.parametrize("columns", [40, 80])
def test_it_stays_on_one_row(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert max(map(len, drawn(columns, monkeypatch))) < columns, "a second row would not be wiped"


def test_there_is_none_without_a_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    with progress.TuningProgress(4) as bar:
        bar.update(2, lambda: 1.0)
    assert capfd.readouterr() == ("", "")
