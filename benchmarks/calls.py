"""What calling a graph from C gains over its generated Python, beside eager: whole calls of captured modules.

    python benchmarks/calls.py
    python benchmarks/calls.py --only tiny

Each node has a kernel with default settings, products are torch's. All take turns in one process, with one thread. A
call in C or Python is that of the captured code, without the guards and the bookkeeping around it, which are the same
for both; "script" is the whole call as a script makes it, in C. Times are the thread's on its processor, so that others
on the machine weigh less. A training step is the forward pass, a sum and the backward pass. Results of C and Python are
compared bit by bit.
Bars: no row slower than Python; a tiny module's whole call takes at most 5 us more than eager's without gradients, and
at most 30 us more with them, forward and backward. Writes benchmarks/results/calls.json.
"""

from __future__ import annotations

import copy
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cache
from types import BuiltinFunctionType
from typing import Any

import torch
import torch.nn.functional as F
from common import arguments, chosen, commit, difference, parse, print_end, ratio, save, summary
from torch import nn

from autofuse.codegen.c.build import find_toolchain
from autofuse.codegen.generator import FusionKernelGenerator
from autofuse.errors import AutofuseError
from autofuse.ir.operation import NodeForm
from autofuse.runtime.graphs.choice import Choice
from autofuse.runtime.graphs.plans import NATIVE_AFTER
from autofuse.runtime.graphs.step_records import TIMED_FIRST
from autofuse.sessions import start_session
from autofuse.settings.layers import load
from autofuse.wrapper.native_library import compile_runner, install, load_runner

SETTINGS = {
    "TUNE": "off", "QUIET": "1", "STORE": os.path.join(tempfile.mkdtemp(), "store.sqlite3"),
    "CAPTURE_AT_ONCE": "true", "CAPTURE_HELD_OUT_SHARE": "0", "CAPTURE_KEEP_GRAPHS": "false",
    "FUSION_MIN_TENSOR_SIZE": "0", "RUN_GRAPHS_IN_C": "false",
}  # fmt: skip
Call = Callable[[], Any]
PATHS = ("C", "Python", "script", "eager")
MOST_OVER_EAGER = {"tiny, inference": 5.0, "tiny, training": 30.0}  # us, of the script's call


class Tiny(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.norm(torch.tanh(self.linear(x)) + x)
        return found


class Block(nn.Module):
    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        h = self.norm(x)
        q, k, v = (f(h).view(b, t, self.heads, c // self.heads).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        found: torch.Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return found


def blocks(width: int) -> nn.Module:
    return nn.Sequential(*(Block(width) for _ in range(4)))


ROWS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], bool, int]] = {
    "tiny, inference": (lambda: Tiny(16), (4, 16), False, 1000),
    "tiny, training": (lambda: Tiny(16), (4, 16), True, 300),
    "4 blocks of width 64, 2 x 16, inference": (lambda: blocks(64), (2, 16, 64), False, 100),
    "4 blocks of width 64, 2 x 16, training": (lambda: blocks(64), (2, 16, 64), True, 30),
    "4 blocks of width 256, 4 x 64, inference": (lambda: blocks(256), (4, 64, 256), False, 10),
    "4 blocks of width 256, 4 x 64, training": (lambda: blocks(256), (4, 64, 256), True, 4),
}
GENERATOR = FusionKernelGenerator()


@cache
def kernel(form: NodeForm) -> Any:
    try:
        return GENERATOR.generate_generic_kernel(form).load().entry
    except AutofuseError:
        return None


