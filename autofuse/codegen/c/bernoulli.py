"""Dropout masks, eight times faster and bit for bit aten's: a vectorised mt19937 on aten's own generator state.

In: a bool mask to fill and the probability of True. Out: the mask that ``mask.bernoulli_(p)`` gives, and the generator
in the state that it would leave. aten samples serially, two 32-bit words an element: ``((w1 << 32) | w2) & (2^53 - 1)``
is compared with p x 2^53. The legacy state tensor holds ``left`` (int32 at byte 8), ``next`` (int64 at 16) and 624
words of 64 bits from byte 24; the bytes after these (cached normal samples) stay as they are. Guarantee: checked
against aten on a private generator before it is handed out; None where anything differs (an Intel CPU with MKL uses
another stream). What another thread draws before the state is written back would be drawn again: where the state has
changed meanwhile, aten fills this mask and all that follow.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable

import torch

from autofuse.codegen.c.build import Toolchain, compile_key, compile_source, flags_for
from autofuse.codegen.c.load import load_kernel
from autofuse.errors import CompilerError
from autofuse.preserve_rng import bytes_of, is_only_thread, torchs_states
from autofuse.private_files import PrivateFolder, Untrusted

Bernoulli = Callable[..., None]

SMALL = 256  # elements below which aten is faster: copying the state costs 2 us (EPYC 9004, torch 2.13)

SOURCE = r"""
#include <stdint.h>
#include <string.h>
#define AF_EXPORT __attribute__((visibility("default")))
#define N 624
#define M 397

static inline uint32_t twist(uint32_t u, uint32_t v) {
  const uint32_t y = (u & 0x80000000u) | (v & 0x7fffffffu);
  return (y >> 1) ^ (-(v & 1u) & 0x9908b0dfu);
}

static void next_state(uint32_t* restrict s) {
  /* s[i] needs the old s[i+1] and, from i = N-M on, new words 227 back: safe for any vector length here. */
  #pragma omp simd safelen(64)
  for (int i = 0; i < N - M; ++i) s[i] = s[i + M] ^ twist(s[i], s[i + 1]);
  #pragma omp simd safelen(64)
  for (int i = N - M; i < N - 1; ++i) s[i] = s[i + M - N] ^ twist(s[i], s[i + 1]);
  s[N - 1] = s[M - 1] ^ twist(s[N - 1], s[0]);
}

static inline uint32_t temper(uint32_t y) {
  y ^= y >> 11;
  y ^= (y << 7) & 0x9d2c5680u;
  y ^= (y << 15) & 0xefc60000u;
  return y ^ (y >> 18);
}

static void draw(char* state, uint8_t* restrict out, int64_t n, uint64_t limit) {
  int32_t left; int64_t next; uint64_t wide[N]; uint32_t s[N], word[N + 1];
  memcpy(&left, state + 8, 4); memcpy(&next, state + 16, 8); memcpy(wide, state + 24, sizeof wide);
  for (int i = 0; i < N; ++i) s[i] = (uint32_t)wide[i];
  int64_t need = 2 * n;
  int carried = 0;  /* one word of a pair that spans two states */
  while (need > 0) {
    if (left == 1) { next_state(s); left = N + 1; next = 0; }
    const int64_t have = left - 1, take = have < need ? have : need;
    #pragma omp simd
    for (int64_t i = 0; i < take; ++i) word[carried + i] = temper(s[next + i]);
    left -= (int32_t)take; next += take; need -= take;
    const int64_t words = carried + take, pairs = words / 2;
    #pragma omp simd
    for (int64_t i = 0; i < pairs; ++i) {
      const uint64_t v = ((uint64_t)(word[2 * i] & 0x1fffffu) << 32) | word[2 * i + 1];
      out[i] = v < limit;
    }
    out += pairs;
    carried = (int)(words & 1);
    if (carried) word[0] = word[words - 1];
  }
  for (int i = 0; i < N; ++i) wide[i] = s[i];
  memcpy(state + 8, &left, 4); memcpy(state + 16, &next, 8); memcpy(state + 24, wide, sizeof wide);
}

typedef struct _object PyObject;
extern void* PyLong_AsVoidPtr(PyObject*);
extern unsigned long long PyLong_AsUnsignedLongLong(PyObject*);
extern PyObject* PyErr_Occurred(void);
extern void* PyEval_SaveThread(void);
extern void PyEval_RestoreThread(void*);
extern void Py_IncRef(PyObject*);
extern PyObject _Py_NoneStruct;

