"""PyTorch's own samples of its operators, on kernels, against eager and float64.

In: an operator of torch's table (`op_db`), a dtype, a seed. Out: what differs, each with its sample's name, by which
`scripts/fuzz samples --only NAME --seed N` repeats it. Needs `expecttest`, which that table imports. Guarantee: a
sample that is not compared is counted with the reason.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._dynamo.exc import TorchDynamoException
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from fuzz.fused import REFUSED, Kernels, fused
from tests.codegen.compare import problems

T = torch.Tensor
LEFT_OUT = ("fft.", "sparse.", "_refs", "torch.ops", "empty", "new_empty")  # the last ones have no values of their own
MOST_ELEMENTS = 200_000


@dataclass(frozen=True)
class Sample:
    """One call of an operator: the operator between its neighbours, as a function of its tensors."""

    name: str  # "nn.functional.softmax[float32, 3, both]"
    function: Callable[..., list[T]]
    tensors: list[T]


@dataclass
class Outcome:
    ran: int = 0
    nodes: int = 0
    skipped: dict[str, int] = field(default_factory=dict)  # reason -> samples
    wrong: list[str] = field(default_factory=list)

    def skip(self, reason: str) -> None:
        self.skipped[reason] = self.skipped.get(reason, 0) + 1


def operators(only: str = "") -> list[Any]:
    """Of torch's table, those whose names begin with one of these words, separated by commas."""
    try:
        from torch.testing._internal.common_methods_invocations import op_db
    except ModuleNotFoundError as error:
        sys.exit(f"expected {error.name}, which torch's table of operators imports: pip install {error.name}")
    wanted = tuple(name for name in only.split(",") if name)
    found = [op for op in op_db if not name_of(op).startswith(LEFT_OUT)]
    return [op for op in found if not wanted or name_of(op).startswith(wanted)]


