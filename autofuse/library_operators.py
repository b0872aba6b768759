"""Operators of libraries and of the script, and what they compute in plain torch (`register_unfused`).

In: an operator beside torch's own, and a function with its arguments and results. Out: the function, for capture, which
traces it and checks it against the operator. Guarantee: an operator that writes to its arguments, returns a part of
one, or draws random numbers is refused here; everything else is found out where the operator is captured.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from autofuse.errors import FusionError

PREFIX = "library."  # of the names under which such operators stand in nodes: "library.mylib__scaled.default"
_TORCHS = ("aten", "prims", "prim", "autofuse", "vendor", "c10d", "_c10d_functional", "inductor", "higher_order")


@dataclass(frozen=True, eq=False)
class Unfused:
    """An operator with its function."""

    operator: Any  # torch._ops.OpOverload
    function: Callable[..., Any]
    found: dict[Any, str] = field(default_factory=dict)  # what capture's checks of it have found


_by_name: dict[str, Unfused] = {}
_by_operator: dict[Any, str] = {}


def register_unfused(op: Any, function: Callable[..., Any]) -> None:
    """Say what an operator of a library's computes, so that it may be fused with what stands around it.

    ``op``: an operator made with ``torch.library``: what ``torch.library.custom_op`` returns, its overload
    ``torch.ops.mylib.scaled.default``, or its name ``"mylib::scaled"``. ``function``: takes the operator's arguments,
    by position as in its schema (those behind ``*`` by name, defaults filled in), and returns tensors of the same
    shapes and dtypes, made by torch's operators, for any sizes; it reads no tensor but its arguments and changes none.

    Nothing changes for the operator itself: it is the reference. Where a graph with it is captured, the function is
    traced for the sizes and dtypes at hand and compared with the operator on random numbers. Where they differ, one
    line says how, and the script goes on with the operator. The kernel that results is raced against the operator, and
    the faster one runs. Gradients stay the operator's own (``torch.library.register_autograd``); an operator that these
    are made of may be registered, too. The operator must be pure: where a kernel runs, it is not called, and races call
    it on a thread of autofuse's. It must take any floats, NaN and Inf too, for the check calls it with such.

    Called again with a function of the same name (a module that is loaded again), the new one counts; one of a name
    that several may have (a lambda) has to have the same code. Raises TypeError
    for what is no operator or no function, and FusionError for an operator of torch's own, one that writes to an
    argument, returns a part of one, draws random numbers or returns anything but tensors, and for a second function.
    """
    operator = _overload_of(op)
    if not callable(function):
        raise TypeError(f"expected a function of the arguments of {operator}, found {type(function).__name__}")
    problem = _why_not(operator)
    if problem:
        raise FusionError(f"expected an operator that a kernel can replace, found {name_of(operator)}, {problem}")
    name = f"{PREFIX}{operator.namespace}__{_short(operator)}.{operator._overloadname}"
    known = _by_name.get(name)
    if known is not None:
        if name_of(known.operator) != name_of(operator):
            raise FusionError(
                f"expected operators whose names in nodes differ, found {name_of(operator)} after "
                f"{name_of(known.operator)}: both are {name}"
            )
        if not _is_same(known.function, function):
            raise FusionError(
                f"expected one function for {name_of(operator)}, found a second: {_identity(function)} after "
                f"{_identity(known.function)}; register one of them"
            )
        _by_operator.pop(known.operator, None)
    _by_name[name] = Unfused(operator, function)
    _by_operator[operator] = name


def target_of(operator: Any) -> str | None:
    """The name of a registered operator in nodes; None for every other one."""
    return _by_operator.get(operator)


def with_defaults(unfused: Unfused) -> Callable[..., Any]:
    """The function, called with all arguments of the operator's schema, those that a call left out filled in."""
    arguments = unfused.operator._schema.arguments

    def call(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip((a.name for a in arguments), args, strict=False)) | kwargs
        full = {a.name: given.get(a.name, a.default_value) for a in arguments}
        by_name = {a.name: full.pop(a.name) for a in arguments if a.kwarg_only}
        return unfused.function(*full.values(), **by_name)

    return call


