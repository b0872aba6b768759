"""Guards on what traced code reads from classes, which torch before 2.13 leaves out for numbers, texts and flags.

In: nothing. Out: Dynamo guards an attribute that is read through a class (``cls.factor`` in a classmethod) as it does
one that is read through an object. Guarantee: nothing changes where torch makes the guard itself. Without it a script
that changes such an attribute keeps the graph of the old value (torch 2.11: wrong results, also with torch.compile).
"""

from __future__ import annotations

import functools
from functools import cache
from typing import Any

import torch

from autofuse.dynamo_skip import mark_all_below
from autofuse.preserve_rng import untouched

_GUARDED_BY_TORCH = (2, 13)
_READS = "var_getattr"  # the method for it in these versions; torch 2.14 has another one


@cache
def guard_classes() -> None:
    """To be called before the first trace."""
    if torch.__version__ >= _GUARDED_BY_TORCH:
        return
    with untouched():
        from torch._dynamo.guards import GuardBuilder, install_guard
        from torch._dynamo.source import AttrSource
        from torch._dynamo.variables import ConstantVariable
        from torch._dynamo.variables.user_defined import UserDefinedClassVariable

    read = getattr(UserDefinedClassVariable, _READS)

    @functools.wraps(read)
    def read_and_guard(self: Any, tx: Any, name: str) -> Any:
        found = read(self, tx, name)
        if self.source is not None and not name.startswith("__") and isinstance(found, ConstantVariable):
            install_guard(AttrSource(self.source, name).make_guard(GuardBuilder.CONSTANT_MATCH))
        return found

    mark_all_below(read_and_guard)
    setattr(UserDefinedClassVariable, _READS, read_and_guard)
