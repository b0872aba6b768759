"""Code that the C templates share: reading a node's operands, and filling in a text.

In: a `NodeForm`, sizes, a text with ``@KEY@`` in it. Out: numbers of pointers, macros, `CSource`. Guarantee: an operand
that is not an input with its own strides is refused with a reason.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

from autofuse.codegen.c.printer import ENTRY, CSource
from autofuse.codegen.knobs import Sizes
from autofuse.codegen.lowering.lower import context_of
from autofuse.errors import LoweringError
from autofuse.ir.operation import NodeForm, TensorSpec, ValueRef
from autofuse.ir.records import Config
from autofuse.ir.shape import Dim, free_symbols
from autofuse.ir.size_text import dim_text

# ---- operands ---------------------------------------------------------------------------------------


def spec_of(form: NodeForm, ref: object) -> TensorSpec:
    """The spec of an operation's argument. Raises LoweringError where that is no tensor."""
    if not isinstance(ref, ValueRef):
        raise LoweringError("operand", f"expected a tensor, found {ref}")
    return form.spec(ref)


def pointer_of(form: NodeForm, ref: ValueRef) -> int:
    """The number of a value's pointer. Raises LoweringError where it is not an input with its own strides."""
    source = context_of(form).aliased_input(ref)
    if source is None:
        raise LoweringError("operand", f"expected an input, found {ref.name}")
    return _input_names(form).index(source.name)


def bias_of(form: NodeForm, ref: ValueRef, cols: Dim) -> int:
    """The number of a bias's pointer.

    Raises LoweringError where the bias is not an input that is one dense row of float32, with a number for each column.
    """
    spec, names = spec_of(form, ref), _input_names(form)
    is_row = spec.dtype == "float32" and tuple(spec.shape) == (cols,) and tuple(spec.strides) == (1,)
    if not is_row or ref.name not in names:
        raise LoweringError(
            "bias",
            f"expected a bias that is an input of float32 with {cols} numbers side by side, "
            f"found {ref.name}: {spec.dtype}, {spec.shape}, {spec.strides}",
        )
    return names.index(ref.name)


def _input_names(form: NodeForm) -> list[str]:
    return [item.name for item in form.inputs]


# ---- text -------------------------------------------------------------------------------------------


def tile_of(config: Config) -> tuple[int, int, int]:
    """Rows, vectors and vector bits of a tile: the sums that stay in registers."""
    rows, vectors, bits = (int(part) for part in str(dict(config)["tile"]).split("x"))
    return rows, vectors, bits


def bias_text(number: int | None) -> str:
    """The pointer of a bias in C."""
    return "NULL" if number is None else f"(const float*)ptrs[{number}]"


def header(what: str, config: Config, known: Sizes) -> str:
    """A comment: what is calculated, the configuration, and the sizes that are built in."""
    lines = [what, "config:  " + " ".join(f"{k}={v}" for k, v in config)]
    if known:
        lines.append("fixed:   " + " ".join(f"{k}={v}" for k, v in known.items()))
    return "\n * ".join(lines)


def size_macros(form: NodeForm, known: Sizes, dims: Mapping[str, Dim], others: Iterable[Dim] = ()) -> list[str]:
    """Sizes and strides as macros ``AF_<key>``; those that do not vary are constants wherever they are used.

    ``others``: further dims in the text, whose symbols need macros too.
    """
    used = {str(s) for dim in (*dims.values(), *others) for s in free_symbols(dim)}
    lines = []
    for n, symbol in enumerate(form.symbols):
        if symbol in used:
            value = f"INT64_C({dim_text(int(known[symbol]))})" if symbol in known else f"(sizes[{n}])"
            lines.append(f"#define {symbol} {value}")
    return [*lines, *(f"#define AF_{key} ((int64_t)({dim_text(dim)}))" for key, dim in dims.items())]


def fill(kind: str, form: NodeForm, text: str, values: Mapping[str, str]) -> CSource:
    """A translation unit: ``text`` and the entry of every kernel, with each ``@KEY@`` replaced, in this order.

    ``@NAME@`` becomes the kernel's name, ``@THREADS@`` the number of threads that the caller passes.
    """
    name = f"af_{kind}_{hashlib.sha256(form.text().encode()).hexdigest()[:10]}"
    whole = text + ENTRY
    own = {
        "NAME": name,
        "THREADS": f"sizes[{len(form.symbols)}]",
        "PARAMS": str(len(form.inputs) + len(form.outputs)),
    }
    for key, value in {**values, **own}.items():
        whole = whole.replace(f"@{key}@", value)
    return CSource(name, whole)
