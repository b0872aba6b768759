"""The text of a Triton module as a Python module, without a file.

In: a `TritonSource`. Out: the names that its text defines.
Triton asks for the text of a function when it is decorated, and finds it where tracebacks look for it.
Needs Triton to be importable, since the text imports it; what ``@triton.jit`` makes of a function is decided by the
process's ``TRITON_INTERPRET``.
"""

from __future__ import annotations

import contextlib
import hashlib
import linecache
from collections.abc import Iterator
from typing import Any

from autofuse.codegen.triton.source import TritonSource


@contextlib.contextmanager
def defined(source: TritonSource) -> Iterator[dict[str, Any]]:
    """The names of the module; its lines are known to tracebacks inside of the block."""
    digest = hashlib.sha256(source.text.encode()).hexdigest()[:12]
    file = f"<{source.name} {digest}>"
    linecache.cache[file] = (len(source.text), None, source.text.splitlines(keepends=True), file)
    try:
        names: dict[str, Any] = {"__name__": f"autofuse_triton_{digest}"}
        exec(compile(source.text, file, "exec"), names)
        yield names
    finally:
        linecache.cache.pop(file, None)
