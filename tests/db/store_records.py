"""Records to fill stores with, shared by the tests of the store."""

from __future__ import annotations

from autofuse.ir.records import (
    Bucket,
    Candidate,
    CompileKey,
    Decision,
    DecisionKey,
    DeviceInfo,
    KernelRecord,
    Measurement,
    NodeUse,
    ObservedShape,
    RunStart,
    StepSample,
    TuneRequest,
    make_config,
)  # fmt: skip

DEVICE = DeviceInfo("cpu", "Test CPU", 2, "avx512")
VERSIONS = "torch 2.13 codegen 1"
FORM = {
    "inputs": [], "outputs": [], "symbols": ["s0"],
    "operations": [{"target": "aten.add.Tensor"}, {"target": "aten.relu.default"}],
}  # fmt: skip


def start(command: str = "train.py", mode: str = "wait", device: DeviceInfo = DEVICE) -> RunStart:
    return RunStart(command, device, VERSIONS, mode, 4242, {"tune": mode})


def bucket(low: int = 65, high: int = 128) -> Bucket:
    return Bucket(((low, high),))


def key(fusion_id: str = "a" * 64, of: Bucket | None = None, device: DeviceInfo = DEVICE) -> DecisionKey:
    return DecisionKey(fusion_id, (of or bucket()).label, device.key, 2, VERSIONS)


def request(
    fusion_id: str = "a" * 64, calls: int = 100, unfused_us: float = 50.0, speedup: float = 2.0,
    run_id: int | None = None, shapes: tuple[tuple[int, int], ...] = ((128, 100),), of: Bucket | None = None,
) -> TuneRequest:  # fmt: skip
    observed = tuple(ObservedShape((size,), count) for size, count in shapes)
    return TuneRequest(key(fusion_id, of), FORM, of or bucket(), observed, calls, unfused_us, speedup, run_id)


def measurement(variant: str = "c_generic", speedup: float = 1.5, **config: int | str | bool) -> Measurement:
    return Measurement(
        Candidate(variant, make_config(config)), "ok", (128,), 20.0, 20.0 * speedup, speedup, speedup - 0.1,
        speedup + 0.1, 0.9, "c0ffee", 0.1, 0.5,
    )  # fmt: skip


def decision(fusion_id: str = "a" * 64, speedup: float = 1.5, of: Bucket | None = None) -> Decision:
    return Decision(
        key(fusion_id, of), of or bucket(), Candidate("c_generic", make_config({"unroll": 4})), "c0ffee", 30.0,
        30.0 / speedup, speedup, speedup - 0.1, speedup + 0.1, "won", "", 12, 3.5,
    )  # fmt: skip


def kernel(source: str = "void af_add_relu(void) {}", binary: bytes = b"\x7fELF" + bytes(60)) -> KernelRecord:
    return KernelRecord(CompileKey(source, "gcc 12", "-O3", "avx512"), "af_pointwise_add_relu", source, binary)


RESOURCES = {"registers": 28, "spill_bytes": 0, "shared_bytes": 128, "threads": 64}
TRITON_FILES = {"af_softmax.cubin": b"\x7fELF" + bytes(40), "af_softmax.json": b"{}"}


def gpu_kernel(source: str = "def af_softmax(): ...", binary: bytes = b"autofuse-triton-1\n") -> KernelRecord:
    key = CompileKey(source, "triton 3.7.1", "{}", "cuda:90")
    return KernelRecord(key, "af_softmax", source, binary, RESOURCES)


def use(
    fusion_id: str = "a" * 64, calls: int = 10, fused_calls: int = 4, share: float = 0.25, of: Bucket | None = None
) -> NodeUse:
    return NodeUse(
        fusion_id, FORM, f"af_pointwise_add_relu_{fusion_id[:6]}", "add + relu", of or bucket(), calls, fused_calls,
        31.5, share, (ObservedShape((128,), calls),), "train.py:7 x = relu(x + y)",
    )  # fmt: skip


def steps(count: int, first: int = 0, root: str = "Model", held_out: bool = False) -> list[StepSample]:
    return [StepSample(root, "(4, 128)", held_out, 0 if held_out else 3, first + i, 100.0 + i) for i in range(count)]
