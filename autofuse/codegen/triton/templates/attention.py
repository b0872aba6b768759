"""Printing attention in Triton: a program has some rows of queries and goes once over the keys and values.

In: a node with ``softmax(f(q @ k)) @ v`` and its epilogue (see `attention_plan`), a configuration (see
`attention_knobs`), and constants for some or all symbols. Out: `TritonSource`, like that of any other node. The softmax
is the online softmax of Milakov and Gimelshein (2018) and FlashAttention (Dao et al., 2022): each row keeps its largest
score so far, the sum of exp(score - largest) and the weighted sum of values; a larger score scales both down. Scores
never reach memory. Guarantee: any sizes and strides; a row without any key left gives NaN, as the softmax does; results
repeat bit by bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from autofuse.codegen.loops import LoopKernel
from autofuse.codegen.templates import ATTENTION, Template
from autofuse.codegen.triton.index_width import Limit, index_limits, open_limits
from autofuse.codegen.triton.printer import source_of
from autofuse.codegen.triton.program import Program
from autofuse.codegen.triton.signature import Piece, make_piece, program_number
from autofuse.codegen.triton.source import TritonSource
from autofuse.codegen.triton.templates.attention_knobs import attention_knobs
from autofuse.codegen.triton.templates.attention_plan import Attention, plan_attention
from autofuse.codegen.triton.templates.epilogue import parameters
from autofuse.codegen.triton.templates.tile import Tile, arguments_of, load, with_constants
from autofuse.codegen.triton.tile_text import indented
from autofuse.ir.operation import NodeForm
from autofuse.ir.records import Config
from autofuse.ir.shape import Dim


def print_attention(form: NodeForm, config: Config, constants: Mapping[str, int] | None = None) -> TritonSource:
    """The Triton module of a node. Raises LoweringError where it is none: see `attention_plan`."""
    known = dict(constants or {})
    plan = plan_attention(form)
    described = dataclasses.replace(plan.result.kernel, params=parameters(form), symbols=form.symbols)
    return source_of(described, AttentionProgram(described, plan, config, known), config, known)


class AttentionProgram(Program):
    """The kernel: a tile of scores, and after the loop over keys a tile of the result."""

    def __init__(self, kernel: LoopKernel, plan: Attention, config: Config, constants: Mapping[str, int]) -> None:
        """``kernel`` has the name, the tensors and the symbols of the node."""
        knobs = dict(config)
        self.blocks = {name: int(knobs[name]) for name in ("BLOCK_M", "BLOCK_N")}
        self.blocks |= {"BLOCK_D": block_of(plan.depth), "BLOCK_E": block_of(plan.width)}
        rows = self.blocks["BLOCK_M"]
        self.kernel = kernel
        self.attention = plan
        self.scores = Tile(plan.scores, (rows, self.blocks["BLOCK_N"]), knobs, constants)
        self.result = Tile(plan.result, (rows, self.blocks["BLOCK_E"]), knobs, constants)
        self.text = self.scores.text
        self.exp = "tl.exp" if self.text.config.is_fast else "libdevice.exp"
        precision = knobs.get("input_precision", "ieee")
        self.dot = f'input_precision="{precision}", out_dtype=tl.float32'

    def first(self) -> Piece:
        plan = self.attention
        lines = [*self._rows_of_program(), "for start in tl.range(0, ncols, BLOCK_N):"]
        lines += indented(self._step())
        lines += self._end()
        tiles: list[tuple[Dim, int]] = [(plan.rows, self.blocks["BLOCK_M"])]
        if plan.batch != 1:
            tiles.append((plan.batch, 1))
        return make_piece(self.kernel.name, lines, arguments_of(self.kernel, self.text), self.blocks, tuple(tiles))

    def limits(self) -> tuple[Limit, ...]:
        return open_limits(index_limits(self.attention.extents, self.text.config.is_wide))

    def _rows_of_program(self) -> list[str]:
        plan, scores, text = self.attention, self.scores, self.text
        lines = [f"nrows = {text.size(plan.rows)}", f"ncols = {text.size(plan.keys)}"]
        lines.append(f"pid = {program_number(text.config.is_wide)}")
        if plan.batch == 1:
            lines.append("row_tile = pid")
        else:
            lines.append("row_tiles = tl.cdiv(nrows, BLOCK_M)")
            lines += ["b = pid // row_tiles + tl.full([1, 1], 0, tl.int32)", "row_tile = pid % row_tiles"]
        return [
            *lines,
            f"r = {text.arange('row_tile * BLOCK_M', 'BLOCK_M', 0)}",
            "row_mask = r < nrows",
            f"d = {text.arange('0', 'BLOCK_D', 1)}",
            f"dk = {text.arange('0', 'BLOCK_D', 0)}",
            f"e = {text.arange('0', 'BLOCK_E', 1)}",
            f"q = {load(scores.matrix(plan.query, 'r', 'd'), scores.row_mask, _within('d', plan.depth))}",
            'top = tl.full([BLOCK_M, 1], float("-inf"), tl.float32)',
            "weight = tl.zeros([BLOCK_M, 1], tl.float32)",
            "mixed = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)",
        ]

    def _step(self) -> list[str]:
        """Lines that work on the next keys.

        A row that has met no key yet has the largest score -inf, and -inf - -inf would be NaN: 0 is subtracted then.
        """
        plan, scores, text = self.attention, self.scores, self.text
        mask = "(n < ncols)" if scores.col_mask else ""
        return [
            f"c = {text.arange('start', 'BLOCK_N', 1)}",
            "col_mask = c < ncols",
            f"k = {load(scores.matrix(plan.key, 'dk', 'c'), _within('dk', plan.depth), scores.col_mask)}",
            f"acc = tl.dot(q, k, {self.dot})",
            *scores.values(),
            f'score = tl.where(col_mask, {self._score()}, float("-inf"))',
            "above = tl.maximum(top, tl.max(score, axis=1, keep_dims=True))",
            'base = tl.where(above == float("-inf"), 0.0, above)',
            f"p = {self.exp}(score - base)",
            f"kept = {self.exp}(top - base)",
            "weight = weight * kept + tl.sum(p, axis=1, keep_dims=True)",
            f"n = {text.arange('start', 'BLOCK_N', 0)}",
            f"v = {load(scores.matrix(plan.value, 'n', 'e'), mask, _within('e', plan.width))}",
            f"mixed = tl.dot(p.to(v.dtype), v, mixed * kept, {self.dot})",
            "top = above",
        ]

    def _score(self) -> str:
        score = self.attention.score
        text, name = self.text.text(score), self.scores.kernel.values[score].dtype
        return text if name == "float32" else f"{text}.to(tl.float32)"

    def _end(self) -> list[str]:
        lines = []
        keys = with_constants(self.attention.keys, self.text.constants)
        if not (isinstance(keys, int) and keys > 0):  # without keys, eager's result is a sum of nothing: 0
            lines.append("weight = tl.where(tl.full([1, 1], ncols, tl.int64) > 0, weight, 1.0)")
        lines += [
            "acc = mixed / weight",
            "c = e",
            f"ncols = {self.text.size(self.attention.width)}",
            "col_mask = c < ncols",
        ]
        if any("col_tile" in line for line in self.result.stores()):
            lines.append("col_tile = row_tile * 0")
        return [*lines, *self.result.alone(), *self.result.values(), *self.result.stores()]


def block_of(size: int) -> int:
    """The block that holds a head: a power of two, at least the 16 that a matrix unit takes."""
    return max(16, 1 << (size - 1).bit_length())


def _within(place: str, size: int) -> str:
    return "" if block_of(size) == size else f"({place} < {size})"


TEMPLATE = Template(ATTENTION, plan_attention, attention_knobs, print_attention)
