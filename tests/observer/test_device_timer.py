"""Times of a GPU without one: a stream that runs when the test says so, CPU tensors that count as the device's."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from autofuse.gpu import devices
from autofuse.ir.records import DeviceInfo, StepSample
from autofuse.observer import device_timer
from autofuse.observer.device_timer import EventCalls, EventTimer, LateTimes
from autofuse.observer.mode import ObserverMode, attach, detach
from autofuse.observer.observer import Observer
from autofuse.observer.profile import aggregate
from autofuse.runtime.kernels.device_kernels import DeviceKernels
from autofuse.runtime.roots.registry import RootRegistry
from autofuse.runtime.roots.services import RootTools
from autofuse.sessions import make_session
from autofuse.settings.layers import load
from tests.observer.harness import EVERY_STEP, MLP
from tests.runtime.fake_capturer import fake_capturer


@dataclass
class FakeGpu:
    """A device whose clock moves from event to event only, and which runs behind the host."""

    recorded: int = 0
    reached: int = 0  # events that the device has passed
    capturing: bool = False
    active: bool = True
    made: int = 0
    broken: bool = False
    milliseconds: float = 1.0  # between events
    streams: list[int] = field(default_factory=list)

    def calls(self) -> EventCalls:
        return EventCalls(
            is_active=lambda: self.active,
            is_capturing=lambda: self.capturing,
            new_event=lambda: FakeEvent(self),
            stream=lambda index: index,
            index_of=lambda tensor: 0 if tensor.dim() else -1,  # a scalar stays on the host
        )

    def catch_up(self) -> None:
        self.reached = self.recorded


class FakeEvent:
    def __init__(self, gpu: FakeGpu) -> None:
        gpu.made += 1
        self.gpu = gpu
        self.at = -1

    def record(self, stream: int) -> None:
        assert not self.gpu.capturing, "an event in the script's CUDA graph"
        if self.gpu.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        self.gpu.recorded += 1
        self.gpu.streams.append(stream)
        self.at = self.gpu.recorded

    def query(self) -> bool:
        assert not self.gpu.capturing, "a question that ends the script's recording"
        return self.at <= self.gpu.reached

    def elapsed_time(self, end_event: FakeEvent) -> float:
        assert self.query() and end_event.query()
        return (end_event.at - self.at) * self.gpu.milliseconds

    def synchronize(self) -> None:
        raise AssertionError("the script was made to wait")


def test_a_length_is_told_once_the_device_has_passed_it_and_events_are_used_again() -> None:
    gpu = FakeGpu()
    timer = EventTimer(gpu.calls())
    first = timer.end(timer.begin(0))
    assert first is not None and timer.nanoseconds(first) is None
    gpu.reached = 1  # past the start, not past the end
    assert timer.nanoseconds(first) is None
    gpu.catch_up()
    assert timer.nanoseconds(first) == 1_000_000
    assert gpu.made == 2
    assert timer.end(timer.begin(0)) is not None and gpu.made == 2
    assert timer.end(timer.begin(1)) is not None and gpu.made == 4, "an event belongs to one device"
    assert gpu.streams == [0, 0, 0, 0, 1, 1]


def test_nothing_is_recorded_or_asked_while_a_graph_is_recorded() -> None:
    gpu = FakeGpu()
    timer = EventTimer(gpu.calls())
    before = timer.end(timer.begin(0))
    half = timer.begin(0)
    gpu.catch_up()
    gpu.capturing = True
    assert timer.begin(0) is None and timer.end(half) is None
    assert before is not None and timer.nanoseconds(before) is None
    gpu.capturing = False
    assert timer.nanoseconds(before) == 1_000_000
    assert timer.fault is None


def test_a_device_in_trouble_switches_the_timer_off() -> None:
    gpu = FakeGpu()
    timer = EventTimer(gpu.calls())
    told: list[int | None] = []
    late = LateTimes(timer)
    late.add(timer.end(timer.begin(0)), told.append)
    gpu.broken = True
    assert timer.begin(0) is None
    assert timer.fault is not None and "illegal memory access" in timer.fault and not timer.is_active
    late.collect()
    assert told == [None] and not len(late)


def test_late_times_come_in_order_and_the_rest_is_told_as_unknown() -> None:
    gpu = FakeGpu()
    timer = EventTimer(gpu.calls())
    late = LateTimes(timer)
    told: list[tuple[str, int | None]] = []
    late.add(timer.end(timer.begin(0)), lambda ns: told.append(("first", ns)))
    late.add(None, lambda ns: told.append(("untimed", ns)))
    late.add(timer.end(timer.begin(0)), lambda ns: told.append(("last", ns)))
    late.collect()
    assert told == []
    gpu.reached = 2
    late.collect()
    assert told == [("first", 1_000_000), ("untimed", None)]
    late.close()
    assert told[2:] == [("last", None)]


def test_a_length_is_told_to_its_own_stretch_while_another_thread_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other thread drops the oldest, for there is no room, while the first one asks for its length."""
    monkeypatch.setattr(device_timer, "MAX_LATE", 2)
    told: list[tuple[str, int | None]] = []
    adding = threading.Thread(target=lambda: late.add(None, lambda ns: told.append(("third", ns))))

    def nanoseconds(stretch: str) -> int:
        adding.start()
        adding.join(0.2)
        return 1

    late = LateTimes(SimpleNamespace(nanoseconds=nanoseconds, fault=None))  # type: ignore[arg-type]
    late.add("stretch", lambda ns: told.append(("first", ns)))  # type: ignore[arg-type]
    late.add(None, lambda ns: told.append(("second", ns)))
    late.collect()
    adding.join()
    late.close()
    assert told == [("first", 1), ("second", None), ("third", None)]


