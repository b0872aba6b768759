"""Dynamo's guards, recorded in one process and rebuilt in another by torch's own builder.

In: what Dynamo guards a trace with. Out: a record of the guards; in a later process, guards that torch has built from
the record on that process's objects, and the text of the whole guard tree, with each address replaced by a text for its
object. Guarantee: guards are torch's own and as strict as after a trace. If both texts are equal, each guard checks
what it checked in the first process. Guards that a text cannot describe (`fingerprints.Unknown`), or of a kind that is
not in the table, make the record fail.

torch can pickle guards (`torch._dynamo.package`, `GuardsStatePickler`), but not those on identities: it refuses
ID_MATCH, CLOSURE_MATCH, CLASS_MATCH, FUNCTION_MATCH and MODULE_MATCH (`CheckFunctionManager.serialize_guards`) or drops
them (`caching_precompile`), and every trace of a module has some: 129 of 1,366 for GPT-2. So we cannot use those: code
may call functions that can be replaced without a guard that notices.
"""

from __future__ import annotations

import builtins
import dataclasses
import functools
import importlib
import itertools
import re
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo import convert_frame
from torch._dynamo.guards import CheckFunctionManager, GuardBuilder, ShapeCodeParts, convert_int_to_concrete_values
from torch._dynamo.output_graph import OutputGraphCommon, OutputGraphGuardsState
from torch._dynamo.source import Source
from torch._guards import Guard, GuardsSet
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _device, _pytree
from torch.utils._ordered_set import OrderedSet

from autofuse.capture.kept.fingerprints import Unknown, object_text
from autofuse.preserve_rng import untouched

# Guards whose text says all that they check.
_KNOWN = {
    "AUTOGRAD_SAVED_TENSORS_HOOKS", "BOOL_MATCH", "BUILTIN_MATCH", "CLASS_MATCH", "CLOSURE_MATCH", "CONSTANT_MATCH",
    "DEFAULT_DEVICE", "DETERMINISTIC_ALGORITHMS", "DICT_CONTAINS", "DICT_KEYS_MATCH", "DICT_NOT_CONTAINS",
    "DUAL_LEVEL", "DUPLICATE_INPUT", "EMPTY_NN_MODULE_HOOKS_DICT", "EQUALS_MATCH", "FUNCTION_MATCH",
    "FUNCTORCH_STACK_MATCH", "GLOBAL_STATE", "GRAD_MODE", "HASATTR", "ID_MATCH", "MAPPING_KEYS_CHECK", "MODULE_MATCH",
    "NONE_MATCH", "NOT_NONE_MATCH", "NOT_PRESENT_IN_GENERIC_DICT", "RANGE_ITERATOR_MATCH", "SEQUENCE_LENGTH",
    "SHAPE_ENV", "TENSOR_MATCH", "TORCH_FUNCTION_STATE", "TUPLE_ITERATOR_LEN", "TYPE_MATCH",
}  # fmt: skip


@dataclass(frozen=True)
class GuardRecord:
    """What torch needs to build the guards of one trace."""

    guards: tuple[Guard, ...]
    key_order: tuple[Source, ...]  # dicts the order of whose keys counts
    sizes: Mapping[Source, Any]  # of tensors, with None for what may vary
    shapes: ShapeCodeParts | None  # conditions on sizes, as code
    builtins_name: str | None  # under which code and guards find Python's builtins
    imports: Mapping[str, str]  # modules by the names that code and guards have for them


@dataclass(frozen=True)
class Ambient:
    """State of the process that guards are built against."""

    function_modes: list[Any]
    dual_level: int
    functorch_layers: list[Any]
    device: torch.device | None
    state: Any

    @classmethod
    def of_now(cls) -> Ambient:
        state = convert_frame.GlobalStateGuard()
        layers = torch._functorch.pyfunctorch.retrieve_all_functorch_interpreters()
        modes = list(_get_current_function_mode_stack())
        return cls(modes, forward_ad._current_level, layers, _device.CURRENT_DEVICE, state)

    @classmethod
    def of_trace(cls, output: Any) -> Ambient:
        """As it was when Dynamo began, which has changed some of it since."""
        layers, device = output.functorch_layers, output.current_device
        return cls(output.torch_function_mode_stack, output.dual_level, layers, device, output.global_state_guard)


