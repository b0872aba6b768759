"""The result of the Triton printer: the text of a module, and how its kernels are launched.

In: made by `printer.print_triton`. Out: `TritonSource`, from which the compiler makes binaries for any target, the
interpreter runs the text as it is, and `resolve` gives, for given sizes, the launches and grids of one call of the
node. Serialisable, free of torch and of Triton: the daemon, the compiler process and the script share it. A call runs
the passes in order on one stream. Most nodes have one pass; reductions over rows have two: programs write partial
results to scratch memory, the second pass adds them up in a fixed order, so results repeat bit by bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from autofuse.codegen.philox import RandomState
from autofuse.errors import ShapeError
from autofuse.ir.shape import Dim, evaluate, parse_dim
from autofuse.ir.validation import stored_name, stored_number

MAX_GRID = 2**31 - 1  # programs of a launch along x
RANDOM = ("seed", "offset", "threads", "vec", "draws")  # fields of a RandomState, in the order of its arguments


@dataclass(frozen=True)
class Argument:
    """A runtime argument of a kernel."""

    name: str  # in the source
    kind: Literal["param", "scratch", "symbol", "programs", "random"]
    type: str  # Triton's name: "*fp32", "*bf16", "*i1", "i32", "i64"
    index: int = 0  # of the parameter (inputs, then outputs), the scratch tensor, or in RANDOM


@dataclass(frozen=True)
class Pass:
    """One kernel of the module and how it is launched."""

    function: str
    arguments: tuple[Argument, ...]  # in the order of the signature
    constants: tuple[tuple[str, int], ...]  # tl.constexpr parameters, which follow the arguments
    tiles: tuple[tuple[Dim, int], ...]  # (extent, block): the product of ceil(extent / block) is the number of tiles
    shared: int = 0  # so many leading entries of ``tiles`` are shared by programs, which loop over their tiles
    beside: tuple[tuple[tuple[Dim, int], ...], ...] = ()  # tiles of further nests, whose programs follow in order


@dataclass(frozen=True)
class Scratch:
    """Memory in which a pass leaves results for the next: ``programs`` x ``columns`` elements, contiguous."""

    dtype: str
    columns: Dim


@dataclass(frozen=True)
class TritonSource:
    """A module of one or more kernels."""

    name: str  # af_<kind>_<ops>_<hash>; functions are this name, with a suffix where there are several
    text: str
    passes: tuple[Pass, ...]
    scratch: tuple[Scratch, ...]
    symbols: tuple[str, ...]  # that are arguments; those of a specialised kernel are part of the text
    num_warps: int
    num_stages: int
    programs: int = 0  # of a launch, about; the argument ``programs`` is how many of them share tiles
    limits: tuple[tuple[Dim, int], ...] = ()  # (size, bound): the kernels are wrong for sizes beyond a bound
    contracts: bool = True  # the compiler may make one instruction of a multiplication and an addition

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "text": self.text,
            "passes": [
                {
                    "function": p.function,
                    "arguments": [[a.name, a.kind, a.type, a.index] for a in p.arguments],
                    "constants": [list(c) for c in p.constants],
                    "tiles": _encode_tiles(p.tiles),
                    "shared": p.shared,
                    "beside": [_encode_tiles(tiles) for tiles in p.beside],
                }
                for p in self.passes
            ],
            "scratch": [[s.dtype, _encode(s.columns)] for s in self.scratch],
            "symbols": list(self.symbols),
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "programs": self.programs,
            "limits": [[_encode(size), bound] for size, bound in self.limits],
            **({} if self.contracts else {"contracts": False}),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TritonSource:
        return cls(
            name=stored_name(data["name"]),
            text=data["text"],
            passes=tuple(
                Pass(
                    stored_name(p["function"]),
                    tuple(Argument(stored_name(name), *rest) for name, *rest in p["arguments"]),
                    tuple((stored_name(name), stored_number(value)) for name, value in p["constants"]),
                    _decode_tiles(p["tiles"]),
                    p["shared"],
                    tuple(_decode_tiles(tiles) for tiles in p["beside"]),
                )
                for p in data["passes"]
            ),
            scratch=tuple(Scratch(stored_name(dtype), _decode(columns)) for dtype, columns in data["scratch"]),
            symbols=tuple(map(stored_name, data["symbols"])),
            num_warps=data["num_warps"],
            num_stages=data["num_stages"],
            programs=data["programs"],
            limits=tuple((_decode(size), bound) for size, bound in data["limits"]),
            contracts=bool(data.get("contracts", True)),
        )


def _encode(dim: Dim) -> int | str:
    return dim if isinstance(dim, int) else str(dim)


def _decode(data: int | str) -> Dim:
    return data if isinstance(data, int) else parse_dim(data)


def _encode_tiles(tiles: Sequence[tuple[Dim, int]]) -> list[list[int | str]]:
    return [[_encode(extent), block] for extent, block in tiles]


def _decode_tiles(data: Sequence[Sequence[Any]]) -> tuple[tuple[Dim, int], ...]:
    return tuple((_decode(extent), block) for extent, block in data)


# ---- one call -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Launch:
    """One launch of one call, with everything that the sizes decide."""

    number: int  # of the pass
    grid: int  # programs along x; y and z are 1
    scalars: tuple[int, ...]  # values of the arguments that are no pointers, in their order


@dataclass(frozen=True)
class ResolvedCall:
    """All launches of one call of the node, for one set of sizes."""

    launches: tuple[Launch, ...]
    scratch: tuple[tuple[str, int], ...]  # (dtype, elements) of each scratch tensor


def resolve(source: TritonSource, values: Mapping[str, int], state: RandomState | None = None) -> ResolvedCall:
    """The launches for these values of the node's symbols, and this generator state if the node samples.

    Raises ShapeError where the kernels are not made for these sizes: a row longer than its block, more elements than
    32-bit indices reach; and for a node that draws without a state. A call whose outputs are all empty needs no launch
    and must not come here.
    """
    for size, bound in source.limits:
        found = evaluate(size, values)
        if found > bound:
            raise ShapeError(f"expected {size} of at most {bound} for {source.name}, found {found}")
    programs = max((_shares(source, p, values) for p in source.passes if p.shared), default=1)
    launches = []
    for number, item in enumerate(source.passes):
        grid = _grid(item, programs, values)
        if grid > MAX_GRID:
            raise ShapeError(f"expected at most {MAX_GRID} programs for {item.function}, found {grid}")
        scalars = tuple(
            _scalar(a, values, programs, state) for a in item.arguments if a.kind not in ("param", "scratch")
        )
        launches.append(Launch(number, grid, scalars))
    scratch = tuple((s.dtype, programs * evaluate(s.columns, values)) for s in source.scratch)
    return ResolvedCall(tuple(launches), scratch)


def _scalar(argument: Argument, values: Mapping[str, int], programs: int, state: RandomState | None) -> int:
    if argument.kind == "programs":
        return programs
    if argument.kind == "symbol":
        return values[argument.name]
    if state is None:
        raise ShapeError("expected the state of a generator for a kernel that draws numbers, found none")
    return random_numbers(state)[argument.index]


def random_numbers(state: RandomState) -> tuple[int, ...]:
    """The fields of a state in the order of RANDOM, as a kernel takes them."""
    numbers = [int(getattr(state, name)) for name in RANDOM]
    return tuple(n - 2**64 if n >= 2**63 else n for n in numbers)  # a seed has 64 bits without a sign


def _grid(item: Pass, programs: int, values: Mapping[str, int]) -> int:
    if item.shared:
        return max(1, _tiles(item.tiles[item.shared :], values)) * programs
    return max(1, sum(_tiles(tiles, values) for tiles in (item.tiles, *item.beside)))


def _shares(source: TritonSource, item: Pass, values: Mapping[str, int]) -> int:
    """How many programs share the leading tiles, for each of the other tiles."""
    others, shared = (max(1, _tiles(t, values)) for t in (item.tiles[item.shared :], item.tiles[: item.shared]))
    return min(max(1, source.programs // others), shared)


def _tiles(tiles: Sequence[tuple[Dim, int]], values: Mapping[str, int]) -> int:
    total = 1
    for extent, block in tiles:
        total *= -(-evaluate(extent, values) // block)
    return total


# ---- what a binary may assume -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Assumptions:
    """What one binary of a kernel takes for granted; the launcher picks the strongest that holds for a call."""

    is_aligned: bool = False  # every pointer is a multiple of 16 bytes
    divisible: tuple[str, ...] = ()  # symbols whose values are multiples of 16

    def hold(self, is_aligned: bool, values: Mapping[str, int]) -> bool:
        return (is_aligned or not self.is_aligned) and all(values[s] % 16 == 0 for s in self.divisible)


def natural_assumptions(symbols: Sequence[str], values: Mapping[str, int]) -> Assumptions:
    """The strongest assumptions that hold for fresh tensors of these sizes."""
    return Assumptions(True, tuple(s for s in symbols if values[s] % 16 == 0))


NOTHING_ASSUMED = Assumptions()
