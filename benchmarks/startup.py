"""Start-up: wall time of a training script with varying shapes to 50, 200 and 1000 steps, and of one that is short.

    python benchmarks/startup.py                                  # all of it, half an hour
    python benchmarks/startup.py --parts rounds --rounds 1 --append   # one more round beside those in the result file
    python benchmarks/startup.py --quick                          # a trial of the benchmark itself, within a minute

Bars on two cores, cold: time to 200 steps at most 0.6x of torch.compile's; warm: at most 0.5x of its run on a warm
cache; never above eager's time by more than the capture time that autofuse reports; a script too short for a capture
to pay within 1.05x of eager's total time; any script within 2x of the better of eager and captured.

Whole processes take turns (the first of each round rotates): plain python, `autofuse run` with default settings, that
is, with tuning in the background, and torch.compile of the model, as it is and with dynamic=True. One script, unchanged
for autofuse: `startup_scripts/train_varying.py`, a GPT of 4 layers, width 256, 2,000 tokens, with dropout and AdamW. It
notes the clock after each step; times run from the launch of the process, so that imports, capture, compilation and
the daemon at work are in them. Cold: autofuse has no store, torch.compile an empty cache directory. Warm: autofuse has
a copy of a store whose daemon has worked off what a run of 200 steps "at once" had asked for, torch.compile the cache
directory of the cold run before it. "at once" is autofuse without a store that captures at the first call, whatever
that costs: the other choice in hindsight. "no tuning" is with --tune off: what captured graphs cost and gain without a
daemon beside them. Daemons are stopped when their script has ended; files are in the page cache
of the system from a first run that is not counted.

Ratios are taken within a round, and given with their range over the rounds, which are too few for an interval. The
part "long" is one round of 1000 steps, with those contenders that a run of 200 steps shows to take less than two
minutes. The part "short" is runs of 5 and 20 steps: without a store, with the store of a run as short, and with that
of a run of 200 steps. Results are written to benchmarks/results/startup.json after each process, with the commit.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from common import arguments, commit, encode_json, parse, print_end, save

from autofuse.daemon import control
from autofuse.settings.layers import Settings, load

SCRIPT = Path(__file__).with_name("startup_scripts") / "train_varying.py"
MARKS = (50, 200, 1000)
STEPS = 200
LONG_STEPS = 1000
LONG_SECONDS = 120.0
ONCE_SECONDS = 30.0  # a contender that takes longer is in the first round only
SHORT_STEPS = (5, 20)
SHORT_ROUNDS = 5
TUNING_SECONDS = 400.0  # at most, until the daemon has worked off a cold run's requests
CALM_SECONDS = 3.0  # a daemon idle for so long has nothing left that it may work on
PARTS = ("short", "rounds", "long")
LONG_STORE = "autofuse, long run's store"
# What is run together, in this order: a warm cache is that of the cold run before.
UNITS = (
    ("eager",),
    ("autofuse cold",),
    ("compile cold", "compile warm"),
    ("autofuse warm",),
    ("compile dynamic cold", "compile dynamic warm"),
    ("autofuse at once",),
    ("autofuse cold, no tuning",),
    ("autofuse warm, no tuning",),
)
CONTENDERS = tuple(name for unit in UNITS for name in unit)


@dataclass
class Run:
    """One process. Seconds since its launch."""

    part: str
    round: int
    contender: str
    steps: int
    total_seconds: float  # to the end of the process
    imported_seconds: float
    at: dict[int, float]  # the end of a step; every step up to 20, then one in ten
    first_loss: float
    last_loss: float
    commit: str
    report: dict[str, Any] = field(default_factory=dict)  # of autofuse


@dataclass
class Benchmark:
    out: Path
    folder: Path  # for stores and caches, of this run
    script_arguments: tuple[str, ...]
    commit: str
    keep: Path | None = None  # the store of the warm runs, where it is to outlive this run
    runs: list[Run] = field(default_factory=list)
    tuning: dict[str, Any] = field(default_factory=dict)  # what came between cold and warm
    shapes: dict[str, Any] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def save(self) -> None:
        save(
            self.out,
            "startup",
            encode=lambda document: re.sub(r"\{[^{}]{0,6000}\}", on_one_line, encode_json(document)),
            settings={
                "autofuse": "default; --tune background, --store in a temporary folder",
                "compile": "torch.compile(model), fullgraph off",
                "dynamic flags": {"compile": None, "compile dynamic": True},
                "recompile_limit": torch._dynamo.config.recompile_limit,
                "automatic_dynamic_shapes": torch._dynamo.config.automatic_dynamic_shapes,
                "malloc": "as glibc has it",
                "script": " ".join(["train_varying.py", *self.script_arguments]),
            },
            shapes=self.shapes,
            figures=figures(self.runs),
            tuning_between_cold_and_warm=self.tuning,
            left_out=self.left_out,
            runs=[asdict(run) for run in self.runs],
        )

    def take_up(self) -> None:
        """What the result file holds, to be added to."""
        found = json.loads(self.out.read_text())
        for run in found["runs"]:
            self.runs.append(Run(**run | {"at": {int(step): seconds for step, seconds in run["at"].items()}}))
        self.tuning, self.shapes = found["tuning_between_cold_and_warm"], found["shapes"]
        self.left_out = found["left_out"]

    def rounds_of(self, part: str) -> int:
        """Rounds that have begun."""
        return 1 + max((run.round for run in self.runs if run.part == part), default=-1)


def on_one_line(found: re.Match[str]) -> str:
    """Steps and their times take one line, not one each."""
    text = found.group(0)
    return re.sub(r"\s*\n\s*", " ", text) if re.match(r'\{\s*"1":', text) else text


# ---- processes ------------------------------------------------------------------------------------------------------


def launch(run: Benchmark, part: str, number: int, contender: str, steps: int, place: Path) -> Run:
    """Run the script to its end; ``place`` is the folder of its store or cache."""
    place.mkdir(parents=True, exist_ok=True)
    stamps = place / "stamps.json"
    stamps.unlink(missing_ok=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AUTOFUSE_", "STARTUP_"))}
    environment = kept | {"STARTUP_STAMPS": str(stamps), "TORCHINDUCTOR_CACHE_DIR": str(place / "inductor")}
    if contender.startswith("compile"):
        environment["STARTUP_COMPILE"] = "dynamic" if "dynamic" in contender else "default"
    command = [sys.executable]
    if contender.startswith("autofuse"):
        command += ["-m", "autofuse", "run", "--store", str(place / "store.sqlite3")]
        if contender == "autofuse at once":
            command += ["--set", "capture.at_once=true"]
        if contender.endswith("no tuning"):
            command += ["--tune", "off"]
    command += [str(SCRIPT), "--steps", str(steps), *run.script_arguments]
    with open(place / "output.txt", "w") as output:
        began = time.monotonic()
        code = subprocess.run(command, env=environment, cwd=place, stdout=output, stderr=subprocess.STDOUT).returncode
        seconds = time.monotonic() - began
    if code:
        tail = "\n".join((place / "output.txt").read_text().splitlines()[-5:])
        raise SystemExit(f"expected {' '.join(command)} to end well, found exit code {code}:\n{tail}")
    told = json.loads(stamps.read_text())
    at = {step: stamp - began for step, stamp in enumerate(told["stamps"], 1)}
    shown = {step: round(at[step], 4) for step in at if step <= 20 or step % 10 == 0}
    note_shapes(run, told["shapes"])
    found = Run(
        part, number, contender, steps, round(seconds, 4), round(told["imported"] - began, 4), shown,
        told["losses"][0], told["losses"][-1], run.commit,
    )  # fmt: skip
    run.runs.append(found)
    marks = "  ".join(f"{m}: {at[m]:6.1f} s" for m in (*SHORT_STEPS, *MARKS) if m in at)
    print(f"{part} {number}  {found.contender:24s}{marks}  total {seconds:6.1f} s", flush=True)
    return found


def note_shapes(run: Benchmark, seen: Sequence[Sequence[int]]) -> None:
    if len(seen) > run.shapes.get("steps", 0):
        lengths = sorted(length for _, length in seen)
        run.shapes = {
            "steps": len(seen),
            "distinct": len({tuple(s) for s in seen}),
            "first": [list(s) for s in seen[:10]],
            "batch": {str(b): sum(s[0] == b for s in seen) for b in sorted({s[0] for s in seen})},
            "length_quartiles": [lengths[0], *(lengths[len(lengths) * q // 4] for q in (1, 2, 3)), lengths[-1]],
        }


def settings_of(place: Path) -> Settings:
    return load(cli={"run.store": place / "store.sqlite3"}, environ={}, cwd=place)


def measure_autofuse(run: Benchmark, part: str, number: int, contender: str, steps: int, place: Path) -> Run:
    """A run with its report; the daemon is stopped afterwards, so that it takes nothing from who comes next."""
    found = launch(run, part, number, contender, steps, place)
    found.report = report_of(place)
    control.stop(settings_of(place))
    run.save()
    return found


def report_of(place: Path) -> dict[str, Any]:
    """What ``autofuse report --json`` says of the newest run."""
    command = [sys.executable, "-m", "autofuse", "report", "--json", "--store", str(place / "store.sqlite3")]
    answer = subprocess.run(command, capture_output=True, text=True, cwd=place)
    if answer.returncode:
        return {"unreadable": answer.stderr.strip()[-300:]}
    data = json.loads(answer.stdout)
    keys = (
        "capture_seconds", "tuning_seconds", "speedup_median", "speedup_low", "speedup_high", "speedup_pairs",
        "held_out_steps", "fused_calls", "unfused_calls", "break_even_step", "observer_overhead_percent",
    )  # fmt: skip
    totals = {key: data["totals"][key] for key in keys}
    roots = [
        {k: r[k] for k in ("name", "state", "reason", "calls", "predicted_capture_seconds")} for r in data["roots"]
    ]
    events = [e["kind"] for e in data["events"] if e["kind"] not in ("graph", "graphs")]
    return totals | {"roots": roots, "queue": data["queue"], "events": sorted(set(events))}


def wait_for_daemon(place: Path) -> dict[str, Any]:
    """Until it has nothing left that it may work on: the queue is empty, or the run's budget spent."""
    settings, began, calm_since = settings_of(place), time.monotonic(), time.monotonic()
    while time.monotonic() - began < TUNING_SECONDS:
        state = control.status(settings)
        if state is None or (state.state == "idle" and state.done + state.failed):
            if time.monotonic() - calm_since > CALM_SECONDS:
                break
        else:
            calm_since = time.monotonic()
        time.sleep(0.2)
    state = control.status(settings)
    control.stop(settings)
    found: dict[str, Any] = {
        "seconds": round(time.monotonic() - began - CALM_SECONDS, 1),
        "queue": report_of(place)["queue"],
    }
    if state is not None:
        found |= {"done": state.done, "failed": state.failed, "state": state.state}
    return found


