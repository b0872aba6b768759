"""Autograd functions of the user's own in Dynamo's graph, run in eager so that their gradients can be differentiated.

In: Dynamo's graph and its inputs. Out: its results. Guarantee: second gradients are eager's. Dynamo keeps the passes of
a function as two graphs, and runs the backward one without gradients (torch 2.11 to 2.15): what eager differentiates
again is then silently a constant. Here the backward graph runs with gradients, on tensors that went through
``save_for_backward`` where the function had them there. Functions that write to their inputs, or turn gradients on or
off themselves, cannot be run so; `can_run_again` finds them. Dynamo traces a backward pass with gradients off and drops
what turns them off once more, so the source of the pass is looked at; without its source a function is refused.
"""

from __future__ import annotations

import ast
import linecache
import re
from collections.abc import Collection
from typing import Any

import torch
from torch import fx

_OPERATOR = "autograd_function_apply"
_SWITCHES = {"no_grad", "enable_grad", "set_grad_enabled", "inference_mode", "once_differentiable"}
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')
_KNOWN = {"non_differentiable_idx", "saved_for_backward_idx", "dirty_idx", "args_tensor_mask"}


def has_functions(graph: fx.GraphModule) -> bool:
    return any(_is_function(node.target) for node in graph.graph.nodes)


def can_run_again(graph: fx.GraphModule) -> bool:
    """Whether `run` gives eager's second gradients for all functions of a graph."""
    for node in graph.graph.nodes:
        if not _is_function(node.target):
            continue
        if node.kwargs.get("dirty_idx") or not _KNOWN.issuperset(node.kwargs):
            return False
        forward, backward = (getattr(graph, str(part.target), None) for part in node.args[:2])
        if not isinstance(forward, fx.GraphModule) or not isinstance(backward, fx.GraphModule):
            return False
        nodes = _computing(backward)
        # Dynamo's own switch stands at the beginning and the end of the pass.
        switches = [index for index, n in enumerate(nodes) if _is_switch(n.target)]
        if switches not in ([], [0, len(nodes) - 1]) or not can_run_again(backward):
            return False
        if not all(_keeps_gradients(n.stack_trace or "") for n in nodes if not _is_switch(n.target)):
            return False
    return True


def run(graph: fx.GraphModule, *inputs: Any) -> Any:
    """The results of a graph that `can_run_again`."""
    return _Runner(graph).run(*inputs)


def _computing(graph: fx.GraphModule) -> list[fx.Node]:
    return [node for node in graph.graph.nodes if node.op not in ("placeholder", "get_attr", "output")]


def _is_switch(target: Any) -> bool:
    return target is torch._C._set_grad_enabled


def _keeps_gradients(stack_trace: str) -> bool:
    """Whether the code that made a node of a backward pass, from ``backward`` on, turns no gradients on or off."""
    frames = [match.groupdict() for match in _FRAME.finditer(stack_trace)]
    begins = [index for index, frame in enumerate(frames) if frame["function"] == "backward"]
    if not begins:
        return False
    return all(_has_no_switch(frame["file"], int(frame["line"])) for frame in frames[begins[0] :])


def _has_no_switch(file: str, line: int) -> bool:
    """Of the class around a line of source, or the function where there is none."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return False
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.Lambda)
        and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    if not around:
        return False
    innermost = max(around, key=lambda node: (isinstance(node, ast.ClassDef), node.lineno))
    names = {n.id for n in ast.walk(innermost) if isinstance(n, ast.Name)}
    names |= {n.attr for n in ast.walk(innermost) if isinstance(n, ast.Attribute)}
    return not names & _SWITCHES


def _is_function(target: Any) -> bool:
    return getattr(target, "_name", "") == _OPERATOR


class _Runner(fx.Interpreter):  # type: ignore[misc]
    """Runs a graph with its functions in a form that can be differentiated twice."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not _is_function(target):
            return super().call_function(target, args, kwargs)
        return _apply(*args, **kwargs)


class _BackwardRunner(_Runner):
    """Runs a backward pass as the engine has it: with gradients where they are to be differentiated again."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return None if _is_switch(target) else super().call_function(target, args, kwargs)


def _apply(
    forward_graph: fx.GraphModule,
    backward_graph: fx.GraphModule,
    *inputs: Any,
    non_differentiable_idx: Collection[int] = (),
    saved_for_backward_idx: Collection[int] = (),
    **_: Any,
) -> Any:
    class Again(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            outputs, saved = fx.Interpreter(forward_graph).run(*inputs)
            ctx.kept = list(saved)  # what the function put on ctx by itself stays there
            ctx.places = [i for i in saved_for_backward_idx if isinstance(saved[i], torch.Tensor)]
            ctx.save_for_backward(*(saved[i] for i in ctx.places))
            for place in ctx.places:
                ctx.kept[place] = None
            if non_differentiable_idx:
                ctx.mark_non_differentiable(*(outputs[i] for i in non_differentiable_idx))
            return outputs

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            kept = list(ctx.kept)
            for place, value in zip(ctx.places, ctx.saved_tensors, strict=True):
                kept[place] = value
            return _BackwardRunner(backward_graph).run(*grads, *kept)

    return Again.apply(*inputs)
