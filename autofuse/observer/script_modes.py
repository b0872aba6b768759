"""Modes of the script that intercept operators (`TorchDispatchMode`) or functions of torch (`TorchFunctionMode`).

In: nothing. Out: whether one is on this thread's stacks. Guarantee: our own observers do not count, nor does a default
device, which torch implements as a function mode. 0.1 us where no mode is active.
"""

from __future__ import annotations

from torch._C import (
    _get_dispatch_stack_at,
    _get_function_stack_at,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
)
from torch.utils._device import DeviceContext


def modes_are_active() -> bool:
    """Under which everything is python's, for what we run in its place looks otherwise."""
    return (_len_torch_dispatch_stack() != 0 and foreign_modes_active()) or (
        _len_torch_function_stack() != 0 and _function_modes_active()
    )


def foreign_modes_active() -> bool:
    """Is a dispatch mode there that does not call itself an observer of ours?"""
    return any(
        not getattr(_get_dispatch_stack_at(index), "is_autofuse_observer", False)
        for index in range(_len_torch_dispatch_stack())
    )


def _function_modes_active() -> bool:
    return any(type(_get_function_stack_at(i)) is not DeviceContext for i in range(_len_torch_function_stack()))
