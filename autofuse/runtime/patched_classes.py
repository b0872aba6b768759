"""What a script changes in classes, or for all modules there are, after a module has been captured.

In: classes of which a trace has looked at objects; a call that is about to run the trace. Out: whether it must not.
Guarantee: hooks for all modules, and whatever can be called (methods, properties, operators) that is put into a class
or one of its bases, in the place of another or as a new one, are seen at the next call. Dynamo guards on none of the
first and on few of the second; on data of classes, and on all that is put into single objects, it does.

Python gives a class another version whenever it or one of its bases is written to. As long as the versions are those
that were noted, nothing has changed: 0.02 us a class. Where one is not, all that can be called is compared.
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
    """Whether the script watches the calls of all modules, or wants to know which operation made a NaN."""
    return bool(_forward or _before or _backward or _backward_before or torch.is_anomaly_enabled())


# ---- versions of classes --------------------------------------------------------------------------------------

_VERSION_OFFSET = 384  # of ``tp_version_tag`` in CPython's type objects, 3.11 to 3.13 on machines of 64 bits
_IMMUTABLE = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE
_NONE = bytes(4)


def _version_of(kind: type) -> memoryview:
    """Where its version lies: 0 after each change, until something is looked up in the class."""
    return memoryview((ctypes.c_char * 4).from_address(id(kind) + _VERSION_OFFSET)).cast("B")


def _look_up(kind: type) -> None:
    """After which the class has a version."""
    type.__getattribute__(kind, "__init__")


def _versions_are_there() -> bool:
    """Whether this Python keeps versions of classes where they are looked for, and as it is known to."""

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
        self._members: dict[type, dict[str, Any]] = {}  # what can be called, by the class that has it
        self._leaves: list[type] = []  # those that none of the others inherits from
        self._versions: list[memoryview] = []  # theirs
        self._noted: bytes | None = b""  # None: they say nothing

    def note(self, kinds: Iterable[type]) -> None:
        """More of them, after a trace; those that are noted already are as they were."""
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
        # Python gives up on versions of a class that changes again and again.
        return b"".join(self._versions) if _HAS_VERSIONS and _NONE not in self._versions else None

    def are_as_noted(self) -> bool:
        """0.02 us a class, some 20 us for each that has been written to."""
        before = self._noted
        if b"".join(self._versions) == before:
            return True
        now, changed = self._present_versions(), self._leaves  # before the look, or a change between would go unseen
        if before is not None and now is not None:
            changed = [kind for i, kind in enumerate(changed) if before[4 * i :][:4] != now[4 * i :][:4]]
        is_whole = not self.replaced(changed)
        self._noted = now if is_whole else None  # only now: another thread may ask meanwhile
        return is_whole

    def replaced(self, kinds: Iterable[type] | None = None) -> str:
        """The name of something that is not what it was, in these classes or in all; "" where all is."""
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
    """What can be called, or answers by itself when it is read."""
    return {n: value for n, value in list(vars(kind).items()) if callable(value) or hasattr(type(value), "__get__")}


# Those that a forward may call: what prints a tensor, or compares it in a test, may be anybody's.
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
    """An operator of tensors that is not the one there was before the script: Dynamo sees through some only."""
    present = _operators()
    changed = (n for n in present.keys() | _OPERATORS.keys() if present.get(n) is not _OPERATORS.get(n))
    return next((f"torch.Tensor.{name} is not torch's" for name in changed), "")
