"""Compiling Triton ahead of time, for any target, without a GPU.

In: a `TritonSource`, a target, and the assumptions under which binaries are wanted. Out: an `Artifact` with one image
for each pass and each of the assumptions, and the device resources of each. Guarantee: no driver is called and nothing
is loaded. A source that does not compile raises `CompilerError` with the first lines of the reason; the compilers'
output on stdout and stderr goes nowhere else. Imports Triton: only the compile process and its tests import this
module. One compilation at a time: file descriptors 1 and 2 point elsewhere meanwhile.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.cache import get_cache_manager

from autofuse.codegen.triton.artifact import Artifact, Image
from autofuse.codegen.triton.key import Options, in_order, options_for
from autofuse.codegen.triton.machine_code import MachineCode, disassemble, nvidia_tool, read_amd, read_nvidia
from autofuse.codegen.triton.module import defined
from autofuse.codegen.triton.resources import Resources
from autofuse.codegen.triton.source import Assumptions, Pass, TritonSource
from autofuse.codegen.triton.targets import parse_target
from autofuse.errors import CompilerError

_NOTE = "resources.json"  # beside Triton's own files of a kernel
_MESSAGE_LINES = 5
_DISASSEMBLER_SECONDS = 10.0  # far less than a request to the compile process may take


class Compiled(NamedTuple):
    """One pass of a source under some assumptions."""

    number: int  # of the pass
    assumptions: Assumptions
    kernel: Any  # Triton's, with the texts of all its stages
    resources: Resources


def compile_source(
    source: TritonSource, target: str, assumptions: Sequence[Assumptions], reads_code: bool = False
) -> Artifact:
    """Compile all passes of a source under each of the assumptions. Raises CompilerError.

    ``reads_code``: the images under the strongest assumptions, which nearly all calls use, say what their code does, if
    there is a disassembler that can read them.
    """
    found = compiled_kernels(source, target, assumptions)
    made = Artifact(source, target, tuple(_image(*item) for item in found))
    if not reads_code:
        return made
    usual, backend = made.assumptions[0], parse_target(target).backend
    codes = [_machine_code(item.kernel, backend) if item.assumptions == usual else None for item in found]
    images = zip(made.images, codes, strict=True)
    return dataclasses.replace(made, images=tuple(dataclasses.replace(image, code=code) for image, code in images))


def compiled_kernels(source: TritonSource, target: str, assumptions: Sequence[Assumptions]) -> list[Compiled]:
    """Each pass under each of the assumptions. Raises CompilerError."""
    parsed = parse_target(target)
    gpu = GPUTarget(parsed.backend, parsed.arch, parsed.warp_size)
    options = options_for(source, target)
    made = []
    with _settings(), contextlib.ExitStack() as stack:
        try:
            names = stack.enter_context(defined(source))
            functions = [names[item.function] for item in source.passes]
        except Exception as error:
            raise CompilerError(
                f"expected a module with the kernels of {source.name}, found {_reason(error)}"
            ) from None
        for number, (item, function) in enumerate(zip(source.passes, functions, strict=True)):
            for assumed in in_order(assumptions):
                ast = ASTSource(function, _signature(item), dict(item.constants), _attributes(item, assumed))
                made.append(Compiled(number, assumed, *_compile(ast, gpu, options)))
    return made


@contextlib.contextmanager
def _settings() -> Iterator[None]:
    """Set what matters here of Triton's settings in this process, until the end of the block."""
    with knobs.compilation.scope(), knobs.nvidia.scope():
        knobs.compilation.disable_line_info = True  # about half of a cubin
        knobs.nvidia.dump_ptxas_log = True  # makes ptxas print registers and spills
        yield


def _signature(item: Pass) -> dict[str, str]:
    return {a.name: a.type for a in item.arguments} | {name: "constexpr" for name, _ in item.constants}


def _attributes(item: Pass, assumed: Assumptions) -> dict[tuple[int], list[list[Any]]]:
    """What the compiler may take for granted, by the position of an argument.

    AMD's compiler could also be told that a tensor is smaller than 2 GiB ("tt.pointer_range"): it is not, because
    nobody checks that at a launch.
    """

    def holds(name: str, kind: str) -> bool:
        return name in assumed.divisible if kind == "symbol" else assumed.is_aligned and kind in ("param", "scratch")

    return {(at,): [["tt.divisibility", 16]] for at, a in enumerate(item.arguments) if holds(a.name, a.kind)}


def _compile(ast: Any, gpu: Any, options: Options) -> tuple[Any, Resources]:
    """The compiled kernel and what it takes, which is noted in Triton's cache beside the kernel."""
    kernel, log, was_cached = _run(ast, gpu, options)
    files = get_cache_manager(kernel.hash)
    note = files.get_file(_NOTE)
    if note is not None:
        return kernel, Resources(**json.loads(Path(note).read_text()))
    if was_cached:
        with knobs.compilation.scope():
            knobs.compilation.always_compile = True
            kernel, log, _ = _run(ast, gpu, options)
    resources = _READERS[gpu.backend](kernel, log, kernel.metadata.num_warps * gpu.warp_size)
    files.put(json.dumps(dataclasses.asdict(resources)), _NOTE)
    return kernel, resources


