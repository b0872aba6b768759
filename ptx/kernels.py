"""A Triton source as a function of CPU tensors: compiled for a GPU, its PTX executed here.

In: a `TritonSource` and an architecture. Out: ``entry(symbol values, tensors)``, as the interpreter has it. Guarantee:
a call takes the binary that the launcher would take for these pointers and sizes; results, faults and conflicts are
those of the compiled code, up to the assembler's own work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from autofuse.codegen.call import torch_dtype
from autofuse.codegen.philox import RandomState
from autofuse.codegen.triton.compile import compiled_kernels
from autofuse.codegen.triton.source import NOTHING_ASSUMED, Assumptions, TritonSource, natural_assumptions, resolve
from ptx.machine import Launch, places_of, run
from ptx.memory import Conflicts, Global
from ptx.text import Program, parse

ARCHITECTURE = "cuda:80"  # products of matrices are plain mma there
MOST_LANES = 1 << 16


@dataclass
class PtxKernel:
    """The compiled passes of a source, by what they assume."""

    source: TritonSource
    programs: dict[tuple[int, Assumptions], tuple[Program, int, int]] = field(default_factory=dict)  # threads, shared
    conflicts: Conflicts = field(default_factory=Conflicts)
    opcodes: set[str] = field(default_factory=set)
    execute: Callable[[Program, Launch, Global, Conflicts, dict[str, int]], None] = run

    @classmethod
    def compile(cls, source: TritonSource, sizes: Iterable[Mapping[str, int]], target: str = ARCHITECTURE) -> PtxKernel:
        """For fresh tensors of all these sizes, and for tensors of which nothing is known. Raises CompilerError."""
        assumptions = {NOTHING_ASSUMED, *(natural_assumptions(source.symbols, values) for values in sizes)}
        made = cls(source)
        for found in compiled_kernels(source, target, sorted(assumptions, key=str)):
            program, resources = parse(found.kernel.asm["ptx"]), found.resources
            made.programs[found.number, found.assumptions] = program, resources.threads, resources.shared_bytes
            made.opcodes |= {".".join(item.opcode) for item in program.code}
        return made

    def __call__(
        self,
        values: Mapping[str, int],
        tensors: Sequence[torch.Tensor],
        state: RandomState | None = None,
        shift: int = 0,
    ) -> None:
        """Run a call on CPU tensors. ``shift``: elements by which each tensor's memory lies beside an aligned place."""
        call = resolve(self.source, values, state)
        memory = Global(self.conflicts)
        spans = [_span(t) for t in tensors]
        places = [memory.reserve(len(s), shift * t.element_size()) for s, t in zip(spans, tensors, strict=True)]
        scratch = [memory.reserve(n * torch_dtype(dtype).itemsize) for dtype, n in call.scratch]
        is_aligned = all(place % 16 == 0 for place in places)
        chosen = [self._program(launch.number, is_aligned, values) for launch in call.launches]
        named = [{name: memory.reserve(size) for name, _, size in places_of(program)} for program, _, _ in chosen]
        memory.allocate()
        for place, span in zip(places, spans, strict=True):
            memory.write(place, span.tobytes())
        for launch, (program, threads, shared), own in zip(call.launches, chosen, named, strict=True):
            for name, data, _ in places_of(program):
                memory.write(own[name], data)
            scalars, arguments = iter(launch.scalars), []
            for a in self.source.passes[launch.number].arguments:
                pointers = {"param": places, "scratch": scratch}.get(a.kind)
                arguments.append(next(scalars) if pointers is None else pointers[a.index])
            arguments += [0] * (len(program.parameters) - len(arguments))  # Triton's own memory: none
            if launch.grid * threads > MOST_LANES:
                raise MemoryError(f"expected at most {MOST_LANES} threads, found {launch.grid * threads}")
            self.execute(program, Launch(launch.grid, threads, shared, tuple(arguments)), memory, self.conflicts, own)
        for place, tensor, span in zip(places, tensors, spans, strict=True):
            _set_span(tensor, memory.read(place, len(span)))

    def _program(self, number: int, is_aligned: bool, values: Mapping[str, int]) -> tuple[Program, int, int]:
        known = [assumed for n, assumed in self.programs if n == number and assumed.hold(is_aligned, values)]
        best = max(known, key=lambda assumed: (assumed.is_aligned, len(assumed.divisible)))
        return self.programs[number, best]


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0
    return tensor.as_strided((extent,), (1,))


def _span(tensor: torch.Tensor) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """The bytes that a tensor spans."""
    flat = _flat(tensor.detach())
    return flat.view(torch.uint8).numpy().copy() if len(flat) else np.zeros(0, np.uint8)


def _set_span(tensor: torch.Tensor, data: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
    flat = _flat(tensor.detach())
    if len(flat):
        flat.view(torch.uint8).copy_(torch.from_numpy(data))
