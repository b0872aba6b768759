"""What Dynamo takes for something else than Python does: our traces break there, and the script's own code runs.

In: Dynamo's functions, replaced when this module is imported. Out: the same functions for the script's own traces; in
ours, a graph break, or a guard, where the trace would not do what the script does. Guarantee: a function that this
torch lacks is left out.

================================================  =====================================================================
in a forward                                      what a trace of it does
================================================  =====================================================================
a function with ``functools.cache``               runs it at each call: random numbers are drawn again, tables made anew
a ``random.Random`` object                        draws the same numbers at each call
``t_``, ``squeeze_`` and others of a result       goes on with its sizes from before
an attribute of a class that is written           reads it through objects as it was before
a ``deque`` with a ``maxlen``                     lets it grow
a variable of the environment                     does not look again whether it is there, or, by ``getenv``, what it is
an attribute that a function may have             does not look again whether it has it
``torch.inference_mode()``                        makes results that are no inference tensors
``torch.set_default_dtype``, ``torch.seed``, ...    calls them at the trace, and never again
``torch.distributions``                           no longer checks arguments, in the whole process
================================================  =====================================================================
"""

from __future__ import annotations

import collections
import functools
import os
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch._dynamo import utils
from torch._dynamo.eval_frame import TorchPatcher
from torch._dynamo.exc import unimplemented
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.variables import functions
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.ctx_manager import InferenceModeVariable
from torch._dynamo.variables.functions import UserFunctionVariable, WrapperUserFunctionVariable
from torch._dynamo.variables.misc import RandomVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch._dynamo.variables.user_defined import UserDefinedClassVariable

from autofuse.capture.corrections.dynamo_patches import not_of_our_traces

_UNCHANGING = (type(None), bool, int, float, complex, str, bytes, tuple, frozenset, range, torch.dtype, torch.device)
# So begin the names of torch's functions that set a state of the process; what a trace has in its graph is left out.
_SETTERS = ("set_", "enable_", "use_deterministic")
_TRACED_SETTERS = ("set_grad_enabled", "set_fwd_grad_enabled", "set_multithreading_enabled", "set_stream", "set_device")
_RESHAPES = ("t_", "squeeze_", "unsqueeze_", "transpose_", "swapaxes_", "swapdims_", "as_strided_")


# Caches of libraries, of which torch knows that their results do not change.
_is_harmless = getattr(utils, "is_lru_cache_wrapper_trace_without_warning_allowed", lambda function: False)


def _break(found: str) -> NoReturn:
    unimplemented(gb_type="autofuse: left to Python", context=found, explanation=f"found {found}", hints=[])
    raise AssertionError("expected a graph break")


