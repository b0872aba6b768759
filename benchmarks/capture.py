"""What capturing a model costs: the first training step through autofuse beside torch.compile's tracing back end.

    python benchmarks/capture.py                 # GPT-2 of 12 layers, some minutes
    python benchmarks/capture.py --quick         # 4 layers, one round
    python benchmarks/capture.py --costs         # what capturing twelve models costs, and was expected to; 6 minutes
    python benchmarks/capture.py --costs --only gpt2,resnet

Contenders are processes that take turns, each captures once: "aot_eager" is torch.compile(model, dynamic=True,
backend="aot_eager"), which traces forward and backward and generates nothing; "autofuse" is
torch.compile(model, backend="autofuse") under the settings of `autofuse run`, sizes marked as varying; and "autofuse,
whole" the same with capture.min_blocks=0, so that equal layers are captured one by one. Capture is what the first two
steps, of two lengths, take longer than the third, of another one: what is compiled again for a new length counts.
Losses and gradients are compared with eager's of the same step. Bar: a fifth of aot_eager's.

With --costs each of the twelve models of `capture_models.py` trains in a process and on a store of its own, until it
has been captured and 48 steps on. True cost: of all steps from the capture on, the time above the median of eager's
steps of that size, as far as a step takes more than `SLOW` times as long. Beside it stand what was predicted before the
capture, what autofuse reports, and what it knew. Bar: predicted within 1.5x of the true cost in ten of twelve.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from capture_models import TASKS
from common import RESULTS, arguments, chosen, commit, parse, print_end, ratio, save, summary

CONTENDERS = ("aot_eager", "autofuse", "autofuse, whole")
ROUNDS = 3
LENGTHS = (33, 40, 64)
BATCH = 4
SLOW = 1.5
WITHIN = 1.5
MODEL_SECONDS = 60.0  # after which a model that was not captured is left out


def main() -> int:
    if len(sys.argv) == 4 and sys.argv[1] == "--worker":
        return work(sys.argv[2], int(sys.argv[3]))
    parser = arguments(__doc__, "capture", quick="4 layers and one round; proves nothing about speed", only="models")
    parser.add_argument("--costs", action="store_true", help="what capturing twelve models costs")
    options = parse(parser)
    if options.costs:
        return costs(options)
    layers, rounds = (4, 1) if options.quick else (12, ROUNDS)
    began = time.monotonic()
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTENDERS}
    for number in range(rounds):
        for position in range(len(CONTENDERS)):
            name = CONTENDERS[(position + number) % len(CONTENDERS)]
            found[name].append(run(name, layers))
            print(f"round {number + 1}: {name}: {found[name][-1]['capture_seconds']:.1f} s", flush=True)
    seconds = {name: [r["capture_seconds"] for r in runs] for name, runs in found.items()}
    shares = {name: ratio(seconds[name], seconds["aot_eager"]) for name in CONTENDERS[1:]}
    wrong = [name for name, runs in found.items() if not all(run["is_eagers"] for run in runs)]
    middle = statistics.median(a / b for a, b in zip(seconds["autofuse"], seconds["aot_eager"], strict=True))
    bars = {"autofuse_over_aot_eager": f"{middle:.3f} (bar 0.2)", "results_unlike_eagers": wrong}
    save(
        options.out,
        "capture",
        commit=commit(),
        model={"class": "GPT2LMHeadModel", "layers": layers, "width": 256, "vocabulary": 4000, "dropout": 0.1},
        lengths=LENGTHS,
        bars=bars,
        seconds={name: summary(values) for name, values in seconds.items()},
        over_aot_eager=shares,
        runs=found,
    )
    print_end(bars, [], options.out, began)
    return 1 if wrong else 0


# ---- predicted and true cost of twelve models ---------------------------------------------------------------------


def costs(options: argparse.Namespace) -> int:
    began = time.monotonic()
    rows = []
    for name in chosen(options.only, list(TASKS)):
        rows.append(cost_of(name))
        print(row_text(rows[-1]), flush=True)
    near = sum(1 / WITHIN <= row["predicted_over_true"] <= WITHIN for row in rows if row["true_seconds"])
    said = [row["reported_seconds"] / row["true_seconds"] for row in rows if row["true_seconds"]]
    bars = {
        "predicted_within_1.5x": f"{near} of {len(rows)} (bar 10 of 12)",
        "reported_over_true": f"{min(said):.2f} to {max(said):.2f}" if said else "-",
    }
    out = options.out.with_name("capture_costs.json") if options.out == RESULTS / "capture.json" else options.out
    save(out, "capture", commit=commit(), bars=bars, models=rows)
    print_end(bars, [row["model"] for row in rows if not row["true_seconds"]], out, began)
    return 0


def cost_of(name: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        store, out = Path(folder) / "store.sqlite3", Path(folder) / "steps.json"
        command = [sys.executable, "-m", "autofuse", "run", "--tune", "off", "--store", str(store)]
        command += ["--set", "capture.max_slowdown=4", str(Path(__file__).with_name("capture_models.py"))]
        answer = subprocess.run([*command, name, str(MODEL_SECONDS), str(out)], capture_output=True, text=True)
        if answer.returncode != 0:
            sys.exit(f"{name}: expected an answer, found: {answer.stderr.strip()[-600:]}")
        found: dict[str, Any] = json.loads(out.read_text())
    root, steps = found["root"], found["steps"]
    captured = next((number for number, step in enumerate(steps) if step[2] == "captured"), len(steps))
    eager: dict[int, list[float]] = {}
    for seconds, elements, _ in steps[min(3, captured // 2) : captured]:  # the first ones warm up
        eager.setdefault(elements, []).append(seconds)
    usual = {elements: statistics.median(seconds) for elements, seconds in eager.items()}
    lost = sum(s - usual[n] for s, n, _ in steps[captured:] if n in usual and s > SLOW * usual[n])
    return {
        "model": name,
        "predicted_seconds": root["predicted_capture_seconds"],
        "reported_seconds": root["capture_seconds"],
        "true_seconds": lost,
        "predicted_over_true": root["predicted_capture_seconds"] / lost if lost else 0.0,
        "causes": dict(root["capture_causes"]),
        "captured_at_step": captured,
        "eager_step_seconds": statistics.median(s for seconds in eager.values() for s in seconds),
        "traits": root["traits"],
        "machine_factor": root["factor"],
    }


def row_text(row: dict[str, Any]) -> str:
    causes = ", ".join(f"{cause} {seconds:.1f}" for cause, seconds in row["causes"].items())
    return (
        f"{row['model']:10} predicted {row['predicted_seconds']:5.2f} s, reported {row['reported_seconds']:5.2f} s, "
        f"true {row['true_seconds']:5.2f} s: {row['predicted_over_true']:.2f}x ({causes})"
    )


# ---- tracing ------------------------------------------------------------------------------------------------------


def run(name: str, layers: int) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__)), "--worker", name, str(layers)]
    environment = {**os.environ, "AUTOFUSE_TUNE": "off", "AUTOFUSE_QUIET": "1", "TRANSFORMERS_VERBOSITY": "error"}
    if name == "autofuse, whole":
        environment["AUTOFUSE_CAPTURE_MIN_BLOCKS"] = "0"
    answer = subprocess.run(command, capture_output=True, text=True, env=environment)
    if answer.returncode != 0:
        sys.exit(f"{name}: expected an answer, found: {answer.stderr.strip()[-600:]}")
    result: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    return result


# ---- one contender in its process ---------------------------------------------------------------------------------


def work(name: str, layers: int) -> int:
    model = gpt2(layers)
    expected = [step(model, model, length) for length in LENGTHS]
    if name == "aot_eager":
        compiled = torch.compile(model, dynamic=True, backend="aot_eager")
        measured = [step(model, compiled, length) for length in LENGTHS]
    else:
        from autofuse.capture.dynamo import capture_settings
        from autofuse.pipeline import backend

        compiled = torch.compile(model, backend=backend)
        with capture_settings(8):
            measured = [step(model, compiled, length, marked=True) for length in LENGTHS]
    first, _, last = (seconds for seconds, _ in measured)
    second = measured[1][0]
    is_eagers = all(a == b for (_, a), (_, b) in zip(expected, measured, strict=True))
    print(json.dumps({"capture_seconds": first + second - 2 * last, "step_seconds": last, "is_eagers": is_eagers}))
    return 0


def gpt2(layers: int) -> torch.nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=4000, n_positions=256, n_embd=256, n_layer=layers, n_head=4, use_cache=False,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model: torch.nn.Module = GPT2LMHeadModel(config)
    return model


def step(model: torch.nn.Module, call: Any, length: int, marked: bool = False) -> tuple[float, list[float]]:
    """Seconds of a training step; its loss and the norms of its gradients."""
    torch.manual_seed(length)
    tokens = torch.randint(0, 4000, (BATCH, length))
    labels = tokens.clone()
    if marked:
        for tensor in (tokens, labels):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
            torch._dynamo.maybe_mark_dynamic(tensor, 1)
    model.zero_grad()
    began = time.perf_counter()
    loss = call(input_ids=tokens, labels=labels).loss
    loss.backward()
    seconds = time.perf_counter() - began
    return seconds, [loss.item(), *(p.grad.norm().item() for p in model.parameters() if p.grad is not None)]


if __name__ == "__main__":
    sys.exit(main())
