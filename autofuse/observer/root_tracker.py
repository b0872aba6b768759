"""Finds the outermost modules of an unmodified script and hands their calls to one handler.

In: module calls, through ``module_calls``. Out: ``handler(module, args, kwargs)`` for each call of a root: a module
that is called while no other module is running in this thread. The handler usually ends in ``call_original``.
Guarantee: calls that belong to other tools run as without autofuse: inside ``torch.compile`` (tracing or running),
export, jit and fx tracing, functorch transforms, modes that see operators or functions, and inside backward, where
checkpointing calls modules again. Wrappers that only pass a call on (DDP, DataParallel) leave the root to the module
inside; modules that other tools have made (compiled, scripted, traced) run whole, without a root inside.
"""

from __future__ import annotations

import hashlib
import os
import sys
import types
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch._C import _current_graph_task_id, _get_tracing_state, _is_torch_function_enabled
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.fx import _symbolic_trace

from autofuse.observer import module_calls
from autofuse.observer.module_calls import PLAIN, CallRunner, thread
from autofuse.observer.module_table import ModuleTable
from autofuse.observer.script_modes import modes_are_active

Target = Callable[..., Any]  # a module, or a function that was named as a root
Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
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
# torch.jit types all attributes of a module but these; of this one it knows an annotation that it cannot read.
_NOT_SCRIPTED: list[str] = getattr(sys.modules.get("torch.jit._recursive"), "ignored_attributes", [])
PROBE_EVERY = 31  # calls of a released module; a prime, for scripts alternate


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
    return "root" if has_plain_call(kind_of) else "transparent"


def has_plain_call(kind_of: type) -> bool:
    """Whether calls of the module are torch's own ``__call__``; a script may replace it at any time."""
    return getattr(kind_of, "__call__", None) is _MODULE_CALL  # noqa: B004


class QuietCalls:
    """Calls of a root that the handler need not see, but for one in ``PROBE_EVERY``."""

    def __init__(self) -> None:
        self.calls = 0  # quiet ones, without those that the handler saw
        self.is_quiet = False
        self.is_final = False  # the handler has no interest in any call of it
        self.until_probe = PROBE_EVERY
        # Whether this call is counted by someone, and need not be seen.
        self.takes: Callable[[], bool] | None = None
        # Of a function: whether this call need not be seen, where the others are.
        self.skips: Callable[[tuple[Any, ...], dict[str, Any]], bool] | None = None


