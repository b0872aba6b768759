"""Finds the values of symbols for the generated call of a graph.

In: an imported graph. Out: for each symbol an expression of the graph's inputs, and the lines that bind symbols.
Guarantee: sizes need no tensors but the graph's inputs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import sympy

from autofuse.capture.graph_import import ImportedGraph
from autofuse.errors import ShapeError
from autofuse.ir.shape import Dim, free_symbols
from autofuse.ir.size_text import PYTHON, dim_text


def symbol_sources(imported: ImportedGraph, unsized: Collection[str]) -> dict[str, str]:
    """The graph input that holds the value of each symbol. ``unsized``: inputs whose sizes may differ."""
    sources: dict[str, str] = {}
    placeholders = [n for n in imported.module.graph.nodes if n.op == "placeholder"]
    for n in placeholders:
        dim = imported.dims.get(n)
        if isinstance(dim, sympy.Symbol):
            sources.setdefault(str(dim), n.name)
    for n in placeholders:
        ref = imported.refs.get(n)
        if ref is None or n.name in unsized:
            continue
        for axis, size in enumerate(imported.inputs[ref.name].shape):
            if isinstance(size, sympy.Symbol):
                sources.setdefault(str(size), f"{n.name}.size({axis})")
    return sources


def symbol_bindings(
    wanted: Sequence[str], sizes: Iterable[Dim], derived: Mapping[str, sympy.Expr], sources: Mapping[str, str]
) -> list[str]:
    """The lines that give symbols their values: the ``wanted`` ones, and those in ``sizes``.

    ``derived``: symbols that follow from others. Raises ShapeError where a symbol is not among the inputs.
    """
    used = dict.fromkeys(s for size in sizes for s in free_symbols(size))
    found = {*wanted, *used}
    for name, expr in reversed([*derived.items()]):  # each is made of earlier ones
        found |= {*free_symbols(expr)} if name in found else set()
    calculated = {name: expr for name, expr in derived.items() if name in found}
    of_calculated = (s for expr in calculated.values() for s in free_symbols(expr))
    needed = dict.fromkeys(s for s in (*wanted, *of_calculated, *used) if s not in calculated)
    missing = [s for s in needed if s not in sources]
    if missing:
        raise ShapeError(f"expected the sizes {missing} among the graph's inputs, found only {sorted(sources)}")
    lines = [f"af_{s} = {sources[s]}" for s in needed]
    return [*lines, *(f"af_{name} = {in_code(expr)}" for name, expr in calculated.items())]


def in_code(size: sympy.Expr) -> str:
    """A size, in the code's names of symbols."""
    return dim_text(size.xreplace({s: sympy.Symbol(f"af_{s}") for s in size.free_symbols}), PYTHON)
