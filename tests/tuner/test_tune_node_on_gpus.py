"""The tuner's GPU side without a GPU: Triton's interpreter does the work, fakes stand for clock and device."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from autofuse.codegen.knobs import default_config
from autofuse.codegen.lowering.lower import lower
from autofuse.codegen.templates import LOOP
from autofuse.codegen.triton.artifact import Artifact, Image
from autofuse.codegen.triton.interpret import load_interpreted
from autofuse.codegen.triton.knobs import triton_knobs
from autofuse.codegen.triton.printer import print_triton
from autofuse.codegen.triton.resources import Resources
from autofuse.codegen.triton.source import NOTHING_ASSUMED, Assumptions, TritonSource
from autofuse.daemon import control, devices
from autofuse.daemon.visible_devices import as_seen_by
from autofuse.db.store import Store
from autofuse.db.tune_queue import NOT_READY
from autofuse.errors import CompilerError
from autofuse.ir.operation import NodeForm
from autofuse.ir.records import Decision, DeviceInfo, TuneRequest
from autofuse.settings.layers import load
from autofuse.tuner import gpu_rig
from autofuse.tuner.backends import InterpreterBackend, TritonBackend, isa_of
from autofuse.tuner.benchmark_provider import Bench, BenchmarkProvider, Built, NodeBenchmarks
from autofuse.tuner.compiler_pool import CompilerPool
from autofuse.tuner.gpu_sampler import DeviceCalls, GpuSampler
from autofuse.tuner.outcome import JobLimits, Outcome
from autofuse.tuner.timing import RaceResult, RaceRules, race
from autofuse.tuner.triton_compiler import TritonCompiler
from autofuse.tuner.tune_node import Job
from autofuse.tuner.worker_process import Lost, Main, NotReady, Refused, WorkerProcess
from tests.cases import CASES
from tests.tuner.nodes import chain_form, request

LIMITS = JobLimits(trials=3, rounds=6, margin=0.03, job_seconds=20.0)
H200 = DeviceInfo("cuda", "NVIDIA H200", 132, "sm_90", 140 << 30).key


@pytest.fixture(scope="module")
def interpreter() -> Iterator[BenchmarkProvider]:
    backend = InterpreterBackend()
    worker = WorkerProcess(memory_bytes=2 << 30, timeout_seconds=120.0, main=Main(backend.worker_module))
    yield BenchmarkProvider(backend, worker)
    worker.kill()


def asked_for(form: NodeForm, values: tuple[int, ...], device: str) -> TuneRequest:
    asked = request(form, values, threads=0)
    return replace(asked, key=replace(asked.key, device=device))


class Timed:
    """A bench whose checks are real and whose times are given: eager's, then a candidate's."""

    def __init__(self, bench: NodeBenchmarks, device: tuple[float, float], host: tuple[float, float]) -> None:
        self._bench = bench
        self._times = device, host

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bench, name)

    def race(self, built: Sequence[Built], values: Sequence[int], rules: RaceRules) -> RaceResult:
        (eager, ours), (eager_host, our_host) = self._times
        bound = eager_host > eager
        device = [[eager + 1e-9 * k for k in range(rules.rounds + 10)], *([ours] * (rules.rounds + 10) for _ in built)]
        host = [[eager_host] * len(device[0]), *([our_host] * len(device[0]) for _ in built)]
        cost = [
            [max(d, h) if bound else d for d, h in zip(*pair, strict=True)] for pair in zip(device, host, strict=True)
        ]
        return RaceResult(cost, [False] * len(cost), 0, device, host)


def tune(
    provider: BenchmarkProvider,
    form: NodeForm,
    values: tuple[int, ...],
    device: Any = (9e-6, 3e-6),
    host: Any = (5e-6, 2e-6),
) -> Outcome:
    asked = asked_for(form, values, "interpreter:test")
    bench: Bench = Timed(provider.bench(asked.key.fusion_id, form, 0, asked.bucket), device, host)  # type: ignore[assignment]
    return Job(asked, bench, LIMITS).run()


def first(outcome: Outcome) -> Decision:
    return outcome.decisions[0]


# ---- whole jobs, in the interpreter ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["add_bias_gelu", "softmax", "layer_norm_backward", "cross_entropy", "bias_gradient", "moves_of_sizes"]
)
def test_a_job_checks_triton_kernels_and_keeps_the_winner(interpreter: BenchmarkProvider, name: str) -> None:
    form = CASES[name].form()
    outcome = tune(interpreter, form, tuple(5 + n for n in range(len(form.symbols))))
    assert first(outcome).reason == "won" and first(outcome).candidate.variant == "triton_generic", first(
        outcome
    ).detail
    assert outcome.kernels[0].key.digest == first(outcome).compile_key
    won = [m for m in outcome.measurements if m.status == "ok"]
    assert won and all(m.error_ratio is not None and m.host_us == pytest.approx(2.0) for m in won)
    source = TritonSource.from_json(json.loads(outcome.kernels[0].binary))
    load_interpreted(source)  # what was kept runs in any process


def test_the_interpreter_is_slower_than_eager_and_eager_stays(interpreter: BenchmarkProvider) -> None:
    form = chain_form(3, 8)
    asked = asked_for(form, (4,), "interpreter:test")
    outcome = Job(asked, interpreter.bench(asked.key.fusion_id, form, 0, asked.bucket), LIMITS).run()
    assert first(outcome).reason == "no_gain" and first(outcome).candidate.variant == "eager"


def test_a_daemon_works_off_requests_of_other_devices(tmp_path: Any) -> None:
    cli = {"run.store": tmp_path / "store.sqlite3", "run.profile": "quick", "tuner.trials": 2}
    settings = load(cli, environ={}, cwd=tmp_path)
    form = chain_form(3, 8)
    with Store.open(settings.run.store) as store:
        asked = asked_for(form, (4,), "interpreter:test")
        unknown = asked_for(form, (4,), "cuda:GPU of the future:1:sm_999:1GiB")
        store.queue.add([asked, unknown, request(form, (4,))])
        assert sum(control.drain(settings)[:2]) == 3
        rows = {r.key.device: (r.status, r.message) for r in store.queue.requests()}
    assert rows[asked.key.device][0] == "done"
    status, message = rows[unknown.key.device]
    assert status == "failed" and "found cuda:999" in message


@pytest.mark.parametrize("name", ["add_layer_norm", "bias_gradient"])
def test_from_request_to_stored_artifact(tmp_path: Any, name: str) -> None:
    """All of a GPU's way but the GPU: printed, compiled for sm_90, checked, raced, completed, stored, unpacked."""
    form = CASES[name].form()
    values = (3, 5, 16)
    with (
        Store.open(tmp_path / "store.sqlite3") as store,
        TritonCompiler(store.kernels.get_triton_files, store.kernels.put_triton_files) as compiler,
    ):
        worker = WorkerProcess(memory_bytes=2 << 30, timeout_seconds=120.0, main=Main("tests.tuner.artifact_worker"))
        provider = BenchmarkProvider(TritonBackend(H200, compiler.compile), worker, stored=store.kernels.get)
        try:
            asked = asked_for(form, values, H200)
            bench = Timed(provider.bench(asked.key.fusion_id, form, 0, asked.bucket), (9e-6, 3e-6), (5e-6, 2e-6))
            outcome = Job(asked, bench, replace(LIMITS, trials=2), ()).run()  # type: ignore[arg-type]
        finally:
            worker.kill()
        decision = first(outcome)
        assert decision.reason == "won", (decision.reason, decision.detail)
        for kernel in outcome.kernels:
            store.kernels.put(kernel)
        found = store.kernels.get(str(decision.compile_key))
    assert found is not None and found.resources["registers"] > 0 and found.key.target == "cuda:90"
    assert found.resources["code"]["instructions"] > 50 and found.resources["code"]["stores"]
    artifact = Artifact.unpack(found.binary)
    assert {Assumptions(True, ("s2",)), Assumptions(True), NOTHING_ASSUMED} == set(artifact.assumptions)
    for aligned in (True, False):
        assumed = artifact.best(aligned, {"s0": 3, "s1": 7, "s2": 13})
        assert assumed == (Assumptions(True) if aligned else NOTHING_ASSUMED)
        images = [image for image in artifact.images if image.assumptions == assumed]
        assert len(images) == len(artifact.source.passes) and all(i.image[:4] == b"\x7fELF" for i in images)


