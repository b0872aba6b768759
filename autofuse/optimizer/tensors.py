"""The tensors of a step: packed for a kernel, made up for tests and timing, handed to torch's own functions.

In: the arguments of a functional optimizer. Out: the table that a kernel reads; or calls of torch with another variant.
Guarantee: what `Table.pack` accepts, a kernel may write: plain dense CPU tensors of one dtype, parameter, gradient and
states laid out alike, none of those that are written sharing memory with another. A table keeps no tensor alive.
"""

from __future__ import annotations

import importlib
import itertools
import operator
import weakref
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autofuse.optimizer.form import StepForm
from autofuse.optimizer.printer import COLUMNS, MOST_STATES

Arguments = Mapping[str, Any]
VENDOR_SWITCHES = ("foreach", "fused")
NOT_MADE = "a state is not made yet"  # SGD makes its buffers in the first step


def torch_function(algorithm: str) -> Callable[..., None]:
    """``torch.optim.<algorithm>.<algorithm>``, whatever stands there now."""
    function: Callable[..., None] = getattr(importlib.import_module(f"torch.optim.{algorithm}"), algorithm)
    return function


def with_variant(form: StepForm, arguments: Arguments, variant: str) -> dict[str, Any]:
    """The arguments with another of torch's own variants switched on."""
    switches = {name: name == variant for name in VENDOR_SWITCHES if name in form.rule.vendors}
    return {**arguments, **switches}


class Table:
    """Addresses of all tensors of a group, as a kernel reads them."""

    def __init__(self, form: StepForm) -> None:
        self._form = form
        self._dtype: torch.dtype = getattr(torch, form.dtype)
        self._rows = array("q", [0] * (COLUMNS * len(form.sizes)))
        self._scalars = array("d", [0.0] * len(form.rule.scalars))
        self._sizes = array("q", [len(form.sizes), 1])
        # Parameters, states, counters as they were checked: a model that the script drops must go.
        self._kept: list[list[weakref.ref[Tensor]]] = []
        self._pointers: list[list[int]] = []
        self._strides: list[tuple[int, ...]] = []
        self._numels: list[int] = []
        self._plain: tuple[Any, ...] = ()
        self.addresses = tuple(a.buffer_info()[0] for a in (self._sizes, self._rows, self._scalars))

    def pack(self, arguments: Arguments, threads: int) -> str | None:
        """Take the arguments of one step; what is in the way, None where nothing is.

        Parameters and states that are the same objects as before at the same addresses are not looked at again: of a
        step over 100 tensors the script waits for 40 us of this, looking at all would take 300.
        """
        form = self._form
        grads = arguments[form.rule.grads]
        kept = [arguments["params"], *(arguments[name] for name in form.states)]
        kept += [arguments["state_steps"]] if form.rule.has_steps else []
        if any(len(listed) != len(form.sizes) for listed in (grads, *kept)):
            return "the lists of tensors have other lengths than before"
        if not self._is_known(kept):
            problem = self._look_at(kept)
            if problem is not None:
                return problem
        if [g.stride() for g in grads] != self._strides or [g.numel() for g in grads] != self._numels:
            return "a gradient is laid out unlike its parameter"
        if {(type(g), g.dtype, g.layout, g.device.type, g.is_neg()) for g in grads} - {self._plain}:
            return f"a gradient is no plain {form.dtype} tensor of the CPU"
        self._rows[2::COLUMNS] = array("q", [g.data_ptr() for g in grads])
        for n, name in enumerate(form.rule.scalars):
            value = arguments[name]
            if not isinstance(value, int | float):
                return f"{name} is no plain number"
            self._scalars[n] = value
        self._sizes[1] = threads
        return None

    def _is_known(self, kept: list[list[Tensor]]) -> bool:
        if len(self._kept) != len(kept) or not all(
            all(map(operator.is_, now, [ref() for ref in before])) for now, before in zip(kept, self._kept, strict=True)
        ):
            return False
        same = [[t.data_ptr() for t in listed] for listed in kept] == self._pointers
        return same and [p.numel() for p in kept[0]] == self._numels

    def _look_at(self, kept: list[list[Tensor]]) -> str | None:
        """Check parameters, states and counters, and note where they lie."""
        form, rows = self._form, self._rows
        self._kept = []
        params = kept[0]
        for param, numel in zip(params, form.sizes, strict=True):
            problem = _problem(param, numel, self._dtype)
            if problem:
                return problem
        steps = kept[-1] if form.rule.has_steps else []
        for step in steps:
            if step.dtype is not torch.float32 or step.device.type != "cpu" or step.numel() != 1:
                return "a step counter is no float32 number of the CPU"
        states = kept[1 : 1 + len(form.states)]
        for listed in states:
            for param, state in zip(params, listed, strict=True):
                if state is None:
                    return NOT_MADE
                if type(state) is not Tensor or state.dtype is not self._dtype or state.shape != param.shape:
                    return "a state is no plain tensor like its parameter"
                if state.stride() != param.stride() or state.device.type != "cpu" or state.is_neg():
                    return "a state is laid out unlike its parameter"
        if _share_memory([t for listed in kept for t in listed]):
            return "tensors of the step share memory"
        self._strides, self._numels = [p.stride() for p in params], [p.numel() for p in params]
        self._plain = (Tensor, self._dtype, torch.strided, "cpu", False)
        self._pointers = [[t.data_ptr() for t in listed] for listed in kept]
        rows[0::COLUMNS] = array("q", self._numels)
        for column, listed in zip((1, *range(3, 3 + len(states))), self._pointers, strict=False):
            rows[column::COLUMNS] = array("q", listed)
        if form.rule.has_steps:
            rows[3 + MOST_STATES :: COLUMNS] = array("q", self._pointers[-1])
        self._kept = [[weakref.ref(t) for t in listed] for listed in kept]
        return None