def tuned_store(run: Benchmark) -> Path:
    """The folder of a store that has seen a run of 200 steps with a capture, and all tuning that it asked for."""
    place = run.keep or run.folder / "tuned"
    if not (place / "tuned.json").exists():
        launch(run, "tuning", 0, "autofuse at once", run_steps(run), place)
        run.runs.pop()  # not one of a round
        found = wait_for_daemon(place)
        (place / "tuned.json").write_text(json.dumps(found))
        print(f"tuning went on for {found['seconds']:.0f} s after the run: {found}", flush=True)
    run.tuning = json.loads((place / "tuned.json").read_text())
    return place


def copy_of(place: Path, target: Path) -> Path:
    """A store as it is now, without what belongs to its daemon."""
    target.mkdir(parents=True, exist_ok=True)
    for file in place.glob("store.sqlite3*"):
        if file.is_dir():
            shutil.copytree(file, target / file.name)  # kept graphs
        elif ".daemon" not in file.name and not file.name.endswith((".lock", ".urgent")):
            shutil.copy2(file, target / file.name)
    return target


def run_steps(run: Benchmark) -> int:
    return STEPS if not run.script_arguments else 20  # --quick


# ---- parts ----------------------------------------------------------------------------------------------------------


def measure(run: Benchmark, part: str, number: int, contender: str, steps: int) -> Run:
    """One process of a contender of a round."""
    place = run.folder / f"{part}-{number}-{contender.replace(' ', '-')}"
    if contender.startswith("autofuse warm"):
        copy_of(tuned_store(run), place)
    if contender.startswith("autofuse"):
        return measure_autofuse(run, part, number, contender, steps, place)
    if contender.endswith("warm"):
        place = run.folder / f"{part}-{number}-{contender.replace(' ', '-')[: -len('warm')]}cold"
    found = launch(run, part, number, contender, steps, place)
    if contender.endswith("warm"):
        shutil.rmtree(place, ignore_errors=True)
    run.save()
    return found


