"""All benchmarks one after the other, and the page that shows their results.

    python benchmarks/suite.py                  # everything: an hour and a half on two cores
    python benchmarks/suite.py --only models    # by the beginning of their names
    python benchmarks/suite.py --quick          # a trial of every script within 5 minutes; keeps no result
    python benchmarks/suite.py --page           # only writes RESULTS.md from the results there are

Each part is a script of its own and may be called alone. A part that fails is named at the end, and the exit status
is 1; the others run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import RESULTS, chosen

HERE = Path(__file__).parent
PAGE = HERE / "RESULTS.md"
Table = Callable[[dict[str, Any]], list[str]]


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads), *(f"| {' | '.join(row)} |" for row in rows)]


def times(entry: dict[str, float] | None) -> str:
    """A ratio with its interval."""
    if entry is None:
        return "-"
    return f"{entry['median']:.2f} ({entry['low']:.2f} to {entry['high']:.2f})"


def patterns_table(found: dict[str, Any]) -> list[str]:
    rows = []
    for row in found["rows"]:
        over, ours = row.get("autofuse_over", {}), row["contenders"].get("autofuse", {})
        kernels = [str(row["contenders"].get(n, {}).get("kernels", "-")) for n in ("eager", "compile", "autofuse")]
        best = [entry for name, entry in over.items() if name.startswith("compile")]
        better = min(best, key=lambda o: o["median"], default=None)
        found_here = (times(over.get("eager")), times(better), ", ".join(kernels), ours.get("state", ""))
        rows.append([row["row"], row["shape"], *found_here])
    heads = (
        "row",
        "size",
        "over eager",
        "over torch.compile's better mode",
        "kernels: eager, compile, autofuse",
        "state",
    )
    return table(heads, rows)


def models_table(found: dict[str, Any]) -> list[str]:
    rows = []
    for row in found["rows"]:
        over, ours = row.get("autofuse_over", {}), row["contenders"].get("autofuse", {})
        others = ("eager", "eager, same settings", "compile", "compile dynamic")
        nodes = f"{ours.get('fused_nodes')} of {ours.get('nodes')}"
        ratios = (times(over.get(name)) for name in others)
        rows.append([row["model"], *ratios, at_most(row), nodes, row["commit"], "; ".join(row["left_out"])[:120]])
    heads = (
        "model",
        "over eager",
        "over eager, same settings",
        "over compile",
        "over compile dynamic",
        "at most, over eager, compile",
        "nodes fused",
        "commit",
        "",
    )
    return table(heads, rows)


def at_most(row: dict[str, Any]) -> str:
    """How many times as fast as eager and as torch.compile's better mode a step of products alone would be."""
    deck = {name: found["deck_seconds"]["median"] for name, found in row["contenders"].items()}
    products = row["contenders"].get("eager, same settings", {}).get("products_seconds")
    compiled = [seconds for name, seconds in deck.items() if name.startswith("compile")]
    if not products or "eager" not in deck:
        return "-"
    found = [deck["eager"] / products, *([min(compiled) / products] if compiled else [])]
    return ", ".join(f"{ratio:.2f}" for ratio in found)


def startup_table(found: dict[str, Any]) -> list[str]:
    """Seconds from launch to a step; of several rounds the median."""
    lines: list[str] = []
    for part, figures in found["figures"].items():
        if "seconds_to" in figures:
            lines += [f"{part}:", "", *startup_part(figures), ""]
        elif part == "short":
            lines += ["short scripts:", "", *short_part(figures), ""]
    return lines[:-1]


def short_part(figures: dict[str, Any]) -> list[str]:
    """Whole scripts of a few steps, beside eager's whole time."""
    rows = []
    for steps, of_length in figures.items():
        eager = f"{of_length['eager_seconds']['median']:.1f}"
        for name, ours in of_length.items():
            if name != "eager_seconds":
                over = ours["over_eager_total"]
                ratios = f"{over['median']:.2f} ({over['low']:.2f} to {over['high']:.2f})"
                rows.append([name, steps, eager, ratios, str(ours["captured"])])
    return table(["", "steps", "eager, s", "over eager", "runs that captured"], rows)


