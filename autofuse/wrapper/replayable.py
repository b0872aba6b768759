"""Whether the call of a graph may be recorded as a CUDA graph and replayed.

In: a `CallPlan`. Out: why not, as a sentence; "" where it may. Guarantee: what passes launches the same work on the
same addresses at each call with the same sizes. It draws no random numbers, writes to no input, asks the device for no
value, and calls no operators but torch's and ours.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from autofuse.ir.optable import VIEWS
from autofuse.wrapper.graph_call_plan import CallPlan
from autofuse.wrapper.graph_call_units import Unit, kind_of, short_name

LEAST_LAUNCHES = 3  # a replay launches a graph, and copies inputs and results
_WAITS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)  # the host reads a value of the device


def why_not_replayed(plan: CallPlan) -> str:
    """Of a graph on a CPU: "is on a CPU"."""
    devices = set(plan.imported.devices.values())
    if not any(device.type == "cuda" for device in devices):
        return "is on a CPU"
    if len(devices) != 1:
        return f"has tensors on {', '.join(sorted(map(str, devices)))}"
    if plan.halves:
        return "holds an attention that chooses at each call how it runs"
    nodes: list[fx.Node] = list(plan.imported.module.graph.nodes)
    output = nodes[-1].args[0]
    if not isinstance(output, tuple | list) or not all(r is None or isinstance(r, fx.Node | int) for r in output):
        return "has results that are not a list of tensors and sizes"
    launches = sum(_launches(unit) for unit in [*plan.booked, *plan.units])
    if launches < LEAST_LAUNCHES:
        return f"has {launches} launches, too few to gain"
    return next((problem for node in nodes if (problem := _problem(node))), "")


def _launches(unit: Unit) -> int:
    if unit.slot is not None or unit.inner:
        return max(1, sum(map(_launches, unit.inner)))
    target = unit.nodes[0].target
    is_operator = unit.size is None and isinstance(target, torch._ops.OpOverload)
    return int(is_operator and not target.is_view and kind_of(unit.nodes[0]) not in VIEWS)


def _problem(node: fx.Node) -> str:
    """Why this node's graph is not replayed."""
    value = node.meta.get("val")
    if node.op == "placeholder":
        is_known = isinstance(value, torch.Tensor | torch.SymInt) or type(value) is int
        is_strided = not isinstance(value, torch.Tensor) or value.layout is torch.strided
        return "" if is_known and is_strided else f"takes a {type(value).__name__} that is no dense tensor and no size"
    if node.op != "call_function":
        return "" if node.op in ("get_attr", "output") else f"calls {node.target}"
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        name = getattr(target, "__name__", str(target))
        is_size = target is operator.getitem or getattr(target, "__module__", "") in ("_operator", "math", "builtins")
        return "" if is_size or name.startswith("sym_") else f"calls {name}"
    if target.namespace not in ("aten", "prims"):
        return f"calls {target}, which is not torch's own"
    if target._schema.is_mutable:
        return f"writes to a tensor by {short_name(node)}"
    if torch.Tag.nondeterministic_seeded in target.tags and not _has_no_dropout(node, target):
        return f"draws random numbers by {short_name(node)}"
    if any(tag in target.tags for tag in _WAITS):
        return f"waits for the device in {short_name(node)}"
    if short_name(node).startswith("as_strided"):  # by an offset into memory of which an argument may be a part
        return "looks at memory by as_strided"
    return ""


def _has_no_dropout(node: fx.Node, target: torch._ops.OpOverload) -> bool:
    """An attention whose dropout is off draws nothing."""
    for place, argument in enumerate(target._schema.arguments):
        if argument.name == "dropout_p":
            given = node.args[place] if place < len(node.args) else node.kwargs.get("dropout_p", argument.default_value)
            return bool(given == 0)
    return False