# ---- calls of a sampled step ------------------------------------------------------------------------------


def test_calls_on_the_gpu_are_timed_by_events_and_calls_on_the_host_by_the_clock() -> None:
    gpu = FakeGpu()
    mode = ObserverMode(timer=EventTimer(gpu.calls()))
    a, scalar = torch.randn(4, 4), torch.tensor(2.0)
    assert attach(mode)
    mode.recording = True
    a + a
    torch.cat([a, a])
    scalar + scalar
    gpu.capturing = True
    a * a
    gpu.capturing = False
    mode.recording = False
    assert detach(mode) and mode.fault is None
    assert mode.timing_ns > 0
    profile = aggregate(mode.events, lambda identity, name: name)
    assert profile.not_understood == 0 and len(profile.late) == 2 and profile.untimed == 1
    by_name = {(str(key[0]), totals.description[-2]): totals for key, totals in profile.ops.items()}
    assert by_name["aten.add.Tensor", ()].time_ns > 0
    assert by_name["aten.add.Tensor", (4, 4)].time_ns == 0
    for late in profile.late:
        late.add(5_000)
    assert by_name["aten.add.Tensor", (4, 4)].time_ns == by_name["aten.cat.default", (8, 4)].time_ns == 5_000
    assert by_name["aten.mul.Tensor", (4, 4)].calls == 1 and by_name["aten.mul.Tensor", (4, 4)].time_ns == 0


def watched(observer: Observer, model: nn.Module, steps: int) -> None:
    for _ in range(steps):
        x = torch.randn(4, 8)
        observer.on_root_call("root", (x,), {})
        observer.before_root_call("root", model)
        loss = model(x).sum()
        observer.after_root_call("root", 0.001)
        loss.backward()


def test_the_observer_asks_for_a_steps_times_at_later_calls() -> None:
    gpu = FakeGpu()
    observer = Observer(EVERY_STEP, EventTimer(gpu.calls()))
    watched(observer, MLP(), 4)
    assert observer.sampled_steps("root") == 1, "one step at a time is waited for"
    assert observer.backward_ratio("root") is None and observer.ops_in_forward("root")
    assert sum(p.time_us for p in observer.profiles() if len(p.shapes) and p.shapes[0]) == 0
    gpu.catch_up()
    observer.on_root_call("root", (torch.randn(4, 8),), {})
    ratio = observer.backward_ratio("root")
    assert ratio is not None and ratio > 0
    (addmm,) = [p for p in observer.profiles() if p.overload == "aten.addmm.default" and "first" in p.module]
    assert addmm.time_us == 1000.0 * addmm.calls
    observer.stop()
    assert observer.untimed_calls == 0 and observer.fault is None


def test_what_the_device_has_not_reached_at_the_end_is_counted() -> None:
    gpu = FakeGpu()
    observer = Observer(EVERY_STEP, EventTimer(gpu.calls()))
    watched(observer, MLP(), 3)
    observer.stop()
    assert observer.untimed_calls == gpu.recorded // 2 > 0
    assert observer.backward_ratio("root") is None