def test_a_job_whose_waves_are_compiled_side_by_side(tmp_path: Any) -> None:
    """As while a script waits on a machine with many cores."""
    with Store.open(tmp_path / "store.sqlite3") as store:
        made: list[TritonCompiler] = []

        def make() -> TritonCompiler:
            made.append(TritonCompiler(store.kernels.get_triton_files, store.kernels.put_triton_files))
            return made[-1]

        pool = CompilerPool(make, 2)
        worker = WorkerProcess(memory_bytes=2 << 30, timeout_seconds=120.0, main=Main("tests.tuner.artifact_worker"))
        backend = TritonBackend(H200, pool.compile)
        provider = BenchmarkProvider(backend, worker, compilers=lambda: pool.count, stored=store.kernels.get)
        try:
            form = CASES["add_bias_gelu"].form()
            # So many calls that further waves pay.
            asked = replace(asked_for(form, (5, 6), H200), calls=10**10)
            bench = Timed(provider.bench(asked.key.fusion_id, form, 0, asked.bucket), (9e-6, 3e-6), (5e-6, 2e-6))
            limits = replace(LIMITS, trials=6, job_seconds=300.0)
            outcome = Job(asked, bench, limits, ()).run()  # type: ignore[arg-type]
        finally:
            worker.kill()
            pool.close()
    assert first(outcome).reason == "won", (first(outcome).reason, first(outcome).detail)
    tried = [m for m in outcome.measurements if m.candidate.variant != "eager"]
    assert len(tried) >= 6 and {m.status for m in tried} <= {"ok", "pruned"}
    assert [compiler.generation for compiler in made] == [1, 1], "expected both processes to live through all waves"