def foreign_table(found: dict[str, Any]) -> list[str]:
    """A run of autofuse each, beside plain python's of the same round."""
    rows = []
    for c in found["comparisons"]:
        totals = ", ".join(f"{ratio:.2f}" for ratio in c["totals"].values())
        costs = (c[f"{which}_seconds"] for which in ("predicted", "reported", "true"))
        cost = ", ".join(f"{seconds:.1f}" for seconds in costs) if c["captured_at"] else "-"
        losses = f"{c['loss_difference']:.0e} of {c['loss_bound']:.0e}"
        worst = f"{c['worst_total']:.2f}"
        rows.append(
            [c["script"], c["kind"], totals, worst, str(c["captured_at"] or "-"), cost, f"{c['steady']:.2f}", losses]
        )
    marks = ", ".join(found["comparisons"][0]["totals"]) if found["comparisons"] else ""
    heads = (
        "script",
        "",
        f"total over eager's at {marks}",
        "worst at any step",
        "captured at step",
        "its cost in s: predicted, reported, true",
        "steady state over eager",
        "largest loss difference",
    )
    return table(heads, rows)


def trap_table(found: dict[str, Any]) -> list[str]:
    """Geometric means over the cases."""
    rows = []
    for shapes, contenders in found["bars"].items():
        for name, each in contenders.items():
            fresh = f"{each['over_fresh']:.2f} ({each['worst_over_fresh']:.2f})"
            eager = f"{each['eager_over']:.2f}" if each["eager_over"] else "-"
            rows.append([shapes, name, fresh, eager, f"{each['stall_seconds']:.1f}"])
    heads = ("timed", "", "time over that without a past (worst case)", "eager's time over it", "longest stall, s")
    return table(heads, rows)


def where_table(found: dict[str, Any]) -> list[str]:
    """Milliseconds of a deck by kind, of the thread that Python runs in."""
    entries = [entry for row in found["rows"] for entry in row["contenders"].values()]
    kinds = list(dict.fromkeys(kind for entry in entries for kind in entry["ms"]))
    rows = [
        [row["model"], name, f"{entry['deck_ms']:.0f}", *(f"{entry['ms'].get(kind, 0):.0f}" for kind in kinds)]
        for row in found["rows"]
        for name, entry in row["contenders"].items()
    ]
    left = [f"Left out: {'; '.join(found['left_out'])}."] if found.get("left_out") else []
    return [*table(["model", "", "ms a deck", *kinds], rows), *(["", *left] if left else [])]


def startup_part(figures: dict[str, Any]) -> list[str]:
    marks = list(figures["seconds_to"])
    rows = []
    for name in figures["seconds_to"][marks[0]]:
        seconds = (figures["seconds_to"][mark].get(name) for mark in marks)
        late = figures["ms_a_step_in_the_second_half"].get(name)
        cells = [f"{entry['median']:.1f}" if entry else "-" for entry in seconds]
        rows.append([name, *cells, f"{late['median']:.0f}" if late else "-"])
    return table(["", *(f"s to step {mark}" for mark in marks), "ms a step in the second half"], rows)


def doors_table(found: dict[str, Any]) -> list[str]:
    rows = []
    for row in found["rows"]:
        for size, case in row["cases"].items():
            over = [times(case.get(f"{door} over", {}).get(n)) for door in DOORS for n in ("eager", "compile")]
            rows.append([row["row"], size, f"{case['us']['eager']['median']:.0f}", *over, row["commit"]])
    heads = [f"{door} over {other}" for door in DOORS for other in ("eager", "torch.compile")]
    return table(("function", "size", "eager, us", *heads, "commit"), rows)


DOORS = ("compile, autofuse", "optimize")


def calls_table(found: dict[str, Any]) -> list[str]:
    rows = []
    for row in found["rows"]:
        us = [f"{row['us'][path]['median']:.1f}" for path in ("C", "Python", "eager")]
        rows.append([row["row"], *us, *(times(row["over C"][other]) for other in ("Python", "eager"))])
    return table(("call", "C, us", "Python, us", "eager, us", "Python over C", "eager over C"), rows)


