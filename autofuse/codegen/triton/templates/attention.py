"""Printing attention in Triton: a program has some rows of queries and goes once over the keys and values.

In: a node with ``softmax(f(q @ k)) @ v`` and what follows it (see `attention_plan`), a configuration (see
`attention_knobs`), and constants for some or all symbols. Out: `TritonSource`, like that of any other node.
The softmax is the running one of Milakov and Gimelshein (2018) and FlashAttention (Dao et al., 2022): each row keeps
its largest score so far, the sum of exp(score - largest) and the sum of values weighted so; a larger score scales both
down. Scores never reach memory.
Guarantee: any sizes and strides; a row without any key left gives NaN, as the softmax does; results repeat bit by bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from autofuse.codegen.templates import ATTENTION, Template
from autofuse.codegen.triton.body import Piece
from autofuse.codegen.triton.printer import header
from autofuse.codegen.triton.scalar import HELPERS
from autofuse.codegen.triton.source import TritonSource
from autofuse.codegen.triton.templates.attention_knobs import attention_knobs
from autofuse.codegen.triton.templates.attention_plan import Attention, plan_attention
from autofuse.codegen.triton.templates.epilogue import parameters
from autofuse.codegen.triton.templates.matmul import arguments_of
from autofuse.codegen.triton.templates.tile import Tile, load, with_constants
from autofuse.ir.operation import NodeForm
from autofuse.ir.records import Config
from autofuse.ir.shape import Dim


def print_attention(form: NodeForm, config: Config, constants: Mapping[str, int] | None = None) -> TritonSource:
    """The Triton module of a node. Raises LoweringError where it is none: see `attention_plan`."""
    known = dict(constants or {})
    plan = plan_attention(form)
    body = AttentionBody(form, plan, config, known)
    piece = body.first()
    helpers = [definition for name, definition in HELPERS if name in piece.text]
    described = dataclasses.replace(plan.result.kernel, params=parameters(form))
    knobs = dict(config)
    return TritonSource(
        name=described.name,
        text="\n\n".join([header(described, known), *helpers, piece.text]),
        passes=(piece.launch,),
        scratch=(),
        symbols=tuple(s for s in form.symbols if s not in known),
        num_warps=int(knobs["num_warps"]),
        num_stages=int(knobs["num_stages"]),
        limits=body.limits(),
    )


class AttentionBody(Tile):
    """The kernel: a tile of scores, and after the loop over keys a tile of the result."""

    def __init__(self, form: NodeForm, plan: Attention, config: Config, constants: Mapping[str, int]) -> None:
        knobs = dict(config)
        rows, keys = int(knobs["BLOCK_M"]), int(knobs["BLOCK_N"])
        super().__init__(plan.scores, (rows, keys), knobs, constants)
        self.result = Tile(plan.result, (rows, block_of(plan.width)), knobs, constants)
        self.form = form
        self.attention = plan
        self.exp = "tl.exp" if self.fast else "libdevice.exp"
        precision = knobs.get("input_precision", "ieee")
        self.dot = f'input_precision="{precision}", out_dtype=tl.float32'

    def first(self) -> Piece:
        """The kernel."""
        plan = self.attention
        lines = [*self._rows_of_program(), "for start in tl.range(0, ncols, BLOCK_N):"]
        lines += [f"    {line}" for line in self._step()]
        lines += self._end()
        tiles: list[tuple[Dim, int]] = [(plan.rows, self.block_rows)]
        if plan.batch != 1:
            tiles.append((plan.batch, 1))
        return self._piece(
            plan.result.kernel.name, [*arguments_of(self.form), *self._symbols()], lines, tuple(tiles), 0
        )

    def _rows_of_program(self) -> list[str]:
        plan = self.attention
        lines = [f"nrows = {self.size(plan.rows)}", f"ncols = {self.size(plan.keys)}", f"pid = {self._pid()}"]
        if plan.batch == 1:
            lines.append("row_tile = pid")
        else:
            lines.append("row_tiles = tl.cdiv(nrows, BLOCK_M)")
            lines += ["b = pid // row_tiles + tl.full([1, 1], 0, tl.int32)", "row_tile = pid % row_tiles"]
        return [
            *lines,
            f"r = {self._arange('row_tile * BLOCK_M', 'BLOCK_M', 0)}",
            "row_mask = r < nrows",
            f"d = {self._arange('0', 'BLOCK_D', 1)}",
            f"dk = {self._arange('0', 'BLOCK_D', 0)}",
            f"e = {self._arange('0', 'BLOCK_E', 1)}",
            f"q = {load(self.matrix(plan.query, 'r', 'd'), self.row_mask, _within('d', plan.depth))}",
            'top = tl.full([BLOCK_M, 1], float("-inf"), tl.float32)',
            "weight = tl.zeros([BLOCK_M, 1], tl.float32)",
            "mixed = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)",
        ]

    def _step(self) -> list[str]:
        """Some keys; a row that has met none yet has the largest score -inf, from which nothing can be subtracted."""
        plan = self.attention
        mask = "(n < ncols)" if self.col_mask else ""
        return [
            f"c = {self._arange('start', 'BLOCK_N', 1)}",
            "col_mask = c < ncols",
            f"k = {load(self.matrix(plan.key, 'dk', 'c'), _within('dk', plan.depth), self.col_mask)}",
            f"acc = tl.dot(q, k, {self.dot})",
            *self.values(),
            f'score = tl.where(col_mask, {self._score()}, float("-inf"))',
            "above = tl.maximum(top, tl.max(score, axis=1, keep_dims=True))",
            'base = tl.where(above == float("-inf"), 0.0, above)',
            f"p = {self.exp}(score - base)",
            f"kept = {self.exp}(top - base)",
            "weight = weight * kept + tl.sum(p, axis=1, keep_dims=True)",
            f"n = {self._arange('start', 'BLOCK_N', 0)}",
            f"v = {load(self.matrix(plan.value, 'n', 'e'), mask, _within('e', plan.width))}",
            f"mixed = tl.dot(p.to(v.dtype), v, mixed * kept, {self.dot})",
            "top = above",
        ]

    def _score(self) -> str:
        text, name = self.text(self.attention.score), self.kernel.values[self.attention.score].dtype
        return text if name == "float32" else f"{text}.to(tl.float32)"

    def _end(self) -> list[str]:
        lines = []
        keys = with_constants(self.attention.keys, self.constants)
        if not (isinstance(keys, int) and keys > 0):  # without keys, eager's sum of nothing is 0
            lines.append("weight = tl.where(tl.full([1, 1], ncols, tl.int64) > 0, weight, 1.0)")
        lines += ["acc = mixed / weight", "c = e", f"ncols = {self.size(self.attention.width)}", "col_mask = c < ncols"]
        if any("col_tile" in line for line in self.result.stores()):
            lines.append("col_tile = row_tile * 0")
        return [*lines, *self.result.alone(), *self.result.values(), *self.result.stores()]

    # ---- what the parent asks

    def _extents(self) -> tuple[Dim, ...]:
        return self.attention.extents

    def _blocks(self) -> dict[str, int]:
        return {
            "BLOCK_M": self.block_rows, "BLOCK_N": self.block_cols,
            "BLOCK_D": block_of(self.attention.depth), "BLOCK_E": block_of(self.attention.width),
        }  # fmt: skip


def block_of(size: int) -> int:
    """The block that holds a head: what a matrix unit takes at least."""
    return max(16, 1 << (size - 1).bit_length())


def _within(place: str, size: int) -> str:
    return "" if block_of(size) == size else f"({place} < {size})"


TEMPLATE = Template(ATTENTION, plan_attention, attention_knobs, print_attention)
