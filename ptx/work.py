"""What is executed: the nodes of the table of cases, products and attentions, each at several sizes.

In: names. Out: an `Outcome` of each: calls that were right, or what was wrong, faulty, unordered or unknown. Guarantee:
results are held against float64 beside eager, as those of all kernels are.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from autofuse.codegen.call import allocate
from autofuse.codegen.knobs import default_config
from autofuse.codegen.reference import make_inputs, run_unfused, to_float64, widen
from autofuse.codegen.triton.generator import TritonKernelGenerator
from autofuse.codegen.triton.source import TritonSource
from autofuse.errors import AutofuseError, ShapeError
from autofuse.ir.operation import NodeForm
from autofuse.ir.records import make_config
from ptx.kernels import ARCHITECTURE, PtxKernel
from ptx.memory import Fault
from ptx.text import Unsupported
from tests import cases
from tests.codegen.compare import problems
from tests.codegen.triton.templates import test_attention, test_matmul

GENERATOR = TritonKernelGenerator()
KINDS = ("normal", "special")
# NaN and Inf as integers: each kind of device has its own, and eager on a CPU is no measure.
DEVICES_OWN_SPECIALS = ("casts",)
Sizes = Mapping[str, int]


@dataclass(frozen=True)
class Work:
    """One node in one dtype."""

    name: str
    dtype: str
    form: NodeForm
    sizes: tuple[Sizes, ...]
    loose: bool = False
    config: Mapping[str, object] = field(default_factory=dict)  # of a product's small tiles
    sizes_are_any: bool = False  # the table names none for this node: others do as well

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}"


@dataclass
class Outcome:
    counts: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)
    opcodes: set[str] = field(default_factory=set)
    skipped: list[str] = field(default_factory=list)

    def find(self, kind: str, text: str) -> None:
        self.counts[kind] += 1
        self.findings.append(f"{kind}: {text}")


DTYPES = ("float32", "bfloat16", "float16", "float64")


def all_work(dtypes: Sequence[str] = DTYPES, beginnings: tuple[str, ...] = ()) -> Iterator[Work]:
    """All nodes, or those whose names begin so."""
    for name in cases.ON_GPUS:
        case = cases.CASES[name]
        for dtype in dtypes if not beginnings or name.startswith(beginnings) else ():
            if name in cases.NO_HALVES and dtype.endswith("float16"):
                continue
            form = case.form(getattr(torch, dtype))
            sizes = case.sizes or cases.SIZES_BY_SYMBOLS[len(form.symbols)]
            loose, is_any = name in cases.LOOSE_SPECIALS, not case.sizes
            yield Work(name, dtype, form, _named(form, sizes), loose, sizes_are_any=is_any)
    for label, table, config in (
        ("product", test_matmul.CASES, test_matmul.SMALL),
        ("attention", test_attention.CASES, test_attention.SMALL),
    ):
        for name, item in table.items():
            full = f"{label} {name}"
            # In float64 products are other instructions than mma.
            for dtype in dtypes if not beginnings or full.startswith(beginnings) else ():
                if dtype != "float64":
                    form = item.form(dtype)
                    yield Work(full, dtype, form, _named(form, item.sizes), True, config)


def _named(form: NodeForm, sizes: object) -> tuple[Sizes, ...]:
    return tuple(dict(zip(form.symbols, values, strict=True)) for values in sizes)  # type: ignore[call-overload]


def execute(work: Work, outcome: Outcome, most_sizes: int, built_in: int = 0) -> None:
    """Compile and run a node at its largest sizes; what happens is noted in ``outcome``.

    ``built_in``: instead, the kernel that is made for this size of all symbols and for no other.
    """
    outcome.counts["nodes"] += 1
    by_source: dict[TritonSource, list[Sizes]] = {}
    largest = sorted(work.sizes, key=lambda values: -math.prod(values.values()))  # several warps and tiles
    for values in [dict.fromkeys(work.form.symbols, built_in)] if built_in else largest[:most_sizes]:
        try:
            knobs = GENERATOR.knobs(work.form, values, values)
            config = make_config({**dict(default_config(knobs)), **work.config})
            source = GENERATOR.source(work.form, config, values if built_in else {})
            by_source.setdefault(source, []).append(values)
        except (ShapeError, AutofuseError) as error:
            outcome.find("refused", f"{work} {dict(values)}: {error}")
    for source, sizes in by_source.items():
        try:
            kernel = PtxKernel.compile(source, sizes, ARCHITECTURE)
        except (AutofuseError, Unsupported) as error:
            outcome.find("unsupported", f"{work}: {str(error)[:200]}")
            continue
        outcome.counts["kernels"] += len(kernel.programs)
        outcome.opcodes |= kernel.opcodes
        for values in sizes:
            try:
                _run_all(work, kernel, values, outcome)
            except (RuntimeError, IndexError) as error:
                if not built_in:
                    raise
                outcome.counts["without such a size"] += 1  # in torch's words
                outcome.skipped.append(f"{work}: {error}")
        for text in kernel.conflicts.races:
            outcome.find("races", f"{work}: {text}")
        outcome.counts["kernels with duplicates"] += bool(kernel.conflicts.counts["duplicates"])


def _run_all(work: Work, kernel: PtxKernel, values: Sizes, outcome: Outcome) -> None:
    """Aligned and beside it; normal values, and in float32 NaN and Inf among them."""
    has_specials = work.dtype == "float32" and not work.config and work.name not in DEVICES_OWN_SPECIALS
    kinds = KINDS if has_specials else KINDS[:1]
    for kind, shift in [(kinds[0], 0), (kinds[0], 1), *((kind, 0) for kind in kinds[1:])]:
        label = f"{work} {dict(values)}, {kind} values{', beside aligned places' if shift else ''}"
        try:
            wrong = _run(work, kernel, values, kind, shift)
        except Unsupported as error:
            outcome.find("unsupported", f"{label}: {error}")
            return
        except (Fault, AssertionError) as error:
            outcome.find("faults", f"{label}: {error}")
        except MemoryError:
            outcome.counts["too large"] += 1
        else:
            outcome.counts["right" if not wrong else "wrong"] += 1
            if wrong:
                outcome.findings.append(f"wrong: {label}: {'; '.join(wrong)[:300]}")


def _run(work: Work, kernel: PtxKernel, values: Sizes, kind: str, shift: int) -> list[str]:
    form = work.form
    inputs = make_inputs(form, values, seed=1, kind=kind)  # type: ignore[arg-type]
    outputs = [allocate(form.spec(ref), values, poison=True) for ref in form.outputs]
    if all(t.numel() == 0 for t in outputs):
        return []
    kept = [t.clone() for t in inputs]
    eager = run_unfused(form, inputs, values)  # first: torch refuses sizes that a node cannot have
    kernel(values, [*inputs, *outputs], shift=shift)
    exact = run_unfused(to_float64(form), widen(inputs), values)
    wrong = problems(outputs, eager, exact, work.loose)
    changed = [f"input {n} has changed" for n, (a, b) in enumerate(zip(inputs, kept, strict=True)) if not _same(a, b)]
    return wrong + changed


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)
