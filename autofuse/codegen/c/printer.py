"""Printing C: a loop kernel and a configuration become one C11 translation unit.

In: a `LoopKernel`, a configuration, and constants for some or all symbols (the specialised form; without constants, the
generic one). Out: `CSource`, whose text depends on nothing else. The unit exports ``af_call(sizes, ptrs)`` and
``af_entry`` (a METH_FASTCALL function of Python, declared by hand: no Python headers are needed). ``sizes`` holds the
symbols in order, then the thread count; ``ptrs`` inputs, then outputs. Guarantee: any strides, sizes of 0, more than
2^31 elements; sums run in blocks whose partial sums are added in double, so their error does not grow with the length;
the result for a thread count is always the same. It is the same for any number of threads where a whole tensor becomes
one number and no row needs a buffer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autofuse.codegen.c.body import SHARES, Body
from autofuse.codegen.c.knobs import can_chunk, can_merge, can_transpose, uses_lanes
from autofuse.codegen.c.lanes import LaneBody
from autofuse.codegen.c.merge import MERGE_HELPERS
from autofuse.codegen.c.row_chunks import ChunkBody
from autofuse.codegen.c.scalar import HELPERS, vector_prototypes
from autofuse.codegen.c.staged import driver_of_stages, stage_name, symbol_lines
from autofuse.codegen.c.tiled_sums import TiledBody
from autofuse.codegen.c.transposed_blocks import TransposedBody
from autofuse.codegen.c.write_body import WriteBody
from autofuse.codegen.column_passes import plan
from autofuse.codegen.loops import LoopKernel
from autofuse.codegen.one_pass import merge_passes
from autofuse.errors import OUT_OF_BOUNDS, LoweringError
from autofuse.ir.records import Config
from autofuse.ir.size_text import dim_text


@dataclass(frozen=True)
class CSource:
    """A translation unit and the name a profiler shows."""

    name: str
    text: str


def print_c(kernel: LoopKernel, config: Config, constants: Mapping[str, int] | None = None) -> CSource:
    """The C text of a kernel. Raises LoweringError where a size has no exact C form."""
    whole = (kernel, *kernel.rest)
    work, driver = _functions(kernel, dict(config), constants or {})
    text = "\n".join(
        [
            _header(kernel, config, constants),
            INCLUDES,
            vector_prototypes(work + driver),
            *(helper for token, helper in (*HELPERS, *MERGE_HELPERS) if token in work or token in driver),
            work,
            driver,
            ENTRY.replace("@NAME@", kernel.name)
            .replace("@PARAMS@", str(len(kernel.params)))
            .replace("  if (failed) {\n", f"{OUTSIDE if any(k.bounds for k in whole) else ''}  if (failed) {{\n"),
        ]
    )
    return CSource(kernel.name, text)


def _functions(kernel: LoopKernel, knobs: Mapping[str, object], constants: Mapping[str, int]) -> tuple[str, str]:
    """The functions that the kernel's own function calls, and that function."""
    if kernel.stages:
        parts = [dataclasses.replace(s.kernel, name=stage_name(kernel, n)) for n, s in enumerate(kernel.stages)]
        work = "\n".join(text for part in parts for text in _functions(part, knobs, constants))
        return work, driver_of_stages(kernel, constants)
    body, sizes = _body(kernel, knobs), _sizes(kernel, constants)
    nests = [(body, sizes)]
    nests += [(_body(n, {**knobs, "staging": "recompute"}), _sizes(n, constants)) for n in kernel.rest]
    work = "\n".join(b.function().replace("@SIZES@", text) for b, text in nests)
    driver = _driver_of_nests(kernel, nests) if kernel.rest else _driver(kernel, body)
    return work, driver.replace("@SIZES@", sizes)


def _body(kernel: LoopKernel, knobs: Mapping[str, object]) -> Body:
    """The printer of a nest's loops: rows as lanes, transposed blocks, or plain loops."""
    if kernel.kind == "write":
        return WriteBody(kernel, plan(kernel, keep=False), knobs)
    if uses_lanes(kernel):
        return LaneBody(kernel, plan(kernel, keep=False, widen=False), knobs)
    is_merged = knobs.get("passes") == "one" and can_merge(kernel)
    kernel = merge_passes(kernel) if is_merged else kernel
    if knobs.get("row_chunks") and can_chunk(kernel):
        return ChunkBody(kernel, plan(kernel, keep=False), knobs)
    if is_merged:
        return TiledBody(kernel, plan(kernel, keep=False), knobs)
    made = plan(kernel, keep=knobs.get("staging", "buffer") == "buffer")
    return (
        TransposedBody(kernel, made, knobs)
        if knobs.get("blocks") and can_transpose(kernel)
        else Body(kernel, made, knobs)
    )


