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
from autofuse.codegen.triton.body import Body
from autofuse.codegen.triton.horizontal import NestsBody
from autofuse.codegen.triton.scalar import HELPERS
from autofuse.codegen.triton.source import TritonSource
from autofuse.ir.records import Config


def print_triton(kernel: LoopKernel, config: Config, constants: Mapping[str, int] | None = None) -> TritonSource:
    """The Triton module of a kernel. Raises LoweringError where a size or an operation has no exact form."""
    known = dict(constants or {})
    body = (NestsBody if kernel.rest else Body)(kernel, config, known)
    second = body.second()
    pieces = [body.first(), *([second] if second is not None else [])]
    text = "\n\n".join(piece.text for piece in pieces)
    helpers = [definition for name, definition in HELPERS if name in text]
    knobs = dict(config)
    return TritonSource(
        name=kernel.name,
        text="\n\n".join([header(kernel, known), *helpers, text]),
        passes=tuple(piece.launch for piece in pieces),
        scratch=body.scratch(),
        symbols=tuple(s for s in kernel.symbols if s not in known),
        num_warps=int(knobs.get("num_warps", 4)),
        num_stages=int(knobs.get("num_stages", 1)),
        programs=body.programs,
        limits=body.limits(),
    )


def header(kernel: LoopKernel, constants: Mapping[str, int]) -> str:
    """What stands above the kernels: a summary for people, and what the text imports."""
    lines = kernel.summary()
    if constants:
        lines += ["  fixed:   " + " ".join(f"{k}={v}" for k, v in constants.items())]
    text = "\n".join(lines).replace("\\", "/").replace('"""', "'''")
    return f'"""{text}\n"""\n\nimport triton\nimport triton.language as tl\nfrom triton.language.extra import libdevice'
