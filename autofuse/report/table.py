"""The common style of all tables and sentences on a terminal."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text


class PlainTable(Table):
    """A table that prints cells as plain text: names and messages may hold what rich takes for markup."""

    def add_row(self, *cells: RenderableType | None, **options: Any) -> None:
        super().add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells), **options)


def say(console: Console, text: str, style: str = "") -> None:
    """Print text as it is, wrapped at words."""
    console.print(Text(text, style))


def plain_table(title: str, caption: str = "") -> PlainTable:
    """An empty table in the style of all tables."""
    return PlainTable(
        title=title or None, caption=caption or None, title_justify="left", caption_justify="left", title_style="bold",
        caption_style="dim", box=box.SIMPLE_HEAD, expand=True, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False,
    )  # fmt: skip
