"""Process settings: what is applied, what a trial concludes, and a trial of a real script."""

from __future__ import annotations

import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from autofuse.db.rows import SettingTrial
from autofuse.db.store import Store
from autofuse.errors import AutofuseError
from autofuse.ir.commands import script_of
from autofuse.process.apply import MALLOC, MALLOC_VALUES, latest_decision, resolve
from autofuse.process.trial import StepPair, judge, measure_malloc
from autofuse.settings.layers import load
from autofuse.startup.script import Target

SCRIPT = """
import sys
import torch
weights = torch.nn.Parameter(torch.zeros(1 << 12))
optimizer = torch.optim.SGD([weights], lr=0.1)
for step in range(int(sys.argv[1])):
    optimizer.zero_grad()
    weights.square().sum().backward()
    optimizer.step()
print("not for our eyes")
"""

on_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")


def trial_of(*ratios: float, off_us: float = 1000.0) -> SettingTrial:
    pairs = [StepPair(off_us, off_us / ratio, 0.0, 0.0) for ratio in ratios]
    return judge(pairs, margin=0.03, device_key="cpu", workload="train.py --steps 3")


def test_values_fit_a_c_int() -> None:
    assert all(0 < value < 1 << 31 for _, value in MALLOC_VALUES.values())


@on_glibc
def test_mallopt_takes_effect_in_a_process_of_its_own() -> None:
    """After it, a large block comes from the heap instead of mmap, and freeing it does not shrink the heap."""
    code = """
import ctypes, sys
from autofuse.process.apply import apply_malloc
assert apply_malloc() == {"M_MMAP_THRESHOLD": 1 << 30, "M_TRIM_THRESHOLD": (1 << 31) - 1, "M_TOP_PAD": 64 << 20}
assert "torch" not in sys.modules
libc = ctypes.CDLL(None)
libc.sbrk.restype = libc.malloc.restype = ctypes.c_void_p
before = libc.sbrk(0)
block = libc.malloc(ctypes.c_size_t(48 << 20))
grown = libc.sbrk(0)
libc.free(ctypes.c_void_p(block))
assert grown - before >= 48 << 20 and libc.sbrk(0) == grown
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@on_glibc
def test_large_blocks_lie_in_huge_pages_and_none_is_touched_before() -> None:
    code = """
import ctypes, re
from autofuse.process.apply import advise_huge_pages, apply_malloc
def resident():
    return int(re.search(r"VmRSS:\\s*(\\d+)", open("/proc/self/status").read())[1]) << 10
apply_malloc()
before = resident()
advised = advise_huge_pages()
assert advised >= 900 << 20 and resident() - before < 8 << 20
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
middle = libc.malloc(ctypes.c_size_t(64 << 20)) + (32 << 20)
areas = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", open("/proc/self/smaps").read(), flags=re.M)[1:]
spans = [[int(number, 16) for number in area.split()[0].split("-")] for area in areas]
inside = next(area for area, (begin, end) in zip(areas, spans) if begin <= middle < end)
assert " hg" in inside.split("VmFlags:")[1]
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_clear_gain_wins_and_a_doubtful_one_does_not() -> None:
    won = trial_of(1.2, 1.25, 1.15, 1.2, 1.22, 1.18)
    assert (won.decision, won.reason, won.setting) == ("on", "won", MALLOC)
    assert won.low <= won.ratio <= won.high
    assert won.ratio == pytest.approx(1.2, abs=0.02)
    assert trial_of(1.02, 1.02, 1.02, 1.02, 1.02).decision == "off"
    assert trial_of(0.7, 1.5, 0.8, 1.6, 1.1, 0.9, 1.3).decision == "off"
    assert trial_of(0.8, 0.8, 0.8, 0.8, 0.8).reason == "below_margin"


def test_one_slow_step_decides_nothing() -> None:
    assert trial_of(*[1.0] * 20, 50.0).decision == "off"


@pytest.mark.parametrize(
    ("command", "script"),
    [("a/b/train.py --x 1", "train.py"), ("-m pkg.train --x", "-m pkg.train"), ("train.py", "train.py"), ("", "")],
)
def test_a_script_is_the_same_with_other_arguments(command: str, script: str) -> None:
    assert script_of(command) == script


def test_the_newest_trial_of_the_script_stands() -> None:
    on, off = trial_of(*[1.2] * 6), trial_of(*[1.0] * 6)
    assert latest_decision([off, on], "sub/train.py --steps 9") == "on"
    assert latest_decision([on, off], "train.py") == "off"
    assert latest_decision([on], "other.py") is None
    assert latest_decision([replace(on, setting="process.threads")], "train.py") is None


def test_auto_follows_the_store(tmp_path: Path) -> None:
    settings = load({"run.store": tmp_path / "s.sqlite3"}, {}, tmp_path)
    assert resolve(settings, "train.py", "cpu").process.malloc == "off"
    with Store.open(settings.run.store) as store:
        store.trials.put(trial_of(*[1.2] * 6))
    resolved = resolve(settings, "train.py", "cpu")
    assert (resolved.process.malloc, resolved.origin(MALLOC)) == ("on", "measured")
    assert resolve(settings, "other.py", "cpu").process.malloc == "off"
    assert resolve(settings, "train.py", "another machine").process.malloc == "off"
    asked = settings.with_values({MALLOC: "off"}, origin="command line")
    assert resolve(asked, "train.py", "cpu") is asked


def test_auto_with_a_broken_store_is_off(tmp_path: Path) -> None:
    (tmp_path / "s.sqlite3").write_bytes(b"garbage" * 100)
    settings = load({"run.store": tmp_path / "s.sqlite3"}, {}, tmp_path)
    assert resolve(settings, "train.py", "cpu").process.malloc == "off"


@on_glibc
def test_trial_of_a_real_script(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    target = Target(str(tmp_path / "train.py"), ("1000000",))
    seen: list[int] = []
    trial, pairs = measure_malloc(target, steps=12, margin=0.03, device_key="cpu", on_progress=seen.append)
    assert len(pairs) == 12 and seen == list(range(1, 13))
    assert all(pair.off_us > 0 and pair.on_us > 0 for pair in pairs)
    assert trial.workload == target.command
    assert "not for our eyes" not in capfd.readouterr().out


def test_a_script_with_too_few_steps_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    with pytest.raises(AutofuseError, match=r"at least 11 calls of optimizer\.step"):
        measure_malloc(
            Target(str(tmp_path / "train.py"), ("3",)), steps=12, margin=0.03, device_key="", on_progress=print
        )
