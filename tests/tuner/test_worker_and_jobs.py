"""Real kernels in a real worker: verified, raced, killed; what a job decides and why."""

import os
import signal
from dataclasses import replace

import pytest
import torch

from autofuse.codegen.build import compile_key, compile_source, find_toolchain, flags_for
from autofuse.codegen.generator import CODEGEN_VERSION
from autofuse.ir.operation import NodeForm, NodeInput, Operation, TensorSpec, ValueRef
from autofuse.ir.records import Bucket, DecisionKey, ObservedShape, TuneRequest
from autofuse.ir.shape import SymbolicShape
from autofuse.tuner.buckets import bucket_of
from autofuse.tuner.job import Job, JobLimits, KernelMaker
from autofuse.tuner.verify import Wrong, verify
from autofuse.tuner.worker import CandidateError, Worker, WorkerLost

LIMITS = JobLimits(trials=4, rounds=9, margin=0.03, job_seconds=20.0, compile_timeout_seconds=60.0)


def spec(*dims, dtype="float32"):
    shape = SymbolicShape(dims)
    strides, step = [], 1
    for dim in reversed(shape.dims):
        strides.insert(0, step)
        step = step * dim
    return TensorSpec(shape, dtype, SymbolicShape(strides))


def chain_form():
    """A long element-wise chain: fusing it wins by far on any machine."""
    full = spec("s0", 512)
    ops = []
    last = "i0"
    for i in range(8):
        target = ("aten.mul.Tensor", "aten.add.Tensor")[i % 2]
        ops.append(Operation(f"v{i}", target, (ValueRef(last), ValueRef("i1")), (), (full,)))
        last = f"v{i}"
    return NodeForm((NodeInput("i0", full), NodeInput("i1", full)), tuple(ops), (ValueRef(last),), ("s0",))


def request(form, values, calls=5, device="cpu:test"):
    key = DecisionKey("f" * 16, bucket_of(values).label, device, torch.get_num_threads(), f"torch x, {CODEGEN_VERSION}")
    return TuneRequest(key, form.to_json(), bucket_of(values), (ObservedShape(values, calls),), calls, 50.0, 2.0)


@pytest.fixture
def worker():
    found = Worker(memory_bytes=2 << 30, timeout_seconds=60.0, nice=0)
    yield found
    found.kill()


@pytest.fixture(scope="module")
def toolchain():
    return find_toolchain()


def test_a_job_finds_a_verified_winner(worker, toolchain):
    outcome = Job(request(chain_form(), (700,)), KernelMaker(toolchain), worker, LIMITS).run()
    (decision,) = outcome.decisions
    assert decision.reason == "won" and decision.candidate.variant == "c_generic"
    assert decision.speedup_low > 1.0 and decision.speedup >= 1.03
    assert decision.compile_key in [k.key.digest for k in outcome.kernels]
    assert all(m.status == "ok" and m.error_ratio is not None for m in outcome.measurements)


def test_a_dominant_shape_may_get_a_kernel_of_its_own(worker, toolchain):
    outcome = Job(request(chain_form(), (700,), calls=500), KernelMaker(toolchain), worker, LIMITS).run()
    tried = [m for m in outcome.measurements if m.candidate.variant == "c_specialised"]
    assert len(tried) == 1 and tried[0].status == "ok" and tried[0].symbol_values == (700,)
    exact = [d for d in outcome.decisions if d.bucket == Bucket(((700, 700),))]
    assert len(exact) <= 1  # it wins only where it is faster than the generic winner, too


class Saboteur(KernelMaker):
    """Compiles something else than it was asked to."""

    def __init__(self, toolchain, body):
        super().__init__(toolchain)
        self.body = body

    def make(self, loop, config, constants, timeout):
        record = super().make(loop, config, constants, timeout)
        text = f"""#include <stdint.h>
/* {config} */
__attribute__((visibility("default"))) void *af_entry(void *self, void *const *args, long n) {{ {self.body} extern void *PyLong_FromLong(long);
return PyLong_FromLong(0); }}
__attribute__((visibility("default"))) void af_call(const int64_t *sizes, void **p) {{}}
"""
        flags = flags_for(self._toolchain, config)
        key = compile_key(text, self._toolchain, flags)
        return replace(record, key=key, source=text, binary=compile_source(text, self._toolchain, flags, timeout))


