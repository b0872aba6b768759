"""Scripts that train for hours under autofuse: is their memory flat, are steps as fast at the end as before?

    scripts/soak                                  # each script for an hour
    scripts/soak --only shapes --minutes 1440     # a day
    scripts/soak --plain                          # in plain Python: what grows there is not autofuse's
    scripts/soak --quick                          # a minute; proves nothing

In: the scripts of `soak_scripts`, run with `autofuse run` on a store of their own. Every five seconds the resident
memory and the open files of the script, of the daemon with its workers, and of the process that keeps the store are
read, and the bytes of the store's folder. Out: for each of them the slope an hour (least squares), with a 95 % interval
from resampled blocks of a minute, after the first third and in the last third; and how long steps of one fixed shape
take in the last third over the middle one, each over a piece of plain torch right after it. The last third decides: a
leak goes on in it, and what is met and tuned for the first time does not. A slope counts as growing where its interval
begins above 1 % of its mean an hour, as flat where it ends below, and else as open: the run was too short or too
uneven. New shapes without end spread the resident memory of plain Python, too: malloc keeps what it cannot join. So the
scripts also say what malloc has given out and how many blocks Python has, and ``--plain`` measures plain Python, in
rows of their own. Writes benchmarks/results/soak.json.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from common import arguments, chosen, commit, parse, print_end, save

SCRIPTS = Path(__file__).with_name("soak_scripts")
NAMES = ("shapes", "models")
EVERY_SECONDS = 5.0
BLOCK = 12  # samples, a minute: neighbours are alike, so whole blocks are drawn
DRAWS = 1000
GROWS = 0.01  # of the mean, an hour
_PATHS = re.compile(r" Next: .*| \(autofuse [^)]*\)")  # what autofuse says to type, with this run's store in it


@dataclass
class Series:
    """Samples of one quantity over the hours since the beginning."""

    at: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, at: float, value: float) -> None:
        self.at.append(at)
        self.values.append(value)

    def late(self, share: float) -> Series:
        """Without the first samples, which this share of the time has."""
        begin = share * self.at[-1] if self.at else 0.0
        kept = [(at, value) for at, value in zip(self.at, self.values, strict=True) if at >= begin]
        return Series([at for at, _ in kept], [value for _, value in kept])


def slope(at: Sequence[float], values: Sequence[float]) -> float:
    """By least squares, an hour; 0 where all samples are of one moment."""
    if len(set(at)) < 2:
        return 0.0
    return statistics.linear_regression(at, values).slope


def with_interval(
    series: Series, draw: random.Random, of: Callable[..., float] = slope, after: float = 1 / 3
) -> dict[str, Any]:
    """The slope of the samples after this share of the time, its 95 % interval, their mean, and a `verdict`."""
    late = series.late(after)
    count = len(late.at)
    blocks = [range(start, min(start + BLOCK, count)) for start in range(0, count, BLOCK)]
    found = []
    for _ in range(DRAWS if len(blocks) > 1 else 0):
        places = [place for _ in blocks for place in draw.choice(blocks)]
        found.append(of([late.at[p] for p in places], [late.values[p] for p in places]))
    found.sort()
    low, high = (found[int(0.025 * DRAWS)], found[int(0.975 * DRAWS)]) if found else (None, None)
    mean = statistics.fmean(late.values) if late.values else 0.0
    return {
        "samples": count,
        "mean": mean,
        "last": late.values[-1] if late.values else 0.0,
        "an_hour": of(late.at, late.values) if count else 0.0,
        "low": low,
        "high": high,
        "verdict": verdict(low, high, mean),
    }


def verdict(low: float | None, high: float | None, mean: float) -> str:
    """Of a slope an hour, from its interval: "grows", "flat" or "open"."""
    if low is None or high is None:
        return "open"
    if low > GROWS * mean:
        return "grows"
    return "flat" if high < GROWS * mean or low == high == 0.0 else "open"


# ---- one script -------------------------------------------------------------------------------------------------


def roles(script: psutil.Process, store: Path) -> dict[str, list[psutil.Process]]:
    """The processes of a run: the script itself, the daemon with its workers, and the one that keeps the store."""
    found: dict[str, list[psutil.Process]] = {"script": [script], "daemon": [], "store": []}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if process.pid == script.pid or not any(str(store) in word for word in words):
                continue
            if "daemon" in words and "serve" in words:
                found["daemon"] += [process, *process.children(recursive=True)]
            else:
                found["store"].append(process)
    return found


def sample(found: dict[str, list[psutil.Process]], at: float, series: dict[str, Series]) -> None:
    for role, processes in found.items():
        memory = handles = 0
        for process in processes:
            with contextlib.suppress(psutil.Error):
                memory += process.memory_info().rss
                handles += process.num_fds()
        if memory:
            series.setdefault(f"{role}_bytes", Series()).add(at, memory)
            series.setdefault(f"{role}_files", Series()).add(at, handles)


def folder_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.stat().st_size
    return total


def soak(name: str, seconds: float, is_plain: bool = False) -> dict[str, Any]:
    """One script for so many seconds, under autofuse or in plain Python. Exits where it fails."""
    series: dict[str, Series] = {}
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as errors:
        store, lines = Path(folder, "kept", "store.sqlite3"), Path(folder, "lines")
        store.parent.mkdir(mode=0o700)
        under = [] if is_plain else ["-m", "autofuse", "run", "--store", store]
        command = [sys.executable, *under, SCRIPTS / f"{name}.py", seconds, lines]
        began = time.monotonic()
        process = subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, stderr=errors)
        script = psutil.Process(process.pid)
        try:
            while process.poll() is None:
                at = (time.monotonic() - began) / 3600
                sample(roles(script, store), at, series)
                if not is_plain:
                    series.setdefault("kept_bytes", Series()).add(at, folder_bytes(store.parent))
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(EVERY_SECONDS)
        finally:
            stop = [sys.executable, "-m", "autofuse", "daemon", "stop", "--store", str(store)]
            process.kill()
            subprocess.run(stop, capture_output=True)
        errors.seek(0)
        said = errors.read().decode(errors="replace").strip().splitlines()
        if process.returncode != 0:
            sys.exit(f"{name}: exit code {process.returncode}: {(said or ['nothing was said'])[-1]}")
        printed = [json.loads(line) for line in lines.read_text().splitlines()]
        gained = {} if is_plain else _gained(store)
    for said_line in printed:
        for key in ("malloc_bytes", "python_blocks"):
            series.setdefault(f"script_{key}", Series()).add(said_line["at"] / 3600, said_line[key])
    draw = random.Random(0)
    minutes = {key: [round(value) for value in found.values[::BLOCK]] for key, found in series.items()}
    return {
        "script": name_of(name, is_plain),
        "commit": commit(),
        "seconds": seconds,
        "steps": printed[-1]["steps"],
        "met": {key: printed[-1][key] for key in ("shapes", "models") if key in printed[-1]},
        **gained,
        "slopes": {key: with_interval(found, draw) for key, found in series.items()},
        "last_third": {key: with_interval(found, draw, after=2 / 3) for key, found in series.items()},
        "steps_late_over_middle": pace(printed, seconds, draw),
        "minutes": minutes,  # one sample a minute of each, to see whether it grows by steps
        "said": [_PATHS.sub("", text) for text in said if text.startswith("autofuse: ")],
    }


def _gained(store: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "autofuse", "report", "--json", "--store", str(store)]
    totals = json.loads(subprocess.run(command, capture_output=True).stdout)["totals"]
    return {
        "speedup": [totals[key] for key in ("speedup_median", "speedup_low", "speedup_high")],
        "fused_calls": totals["fused_calls"],
        "unfused_calls": totals["unfused_calls"],
    }


def name_of(script: str, is_plain: bool) -> str:
    """Of a row."""
    return f"{script}, plain Python" if is_plain else script


def pace(printed: Sequence[dict[str, Any]], seconds: float, draw: random.Random) -> dict[str, Any] | None:
    """Median of the steps of one shape, each over plain torch, in the last third of the run over that in the middle."""
    thirds: list[list[float]] = [[], [], []]
    for line in printed:
        thirds[min(2, int(3 * line["at"] / seconds))] += line["probes"]
    middle, late = thirds[1], thirds[2]
    if len(middle) < 10 or len(late) < 10:
        return None
    found = sorted(
        statistics.median(draw.choices(late, k=len(late))) / statistics.median(draw.choices(middle, k=len(middle)))
        for _ in range(DRAWS)
    )
    return {
        "median": statistics.median(late) / statistics.median(middle),
        "low": found[int(0.025 * DRAWS)],
        "high": found[int(0.975 * DRAWS)],
        "steps": [len(middle), len(late)],
    }


def _slope(found: dict[str, Any], scale: int) -> str:
    span = "" if found["low"] is None else f" ({found['low'] / scale:+.2f} to {found['high'] / scale:+.2f})"
    return f"{found['an_hour'] / scale:+.2f}{span}"


def line(row: dict[str, Any]) -> str:
    words = [f"{row['script']}: {row['steps']:,} steps, {row['met']}"]
    for key, found in row["slopes"].items():
        unit, scale = ("MiB", 2**20) if key.endswith("_bytes") else ("", 1)
        mean = f"{found['mean'] / scale:.1f} {unit}".strip()
        late = row["last_third"][key]
        decided = f"{_slope(late, scale)} in the last third: {late['verdict']}"
        words.append(f"  {key}: {mean}, {_slope(found, scale)} an hour after the first third, {decided}")
    if row["steps_late_over_middle"] is not None:
        found = row["steps_late_over_middle"]
        words.append(
            f"  steps, last third over middle: {found['median']:.3f} ({found['low']:.3f} to {found['high']:.3f})"
        )
    return "\n".join(words)


def main() -> int:
    parser = arguments(__doc__, "soak", quick="a minute each", only="scripts")
    parser.add_argument("--minutes", type=float, default=60.0, help="of each script; default 60")
    parser.add_argument("--plain", action="store_true", help="in plain Python, without autofuse")
    options = parse(parser)
    began = time.monotonic()
    before = json.loads(options.out.read_text())["rows"] if options.out.exists() else []
    rows = {row["script"]: row for row in before}
    for name in chosen(options.only, NAMES):
        row = soak(name, 60.0 if options.quick else 60.0 * options.minutes, options.plain)
        rows[row["script"]] = row
        order = [name_of(script, is_plain) for script in NAMES for is_plain in (False, True)]
        save(options.out, "soak", rows=[rows[key] for key in order if key in rows])
        print(line(row), flush=True)
    print_end({}, [], options.out, began)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
