"""Gradients of outputs that the loss does not use, in graphs that AOTAutograd compiles for all outputs at once.

In: a backward graph, and the gradients that a backward pass has for a graph's outputs, None where the loss does not use
one. Out: the graph's inputs in place of the missing ones (zeros), which of its results are defined, and whether zeros
are correct. Guarantee: an input gets a gradient exactly if an output that the loss uses depends on it, as in eager. An
optimizer skips parameters without a gradient, but would decay and move parameters whose gradient is zeros.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from autofuse.capture.corrections.autograd_function import needs_tangent

_DIVISION, _PRODUCT, _POWER = "aten.div.Tensor", "aten.mul.Tensor", "aten.pow.Tensor_Scalar"
# Operators whose result may be infinite, or not a number, though what they read is finite. torch's derivatives multiply
# gradients by such values: by cosh for sinh, by rsqrt for acos, by log for entr, by digamma for lgamma (torch's
# derivatives.yaml). Sums and products of finite values are not among them: if they overflow, so be it.
_UNBOUNDED = frozenset(
    f"aten.{name}"
    for name in (
        "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "rsqrt.default", "reciprocal.default",
        "div.Tensor_mode", "exp.default", "exp2.default", "expm1.default", "sinh.default", "cosh.default",
        "log.default", "log2.default", "log10.default", "log1p.default", "atanh.default", "erfinv.default",
        "logit.default", "lgamma.default", "digamma.default", "polygamma.default", "i0.default", "special_i1.default",
        "special_erfcx.default", "special_ndtri.default", "special_zeta.default", "special_zeta.self_scalar",
        "special_zeta.other_scalar",
    )
)  # fmt: skip
# What reads a value that may be infinite and makes a finite one of it (not of NaN). Whatever else reads it may pass it
# on.
_BOUNDED = frozenset(
    f"aten.{name}"
    for name in (
        "tanh.default", "sigmoid.default", "atan.default", "erf.default", "erfc.default", "sign.default",
        "sgn.default", "isnan.default", "isinf.default", "logical_not.default", "eq.Scalar", "eq.Tensor", "ne.Scalar",
        "ne.Tensor", "lt.Scalar", "lt.Tensor", "le.Scalar", "le.Tensor", "gt.Scalar", "gt.Tensor", "ge.Scalar",
        "ge.Tensor",
    )
)  # fmt: skip
_INFINITE_WITHIN = "aten.logit_backward.default"  # it multiplies the gradient in the midst of a kernel of torch's


class UndefinedGradients(NamedTuple):
    """Which results of a backward graph depend on which tangents, by number."""

    tangents: int = 0
    results: tuple[tuple[int, ...], ...] = ()  # of each input's gradient
    risks: tuple[tuple[int, ...], ...] = ()  # of values in which zero may meet infinity

    @property
    def parted(self) -> list[int]:
        """Inputs whose gradient depends on some tangents, and not on others."""
        return [i for i, found in enumerate(self.results) if 0 < len(found) < self.tangents]

    @property
    def has_risks(self) -> bool:
        """Whether some loss may use outputs such that zeros for the others would be wrong."""
        return any(len(found) < self.tangents for found in self.risks)

    def may_be_zero(self, present: set[int]) -> bool:
        """Whether zeros for the other tangents change nothing: 0 * inf would be NaN where eager adds nothing."""
        return all(not present.isdisjoint(found) for found in self.risks)

    def only_reached(self, results: Sequence[Any], present: set[int]) -> tuple[Any, ...]:
        """The gradients that eager has. Results that depend on no tangent stay."""
        if len(results) != len(self.results):
            return tuple(results)
        return tuple(
            result if not found or not present.isdisjoint(found) else None
            for result, found in zip(results, self.results, strict=True)
        )


def infinite_values(forward: fx.GraphModule) -> frozenset[str]:
    """The names of a forward graph's values that may be infinite: backward has those that are saved by these names."""
    return frozenset(node.name for node in forward.graph.nodes if _makes_infinity(node))


