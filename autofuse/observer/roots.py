"""Finds the outermost modules of an unmodified script and hands their calls to one handler.

In: module calls, through ``module_calls``. Out: ``handler(module, args, kwargs)`` for each call of a root: a module
that is called while no other module is running in this thread. The handler usually ends in ``call_original``.
Guarantee: calls that belong to someone else run as if we were not here: inside ``torch.compile`` (tracing or
running), export, jit and fx tracing, functorch transforms, fake or other dispatch modes, and inside backward, where
checkpointing calls modules again. Wrappers that only pass a call on (DDP, DataParallel) leave the root to the module
inside; modules that someone else already made (compiled, scripted, traced) run whole without a root inside.
"""

from __future__ import annotations

import hashlib
import os
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch._C import _current_graph_task_id, _get_dispatch_stack_at, _get_tracing_state, _len_torch_dispatch_stack
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.fx import _symbolic_trace

from autofuse.observer import module_calls
from autofuse.observer.module_calls import PLAIN, CallRunner, skip_in_dynamo, thread
from autofuse.observer.module_table import ModuleTable

Handler = Callable[[torch.nn.Module, tuple[Any, ...], dict[str, Any]], Any]
Kind = Literal["root", "transparent", "opaque"]

# Named by text: some live in modules that are slow or impossible to import (distributed builds).
_OPAQUE = {
    "torch._dynamo.eval_frame.OptimizedModule",
    "torch.fx.graph_module.GraphModule",
    "torch.jit._script.ScriptModule",
    "torch.jit._script.RecursiveScriptModule",
    "torch.jit._trace.TracedModule",
    "torch.jit._trace.TopLevelTracedModule",
    "torch.nn.modules.lazy.LazyModuleMixin",  # becomes another class in its first call; a root from the second on
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel",
    "torch.distributed.fsdp._fully_shard._fully_shard.FSDPModule",
}
_TRANSPARENT = {
    "torch.nn.parallel.distributed.DistributedDataParallel",
    "torch.nn.parallel.data_parallel.DataParallel",
    "torch.ao.quantization.stubs.QuantWrapper",
}
_MODULE_CALL = torch.nn.Module.__call__


def classify(kind_of: type) -> Kind:
    """How calls of modules of a class are treated.

    A class that overrides ``__call__`` decides itself what a call means, so it is left alone and the modules that it
    calls are the roots.
    """
    for base in kind_of.__mro__:
        name = f"{base.__module__}.{base.__qualname__}"
        if name in _OPAQUE:
            return "opaque"
        if name in _TRANSPARENT:
            return "transparent"
    if getattr(kind_of, "__call__", None) is not _MODULE_CALL:  # noqa: B004
        return "transparent"
    return "root"