def coverage_table(found: dict[str, Any]) -> list[str]:
    """The graphs that did not become one node."""
    rows = []
    for row in found["rows"]:
        for graph in (graph for graph in row["graphs"] if not graph["covered"]):
            outside = " + ".join(graph["outside"][:4]) or f"{graph['nodes']} nodes"
            reasons = ", ".join(graph["reasons"]) or "no rule"
            kernels = str(row["inductor_kernels"]) if graph is row["graphs"][0] else "-"
            rows.append([row["operator"], row["kind"], graph["phase"], outside, reasons, kernels])
    return table(("operator", "kind", "graph", "outside", "why", "kernels of torch.compile, forward"), rows)


def fleet_table(found: dict[str, Any]) -> list[str]:
    """A row for each size of fleet, in the hosts' time; then for each number of hosts at once, in real time."""
    rows = []
    for row in found["fleets"]:
        spent, first, decided = row["then"], row["first_contact"], max(1, row["keys_decided"])
        rows.append(
            [
                f"{row['hosts']:,}",
                f"{row.get('seconds_to_95%', float('nan')):,.0f}",
                f"{decided:,} of {row['keys']:,}",
                f"{row['duplicate_searches'] / max(1, row['searches']):.1%}",
                f"{row['hosts_lost']}, {row['jobs_lost']}, {row['requests_failed']}",
                f"{1000 * first['cpu_seconds'] / row['requests']:.2f}",
                f"{1000 * spent['cpu_seconds'] / decided:.1f}",
                f"{spent['statements'] / decided:.0f}",
                f"{spent['wal_bytes'] / decided / 1024:.1f}",
            ]
        )
    heads = (
        "hosts",
        "s to 95 %",
        "keys decided by then",
        "searches in vain",
        "hosts lost, their jobs, requests failed",
        "server's CPU ms a request",
        "a decision",
        "statements a decision",
        "KiB of log a decision",
    )
    crowds = []
    for row in found["crowds"]:
        errors = ", ".join(f"{count} {what}" for what, count in row["errors"].items()) or "none"
        ms, cores = row["round_ms"], f"{row['server_cores']:.2f}, {row['hosts_cores']:.2f}"
        rates = (f"{row['rounds_a_second']:.0f}", f"{row['keys_a_second']:.0f}")
        memory = f"{row['server_memory_mib']:.0f}"
        crowds.append([f"{row['hosts']:,}", *rates, f"{ms['p50']:.0f}, {ms['p99']:.0f}", cores, memory, errors])
    at_once = ("hosts at once", "rounds/s", "decisions/s", "round ms: median, p99", "cores: server, hosts", "MiB")
    return [*table(heads, rows), "", *table((*at_once, "errors"), crowds)]


@dataclass(frozen=True)
class Part:
    """A script, what it asks, and how its rows are shown."""

    name: str
    question: str
    arguments: tuple[str, ...] = ()
    quick: tuple[str, ...] | None = ("--quick",)  # None: so short that a trial would be the run
    table: Table | None = None
    has_bars: bool = True  # that are no rows of the table

    def command(self, quick: bool, folder: Path) -> list[str]:
        out = ("--out", str(folder / f"{self.name}.json"))
        arguments = (*self.quick, *out) if quick and self.quick else self.arguments
        return [sys.executable, str(HERE / f"{self.name}.py"), *arguments]


