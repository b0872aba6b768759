"""Host time of a routed GPU launch: everything from the graph's call to the driver.

    python benchmarks/launch.py

Bar: 6 us. With a GPU the driver is the real one and the kernel is compiled for it; without one the driver is a
library whose launch returns at once, and CPU tensors stand in for the device's, so that the time is all ours: what the
driver itself takes is not in it. All variants take turns in one process; times are medians of rounds, differences are
taken round by round. Writes benchmarks/results/launch.json.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("AUTOFUSE_TUNE", "off")
os.environ.setdefault("AUTOFUSE_STORE", os.path.join(tempfile.mkdtemp(), "store.sqlite3"))

import torch
from common import difference, interleave, summary, write
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from autofuse.capture.graph_import import import_graph
from autofuse.codegen.c.build import compile_source as compile_c
from autofuse.codegen.c.build import find_toolchain
from autofuse.codegen.knobs import default_config
from autofuse.codegen.lowering.lower import lower
from autofuse.codegen.triton.artifact import Artifact, Image
from autofuse.codegen.triton.knobs import triton_knobs
from autofuse.codegen.triton.printer import print_triton
from autofuse.codegen.triton.resources import Resources
from autofuse.codegen.triton.source import NOTHING_ASSUMED, Assumptions, TritonSource, natural_assumptions
from autofuse.fusion import FusionEngine
from autofuse.gpu import launcher
from autofuse.gpu.driver import CUDA, Driver, torch_driver
from autofuse.gpu.launch_record import LaunchRecord
from autofuse.gpu.modules import LoadedArtifact, load_artifact
from autofuse.gpu.torch_calls import TorchCalls, torch_calls
from autofuse.ir.operation import NodeForm
from autofuse.runtime.graphs.choice import UNKNOWN, Choice
from autofuse.runtime.graphs.plans import NodeState, Plan
from autofuse.runtime.graphs.router import GraphRouter
from autofuse.wrapper.graph_call_builder import build_program
from autofuse.wrapper.node_call import empty_like_spec, make_device_launcher

COLUMNS = 64
REPEATS = 500  # below the length of a driver's queue of launches, which is emptied between samples

# A driver that accepts everything at once.
FAKE = """
#include <stdint.h>
typedef int64_t word;
int cuDeviceGet(int* d, int n) { *d = n; return 0; }
int cuDevicePrimaryCtxRetain(word* c, int d) { *c = 1; return 0; }
int cuCtxPushCurrent_v2(word c) { return 0; }
int cuCtxPopCurrent_v2(word* c) { return 0; }
int cuCtxSetCurrent(word c) { return 0; }
int cuThreadExchangeStreamCaptureMode(int* m) { return 0; }
int cuModuleLoadData(word* m, const char* i) { *m = 1; return 0; }
int cuModuleUnload(word m) { return 0; }
int cuModuleGetFunction(word* f, word m, const char* n) { *f = 1; return 0; }
int cuFuncSetAttribute(word f, int a, int v) { return 0; }
int cuFuncGetAttribute(int* v, int a, word f) { *v = 0; return 0; }
int cuGetErrorName(int e, const char** n) { *n = "none"; return 0; }
int cuLaunchKernel(word f, unsigned a, unsigned b, unsigned c, unsigned d, unsigned e, unsigned g, unsigned h, word s,
                   void** p, void** x) { return 0; }
"""


@dataclass(frozen=True)
class Machine:
    """What stands behind the launches."""

    device: torch.device  # of the tensors
    driver: Driver
    calls: TorchCalls
    compile: Callable[[TritonSource, tuple[Assumptions, ...]], Artifact]
    synchronise: Callable[[], object]
    describe: dict[str, str]


def real() -> Machine:
    from autofuse.codegen.triton.compile import compile_source
    from autofuse.codegen.triton.targets import target_of
    from autofuse.gpu.devices import gpu_device

    found = gpu_device(0)
    return Machine(
        torch.device("cuda", 0),
        torch_driver(),
        torch_calls(),
        lambda source, assumptions: compile_source(source, target_of(found.isa), assumptions),
        torch.cuda.synchronize,
        {"gpu": found.name, "isa": found.isa, "driver": "the real one", "tensors": "on the GPU"},
    )


def standing_in() -> Machine:
    path = Path(tempfile.mkdtemp()) / "libfake.so"
    path.write_bytes(compile_c(FAKE, find_toolchain(), ("-O2", "-fPIC", "-shared", "-w")))
    calls = TorchCalls(lambda: 0, lambda index: 0, torch.device, empty_like_spec)
    what = "none: a library whose launch returns at once"
    return Machine(
        torch.device("cpu"), Driver.open(CUDA, str(path)), calls, _words, lambda: None,
        {"gpu": "none", "driver": what, "tensors": "CPU tensors stand in for a GPU's; torch's look-ups of device and "
         "stream are functions that return a number"},
    )  # fmt: skip


def _words(source: TritonSource, assumptions: tuple[Assumptions, ...]) -> Artifact:
    """An artifact whose images are no code."""
    resources = Resources(0, 0, 0, 32 * source.num_warps)
    images = [
        Image(number, item.function, assumed, 32 * source.num_warps, 0, resources, b"no code")
        for assumed in assumptions
        for number, item in enumerate(source.passes)
    ]
    return Artifact(source, "cuda:90", tuple(images))


@dataclass
class OneKernel:
    """A catalogue in which every node has this callable."""

    threads: int = 1

    def choose(self, fusion_id: str, values: Any, device: torch.device) -> Choice:
        return UNKNOWN

    def node_failed(self, node: NodeState, problem: str) -> None:
        raise RuntimeError(problem)

    def settle_plan(self, plan: Plan) -> bool:
        return True

    def new_plan(self, plan: Plan) -> None:
        pass

    live_races = None

    def sample_due(self, graph: object) -> bool:
        return False

    def wrap(self, node: NodeState, fused: Any, unfused: Any) -> Any:
        return fused


def router_of(function: Callable[..., Any], rows: int) -> GraphRouter:
    """The graph of a function of two tensors, traced on fake tensors of a GPU."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        graph = make_fx(function)(*(torch.empty(rows, COLUMNS, device="cuda") for _ in range(2)))
    imported = import_graph(graph)
    planned = imported.for_fusion()
    return GraphRouter(build_program(imported, FusionEngine().fuse(planned)), OneKernel(), "inference", lambda: 0.0)