@dataclass(frozen=True)
class Built:
    """Guards in this process."""

    manager: Any  # torch's; ``cache_entry`` is None once something that it knows by its address has gone
    lines: tuple[str, ...]  # of the tree
    ties: tuple[int, ...]  # of each tensor: the first that is the same one, the first in the same memory
    types: tuple[type, ...]  # that guards name
    names: dict[str, Any]  # globals of code and guards


def note_guards(manager: CheckFunctionManager, guards: list[Guard], output: Any) -> GuardRecord:
    """Record the guards that Dynamo has just built. Raises Unknown."""
    kinds = {guard.create_fn_name() for guard in guards}
    if kinds - _KNOWN:
        raise Unknown(f"guards of the kinds {', '.join(sorted(kinds - _KNOWN))}")
    if output.aotautograd_guards or output.functorch_layers or output.torch_function_mode_stack or output.export:
        raise Unknown("guards on tensors that share memory, or a transform or mode around the call")
    shapes = manager.shape_code_parts
    if shapes is not None:
        if not shapes.python_fallback:
            raise Unknown("conditions on sizes that are compiled")
        shapes = dataclasses.replace(shapes, cpp_code_parts=None, shape_env_sources=[])
    return GuardRecord(
        tuple(map(_plain_guard, guards)),
        tuple(output.guard_on_key_order),
        _pytree.tree_map(convert_int_to_concrete_values, dict(output.input_source_to_sizes_strides)),
        shapes,
        output.name_of_builtins_dict_key_in_fglobals,
        {**output.import_sources, **_installed_modules(output)},
    )


def _installed_modules(output: Any) -> dict[str, str]:
    """Modules that Dynamo has put among the globals, under names made of this process's addresses: ``type(tensor)``
    in the user's code is ``torch.Tensor`` of such a one."""
    found = ((name, output.global_scope.get(name)) for name in output.installed_globals)
    modules = ((name, value) for name, value in found if isinstance(value, types.ModuleType))
    return {name: value.__name__ for name, value in modules if sys.modules.get(value.__name__) is value}


def _plain_guard(guard: Guard) -> Guard:
    """The guard without this process's objects and stacks."""
    create: Callable[..., Any] = guard.create_fn
    if isinstance(create, functools.partial):
        is_tensor = create.func is GuardBuilder.TENSOR_MATCH
        keywords = {} if is_tensor else dict(create.keywords)  # the tensor itself; its metadata is looked up
        arguments = () if is_tensor else create.args
        if not all(_is_plain(value) for value in (*arguments, *keywords.values())):
            raise Unknown(f"an argument of {guard.create_fn_name()} on {guard.name}")
        create = functools.partial(create.func, *arguments, **keywords) if arguments or keywords else create.func
    return Guard(guard.originating_source, create)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float | bytes | Source)


def build_guards(record: GuardRecord, code: types.CodeType, scope: dict[str, Any], ambient: Ambient) -> Built:
    """Guards of ``code`` on the objects of a call, whose local variables are ``scope``. Raises what torch raises."""
    names: dict[str, Any] = {"__builtins__": builtins}
    with untouched():
        names |= {alias: importlib.import_module(name) for alias, name in record.imports.items()}
    if record.builtins_name:
        names[record.builtins_name] = vars(builtins)
    state = OutputGraphGuardsState(
        local_scope=scope,
        global_scope=names,
        torch_function_mode_stack=ambient.function_modes,
        guard_on_key_order=set(record.key_order),
        input_source_to_sizes_strides=dict(record.sizes),
        dual_level=ambient.dual_level,
        functorch_layers=ambient.functorch_layers,
        current_device=ambient.device,
        global_state_guard=ambient.state,
        _guards=GuardsSet(OrderedSet(dataclasses.replace(guard) for guard in record.guards)),
        _aotautograd_guards=[],
        skip_guards_check=True,
        name_of_builtins_dict_key_in_fglobals=record.builtins_name,
    )
    built = _Building(code, OutputGraphCommon(state), shape_code_parts=record.shapes, runtime_global_scope=names)
    manager = built.guard_manager
    manager.cache_entry = _ALIVE
    lines = tuple(_line(line, built.known) for line in str(manager).splitlines())
    found = tuple(value for value in built.known.values() if isinstance(value, type))
    built.known.clear()  # otherwise no object that guards know would ever be freed
    return Built(manager, lines, built.ties, found, names)