def registered(target: str) -> Unfused | None:
    """The operator of a name in nodes; None where this process has registered none, as in a tuner's worker."""
    return _by_name.get(target)


def called(target: str) -> Any:
    """The overload of a name in nodes. Raises FusionError where this process has registered none."""
    found = _by_name.get(target)
    if found is None:
        raise FusionError(f"expected {target} to be registered in this process, found that it is not")
    return found.operator


def name_of(operator: Any) -> str:
    """``mylib::scaled``, with the overload where it has a name."""
    suffix = "" if operator._overloadname == "default" else f".{operator._overloadname}"
    return f"{operator.namespace}::{_short(operator)}{suffix}"


def _short(operator: Any) -> str:
    return str(operator._schema.name).split("::")[1]


def _identity(function: Callable[..., Any]) -> str:
    """A function's name, which stays when its module is loaded again."""
    if isinstance(function, functools.partial):
        return _identity(function.func)
    name = getattr(function, "__qualname__", repr(function))
    return f"{getattr(function, '__module__', '')}.{name}"


def _is_same(a: Any, b: Any) -> bool:
    """Whether two functions are one, perhaps of a module that was loaded again: of one name, and, where a name may be
    that of several (one in a function, a lambda), of the same code, defaults and closure."""
    if a is b:
        return True
    if isinstance(a, functools.partial) and isinstance(b, functools.partial):
        return _is_same(a.func, b.func) and _are_equal((a.args, a.keywords), (b.args, b.keywords))
    name = _identity(a)
    if isinstance(a, functools.partial) or isinstance(b, functools.partial) or name != _identity(b):
        return False
    if "<" not in name:
        return True
    return all(hasattr(f, "__code__") for f in (a, b)) and _are_equal(_parts(a), _parts(b))


def _parts(function: Any) -> tuple[Any, ...]:
    code = function.__code__
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    # without its lines, which change above an edited cell of a notebook
    return code.co_code, code.co_consts, code.co_names, function.__defaults__, function.__kwdefaults__, cells


def _are_equal(a: Any, b: Any) -> bool:
    """Of plain data; other things are equal where they are one, and functions as in `_is_same`."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(_are_equal, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_are_equal(a[key], b[key]) for key in a)
    if isinstance(a, types.CodeType):
        return _are_equal((a.co_code, a.co_consts, a.co_names), (b.co_code, b.co_consts, b.co_names))
    if isinstance(a, types.FunctionType):
        return _is_same(a, b)
    return isinstance(a, bool | int | float | str | bytes) and repr(a) == repr(b)  # -0.0 is another number


def _overload_of(op: Any) -> Any:
    """The overload that is meant."""
    found = getattr(op, "_opoverload", op)  # of what `torch.library.custom_op` returns
    if isinstance(found, str):
        namespace, _, name = found.partition("::")
        try:
            found = getattr(getattr(torch.ops, namespace), name)
        except (AttributeError, RuntimeError):
            raise TypeError(f"expected an operator that exists, found {op!r}; import its library first") from None
    if isinstance(found, torch._ops.OpOverloadPacket):
        names = found.overloads()
        if names != ["default"]:
            raise TypeError(f"expected one overload of {found}, found {', '.join(names)}; pass {found}.{names[0]}")
        found = found.default
    if not isinstance(found, torch._ops.OpOverload):
        raise TypeError(
            f"expected an operator made with torch.library, or its name 'mylib::scaled', found {type(op).__name__}"
        )
    return found


def _why_not(operator: Any) -> str:
    """Why a kernel may not take an operator's place; "" where it may."""
    schema = operator._schema
    if operator.namespace in _TORCHS:
        return "which is not a library's: its kernels are made by rules"
    if schema.is_mutable or any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments):
        return "which writes to its arguments"
    if any(item.alias_info is not None for item in (*schema.arguments, *schema.returns)):
        return "which returns a part of an argument"
    if torch.Tag.nondeterministic_seeded in operator.tags:
        return "which draws random numbers"
    if not schema.returns or any(str(item.type) != "Tensor" for item in schema.returns):
        return "which returns something other than tensors"
    return ""
