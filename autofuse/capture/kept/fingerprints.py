"""Names for objects that hold across processes: code by its instructions, classes and functions by their places.

In: code objects, and objects that guards know by their address. Out: texts that are equal in two processes where the
objects do the same, and places by which code is found again. Guarantee: objects that a text cannot tell apart raise
``Unknown``; a function is identified by its code, its defaults and its name, never by its name alone.
"""

from __future__ import annotations

import enum
import hashlib
import inspect
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from autofuse.capture.traced import ROOT_FILE

Step = tuple[str, Any]  # "attr", "const", "cell": and which
_MOST_VISITED = 400  # functions looked through for one code


class Unknown(Exception):
    """An object that has no text in another process."""


# ---- code ------------------------------------------------------------------------------------------------------


def code_text(code: types.CodeType) -> str:
    """Equal where two codes do the same, whatever file and lines they come from."""
    digest = hashlib.sha256()
    fields = (
        code.co_code,
        code.co_names,
        code.co_varnames,
        code.co_freevars,
        code.co_cellvars,
        code.co_flags,
        code.co_argcount,
        code.co_posonlyargcount,
        code.co_kwonlyargcount,
        code.co_name,
        getattr(code, "co_exceptiontable", b""),
    )
    digest.update(repr(fields).encode())
    digest.update(_constant_text(code.co_consts).encode())
    return digest.hexdigest()[:24]


def _constant_text(value: Any) -> str:
    if isinstance(value, types.CodeType):
        return code_text(value)
    if isinstance(value, tuple):
        return f"({','.join(map(_constant_text, value))})"
    if isinstance(value, frozenset):  # whose order differs from process to process
        return f"{{{','.join(sorted(map(_constant_text, value)))}}}"
    return f"{type(value).__name__} {value!r}"


# ---- where code is ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """How code is reached from a module, and what it was."""

    module: str
    steps: tuple[Step, ...]
    text: str

    def holds(self) -> bool:
        """Whether the same code is there in this process."""
        found: Any = sys.modules.get(self.module)
        try:
            for kind, which in self.steps:
                found = _follow(found, kind, which)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            return False
        return isinstance(found, types.CodeType) and code_text(found) == self.text


def _follow(value: Any, kind: str, which: Any) -> Any:
    if kind == "const":
        return value.co_consts[which]
    if kind == "cell":
        return value.__closure__[which].cell_contents
    # Read the class's own entry, not the object that a descriptor makes from it.
    for owner in value.__mro__ if isinstance(value, type) and which != "__code__" else ():
        if which in vars(owner):
            return vars(owner)[which]
    return getattr(value, which)


def find_places(codes: Iterable[types.CodeType], classes: Iterable[type]) -> list[Place]:
    """The place of each code. Raises Unknown where one cannot be found; ``classes``: may hold code without a file.

    Python's own library is left out: it is as old as the interpreter.
    """
    modules: dict[str, list[str]] = {}
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if isinstance(path, str):
            modules.setdefault(path, []).append(name)
    holders = list(dict.fromkeys(owner for cls in classes for owner in cls.__mro__))
    found = []
    for code in dict.fromkeys(codes):
        if _is_of_python(code):
            continue
        place = _place_in(modules.get(code.co_filename, ()), code) or _place_among(holders, code)
        if place is None:
            raise Unknown(f"code that cannot be found again: {code.co_qualname} of {code.co_filename}")
        found.append(place)
    return found


def _is_of_python(code: types.CodeType) -> bool:
    name = code.co_filename
    return name.startswith(("<frozen ", ROOT_FILE)) or (
        name.startswith(_STDLIB) and "site-packages" not in name and "dist-packages" not in name
    )