class Attached(QuietCalls):
    """A root's own ``_compiled_call_impl``: its calls past the hook, at 0.6 us instead of 2.2, once they are quiet.

    Quiet calls are only counted; one in ``PROBE_EVERY`` goes to the handler, which may take an interest in it. Copies
    and pickles hold None in its place, and where attributes were shared (replicas of DataParallel, classes that copy
    their ``__dict__``) the module that is called is the one that runs.
    """

    def __init__(self, tracker: RootTracker, module: torch.nn.Module) -> None:
        super().__init__()
        self._tracker = tracker
        self._module = weakref.ref(module)
        if "_compiled_call_impl" not in _NOT_SCRIPTED:
            _NOT_SCRIPTED.append("_compiled_call_impl")
        module.__dict__["_compiled_call_impl"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self._module()
        if is_dynamo_compiling():
            return module._call_impl(*args, **kwargs)
        called = _called(sys._getframe(1), module)
        if called is not module:
            return _run_whole(called, *args, **kwargs)
        answer = thread.answer
        if answer is not False:
            runner = None if answer is None else answer(module)  # type: ignore[operator]
            return (module._call_impl if runner is None else runner)(*args, **kwargs)
        if self.is_quiet:
            self.until_probe -= 1
            if self.until_probe > 0 or self.is_final:
                self.calls += 1
                return _run_whole(module, *args, **kwargs)
            self.until_probe = PROBE_EVERY
        if not self._tracker.is_installed or _belongs_elsewhere():
            return module._call_impl(*args, **kwargs)
        takes = self.takes
        thread.answer = PLAIN
        try:
            if takes is not None and takes():
                return module._call_impl(*args, **kwargs)
            return self._tracker.handler(module, args, kwargs)
        finally:
            thread.answer = module_calls.OUTSIDE

    def __deepcopy__(self, memo: object) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    def end(self) -> None:
        module = self._module()
        if module is not None and module.__dict__.get("_compiled_call_impl") is self:
            del module.__dict__["_compiled_call_impl"]


class RootTracker:
    """Sends the calls of outermost modules to ``handler(module, args, kwargs)``, whose result is the call's.

    One tracker at a time is installed. What the handler raises goes to the user, so the handler keeps its own faults to
    itself.
    """

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.is_installed = False
        self._kinds: dict[type, Kind] = {}
        self._attached: ModuleTable[QuietCalls] = ModuleTable()

    def install(self) -> None:
        """Start; nothing happens where this tracker is installed already."""
        global _current
        if self.is_installed:
            return
        if _current is not None:
            _current.uninstall()
        _current = self
        self.is_installed = True
        module_calls.set_root_answer(self._answer)
        module_calls.acquire()

    def uninstall(self) -> None:
        """Stop; calls in progress finish as they began."""
        global _current
        if not self.is_installed:
            return
        self.is_installed = False
        _current = None
        module_calls.set_root_answer(None)
        module_calls.release()
        for attached in self._attached.values():
            if isinstance(attached, Attached):
                attached.end()

    def call_original(self, target: Target, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a function, or a module's own forward with its hooks, eagerly, with no root inside."""
        if thread.answer is not False:  # a watcher stays
            return (target._call_impl if isinstance(target, torch.nn.Module) else target)(*args, **kwargs)
        return _run_whole(target, *args, **kwargs)

    def attach(self, target: Target) -> QuietCalls:
        """The calls of a module that the handler knows as a root need the hook no more."""
        attached = self._attached.get(target)
        if attached is None:
            attached = Attached(self, target) if isinstance(target, torch.nn.Module) else QuietCalls()
            self._attached.set(target, attached)
        return attached

    def release(self, target: Target) -> QuietCalls:
        """This one is of no interest any more: its calls skip the handler; inside of a module nothing is a root."""
        attached = self.attach(target)
        attached.is_quiet = True
        return attached

    def wake(self, target: Target) -> None:
        """The handler takes all calls of this one again."""
        self.attach(target).is_quiet = False

    def wrap(self, target: Target, handler: Handler) -> Callable[..., Any]:
        """A function that was named as a root, or a module, as one whose calls go to ``handler``.

        Inside of another root's call too, since it was asked for.
        """
        attached = self.attach(target)
        is_module = isinstance(target, torch.nn.Module)
        original = target._call_impl if isinstance(target, torch.nn.Module) else target

        def call(*args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling():
                return original(*args, **kwargs)
            if is_module and (called := _called(sys._getframe(1), target)) is not target:
                return _run_whole(called, *args, **kwargs)
            if attached.is_quiet:
                attached.until_probe -= 1
                if attached.until_probe > 0 or attached.is_final:
                    attached.calls += 1
                    return original(*args, **kwargs)
                attached.until_probe = PROBE_EVERY
            elif attached.skips is not None and attached.skips(args, kwargs):
                attached.calls += 1
                return original(*args, **kwargs)
            if _belongs_elsewhere():
                return original(*args, **kwargs)
            answer = thread.answer
            thread.answer = PLAIN  # nothing inside is a root
            try:
                return handler(target, args, kwargs)
            finally:
                thread.answer = answer

        return call

    def _answer(self, module: torch.nn.Module) -> CallRunner | None:
        if _belongs_elsewhere():
            return None
        kind = self._kinds.get(type(module)) or self._learn_kind(type(module))
        if kind == "transparent":
            return None
        if kind == "opaque" or "_former_parameters" in module.__dict__:
            return partial(_run_whole, module)  # the last: a replica that DataParallel made for this call
        return partial(self._run_root, module)

    def _learn_kind(self, kind_of: type) -> Kind:
        kind = self._kinds[kind_of] = classify(kind_of)
        return kind

    def _run_root(self, module: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        self.attach(module)
        thread.answer = PLAIN
        try:
            return self.handler(module, args, kwargs)
        finally:
            thread.answer = module_calls.OUTSIDE


def _run_whole(target: Target, /, *args: Any, **kwargs: Any) -> Any:
    answer = thread.answer
    thread.answer = PLAIN
    try:
        return (target._call_impl if isinstance(target, torch.nn.Module) else target)(*args, **kwargs)
    finally:
        thread.answer = answer


def _called(frame: types.FrameType, module: Any) -> Any:
    """Whose ``_compiled_call_impl`` was read: replicas and copies of ``__dict__`` share a module's own."""
    return frame.f_locals["self"] if frame.f_code is module_calls.CALL_CODE else module


def _belongs_elsewhere() -> bool:
    """Whether a call made now belongs to another tool: a trace, a transform, a backward pass."""
    return (
        get_eval_frame_callback() is not None  # in a region that torch.compile runs
        or _current_graph_task_id() != -1  # in backward: a recomputation, or a hook
        or modes_are_active()
        or not _is_torch_function_enabled()  # inside of a __torch_function__
        or peek_interpreter_stack() is not None  # in vmap, grad, jvp
        or _get_tracing_state() is not None
        or _symbolic_trace.is_fx_symbolic_tracing()
        or torch.compiler.is_compiling() is not False  # on any thread: torch traces one frame at a time
        or _top_saved_tensors_default_hooks(True) is not None  # a checkpoint: in backward it calls modules in eager
        or forward_ad._current_level >= 0  # compiled graphs have no forward-mode gradients
    )


_current: RootTracker | None = None


def _after_fork() -> None:
    global _current
    if _current is not None:
        _current.is_installed = False
        _current = None
    module_calls.forget_after_fork()


os.register_at_fork(after_in_child=_after_fork)

# ---- names of roots -------------------------------------------------------------------------------

_keys: ModuleTable[str] = ModuleTable()
_METHODS = (types.MethodType, partial)


def function_key(function: Target) -> tuple[str, str]:
    """A name for a function that is the same in every process, its name and a hash of its code; and one for people.

    Closures over other values share a key, as modules of one structure do.
    """
    digest = hashlib.sha256()
    inner: Any = function
    while isinstance(inner, _METHODS):
        owner = getattr(inner, "__self__", None)
        if isinstance(owner, torch.nn.Module):
            digest.update(root_key(owner).encode())
        inner = inner.__func__ if isinstance(inner, types.MethodType) else inner.func
    if not hasattr(inner, "__code__"):
        inner = vars(type(inner)).get("__call__", inner)  # of an object that can be called
    codes = [inner.__code__] if hasattr(inner, "__code__") else []
    while codes:
        code = codes.pop()
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
        constants = [repr(c) for c in code.co_consts if not isinstance(c, types.CodeType | frozenset)]
        digest.update(repr((code.co_code, code.co_names, constants)).encode())
    name = getattr(inner, "__qualname__", type(inner).__qualname__)
    return f"{getattr(inner, '__module__', None)}.{name}:{digest.hexdigest()[:16]}", name


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
