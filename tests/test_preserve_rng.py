"""Work of ours on a script's thread leaves the random generators as they were."""

import contextlib
import os
import random
import sys
import threading

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode

from autofuse.preserve_rng import keep_generators, untouched
from autofuse.report import progress

DRAWS = {
    "python": random.random,
    "python, a cached half": lambda: random.gauss(0, 1),
    "numpy": lambda: float(np.random.rand()),
    "numpy, a cached half": lambda: float(np.random.randn()),
    "torch": lambda: torch.rand(()).item(),
    "torch, a cached half": lambda: torch.randn(()).item(),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_in_a_block_are_undone(name):
    draw = DRAWS[name]
    draw()
    restore = keep_generators()
    expected = [draw() for _ in range(4)]
    restore()
    found = [draw()]
    with untouched():
        draw()
        with untouched():
            draw()
    found.append(draw())
    with pytest.raises(ValueError), untouched():
        draw()
        raise ValueError
    found.append(draw())
    with FakeTensorMode(), untouched():
        random.random()
    found.append(draw())
    assert found == expected


def test_nothing_is_undone_beside_another_thread():
    """What has been drawn could be its, and is not drawn twice."""
    is_over = threading.Event()
    other = threading.Thread(target=is_over.wait)
    before = random.getstate()
    other.start()
    try:
        with untouched():
            random.random()
    finally:
        is_over.set()
        other.join()
    assert random.getstate() != before


def test_threads_of_ours_do_not_count():
    is_over = threading.Event()
    other = threading.Thread(target=is_over.wait, name="autofuse-daemon")
    before = random.getstate()
    other.start()
    try:
        with untouched():
            random.random()
    finally:
        is_over.set()
        other.join()
    assert random.getstate() == before


def test_generators_of_cpu_and_gpus_go_back_together(monkeypatch):
    gpu = torch.Generator()  # stands for a GPU's
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "default_generators", (gpu,))
    restore = keep_generators()
    before = (torch.rand(3), torch.rand(3, generator=gpu), random.random(), np.random.rand())
    restore()
    after = (torch.rand(3), torch.rand(3, generator=gpu), random.random(), np.random.rand())
    assert all(torch.equal(a, b) for a, b in zip(before[:2], after[:2], strict=True)) and before[2:] == after[2:]


def test_a_generator_of_another_kind_behind_numpys_functions():
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(7))
    try:
        with untouched():
            first = np.random.rand()
        assert np.random.rand() == first
    finally:
        np.random.set_bit_generator(before)


def test_the_bar_tells_what_is_done_and_how_long_it_may_take():
    assert progress.line(0, 40, 1.0) == f"autofuse: tuning {'─' * 30}  0/40 nodes  0:00:01"
    assert progress.line(10, 40, 61.0) == (
        f"autofuse: tuning {'━' * 7}{'─' * 23}  10/40 nodes  0:01:01, about 0:03:03 left"
    )
    assert progress.line(41, 40, 3600.0).startswith(f"autofuse: tuning {'━' * 30}  40/40 nodes  1:00:00")
    assert progress.line(0, 0, 0.0).endswith("0/0 nodes  0:00:00")


def test_the_bar_is_drawn_now_and_then_and_wiped_at_the_end(monkeypatch):
    now, written, (ours, theirs) = [0.0], b"", os.openpty()
    with os.fdopen(theirs, "w") as terminal, monkeypatch.context() as patch:
        patch.setattr(sys, "__stderr__", terminal)
        with progress.TuningProgress(4, clock=lambda: now[0]) as bar:
            for done, at in ((1, 0.1), (2, 0.3), (3, 0.35), (4, 0.6)):
                now[0] = at
                bar.update(done)
    with os.fdopen(ours, "rb", 0) as seen, contextlib.suppress(OSError):  # how a terminal's other side ends
        while piece := seen.read(4096):
            written += piece
    before, *bars, last = written.decode().split("\r\x1b[2K")
    assert [bar.split("nodes")[0].split()[-1] for bar in bars] == ["0/4", "2/4", "4/4"]
    assert before == last == "", "it is wiped"


def test_there_is_no_bar_without_a_terminal(capfd):
    with progress.TuningProgress(4) as bar:
        bar.update(2)
    assert capfd.readouterr() == ("", "")
