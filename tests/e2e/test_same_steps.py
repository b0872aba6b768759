"""Step by step: with autofuse each step is plain python's, in every mode, on a cold store and on a warm one.

Each step begins with the parameters, buffers and moments of plain python's same step (`watched_steps.py`), so what is
compared is one step's own, and no rounding grows over steps. Equal to the bit: sizes of batches, all generators before,
within and after a step, and what a script can notice of its process. Where eager's own kernels run, loss, gradients,
parameters and buffers are equal to the bit too. Where kernels of ours run, sums are reordered, and the difference is
rounding: of a step in float64 with the same random numbers ours is at most `TIMES` as far away as eager is, plus
`UNITS` units in the last place of the largest value, for eager's error of one draw may happen to be none.
The optimizer's step is judged by the gradients that it was given: a gradient near 0 may have either sign, and Adam
divides it by its own size.
"""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import forked
from tests.e2e.commands import report, stop_daemon
from tests.e2e.watched_steps import HYPER

SCRIPT = Path(__file__).with_name("watched_steps.py")
STEPS = 30
TIMES, UNITS = 4.0, 16.0
EPS = torch.finfo(torch.float32).eps
AT_ONCE = ("--set", "capture.at_once=true")
QUICK = ("--set", "tuner.trials=2", "--set", "tuner.rounds=5", "--set", "tuner.budget_seconds=8")

Record = dict[str, Any]


class Runs:
    """Runs of the script with one kind of model, in a folder of their own.

    The first with autofuse and the one without are new processes, the others children of one that has torch.
    """

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self.folder = folder
        self.runs = 0
        self.plain = self._records([str(SCRIPT)], None)

    def _records(self, command: list[str], plain: Path | None, **environment: str) -> list[Record]:
        out = self.folder / "records.pt"
        out.unlink(missing_ok=True)
        command = [*command, self.kind, str(STEPS), str(out), *([str(plain)] if plain else [])]
        env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")} | environment
        self.runs += 1
        self.said, code = _run_with_terminal(command, env, is_new=self.runs <= 2)
        assert code == 0, self.said
        if plain is None:
            out = out.rename(self.folder / "plain.pt")
        records: list[Record] = torch.load(out, weights_only=False)
        return records

    def under_autofuse(self, mode: str, store: Path, *options: str) -> list[Record]:
        run = ["-m", "autofuse", "run", "--tune", mode, "--store", str(store), *options, str(SCRIPT)]
        return self._records(run, self.folder / "plain.pt")


def _run_with_terminal(command: list[str], environment: dict[str, str], is_new: bool) -> tuple[str, int]:
    """What a run has written to its stderr, a terminal, as progress bars want; and its exit code."""
    ours, theirs = pty.openpty()
    read: list[bytes] = []

    def listen() -> None:
        try:
            while piece := os.read(ours, 4096):
                read.append(piece)
        except OSError:  # nobody writes any more
            return

    listener = threading.Thread(target=listen)
    listener.start()
    try:
        if is_new:
            python = [sys.executable, *command]
            done = subprocess.run(python, stderr=theirs, stdin=subprocess.DEVNULL, env=environment, timeout=300)
        else:
            done = forked.run(*command, environment=environment, terminal=os.ttyname(theirs))
    finally:
        os.close(theirs)
    listener.join(timeout=5)  # a daemon may keep the terminal
    return b"".join(read).decode(errors="replace"), done.returncode


@pytest.fixture(scope="module", params=["transformer", "images"])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(request.param, tmp_path_factory.mktemp(request.param))


# ---- the comparison --------------------------------------------------------------------------------------------------


def check_surroundings(plain: list[Record], ours: list[Record]) -> None:
    assert len(plain) == len(ours) == STEPS
    for step, (expected, found) in enumerate(zip(plain, ours, strict=True)):
        for name in ("sizes", "drawn", "after forward", "after step"):
            assert found[name] == expected[name], (step, name)
        for name, value in expected["world"].items():
            assert found["world"][name] == value, (step, name)


def check_bits(plain: list[Record], ours: list[Record]) -> None:
    check_surroundings(plain, ours)
    for step, (expected, found) in enumerate(zip(plain, ours, strict=True)):
        for name in ("loss", "grads", "norm", "clipped", "after"):
            assert _same(expected[name], found[name]), (step, name)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    return len(a) == len(b) and all(map(_same, a, b))


