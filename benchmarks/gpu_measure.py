"""One measurement of the GPU benchmark: a case on a size, all variants side by side in one process.

In: a `Benchmark` with its device, its clock and its session of autofuse. Out: a row of results.
Every variant is compiled afresh for each row, called until it has compiled and tuned what it wants to, and then takes
turns with the others. Backward is that of torch.autograd, as in a training script. A variant that fails, or for which
there is no time, is named in the row and does not keep the others from running.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from common import commit, machine, summary
from gpu_cases import Size, SpeedCase, input_sets, training
from gpu_rig import Call, DeviceRunner, race

import autofuse
from autofuse.db.store import Store
from autofuse.errors import AutofuseError
from autofuse.ir.records import DETAILS
from autofuse.runtime.session import Session
from autofuse.settings.layers import Settings

MODES: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "eager": lambda f: f,
    "autofuse": lambda f: autofuse.optimize(f),
    "default": lambda f: torch.compile(f),
    "dynamic": lambda f: torch.compile(f, dynamic=True),
    "max-autotune": lambda f: torch.compile(f, mode="max-autotune-no-cudagraphs"),
}
QUICK_MODES = ("eager", "autofuse")  # torch.compile takes half a minute a case on a CPU
WARM_CALLS = 4  # autofuse tunes at the second
SETTLE_CALLS = 256
SETTLE_SECONDS = 2.0
ROUNDS = 30
RACE_SECONDS = 2.0
MOST_SETS = 8


@dataclass
class Clock:
    """How much time a section has."""

    minutes: float
    began: float = field(default_factory=time.monotonic)
    ends: float = 0.0

    def start(self, share: float) -> None:
        """Of what is left of the run, but for the seconds that ending takes."""
        now = time.monotonic()
        self.ends = now + share * (self.began + 0.97 * self.minutes * 60 - now)

    def left(self) -> float:
        return self.ends - time.monotonic()


@dataclass
class Benchmark:
    """One run: its options and what it has found so far."""

    rig: DeviceRunner
    modes: tuple[str, ...]
    sizes: tuple[Size, ...]
    cases: tuple[SpeedCase, ...]
    rounds: int
    is_quick: bool
    clock: Clock
    out: Path
    settings: Settings
    session: Session
    checked: Path | None = None  # results of an earlier run
    copy_bytes_per_second: float = 0.0
    sections: dict[str, Any] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def notes(self) -> list[str]:
        """Trouble of autofuse's own."""
        with contextlib.suppress(AutofuseError), Store.open(self.settings.run.store, readonly=True) as store:
            return [
                f"{row.event.kind}: {row.event.message}"
                for row in store.notes.events()
                if row.event.kind not in DETAILS
            ]
        return [f"{self.settings.run.store} cannot be read"]

    def save(self) -> None:
        document = {
            "benchmark": "gpu",
            "command": " ".join(["python", *sys.argv]),
            "commit": commit(),
            "machine": machine() | self.rig.describe(),
            "seconds": round(time.monotonic() - self.clock.began, 1),
            "copy_bytes_per_second": self.copy_bytes_per_second,
            "sections": self.sections,
            "left_out": self.left_out,
        }
        self.out.parent.mkdir(parents=True, exist_ok=True)
        partial = self.out.with_suffix(".partial")
        partial.write_text(json.dumps(document, indent=1) + "\n")
        partial.replace(self.out)

    def leave_out(self, what: str, error: Exception) -> None:
        """Something broke; the rest of the run is still worth its time."""
        traceback.print_exception(error, limit=-4)
        self.left_out.append(f"{what}: {type(error).__name__}: {str(error).strip()[:300]}")

    def rows(self, section: str) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self.sections.setdefault(section, {}).setdefault("rows", [])
        return rows


@dataclass
class Prepared:
    """One variant of one case."""

    compiled: Callable[..., Any]
    call: Call
    first_seconds: float  # until it answered at full speed
    fused: str = ""  # nodes of autofuse on fused kernels, of all


