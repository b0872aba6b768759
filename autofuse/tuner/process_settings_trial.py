"""Trial of malloc's thresholds on what a run has recorded, without the script: its nodes, again and again, unfused.

In: the node uses of a run in the store. Out: a ``SettingTrial`` in the store.
Two processes, one of them with the thresholds, take turns replaying the nodes in sequence like a training step: all
results stay alive until the step ends, as autograd keeps them, and are freed together. They see the allocations of
the nodes only, not of the matmuls between them, so the ratio is of that part of a step and its reason says so;
``autofuse tune --process-settings SCRIPT`` measures whole steps.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from autofuse.db.rows import SettingTrial
from autofuse.db.store import Store
from autofuse.errors import AutofuseError
from autofuse.ir.operation import NodeForm
from autofuse.ir.records import NodeUse
from autofuse.process_settings import apply_malloc
from autofuse.process_trial import StepPair, judge
from autofuse.settings import Settings
from autofuse.tuner.cases import call_bytes
from autofuse.tuner.pipes import Pipe, PipeClosed
from autofuse.tuner.worker_process import START_SECONDS, python_module

WARM_UP = 3
PAIRS = 40
REPEATS = 8  # times a node is replayed in a step at most: layers share one node
STEP_SECONDS = 60.0
REASON = "_on_nodes"  # behind the code of the reason

Row = tuple[Mapping[str, Any], tuple[int, ...], int]  # node's JSON, symbol values, times in a step


def measure_process_settings(settings: Settings, run_id: int | None = None) -> SettingTrial:
    """Measure on a run's nodes (the newest run with nodes, by default) and store what was found.

    Raises AutofuseError where no run has recorded nodes or a replay fails, StoreError as the store does.
    """
    with Store.open(settings.run.store) as store:
        candidates = [store.run(run_id)] if run_id is not None else store.runs()
        found = ((run, store.node_uses(run.id)) for run in candidates)
        run, uses = next(((run, uses) for run, uses in found if uses), (None, []))
        if run is None:
            raise AutofuseError("expected a run that used fusion nodes, found none; type: autofuse run SCRIPT.py")
        pairs = replay_in_turns(step_of(uses, settings.tuner.memory_bytes))
        trial = judge(pairs, margin=settings.tuner.margin, device_key=run.device.key, workload=run.command)
        trial = replace(trial, reason=trial.reason + REASON)
        store.put_setting_trial(trial, run.id)
        return trial


def step_of(uses: Sequence[NodeUse], memory_bytes: int) -> list[Row]:
    """Nodes of a typical step with their most frequent shapes, within half of the memory."""
    fewest = min((use.calls for use in uses if use.calls), default=1)
    rows: list[Row] = []
    left = memory_bytes // 2
    for use in sorted(uses, key=lambda use: -use.calls):
        if not use.shapes or not use.calls:
            continue
        values = max(use.shapes, key=lambda shape: shape.calls).symbol_values
        times = max(1, min(REPEATS, use.calls // fewest))
        nbytes = call_bytes(NodeForm.from_json(dict(use.node)), values) * times
        if nbytes <= left:
            rows.append((use.node, values, times))
            left -= nbytes
    return rows


def replay_in_turns(rows: Sequence[Row], pairs: int = PAIRS) -> list[StepPair]:
    """The same steps without and with the thresholds. Raises AutofuseError."""
    sides = [_Replay("off", rows), _Replay("on", rows)]
    try:
        found: list[StepPair] = []
        for number in range(-WARM_UP, pairs):
            order = sides if number % 2 == 0 else sides[::-1]
            steps = {side.malloc: side.step() for side in order}
            if number >= 0:
                off, on = steps["off"], steps["on"]
                found.append(StepPair(off["us"], on["us"], off["faults"], on["faults"]))
        return found
    except (PipeClosed, TimeoutError) as error:
        raise AutofuseError(f"expected to replay {len(rows)} nodes, found that the process ended ({error})") from error
    finally:
        for side in sides:
            side.close()


class _Replay:
    """A process that replays the nodes, one step when asked."""

    def __init__(self, malloc: str, rows: Sequence[Row]) -> None:
        self.malloc = malloc
        command, environment = python_module("autofuse.tuner.process_settings_trial")
        self._process = subprocess.Popen(
            [*command, malloc], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, bufsize=0, cwd="/"
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._pipe = Pipe(os.dup(self._process.stdout.fileno()), os.dup(self._process.stdin.fileno()))
        self._process.stdin.close()
        self._process.stdout.close()
        self._pipe.send({"rows": [[dict(node), list(values), times] for node, values, times in rows]})
        self._is_ready = False

    def step(self) -> dict[str, Any]:
        if not self._is_ready:
            self._pipe.receive(START_SECONDS)
            self._is_ready = True
        self._pipe.send({})
        return self._pipe.receive(STEP_SECONDS)

    def close(self) -> None:
        self._pipe.close()
        self._process.kill()
        self._process.wait()


# ---- the process that replays ---------------------------------------------------------------------------


def main(malloc: str) -> None:
    """Replay on stdin and stdout until they close."""
    pipe = Pipe(os.dup(0), os.dup(1))
    os.dup2(2, 1)
    if malloc == "on":
        apply_malloc()  # before anything is allocated: it cannot be undone, and takes no memory back
    try:
        calls = _prepare(pipe.receive()["rows"])
        pipe.send({})
        while True:
            pipe.receive()
            pipe.send(_step(calls))
    except PipeClosed:
        return


def _prepare(rows: Sequence[Any]) -> list[Callable[[], Any]]:
    # Here, behind the setting: torch allocates when it is imported, and the other side of the pipe needs none of it.
    from autofuse.codegen.inputs import make_inputs
    from autofuse.runtime.launch import make_unfused

    calls: list[Callable[[], Any]] = []
    for node, values, times in rows:
        form = NodeForm.from_json(node)
        inputs = make_inputs(form, values)
        unfused = make_unfused(form, values)
        calls += [lambda call=unfused, tensors=inputs: call(*tensors)] * times  # type: ignore[misc]
    return calls


def _step(calls: Sequence[Callable[[], Any]]) -> dict[str, float]:
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    began = time.perf_counter()
    kept = [call() for call in calls]
    del kept
    seconds = time.perf_counter() - began
    return {"us": seconds * 1e6, "faults": float(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults)}


if __name__ == "__main__":
    main(sys.argv[1])