def measure_round(run: Benchmark, part: str, contenders: Sequence[str], steps: int) -> None:
    number = run.rounds_of(part)
    for unit in [*UNITS[number % len(UNITS) :], *UNITS[: number % len(UNITS)]]:
        if any(r.contender in unit and r.part == part and r.total_seconds > ONCE_SECONDS for r in run.runs):
            note(run, f"{', '.join(unit)}: first round only, for a run takes more than {ONCE_SECONDS:.0f} s")
            continue
        for contender in unit:
            if contender in contenders:
                measure(run, part, number, contender, steps)


def measure_long(run: Benchmark, contenders: Sequence[str]) -> None:
    """1000 steps; a round is filled up over several calls, since it takes ten minutes."""
    for contender in contenders:
        if any(r.part == "long" and r.contender == contender for r in run.runs):
            continue
        seen = [r for r in run.runs if r.contender == contender and r.part == "rounds" and STEPS in r.at]
        if not seen:
            note(run, f"{contender}: 1000 steps: not run, for a run of 200 steps is not known")
            continue
        expected = statistics.median(r.at[200] + 8 * (r.at[200] - r.at[100]) for r in seen)
        if expected > LONG_SECONDS:
            note(run, f"{contender}: 1000 steps: not run, expected to take {expected:.0f} s")
            continue
        measure(run, "long", 0, contender, LONG_STEPS)


