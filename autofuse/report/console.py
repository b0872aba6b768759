"""The console of reports, which takes text from stores as plain text only.

In: objects that rich can draw. Out: the same without control characters in any text, in tables as in lines.
"""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from autofuse.stderr import plain


class PlainConsole(Console):
    """Removes control characters from all text that it draws.

    Colours and lines are added to the segments later, so an escape that is in one by now came from outside.
    """

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else plain(text), style, control)