# ---- what decides -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "host", "reason"),
    [
        ((100e-6, 50e-6), (20e-6, 5e-6), "won"),  # the device's time decides
        ((100e-6, 120e-6), (20e-6, 5e-6), "no_gain"),
        ((5e-6, 5e-6), (40e-6, 6e-6), "won"),  # launch-bound: fewer launches
        ((5e-6, 8e-6), (40e-6, 10e-6), "device_slower"),  # but not at the device's cost
        ((5e-6, 4e-6), (40e-6, 40e-6), "below_margin"),
    ],
)
def test_host_and_device_time_decide_together(
    interpreter: BenchmarkProvider, device: Any, host: Any, reason: str
) -> None:
    assert first(tune(interpreter, chain_form(3, 8), (4,), device, host)).reason == reason


class Unequal(Timed):
    """Launch-bound, with candidates that the host takes equally long for and the device does not."""

    device_us = (4.0, 8.0, 3.0, 9.0)  # of the candidates in the order in which they first race; eager's are 5

    def race(self, built: Sequence[Built], values: Sequence[int], rules: RaceRules) -> RaceResult:
        known = self.__dict__.setdefault("known", {})
        for item in built:
            known.setdefault(item.digest, self.device_us[len(known) % 4])
        rounds = rules.rounds + 10
        device = [[us * 1e-6] * rounds for us in (5.0, *(known[item.digest] for item in built))]
        # The slower the device, the faster the host by a hair: noise.
        host = [[40e-6] * rounds, *([10e-6 - known[item.digest] * 1e-9] * rounds for item in built)]
        cost = [[max(d, h) for d, h in zip(*pair, strict=True)] for pair in zip(device, host, strict=True)]
        return RaceResult(cost, [False] * len(cost), 0, device, host)


def test_among_kernels_that_are_launched_alike_the_devices_time_decides(interpreter: BenchmarkProvider) -> None:
    form = CASES["add_bias_gelu"].form()
    asked = asked_for(form, (5, 6), "interpreter:test")
    bench = Unequal(interpreter.bench(asked.key.fusion_id, form, 0, asked.bucket), (0, 0), (0, 0))
    outcome = Job(asked, bench, replace(LIMITS, trials=4)).run()  # type: ignore[arg-type]
    assert len(bench.__dict__["known"]) >= 3, "expected several binaries to choose from"
    won = next(m for m in outcome.measurements if m.candidate == first(outcome).candidate)
    assert first(outcome).reason == "won" and won.host_us == pytest.approx(10.0 - 0.003)  # that of 3 us


