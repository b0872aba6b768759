"""What benchmarks share: options, the result file with the machine, interleaved samples, ratios with intervals."""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from autofuse.ir.device import cpu_device
from autofuse.tuner.comparison import INTERVAL_TAIL, bounds

RESULTS = Path(__file__).with_name("results")


def machine() -> dict[str, Any]:
    device = cpu_device()
    return {
        "cpu": device.name,
        "cores": device.cores,
        "isa": device.isa,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "libc": " ".join(platform.libc_ver()),
        "date": time.strftime("%Y-%m-%d"),
    }


# ---- what was asked for ---------------------------------------------------------------------------------------


def arguments(
    doc: str | None, name: str, *, quick: str, only: str = "", malloc: bool = False
) -> argparse.ArgumentParser:
    """Options of a benchmark. ``quick``: what a trial is; ``only``: what is chosen by the beginning of its name."""
    parser = argparse.ArgumentParser(
        prog=f"{name}.py", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if only:
        parser.add_argument("--only", default="", help=f"beginnings of names of {only}, separated by commas")
    if malloc:
        text = "keep freed memory, for all contenders"
        parser.add_argument("--malloc", choices=("on", "off"), default="on", help=text)
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--out", type=Path, help=f"result file: results/{name}.json, of a trial a temporary one")
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The options, with the result file."""
    options = parser.parse_args()
    name = Path(parser.prog).stem
    usual = Path(tempfile.gettempdir()) / f"{name}-quick.json" if options.quick else RESULTS / f"{name}.json"
    options.out = options.out or usual
    return options


def chosen(text: str, names: Sequence[str], default: str = "") -> list[str]:
    """The names that begin with one of the words in ``text``; all where there is no word. Exits on a word of none."""
    wanted = [w.strip() for w in (text or default).split(",") if w.strip()]
    unknown = [w for w in wanted if not any(n.startswith(w) for n in names)]
    if unknown:
        sys.exit(f"--only: expected beginnings of {', '.join(names)}; found {', '.join(unknown)}")
    return [n for n in names if not wanted or any(n.startswith(w) for w in wanted)]


def command_line() -> str:
    """How this run was asked for; where it writes to does not matter."""
    words = [word for word in sys.argv[1:] if not word.startswith("--out=")]
    if "--out" in words:
        at = words.index("--out")
        del words[at : at + 2]
    return " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *words])


def commit() -> str:
    """Of the code that is measured."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).resolve().parent)
    except OSError:
        return "unknown"
    return answer.stdout.strip() or "unknown"


# ---- samples ----------------------------------------------------------------------------------------------------


def interleave(
    calls: dict[str, Callable[[], object]],
    rounds: int,
    repeats: int,
    before: Callable[[], object] = lambda: None,
    warm: bool = False,
) -> dict[str, list[float]]:
    """Microseconds a call, one sample per round and callable; the order rotates. ``before`` is called untimed.

    ``warm``: so is each callable before its sample, which then finds its own code and data in the caches, not the
    others', as in a script that calls nothing else.
    """
    names = list(calls)
    for name in names:
        for _ in range(repeats):
            calls[name]()
    samples: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        for position in range(len(names)):
            name = names[(position + number) % len(names)]
            call = calls[name]
            before()
            if warm:
                call()
            began = time.perf_counter()
            for _ in range(repeats):
                call()
            samples[name].append((time.perf_counter() - began) / repeats * 1e6)
    return samples


def summary(samples: Sequence[float]) -> dict[str, float]:
    """Median with its 95 % interval."""
    low, high = bounds(sorted(samples), INTERVAL_TAIL)
    return {"median": statistics.median(samples), "low": low, "high": high, "samples": len(samples)}


def ratio(over: Sequence[float], under: Sequence[float]) -> dict[str, float]:
    """over / under, round by round."""
    ratios = sorted(a / b for a, b in zip(over, under, strict=True))
    low, high = bounds(ratios, INTERVAL_TAIL)
    low, high = max(low, ratios[0]), min(high, ratios[-1])  # of few rounds: their range
    return {"median": statistics.median(ratios), "low": low, "high": high, "rounds": len(ratios)}


def difference(left: Sequence[float], right: Sequence[float]) -> dict[str, float]:
    """left - right, round by round."""
    return summary([a - b for a, b in zip(left, right, strict=True)])


# ---- the result -------------------------------------------------------------------------------------------------


def encode_json(document: Mapping[str, Any]) -> str:
    return json.dumps(document, indent=1)


def save(path: Path, name: str, *, encode: Callable[[Mapping[str, Any]], str] = encode_json, **found: Any) -> None:
    """Write the result file, whole or not at all. ``found`` may name another command than this run's."""
    document = {"benchmark": name, "command": command_line(), "machine": machine(), **found}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(encode(document) + "\n")
    partial.replace(path)


def encode_rows(document: Mapping[str, Any]) -> str:
    """With a line for each row of ``rows``, here and one level further down."""
    marks: dict[str, str] = {}

    def marked(rows: Sequence[Any]) -> str:
        mark = f"@{len(marks)}"
        marks[f'"{mark}"'] = "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]"
        return mark

    def folded(part: Mapping[str, Any]) -> dict[str, Any]:
        return {key: marked(value) if key == "rows" else value for key, value in part.items()}

    parts = {key: folded(value) if isinstance(value, dict) else value for key, value in folded(document).items()}
    text = json.dumps(parts, indent=1)
    for mark, rows in marks.items():
        text = text.replace(mark, rows)
    return text


def write(name: str, results: dict[str, Any]) -> Path:
    path = RESULTS / f"{name}.json"
    save(path, name, **results)
    return path


def print_end(bars: Mapping[str, Any], left_out: Sequence[str], path: Path, began: float) -> None:
    """The last lines of a run. ``began``: of `time.monotonic`."""
    for what, result in bars.items():
        print(f"{what}: {result}")
    for text in left_out:
        print(f"left out: {text}")
    print(f"written to {path} after {time.monotonic() - began:.0f} s")
