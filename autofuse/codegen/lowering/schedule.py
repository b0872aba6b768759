"""Scheduling: which loops are rows, which are columns, and in what order; then the final `LoopKernel`.

In: body nodes over atoms and the stores. Out: a kernel whose dims are numbered loops. One set of loops K is reduced
inside a row and becomes ``cols``; every other reduction must run over the rest, or over everything, and may only feed
outputs. Loops are ordered by the strides of the largest access. Adjacent loops that every access steps through evenly
are collapsed into one. Guarantee: a node that needs two different inner reductions, or whose outputs have no common
nest, is refused.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autofuse.codegen.loops import SINKS, Access, LoopKernel, LoopValue, Param, Scan, Store, regions
from autofuse.codegen.lowering.builder import AtomAccess, Node, Val
from autofuse.codegen.lowering.index import Atom
from autofuse.errors import LoweringError
from autofuse.ir.shape import Dim, as_dim, evaluate

Terms = tuple[tuple[Atom, Dim], ...]
Atoms = frozenset[Atom]


@dataclass(frozen=True)
class _Body:
    """Live nodes, renumbered, with what each depends on."""

    nodes: tuple[Node, ...]
    stores: tuple[tuple[int, AtomAccess], ...]
    depends: tuple[Atoms, ...]

    @property
    def accesses(self) -> list[AtomAccess]:
        """Stores first, then loads."""
        return [a for _, a in self.stores] + [n.attr for n in self.nodes if isinstance(n.attr, AtomAccess)]

    @property
    def terms(self) -> list[Terms]:
        """The (loop, stride) terms of every access and index of the body."""
        return [a.strides for a in self.accesses] + [n.attr for n in self.nodes if n.op == "index"]  # type: ignore[misc]


def schedule(
    nodes: Sequence[Node],
    stores: Sequence[tuple[Val, AtomAccess]],
    params: tuple[Param, ...],
    symbols: tuple[str, ...],
    label: str,
    digest: str,
    comments: tuple[str, ...],
) -> LoopKernel:
    """Choose the nest and build the kernel; raises LoweringError with a reason code."""
    body = _live(nodes, stores)
    domain = _domain(body)
    inner = _inner_reduction(body)
    order = _memory_order(body, domain, symbols)
    rows, cols = _split_nest(body, domain, inner, order)
    if rows or cols:
        groups = _collapse(rows, body) + _collapse(cols, body)
        row_count = len(_collapse(rows, body))
        if len(groups) - row_count > 1 and any(n.op == "scan" for n in body.nodes):
            raise LoweringError("scan", "expected a scan along one loop, found several")
    else:  # nothing is reduced over a part of the loops: all of them may collapse, the last group is vectorised
        groups = _collapse(order, body)
        row_count = max(0, len(groups) - 1)
        cols = groups[-1] if groups else []
        rows = [a for a in order if a not in cols]
    kernel = _kernel(groups, row_count, body, params, symbols, comments, rows, cols)
    kind = _kind(kernel)
    _check_sinks(kernel)
    return dataclasses.replace(kernel, name=f"af_{kind}_{label}_{digest}", kind=kind)


def schedule_tile(
    nest: Sequence[Sequence[Atom]],
    nodes: Sequence[Node],
    stores: Sequence[tuple[Val, AtomAccess]],
    params: tuple[Param, ...],
    symbols: tuple[str, ...],
    name: str,
    comments: tuple[str, ...],
) -> tuple[LoopKernel, tuple[tuple[int, ...], ...]]:
    """A kernel whose loops are those of a nest, and which of its dims each part of the nest has become.

    ``nest``: outermost first; the last part is the columns. Only neighbours within a part collapse. Raises
    LoweringError where a value runs over other loops or is reduced.
    """
    body = _live(nodes, stores)
    loops = [atom for part in nest for atom in part]
    if _domain(body) - set(loops):
        raise LoweringError("disjoint", "expected values over the loops of the tile, found other loops")
    if any(n.op in ("reduce", "scan") for n in body.nodes):
        raise LoweringError("reduction", "expected values of single elements, found a reduction")
    parts = [_collapse(list(part), body) for part in nest]
    groups = [group for part in parts for group in part]
    counts = [sum(len(part) for part in parts[:k]) for k in range(len(parts) + 1)]
    kernel = _kernel(groups, counts[-2], body, params, symbols, comments, loops, [])
    dims = tuple(tuple(range(low, high)) for low, high in itertools.pairwise(counts))
    return dataclasses.replace(kernel, name=name), dims


def _kernel(
    groups: list[list[Atom]],
    row_count: int,
    body: _Body,
    params: tuple[Param, ...],
    symbols: tuple[str, ...],
    comments: tuple[str, ...],
    rows: list[Atom],
    cols: list[Atom],
) -> LoopKernel:
    """The kernel over groups of loops, each of which is one dim; it has no name yet."""
    dims = tuple(as_dim(_product(g)) for g in groups) or (1,)
    if not groups:
        groups = [[]]
    place = {atom: (d, _inside(group, atom)) for d, group in enumerate(groups) for atom in group}
    return LoopKernel(
        name="",
        dims=dims,
        rows=tuple(range(row_count)),
        cols=tuple(range(row_count, len(dims))),
        params=params,
        values=tuple(_value(n, place, rows, cols, body) for n in body.nodes),
        stores=tuple(
            Store(v, Access(a.param, _strides(a.strides, place), a.indirect, a.offset)) for v, a in body.stores
        ),
        symbols=symbols,
        comments=comments,
    )


# ---- liveness and dependence ------------------------------------------------------------------------


def _live(nodes: Sequence[Node], stores: Sequence[tuple[Val, AtomAccess]]) -> _Body:
    wanted = {value.number for value, _ in stores}
    for number in range(len(nodes) - 1, -1, -1):
        if number in wanted:
            wanted.update(nodes[number].args)
    renumber = {old: new for new, old in enumerate(sorted(wanted))}
    kept: list[Node] = []
    depends: list[Atoms] = []
    for old in sorted(wanted):
        node = nodes[old]
        args = tuple(renumber[a] for a in node.args)
        kept.append(Node(node.op, node.dtype, args, node.attr))
        own = frozenset(a for a, _ in _terms(node)) | frozenset(_along(node))
        reach = own.union(*(depends[a] for a in args)) if args else own
        depends.append(reach - _over(node))
    return _Body(tuple(kept), tuple((renumber[v.number], a) for v, a in stores), tuple(depends))


def _terms(node: Node) -> Terms:
    if isinstance(node.attr, AtomAccess):
        return node.attr.strides
    return node.attr if node.op == "index" else ()  # type: ignore[return-value]


def _over(node: Node) -> Atoms:
    """The loops a reduce node runs over."""
    return frozenset(node.attr[1]) if node.op == "reduce" else frozenset()  # type: ignore[index]


def _along(node: Node) -> tuple[Atom, ...]:
    """The loops that a scan goes along, outermost first."""
    return node.attr[1] if node.op == "scan" else ()  # type: ignore[index]


def _domain(body: _Body) -> Atoms:
    found: set[Atom] = set()
    widest: Atoms = frozenset()
    for number, node in enumerate(body.nodes):
        over = _over(node)
        found |= over | {a for a, _ in _terms(node)}
        reach = body.depends[number] | over
        widest = max(widest, reach, key=len)
    for number, access in body.stores:
        reach = body.depends[number] | {a for a, _ in access.strides}
        found |= reach
        widest = max(widest, frozenset(reach), key=len)
    if widest != found:
        raise LoweringError(
            "disjoint", "expected outputs that share one loop nest, found sizes that do not fit together"
        )
    return frozenset(found)


# ---- reductions ---------------------------------------------------------------------------------------


def _inner_reduction(body: _Body) -> Atoms | None:
    """The loops reduced inside a row: those of every scan, and of every reduction whose result is used again under its
    loops.

    None where there are none; raises LoweringError where there are several sets of them.
    """
    tainted: list[frozenset[int]] = []  # reductions each node depends on
    internal: set[int] = set()
    for number, node in enumerate(body.nodes):
        reached = frozenset().union(*(tainted[a] for a in node.args)) if node.args else frozenset()
        for r in reached:
            if node.op == "reduce" or body.depends[number] & _over(body.nodes[r]):
                internal.add(r)
        tainted.append(reached | {number} if node.op == "reduce" else reached)
    for number, access in body.stores:
        dims = {a for a, _ in access.strides}
        internal.update(r for r in tainted[number] if dims & _over(body.nodes[r]))
    sets = {_over(body.nodes[r]) for r in internal}
    sets |= {frozenset(_along(node)) for node in body.nodes if node.op == "scan"}
    if len(sets) > 1:
        raise LoweringError("reductions", f"expected one set of dims reduced inside a row, found {len(sets)}")
    return sets.pop() if sets else None


def _split_nest(body: _Body, domain: Atoms, inner: Atoms | None, order: list[Atom]) -> tuple[list[Atom], list[Atom]]:
    """Rows and columns, each in memory order; both empty where any split would do."""
    sets = {_over(n) for n in body.nodes if n.op == "reduce"}
    if inner is None:
        partial = sorted((s for s in sets if s != domain), key=lambda s: -len(s))
        if partial:
            reduced = partial[0]
            inner = reduced if order[-1] in reduced or (len(partial) > 1 and domain - reduced in partial) else None
            if inner is None:  # column sums: the kept dims are the inner loop
                inner = domain - reduced
        else:
            return [], []  # for the caller to choose after collapsing
    rows = domain - inner
    for over in sets:
        if over not in (inner, rows, domain):
            raise LoweringError(
                "reductions", "expected reductions over a row, over all rows or over all, found another"
            )
    return [a for a in order if a in rows], _scan_order(body) or [a for a in order if a in inner]


def _scan_order(body: _Body) -> list[Atom]:
    """The columns as the scans go along them; empty without scans. Raises LoweringError where these do not agree."""
    ways = {(_along(node), node.attr[2]) for node in body.nodes if node.op == "scan"}  # type: ignore[index]
    if len(ways) > 1:
        raise LoweringError("scan", "expected scans that go one way along the same loops, found several ways")
    return list(ways.pop()[0]) if ways else []


def _memory_order(body: _Body, domain: Atoms, symbols: Iterable[str]) -> list[Atom]:
    """The loops, outermost first: by the strides, from the largest to the smallest, of the access with most of them.

    Loops that this access lacks stand before its own, ordered by the other accesses.
    """
    hints = {s: 61 + 2 * n for n, s in enumerate(symbols)}  # made-up sizes, only to compare strides
    accesses = sorted(body.accesses, key=lambda a: -len(a.strides))  # stable: stores win ties
    placed: list[Atom] = []
    for access in accesses:
        steps = sorted(access.strides, key=lambda t: (-evaluate(t[1], hints), t[0].number))
        placed = [a for a, _ in steps if a not in placed] + placed
    rest = sorted(domain - set(placed), key=lambda a: a.number)
    return rest + placed


# ---- collapsing -----------------------------------------------------------------------------------------


def _collapse(loops: list[Atom], body: _Body) -> list[list[Atom]]:
    """Merge neighbours that every access steps through as if they were one loop."""
    forms = [dict(t) for t in body.terms]
    groups: list[list[Atom]] = []
    for atom in loops:
        if groups and all(_even(form, groups[-1][-1], atom) for form in forms):
            groups[-1].append(atom)
        else:
            groups.append([atom])
    return groups


def _even(form: dict[Atom, Dim], outer: Atom, inner: Atom) -> bool:
    return as_dim(form.get(outer, 0) - form.get(inner, 0) * inner.size) == 0


def _product(group: Sequence[Atom]) -> Dim:
    total: Dim = 1
    for atom in group:
        total = total * atom.size
    return as_dim(total)


def _inside(group: list[Atom], atom: Atom) -> bool:
    """Whether the atom is the innermost of its group, whose stride is the group's."""
    return group[-1] is atom


