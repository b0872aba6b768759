"""A GPU's driver that executes PTX: what the package's own launcher calls, with the tensors' memory as it is.

In: a `Heap` and the driver of the tests, which is a library in C under CUDA's name. Out: that library, which loads PTX
as images and executes each launch at once, and what has happened. Guarantee: a launch reads its parameters from where
the launcher has put them; one that faults, is not known, or fails its own assertion is refused with the error code that
CUDA has for it, and noted. An order of launches on several streams, and work that is still under way, are not seen.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from ptx.device import Heap
from ptx.machine import Launch, places_of, run
from ptx.memory import Fault
from ptx.text import Program, Unsupported, parse
from tests.gpu.fake_driver import FakeDriver

ILLEGAL_ADDRESS, ASSERTED, INVALID_IMAGE, NOT_SUPPORTED = 700, 710, 200, 801
SONAME = "libcuda.so.1"


@dataclass
class Executed:
    """What was launched."""

    modules: dict[int, tuple[Program, dict[str, int]]] = field(default_factory=dict)  # with places of named memory
    names: dict[int, str] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    launches: Counter[int] = field(default_factory=Counter)  # by module
    problems: list[str] = field(default_factory=list)


class ExecutingDriver:
    """The driver of this process's one GPU."""

    def __init__(self, heap: Heap) -> None:
        self._heap = heap
        self._kept: list[object] = []  # memory of modules
        self.seen = Executed()
        self.library = FakeDriver("cuda", SONAME)
        self.library.execute_by(self._load, self._launch)

    def _load(self, module: int, image: bytes) -> int:
        text = image.decode()
        try:
            program = parse(text)
        except Unsupported as error:
            self.seen.problems.append(f"not loaded: {error}")
            return INVALID_IMAGE
        named = {}
        for name, data, size in places_of(program):
            memory = self._heap.take(size)
            self._kept.append(memory)
            named[name] = memory.ctypes.data
            self._heap.write(named[name], data)
        self.seen.modules[module] = program, named
        self.seen.texts[module] = text
        self.seen.names[module] = text.partition(".entry ")[2].partition("(")[0].strip()
        return 0

    def _launch(self, module: int, blocks: int, threads: int, shared: int, parameters: int) -> int:
        program, named = self.seen.modules[module]
        places = (ctypes.c_void_p * len(program.parameters)).from_address(parameters)
        kinds = [{4: ctypes.c_uint32, 8: ctypes.c_uint64}[p.size] for p in program.parameters]
        given = tuple(kind.from_address(place or 0).value for kind, place in zip(kinds, places, strict=True))
        self.seen.launches[module] += 1
        self._heap.conflicts.races.clear()
        try:
            run(program, Launch(blocks, threads, shared, given), self._heap, self._heap.conflicts, named)
        except Unsupported as error:
            return self._refuse(module, NOT_SUPPORTED, str(error))
        except AssertionError as error:
            return self._refuse(module, ASSERTED, str(error))
        except Fault as error:
            return self._refuse(module, ILLEGAL_ADDRESS, str(error))
        for text in set(self._heap.conflicts.races):
            self._refuse(module, 0, text)
        return 0

    def change(self, change: Callable[[str], str]) -> int:
        """Put other code in the place of what is loaded; how many kernels differ. To see that a wrong one is found."""
        count = 0
        for module, text in self.seen.texts.items():
            changed = change(text)
            count += changed != text
            self.seen.modules[module] = parse(changed), self.seen.modules[module][1]
        return count

    def _refuse(self, module: int, code: int, why: str) -> int:
        self.seen.problems.append(f"{self.seen.names[module]}: {why}")
        return code
