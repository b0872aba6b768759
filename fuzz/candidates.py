"""Every candidate of a node through the verifier: several configurations in C, and Triton in its interpreter.

In: a node, values of its symbols, a random generator. Out: what is wrong, in words; the generic C kernel's entry.
Guarantee: nothing is raced or stored. The C of many candidates is compiled as one text, with -O1: a compiler takes
longer to start than for a kernel.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autofuse.codegen.c.build import compile_source, flags_for
from autofuse.codegen.c.load import kernel_in, open_library
from autofuse.codegen.c.templates.registry import C_TEMPLATES
from autofuse.codegen.generator import FusionKernelGenerator
from autofuse.codegen.knobs import Knob, default_config
from autofuse.codegen.lowering.lower import lowered
from autofuse.codegen.reference import run_unfused
from autofuse.codegen.templates import LOOP, template_of
from autofuse.codegen.triton.generator import TritonKernelGenerator
from autofuse.codegen.triton.interpret import load_interpreted
from autofuse.errors import LoweringError, ShapeError
from autofuse.ir.buckets import bucket_of
from autofuse.ir.operation import NodeForm, Operation
from autofuse.ir.records import Config, make_config
from autofuse.ir.shape import evaluate, product
from autofuse.ir.writes import is_write
from autofuse.strategies.enumeration import is_group
from autofuse.tuner.cases import CheckCase, first_cases, full_cases
from autofuse.tuner.verify import FAR, GuardedAllocator, Impossible, Inaccurate, MakeCall, Verifier, Wrong
from autofuse.wrapper.node_call import Entry, expected_outputs, make_launcher

GENERATOR, TRITON = FusionKernelGenerator(), TritonKernelGenerator()
MOST_POINTS = 2000  # the interpreter takes half a millisecond a program
THREADS = (1, 2, 3)
_NOT_MADE_FOR = ("could not create a primitive", "could not construct a memory descriptor")
NUDGE = 64  # units in the last place: a sum of some numbers is rounded at each of them


@dataclass(frozen=True)
class Text:
    """A candidate in C that is not compiled yet."""

    form: NodeForm
    label: str  # "generic vector_bits=256"
    text: str
    config: Config


def c_texts(form: NodeForm, values: tuple[int, ...], rng: random.Random) -> list[Text]:
    """The generic kernel first; then one with any choices of its knobs, and one with its sizes built in."""
    sizes = dict(zip(form.symbols, values, strict=True))
    generic = GENERATOR.knobs(form, None, {})
    wanted = [("generic", {}, default_config(generic)), ("generic", {}, drawn(generic, rng))]
    if sizes:
        wanted.append(("specialised", sizes, drawn(GENERATOR.knobs(form, sizes, sizes), rng)))
    return [
        Text(form, f"{kind} C {dict(config)}", GENERATOR.source(form, config, constants).text, config)
        for kind, constants, config in wanted
    ]


def drawn(knobs: Sequence[Knob], rng: random.Random) -> Config:
    return make_config({knob.name: rng.choice(knob.choices) for knob in knobs})


def compile_together(texts: Sequence[Text]) -> list[Entry]:
    """Their entries. Raises CompilerError, of all where the compiler refuses one."""
    loops = [item for item in texts if template_of(C_TEMPLATES, item.form).name == LOOP]
    others = [item for item in texts if item not in loops]  # their macros have names of their own
    pieces = [loops, *([item] for item in others)]
    found = {id(item): entry for piece in pieces for item, entry in zip(piece, _compiled(piece), strict=True)}
    return [found[id(item)] for item in texts]


def _compiled(texts: Sequence[Text]) -> list[Entry]:
    if not texts:
        return []
    toolchain = GENERATOR.toolchain
    flags = [flag if flag != "-O3" else "-O1" for flag in flags_for(toolchain, texts[0].config)]
    whole = "\n".join(re.sub(r"\b(af|AF)_(?!LIBMVEC)", rf"\g<1>{n}_", item.text) for n, item in enumerate(texts))
    library = open_library(compile_source(whole, toolchain, flags), "fuzz")
    return [kernel_in(library, item.label, f"af{n}").entry for n, item in enumerate(texts)]


def call_of(form: NodeForm, entry: Entry, threads: int) -> MakeCall:
    return lambda allocator, values: make_launcher(form, entry, values, threads, allocator)


def triton_call(form: NodeForm, values: tuple[int, ...], rng: random.Random) -> tuple[str, MakeCall] | None:
    """A Triton kernel of any choices; None where the node has none, or is too large for the interpreter."""
    sizes = dict(zip(form.symbols, values, strict=True))
    if any(map(is_write, form.operations)):
        return None  # on a GPU nothing is written by an index
    kernel = lowered(form)
    if max(evaluate(product(nest.dims), sizes) for nest in (kernel, *kernel.rest)) > MOST_POINTS:
        return None
    config = drawn(TRITON.knobs(form, sizes, sizes), rng)
    entry = load_interpreted(TRITON.source(form, config, rng.choice(({}, sizes))))

    def make_call(allocator: GuardedAllocator, values: Sequence[int]) -> Callable[..., Any]:
        table = dict(zip(form.symbols, values, strict=True))

        def call(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            outputs = tuple(allocator(*spec) for spec in expected_outputs(form, values))
            if any(t.numel() for t in outputs):
                entry(table, [*inputs, *outputs])
            return outputs

        return call

    return f"Triton {dict(config)}", make_call


def cases_of(form: NodeForm, values: tuple[int, ...]) -> list[CheckCase]:
    bucket = bucket_of(values)
    return [*first_cases(form, bucket, values), *full_cases(form, bucket, (), values)]


def problems_of(
    form: NodeForm, values: tuple[int, ...], entries: Mapping[str, Entry], rng: random.Random
) -> Iterator[str]:
    """What the verifier says of each candidate."""
    verifier, cases = Verifier(form), cases_of(form, values)
    calls = {label: call_of(form, entry, rng.choice(THREADS)) for label, entry in entries.items()}
    same = [case for case in cases if case.values == values]  # the only sizes of a specialised kernel
    # Inf in a weight meets the zeros around an image in eager's code for small images, and not in that for large ones:
    # of special values in libraries' convolutions nothing is known.
    known = [c for c in cases if c.kind != "special"] if any(map(_is_convolution, form.operations)) else cases
    for label, make_call in calls.items():
        wanted = known if label.startswith("strategy") else same if label.startswith("specialised") else cases
        yield from _checked(verifier, form, label, make_call, wanted)
    if is_group(form):  # whose products in Triton are strategies of a GPU
        return
    try:
        triton = triton_call(form, values, rng)
    except (LoweringError, ShapeError):  # said where it is planned for a GPU
        return
    if triton is not None:
        yield from _checked(verifier, form, *triton, same[:2])


def _is_convolution(op: Operation) -> bool:
    return op.short_name == "convolution"


def _is_chaotic(verifier: Verifier, form: NodeForm, cases: Sequence[CheckCase], times: float) -> bool:
    """Whether eager errs about as much itself where its inputs are off by some units in the last place.

    Of float64 no wider result is known, by which the verifier would see that eager's own error is large.
    """

    def make_call(allocator: GuardedAllocator, values: Sequence[int]) -> Callable[..., Any]:
        return lambda *inputs: tuple(run_unfused(form, [*map(_nudged, inputs)], values))

    try:
        verifier.check(make_call, cases)
    except Inaccurate as error:
        return error.times * FAR >= times
    except Wrong:  # a comparison went the other way: of numbers, nothing is known
        pass
    return False


def _nudged(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, each number of it a little larger."""
    if not tensor.is_floating_point() or not tensor.numel():
        return tensor
    extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    memory = tensor.as_strided((extent,), (1,))
    return (memory * (1 + NUDGE * torch.finfo(tensor.dtype).eps)).as_strided(tensor.shape, tensor.stride())


def _checked(
    verifier: Verifier, form: NodeForm, label: str, make_call: MakeCall, cases: Sequence[CheckCase]
) -> Iterator[str]:
    try:
        verifier.check(make_call, cases)
    except Wrong as error:
        # A small error may be chance, and grows in chains.
        far = not isinstance(error, Inaccurate) or error.times > FAR
        if far and not (isinstance(error, Inaccurate) and _is_chaotic(verifier, form, cases, error.times)):
            yield f"{label}: {error}"
    except Impossible:  # no values were found that eager takes, as where the node computes its own indices
        pass
    except Exception as error:
        # Eager raises the first, so such a node stays eager's; with the others oneDNN says what it is not made for.
        if not any(text in str(error) for text in ("ZeroDivisionError", *_NOT_MADE_FOR)):
            yield f"{label}: {type(error).__name__}: {error}"
