"""Loading leaves the process as it was: one OpenMP runtime, denormals, errors instead of crashes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from array import array
from pathlib import Path

import pytest
import torch

from autofuse.codegen.c.load import load_kernel
from autofuse.codegen.generator import FusionKernelGenerator
from tests.cases import CASES


def test_denormals_survive(generator: FusionKernelGenerator) -> None:
    kernel = generator.generate_generic_kernel(CASES["add_bias_gelu"].form())
    kernel(torch.randn(64, 300), torch.randn(300), torch.randn(64, 300), threads=2)
    tiny = torch.full((100_000,), 1e-40)
    assert (tiny * 1).count_nonzero() == tiny.numel()
    copied = generator.generate_generic_kernel(CASES["mul_scalar"].form())(torch.full((300, 300), 1e-38))[0]
    assert copied.count_nonzero() == copied.numel()


def test_one_openmp_runtime(generator: FusionKernelGenerator) -> None:
    generator.generate_generic_kernel(CASES["softmax"].form()).load()
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("no /proc")
    runtimes = set(re.findall(r"/\S*lib(?:gomp|omp|iomp5)[^/\s]*\.so\S*", maps.read_text()))
    assert len(runtimes) == 1, runtimes


def test_entry_checks_its_arguments(generator: FusionKernelGenerator) -> None:
    loaded = generator.generate_generic_kernel(CASES["softmax"].form()).load()
    with pytest.raises(TypeError, match="expected the address of the sizes and 2 pointers"):
        loaded.entry(0)
    with pytest.raises(TypeError):
        loaded.entry(0, "x", 1)


def test_more_columns_than_positions_have_bits_for(generator: FusionKernelGenerator) -> None:
    """Said before an element is read, so no pointer has to point anywhere."""
    loaded = generator.generate_generic_kernel(CASES["cross_entropy_backward_none"].form()).load()
    sizes = array("q", [4, 2**31, 1])
    with pytest.raises(ValueError, match=r"expected fewer than 2\^31 columns"):
        loaded.entry(sizes.buffer_info()[0], 0, 0, 0, 0, 0)


def test_two_kernels_stay_apart(generator: FusionKernelGenerator) -> None:
    """The dynamic linker must not take one library for another."""
    x = torch.randn(5, 7)
    for name, function in (("unary_neg", torch.neg), ("unary_abs", torch.abs), ("unary_floor", torch.floor)):
        kernel = generator.generate_generic_kernel(CASES[name].form())
        load_kernel(kernel.binary, kernel.name)
        assert torch.equal(kernel(x)[0], function(x))


def test_calls_from_several_threads(generator: FusionKernelGenerator) -> None:
    """Backward runs on autograd's own threads: scratch memory must not be shared between callers."""
    kernel = generator.generate_generic_kernel(CASES["layer_norm_backward"].form())
    inputs = [
        torch.randn(8, 16, 200),
        torch.randn(8, 16, 200),
        torch.randn(8, 16, 1),
        torch.rand(8, 16, 1),
        torch.randn(200),
        torch.randn(200),
    ]
    expected = kernel(*inputs, threads=1)
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(50):
            if not all(torch.equal(a, b) for a, b in zip(kernel(*inputs, threads=1), expected, strict=True)):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_result_is_the_same_every_time(generator: FusionKernelGenerator) -> None:
    kernel = generator.generate_generic_kernel(CASES["bias_gradient"].form())
    inputs = [torch.randn(3, 300, 65), torch.randn(3, 300, 65)]
    first = kernel(*inputs, threads=2)
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(kernel(*inputs, threads=2), first, strict=True))


def test_generating_code_needs_no_torch() -> None:
    """The daemon never imports torch."""
    modules = [
        "lowering.lower",
        "lowering.rules",
        "c.printer",
        "c.knobs",
        "c.build",
        "generator",
        "column_passes",
        "loops",
    ]
    program = "\n".join(f"import autofuse.codegen.{m}" for m in modules)
    program += "\nimport sys\nassert 'torch' not in sys.modules, 'torch was imported'"
    assert subprocess.run([sys.executable, "-c", program], env={**os.environ}).returncode == 0


def test_equal_nodes_give_equal_text(generator: FusionKernelGenerator) -> None:
    a, b = (generator.generate_generic_kernel(CASES["add_layer_norm"].form()) for _ in range(2))
    assert a.source == b.source
    assert a.key == b.key
    assert re.match(r"af_row_add_layer_norm_[0-9a-f]{10}$", a.name)


def test_vector_math_in_the_binary(generator: FusionKernelGenerator) -> None:
    """tanh must reach libmvec's vector variants where the toolchain has them."""
    if generator.toolchain.libmvec < 2:
        pytest.skip("no libmvec")
    assert b"_ZGV" in generator.generate_generic_kernel(CASES["unary_tanh"].form()).binary
