"""Notices changes that a script makes to classes, or to hooks of all modules, after a capture.

In: the classes of the objects that a trace has read; a call that is about to run the trace. Out: whether it must not.
Guarantee: global module hooks, and callables (methods, properties, operators) that replace others or are added in a
class or one of its bases, are noticed at the next call. Dynamo does not guard the hooks and guards few of the
callables; it does guard data of classes and all attributes of single objects.

Python gives a class another version whenever it or one of its bases is written to. While the versions are the recorded
ones, nothing has changed: 0.02 us per class. Where a version differs, all callables are compared.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.modules import module as _all_modules

_forward, _before, _backward, _backward_before = (
    getattr(_all_modules, name, {})
    for name in (
        *("_global_forward_hooks", "_global_forward_pre_hooks"),
        *("_global_backward_hooks", "_global_backward_pre_hooks"),
    )
)


def must_be_eager() -> bool:
    """Whether the script has hooks on all modules, or has anomaly mode on."""
    return bool(_forward or _before or _backward or _backward_before or torch.is_anomaly_enabled())


# ---- versions of classes --------------------------------------------------------------------------------------

_VERSION_OFFSET = 384  # of ``tp_version_tag`` in CPython's type objects, 3.11 to 3.13 on machines of 64 bits
_IMMUTABLE = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE
_NONE = bytes(4)


def _version_of(kind: type) -> memoryview:
    """The address of the class's version: 0 after each change, until a look-up in the class."""
    return memoryview((ctypes.c_char * 4).from_address(id(kind) + _VERSION_OFFSET)).cast("B")


def _look_up(kind: type) -> None:
    """Look up a name in the class, which gives it a version."""
    type.__getattribute__(kind, "__init__")


def _versions_are_there() -> bool:
    """Whether this Python stores class versions at the expected place and changes them as expected."""

    class Base:
        pass

    class Derived(Base):
        pass

    size = object.__getattribute__(type, "__basicsize__")
    if ctypes.sizeof(ctypes.c_void_p) != 8 or size < _VERSION_OFFSET + 4:
        return False
    _look_up(Derived)
    version = _version_of(Derived)
    before = bytes(version)
    _look_up(Derived)
    stays = before == version != _NONE
    Base.x = 1  # type: ignore[attr-defined]
    is_gone = version == _NONE
    _look_up(Derived)
    return stays and is_gone and bytes(version) not in (_NONE, before)


_HAS_VERSIONS = _versions_are_there()


class Classes:
    """The classes that a root's traces depend on, as they were when it was traced."""

    def __init__(self) -> None:
        self._kinds: dict[type, tuple[type, ...]] = {}  # with what it inherits from
        self._members: dict[type, dict[str, Any]] = {}  # callables, by the class that defines them
        self._leaves: list[type] = []  # classes that no other one inherits from
        self._versions: list[memoryview] = []  # their versions
        self._noted: bytes | None = b""  # None: versions cannot be used

    def note(self, kinds: Iterable[type]) -> None:
        """Record more classes, after a trace; those already recorded stay as they are."""
        new = [kind for kind in dict.fromkeys(kinds) if kind not in self._kinds and not kind.__flags__ & _IMMUTABLE]
        if not new:
            return
        is_as_noted = not self._kinds or self.are_as_noted()
        for kind in new:
            self._kinds[kind] = kind.__mro__
            for owner in kind.__mro__:
                if owner not in self._members and not owner.__flags__ & _IMMUTABLE:
                    self._members[owner] = _members(owner)
        inherited = {base for bases in self._kinds.values() for base in bases[1:]}
        self._leaves = [kind for kind in self._kinds if kind not in inherited]
        self._versions = [_version_of(kind) for kind in self._leaves]
        self._noted = self._present_versions() if is_as_noted else None

    def _present_versions(self) -> bytes | None:
        for kind in self._leaves:
            _look_up(kind)
        # Python stops giving versions to a class that changes again and again.
        return b"".join(self._versions) if _HAS_VERSIONS and _NONE not in self._versions else None

    def are_as_noted(self) -> bool:
        """Whether all classes are as recorded: 0.02 us per class, some 20 us for each that has been written to."""
        before = self._noted
        if b"".join(self._versions) == before:
            return True
        now, changed = (
            self._present_versions(),
            self._leaves,
        )  # before the comparison, or a change in between would be missed
        if before is not None and now is not None:
            changed = [kind for i, kind in enumerate(changed) if before[4 * i :][:4] != now[4 * i :][:4]]
        is_whole = not self.replaced(changed)
        self._noted = now if is_whole else None  # only now: another thread may call this meanwhile
        return is_whole

    def replaced(self, kinds: Iterable[type] | None = None) -> str:
        """The name of something that was replaced, in these classes or among operators; "" if nothing was."""
        looked_at = self._leaves if kinds is None else kinds
        for owner in dict.fromkeys(base for kind in looked_at for base in self._kinds[kind]):
            if owner not in self._members:
                continue
            noted, present = self._members[owner], _members(owner)
            for name in noted.keys() | present.keys():
                if noted.get(name) is not present.get(name):
                    return f"{owner.__qualname__}.{name}"
        changed = (kind.__qualname__ for kind, bases in self._kinds.items() if kind.__mro__ != bases)
        return next((f"{name}.__mro__" for name in changed), "")


def _members(kind: type) -> dict[str, Any]:
    """Members that are callable, or run code when they are read."""
    return {n: value for n, value in list(vars(kind).items()) if callable(value) or hasattr(type(value), "__get__")}


# Methods that a forward may call: those that print a tensor, or compare it in a test, may be patched by anyone.
_NAMES = {
    f"__{before}{name}__"
    for name in (
        *("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow"),
        *("lshift", "rshift", "and", "or", "xor"),
    )
    for before in ("", "r", "i")
} | {
    f"__{name}__"
    for name in (
        *("neg", "pos", "abs", "invert", "eq", "ne", "lt", "le", "gt", "ge", "bool", "int", "float", "index", "len"),
        *("iter", "contains", "getitem", "setitem", "call", "getattribute", "getattr", "torch_function", "reversed"),
    )
}  # fmt: skip


def _operators() -> dict[str, Any]:
    return {name: value for name, value in _members(torch.Tensor).items() if name in _NAMES}


_OPERATORS = _operators()


def replaced_operator() -> str:
    """A tensor operator that the script has replaced; Dynamo traces through only some of these."""
    present = _operators()
    changed = (n for n in present.keys() | _OPERATORS.keys() if present.get(n) is not _OPERATORS.get(n))
    return next((f"torch.Tensor.{name} is not torch's" for name in changed), "")
