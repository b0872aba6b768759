"""Kernels in the store, for the daemon that makes them, for scripts that load them, and for people.

In: ``KernelRecord``s, files under Triton's keys. Out: the same, or a miss; a miss only ever costs a compilation.
Guarantee: what is handed out is as this user's autofuse wrote it here; what is not is dropped, with an event. The rows
are `kernel_cache`'s and `triton_files`'.
"""

from __future__ import annotations

from collections.abc import Mapping

from autofuse.db import kernel_cache, triton_files
from autofuse.db.base import Database, now
from autofuse.db.rows import KernelSource
from autofuse.ir.records import KernelRecord


class Kernels:
    """Generated kernels, and the files of Triton's own cache."""

    def __init__(self, file: Database) -> None:
        self.limit_bytes = kernel_cache.DEFAULT_LIMIT_BYTES  # of all binaries together
        self._file = file
        self._refused = 0

    def put(self, record: KernelRecord) -> None:
        """Store a kernel; the least recently used binaries beyond ``limit_bytes`` are evicted, their sources stay."""
        with self._file.write() as connection:
            kernel_cache.put(connection, record, self.limit_bytes)

    def get(self, digest: str) -> KernelRecord | None:
        """The kernel under a compile key's digest, or None: unknown, evicted, damaged, or not safe to load.

        Not safe: written by another user, or part of a copied store. Such a kernel and a damaged one are dropped and
        recorded as an event.
        """
        with self._file.read() as connection:
            record, problem = kernel_cache.get(connection, digest)
            touch = record is not None and kernel_cache.needs_touch(connection, digest)
        self._refused += bool(problem)
        if not self._file.readonly and (problem or touch):
            with self._file.write() as connection:
                if problem:
                    kernel_cache.note_damage(connection, digest, problem)
                else:
                    kernel_cache.touch(connection, digest)
        return record

    def refused(self) -> int:
        """Kernels so far that this object has not handed out: damaged, or not sealed by this user."""
        return self._refused

    def source(self, digest: str) -> KernelSource | None:
        """A kernel for people to read, evicted ones included; ``digest`` may be a prefix."""
        with self._file.read() as connection:
            return kernel_cache.source(connection, digest)

    def put_triton_files(self, key: str, files: Mapping[str, bytes]) -> None:
        """Store files under Triton's key of a kernel; they count towards ``limit_bytes``."""
        with self._file.write() as connection:
            triton_files.put(connection, key, files)
            kernel_cache.evict(connection, self.limit_bytes, keep=key)

    def get_triton_files(self, key: str) -> dict[str, bytes] | None:
        """The sound files under a key, or None. Others are dropped, as damaged or unsafe kernels are by `get`."""
        with self._file.read() as connection:
            files, damaged = triton_files.get(connection, key)
            used_at = triton_files.last_use(connection, key)
        is_old = used_at is not None and now() - used_at > kernel_cache.TOUCH_SECONDS
        if not self._file.readonly and (damaged or (files and is_old)):
            with self._file.write() as connection:
                if damaged:
                    triton_files.note_damage(connection, key, damaged)
                triton_files.touch(connection, key)
        return files or None
