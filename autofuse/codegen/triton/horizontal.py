"""Horizontal fusion: several loop nests in one Triton kernel, such as copies, casts and fills of different sizes.

In: a loop kernel with further nests beside it (``LoopKernel.rest``) and a configuration. Out: its text, and one launch
whose grid is the sum of the nests' tiles. Each nest is a function with the masks and strides that it would have alone.
The kernel derives from the program's number its nest and its tile. A tile has ``TILE`` elements in all nests, in the
shape that suits the nest; a nest without elements has no tiles. Guarantee: no nest reads what another one writes, since
`lowering.lower` only makes nests of independent parts; so programs need not wait for each other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from autofuse.codegen.loops import LoopKernel
from autofuse.codegen.triton.index_width import Limit
from autofuse.codegen.triton.knobs import is_crossed
from autofuse.codegen.triton.one_tile import OneTile
from autofuse.codegen.triton.program import Program
from autofuse.codegen.triton.signature import Piece, make_piece
from autofuse.ir.records import Config, make_config


class NestsProgram(Program):
    """Several nests as functions, and the kernel that calls them."""

    def __init__(self, kernel: LoopKernel, config: Config, constants: Mapping[str, int]) -> None:
        self.kernel = kernel
        nests = (dataclasses.replace(kernel, rest=()), *kernel.rest)
        self.nests = [
            OneTile(dataclasses.replace(nest, name=f"{kernel.name}_{k}"), nest_config(config, nest, k), constants, True)
            for k, nest in enumerate(nests)
        ]

    def limits(self) -> tuple[Limit, ...]:
        return tuple(dict.fromkeys(limit for nest in self.nests for limit in nest.limits()))

    def first(self) -> Piece:
        parts = [nest.first() for nest in self.nests]
        one, last = self.nests[0], len(parts) - 1
        lines, branches = [one.number()], []
        for k, part in enumerate(parts):
            launch = part.launch
            if k < last:
                tiles = " * ".join(f"tl.cdiv({one.tile.size(extent)}, {block})" for extent, block in launch.tiles)
                lines.append(f"start_{k + 1} = " + (f"start_{k} + " if k else "") + tiles)
            names = [f"pid - start_{k}" if k else "pid", *(a.name for a in launch.arguments)]
            names += [f"{name}={block}" for name, block in launch.constants]
            branches.append("else:" if k == last else f"{'elif' if k else 'if'} pid < start_{k + 1}:")
            branches.append(f"    {launch.function}({', '.join(names)})")
        # The sides of tiles are constants of the nests' functions, so the kernel itself has none.
        kernel = make_piece(self.kernel.name, [*lines, *branches], one.arguments(), {}, parts[0].launch.tiles)
        beside = tuple(part.launch.tiles for part in parts[1:])
        text = "\n\n".join([*(part.text for part in parts), kernel.text])
        return Piece(text, dataclasses.replace(kernel.launch, beside=beside))


def nest_config(config: Config, nest: LoopKernel, number: int) -> Config:
    """The configuration with the sides of a nest's tile.

    A tile has as many columns as it may, but is square where some tensor has its neighbours in memory along rows.
    """
    knobs = dict(config)
    tile = int(knobs["TILE"])
    side = 1 << tile.bit_length() // 2 if is_crossed(nest) else tile
    cols = min(side, int(knobs.get(f"WIDTH_{number}", tile)))
    return make_config({**knobs, "BLOCK_COLS": cols, "BLOCK_ROWS": tile // cols})
