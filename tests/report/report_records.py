"""A run as the store of a real one looks, shared by the tests of the reports."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from autofuse.db.rows import SettingTrial
from autofuse.db.store import Store
from autofuse.ir.records import (
    EAGER,
    Bucket,
    Candidate,
    CompileKey,
    Decision,
    DecisionKey,
    DeviceInfo,
    Event,
    KernelRecord,
    Measurement,
    NodeUse,
    ObservedShape,
    Refusal,
    RootRecord,
    RunStart,
    RunTotals,
    StepSample,
    TuneRequest,
    make_config,
)  # fmt: skip

DEVICE = DeviceInfo("cpu", "AMD EPYC 9654 96-Core Processor", 2, "avx512")
VERSIONS = "torch 2.13, codegen 1"
ROOT = "GPT[4x256]"
SIGNATURE = "((torch.Size([8, {0}]), torch.Size([8, {0}])), True, True)"
HOT = Bucket(((8, 8), (129, 256)))
COLD = Bucket(((8, 8), (65, 128)))


def form(*targets: str) -> dict[str, Any]:
    spec = [["s0", "s1", "256"], "float32", ["256*s1", "256", "1"], "cpu"]
    operations = [
        {
            "name": f"v{i}",
            "target": target,
            "args": [{"ref": "i0" if i == 0 else f"v{i - 1}", "index": 0}, {"float": (0.5).hex()}, {"dim": "s1"}],
            "kwargs": {},
            "outputs": [spec],
            "source": "train_lm.py:41 x = x + self.mlp(self.norm(x))",
        }
        for i, target in enumerate(targets)
    ]
    return {
        "inputs": [["i0", spec]],
        "operations": operations,
        "outputs": [[f"v{len(targets) - 1}", 0]],
        "symbols": ["s0", "s1"],
    }


GELU = ("a" * 64, "af_pointwise_add_gelu_mul_a1b2c3", "add + gelu + mul", form("aten.add.Tensor", "aten.gelu.default"))
NORM = ("b" * 64, "af_norm_add_native_layer_norm_d4e5f6", "add + native_layer_norm", form("aten.add.Tensor"))
LOSS = ("c" * 64, "af_loss_log_softmax_nll_loss_forward_070809", "log_softmax + nll_loss_forward", form("aten.sum"))


def key(node: tuple[str, str, str, dict[str, Any]], bucket: Bucket) -> DecisionKey:
    return DecisionKey(node[0], bucket.label, DEVICE.key, 2, VERSIONS)


def use(node: tuple[str, str, str, dict[str, Any]], bucket: Bucket, calls: int, fused: int, share: float) -> NodeUse:
    return NodeUse(
        node[0], node[3], node[1], node[2], bucket, calls, fused, 150.0, share,
        (ObservedShape((8, bucket.ranges[1][1]), calls),), "train_lm.py:41 x = x + self.mlp(self.norm(x))",
    )  # fmt: skip


def decision(
    node: tuple[str, str, str, dict[str, Any]], bucket: Bucket, speedup: float, variant: str = "c_specialised",
    reason: str = "won",
) -> Decision:  # fmt: skip
    unfused_us = 151.25
    candidate = Candidate(variant, make_config({"unroll": 4, "threads": 2}) if variant != EAGER else ())
    return Decision(
        key(node, bucket), bucket, candidate, "c0ffee" if variant != EAGER else None, unfused_us,
        unfused_us / speedup, speedup, speedup - 0.04, speedup + 0.05, reason, "", 24, 6.5,
    )  # fmt: skip


def sample(index: int, step_us: float, held_out: bool = False, size: int = 256, fused_nodes: int = 12) -> StepSample:
    return StepSample(ROOT, SIGNATURE.format(size), held_out, 0 if held_out else fused_nodes, index, step_us)


def real_steps(count: int = 400, ratio: float = 1.34) -> list[StepSample]:
    """Steps of two lengths in turn; every 25th is held out; noise of a few percent by a fixed rule."""
    steps = []
    for index in range(1, count + 1):
        size = 256 if index % 3 else 128
        base = 74_000.0 if size == 256 else 38_000.0
        noise = 1.0 + 0.03 * (((index * 7919) % 101) / 50.0 - 1.0)
        held_out = index % 25 == 0
        steps.append(sample(index, base * noise * (ratio if held_out else 1.0), held_out, size))
    return [replace(steps[0], step_us=0.0), *steps[1:]]


def fill(store: Store, ratio: float = 1.34, mode: str = "wait") -> int:
    """One run of a small language model; returns its id."""
    run_id = store.runs.start(
        RunStart("examples/train_lm.py --steps 400", DEVICE, VERSIONS, mode, 4242, {"run.tune": mode})
    )
    store.queue.add(
        [
            TuneRequest(key(node, bucket), node[3], bucket, (ObservedShape((8, 256), 900),), 900, 150.0, 2.0, run_id)
            for node, bucket in ((GELU, HOT), (GELU, COLD), (NORM, HOT), (LOSS, HOT))
        ]
    )
    measured = [
        Measurement(
            Candidate("c_generic", make_config({"unroll": unroll, "threads": 2})), "ok", (8, 256),
            151.25 / (2 + unroll / 10), 151.25, 2 + unroll / 10, 1.9 + unroll / 10, 2.1 + unroll / 10, 0.8, "c0ffee",
            0.11, 0.4,
        )
        for unroll in (1, 2, 4)
    ]  # fmt: skip
    crashed = Measurement(Candidate("c_specialised", make_config({"unroll": 8})), "crash", message="signal 11")
    store.results.put_measurements(key(GELU, HOT), [*measured, crashed])
    store.kernels.put(
        KernelRecord(CompileKey("s", "gcc 12.2", "-O3", "avx512"), GELU[1], "void f(void) {}", b"\x7fELF")
    )
    store.results.put_decision(decision(GELU, HOT, 2.16))
    store.results.put_decision(decision(NORM, HOT, 1.52, "c_generic"))
    store.results.put_decision(decision(LOSS, HOT, 1.01, EAGER, "below_margin"))
    for node in (GELU, NORM, LOSS):
        store.queue.finish(key(node, HOT), "done")
    store.nodes.put_uses(
        run_id,
        [use(GELU, HOT, 2944, 2760, 0.123), use(GELU, COLD, 1472, 0, 0.031), use(NORM, HOT, 5888, 5520, 0.094),
         use(LOSS, HOT, 368, 0, 0.02)],
    )  # fmt: skip
    store.steps.add(run_id, real_steps(ratio=ratio))
    store.roots.put(
        run_id,
        RootRecord(
            ROOT,
            "GPT",
            "captured",
            "at_once",
            "",
            400,
            1.9,
            412,
            5.4,
            8.2,
            (("args[0]", 1), ("args[1]", 1)),
            capture_causes=(("imports", 1.1), ("tracing", 4.25), ("slow steps", 0.04)),
        ),
    )
    store.roots.put(run_id, RootRecord("Scale[1]", "Scale", "eager", "too_small", "12 us a call", 400, 0.01, 2))
    store.trials.put(
        SettingTrial(
            "process.malloc", "M_MMAP_THRESHOLD=1GiB M_TRIM_THRESHOLD=2GiB M_TOP_PAD=64MiB", 80_100.0, 68_400.0, 1.17,
            1.12, 1.21, "on", "won", "x86_64:2", "examples/train_lm.py --steps 400",
        )
    )  # fmt: skip
    store.notes.add_refusals(
        run_id,
        [Refusal("fused", True, "add + gelu", "", 1 << 20)] * 9
        + [Refusal("single_op", False, "mul", "one cheap operation", 0, "train_lm.py:52 q = q * scale")] * 4
        + [Refusal("random_op", False, "native_dropout", "eager's stream", 0, "train_lm.py:58 x = self.drop(x)")],
    )
    store.notes.add_event(run_id, Event("kernel_unusable", "a stored kernel could not be loaded; its node runs eager"))
    store.runs.finish(run_id, RunTotals(400, 16560, 1104, 0.11, 33.5, 5.4, 21.5, 16, 0))
    return run_id


def open_store(path: Path) -> Store:
    return Store.open(path)