def _problem(param: Tensor, numel: int, dtype: torch.dtype) -> str | None:
    if param.numel() != numel or param.dtype is not dtype or param.device.type != "cpu":
        return "a parameter has changed its size, dtype or device"
    if type(param) not in (Tensor, torch.nn.Parameter) or param.layout is not torch.strided or param.is_neg():
        return "a parameter is no plain strided tensor"
    if not param.is_contiguous() and not torch.ops.aten.is_non_overlapping_and_dense(param):
        return "the elements of a parameter do not lie side by side"
    return None


def _share_memory(tensors: Sequence[Tensor]) -> bool:
    """Whether two of these dense tensors overlap, as where a parameter is listed twice: the order would matter."""
    spans = sorted((t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in tensors if t.numel())
    return any(end > start for (_, end), (start, _) in itertools.pairwise(spans))


def written(form: StepForm, arguments: Arguments) -> list[Tensor]:
    """The tensors that a step changes in place."""
    found = [*arguments["params"], *(t for name in form.states for t in arguments[name])]
    return found + list(arguments["state_steps"]) if form.rule.has_steps else found


# ---- made up ------------------------------------------------------------------------------------------

NUMBERS = {
    "lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01, "momentum": 0.9, "dampening": 0.1,
    "alpha": 0.99, "lr_decay": 0.01,
}  # fmt: skip


def make_arguments(form: StepForm, seed: int, kind: str = "normal", steps: int = 3) -> dict[str, Any]:
    """Arguments of a step with random tensors; ``kind`` as in `codegen.inputs`; ``steps`` were done before."""
    generator = torch.Generator().manual_seed(seed)
    dtype: torch.dtype = getattr(torch, form.dtype)

    def tensors(scale: float, is_positive: bool = False, values: str = "normal") -> list[Tensor]:
        made = []
        for size in form.sizes:
            value = torch.randn(size, generator=generator, dtype=torch.float64) * scale
            value = value.abs() if is_positive else value
            if values == "zeros":
                value.zero_()
            if values == "large":
                value *= 1e4
            if values == "special" and size:
                value[0], value[size // 2] = float("nan"), float("inf")
            made.append(value.to(dtype))
        return made

    lists = {"params": tensors(1.0), form.rule.grads: tensors(0.1, values=kind)}
    for name, _ in form.rule.states:
        is_square = name in ("exp_avg_sqs", "max_exp_avg_sqs", "square_avgs", "state_sums")
        known = name in form.states
        # Above the square of grad_avgs, as a mean of squares is.
        lists[name] = tensors(0.01 if not is_square else 1.0, is_square) if known else []
    if form.rule.has_steps:
        lists["state_steps"] = [torch.tensor(float(steps)) for _ in form.sizes]
    return {**lists, **_numbers(form)}


def _numbers(form: StepForm) -> dict[str, Any]:
    found: dict[str, Any] = {name: NUMBERS[name] for name in form.rule.scalars}
    for name in ("weight_decay", "momentum"):
        if name in found and name not in form.flags:
            found[name] = 0.0
    if "nesterov" in form.flags:
        found["dampening"] = 0.0
    switches = {
        "adam": ("amsgrad", "maximize", "decoupled_weight_decay"),
        "sgd": ("nesterov", "maximize"),
        "rmsprop": ("centered", "maximize"),
        "adagrad": ("maximize",),
    }[form.algorithm]
    return found | {name: name in form.flags for name in switches}


def copied(arguments: Arguments, dtype: torch.dtype | None = None) -> dict[str, Any]:
    """The same arguments with tensors of their own, in another dtype where one is given (but the step counters)."""

    def copy(name: str, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [t.clone() if dtype is None or name == "state_steps" else t.to(dtype, copy=True) for t in tensors]

    return {k: copy(k, v) if isinstance(v, list) else v for k, v in arguments.items()}
