"""Triton modules written by hand, for tests of what comes after the printer."""

from __future__ import annotations

import sympy

from autofuse.codegen.triton.source import Argument, Pass, TritonSource
from autofuse.ir.shape import Dim

_S0: Dim = sympy.Symbol("s0", integer=True, nonnegative=True)
_HEAD = "import triton\nimport triton.language as tl\n\n\n"


def _source(name: str, arguments: tuple[Argument, ...], body: str, block: int, extent: Dim) -> TritonSource:
    names = [a.name for a in arguments]
    text = f"{_HEAD}@triton.jit\ndef {name}({', '.join(names)}, BLOCK: tl.constexpr):\n{body}"
    item = Pass(name, arguments, (("BLOCK", block),), ((extent, block),))
    symbols = tuple(a.name for a in arguments if a.kind == "symbol")
    return TritonSource(name, text, (item,), (), symbols, num_warps=4, num_stages=1)


def _pointers(*names: str) -> tuple[Argument, ...]:
    return tuple(Argument(name, "param", "*fp32", at) for at, name in enumerate(names))


def elementwise(scale: float = 2.0, block: int = 1024, num_warps: int = 4) -> TritonSource:
    """y = relu(x * scale)."""
    body = f"""    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < s0)
    tl.store(y_ptr + at, tl.maximum(x * {scale}, 0.0), mask=at < s0)
"""
    arguments = (*_pointers("x_ptr", "y_ptr"), Argument("s0", "symbol", "i32"))
    made = _source("af_mul_relu", arguments, body, block, _S0)
    return TritonSource(**{**vars(made), "num_warps": num_warps})


def row_softmax(columns: int = 1000) -> TritonSource:
    """One program a row."""
    body = f"""    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * {columns} + column, mask=column < {columns}, other=-float("inf"))
    e = tl.exp(x - tl.max(x, 0))
    tl.store(y_ptr + row * {columns} + column, e / tl.sum(e, 0), mask=column < {columns})
"""
    made = _source("af_softmax", (*_pointers("x_ptr", "y_ptr"), Argument("s0", "symbol", "i32")), body, 1024, _S0)
    return TritonSource(**{**vars(made), "passes": (_with_tiles(made.passes[0], ((_S0, 1),)),)})


def spilling() -> TritonSource:
    """A block of which one warp must hold far more values than it has registers."""
    body = """    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    tl.store(y_ptr + at, x / tl.sum(x, 0))
"""
    made = _source("af_spills", _pointers("x_ptr", "y_ptr"), body, 16384, 1)
    return TritonSource(**{**vars(made), "num_warps": 1})


def two_passes() -> TritonSource:
    """Two kernels in one module."""
    one, two = elementwise(), row_softmax()
    text = one.text + "\n\n" + two.text.removeprefix(_HEAD)
    return TritonSource(**{**vars(one), "text": text, "passes": one.passes + two.passes})


def broken() -> TritonSource:
    """Names a function that Triton does not have."""
    made = elementwise()
    return TritonSource(**{**vars(made), "text": made.text.replace("tl.maximum", "tl.no_such_function")})


def _with_tiles(item: Pass, tiles: tuple[tuple[Dim, int], ...]) -> Pass:
    return Pass(item.function, item.arguments, item.constants, tiles, item.shared)
