"""What is read of machine code: counts by kind, widths of accesses, occupancy; and of kernels compiled here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from autofuse.codegen.knobs import default_config
from autofuse.codegen.lowering.lower import lower
from autofuse.codegen.triton.artifact import Image
from autofuse.codegen.triton.knobs import triton_knobs
from autofuse.codegen.triton.machine_code import (
    MachineCode,
    disassemble,
    nvidia_tool,
    read_amd,
    read_nvidia,
    total,
)
from autofuse.codegen.triton.printer import print_triton
from autofuse.codegen.triton.resources import Resources, occupancy
from autofuse.codegen.triton.source import NOTHING_ASSUMED, natural_assumptions
from autofuse.errors import CompilerError
from autofuse.tuner.triton_compiler import TritonCompiler
from tests.cases import CASES
from tests.codegen.triton.sources import spilling

SASS = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   S2R R0, SR_TID.X ;
        /*0020*/              @!P0 LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0030*/              @P1  LDG.E.U16.CONSTANT R8, desc[UR4][R6.64] ;
        /*0040*/                   LDG.E R9, desc[UR4][R6.64] ;
        /*0050*/                   MUFU.EX2 R10, R9 ;
        /*0060*/                   SHFL.BFLY PT, R11, R10, 0x10, 0x1f ;
        /*0070*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0080*/                   HMMA.16816.F32 R4, R4, R8, R12 ;
        /*0090*/                   STL.64 [R1], R4 ;
        /*00a0*/                   STG.E.64 desc[UR4][R2.64], R4 ;
        /*00b0*/                   EXIT ;
        /*00c0*/                   NOP ;
"""
AMD = """
af_kernel:
\ts_load_dwordx4 s[4:7], s[0:1], 0x0
\tglobal_load_dwordx4 v[0:3], v4, s[4:5]
\tbuffer_load_ubyte v5, v6, s[8:11], 0 offen
\tv_exp_f32_e32 v7, v0
\tv_add_f32_dpp v8, v7, v7 quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf
\tds_bpermute_b32 v9, v10, v8
\ts_barrier
\tglobal_store_dwordx2 v4, v[0:1], s[6:7]
\ts_endpgm
\t.section .rodata
\tv_exp_f32_e32 v7, v0
"""


@pytest.fixture(scope="module")
def compiler() -> Iterator[TritonCompiler]:
    with TritonCompiler(lambda key: None, lambda key, files: None) as opened:
        yield opened


def test_nvidias_instructions_are_counted_by_kind() -> None:
    assert read_nvidia(SASS) == MachineCode(
        12, {2: 1, 4: 1, 16: 1}, {8: 1}, local=1, barriers=1, shuffles=1, special=1, matrix=1
    )


def test_amds_instructions_are_counted_up_to_the_end_of_the_kernel() -> None:
    assert read_amd(AMD) == MachineCode(8, {1: 1, 16: 1}, {8: 1}, local=0, barriers=1, shuffles=2, special=1, matrix=0)


@pytest.mark.parametrize("read", [read_nvidia, read_amd])
def test_other_text_is_refused(read: object) -> None:
    assert callable(read)
    with pytest.raises(CompilerError, match="expected instructions of an"):
        read("no code at all")
    with pytest.raises(CompilerError, match="expected nvdisasm to read a cubin"):
        disassemble(b"no cubin", nvidia_tool("nvdisasm"))


def test_a_disassembler_that_is_missing_or_slow_is_an_error_of_compilation() -> None:
    with pytest.raises(CompilerError, match=r"expected Triton's wheel with .*no_such_tool: pip install"):
        nvidia_tool("no_such_tool")
    with pytest.raises(CompilerError, match="expected /no/such/nvdisasm to run, found"):
        disassemble(b"", Path("/no/such/nvdisasm"))
    with pytest.raises(CompilerError, match=r"to run, found: .* timed out after 0.0 seconds"):
        disassemble(b"", nvidia_tool("nvdisasm"), timeout_seconds=0.0)


def test_counts_are_added_up_and_survive_json() -> None:
    nvidia, amd = read_nvidia(SASS), read_amd(AMD)
    both = total([nvidia, amd])
    assert both == MachineCode(
        20, {1: 1, 2: 1, 4: 1, 16: 2}, {8: 2}, local=1, barriers=2, shuffles=3, special=2, matrix=1
    )
    assert total([nvidia]) == nvidia == MachineCode.from_json(json.loads(json.dumps(nvidia.to_json())))


@pytest.mark.parametrize(
    ("taken", "target", "warps", "limiter"),
    [
        (Resources(32, 0, 0, 256), "cuda:90", 64, "warps"),
        (Resources(128, 0, 0, 256), "cuda:90", 16, "registers"),
        (Resources(33, 0, 0, 128), "cuda:80", 48, "registers"),  # a warp gets registers in units of 256
        (Resources(32, 0, 100 << 10, 128), "cuda:90", 8, "kilobytes of shared memory"),
        (Resources(16, 0, 0, 32), "cuda:86", 16, "programs"),
        (Resources(128, 0, 0, 256), "hip:gfx942", 16, "registers"),
    ],
)
def test_what_limits_occupancy(taken: Resources, target: str, warps: int, limiter: str) -> None:
    held = occupancy(taken, target)
    assert held is not None and (held.warps, held.limiter) == (warps, limiter)
    assert held.share == warps / held.most


def test_a_device_that_is_in_no_table() -> None:
    assert occupancy(Resources(32, 0, 0, 256), "cuda:75") is None


def images_of(compiler: TritonCompiler, name: str, target: str) -> tuple[Image, ...]:
    """A case's kernels by their defaults, for aligned tensors and sizes that 16 divides."""
    form = CASES[name].form()
    kernel, values = lower(form), dict.fromkeys(form.symbols, 1024)
    source = print_triton(kernel, default_config(triton_knobs(kernel, values, values)))
    return compiler.compile(source, target, [natural_assumptions(form.symbols, values)], reads_code=True).images


@pytest.mark.parametrize("target", ["cuda:80", "cuda:90"])
@pytest.mark.parametrize("name", ["unary_gelu", "softmax", "gelu_backward"])
def test_aligned_rows_are_read_sixteen_bytes_at_a_time(compiler: TritonCompiler, name: str, target: str) -> None:
    for image in images_of(compiler, name, target):
        assert image.code is not None and image.code.local == 0
        assert set(image.code.loads) == {16} and set(image.code.stores) == {16}
        held = occupancy(image.resources, target)
        assert held is not None and held.share >= 0.5


@pytest.mark.parametrize(
    "name", ["lerp", "add_bias_gelu", "rms_norm_parts", "layer_norm_plain", "log_softmax_backward", "sum_first"]
)
def test_whatever_is_aligned_is_read_sixteen_bytes_at_a_time(compiler: TritonCompiler, name: str) -> None:
    """Sums of columns are written by as many threads as there are columns, four bytes each."""
    first, *_ = images_of(compiler, name, "cuda:90")
    assert first.code is not None and set(first.code.loads) == {16}
    assert set(first.code.stores) == ({4} if name == "sum_first" else {16})


def test_spilled_registers_are_memory_of_a_thread(compiler: TritonCompiler) -> None:
    (image,) = compiler.compile(spilling(), "cuda:90", [NOTHING_ASSUMED], reads_code=True).images
    assert image.code is not None and image.code.local > 100
