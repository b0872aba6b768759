"""The bar a person sees while the script pauses for tuning; on stderr, and only where that is a terminal."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class TuningProgress:
    """A bar over the nodes of one pause. Use as a context manager; ``update(done)`` may go up to ``total``."""

    def __init__(self, total: int, *, quiet: bool = False) -> None:
        console = Console(file=sys.stderr)
        columns = (
            TextColumn("autofuse: tuning"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("nodes"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        enabled = console.is_terminal and not quiet
        self._progress = Progress(*columns, console=console, transient=True, disable=not enabled)
        self._task = self._progress.add_task("tuning", total=total)

    def update(self, done: int, total: int | None = None) -> None:
        self._progress.update(self._task, completed=max(0, done), total=total)

    def __enter__(self) -> TuningProgress:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
