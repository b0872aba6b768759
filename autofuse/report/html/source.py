"""Colours the source of a kernel for the page.

In: C or Python text. Out: markup in which each word has the class of its kind, and the style for these classes in light
and dark. Guarantee: nothing of the source is lost or run; what lies beyond `MOST_LINES` is said.
"""

from __future__ import annotations

from markupsafe import Markup
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import CLexer, PythonLexer

MOST_LINES = 300
_PREFIX = "k-"


def coloured(source: str) -> Markup:
    lines = source.splitlines()
    shown = "\n".join(lines[:MOST_LINES])
    lexer = PythonLexer() if "import triton" in source[:4000] else CLexer()
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
