"""Where text goes: results to stdout, everything else to stderr, nothing ever into a script's own streams."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from autofuse.errors import UsageError
from autofuse.stderr import say

if TYPE_CHECKING:
    from rich.console import Console


__all__ = ["err_console", "one_line", "out_console", "say", "write_file"]


def write_file(path: Path, text: str, option: str) -> None:
    """A whole file or none; an earlier one is replaced. Errors: UsageError, which names the ``option`` to type."""
    try:
        made = path.with_name(f".{path.name}.new")
        made.write_text(text, encoding="utf-8")
        made.replace(path)
    except OSError as error:
        raise UsageError(
            f"expected a file that can be written, found {path}: {error.strerror}; type another: {option}"
        ) from None


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