def _header(kernel: LoopKernel, config: Config, constants: Mapping[str, int] | None) -> str:
    lines = kernel.summary()
    lines += ["  config:  " + (" ".join(f"{k}={v}" for k, v in config) or "none")]
    if constants:
        lines += ["  fixed:   " + " ".join(f"{k}={v}" for k, v in constants.items())]
    return "/* " + "\n * ".join(lines).replace("\n * \n", "\n *\n") + "\n */"


def _sizes(kernel: LoopKernel, constants: Mapping[str, int]) -> str:
    lines = symbol_lines(kernel, constants)
    for d, dim in enumerate(kernel.dims):
        lines.append(f"  const int64_t n{d} = {dim_text(dim)}; (void)n{d};")
    rows = "*".join(f"n{d}" for d in kernel.rows) or "1"
    cols = "*".join(f"n{d}" for d in kernel.cols)
    lines.append(f"  const int64_t nrows = {rows}, ncols = {cols}; (void)nrows; (void)ncols;")
    return "\n".join(lines)


INCLUDES = """#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <math.h>
#ifdef _OPENMP
#include <omp.h>
#endif
#define AF_EXPORT __attribute__((visibility("default")))
#define AF_ALIGNED(bytes) (((int64_t)(bytes) + 63) & ~INT64_C(63))
"""


def _driver(kernel: LoopKernel, body: Body) -> str:
    """Thread count, scratch memory, the parallel region, and the code after it."""
    threads_at = len(kernel.symbols)
    parallel = body.parallel
    lines = [
        f"static int {kernel.name}(const int64_t* sizes, void** ptrs) {{",
        "@SIZES@",
        f"  int64_t threads = {f'sizes[{threads_at}]' if parallel else '1'};",
        f"  const int64_t items = {body.items_limit()};",
        f"  if (threads < 1 || {body.work_text()} < {body.serial_below}) threads = 1;",
        "  if (threads > items) threads = items > 0 ? items : 1;",
    ]
    if body.has_shares:  # the sizes alone decide the number, not the threads
        lines.append(f"  const int64_t shares = {body.work_text()} < {body.serial_below} ? 1 : {SHARES};")
    if body.tests_positions:
        lines.append(f"  if (n{body.last} >= INT32_MAX) return -2;")
    for size in kernel.bounds:  # without an element, there is none to read instead of one that is outside
        lines.append(f"  if (({dim_text(size)}) < 1) return -4;")
    if kernel.bounds:
        lines.append("  int64_t bad = 0;")
    share = ", &bad" if kernel.bounds else ""
    scratch = body.scratch_layout()
    if scratch:
        lines += [*scratch, *(line.replace("@TEAM@", "shares" if body.has_shares else "threads") for line in _SCRATCH)]
    else:
        lines += ["  char* const scratch = NULL;", "  const int64_t scratch_bytes = 0;"]
    lines += ["  int64_t used = shares;" if body.has_shares else "  int64_t used = 1;"]
    if body.has_shares:
        lines += [
            "#ifdef _OPENMP",
            "  #pragma omp parallel for schedule(static) num_threads((int)threads) if (threads > 1)",
            "#endif",
            "  for (int64_t share = 0; share < shares; ++share)",
            f"    {kernel.name}_rows(sizes, ptrs, scratch + share * scratch_bytes, share, shares{share});",
        ]
    elif parallel:
        lines += [
            "  if (threads > 1) {",
            "#ifdef _OPENMP",
            "    #pragma omp parallel num_threads((int)threads)",
            "    {",
            "      const int64_t team = omp_get_num_threads(), tid = omp_get_thread_num();",
            "      if (tid == 0) used = team;",
            f"      {kernel.name}_rows(sizes, ptrs, scratch + tid * scratch_bytes, tid, team{share});",
            "    }",
            "#endif",
            "  } else",
        ]
    if not body.has_shares:
        lines.append(f"    {kernel.name}_rows(sizes, ptrs, scratch, 0, 1{share});")
    lines += ["  (void)used;", *body.post()]
    if scratch:
        lines += ["  if (total_bytes > AF_KEEP_BYTES) free(memory);"]
    return "\n".join([*lines, f"  return {'bad < 0 ? -4 : 0' if kernel.bounds else '0'};", "}", ""])


