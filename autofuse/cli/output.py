"""Where text goes: results to stdout, everything else to stderr, nothing ever into a script's own streams."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from autofuse.errors import UsageError
from autofuse.stderr import say

if TYPE_CHECKING:
    from rich.console import Console


__all__ = ["err_console", "one_line", "out_console", "say", "write_file"]


def write_file(path: Path, text: str, option: str) -> None:
    """A whole file or none; an earlier one is replaced. Errors: UsageError, which names the ``option`` to type.

    A link stays one, and what is no file (``/dev/stdout``, a pipe) is written to.
    """
    try:
        place = path.resolve()
        if place.exists() and not place.is_file():
            place.write_text(text, encoding="utf-8")
            return
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=place.parent, delete=False) as file:
            made = Path(file.name)
            try:
                file.write(text)
                file.flush()
                made.chmod(place.stat().st_mode & 0o777 if place.exists() else 0o666 & ~_umask())
                made.replace(place)
            except BaseException:
                made.unlink()
                raise
    except OSError as error:
        raise UsageError(
            f"expected a file that can be written, found {path}: {error.strerror}; type another: {option}"
        ) from None


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def one_line(error: BaseException) -> str:
    """An error in one line: its first line, or its type if it has no text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def out_console() -> Console:
    """The console for results, on stdout."""
    from autofuse.report.console import PlainConsole  # rich takes 50 ms: only for commands that draw

    return PlainConsole(highlight=False)


def err_console() -> Console:
    """The console for progress, on stderr."""
    from autofuse.report.console import PlainConsole

    return PlainConsole(stderr=True, highlight=False)
