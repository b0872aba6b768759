"""Writes one runnable file of a node and its kernel, for a report of a fault: inputs, eager, kernel, check, race.

In: a node's form, the stored source of its C kernel, sizes. Out: Python text that needs torch and a C compiler, and
nothing of autofuse. Guarantee: the operations are those that eager runs, with the same arguments; inputs have the
node's shapes, strides and dtypes, and values of the ranges that its check uses. Errors: UsageError for a node that no
such file can hold, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from autofuse.codegen.inputs import make_inputs
from autofuse.codegen.reference import to_float64
from autofuse.db.rows import KernelSource
from autofuse.errors import UsageError
from autofuse.ir.composites import without_librarys
from autofuse.ir.operation import NodeForm
from autofuse.wrapper.operation_text import dims_text, operation_text, value_name

_HEAD = '''"""A node's kernel beside eager, written by autofuse repro. Needs torch and a C compiler ($CC, else cc)."""

{comments}

import ctypes
import os
import statistics
import subprocess
import sys
import tempfile
import time

import torch

THREADS = {threads}
{sizes}
FLAGS = {flags!r}
SOURCE = r"""
{source}
"""


def tensor(shape, strides, dtype, kind, low, high, seed):
    """Values of a kind and range, in memory with these strides; dims of stride 0 share theirs."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        values = torch.rand(shape, generator=generator) > 0.4
    elif kind == "mask":  # what is added to scores: 0 up to the diagonal, and -inf beyond it
        values = torch.full(shape, float("-inf")).triu(1)
    elif kind == "normal":
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
    elif dtype.is_floating_point:
        values = low + (high - low) * torch.rand(shape, generator=generator, dtype=torch.float64)
    else:
        values = torch.randint(low, high + 1, shape, generator=generator)
    made = torch.empty_strided(shape, strides, dtype=dtype)
    place = made
    for dim, stride in enumerate(strides):
        if stride == 0 and shape[dim] > 1:
            place, values = place.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    place.copy_(values)
    return made


def inputs():
    return [
{inputs}
    ]


def outputs():
    return [
{outputs}
    ]


def eager({parameters}):
{eager}


def exact({parameters}):
    """The same operations in float64."""
{exact}

'''

_TAIL = '''
def compiled():
    """The kernel as a function of its inputs and outputs."""
    folder = tempfile.mkdtemp()
    text, binary = os.path.join(folder, "kernel.c"), os.path.join(folder, "kernel.so")
    with open(text, "w") as file:
        file.write(SOURCE)
    subprocess.run([*os.environ.get("CC", "cc").split(), *FLAGS.split(), text, "-o", binary, "-lm"], check=True)
    call = ctypes.CDLL(binary).af_call
    sizes = (ctypes.c_int64 * len(SIZES))(*SIZES)

    def run(given, made):
        pointers = (ctypes.c_void_p * (len(given) + len(made)))(*(t.data_ptr() for t in (*given, *made)))
        status = call(sizes, pointers)
        if status:
            sys.exit(f"the kernel returned {status}")

    return run


def check(found, theirs, reference):
    """Whether the kernel is as near to float64 as twice eager, and has NaN and Inf where eager has them."""
    good = True
    for number, (a, b, x) in enumerate(zip(found, theirs, reference)):
        if not a.is_floating_point():
            same = torch.equal(a, b)
            print(f"output {number}: {'equal' if same else 'DIFFERS'}")
            good &= same
            continue
        finite = a.isfinite() & b.isfinite() & x.isfinite()
        same = torch.equal(a.isnan(), b.isnan()) and torch.equal(a.isinf() * a.sign(), b.isinf() * b.sign())
        a, b, x = (t.double()[finite] for t in (a, b, x))
        if not x.numel():
            ours = theirs_error = bound = 0.0
        else:
            ours, theirs_error = (a - x).abs().max().item(), (b - x).abs().max().item()
            bound = 2 * theirs_error + 4 * torch.finfo(found[number].dtype).eps * x.abs().max().item()
        right = same and ours <= bound
        good &= right
        print(f"output {number}: error {ours:.3g}, eager's {theirs_error:.3g}: {'right' if right else 'WRONG'}")
    return good


def race(run, given, made):
    ratios, times = [], []
    for _ in range(30):
        began = time.perf_counter()
        eager(*given)
        middle = time.perf_counter()
        run(given, made)
        times.append(time.perf_counter() - middle)
        ratios.append((middle - began) / times[-1])
    speedup, kernel = statistics.median(ratios[5:]), statistics.median(times[5:])
    print(f"kernel {kernel * 1e6:.1f} us, eager / kernel {speedup:.2f}")


torch.set_num_threads(THREADS)
given, made = inputs(), outputs()
run = compiled()
with torch.no_grad():
    run(given, made)
    wide = [t.double() if t.is_floating_point() else t for t in given]
    good = check(made, eager(*given), exact(*wide))
    race(run, given, made)
sys.exit(not good)
'''


def repro(form: NodeForm, kernel: KernelSource, values: Mapping[str, int], threads: int, file: str) -> str:
    """The text of the file. ``values``: of the node's symbols; ``file``: the name that it says to type.

    Raises UsageError for a kernel that is not one function in C, and for a node that draws random numbers.
    """
    if "import triton" in kernel.source[:4000]:
        raise UsageError("expected a kernel in C, found one for a GPU")
    if kernel.is_strategy:
        raise UsageError("expected a node that one kernel runs, found a strategy of several steps")
    if any(op.target.startswith("autofuse.") or op.short_name == "native_dropout" for op in form.operations):
        raise UsageError("expected a node without random numbers, found one with dropout")
    form = without_librarys(form)  # the file has no library but torch
    head = _HEAD.format(
        comments="\n".join(f"# {line}" for line in _comments(form, kernel, file)),
        threads=threads,
        sizes=_sizes(form, values),
        flags=kernel.key.flags,
        source=kernel.source.replace('"""', '\\"\\"\\"'),
        inputs="\n".join(_inputs(form, values)),
        outputs="\n".join(f"        torch.empty_strided({_layout(form.spec(ref))})," for ref in form.outputs),
        parameters=", ".join(item.name for item in form.inputs),
        eager=_body(form),
        exact=_body(to_float64(form)),
    )
    return head + _TAIL