def _driver_of_nests(kernel: LoopKernel, nests: Sequence[tuple[Body, str]]) -> str:
    """One parallel region for all nests.

    Each nest numbers the threads differently, so that different threads work on the nests that are too small to be
    shared.
    """
    lines = [f"static int {kernel.name}(const int64_t* sizes, void** ptrs) {{", "  int64_t work = 0;"]
    calls = []
    for k, (body, sizes) in enumerate(nests):
        lines += ["  {", sizes, f"  work += {body.work_text()};"]
        if body.tests_positions:
            lines.append(f"  if (n{body.last} >= INT32_MAX) return -2;")
        lines += [f"  if (({dim_text(size)}) < 1) return -4;" for size in body.kernel.bounds]  # no element to read
        lines.append("  }")
        if body.scratch_layout():
            raise LoweringError("several_nests", "expected nests without memory of their own, found row buffers")
        share = ", &bad" if body.kernel.bounds else ""
        calls.append(f"{body.kernel.name}_rows(sizes, ptrs, NULL, (tid + {k}) % team, team{share});")
    first = nests[0][0]
    threads = f"sizes[{len(kernel.symbols)}]" if first.parallel else "1"
    has_bounds = any(body.kernel.bounds for body, _ in nests)
    lines += ["  int64_t bad = 0;"] if has_bounds else []
    lines += [
        f"  int64_t threads = {threads};",
        f"  if (threads < 1 || work < {min(body.serial_below for body, _ in nests)}) threads = 1;",
        "#ifdef _OPENMP",
        "  #pragma omp parallel num_threads((int)threads) if (threads > 1)",
        "#endif",
        "  {",
        "    int64_t team = 1, tid = 0;",
        "#ifdef _OPENMP",
        "    if (threads > 1) { team = omp_get_num_threads(); tid = omp_get_thread_num(); }",
        "#endif",
        *(f"    {call}" for call in calls),
        "  }",
    ]
    for body, sizes in nests:  # what does not depend on the loops is written once
        after = body.post()
        lines += ["  {", sizes, *after, "  }"] if after else []
    return "\n".join([*lines, f"  return {'bad < 0 ? -4 : 0' if has_bounds else '0'};", "}", ""])


_SCRATCH = (
    "  /* One block for all threads, kept for the next call unless it is large. */",
    "#define AF_KEEP_BYTES (INT64_C(4) << 20)",
    "  static _Thread_local char* kept = NULL;",
    "  static _Thread_local int64_t kept_bytes = 0;",
    "  const int64_t total_bytes = @TEAM@ * scratch_bytes + 64;",
    "  char* memory = kept;",
    "  if (total_bytes > kept_bytes) {",
    "    memory = malloc((size_t)total_bytes);",
    "    if (memory == NULL) return -1;",
    "    if (total_bytes <= AF_KEEP_BYTES) { free(kept); kept = memory; kept_bytes = total_bytes; }",
    "  }",
    "  char* const scratch = (char*)(((uintptr_t)memory + 63) & ~(uintptr_t)63);",
)


OUTSIDE = f"""  if (failed == -4) {{
    extern PyObject* PyExc_IndexError;
    PyErr_SetString(PyExc_IndexError, "{OUT_OF_BOUNDS}");
    return NULL;
  }}
"""

ENTRY = """
AF_EXPORT int af_call(const int64_t* sizes, void** ptrs) { return @NAME@(sizes, ptrs); }

/* The few stable-ABI names of CPython that the entry needs. */
typedef struct _object PyObject;
extern void* PyLong_AsVoidPtr(PyObject*);
extern PyObject* PyErr_Occurred(void);
extern PyObject* PyErr_NoMemory(void);
extern void PyErr_SetString(PyObject*, const char*);
extern PyObject* PyExc_TypeError;
extern PyObject* PyExc_ValueError;
extern PyObject* PyExc_FloatingPointError;
extern void* PyEval_SaveThread(void);
extern void PyEval_RestoreThread(void*);
extern void Py_IncRef(PyObject*);
extern PyObject _Py_NoneStruct;

AF_EXPORT PyObject* af_entry(PyObject* self, PyObject* const* args, intptr_t n) {
  (void)self;
  void* ptrs[@PARAMS@];
  if (n != @PARAMS@ + 1) {
    PyErr_SetString(PyExc_TypeError, "expected the address of the sizes and @PARAMS@ pointers");
    return NULL;
  }
  const int64_t* const sizes = PyLong_AsVoidPtr(args[0]);
  for (int k = 0; k < @PARAMS@; ++k) ptrs[k] = PyLong_AsVoidPtr(args[k + 1]);
  if (PyErr_Occurred()) return NULL;
  void* const thread = PyEval_SaveThread();
  const int failed = @NAME@(sizes, ptrs);
  PyEval_RestoreThread(thread);
  if (failed == -1) return PyErr_NoMemory();
  if (failed == -3) {
    PyErr_SetString(PyExc_FloatingPointError, "expected finite results");
    return NULL;
  }
  if (failed) {
    PyErr_SetString(PyExc_ValueError, "expected fewer than 2^31 columns");
    return NULL;
  }
  Py_IncRef((PyObject*)&_Py_NoneStruct);
  return (PyObject*)&_Py_NoneStruct;
}
"""