class Crowded(Timed):
    """A GPU whose memory is enough for one candidate at a time."""

    def race(self, built: Sequence[Built], values: Sequence[int], rules: RaceRules) -> RaceResult:
        if len(built) > 1:
            raise Refused("out_of_memory", "OutOfMemoryError: CUDA out of memory.")
        return super().race(built, values, rules)


def test_candidates_that_do_not_fit_into_memory_together_race_one_by_one(interpreter: BenchmarkProvider) -> None:
    form = CASES["add_bias_gelu"].form()
    asked = asked_for(form, (5, 6), "interpreter:test")
    bench = Crowded(interpreter.bench(asked.key.fusion_id, form, 0, asked.bucket), (9e-6, 3e-6), (5e-6, 2e-6))
    outcome = Job(asked, bench, replace(LIMITS, trials=4)).run()  # type: ignore[arg-type]
    assert first(outcome).reason == "won" and {m.status for m in outcome.measurements} == {"ok"}


# ---- timing by events -------------------------------------------------------------------------------------


@dataclass
class FakeDevice:
    """A device that works its queue off behind the host; both have clocks."""

    host: float = 0.0
    busy_until: float = 0.0
    cleared: int = 0
    synchronised: int = 0
    spins: list[float] = field(default_factory=list)

    def enqueue(self, seconds: float) -> None:
        self.busy_until = max(self.busy_until, self.host) + seconds

    def calls(self) -> DeviceCalls:
        device = self

        class Event:
            at = 0.0

            def record(self) -> None:
                device.host += 1e-7
                self.at = max(device.busy_until, device.host)

            def elapsed_time(self, later: Event) -> float:
                return (later.at - self.at) * 1e3

        def synchronize() -> None:
            device.synchronised += 1
            device.host = max(device.host, device.busy_until)

        def clear() -> None:
            device.cleared += 1
            device.enqueue(10e-6)

        def spin(seconds: float) -> None:
            device.spins.append(seconds)
            device.enqueue(seconds)

        return DeviceCalls(Event, synchronize, clear, spin, lambda: device.host)

    def kernels(self, count: int, each: float, launch: float) -> Callable[[], None]:
        def call() -> None:
            for _ in range(count):
                self.host += launch
                self.enqueue(each)

        return call


def test_events_give_the_devices_time_without_the_hosts_gaps() -> None:
    fake = FakeDevice()
    sampler = GpuSampler(fake.calls())
    eager, ours = fake.kernels(10, 1e-6, 8e-6), fake.kernels(1, 4e-6, 5e-6)
    result = race([eager, ours], RaceRules(5, 5, 1e9, 0.03), lambda: fake.host, sampler)
    assert sampler.is_launch_bound
    assert result.device[0] == pytest.approx([10e-6] * 5, rel=0.02)  # not 80 us, which is the host's
    assert result.host[0] == pytest.approx([80e-6] * 5) and result.host[1] == pytest.approx([5e-6] * 5)
    assert result.samples[0] == pytest.approx([80e-6] * 5) and result.samples[1] == pytest.approx([5e-6] * 5)
    assert fake.cleared >= 10 and min(fake.spins) > 10e-6


def test_a_busy_device_is_judged_by_its_own_time() -> None:
    fake = FakeDevice()
    sampler = GpuSampler(fake.calls())
    calls = [fake.kernels(2, 50e-6, 8e-6), fake.kernels(1, 40e-6, 5e-6)]
    result = race(calls, RaceRules(4, 4, 1e9, 0.03), lambda: fake.host, sampler)
    assert not sampler.is_launch_bound and result.samples == result.device
    assert result.samples[1] == pytest.approx([40e-6] * 4, rel=0.02)
    warm_up = 2 * 2 + 1
    assert fake.synchronised == warm_up + 4  # once a round


# ---- what GPUs do to workers ------------------------------------------------------------------------------


def broken(how: str) -> WorkerProcess:
    return WorkerProcess(memory_bytes=2 << 30, timeout_seconds=60.0, main=Main("tests.tuner.broken_gpu_worker", (how,)))


def ask_to_race(worker: WorkerProcess) -> None:
    form = chain_form(2, 4)
    worker.ask("open", node="n", form=form.to_json(), threads=0)
    rules = {"rounds": 3, "max_rounds": 3, "budget_seconds": 1.0, "margin": 0.03}
    worker.ask("race", digests=[], values=[3], rules=rules)