def _strides(terms: Terms, place: dict[Atom, tuple[int, bool]]) -> tuple[tuple[int, Dim], ...]:
    return tuple(sorted((place[a][0], s) for a, s in terms if place[a][1]))


# ---- the result -----------------------------------------------------------------------------------------


def _value(
    node: Node, place: dict[Atom, tuple[int, bool]], rows: list[Atom], cols: list[Atom], body: _Body
) -> LoopValue:
    if node.op == "reduce":
        kind: str = node.attr[0]  # type: ignore[index]
        over = _over(node)
        if over == frozenset(cols) and _row_wise(body, over, rows):
            op = "row_reduce"
        elif over == frozenset(rows):
            op = "col_reduce" if body.depends[node.args[0]] & frozenset(cols) else "rows_reduce"
        else:
            op = "full_reduce"
        return LoopValue(op, node.dtype, node.args, kind)
    if node.op == "scan":
        return LoopValue(node.op, node.dtype, node.args, Scan(node.attr[0], node.attr[2]))  # type: ignore[index]
    if isinstance(node.attr, AtomAccess):
        access = node.attr
        attr: object = Access(access.param, _strides(access.strides, place), access.indirect, access.offset)
    elif node.op == "index":
        attr = _strides(node.attr, place)  # type: ignore[arg-type]
    else:
        attr = node.attr
    return LoopValue(node.op, node.dtype, node.args, attr)


def _row_wise(body: _Body, over: Atoms, rows: list[Atom]) -> bool:
    """Whether a reduction over the columns is done row by row.

    One over all loops that only feeds outputs is not: it is shared among threads.
    """
    return bool(rows) or _inner_reduction(body) is not None


def _kind(kernel: LoopKernel) -> str:
    ops = {v.op for v in kernel.values}
    if kernel.needs_whole_rows:
        return "rowcol" if "col_reduce" in ops else "row"
    if "col_reduce" in ops:
        return "col"
    return "full" if ops & {"full_reduce", "rows_reduce"} else "pointwise"


def _check_sinks(kernel: LoopKernel) -> None:
    """Raise LoweringError where a value known only after the nest meets a row's values, or is stored along rows."""
    found = regions(kernel)
    for number, value in enumerate(kernel.values):
        follows = found[number].post and value.op not in SINKS
        if follows and any(found[a].rows for a in value.args):
            raise LoweringError("sink_reused", "expected a column sum that only feeds outputs, found it used in rows")
    for store in kernel.stores:
        if found[store.value].post and {d for d, _ in store.access.strides} & set(kernel.rows):
            raise LoweringError(
                "sink_reused", "expected a column sum that only feeds outputs, found it spread over rows"
            )
