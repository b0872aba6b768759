"""The launch itself: one call from Python makes all launches of a node.

In: a `LaunchRecord`. Out: ``launch(address of the record, stream, *pointers)``, pointers of inputs, outputs, scratch.
It takes the functions that assume alignment only if every pointer is a multiple of 16 bytes, ends each argument list
with the two hidden null pointers of Triton's kernels (global and profile scratch), releases the GIL around the driver,
and raises RuntimeError with the driver's name of an error.
In C where a compiler is at hand (an entry without Python's headers, as kernels have), else through ctypes: slower,
with the same results. A thread without a context, such as autograd's, gets the device's at its first launch.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable

from autofuse.codegen.c.build import Toolchain, compile_key, compile_source
from autofuse.codegen.c.load import load_kernel
from autofuse.gpu.launch_record import HEAD, LAUNCH, LITERAL, MOST_ARGUMENTS, MOST_POINTERS, LaunchRecord
from autofuse.ir.records import CompileKey, KernelRecord
from autofuse.locks import make_lock

Launch = Callable[..., None]

NAME = "af_launch"
FLAGS = ("-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-std=gnu11", "-w")

SOURCE = """// A launch record, as `LaunchRecord` lays it out, given to the GPU's driver.
#include <stddef.h>
#include <stdint.h>
typedef struct _object PyObject;
extern void* PyLong_AsVoidPtr(PyObject*);
extern PyObject* PyErr_Occurred(void);
extern PyObject* PyErr_Format(PyObject*, const char*, ...);
extern PyObject *PyExc_RuntimeError, *PyExc_TypeError;
extern void* PyEval_SaveThread(void);
extern void PyEval_RestoreThread(void*);
extern void Py_IncRef(PyObject*);
extern PyObject _Py_NoneStruct;

enum { @HEAD@, HEAD };
enum { @LAUNCH@, LAUNCH };
typedef int (*launch_fn)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**,
                         void**);
typedef int (*bind_fn)(void*);
typedef int (*name_by_pointer_fn)(int, const char**);
typedef const char* (*name_returned_fn)(int);

static int run(const int64_t* record, void* stream, void** slots, int is_aligned, int64_t* number) {
  static void* const null = NULL;
  const launch_fn launch = (launch_fn)record[H_LAUNCH];
  const int64_t* at = record + HEAD;
  for (*number = 0; *number < record[H_LAUNCHES]; ++*number) {
    void* params[@MOST_ARGUMENTS@];
    const int64_t count = at[L_ARGUMENTS];
    const int64_t* pair = at + LAUNCH;
    for (int64_t k = 0; k < count; ++k, pair += 2)
      params[k] = pair[0] == @LITERAL@ ? (void*)(pair + 1) : (void*)(slots + pair[1]);
    params[count] = params[count + 1] = (void*)&null;
    const int64_t* const f = at + (is_aligned && at[L_FUNCTION] ? L_FUNCTION : L_ANY_FUNCTION);
    if (!f[0]) return -1;
    int code = launch((void*)f[0], at[L_GRID], 1, 1, f[1], 1, 1, f[2], stream, params, NULL);
    if (code && code == record[H_NO_CONTEXT] && record[H_BIND]) {
      ((bind_fn)record[H_BIND])((void*)record[H_CONTEXT]);
      code = launch((void*)f[0], at[L_GRID], 1, 1, f[1], 1, 1, f[2], stream, params, NULL);
    }
    if (code) return code;
    at = pair;
  }
  return 0;
}

static PyObject* fail(const int64_t* record, int code, int64_t number) {
  const char* name = NULL;
  if (code == -1)
    return PyErr_Format(PyExc_RuntimeError, "expected pointers that are multiples of 16 bytes, found others");
  if (record[H_NAME_BY_POINTER]) ((name_by_pointer_fn)record[H_NAME_BY_POINTER])(code, &name);
  if (record[H_NAME_RETURNED]) name = ((name_returned_fn)record[H_NAME_RETURNED])(code);
  return PyErr_Format(PyExc_RuntimeError, "expected the driver to take launch %d, found %s (%d)", (int)number,
                      name ? name : "an unknown error", code);
}

