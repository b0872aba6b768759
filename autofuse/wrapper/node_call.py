"""Callables for one node: the unfused one (aten, op by op) and the fused one (a kernel's launcher).

In: a `NodeForm`, the values of its symbols, and for the fused callable a loaded kernel: the entry of a C kernel, or the
`LoadedArtifact` of Triton kernels. Out: a flat Python function of the node's input tensors that returns its outputs
(one tensor, or a tuple of several). Guarantee: outputs have exactly the sizes and strides that the form promises, on
the node's device; a call computes no size and looks nothing up. Both callables read the same inputs and may replace
each other between calls.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from autofuse.dynamo_skip import define
from autofuse.errors import OUT_OF_BOUNDS, ShapeError
from autofuse.gpu.capturing import is_capturing
from autofuse.gpu.launch_record import make_record
from autofuse.gpu.launcher import CtypesLaunch, Launch, launch_of
from autofuse.gpu.modules import LoadedArtifact
from autofuse.gpu.philox import draw_of, drawing_launch
from autofuse.gpu.torch_calls import TorchCalls, torch_calls
from autofuse.ir.operation import NodeForm
from autofuse.ir.optable import is_librarys
from autofuse.ir.shape import evaluate
from autofuse.library_operators import Unfused, registered
from autofuse.wrapper.liveness import deaths, deleted
from autofuse.wrapper.operation_text import dims_text, operation_text, value_name

if TYPE_CHECKING:
    from autofuse.codegen.in_place import Pairs

try:  # 0.4 us against 0.8 us for torch.empty_strided (torch 2.13)
    from torch._C._dynamo.guards import (  # type: ignore[attr-defined]
        _empty_strided_cpu as empty_strided_cpu,
    )
except ImportError:
    empty_strided_cpu = None

NodeCall = Callable[..., Any]
Allocate = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]


def raise_error(error: Exception, *inputs: torch.Tensor) -> Any:
    raise error


@dataclass(frozen=True)
class CallSite:
    """The site of a callable: one shape, at one place of use."""

    form: NodeForm
    symbol_values: Sequence[int]
    threads: int  # of C kernels
    allocate: Callable[..., torch.Tensor] | None = None  # replaces the allocation of outputs in tests
    failed: Callable[..., Any] = raise_error  # ``failed(error, *inputs)`` computes the result of a call that raised
    kept: dict[str, Any] = field(
        default_factory=dict
    )  # data shared by the callables for all sizes, such as packed weights


class Composed(ABC):
    """Several kernels and library calls that together run a group (`wrapper.strategy_call.LoadedStrategy`).

    No protocol: asking whether an entry follows one takes 50 us.
    """

    @abstractmethod
    def make_call(self, site: CallSite) -> NodeCall:
        """As `make_launcher`."""

    @property
    def keeps(self) -> bool:
        """Whether a callable keeps data for its place of use, such as packed weights."""
        return False


class KernelCall(NamedTuple):
    """What a fused callable does: it makes outputs and calls one C kernel."""

    form: NodeForm
    symbol_values: tuple[int, ...]
    entry: Callable[..., None]
    sizes: int  # the address of the kernel's sizes
    reuse: Pairs


KERNEL = "kernel_call"  # the attribute of a fused callable that has its `KernelCall`


# The entry that runs a node: the C kernel's entry ``(sizes, *pointers)``, Triton kernels loaded on one device, or a
# strategy.
Entry = Callable[..., None] | LoadedArtifact | Composed


def device_type(form: NodeForm) -> str:
    """The node's device type: "cpu" or "cuda"; all its tensors are there."""
    return form.spec(form.outputs[0]).device


def make_unfused(form: NodeForm, symbol_values: Sequence[int], device: torch.device | None = None) -> NodeCall:
    """The node's operations one by one through aten: eager's own kernels.

    ``device``: where operations without inputs create their results, the current one of the node's type if None.
    """
    found = tuple(registered(op.target) for op in form.operations if is_librarys(op.target))
    return _unfused_factory(form, found)(*symbol_values, device or torch.device(device_type(form)))


def make_launcher(
    form: NodeForm,
    entry: Entry,
    symbol_values: Sequence[int],
    threads: int,
    allocate: Callable[..., torch.Tensor] | None = None,
    failed: Callable[..., Any] | None = None,
    reuse: Pairs = (),
    kept: dict[str, Any] | None = None,
) -> NodeCall:
    """The fused callable.

    ``allocate(shape, strides, dtype)`` replaces the allocation of outputs in tests; ``reuse``: outputs of a C kernel
    that are written into an input that is dead afterwards. ``failed(error, *inputs)`` computes the result of a launch
    that raised; without it the error goes to the caller. ``threads`` are those of a C kernel. ``kept``: a strategy's
    data for its place of use, shared by the callables for all sizes there; its own if None. Raises ShapeError where the
    kernels of a GPU are not made for these sizes.
    """
    if isinstance(entry, LoadedArtifact):
        return make_device_launcher(form, entry, symbol_values, allocate, failed)
    if isinstance(entry, Composed):
        own = {} if kept is None else kept
        return entry.make_call(CallSite(form, symbol_values, threads, allocate, failed or raise_error, own))
    sizes = array("q", [*symbol_values, threads])
    address = sizes.buffer_info()[0]
    answer = _unless_odd(form, symbol_values, failed or raise_error)
    call = _launcher_factory(form, () if allocate else reuse)(
        *symbol_values, entry, address, allocate or empty_like_spec, answer
    )
    vars(call)["sizes"] = sizes  # keeps the array alive as long as its address is in use
    if allocate is None:
        vars(call)[KERNEL] = KernelCall(form, tuple(symbol_values), entry, address, reuse)
    return call


