"""Settings of the whole process that cost or save time without being a kernel (malloc thresholds, threads).

In: the settings, and earlier trials from the store. Out: the settings that were applied to this process. They speed
eager up as well, so ``trial`` measures them in processes of their own, and reports show them apart from fusion.
Guarantee: ``apply_malloc`` does nothing on a libc without ``mallopt``; torch is imported only for a thread count.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import platform
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from autofuse.db.rows import SettingTrial
from autofuse.errors import StoreError
from autofuse.ir.commands import script_of
from autofuse.settings.layers import Settings

MALLOC: Final = "process.malloc"  # the setting's name, in trials and in reports

# mallopt(3): parameter numbers of glibc's <malloc.h>.
_M_TRIM_THRESHOLD: Final = -1
_M_TOP_PAD: Final = -2
_M_MMAP_THRESHOLD: Final = -3

# By default glibc gives the top of the heap back and serves large blocks by mmap, so that a training step touches fresh
# pages again and again: 2,400 to 8,000 page faults a step for small GPTs, 30 to 80 with these values (1.17x to 1.23x
# faster steps; 2 cores, AVX-512, glibc 2.36, torch 2.13). mallopt takes C ints: 1 << 34 would arrive as 0.
MALLOC_VALUES: Final = {
    "M_MMAP_THRESHOLD": (_M_MMAP_THRESHOLD, 1 << 30),
    "M_TRIM_THRESHOLD": (_M_TRIM_THRESHOLD, (1 << 31) - 1),
    "M_TOP_PAD": (_M_TOP_PAD, 64 << 20),
}
MALLOC_IN_WORDS: Final = "mmap=1GiB trim=2GiB pad=64MiB huge=960MiB"

# Large blocks come from the heap then, whose pages may be huge ones: a processor that walks two page tables, as in a
# virtual machine, spends a third of a memory-bound kernel on them (31 to 53 GB/s read, 47 to 71 for an addition; EPYC).
_HUGE_PAGE: Final = 2 << 20
_ADVISED: Final = 960 << 20  # less than M_MMAP_THRESHOLD, so that it is a part of the heap


def apply_malloc() -> dict[str, int]:
    """Make glibc keep freed memory; returns what was applied, nothing on other libraries. Cannot be undone."""
    if platform.libc_ver()[0] != "glibc":
        return {}
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return {}
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    return {name: value for name, (number, value) in MALLOC_VALUES.items() if mallopt(number, value) == 1}


def advise_huge_pages() -> int:
    """Ask for huge pages in the heap, once `apply_malloc` has made glibc keep it; returns how many bytes, or 0.

    The heap grows by what is asked for, but no page of it is touched: resident memory stays what it is.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return 0
    libc = ctypes.CDLL(None)
    libc.malloc.argtypes, libc.malloc.restype = (ctypes.c_size_t,), ctypes.c_void_p
    libc.free.argtypes, libc.free.restype = (ctypes.c_void_p,), None
    libc.madvise.argtypes, libc.madvise.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    block = libc.malloc(_ADVISED)
    if not block:
        return 0
    begin, end = -(-block // _HUGE_PAGE) * _HUGE_PAGE, (block + _ADVISED) // _HUGE_PAGE * _HUGE_PAGE
    failed = libc.madvise(begin, end - begin, mmap.MADV_HUGEPAGE)
    libc.free(block)  # the heap keeps it: M_TRIM_THRESHOLD is larger
    return 0 if failed else end - begin


def keep_freed_memory() -> None:
    """What the setting ``process.malloc`` turns on."""
    if apply_malloc():
        advise_huge_pages()


def apply_threads(threads: int) -> None:
    """Let torch compute with this many threads."""
    import torch  # here, for nothing else in this module may cost a torch-free command its start

    torch.set_num_threads(threads)


Trials = Callable[[str], Sequence[SettingTrial]]


def resolve(settings: Settings, workload: str, device_key: str, trials: Trials | None = None) -> Settings:
    """The settings with ``auto`` replaced by what trials of this script on this kind of machine have shown.

    ``trials(device_key)`` asks the store for them; by default it is opened here.
    """
    if settings.process.malloc != "auto":
        return settings
    found: Sequence[SettingTrial] = ()
    if settings.run.store.exists():
        with contextlib.suppress(StoreError):  # the session opens the store too, and reports its error
            found = (trials or partial(_trials, settings.run.store))(device_key)
    decision = latest_decision(found, workload) or "off"
    return settings.with_values({MALLOC: decision}, origin="measured" if decision == "on" else "not measured to win")


def apply_process_settings(settings: Settings) -> None:
    """Apply resolved settings to this process, before the script allocates."""
    if settings.process.malloc == "on":
        keep_freed_memory()
    if settings.process.threads is not None:
        apply_threads(settings.process.threads)


def _trials(path: Path, device_key: str) -> list[SettingTrial]:
    from autofuse.db.store import Store  # a script that has its store in another process does not pay for it

    with Store.open(path, readonly=True) as store:
        return store.trials.standing(device_key)


def latest_decision(trials: Sequence[SettingTrial], workload: str) -> str | None:
    """ "on" or "off" by the newest trial of the same script, whatever its arguments were; None without one."""
    script = script_of(workload)
    fitting = [t for t in trials if t.setting == MALLOC and script_of(t.workload) == script]
    return fitting[-1].decision if fitting else None
