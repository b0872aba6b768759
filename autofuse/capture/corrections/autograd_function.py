"""The autograd functions that AOTAutograd builds for training graphs: told of, and in one form with each torch.

In: what is to be told. Out: it is called for each function that AOTAutograd builds, from then on, with the function and
its specification. Guarantee: a function has its two passes in ``_fwd_fn`` and ``_bwd_fn``, with the arguments that
torch 2.13 gives them, and they may be replaced. Torch 2.11 has them in the function itself; they are wrapped.
Functions that are not told of keep torch's form.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch._functorch._aot_autograd import runtime_wrappers

from autofuse.dynamo_skip import mark_all_below

Note = Callable[[Any, Any], Any]  # gives what is to be called in place of the function, None for no change

_building = threading.local()  # .spec: of the function that AOTAutograd is building in this thread
# Names of the specification that are others in the arguments of torch 2.11.
_RENAMED = {"num_symints_saved_for_bw_": "num_symints_saved_for_bw"}


def watch(note: Note) -> bool:
    """Have ``note(function, specification)`` called from now on; False where this torch builds no such functions."""
    try:
        owner: Any = runtime_wrappers.AOTDispatchAutograd
        wrapper: Any = runtime_wrappers.RuntimeWrapper
    except AttributeError:
        return False
    if not hasattr(owner, "post_compile") or not hasattr(wrapper, "post_compile"):
        return False
    if not hasattr(owner.post_compile, "autofuse"):
        owner.post_compile = staticmethod(_noting_specification(owner.post_compile))
        wrapper.post_compile = _noting_function(wrapper.post_compile, note)
    return True


def needs_tangent(info: Any) -> bool:
    """Whether an output has a gradient of its own that the backward graph reads."""
    return bool(getattr(info, "requires_grad_for_backward", info.requires_grad))  # the latter in torch 2.11


def _noting_specification(build: Callable[..., Any]) -> Callable[..., Any]:
    """Torch 2.13 passes the specification as one object, torch 2.11 as many arguments."""
    signature = inspect.signature(build)

    @functools.wraps(build)
    def build_and_note(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        spec = (
            given["spec"] if "spec" in given else SimpleNamespace(**{_RENAMED.get(k, k): v for k, v in given.items()})
        )
        before = getattr(_building, "spec", None)
        _building.spec = spec
        try:
            return build(*args, **kwargs)
        finally:
            _building.spec = before

    build_and_note.autofuse = True  # type: ignore[attr-defined]
    return build_and_note


def _noting_function(wrap: Callable[..., Any], note: Note) -> Callable[..., Any]:
    """AOTAutograd wraps each function once it is built."""

    @functools.wraps(wrap)
    def note_and_wrap(self: Any, compiled: Any, *args: Any, **kwargs: Any) -> Any:
        spec, _building.spec = getattr(_building, "spec", None), None
        function = getattr(compiled, "__self__", None)
        if spec is not None and isinstance(function, type) and issubclass(function, torch.autograd.Function):
            compiled = note(function, spec) or compiled
        return wrap(self, compiled, *args, **kwargs)

    return note_and_wrap


def passes_of(function: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """``_fwd_fn`` and ``_bwd_fn``, which are put in where torch has none."""
    if not hasattr(function, "_fwd_fn"):
        _split(function)
    return function._fwd_fn, function._bwd_fn


def _split(function: Any) -> None:
    """Give a function of torch 2.11 its passes as torch 2.13 has them."""
    whole_forward, whole_backward = function.forward, function.backward

    def forward_pass(ctx: Any, inputs: tuple[Any, ...], *rest: Any) -> Any:
        return whole_forward(ctx, *inputs)

    def backward_pass(grads: Any, ctx: Any, *rest: Any) -> Any:
        return whole_backward(ctx, *grads[0])

    def forward(ctx: Any, *inputs: Any) -> Any:
        return function._fwd_fn(ctx, inputs, None, None, None, function.compiled_fw)

    def backward(ctx: Any, *grads: Any) -> Any:
        return function._bwd_fn(([*grads],), ctx)

    mark_all_below(forward_pass, backward_pass, forward, backward)
    function._fwd_fn, function._bwd_fn = forward_pass, backward_pass
    function.forward, function.backward = staticmethod(forward), staticmethod(backward)