def make_device_launcher(
    form: NodeForm,
    loaded: LoadedArtifact,
    symbol_values: Sequence[int],
    allocate: Callable[..., torch.Tensor] | None = None,
    failed: Callable[..., Any] | None = None,
    calls: TorchCalls | None = None,
    launch: Launch | None = None,
) -> NodeCall:
    """The fused callable of a GPU's node, on the device that the artifact was loaded on, in its current stream.

    ``calls`` and ``launch`` replace torch's functions and the launcher where there is no GPU.
    """
    values = dict(zip(form.symbols, symbol_values, strict=True))
    outputs = [math.prod(form.spec(ref).shape.bind(values)) for ref in form.outputs]
    torch_side = calls or torch_calls()
    empty = allocate or torch_side.empty
    device = (loaded.device_index, torch_side.current_device, torch_side.on_device, torch_side.raw_stream)
    if not any(outputs):
        return _device_factory(form, None)(
            *symbol_values, None, 0, *device, empty, torch_side.empty, failed or raise_error
        )
    record = make_record(loaded, values, len(form.inputs) + len(form.outputs))
    factory = _device_factory(form, record.scratch)
    launcher = launch or launch_of(record)
    if record.draws:
        if isinstance(launcher, CtypesLaunch):
            raise ShapeError("expected the launcher in C for a node that draws random numbers, found none; install gcc")
        draw = draw_of(form, values, loaded.device_index)
        launcher = drawing_launch(record, launcher, draw, lambda: torch.cuda.default_generators[loaded.device_index])
    call = factory(*symbol_values, launcher, record.address, *device, empty, torch_side.empty, failed or raise_error)
    vars(call)["record"] = record  # keeps the array alive as long as its address is in use
    if record.draws:
        return _outside_recordings(call, make_unfused(form, symbol_values, torch.device("cuda", loaded.device_index)))
    return call


def _unless_odd(form: NodeForm, symbol_values: Sequence[int], failed: Callable[..., Any]) -> Callable[..., Any]:
    """The fallback of a kernel that raised: eager where it raised because of numbers that are not finite, or because
    of an index out of its bounds, for which eager raises an error of its own.

    A part of a larger program leaves the latter to that. Eager's callable is made when a kernel first requests it,
    which is rare.
    """

    @functools.cache
    def eagers() -> tuple[NodeCall, list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]]:
        return make_unfused(form, symbol_values), expected_outputs(form, symbol_values)

    def answer(error: Exception, *inputs: torch.Tensor) -> Any:
        if not isinstance(error, FloatingPointError) and (not is_out_of_bounds(error) or failed is raise_error):
            return failed(error, *inputs)
        eager, specs = eagers()
        found = repeat(eager, *inputs)
        tensors = found if isinstance(found, tuple) else (found,)
        laid = [t if t.stride() == s[1] else empty_like_spec(*s).copy_(t) for t, s in zip(tensors, specs, strict=True)]
        return laid[0] if len(laid) == 1 else tuple(laid)

    return answer


def is_out_of_bounds(error: Exception) -> bool:
    """Whether a kernel has found an index out of its bounds: eager, run on the same inputs, says which and where."""
    return isinstance(error, IndexError) and error.args == (OUT_OF_BOUNDS,)


def repeat(eager: NodeCall, *inputs: torch.Tensor) -> Any:
    """Eager's result of a call that a kernel did not finish, or the error that a script sees in eager, and no other."""
    try:
        return eager(*inputs)
    except Exception as raised:
        raised.__context__ = None
        raise


def _outside_recordings(call: NodeCall, unfused: NodeCall) -> NodeCall:
    """Run eager during CUDA graph capture: each replay needs new random numbers, which only eager's kernels provide."""

    def drawing(*inputs: torch.Tensor) -> Any:
        return unfused(*inputs) if is_capturing() else call(*inputs)

    return drawing


def _empty_strided(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype)


# An uninitialised CPU tensor of these sizes and strides.
empty_like_spec: Allocate = empty_strided_cpu or _empty_strided


def expected_outputs(
    form: NodeForm, symbol_values: Sequence[int]
) -> list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]:
    """Sizes, strides and dtype of each output."""
    values = dict(zip(form.symbols, symbol_values, strict=True))
    specs = [form.spec(ref) for ref in form.outputs]
    return [(s.shape.bind(values), s.strides.bind(values), getattr(torch, s.dtype)) for s in specs]


