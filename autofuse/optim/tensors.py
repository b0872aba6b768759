"""The tensors of a step: looked at before a kernel may have them, or made up for checks and timing.

In: the arguments of a functional optimizer. Out: their addresses, or what is in the way.
Guarantee: what `StepTensors.take` accepts, a kernel may write: plain dense tensors of one dtype on one device,
parameter, gradient and states laid out alike, none of those that are written sharing memory with another. No tensor is
kept alive.
"""

from __future__ import annotations

import importlib
import itertools
import operator
import weakref
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autofuse.optim.form import StepForm

if TYPE_CHECKING:
    from autofuse.wrapper.native_library import Look

Arguments = Mapping[str, Any]
VENDOR_SWITCHES = ("foreach", "fused")
CPU = torch.device("cpu")
_KIND = operator.attrgetter("dtype", "layout", "device")
NOT_MADE = "a state is not made yet"  # SGD makes its buffers during the first step

_look: list[Look] = []  # of this process, the newest last; empty until `look_in_c`


def look_in_c(look: Look | None) -> None:
    """Look at tensors by this function from now on; None: in Python."""
    _look[:] = [] if look is None else [look]


def torch_function(algorithm: str) -> Callable[..., None]:
    """The present ``torch.optim.<algorithm>.<algorithm>``, which may have been replaced."""
    function: Callable[..., None] = getattr(importlib.import_module(f"torch.optim.{algorithm}"), algorithm)
    return function


def with_variant(form: StepForm, arguments: Arguments, variant: str) -> dict[str, Any]:
    """The arguments with one of torch's own implementations switched on, the others off; "": all off."""
    switches = {name: name == variant for name in VENDOR_SWITCHES if name in form.rule.vendors}
    return {**arguments, **switches}


class StepTensors:
    """The tensors of a parameter group, which are checked before each step."""

    def __init__(self, form: StepForm, device: torch.device) -> None:
        """``device``: where parameters, gradients and states must be."""
        self._form = form
        self._device = device
        self._dtype: torch.dtype = getattr(torch, form.dtype)
        # Parameters, states and counters as they were checked. By weak references, so that a model that a script drops
        # is freed: then `_gone` has an item, and another object may have the identity.
        self._identities: list[list[int]] = []
        self._references: list[weakref.ref[Tensor]] = []
        self._gone: list[weakref.ref[Tensor]] = []
        self._strides: list[tuple[int, ...]] = []
        self._sizes = list(form.sizes)
        self._kind = (self._dtype, torch.strided, device)
        self._words = b""  # what `native_library.Look` says of parameters, states and counters; "" where it is silent
        self.pointers: list[list[int]] = []  # addresses of parameters, each state, and counters if any
        self.generation = 0  # grows when pointers change
        self.grads: Sequence[int] = ()
        self.scalars: list[float] = []

    def take(self, arguments: Arguments) -> str | None:
        """Take the arguments of one step; why a kernel may not have them, None if it may.

        Parameters and states that are the same objects as before, at the same addresses, are not checked again. The
        script waits for this at each step: hence C, and before that is there `map`, of torch's own methods.
        """
        form = self._form
        grads = arguments[form.rule.grads]
        kept = [arguments["params"], *(arguments[name] for name in form.states)]
        kept += [arguments["state_steps"]] if form.rule.has_steps else []
        if not self._is_as_before(grads, kept):
            problem = self._check(grads, kept)
            if problem is not None:
                return problem
        self.scalars = [arguments[name] for name in form.rule.scalars]
        for name, value in zip(form.rule.scalars, self.scalars, strict=True):
            if not isinstance(value, int | float):
                return f"{name} is no plain number"
        return None

    def _is_as_before(self, grads: list[Tensor], kept: list[list[Tensor]]) -> bool:
        """Whether all are as they were checked, and the gradients like their parameters. In C, else False."""
        words = self._words
        if not words or not _look or self._gone:
            return False
        found = _look[-1]((grads, *kept))
        if found is None or not found.startswith(words) or len(found) - len(words) != 8 * len(grads):
            return False
        if any(map(Tensor.is_neg, grads)):
            return False
        self.grads = array("q", found[len(words) :])
        return True

    def _check(self, grads: list[Tensor], kept: list[list[Tensor]]) -> str | None:
        form = self._form
        if any(len(listed) != len(form.sizes) for listed in (grads, *kept)):
            return "the lists of tensors have other lengths than before"
        if not self._is_known(kept):
            problem = self._look_at(kept)
            if problem is not None:
                return problem
        if {*map(type, grads)} != {Tensor} or {*map(_KIND, grads)} != {self._kind} or any(map(Tensor.is_neg, grads)):
            return f"a gradient is no plain {form.dtype} tensor of {self._device}"
        if [*map(Tensor.stride, grads)] != self._strides or [*map(Tensor.numel, grads)] != self._sizes:
            return "a gradient is laid out unlike its parameter"
        self.grads = [*map(Tensor.data_ptr, grads)]
        found = _look[-1]((grads, *kept)) if _look and self._device == CPU else None
        self._words = found[: -8 * len(grads)] if found else b""
        return None

    def _is_known(self, kept: list[list[Tensor]]) -> bool:
        if self._gone or [[*map(id, listed)] for listed in kept] != self._identities:
            return False
        if [[*map(Tensor.data_ptr, listed)] for listed in kept] != self.pointers:
            return False
        return [*map(Tensor.numel, kept[0])] == self._sizes

    def _look_at(self, kept: list[list[Tensor]]) -> str | None:
        """Check parameters, states and counters, and note their addresses."""
        form = self._form
        self._identities, self._words = [], b""
        params = kept[0]
        for param, numel in zip(params, form.sizes, strict=True):
            problem = self._problem(param, numel)
            if problem:
                return problem
        counters = self._device if form.counters == "device" else CPU
        for step in kept[-1] if form.rule.has_steps else ():
            if step.dtype is not torch.float32 or step.device != counters or step.numel() != 1:
                return f"a step counter is no float32 number on {counters}"
        for listed in kept[1 : 1 + len(form.states)]:
            for param, state in zip(params, listed, strict=True):
                if state is None:
                    return NOT_MADE
                if type(state) is not Tensor or state.dtype is not self._dtype or state.shape != param.shape:
                    return "a state is no plain tensor like its parameter"
                if state.stride() != param.stride() or state.device != self._device or state.is_neg():
                    return "a state is laid out unlike its parameter"
        if _share_memory([t for listed in kept for t in listed]):
            return "tensors of the step share memory"
        self._strides = [p.stride() for p in params]
        self.pointers = [[t.data_ptr() for t in listed] for listed in kept]
        self.generation += 1
        self._gone = []
        self._references = [weakref.ref(t, self._gone.append) for listed in kept for t in listed]
        self._identities = [[*map(id, listed)] for listed in kept]
        return None

    def _problem(self, param: Tensor, numel: int) -> str | None:
        if param.numel() != numel or param.dtype is not self._dtype or param.device != self._device:
            return f"a parameter is not {numel} elements of {self._form.dtype} on {self._device}"
        if type(param) not in (Tensor, torch.nn.Parameter) or param.layout is not torch.strided or param.is_neg():
            return "a parameter is no plain strided tensor"
        if not param.is_contiguous() and not torch.ops.aten.is_non_overlapping_and_dense(param):
            return "the elements of a parameter do not lie side by side"
        return None


