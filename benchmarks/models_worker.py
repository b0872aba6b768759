"""One contender of `models.py` in a process of its own: prepares, then runs rounds when asked to.

In: the contender, the model and the store as arguments; on standard input a line for each round. Out: JSON lines on
standard output: what preparing took and led to, then the seconds of each round (one pass over the deck).
A process each, because malloc's settings and Dynamo's caches belong to a process; only one computes at a time.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from models_cases import CASES, DECK, Workload, build
from torch import nn

RECOMPILE_LIMIT = 64  # of torch.compile, so that no shape is left in eager
CALM_DECKS = 3  # without a new plan, graph or kernel
PREPARE_SECONDS = 420.0

PRODUCTS = {f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "mkldnn_convolution", "convolution_backward")}
COMPILED: dict[str, dict[str, Any]] = {
    "compile": {},
    "compile dynamic": {"dynamic": True},
    "max-autotune": {"mode": "max-autotune-no-cudagraphs"},
}


def main() -> int:
    contender, name, store, fixed = sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4] == "fixed"
    case = next(case for case in CASES if case.name == name)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not be taken for an answer
    session = None
    if contender == "autofuse":
        session = session_of(store)
    elif contender == "autofuse, whole":
        session = session_of(store, **{"capture.min_blocks": 0})
    elif contender == "eager, same settings":
        from autofuse.process.apply import apply_malloc

        apply_malloc()
    began = time.perf_counter()
    workload = build(case, fixed, contender == "eager, same settings", wrapper(contender))
    state = prepare(workload, session)
    print(
        json.dumps({"prepare_seconds": time.perf_counter() - began, "shapes": workload.shapes, **state}), file=answers
    )
    for _ in sys.stdin:
        _run_deck(workload)  # untimed: caches hold what another process left
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        seconds = _run_deck(workload)
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
        print(json.dumps({"seconds": seconds, "page_faults": faults / DECK}), file=answers)
    if session is not None:
        session.finish(0)
    return 0


def wrapper(contender: str) -> Callable[[nn.Module], nn.Module]:
    if contender not in COMPILED:
        return lambda model: model
    torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
    return lambda model: torch.compile(model, **COMPILED[contender])


def session_of(store: Path, **settings: Any) -> Any:
    """As `autofuse run --tune wait --set process.malloc=on` would begin."""
    from autofuse.process.apply import apply_malloc
    from autofuse.sessions import start_session
    from autofuse.settings.layers import load

    apply_malloc()
    values = {
        "run.store": store, "run.tune": "wait", "run.quiet": True, "tuner.budget_seconds": 3600.0,
        "tuner.job_seconds": float(os.environ.get("JOB_SECONDS", "4")), "tuner.idle_exit_seconds": 60.0, **settings,
    }  # fmt: skip
    return start_session(load(cli=values, environ={}, cwd=store.parent), "benchmarks/models.py")


def _run_deck(workload: Workload) -> float:
    began = time.perf_counter()
    for i in range(DECK):
        workload.step(i)
    return time.perf_counter() - began


def prepare(workload: Workload, session: Any) -> dict[str, Any]:
    """Passes over the deck until nothing changes any more."""
    began = time.perf_counter()
    first = _run_deck(workload)
    if session is None:
        for _ in range(CALM_DECKS):
            _run_deck(workload)
        return {"first_deck_seconds": first, "products_seconds": _products_seconds(workload)}
    calm = passes = 0
    while calm < CALM_DECKS or passes < 12:
        before = session.context.disturbances
        _run_deck(workload)
        passes += 1
        calm = calm + 1 if session.context.disturbances == before else 0
        if time.perf_counter() - began > PREPARE_SECONDS:
            break
    plans = [p for router in session.context.routers for p in router.all_plans() if p.count]
    roots = [root.record() for root in session.roots.groups.values()]
    return {
        "first_deck_seconds": first,
        "capture_seconds": session.context.capture_seconds,
        "tuning_seconds": session.context.paused_seconds,
        "graphs": len(session.context.routers),
        "fused_nodes": sum(p.fused_nodes for p in plans),
        "nodes": sum(len(p.nodes) for p in plans),
        "roots": [f"{root.name}: {root.state}, {root.reason}" for root in roots],
        "is_calm": calm >= CALM_DECKS,
    }


def _products_seconds(workload: Workload) -> float:
    """Seconds of a deck in matrix products and convolutions as aten runs them.

    The least of three: a bound must not hold what disturbed them. A profiler's first start is not counted.
    """
    found = []
    for _ in range(4):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            _run_deck(workload)
        found.append(sum(e.self_cpu_time_total for e in profile.key_averages() if e.key in PRODUCTS) / 1e6)
    return min(found[1:])


if __name__ == "__main__":
    sys.exit(main())