# Rows, and a function of two tensors; small outputs, so that the allocation costs what it always does.
CASES: dict[str, tuple[int, Callable[..., Any]]] = {
    "relu(a + b), one pass": (64, lambda a, b: (a + b).relu()),
    "sum of a * b over rows, two passes": (8192, lambda a, b: (a * b).sum(0)),
}


def case(machine: Machine, rows: int, function: Callable[..., Any], rounds: int) -> dict[str, object]:
    router = router_of(function, rows)
    (slot,) = router.program.slots
    form = slot.node.form
    kernel = lower(form)
    source = print_triton(kernel, default_config(triton_knobs(kernel, {}, {})))
    artifact = machine.compile(source, (natural_assumptions(source.symbols, {}), NOTHING_ASSUMED))
    loaded = load_artifact(artifact, 0, driver=machine.driver)
    a, b = (torch.randn(rows, COLUMNS, device=machine.device) for _ in range(2))

    in_c = launcher.install(launcher.compile_launcher(find_toolchain()).binary)
    fused = make_device_launcher(form, loaded, (), calls=machine.calls, launch=in_c)
    record: LaunchRecord = fused.record  # type: ignore[attr-defined]
    through_ctypes = launcher.CtypesLaunch(record)
    slow = make_device_launcher(form, loaded, (), calls=machine.calls, launch=through_ctypes)
    plan = router.plan_for(())
    plan.calls = (fused,)
    memory = _memory(machine, form, record)
    pointers = (a.data_ptr(), b.data_ptr(), *(t.data_ptr() for t in memory()))
    stream = machine.calls.raw_stream(0)
    kept = memory()
    calls: dict[str, Callable[[], object]] = {
        "launcher alone, in C": lambda: in_c(record.address, stream, *pointers),
        "launcher alone, ctypes": lambda: through_ctypes(record.address, stream, *pointers),
        "outputs and scratch": memory,
        "node, in C": lambda: fused(a, b),
        "node, ctypes": lambda: slow(a, b),
        "routed graph, in C": lambda: router([a, b]),
    }
    if machine.device.type == "cuda":
        calls["kernel[grid], without outputs"] = _by_triton(loaded, record, [a, b, *kept])
        calls["eager, op by op"] = lambda: function(a, b)
    samples = interleave(calls, rounds, REPEATS, before=machine.synchronise)
    return {
        "passes": len(record.steps),
        "pointers": record.pointers,
        "us": {name: summary(s) for name, s in samples.items()},
        "routed graph over its outputs and scratch, us": difference(
            samples["routed graph, in C"], samples["outputs and scratch"]
        ),
    }


def _memory(machine: Machine, form: NodeForm, record: LaunchRecord) -> Callable[[], list[torch.Tensor]]:
    specs = [form.spec(ref) for ref in form.outputs]
    wanted = [(s.shape.bind({}), s.strides.bind({}), getattr(torch, s.dtype)) for s in specs]
    wanted += [((elements,), (1,), getattr(torch, dtype)) for dtype, elements in record.scratch]
    empty = machine.calls.empty
    return lambda: [empty(*what) for what in wanted]


def _by_triton(loaded: LoadedArtifact, record: LaunchRecord, tensors: list[torch.Tensor]) -> Callable[[], object]:
    """The same launches as a user of Triton writes them."""
    from autofuse.codegen.triton.module import defined

    source = loaded.artifact.source
    with defined(source) as names:
        kernels = [names[item.function] for item in source.passes]
    options = {"num_warps": source.num_warps, "num_stages": source.num_stages}
    steps = []
    for kernel, item, step in zip(kernels, source.passes, record.steps, strict=True):
        arguments = [tensors[value] if kind == 0 else value for kind, value in step.arguments]
        steps.append((kernel, (step.grid,), arguments, {**dict(item.constants), **options}))
        kernel[(step.grid,)](*arguments, **steps[-1][3])

    def run() -> None:
        for kernel, grid, arguments, keywords in steps:
            kernel[grid](*arguments, **keywords)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    machine = real() if torch.cuda.is_available() else standing_in()
    results = {name: case(machine, *what, rounds) for name, what in CASES.items()}
    path = write("launch", {"device": machine.describe, "cases": results})
    for name, result in results.items():
        print(name)
        for variant, s in result["us"].items():  # type: ignore[attr-defined]
            print(f"  {variant:32s} {s['median']:7.2f} us ({s['low']:.2f} to {s['high']:.2f})")
    print(f"driver: {machine.describe['driver']}; written to {path}")


if __name__ == "__main__":
    main()