def measure(run: Benchmark, case: SpeedCase, size: Size, first: Size | None = None) -> dict[str, Any]:
    """All variants of one case; with ``first``, each is compiled on that size before it sees the real one."""
    torch._dynamo.reset()  # each case is new to everyone; autofuse keeps its store, the others their caches
    function = training(case.function) if case.trains else case.function
    row: dict[str, Any] = {
        "case": case.name, "size": size.name, "rows": size.rows, "columns": size.columns, "dtype": str(size.dtype),
        "least_bytes": case.passes * size.nbytes, "modes": {}, "errors": {},
    }  # fmt: skip
    if first is not None:
        row["first"] = {"rows": first.rows, "columns": first.columns}
    sets = input_sets(case, size, run.rig.device, 1)
    nbytes = sum(t.numel() * t.element_size() for t in sets[0])
    sets += input_sets(case, size, run.rig.device, max(1, min(MOST_SETS, run.rig.rotated_bytes // nbytes)))
    small = input_sets(case, first, run.rig.device, 1)[0] if first is not None else None
    prepared: dict[str, Prepared] = {}
    for mode in run.modes:
        if run.clock.left() < 0 and mode not in ("eager", "autofuse"):
            row["errors"][mode] = "out of time"
            run.left_out.append(f"{mode}: {case.name} {size.name}")
            continue
        try:
            prepared[mode] = prepare(run, mode, case, function, sets, small)
        except Exception as error:  # of one variant: the others are still worth their time
            row["errors"][mode] = f"{type(error).__name__}: {str(error).strip()[:500]}"
    if not case.is_random:
        with torch.set_grad_enabled(case.trains):
            row["largest_difference_to_eager"] = differences(prepared, sets[0])
    samples = race(run.rig, {mode: p.call for mode, p in prepared.items()}, run.rounds, RACE_SECONDS)
    for mode, found in samples.items():
        device = summary(found.device_us)
        row["modes"][mode] = {
            "device_us": device,
            "host_us": summary(found.host_us),
            "bytes_per_second": row["least_bytes"] / (device["median"] / 1e6),
            "share_of_copy": row["least_bytes"] / (device["median"] / 1e6) / run.copy_bytes_per_second,
            "first_seconds": round(prepared[mode].first_seconds, 2),
        }
        if prepared[mode].fused:
            row["modes"][mode]["nodes_fused"] = prepared[mode].fused
    return row


def prepare(
    run: Benchmark,
    mode: str,
    case: SpeedCase,
    function: Callable[..., Any],
    sets: Sequence[Sequence[torch.Tensor]],
    small: Sequence[torch.Tensor] | None,
) -> Prepared:
    routers = len(run.session.context.routers)
    # Forward alone is compiled; torch.autograd runs its backward, as in a training script.
    compiled = MODES[mode](case.function)
    whole = training(compiled) if case.trains else compiled
    began = time.perf_counter()
    with torch.set_grad_enabled(case.trains):
        for inputs in ([small] if small is not None else []) + [sets[0]]:
            for _ in range(WARM_CALLS):
                whole(*inputs)
            if mode == "autofuse":
                settle(run, lambda: whole(*inputs))  # noqa: B023 (called at once)
        run.rig.synchronise()
    seconds = time.perf_counter() - began
    turns = _turns(sets)

    def call() -> object:
        with torch.set_grad_enabled(case.trains):
            return whole(*next(turns))

    return Prepared(whole, call, seconds, _fused(run.session, routers) if mode == "autofuse" else "")


def await_decisions(call: Call) -> None:
    """Decisions arrive between two calls, read by a thread of the session."""
    for _ in range(6):
        time.sleep(0.05)
        call()


def settle(run: Benchmark, call: Call) -> None:
    """Call until decisions have arrived and their gain has been confirmed call by call.

    Calls that confirm are timed one by one, with events on the stream: they are not what a long run consists of.
    """
    await_decisions(call)
    ends = time.monotonic() + SETTLE_SECONDS
    for number in range(SETTLE_CALLS):
        call()
        if number % 16 == 15:  # the device keeps up, so that the lengths of timed calls are known soon
            run.rig.synchronise()
            if time.monotonic() > ends:
                break


def _turns(sets: Sequence[Sequence[torch.Tensor]]) -> Iterator[Sequence[torch.Tensor]]:
    number = 0
    while True:
        yield sets[number % len(sets)]
        number += 1


def _fused(session: Session, first_router: int) -> str:
    plans = [p for r in session.context.routers[first_router:] for p in r.all_plans() if p.count > WARM_CALLS]
    return f"{sum(p.fused_nodes for p in plans)} of {sum(len(p.nodes) for p in plans)}"


def differences(prepared: dict[str, Prepared], inputs: Sequence[torch.Tensor]) -> dict[str, float]:
    """Relative to the largest value of each output."""
    found: dict[str, float] = {}
    answers = {mode: _outputs(p.compiled(*inputs)) for mode, p in prepared.items()}
    for mode, outputs in answers.items():
        if mode == "eager" or "eager" not in answers:
            continue
        pairs = [(a.double(), b.double()) for a, b in zip(outputs, answers["eager"], strict=True)]
        found[mode] = max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-30)) for a, b in pairs)
    return found


def _outputs(found: Any) -> tuple[torch.Tensor, ...]:
    return tuple(t.detach() for t in (found if isinstance(found, tuple) else (found,)))
