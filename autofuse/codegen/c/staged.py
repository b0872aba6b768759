"""C of a kernel of stages: each is a function with loops and threads of its own, called one after another.

In: the stages, each printed. Out: the function of the whole, which has memory for the temporaries: up to 4 MiB kept for
the next call. Guarantee: a stage begins when the one before has ended; after one that has failed, none begins.
"""

from __future__ import annotations

from collections.abc import Mapping

from autofuse.codegen.dtypes import dtype
from autofuse.codegen.loops import LoopKernel
from autofuse.ir.size_text import dim_text

_MEMORY = (
    "#ifndef AF_KEEP_BYTES",
    "#define AF_KEEP_BYTES (INT64_C(4) << 20)",
    "#endif",
    "  static _Thread_local char* held = NULL;",
    "  static _Thread_local int64_t held_bytes = 0;",
    "  char* space = held;",
    "  if (all_bytes > held_bytes) {",
    "    space = malloc((size_t)all_bytes);",
    "    if (space == NULL) return -1;",
    "    if (all_bytes <= AF_KEEP_BYTES) { free(held); held = space; held_bytes = all_bytes; }",
    "  }",
    "  char* const first = (char*)(((uintptr_t)space + 63) & ~(uintptr_t)63);",
)


def stage_name(kernel: LoopKernel, number: int) -> str:
    """The name of a stage's function."""
    return f"{kernel.name}_{number}"


def driver_of_stages(kernel: LoopKernel, constants: Mapping[str, int]) -> str:
    """The function that calls the stages."""
    lines = [f"static int {kernel.name}(const int64_t* sizes, void** ptrs) {{", *symbol_lines(kernel, constants)]
    offset = "0"
    for n, temporary in enumerate(kernel.temporaries):
        lines.append(f"  const int64_t at_temp{n} = {offset};")
        bytes_text = f"({dim_text(temporary.numel)}) * {dtype(temporary.dtype).nbytes}"
        offset = f"at_temp{n} + AF_ALIGNED({bytes_text})"
    if kernel.temporaries:
        lines += [f"  const int64_t all_bytes = {offset} + 64;", *_MEMORY]
    lines.append("  int failed = 0;")
    for number, stage in enumerate(kernel.stages):
        pointers = ", ".join(_pointer(kernel, place) for place in stage.places)
        lines += [
            "  if (!failed) {",
            f"    void* part[] = {{{pointers}}};",
            f"    failed = {stage_name(kernel, number)}(sizes, part);",
            "  }",
        ]
    if kernel.temporaries:
        lines.append("  if (all_bytes > AF_KEEP_BYTES) free(space);")
    return "\n".join([*lines, "  return failed;", "}", ""])


def _pointer(kernel: LoopKernel, place: int) -> str:
    number = place - len(kernel.params)
    return f"first + at_temp{number}" if number >= 0 else f"ptrs[{place}]"


def symbol_lines(kernel: LoopKernel, constants: Mapping[str, int]) -> list[str]:
    """C lines that define a kernel's symbols."""
    lines = []
    for n, name in enumerate(kernel.symbols):
        value = dim_text(int(constants[name])) if name in constants else f"sizes[{n}]"
        lines.append(f"  const int64_t {name} = {value}; (void){name};")
    return lines