PARTS: tuple[Part, ...] = (
    Part(
        "patterns", "Operators beside eager and torch.compile, three sizes each.", ("--minutes", "18"),
        ("--quick", "--only", "affine", "--shapes", "cache"), patterns_table,
    ),
    Part("doors", "Thirty functions through torch.compile(backend='autofuse') and optimize, three sizes each.", (),
         ("--quick", "--only", "forward: swiglu"), doors_table),
    Part("coverage", "PyTorch's own operators between two others: which become part of one node.", (),
         ("--quick",), coverage_table),
    Part("models", "Whole models on shapes that vary, training steps and inference.", (),
         ("--quick", "--only", "mlp"), models_table),
    Part("where", "Where the time of a model's step goes: ms of a deck by kind, sampled.", (),
         ("--quick",), where_table),
    Part("memory", "Peak memory of a step beside eager's.", (), ("--quick",)),
    Part("startup", "Wall time to 50, 200 and 1000 steps with varying shapes, cold and warm.", table=startup_table),
    Part("foreign", "Twelve scripts as users write them, cold, tuned and warm, beside plain python.",
         table=foreign_table),
    Part("examples", "The examples as a person runs them, tuned and on a warm store.", has_bars=False),
    Part("capture", "What capturing a 12-layer GPT-2 costs beside torch.compile's tracing back end."),
    Part("trap", "What a contender saw first against what it is then to be fast on.", table=trap_table, has_bars=False),
    Part("regret", "What the tuner chose against the best of the whole search space."),
    Part("aa", "Two identical candidates in the tuner's own jobs: how many leave eager."),
    Part("bandwidth", "Memory-bound kernels against a measured copy."),
    Part("overhead", "What routing costs over the bare kernel, a captured tiny model over eager.", quick=None),
    Part("calls", "What calling a graph from C gains over its generated Python, beside eager.",
         table=calls_table),
    Part("background", "What the tuning daemon costs a script that runs beside it.", quick=None),
    Part("fleet", "Fleets of hosts that only pretend to tune, on the real queue and a real PostgreSQL.", (),
         ("--quick",), fleet_table),
    Part("launch", "Host time of a routed GPU launch, up to the driver.", quick=None),
)  # fmt: skip


def run(parts: Sequence[Part], quick: bool) -> list[str]:
    """Names of the parts that failed."""
    failed = []
    with tempfile.TemporaryDirectory(prefix="autofuse-suite-") as folder:
        for part in parts:
            command = part.command(quick, Path(folder))
            print(f"\n== {part.name}: {part.question}\n$ {' '.join(['python', *command[1:]])}", flush=True)
            began = time.monotonic()
            code = subprocess.run(command, cwd=HERE.parent, check=False).returncode
            print(f"== {part.name}: exit {code} after {time.monotonic() - began:.0f} s", flush=True)
            if code:
                failed.append(part.name)
    return failed


def page() -> str:
    """RESULTS.md, of what lies in results/."""
    lines = ["# Results", "", "Written by `python benchmarks/suite.py --page` from the JSON files in `results/`."]
    for part in PARTS:
        lines += ["", f"## {part.name}", "", part.question]
        # `models.json`, and `models_<machine>.json` where it was run on another machine too.
        paths = [p for p in sorted(RESULTS.glob(f"{part.name}*.json")) if p.stem.split("_")[0] == part.name]
        lines += part_lines(part, paths) if paths else ["", "Not measured yet."]
    return "\n".join(lines) + "\n"


def part_lines(part: Part, paths: Sequence[Path]) -> list[str]:
    lines = []
    for path in paths:
        found = json.loads(path.read_text())
        machine = found["machine"]
        lines += [
            "",
            f"`{found['command']}` on {machine['cpu']}, {machine['threads']} threads, torch {machine['torch']},",
        ]
        lines += [f"{machine['date']} ([{path.name}](results/{path.name}))."]
        bars = [
            f"- {name.replace('_', ' ')}: {said(value)}"
            for name, value in found.get("bars", {}).items()
            if part.has_bars
        ]
        lines += ["", *bars] if bars else []
        lines += ["", *part.table(found)] if part.table is not None else []
    return lines


def said(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{said(v)} ({k})" if k != "ratio" else f"**{said(v)}x**" for k, v in value.items())
    if isinstance(value, list):
        return "; ".join(map(str, value)) or "none"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="beginnings of names of parts, separated by commas")
    parser.add_argument("--quick", action="store_true", help="tries every script; keeps no result")
    parser.add_argument("--page", action="store_true", help="writes RESULTS.md and measures nothing")
    options = parser.parse_args()
    names = chosen(options.only, [part.name for part in PARTS])
    parts = [p for p in PARTS if p.name in names]
    if options.quick:
        parts = [p for p in parts if p.quick is not None]
    failed = [] if options.page else run(parts, options.quick)
    if not options.quick:
        PAGE.write_text(page())
        print(f"written to {PAGE}")
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