def note(run: Benchmark, text: str) -> None:
    if text not in run.left_out:
        run.left_out.append(text)


def measure_short(run: Benchmark, rounds: int, lengths: Sequence[int]) -> None:
    """Scripts too short for a capture to pay."""
    tuned = tuned_store(run)
    names = ("eager", "autofuse cold", LONG_STORE)
    for _ in range(rounds):
        number = run.rounds_of("short")
        for steps in lengths:
            place = run.folder / f"short-{number}-{steps}"
            for name in [*names[number % 3 :], *names[: number % 3]]:
                if name == "eager":
                    launch(run, "short", number, name, steps, place / "eager")
                elif name == LONG_STORE:
                    measure_autofuse(run, "short", number, name, steps, copy_of(tuned, place / "long"))
                else:
                    measure_autofuse(run, "short", number, name, steps, place / "own")
                    measure_autofuse(run, "short", number, "autofuse warm", steps, place / "own")
            shutil.rmtree(place, ignore_errors=True)
    run.save()


# ---- figures --------------------------------------------------------------------------------------------------------


def figures(runs: Sequence[Run]) -> dict[str, Any]:
    """All that is derived from the runs; nothing is rounded away in favour of anyone."""
    found: dict[str, Any] = {}
    for part, marks in (("rounds", MARKS[:2]), ("long", MARKS)):
        rounds = by_round(runs, part)
        times = {str(m): times_to(rounds, m) for m in marks}
        if any(times.values()):
            found[part] = {
                "seconds_to": times,
                "autofuse_cold_over": {str(m): ratios(rounds, "autofuse cold", "cold", m) for m in marks},
                "autofuse_warm_over": {str(m): ratios(rounds, "autofuse warm", "warm", m) for m in marks},
                "break_even_step": break_evens(rounds),
                "ms_a_step_in_the_second_half": second_half(rounds),
                "above_eager": [above_eager(r, name) for r in rounds for name in ("autofuse cold", "autofuse warm")
                                if "eager" in r and name in r],
                "over_better_of_eager_and_at_once": worst_in_hindsight(rounds),
                "largest_difference_of_last_loss": differences(rounds),
            }  # fmt: skip
    short = {str(steps): short_ratios(runs, steps) for steps in sorted({r.steps for r in runs if r.part == "short"})}
    return found | ({"short": short} if short else {})


