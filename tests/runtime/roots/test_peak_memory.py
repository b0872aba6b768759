"""Peak memory of steps: exact on allocations that are known, and out of the way of whatever the script does."""

import io
import subprocess
import sys
import threading

import pytest
import torch
from rich.console import Console
from torch import nn

from autofuse.db.store import Store
from autofuse.report.as_json import report_to_json
from autofuse.report.report import load_report
from autofuse.report.terminal import render_report
from autofuse.runtime.roots.peak_memory import AllocationLog, RootPeaks
from autofuse.sessions import start_session
from autofuse.settings.layers import load

MIB = 2**20


def megabytes(count):
    return torch.empty(count * MIB, dtype=torch.uint8)


@pytest.fixture
def allocations():
    log = AllocationLog()
    yield log
    log.give_up()


def test_the_peak_counts_what_is_held_at_once(allocations):
    before = megabytes(8)
    assert allocations.begin()
    first = megabytes(3)
    del first, before  # what was there before is unknown, and not counted as freed
    second, third = megabytes(2), megabytes(2)
    del second, third
    last = megabytes(1)
    assert allocations.end(on_gpu=False) == 4 * MIB
    del last


def test_backward_is_watched_too(allocations):
    x = torch.ones(MIB // 4, requires_grad=True)
    assert allocations.begin()
    loss = x.exp().sum()  # exp's result is kept for backward, which makes two more: exp's gradient and x's
    loss.backward()
    assert 2 * MIB <= allocations.end(on_gpu=False) < 4 * MIB


def test_a_profiler_of_the_script_goes_first(allocations):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        assert not allocations.begin()
    assert allocations.begin()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        torch.ones(8).add(1)
    assert any(event.key == "aten::add" for event in profile.key_averages())
    assert allocations.end(on_gpu=False) is None
    assert allocations.begin() and allocations.end(on_gpu=False) == 0


def test_another_thread_cannot_end_it(allocations):
    assert allocations.begin()
    found = []
    thread = threading.Thread(target=lambda: found.extend([allocations.end(False), allocations.begin()]))
    thread.start()
    thread.join()
    assert found == [None, False]
    kept = megabytes(1)
    assert allocations.end(on_gpu=False) == MIB
    del kept


def test_the_scripts_profiler_on_another_thread(allocations):
    assert allocations.begin()
    counts = []

    def profile():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
            torch.ones(3).add(1)
        counts.append(len(found.key_averages()))

    run_in_thread(profile)
    assert counts[0] > 0
    assert allocations.end(on_gpu=False) is not None


def test_a_thread_that_ends_while_it_is_watched(allocations):
    said = []
    run_in_thread(lambda: said.append(allocations.begin()))
    run_in_thread(lambda: said.append(allocations.end(False)))  # which may have the first one's ident
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        torch.ones(3).add(1)
    assert said == [True, None]
    kept = allocations.begin() and megabytes(2)
    assert allocations.end(on_gpu=False) == 2 * MIB
    del kept


def run_in_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


FORK = """
import os, torch
from autofuse.runtime.roots.peak_memory import AllocationLog
log = AllocationLog()
kept = [torch.empty(2**20) for _ in range(8)]
assert log.begin()
child = os.fork()
if child == 0:
    os._exit(int(torch._C._autograd._profiler_enabled()))
assert os.waitpid(child, 0)[1] == 0
kept.clear()  # of unknown size to the profiler, which logs it where it may
kept.append(torch.empty(2**20))
print(log.end(False))
"""


def test_nothing_is_printed_and_a_fork_is_not_watched():
    result = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout, result.stderr) == (0, f"{4 * MIB}\n", "")


def test_larger_inputs_are_measured_after_smaller_ones_and_never_two_steps_in_a_row(allocations):
    posted = []
    peaks = RootPeaks(allocations, "key", "Net", posted.append)

    def step(signature, elements, number, nbytes, is_changed=False):
        held_out = peaks.begin(signature, elements, number)
        if held_out is not None:
            megabytes(nbytes)
            peaks.end(signature, elements, held_out, False, is_changed)
        return held_out

    assert step("a", 100, 5, 3) is False
    assert step("a", 100, 6, 4) is None  # right after the other
    assert peaks.is_half_known("a", 100) and not peaks.is_half_known("b", 100)
    assert step("a", 100, 7, 4, is_changed=True) is True  # kernels changed: again
    assert step("a", 100, 9, 4) is True
    assert step("a", 100, 11, 4) is None and step("b", 105, 13, 4) is None  # not larger
    assert step("c", 120, 15, 6) is False and step("c", 120, 17, 9) is True
    sizes = [(e.data["signature"], e.data["routed_bytes"] // MIB, e.data["eager_bytes"] // MIB) for e in posted]
    assert sizes == [("a", 3, 4), ("c", 6, 9)] and not peaks.is_half_known("a", 100)


class Gate(nn.Module):
    """In eager three intermediates are kept for backward."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return torch.sigmoid(torch.tanh(x * self.scale)) * x


@pytest.fixture
def settings(tmp_path, monkeypatch):
    for name, value in {
        "STORE": str(tmp_path / "store.sqlite3"), "TUNE": "off", "QUIET": "1", "CAPTURE_AT_ONCE": "1",
        "CAPTURE_HELD_OUT_SHARE": "0", "CAPTURE_MIN_ROOT_US": "0",
    }.items():  # fmt: skip
        monkeypatch.setenv(f"AUTOFUSE_{name}", value)
    return monkeypatch


def run_steps(count=24):
    session = start_session(load(), "test.py")
    model, x = Gate(), torch.randn(MIB // 4)
    for _ in range(count):
        model(x).sum().backward()
        model.scale.grad = None
    session.finish(0)
    torch._dynamo.reset_code_caches()
    return session


def test_a_run_reports_the_peaks_of_both(settings):
    settings.setenv("AUTOFUSE_OBSERVE_MEMORY", "1")
    session = run_steps()
    with Store.open(session.context.settings.run.store) as store:
        report = load_report(store)
        held_out = [sample for sample in store.steps.of_run(report.run.id) if sample.held_out]
    (line,) = report.memory
    assert line.name == "Gate" and line.eager_bytes >= 3 * MIB and line.routed_bytes >= MIB
    assert not any(row.event.kind == "peak_memory" for row in report.events)
    assert [sample.step_us for sample in held_out] == [0.0]  # the profiler's time is not a step's
    assert report_to_json(report)["memory"][0]["eager_bytes"] == line.eager_bytes
    assert f"of eager's {line.eager_bytes / MIB:.1f} MiB" in text_of(report)


def test_a_run_that_was_not_asked_says_how_to_ask(settings):
    session = run_steps(4)
    with Store.open(session.context.settings.run.store) as store:
        assert "--set observe.memory=on" in text_of(load_report(store))


def text_of(report):
    out = io.StringIO()
    render_report(report, Console(width=200, file=out))
    return out.getvalue()
