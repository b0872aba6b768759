"""The loop-level form of a node: one nest of loops, independent of the target.

In: what lowering found. Out: an immutable kernel description that a printer turns into C or another language.
The nest has outer dims (``rows``) and inner dims (``cols``, the last one is vectorised). Values are in SSA
order; each depends on some of the dims. Three kinds of reduction exist:
``row_reduce`` over all cols, whose result may be used again in the same row; ``col_reduce`` over all rows, one
result per column; ``full_reduce`` over rows, or over rows and cols, one result in all. The last two are
sinks: what depends on them is calculated once after the nest (region ``post``).
Guarantee: `check` accepts a kernel exactly when every printer may rely on these rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from autofuse.codegen.dtypes import DTYPES, VALUE_TYPE
from autofuse.ir.shape import Dim

Strides = tuple[tuple[int, Dim], ...]  # (domain dim, elements per step), absent where the stride is 0


@dataclass(frozen=True)
class Access:
    """Where in a parameter an element lies: offset + sum of dim index x stride + indirect index x stride."""

    param: int
    strides: Strides
    indirect: Dim = 0  # stride of the last argument of a ``gather``


@dataclass(frozen=True)
class LoopValue:
    """One SSA value. ``attr`` is the op's constant, Access, linear index or reduction kind.

    ``uniform`` is the number that eager's generator gives the element at a linear place, in (0, 1].
    """

    op: str
    dtype: str  # a compute dtype: never a 16-bit float
    args: tuple[int, ...] = ()
    attr: object = None


@dataclass(frozen=True)
class Store:
    """Write a value to a parameter."""

    value: int
    access: Access


@dataclass(frozen=True)
class Param:
    """A tensor the kernel reads or writes."""

    name: str
    dtype: str
    is_output: bool


@dataclass(frozen=True)
class LoopKernel:
    """A loop nest with its body."""

    name: str  # af_<kind>_<ops>_<hash>
    dims: tuple[Dim, ...]  # sizes of the domain dims
    rows: tuple[int, ...]  # domain dims of the outer loops, outermost first
    cols: tuple[int, ...]  # domain dims of the inner loops, the last is vectorised
    params: tuple[Param, ...]  # inputs in order, then outputs in order
    values: tuple[LoopValue, ...]
    stores: tuple[Store, ...]
    symbols: tuple[str, ...]  # symbols in the order of the sizes array
    comments: tuple[str, ...] = ()  # operations and the user's lines
    kind: str = "pointwise"
    notes: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def has_row_reduce(self) -> bool:
        return any(v.op == "row_reduce" for v in self.values)

    @property
    def sinks(self) -> tuple[int, ...]:
        """Values that are reduced over rows; known only after the nest."""
        return tuple(i for i, v in enumerate(self.values) if v.op in SINKS)


SINKS = ("col_reduce", "full_reduce", "rows_reduce")
REDUCTIONS = ("row_reduce", *SINKS)
REDUCE_KINDS = ("sum", "max", "min", "peak", "prod", "any", "all")  # peak: a maximum that may overlook NaN

TRANSCENDENTAL = (
    "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "tanh", "sinh", "cosh", "asin",
    "acos", "atan", "erf", "erfc",
)  # fmt: skip
UNARY = (
    *TRANSCENDENTAL, "neg", "abs", "sqrt", "rsqrt", "reciprocal", "floor", "ceil", "round", "trunc", "sign",
    "not", "bitnot", "isnan", "isinf",
)  # fmt: skip
BINARY = (
    "add", "sub", "mul", "div", "maximum", "minimum", "pow", "atan2", "fmod", "remainder",
    "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor", "bitand", "bitor", "bitxor",
)  # fmt: skip
ARITY: dict[str, int] = {
    "load": 0, "const": 0, "size": 0, "index": 0, "cast": 1, "round_to": 1, "gather": 1, "uniform": 1, "where": 3,
    **dict.fromkeys(UNARY, 1), **dict.fromkeys(BINARY, 2), **dict.fromkeys(REDUCTIONS, 1),
}  # fmt: skip
COMPARISONS = frozenset(["eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor", "not", "isnan", "isinf"])

# Rough cost of an op in arithmetic operations per element; decides what is worth keeping in a row buffer.
COST: dict[str, int] = {
    **dict.fromkeys(TRANSCENDENTAL, 12),
    **dict.fromkeys(["pow", "atan2", "fmod", "remainder"], 24),
    **dict.fromkeys(["div", "sqrt", "rsqrt", "reciprocal"], 3),
    **dict.fromkeys(["load", "const", "size", "index", "cast"], 0),
    "gather": 4, "round_to": 2, "uniform": 60,
}  # fmt: skip


@dataclass(frozen=True)
class Region:
    """What a value depends on."""

    rows: bool = False  # row dims, or a row reduction
    cols: bool = False
    post: bool = False  # a reduction over rows
    stage: int = 0  # row reductions one after the other on the way to it

    @property
    def name(self) -> str:
        if self.post:
            return "post"
        if self.cols:
            return "full" if self.rows else "col"
        return "row" if self.rows else "entry"


def regions(kernel: LoopKernel) -> list[Region]:
    """The region of each value, in order."""
    rows, cols = frozenset(kernel.rows), frozenset(kernel.cols)
    found: list[Region] = []
    for value in kernel.values:
        dims = {d for d, _ in _linear(value)}
        args = [found[a] for a in value.args]
        in_columns = bool(dims & cols) or any(a.cols for a in args)
        region = Region(
            # without row dims the nest is one row, and what varies along its columns belongs to it
            rows=bool(dims & rows) or any(a.rows for a in args) or (in_columns and not rows),
            cols=in_columns,
            post=any(a.post for a in args),
            stage=max((a.stage for a in args), default=0),
        )
        if value.op == "row_reduce":
            region = Region(rows=True, cols=False, post=region.post, stage=region.stage + 1)
        elif value.op == "col_reduce":
            region = Region(cols=True, post=True)
        elif value.op in SINKS:
            region = Region(post=True)
        found.append(region)
    return found


def _linear(value: LoopValue) -> Strides:
    if isinstance(value.attr, Access):
        return value.attr.strides
    return value.attr if value.op == "index" else ()  # type: ignore[return-value]


# ---- validity -----------------------------------------------------------------------------------

Rule = Callable[[LoopKernel], Iterator[str]]


def _dims_partition(kernel: LoopKernel) -> Iterator[str]:
    if sorted((*kernel.rows, *kernel.cols)) != list(range(len(kernel.dims))):
        yield f"rows {kernel.rows} and cols {kernel.cols} are not a partition of {len(kernel.dims)} dims"


def _ssa_order(kernel: LoopKernel) -> Iterator[str]:
    for i, value in enumerate(kernel.values):
        if value.op not in ARITY:
            yield f"value {i} has the unknown op {value.op}"
        elif len(value.args) != ARITY[value.op]:
            yield f"value {i} ({value.op}) has {len(value.args)} arguments, not {ARITY[value.op]}"
        if any(not 0 <= a < i for a in value.args):
            yield f"value {i} ({value.op}) uses a later value"


def _dtypes(kernel: LoopKernel) -> Iterator[str]:
    for i, value in enumerate(kernel.values):
        if value.dtype not in VALUE_TYPE:
            yield f"value {i} has dtype {value.dtype}, which nothing is calculated in"
        if value.op in COMPARISONS and value.dtype != "bool":
            yield f"value {i} ({value.op}) is {value.dtype}, not bool"
        operands = [kernel.values[a].dtype for a in value.args]
        if value.op in BINARY and operands[0] != operands[1]:
            yield f"value {i} ({value.op}) mixes {operands[0]} and {operands[1]}"
        if value.op == "where" and (operands[0] != "bool" or operands[1] != operands[2]):
            yield f"value {i} (where) has operands {operands}"


def _accesses(kernel: LoopKernel) -> Iterator[str]:
    for access, writes in [
        *((v.attr, False) for v in kernel.values if isinstance(v.attr, Access)),
        *((s.access, True) for s in kernel.stores),
    ]:
        param = kernel.params[access.param]
        if param.is_output != writes:
            yield f"{'store to' if writes else 'load from'} {param.name}, which is not for that"
        if param.dtype not in DTYPES:
            yield f"{param.name} has the unknown dtype {param.dtype}"
        if any(not 0 <= d < len(kernel.dims) for d, _ in access.strides):
            yield f"access to {param.name} uses a dim outside of the domain"


def _reductions(kernel: LoopKernel) -> Iterator[str]:
    found = regions(kernel)
    for i, value in enumerate(kernel.values):
        if value.op in REDUCTIONS and value.attr not in REDUCE_KINDS:
            yield f"value {i} reduces by {value.attr}"
        if value.op in REDUCTIONS and any(found[a].post for a in value.args):
            yield f"value {i} reduces what is known only after the nest"
        if found[i].post and value.op not in SINKS and any(found[a].rows for a in value.args):
            yield f"value {i} needs a row and a reduction over rows at once"


def _stores(kernel: LoopKernel) -> Iterator[str]:
    found = regions(kernel)
    for store in kernel.stores:
        dims = {d for d, _ in store.access.strides}
        region = found[store.value]
        if region.name in ("post", "col", "entry") and dims & set(kernel.rows):
            pass  # a broadcast that is written out: the store itself moves into the nest
        if region.post and dims & set(kernel.rows):
            yield f"store to {kernel.params[store.access.param].name} spreads a sink over rows"
    written = [s.access.param for s in kernel.stores]
    outputs = [i for i, p in enumerate(kernel.params) if p.is_output]
    if sorted(written) != outputs:
        yield f"stores write parameters {sorted(written)}, outputs are {outputs}"


RULES: tuple[Rule, ...] = (_dims_partition, _ssa_order, _dtypes, _accesses, _reductions, _stores)


def check(kernel: LoopKernel) -> list[str]:
    """What is wrong with a kernel; empty where it is valid."""
    return [f"{kernel.name}: {problem}" for rule in RULES for problem in rule(kernel)]
