"""The console of reports: what it draws is its own, what it is given is text.

In: what rich can draw. Out: the same without control characters in any text, whichever table or line it stands in.
"""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from autofuse.stderr import plain


class PlainConsole(Console):
    """Colours and lines are added to the segments later on, so every escape that is in one by now came from outside."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else plain(text), style, control)