def calls_of(session: Any, name: str) -> tuple[dict[str, Call], int]:
    """The calls of a row, and how often to call them in a sample."""
    make, sizes, trains, repeats = ROWS[name]
    torch.manual_seed(0)
    module, x = make(), torch.randn(*sizes)
    twin, before = copy.deepcopy(module), len(session.context.routers)

    def call(run: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        if not trains:
            with torch.no_grad():
                return run(x)
        module.zero_grad()
        found = run(x)
        found.sum().backward()
        return [found, *(p.grad for p in module.parameters())]

    session.roots.install()
    for _ in range(6):
        call(module)
    *_, shape = session.roots.root_of(module).trial.shapes.values()
    session.roots.uninstall()
    code = shape.direct[0].run
    plans = [plan for router in session.context.routers[before:] for plan in router.all_plans()]
    for router in session.context.routers[before:]:
        router.run_in_c()
    for _ in range(TIMED_FIRST + NATIVE_AFTER + 1):  # the first ones are timed, which is done in Python
        call(lambda x: code(module, x))
    in_c = [plan.native for plan in plans]

    def use(programs: Sequence[Any]) -> None:
        for plan, program in zip(plans, programs, strict=True):
            plan.native = program

    def captured(programs: Sequence[Any]) -> Call:
        def run() -> Any:
            use(programs)
            return call(lambda x: code(module, x))

        return run

    found, expected = captured(in_c)(), captured([None] * len(plans))()
    same = map(torch.equal, found, expected) if trains else [torch.equal(found, expected)]
    if not all(isinstance(native, BuiltinFunctionType) for native in in_c) or not all(same):
        raise SystemExit(f"{name}: expected the same bits from programs in C, found {in_c} and other bits")

    def as_a_script() -> Any:
        use(in_c)
        return call(module)

    return {
        "C": captured(in_c),
        "Python": captured([None] * len(plans)),
        "script": as_a_script,
        "eager": lambda: call(twin),
    }, repeats


def thread_times(session: Any, calls: dict[str, Call], rounds: int, repeats: int) -> dict[str, list[float]]:
    """Microseconds a call, one sample per round and callable, which take turns."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds):
        for position in range(len(PATHS)):
            name = PATHS[(position + number) % len(PATHS)]
            call = calls[name]
            if name == "script":
                session.roots.install()
            else:
                session.roots.uninstall()
            for _ in range(max(2, repeats // 10)):  # its own code and data are in the caches then
                call()
            began = time.thread_time()
            for _ in range(repeats):
                call()
            samples[name].append((time.thread_time() - began) / repeats * 1e6)
    return samples


def main() -> int:
    parser = arguments(__doc__, "calls", quick="three rounds; proves nothing about speed", only="rows")
    options = parse(parser)
    torch.set_num_threads(1)
    began = time.monotonic()
    session = start_session(load(environ={f"AUTOFUSE_{name}": value for name, value in SETTINGS.items()}), "benchmark")
    session.kernels.choose = lambda fusion_id, values, device: choice(session, fusion_id)  # type: ignore[method-assign]
    install(load_runner(compile_runner(find_toolchain()).binary))
    rows, slower, tiny = [], [], {}
    for name in chosen(options.only, list(ROWS)):
        calls, repeats = calls_of(session, name)
        samples = thread_times(session, calls, 3 if options.quick else 21, repeats)
        over = {other: ratio(samples[other], samples["C"]) for other in PATHS[1:]}
        extra = difference(samples["script"], samples["eager"])
        rows.append({
            "row": name, "us": {path: summary(samples[path]) for path in PATHS}, "over C": over,
            "script over eager, us": extra,
        })  # fmt: skip
        slower += [name] if over["Python"]["high"] < 1.0 else []
        if name in MOST_OVER_EAGER:
            tiny[f"{name}: script over eager, us"] = f"{extra['median']:.1f} (bar {MOST_OVER_EAGER[name]:g})"
        us = ", ".join(f"{path} {summary(samples[path])['median']:.1f}" for path in PATHS)
        ends = ", ".join(f"{other} {found['median']:.2f}x" for other, found in over.items())
        print(f"{name}: us {us}; over C: {ends}", flush=True)
    bars = {"rows slower than Python": slower, **tiny}
    save(options.out, "calls", commit=commit(), bars=bars, rows=rows)
    print_end(bars, [], options.out, began)
    session.finish(None)
    return 0


def choice(session: Any, fusion_id: str) -> Choice:
    slots = (slot for router in session.context.routers for slot in router.program.slots)
    slot = next(slot for slot in slots if slot.node.fusion_id == fusion_id)
    entry = None if slot.is_group else kernel(slot.node.form)
    return Choice(known=True, entry=entry, tag="generated" if entry is not None else "")


if __name__ == "__main__":
    raise SystemExit(main())
