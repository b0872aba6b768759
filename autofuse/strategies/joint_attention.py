"""Attention in training as two halves: one in each graph; either both run torch's own attention or neither does.

In: for each attention one `AttentionPass` in each graph (from `find_joint_attention`), both of which refer to one
`Pair`. Out: callables of the halves. Guarantee: the forward half decides call by call, and the tensor that it saves in
place of the probabilities tells the backward half. It runs only once the backward graph is known to support it
(`Pair.is_ready`). Where it declines or fails, its graph's own operations run as without a half.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autofuse.fusion.node import FusionNode
from autofuse.ir.shape import Dim, evaluate
from autofuse.strategies.sdpa_calls import Rule, backward, backward_by_products, forward
from autofuse.strategies.sdpa_training_match import TrainingAttention

LONGEST_PAUSE = 255  # calls
_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks


def _is_compiled_autograd() -> bool:
    """Whether torch traces the backward pass (compiled autograd): then AOTAutograd's graph runs, without halves."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return module is not None and bool(getattr(module, "compiled_autograd_enabled", False))


@dataclass(eq=False)
class Pair:
    """An attention of training, which is in the forward graph and in the backward graph."""

    node: FusionNode  # the node of both passes, which is tuned
    attention: TrainingAttention
    kept_shapes: tuple[tuple[Dim, ...], ...]  # sizes of each value that forward saves in place of the probabilities
    is_ready: bool = False  # the backward graph has its half, which has not failed
    failed: Callable[[Exception], None] | None = None  # called with failures of either half

    def __deepcopy__(self, memo: dict[int, Any]) -> Pair:
        """Returns itself: AOTAutograd copies the backward graph, with the records on it, before it compiles it."""
        return self

    def __getstate__(self) -> dict[str, Any]:
        """The state without objects of this process."""
        return vars(self) | {"is_ready": False, "failed": None}

    @property
    def lead(self) -> tuple[Dim, ...]:
        return self.attention.scores.lead

    def rule(self, lead: Sequence[int]) -> Rule:
        return Rule(tuple(lead), self.attention.scores.scale, self.attention.scores.fill)


@dataclass(frozen=True)
class AttentionPass:
    """One pass of an attention, by names of its FX graph."""

    pair: Pair
    names: frozenset[str]  # operations that do not run where the half runs as a whole
    inputs: tuple[str, ...]  # of a backward half: first the tensors saved by forward
    outputs: tuple[str, ...]

    @property
    def kept_inputs(self) -> tuple[str, ...]:
        """Of a backward half: the tensors saved by forward."""
        return self.inputs[: len(self.pair.kept_shapes)]


# ---- callables ---------------------------------------------------------------------------------------------------


def forward_call(
    pair: Pair, symbol_values: Mapping[str, int], failed: Callable[[Exception], None]
) -> Callable[..., tuple[Tensor, ...] | None]:
    """The forward half for one shape: ``call(query, key, value, [bias], [masked])`` gives the result and the tensor to
    save, once for each name of the probabilities; None where the operations must run one by one.

    ``failed`` is called with errors. After each decline, more calls pass before the next attempt: an attempt may cost a
    pass over the data.
    """
    rule = pair.rule([evaluate(dim, symbol_values) for dim in pair.lead])
    places = len(pair.kept_shapes)
    has_bias, has_mask = pair.attention.scores.bias is not None, pair.attention.scores.masked is not None
    pair.failed = failed

    pause, left = 0, 0  # calls to leave alone after the last decline, and those still to come

    def call(query: Tensor, key: Tensor, value: Tensor, *masks: Tensor) -> tuple[Tensor, ...] | None:
        nonlocal pause, left
        # With hooks on saved tensors: a checkpoint expects the first run's sizes when it runs the graph again, but by
        # then a half may have become ready or decided. Other hooks may change values, and cannot handle our bytes.
        if not pair.is_ready or _top_hooks(True) is not None or _is_compiled_autograd():
            return None
        if left:
            left -= 1
            return None
        bias = masks[0] if has_bias else None
        try:
            found = forward(query, key, value, bias, masks[-1] if has_mask else None, rule)
            if found is None:
                pause = left = min(2 * pause + 1, LONGEST_PAUSE)
                return None
            pause = 0
            # The mask is a copy, so later writes of the script to its own mask do not matter.
            return *found, *([found[1] if bias is None else bias.clone()] * (places - 1))
        except Exception as error:
            failed(error)
            return None

    return call


def backward_call(pair: Pair) -> Callable[..., tuple[Tensor, ...]]:
    """The backward half: ``call(lead, *kept, gradient, query, key, value, [masked])`` gives the three gradients.

    Where torch's kernel fails, they come from matmuls, and neither half runs as a whole again.
    """
    places, has_bias = len(pair.kept_shapes), pair.attention.scores.bias is not None
    has_mask = pair.attention.scores.masked is not None
    rules: dict[tuple[int, ...], Rule] = {}

    def call(lead: tuple[int, ...], *inputs: Any) -> tuple[Tensor, ...]:
        rule = rules.get(lead)
        if rule is None:
            rule = rules[lead] = pair.rule(lead)
        gradient, query, key, value = inputs[places : places + 4]
        bias = inputs[1] if has_bias else None
        masked = inputs[-1] if has_mask else None
        try:
            return backward(inputs[0], gradient, query, key, value, bias, masked, rule)
        except Exception as error:
            pair.is_ready = False
            if pair.failed is not None:
                pair.failed(error)
        return backward_by_products(None, gradient, query, key, value, bias, masked, rule)

    return call
