"""What a rank of a job computes that other ranks compute too, and that no mean makes equal again.

In: a module, or a graph of Dynamo's. Out: whether kernels that differ from eager's in the last bit may let ranks drift
apart. Gradients of data-parallel ranks are averaged, so their forward and backward passes may differ. Values of
tensor-parallel ranks are not, nor are updates of parameters, gradients and averages of parameters.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn

from autofuse.job_ranks import told_ranks
from autofuse.runtime.rank_agreement import group_size

_COLLECTIVES = ("_c10d_functional.", "_c10d_functional_autograd.", "c10d.", "_dtensor.")
_IN_PLACE = frozenset(
    f"i{name}" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
) | {"setitem", "ilshift", "irshift"}  # of the operator module


def has_other_ranks() -> bool:
    """Whether this process is one of several ranks, as its process group or else its launcher tells."""
    return group_size() > 1 or told_ranks() is not None


def shares_values(module: object) -> bool:
    """Whether other ranks compute values of this module, too: tensor parallelism.

    Parameters that are data-parallel alone (FSDP) have gradients that are reduced over all ranks.
    """
    tensors, fsdp = (sys.modules.get(f"torch.distributed.{name}") for name in ("tensor", "fsdp"))
    if tensors is None or not isinstance(module, nn.Module):
        return False
    sharded = getattr(fsdp, "FSDPModule", None)
    own_dims = int(sharded is not None and any(isinstance(part, sharded) for part in module.modules()))
    meshes = (p.device_mesh for p in module.parameters() if isinstance(p, tensors.DTensor))
    return any(mesh.size() > 1 and mesh.ndim > own_dims for mesh in meshes)


def graph_shares_values(graph: fx.Graph, inputs: Sequence[Any]) -> bool:
    """Whether a graph of a rank has distributed tensors among its inputs, or exchanges values with other ranks."""
    tensors = sys.modules.get("torch.distributed.tensor")
    if tensors is not None and any(isinstance(value, tensors.DTensor) for value in inputs):
        return True
    called = (str(node.target) for node in graph.nodes if node.op == "call_function")
    return any(name.startswith(_COLLECTIVES) for name in called)


def graph_updates_state(graph: fx.Graph, inputs: Sequence[Any]) -> bool:
    """Whether a graph of a rank may compute an update that each rank makes for itself, such as an optimizer's step.

    No gradient flows through such a graph, and it writes to its inputs or has no parameter among them: a forward
    pass without gradients reads parameters, and its results end in no parameter.
    """
    if any(_has_gradient(value) for node in graph.nodes if node.op == "output" for value in node.all_input_nodes):
        return False
    held = graph.owning_module
    has_parameter = any(isinstance(value, nn.Parameter) for value in inputs) or any(
        isinstance(getattr(held, str(node.target), None), nn.Parameter) for node in graph.nodes if node.op == "get_attr"
    )
    return not has_parameter or any(map(_writes, graph.nodes))


def _has_gradient(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    return isinstance(value, torch.Tensor) and value.requires_grad


def _writes(node: fx.Node) -> bool:
    if node.op == "call_method":
        name = str(node.target)
    elif node.op == "call_function":
        name = getattr(node.target, "__name__", "")
    else:
        return False
    return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__")) or "out" in node.kwargs
