"""The first hour on a GPU: everything that only a GPU can show, what matters most first.

    scripts/gpu-hour                       # all of it, within 55 minutes
    scripts/gpu-hour --minutes 6           # as far as it comes; what is left is done by the next call
    scripts/gpu-hour --only doctor,amp     # parts by the beginnings of their names
    scripts/gpu-hour --device cpu --quick  # a trial of this script, without a GPU

Each part is a process of its own with its own limit of time. Parts that time nothing run side by side, before the
others. A part's outcome is written when it ends, to `hour.json` in the folder that `--out` names, and is not made again
unless `--again` is given. What differed from expectation is printed at the end, and kept as `page.txt`; the output of
each part lies beside it in `logs/`. Nothing is downloaded.

Parts named after a script of benchmarks/gpu_scripts run it three times: in plain python, under `autofuse run --tune
wait` without a store, and under `autofuse run` on the store which that has made. The lines that the script prints must
be the same within the part's tolerance, the exit codes must be 0, and some calls must have been fused.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from common import commit, save

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
LINE = re.compile(r"^(?:step|request) (\d+) (?:loss|checksum) (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Part:
    """One process, or one script's three runs."""

    name: str
    seconds: float  # after which it is ended
    arguments: tuple[str, ...] = ()  # of python; a script's of gpu_scripts or examples where `compares`
    compares: bool = False
    tolerance: float = 1e-5  # relative, of a script's lines
    steps: int = 200
    is_timed: bool = False  # nothing may run beside it
    settings: tuple[str, ...] = ()  # of autofuse, where it compares


@dataclass(frozen=True)
class Outcome:
    """What one part found."""

    part: str
    seconds: float
    differs: tuple[str, ...]  # from what was expected
    found: Mapping[str, Any] = field(default_factory=dict)
    commit: str = field(default_factory=commit)


def _gpu(name: str, *more: str) -> tuple[str, ...]:
    return ("benchmarks/gpu.py", "--only", name, *more)


def _script(name: str, tolerance: float) -> Part:
    return Part(name, 150.0, (f"benchmarks/gpu_scripts/{name}.py",), True, tolerance)


# Training multiplies a difference of rounding; tolerances leave room for that, and for float16 and bfloat16 sums.
PARTS: tuple[Part, ...] = (
    Part("doctor", 90.0, ("-m", "autofuse", "doctor")),
    _script("unusual", 1e-5),
    _script("lengths", 3e-2),
    _script("dropout", 1e-4),
    _script("amp", 5e-2),
    _script("cuda_graphs", 1e-4),
    Part("replays", 200.0, ("benchmarks/gpu_scripts/replays.py",), True, 1e-3, settings=("replay.enabled=true",)),
    _script("streams", 1e-4),
    _script("out_of_memory", 1e-4),
    _script("threads", 1e-4),
    _script("bad_index", 1e-4),
    _script("compiled", 1e-4),
    Part("check", 160.0, _gpu("check")),
    Part("host", 60.0, _gpu("host"), is_timed=True),
    Part("table", 600.0, _gpu("table"), is_timed=True),
    Part("steps", 120.0, _gpu("steps"), is_timed=True),
    Part("trap", 200.0, _gpu("trap"), is_timed=True),
    Part("lm", 420.0, _gpu("lm"), is_timed=True),
)


@dataclass(frozen=True)
class Hour:
    """Options of a run."""

    folder: Path
    device: str
    is_quick: bool
    ends: float  # on the monotonic clock
    checked: Path | None = None  # the check's results of an earlier run

    def left(self) -> float:
        return self.ends - time.monotonic()

    def log(self, name: str) -> Path:
        return self.folder / "logs" / f"{name}.txt"


# ---- processes --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ended:
    """A process at its end."""

    code: int | None  # None: ended because its time was up
    output: str
    seconds: float


