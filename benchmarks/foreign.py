"""Twelve training and inference scripts that were not written for autofuse, under plain python and under autofuse.

    python benchmarks/foreign.py                           # all of it, some twenty-seven minutes
    python benchmarks/foreign.py --only gpt2,bert --rounds 3
    python benchmarks/foreign.py --quick                   # a trial of the benchmark itself, within two minutes

Bars on two cores, total time over eager's: cold at most 1.05x where nothing is captured and at most 1.3x at any number
of steps where something is; warm at most 1.02x at any number of steps and at most 0.9x at 400; steady state at least
1.3x of eager's speed in the geometric mean; no loss beyond its bound in any run.

Each script is run as a user runs it; it prints a line a step, and the arrival of that line is the clock. In a round
these whole processes take turns:

- plain: `python SCRIPT`
- cold: `autofuse run SCRIPT` without a store
- again: the same as plain; what differs is noise, and no other figure of the script says more than that. All others are
  compared with the mean of both, step by step
- tuned: `autofuse run --tune wait SCRIPT` without a store, with at most `TUNING_SECONDS` of pauses for tuning
- warm: `autofuse run SCRIPT` on the store that the tuned run has made
- reordered: plain python on one thread and with vectors of another width (`ATEN_CPU_CAPABILITY`), whose sums are added
  up in another order

Total at step N is the time from the launch of the process to the line of step N, imports included. Draws are seeded, so
that step N has the same shapes in all runs. The true cost of a capture is what the script lost to it by the clock: of
all steps from the first that takes `STALL_SECONDS` longer than plain python's, the time above that of the same steps in
plain python, as far as a step takes more than `SLOW` times as long. Steady state: the same steps' time in plain python
over that in autofuse, the median of the last third. Loss: the largest relative difference to plain python's at any
step. Training multiplies any difference from step to step, and jumps where a gradient near nothing changes its sign
(RMSprop's first steps), at one step or another. So the bound is set by eager itself: `DRIFT` times the largest
difference that reordered sums made up to a step `AHEAD` times as late, and at least `LEAST_DRIFT`. A run beside which
others took more than `DISTURBED` of a core is marked: its times say little.

Results are written to benchmarks/results/foreign.json after each script, with hardware, versions and commit.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from common import arguments, chosen, commit, encode_json, parse, print_end, save

from autofuse.daemon import control
from autofuse.daemon.throttle import cpu_seconds
from autofuse.settings.layers import load
from autofuse.tuner.machine_load import busy_seconds

HERE = Path(__file__).parent
SCRIPTS, EXAMPLES = HERE / "foreign_scripts", HERE.parent / "examples"
STEPS = 400
MARKS = (50, 150, 400)
TUNING_SECONDS = 40.0
RUN_SECONDS = 300.0  # after which a run is ended and left out
STALL_SECONDS = 0.1
SLOW = 1.5  # a step that takes so many times as long as plain python's has lost something
DISTURBED = 0.1  # of one core, taken by processes that are none of ours while a run lasts
DRIFT = 20.0
AHEAD = 2
LEAST_DRIFT = 1e-4
RUNS = ("cold", "plain", "tuned", "again", "warm")  # warm needs the store of tuned, and plain is near all
LINE = re.compile(r"^(?:step|request) (\d+) (?:loss|checksum) (\S+)$")


@dataclass(frozen=True)
class Script:
    """A file and its arguments; ``{steps}`` stands for the number of steps."""

    name: str
    path: Path
    arguments: tuple[str, ...] = ("{steps}",)
    needs: str = ""  # a package

    def command(self, steps: int) -> list[str]:
        return [str(self.path), *(word.format(steps=steps) for word in self.arguments)]


SHOWN = ("--log-every", "1")
TABLE = (
    Script("gpt2", SCRIPTS / "gpt2.py", needs="transformers"),
    Script("bert", SCRIPTS / "bert.py", needs="transformers"),
    Script("llama", SCRIPTS / "llama.py", needs="transformers"),
    Script("vit", SCRIPTS / "vit.py", needs="transformers"),
    Script("resnet", SCRIPTS / "resnet.py"),
    Script("lstm_cell", SCRIPTS / "lstm_cell.py"),
    Script("mlp", SCRIPTS / "mlp.py"),
    Script("breaks", SCRIPTS / "breaks.py"),
    Script("gan", SCRIPTS / "gan.py"),
    Script("vae", SCRIPTS / "vae.py"),
    Script("cnn", EXAMPLES / "train_cnn.py", ("--steps", "{steps}", "--width", "8", *SHOWN)),
    Script("infer", EXAMPLES / "infer.py", ("--requests", "{steps}", "--width", "128", *SHOWN)),
)


@dataclass
class Run:
    """One process. Seconds since its launch."""

    script: str
    round: int
    kind: str
    steps: int
    at: list[float]  # the arrival of each step's line
    losses: list[float]
    ended: float
    exit_code: int
    errors: str = ""  # the end of what it wrote on stderr
    report: dict[str, Any] = field(default_factory=dict)
    others_seconds: float = 0.0  # of processors, that processes which are none of ours worked while it lasted

    @property
    def is_disturbed(self) -> bool:
        """Whether somebody else computed beside it."""
        return self.others_seconds > DISTURBED * self.ended

    def step_seconds(self) -> list[float]:
        """Of each step; the first one's begins at the launch."""
        return [later - earlier for earlier, later in zip([0.0, *self.at], self.at, strict=False)]


