"""What tests of generated kernels share: one toolchain, and kernels compiled once a session."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence

import pytest
import torch

from autofuse.codegen.c.build import find_toolchain
from autofuse.codegen.generator import CompiledKernel, FusionKernelGenerator
from autofuse.codegen.in_place import in_place
from autofuse.codegen.reference import make_inputs, run_unfused, to_float64, widen
from autofuse.errors import CompilerError
from autofuse.ir.operation import NodeForm
from autofuse.ir.records import Config
from autofuse.wrapper.node_call import make_launcher
from tests.codegen.compare import Answers, problems_of_draws

warnings.filterwarnings("ignore", message=".*degrees of freedom.*")


@pytest.fixture(scope="session")
def generator() -> FusionKernelGenerator:
    try:
        return FusionKernelGenerator(find_toolchain())
    except CompilerError as error:
        pytest.skip(str(error))


Verify = Callable[..., None]


@pytest.fixture(scope="session")
def verify(generator: FusionKernelGenerator) -> Verify:
    """Check a node's kernel against eager and float64: ``verify(form, sizes, kinds, config, specialise)``."""
    return make_verify(generator)


def make_verify(generator: FusionKernelGenerator) -> Verify:
    """What checks the kernels of a generator."""

    @functools.cache
    def generic(form: NodeForm, config: Config | None) -> CompiledKernel:
        return generator.generate_generic_kernel(form, config)

    def run(
        form: NodeForm,
        sizes: Sequence[Sequence[int]],
        kinds: Sequence[str] = ("normal", "special"),
        config: Config | None = None,
        specialise: bool = False,
        loose: bool = False,
        threads: int | None = None,
    ) -> None:
        for values in sizes:
            symbols = dict(zip(form.symbols, values, strict=True))
            for kind in kinds:
                inputs = make_inputs(form, symbols, seed=1, kind=kind)  # type: ignore[arg-type]
                if specialise:
                    kernel = generator.generate_fused_kernel(form, [tuple(t.shape) for t in inputs], config)
                else:
                    kernel = generic(form, config)
                found = kernel(*inputs, threads=threads)
                _check_in_place(form, kernel, inputs, values, found, threads or torch.get_num_threads())

                def draw(
                    number: int, kernel: CompiledKernel = kernel, symbols: dict[str, int] = symbols, kind: str = kind
                ) -> Answers:
                    inputs = make_inputs(form, symbols, seed=1 + number, kind=kind)  # type: ignore[arg-type]
                    eager = run_unfused(form, inputs, symbols)
                    exact = run_unfused(to_float64(form), widen(inputs), symbols)
                    return kernel(*inputs, threads=threads), eager, exact

                wrong = problems_of_draws(draw, loose)
                assert not wrong, f"sizes {tuple(values)}, {kind} values: {'; '.join(wrong)}\n{kernel.source}"

    return run


def _check_in_place(
    form: NodeForm,
    kernel: CompiledKernel,
    inputs: Sequence[torch.Tensor],
    values: Sequence[int],
    found: Sequence[torch.Tensor],
    threads: int,
) -> None:
    """Written over an input that it may be written over, every output has the same bits."""
    for pair in in_place(form):
        own = [t.clone(memory_format=torch.preserve_format) if i == pair[1] else t for i, t in enumerate(inputs)]
        result = make_launcher(form, kernel.load().entry, tuple(values), threads, reuse=(pair,))(*own)
        outputs = result if isinstance(result, tuple) else (result,)
        assert outputs[pair[0]] is own[pair[1]]
        for number, (out, wanted) in enumerate(zip(outputs, found, strict=True)):
            same = torch.equal(out.isnan(), wanted.isnan()) and torch.equal(out.nan_to_num(), wanted.nan_to_num())
            assert same, f"output {number} differs with output {pair[0]} over input {pair[1]}\n{kernel.source}"


@pytest.fixture(autouse=True)
def _threads() -> object:
    torch.set_num_threads(min(2, torch.get_num_threads()))
    return None