class Quiet:
    """A module whose calls are only counted: its own ``_compiled_call_impl``, past the hook, at 0.5 us instead of 3.

    It is gone from copies and pickles (torch leaves the attribute out), from a module that the user compiles, and from
    all modules when the tracker stops. With several GPUs it is not set: replicas share the attributes of a module.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.calls = 0
        self._module = reference = weakref.ref(module)

        def run(*args: Any, **kwargs: Any) -> Any:
            module = reference()
            assert module is not None  # whose attribute this is
            if is_dynamo_compiling():
                return module._call_impl(*args, **kwargs)
            answer = thread.answer
            if answer is not False:
                runner = None if answer is None else answer(module)  # type: ignore[operator]
                return (module._call_impl if runner is None else runner)(*args, **kwargs)
            self.calls += 1
            return _run_whole(module, *args, **kwargs)

        skip_in_dynamo(run)
        self._run = run
        if torch.cuda.device_count() < 2:
            module.__dict__["_compiled_call_impl"] = run

    def end(self) -> None:
        module = self._module()
        if module is not None and module.__dict__.get("_compiled_call_impl") is self._run:
            del module.__dict__["_compiled_call_impl"]


class RootTracker:
    """Sends the calls of outermost modules to ``handler(module, args, kwargs)``, whose result is the call's.

    One tracker at a time is installed. What the handler raises goes to the user, so the handler keeps its own faults to
    itself.
    """

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._kinds: dict[type, Kind] = {}
        self._quiet: ModuleTable[Quiet] = ModuleTable()
        self._all_quiet: list[Quiet] = []
        self._installed = False

    def install(self) -> None:
        """Start; nothing happens where this tracker is installed already."""
        global _current
        if self._installed:
            return
        if _current is not None:
            _current.uninstall()
        _current = self
        self._installed = True
        module_calls.set_root_answer(self._answer)
        module_calls.acquire()

    def uninstall(self) -> None:
        """Stop; calls in progress finish as they began."""
        global _current
        if not self._installed:
            return
        self._installed = False
        _current = None
        module_calls.set_root_answer(None)
        module_calls.release()
        for quiet in self._all_quiet:
            quiet.end()

    def call_original(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the module's own forward with its hooks, eagerly, with no root inside."""
        answer = thread.answer
        if answer is not False:
            return module._call_impl(*args, **kwargs)
        thread.answer = PLAIN
        try:
            return module._call_impl(*args, **kwargs)
        finally:
            thread.answer = answer

    def release(self, module: torch.nn.Module) -> Quiet:
        """This module is of no interest any more: its calls skip the handler, and nothing inside is a root."""
        quiet = Quiet(module)
        self._quiet.set(module, quiet)
        self._all_quiet.append(quiet)
        return quiet

    def _answer(self, module: torch.nn.Module) -> CallRunner | None:
        if (
            get_eval_frame_callback() is not None  # in a region that torch.compile runs
            or _current_graph_task_id() != -1  # in backward: a recomputation, or a hook
            or (_len_torch_dispatch_stack() != 0 and foreign_modes_active())
            or peek_interpreter_stack() is not None  # in vmap, grad, jvp
            or _get_tracing_state() is not None
            or _symbolic_trace._is_fx_tracing_flag
            or torch.compiler.is_compiling()
            or _top_saved_tensors_default_hooks(True) is not None  # a checkpoint: in backward it calls modules in eager
            or forward_ad._current_level >= 0  # compiled graphs have no forward-mode gradients
        ):
            return None
        kind = self._kinds.get(type(module)) or self._learn_kind(type(module))
        if kind == "transparent":
            return None
        quiet = self._quiet.get(module)
        if quiet is not None:
            quiet.calls += 1
            return partial(_run_whole, module)
        if kind == "opaque" or "_former_parameters" in module.__dict__:
            return partial(_run_whole, module)  # the last: a replica that DataParallel made for this call
        return partial(self._run_root, module)

    def _learn_kind(self, kind_of: type) -> Kind:
        kind = self._kinds[kind_of] = classify(kind_of)
        return kind

    def _run_root(self, module: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        thread.answer = PLAIN
        try:
            return self._handler(module, args, kwargs)
        finally:
            thread.answer = module_calls.OUTSIDE


def _run_whole(module: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    thread.answer = PLAIN
    try:
        return module._call_impl(*args, **kwargs)
    finally:
        thread.answer = module_calls.OUTSIDE


def foreign_modes_active() -> bool:
    """Is a dispatch mode on this thread's stack that does not call itself an observer of ours?"""
    return any(
        not getattr(_get_dispatch_stack_at(index), "is_autofuse_observer", False)
        for index in range(_len_torch_dispatch_stack())
    )


skip_in_dynamo(
    RootTracker._answer, RootTracker._learn_kind, RootTracker._run_root, RootTracker.call_original, classify, _run_whole
)
skip_in_dynamo(foreign_modes_active)

_current: RootTracker | None = None


def _after_fork() -> None:
    global _current
    if _current is not None:
        _current._installed = False
        _current = None
    module_calls.forget_after_fork()


os.register_at_fork(after_in_child=_after_fork)

# ---- names of roots -------------------------------------------------------------------------------

_keys: ModuleTable[str] = ModuleTable()


def root_key(module: torch.nn.Module) -> str:
    """A name for a root that is the same in every process: its class and a hash of its structure.

    The structure is the classes of its modules and the names, shapes and dtypes of its parameters and buffers, so two
    models of one class and one size share a key, and training does not change it.
    """
    known = _keys.get(module)
    if known is not None:
        return known
    key, final = _compute_key(module)
    if final:
        _keys.set(module, key)
    return key


def _compute_key(module: torch.nn.Module) -> tuple[str, bool]:
    digest = hashlib.sha256()
    final = True
    for path, child in module.named_modules():
        digest.update(f"{path}:{type(child).__qualname__};".encode())
    for kind, tensors in (("p", module.named_parameters()), ("b", module.named_buffers())):
        for name, tensor in tensors:
            if torch.nn.parameter.is_lazy(tensor):
                final = False
                digest.update(f"{kind} {name} lazy;".encode())
                continue
            digest.update(f"{kind} {name} {tuple(tensor.shape)} {tensor.dtype};".encode())
    qualified = f"{type(module).__module__}.{type(module).__qualname__}"
    return f"{qualified}:{digest.hexdigest()[:16]}", final
