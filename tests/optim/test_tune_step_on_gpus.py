"""Tuning an optimizer's step for a GPU without one: the interpreter checks, the times are given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autofuse.codegen.knobs import Knob
from autofuse.codegen.triton.artifact import Artifact
from autofuse.codegen.triton.source import Assumptions
from autofuse.daemon import control
from autofuse.db.store import Store
from autofuse.ir.records import Bucket, DecisionKey, DeviceInfo, ObservedShape, TuneRequest
from autofuse.optim import tune_step as job_module
from autofuse.optim.form import StepForm
from autofuse.optim.tune_step import TRITON_MULTI, StepTuning
from autofuse.settings.layers import load
from autofuse.tuner.backends import InterpreterBackend, TritonBackend
from autofuse.tuner.outcome import JobLimits, Outcome
from autofuse.tuner.triton_compiler import TritonCompiler
from autofuse.tuner.worker_process import Main, WorkerProcess
from tests.tuner.nodes import versions
from tests.tuner.test_tune_node_on_gpus import compiled

LIMITS = JobLimits(trials=3, rounds=6, margin=0.03, job_seconds=20.0)
H200 = DeviceInfo("cuda", "NVIDIA H200", 132, "sm_90", 140 << 30).key
ONE = (Knob("block", (512,), 512, "of a test"),)
FORM = StepForm("adam", ("decoupled_weight_decay", "weight_decay"), "float32", (600, 7))


@pytest.fixture(scope="module")
def worker() -> Iterator[WorkerProcess]:
    module = InterpreterBackend.worker_module
    started = WorkerProcess(memory_bytes=2 << 30, timeout_seconds=120.0, main=Main(module))
    yield started
    started.kill()


def request(form: StepForm, device: str) -> TuneRequest:
    bucket = Bucket(())
    key = DecisionKey(form.fusion_id, bucket.label, device, 0, versions())
    return TuneRequest(key, form.node(), bucket, (ObservedShape((), 9),), 9, 50.0, 2.0, None)


class Timed:
    """A worker's real checks; times are those of torch, then of every kernel: what decides, and the device's alone."""

    seconds = (9e-6, 3e-6)
    device = (5e-6, 2e-6)

    def __init__(self, worker: WorkerProcess) -> None:
        self.worker = worker

    @property
    def pid(self) -> int | None:
        return self.worker.pid

    def start(self) -> None:
        self.worker.start()

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        if do != "race_steps":
            return self.worker.ask(do, **arguments)

        def samples(times: Sequence[float]) -> list[list[float]]:
            kernels = [bool(candidate["binary"]) for candidate in arguments["candidates"]]
            return [[times[is_kernel]] * 40 for is_kernel in (False, *kernels)]

        raced = samples(self.seconds)
        return {"samples": raced, "dropped": [False] * len(raced), "device": samples(self.device), "threads": 0}


def statuses(outcome: Outcome) -> set[tuple[str, str]]:
    return {(m.candidate.variant, m.status) for m in outcome.measurements}


def test_every_configuration_is_checked_and_the_winner_kept(worker: WorkerProcess) -> None:
    outcome = StepTuning(request(FORM, "interpreter:test"), FORM, InterpreterBackend(), Timed(worker), LIMITS).run()
    (decision,) = outcome.decisions
    assert (decision.reason, decision.candidate.variant) == ("won", TRITON_MULTI)
    assert [kernel.key.digest for kernel in outcome.kernels] == [decision.compile_key]
    assert statuses(outcome) == {(TRITON_MULTI, "ok"), ("foreach", "ok"), ("fused", "ok")}
    assert len([m for m in outcome.measurements if m.candidate.variant == TRITON_MULTI]) == 6


def test_the_devices_own_time_may_not_get_worse(worker: WorkerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_module, "TRITON_KNOBS", ONE)
    monkeypatch.setattr(Timed, "device", (2e-6, 3e-6))
    outcome = StepTuning(request(FORM, "interpreter:test"), FORM, InterpreterBackend(), Timed(worker), LIMITS).run()
    assert outcome.decisions[0].reason == "below_margin" and outcome.kernels == []


def test_a_leader_that_takes_the_device_longer_hides_no_good_candidate(
    worker: WorkerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The race dropped torch's variants as slower than the kernel, which wins by fewer launches alone."""

    class Dropping(Timed):
        def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
            reply = super().ask(do, **arguments)
            if do == "race_steps" and len(arguments["candidates"]) > 1:
                kernels = [bool(candidate["binary"]) for candidate in arguments["candidates"]]
                own = [[6e-6 if us > 4e-6 else us for us in samples] for samples in reply["samples"][1:]]
                on_device = [samples if is_kernel else [1e-6] * 40 for is_kernel, samples in
                             zip(kernels, reply["device"][1:], strict=True)]  # fmt: skip
                reply["samples"][1:], reply["device"][1:] = own, on_device
                reply["dropped"][1:] = [not is_kernel for is_kernel in kernels]
            return reply

    monkeypatch.setattr(job_module, "TRITON_KNOBS", ONE)
    monkeypatch.setattr(Timed, "device", (2e-6, 3e-6))
    outcome = StepTuning(request(FORM, "interpreter:test"), FORM, InterpreterBackend(), Dropping(worker), LIMITS).run()
    assert outcome.decisions[0].reason == "won" and outcome.decisions[0].candidate.variant in ("foreach", "fused")