@pytest.mark.parametrize(("how", "words"), [("sticky", "illegal memory access"), ("without a name", "unknown error")])
def test_a_broken_context_ends_the_process_and_the_next_request_finds_a_new_one(how: str, words: str) -> None:
    worker = broken(how)
    try:
        for generation in (1, 2):
            with pytest.raises(Lost, match=words) as lost:
                ask_to_race(worker)
            assert lost.value.status == "crash" and worker.generation == generation and worker.pid is None
    finally:
        worker.kill()


@pytest.mark.parametrize(("how", "words"), [("absent", "expected a device H200"), ("dies", "exit code 3")])
def test_a_worker_that_cannot_begin_is_no_fault_of_a_kernel(how: str, words: str) -> None:
    worker = broken(how)
    provider = BenchmarkProvider(InterpreterBackend(), worker)
    form = chain_form(3, 8)
    asked = asked_for(form, (4,), "interpreter:test")
    with pytest.raises(NotReady, match=words):
        Job(asked, provider.bench(asked.key.fusion_id, form, 0, asked.bucket), replace(LIMITS, trials=1)).run()
    assert provider.lethal == set() and worker.pid is None


class Unusable(InterpreterBackend):
    """A GPU that is hidden or full."""

    worker_module = "tests.tuner.broken_gpu_worker"
    worker_arguments = ("absent",)


def test_a_device_that_cannot_be_used_just_now_is_tried_again_by_the_next_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = load({"run.store": tmp_path / "store.sqlite3", "run.profile": "quick"}, environ={}, cwd=tmp_path)
    asked = [asked_for(chain_form(3, 8), (size,), "interpreter:test") for size in (4, 16)]
    starts: list[int] = []
    monkeypatch.setattr(devices, "InterpreterBackend", Unusable)
    monkeypatch.setattr(devices, "as_seen_by", lambda pid, variables: starts.append(1) or dict(variables))
    with Store.open(settings.run.store) as store:
        store.queue.add(asked)
        assert sum(control.drain(settings)[:2]) == 2
        rows = store.queue.requests()
        assert {r.status for r in rows} == {"failed"}  # at once: a script that waits goes on
        assert all(r.message.startswith(NOT_READY) and "expected a device H200" in r.message for r in rows)
        assert len(starts) <= 2  # started ahead and for the first; the second is not tried
        assert store.results.history(asked[0].key.fusion_id) == [] == store.results.measurements(asked[0].key.fusion_id)
        monkeypatch.undo()
        assert sum(control.drain(settings)[:2]) == 2
        assert {(r.status, r.message) for r in store.queue.requests()} == {("done", "")}


