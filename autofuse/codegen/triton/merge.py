"""How a merge is written in Triton: a sum over distances from a row's maximum or mean, made in the loop of these.

In: the text of a tile, and a ``row_merge`` (`one_pass`). Out: lines before, in and after a loop over columns. Each lane
of a tile has a maximum or a mean of its own; after the loop the lanes of a row are brought together. Names in the text:
``a*`` what a lane has; ``old*`` the maximum before a tile; ``mid*`` and ``seen*`` a lane's mean and its number of
elements.
"""

from __future__ import annotations

from autofuse.codegen.loops import LoopKernel, LoopValue
from autofuse.codegen.triton.scalar import TYPES, literal
from autofuse.codegen.triton.tile_text import TileText

_SHAPE = "[BLOCK_ROWS, BLOCK_COLS]"


def is_merge(kernel: LoopKernel, number: int) -> bool:
    return kernel.values[number].op == "row_merge"


def start(tile: TileText, number: int) -> list[str]:
    """The lines before the loop."""
    value = tile.kernel.values[number]
    names = ("a", "mid", "seen") if value.attr == "squares" else ("a",)
    return [f"{name}{number} = tl.full({_SHAPE}, 0, {TYPES[value.dtype]})" for name in names]


def before(tile: TileText, number: int) -> list[str]:
    """The lines in the loop before the maximum takes the tile in."""
    value = tile.kernel.values[number]
    return [] if value.attr == "squares" else [f"old{number} = a{value.args[1]}"]


def take(tile: TileText, number: int) -> list[str]:
    """The lines in the loop after that."""
    value = tile.kernel.values[number]
    x, top = f"x{value.args[0]}", f"a{value.args[1]}"
    if value.attr == "squares":
        return [
            f"seen{number} = seen{number} + {_kept(tile, literal(1, value.dtype), value.dtype)}",
            f"off{number} = {x} - mid{number}",
            f"mid{number} = mid{number} + {_kept(tile, f'off{number} / seen{number}', value.dtype)}",
            f"a{number} = a{number} + {_kept(tile, f'off{number} * ({x} - mid{number})', value.dtype)}",
        ]
    infinity, zero = literal(float("inf"), value.dtype), literal(0, value.dtype)
    is_out = f"tl.abs({top}) == {infinity}" if value.attr == "exp_finite" else f"{top} == -{infinity}"
    element = _exponential(tile, value, f"{x} - tl.where({is_out}, {zero}, {top})")
    return [
        f"a{number} = {_rescaled(tile, number, f'old{number}', top)}",
        f"a{number} = a{number} + {_kept(tile, element, value.dtype)}",
    ]


def finish(tile: TileText, number: int) -> list[str]:
    """The lines after the loop, behind the result that the merge is relative to."""
    value = tile.kernel.values[number]
    beside = value.args[1]
    if value.attr == "squares":
        mean = f"off{number} = mid{number} - x{beside} / ncols"
        moved = f"a{number} + seen{number} * off{number} * off{number}"
        apart = f"a{number} = tl.where(seen{number} > 0, {moved}, a{number})"  # a row without columns has no mean
        return [mean, apart, f"x{number} = tl.sum(a{number}, axis=1, keep_dims=True)"]
    lines = [
        f"a{number} = {_rescaled(tile, number, f'a{beside}', f'x{beside}')}",
        f"x{number} = tl.sum(a{number}, axis=1, keep_dims=True)",
    ]
    if value.attr == "exp":  # of a row of nothing but -inf, exp(x - top) is NaN
        lowest = literal(float("-inf"), value.dtype)
        lines.append(f'x{number} = tl.where((x{beside} == {lowest}) & (ncols > 0), float("nan"), x{number})')
    return lines


def _kept(tile: TileText, text: str, dtype: str) -> str:
    """A text within the row, nothing beyond its end."""
    return f"tl.where({tile.col_mask}, {text}, {literal(0, dtype)})" if tile.col_mask else text


def _exponential(tile: TileText, value: LoopValue, text: str) -> str:
    operand = LoopValue("sub", value.dtype, value.args)
    return tile.scalars.expression(LoopValue("exp", value.dtype, (0,)), [text], [operand])


def _rescaled(tile: TileText, number: int, old: str, new: str) -> str:
    """A lane's sum of exp(x - old) as one of exp(x - new)."""
    value = tile.kernel.values[number]
    factor = f"tl.where({old} == {new}, {literal(1, value.dtype)}, {_exponential(tile, value, f'{old} - {new}')})"
    return f"a{number} * {factor}"