# ---- generated text ---------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def _unfused_factory(form: NodeForm, found: tuple[Unfused | None, ...] = ()) -> Callable[..., NodeCall]:
    """``found``: what is registered for libraries' operators; one that is defined anew is another."""
    namespace: dict[str, Any] = {"torch": torch}
    lines = [
        f"def make({', '.join([*form.symbols, 'device'])}):",
        f"    def unfused({', '.join(i.name for i in form.inputs)}):",
    ]
    leaving = {ref.name for ref in form.outputs}
    reads = [[ref.name for ref in op.inputs] for op in form.operations]
    first = [*dict.fromkeys(name for names in reads for name in names)]
    dead = deaths(reads, lambda name: name.startswith("v") and name not in leaving)
    for op, names in zip(form.operations, dead, strict=True):
        lines.append(f"        {op.name} = {operation_text(op, form, namespace)}")
        lines += deleted(sorted(names, key=first.index), "        ")
    lines.append(f"        return {', '.join(value_name(ref, form) for ref in form.outputs)}")
    lines.append("    return unfused")
    return _compile(lines, namespace, "unfused")


@functools.lru_cache(maxsize=4096)
def _launcher_factory(form: NodeForm, reuse: Pairs = ()) -> Callable[..., NodeCall]:
    source_of = dict(reuse)
    namespace: dict[str, Any] = {"torch": torch}
    names = [i.name for i in form.inputs]
    outputs = [f"o{i}" for i in range(len(form.outputs))]
    lines = [f"def make({', '.join([*form.symbols, 'kernel', 'sizes', 'empty', 'failed'])}):"]
    lines += _output_constants(form)
    lines.append(f"    def fused({', '.join(names)}):")
    lines.append("        try:")  # costs nothing while nothing is raised
    for number, out in enumerate(outputs):
        fresh = f"empty({out}_shape, {out}_strides, {out}_dtype)"
        lines.append(f"            {out} = {names[source_of[number]] if number in source_of else fresh}")
    pointers = [f"{name}.data_ptr()" for name in [*names, *outputs]]
    lines.append(f"            kernel({', '.join(['sizes', *pointers])})")
    lines.append(f"            return {', '.join(outputs)}")
    lines.append("        except Exception as error:")
    lines.append(f"            return failed({', '.join(['error', *names])})")
    lines.append("    return fused")
    return _compile(lines, namespace, "fused")


_DEVICE = ("launch", "record", "index", "current", "on_device", "stream", "empty", "empty_scratch", "failed")


@functools.lru_cache(maxsize=4096)
def _device_factory(form: NodeForm, scratch: tuple[tuple[str, int], ...] | None) -> Callable[..., NodeCall]:
    """``scratch``: dtype and elements of each scratch tensor; None where there is nothing to launch."""
    namespace: dict[str, Any] = {"torch": torch}
    names = [i.name for i in form.inputs]
    outputs = [f"o{i}" for i in range(len(form.outputs))]
    lines = [f"def make({', '.join([*form.symbols, *_DEVICE])}):", *_output_constants(form)]
    lines.append(f"    def fused({', '.join(names)}):")
    lines.append("        if current() != index:")
    lines.append(f"            with on_device(index): return fused({', '.join(names)})")
    lines.append("        try:")
    lines += [f"            {out} = empty({out}_shape, {out}_strides, {out}_dtype)" for out in outputs]
    if scratch is not None:
        memory = [f"w{i}" for i in range(len(scratch))]
        # Freed when the call returns; the allocator reuses it in stream order.
        for name, (dtype, elements) in zip(memory, scratch, strict=True):
            lines.append(f"            {name} = empty_scratch(({elements},), (1,), torch.{dtype})")
        pointers = [f"{name}.data_ptr()" for name in [*names, *outputs, *memory]]
        lines.append(f"            launch({', '.join(['record', 'stream(index)', *pointers])})")
    lines.append(f"            return {', '.join(outputs)}")
    lines.append("        except Exception as error:")
    lines.append(f"            return failed({', '.join(['error', *names])})")
    lines.append("    return fused")
    return _compile(lines, namespace, "fused")


def _output_constants(form: NodeForm) -> list[str]:
    lines = []
    for number, ref in enumerate(form.outputs):
        spec = form.spec(ref)
        lines.append(f"    o{number}_shape = {dims_text(spec.shape.dims)}")
        lines.append(f"    o{number}_strides = {dims_text(spec.strides.dims)}")
        lines.append(f"    o{number}_dtype = torch.{spec.dtype}")
    return lines


def _compile(lines: list[str], namespace: dict[str, Any], what: str) -> Callable[..., NodeCall]:
    define("\n".join(lines), f"{what} node", namespace)
    make: Callable[..., NodeCall] = namespace["make"]
    return make


def node_symbol_values(symbols: Sequence[Any], values: Mapping[str, int]) -> tuple[int, ...]:
    """Values of a node's symbols from those of its graph."""
    try:
        return tuple(evaluate(s, values) for s in symbols)
    except KeyError as missing:
        raise ShapeError(f"expected a value for {missing}, found {dict(values)}") from None
