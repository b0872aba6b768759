"""``AUTOFUSE_CHECK=1``: each routed call beside eager's, to find a wrong kernel.

In: the fused and the unfused callable of a node. Out: a callable that runs both; where they differ it returns eager's
result and reports it once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autofuse.gpu import capturing
from autofuse.runtime.graphs.plans import NodeState
from autofuse.wrapper.node_call import NodeCall

# Two roundings of the dtype per operation of the node, and a sum's worth of slack.
SLACK = 64.0


def check_against(node: NodeState, fused: NodeCall, unfused: NodeCall, say: Callable[[str, str], None]) -> NodeCall:
    """A callable of the node's inputs that compares both results before it returns."""

    def checked(*inputs: torch.Tensor) -> Any:
        if node.slot.device.type != "cpu" and capturing.is_capturing():
            return fused(*inputs)  # a comparison synchronises, which ends the recording
        expected = unfused(*inputs)
        found = fused(*inputs)
        pairs = zip(_tuple(expected), _tuple(found), strict=True)
        problem = next((p for p in (_difference(e, f) for e, f in pairs) if p), None)
        if problem is None:
            return found
        say("check_failed", f"{node.slot.node.label} with {node.values}: {problem}; eager's result is used")
        return expected

    return checked


def _tuple(value: Any) -> tuple[torch.Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def _difference(expected: torch.Tensor, found: torch.Tensor) -> str | None:
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return f"{found.dtype}{list(found.shape)} where eager has {expected.dtype}{list(expected.shape)}"
    if not expected.dtype.is_floating_point:
        return None if torch.equal(expected, found) else "integer results differ"
    left, right = expected.double(), found.double()
    if not torch.equal(left.isnan(), right.isnan()) or not torch.equal(left.isinf(), right.isinf()):
        return "NaN or Inf in other places"
    finite = left.isfinite()
    error = (left - right)[finite].abs().max().item() if bool(finite.any()) else 0.0
    scale = left[finite].abs().max().item() if bool(finite.any()) else 0.0
    bound = SLACK * torch.finfo(expected.dtype).eps * max(scale, torch.finfo(expected.dtype).tiny)
    return None if error <= bound else f"largest difference {error:.3g}, allowed {bound:.3g}"
