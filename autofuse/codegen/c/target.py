"""The processor that C is generated for: the compiler's ``-march``, and vector widths.

In: a name of gcc's and clang's ``-march``, `NATIVE` unless a test says otherwise. Out: that name and vector widths.
Guarantee: all printers and compilers read both here, so that they fit each other.
"""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Iterator
from pathlib import Path

NATIVE = "native"
AVX512 = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq"})
# For each other processor: the flags in /proc/cpuinfo that a processor must have to run code for it.
OTHERS: dict[str, frozenset[str]] = {
    "x86-64-v3": frozenset({"avx2", "fma", "bmi2", "f16c"}),
    "skylake-avx512": AVX512 | {"avx512cd", "fma", "bmi2", "adx"},
}
_chosen = [NATIVE]


def march() -> str:
    """The name that the compiler gets as its ``-march``."""
    return _chosen[-1]


def can_run(name: str) -> bool:
    """Whether this processor runs code that is generated for the processor of this name."""
    return name == NATIVE or OTHERS[name] <= flags()


@contextlib.contextmanager
def generated_for(name: str) -> Iterator[None]:
    """Generate and compile for another processor meanwhile; for tests, in one thread."""
    _chosen.append(name)
    try:
        yield
    finally:
        _chosen.pop()


def vector_bits() -> tuple[int, ...]:
    """Vector widths in bits, narrowest first; (128,) where nothing wider is known."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return (128,)
    has = OTHERS.get(march()) or flags()
    if has >= AVX512:
        return (256, 512)
    return (256,) if "avx2" in has else (128,)


def flags() -> frozenset[str]:
    """The features of this processor, by their names in /proc/cpuinfo; AVX2 where that cannot be read."""
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return frozenset({"avx2"})
    return frozenset(text.partition("flags")[2].partition("\n")[0].split())
