"""Checks stored values before a record is made of them: names, operators, dtypes, whole numbers.

In: plain JSON from a store, a pipe or a kernel's own data. Out: the same value, or FusionError that says what was
expected and what was found. Guarantee: a value that passes may be put into generated Python, C and Triton at its place,
and means nothing else there. Imports nothing heavy: the store and reports use it.
"""

from __future__ import annotations

import keyword
import re
from typing import Any

from autofuse.errors import FusionError

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_LONGEST_SIZE, _LONGEST = 64, 128  # characters of a size's name; of others: a kernel's tells its operators
_OPERATOR = re.compile(r"(aten|vendor|autofuse|optimizer|opaque|prims|library)\.[A-Za-z_]\w{0,127}\.\w{1,64}", re.ASCII)
_WORD = re.compile(r"[\w.:]{0,128}", re.ASCII)  # such as "mean", "float32", "cuda:0", "aten.relu.default"


def is_name(text: object, longest: int = _LONGEST_SIZE) -> bool:
    """Whether a text can be a name in all languages that code is generated in."""
    fits = isinstance(text, str) and len(text) <= longest
    return fits and bool(_NAME.fullmatch(str(text))) and not keyword.iskeyword(str(text))


def stored_name(value: Any) -> str:
    """Of a value, a symbol, an argument, a kernel."""
    if not is_name(value, _LONGEST):
        raise _refusal("a name", value)
    return str(value)


def stored_operator(value: Any) -> str:
    if not isinstance(value, str) or not _OPERATOR.fullmatch(value):
        raise _refusal("an operator such as aten.add.Tensor", value)
    return value


def stored_word(value: Any) -> str:
    """A text among an operation's arguments."""
    if not isinstance(value, str) or not _WORD.fullmatch(value):
        raise _refusal("a word", value)
    return value


def stored_number(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) >= 2**63:
        raise _refusal("a whole number", value)
    return value


def one_of(value: Any, known: Any, what: str) -> Any:
    if not isinstance(value, str) or value not in known:
        raise _refusal(f"{what} ({', '.join(known)})", value)
    return value


def one_line(text: Any) -> str:
    """Text for people, such as a line of the user's: without what ends a line or moves a terminal's cursor."""
    return "".join(c if c.isprintable() else " " for c in str(text))


def _refusal(expected: str, found: Any) -> FusionError:
    return FusionError(f"expected {expected} in a stored node, found {repr(found)[:80]}")
