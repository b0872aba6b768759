"""Index algebra: the dims of every tensor of a node as mixed-radix words over shared atoms.

In: symbolic sizes and view operations. Out: for each tensor dim a tuple of atoms, outermost first; empty for a
size-1 or broadcast dim. An atom is one loop dim of the final kernel; a view that needs finer loops splits it,
and all words that hold it follow, because atoms are shared objects.
Guarantee: only provable steps are taken. Where two sizes are not provably equal or a split is not provably
whole, LoweringError says so; nothing is guessed from example values.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

from autofuse.errors import LoweringError
from autofuse.ir.shape import Dim, SymbolicShape, divide, product

_numbers = itertools.count()


class Atom:
    """One loop dim while lowering. Joined atoms share a root; a split atom has parts, outermost first."""

    __slots__ = ("is_unrolled", "number", "owners", "parent", "parts", "size")

    def __init__(self, size: Dim, is_unrolled: bool = False) -> None:
        self.number = next(_numbers)
        self.size = size
        self.parent: Atom | None = None
        self.parts: tuple[Atom, ...] = ()
        self.owners: set[Hashable] = set()  # tensors whose canonical index holds it
        self.is_unrolled = is_unrolled  # outputs are stored once for each of its few places, not in a loop

    def __repr__(self) -> str:
        return f"a{self.number}:{self.size}"


class Indirect:
    """An index that is read from a tensor: the element at ``value`` of a dim."""

    __slots__ = ("size", "value")

    def __init__(self, value: object, size: Dim) -> None:
        self.value = value
        self.size = size


@dataclass(frozen=True)
class Moved:
    """A position calculated from others: ``start + step x position of word``; without a word, ``start`` itself."""

    start: Dim
    size: Dim  # of the dim that it is a position in
    word: tuple[Part, ...] = ()
    step: int = 1


Part = Atom | Indirect | Moved
Word = tuple[Part, ...]  # the parts of one tensor dim
Index = tuple[Word, ...]  # a word per tensor dim


def root(atom: Atom) -> Atom:
    while atom.parent is not None:
        atom = atom.parent
    return atom


def resolve(word: Iterable[Part]) -> Word:
    """The word in finest terms: roots, split atoms replaced by their parts."""
    found: list[Part] = []
    for part in word:
        if isinstance(part, Indirect):
            found.append(part)
            continue
        if isinstance(part, Moved):
            found.append(replace(part, word=resolve(part.word)))
            continue
        top = root(part)
        found.extend(resolve(top.parts) if top.parts else (top,))
    return tuple(found)


def resolve_index(index: Index) -> Index:
    return tuple(resolve(word) for word in index)


def atoms_of(index: Index) -> tuple[Atom, ...]:
    """All atoms of an index, in order."""
    parts = [p for word in index for p in resolve(word)]
    return tuple(
        a for p in parts for a in (atoms_of((p.word,)) if isinstance(p, Moved) else (p,)) if isinstance(a, Atom)
    )


def fresh_index(shape: SymbolicShape) -> Index:
    """New atoms for a tensor; size-1 dims get none."""
    return tuple(() if dim == 1 else (Atom(dim),) for dim in shape)


def is_fixed(part: Part) -> bool:
    """Whether a part is one place that is known in advance."""
    return isinstance(part, Moved) and not part.word


def split(atom: Atom, sizes: Sequence[Dim]) -> tuple[Atom, ...]:
    """Split an atom into parts of the given sizes (outermost first); their product is the atom's size."""
    top = root(atom)
    parts = tuple(Atom(size, top.is_unrolled) for size in sizes)
    for part in parts:
        part.owners = set(top.owners)
    top.parts = parts
    return parts


def join(left: Word, right: Word) -> bool:
    """Make two words of the same size one, so that both run over the same loops.

    Returns False, with nothing joined, where a word has parts other than loops, or where some tensor holds both words
    in different dims (``x + x.t()``), which must stay apart. Raises LoweringError where sizes do not match.
    """
    a, b = list(resolve(left)), list(resolve(right))
    if a == b:
        return True
    if not all(isinstance(p, Atom) for p in (*a, *b)):
        return False
    atoms_a, atoms_b = [p for p in a if isinstance(p, Atom)], [p for p in b if isinstance(p, Atom)]
    if _joint_owners(atoms_a) & _joint_owners(atoms_b):
        return False
    for x, y in _align(atoms_a, atoms_b):
        if x is not y:
            y.parent = x
            x.owners |= y.owners
            x.is_unrolled |= y.is_unrolled
    return True


def _joint_owners(atoms: Iterable[Atom]) -> set[Hashable]:
    return set().union(*(a.owners for a in atoms))


