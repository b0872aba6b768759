"""Peak memory of a step: what tensors a model's step holds at most, through autofuse and in eager.

    python benchmarks/memory.py                    # all models of models.py
    python benchmarks/memory.py --only gpt2,bert   # by the beginning of their names
    python benchmarks/memory.py --quick            # a perceptron

In a process for each contender, once nothing changes any more (autofuse: all is tuned), every batch of the deck is run
once under torch's memory profiler, which is told of each allocation: the peak is the most that was held above what was
held when the step began: parameters and optimizer states, the same for all, are left out. Bar: autofuse at
most 2 % above eager, model by model, over the batches together (their largest peak).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import arguments, chosen, commit, parse, print_end, save
from models_cases import CASES, DECK, build
from models_worker import prepare, session_of, wrapper

CONTENDERS = ("eager", "compile dynamic", "autofuse")
BAR = 1.02


def main() -> int:
    if len(sys.argv) == 5 and sys.argv[1] == "--worker":
        return work(sys.argv[2], sys.argv[3], Path(sys.argv[4]))
    parser = arguments(__doc__, "memory", quick="a perceptron only", only="models")
    options = parse(parser)
    names = chosen(options.only, [case.name for case in CASES], "mlp" if options.quick else "")
    began, rows, left_out = time.monotonic(), list[dict[str, Any]](), list[str]()
    with tempfile.TemporaryDirectory(prefix="autofuse-memory-") as folder:
        for name in names:
            row: dict[str, Any] = {"model": name, "peaks": {}}
            for contender in CONTENDERS:
                store = Path(folder) / f"{name.replace(' ', '_')}.sqlite3"
                command = [sys.executable, str(Path(__file__)), "--worker", contender, name, str(store)]
                answer = subprocess.run(command, capture_output=True, text=True)
                if answer.returncode != 0:
                    left_out.append(f"{name}, {contender}: {answer.stderr.strip()[-200:]}")
                    continue
                row["peaks"][contender] = json.loads(answer.stdout.splitlines()[-1])
            rows.append(row)
            peaks = {who: max(found) for who, found in row["peaks"].items()}
            if "eager" in peaks:
                row["over_eager"] = {who: round(p / peaks["eager"], 4) for who, p in peaks.items() if who != "eager"}
            print(f"{name:16s}", *(f"{who} {p / 2**20:.1f} MiB" for who, p in peaks.items()), flush=True)
            bars = bars_of(rows)
            save(options.out, "memory", commit=commit(), bars=bars, rows=rows, left_out=left_out)
    print_end(bars_of(rows), left_out, options.out, began)
    return 0


def bars_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    over = {row["model"]: row["over_eager"]["autofuse"] for row in rows if "autofuse" in row.get("over_eager", {})}
    return {
        "above_1.02_of_eager": [f"{name}: {value:.3f}" for name, value in over.items() if value > BAR],
        "below_eager": sum(value < 1.0 for value in over.values()),
        "models": len(over),
    }


# ---- one contender in its process ---------------------------------------------------------------------------------


def work(contender: str, name: str, store: Path) -> int:
    case = next(case for case in CASES if case.name == name)
    # No call is held out: it would run eager's kernels.
    session = session_of(store, **{"capture.held_out_share": 0.0}) if contender == "autofuse" else None
    workload = build(case, False, False, wrapper(contender))
    prepare(workload, session)
    print(json.dumps([peak_bytes(lambda i=i: workload.step(i)) for i in range(DECK)]))
    if session is not None:
        session.finish(0)
    return 0


def peak_bytes(step: Any) -> int:
    """The most that a step's tensors took of the CPU's memory, above what was there before it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


if __name__ == "__main__":
    sys.exit(main())
