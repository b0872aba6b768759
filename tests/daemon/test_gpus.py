"""Which GPUs are lent to other hosts, told by processes that only play torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest

from autofuse.daemon.devices import Devices
from autofuse.daemon.gpus import FREE_SECONDS, PATIENCE_SECONDS, Gpus
from autofuse.daemon.workers import list_gpus
from autofuse.ir.device import cpu_device
from autofuse.ir.records import DeviceInfo
from autofuse.settings.layers import load
from autofuse.tuner.benchmark_provider import BenchmarkProvider

CPU = cpu_device().key
FREE, BUSY = "cuda:Free:132:sm_90:80GiB", "cuda:Busy:108:sm_80:40GiB"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


Make = Callable[..., Gpus]


@pytest.fixture
def gpus(clock: Clock, tmp_path: Path) -> Iterator[Make]:
    made = []

    def make(code: str, driver: Path = tmp_path) -> Gpus:
        made.append(Gpus((sys.executable, "-S", "-c", code), (str(driver),), clock))
        return made[-1]

    yield make
    for one in made:
        one.close()


def tells(**free: bool) -> str:
    """A process that knows two GPUs."""
    return f"print({json.dumps({FREE: free.get('free', True), BUSY: False})!r})"


def wait(one: Gpus) -> None:
    assert one._process is not None
    one._process.wait()


def test_nobody_waits_for_the_answer(gpus: Make) -> None:
    one = gpus(tells())
    assert one.models() == () and one.free() == () and not one.is_known
    wait(one)
    assert one.models() == (FREE, BUSY) and one.free() == (FREE,) and one.is_known


def test_an_answer_holds_for_a_while(gpus: Make, clock: Clock) -> None:
    one = gpus(tells())
    one.models()
    wait(one)
    assert one.free() == (FREE,)
    clock.now += FREE_SECONDS + 1.0
    one._command = (sys.executable, "-S", "-c", tells(free=False))
    assert one.models() == (FREE, BUSY) and one._process is None, "the models are known"
    assert one.free() == ()
    wait(one)
    assert one.free() == () and one.is_known


def test_without_a_driver_no_process_is_started(gpus: Make, tmp_path: Path) -> None:
    one = gpus(tells(), tmp_path / "none")
    assert one.models() == () and one.free() == () and one._process is None and one.is_known


@pytest.mark.parametrize("code", ["raise SystemExit(1)", "print('[1]')", "print('Warning'); print('{}')"])
def test_what_cannot_be_read_names_no_gpu(gpus: Make, code: str) -> None:
    one = gpus(code)
    one.models()
    wait(one)
    assert one.models() == () and one.is_known


def test_a_process_that_hangs_is_ended(gpus: Make, clock: Clock) -> None:
    one = gpus("import time; time.sleep(600)")
    one.models()
    process = one._process
    assert process is not None
    clock.now += PATIENCE_SECONDS + 1.0
    assert one.models() == () and process.poll() is not None and one.is_known


def test_a_command_that_cannot_be_started_names_no_gpu(clock: Clock, tmp_path: Path) -> None:
    one = Gpus((str(tmp_path / "none"),), (str(tmp_path),), clock)
    assert one.models() == () and one.is_known


def test_a_gpu_that_somebody_uses_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two of one model the first counts."""
    total = 80 << 30
    left = [total - (1 << 29), total - (9 << 30), total]
    kinds = [DeviceInfo("cuda", name, 132, "sm_90", total) for name in ("A", "B", "B")]
    monkeypatch.setattr(list_gpus, "device_count", lambda: 3)
    monkeypatch.setattr(list_gpus, "gpu_device", kinds.__getitem__)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda index: (left[index], total))
    assert list_gpus.free_models() == {kinds[0].key: True, kinds[1].key: False}


# ---- what is lent ---------------------------------------------------------------------------------


class FakeGpus:
    def __init__(self) -> None:
        self.is_known = True
        self.looks = 0

    def models(self) -> Sequence[str]:
        return (FREE, BUSY)

    def free(self) -> Sequence[str]:
        self.looks += 1
        return (FREE,)


class FakeWorker:
    pid: int | None = 7

    def kill(self) -> None:
        self.pid = None


class FakeProvider(NamedTuple):
    worker: FakeWorker


@pytest.fixture
def devices(tmp_path: Path) -> Devices:
    settings = load({"run.store": tmp_path / "store.db"}, environ={}, cwd=tmp_path)
    made = Devices(settings, cast(Any, None), cast(Any, None), cast(Any, None))
    made._gpus = cast(Gpus, FakeGpus())
    return made


def test_a_gpu_is_lent_where_it_is_asked_for_and_free(devices: Devices) -> None:
    gpus = cast(FakeGpus, devices._gpus)
    assert devices.lent(lambda key: False) == [CPU] and gpus.looks == 0, "nobody asks, so nobody looks"
    assert devices.lent(lambda key: key == BUSY) == [CPU, FREE] and gpus.looks == 1


def test_what_cannot_be_used_just_now_is_not_lent(devices: Devices) -> None:
    devices.note_not_ready(CPU, "no compiler")
    assert devices.lent(lambda key: True) == [FREE]
    devices.note_not_ready(FREE, "its driver is gone")
    assert devices.lent(lambda key: True) == []


def test_our_own_workers_leave_before_somebody_looks_who_uses_a_gpu(devices: Devices) -> None:
    gpus, worker = cast(FakeGpus, devices._gpus), FakeWorker()
    devices._providers[FREE] = cast(BenchmarkProvider, FakeProvider(worker))
    devices.leave_gpus()
    assert worker.pid is not None and devices.lent(lambda key: True) == [CPU, FREE]
    gpus.is_known = False
    assert devices.lent(lambda key: True) == [CPU]
    devices.leave_gpus()
    assert worker.pid is None and devices.lent(lambda key: True) == [CPU, FREE]
