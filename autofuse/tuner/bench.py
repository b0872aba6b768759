"""One node on the worker's bench: inputs, eager, candidates, verified and timed.

In: a `NodeForm`, symbol values, kernels as bytes. Out: plain numbers and texts.
Guarantee: what is timed is what is deployed: the router's own launcher against the router's own unfused
call, both allocating their outputs, on inputs that rotate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from autofuse.codegen.inputs import make_inputs
from autofuse.codegen.load import load_kernel
from autofuse.ir.operation import NodeForm
from autofuse.runtime.launch import make_launcher, make_unfused
from autofuse.tuner.timing import Comparison, compare, measure_rounds
from autofuse.tuner.verify import GuardedAllocator, verify

MAX_VERIFY_ELEMENTS = 1 << 22  # larger shapes are verified at a smaller one; the code is the same
ROTATED_BYTES = 8 << 20  # inputs are duplicated until they take this much, so that they do not all sit in the L2


class Bench:
    """Everything of one node in one worker process."""

    def __init__(self, form: NodeForm, threads: int) -> None:
        self.form = form
        self.threads = threads
        self._entries: dict[str, Callable[..., None]] = {}

    def load(self, digest: str, name: str, binary: bytes) -> None:
        """Map a kernel into the process, once."""
        if digest not in self._entries:
            self._entries[digest] = load_kernel(binary, name).entry

    def has(self, digest: str) -> bool:
        return digest in self._entries

    def verify(self, digest: str, shapes: Sequence[tuple[tuple[int, ...], str]]) -> float:
        """The worst error ratio over (symbol values, kind of inputs). Raises `verify.Wrong`."""
        worst = 0.0
        for seed, (values, kind) in enumerate(shapes):
            if self.elements(values) > MAX_VERIFY_ELEMENTS:
                continue
            try:
                inputs = make_inputs(self.form, values, seed, kind)  # type: ignore[arg-type]
                make_unfused(self.form, values)(*inputs)
            except (RuntimeError, IndexError):
                continue  # eager itself refuses such sizes: the script cannot meet them

            def make_call(allocator: GuardedAllocator, values: tuple[int, ...] = values) -> Callable[..., Any]:
                return make_launcher(self.form, self._entries[digest], values, self.threads, allocator)

            worst = max(worst, verify(self.form, make_call, inputs, values))
        return worst

    def elements(self, values: Sequence[int]) -> int:
        table = dict(zip(self.form.symbols, values, strict=True))
        specs = [i.spec for i in self.form.inputs] + [s for op in self.form.operations for s in op.outputs]
        counts = []
        for spec in specs:
            total = 1
            for size in spec.shape.bind(table):
                total *= size
            counts.append(total)
        return max(counts, default=1)

    def race(
        self, digests: Sequence[str], values: tuple[int, ...], rounds: int, budget_seconds: float
    ) -> tuple[float, list[Comparison]]:
        """Eager's median in us, and each candidate against it, from the same rounds."""
        sets = self._input_sets(values)
        eager = make_unfused(self.form, values)
        calls = [eager, *(make_launcher(self.form, self._entries[d], values, self.threads) for d in digests)]
        samples = measure_rounds([_rotating(call, sets) for call in calls], rounds, budget_seconds=budget_seconds)
        comparisons = [compare(samples[0], s) for s in samples[1:]]
        return sorted(samples[0])[len(samples[0]) // 2] * 1e6, comparisons

    def _input_sets(self, values: tuple[int, ...]) -> list[list[torch.Tensor]]:
        first = make_inputs(self.form, values, 0, "normal")
        nbytes = sum(t.numel() * t.element_size() for t in first)
        copies = max(1, min(4, ROTATED_BYTES // max(nbytes, 1)))
        return [first, *(make_inputs(self.form, values, seed, "normal") for seed in range(1, copies))]


def _rotating(call: Callable[..., Any], sets: Sequence[Sequence[torch.Tensor]]) -> Callable[[], object]:
    state = {"next": 0}
    count = len(sets)

    def rotated() -> object:
        index = state["next"]
        state["next"] = index + 1 if index + 1 < count else 0
        return call(*sets[index])

    return rotated
