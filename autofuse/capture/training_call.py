"""Calls of a captured training graph without the checks that AOTAutograd repeats at each call.

In: the autograd function that AOTAutograd has built for a graph, and its specification. Out: its forward and backward
pass as plain functions, and a backward pass of its loss alone (`lean_passes`); a call past the wrapper around it
(`plain_apply`). None where AOTAutograd has more to do: subclasses, inputs that are written to, aliases, tokens,
autocast, generators of a GPU. Guarantee: tensors are saved, checked for writes and freed as AOTAutograd does it. Rare
cases (tangents of a subclass, a backward graph that is not compiled yet) are left to AOTAutograd.

Why: a call of three operators and its backward pass took 71 us, and eager's 43 (64 elements, torch 2.13, AMD EPYC,
2026-11). The difference is checks of each argument's class, a closure and two contexts per pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch._functorch._aot_autograd import runtime_wrappers

from autofuse.capture.corrections.autograd_function import needs_tangent, passes_of

Pass = Callable[..., Any]
_Tensor, _Parameter = torch.Tensor, torch.nn.Parameter
_unsafe_view = torch.ops.aten._unsafe_view.default


class LeanPasses(NamedTuple):
    """Forward and backward with the arguments of ``function._fwd_fn`` and ``function._bwd_fn``.

    ``of_one(flat, ctx, number, compiled)``: backward by a graph that reads one tangent; None where AOTAutograd has more
    to do.
    """

    forward: Pass
    backward: Pass
    of_one: Pass


def lean_passes(function: Any, spec: Any) -> LeanPasses | None:
    """The passes of ``function``; None where AOTAutograd has more to do."""
    try:
        return _lean_passes(function, spec) if _is_plain(spec) else None
    except AttributeError:  # another torch
        return None


def plain_apply(function: Any, spec: Any) -> Pass | None:
    """The function that AOTAutograd's wrapper calls, where the wrapper only passes on arguments and results."""
    try:
        meta = spec.fw_metadata
        is_plain = (
            _is_plain(spec)
            and not any(info.mutates_data or info.mutates_metadata for info in meta.input_info)
            # Inputs without a gradient of their own that need one elsewhere, which others detach for nothing.
            and not any(meta.input_info[i].requires_grad for i in spec.indices_of_inps_to_detach)
            and meta.grad_enabled_mutation is None
            and torch.is_grad_enabled()  # as Dynamo's guards will read it
            and not runtime_wrappers._should_disable_saved_tensors_hooks()
        )
        former = getattr(runtime_wrappers, "maybe_mark_dynamic_helper", None)  # its name in torch 2.11
        mark: Pass = former or runtime_wrappers.mark_dynamo_propagated_dynamic_indices
        dynamic = [(i, info.dynamic_dims) for i, info in enumerate(meta.output_info) if info.dynamic_dims]
    except AttributeError:
        return None
    if not is_plain:
        return None
    # Without ``Function.apply``, which asks for functorch's transforms: guards and the root's own look have done so.
    apply: Pass = super(torch.autograd.Function, function).apply
    if not dynamic:
        return apply

    def call(*args: Any) -> Any:
        results = apply(*args)
        for index, dims in dynamic:
            mark(results[index], dims)
        return results

    return call


def _is_plain(spec: Any) -> bool:
    meta = spec.fw_metadata
    return (
        spec.maybe_subclass_meta is None
        and not spec.backward_state_indices
        and not spec.disable_amp
        and not meta.mutated_inp_runtime_indices
        and not meta.num_outputs_aliased
        and not meta.num_intermediate_bases
        and not meta.tokens
        and not meta.num_backward_tokens
        and not meta.is_rng_op_functionalized
        and not meta.num_graphsafe_rng_states
        and not meta.indices_of_inputs_that_requires_grad_with_mutations_in_bw
    )


