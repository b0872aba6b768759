"""What is read of machine code: counts by kind, widths of accesses, occupancy; and of kernels compiled here."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from autofuse.codegen.knobs import default_config
from autofuse.codegen.lowering.lower import lower
from autofuse.codegen.triton.knobs import triton_knobs
from autofuse.codegen.triton.machine_code import MachineCode, disassemble, read_amd, read_nvidia
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


def nvdisasm() -> Path:
    spec = importlib.util.find_spec("triton")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "nvdisasm"


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
        disassemble(b"no cubin", nvdisasm())


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


@pytest.mark.parametrize("target", ["cuda:80", "cuda:90"])
@pytest.mark.parametrize("name", ["unary_gelu", "softmax", "gelu_backward"])
def test_aligned_rows_are_read_sixteen_bytes_at_a_time(compiler: TritonCompiler, name: str, target: str) -> None:
    form = CASES[name].form()
    kernel, values = lower(form), dict.fromkeys(form.symbols, 1024)
    source = print_triton(kernel, default_config(triton_knobs(kernel, values, values)))
    for image in compiler.compile(source, target, [natural_assumptions(form.symbols, values)]).images:
        code = read_nvidia(disassemble(image.image, nvdisasm()))
        assert set(code.loads) == {16} and set(code.stores) == {16} and code.local == 0
        held = occupancy(image.resources, target)
        assert held is not None and held.share >= 0.5


def test_spilled_registers_are_memory_of_a_thread(compiler: TritonCompiler) -> None:
    (image,) = compiler.compile(spilling(), "cuda:90", [NOTHING_ASSUMED]).images
    assert read_nvidia(disassemble(image.image, nvdisasm())).local > 100
