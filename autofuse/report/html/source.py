"""Colours the source of a kernel for the page.

In: C or Python text. Out: markup in which comments, keywords and numbers have a class, and the style for these classes
in light and dark. Guarantee: nothing of the source is lost or run; what lies beyond `MOST_LINES` is said. Most words of
a kernel are names and signs: with a class for each, a page was nine times as long as its kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from markupsafe import Markup
from pygments import highlight
from pygments.filter import Filter
from pygments.formatters import HtmlFormatter
from pygments.lexers import CLexer, PythonLexer
from pygments.token import Comment, Keyword, Literal, Text

MOST_LINES = 300
_PREFIX = "k-"
_COLOURED = (Comment, Keyword, Literal)  # the preprocessor's lines are comments to the lexer


class _SomeKinds(Filter):  # type: ignore[misc]
    """Leaves the kinds of words that are coloured; blanks take the kind before them, so that spans join."""

    def filter(self, lexer: Any, stream: Iterable[tuple[Any, str]]) -> Iterator[tuple[Any, str]]:
        before = Text
        for kind, words in stream:
            if words.strip():
                before = next((wanted for wanted in _COLOURED if kind in wanted), Text)
            yield before, words


def coloured(source: str) -> Markup:
    lines = source.splitlines()
    shown = "\n".join(lines[:MOST_LINES])
    lexer = PythonLexer() if "import triton" in source[:4000] else CLexer()
    lexer.add_filter(_SomeKinds())
    text = highlight(shown, lexer, HtmlFormatter(nowrap=True, classprefix=_PREFIX))
    if len(lines) > MOST_LINES:
        text += f"\n… {len(lines) - MOST_LINES:,} lines more"
    return Markup(text)


def colours() -> str:
    """The style of all classes: for light, then for dark."""
    light = _rules("friendly", "pre.source")
    dark = _rules("github-dark", "pre.source")
    return f"\n{light}\n@media screen and (prefers-color-scheme: dark) {{\n{dark}\n}}\n"


def _rules(style: str, scope: str) -> str:
    rules = HtmlFormatter(style=style, classprefix=_PREFIX).get_style_defs(scope)
    found = rules if isinstance(rules, str) else "\n".join(rules)
    wanted = [line for line in found.splitlines() if line.startswith(f"{scope} .{_PREFIX}")]
    return "\n".join(line.partition(" /*")[0] for line in wanted)