def _lean_passes(function: Any, spec: Any) -> LeanPasses:
    meta = spec.fw_metadata
    checked = meta.tensors_saved_for_backwards_with_vc_check_slice
    unchecked = meta.tensors_saved_for_backwards_no_vc_check_slice
    symbols = meta.symints_saved_for_backwards_slice
    opaque = meta.opaque_objects_saved_for_backwards_slice
    returned = meta.num_forward_returns
    constant = [
        i for i, info in enumerate(meta.output_info) if issubclass(info.raw_type, _Tensor) and not info.requires_grad
    ]
    hidden = meta.unsafe_view_out_indices
    tangents = _tangents(meta)
    whole_backward = passes_of(function)[1]

    def forward(ctx: Any, inputs: Sequence[Any], _add: Pass, _save: Pass, _finalize: Pass, compiled: Pass) -> Any:
        found = getattr(compiled, "_torchdynamo_orig_callable", compiled)(list(inputs))
        # A view would keep its base's graph alive.
        ctx.save_for_backward(*[t.detach() if t._is_view() else t for t in found[checked]])
        ctx._tensors_no_vc_check = [t.detach() if t._is_view() else t for t in found[unchecked]]
        ctx.symints, ctx.opaque_objects = found[symbols], found[opaque]
        results = list(found[:returned])
        for i in hidden:  # a view inside of the graph, which autograd is not to see
            results[i] = _unsafe_view(results[i], results[i].shape)
        if constant:
            ctx.mark_non_differentiable(*[results[i] for i in constant])
        ctx._materialize_non_diff_grads = False
        return tuple(results)

    def backward(flat: Any, ctx: Any, *rest: Any) -> Any:
        compiled = function.compiled_bw
        found = _taken(flat[0], tangents) if getattr(compiled, "_boxed_call", False) else None
        return whole_backward(flat, ctx, *rest) if found is None else run(compiled, found, flat[0], ctx)

    def of_one(flat: Any, ctx: Any, number: int, compiled: Any) -> Any:
        found = _taken(flat[0], tangents[number : number + 1])
        return None if found is None else run(compiled, found, flat[0], ctx)

    def run(compiled: Any, found: list[Any], gradients: Any, ctx: Any) -> Any:
        args = [*ctx.symints, *ctx.saved_tensors, *ctx._tensors_no_vc_check, *ctx.opaque_objects, *found]
        gradients.clear()
        ctx.maybe_clear_saved_tensors()
        # Dynamo is kept out of all that is below (`double_backward`), and nothing there reads context variables.
        return tuple(getattr(compiled, "_torchdynamo_orig_callable", compiled)(args))

    return LeanPasses(forward, backward, of_one)


class _Tangent(NamedTuple):
    """A gradient that the backward graph reads, and the layout that it must have."""

    place: int  # among all gradients
    layout: Any  # a memory format; None where size and stride tell
    size: tuple[int, ...] | None
    stride: tuple[int, ...] | None


def _tangents(meta: Any) -> list[_Tangent]:
    kinds = runtime_wrappers.OutputType
    plain = (kinds.non_alias, kinds.unsafe_view_alias, kinds.custom_function_view)
    places = [
        i
        for i, info in enumerate(meta.output_info)
        if info.output_type in plain and issubclass(info.raw_type, _Tensor) and needs_tangent(info)
    ]
    layouts = [kind.memory_format for kind in meta.subclass_tangent_meta]
    if len(layouts) != len(places):
        raise AttributeError("expected a layout for each tangent")
    return [
        _Tangent(place, layout.memory_format, _known(layout.size), _known(layout.stride))
        for place, layout in zip(places, layouts, strict=True)
    ]


def _taken(gradients: list[Any], wanted: Sequence[_Tangent]) -> list[Any] | None:
    """The gradients as the backward graph wants them; None where AOTAutograd has more to do with them."""
    found = []
    for place, layout, size, stride in wanted:
        gradient = gradients[place]
        if type(gradient) is _Parameter:  # which AOTAutograd takes for a subclass, and raises
            gradient = gradients[place] = gradient.detach()
        if type(gradient) is not _Tensor or not (size is None or gradient.shape == size):
            return None
        # The gradient of a sum or a mean has strides of 0.
        if layout is not None:
            gradient = gradient.contiguous(memory_format=layout)
        elif gradient.stride() != stride:
            gradient = torch.empty_strided(size, stride, dtype=gradient.dtype, device=gradient.device).copy_(gradient)
        found.append(gradient)
    return found


def _known(sizes: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if sizes is None else tuple(sizes)