__attribute__((visibility("default"))) PyObject* af_entry(PyObject* self, PyObject* const* args, intptr_t n) {
  (void)self;
  void* slots[@MOST_POINTERS@];
  uintptr_t all = 0;
  if (n < 2) return PyErr_Format(PyExc_TypeError, "expected a record, a stream and pointers, found %d values", (int)n);
  const int64_t* const record = PyLong_AsVoidPtr(args[0]);
  void* const stream = PyLong_AsVoidPtr(args[1]);
  if (PyErr_Occurred()) return NULL;
  if (n != record[H_POINTERS] + 2)
    return PyErr_Format(PyExc_TypeError, "expected %d pointers, found %d", (int)record[H_POINTERS], (int)n - 2);
  for (intptr_t k = 2; k < n; ++k) all |= (uintptr_t)(slots[k - 2] = PyLong_AsVoidPtr(args[k]));
  if (PyErr_Occurred()) return NULL;
  int64_t number = 0;
  void* const thread = PyEval_SaveThread();
  const int code = run(record, stream, slots, !(all & 15), &number);
  PyEval_RestoreThread(thread);
  if (code) return fail(record, code, number);
  Py_IncRef((PyObject*)&_Py_NoneStruct);
  return (PyObject*)&_Py_NoneStruct;
}
"""
for _old, _new in {
    "HEAD": ", ".join(f"H_{name.upper()}" for name in HEAD),
    "LAUNCH": ", ".join(f"L_{name.upper()}" for name in LAUNCH),
    "LITERAL": str(LITERAL),
    "MOST_ARGUMENTS": str(MOST_ARGUMENTS),
    "MOST_POINTERS": str(MOST_POINTERS),
}.items():
    SOURCE = SOURCE.replace(f"@{_old}@", _new)


# ---- in C -----------------------------------------------------------------------------------------------


def launcher_key(toolchain: Toolchain) -> CompileKey:
    """What the launcher's binary depends on; the store keeps it like a kernel."""
    return compile_key(SOURCE, toolchain, FLAGS)


def compile_launcher(toolchain: Toolchain) -> KernelRecord:
    """Raises CompilerError."""
    return KernelRecord(launcher_key(toolchain), NAME, SOURCE, compile_source(SOURCE, toolchain, FLAGS))


_compiled: dict[str, Launch] = {}  # launchers in C by digest of the binary, the newest last; empty until `install`


def install(binary: bytes) -> Launch:
    """Use this launcher from now on. Raises OSError where it cannot be loaded."""
    digest = hashlib.sha256(binary).hexdigest()
    if digest not in _compiled:
        _compiled[digest] = load_kernel(binary, NAME).entry
    return _compiled[digest]


def launch_of(record: LaunchRecord) -> Launch:
    """The best that this process has for a record."""
    return next(reversed(_compiled.values()), None) or CtypesLaunch(record)


# ---- through ctypes --------------------------------------------------------------------------------------


class CtypesLaunch:
    """The same for one record, with argument arrays made once."""

    def __init__(self, record: LaunchRecord) -> None:
        self._record = record
        self._launch = record.loaded.driver.launch
        self._lock = make_lock()  # the arrays below are filled anew by each call
        self._slots = (ctypes.c_void_p * max(1, record.pointers))()
        self._literals: list[ctypes.c_int64] = []
        self._params = [self._pack(step.arguments) for step in record.steps]

    def _pack(self, arguments: tuple[tuple[int, int], ...]) -> ctypes.Array[ctypes.c_void_p]:
        addresses = []
        null = ctypes.c_int64(0)
        self._literals.append(null)
        for kind, value in arguments:
            if kind == LITERAL:
                self._literals.append(ctypes.c_int64(value))
                addresses.append(ctypes.addressof(self._literals[-1]))
            else:
                addresses.append(ctypes.addressof(self._slots) + value * ctypes.sizeof(ctypes.c_void_p))
        return (ctypes.c_void_p * (len(addresses) + 2))(*addresses, *[ctypes.addressof(null)] * 2)

    def __call__(self, address: int, stream: int, *pointers: int) -> None:
        record, driver = self._record, self._record.loaded.driver
        if len(pointers) != record.pointers:
            raise TypeError(f"expected {record.pointers} pointers, found {len(pointers)}")
        every = 0
        for pointer in pointers:
            every |= pointer
        is_aligned = not every & 15
        with self._lock:
            self._slots[: len(pointers)] = list(pointers)
            for number, (step, params) in enumerate(zip(record.steps, self._params, strict=True)):
                function = (step.aligned if is_aligned else None) or step.unaligned
                if function is None:
                    raise RuntimeError("expected pointers that are multiples of 16 bytes, found others")
                shape = (step.grid, 1, 1, function.threads, 1, 1, function.shared_bytes)
                code = self._launch(function.handle, *shape, stream, params, None)
                if code == driver.vendor.no_context and driver.vendor.bind_context is not None:
                    driver.bind(record.loaded.context)
                    code = self._launch(function.handle, *shape, stream, params, None)
                if code:
                    raise RuntimeError(f"expected the driver to take launch {number}, found {driver.error_name(code)}")
