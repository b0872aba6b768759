"""Calls a captured root past the wrappers of Dynamo and AOTAutograd, under Dynamo's own guards.

In: the function that Dynamo has compiled for a root. Out: for a call, the compiled code whose guards hold, as a plain
function, to be called as long as they do. Guarantee: code runs only if its guards hold for this very call, and never
after Dynamo has dropped or invalidated it. Code with a graph break needs Dynamo's frame evaluation for what follows the
break, unless that is a call of ``backward`` (`graph_break_call`).

Why: guards take 2 us of the 12 that a call of torch.compile's function takes before the graph begins (torch 2.13, AMD
EPYC, 2026-11); the rest is bookkeeping for users' own compiled regions, which a root of ours is not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._C._dynamo.guards import DictGuardManager
from torch._dynamo import utils
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._guards import TracingContext
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

Run = Callable[..., Any]
FindParted = Callable[[Callable[..., Any], Any, tuple[Any, ...]], Any]  # see `capture.graph_break_call`
_KEPT = 64  # with more code objects than this, Dynamo itself finds the right one


class DirectCall(NamedTuple):
    """Compiled code and its guards."""

    manager: Any  # Dynamo's wrapper of the guards; its ``cache_entry`` is None once the code is dropped or invalid
    check: Callable[[Mapping[str, Any]], bool]  # of the local variables of ``call_root``
    run: Run

    def fits(self, module: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the code may run in place of this call."""
        scope = {"module": module, "args": args, "kwargs": kwargs}
        return self.manager.cache_entry is not None and hold(self.check, scope)

    def types(self) -> set[type]:
        """Of all objects that the guards look at."""
        found: set[type] = set()
        waiting = [self.manager.root]
        while waiting:
            node = waiting.pop()
            found.add(node.get_type_of_guarded_value())
            if isinstance(node, DictGuardManager):
                pairs = node.get_key_value_managers().values()
                waiting += [child for pair in pairs for child in pair if child is not None]
            else:
                waiting += node.get_child_managers()
        return found


def hold(check: Callable[[Mapping[str, Any]], bool], scope: Mapping[str, Any]) -> bool:
    """Whether guards hold for local variables. No call is looked at while ``__torch_function__`` is off."""
    try:
        return check(scope)
    except RuntimeError:  # a nested tensor has no strides; guards then leave __torch_function__ off (torch 2.13)
        torch._C._set_torch_function_state(torch._C._TorchFunctionState.ENABLED)
        return False


