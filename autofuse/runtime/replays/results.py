"""The results of a recorded graph: each replay's are copied out of the recording's memory, which the next overwrites.

In: what the recording returned, in memory of ours, and the arguments that it was given. Out: for each replay new
tensors, which belong to the caller alone. An argument that is returned is the call's own; a view of an argument is a
view of the call's. Results that share memory share it again.

Guarantee: nothing that is handed out lies in memory of a recording. So results may be kept, written to, saved for a
backward pass that comes after further calls, and used on other streams, as those of launches one by one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from autofuse.gpu.torch_calls import Empty
from autofuse.runtime.replays.inputs import CopyLists, Layout, Unfit, is_dense, layout_of
from autofuse.wrapper.below_autograd import NAMES

Below = Callable[[], contextlib.AbstractContextManager[None]]
# Without counting writes: the results are new, and have version 0 as eager's.
below: Below = NAMES["af_below"] or contextlib.nullcontext
Give = Callable[[Sequence[Any], Sequence[Any], Sequence[Any]], Any]  # of arguments, new memory, results so far


class _Copy(NamedTuple):
    """Memory that is copied out."""

    source: torch.Tensor
    layout: Layout  # of the new memory


class Results:
    """Those of one recording."""

    def __init__(self, found: Any, given: Sequence[Any], empty: Empty) -> None:
        """Raises Unfit where results cannot be copied."""
        self._kind = type(found)
        self._empty = empty
        self._gives: list[Give] = []
        arguments = {id(arg): place for place, arg in enumerate(given) if isinstance(arg, torch.Tensor)}
        storages = {_memory(arg): place for place, arg in enumerate(given) if isinstance(arg, torch.Tensor)}
        shared: dict[int, list[torch.Tensor]] = {}
        for result in found:
            if isinstance(result, torch.Tensor) and id(result) not in arguments:
                its = shared.setdefault(_memory(result), [])
                its += [] if any(result is other for other in its) else [result]
        copies: dict[int, tuple[_Copy, bool]] = {}  # by memory; whether the results are parts of it
        for memory, tensors in shared.items():
            if memory not in storages and memory:
                copies[memory] = _copy_of(tensors)
        order = sorted(copies, key=lambda memory: _kind_of(copies[memory][0]))
        places = {memory: number for number, memory in enumerate(order)}
        self._copies = CopyLists([copies[memory][0].source for memory in order])
        self._layouts = [_sizes(copies[memory][0].layout) for memory in order]
        done: dict[int, int] = {}
        for place, result in enumerate(found):
            if not isinstance(result, torch.Tensor):
                self._gives.append(_number(result))
            elif id(result) in arguments:
                self._gives.append(_argument(arguments[id(result)]))
            elif id(result) in done:
                self._gives.append(_repeated(done[id(result)]))
            elif not (memory := _memory(result)):
                self._gives.append(_nothing(layout_of(result), empty))
            elif memory in storages:
                self._gives.append(_view(result, storages[memory], given[storages[memory]]))
            else:
                is_part = copies[memory][1]
                self._gives.append(
                    _part(result, places[memory], len(shared[memory]) > 1) if is_part else _whole(places[memory])
                )
            done.setdefault(id(result), place)

    def hand_out(self, args: Sequence[Any]) -> Any:
        """After a replay."""
        with below():
            fresh = [self._empty(*layout) for layout in self._layouts]
            self._copies.copy_to(fresh)
        done: list[Any] = []
        for give in self._gives:
            done.append(give(args, fresh, done))
        return self._kind(done)


def _memory(tensor: torch.Tensor) -> int:
    """Tells one memory from another; 0 where there is none."""
    storage = tensor.untyped_storage()
    return storage.data_ptr() if storage.nbytes() and tensor.numel() else 0


def _kind_of(copy: _Copy) -> tuple[str, bool]:
    return str(copy.layout.dtype), not is_dense(copy.layout)


def _copy_of(tensors: Sequence[torch.Tensor]) -> tuple[_Copy, bool]:
    """What is copied for results that lie in one memory: the only one, or all of the memory."""
    first = tensors[0]
    layout, room = layout_of(first), first.untyped_storage().nbytes()
    is_alone = len(tensors) == 1 and not first.storage_offset()
    if is_alone and is_dense(layout) and room == first.numel() * first.dtype.itemsize:
        return _Copy(first, layout), False
    if any(t.dtype is not first.dtype for t in tensors):
        raise Unfit("returns one memory as several dtypes")
    elements = room // first.dtype.itemsize
    source = first.detach().as_strided((elements,), (1,), 0)
    return _Copy(source, layout_of(source)), True


def _number(value: Any) -> Give:
    return lambda args, fresh, done: value


def _argument(place: int) -> Give:
    return lambda args, fresh, done: args[place]


def _repeated(place: int) -> Give:
    return lambda args, fresh, done: done[place]


def _whole(number: int) -> Give:
    return lambda args, fresh, done: fresh[number]


def _sizes(layout: Layout) -> Layout:
    """What allocates knows tuples only."""
    return layout._replace(shape=tuple(layout.shape))


def _nothing(layout: Layout, empty: Empty) -> Give:
    layout = _sizes(layout)
    return lambda args, fresh, done: empty(*layout)


def _part(result: torch.Tensor, number: int, is_shared: bool) -> Give:
    shape, strides, offset = result.shape, result.stride(), result.storage_offset()

    def give(args: Sequence[Any], fresh: Sequence[Any], done: Sequence[Any]) -> Any:
        if is_shared:  # a write to one is counted for all
            return fresh[number].as_strided(shape, strides, offset)
        with below():
            return fresh[number].as_strided(shape, strides, offset)

    return give


def _view(result: torch.Tensor, place: int, argument: torch.Tensor) -> Give:
    if result.dtype is not argument.dtype:
        raise Unfit("returns an argument as another dtype")
    shape, strides = result.shape, result.stride()
    shift = result.storage_offset() - argument.storage_offset()

    def give(args: Sequence[Any], fresh: Sequence[Any], done: Sequence[Any]) -> Any:
        own = args[place]
        return own.as_strided(shape, strides, own.storage_offset() + shift)

    return give
