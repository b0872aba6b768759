"""Nodes as scripts have them, and what the tuner decides for them: shared by `regret.py`, `aa.py` and `bandwidth.py`.

A node is captured from a function by the same backend that scripts use. The daemon's own loop decides, with default
settings, as for a script that waits; races are counted where it asks the worker for them.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from patterns_rows import Tensors

from autofuse.daemon.loop import TuningLoop
from autofuse.db.store import Store
from autofuse.ir.buckets import bucket_of
from autofuse.ir.operation import NodeForm
from autofuse.ir.records import Candidate, Decision, DecisionKey, KernelRecord, ObservedShape, TuneRequest
from autofuse.runtime.kernels.catalogue import DecisionTable
from autofuse.runtime.session import Session
from autofuse.sessions import start_session
from autofuse.settings.layers import Settings, load
from autofuse.tuner.benchmark_provider import Built, NodeBenchmarks
from autofuse.tuner.timing import RaceResult, RaceRules

CALLS = 1000  # of the shape, in the request: one that a script has used for a while, so that sizes may be built in
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """A function with one node of interest."""

    name: str
    function: Callable[..., Any]  # of the inputs, then the parameters
    inputs: Callable[[int], Tensors]  # of a number of rows, which varies
    parameters: Callable[[], Tensors]
    rows: tuple[int, ...]  # in each bucket
    phase: str = "inference"  # of the graph that has the node


@dataclass(frozen=True)
class Node:
    """A node as capture and planner made it."""

    fusion_id: str
    form: NodeForm
    values: dict[int, tuple[int, ...]]  # of its symbols, by number of rows


def full(count: int, *columns: int) -> Callable[[int], Tensors]:
    return lambda rows: tuple(torch.randn(rows, *columns) for _ in range(count))


def vectors(*sizes: int) -> Callable[[], Tensors]:
    return lambda: tuple(torch.randn(n) for n in sizes)


def angles(length: int) -> Callable[[], Tensors]:
    def tables() -> Tensors:
        turn = torch.arange(length).unsqueeze(1) * torch.exp(torch.arange(32) * (-math.log(10000.0) / 32))
        whole = torch.cat((turn, turn), -1)
        return whole.cos(), whole.sin()

    return tables


def capture(session: Session, case: Case) -> Node:
    """The case's largest node, with sizes from real calls. Raises ValueError where the planner made none."""
    torch._dynamo.reset()
    session.context.routers.clear()
    trains = case.phase != "inference"
    compiled = torch.compile(case.function, backend="autofuse")
    found: dict[int, tuple[int, ...]] = {}
    largest = None
    for rows in case.rows:
        inputs, parameters = case.inputs(rows), case.parameters()
        if trains:
            inputs, parameters = ([t.requires_grad_() for t in ts] for ts in (inputs, parameters))
        for tensor in inputs:
            torch._dynamo.mark_dynamic(tensor, 0)
        with torch.set_grad_enabled(trains):
            result = compiled(*inputs, *parameters)
            if trains:
                result.backward(torch.ones_like(result))
        plans = [p for r in session.context.routers if r.phase == case.phase for p in r.all_plans()]
        nodes = [n for p in plans for n in p.nodes if not n.slot.is_group]
        if not nodes:
            raise ValueError(f"{case.name}: expected a node in the {case.phase} graph, found none")
        size = max(len(n.form.operations) for n in nodes)
        largest = next(n for n in reversed(nodes) if len(n.form.operations) == size)
        found[rows] = largest.values
    assert largest is not None
    return Node(largest.fusion_id, largest.form, found)


# ---- what the tuner decides -----------------------------------------------------------------------------------


@dataclass
class Measured:
    """What was timed: different configurations, samples of them, and of eager beside them."""

    candidates: set[Candidate] = field(default_factory=set)
    samples: int = 0
    eager_samples: int = 0
    seconds: float = 0.0

    def add(self, built: Sequence[Built], result: RaceResult) -> None:
        self.candidates |= {item.candidate for item in built}
        self.eager_samples += len(result.samples[0])
        self.samples += sum(map(len, result.samples[1:]))

    def to_json(self) -> dict[str, Any]:
        return {
            "configurations": len(self.candidates),
            "samples": self.samples,
            "eager_samples": self.eager_samples,
            "seconds": round(self.seconds, 2),
        }


@contextlib.contextmanager
def counted() -> Iterator[Measured]:
    """Counts the races that are asked of the worker meanwhile."""
    measured, race = Measured(), NodeBenchmarks.race

    def counting(self: NodeBenchmarks, built: Sequence[Built], values: Sequence[int], rules: RaceRules) -> RaceResult:
        result = race(self, built, values, rules)
        measured.add(built, result)
        return result

    NodeBenchmarks.race = counting  # type: ignore[method-assign]
    began = time.monotonic()
    try:
        yield measured
    finally:
        measured.seconds = time.monotonic() - began
        NodeBenchmarks.race = race  # type: ignore[method-assign]


class Tuner:
    """The daemon's loop in this process, on a store of its own."""

    def __init__(self, settings: Settings, session: Session) -> None:
        self.settings = settings
        self._session = session
        self._loop = TuningLoop(settings, is_urgent=lambda: True)

    def decide(self, node: Node, values: tuple[int, ...]) -> tuple[Decision, KernelRecord | None, Measured]:
        """What a script would run at these sizes, its kernel, and what was measured for it."""
        place = self._session.kernels.tunable(CPU)
        assert place is not None
        bucket = bucket_of(values)
        request = TuneRequest(
            key=DecisionKey(node.fusion_id, bucket.label, place.key, place.threads, self._session.context.versions),
            node=node.form.to_json(),
            bucket=bucket,
            shapes=(ObservedShape(values, CALLS),),
            calls=CALLS,
            unfused_us=100.0,
            estimated_speedup=self._session.context.notes.estimates.get(node.fusion_id, 1.0),
        )
        with Store.open(self.settings.run.store) as store:
            store.queue.add([request])
            with counted() as measured:
                self._loop.drain(lambda done, total: None)
            table = DecisionTable()
            table.update(row.decision for row in store.results.history(node.fusion_id))
            decision = table.find(node.fusion_id, values, place)
            if decision is None:
                failed = [row.message for row in store.queue.requests(node.fusion_id)]
                raise ValueError(f"expected a decision, found none: {failed}")
            return decision, store.kernels.get(decision.compile_key) if decision.compile_key else None, measured

    def close(self) -> None:
        self._loop.close()


@contextlib.contextmanager
def tuning_session(script: str, **changed: object) -> Iterator[tuple[Session, Tuner]]:
    """A session that captures and a tuner that decides, on a store of their own. ``changed``: settings of the tuner."""
    with tempfile.TemporaryDirectory(prefix="autofuse-nodes-") as name:
        folder = Path(name)
        values = {
            "run.store": folder / "store.sqlite3",
            "run.tune": "off",
            "run.quiet": True,
            "tuner.budget_seconds": 3600.0,
            **{f"tuner.{key}": value for key, value in changed.items()},
        }
        settings = load(cli=values, environ={}, cwd=folder)
        session = start_session(settings, f"benchmarks/{script}.py")
        tuner = Tuner(settings, session)
        try:
            yield session, tuner
        finally:
            tuner.close()
            session.finish(0)
