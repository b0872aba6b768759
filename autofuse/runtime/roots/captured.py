"""Calls of a captured root: which of them run the trace, and their times.

In: a call. Out: its result, from the captured graph, or from the original module where the call is held out, rests, or
has a shape that does not pay for a trace. Once its shape is fully known, our part of a call takes 4 us.
"""

from __future__ import annotations

from typing import Any

import torch

from autofuse.gpu import capturing
from autofuse.observer.held_out import Held
from autofuse.observer.module_table import ModuleTable
from autofuse.observer.root_tracker import Target
from autofuse.observer.signatures import call_signature, has_plain_sizes, training_signature
from autofuse.runtime.roots.device import RootDevice
from autofuse.runtime.roots.graph_trial import GraphTrial
from autofuse.runtime.roots.life import RootLife
from autofuse.runtime.roots.services import RootServices
from autofuse.runtime.roots.step_clock import Account
from autofuse.runtime.roots.tracing import TracedCalls
from autofuse.runtime.roots.untimed import UntimedCalls


class CapturedCalls:
    """Of one root."""

    def __init__(
        self,
        services: RootServices,
        trial: GraphTrial,
        account: Account,
        device: RootDevice,
        traced: TracedCalls,
        untimed: UntimedCalls,
        life: RootLife,
    ) -> None:
        self._tracker = services.tracker
        self._clock = services.tools.clock
        self._trial = trial
        self._account = account
        self._device = device
        self._traced = traced
        self._untimed = untimed
        self._life = life
        self._fast_paths = ModuleTable[bool]()

    def call(self, module: Target, args: tuple[Any, ...], kwargs: dict[str, Any], number: int, now: float) -> Any:
        """The ``number``-th of the root, which began at ``now``."""
        trial, traced, has_gradients = self._trial, self._traced, torch.is_grad_enabled()
        is_training = getattr(module, "training", False)
        describe = training_signature if has_gradients else call_signature
        signature = (describe(args, kwargs), is_training, has_gradients)
        shape = trial.shapes.get(signature)
        if capturing.is_capturing():
            return traced.run_recorded(module, args, kwargs, shape)
        if self._device.found is None:
            self._device.find(module, args, kwargs)
        if shape is None:
            is_eager = not is_training and not has_gradients and self._has_fast_path(module)
            is_eager = is_eager or not has_plain_sizes(signature[0])  # Dynamo supports nested tensors only in part
            shape = trial.new_shape(signature, is_eager)
        account, clock = self._account, self._clock
        is_untraced = shape.is_new and not shape.is_eager
        may_run = not is_untraced or traced.may_trace(module, args, kwargs, shape)
        held = trial.choose(shape, number) if may_run else Held.RESTING
        if held is Held.RESTING:
            trial.begin(shape, held, number, now)
            account.begin(shape.elements, now, False)
            result = self._tracker.call_original(module, args, kwargs)
            try:
                account.returned(result, clock())
            except Exception as error:
                self._life.give_up(module, error)
            return result
        is_settled = not account.ledger.is_open
        if held is Held.NO and is_settled and self._untimed.begin(shape, now, has_gradients):
            return traced.run(module, args, kwargs, shape)
        trial.begin(shape, held, number, now, self._device.begin_stretch())
        account.begin(shape.elements, now, True)
        began = clock()
        if held is Held.NO and not shape.is_eager:
            result = traced.run(module, args, kwargs, shape)
        else:
            result = self._tracker.call_original(module, args, kwargs)
        returned = clock()
        try:
            # Without a backward pass the step is the call alone: the rest of the script need not be compared.
            if not has_gradients or not needs_gradients(result):
                trial.call_took(returned - began)
            if account.ledger.is_open:
                account.returned(result, returned)
        except Exception as error:
            self._life.give_up(module, error)
        return result

    def _has_fast_path(self, module: Target) -> bool:
        """Whether torch's own fast path runs other kernels in inference, which turn padding into zeros."""
        found = self._fast_paths.get(module)
        if found is None:
            children = torch.nn.Module.modules(module) if isinstance(module, torch.nn.Module) else ()
            found = any(isinstance(child, torch.nn.TransformerEncoder) for child in children)
            self._fast_paths.set(module, found)
        return found


def needs_gradients(result: Any) -> bool:
    """Whether a backward pass may follow, judged by the call's result."""
    if isinstance(result, torch.Tensor):
        if type(result) is torch.Tensor:
            return bool(result.requires_grad)
        with torch._C.DisableTorchFunction():  # without calling a subclass's ``__torch_function__``
            return bool(result.requires_grad)
    if isinstance(result, tuple | list):
        return any(needs_gradients(item) for item in result)
    return result is not None
