"""Whole models, training steps with their optimizer and inference, on shapes that vary: autofuse beside its peers.

    python benchmarks/models.py                       # all models
    python benchmarks/models.py --only gpt2,mlp       # by the beginning of their names
    python benchmarks/models.py --fixed               # all batches of one shape
    python benchmarks/models.py --quick               # a trial of the benchmark itself

Contenders are processes, because malloc's settings and Dynamo's caches belong to a process; they take turns, one pass
over a deck of eight batches a round (and one untimed before it), and wait meanwhile. Ratios are taken round by round
and carry a 95 % interval. Everyone has had its shapes before: compilers have compiled them, autofuse has a store that a
run before this one has filled (its capture is counted beside). "eager" is what a user has; "eager, same settings" has
autofuse's malloc settings and torch's fused AdamW, so that what is left is fusion's own share. "limit_over_eager" is
eager's time over that of its matrix products and convolutions alone: what could be had if all else were free and these
were aten's.

Bars on two cores: geometric mean 1.4x eager and 1.35x torch.compile (its better mode, model by model); GPT-2 1.7x,
Llama 1.45x; no model below 0.98x eager.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import RESULTS, commit, machine, summary
from models_cases import CASES, Case
from models_worker import COMPILED, RECOMPILE_LIMIT

from autofuse.tuner.comparison import INTERVAL_TAIL, bounds

EAGER, SAME, AUTOFUSE = "eager", "eager, same settings", "autofuse"
WHOLE = "autofuse, whole"  # equal layers captured one by one, where asked for
CONTENDERS = (EAGER, SAME, "compile", "compile dynamic", AUTOFUSE)
ROUNDS = 13
ROUND_SECONDS = 60.0  # of one model, all contenders


class Contender:
    """A process that waits for its turn."""

    def __init__(self, name: str, case: Case, store: Path, fixed: bool) -> None:
        worker = Path(__file__).with_name("models_worker.py")
        command = [sys.executable, str(worker), name, case.name, str(store), "fixed" if fixed else "varying"]
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, bufsize=1
        )
        self.prepared = self._answer()

    @property
    def pid(self) -> int:
        return self._process.pid

    def round(self) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        return self._answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(120)
        self._log.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        text = self._process.stdout.readline()
        if not text:
            self._process.wait(60)
            self._log.seek(0)
            raise RuntimeError(f"the contender ended: {self._log.read().strip()[-600:]}")
        found: dict[str, Any] = json.loads(text)
        return found


def measure(case: Case, names: Sequence[str], folder: Path, fixed: bool, rounds: int) -> dict[str, Any]:
    contenders: dict[str, Contender] = {}
    found: dict[str, Any] = {"model": case.name, "commit": commit(), "bar": case.bar, "contenders": {}, "left_out": []}
    for name in names:
        store = folder / f"{name.replace(', ', '-')}.sqlite3"
        try:
            if name in (AUTOFUSE, WHOLE):
                Contender(name, case, store, fixed).close()  # fills the store
            contenders[name] = Contender(name, case, store, fixed)
        except RuntimeError as error:
            found["left_out"].append(f"{name}: {error}")
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    faults: dict[str, float] = {}
    began = time.perf_counter()
    order = list(contenders)
    for number in range(rounds):
        for position in range(len(order)):
            name = order[(position + number) % len(order)]
            answer = contenders[name].round()
            samples[name].append(answer["seconds"])
            faults[name] = answer["page_faults"]
        if number >= 4 and time.perf_counter() - began > ROUND_SECONDS:
            break
    for name, contender in contenders.items():
        contender.close()
        found["shapes"] = contender.prepared.pop("shapes")
        found["contenders"][name] = {
            "deck_seconds": summary(samples[name]), "page_faults_a_step": faults[name], **contender.prepared,
        }  # fmt: skip
    if AUTOFUSE in samples:
        found["autofuse_over"] = {n: ratio(samples[n], samples[AUTOFUSE]) for n in samples if n != AUTOFUSE}
    if EAGER in samples and SAME in samples:
        products = found["contenders"][SAME]["products_seconds"]
        found["limit_over_eager"] = found["contenders"][EAGER]["deck_seconds"]["median"] / products
    return found


def ratio(other: Sequence[float], ours: Sequence[float]) -> dict[str, float]:
    """How many times as fast autofuse is, round by round."""
    ratios = sorted(a / b for a, b in zip(other, ours, strict=True))
    low, high = bounds(ratios, INTERVAL_TAIL)
    middle = summary(ratios)["median"]
    return {"median": middle, "low": max(low, ratios[0]), "high": min(high, ratios[-1])}


def bars(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    timed = [row for row in rows if "autofuse_over" in row]
    found: dict[str, Any] = {}
    for name in (EAGER, SAME, *COMPILED):
        values = [row["autofuse_over"][name]["median"] for row in timed if name in row["autofuse_over"]]
        if values:
            found[f"geometric_mean_over_{name}"] = {"ratio": round(mean(values), 3), "models": len(values)}
    best = [
        min(row["autofuse_over"][name]["median"] for name in COMPILED if name in row["autofuse_over"])
        for row in timed
        if any(name in row["autofuse_over"] for name in COMPILED)
    ]
    if best:
        found["geometric_mean_over_best_compile"] = {"ratio": round(mean(best), 3), "models": len(best)}
    eager = {row["model"]: row["autofuse_over"][EAGER] for row in timed if EAGER in row["autofuse_over"]}
    found["below_0.98_of_eager"] = [f"{m}: {o['median']:.3f}" for m, o in eager.items() if o["median"] < 0.98]
    found["own_bars_missed"] = [
        f"{row['model']}: {eager[row['model']]['median']:.2f} of {row['bar']}"
        f" (at most {row.get('limit_over_eager', math.nan):.2f}, if all but matrix products and convolutions were free)"
        for row in timed
        if row["model"] in eager and eager[row["model"]]["median"] < row["bar"]
    ]
    return found


def mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def save(out: Path, rows: list[dict[str, Any]], options: argparse.Namespace, began: float) -> None:
    document = {
        "benchmark": "models",
        "command": " ".join(["python", *sys.argv]),
        "machine": machine(),
        "settings": {"recompile_limit": RECOMPILE_LIMIT, "compile": COMPILED, "fixed_shapes": options.fixed},
        "seconds": round(time.monotonic() - began, 1),
        "bars": bars(rows),
        "rows": rows,
    }
    partial = out.with_suffix(".partial")
    partial.write_text(json.dumps(document, indent=1) + "\n")
    partial.replace(out)


def line(found: dict[str, Any], names: Sequence[str]) -> str:
    cells = []
    for name in names:
        entry = found["contenders"].get(name)
        cells.append(f"{entry['deck_seconds']['median'] * 1e3:10.0f}" if entry else f"{'-':>10s}")
    over = found.get("autofuse_over", {})
    cells += [f"{over[n]['median']:7.2f}" if n in over else f"{'-':>7s}" for n in names if n != AUTOFUSE]
    ours = found["contenders"].get(AUTOFUSE, {})
    state = f"{ours.get('fused_nodes')} of {ours.get('nodes')} nodes fused" if ours else ""
    return f"{found['model']:16s}" + "".join(cells) + f"  {state}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="beginnings of names of models, separated by commas")
    parser.add_argument("--contenders", default=";".join(CONTENDERS), help=f"separated by ;, of {EAGER}; {SAME}; ...")
    parser.add_argument("--fixed", action="store_true", help="all batches of one shape")
    parser.add_argument("--quick", action="store_true", help="three rounds; proves nothing about speed")
    parser.add_argument("--append", action="store_true", help="keep the rows of other models in the result file")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    wanted = [w.strip() for w in options.only.split(",") if w.strip()]
    unknown = [w for w in wanted if not any(case.name.startswith(w) for case in CASES)]
    if unknown:
        sys.exit(f"--only: expected beginnings of {', '.join(c.name for c in CASES)}; found {', '.join(unknown)}")
    names = [n.strip() for n in options.contenders.split(";")]
    strange = [n for n in names if n not in (*CONTENDERS, *COMPILED, WHOLE)]
    if strange:
        known = "; ".join([*CONTENDERS, "max-autotune", WHOLE])
        sys.exit(f"--contenders: expected some of {known}; found {'; '.join(strange)}")
    began, rows = time.monotonic(), list[dict[str, Any]]()
    print("ms a deck of " + ", ".join(names) + "; autofuse over each of the others")
    with tempfile.TemporaryDirectory(prefix="autofuse-models-") as folder:
        default = Path(folder) if options.quick else RESULTS
        out = options.out or default / ("models_fixed.json" if options.fixed else "models.json")
        if options.append and out.exists():
            measured = [case.name for case in CASES if not wanted or any(case.name.startswith(w) for w in wanted)]
            rows += [row for row in json.loads(out.read_text())["rows"] if row["model"] not in measured]
        for case in CASES:
            if wanted and not any(case.name.startswith(w) for w in wanted):
                continue
            own = Path(folder) / case.name.replace(" ", "_")
            own.mkdir()
            rows.append(measure(case, names, own, options.fixed, 3 if options.quick else ROUNDS))
            save(out, rows, options, began)
            print(line(rows[-1], names), *rows[-1]["left_out"], flush=True)
        for what, result in bars(rows).items():
            print(f"{what}: {result}")
        print(f"written to {out} after {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