@pytest.mark.parametrize(("seconds", "reason"), [(11e-6, "no_gain"), (10e-6, "below_margin"), (9.9e-6, "below_margin")])
def test_what_is_slower_for_certain_is_told_from_what_gains_too_little(
    seconds: float, reason: str, worker: WorkerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_module, "TRITON_KNOBS", ONE)
    monkeypatch.setattr(StepForm, "vendors", ())  # they are as fast as what the script asked for
    monkeypatch.setattr(Timed, "seconds", (10e-6, seconds))
    monkeypatch.setattr(Timed, "device", (1e-6, 1e-6))
    outcome = StepTuning(request(FORM, "interpreter:test"), FORM, InterpreterBackend(), Timed(worker), LIMITS).run()
    assert outcome.decisions[0].reason == reason and outcome.kernels == []


def test_from_request_to_stored_artifact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counters are on a GPU for ``fused`` alone, so nothing else of torch's competes; the kernel has two passes."""
    monkeypatch.setattr(job_module, "TRITON_KNOBS", ONE)
    form = StepForm("adam", (), "bfloat16", (600, 7), "fused", "cuda", "device")
    artifacts = WorkerProcess(memory_bytes=2 << 30, timeout_seconds=120.0, main=Main("tests.tuner.artifact_worker"))
    with (
        Store.open(tmp_path / "store.sqlite3") as store,
        TritonCompiler(store.kernels.get_triton_files, store.kernels.put_triton_files) as compiler,
    ):
        try:
            outcome = StepTuning(
                request(form, H200), form, TritonBackend(H200, compiler.compile), Timed(artifacts), LIMITS
            ).run()
        finally:
            artifacts.kill()
        assert statuses(outcome) == {(TRITON_MULTI, "ok")}
        (kernel,) = outcome.kernels
        store.kernels.put(kernel)
        found = store.kernels.get(str(outcome.decisions[0].compile_key))
    assert found is not None and found.key.target == "cuda:90"
    artifact = Artifact.unpack(found.binary)
    assert artifact.assumptions == (Assumptions(True),) and len(artifact.images) == 2
    assert found.resources["registers"] and found.resources["code"]["stores"], "the winner's machine code was read"


def test_what_spills_is_never_timed(worker: WorkerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_module, "TRITON_KNOBS", ONE)
    form = StepForm("adagrad", (), "float32", (600, 7), "fused", "cuda", "device")
    outcome = StepTuning(request(form, H200), form, TritonBackend(H200, compiled(8, [])), Timed(worker), LIMITS).run()
    assert outcome.decisions[0].reason == "no_candidates" and "spill" in outcome.decisions[0].detail
    assert statuses(outcome) == {(TRITON_MULTI, "pruned")}


def test_a_daemon_decides_on_a_step_of_another_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_module, "TRITON_KNOBS", ONE)
    settings = load({"run.store": tmp_path / "store.sqlite3", "run.profile": "quick"}, environ={}, cwd=tmp_path)
    with Store.open(settings.run.store) as store:
        store.queue.add([request(FORM, "interpreter:test")])
        assert sum(control.drain(settings)[:2]) == 1
        assert [(r.status, r.message) for r in store.queue.requests()] == [("done", "")]
        (decision,) = [d for _, d in store.results.decisions("interpreter:test", versions())]
    assert decision.candidate.variant != TRITON_MULTI  # the interpreter is slower than anything


def test_what_is_large_is_tried_on_the_parts_that_fit(worker: WorkerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """The binary does not depend on sizes, so the one that was checked on fewer elements is the one that is kept."""
    monkeypatch.setattr(job_module, "TRITON_KNOBS", ONE)
    monkeypatch.setattr(job_module, "LEAST_ELEMENTS", 100)
    form = StepForm("adam", (), "float32", (600, 7, 90_000))
    asked: list[StepForm] = []

    class Watched(Timed):
        def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
            asked.append(StepForm.from_json(arguments["step"]))
            return super().ask(do, **arguments)

    fits = replace(LIMITS, memory_bytes=16 * job_module.MOST_COPIES * 1000)
    outcome = StepTuning(request(form, "interpreter:test"), form, InterpreterBackend(), Watched(worker), fits).run()
    (decision,) = outcome.decisions
    assert {tried.sizes for tried in asked} == {(496, 7, 496)}
    assert decision.reason == "won" and decision.detail.endswith("on 999 of 90607 elements")
    assert decision.key.fusion_id == form.fusion_id and outcome.kernels[0].name == form.label
    small = replace(LIMITS, memory_bytes=16 * job_module.MOST_COPIES * 200)
    outcome = StepTuning(request(form, "interpreter:test"), form, InterpreterBackend(), Timed(worker), small).run()
    assert outcome.decisions[0].reason == "out_of_memory"


@pytest.mark.parametrize(
    ("sizes", "most", "cut"),
    [
        ((5, 3), 8, (5, 3)),
        ((5, 3), 7, (4, 3)),
        ((9, 0, 1, 9), 9, (4, 0, 1, 4)),
        ((7, 7, 7), 3, (1, 1, 1)),
        ((), 4, ()),
    ],
)
def test_the_largest_tensors_are_cut(sizes: tuple[int, ...], most: int, cut: tuple[int, ...]) -> None:
    assert StepForm("sgd", (), "float32", sizes).cut_to(most).sizes == cut
