"""Tries other versions of Python, torch and Triton, each in a fresh environment with a tenth of the tests.

    scripts/matrix                       # all rows
    scripts/matrix --only torch-2.15     # those whose name begins so; other rows of the file are kept
    scripts/matrix --keep                # leave the environments in the folder; they are used again

In: the rows below. Out: for each row, as JSON, what was installed, what `autofuse doctor` finds not well, how far the
losses of 60 steps of the demo are from plain Python's, and how a tenth of the tests ended. A row that cannot be
installed says why. Needs the interpreters (found on the path, or as pyenv has them) and pip, nothing else. A newer
torch may come as a build for CUDA only, which takes some gigabytes of the folder and runs on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "matrix.json"
TENTH = 3  # which tenth of the tests; any other is as good
DEMO_STEPS = 60
LOSSES = re.compile(r"step (\d+) loss (\S+)")
MOST_APART = 1e-4  # of losses, relative: the demo prints four decimals of sums over many roundings


@dataclass(frozen=True)
class Row:
    """Versions that are tried together; ``triton`` is left out where torch's own wheel brings it."""

    python: str
    torch: str
    triton: str

    @property
    def name(self) -> str:
        return f"torch-{self.torch}-python-{self.python}"


ROWS = (
    Row("3.11", "2.11.0", "3.6.0"),
    Row("3.12", "2.12.0", "3.7.0"),
    Row("3.11", "2.13.0", "3.7.1"),
    Row("3.13", "2.13.0", "3.7.1"),
    Row("3.11", "2.14.1", "3.8.0"),
    Row("3.12", "2.15.0", "3.9.0"),
    Row("3.14", "2.15.0", "3.9.0"),
)


@dataclass
class Outcome:
    """What became of a row. ``error`` is the step that could not be done, and why."""

    name: str
    versions: dict[str, str] = field(default_factory=dict)
    doctor: dict[str, str] = field(default_factory=dict)  # of the findings that are not well
    losses_apart: float | None = None  # relative, the most over the steps of the demo
    tests: str = ""
    failed: list[str] = field(default_factory=list)
    seconds: float = 0.0
    error: str = ""

    @property
    def is_well(self) -> bool:
        apart = self.losses_apart
        return not (self.error or self.failed or self.doctor) and apart is not None and apart <= MOST_APART


class StepFailed(Exception):
    """A step of a row ended with an error; the text is its last line."""