def _align(left: list[Atom], right: list[Atom]) -> list[tuple[Atom, Atom]]:
    """Split both words until they agree atom by atom. Raises LoweringError where their sizes do not match."""
    pairs: list[tuple[Atom, Atom]] = []
    a, b = left[::-1], right[::-1]  # used as stacks, outermost on top
    while a and b:
        x, y = a.pop(), b.pop()
        if x.size == y.size:
            pairs.append((x, y))
        elif (rest := divide(x.size, y.size)) is not None:
            head, tail = split(x, (y.size, rest))
            pairs.append((head, y))
            a.append(tail)
        elif (rest := divide(y.size, x.size)) is not None:
            head, tail = split(y, (x.size, rest))
            pairs.append((x, head))
            b.append(tail)
        else:
            raise LoweringError("sizes", f"expected sizes that are provably equal, found {x.size} and {y.size}")
    if a or b:
        raise LoweringError("sizes", f"expected sizes that are provably equal, found {left} and {right}")
    return pairs


def word_size(word: Word) -> Dim:
    return product(p.size for p in resolve(word))


def regroup(index: Index, shape: SymbolicShape) -> Index:
    """The same elements under another shape: ``view``. Atoms are split where the new dims need it.

    The elements of ``index`` run in row-major order through its words; the result groups the same parts into
    dims of the new sizes. Raises LoweringError("view") where a group boundary cannot be found provably.
    """
    flat = [p for word in index for p in resolve(word)]
    if not all(isinstance(p, Atom) or is_fixed(p) for p in flat):
        return _regroup_indirect(index, shape)
    parts = [p for p in flat if not isinstance(p, Indirect)]
    try:
        return _take(parts, list(shape), from_left=True)
    except LoweringError:
        return _take(parts, list(shape), from_left=False)


def _take(parts: list[Atom | Moved], sizes: list[Dim], from_left: bool) -> Index:
    if not from_left:
        return tuple(w[::-1] for w in _take_stack(parts[:], sizes[::-1], from_left))[::-1]
    return tuple(_take_stack(parts[::-1], sizes, from_left))


def _split_part(part: Atom | Moved, sizes: tuple[Dim, Dim]) -> tuple[Atom | Moved, Atom | Moved]:
    """Split an atom, or a known place, into its parts in an outer and an inner dim of these sizes."""
    if isinstance(part, Atom):
        outer, inner = split(part, sizes)
        return outer, inner
    if not isinstance(part.start, int) or not isinstance(sizes[1], int):
        raise LoweringError("view", f"expected a place that splits by {sizes[1]}, found {part.start}")
    high, low = divmod(part.start, sizes[1])
    return Moved(high, sizes[0]), Moved(low, sizes[1])


def _take_stack(stack: list[Atom | Moved], sizes: list[Dim], from_left: bool) -> list[Word]:
    words: list[Word] = []
    for size in sizes:
        word: list[Part] = []
        rest: Dim = size
        while rest != 1:
            if not stack:
                raise LoweringError("view", f"expected a view that keeps the elements, found a dim of {rest} left")
            atom = stack.pop()
            quotient = divide(rest, atom.size)
            if quotient is not None:
                word.append(atom)
                rest = quotient
                continue
            outer = divide(atom.size, rest)
            if outer is None:
                raise LoweringError("view", f"expected a dim that splits evenly, found {atom.size} against {rest}")
            if from_left:
                taken, left = _split_part(atom, (rest, outer))
            else:
                left, taken = _split_part(atom, (outer, rest))
            word.append(taken)
            stack.append(left)
            rest = 1
        words.append(tuple(word))
    if any(atom.size != 1 for atom in stack):
        raise LoweringError("view", f"expected a view that keeps the elements, found {stack} left over")
    return words


def _regroup_indirect(index: Index, shape: SymbolicShape) -> Index:
    """Regroup the dims on both sides of a dim with an indirect or moved index, which the view must leave whole."""
    position = next(i for i, w in enumerate(index) if not all(isinstance(p, Atom) or is_fixed(p) for p in resolve(w)))
    size = word_size(index[position])
    before = product(word_size(w) for w in index[:position])
    seen: Dim = 1
    for i, dim in enumerate(shape):
        if seen == before and dim == size:
            head = regroup(index[:position], SymbolicShape(shape.dims[:i]))
            return (*head, index[position], *regroup(index[position + 1 :], SymbolicShape(shape.dims[i + 1 :])))
        seen = product((seen, dim))
    raise LoweringError("view", f"expected a view that keeps the indexed dim of {size}, found {shape}")


def broadcast_index(index: Index, shape: SymbolicShape) -> Index:
    """The index of an operand of ``shape`` where the result of a broadcast has ``index``."""
    tail = index[len(index) - len(shape) :] if len(shape) else ()
    return tuple(() if dim == 1 else word for dim, word in zip(shape, tail, strict=True))