class DirectCalls:
    """What Dynamo has compiled for one function ``call_root(module, /, *args, **kwargs)``."""

    def __init__(self, function: FunctionType, find_parted: FindParted | None = None) -> None:
        self.function = function
        self._find_parted = find_parted
        self._known: dict[int, DirectCall] = {}  # by the identity of the guards
        self._adopted: list[DirectCall] = []

    def adopt(self, direct: DirectCall) -> None:
        """Add code that an earlier run has traced, which Dynamo does not know."""
        self._adopted.append(direct)

    def forget(self) -> None:
        """Forget all code."""
        self._known, self._adopted = {}, []

    def find_adopted(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DirectCall | None:
        """The adopted code whose guards hold for this call."""
        return next((direct for direct in self._adopted if direct.fits(module, args, kwargs)), None)

    def find(self, module: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> DirectCall | None:
        """The code that Dynamo runs for this call; None unless it is whole or split only by calls of ``backward``."""
        known: dict[int, DirectCall] = {}
        entries = _debug_get_cache_entry_list(self.function.__code__)[:_KEPT]
        for found in entries:
            manager = found.guard_manager
            before = self._known.get(id(manager))
            if before is not None and before.manager is manager:
                known[id(manager)] = before
            elif (run := _whole_call(found.code, self.function)) is not None:
                known[id(manager)] = DirectCall(manager, manager.root.check, run)
        self._known = known
        direct = next((d for d in (*self._adopted, *known.values()) if d.fits(module, args, kwargs)), None)
        if direct is None and entries and not kwargs and self._find_parted is not None:
            direct = self._find_parted(module, entries[0].backend, args)
        return direct


def _whole_call(code: Any, function: FunctionType) -> Run | None:
    """The code as a function that calls its graph without a wrapper, None where it is more than one graph."""
    graphs = [name for name in code.co_names if name.startswith("__compiled_fn")]
    if len(graphs) != 1 or any(name.startswith("__resume") for name in code.co_names):
        return None
    names = dict(function.__globals__)
    if UTILITIES in names:
        names[UTILITIES] = Unrecorded()
    names[graphs[0]] = plain_call(names[graphs[0]])
    return FunctionType(code, names, function.__name__, function.__defaults__, function.__closure__)


UTILITIES = "__import_torch_dot__dynamo_dot_utils"  # as Dynamo's code calls the module


class Unrecorded:
    """Dynamo's utilities without its marks for torch's profiler, 3 us a call whether it records or not.

    Sizes and strides are read without the wrapper that switches Dynamo off, which is not active here: 2 us each.
    """

    def __getattr__(self, name: str) -> Any:
        found = getattr(utils, name)
        setattr(self, name, found)  # later calls find it at once
        return found

    @staticmethod
    def record_pregraph_bytecode_enter() -> None:
        return None

    @staticmethod
    def record_pregraph_bytecode_exit(mark: None) -> None:
        return None

    @staticmethod
    def call_size(tensor: torch.Tensor, dim: int) -> int:
        size: int = tensor.size(dim)
        return size

    @staticmethod
    def call_stride(tensor: torch.Tensor, dim: int) -> int:
        stride: int = tensor.stride(dim)
        return stride


# ---- graphs past AOTAutograd's wrapper ----------------------------------------------------------------------------

_PLAIN = "autofuse_plain_graph"
_TRAINING = "autofuse_plain_training"


def note_plain_graph(compiled: Callable[..., Any], graph: Callable[[list[Any]], Any]) -> None:
    """AOTAutograd's callable ``compiled`` does nothing but call ``graph`` with its arguments as a list."""
    vars(_inside(compiled))[_PLAIN] = graph


def note_plain_training(compiled: Callable[..., Any], apply: Callable[..., Any], inputs: int) -> None:
    """Of a graph with gradients: AOTAutograd's callable does nothing but call ``apply`` with so many arguments.

    With more or fewer arguments it does more: it drops duplicates.
    """
    vars(_inside(compiled))[_TRAINING] = (apply, inputs)


def plain_call(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """AOTAutograd's callable without the wrapper that disables Dynamo, which is not active where this is called."""
    compiled = _inside(compiled)
    noted = vars(compiled) if hasattr(compiled, "__dict__") else {}
    if _PLAIN in noted:
        graph = noted[_PLAIN]
        return lambda *args: graph(list(args))
    if _TRAINING not in noted:
        return compiled
    apply, inputs = noted[_TRAINING]
    return lambda *args: (apply if len(args) == inputs else compiled)(*args)


def _inside(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """The callable inside of the wrapper that disables Dynamo, which Dynamo replaces by one of its own."""
    found: Callable[..., Any] = getattr(compiled, "_torchdynamo_orig_callable", compiled)
    return found


def is_plain_graph(graph: fx.GraphModule, inputs: int) -> bool:
    """Whether AOTAutograd's wrapper has nothing to do for the inference graph that is being compiled.

    So it is where outputs alias no input, no input is written, there are no subclasses (`has_subclasses`), and neither
    autocast nor gradients are to be switched off meanwhile. ``inputs``: the number of inputs of Dynamo's graph, which
    the wrapper passes on unchanged.
    """
    context = TracingContext.try_get()
    meta = context.fw_metadata if context is not None else None
    if meta is None:
        return False
    placeholders = sum(node.op == "placeholder" for node in graph.graph.nodes)
    return (
        len(meta.input_info) == placeholders == inputs
        and not any(info.mutates_data or info.mutates_metadata for info in meta.input_info)
        and meta.num_outputs_aliased == 0
        and meta.num_intermediate_bases == 0
        and not meta.tokens
        and meta.grad_enabled_mutation is None
        and not meta.is_rng_op_functionalized
        and not meta.num_graphsafe_rng_states
    )


def has_subclasses(module: fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """Whether Dynamo's graph takes or gives tensors of a subclass: AOTAutograd's wrapper takes them apart and back.

    The metadata that a compiler sees describes the tensors inside of them.
    """
    found: list[Any] = []
    for node in module.graph.find_nodes(op="output"):
        found += [n.meta.get("example_value") for n in node.all_input_nodes]
    return any(isinstance(t, torch.Tensor) and is_traceable_wrapper_subclass(t) for t in (*inputs, *found))