def by_round(runs: Sequence[Run], part: str) -> list[dict[str, Run]]:
    found: dict[int, dict[str, Run]] = {}
    for run in runs:
        if run.part == part:
            found.setdefault(run.round, {})[run.contender] = run
    return list(found.values())


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median and range."""
    return {
        "median": round(statistics.median(values), 4), "low": round(min(values), 4), "high": round(max(values), 4),
        "samples": len(values),
    }  # fmt: skip


def times_to(rounds: Sequence[dict[str, Run]], mark: int) -> dict[str, Any]:
    found = {name: [r[name].at[mark] for r in rounds if name in r and mark in r[name].at] for name in CONTENDERS}
    return {name: spread(values) for name, values in found.items() if values}


def ratios(rounds: Sequence[dict[str, Run]], ours: str, state: str, mark: int) -> dict[str, Any]:
    """Our time over that of eager and of torch.compile in the same state; below 1 we are earlier."""
    found = {}
    for other in ("eager", f"compile {state}", f"compile dynamic {state}"):
        pairs = [(r[ours].at, r[other].at) for r in rounds if ours in r and other in r]
        values = [a[mark] / b[mark] for a, b in pairs if mark in a and mark in b]
        if values:
            found[other] = spread(values)
    return found


def second_half(rounds: Sequence[dict[str, Run]]) -> dict[str, Any]:
    """Mean time of a step there, where all captures and compilations are over."""
    found: dict[str, list[float]] = {}
    for name, run in ((name, run) for r in rounds for name, run in r.items()):
        half = run.steps // 2
        if half in run.at:
            found.setdefault(name, []).append((run.at[run.steps] - run.at[half]) / (run.steps - half) * 1e3)
    return {name: spread(values) for name, values in found.items()}


def break_evens(rounds: Sequence[dict[str, Run]]) -> dict[str, Any]:
    """The step from which on the first is ahead of the second for good, each round's; null: not within the run."""
    found: dict[str, Any] = {}
    for ours, state in (("autofuse cold", "cold"), ("autofuse warm", "warm")):
        for other in ("eager", f"compile {state}", f"compile dynamic {state}"):
            pairs = [(r[ours], r[other]) for r in rounds if ours in r and other in r]
            if pairs:
                found[f"{ours} before {other}"] = [break_even(a, b) for a, b in pairs]
    for other in ("compile cold", "compile warm", "compile dynamic cold", "compile dynamic warm"):
        pairs = [(r[other], r["eager"]) for r in rounds if other in r and "eager" in r]
        if pairs:
            found[f"{other} before eager"] = [break_even(a, b) for a, b in pairs]
    return found


def break_even(ours: Run, other: Run) -> int | None:
    first = None
    for step in sorted(set(ours.at) & set(other.at)):
        if ours.at[step] > other.at[step]:
            first = None
        elif first is None:
            first = step
    return first


def above_eager(found: dict[str, Run], name: str) -> dict[str, Any]:
    """By how much autofuse is behind eager at worst, beside the capture time that it reports."""
    ours, eager = found[name], found["eager"]
    behind = {step: ours.at[step] - eager.at[step] for step in set(ours.at) & set(eager.at)}
    worst = max(behind, key=lambda step: behind[step])
    capture = ours.report.get("capture_seconds") or 0.0
    return {
        "contender": name,
        "round": ours.round,
        "worst_seconds": round(behind[worst], 3),
        "at_step": worst,
        "reported_capture_seconds": round(capture, 3),
        "imports_seconds": round(ours.imported_seconds - eager.imported_seconds, 3),
        "at_the_end_seconds": round(ours.total_seconds - eager.total_seconds, 3),
        "is_within_capture": behind[worst] <= capture,
    }


def worst_in_hindsight(rounds: Sequence[dict[str, Run]]) -> list[dict[str, Any]]:
    """The largest ratio, over all lengths of the script, of autofuse's time to the better of the two choices."""
    found = []
    for r in rounds:
        names = ("autofuse cold", "eager", "autofuse at once")
        if all(name in r for name in names):
            ours, eager, captured = (r[name].at for name in names)
            steps = set(ours) & set(eager) & set(captured)
            over = {step: ours[step] / min(eager[step], captured[step]) for step in steps}
            worst = max(over, key=lambda step: over[step])
            found.append({"worst": round(over[worst], 3), "at_step": worst})
    return found


def differences(rounds: Sequence[dict[str, Run]]) -> dict[str, float]:
    """Relative to eager's; torch.compile draws other dropout masks, autofuse the same."""
    found: dict[str, float] = {}
    for r in rounds:
        for name, run in r.items():
            if "eager" in r and name != "eager":
                apart = abs(run.last_loss - r["eager"].last_loss) / abs(r["eager"].last_loss)
                found[name] = max(apart, found.get(name, 0.0))
    return found


