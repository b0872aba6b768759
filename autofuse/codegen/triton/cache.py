"""Triton's own cache, kept in our store instead of ``~/.triton``.

In: two functions that load and save the files of a key. Out: a cache manager that Triton uses for every compilation.
Files are in a private temporary folder only while Triton reads them, because it takes paths. Texts of intermediate
forms are not kept: they are most of the bytes, and nothing reads them again. Guarantee: a file that is missing from the
store makes Triton compile again; nothing is written outside of the process's temporary folder (``TMPDIR``). Imports
Triton.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from triton import knobs
from triton.runtime.cache import CacheManager

Load = Callable[[str], Mapping[str, bytes] | None]
Save = Callable[[str, Mapping[str, bytes]], None]

NOT_KEPT = (".source", ".ttir", ".ttgir", ".llir", ".ptx", ".amdgcn")
_GROUP = "__grp__"  # a file of this beginning lists the files that belong together


class StoreCacheManager(CacheManager):  # type: ignore[misc]
    """The files of one kernel; Triton makes an object for each compilation."""

    load: Load
    save: Save

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        if override or dump:
            raise ValueError("expected Triton to keep no other files, found TRITON_KERNEL_OVERRIDE or _DUMP; unset it")
        self._key = key
        self._stored = dict(type(self).load(key) or {})
        self._folder = Path(tempfile.mkdtemp(prefix="cache-"))  # mode 0700
        # Triton reads the files while it holds this object, and does not say when it has done so.
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)

    def get_file(self, filename: str) -> str | None:
        data = self._stored.get(filename)
        return None if data is None else self._write(filename, data)

    def put(self, data: Any, filename: str, binary: bool = True) -> str:
        content = data if isinstance(data, bytes) else str(data).encode()
        if not filename.endswith(NOT_KEPT):
            self._stored[filename] = content
            type(self).save(self._key, {filename: content})
        return self._write(filename, content)

    def get_group(self, filename: str) -> dict[str, str] | None:
        listed = self._stored.get(_GROUP + filename)
        names = json.loads(listed) if listed is not None else None
        if names is None or any(name not in self._stored for name in names):
            return None
        return {name: self._write(name, self._stored[name]) for name in names}

    def put_group(self, filename: str, group: Mapping[str, str]) -> str:
        names = [name for name in group if not name.endswith(NOT_KEPT)]
        return self.put(json.dumps(names), _GROUP + filename)

    def _write(self, filename: str, data: bytes) -> str:
        path = self._folder / filename
        path.write_bytes(data)
        return str(path)


def install(load: Load, save: Save) -> None:
    """Make Triton keep its files through these functions from now on, in this process."""
    functions = {"load": staticmethod(load), "save": staticmethod(save)}
    knobs.cache.manager_class = type("InstalledCacheManager", (StoreCacheManager,), functions)