def check_rounding(plain: list[Record], ours: list[Record]) -> None:
    check_surroundings(plain, ours)
    for step, (expected, found) in enumerate(zip(plain, ours, strict=True)):
        reference = expected["float64"]
        pairs = [("loss", expected["loss"], found["loss"], reference["loss"])]
        pairs += [
            (f"gradient {n}", *tensors)
            for n, tensors in enumerate(zip(expected["grads"], found["grads"], reference["grads"], strict=True))
        ]
        scale = max(g.abs().max().item() for g in reference["grads"])
        for name, eager, mine, exact in pairs:
            # What cancels (a gradient of a bias before a norm) is rounding of terms as large as other gradients.
            largest = max(exact.abs().max().item(), scale if name != "loss" else 0.0)
            allowed = TIMES * (eager - exact).abs().max().item() + UNITS * EPS * largest
            assert (mine - exact).abs().max().item() <= allowed, (step, name)
        check_update(step, found)
        for name, value in expected["after"]["model"].items():
            if "running" in name:  # means and variances of what eager computes: a sum over a batch
                close = torch.allclose(found["after"]["model"][name], value, rtol=UNITS * EPS, atol=UNITS * EPS)
                assert close, (step, name)
            elif not value.is_floating_point():
                assert torch.equal(found["after"]["model"][name], value), (step, name)


def check_update(step: int, found: Record) -> None:
    """AdamW in float64 on the gradients at hand."""
    (beta1, beta2), rate = HYPER["betas"], HYPER["lr"]
    names = [n for n in found["before"]["model"] if "running" not in n and "num_batches" not in n]
    rows = zip(names, found["clipped"], found["before"]["moments"], found["after"]["moments"], strict=True)
    for name, grad, before, after in rows:
        g, p = grad.double(), found["before"]["model"][name].double()
        m = beta1 * before["exp_avg"].double() + (1 - beta1) * g if before else (1 - beta1) * g
        v = beta2 * before["exp_avg_sq"].double() + (1 - beta2) * g * g if before else (1 - beta2) * g * g
        count = after["step"].item()
        assert count == step + 1
        denominator = (v / (1 - beta2**count)).sqrt() + HYPER["eps"]
        expected = p * (1 - rate * HYPER["weight_decay"]) - rate * (m / (1 - beta1**count)) / denominator
        allowed = UNITS * EPS * (p.abs() + rate)
        assert ((found["after"]["model"][name].double() - expected).abs() <= allowed).all(), (step, name)


# ---- runs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["background", "after", "off"])
def test_nothing_fused_yet(runs: Runs, mode: str, tmp_path: Path) -> None:
    """A first trace, a second shape, plans, held-out calls: eager's kernels, and eager's bits."""
    if runs.kind == "images" and mode != "off":
        pytest.skip("one mode is enough for batch norm's statistics")
    store = tmp_path / "s.sqlite3"
    try:
        ours = runs.under_autofuse(mode, store, *AT_ONCE, *QUICK)
        told = report(store)
    finally:
        stop_daemon(store)
    check_bits(runs.plain, ours)
    assert told["totals"]["capture_seconds"] > 0 and told["totals"]["fused_calls"] == 0


def test_a_waiting_run_and_runs_on_what_it_has_stored(runs: Runs, tmp_path: Path) -> None:
    """Pauses with a bar, swaps to fused kernels, a budget that ends with a line; then all modes warm."""
    store = tmp_path / "s.sqlite3"
    try:
        cold = runs.under_autofuse("wait", store, *QUICK, "--set", "tuner.budget_seconds=30")
        said, told = runs.said, report(store)
        check_rounding(runs.plain, cold)
        assert "autofuse: tuning" in said and "nodes" in said
        assert told["totals"]["fused_calls"] > 0
        for mode in ("wait", "background", "after", "off") if runs.kind == "transformer" else ("background",):
            warm = runs.under_autofuse(mode, store, *AT_ONCE, *QUICK)
            check_rounding(runs.plain, warm)
            assert report(store)["totals"]["fused_calls"] > 0, mode
    finally:
        stop_daemon(store)


def test_a_root_that_is_released(runs: Runs, tmp_path: Path) -> None:
    """Where a half of the calls is held out there are soon enough pairs; such small calls gain nothing untuned."""
    if runs.kind == "transformer":
        pytest.skip("its sizes vary, so pairs are few")
    store = tmp_path / "s.sqlite3"
    never_fast_enough = ("--set", "capture.release_factor=1.0", "--set", "capture.held_out_share=0.5")
    ours = runs.under_autofuse("off", store, *AT_ONCE, *never_fast_enough)
    check_bits(runs.plain, ours)


def test_lines_of_trouble(runs: Runs, tmp_path: Path) -> None:
    """No compiler, which is found during a capture; and no store."""
    if runs.kind == "images":
        pytest.skip("lines are lines")
    ours = runs.under_autofuse("wait", tmp_path / "s.sqlite3", *QUICK, "--set", f"run.cc={tmp_path / 'no-cc'}")
    check_bits(runs.plain, ours)
    assert "no-cc" in runs.said
    (tmp_path / "t.sqlite3").write_bytes(b"no database" * 1000)
    ours = runs.under_autofuse("background", tmp_path / "t.sqlite3", *AT_ONCE)
    check_bits(runs.plain, ours)
    assert "autofuse:" in runs.said
