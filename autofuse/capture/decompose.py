"""What an operator computes, traced once with the fake tensors of the graph that it is in.

In: the FX node of an operator, and a function of its arguments: the operator itself, where `ir.composites` lists it and
PyTorch decomposes it, or what a library has registered for it. Out: an FX graph of torch's operators, over one
placeholder for each tensor that the operator reads, repeats included. Guarantee: `NotTraced` with the reason where the
function fails, or where tracing it needs to know more of a size than the graph's guards say.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._decomp import decomposition_table
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from autofuse.ir.optable import FUSIBLE, OpKind, info

log = logging.getLogger(__name__)
_torchs_log = logging.getLogger("torch.fx.experimental.symbolic_shapes")


_ASKS = "the function asks for more of a size than the graph knows"


class NotTraced(Exception):
    """An operator whose unfused form cannot be used; the message says why."""


def _traced_once(call: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> fx.GraphModule:
    found: fx.GraphModule = make_fx(call, decomposition_table=decompositions())(*tensors)
    return found


def without_writes(call: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> fx.GraphModule:
    """The graph of a function that may write to tensors of its own. A write to an argument remains, as a copy.

    Twice: what torch's composites write to is known only where these are taken apart.
    """
    first = {overload: rule for overload, rule in decompositions().items() if not _writes(overload)}
    apart = make_fx(call, decomposition_table=first)(*tensors)
    return _traced_once(torch.func.functionalize(apart), tensors)


def _writes(operator: Any) -> bool:
    return isinstance(operator, torch._ops.OpOverload) and bool(operator._schema.is_mutable)


Trace = Callable[[Callable[..., Any], Sequence[torch.Tensor]], fx.GraphModule]


def decomposed(node: fx.Node) -> fx.GraphModule:
    """The graph that the operator of an FX node decomposes into; each of its nodes has its fake values."""
    return traced(node, node.target)


def traced(node: fx.Node, function: Callable[..., Any], trace: Trace = _traced_once) -> fx.GraphModule:
    """The graph of a function on the arguments of an FX node. Raises NotTraced."""
    arguments = tree_map(lambda a: a.meta["val"] if isinstance(a, fx.Node) else a, (node.args, node.kwargs))
    flat, spec = tree_flatten(arguments)
    places = [n for n, value in enumerate(flat) if isinstance(value, torch.Tensor)]
    mode = next((flat[n].fake_mode for n in places if hasattr(flat[n], "fake_mode")), None)
    if not isinstance(mode, FakeTensorMode):
        raise NotTraced("it reads no tensor")

    def call(*tensors: torch.Tensor) -> Any:
        values = list(flat)
        for place, tensor in zip(places, tensors, strict=True):
            values[place] = tensor
        args, kwargs = tree_unflatten(values, spec)
        return function(*args, **kwargs)

    guards = _guards(mode)
    kept = _keeping_guards(mode) if trace is not _traced_once else contextlib.nullcontext()
    try:
        with kept, mode, enable_python_dispatcher():
            found = trace(call, [flat[n].detach() for n in places])  # whose sizes a function may change: x.t_()
    except Exception as error:  # whatever a decomposition may raise on fake tensors, eager has a kernel
        log.debug("%s has no decomposition here: %s", node.target, error)
        if isinstance(error, _Asked):
            raise NotTraced(_ASKS) from error
        lines = str(error).strip().splitlines() or [""]
        raise NotTraced(f"the function raised {type(error).__name__}: {lines[0]}") from error
    if _guards(mode) != guards:
        raise NotTraced(_ASKS)
    return found


def _keeping_guards(mode: FakeTensorMode) -> contextlib.AbstractContextManager[None]:
    """Where a function that asks for more of a size raises, and leaves the script's guards as they are.

    A backward's sizes take no guards any more, but would answer.
    """
    return contextlib.nullcontext() if mode.shape_env is None else _raising(mode.shape_env)


class _Asked(Exception):
    pass


@contextlib.contextmanager
def _raising(environment: ShapeEnv) -> Iterator[None]:
    asked = []

    def raises(*expression: object) -> None:
        asked.append(expression)
        raise _Asked

    own = vars(environment)  # `error_on_new_guards` does the same in torch 2.13, where this is called first, too
    own["_check_frozen"] = raises
    _torchs_log.addFilter(_nothing)  # it warns of the error
    try:
        yield
        if asked:  # torch has caught the error
            raise _Asked
    finally:
        _torchs_log.removeFilter(_nothing)
        del own["_check_frozen"]


def _nothing(record: logging.LogRecord) -> bool:
    return False


def _guards(mode: FakeTensorMode) -> int:
    return len(mode.shape_env.guards) if mode.shape_env is not None else 0


@functools.cache
def decompositions() -> dict[Any, Any]:
    """Decompositions of all operators without a rule of their own."""
    known = FUSIBLE - {OpKind.COMPOSITE}
    listed = dict(decomposition_table)
    table = {overload: call for overload, call in listed.items() if info(str(overload)).kind not in known}
    return table | {torch.ops.prims.convert_element_type.default: _converted}


def _converted(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A decomposition says so what aten has another operator for."""
    return torch.ops.aten._to_copy(x, dtype=dtype)
