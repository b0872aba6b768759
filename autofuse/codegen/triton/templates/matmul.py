"""Printing a tiled matmul in Triton: one program per tile of the result, with the epilogue in registers.

In: a node with one matmul and an element-wise epilogue (see `matmul_plan`), a configuration (see `matmul_knobs`), and
constants for some or all symbols. Out: `TritonSource`, like that of any other node. Guarantee: any sizes, 0 and ragged
ones included, and any strides; sums in float32 (float64 for float64), where float32 operands are multiplied exactly
unless the configuration asks for tf32; results repeat bit by bit. Names in the text: ``r`` and ``c`` rows and columns
of the result, ``b`` its batch, ``acc`` the matmul's result, ``x*`` values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from autofuse.codegen.loops import LoopKernel
from autofuse.codegen.templates import MATMUL, Template
from autofuse.codegen.triton.index_width import Limit, index_limits, open_limits
from autofuse.codegen.triton.printer import source_of
from autofuse.codegen.triton.program import Program
from autofuse.codegen.triton.signature import Piece, make_piece, program_number
from autofuse.codegen.triton.source import TritonSource
from autofuse.codegen.triton.templates.epilogue import parameters
from autofuse.codegen.triton.templates.matmul_knobs import matmul_knobs
from autofuse.codegen.triton.templates.matmul_plan import Matmul, plan_matmul
from autofuse.codegen.triton.templates.tile import Tile, arguments_of, is_multiple, load
from autofuse.ir.operation import NodeForm
from autofuse.ir.records import Config
from autofuse.ir.shape import Dim


def print_matmul(form: NodeForm, config: Config, constants: Mapping[str, int] | None = None) -> TritonSource:
    """The Triton module of a node. Raises LoweringError where it has no tiled matmul: see `matmul_plan`."""
    known = dict(constants or {})
    plan = plan_matmul(form)
    described = dataclasses.replace(plan.rest.kernel, params=parameters(form), symbols=form.symbols)
    return source_of(described, MatmulProgram(described, plan, config, known), config, known)


class MatmulProgram(Program):
    """One matmul and its epilogue, as one kernel."""

    def __init__(self, kernel: LoopKernel, plan: Matmul, config: Config, constants: Mapping[str, int]) -> None:
        """``kernel`` has the name, the tensors and the symbols of the node."""
        knobs = dict(config)
        self.kernel = kernel
        self.matmul = plan
        self.blocks = {name: int(knobs[name]) for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K", "GROUP_M")}
        self.precision = str(knobs.get("input_precision", "ieee"))
        self.tile = Tile(plan.rest, (self.blocks["BLOCK_M"], self.blocks["BLOCK_N"]), knobs, constants)
        self.text = self.tile.text

    def first(self) -> Piece:
        plan, tile = self.matmul, self.tile
        lines = [*self._tile_of_program(), *self._product(), *tile.alone(), *tile.values(), *tile.stores()]
        tiles: list[tuple[Dim, int]] = [(plan.rows, self.blocks["BLOCK_M"]), (plan.cols, self.blocks["BLOCK_N"])]
        if plan.batch != 1:
            tiles.append((plan.batch, 1))
        return make_piece(self.kernel.name, lines, arguments_of(self.kernel, self.text), self.blocks, tuple(tiles))

    def limits(self) -> tuple[Limit, ...]:
        return open_limits(index_limits(self.matmul.extents, self.text.config.is_wide))

    def _tile_of_program(self) -> list[str]:
        """Lines that find the program's tile.

        Programs that run at the same time share rows and columns of the operands, which are then in the L2 cache.
        """
        text = self.text
        lines = [*text.sizes(), f"depth = {text.size(self.matmul.depth)}"]
        lines.append(f"pid = {program_number(text.config.is_wide)}")
        lines += ["row_tiles = tl.cdiv(nrows, BLOCK_M)", "col_tiles = tl.cdiv(ncols, BLOCK_N)"]
        if self.matmul.batch != 1:
            lines += ["b = pid // (row_tiles * col_tiles) + tl.full([1, 1], 0, tl.int32)"]
            lines += ["pid = pid % (row_tiles * col_tiles)"]
        return [
            *lines,
            "band = GROUP_M * col_tiles",
            "first = pid // band * GROUP_M",
            "height = tl.minimum(row_tiles - first, GROUP_M)",
            "row_tile = first + pid % band % height",
            "col_tile = pid % band // height",
            f"r = {text.arange('row_tile * BLOCK_M', 'BLOCK_M', 0)}",
            f"c = {text.arange('col_tile * BLOCK_N', 'BLOCK_N', 1)}",
            "row_mask = r < nrows",
            "col_mask = c < ncols",
        ]

    def _product(self) -> list[str]:
        tile, text, left, right = self.tile, self.text, self.matmul.left, self.matmul.right
        wide = "float64" if self.matmul.dtype == "float64" else "float32"
        rest = "" if is_multiple(self.matmul.depth, self.blocks["BLOCK_K"], text.constants) else "depth - start"
        return [
            f"ka = {text.arange('0', 'BLOCK_K', 1)}",
            f"kb = {text.arange('0', 'BLOCK_K', 0)}",
            f"lhs_at = {tile.matrix(left, 'r', 'ka')}",
            f"rhs_at = {tile.matrix(right, 'kb', 'c')}",
            f"acc = tl.zeros([BLOCK_M, BLOCK_N], tl.{wide})",
            "for start in tl.range(0, depth, BLOCK_K):",
            f"    lhs = {load('lhs_at', tile.row_mask, rest and f'(ka < {rest})')}",
            f"    rhs = {load('rhs_at', rest and f'(kb < {rest})', tile.col_mask)}",
            f'    acc = tl.dot(lhs, rhs, acc, input_precision="{self.precision}", out_dtype=tl.{wide})',
            f"    lhs_at += {text.times('BLOCK_K', left.cols)}",
            f"    rhs_at += {text.times('BLOCK_K', right.rows)}",
        ]


TEMPLATE = Template(MATMUL, plan_matmul, matmul_knobs, print_matmul)
