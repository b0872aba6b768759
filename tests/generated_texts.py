"""All text that is generated: C, Triton and Python, of cases, strategies, optimizer steps and whole graphs.

    python -m tests.generated_texts            # a hash for each kind of text, and one for all
    python -m tests.generated_texts --each     # one for each text
    python -m tests.generated_texts 20         # of every twentieth case

What moves code about must leave these as they are; a kernel's text is the key under which it is stored.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from autofuse.codegen import generator
from autofuse.codegen.triton.generator import TritonKernelGenerator
from autofuse.errors import AutofuseError
from autofuse.ir.operation import NodeForm
from autofuse.optim.c_printer import print_step
from autofuse.optim.form import DTYPES, StepForm
from autofuse.optim.triton_printer import print_triton_step
from autofuse.strategies.enumeration import strategies_of
from autofuse.wrapper.graph_call_builder import build_program
from autofuse.wrapper.node_call import make_launcher, make_unfused
from autofuse.wrapper.strategy_call import render
from tests.cases import CASES
from tests.optim.test_c_printer import CASES as STEPS
from tests.optim.test_c_printer import SIZES
from tests.strategies.harness import Planned, plan
from tests.strategies.test_attention import ATTENTIONS
from tests.strategies.test_convolutions import CONVOLUTIONS

Text = tuple[str, str, str]  # kind, name, text

_LINE = re.compile(r"  # \S+\.py:\d+ .*")  # of the script, in a comment
_DTYPES = (torch.float32, torch.bfloat16)


def texts(every: int = 1) -> Iterator[Text]:
    """Every text; with ``every``, of each so-many-th case only."""
    for kind, name, text in (*_of_cases(every), *_of_steps(every), *_of_graphs(every)):
        yield kind, name, _LINE.sub("", text)


def _of_cases(every: int) -> Iterator[Text]:
    for case in list(CASES.values())[::every]:
        for dtype in _DTYPES:
            form = case.form(dtype)
            shapes = [tuple(t.shape) for t in case.example]
            yield from _kernels(form, f"{case.name} {dtype}", shapes)
            yield "python", f"{case.name} {dtype}", _compiled(lambda form=form: _calls(form))  # type: ignore[misc]


def _calls(form: NodeForm) -> None:
    """Through aten, and of a kernel."""
    values = tuple(range(3, 3 + len(form.symbols)))
    make_unfused(form, values)
    make_launcher(form, lambda *pointers: 0, values, 1)


def _kernels(form: NodeForm, name: str, shapes: Sequence[Sequence[int]] | None = None) -> Iterator[Text]:
    """Of one node, for all sizes and with these built in; what a generator refuses, by its reason."""
    with _uncompiled() as printed:
        compiler, triton = generator.FusionKernelGenerator(), TritonKernelGenerator()
        for variant, make in (
            ("generic", lambda g: g.generate_generic_kernel(form)),
            ("specialised", lambda g: g.generate_fused_kernel(form, shapes)),
        ):
            if variant == "specialised" and shapes is None:
                continue
            yield "c", f"{name} {variant}", _text_or_reason(lambda make=make: (make(compiler), printed[-1])[1])  # type: ignore[misc]
            yield "triton", f"{name} {variant}", _text_or_reason(lambda make=make: make(triton).text)  # type: ignore[misc]


def _text_or_reason(make: Callable[[], str]) -> str:
    try:
        return make()
    except AutofuseError as error:
        return f"refused: {error}"


@contextlib.contextmanager
def _uncompiled() -> Iterator[list[str]]:
    """What C would be compiled."""
    printed: list[str] = []
    before = generator.compile_source
    generator.compile_source = lambda text, *args: printed.append(text) or b""  # type: ignore[func-returns-value,assignment]
    try:
        yield printed
    finally:
        generator.compile_source = before


def _of_steps(every: int) -> Iterator[Text]:
    for algorithm, flags in STEPS[::every]:
        for dtype in DTYPES:
            name = f"{algorithm} {flags} {dtype}"
            form = StepForm(algorithm, flags, dtype, SIZES)
            yield "c", name, _text_or_reason(lambda form=form: print_step(form, ()).text)  # type: ignore[misc]
            on_gpu = StepForm(algorithm, flags, dtype, SIZES, "", "cuda")
            yield "triton", name, _text_or_reason(lambda form=on_gpu: print_triton_step(form, ()).text)  # type: ignore[misc]


# ---- graphs -----------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A transformer's."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(2, (4, -1)).transpose(1, 2) for t in self.qkv(self.norms[0](x)).chunk(3, -1))
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.narrow(nn.functional.gelu(self.wide(self.norms[1](x))))


def _graphs() -> Iterator[tuple[str, Callable[[], list[Planned]]]]:
    def module(make: Callable[[], tuple[nn.Module, torch.Tensor]], trains: bool) -> list[Planned]:
        found, x = make()
        return plan(found.train(trains), [x])

    for name, convolution in CONVOLUTIONS.items():
        for trains in (False, True):
            yield f"convolution {name} {trains}", lambda m=convolution, t=trains: module(m, t)  # type: ignore[misc]
    for name, (function, inputs, dynamic) in ATTENTIONS.items():
        yield f"attention {name}", lambda f=function, i=inputs, d=dynamic: plan(f, i, d)  # type: ignore[misc]
    for trains in (False, True):
        yield f"block {trains}", lambda t=trains: module(lambda: (Block(), torch.randn(3, 17, 32)), t)  # type: ignore[misc]
        mlp = nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.LayerNorm(40), nn.Linear(40, 8), nn.Softmax(-1))
        yield f"mlp {trains}", lambda m=mlp, t=trains: module(lambda: (m, torch.randn(300, 24)), t)  # type: ignore[misc]


def _of_graphs(every: int) -> Iterator[Text]:
    for name, make in list(_graphs())[::every]:
        torch.manual_seed(0)
        for number, planned in enumerate(make()):
            where = f"{name} {number} {planned.phase}"
            is_backward = planned.phase == "backward"

            def build(planned: Planned = planned, is_backward: bool = is_backward) -> object:
                return build_program(planned.imported, planned.nodes, planned.groups, is_backward=is_backward)

            yield "python", where, _compiled(build)
            for node in planned.nodes:
                yield from _kernels(node.form, f"{where} {node.fusion_id}")
            for group in planned.groups:
                for strategy in strategies_of(group.node.form):
                    at = f"{where} {group.node.fusion_id} {strategy.name}"
                    yield "python", at, render(strategy)[0]
                    for number, part in enumerate(strategy.kernels):
                        yield from _kernels(part.node.form, f"{at} {number} {part.node.fusion_id}")


_listening: list[str] | None = None


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "compile" and _listening is not None and arguments[0] is not None:
        source = arguments[0]
        _listening.append(source.decode() if isinstance(source, bytes) else str(source))


sys.addaudithook(_hear)


def _compiled(make: Callable[[], object]) -> str:
    """The Python text that something compiles."""
    global _listening
    _listening = heard = []
    try:
        make()
    finally:
        _listening = None
    return "\n".join(heard)


# ---- hashes -----------------------------------------------------------------------------------------------


def digest(found: Sequence[Text]) -> str:
    return hashlib.sha256("\0".join("\1".join(text) for text in sorted(found)).encode()).hexdigest()


def main() -> None:
    every = list(texts(next((int(word) for word in sys.argv[1:] if word.isdigit()), 1)))
    if "--each" in sys.argv:
        for kind, name, text in every:
            print(kind, name, hashlib.sha256(text.encode()).hexdigest()[:16])
    for kind in ("c", "triton", "python"):
        some = [text for text in every if text[0] == kind]
        refused = sum(text[2].startswith("refused: ") for text in some)
        print(f"{kind:7} {len(some):5} texts, of which {refused:4} refusals  {digest(some)}")
    print(f"all     {len(every):5} texts  {digest(every)}")


if __name__ == "__main__":
    main()
