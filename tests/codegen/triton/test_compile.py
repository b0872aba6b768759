"""Triton kernels compile ahead of time for every target, and what they take of a device is read back."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import subprocess
import sys
import zlib
from collections.abc import Iterator

import pytest
import torch

from autofuse.codegen.knobs import default_config
from autofuse.codegen.lowering.lower import lower
from autofuse.codegen.triton import key as keys
from autofuse.codegen.triton.artifact import Artifact, Image
from autofuse.codegen.triton.key import clean_environment, compile_key, find_triton, kernel_record, options_for
from autofuse.codegen.triton.knobs import triton_knobs
from autofuse.codegen.triton.printer import print_triton
from autofuse.codegen.triton.resources import Resources
from autofuse.codegen.triton.source import NOTHING_ASSUMED, Assumptions, TritonSource, natural_assumptions
from autofuse.codegen.triton.targets import (
    LIMITS,
    Target,
    limits_of,
    parse_target,
    prune_reason,
    target_of,
    total_resources,
)
from autofuse.errors import CompilerError
from autofuse.ir.records import make_config
from autofuse.tuner.triton_compiler import TritonCompiler
from autofuse.tuner.worker_process import CandidateProblem
from tests.cases import CASES, ON_GPUS
from tests.codegen.triton.sources import broken, elementwise, row_softmax, spilling, two_passes

TARGETS = {"cuda:80": (190, 32), "cuda:90": (190, 32), "hip:gfx942": (224, 64)}  # machine of the ELF header, warp size
STRONG = Assumptions(True, ("s0",))


@pytest.fixture(scope="module")
def compiler() -> Iterator[TritonCompiler]:
    with TritonCompiler(lambda key: None, lambda key, files: None) as opened:
        yield opened


def images_of(artifact: Artifact, assumptions: Assumptions) -> list[Image]:
    """Of all passes, in order."""
    found = [image for image in artifact.images if image.assumptions == assumptions]
    return sorted(found, key=lambda image: image.number)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", [elementwise(), row_softmax(), two_passes()], ids=["elementwise", "softmax", "two"])
def test_compiles_without_a_gpu(compiler: TritonCompiler, source: TritonSource, target: str) -> None:
    artifact = compiler.compile(source, target, [NOTHING_ASSUMED, STRONG])
    assert artifact.source == source and artifact.target == target
    assert artifact.assumptions == (STRONG, NOTHING_ASSUMED)
    machine, warp_size = TARGETS[target]
    for assumptions in artifact.assumptions:
        images = images_of(artifact, assumptions)
        assert [i.function for i in images] == [p.function for p in source.passes]
        assert [i.number for i in images] == list(range(len(source.passes)))
        for image in images:
            assert image.image[:4] == b"\x7fELF" and int.from_bytes(image.image[18:20], "little") == machine
            assert image.function.encode() in image.image
            assert image.threads == image.resources.threads == source.num_warps * warp_size
            assert image.shared_bytes == image.resources.shared_bytes
            assert 4 <= image.resources.registers <= 64 and image.resources.spill_bytes == 0
            assert (image.shared_bytes > 0) == (image.function == "af_softmax")  # to reduce over warps
    assert prune_reason(artifact, limits_of(target)) is None
    strong, weak = (images_of(artifact, a)[0].image for a in artifact.assumptions)
    assert strong != weak


def test_spilled_registers_are_seen_and_pruned(compiler: TritonCompiler) -> None:
    artifact = compiler.compile(spilling(), "cuda:90", [NOTHING_ASSUMED])
    assert artifact.images[0].resources.spill_bytes > 1000
    reason = prune_reason(artifact, limits_of("cuda:90"))
    assert (
        reason is not None and reason.startswith("af_spills spills ") and reason.endswith("bytes of registers a thread")
    )


@pytest.mark.parametrize("target", TARGETS)
def test_a_source_that_does_not_compile_says_where_and_why(compiler: TritonCompiler, target: str) -> None:
    generation = compiler.generation
    with pytest.raises(CandidateProblem) as caught:
        compiler.compile(broken(), target, [NOTHING_ASSUMED])
    assert caught.value.status == "compile_error"
    message = str(caught.value)
    assert "expected the generated Triton kernel af_mul_relu to compile" in message
    assert "tl.no_such_function(x * 2.0" in message and "has no attribute 'no_such_function'" in message
    assert len(message.splitlines()) <= 6
    compiler.compile(elementwise(), target, [NOTHING_ASSUMED])
    assert compiler.generation == max(generation, 1)  # the same process


def test_text_that_is_no_python_and_a_target_that_is_none(compiler: TritonCompiler) -> None:
    with pytest.raises(CandidateProblem, match="expected a module with the kernels of af_mul_relu, found SyntaxError"):
        compiler.compile(dataclasses.replace(elementwise(), text="def (:"), "cuda:90", [NOTHING_ASSUMED])
    with pytest.raises(CandidateProblem, match="found KeyError: 'af_mul_relu'"):
        compiler.compile(dataclasses.replace(elementwise(), text="pass"), "cuda:90", [NOTHING_ASSUMED])
    with pytest.raises(CandidateProblem, match="expected a target such as cuda:90 or hip:gfx942, found 'metal'"):
        compiler.compile(elementwise(), "metal", [NOTHING_ASSUMED])


def test_triton_knows_every_option() -> None:
    """It drops options that it does not know without a word."""
    known = "from triton.backends.{0}.compiler import {1} as o; print(*o.__dataclass_fields__)"
    for target, backend, name in (("cuda:90", "nvidia", "CUDAOptions"), ("hip:gfx942", "amd", "HIPOptions")):
        code = [sys.executable, "-c", known.format(backend, name)]
        found = subprocess.run(code, capture_output=True, text=True, check=True, env=clean_environment(os.environ))
        assert set(options_for(elementwise(), target)) - set(found.stdout.split()) == set()


@pytest.mark.parametrize("name", ON_GPUS)
def test_what_the_printer_writes_compiles(compiler: TritonCompiler, name: str) -> None:
    """Each case of the table for both makers, in float32 or a narrower type; nothing spills or asks for too much."""
    number = zlib.crc32(name.encode())
    dtype = ("float32", "bfloat16", "float16")[number % 3]
    form = CASES[name].form(getattr(torch, dtype))
    kernel = lower(form)
    values = dict.fromkeys(form.symbols, 512)
    source = print_triton(kernel, default_config(triton_knobs(kernel, values, values)))
    natural = natural_assumptions(source.symbols, values)
    for target in ("cuda:90" if number % 2 else "cuda:80", "hip:gfx942"):
        artifact = compiler.compile(source, target, [natural])
        assert len(images_of(artifact, natural)) == len(source.passes)
        assert prune_reason(artifact, limits_of(target)) is None


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("is_specialised", [False, True])
def test_several_nests_compile(compiler: TritonCompiler, is_specialised: bool, bits: int) -> None:
    """With sizes as arguments or built in, and positions of 32 or 64 bits."""
    form = CASES["moves_of_parts"].form(torch.bfloat16)
    kernel = lower(form)
    values = dict(zip(form.symbols, (64, 1000, 31, 3, 5000), strict=True))
    config = make_config(
        {**dict(default_config(triton_knobs(kernel, values, values))), "index_bits": bits, "TILE": 4096}
    )
    source = print_triton(kernel, config, values if is_specialised else None)
    assert source.symbols == (() if is_specialised else form.symbols)
    for target in TARGETS:
        artifact = compiler.compile(source, target, [NOTHING_ASSUMED])
        (image,) = artifact.images
        assert image.function == source.name and image.shared_bytes == image.resources.spill_bytes == 0


@pytest.mark.parametrize("stages", [1, 3])
def test_column_sums_of_long_rows_compile(compiler: TritonCompiler, stages: int) -> None:
    """They grow in scratch memory; the threads of a program wait for each other before they read it again."""
    form = CASES["layer_norm_backward"].form(torch.bfloat16)
    kernel = lower(form)
    values = dict(zip(form.symbols, (64, 8, 32_768), strict=True))
    config = make_config({**dict(default_config(triton_knobs(kernel, values, values))), "num_stages": stages})
    source = print_triton(kernel, config)
    assert source.text.count("tl.debug_barrier()") == 2 and len(source.passes) == 2
    natural = natural_assumptions(source.symbols, values)
    for target in TARGETS:
        assert prune_reason(compiler.compile(source, target, [natural]), limits_of(target)) is None


# ---- keys -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["softmax", "logsumexp", "layer_norm"])
def test_merged_passes_compile(compiler: TritonCompiler, name: str) -> None:
    kernel = lower(CASES[name].form())
    sizes = dict(zip(kernel.symbols, (1, 64, 1 << 18), strict=True))
    config = default_config(triton_knobs(kernel, sizes, sizes))
    assert dict(config)["passes"] == "one"
    artifact = compiler.compile(print_triton(kernel, config), "cuda:90", [NOTHING_ASSUMED])
    assert prune_reason(artifact, limits_of("cuda:90")) is None


def test_whatever_determines_a_binary_is_in_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    source = elementwise()
    others = [
        compile_key(dataclasses.replace(source, **{name: value}), "cuda:90", [STRONG])
        for name, value in (
            ("text", source.text + "\n"), ("num_warps", 8), ("num_stages", 2), ("programs", 5), ("name", "other"),
            ("passes", elementwise(block=512).passes),
        )
    ]  # fmt: skip
    others += [compile_key(source, "cuda:80", [STRONG]), compile_key(source, "hip:gfx942", [STRONG])]
    others += [compile_key(source, "cuda:90", [NOTHING_ASSUMED]), compile_key(source, "cuda:90", [])]
    others += [compile_key(source, "cuda:90", [STRONG, NOTHING_ASSUMED])]
    key = compile_key(source, "cuda:90", [STRONG])
    monkeypatch.setattr(keys, "installed_triton", lambda: keys.TritonVersion("triton", "3.6.0", "0" * 12))
    others += [compile_key(source, "cuda:90", [STRONG])]
    assert len({key.digest, *(other.digest for other in others)}) == 1 + len(others)


def test_the_order_of_assumptions_is_in_no_key() -> None:
    pairs = ([STRONG, NOTHING_ASSUMED], [NOTHING_ASSUMED, STRONG, STRONG])
    first, second = (compile_key(elementwise(), "cuda:90", pair) for pair in pairs)
    assert first == second


def test_the_record_of_an_artifact(compiler: TritonCompiler) -> None:
    artifact = compiler.compile(two_passes(), "cuda:90", [NOTHING_ASSUMED, STRONG])
    record = kernel_record(artifact)
    assert record.key == compile_key(two_passes(), "cuda:90", [STRONG, NOTHING_ASSUMED])
    assert Artifact.unpack(record.binary) == artifact and record.source == two_passes().text
    taken = [image.resources for image in artifact.images]
    assert record.resources == total_resources(artifact) == {
        "target": "cuda:90",
        "registers": max(r.registers for r in taken),
        "spill_bytes": 0,
        "shared_bytes": max(r.shared_bytes for r in taken),
        "threads": 128,
    }  # fmt: skip


@pytest.mark.parametrize("target", ["cuda:90", "hip:gfx942"])
def test_what_the_usual_code_does_is_stored_where_it_is_asked_for(compiler: TritonCompiler, target: str) -> None:
    artifact = compiler.compile(two_passes(), target, [NOTHING_ASSUMED, STRONG], reads_code=True)
    assert Artifact.unpack(artifact.pack()) == artifact
    codes = [image.code for image in images_of(artifact, STRONG)]
    assert [image.code for image in images_of(artifact, NOTHING_ASSUMED)] == [None, None]
    assert all(code is not None and code.loads and code.stores for code in codes)
    stored = kernel_record(artifact).resources["code"]
    assert stored["instructions"] == sum(code.instructions for code in codes if code is not None)
    part = dataclasses.replace(artifact, images=images_of(artifact, STRONG)[:1])
    assert "code" not in total_resources(part)  # of half a call nothing is said


UNREADABLE = """
from types import SimpleNamespace
from autofuse.codegen.triton import compile as compiling
from autofuse.codegen.triton.machine_code import nvidia_tool
from autofuse.codegen.triton.source import NOTHING_ASSUMED
from tests.codegen.triton.sources import elementwise

