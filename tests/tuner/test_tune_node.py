"""Jobs on real kernels in a real worker: winners are verified, and whatever a bad kernel does is an outcome."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import psutil
import pytest

from autofuse.codegen.c.build import find_toolchain
from autofuse.codegen.c.printer import print_c
from autofuse.codegen.c.templates import loop
from autofuse.codegen.knobs import Knob
from autofuse.daemon.workers.cpu import OPEN_NODES
from autofuse.ir.records import Bucket, Candidate, Decision
from autofuse.tuner.backends import CBackend
from autofuse.tuner.benchmark_provider import BenchmarkProvider, Built
from autofuse.tuner.cases import CheckCase
from autofuse.tuner.outcome import JobLimits, Outcome
from autofuse.tuner.timing import RaceResult
from autofuse.tuner.tune_node import Job
from autofuse.tuner.worker_process import Lost, Refused, WorkerProcess
from tests.tuner.nodes import chain_form, matmul_form, request
from tests.tuner.replay import RecordedBench

LIMITS = JobLimits(trials=4, rounds=9, margin=0.03, job_seconds=8.0)
FORM = chain_form()
SMALL = (24,)  # few enough elements for one thread, so that a busy machine does not matter


@pytest.fixture(scope="module")
def provider() -> Iterator[BenchmarkProvider]:
    worker = WorkerProcess(memory_bytes=2 << 30, timeout_seconds=60.0)
    yield BenchmarkProvider(CBackend(find_toolchain()), worker, compilers=lambda: 2)
    worker.kill()


def tune(provider: BenchmarkProvider, values: tuple[int, ...], limits: JobLimits = LIMITS, calls: int = 5) -> Outcome:
    asked = request(FORM, values, calls=calls)
    return Job(asked, provider.bench(asked.key.fusion_id, FORM, asked.key.threads, asked.bucket), limits).run()


def only(outcome: Outcome) -> Decision:
    assert len(outcome.decisions) == 1
    return outcome.decisions[0]


def test_a_job_finds_a_winner_and_keeps_its_kernel(provider: BenchmarkProvider) -> None:
    outcome = tune(provider, (700,))
    decision = only(outcome)
    assert decision.reason == "won" and decision.candidate.variant == "c_generic"
    assert decision.speedup >= 1.03 and decision.speedup_low > 1.0 and decision.trials >= 1
    assert decision.compile_key in [kernel.key.digest for kernel in outcome.kernels]
    assert all(m.status in ("ok", "pruned") and m.error_ratio is not None for m in outcome.measurements)


def test_the_next_bucket_compiles_nothing(provider: BenchmarkProvider) -> None:
    tune(provider, (700,))
    outcome = tune(provider, (300,))
    only(outcome)  # which one it is depends on what else the machine does
    assert outcome.measurements and all(m.compile_seconds == 0.0 for m in outcome.measurements)


class OneThread(RecordedBench):
    """A bench whose races have one thread, since others use the cores."""

    def race(self, *arguments: Any) -> RaceResult:
        return replace(super().race(*arguments), threads=1)


@pytest.mark.parametrize(("threads", "raced"), [(2, 1), (1, 0)])
@pytest.mark.parametrize("us", [20.0, 80.0])
def test_a_decision_says_that_others_used_the_cores(threads: int, raced: int, us: float) -> None:
    bench = OneThread([Knob("a", (1,), 1, "")], {(("a", 1),): us}, 40.0)
    decision = only(Job(request(FORM, SMALL, threads=threads), bench, LIMITS, clock=bench.clock).run())
    assert decision.reason == ("won" if us < 40 else "no_gain") and decision.raced_threads == raced
    assert ("on one thread, for the machine was busy" in decision.detail) == bool(raced and us < 40)


def test_winners_of_other_buckets_make_the_first_wave() -> None:
    knobs = [Knob("a", (1, 2, 4), 1, ""), Knob("b", (1, 2), 1, "")]
    times = {(("a", a), ("b", b)): 20.0 for a in (1, 2, 4) for b in (1, 2)}
    known = (("a", 4), ("b", 1))
    first, next_one = (RecordedBench(knobs, times | {known: 10.0}, 40.0) for _ in range(2))
    limits = replace(LIMITS, trials=6)
    Job(request(FORM, SMALL), first, limits, clock=first.clock).run()
    assert len({*first.built}) > 2, "where nothing is known, a wave of changes to the default"
    found = Job(request(FORM, SMALL), next_one, limits, [known], next_one.clock).run()
    assert only(found).candidate.config == known and {*next_one.built} == {known, next_one.default(())}


def test_a_dominant_shape_may_get_a_kernel_of_its_own(provider: BenchmarkProvider) -> None:
    for _ in range(3):  # beside other work the generic kernel may not win, and then nothing is to be beaten
        outcome = tune(provider, (700,), calls=500)
        if any(decision.reason == "won" for decision in outcome.decisions):
            break
    tried = [m for m in outcome.measurements if m.candidate.variant == "c_specialised"]
    assert len(tried) == 1 and tried[0].symbol_values == (700,) and tried[0].status in ("ok", "pruned")
    exact = [d for d in outcome.decisions if d.bucket == Bucket(((700, 700),))]
    assert len(exact) <= 1  # it wins only where it is faster than the generic winner, too
    assert all(d.key.bucket == d.bucket.label for d in outcome.decisions)


def test_a_node_without_loop_form_is_refused_without_a_worker() -> None:
    idle = WorkerProcess(memory_bytes=1 << 30, timeout_seconds=10.0)
    asked = request(matmul_form(), (8,))
    bench = BenchmarkProvider(CBackend(find_toolchain()), idle).bench(
        asked.key.fusion_id, matmul_form(), 2, asked.bucket
    )
    decision = only(Job(asked, bench, LIMITS).run())
    assert decision.reason.startswith("refused:") and decision.detail and idle.pid is None


def test_nothing_is_made_for_no_elements_or_for_too_many() -> None:
    bench = RecordedBench((), {}, 1.0)
    assert only(Job(request(FORM, (0,)), bench, LIMITS).run()).reason == "too_small"
    assert only(Job(request(FORM, (10**7,)), bench, LIMITS).run()).reason == "out_of_memory"


def test_a_node_that_the_worker_forgot_over_many_others_is_opened_again(provider: BenchmarkProvider) -> None:
    asked = request(FORM, SMALL)
    bench = provider.bench("forgotten", FORM, 1, asked.bucket)
    (built,) = bench.build([Candidate("c_generic", bench.default(SMALL))], SMALL)
    assert isinstance(built, Built)
    case = [CheckCase((3,), "normal")]
    found = bench.check(built, case, 1.0, 1)
    for number in range(OPEN_NODES):
        provider.bench(f"other {number}", FORM, 1, asked.bucket).check(built, case, 1.0, 1)
    assert bench.check(built, case, 1.0, 1) == found


# ---- bad kernels ----------------------------------------------------------------------------------------

BAD = {
    # name: (C that runs before the kernel itself, or in place of it where it returns; reason; status)
    "segfault": ("*(volatile int *)0 = 1;", "crashed", "crash"),
    "hangs": ("for (;;) __asm__ volatile(\"\");", "timeout", "timeout"),
    "writes nothing": ("return 0;", "all_wrong", "wrong"),
    "writes outside": ("((float *)ptrs[2])[512 * sizes[0]] = 1.0f;", "all_wrong", "wrong"),
    "changes an input": ("((float *)ptrs[0])[3] += 1.0f;", "all_wrong", "wrong"),
    "no memory": ("if (!__builtin_malloc(64L << 30)) return -1;", "out_of_memory", "out_of_memory"),
    "no C": ("this is not C", "compile_failed", "compile_error"),
    # Right at the size that is timed, and at every even one: only other sizes of the bucket show it.
    "forgets odd tails": ("if (sizes[0] & 1) return 0;", "all_wrong", "wrong"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_bad_kernels_do_is_recorded_and_eager_stays(
    name: str, provider: BenchmarkProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    body, reason, status = BAD[name]

    def print_bad(*arguments: Any) -> Any:
        source = print_c(*arguments)
        bad = f"static int bad(const int64_t *sizes, void **ptrs) {{ {body} return 1; }}\n"
        text, count = re.subn(
            r"const int failed = (\w+\(sizes, ptrs\));",
            r"int failed = bad(sizes, ptrs); if (failed == 1) failed = \1;",
            source.text,
        )
        entry = "AF_EXPORT PyObject* af_entry("
        assert count == text.count(entry) == 1
        return replace(source, text=text.replace(entry, bad + entry))

    monkeypatch.setattr(loop, "print_c", print_bad)
    monkeypatch.setattr(provider.worker, "timeout_seconds", 3.0 if reason == "timeout" else 60.0)
    outcome = tune(provider, SMALL, replace(LIMITS, trials=1))
    decision = only(outcome)
    assert (decision.reason, decision.candidate.variant, decision.compile_key) == (reason, "eager", None)
    failures = [m for m in outcome.measurements if m.status != "ok"]
    assert [m.status for m in failures] == [status] and failures[0].message and not outcome.kernels
    if reason in ("crashed", "timeout"):  # it is not run a second time
        generation = provider.worker.generation
        assert only(tune(provider, SMALL, replace(LIMITS, trials=1))).reason == "crashed"
        assert provider.worker.generation == generation
    monkeypatch.undo()
    # A good one is none the worse for it; whether it wins depends on what else the machine does.
    assert only(tune(provider, SMALL)).reason in ("won", "undecided", "below_margin", "no_gain")


def test_equal_binaries_are_raced_once() -> None:
    times = {(("a", 1),): 50.0, (("a", 2),): 50.0}
    knob = Knob("a", (1, 2), 1, "")

    class OneBinary(RecordedBench):
        raced = 0

        def build(self, candidates: Any, values: Any, others: Any = ()) -> Any:
            first = super().build(candidates[:1], values)[0]
            assert isinstance(first, Built)
            return [replace(first, candidate=c) for c in candidates]

        def race(self, built: Any, values: Any, rules: Any) -> Any:
            self.raced = max(self.raced, len(built))
            return super().race(built, values, rules)

    bench = OneBinary((knob,), times, 100.0)
    outcome = Job(request(FORM, SMALL), bench, LIMITS, (), bench.clock).run()
    assert bench.raced == 1 and only(outcome).reason == "won" and only(outcome).trials == 2


# ---- the worker process ---------------------------------------------------------------------------------


def test_the_worker_survives_errors_and_is_replaced_when_killed(provider: BenchmarkProvider) -> None:
    worker = provider.worker
    with pytest.raises(Refused) as refused:
        worker.ask("load", digest="d", name="n", binary="")
    assert refused.value.status == "refused"
    pid, generation = worker.pid, worker.generation
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(Lost, match="SIGKILL"):
        worker.ask("close")
    with pytest.raises(Refused):
        worker.ask("close")
    assert worker.pid not in (None, pid) and worker.generation == generation + 1


def test_a_silent_worker_is_killed(provider: BenchmarkProvider) -> None:
    with pytest.raises(Refused):
        provider.worker.ask("close")
    pid = provider.worker.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(Lost) as lost:
        provider.worker.ask("close", timeout_seconds=0.3)
    assert lost.value.status == "timeout" and provider.worker.pid is None and not psutil.pid_exists(pid)


def test_the_worker_has_its_starters_priority_and_is_bounded() -> None:
    worker = WorkerProcess(memory_bytes=256 << 20, timeout_seconds=60.0)
    try:
        with pytest.raises(Refused):
            worker.ask("close")
        process = psutil.Process(worker.pid)
        assert process.nice() == os.getpriority(os.PRIO_PROCESS, 0)
        limit = process.rlimit(psutil.RLIMIT_AS)[0]
        assert 0 < limit - process.memory_info().vms <= (256 << 20) + (64 << 20)
    finally:
        began = time.monotonic()
        worker.kill()
        assert time.monotonic() - began < 5.0