# ---- running --------------------------------------------------------------------------------------------------


def run(script: Script, kind: str, number: int, steps: int, folder: Path) -> Run:
    """One process of a script, to its end."""
    store = folder / f"{script.name}-{number}-{'tuned' if kind in ('tuned', 'warm') else kind}" / "store.sqlite3"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AUTOFUSE_")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # packages are compiled once, as a user's are
    command = [sys.executable]
    if kind == "reordered":
        # Both: convolutions of oneDNN know nothing of aten's choice, and small products are not shared among threads.
        environment["OMP_NUM_THREADS"] = "1"
        environment["ATEN_CPU_CAPABILITY"] = (
            "avx2" if "AVX512" in torch.backends.cpu.get_cpu_capability() else "default"
        )
    elif kind not in ("plain", "again"):
        store.parent.mkdir(mode=0o700, exist_ok=True)
        command += ["-m", "autofuse", "run", "--store", str(store)]
        if kind == "tuned":
            command += ["--tune", "wait", "--set", f"tuner.budget_seconds={TUNING_SECONDS}"]
    command += script.command(steps)
    found = Run(script.name, number, kind, steps, [], [], 0.0, -1)
    with tempfile.TemporaryFile("w+") as errors:
        began, busy, own = time.monotonic(), busy_seconds(), own_seconds()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
        assert process.stdout is not None
        for line in process.stdout:
            now = time.monotonic() - began
            match = LINE.match(line.strip())
            if match is not None:
                found.at.append(now)
                found.losses.append(float(match[2]))
            if now > RUN_SECONDS:
                process.kill()
        found.exit_code = process.wait()
        found.ended = time.monotonic() - began
        busy, own = busy_seconds() - busy, own_seconds() - own
        errors.seek(0)
        found.errors = errors.read()[-2000:]
    if store.exists():
        settings = load(cli={"run.store": store}, environ={}, cwd=folder)
        pid = control.running_pid(settings)
        own += cpu_seconds(pid) if pid else 0.0
        found.report = report_of(store)
        control.stop(settings)
    found.others_seconds = max(0.0, busy - own)
    return found


def own_seconds() -> float:
    """Processor seconds of the processes that were started here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def report_of(store: Path) -> dict[str, Any]:
    """What the newest run says of itself."""
    command = [sys.executable, "-m", "autofuse", "report", "--json", "--store", str(store)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return {"problem": done.stderr.strip()}
    data = json.loads(done.stdout)
    roots = [{k: v for k, v in root.items() if k not in ("root", "dynamic_dims")} for root in data["roots"]]
    return {"totals": data["totals"], "roots": roots, "events": data["events"]}


# ---- what the runs say ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """A run of autofuse beside plain python's of the same round."""

    script: str
    kind: str
    round: int
    totals: dict[int, float]  # over plain's, by step
    worst_total: float  # the largest at any step from the tenth on
    end: float  # of the whole process
    captured_at: int  # the step of the first stall, 0 for none
    predicted_seconds: float
    reported_seconds: float
    true_seconds: float
    steady: float  # plain's time over this one's
    loss_difference: float  # the largest, relative
    loss_bound: float  # at the step where it is nearest to its bound
    within_bound: bool
    states: str  # of the roots
    is_disturbed: bool  # either of the two


def mean_of(one: Run, other: Run) -> Run:
    """Two runs of the same kind as one."""
    at = [(a + b) / 2 for a, b in zip(one.at, other.at, strict=False)]
    ended, others = (one.ended + other.ended) / 2, max(one.others_seconds, other.others_seconds)
    return replace(one, at=at, ended=ended, others_seconds=others, exit_code=one.exit_code or other.exit_code)


