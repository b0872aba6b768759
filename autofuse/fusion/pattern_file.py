"""A TOML file of custom patterns, which the setting ``fusion.patterns`` names.

In: the file, a ``[[pattern]]`` table for each pattern. Out: `FusionPattern`s. Guarantee: whatever is wrong with the
file is a `SettingsError` that says where it is, what was expected, what was found and what to type.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from autofuse.errors import FusionError, SettingsError
from autofuse.fusion.patterns import FusionPattern, add_pattern
from autofuse.settings.layers import read_toml

EXAMPLE = '[[pattern]] name = "scaled_relu" ops = ["mul", "add", "relu"]'
# Key -> the expected value, and a test for it; the first two keys are required.
KEYS: dict[str, tuple[str, type]] = {
    "name": ("a text", str),
    "ops": ("a list of operators' names", list),
    "fusion_type": ("a text", str),
    "priority": ("a whole number", int),
}
REQUIRED = ("name", "ops")


def read_patterns(path: Path) -> list[FusionPattern]:
    """The patterns of a file, in its order."""
    document = read_toml(path)
    tables = document.get("pattern")
    if not isinstance(tables, list) or set(document) != {"pattern"}:
        found = ", ".join(document) or "nothing"
        raise SettingsError(f"{path}: expected tables [[pattern]] and nothing else, found {found}. Type: {EXAMPLE}")
    patterns: list[FusionPattern] = []
    for number, table in enumerate(tables, 1):
        place = f"{path}: pattern {number}"
        try:
            add_pattern(patterns, FusionPattern(**_checked(table, place)))
        except FusionError as error:
            raise SettingsError(f"{place}: {error}") from error
    return patterns


def _checked(table: Any, place: str) -> dict[str, Any]:
    """The table as the pattern's arguments."""
    if not isinstance(table, dict):
        raise SettingsError(f"{place}: expected a table, found {table!r}. Type: {EXAMPLE}")
    for key, value in table.items():
        if key not in KEYS:
            near = difflib.get_close_matches(key, KEYS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"a pattern has {', '.join(KEYS)}."
            raise SettingsError(f"{place}: expected {', '.join(KEYS)}, found {key!r}; {hint}")
        expected, kind = KEYS[key]
        is_right = isinstance(value, kind) and not isinstance(value, bool)
        if not is_right or (key == "ops" and not all(isinstance(op, str) for op in value)):
            raise SettingsError(f"{place}: expected {expected} as {key}, found {value!r}. Type: {EXAMPLE}")
    missing = [key for key in REQUIRED if key not in table]
    if missing:
        raise SettingsError(f"{place}: expected a {missing[0]}, found none. Type: {EXAMPLE}")
    return table
