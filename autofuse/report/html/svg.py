"""Elements of an SVG drawing as text, with everything that comes from a store escaped.

In: names, attributes and children. Out: ``Markup``, which templates insert as it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from markupsafe import Markup, escape

Value = str | float | int


def element(name: str, *children: Markup | str, **attributes: Value) -> Markup:
    """``element("line", x1=0, class_="axis")``: an underscore in a name is a hyphen, one at its end is left out."""
    written = "".join(f' {_attribute(key)}="{escape(_number(value))}"' for key, value in attributes.items())
    inside = Markup("").join(escape(child) for child in children)
    return Markup(f"<{name}{written}>{inside}</{name}>")


def drawing(width: float, height: float, label: str, children: Iterable[Markup], **attributes: Value) -> Markup:
    """A whole drawing, scaled to its column; ``label`` says to a screen reader what it shows."""
    return element(
        "svg",
        *children,
        viewBox=f"0 0 {_number(width)} {_number(height)}",
        role="img",
        aria_label=label,
        **attributes,
    )


def text(x: float, y: float, words: str, **attributes: Value) -> Markup:
    return element("text", words, x=x, y=y, **attributes)


def line(x1: float, y1: float, x2: float, y2: float, **attributes: Value) -> Markup:
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, **attributes)


def rect(x: float, y: float, width: float, height: float, *children: Markup, **attributes: Value) -> Markup:
    return element("rect", *children, x=x, y=y, width=max(0.0, width), height=max(0.0, height), **attributes)


def title(words: str) -> Markup:
    """What a browser shows beside the pointer."""
    return element("title", words)


SMALLEST = 1e-300  # a span whose logarithm, and fifth, are no trouble


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from ``low`` to ``high``, some ``about`` of them."""
    span = high - low
    if not span > SMALLEST or not math.isfinite(span):
        return [low]
    rough = span / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = min((factor * power for factor in (1, 2, 2.5, 5, 10)), key=lambda width: abs(width - rough))
    first = math.ceil(low / step - 1e-9)
    return [round(number * step, 10) for number in range(first, math.floor(high / step + 1e-9) + 1)]


def _attribute(key: str) -> str:
    return key.rstrip("_").replace("_", "-") if key != "viewBox" else key


def _number(value: Value) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