def test_a_worker_sees_the_devices_of_the_script_that_asks() -> None:
    ours = {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "0"}
    theirs = {"CUDA_VISIBLE_DEVICES": "3", "PATH": "/usr/bin:/bin", "X": "y"}
    command = ["sh", "-c", "echo ready; read line"]
    script = subprocess.Popen(command, env=theirs, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        # Until exec has ended, which Popen does not wait for, Linux shows an empty environment.
        assert script.stdout is not None and script.stdout.readline() == b"ready\n"
        assert as_seen_by(script.pid, ours) == {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "3"}
    finally:
        script.kill()
        script.communicate()
    assert as_seen_by(script.pid, ours) == ours == as_seen_by(None, ours)


def test_the_first_visible_device_of_the_model_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    models = [DeviceInfo("cuda", name, 108, "sm_80", 80 << 30) for name in ("A100", "L40", "L40")]
    monkeypatch.setattr(gpu_rig, "device_count", lambda: len(models))
    monkeypatch.setattr(gpu_rig, "gpu_device", models.__getitem__)
    assert [gpu_rig.find_device(model.key) for model in models] == [0, 1, 1]
    with pytest.raises(RuntimeError, match=r"expected a device .*H200.*, found .*A100.*L40"):
        gpu_rig.find_device(H200)


def test_a_device_without_bfloat16_refuses_kernels_that_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    old = object.__new__(gpu_rig.GpuRunner)
    old.device, old.has_bf16 = torch.device("cuda", 0), False
    monkeypatch.setattr(gpu_rig, "load_artifact", lambda artifact, index, digest: (index, digest))
    for dtype, is_fine in ((torch.float32, True), (torch.bfloat16, False)):
        kernel = lower(CASES["add_bias_gelu"].form(dtype))
        values = {"s0": 32, "s1": 48}
        source = print_triton(kernel, default_config(triton_knobs(kernel, values, values)))
        binary = compiled(0, [])(source, "cuda:75", (NOTHING_ASSUMED,)).pack()
        if is_fine:
            assert old.load("digest", source.name, binary) == (0, "digest")
        else:
            with pytest.raises(ValueError, match="expected a device with bfloat16"):
                old.load("digest", source.name, binary)


@pytest.mark.parametrize(
    ("how", "status"), [("memory", "out_of_memory"), ("driver's memory", "out_of_memory"), ("mild", "refused")]
)
def test_other_errors_are_outcomes_of_a_living_worker(how: str, status: str) -> None:
    worker = broken(how)
    try:
        with pytest.raises(Refused) as refused:
            ask_to_race(worker)
        assert refused.value.status == status and worker.pid is not None
    finally:
        worker.kill()


# ---- what is built ----------------------------------------------------------------------------------------


def compiled(spill_bytes: int, made: list[tuple[Assumptions, ...]]) -> Callable[..., Artifact]:
    def compile_source(
        source: TritonSource, target: str, assumptions: Sequence[Assumptions], reads_code: bool = False
    ) -> Artifact:
        made.append(tuple(assumptions))
        resources = Resources(64, spill_bytes, 0, 128)
        images = [
            Image(n, p.function, a, 128, 0, resources, b"\x7fELF")
            for n, p in enumerate(source.passes)
            for a in assumptions
        ]
        return Artifact(source, target, tuple(images))

    return compile_source


def test_what_spills_is_never_timed() -> None:
    form = CASES["softmax"].form()
    idle = WorkerProcess(memory_bytes=1 << 30, timeout_seconds=10.0)
    asked = asked_for(form, (4, 5, 6), H200)
    provider = BenchmarkProvider(TritonBackend(H200, compiled(8, [])), idle)
    outcome = Job(asked, provider.bench(asked.key.fusion_id, form, 0, asked.bucket), LIMITS).run()
    assert first(outcome).reason == "does_not_fit" and "spill" in first(outcome).detail
    assert {m.status for m in outcome.measurements} == {"pruned"} and idle.pid is None


def test_a_candidate_is_built_for_the_sizes_at_hand_and_a_winner_for_all() -> None:
    made: list[tuple[Assumptions, ...]] = []
    backend = TritonBackend(H200, compiled(0, made))
    form = CASES["add_bias_gelu"].form()
    values = {"s0": 32, "s1": 48}
    config = default_config(backend.knobs(form, LOOP, values, values))
    first_try = backend.recipe(form, LOOP, config, {}, [values, {"s0": 17, "s1": 48}], is_final=False)
    final = backend.recipe(form, LOOP, config, {}, [values], is_final=True)
    assert made == [] and first_try.key != final.key  # nothing is compiled to know a key
    assert set(final.make().resources) >= {"registers"}
    first_try.make()
    whole, part = Assumptions(True, ("s0", "s1")), Assumptions(True, ("s1",))
    assert set(made[0]) == {whole, Assumptions(True), NOTHING_ASSUMED} and set(made[1]) == {whole, part}


def test_keys_tell_the_architecture() -> None:
    assert isa_of(H200) == "sm_90" and isa_of("cuda:AMD Instinct MI300X:304:gfx942:192GiB") == "gfx942"
    with pytest.raises(CompilerError, match="sm_90"):
        isa_of("cuda:something")


def test_inputs_and_reference_stay_on_the_device() -> None:
    """Where a node's inputs are, its eager answer is made; strides are those of the node."""
    from autofuse.codegen.inputs import make_inputs
    from autofuse.codegen.reference import run_unfused

    form = CASES["aranges"].form()
    values = dict.fromkeys(form.symbols, 4)
    inputs = make_inputs(form, values, device=torch.device("meta"))
    assert all(t.device.type == "meta" for t in inputs)
    if inputs:
        assert all(t.device.type == "meta" for t in run_unfused(form, inputs, values))
