"""CUDA graphs without a GPU: a player that notes what is launched on which addresses, and launches it there again.

CPU tensors take the place of a GPU's. While something is recorded nothing is calculated: results lie in the player's
own memory, which is full of NaN. A replay reads the addresses that were noted, whatever lies there by then. Memory of
a recording is used again once its tensors are gone, also by other recordings of the same pool, and is spoilt before
each replay. So a stale input, an address that nobody checked or a result that was not copied out is a wrong result.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only

from autofuse.gpu.graphs import GraphCalls
from autofuse.gpu.launcher import CtypesLaunch
from autofuse.gpu.torch_calls import TorchCalls
from autofuse.wrapper.node_call import empty_like_spec, expected_outputs, make_unfused
from tests.gpu.fake_driver import FakeDriver

ALIGNED = 64  # bytes, as torch's own memory on a CPU


class Place:
    """Where a tensor lies: all that a launch knows of it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.address, self.dtype = tensor.data_ptr(), tensor.dtype
        self.shape, self.strides = tuple(tensor.shape), tensor.stride()

    def look(self) -> torch.Tensor:
        return tensor_at(self.address, self.shape, self.strides, self.dtype)


def tensor_at(address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The memory at an address as a tensor, which does not own it."""
    if 0 in shape:
        return torch.empty_strided(shape, strides, dtype=dtype)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    memory = (ctypes.c_char * (extent * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype, count=extent).as_strided(shape, strides)


class Memory:
    """A pool: blocks that are used again once the storage in them is gone."""

    def __init__(self) -> None:
        self._blocks: list[tuple[torch.Tensor, StorageWeakRef]] = []
        self.graphs: weakref.WeakSet[Played] = weakref.WeakSet()
        self.was_used = False

    @property
    def bytes(self) -> int:
        return sum(block.numel() for block, _ in self._blocks)

    def empty(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if 0 in shape:
            return torch.empty_strided(shape, strides, dtype=dtype)
        extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        needed = extent * dtype.itemsize
        free = (
            number
            for number, (block, used) in enumerate(self._blocks)
            if block.numel() >= needed + ALIGNED and used.expired()
        )
        number = next(free, len(self._blocks))
        is_new = number == len(self._blocks)
        block = torch.empty(needed + ALIGNED, dtype=torch.uint8) if is_new else self._blocks[number][0]
        tensor = tensor_at(-(-block.data_ptr() // ALIGNED) * ALIGNED, shape, strides, dtype)
        self._blocks[number : number + 1] = [(block, StorageWeakRef(tensor.untyped_storage()))]
        return tensor

    def spoil(self) -> None:
        for block, _ in self._blocks:
            block.fill_(0xFF)


class Played:
    """A recording."""

    def __init__(self, player: Player, memory: Memory, work: list[Callable[[], None]]) -> None:
        self.player, self.memory, self.work = player, memory, work

    def replay(self) -> None:
        assert not self.player.is_capturing(), "replayed inside of a recording"
        self.player.replays += 1
        self.memory.spoil()
        for item in self.work:
            item()


class Mark:
    def __init__(self, player: Player) -> None:
        self.player = player

    def query(self) -> bool:
        return self.player.has_finished


class Player:
    """Stands in for `GraphCalls`, `TorchCalls` and what the fake driver does not do: to calculate."""

    def __init__(self, driver: FakeDriver) -> None:
        self.driver = driver
        self._launching = threading.Lock()
        self.capturing: bool | int = False  # or the thread of a recording of ours
        self.left_alone, self.may_wait, self.has_finished = True, True, False
        self.device, self.current_stream, self.numerics = 0, 0x5000, "as usual"
        self.replays = self.recordings = self.launches = 0
        self.fails: dict[str, BaseException] = {}  # by moment: "begin", "body", "end", "replay"
        self.pools: list[Memory] = []
        self.memory: Memory | None = None  # of the recording under way
        self.work: list[Callable[[], None]] = []
        self.during: Callable[[], None] = lambda: None  # called in the middle of a recording

    def calls(self) -> GraphCalls:
        return GraphCalls(
            is_capturing=self.is_capturing,
            is_left_alone=lambda: self.left_alone and not torch.is_anomaly_enabled(),
            may_wait=lambda: self.may_wait,
            device=lambda: self.device,
            stream=lambda index: self.current_stream + index,
            index_of=lambda tensor: 0,
            numerics=lambda: self.numerics,
            empty=self.empty,
            reserved=lambda index: sum(pool.bytes for pool in self.pools),
            new_pool=self.new_pool,
            record=self.record,
            mark=lambda index: Mark(self),
        )

    def is_capturing(self) -> bool:
        """On the stream of the calling thread."""
        return self.capturing is True or self.capturing == threading.get_ident()

    def new_pool(self) -> Memory:
        self.pools.append(Memory())
        return self.pools[-1]

    def empty(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        with _disable_current_modes():  # else making memory would be work of the recording
            is_recorded = self.memory is not None and self.is_capturing()
            memory = self.memory.empty if is_recorded else empty_like_spec
            found = memory(shape, strides, dtype)
            spoil(found)
        return found

    def fail(self, moment: str) -> None:
        if moment in self.fails:
            raise self.fails[moment]

    def record(self, index: int, pool: Memory, body: Callable[[], Any]) -> tuple[Played, Any]:
        assert not self.capturing and self.left_alone and index == self.device
        assert not pool.was_used or len(pool.graphs), "torch has given this memory up"
        pool.was_used = True
        self.fail("begin")
        self.recordings += 1
        self.capturing, self.memory, self.work = threading.get_ident(), pool, []
        try:
            with _Noting(self):
                self.fail("body")
                result = body()
                self.during()
        finally:
            self.capturing, self.memory = False, None
        self.fail("end")
        pool.spoil()
        graph = Played(self, pool, self.work)
        pool.graphs.add(graph)
        return graph, result

    # ---- kernels -----------------------------------------------------------------------------------------

    def torch_calls(self) -> TorchCalls:
        class Here:
            def __init__(self, index: int) -> None:
                pass

            def __enter__(self) -> None:
                pass

            def __exit__(self, *error: object) -> None:
                pass

        return TorchCalls(lambda: self.device, lambda index: self.current_stream + index, Here, self.empty)

    def launcher(self, form, values):
        """Makes the launch of a node's record: the driver notes it, and its pointers are those that the driver saw."""
        unfused = make_unfused(form, values, torch.device("cpu"))
        symbols = dict(zip(form.symbols, values, strict=True))
        inputs = [
            (i.spec.shape.bind(symbols), i.spec.strides.bind(symbols), getattr(torch, i.spec.dtype))
            for i in form.inputs
        ]
        layouts = [*inputs, *expected_outputs(form, values)]

        def make(record):
            launch = CtypesLaunch(record)

            def play(pointers):
                tensors = [tensor_at(p, *layout) for p, layout in zip(pointers, layouts, strict=True)]
                found = unfused(*tensors[: len(inputs)])
                found = found if isinstance(found, tuple) else (found,)
                for out, value in zip(tensors[len(inputs) :], found, strict=True):
                    out.copy_(value)

            def run(address: int, stream: int, *pointers: int) -> None:
                with self._launching:  # else another thread's launch may be the one that is seen
                    self.driver.forget()
                    launch(address, stream, *pointers)
                    (seen,) = self.driver.launches
                assert seen.stream == self.current_stream
                given = seen.params[: len(layouts)]
                self.launches += 1
                if self.is_capturing() and self.memory is not None:
                    self.work.append(lambda: play(given))
                else:
                    play(given)

            return run

        return make


def spoil(tensor: torch.Tensor) -> None:
    if tensor.numel() and tensor.is_floating_point():
        tensor.untyped_storage().fill_(0xFF)  # NaN


class _Noting(TorchDispatchMode):
    """Notes aten's work; results are memory of the recording that nothing has been written to."""

    def __init__(self, player: Player) -> None:
        super().__init__()
        self.player = player

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        memory = self.player.memory
        if memory is None or func.is_view or func._schema.name in ("aten::_unsafe_view", "aten::detach"):
            return func(*args, **kwargs)
        assert not func._schema.is_mutable, f"{func} in a recording"
        places = tree_map_only(torch.Tensor, Place, (args, kwargs))
        results: list[Place] = []

        def put(value: torch.Tensor) -> torch.Tensor:
            found = memory.empty(tuple(value.shape), value.stride(), value.dtype)
            spoil(found)
            results.append(Place(found))
            return found

        answer = tree_map_only(torch.Tensor, put, func(*args, **kwargs))

        def work() -> None:
            own_args, own_kwargs = tree_map_only(Place, Place.look, places)
            made: list[torch.Tensor] = []
            tree_map_only(torch.Tensor, made.append, func(*own_args, **own_kwargs))
            for place, value in zip(results, made, strict=True):
                place.look().copy_(value)

        self.player.work.append(work)
        return answer
