"""One Triton kernel of a module: its text from head to end, and how it is launched.

In: the lines of the body, the arguments that it may use, the constants that it may name. Out: a `Piece`.
Guarantee: a kernel takes just the arguments and constants that its text names, in a fixed order.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from autofuse.codegen.loops import Param
from autofuse.codegen.triton.scalar import POINTERS
from autofuse.codegen.triton.source import RANDOM, Argument, Pass
from autofuse.ir.shape import Dim


@dataclass(frozen=True)
class Piece:
    """One kernel of the module."""

    text: str
    launch: Pass


def make_piece(
    name: str,
    lines: Sequence[str],
    arguments: Sequence[Argument],
    blocks: Mapping[str, int],
    tiles: tuple[tuple[Dim, int], ...],
    shared: int = 0,
    is_called: bool = False,
) -> Piece:
    """A kernel with these lines as its body.

    ``blocks``: the constants that the lines may name; ``tiles`` and ``shared`` as in `Pass`; ``is_called``: the kernel
    is a function, which another kernel calls with the program's number as first argument.
    """
    body = "\n".join(f"    {line}" for line in lines)
    used = [a for a in (*arguments, *RANDOM_ARGUMENTS) if _occurs(a.name, body)]
    constants = tuple((k, v) for k, v in blocks.items() if _occurs(k, body))
    head = ["pid"] * is_called + [a.name for a in used] + [f"{k}: tl.constexpr" for k, _ in constants]
    text = f"@triton.jit\ndef {name}({', '.join(head)}):\n{body}\n"
    return Piece(text, Pass(name, tuple(used), constants, tiles, shared))


def _occurs(name: str, text: str) -> bool:
    return re.search(rf"\b{re.escape(name)}\b", text) is not None


def program_number(is_wide: bool) -> str:
    """The number of the program, from which its tile follows; ``is_wide``: in 64 bits."""
    return "tl.program_id(0)" + (".to(tl.int64)" if is_wide else "")


def pointer_arguments(params: Iterable[Param]) -> list[Argument]:
    """The tensors of a node, as arguments."""
    return [Argument(p.name, "param", POINTERS[p.dtype], n) for n, p in enumerate(params)]


def symbol_arguments(symbols: Iterable[str], constants: Collection[str], is_wide: bool) -> list[Argument]:
    """The symbols that the text does not have built in."""
    return [Argument(s, "symbol", "i64" if is_wide else "i32") for s in symbols if s not in constants]


# The state of the generator; seed and offset need more than 32 bits.
RANDOM_ARGUMENTS = tuple(
    Argument(f"rng_{name}", "random", "i64" if name in ("seed", "offset") else "i32", n)
    for n, name in enumerate(RANDOM)
)
