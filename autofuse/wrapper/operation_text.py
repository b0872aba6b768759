"""Writes arguments, and the values, sizes and operations of a form, in generated Python.

In: an argument of an operation, or a `NodeForm` and one of its operations. Out: an expression.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sympy

from autofuse.ir.operation import NodeForm, Operation, ValueRef
from autofuse.ir.optable import OpKind, info, is_librarys
from autofuse.ir.size_text import PYTHON, dim_text
from autofuse.wrapper.aten_call import render_call

Leaf = Callable[[Any], str | None]


def argument_text(arg: Any, leaf: Leaf, is_form: bool = False) -> str:
    """Python text of an argument and its parts.

    ``leaf`` is called first: it gives the text of a value, a size or a constant, or None for plain Python values.
    ``is_form``: whether it is an argument of a form, whose tuples stand for lists.
    """
    found = leaf(arg)
    if found is not None:
        return found
    if isinstance(arg, tuple | list):
        items = [argument_text(item, leaf, is_form) for item in arg]
        if is_form:
            return f"[{', '.join(items)}]"
        text = "".join(f"{item}, " for item in items)
        return f"({text})" if isinstance(arg, tuple) else f"[{text}]"
    if isinstance(arg, slice):
        ends = (argument_text(end, leaf) for end in (arg.start, arg.stop, arg.step))
        return f"slice({', '.join(ends)})"
    if isinstance(arg, dict):
        return "{" + ", ".join(f"{k!r}: {argument_text(v, leaf)}" for k, v in arg.items()) + "}"
    if isinstance(arg, float) and (arg != arg or arg in (float("inf"), float("-inf"))):
        return f"float('{arg}')"
    return repr(arg)


# ---- forms ------------------------------------------------------------------------------------------


def form_argument(arg: Any, form: NodeForm) -> str:
    """An argument of one of a form's operations; symbols stand for themselves."""

    def leaf(arg: Any) -> str | None:
        if isinstance(arg, ValueRef):
            return value_name(arg, form)
        return dim_text(arg, PYTHON) if isinstance(arg, sympy.Expr) else None

    return argument_text(arg, leaf, is_form=True)


def value_name(ref: ValueRef, form: NodeForm) -> str:
    """The text that reads a value: operations with several results give tuples."""
    for op in form.operations:
        if op.name == ref.name:
            return ref.name if len(op.outputs) == 1 else f"{ref.name}[{ref.index}]"
    return ref.name


def dims_text(dims: Sequence[Any]) -> str:
    """A tuple of sizes in Python."""
    return "(" + "".join(f"{dim_text(d, PYTHON)}, " for d in dims) + ")"


_GIVE_LISTS = frozenset(["split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes", "unbind"])
# Keywords whose values are torch's, under their names; and overloads that take a dtype by position, and where.
_NAMED = ("dtype", "memory_format")
_DTYPE_POSITION = {"_softmax_backward_data": 3, "_log_softmax_backward_data": 3}


def operation_text(op: Operation, form: NodeForm, namespace: dict[str, Any]) -> str:
    """The call of one operation of a form; ``device`` must be known where it runs, and ``namespace`` be its globals."""
    text = render_call(op.target, *arguments_of(op, form), namespace)
    # Values are named by the number of results (`value_name`): a split into one part gives a list all the same.
    return f"{text}[0]" if len(op.outputs) == 1 and op.short_name.removesuffix("_copy") in _GIVE_LISTS else text


def arguments_of(op: Operation, form: NodeForm) -> tuple[list[str], dict[str, str]]:
    """The texts of an operation's arguments, and of its keywords."""
    args = [form_argument(a, form) for a in op.args]
    if is_librarys(op.target):  # its texts are texts
        return args, {k: form_argument(v, form) for k, v in op.kwargs}
    position = _DTYPE_POSITION.get(op.short_name)
    if position is not None and position < len(args):
        args[position] = f"torch.{op.args[position]}"
    kwargs = {k: f"torch.{v}" if isinstance(v, str) and k in _NAMED else form_argument(v, form) for k, v in op.kwargs}
    if info(op.target).kind is OpKind.CREATION and not op.inputs:
        kwargs["device"] = "device"  # import drops the argument: a node runs on one device
    return args, kwargs
