"""The inputs of a recorded graph: which of them are read where they are, and which are copied in before each replay.

In: the arguments of calls. Out: the arguments of the recording, and before each replay whether a call fits it. An input
stays where it is if the same tensor came with each call: a parameter, or a buffer. Only its address is kept, and is
compared at each call: at another address it is copied from then on. Everything else is copied into memory of ours.

Guarantee: a copy has the sizes and strides of its input, and its address the same remainder, by which libraries and
kernels choose how they read. A call that differs in any of these, or in a number, does not fit.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from autofuse.errors import AutofuseError
from autofuse.gpu.torch_calls import Empty

ALIGNMENT = 256  # bytes; no library looks at more of an address


class Unfit(AutofuseError):
    """Arguments or results of which no recording can be made; the text ends "the graph ..."."""


class SeenInputs:
    """The inputs of the calls before a recording."""

    def __init__(self) -> None:
        self.moving: set[int] = set()  # places at which other tensors came, or other memory
        self._before: list[tuple[weakref.ref[torch.Tensor], int] | None] | None = None

    def note(self, args: Sequence[Any]) -> None:
        found = [(weakref.ref(arg), arg.data_ptr()) if isinstance(arg, torch.Tensor) else None for arg in args]
        for place, (now, before) in enumerate(zip(found, self._before or found, strict=True)):
            if now is not None and (before is None or before[0]() is not now[0]() or before[1] != now[1]):
                self.moving.add(place)
        self._before = found


class Layout(NamedTuple):
    """How a tensor lies in memory."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class _Copied(NamedTuple):
    place: int
    layout: Layout
    remainder: int  # of the address


class _Fixed(NamedTuple):
    place: int
    address: int
    layout: Layout


class Inputs:
    """Those of one recording."""

    def __init__(self, args: Sequence[Any], moving: set[int], empty: Empty, index_of: Callable[[Any], int]) -> None:
        """Raises Unfit where one cannot be copied."""
        self.given: list[Any] = list(args)  # to the recording; only until `forget`
        self.bytes = 0
        self.indices = {index_of(arg) for arg in args if isinstance(arg, torch.Tensor)}
        self._numbers = [(place, arg) for place, arg in enumerate(args) if not isinstance(arg, torch.Tensor)]
        self._fixed: list[_Fixed] = []
        copied: list[tuple[_Copied, torch.Tensor]] = []
        for place, arg in enumerate(args):
            if not isinstance(arg, torch.Tensor):
                continue
            layout = layout_of(arg)
            if type(arg) not in (torch.Tensor, torch.nn.Parameter):
                raise Unfit(f"takes a {type(arg).__name__}")
            if place not in moving:
                self._fixed.append(_Fixed(place, arg.data_ptr(), layout))
                continue
            remainder = arg.data_ptr() % ALIGNMENT if arg.numel() else 0
            copy = _same_layout(layout, remainder, empty)
            self.bytes += copy.untyped_storage().nbytes()
            copied.append((_Copied(place, layout, remainder), copy))
            self.given[place] = copy
        # The sizes of parameters are constants of a trace, and under its guards.
        self._parameters = [f.place for f in self._fixed if type(args[f.place]) is torch.nn.Parameter]
        self._unsized = [f for f in self._fixed if f.place not in self._parameters]
        copied.sort(key=lambda item: (str(item[1].dtype), not is_dense(item[0].layout)))  # one call for those alike
        self._copied = [item for item, _ in copied]
        self._copies = CopyLists([copy for _, copy in copied])

    def forget(self) -> None:
        """Let go of the arguments that were recorded."""
        self.given = []

    def moved(self, args: Sequence[Any]) -> set[int] | None:
        """None for a call that fits; else places of tensors at other addresses, none where something else differs."""
        found = {place for place, address, _ in self._fixed if args[place].data_ptr() != address}
        if found:
            return found
        for place in self._parameters:
            if type(args[place]) is not torch.nn.Parameter:
                return set()
        for fixed in self._unsized:
            if layout_of(args[fixed.place]) != fixed.layout:
                return set()
        for place, number in self._numbers:
            if args[place] != number:
                return set()
        for place, layout, remainder in self._copied:
            arg = args[place]
            if layout_of(arg) != layout or (arg.numel() and arg.data_ptr() % ALIGNMENT != remainder):
                return set()
        return None

    def copy_in(self, args: Sequence[Any]) -> None:
        self._copies.fill([args[item.place] for item in self._copied])


class CopyLists:
    """Tensors of ours that are filled from, or copied to, others of the same layouts: one launch for each dtype."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = list(tensors)
        self._parts: list[slice] = []
        kinds = [(t.dtype, is_dense(layout_of(t))) for t in tensors]
        begin = 0
        for place in range(1, len(kinds) + 1):
            if place == len(kinds) or kinds[place] != kinds[begin]:
                self._parts.append(slice(begin, place))
                begin = place

    def fill(self, sources: Sequence[torch.Tensor]) -> None:
        for part in self._parts:
            torch._foreach_copy_(self._tensors[part], sources[part])

    def copy_to(self, targets: Sequence[torch.Tensor]) -> None:
        for part in self._parts:
            torch._foreach_copy_(targets[part], self._tensors[part])


def layout_of(tensor: torch.Tensor) -> Layout:
    return Layout(tensor.shape, tensor.stride(), tensor.dtype)


def is_dense(layout: Layout) -> bool:
    """Whether its elements are all of a piece of memory, each once, in any order of dims."""
    expected = 1
    for stride, size in _by_stride(layout):
        if stride != expected:
            return False
        expected *= size
    return True


def _by_stride(layout: Layout) -> list[tuple[int, int]]:
    return sorted((stride, size) for size, stride in zip(layout.shape, layout.strides, strict=True) if size != 1)


def _same_layout(layout: Layout, remainder: int, empty: Empty) -> torch.Tensor:
    """Memory for a tensor of this layout, at an address with this remainder."""
    extent = 1
    if 0 in layout.shape:
        return empty(tuple(layout.shape), layout.strides, layout.dtype)
    for stride, size in _by_stride(layout):
        if stride < extent:
            raise Unfit("takes a tensor that overlaps itself")
        extent += (size - 1) * stride
    itemsize = layout.dtype.itemsize
    room = empty((extent + ALIGNMENT // itemsize,), (1,), layout.dtype)
    shift, rest = divmod((remainder - room.data_ptr()) % ALIGNMENT, itemsize)
    if rest:
        raise Unfit("takes a tensor at an odd address")
    return room.as_strided(layout.shape, layout.strides, shift)