def _run(ast: Any, gpu: Any, options: Options) -> tuple[Any, str, bool]:
    """The kernel, what was printed, and whether it was in Triton's cache."""
    hits: list[bool] = []
    with knobs.compilation.scope(), _captured() as printed:
        knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
        try:
            kernel = triton.compile(ast, target=gpu, options=dict(options))
        except MemoryError:
            raise
        except Exception as error:
            reason = _reason(error, _text(printed))
            raise CompilerError(f"expected the generated Triton kernel {ast.name} to compile, found {reason}") from None
        return kernel, _text(printed), hits[-1]


def _image(number: int, assumed: Assumptions, kernel: Any, resources: Resources) -> Image:
    metadata = kernel.metadata
    scratch = getattr(metadata, "global_scratch_size", 0) or getattr(metadata, "profile_scratch_size", 0)
    if scratch or metadata.num_ctas != 1:
        raise CompilerError(f"expected {metadata.name} to need no memory of Triton's own, found {scratch} bytes")
    return Image(
        number, metadata.name, assumed, resources.threads, resources.shared_bytes, resources, bytes(kernel.kernel)
    )


# ---- what a kernel takes ----------------------------------------------------------------------------------


def _read_nvidia(kernel: Any, log: str, threads: int) -> Resources:
    """Resources from what ``ptxas -v`` printed; the driver's figure would count all local memory as spilled."""
    registers = re.findall(r"Used (\d+) registers", log)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", log)
    if not registers or not spills:
        raise CompilerError(f"expected ptxas to say what {kernel.metadata.name} takes, found: {log[:200]!r}")
    return Resources(max(map(int, registers)), sum(map(int, spills)), kernel.metadata.shared, threads)


def _read_amd(kernel: Any, log: str, threads: int) -> Resources:
    """Resources from the metadata at the end of the assembler's text, and Triton's figure of shared memory.

    The assembler's figure of shared memory lacks what a launch adds.
    """
    text = kernel.asm["amdgcn"]
    names = ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size")
    found = {name: re.search(rf"\.{name}:\s+(\d+)", text) for name in names}
    missing = [name for name, match in found.items() if match is None]
    if missing:
        raise CompilerError(f"expected {', '.join(missing)} in the metadata of {kernel.metadata.name}, found none")
    registers, *spilled, memory = (int(match[1]) for match in found.values() if match is not None)
    # Scalar registers are spilled to lanes of vector registers first, which takes no memory.
    return Resources(registers, memory if any(spilled) else 0, kernel.metadata.shared, threads)


_READERS = {"cuda": _read_nvidia, "hip": _read_amd}


def _machine_code(kernel: Any, backend: str) -> MachineCode | None:
    """What the instructions of a kernel do; None where nothing here can read them."""
    try:
        if backend == "hip":
            return read_amd(kernel.asm["amdgcn"])
        return read_nvidia(disassemble(bytes(kernel.kernel), nvidia_tool("nvdisasm"), _DISASSEMBLER_SECONDS))
    except CompilerError:
        return None


# ---- what compilers print -----------------------------------------------------------------------------------


@contextlib.contextmanager
def _captured() -> Iterator[IO[str]]:
    """What Python and native code print within the block: on a failure, Triton prints all of the assembler's text."""
    saved = os.dup(1), os.dup(2)
    with os.fdopen(os.memfd_create("autofuse-triton"), "w+", errors="replace") as printed:
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            os.dup2(printed.fileno(), 1)
            os.dup2(printed.fileno(), 2)
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
                yield printed
        finally:
            for descriptor, at in zip(saved, (1, 2), strict=True):
                os.dup2(descriptor, at)
                os.close(descriptor)


def _text(printed: IO[str]) -> str:
    printed.flush()
    printed.seek(0)
    return printed.read()


def _reason(error: BaseException, printed: str = "") -> str:
    """The first lines of what went wrong: where, what, and what the compiler said of it."""
    lines = []
    line, text = getattr(getattr(error, "node", None), "lineno", None), getattr(error, "src", None)
    if text and line:
        lines.append(f"in `{text.splitlines()[line - 1].strip()}`")
    while error.__cause__ is not None:
        error = error.__cause__
    said = getattr(error, "error_message", None) or str(error)
    lines.append(f"{type(error).__name__}: {said.strip()}")
    lines += [line for line in printed.splitlines() if re.search(r"\berror\b", line)]
    return "\n".join("\n".join(lines).splitlines()[:_MESSAGE_LINES])