def run(hour: Hour, log: str, arguments: Sequence[str], seconds: float) -> Ended:
    """Python with these arguments, in a session of its own, which is ended as a whole."""
    began = time.monotonic()
    environment = {k: v for k, v in os.environ.items() if not k.startswith("AUTOFUSE_")}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), environment.get("PYTHONPATH", ""))))
    environment |= {"PYTHONUNBUFFERED": "1", "XDG_DATA_HOME": str(hour.folder / "data")}
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        cwd=ROOT,
        start_new_session=True,
    )
    code: int | None
    try:
        output, _ = process.communicate(timeout=max(1.0, min(seconds, hour.left())))
        code = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        code = None
    with hour.log(log).open("a") as file:
        file.write(f"$ python {' '.join(arguments)}\n{output}\nexit code {code}\n\n")
    return Ended(code, output, round(time.monotonic() - began, 1))


def _end_of(ended: Ended, what: str) -> list[str]:
    if ended.code is None:
        return [f"{what}: ended after {ended.seconds:.0f} s, its limit"]
    last = (ended.output.strip().splitlines() or ["nothing printed"])[-1]
    return [f"{what}: exit code {ended.code}: {last[:200]}"] if ended.code else []


# ---- a script under autofuse and without ------------------------------------------------------------------


def compare(hour: Hour, part: Part) -> Outcome:
    began = time.monotonic()
    steps = 12 if hour.is_quick else part.steps
    script = [*part.arguments, str(steps), hour.device]
    store = hour.folder / f"{part.name}.sqlite3"
    tune = ("--set", f"tuner.trials={3 if hour.is_quick else 8}", "--set", "tuner.job_seconds=3")
    settings = [word for setting in part.settings for word in ("--set", setting)]
    autofuse = ("-m", "autofuse", "run", "--store", str(store), *settings)
    commands = {
        "plain": script,
        "tuned": [*autofuse, "--tune", "wait", *tune, *script],
        "warm": [*autofuse, *script],
    }
    ended: dict[str, Ended] = {}
    found: dict[str, Any] = {}
    differs: list[str] = []
    for name, command in commands.items():
        ended[name] = run(hour, part.name, command, part.seconds)
        differs += _end_of(ended[name], name)
        if name == "plain":
            if differs:
                return Outcome(part.name, round(time.monotonic() - began, 1), tuple(differs))
            continue
        reported = run(hour, part.name, ["-m", "autofuse", "report", "--json", "--store", str(store)], 60.0)
        totals, troubles = _report(reported.output)
        found[name] = {"seconds": ended[name].seconds, "plain_seconds": ended["plain"].seconds} | totals
        differs += [f"{name}: {text}" for text in troubles]
        differs += [f"{name}: {text}" for text in _replays_missed(hour, part, reported.output, found[name])]
        if name == "tuned" and not totals.get("fused_calls"):
            differs.append("tuned: no call was fused")
        differs += _lines_differ(ended["plain"].output, ended[name].output, name, part.tolerance, found[name])
    run(hour, part.name, ["-m", "autofuse", "daemon", "stop", "--store", str(store)], 30.0)
    return Outcome(part.name, round(time.monotonic() - began, 1), tuple(differs), found)


def _lines_differ(expected: str, got: str, name: str, tolerance: float, found: dict[str, Any]) -> list[str]:
    one, other = LINE.findall(expected), LINE.findall(got)
    if [step for step, _ in one] != [step for step, _ in other]:
        return [f"{name}: {len(other)} lines of {len(one)}"]
    worst, where = 0.0, ""
    for (step, a), (_, b) in zip(one, other, strict=True):
        off = 0.0 if a == b else abs(float(a) - float(b)) / max(abs(float(a)), 1e-9)
        if not off <= worst:  # NaN too
            worst, where = off if math.isfinite(off) else math.inf, f"step {step}: {a} in plain python, {b}"
    found["largest_difference"] = worst
    return [] if worst <= tolerance else [f"{name}: differs by {worst:.1e}, expected at most {tolerance:.0e}; {where}"]