@pytest.mark.parametrize(
    ("body", "reason", "status"),
    [
        ("*(volatile int *)0 = 1;", "crashed", "crash"),
        ("", "all_wrong", "wrong"),
        ("for (;;) { __asm__ volatile(\"\"); }", "timeout", "timeout"),
    ],
    ids=["segfault", "writes nothing", "hangs"],
)
def test_bad_kernels_are_recorded_and_eager_stays(toolchain, body, reason, status):
    bad = Worker(memory_bytes=2 << 30, timeout_seconds=8.0, nice=0)
    limits = replace(LIMITS, trials=1)
    try:
        lethal = set()
        outcome = Job(request(chain_form(), (64,)), Saboteur(toolchain, body), bad, limits, lethal=lethal).run()
        (decision,) = outcome.decisions
        assert decision.candidate.variant == "eager" and decision.reason == reason and decision.compile_key is None
        assert [m.status for m in outcome.measurements] == [status] and not outcome.kernels
        assert bool(lethal) == (status != "wrong")
        # The next job finds a new worker.
        good = Job(request(chain_form(), (64,)), KernelMaker(toolchain), bad, LIMITS).run()
        assert good.decisions[0].reason in ("won", "below_margin")
    finally:
        bad.kill()


def test_a_node_without_loop_form_is_refused_with_its_code(worker, toolchain):
    full = spec("s0", 8)
    op = Operation("v0", "aten.mm.default", (ValueRef("i0"), ValueRef("i0")), (), (full,))
    form = NodeForm((NodeInput("i0", full),), (op,), (ValueRef("v0"),), ("s0",))
    outcome = Job(request(form, (8,)), KernelMaker(toolchain), worker, LIMITS).run()
    assert outcome.decisions[0].reason.startswith("refused:") and worker.pid is None


def test_lack_of_memory_is_an_outcome_not_an_end(toolchain):
    small = Worker(memory_bytes=64 << 20, timeout_seconds=60.0, nice=0)
    try:
        values = (200_000,)  # 400 MB a tensor
        outcome = Job(request(chain_form(), values), KernelMaker(toolchain), small, replace(LIMITS, trials=1)).run()
        assert outcome.decisions[0].candidate.variant == "eager"
        assert outcome.decisions[0].reason in ("out_of_memory", "crashed")
    finally:
        small.kill()


def test_worker_survives_errors_and_ends_with_its_parent(worker):
    with pytest.raises(CandidateError) as error:
        worker.ask("check", "nobody", "d", "n", b"", [])
    assert error.value.status == "refused"
    pid = worker.pid
    with pytest.raises(WorkerLost, match="no answer") as lost:
        worker.ask("sleep", 30.0, timeout_seconds=0.5)
    assert lost.value.status == "timeout" and worker.pid is None
    worker.ask("sleep", 0.0)
    assert worker.pid not in (None, pid)
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(WorkerLost, match="SIGKILL"):
        worker.ask("sleep", 0.0)
        worker.ask("sleep", 0.0)


def verify_with(form, values, candidate):
    torch.manual_seed(0)
    inputs = [torch.randn(*i.spec.shape.bind(dict(zip(form.symbols, values, strict=True)))) for i in form.inputs]

    def make_call(allocate):
        def call(*tensors):
            out = allocate((values[0], 512), (512, 1), torch.float32)
            candidate(tensors, out)
            return out

        return call

    return verify(form, make_call, inputs, values)


def chain(x, y):
    for i in range(8):
        x = x * y if i % 2 == 0 else x + y
    return x


def test_verification_passes_eager_itself_and_catches_faults():
    form = chain_form()
    assert verify_with(form, (33,), lambda t, out: out.copy_(chain(*t))) <= 1.0
    with pytest.raises(Wrong, match="error"):
        verify_with(form, (33,), lambda t, out: out.copy_(chain(*t) * (1 + 1e-4)))
    with pytest.raises(Wrong, match="NaN"):  # forgets the last row: the poison shows
        verify_with(form, (33,), lambda t, out: out[:-1].copy_(chain(*t)[:-1]))
    with pytest.raises(Wrong, match="changed input"):
        verify_with(form, (33,), lambda t, out: (out.copy_(chain(*t)), t[1].zero_()))

    def overrun(tensors, out):
        out.copy_(chain(*tensors))
        torch.as_strided(out, (33 * 512 + 8,), (1,)).fill_(0.0)
        out.copy_(chain(*tensors))

    with pytest.raises((Wrong, RuntimeError)):
        verify_with(form, (33,), overrun)
