"""The script's own kernels against ours: a short race in the script's process.

In: a node with a library's operator, and the callable of the kernel that has won against the operator's unfused form.
Out: whether the library's operator stays. Guarantee: each kernel of a node and bucket is raced once, on random numbers
of the node's own sizes; the script's generators are as before; where no race can be run the operator stays. The worker
cannot run this race: it has not imported the script's libraries, and does not.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from autofuse.capture.check_unfused import is_int, safe_inputs
from autofuse.codegen.inputs import names_with_roles
from autofuse.ir.composites import without_librarys
from autofuse.ir.indices import passes_indices
from autofuse.ir.operation import BYTES_PER_ELEMENT, NodeForm
from autofuse.ir.optable import is_librarys
from autofuse.ir.records import Event
from autofuse.ir.shape import evaluate
from autofuse.ir.validation import one_line
from autofuse.library_operators import name_of, registered
from autofuse.preserve_rng import untouched
from autofuse.runtime.graphs.plans import NodeState
from autofuse.runtime.run_context import RunContext
from autofuse.wrapper.node_call import NodeCall

ROUNDS = 11  # of which the first two are not counted
SECONDS = 0.2  # for all rounds of long calls
LEAST_ROUNDS = 5
MOST_BYTES = 512 << 20  # of a node's inputs and outputs, which the race copies
LEAST_SECONDS = 2e-4  # of one sample: shorter calls are repeated in it


class OwnKernels:
    """The races of one session."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._stay: dict[tuple[Any, ...], bool] = {}

    def stay(self, node: NodeState, fused: NodeCall, tag: str) -> bool:
        """Whether the script's own kernel is to run, with its neighbours in eager, in place of ``fused``; ``tag``: of
        that kernel."""
        found = tuple(registered(op.target) for op in node.form.operations if is_librarys(op.target))
        key = (node.fusion_id, node.bucket.label, torch.get_num_threads(), tag, found)
        if key not in self._stay:
            try:
                with untouched(), _disable_current_modes():
                    problem, times = _why_not_raced(node), 0.0
                    if not problem:
                        times = self._race(node, fused)
            except Exception as error:  # such as too little memory: the operator is there
                problem, times = f"the race of the two raised {type(error).__name__}: {error}", 0.0
            self._stay[key] = bool(problem) or times < 1.0 + self._context.settings.tuner.margin
            self._note(node, times, problem, self._stay[key])
        return self._stay[key]

    def _race(self, node: NodeState, fused: NodeCall) -> float:
        """How many times as fast as the script's own kernels ours is, by the median of rounds."""
        device = node.slot.device
        inputs = safe_inputs(without_librarys(node.form), node.values, 1, "normal", device)
        calls = (node.unfused, fused)
        began = perf_counter()
        with torch.no_grad():
            once = [_seconds_of_one(call, inputs) for call in calls]
            if max(once) > SECONDS:  # the script waits for this
                return once[0] / once[1]
            counts = [max(1, min(100, int(LEAST_SECONDS / seconds))) for seconds in once]
            ratios = []
            for number in range(ROUNDS):
                order = (0, 1) if number % 2 else (1, 0)
                found = {which: _seconds(calls[which], inputs, counts[which]) for which in order}
                ratios.append(found[0] / found[1])
                if len(ratios) >= LEAST_ROUNDS and perf_counter() - began > SECONDS:
                    break
        return statistics.median(ratios[2:])

    def _note(self, node: NodeState, times: float, problem: str, stays: bool) -> None:
        found = [registered(op.target) for op in node.form.operations if is_librarys(op.target)]
        names = ", ".join(dict.fromkeys(name_of(item.operator) for item in found if item is not None))
        what = "the script's own kernel stays" if stays else "ours takes the place of the script's own kernel"
        message = one_line(f"{names} in {node.slot.node.label}: {what}: {problem or f'{times:.2f}x'}")
        self._context.store_thread.post_event(Event("own_kernel", message, {"speedup": times, "stays": stays}))


def _why_not_raced(node: NodeState) -> str:
    """Why a node is not to be raced; "" where it is."""
    symbols = dict(zip(node.form.symbols, node.values, strict=True))
    specs = [*(item.spec for item in node.form.inputs), *(node.form.spec(ref) for ref in node.form.outputs)]
    nbytes = sum(evaluate(spec.numel, symbols) * BYTES_PER_ELEMENT[spec.dtype] for spec in specs)
    if node.slot.device.type != "cpu":
        return "no race is run on a GPU, where a CUDA graph may be captured meanwhile"
    if _reads_computed_indices(node.form):
        return "random indices might be out of bounds"
    return f"tensors of {nbytes >> 20} MiB are too large to be raced" if nbytes > MOST_BYTES else ""


def _reads_computed_indices(form: NodeForm) -> bool:
    """Whether an operator of a library's, which may look at no bounds, reads integers that are not safe by themselves.

    Those are that are inputs of the node and have a role in what the operator computes.
    """
    named, made = names_with_roles(without_librarys(form)), {op.name: op for op in form.operations}
    read = [
        ref for op in form.operations if is_librarys(op.target) for ref in op.inputs if is_int(form.spec(ref).dtype)
    ]
    for ref in read:
        while ref.name in made and passes_indices(made[ref.name]) and is_int(form.spec(made[ref.name].inputs[0]).dtype):
            ref = made[ref.name].inputs[0]
        if ref.name in made or ref.name not in named:
            return True
    return False


def _seconds_of_one(call: Callable[..., Any], inputs: list[torch.Tensor]) -> float:
    call(*inputs)
    return max(_seconds(call, inputs, 1), 1e-7)


def _seconds(call: Callable[..., Any], inputs: list[torch.Tensor], count: int) -> float:
    """Of one call, of so many in a row."""
    began = perf_counter()
    for _ in range(count):
        call(*inputs)
    return (perf_counter() - began) / count