def short_ratios(runs: Sequence[Run], steps: int) -> dict[str, Any]:
    rounds = by_round([r for r in runs if r.steps == steps], "short")
    found: dict[str, Any] = {"eager_seconds": spread([r["eager"].total_seconds for r in rounds if "eager" in r])}
    for name in ("autofuse cold", "autofuse warm", LONG_STORE):
        pairs = [(r[name], r["eager"]) for r in rounds if name in r and "eager" in r]
        if pairs:
            found[name] = {
                "over_eager_total": spread([a.total_seconds / b.total_seconds for a, b in pairs]),
                "seconds_more": spread([a.total_seconds - b.total_seconds for a, b in pairs]),
                "seconds_more_at_import": spread([a.imported_seconds - b.imported_seconds for a, b in pairs]),
                "seconds_more_at_the_last_step": spread([a.at[steps] - b.at[steps] for a, b in pairs]),
                "captured": sum((a.report.get("capture_seconds") or 0.0) > 0.0 for a, _ in pairs),
            }
    return found


def print_figures(found: dict[str, Any]) -> None:
    for part in ("rounds", "long"):
        if part not in found:
            continue
        print(f"== {part}: seconds, median (range)")
        for mark, times in found[part]["seconds_to"].items():
            for name, s in times.items():
                print(f"  to {mark:>4s} steps  {name:22s}{s['median']:8.1f}  ({s['low']:.1f} to {s['high']:.1f})")
        for ours in ("autofuse_cold_over", "autofuse_warm_over"):
            for mark, others in found[part][ours].items():
                for name, s in others.items():
                    print(f"  {ours} {name:20s} to {mark:>4s}: {s['median']:.2f} ({s['low']:.2f} to {s['high']:.2f})")
        for key in (
            "break_even_step",
            "ms_a_step_in_the_second_half",
            "above_eager",
            "over_better_of_eager_and_at_once",
        ):
            print(f"  {key}: {json.dumps(found[part][key])}")
    for steps, row in found.get("short", {}).items():
        print(f"== {steps} steps: eager {row['eager_seconds']['median']:.2f} s in total")
        for name, entry in row.items():
            if name != "eager_seconds":
                s, more = entry["over_eager_total"], entry["seconds_more"]
                print(f"  {name:28s}{s['median']:.3f} ({s['low']:.3f} to {s['high']:.3f}), {more['median']:+.2f} s, "
                      f"captured in {entry['captured']} of {s['samples']}")  # fmt: skip


# ---- the run --------------------------------------------------------------------------------------------------------


def asked() -> argparse.Namespace:
    parser = arguments(__doc__, "startup", quick="a tiny model, few steps; proves nothing about speed")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of 200 steps")
    parser.add_argument("--short-rounds", type=int, default=SHORT_ROUNDS)
    known = "; ".join(CONTENDERS)
    parser.add_argument("--contenders", default=known, help=f"separated by ;, of {known}")
    parser.add_argument("--append", action="store_true", help="add to the result file instead of writing it anew")
    parser.add_argument("--keep", type=Path, help="folder of the tuned store of the warm runs, made where it is not")
    return parse(parser)


def main() -> int:
    options = asked()
    began = time.monotonic()
    parts, contenders = options.parts.split(","), [name.strip() for name in options.contenders.split(";")]
    for found, known in ((parts, PARTS), (contenders, CONTENDERS)):
        if set(found) - set(known):
            sys.exit(f"expected some of {'; '.join(known)}; found {'; '.join(sorted(set(found) - set(known)))}")
    folder = Path(tempfile.mkdtemp(prefix="autofuse-startup-"))
    tiny = ("--layers", "1", "--width", "32") if options.quick else ()
    run = Benchmark(options.out, folder, tiny, commit(), options.keep.resolve() if options.keep else None)
    if options.append and options.out.exists():
        run.take_up()
    try:
        launch(run, "warm-up", 0, "eager", 3, folder / "warm-up")
        run.runs.pop()
        if options.quick:
            measure_round(run, "rounds", ("eager", "autofuse cold", "compile cold", "autofuse warm"), 20)
            measure_short(run, 1, (3,))
        else:
            if "short" in parts:
                measure_short(run, options.short_rounds, SHORT_STEPS)
            for _ in range(options.rounds if "rounds" in parts else 0):
                measure_round(run, "rounds", contenders, STEPS)
            if "long" in parts:
                measure_long(run, contenders)
    finally:
        run.save()
        for place in {file.parent for file in folder.rglob("store.sqlite3")}:
            control.stop(settings_of(place))
        shutil.rmtree(folder, ignore_errors=True)
    print_figures(figures(run.runs))
    print_end({}, run.left_out, run.out, began)
    return 0


if __name__ == "__main__":
    sys.exit(main())