def _share_memory(tensors: Sequence[Tensor]) -> bool:
    """Whether two of these dense tensors overlap, such as a parameter that is listed twice: order would matter."""
    spans = sorted((t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in tensors if t.numel())
    return any(end > start for (_, end), (start, _) in itertools.pairwise(spans))


def written(form: StepForm, arguments: Arguments) -> list[Tensor]:
    """The tensors that a step changes in place."""
    names = ("params", *form.states, *(("state_steps",) if form.rule.has_steps else ()))
    return [*itertools.chain.from_iterable([arguments[name] for name in names])]


# ---- arguments for checks and timing ----------------------------------------------------------------------------

NUMBERS = {
    "lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01, "momentum": 0.9, "dampening": 0.1,
    "alpha": 0.99, "lr_decay": 0.01,
}  # fmt: skip


def make_arguments(
    form: StepForm, seed: int, kind: str = "normal", steps: int = 3, device: torch.device = CPU
) -> dict[str, Any]:
    """Arguments of a step with random tensors; ``kind`` as in `codegen.inputs`; ``steps``: number of steps before."""
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
            made.append(value.to(dtype).to(device))
        return made

    lists = {"params": tensors(1.0), form.rule.grads: tensors(0.1, values=kind)}
    for name, _ in form.rule.states:
        is_square = name in ("exp_avg_sqs", "max_exp_avg_sqs", "square_avgs", "state_sums")
        known = name in form.states
        # Larger than the square of grad_avgs, as a mean of squares is.
        lists[name] = tensors(0.01 if not is_square else 1.0, is_square) if known else []
    if form.rule.has_steps:
        where = device if form.counters == "device" else CPU
        lists["state_steps"] = [torch.tensor(float(steps), device=where) for _ in form.sizes]
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
    """Copies of the arguments; tensors other than step counters get ``dtype`` if it is given."""

    def copy(name: str, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [t.clone() if dtype is None or name == "state_steps" else t.to(dtype, copy=True) for t in tensors]

    return {k: copy(k, v) if isinstance(v, list) else v for k, v in arguments.items()}
