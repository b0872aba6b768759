"""The arithmetic of a step, written once: what C and Triton print, and what the host computes for a GPU.

In: a `StepForm`. Out: the constants of a tensor and the statements for one element, as text that reads the same in C,
in Triton and in Python: infix operators and calls of a few functions, which each printer defines.
Guarantee: the formulas are those of torch's loop over single tensors (torch/optim, torch 2.13), in the order in which
its kernels round: `add` with a factor, `lerp` and `addcmul` end in one instruction for a product and a sum. Constants
are float64 until they are used; ``step`` is the new count.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping

from autofuse.optim.form import StepForm

Statement = tuple[str, str]  # (name, expression)

# Constants of a tensor: expressions of the scalars (by name, see `algorithms.ALGORITHMS`) and of ``step``.
_CONSTANTS: Mapping[str, tuple[Statement, ...]] = {
    "adam": (
        ("down", "-(lr / (1 - pow(beta1, step)))"), ("corrected", "sqrt(1 - pow(beta2, step))"),
        ("shrink", "1 - lr * weight_decay"), ("w", "1 - beta1"), ("keep", "beta2"), ("add", "1 - beta2"),
        ("tiny", "eps"), ("decay", "weight_decay"),
    ),
    "sgd": (("down", "-lr"), ("keep", "momentum"), ("add", "1 - dampening"), ("decay", "weight_decay")),
    "rmsprop": (
        ("down", "-lr"), ("keep", "alpha"), ("add", "1 - alpha"), ("w", "1 - alpha"), ("tiny", "eps"),
        ("push", "momentum"), ("decay", "weight_decay"),
    ),
    "adagrad": (("down", "-(lr / (1 + (step - 1) * lr_decay))"), ("tiny", "eps"), ("decay", "weight_decay")),
}  # fmt: skip


def statements(form: StepForm) -> tuple[Statement, ...]:
    """The assignments that update one element: parameter ``p``, gradient ``g``, states ``s0``, ``s1``, ``s2``.

    They call ``lerp(a, b, w)``, ``largest(a, b)`` (NaN if either is), ``fused(a, b, c)``, which is ``a * b + c``
    rounded once where the device can, and ``root(x)`` and ``divide(a, b)``, which round to nearest.
    """
    on = set(form.flags)
    found = [("g", "-g")] if "maximize" in on else []
    if "weight_decay" in on:
        found.append(("p", "p * shrink") if "decoupled_weight_decay" in on else ("g", "fused(decay, p, g)"))
    return (*found, *_UPDATES[form.algorithm](on, form.device == "cpu"))


def _moved(along: str, over: str, on_cpu: bool) -> Statement:
    """``p.addcdiv_(along, over, value=down)``, whose kernels differ in what they round first."""
    if on_cpu:
        return "p", f"p + divide(down * {along}, {over})"
    return "p", f"fused(down, divide({along}, {over}), p)"


def _adam(on: set[str], on_cpu: bool) -> list[Statement]:
    found = [("s0", "lerp(s0, g, w)"), ("s1", "fused(add * g, g, s1 * keep)")]
    if "amsgrad" in on:
        found.append(("s2", "largest(s2, s1)"))
    square = "s2" if "amsgrad" in on else "s1"
    return [*found, _moved("s0", f"(divide(root({square}), corrected) + tiny)", on_cpu)]


def _sgd(on: set[str], on_cpu: bool) -> list[Statement]:
    if "momentum" not in on:
        return [("p", "fused(down, g, p)")]
    along = "fused(keep, s0, g)" if "nesterov" in on else "s0"
    return [("s0", "fused(add, g, s0 * keep)"), ("p", f"fused(down, {along}, p)")]


def _rmsprop(on: set[str], on_cpu: bool) -> list[Statement]:
    found = [("s0", "fused(add * g, g, s0 * keep)")]
    if "centered" in on:
        found.append(("s1", "lerp(s1, g, w)"))
    over = f"(root({'fused(-s1, s1, s0)' if 'centered' in on else 's0'}) + tiny)"
    if "momentum" not in on:
        return [*found, _moved("g", over, on_cpu)]
    buffer = "s2" if "centered" in on else "s1"
    return [*found, (buffer, f"{buffer} * push + divide(g, {over})"), ("p", f"fused(down, {buffer}, p)")]


def _adagrad(on: set[str], on_cpu: bool) -> list[Statement]:
    return [("s0", "fused(g, g, s0)"), _moved("g", "(root(s0) + tiny)", on_cpu)]


_UPDATES: Mapping[str, Callable[[set[str], bool], list[Statement]]] = {
    "adam": _adam, "sgd": _sgd, "rmsprop": _rmsprop, "adagrad": _adagrad,
}  # fmt: skip


def constants(form: StepForm) -> tuple[Statement, ...]:
    """The constants that the statements read."""
    read = {word for _, text in statements(form) for word in re.findall(r"\w+", text)}
    return tuple(item for item in _CONSTANTS[form.algorithm] if item[0] in read)


@functools.lru_cache(maxsize=256)
def host_constants(form: StepForm) -> Callable[..., tuple[float, ...]]:
    """A function of ``step`` and the scalars, in the algorithm's order, that returns the values of `constants`."""
    names = ", ".join(["step", *form.rule.scalars])
    values = "".join(f"{text}, " for _, text in constants(form))
    made: Callable[..., tuple[float, ...]] = eval(f"lambda {names}: ({values})", {"pow": math.pow, "sqrt": math.sqrt})
    return made