def compare(plain: Run, other: Run, reordered: Run) -> Comparison:
    """Raises ValueError where the runs do not have the same steps."""
    for run in (plain, other, reordered):
        if len(run.at) != run.steps or run.exit_code:
            raise ValueError(f"{run.kind}: {len(run.at)} of {run.steps} steps, exit code {run.exit_code}: {run.errors}")
    ours, theirs = other.step_seconds(), plain.step_seconds()
    stalls = [n for n in range(1, len(ours)) if ours[n] - theirs[n] > STALL_SECONDS and ours[n] > SLOW * theirs[n]]
    roots = other.report.get("roots", [])
    # One that is not captured may have waited a moment for what the store knows of it.
    captured = [root for root in roots if root["state"] == "captured" or root["capture_seconds"] > STALL_SECONDS]
    first = stalls[0] if stalls and captured else len(ours)
    paused = other.report.get("totals", {}).get("paused_seconds", 0.0) if other.kind == "tuned" else 0.0
    lost = sum(o - t for o, t in zip(ours[first:], theirs[first:], strict=True) if o > SLOW * t)
    tail = len(ours) * 2 // 3
    ratios = [o / t for o, t in zip(other.at, plain.at, strict=True)]
    difference, bound, is_within = losses(plain, other, reordered)
    return Comparison(
        script=other.script,
        kind=other.kind,
        round=other.round,
        totals={mark: ratios[mark - 1] for mark in MARKS if mark <= len(ratios)},
        worst_total=max(ratios[9:], default=0.0),
        end=other.ended / plain.ended,
        captured_at=first + 1 if first < len(ours) else 0,
        predicted_seconds=sum(root["predicted_capture_seconds"] for root in captured),
        reported_seconds=sum(root["capture_seconds"] for root in captured),
        true_seconds=max(0.0, lost - paused),
        steady=statistics.median(t / o for o, t in zip(ours[tail:], theirs[tail:], strict=True)),
        loss_difference=difference,
        loss_bound=bound,
        within_bound=is_within,
        states=", ".join(f"{root['name']} {root['state']} ({root['reason']})" for root in roots),
        is_disturbed=plain.is_disturbed or other.is_disturbed,
    )


def losses(plain: Run, other: Run, reordered: Run) -> tuple[float, float, bool]:
    """The largest relative difference, the bound where it is used up most, and whether all are within theirs."""
    largest, tightest, bound_there, is_within = 0.0, -1.0, 0.0, True
    drifts = list(accumulate(relative(plain.losses, reordered.losses), max))
    for number, difference in enumerate(relative(plain.losses, other.losses), 1):
        bound = max(LEAST_DRIFT, DRIFT * drifts[min(AHEAD * number, len(drifts)) - 1])
        largest, is_within = max(largest, difference), is_within and difference <= bound
        if difference / bound > tightest:
            tightest, bound_there = difference / bound, bound
    return largest, bound_there, is_within


def relative(left: Sequence[float], right: Sequence[float]) -> list[float]:
    def one(a: float, b: float) -> float:
        if a == b or (math.isnan(a) and math.isnan(b)):
            return 0.0
        found = abs(a - b) / max(abs(a), 1e-12)
        return math.inf if math.isnan(found) else found

    return [one(a, b) for a, b in zip(left, right, strict=False)]


def bars(found: Sequence[Comparison]) -> dict[str, str]:
    """Each bar with its figure."""
    if not found:
        return {}

    def worst(values: Iterable[float]) -> str:
        known = list(values)
        return f"{max(known):.2f}" if known else "none"

    cold = [c for c in found if c.kind == "cold"]
    warm = [c for c in found if c.kind == "warm"]
    steady = [c.steady for c in found if c.kind == "warm"]
    again = [c.totals[max(c.totals)] for c in found if c.kind == "again" and c.totals]
    costs = [c for c in found if c.true_seconds > 0.2 and c.predicted_seconds and c.kind != "tuned"]
    near = [c for c in costs if 1 / 1.5 <= c.predicted_seconds / c.true_seconds <= 1.5]
    beyond = [f"{c.script} {c.kind}" for c in found if not c.within_bound]
    last = max(MARKS)
    return {
        "cold, never captured, total at most 1.05": worst(c.end for c in cold if not c.captured_at),
        "cold, captured, at any step at most 1.3": worst(c.worst_total for c in cold if c.captured_at),
        "warm at any step at most 1.02": worst(c.worst_total for c in warm),
        f"warm at {last} at most 0.9": worst(c.totals[last] for c in warm if last in c.totals),
        "steady state, geometric mean at least 1.3": (
            f"{statistics.geometric_mean(steady):.2f} ({min(steady):.2f} to {max(steady):.2f})" if steady else "none"
        ),
        "prediction within 1.5x of the true cost": f"{len(near)} of {len(costs)}",
        "plain python again, over plain python, which is noise": (
            f"{min(again):.2f} to {max(again):.2f} in total" if again else "none"
        ),
        "losses beyond their bound": ", ".join(beyond) or "none",
        "disturbed": ", ".join(f"{c.script} {c.kind}" for c in found if c.is_disturbed) or "none",
    }


