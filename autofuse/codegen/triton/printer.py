"""Printing Triton: a loop kernel and a configuration become one Python module of Triton kernels.

In: a `LoopKernel`, a configuration (see `knobs`), and constants for some or all symbols (the specialised form; none is
the generic one). Out: `TritonSource`: the text, and how its kernels are launched.
The text is what a person would write: blocks as ``tl.constexpr`` parameters, one statement a value, the user's lines on
top. ``libdevice`` is the target's own; the interpreter puts another in its place.
Guarantee: any strides, broadcasts and sizes; 64-bit positions where 32 bits do not reach; results repeat bit by bit.
"""

from __future__ import annotations

from collections.abc import Mapping

from autofuse.codegen.loops import LoopKernel
from autofuse.codegen.one_pass import merge_passes
from autofuse.codegen.triton.horizontal import NestsProgram
from autofuse.codegen.triton.looped_columns import LoopedColumns
from autofuse.codegen.triton.one_tile import OneTile
from autofuse.codegen.triton.program import Program, Spread
from autofuse.codegen.triton.scalar import HELPERS
from autofuse.codegen.triton.shared_tiles import SharedRows, SharedTiles
from autofuse.codegen.triton.source import TritonSource
from autofuse.errors import LoweringError
from autofuse.ir.records import Config


def print_triton(kernel: LoopKernel, config: Config, constants: Mapping[str, int] | None = None) -> TritonSource:
    """The Triton module of a kernel. Raises LoweringError where a size or an operation has no exact form."""
    if kernel.stages:
        raise LoweringError("device_bounds", f"expected loops that a GPU can run, found the stages of {kernel.name}")
    known = dict(constants or {})
    return source_of(kernel, program_of(kernel, config, known), config, known)


def source_of(kernel: LoopKernel, program: Program, config: Config, constants: Mapping[str, int]) -> TritonSource:
    """A program's kernels as a module. ``kernel`` has the name, the tensors and the symbols of the node."""
    second = program.second()
    pieces = [program.first(), *([second] if second is not None else [])]
    text = "\n\n".join(piece.text for piece in pieces)
    helpers = [definition for name, definition in HELPERS if name in text]
    knobs = dict(config)
    return TritonSource(
        name=kernel.name,
        text="\n\n".join([_header(kernel, constants), *helpers, text]),
        passes=tuple(piece.launch for piece in pieces),
        scratch=program.scratch(),
        symbols=tuple(s for s in kernel.symbols if s not in constants),
        num_warps=int(knobs.get("num_warps", 4)),
        num_stages=int(knobs.get("num_stages", 1)),
        programs=program.programs,
        limits=program.limits(),
    )


def program_of(kernel: LoopKernel, config: Config, constants: Mapping[str, int]) -> Program:
    """The program in the shape that the kernel and the configuration ask for."""
    if kernel.rest:
        return NestsProgram(kernel, config, constants)
    spread = Spread.of(kernel, config)
    if spread.is_looped and dict(config).get("passes") == "one":
        kernel = merge_passes(kernel)
    if spread.sinks:
        return (SharedRows if spread.is_looped else SharedTiles)(kernel, config, constants)
    return (LoopedColumns if spread.is_looped else OneTile)(kernel, config, constants)


def _header(kernel: LoopKernel, constants: Mapping[str, int]) -> str:
    """What stands above the kernels: a summary for people, and what the text imports."""
    lines = kernel.summary()
    if constants:
        lines += ["  fixed:   " + " ".join(f"{k}={v}" for k, v in constants.items())]
    text = "\n".join(lines).replace("\\", "/").replace('"""', "'''")
    return f'"""{text}\n"""\n\nimport triton\nimport triton.language as tl\nfrom triton.language.extra import libdevice'