def run(command: Sequence[str | Path], env: Mapping[str, str], limit: int = 1800) -> str:
    """What a command prints. Raises StepFailed where it fails or takes more than ``limit`` seconds."""
    try:
        done = subprocess.run(
            [str(part) for part in command], cwd=ROOT, env=dict(env), capture_output=True, text=True, timeout=limit
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StepFailed(str(error)) from None
    if done.returncode != 0:
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
        errors = [line for line in lines if "ERROR" in line or "Error" in line]
        raise StepFailed((errors or lines or [f"exit status {done.returncode}"])[-1][:300])
    return done.stdout


def interpreter(version: str) -> str:
    """The path of a Python of this version. Raises StepFailed where none runs."""
    found = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    for candidate in [f"python{version}", *map(str, found)]:
        path = shutil.which(candidate)
        test = "import sys, venv; sys.exit(sys.version_info[:2] != tuple(map(int, sys.argv[1].split('.'))))"
        if path and subprocess.run([path, "-I", "-c", test, version], capture_output=True).returncode == 0:
            return path
    raise StepFailed(f"no Python {version} on the path or in pyenv")


# ---- the steps of a row ---------------------------------------------------------------------------------------


def install(row: Row, folder: Path, env: Mapping[str, str]) -> Path:
    """A fresh environment with the row's versions and autofuse in it; the path of its Python."""
    python, done = folder / "bin" / "python", folder / "installed"
    if done.exists():
        return python
    run([interpreter(row.python), "-m", "venv", "--clear", folder], env)
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    try:
        run([*pip, f"torch=={row.torch}+cpu"], env)
    except StepFailed:
        run([*pip, f"torch=={row.torch}"], env)
    run([*pip, f"triton=={row.triton}", "-e", ".[dev]"], env)
    done.touch()
    return python


def installed(python: Path, env: Mapping[str, str]) -> dict[str, str]:
    names = ("torch", "triton", "numpy", "sympy", "optuna", "sqlalchemy", "pydantic")
    code = "import importlib.metadata as m, json, sys; print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"
    found: dict[str, str] = json.loads(run([python, "-c", code, *names], env))
    return {"python": run([python, "-V"], env).split()[1], **found}


def not_well(python: Path, env: Mapping[str, str]) -> dict[str, str]:
    """What `autofuse doctor` finds not well, by check."""
    code = (
        "import json; from autofuse.doctor import examine; from autofuse.settings.layers import load\n"
        "print(json.dumps({f.name: f.found for f in examine(load()) if not f.ok}))"
    )
    found: dict[str, str] = json.loads(run([python, "-c", code], env).splitlines()[-1])
    return found


def demo(python: Path, folder: Path, env: Mapping[str, str]) -> float:
    """How far the demo's losses are from plain Python's, relative, at the most."""
    script = ["examples/train_lm.py", "--steps", str(DEMO_STEPS)]
    store = folder / "demo.sqlite3"
    store.unlink(missing_ok=True)
    plain = dict(LOSSES.findall(run([python, *script], env)))
    try:
        ours = dict(
            LOSSES.findall(run([python, "-m", "autofuse", "run", "--tune", "wait", "--store", store, *script], env))
        )
    finally:
        run([python, "-m", "autofuse", "daemon", "stop", "--store", store], env)
    if not plain or plain.keys() != ours.keys():
        raise StepFailed(f"the demo printed {len(ours)} losses, plain Python {len(plain)}")
    return max(abs(float(ours[step]) / float(loss) - 1) for step, loss in plain.items())


def tests(python: Path, env: Mapping[str, str]) -> tuple[str, list[str]]:
    """pytest's last line, and the tests that failed."""
    command = [python, "-m", "pytest", "-n", "2", "--dist", "worksteal", "--tenth", str(TENTH), "tests"]
    done = subprocess.run(
        list(map(str, command)), cwd=ROOT, env=dict(env), capture_output=True, text=True, timeout=3600
    )
    lines = done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or ["pytest printed nothing"]
    failed = [line.split()[1] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    if done.returncode not in (0, 1):
        raise StepFailed(lines[-1][:300])
    return lines[-1].strip("= "), failed


def try_row(row: Row, folder: Path, env: Mapping[str, str]) -> Outcome:
    outcome, began = Outcome(row.name), time.monotonic()
    try:
        python = install(row, folder, env)
        outcome.versions = installed(python, env)
        outcome.doctor = not_well(python, env)
        outcome.losses_apart = demo(python, folder, env)
        outcome.tests, outcome.failed = tests(python, env)
    except (StepFailed, subprocess.TimeoutExpired) as error:
        outcome.error = str(error)
    outcome.seconds = round(time.monotonic() - began)
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="beginnings of names, separated by commas")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "build" / "matrix", help="where the environments are made"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="JSON with a row for each; others' rows are kept")
    parser.add_argument("--keep", action="store_true", help="leave the environments, and use those that are there")
    options = parser.parse_args()
    rows = [row for row in ROWS if row.name.startswith(tuple(options.only.split(",")))]
    if not rows:
        parser.error(f"--only: expected beginnings of {', '.join(row.name for row in ROWS)}; found {options.only}")
    env = {name: value for name, value in os.environ.items() if not name.startswith("AUTOFUSE_")}
    env |= {"CI": "true", "OMP_NUM_THREADS": "1"}
    before = json.loads(options.out.read_text())["rows"] if options.out.exists() else []
    kept = {row["name"]: row for row in before if row["name"] in {row.name for row in ROWS}}
    for row in rows:
        folder = options.folder / row.name
        outcome = try_row(row, folder, env)
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
        kept[row.name] = asdict(outcome) | {"is_well": outcome.is_well, "date": time.strftime("%Y-%m-%d")}
        said = outcome.error or f"losses within {outcome.losses_apart:.0e}, {outcome.tests}"
        print(f"{row.name}: {'well' if outcome.is_well else 'NOT WELL'}: {said}", flush=True)
        for name, text in outcome.doctor.items():
            print(f"  doctor, {name}: {text}", flush=True)
        for name in outcome.failed:
            print(f"  failed: {name}", flush=True)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(
            json.dumps({"rows": [kept[row.name] for row in ROWS if row.name in kept]}, indent=1) + "\n"
        )
    return 0 if all(kept[row.name]["is_well"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
