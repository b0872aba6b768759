"""Every kernel of the fusion-case table on the device, in several dtypes, against float64.

In: the table of ``tests/cases.py``. Out: one row a case and dtype: how far off it is in units of eager's own error, or
what is wrong, or why nothing could be generated; and the seconds that each phase took. The rule is the tuner's
(``tuner/verify.py``). Nodes are traced and kernels compiled by all cores at once, in processes that see no GPU, and
checked here as they arrive.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch

from autofuse.codegen.generator import FusionKernelGenerator
from autofuse.codegen.knobs import default_config
from autofuse.codegen.lowering.lower import lower
from autofuse.codegen.triton.artifact import Artifact
from autofuse.codegen.triton.knobs import triton_knobs
from autofuse.codegen.triton.printer import print_triton
from autofuse.codegen.triton.source import NOTHING_ASSUMED, Assumptions, TritonSource
from autofuse.errors import CompilerError, LoweringError, ShapeError
from autofuse.ir.operation import NodeForm
from autofuse.tuner.cases import CheckCase
from autofuse.tuner.verify import GuardedAllocator, Verifier, Wrong
from autofuse.wrapper.node_call import Entry, make_launcher
from tests.cases import CASES, SIZES_BY_SYMBOLS

DTYPES = ("float32", "bfloat16", "float16")
MOST_PROCESSES = 14
IN_FLIGHT = 3  # compilations handed out for each process: few, so that an end of time leaves little behind


@dataclass(frozen=True)
class Check:
    case: str
    dtype: str


@dataclass(frozen=True)
class Built:
    """A kernel as another process made it."""

    check: Check
    binary: bytes  # an artifact, or a shared object
    name: str
    problem: str = ""  # why there is none
    is_refused: bool = False  # the node is not for this code generator
    form: str = ""  # the node, as JSON
    digest: str = ""  # of the kernel's source, whatever its name
    is_known: bool = False  # an earlier run has found this very source right, so nothing was compiled
    seconds: dict[str, float] = field(default_factory=dict)  # of each phase


def checks(only: Sequence[str] = ()) -> list[Check]:
    """The whole table in float32 first, then in the narrow dtypes where it makes a difference."""
    named = [name for name in CASES if not only or name in only]
    has_floats = [n for n in named if any(t.is_floating_point() for t in CASES[n].example)]
    return [Check(n, DTYPES[0]) for n in named] + [Check(n, d) for d in DTYPES[1:] for n in has_floats]


def sizes_of(name: str, form: NodeForm) -> Sequence[tuple[int, ...]]:
    return CASES[name].sizes or SIZES_BY_SYMBOLS[len(form.symbols)]


def build(check: Check, target: str | None, known: str = "") -> Built:
    """A kernel for all sizes of a case. In a process of its own; ``target`` None: by the C compiler.

    ``known``: the digest of a source that was right; such a source is not compiled again.
    """
    began = time.perf_counter()
    form = CASES[check.case].form(getattr(torch, check.dtype), "cpu" if target is None else "cuda")
    traced = time.perf_counter()
    made = _compiled(check, form, target, known)
    seconds = {"trace": traced - began, "compile": time.perf_counter() - traced}
    return replace(made, form=json.dumps(form.to_json()), seconds=seconds)


def _compiled(check: Check, form: NodeForm, target: str | None, known: str) -> Built:
    try:
        if target is None:
            kernel = FusionKernelGenerator().generate_generic_kernel(form)
            return Built(check, kernel.binary, kernel.name)
        from autofuse.codegen.triton.compile import compile_source  # imports Triton, which this process alone needs

        loops = lower(form)
        sizes = [dict(zip(form.symbols, values, strict=True)) for values in sizes_of(check.case, form)]
        high = {symbol: max(values[symbol] for values in sizes) for symbol in form.symbols}
        source = print_triton(loops, default_config(triton_knobs(loops, high, high)))
        if (digest := _digest(source)) == known:
            return Built(check, b"", source.name, digest=digest, is_known=True)
        artifact = compile_source(source, target, (Assumptions(True, ()), NOTHING_ASSUMED))
        return Built(check, artifact.pack(), source.name, digest=digest)
    except LoweringError as error:
        return Built(check, b"", "", f"{error.code}: {error}", True)
    except (CompilerError, ShapeError) as error:
        return Built(check, b"", "", str(error))


def _digest(source: TritonSource) -> str:
    text = json.dumps(source.to_json(), sort_keys=True).replace(source.name, "kernel")
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _hide_gpus() -> None:
    """In a process that compiles: tracing would open a GPU that it sees, which takes seconds and half a GiB."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