_STDLIB = tuple({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")})


def _place_in(modules: Iterable[str], code: types.CodeType) -> Place | None:
    """The code's place in the module of its file, under its own name, perhaps behind decorators."""
    parts = code.co_qualname.split(".")
    parts = parts[: parts.index("<locals>")] if "<locals>" in parts else parts
    parts = [part for part in parts if not part.startswith("<")]
    for name in modules:
        value: Any = sys.modules[name]
        steps: list[Step] = []
        for part in parts:
            try:
                value = _follow(value, "attr", part)
            except AttributeError:
                break
            steps.append(("attr", part))
        inner = _search(value, code)
        if inner is not None:
            return Place(name, (*steps, *inner), code_text(code))
    return None


def _place_among(classes: Iterable[type], code: types.CodeType) -> Place | None:
    """The code's place in a class, for methods made at run time, such as those of dataclasses."""
    for owner in classes:
        value = vars(owner).get(code.co_name)
        if value is None or _class_text(owner) is None:
            continue
        inner = _search(value, code)
        if inner is not None:
            steps = [("attr", part) for part in owner.__qualname__.split(".")]
            return Place(owner.__module__, (*steps, ("attr", code.co_name), *inner), code_text(code))
    return None


def _search(value: Any, code: types.CodeType) -> tuple[Step, ...] | None:
    """The path from a function, method, property or wrapper to a code object inside of it."""
    waiting: list[tuple[Any, tuple[Step, ...]]] = [(value, ())]
    seen: set[int] = set()
    while waiting and len(seen) < _MOST_VISITED:
        item, steps = waiting.pop(0)
        if item is code:
            return steps
        if id(item) in seen:
            continue
        seen.add(id(item))
        waiting += [(inner, (*steps, step)) for step, inner in _inside(item)]
    return None


def _inside(value: Any) -> Iterator[tuple[Step, Any]]:
    if isinstance(value, types.CodeType):
        for index, constant in enumerate(value.co_consts):
            if isinstance(constant, types.CodeType):
                yield ("const", index), constant
        return
    for name in ("__code__", "__func__", "__wrapped__", "fget", "fset", "func"):
        inner = inspect.getattr_static(value, name, None) if name == "func" else getattr(value, name, None)
        if isinstance(inner, types.CodeType | types.FunctionType | types.MethodType):
            yield ("attr", name), inner
    for index, cell in enumerate(getattr(value, "__closure__", None) or ()):
        try:
            inner = cell.cell_contents
        except ValueError:  # empty
            continue
        if isinstance(inner, types.FunctionType | types.MethodType | property | staticmethod | classmethod):
            yield ("cell", index), inner


# ---- what classes answer -----------------------------------------------------------------------------------------


def classes_text(classes: Iterable[type]) -> str:
    """Equal where all these classes, and what they inherit from, have the same methods, properties and operators.

    The places of code do not tell whether another class now overrides it.
    """
    owners: dict[type, str] = {}

    def text_of(owner: type) -> str:
        if owner not in owners:
            members = sorted(vars(owner).items()) if not owner.__flags__ & _IMMUTABLE else []
            found = [(name, text) for name, value in members if (text := _member_text(value))]
            owners[owner] = repr((owner.__module__, owner.__qualname__, found))
        return owners[owner]

    texts = sorted(repr([text_of(owner) for owner in kind.__mro__]) for kind in dict.fromkeys(classes))
    return hashlib.sha256("".join(texts).encode()).hexdigest()[:24]


_IMMUTABLE = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE


def _member_text(value: Any, depth: int = 4) -> str:
    """What is called through a class, "" for data."""
    if isinstance(value, types.FunctionType):
        defaults = [_default_text(item) for item in (value.__defaults__ or ())]
        inside = [_member_text(inner, depth - 1) for _, inner in _inside(value)] if depth else []
        return repr((code_text(value.__code__), defaults, inside))
    if isinstance(value, staticmethod | classmethod):
        return f"{type(value).__name__} {_member_text(value.__func__, depth)}"
    if isinstance(value, property):
        return f"property {[_member_text(f, depth) for f in (value.fget, value.fset, value.fdel)]}"
    if callable(value) or hasattr(type(value), "__get__"):
        return f"{type(value).__qualname__} {getattr(value, '__qualname__', '')}"
    return ""


# ---- objects that guards know by their address -------------------------------------------------------------------


def object_text(value: Any) -> str:
    """A text for an object that code was specialised for. Raises Unknown where no text is unambiguous."""
    if value is None or isinstance(value, bool | type(Ellipsis) | type(NotImplemented)):
        return repr(value)
    if isinstance(value, type):
        text = _class_text(value)
        if text is None:
            raise Unknown(f"a class that is not where its name says: {value}")
        return text
    if isinstance(value, types.CodeType):
        return f"code {value.co_qualname} {code_text(value)}"
    if isinstance(value, types.ModuleType):
        if sys.modules.get(value.__name__) is value or value.__name__.startswith("torch."):
            return f"module {value.__name__}"
        raise Unknown(f"a module that is not where its name says: {value}")
    if isinstance(value, types.FunctionType):
        defaults = [_default_text(item) for item in (value.__defaults__ or ())]
        defaults += [f"{k}={_default_text(item)}" for k, item in sorted((value.__kwdefaults__ or {}).items())]
        return f"function {value.__module__}.{value.__qualname__} {code_text(value.__code__)} {defaults}"
    if isinstance(value, types.MethodType):
        return f"method {object_text(value.__func__)}"  # the object that it is bound to has its own guard
    if isinstance(value, enum.Enum):
        return f"member {_class_text(type(value))}.{value.name}"
    if isinstance(value, torch.dtype | torch.device | torch.layout | torch.memory_format):
        return repr(value)
    if isinstance(value, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return f"operator {value}"
    if isinstance(value, _BUILTIN):
        owner = getattr(value, "__self__", None)
        if owner is None or isinstance(owner, types.ModuleType | type):
            place = getattr(owner, "__qualname__", None) or getattr(owner, "__name__", "")
            return f"builtin {getattr(value, '__module__', '')} {place} {value.__qualname__}"
        if type(owner).__name__ in ("_TensorBase", "_VariableFunctionsClass"):
            return f"builtin {type(owner).__name__} {value.__qualname__}"
    raise Unknown(f"an object of {type(value).__module__}.{type(value).__qualname__}")


@dataclass(frozen=True)
class Reference:
    """A module, or a class or function of one, by its name."""

    module: str
    qualname: str  # "": the module itself
    text: str

    def find(self) -> Any:
        """Raises Unknown where something else is there in this process."""
        found: Any = sys.modules.get(self.module)
        for part in self.qualname.split(".") if self.qualname else ():
            found = getattr(found, part, None)
        if found is None or object_text(found) != self.text:
            raise Unknown(f"{self.module}.{self.qualname} is not what it was")
        return found


def refer_to(value: Any) -> Reference:
    """Raises Unknown where a name does not lead there."""
    if isinstance(value, types.ModuleType):
        reference = Reference(value.__name__, "", object_text(value))
    elif isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
        reference = Reference(value.__module__, value.__qualname__, object_text(value))
    else:
        raise Unknown(f"code that reads an object of {type(value).__qualname__}")
    if reference.find() is not value:
        raise Unknown(f"{value} is not where its name says")
    return reference


_BUILTIN = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
)


def _default_text(value: Any) -> str:
    """A text for a default argument; only its type if it is no plain value: guards check defaults that were read."""
    return repr(value) if isinstance(value, int | float | str | bytes | type(None)) else type(value).__name__


def _class_text(value: type) -> str | None:
    """None where the name leads to another object: a class made inside of a function, or replaced since."""
    found: Any = sys.modules.get(value.__module__)
    for part in value.__qualname__.split("."):
        found = getattr(found, part, None)
    names = [f"{owner.__module__}.{owner.__qualname__}" for owner in value.__mro__]
    is_own = value.__module__ == "builtins" or (value.__module__ or "").startswith("torch")
    return f"class {' '.join(names)}" if found is value or is_own else None
