"""Optimizers' steps of the GPU benchmark: torch's own choice, torch's ``fused`` and what autofuse makes of the step.

In: a `Benchmark`. Out: a row for each optimizer and set of sizes: device and host time of a step, and how far the
parameters are from those of torch's own choice after as many steps.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

import torch
from common import summary
from gpu_measure import RACE_SECONDS, WARM_CALLS, Benchmark, await_decisions
from gpu_rig import race
from torch import nn

OPTIMIZERS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("AdamW", {}), ("SGD", {"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-4}), ("RMSprop", {"centered": True}),
    ("Adagrad", {}),
)  # fmt: skip
QUICK = 1  # optimizers
MODES: dict[str, dict[str, Any]] = {"eager": {}, "fused": {"fused": True}, "autofuse": {}}
WITHOUT_FUSED = ("RMSprop",)


def transformer(width: int, layers: int) -> tuple[int, ...]:
    """Elements of the parameters of a transformer's layers."""
    layer = (3 * width * width, 3 * width, width * width, width, 4 * width * width, 4 * width)
    return (*layer, 4 * width * width, *([width] * 5)) * layers


SIZES = {"12 layers of 768": transformer(768, 12), "1000 small": (257,) * 1000}
QUICK_SIZES = {"2 layers of 16": transformer(16, 2)}


def steps(run: Benchmark) -> None:
    print("\nsteps of optimizers; device us (host us)")
    for size, elements in (QUICK_SIZES if run.is_quick else SIZES).items():
        for name, options in OPTIMIZERS[:QUICK] if run.is_quick else OPTIMIZERS:
            what = f"{name}, {size}"
            if run.clock.left() < 0:
                run.left_out.append(f"steps: {what}")
                continue
            try:
                row = _measure(run, name, options, elements) | {"size": size}
            except Exception as error:
                run.leave_out(f"steps: {what}", error)
                continue
            run.rows("steps").append(row)
            run.save()
            medians = {m: (f["device_us"]["median"], f["host_us"]["median"]) for m, f in row["modes"].items()}
            times = ", ".join(f"{mode} {device:.1f} ({host:.1f})" for mode, (device, host) in medians.items())
            print(f"  {what:28s} {times}", flush=True)


def _measure(run: Benchmark, name: str, options: dict[str, Any], elements: tuple[int, ...]) -> dict[str, Any]:
    module = importlib.import_module(f"torch.optim.{'adam' if name == 'AdamW' else name.lower()}")
    function = module.__name__.rpartition(".")[2]
    ours = getattr(module, function)  # the session's, which knows torch's own
    before = _replaced(run)
    calls: dict[str, Callable[[], object]] = {}
    params: dict[str, list[nn.Parameter]] = {}
    for mode, switch in MODES.items():
        if mode == "fused" and name in WITHOUT_FUSED:
            continue
        params[mode] = _parameters(elements, run.rig.device)
        step = getattr(torch.optim, name)(params[mode], **options, **switch).step
        standing = ours if mode == "autofuse" else ours.__wrapped__

        def call(step: Callable[[], object] = step, standing: Callable[..., None] = standing) -> None:
            setattr(module, function, standing)
            step()

        calls[mode] = call
        for _ in range(WARM_CALLS):
            call()
        await_decisions(call)
    replaced = _replaced(run) - before
    differences = {mode: _difference(found, params["eager"]) for mode, found in params.items() if mode != "eager"}
    samples = race(run.rig, calls, run.rounds, RACE_SECONDS)
    setattr(module, function, ours)
    return {
        "optimizer": name,
        "tensors": len(elements),
        "elements": sum(elements),
        "steps_replaced": replaced,  # of those of autofuse until then
        "largest_difference_to_eager": differences,
        "modes": {m: {"device_us": summary(s.device_us), "host_us": summary(s.host_us)} for m, s in samples.items()},
    }


def _replaced(run: Benchmark) -> int:
    return sum(use.fused_calls for use in run.session.optimizers.uses())


def _parameters(elements: tuple[int, ...], device: torch.device) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    made = [nn.Parameter(torch.randn(count, generator=generator).to(device)) for count in elements]
    for parameter in made:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(device)
    return made


def _difference(found: list[nn.Parameter], expected: list[nn.Parameter]) -> float:
    worst = max(float((a - b).detach().abs().max()) for a, b in zip(found, expected, strict=True))
    return worst if math.isfinite(worst) else math.inf
