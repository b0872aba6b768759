"""Printing a tiled matmul in Triton: one program a tile of the result, with what follows it done in registers.

In: a node with one product and operations on single elements after it (see `matmul_plan`), a configuration (see
`matmul_knobs`), and constants for some or all symbols. Out: `TritonSource`, like that of any other node.
Guarantee: any sizes, 0 and ragged ones included, and any strides; sums in float32 (float64 for float64), where float32
operands are multiplied exactly unless the configuration asks for tf32; results repeat bit by bit.
Names in the text: ``r`` and ``c`` rows and columns of the result, ``b`` its batch, ``acc`` the product, ``x*`` values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from autofuse.codegen.templates import MATMUL, Template
from autofuse.codegen.triton.body import Piece
from autofuse.codegen.triton.printer import header
from autofuse.codegen.triton.scalar import HELPERS, POINTERS
from autofuse.codegen.triton.source import Argument, TritonSource
from autofuse.codegen.triton.templates.epilogue import parameters
from autofuse.codegen.triton.templates.matmul_knobs import matmul_knobs
from autofuse.codegen.triton.templates.matmul_plan import Matmul, plan_matmul
from autofuse.codegen.triton.templates.tile import Tile, is_multiple, load
from autofuse.ir.operation import NodeForm
from autofuse.ir.records import Config
from autofuse.ir.shape import Dim


def print_matmul(form: NodeForm, config: Config, constants: Mapping[str, int] | None = None) -> TritonSource:
    """The Triton module of a node. Raises LoweringError where it has no tiled matmul: see `matmul_plan`."""
    known = dict(constants or {})
    plan = plan_matmul(form)
    body = MatmulBody(form, plan, config, known)
    piece = body.first()
    helpers = [definition for name, definition in HELPERS if name in piece.text]
    described = dataclasses.replace(plan.rest.kernel, params=parameters(form))
    knobs = dict(config)
    return TritonSource(
        name=plan.rest.kernel.name,
        text="\n\n".join([header(described, known), *helpers, piece.text]),
        passes=(piece.launch,),
        scratch=(),
        symbols=tuple(s for s in form.symbols if s not in known),
        num_warps=int(knobs["num_warps"]),
        num_stages=int(knobs["num_stages"]),
        limits=body.limits(),
    )


class MatmulBody(Tile):
    """One product and what follows it, as one kernel."""

    def __init__(self, form: NodeForm, plan: Matmul, config: Config, constants: Mapping[str, int]) -> None:
        knobs = dict(config)
        super().__init__(plan.rest, (int(knobs["BLOCK_M"]), int(knobs["BLOCK_N"])), knobs, constants)
        self.form = form
        self.matmul = plan
        self.block_depth = int(knobs["BLOCK_K"])
        self.group = int(knobs["GROUP_M"])
        self.precision = str(knobs.get("input_precision", "ieee"))

    def first(self) -> Piece:
        """The kernel."""
        plan = self.matmul
        lines = [*self._tile_of_program(), *self._product(), *self.alone(), *self.values(), *self.stores()]
        tiles: list[tuple[Dim, int]] = [(plan.rows, self.block_rows), (plan.cols, self.block_cols)]
        if plan.batch != 1:
            tiles.append((plan.batch, 1))
        arguments = [*self._parameters(), *self._symbols()]
        return self._piece(self.kernel.name, arguments, lines, tuple(tiles), 0)

    def _tile_of_program(self) -> list[str]:
        """Programs that run at a time share rows and columns of the operands, which the L2 cache then has."""
        lines = [*self._sizes(), f"depth = {self.size(self.matmul.depth)}", f"pid = {self._pid()}"]
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
            f"r = {self._arange('row_tile * BLOCK_M', 'BLOCK_M', 0)}",
            f"c = {self._arange('col_tile * BLOCK_N', 'BLOCK_N', 1)}",
            "row_mask = r < nrows",
            "col_mask = c < ncols",
        ]

    def _product(self) -> list[str]:
        left, right = self.matmul.left, self.matmul.right
        wide = "float64" if self.matmul.dtype == "float64" else "float32"
        rest = "" if is_multiple(self.matmul.depth, self.block_depth, self.constants) else "depth - start"
        return [
            f"ka = {self._arange('0', 'BLOCK_K', 1)}",
            f"kb = {self._arange('0', 'BLOCK_K', 0)}",
            f"lhs_at = {self.matrix(left, 'r', 'ka')}",
            f"rhs_at = {self.matrix(right, 'kb', 'c')}",
            f"acc = tl.zeros([BLOCK_M, BLOCK_N], tl.{wide})",
            "for start in tl.range(0, depth, BLOCK_K):",
            f"    lhs = {load('lhs_at', self.row_mask, rest and f'(ka < {rest})')}",
            f"    rhs = {load('rhs_at', rest and f'(kb < {rest})', self.col_mask)}",
            f'    acc = tl.dot(lhs, rhs, acc, input_precision="{self.precision}", out_dtype=tl.{wide})',
            f"    lhs_at += {self.times('BLOCK_K', left.cols)}",
            f"    rhs_at += {self.times('BLOCK_K', right.rows)}",
        ]

    def _extents(self) -> tuple[Dim, ...]:
        return self.matmul.extents

    def _parameters(self) -> list[Argument]:
        return arguments_of(self.form)

    def _blocks(self) -> dict[str, int]:
        return {
            "BLOCK_M": self.block_rows, "BLOCK_N": self.block_cols, "BLOCK_K": self.block_depth, "GROUP_M": self.group,
        }  # fmt: skip


def arguments_of(form: NodeForm) -> list[Argument]:
    """All tensors of a node as arguments."""
    return [Argument(p.name, "param", POINTERS[p.dtype], n) for n, p in enumerate(parameters(form))]


TEMPLATE = Template(MATMUL, plan_matmul, matmul_knobs, print_matmul)
