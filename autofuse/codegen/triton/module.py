"""The text of a Triton module as a Python module, without a file.

In: a `TritonSource`. Out: the names that its text defines. Triton reads the text of a function when it is decorated,
from the line cache that tracebacks use. Needs Triton to be importable, since the text imports it; what ``@triton.jit``
makes of a function is decided by the process's ``TRITON_INTERPRET``.
"""

from __future__ import annotations

import contextlib
import hashlib
import linecache
from collections.abc import Iterator
from typing import Any

from autofuse.codegen.triton.source import TritonSource


def define(source: TritonSource) -> dict[str, Any]:
    """The names of the module; its lines stay known to tracebacks, and to Triton, until `forget`."""
    file = file_of(source)
    linecache.cache[file] = (len(source.text), None, source.text.splitlines(keepends=True), file)
    names: dict[str, Any] = {"__name__": f"autofuse_triton_{source.name}"}
    exec(compile(source.text, file, "exec"), names)
    return names


def forget(source: TritonSource) -> None:
    linecache.cache.pop(file_of(source), None)


@contextlib.contextmanager
def defined(source: TritonSource) -> Iterator[dict[str, Any]]:
    """`define` for the length of a block."""
    try:
        yield define(source)
    finally:
        forget(source)


def file_of(source: TritonSource) -> str:
    """The name that its lines have in tracebacks."""
    return f"<{source.name} {hashlib.sha256(source.text.encode()).hexdigest()[:12]}>"