Rows = Mapping[tuple[str, str], dict[str, Any]]  # by case and dtype


def right_rows(document: Mapping[str, Any]) -> Rows:
    """The rows of an earlier run's results that were right, each with the commit that made it."""
    rows = document["sections"]["check"]["rows"]
    right = [row for row in rows if row["outcome"] == "right" and row.get("digest")]
    return {(row["case"], row["dtype"]): {"commit": document["commit"]} | row for row in right}


def build_all(
    wanted: Sequence[Check], target: str | None, left: Callable[[], float], known: Rows = MappingProxyType({})
) -> Iterator[Built]:
    """Kernels in the order in which they are ready, until time is up; ``known``: rows of an earlier run."""
    processes = max(1, min(MOST_PROCESSES, len(os.sched_getaffinity(0)), len(wanted)))
    waiting = list(reversed(wanted))
    running: dict[Future[Built], Check] = {}
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _hide_gpus)
    try:
        while (waiting or running) and left() > 0:
            while waiting and len(running) < IN_FLIGHT * processes:
                digest = known.get((waiting[-1].case, waiting[-1].dtype), {}).get("digest", "")
                running[pool.submit(build, waiting[-1], target, digest)] = waiting[-1]
                waiting.pop()
            for future in wait(running, timeout=max(0.0, left()), return_when=FIRST_COMPLETED).done:
                yield _result(future, running.pop(future))
    except BrokenExecutor:
        return  # a compiler took its process down; what is missing is named as left out
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _result(future: Future[Built], check: Check) -> Built:
    try:
        return future.result()
    except Exception as error:
        return Built(check, b"", "", f"{type(error).__name__}: {error}")


def load(built: Built, device: torch.device) -> Entry:
    if device.type == "cpu":
        from autofuse.codegen.c.load import load_kernel

        return load_kernel(built.binary, built.name).entry
    from autofuse.gpu.modules import load_artifact

    return load_artifact(Artifact.unpack(built.binary), device.index)


def verify(built: Built, device: torch.device) -> dict[str, Any]:
    """A row of results."""
    began = time.perf_counter()
    outcome = _outcome(built, device)
    seconds = built.seconds | {"verify": time.perf_counter() - began}
    row = {"case": built.check.case, "dtype": built.check.dtype} | outcome
    row |= {"digest": built.digest} if built.digest else {}
    return row | {"seconds": {phase: round(value, 3) for phase, value in seconds.items()}}


def _outcome(built: Built, device: torch.device) -> dict[str, Any]:
    if built.problem:
        return {"outcome": "refused" if built.is_refused else "not compiled", "detail": built.problem}
    form = NodeForm.from_json(json.loads(built.form))
    try:
        entry = load(built, device)

        def make_call(allocator: GuardedAllocator, values: Sequence[int]) -> Callable[..., Any]:
            return make_launcher(form, entry, values, torch.get_num_threads(), allocator)

        worst = Verifier(form, device).check(make_call, _cases(built.check, form))
    except Wrong as wrong:
        return {"outcome": "wrong", "detail": str(wrong)}
    except Exception as error:
        if isinstance(error, NotImplementedError) or "not implemented for" in str(error):
            return {"outcome": "refused", "detail": f"no eager kernel: {error}"}
        return {"outcome": "failed", "detail": f"{type(error).__name__}: {error}"}
    return {"outcome": "right", "error_over_eager": round(worst, 3)}


def seconds_by_phase(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """What all rows took together; all phases but the last one run in several processes at once."""
    timed = [row["seconds"] for row in rows if "seconds" in row]
    return {phase: round(sum(row.get(phase, 0.0) for row in timed), 1) for phase in ("trace", "compile", "verify")}


def _cases(check: Check, form: NodeForm) -> list[CheckCase]:
    sizes = list(sizes_of(check.case, form))
    found = [CheckCase(values, "normal") for values in sizes]
    found.append(CheckCase(sizes[-1], "special"))
    found.append(CheckCase(sizes[0], "large" if check.dtype == "float32" else "normal", shifted=True))
    return found
