"""What a person can see of a value, as plain data, and where two such records differ.

In: anything that a program shows. Out: nested tuples of text, with the numbers of tensors at their ends.
Numbers are equal to the bit, signs of zeros and NaNs included, or within a stated rounding bound; all else is equal.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

# Units in the last place of a tensor's largest value by which it may differ, where sums of some dozens of terms are
# reordered and go through a few layers; values of 16 bits are rounded once for each operation or once for several.
ROUNDING_UNITS = {torch.float16: 4.0, torch.bfloat16: 4.0}
OTHER_UNITS = 256.0
_ADDRESS = re.compile(r"0x[0-9a-f]+|\bat \d{6,}|compiled_autograd\d+")


@dataclasses.dataclass(frozen=True)
class Numbers:
    """The elements of a tensor, or a float of Python's."""

    of: torch.Tensor

    def __repr__(self) -> str:
        return str(self.of.tolist())

    def agrees(self, other: Numbers, rounding: torch.dtype | None) -> bool:
        a, b = self.of, other.of
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        equal = a == b
        if a.is_floating_point():
            equal = (equal & (a.signbit() == b.signbit())) | (a.isnan() & b.isnan())
        if rounding is None or not a.is_floating_point() or not a.numel():
            return bool(equal.all())
        coarser = max((a.dtype, rounding), key=lambda dtype: torch.finfo(dtype).eps)
        units, eps = ROUNDING_UNITS.get(coarser, OTHER_UNITS), torch.finfo(coarser).eps
        a, b = a.double(), b.double()
        finite = a[a.isfinite()].abs()
        largest = float(finite.max()) if finite.numel() else 0.0
        near = (a - b).abs() <= units * eps * max(largest, 1e-3)
        return bool((equal | near).all())


def seen(value: Any) -> Any:
    """What can be seen of a value."""
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if isinstance(value, bool | int | str | bytes | type(None)):
        return type(value).__name__, repr(value)
    if isinstance(value, float):
        return "float", Numbers(torch.tensor(value, dtype=torch.float64))
    if isinstance(value, Mapping):
        return type(value).__name__, tuple((repr(key), seen(item)) for key, item in value.items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return type(value).__name__, tuple((f.name, seen(getattr(value, f.name))) for f in dataclasses.fields(value))
    if isinstance(value, tuple | list):
        names = getattr(value, "_fields", range(len(value)))
        return type(value).__name__, tuple((str(name), seen(item)) for name, item in zip(names, value, strict=True))
    if isinstance(value, BaseException):
        context = None if value.__suppress_context__ else value.__context__  # which a traceback tells first
        return type(value).__name__, message(value), type(value.__cause__).__name__, type(context).__name__
    return type(value).__name__, _ADDRESS.sub("", repr(value))


def message(error: BaseException) -> str:
    """What an exception says, but for addresses and the names of autograd's nodes."""
    return re.sub(r"output \d+ of \w+", "an output", _ADDRESS.sub("", str(error)))


def _tensor(tensor: torch.Tensor) -> Any:
    facts = {
        "dtype": str(tensor.dtype),
        "layout": str(tensor.layout),
        "needs grad": tensor.requires_grad,
        "is leaf": tensor.is_leaf,
        "has grad_fn": tensor.grad_fn is not None,
        "inference": tensor.is_inference(),
        "conj": tensor.is_conj(),
    }
    plain = tensor.detach()
    if tensor.is_nested:
        inside: Any = tuple(seen(item.detach().clone()) for item in plain.unbind())
    elif tensor.layout is torch.sparse_coo:
        plain = plain.coalesce()
        inside = seen(plain.indices()), seen(plain.values())
    elif tensor.layout is not torch.strided:
        inside = seen(plain.to_dense())
    elif tensor.is_quantized:
        inside = str(plain.qscheme()), seen(plain.int_repr()), plain.q_scale(), plain.q_zero_point()
    else:
        facts |= {"shape": tuple(tensor.shape), "strides": tensor.stride()}
        plain = plain.as_subclass(torch.Tensor)
        plain = torch.view_as_real(plain.resolve_conj()) if plain.is_complex() else plain
        inside = Numbers(plain.clone())
    return type(tensor).__name__, tuple(facts.items()), inside


def differences(python: Any, ours: Any, rounding: torch.dtype | None, where: str = "") -> Iterator[str]:
    """Each place where two records differ, for people; ``rounding``: the least precision of what was computed."""
    if isinstance(python, Numbers) and isinstance(ours, Numbers):
        if not python.agrees(ours, rounding):
            yield f"{where}: python {python!r:.300}, autofuse {ours!r:.300}"
    elif isinstance(python, tuple) and isinstance(ours, tuple) and len(python) == len(ours):
        is_named = bool(python) and len(python) == 2 and isinstance(python[0], str)
        for index, (a, b) in enumerate(zip(python, ours, strict=True)):
            yield from differences(a, b, rounding, f"{where}/{python[0]}" if is_named and index else where)
    elif isinstance(python, tuple) and isinstance(ours, tuple):
        yield f"{where}: python has {len(python)}: {python!r:.300}, autofuse {len(ours)}: {ours!r:.300}"
    elif python != ours:
        yield f"{where}: python {python!r:.300}, autofuse {ours!r:.300}"