def _report(output: str) -> tuple[dict[str, Any], list[str]]:
    """Totals of the newest run, and what it says went wrong."""
    try:
        report = json.loads(output[output.index("{") :])
    except ValueError:
        return {}, ["the report cannot be read"]
    kept = ("fused_calls", "unfused_calls", "speedup_median", "tuning_seconds", "paused_seconds")
    totals = {name: report["totals"][name] for name in kept}
    return totals, [f"{event['kind']}: {event['message']}"[:400] for event in report["events"]]


def _replays_missed(hour: Hour, part: Part, output: str, found: dict[str, Any]) -> list[str]:
    """Where CUDA graphs are on: what became of them, with an example's times."""
    if "replay.enabled=true" not in part.settings:
        return []
    try:
        lines = json.loads(output[output.index("{") :])["refusals"]
    except (ValueError, KeyError):
        return []
    found["replays"] = [line for line in lines if line["code"] in ("replayed", "not_replayed")]
    is_one = any(line["code"] == "replayed" for line in found["replays"])
    if is_one or hour.device != "cuda" or hour.is_quick:
        return []
    return [f"no graph was replayed: {found['replays'][:1] or 'none was recorded'}"]


# ---- the other parts --------------------------------------------------------------------------------------


def execute(hour: Hour, part: Part) -> Outcome:
    if part.compares:
        return compare(hour, part)
    arguments, made = list(part.arguments), hour.folder / f"{part.name}.json"
    if is_benchmark := arguments[0].endswith("gpu.py"):
        minutes = min(part.seconds, hour.left()) / 60
        arguments += ["--minutes", f"{minutes - 0.1:.2f}", "--device", hour.device, "--out", str(made)]
        arguments += ["--quick"] * hour.is_quick
        arguments += ["--checked", str(hour.checked)] if hour.checked and part.name == "check" else []
    ended = run(hour, part.name, arguments, part.seconds + 15.0)
    differs = _end_of(ended, part.name)
    found = json.loads(made.read_text()) if is_benchmark and made.exists() else {}
    if part.name in JUDGES:
        differs += JUDGES[part.name](found, ended.output)
    differs += [f"left out: {what}" for what in found.get("left_out", [])]
    return Outcome(part.name, ended.seconds, tuple(differs), found)


def _judge_doctor(_: Mapping[str, Any], output: str) -> list[str]:
    wrong = [" ".join(line.split()) for line in output.splitlines() if line.startswith("missing")]
    return wrong if "checks failed" in output else []


def _judge_check(found: Mapping[str, Any], _: str) -> list[str]:
    rows = found.get("sections", {}).get("check", {}).get("rows", [])
    return [
        f"{row['case']} {row['dtype']}: {row['outcome']}: {str(row.get('detail', '')).strip()[:300]}"
        for row in rows
        if row["outcome"] not in ("right", "refused")
    ] + ([] if rows else ["no kernel was checked"])


def _judge_host(found: Mapping[str, Any], _: str) -> list[str]:
    """The bar is for what comes before the driver, which the launcher alone is not without."""
    cases = found.get("sections", {}).get("host", {}).get("cases", {})
    before = {
        n: c["us"]["routed graph, in C"]["median"] - c["us"]["launcher alone, in C"]["median"] for n, c in cases.items()
    }
    return [f"{name}: {us:.1f} us before the launches, expected at most 6" for name, us in before.items() if us > 6.0]


def _judge_table(found: Mapping[str, Any], _: str) -> list[str]:
    rows = found.get("sections", {}).get("table", {}).get("rows", [])
    differs = []
    for row in rows:
        times = {mode: what["device_us"]["median"] for mode, what in row["modes"].items()}
        ours, others = times.pop("autofuse", None), times
        name = f"{row['case']}, {row['size']}"
        if ours is None:
            differs.append(f"{name}: {row['errors'].get('autofuse', 'not measured')[:300]}")
            continue
        best = min(others, key=lambda mode: others[mode])
        if ours > 1.03 * others[best]:
            differs.append(f"{name}: {ours:.1f} us, {best} {others[best]:.1f} us")
    return differs