AF_EXPORT PyObject* af_entry(PyObject* self, PyObject* const* args, intptr_t count) {
  (void)self; (void)count;
  char* const state = PyLong_AsVoidPtr(args[0]);
  uint8_t* const out = PyLong_AsVoidPtr(args[1]);
  const int64_t n = (int64_t)PyLong_AsUnsignedLongLong(args[2]);
  const uint64_t limit = PyLong_AsUnsignedLongLong(args[3]);
  if (PyErr_Occurred()) return NULL;
  void* const thread = PyEval_SaveThread();
  draw(state, out, n, limit);
  PyEval_RestoreThread(thread);
  Py_IncRef((PyObject*)&_Py_NoneStruct);
  return (PyObject*)&_Py_NoneStruct;
}
"""


def make_bernoulli(toolchain: Toolchain, folder: PrivateFolder | None = None) -> Bernoulli | None:
    """A function ``(mask, p, generator=None)`` that fills a bool mask as ``mask.bernoulli_(p)`` does.

    None where it cannot be compiled or loaded, or does not agree with aten on this machine. ``folder`` keeps the
    compiled function for later runs, since the compiler takes 0.13 s of a start.
    """
    try:
        draw = load_kernel(_compiled(toolchain, folder), "af_bernoulli_mt19937").entry
    except (CompilerError, OSError):
        return None

    default = torch.default_generator
    is_shared = False  # another thread was seen to draw

    def draw_alone(mask: torch.Tensor, p: float, source: torch.Generator) -> None:
        state = source.get_state()
        draw(state.data_ptr(), mask.data_ptr(), mask.numel(), math.ceil(p * 9007199254740992.0))
        source.set_state(state)

    def draw_beside_others(mask: torch.Tensor, p: float, source: torch.Generator) -> None:
        nonlocal is_shared
        with torchs_states:  # one of our own masks at a time
            state = source.get_state()
            before = bytes_of(state)
            draw(state.data_ptr(), mask.data_ptr(), mask.numel(), math.ceil(p * 9007199254740992.0))
            # From here on this thread has the interpreter: what is drawn in these 2 us has begun before.
            if bytes_of(source.get_state()) == before:
                source.set_state(state)
                return
            is_shared = True
        mask.bernoulli_(p, generator=source)

    def fill(mask: torch.Tensor, p: float, generator: torch.Generator | None = None) -> None:
        if mask.numel() < SMALL or mask.dtype != torch.bool or not mask.is_contiguous() or is_shared:
            mask.bernoulli_(p, generator=generator)
        elif is_only_thread():
            draw_alone(mask, p, generator or default)
        else:
            draw_beside_others(mask, p, generator or default)

    return fill if agrees_with_aten(draw_alone) else None


def _compiled(toolchain: Toolchain, folder: PrivateFolder | None) -> bytes:
    flags = flags_for(toolchain)
    if folder is None:
        return compile_source(SOURCE, toolchain, flags)
    key = repr(compile_key(SOURCE, toolchain, flags))
    name = f"mt19937.{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    with contextlib.suppress(OSError, Untrusted):
        return folder.read(name)
    binary = compile_source(SOURCE, toolchain, flags)
    with contextlib.suppress(OSError, Untrusted):
        folder.write(name, binary)
    return binary


_SIZES = (1, 2, 3, 311, 312, 313, 623, 624, 625, 1248, 5000, 70001)
_OFFSETS = (0, 1, 2, 311, 622, 623, 624, 625)
_PROBABILITIES = (0.9, 0.5, 0.1, 1 / 3, 0.0, 1.0)


def agrees_with_aten(draw_alone: Bernoulli) -> bool:
    """Whether masks and generator states equal aten's, over sizes, offsets into the state and probabilities."""
    ours, theirs = torch.Generator(), torch.Generator()
    number = 0
    for offset in _OFFSETS:
        for size in _SIZES:
            p = _PROBABILITIES[number % len(_PROBABILITIES)]
            number += 1
            for generator in (ours, theirs):
                generator.manual_seed(1000 + number)
                torch.empty(offset).random_(generator=generator)  # one word an element
                torch.empty(1).normal_(generator=generator)  # leaves a cached sample in the state
            a, b = torch.empty(size, dtype=torch.bool), torch.empty(size, dtype=torch.bool)
            draw_alone(a, p, ours)
            b.bernoulli_(p, generator=theirs)
            if not torch.equal(a, b) or not torch.equal(ours.get_state(), theirs.get_state()):
                return False
    return True
