"""Lets a script swap tensors (`torch.utils.swap_tensors`) that a trace has read.

In: a call of torch's function, which ``Module.to`` and ``load_state_dict`` make where
``torch.__future__.set_swap_module_params_on_conversion`` asks for it. Out: the same call. Guarantee: torch refuses
tensors with weak references, and traces hold such references. So traces are dropped first, and made again once that
pays. Weak references of the script itself are still refused.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch

log = logging.getLogger(__name__)


class Swaps:
    """Replaces torch's function; ``let_go()`` drops all traces."""

    def __init__(self, let_go: Callable[[], None]) -> None:
        self._let_go = let_go
        self._original: Callable[..., Any] | None = None

    def install(self) -> None:
        original = getattr(torch.utils, "swap_tensors", None)
        if original is None or self._original is not None:
            return

        @functools.wraps(original)
        def swap_tensors(t1: torch.Tensor, t2: torch.Tensor) -> Any:
            if weakref.getweakrefs(t1) or weakref.getweakrefs(t2):
                try:
                    self._let_go()
                except Exception as error:  # torch then raises its usual error for tensors with weak references
                    log.warning("traces could not be let go: %s: %s", type(error).__name__, error)
            return original(t1, t2)

        self._original = original
        self._replacement = torch.utils.swap_tensors = swap_tensors

    def uninstall(self) -> None:
        if self._original is not None and torch.utils.swap_tensors is self._replacement:
            torch.utils.swap_tensors = self._original
        self._original = None
