"""Printing a tiled matmul in Triton: one program a tile of the result, with what follows it done in registers.

In: a node with one product and operations on single elements after it (see `matmul_plan`), a configuration (see
`matmul_knobs`), and constants for some or all symbols. Out: `TritonSource`, like that of any other node.
Guarantee: any sizes, 0 and ragged ones included, and any strides; sums in float32 (float64 for float64), where float32
operands are multiplied exactly unless the configuration asks for tf32; results repeat bit by bit.
Names in the text: ``r`` and ``c`` rows and columns of the result, ``b`` its batch, ``acc`` the product, ``x*`` values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from autofuse.codegen.loops import Access, Store
from autofuse.codegen.triton.body import Body, Piece
from autofuse.codegen.triton.matmul_plan import Matmul, Operand, parameters, plan_matmul
from autofuse.codegen.triton.printer import header
from autofuse.codegen.triton.scalar import HELPERS, POINTERS
from autofuse.codegen.triton.source import Argument, TritonSource
from autofuse.ir.operation import NodeForm
from autofuse.ir.records import Config, make_config
from autofuse.ir.shape import Dim


def print_matmul(form: NodeForm, config: Config, constants: Mapping[str, int] | None = None) -> TritonSource:
    """The Triton module of a node. Raises LoweringError where it has no tiled matmul: see `matmul_refusal`."""
    known = dict(constants or {})
    plan = plan_matmul(form)
    body = MatmulBody(form, plan, config, known)
    piece = body.first()
    helpers = [definition for name, definition in HELPERS if name in piece.text]
    described = dataclasses.replace(plan.kernel, params=parameters(form))
    knobs = dict(config)
    return TritonSource(
        name=plan.kernel.name,
        text="\n\n".join([header(described, known), *helpers, piece.text]),
        passes=(piece.launch,),
        scratch=(),
        symbols=tuple(s for s in form.symbols if s not in known),
        num_warps=int(knobs["num_warps"]),
        num_stages=int(knobs["num_stages"]),
        limits=body.limits(),
    )


class MatmulBody(Body):
    """One product and what follows it, as one kernel."""

    def __init__(self, form: NodeForm, plan: Matmul, config: Config, constants: Mapping[str, int]) -> None:
        knobs = dict(config)
        named = {"BLOCK_ROWS": knobs["BLOCK_M"], "BLOCK_COLS": knobs["BLOCK_N"]}
        # A batch is one place for all of a program: to what follows it is neither a row nor a column.
        kernel = dataclasses.replace(plan.kernel, rows=plan.row_dims, cols=plan.col_dims)
        super().__init__(kernel, make_config({**knobs, **named}), constants)
        self.form = form
        self.matmul = plan
        self.block_rows = int(knobs["BLOCK_M"])  # a result of one row has a tile all the same
        self.block_depth = int(knobs["BLOCK_K"])
        self.group = int(knobs["GROUP_M"])
        self.precision = str(knobs.get("input_precision", "ieee"))

    def first(self) -> Piece:
        """The kernel."""
        plan = self.matmul
        lines = [*self._tile_of_program(), *self._product(), *self._spread("b", plan.batch_dims)]
        lines += [*self._spread("r", plan.row_dims), *self._spread("c", plan.col_dims)]
        lines += self._values(self.live)
        lines += [self._store_once(store) for store in self.kernel.stores]
        tiles: list[tuple[Dim, int]] = [(plan.rows, self.block_rows), (plan.cols, self.block_cols)]
        if plan.batch != 1:
            tiles.append((plan.batch, 1))
        arguments = [*self._parameters(), *self._symbols()]
        return self._piece(self.kernel.name, arguments, lines, tuple(tiles), 0)

    # ---- the tile

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
        rest = "" if self._has_whole_depth else "depth - start"
        lines = [
            f"ka = {self._arange('0', 'BLOCK_K', 1)}",
            f"kb = {self._arange('0', 'BLOCK_K', 0)}",
            f"lhs_at = {self._matrix(left, 'r', 'ka')}",
            f"rhs_at = {self._matrix(right, 'kb', 'c')}",
            f"acc = tl.zeros([BLOCK_M, BLOCK_N], tl.{wide})",
            "for start in tl.range(0, depth, BLOCK_K):",
            f"    lhs = {_load('lhs_at', self._row_mask_of_tile, rest and f'(ka < {rest})')}",
            f"    rhs = {_load('rhs_at', rest and f'(kb < {rest})', self._col_mask)}",
            f'    acc = tl.dot(lhs, rhs, acc, input_precision="{self.precision}", out_dtype=tl.{wide})',
            f"    lhs_at += {self._step(left.cols)}",
            f"    rhs_at += {self._step(right.rows)}",
        ]
        if not self.kernel.rows:  # a result of one row: what follows knows none
            lines.append("acc = tl.sum(tl.where(row_mask, acc, 0.0), axis=0, keep_dims=True)")
        if not self.kernel.cols:
            lines.append("acc = tl.sum(tl.where(col_mask, acc, 0.0), axis=1, keep_dims=True)")
        return lines

    @property
    def _has_whole_depth(self) -> bool:
        depth = self.matmul.depth
        known = self.constants.get(str(depth)) if not isinstance(depth, int) else depth
        return known is not None and known % self.block_depth == 0

    @property
    def _row_mask_of_tile(self) -> str:
        return self._row_mask or ("" if self.kernel.rows else "row_mask")

    def _matrix(self, operand: Operand, rows: str, cols: str) -> str:
        steps = (("b", operand.batch), (rows, operand.rows), (cols, operand.cols))
        terms = [self._times(place, self.size(stride)) for place, stride in steps if stride != 0]
        shape = [f"{place} * 0" for place, stride in steps[1:] if stride == 0]  # an expanded dim
        return " + ".join([operand.name, *terms, *shape])

    def _step(self, stride: Dim) -> str:
        return self._times("BLOCK_K", self.size(stride))

    @staticmethod
    def _times(place: str, stride: str) -> str:
        return place if stride == "1" else f"{place} * {stride}"

    def _spread(self, what: str, dims: Sequence[int]) -> list[str]:
        return self._positions(what, dims) if len(dims) > 1 else []

    # ---- what follows

    def _loop(self, dim: int) -> str:
        if dim not in self.matmul.batch_dims:
            return super()._loop(dim)
        return "b" if len(self.matmul.batch_dims) == 1 else f"b{dim}"

    def _compute(self, number: int) -> str:
        attr = self.kernel.values[number].attr
        if isinstance(attr, Access) and attr.param == self.matmul.product:
            return "acc"
        return super()._compute(number)

    def _store_once(self, store: Store) -> str:
        """What rows or columns do not reach is written by the first tile alone."""
        place = self._places[id(store)]
        first = [] if place.rows else ["(row_tile == 0)"]
        first += [] if place.cols else ["(col_tile == 0)"]
        return self._store(store, " & ".join(first))

    # ---- what the parent asks

    def _extents(self) -> tuple[Dim, ...]:
        return self.matmul.extents

    def _parameters(self) -> list[Argument]:
        return [Argument(p.name, "param", POINTERS[p.dtype], n) for n, p in enumerate(parameters(self.form))]

    def _blocks(self) -> dict[str, int]:
        return {
            "BLOCK_M": self.block_rows, "BLOCK_N": self.block_cols, "BLOCK_K": self.block_depth, "GROUP_M": self.group,
        }  # fmt: skip


def _load(pointer: str, *masks: str) -> str:
    mask = " & ".join(m for m in masks if m)
    return f"tl.load({pointer}, mask={mask}, other=0.0)" if mask else f"tl.load({pointer})"