kernel = SimpleNamespace(kernel=b"no cubin", asm={"amdgcn": "no code"})
print(compiling._machine_code(kernel, "cuda"), compiling._machine_code(kernel, "hip"))
compiling.nvidia_tool = lambda name: nvidia_tool("none_of_that_name")
print(compiling.compile_source(elementwise(), "cuda:90", [NOTHING_ASSUMED], reads_code=True).images[0].code)
"""


def test_code_that_nothing_here_can_read_is_left_out() -> None:
    """Where there is no disassembler, or it cannot read a kernel. In a process of its own: Triton is imported."""
    done = subprocess.run([sys.executable, "-c", UNREADABLE], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["None"] * 3


def test_keys_need_neither_triton_nor_torch() -> None:
    code = (
        "import sys\n"
        "from tests.codegen.triton.sources import elementwise\n"
        "from autofuse.codegen.triton.key import compile_key\n"
        "import autofuse.tuner.triton_compiler\n"
        "print(compile_key(elementwise(), 'cuda:90', []).digest)\n"
        "sys.exit('torch' in sys.modules or 'triton' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == compile_key(elementwise(), "cuda:90", []).digest


@pytest.mark.parametrize(
    ("version", "found"), [(None, "found none"), ("3.5.1", "found triton 3.5.1"), ("dev", "found triton dev")]
)
def test_a_missing_or_old_triton_says_what_to_type(
    monkeypatch: pytest.MonkeyPatch, version: str | None, found: str
) -> None:
    installed = None if version is None else keys.TritonVersion("triton", version, "")
    monkeypatch.setattr(keys, "installed_triton", lambda: installed)
    with pytest.raises(CompilerError) as caught:
        find_triton()
    message = str(caught.value)
    assert "expected Triton 3.6 or newer" in message and found in message and "pip install 'triton>=3.6" in message


def test_the_installed_triton_is_found() -> None:
    found = find_triton()
    assert found.version == importlib.metadata.version(found.package)
    assert len(found.digest) == 12


def test_variables_that_change_what_triton_makes_are_taken_away() -> None:
    kept = {"PATH": "/bin", "HOME": "/root", "AUTOFUSE_TUNE": "wait", "CUDA_VISIBLE_DEVICES": "0"}
    taken = ("TRITON_INTERPRET", "TRITON_CACHE_DIR", "PTXAS_OPTIONS", "DISABLE_PTXAS_OPT", "LLVM_PASS_PLUGIN_PATH")
    assert clean_environment(kept | dict.fromkeys(taken, "1")) == kept


# ---- targets ----------------------------------------------------------------------------------------------


def test_targets_by_name() -> None:
    assert parse_target("cuda:90") == Target("cuda", 90, 32)
    assert parse_target("hip:gfx942") == Target("hip", "gfx942", 64)
    assert parse_target("hip:gfx1100") == Target("hip", "gfx1100", 32)
    assert [target_of(isa) for isa in ("sm_80", "sm_90", "gfx942", "gfx942:sramecc+:xnack-")] == [
        "cuda:80", "cuda:90", "hip:gfx942", "hip:gfx942",
    ]  # fmt: skip
    for wrong in ("avx512", "sm_x", ""):
        with pytest.raises(CompilerError, match="expected a target"):
            target_of(wrong)
    assert set(TARGETS) <= set(LIMITS)
    with pytest.raises(CompilerError, match=r"cuda:90.*found cuda:35"):
        limits_of("cuda:35")


@pytest.mark.parametrize(
    ("target", "taken", "says"),
    [
        ("cuda:90", Resources(64, 0, 232448, 1024), None),
        ("cuda:90", Resources(64, 4, 0, 128), "spills 4 bytes"),
        ("cuda:90", Resources(64, 0, 232449, 128), "takes 232449 bytes of shared memory, the device has 232448"),
        ("cuda:80", Resources(64, 0, 166913, 128), "the device has 166912 for a program"),
        ("hip:gfx942", Resources(64, 0, 65537, 256), "the device has 65536 for a program"),
        ("cuda:90", Resources(32, 0, 0, 2048), "has 2048 threads a program, the device 1024 at most"),
        ("cuda:90", Resources(65, 0, 0, 1024), "takes 72 registers for each of 1024 threads, the device has 65536"),
        ("hip:gfx942", Resources(128, 0, 0, 1024), None),
        ("hip:gfx942", Resources(129, 0, 0, 1024), "takes 136 registers for each of 1024 threads"),
    ],
)
def test_what_does_not_fit_is_pruned_with_its_reason(target: str, taken: Resources, says: str | None) -> None:
    image = Image(0, "af_k", NOTHING_ASSUMED, taken.threads, taken.shared_bytes, taken, b"")
    reason = prune_reason(Artifact(elementwise(), target, (image,)), limits_of(target))
    assert reason is None if says is None else reason is not None and says in reason


def test_kernels_for_odd_addresses_may_spill_beside_others() -> None:
    spills, fits = Resources(255, 96, 0, 128), Resources(128, 0, 0, 128)
    large = Resources(128, 0, 1 << 20, 128)

    def reason(strong: Resources, weak: Resources) -> str | None:
        taken = ((STRONG, strong), (NOTHING_ASSUMED, weak))
        images = tuple(Image(0, "af_k", a, r.threads, r.shared_bytes, r, b"") for a, r in taken)
        return prune_reason(Artifact(elementwise(), "cuda:90", images), limits_of("cuda:90"))

    assert reason(fits, spills) is None
    assert "spills 96 bytes" in str(reason(spills, fits))
    assert "shared memory" in str(reason(fits, large))
