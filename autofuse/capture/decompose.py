"""The decomposition of a composite operator, traced once with the fake tensors of the graph that it is in.

In: the FX node of an operator that `ir.composites` lists. Out: an FX graph of the operators that PyTorch decomposes it
into, over one placeholder for each tensor that the operator reads, repeats included. Guarantee: None where PyTorch has
no decomposition, or where tracing one needs to know more of a size than the graph's guards say.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch import fx
from torch._decomp import decomposition_table
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from autofuse.ir.optable import FUSIBLE, OpKind, info

log = logging.getLogger(__name__)


def decomposed(node: fx.Node) -> fx.GraphModule | None:
    """The graph that the operator of an FX node decomposes into; each of its nodes has its fake values."""
    arguments = tree_map(lambda a: a.meta["val"] if isinstance(a, fx.Node) else a, (node.args, node.kwargs))
    flat, spec = tree_flatten(arguments)
    places = [n for n, value in enumerate(flat) if isinstance(value, torch.Tensor)]
    mode = next((flat[n].fake_mode for n in places if hasattr(flat[n], "fake_mode")), None)
    if not isinstance(mode, FakeTensorMode):
        return None

    def call(*tensors: torch.Tensor) -> Any:
        values = list(flat)
        for place, tensor in zip(places, tensors, strict=True):
            values[place] = tensor
        args, kwargs = tree_unflatten(values, spec)
        return node.target(*args, **kwargs)

    guards = _guards(mode)
    try:
        with mode, enable_python_dispatcher():
            traced = make_fx(call, decomposition_table=decompositions())(*(flat[n] for n in places))
    except Exception as error:  # whatever a decomposition may raise on fake tensors, eager has a kernel
        log.debug("%s has no decomposition here: %s", node.target, error)
        return None
    return traced if _guards(mode) == guards else None


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
