"""What a script changes for all modules of a class, or for all there are, after one of them has been captured.

In: a module whose graph is about to be used. Out: whether its calls must be eager's. Guarantee: hooks for all modules
and a ``forward`` that is put into a class in the place of another are seen at the next call. Dynamo guards on neither;
the hooks and the ``forward`` of a single module it does guard on.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch
from torch.nn.modules import module as _all_modules

_FORWARD = attrgetter("forward")
_forward, _before, _backward, _backward_before = (
    getattr(_all_modules, name, {})
    for name in (
        *("_global_forward_hooks", "_global_forward_pre_hooks"),
        *("_global_backward_hooks", "_global_backward_pre_hooks"),
    )
)


def must_be_eager() -> bool:
    """Whether the script watches the calls of all modules, or wants to know which operation made a NaN."""
    return bool(_forward or _before or _backward or _backward_before or torch.is_anomaly_enabled())


class Classes:
    """The classes of which captured modules are made, each with its ``forward`` at that time."""

    def __init__(self) -> None:
        self._classes: list[type] = []
        self._forwards: list[Any] = []

    def note(self, module: Any) -> None:
        """The classes of one more module, before it is captured."""
        if not isinstance(module, torch.nn.Module):
            return
        for kind in dict.fromkeys(map(type, module.modules())):
            if kind not in self._classes:
                self._classes.append(kind)
                self._forwards.append(_FORWARD(kind))

    def are_as_noted(self) -> bool:
        """0.03 us a class."""
        return list(map(_FORWARD, self._classes)) == self._forwards

    def replaced(self) -> str:
        """The name of one that has changed."""
        found = zip(self._classes, self._forwards, strict=True)
        return next((kind.__qualname__ for kind, forward in found if _FORWARD(kind) is not forward), "")
