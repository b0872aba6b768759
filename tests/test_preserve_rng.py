"""Work of ours on a script's thread leaves the random generators as they were."""

import random
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode

from autofuse.hidden_thread import HiddenThread
from autofuse.preserve_rng import keep_generators, untouched

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
    ours, monitor = HiddenThread(is_over.wait), threading.Thread(target=is_over.wait, name="tqdm_monitor")
    before = random.getstate()
    ours.start()
    monitor.start()
    try:
        with untouched():
            random.random()
    finally:
        is_over.set()
        ours.join()
        monitor.join()
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


COLLECTING = """
import gc, sys, threading, time
import torch
from autofuse.preserve_rng import keep_generators
sys.setswitchinterval(1e-5)
gc.callbacks.append(lambda phase, info: time.sleep(0))  # hands the interpreter over in the middle of a collection
gc.set_threshold(3, 1000, 1000)
threads = [threading.Thread(target=lambda: [keep_generators() for _ in range(1000)]) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_threads_that_ask_while_garbage_is_collected_do_not_wait_for_each_other():
    subprocess.run([sys.executable, "-c", COLLECTING], check=True, timeout=120)