JUDGES: dict[str, Callable[[Mapping[str, Any], str], list[str]]] = {
    "doctor": _judge_doctor,
    "check": _judge_check,
    "host": _judge_host,
    "table": _judge_table,
}


# ---- the run ----------------------------------------------------------------------------------------------


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gpu-hour", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="beginnings of names of parts, separated by commas")
    parser.add_argument("--minutes", type=float, default=55.0, help="the run ends by itself within this time")
    parser.add_argument("--out", type=Path, help="folder for results; default: gpu-hour in the temporary folder")
    parser.add_argument("--again", action="store_true", help="also parts that have been done")
    parser.add_argument("--checked", type=Path, help="results of gpu.py: kernels that were right are not checked again")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="few steps and small sizes; proves nothing about speed")
    return parser.parse_args()


def wanted(only: str, device: str) -> list[Part]:
    names = [name.strip() for name in only.split(",") if name.strip()]
    if unknown := [n for n in names if not any(part.name.startswith(n) for part in PARTS)]:
        known = ", ".join(part.name for part in PARTS)
        sys.exit(f"--only: expected beginnings of {known}; found {', '.join(unknown)}")
    needs_gpu = ("streams", "out_of_memory", "bad_index")  # which make no sense elsewhere
    return [
        part
        for part in PARTS
        if (not names or any(part.name.startswith(n) for n in names))
        and (device == "cuda" or part.name not in needs_gpu)
    ]


def _gpus() -> dict[str, Any]:
    count = torch.cuda.device_count()
    return {"gpus": [torch.cuda.get_device_name(index) for index in range(count)], "cuda": torch.version.cuda}


def page(outcomes: Sequence[Outcome], open_parts: Sequence[str]) -> str:
    lines = ["What differed from expectation", ""]
    for outcome in outcomes:
        if outcome.differs:
            lines += [f"{outcome.part} ({outcome.seconds:.0f} s)", *(f"  - {text}" for text in outcome.differs)]
    as_expected = [outcome.part for outcome in outcomes if not outcome.differs]
    lines += ["", f"As expected: {', '.join(as_expected) or 'nothing'}"]
    if open_parts:
        lines.append(f"Not done yet: {', '.join(open_parts)}; the same command goes on")
    return "\n".join(lines) + "\n"


def main() -> int:
    options = parse()
    folder = options.out or Path(tempfile.gettempdir()) / "gpu-hour"
    ends = time.monotonic() + 60 * options.minutes
    hour = Hour(folder.resolve(), options.device, options.quick, ends, options.checked)
    (hour.folder / "logs").mkdir(parents=True, exist_ok=True)
    kept = hour.folder / "hour.json"
    before = {} if options.again or not kept.exists() else json.loads(kept.read_text())["parts"]
    outcomes = {name: Outcome(**(row | {"differs": tuple(row["differs"])})) for name, row in before.items()}
    parts = wanted(options.only, options.device)

    def do(part: Part) -> None:
        if part.name in outcomes or hour.left() < 5:
            return
        outcome = execute(hour, part)
        if hour.left() < 0:
            return  # cut short: the next call makes it anew
        outcomes[part.name] = outcome
        save(kept, "gpu_hour", **_gpus(), parts={name: asdict(found) for name, found in outcomes.items()})
        state = f"{len(outcome.differs)} differences" if outcome.differs else "as expected"
        print(f"{part.name:16s} {outcome.seconds:6.1f} s  {state}", flush=True)

    side_by_side = max(1, min(6, len(os.sched_getaffinity(0)) // 2))
    with ThreadPoolExecutor(side_by_side) as pool:
        list(pool.map(do, [part for part in parts if not part.is_timed]))
    for part in parts:
        if part.is_timed:
            do(part)
    done = [outcomes[part.name] for part in parts if part.name in outcomes]
    text = page(done, [part.name for part in parts if part.name not in outcomes])
    (hour.folder / "page.txt").write_text(text)
    print(f"\n{text}\nResults: {kept}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