_ALIVE = "built from a record"


class _Building(CheckFunctionManager):  # type: ignore[misc]
    """Records the objects that guards know by address, and drops the guards when one of these objects is freed.

    torch would invalidate its own cache entry, but here is none: a reused address may mean another object.
    """

    def __init__(self, code: types.CodeType, output: OutputGraphCommon, **kwargs: Any) -> None:
        self.known: dict[int, Any] = {}
        self.ties: tuple[int, ...] = ()
        self._sizes = output.input_source_to_sizes_strides
        super().__init__(code, output, **kwargs)

    def build_guards(self, sorted_guards: list[Guard], *args: Any, **kwargs: Any) -> Any:
        builder, manager = super().build_guards(sorted_guards, *args, **kwargs)
        of_tensors = [g for g in sorted_guards if g.create_fn_name() == "TENSOR_MATCH"]
        tensors = [builder.get(g) for g in of_tensors]
        for guard, tensor in zip(of_tensors, tensors, strict=True):  # torch takes the number of dims from the tensor
            known = self._sizes.get(guard.originating_source)
            if known is not None and len(known["size"]) != tensor.dim():
                raise Unknown(f"expected {len(known['size'])} dims of {guard.name}, found {tensor.dim()}")
        places = [t.untyped_storage()._cdata if t.layout is torch.strided else id(t) for t in tensors]
        addresses = [id(t) for t in tensors]
        self.ties = tuple(itertools.chain(map(addresses.index, addresses), map(places.index, places)))
        return builder, manager

    def id_ref(self, obj: object, obj_str: str) -> int:
        self.known[id(obj)] = obj
        address: int = super().id_ref(obj, obj_str)
        return address

    def invalidate(self, obj_str: str) -> None:
        if hasattr(self, "guard_manager"):
            self.guard_manager.cache_entry = None


_ADDRESS = re.compile(r"(___check_(?:obj|type)_id\(.*), (\d+)\)")
_TAGS = re.compile(r", tag_safe=\([^)]*\)$")


def _line(line: str, known: Mapping[int, Any]) -> str:
    """A line of torch's text of a tree as another process would have it."""
    line = _TAGS.sub("", line)
    return _ADDRESS.sub(lambda m: f"{m[1]}, {object_text(known[int(m[2])])})", line)


# ---- while Dynamo traces -------------------------------------------------------------------------------------------


class Listening(CheckFunctionManager):  # type: ignore[misc]
    """Dynamo's own guards, which call a listener once they are built."""

    listener: Callable[[CheckFunctionManager, types.CodeType, list[Guard], Any], None] | None = None

    def __init__(self, f_code: types.CodeType, output_graph: Any, *args: Any, **kwargs: Any) -> None:
        self._noted: list[Guard] = []
        super().__init__(f_code, output_graph, *args, **kwargs)
        if self.listener is not None:
            self.listener(self, f_code, self._noted, output_graph)
        self._noted = []

    def build_guards(self, sorted_guards: list[Guard], *args: Any, **kwargs: Any) -> Any:
        self._noted = sorted_guards
        *others, _ = args
        return super().build_guards(sorted_guards, *others, True, **kwargs)  # save_guards: keeps the code of SHAPE_ENV