def test_without_a_gpu_in_use_no_event_is_made() -> None:
    gpu = FakeGpu(active=False)
    observer = Observer(EVERY_STEP, EventTimer(gpu.calls()))
    watched(observer, MLP(), 3)
    observer.stop()
    assert gpu.made == 0 and observer.sampled_steps("root") > 1
    assert all(profile.time_us > 0 for profile in observer.profiles())


# ---- steps and eager calls of a root ----------------------------------------------------------------------


@pytest.fixture
def on_fake_gpu(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[FakeGpu, RootRegistry]]:
    gpu = FakeGpu()
    monkeypatch.setattr(DeviceKernels, "tunable", lambda self, device: object())
    monkeypatch.setattr(DeviceKernels, "use_device", lambda self, device: None)
    environment = {"AUTOFUSE_STORE": str(tmp_path / "s.sqlite3"), "AUTOFUSE_TUNE": "off", "AUTOFUSE_QUIET": "1"}
    capturer = fake_capturer(lambda module, *args, **kwargs: module._call_impl(*args, **kwargs))
    tools = RootTools(
        load_capturer=lambda: capturer,
        device_of=lambda module, *rest: torch.device("cuda", 0),
        event_timer=lambda: EventTimer(gpu.calls()),
    )
    of = make_session(load(environ=environment), "test", tools=tools).roots
    yield gpu, of
    of.uninstall()


def call(of: RootRegistry, model: nn.Module) -> None:
    of.root_of(model).call(model, (torch.randn(4, 8),), {})


def test_time_spent_in_eager_is_the_larger_of_host_and_device(on_fake_gpu: tuple[FakeGpu, RootRegistry]) -> None:
    gpu, of = on_fake_gpu
    gpu.milliseconds = 10_000.0  # longer than any call takes the host
    model = MLP()
    with torch.no_grad():
        call(of, model)
        root = of.root_of(model)
        assert 0 < root.account.ledger.eager_seconds < 10.0
        gpu.catch_up()
        call(of, model)  # learns what the first took the device
    assert 10.0 < root.account.ledger.eager_seconds < 20.0
    assert of.observer.typical_seconds(root.key) == 10.0


def test_steps_of_a_captured_root_are_times_of_its_stream(on_fake_gpu: tuple[FakeGpu, RootRegistry]) -> None:
    gpu, of = on_fake_gpu
    model = MLP()
    root = of.root_of(model)
    root.capture()
    for _ in range(3):
        call(of, model)
    steps = of.context.steps
    assert steps == [], "the device has reached nothing yet"
    gpu.catch_up()
    call(of, model)
    assert [StepSample(*fields).step_us for fields in steps] == [1000.0, 1000.0]
    of.context.disturbances += 1
    call(of, model)
    of.uninstall()
    written = [StepSample(*fields) for fields in steps]
    assert [(s.index, s.step_us) for s in written] == [(1, 1000.0), (2, 1000.0), (3, 0.0), (4, 0.0)]
    assert of.context.untimed_steps == 1 and of.context.step_us_total == 2000.0


# ---- what decisions know of a device ----------------------------------------------------------------------


def test_keys_of_gpus_hold_their_memory_and_keys_of_cpus_are_what_they_were() -> None:
    assert DeviceInfo("cpu", "AMD EPYC", 2, "avx512").key == "cpu:AMD EPYC:2:avx512"
    small, large = (DeviceInfo("cuda", "NVIDIA A100", 108, "sm_80", gib * 2**30 - 17_000_000) for gib in (40, 80))
    assert small.key == "cuda:NVIDIA A100:108:sm_80:40GiB" and large.key.endswith(":80GiB")


@pytest.mark.parametrize(
    ("hip", "arch", "isa"), [(None, "", "sm_90"), ("6.4", "gfx942:sramecc+:xnack-", "gfx942")], ids=["cuda", "rocm"]
)
def test_a_gpu_is_described_by_what_torch_knows(
    hip: str | None, arch: str, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = SimpleNamespace(
        name="A GPU", multi_processor_count=132, major=9, minor=0, gcnArchName=arch, total_memory=141 * 2**30
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: found)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert devices.gpu_device(0) == DeviceInfo("cuda", "A GPU", 132, isa, 141 * 2**30)
    assert devices.supports_bf16(0)
    found.major = 7
    assert devices.supports_bf16(0) is (hip is not None)
