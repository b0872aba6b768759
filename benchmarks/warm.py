"""Warm starts: how soon a script that an earlier run has captured is fused, and what 150 steps take over eager's.

    python benchmarks/warm.py                       # GPT-2, BERT and Llama of 4 layers, some ten minutes of tuning each
    python benchmarks/warm.py --only gpt2 --rounds 1

First each script runs once with --tune wait, which leaves kernels, graphs and traces in a store. Then plain python and
`autofuse run --tune off` on a copy of that store take turns, each in a process of its own. Seconds run from the first
call of the model. "captured": what the report says its capture has lost; "fused from": the first step that runs a
captured graph, by the store's samples of steps. Bars: captured within 1 s, fused from step 2, total at most 0.9x of
eager's. Written to benchmarks/results/warm.json.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import arguments, chosen, parse, print_end, save

SCRIPT = Path(__file__).with_name("startup_scripts") / "train_transformer.py"
MODELS = ("gpt2", "bert", "llama")
STEPS = 150


def run(model: str, steps: int, place: Path, *options: str) -> dict[str, Any]:
    """One process; ``options`` of `autofuse run`, plain python without."""
    stamps = place / "stamps.json"
    command = [sys.executable, *(("-m", "autofuse", "run", *options) if options else ())]
    environment = os.environ | {"STARTUP_STAMPS": str(stamps), "AUTOFUSE_STORE": str(place / "store.sqlite3")}
    subprocess.run(
        [*command, str(SCRIPT), model, "--steps", str(steps)], env=environment, check=True, capture_output=True
    )
    found = json.loads(stamps.read_text())
    first = found["stamps"][0]
    return {"seconds": found["stamps"][-1] - first, "at": [at - first for at in found["stamps"][1:]]} | {
        "losses": found["losses"]
    }


def warm(model: str, steps: int, place: Path, store: Path) -> dict[str, Any]:
    """On a copy of a store, its graphs and traces."""
    folder = Path(tempfile.mkdtemp(dir=place))
    shutil.copytree(store, folder, dirs_exist_ok=True)
    found = run(model, steps, folder, "--tune", "off")
    command = [sys.executable, "-m", "autofuse", "report", "--json", "--store", str(folder / "store.sqlite3")]
    report = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    (root,) = report["roots"]
    with sqlite3.connect(folder / "store.sqlite3") as connection:
        rows = connection.execute(
            "select min(call_index) from step_samples join step_series on step_series.id = series_id "
            "where run_id = (select max(id) from runs) and not held_out"
        )
        (found["fused_from"],) = rows.fetchone()
    found |= {"captured_seconds": root["capture_seconds"], "reason": root["reason"], "kept": root["kept_graphs"]}
    shutil.rmtree(folder)
    return found


def main() -> None:
    parser = arguments(__doc__, "warm", quick="one round of 40 steps, tuned by default settings", only="models")
    parser.add_argument("--rounds", type=int, default=3)
    options, began = parse(parser), time.monotonic()
    steps, rounds = (40, 1) if options.quick else (STEPS, options.rounds)
    results: dict[str, Any] = {}
    for model in chosen(options.only, MODELS):
        with tempfile.TemporaryDirectory(prefix="autofuse-warm-") as name:
            place, store = Path(name), Path(name) / "store"
            store.mkdir(mode=0o700)
            run(model, steps, store, "--tune", "wait")
            daemon = [sys.executable, "-m", "autofuse", "daemon", "stop", "--store", str(store / "store.sqlite3")]
            subprocess.run(daemon, capture_output=True)
            pairs = []
            for number in range(rounds):
                pair = {}
                for contender in ("eager", "warm") if number % 2 == 0 else ("warm", "eager"):
                    eager = contender == "eager"
                    pair[contender] = run(model, steps, place) if eager else warm(model, steps, place, store)
                pairs.append(pair)
                print_line(model, pair)
            ratio = statistics.median(p["warm"]["seconds"] / p["eager"]["seconds"] for p in pairs)
            results[model] = {"total_over_eager": ratio, "rounds": pairs}
    save(options.out, "warm", steps=steps, models=results)
    bars = {f"{model}: total over eager's, at most 0.9": f"{r['total_over_eager']:.2f}" for model, r in results.items()}
    print_end(bars, [], options.out, began)


def print_line(model: str, pair: dict[str, Any]) -> None:
    eager, found = pair["eager"], pair["warm"]
    apart = max(abs(a - b) / abs(b) for a, b in zip(found["losses"], eager["losses"], strict=True))
    print(
        f"{model}: captured in {found['captured_seconds']:.2f} s ({found['reason']}), fused from step "
        f"{found['fused_from']}, {found['seconds']:.1f} s over {eager['seconds']:.1f} s of eager: "
        f"{found['seconds'] / eager['seconds']:.2f}x, losses within {apart:.1e}",
        flush=True,
    )


if __name__ == "__main__":
    main()