def try_operators(options: argparse.Namespace, numbers: Sequence[int], tell: Callable[[str], None]) -> dict[str, int]:
    """Some operators in each dtype; the counts. A file tells the last one, in case the process dies of it."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found, outcome = operators(options.only), Outcome()
    for number in numbers:
        op = found[number]
        for name in options.dtypes.split(","):
            dtype = getattr(torch, name)
            if dtype not in op.supported_dtypes("cpu"):
                continue
            options.note.write_text(f"{name_of(op)} {name}")
            before = len(outcome.wrong)
            try:
                for sample in samples(op, dtype, random.Random(options.seed), options.samples):
                    try_sample(sample, outcome, options.seed)
            except Exception as error:  # of torch's own samples
                outcome.skip(f"no samples: {type(error).__name__}")
            for text in outcome.wrong[before:]:
                tell(text)
    return {"operators": len(numbers), "samples": outcome.ran, "nodes": outcome.nodes, **outcome.skipped}


def after(t: T) -> T:
    if t.dtype is torch.bool:
        return t.logical_not()
    return t * 2


def program(op: Any, sample: Any, place: str) -> tuple[Callable[..., list[T]], list[T]]:
    """The operator, with work ``"before"`` it, ``"after"`` it, or on both sides, as a function of its tensors."""
    flat, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
    at = [n for n, value in enumerate(flat) if isinstance(value, T)]

    def function(*tensors: T) -> list[T]:
        values = list(flat)
        for n, tensor in zip(at, tensors, strict=True):
            # Work before the operator, which makes its input one of the kernel's values; 0 is no constant to fold away.
            values[n] = tensor + 0.0 if place != "after" and tensor.is_floating_point() else tensor
        given, args, kwargs = tree_unflatten(values, spec)
        results = [t for t in tree_leaves(op.op(given, *args, **kwargs)) if isinstance(t, T)]
        return [after(t) for t in results] if place != "before" else results

    return function, [flat[n] for n in at]


def name_of(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


def samples(op: Any, dtype: torch.dtype, rng: random.Random, most: int) -> Iterator[Sample]:
    """Up to ``most`` samples of an operator, drawn from all of it."""
    name = name_of(op)
    needs_grad = op.supports_autograd and dtype.is_floating_point and dtype in op.supported_backward_dtypes("cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(rng.randrange(1 << 30))
        everything = list(itertools.islice(op.sample_inputs("cpu", dtype, needs_grad), 400))
    chosen = sorted(rng.sample(range(len(everything)), min(most, len(everything))))
    for number in chosen:
        place = rng.choice(("before", "after", "both"))
        yield Sample(
            f"{name}[{str(dtype).removeprefix('torch.')}, {number}, {place}]", *program(op, everything[number], place)
        )


def copies(tensors: list[T], wide: bool = False) -> list[T]:
    """Leaves of their own, with the strides that the samples have."""
    found = []
    for t in tensors:
        c = t.detach().clone(memory_format=torch.preserve_format)
        if wide and c.is_floating_point():
            c = c.double()
        found.append(c.requires_grad_(t.requires_grad and c.is_floating_point()))
    return found


def run(function: Callable[..., list[T]], tensors: list[T], seed: int) -> list[T]:
    """Results and gradients."""
    torch.manual_seed(seed)
    results = function(*tensors)
    with_grad = [t for t in results if t.requires_grad]
    inputs = [t for t in tensors if t.requires_grad]
    grads: list[T] = []
    if with_grad and inputs:
        torch.manual_seed(seed + 1)
        sums = [(t.double() * torch.rand(t.shape, dtype=torch.float64)).sum() for t in with_grad]
        grads = list(torch.autograd.grad(torch.stack(sums).sum(), inputs, allow_unused=True, materialize_grads=True))
    return [t.detach() for t in (*results, *grads)]


def try_sample(sample: Sample, outcome: Outcome, seed: int = 0, kernels: Kernels | None = None) -> None:
    """Run a sample in eager, in float64 and on kernels (default: generic ones), and note what differs."""
    if sum(t.numel() for t in sample.tensors) > MOST_ELEMENTS:
        return outcome.skip("large")
    theirs = copies(sample.tensors)
    try:
        eager, again = run(sample.function, theirs, seed), run(sample.function, copies(sample.tensors), seed)
    except Exception as error:
        return outcome.skip(f"eager raises {type(error).__name__}")
    if any(t.dtype.is_complex or t.layout is not torch.strided for t in eager):
        return outcome.skip("complex or sparse")
    if not all(map(_equal, eager, again)):
        return outcome.skip("eager differs from itself")
    kernels, ours = kernels or Kernels(), copies(sample.tensors)
    torch._dynamo.reset()
    try:
        found = run(fused(sample.function, kernels), ours, seed)
    except Exception as error:
        if (reason := _why_no_graph(error)) is not None:
            return outcome.skip(reason)
        outcome.wrong.append(f"{sample.name}: {type(error).__name__}: {str(error)[:300]}")
        return None
    outcome.ran += 1
    outcome.nodes += len(kernels.nodes)
    wrong = [*kernels.problems, *_differences(found, eager, _in_float64(sample, eager, seed))]
    # Statistics that an operator writes to are compared as results are, all else to the bit.
    changed = [n for n, t in enumerate(sample.tensors) if not _equal(t, theirs[n])]
    wrong += [f"input {n} has changed" for n, t in enumerate(ours) if n not in changed and not _equal(t, theirs[n])]
    wrong += [
        f"input {n}: {text}"
        for n in changed
        for text in problems([ours[n].detach()], [theirs[n].detach()], [theirs[n].detach()])
    ]
    if wrong:
        outcome.wrong.append(f"{sample.name}: {'; '.join(wrong)[:600]}")
    return None


def _why_no_graph(error: Exception) -> str | None:
    """Why torch makes no graph, or we refuse one on purpose; None for a fault of ours."""
    if not isinstance(error, TorchDynamoException):
        return None
    inner = getattr(error, "inner_exception", error)
    if isinstance(inner, REFUSED):
        return f"refused: {type(inner).__name__}"
    frames = traceback.extract_tb(inner.__traceback__)
    is_torchs = not frames or f"{os.sep}torch{os.sep}" in frames[-1].filename
    return None if not is_torchs else f"no graph: {type(inner).__name__}"


def _differences(found: list[T], eager: list[T], exact: list[T]) -> list[str]:
    if len(found) != len(eager):
        return [f"{len(found)} results, eager has {len(eager)}"]
    return problems(found, eager, exact)


def _in_float64(sample: Sample, eager: list[T], seed: int) -> list[T]:
    """The reference; eager itself where the operator gives something else for float64."""
    try:
        exact = run(sample.function, copies(sample.tensors, wide=True), seed)
    except Exception:
        return eager
    return exact if [t.shape for t in exact] == [t.shape for t in eager] else eager


def _equal(a: T, b: T) -> bool:
    """Bit by bit, where NaN equals NaN."""
    return a.shape == b.shape and torch.allclose(a.detach(), b.detach(), rtol=0.0, atol=0.0, equal_nan=True)
