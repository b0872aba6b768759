"""Transposes blocks of 4-byte elements in registers: the text that loops and matmuls share.

Out: C of ``af_turn(to, to_step, from, from_step, n, m)``: ``to[i * to_step + k] = from[k * from_step + i]`` for i below
n and k below m. Its printer has defined the elements of a vector (``AF_WIDTH``) before. Guarantee: bits are moved, so
NaN and integers stay as they are; only these n x m elements are read and written.
"""

from __future__ import annotations

WIDTH = """#if defined(__AVX512F__)
enum { AF_WIDTH = 16 };
#elif defined(__AVX__)
enum { AF_WIDTH = 8 };
#else
enum { AF_WIDTH = 4 };
#endif
"""

TURN = """typedef float af_vec __attribute__((vector_size(4 * AF_WIDTH), aligned(4), may_alias));
typedef int32_t af_mask __attribute__((vector_size(4 * AF_WIDTH)));
#if defined(__has_builtin)
#if __has_builtin(__builtin_shuffle) && !defined(__clang__)
#define AF_SHUFFLE 1
#endif
#endif
/* Turn a square of AF_WIDTH vectors: rows become columns. Each step deals the two halves of the rows out by turns, as
   the next bit of the number of a row becomes one of a column; every step has the same two masks. */
static inline __attribute__((always_inline)) void af_turn_square(af_vec* const t) {
#ifdef AF_SHUFFLE
  af_mask low, high;
#pragma GCC unroll 16
  for (int i = 0; i < AF_WIDTH; ++i) {
    low[i] = i / 2 + (i & 1) * AF_WIDTH;
    high[i] = AF_WIDTH / 2 + i / 2 + (i & 1) * AF_WIDTH;
  }
#pragma GCC unroll 4
  for (int step = 1; step < AF_WIDTH; step *= 2) {
    af_vec dealt[AF_WIDTH];
#pragma GCC unroll 16
    for (int i = 0; i < AF_WIDTH / 2; ++i) {
      dealt[2 * i] = __builtin_shuffle(t[i], t[i + AF_WIDTH / 2], low);
      dealt[2 * i + 1] = __builtin_shuffle(t[i], t[i + AF_WIDTH / 2], high);
    }
#pragma GCC unroll 16
    for (int i = 0; i < AF_WIDTH; ++i) t[i] = dealt[i];
  }
#else
  float square[AF_WIDTH][AF_WIDTH];
  memcpy(square, t, sizeof square);
  for (int i = 0; i < AF_WIDTH; ++i)
    for (int j = 0; j < AF_WIDTH; ++j) t[i][j] = square[j][i];
#endif
}
static inline void af_turn(
    void* const to, const int64_t to_step, const void* const from, const int64_t from_step, const int64_t n,
    const int64_t m) {
  char* const t = to;
  const char* const f = from;
  const int64_t whole_n = n - n % AF_WIDTH, whole_m = m - m % AF_WIDTH;
  for (int64_t k = 0; k < whole_m; k += AF_WIDTH)
    for (int64_t i = 0; i < whole_n; i += AF_WIDTH) {
      af_vec square[AF_WIDTH];
#pragma GCC unroll 16
      for (int j = 0; j < AF_WIDTH; ++j) square[j] = *(const af_vec*)(f + ((k + j) * from_step + i) * 4);
      af_turn_square(square);
#pragma GCC unroll 16
      for (int j = 0; j < AF_WIDTH; ++j) *(af_vec*)(t + ((i + j) * to_step + k) * 4) = square[j];
    }
  for (int64_t i = 0; i < n; ++i) {
    const int64_t k_begin = i < whole_n ? whole_m : 0;
    for (int64_t k = k_begin; k < m; ++k) memcpy(t + (i * to_step + k) * 4, f + (k * from_step + i) * 4, 4);
  }
}
"""
