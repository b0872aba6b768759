"""What one block of compiled code does is counted: sectors, waits, barriers; loops may be extrapolated."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
WORK = """
import json
from dataclasses import asdict
from autofuse.codegen.knobs import default_config
from autofuse.codegen.lowering.lower import lower
from autofuse.codegen.triton.compile import compiled_kernels
from autofuse.codegen.triton.knobs import triton_knobs
from autofuse.codegen.triton.printer import print_triton
from autofuse.codegen.triton.source import Assumptions, resolve
from ptx.machine import Launch
from ptx.one_block import address_of, work_of
from ptx.text import parse
from tests.cases import CASES
from tests.codegen.triton.sources import elementwise

def work(source, values, block=0, programs=None):
    item, *_ = compiled_kernels(source, "cuda:90", [Assumptions(True, tuple(values))])
    launch, program = resolve(source, values).launches[0], parse(item.kernel.asm["ptx"])
    scalars, arguments = iter(launch.scalars), []
    for n, a in enumerate(source.passes[0].arguments):
        given = address_of(n) if a.kind in ("param", "scratch") else next(scalars)
        arguments.append(programs if a.kind == "programs" and programs else given)
    arguments += [0] * (len(program.parameters) - len(arguments))
    launched = Launch(1, item.resources.threads, item.resources.shared_bytes, tuple(arguments))
    return work_of(program, launched, block, launch.grid, range(8))

form = CASES["bias_gradient"].form()
kernel, values = lower(form), dict(zip(form.symbols, (1, 4096, 256), strict=True))
sums = print_triton(kernel, default_config(triton_knobs(kernel, values, values)))
eight, sixteen, whole = (work(sums, values, programs=256 // trips) for trips in (8, 16, 64))
found = {
    "first": work(elementwise(block=1024), {"s0": 4096}),
    "last": work(elementwise(block=1024), {"s0": 4096 - 1008}, block=3),
    "eight": eight, "whole": whole, "extrapolated": sixteen.scaled(1.0 + 48 / 8, eight, -48 / 8),
}
print(json.dumps({name: asdict(one) for name, one in found.items()}))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """From a process of its own: Triton is interpreted in this one."""
    command = [sys.executable, "-c", f"import triton\n{WORK}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def touched(work: dict[str, Any]) -> dict[str, int]:
    return {number: sectors for number, sectors in work["touched"].items() if sectors}


def test_an_element_wise_block_asks_for_its_bytes_once(found: dict[str, Any]) -> None:
    work = found["first"]
    assert work["warps"] == 4 and work["barriers"] == 0 and work["waits"] == 1
    assert work["sectors"] == 256 and touched(work) == {"0": 128, "1": 128}
    assert work["cycles"] == 4 * work["longest"] > 0


def test_the_last_block_does_what_is_left(found: dict[str, Any]) -> None:
    assert touched(found["last"]) == {"0": 2, "1": 2}


def test_longer_loops_follow_from_two_lengths(found: dict[str, Any]) -> None:
    assert found["extrapolated"] == found["whole"]
    assert found["whole"]["waits"] > 4 * found["eight"]["waits"]
    assert found["whole"]["barriers"] == found["eight"]["barriers"]