def reach_of(backward: fx.GraphModule, saved: frozenset[str]) -> UndefinedGradients:
    """Read the reach of each output from the backward graph: the gradients that depend on its tangent.

    ``saved``: the `infinite_values` of its forward graph.
    """
    found = tangents_behind(backward.graph)
    infinite: set[fx.Node] = set()  # values of no tangent that may be infinite
    risks = set()
    for node in backward.graph.nodes:
        if not found[node] and (node.name in saved or _may_be_infinite(node, infinite)):
            infinite.add(node)
        if found[node] and _may_meet_infinity(node, found, infinite):
            risks.add(found[node])
    (results,) = backward.graph.find_nodes(op="output")[0].args
    return UndefinedGradients(
        sum(node.op == "placeholder" and bool(reach) for node, reach in found.items()),
        tuple(tuple(sorted(found[r])) if isinstance(r, fx.Node) else () for r in results),
        tuple(sorted(tuple(sorted(risk)) for risk in risks)),
    )


def tangents_behind(backward: fx.Graph) -> dict[fx.Node, frozenset[int]]:
    """The tangents, by number, that each value of a backward graph depends on."""
    found: dict[fx.Node, frozenset[int]] = {}
    tangents = 0
    for node in backward.nodes:
        if node.op == "placeholder" and str(node.target).startswith("tangents"):
            found[node] = frozenset({tangents})
            tangents += 1
        else:
            found[node] = frozenset().union(*(found[n] for n in node.all_input_nodes))
    return found


def _may_be_infinite(node: fx.Node, infinite: set[fx.Node]) -> bool:
    """Of a value that depends on no tangent, and that backward computes from what forward has saved."""
    return _makes_infinity(node) or (str(node.target) not in _BOUNDED and not infinite.isdisjoint(node.all_input_nodes))


def _makes_infinity(node: fx.Node) -> bool:
    return str(node.target) in _UNBOUNDED and not _is_bounded_power(node) and not _is_gaussian(node)


def _is_bounded_power(node: fx.Node) -> bool:
    """Whether a value is computed as a power that is a product: pow(x, 2) has a derivative with 2 * pow(x, 1)."""
    if str(node.target) != _POWER:
        return False
    exponent = node.args[1]
    return isinstance(exponent, int | float) and exponent >= 0.0


def _is_gaussian(node: fx.Node) -> bool:
    """Whether a value is computed as exp(-x^2), at most 1: in the derivatives of erf, erfc and gelu."""
    if str(node.target) != "aten.exp.default":
        return False
    (negative,) = node.all_input_nodes
    if str(negative.target) != "aten.neg.default":
        return False
    (power,) = negative.all_input_nodes
    return str(power.target) == _POWER and power.args[1] == 2


def _may_meet_infinity(node: fx.Node, found: dict[fx.Node, frozenset[int]], infinite: set[fx.Node]) -> bool:
    """Whether a gradient is divided by a tensor, or multiplied by what may be infinite."""
    target = str(node.target)
    if target == _DIVISION:
        return isinstance(node.args[1], fx.Node)
    if target == _PRODUCT:
        kept = [n for n in node.all_input_nodes if not found[n]]
        return any(n in infinite or str(n.target) in (_DIVISION, _PRODUCT) for n in kept)
    return target == _INFINITE_WITHIN


def tangent_places(metadata: Any) -> list[int]:
    """Which of the gradients that autograd hands to AOTAutograd's function are the graph's tangents, in its order."""
    written = metadata.mutated_inp_runtime_indices
    places = [
        i
        for i, index in enumerate(written)
        if metadata.input_info[index].mutates_data and metadata.input_info[index].requires_grad
    ]
    places += [
        len(written) + i
        for i, info in enumerate(metadata.output_info)
        if info.output_type.name in ("non_alias", "unsafe_view_alias", "custom_function_view")
        and issubclass(info.raw_type, torch.Tensor)
        and needs_tangent(info)
    ]
    first_base = len(written) + metadata.num_outputs
    return places + list(range(first_base, first_base + metadata.num_intermediate_bases))


def filled(grads: Sequence[Any], places: Sequence[int], ctx: Any) -> list[Any]:
    """The tangents, with zeros for absent ones that the graph adds to others."""
    found = list(grads)
    for place in places:
        if found[place] is None:
            meta = ctx._input_metadata[place]
            found[place] = torch.zeros(tuple(meta.shape), dtype=meta.dtype, device=meta.device)
    return found


def is_watched(tensors: Sequence[Any]) -> bool:
    """Whether hooks watch gradients of these tensors: a hook is called, with None, also where the loss used nothing."""
    distributed = sys.modules.get("torch.nn.parallel.distributed")
    if distributed is not None and getattr(distributed.DistributedDataParallel, "_active_ddp_module", None) is not None:
        return True
    return any(t._backward_hooks or t._post_accumulate_grad_hooks for t in tensors)