def _patch(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a method by what ``make`` makes of it; for the script's own traces it stays what it was."""
    before = getattr(owner, name, None)
    if before is None:
        return
    ours = make(before)

    @functools.wraps(before)
    def either(*args: Any, **kwargs: Any) -> Any:
        return (ours if not_of_our_traces.is_active else before)(*args, **kwargs)

    setattr(owner, name, either)


def _only_unchanging_results(call: Callable[..., Any]) -> Callable[..., Any]:
    def called(wrapper: Any, tx: Any, *rest: Any) -> Any:
        found = call(wrapper, tx, *rest)
        function = wrapper.wrapper_obj
        module = getattr(getattr(function, "__wrapped__", None), "__module__", None) or ""
        if not hasattr(function, "cache_info") or module.partition(".")[0] == "torch" or _is_harmless(function):
            return found
        if not found.is_python_constant() or not isinstance(found.as_python_constant(), _UNCHANGING):
            _break("a cached function whose result may change")
        return found

    return called


def _no_writes_to_classes(store: Callable[..., None]) -> Callable[..., None]:
    def stored(effects: Any, item: Any, name: str, *rest: Any) -> None:
        if isinstance(item, UserDefinedClassVariable):
            _break("a write to a class")
        store(effects, item, name, *rest)

    return stored


def _no_bounded_deques(wrap: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(builder: Any, value: Any) -> Any:
        if isinstance(value, collections.deque) and value.maxlen is not None:
            _break("a deque with a maxlen")
        return wrap(builder, value)

    return wrapped


def _no_inference_mode(enter: Callable[..., Any]) -> Callable[..., Any]:
    def entered(mode: Any, tx: Any) -> Any:
        if mode.target_values[0]:
            _break("torch.inference_mode")
        return enter(mode, tx)

    return entered


def _no_setters(call: Callable[..., Any]) -> Callable[..., Any]:
    def called(function: Any, *rest: Any) -> Any:
        name = getattr(function.value, "__name__", "").lstrip("_")
        if (name.startswith(_SETTERS) or name == "seed") and name not in _TRACED_SETTERS:
            _break(f"torch's {name}")
        return call(function, *rest)

    return called


def _no_environment(wrap: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(builder: Any, value: Any) -> Any:
        if value is os.environ:
            _break("os.environ")
        return wrap(builder, value)

    return wrapped


def _guard_missing(read: Callable[..., Any]) -> Callable[..., Any]:
    def asked(tx: Any, function: Any, source: Any, name: str) -> Any:
        if not name.startswith("_") and not hasattr(function, name):
            _guard_absence(source, name)
        return read(tx, function, source, name)

    return asked


def _guard_missing_if_asked(has: Callable[..., Any]) -> Callable[..., Any]:
    def asked(function: Any, tx: Any, name: str) -> Any:
        found = has(function, tx, name)
        if not name.startswith("_") and found.as_python_constant() is False:
            _guard_absence(function.source, name)
        return found

    return asked


def _guard_absence(source: Any, name: str) -> None:
    if source is not None:
        install_guard(source.make_guard(functools.partial(GuardBuilder.HASATTR, attr=name)))


def _reshaped_in_place(name: str) -> Callable[..., None]:
    def method(tensor: Any, tx: Any, *rest: Any, **named: Any) -> None:
        if not_of_our_traces.is_active:
            _break(f"Tensor.{name}")
        # Without a result, Dynamo goes on as if there were no such method.

    return method


def _keep_validation(patch: Callable[[], None]) -> None:
    """Dynamo turns off what `torch.distributions` checks, for good. It still does for the script's own traces."""
    distribution = torch.distributions.Distribution

    @functools.cache
    def turn_off() -> None:
        distribution.set_default_validate_args(False)

    def patched() -> None:
        if not_of_our_traces.is_active:
            checks = distribution._validate_args
            patch()
            distribution.set_default_validate_args(checks)
        else:
            patch()
            turn_off()

    TorchPatcher.patch = staticmethod(patched)
    with not_of_our_traces.active():
        patched()  # which a capture of ours may call before it has begun


_patch(WrapperUserFunctionVariable, "call_function", _only_unchanging_results)
_patch(SideEffects, "store_attr", _no_writes_to_classes)
_patch(VariableBuilder, "wrap_listlike", _no_bounded_deques)
_patch(VariableBuilder, "_wrap", _no_environment)
_patch(InferenceModeVariable, "enter", _no_inference_mode)
_patch(TorchInGraphFunctionVariable, "call_function", _no_setters)
_patch(functions, "fn_var_getattr", _guard_missing)
_patch(UserFunctionVariable, "call_obj_hasattr", _guard_missing_if_asked)
for _name in _RESHAPES:
    if not hasattr(TensorVariable, f"method_{_name}"):
        setattr(TensorVariable, f"method_{_name}", _reshaped_in_place(_name))
if hasattr(RandomVariable, "is_supported_random_obj"):
    _is_supported = RandomVariable.is_supported_random_obj
    RandomVariable.is_supported_random_obj = staticmethod(
        lambda generator: not not_of_our_traces.is_active and _is_supported(generator)
    )
if hasattr(TorchPatcher, "patch"):
    _keep_validation(TorchPatcher.patch)