def _comments(form: NodeForm, kernel: KernelSource, file: str) -> Iterator[str]:
    """What the file is; lines of the script among it, whatever stands in them."""
    for line in (
        f"{kernel.name}, as {kernel.key.compiler} compiled it for {kernel.key.target}",
        *(f"  {op.name} = {op.target}{f'  # {op.source}' if op.source else ''}" for op in form.operations),
        f"Type: python {file}",
    ):
        yield " ".join(line.splitlines()) if line.strip() else ""


def _sizes(form: NodeForm, values: Mapping[str, int]) -> str:
    lines = [f"{name} = {values[name]}" for name in form.symbols]
    return "\n".join([*lines, f"SIZES = [{''.join(f'{name}, ' for name in form.symbols)}THREADS]"])


def _layout(spec: Any) -> str:
    return f"{dims_text(spec.shape.dims)}, {dims_text(spec.strides.dims)}, dtype=torch.{spec.dtype}"


def _inputs(form: NodeForm, values: Mapping[str, int]) -> list[str]:
    """A call of ``tensor`` for each input, with the kind and range that the node's check draws."""
    lines = []
    for number, (item, made) in enumerate(zip(form.inputs, make_inputs(form, values), strict=True)):
        kind, low, high = _range(made)
        layout = _layout(item.spec).replace("dtype=", "")
        lines.append(f"        tensor({layout}, {kind!r}, {low}, {high}, seed={number}),  # {item.name}")
    return lines


def _range(made: torch.Tensor) -> tuple[str, float, float]:
    if not made.numel() or made.dtype is torch.bool:
        return "range", 0, 1
    low, high = made.min().item(), made.max().item()
    if made.is_floating_point():
        if made.isinf().any():
            return "mask", 0, 0
        is_normal = low < 0 < high
        return ("normal", 0, 1) if is_normal else ("range", round(low, 3), round(high, 3))
    if high >= 0 and (negative := made[made < 0]).numel() and negative.unique().numel() == 1:
        low = made[made >= 0].min().item()  # the only negative number is that of rows which a loss ignores
    return "range", low, high


def _body(form: NodeForm) -> str:
    """The statements of the operations, and the return."""
    namespace: dict[str, Any] = {}
    lines = [f"{op.name} = {operation_text(op, form, namespace)}" for op in form.operations]
    found = {name: value for name, value in namespace.items() if name.startswith("op_")}
    named = [f"{name} = torch.ops.{value}" for name, value in found.items()]
    results = ", ".join(value_name(ref, form) for ref in form.outputs)
    device = ['device = "cpu"'] if any("device=device" in line for line in lines) else []
    return "\n".join(f"    {line}" for line in (*device, *named, *lines, f"return [{results}]"))


def sizes_for(form: NodeForm, ranges: Sequence[tuple[int, int]], measured: Sequence[int]) -> dict[str, int]:
    """The sizes that a kernel was measured on, else the largest of its bucket."""
    chosen = measured if len(measured) == len(form.symbols) else [high for _, high in ranges]
    return dict(zip(form.symbols, chosen, strict=True))