# ---- the whole ------------------------------------------------------------------------------------------------


@dataclass
class Benchmark:
    out: Path
    steps: int
    commit: str
    runs: list[Run] = field(default_factory=list)
    found: list[Comparison] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def save(self) -> None:
        lists = re.compile(r"\[[^\[\]{}]*\]")
        save(
            self.out,
            "foreign",
            encode=lambda document: lists.sub(lambda m: re.sub(r"\s+", " ", m[0]), encode_json(document)),
            commit=self.commit,
            settings={
                "steps": self.steps,
                "tuning seconds": TUNING_SECONDS,
                "autofuse": "defaults",
                "transformers": version("transformers"),
            },
            bars=bars(self.found),
            comparisons=[asdict(c) for c in self.found],
            left_out=self.left_out,
            runs=[asdict(r) | {"at": rounded(r.at), "losses": r.losses} for r in self.runs],
        )

    def run_script(self, script: Script, rounds: int, folder: Path) -> None:
        reordered = self.one(script, "reordered", 0, self.steps, folder)
        for number in range(rounds):
            runs = {kind: self.one(script, kind, number, self.steps, folder) for kind in RUNS}
            plain = runs["plain"]
            for kind in RUNS:
                if kind == "plain":
                    continue
                try:
                    found = compare(plain if kind == "again" else mean_of(plain, runs["again"]), runs[kind], reordered)
                except ValueError as error:
                    self.left_out.append(f"{script.name}, {error}")
                    print(f"{script.name:10} {error}", flush=True)
                    continue
                self.found.append(found)
                print(line_of(found), flush=True)

    def one(self, script: Script, kind: str, number: int, steps: int, folder: Path) -> Run:
        done = run(script, kind, number, steps, folder)
        self.runs.append(done)
        return done


def line_of(c: Comparison) -> str:
    totals = " ".join(f"{c.totals[mark]:5.2f}" if mark in c.totals else "     " for mark in MARKS)
    costs = f"{c.predicted_seconds:5.1f} {c.reported_seconds:5.1f} {c.true_seconds:5.1f}"
    mark = ("" if c.within_bound else " BEYOND") + (" disturbed" if c.is_disturbed else "")
    return (
        f"{c.script:10} {c.kind:5}  {totals} {c.worst_total:6.2f} {c.captured_at:5d}  {costs}  {c.steady:6.2f}"
        f"  {c.loss_difference:8.1e} of {c.loss_bound:8.1e}{mark}"
    )


HEAD = f"""{"":16}  total over eager's at   worst   capture: at step, seconds   steady  largest loss
{"script":16}  {" ".join(f"{m:5d}" for m in MARKS)}   {"":3}   step   predicted reported true   x     difference"""


def rounded(values: Sequence[float]) -> list[float]:
    return [round(value, 4) for value in values]


def version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        return installed(package)
    except PackageNotFoundError:
        return None


def options() -> argparse.Namespace:
    parser = arguments(__doc__, "foreign", quick="mlp and lstm_cell, 40 steps", only="scripts")
    parser.add_argument("--rounds", type=int, default=1, help="of all runs of a script")
    parser.add_argument("--steps", type=int, default=STEPS)
    return parse(parser)


def main() -> None:
    asked = options()
    began = time.monotonic()
    names = chosen(asked.only, [s.name for s in TABLE], "mlp,lstm_cell" if asked.quick else "")
    benchmark = Benchmark(asked.out, 40 if asked.quick else asked.steps, commit())
    print(HEAD)
    with tempfile.TemporaryDirectory(prefix="autofuse-foreign-") as folder:
        for script in TABLE:
            if script.name not in names:
                continue
            if script.needs and importlib.util.find_spec(script.needs) is None:
                benchmark.left_out.append(f"{script.name}: needs {script.needs}, which is not installed")
                continue
            benchmark.run_script(script, asked.rounds, Path(folder))
            benchmark.save()
    benchmark.save()
    print_end(bars(benchmark.found), benchmark.left_out, asked.out, began)


if __name__ == "__main__":
    main()
