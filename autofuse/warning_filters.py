"""Keeps a script's warnings told once: Python forgets which it has shown whenever a filter changes.

In: a block of our own work. Out: nothing; what the block does to filters of ``warnings`` counts as no change, on its
thread. Python shows a warning once for each place of the script, by a register in each module that is emptied when
``warnings.catch_warnings`` or a new filter says so: sympy adds a filter when it is imported, and AOTAutograd catches
warnings in each trace, after which a script would say again what it has said. Guarantee: what the script itself does to
filters counts as ever, also inside of such a block where ``during()`` says that its code runs.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps


class _Blocks(threading.local):
    def __init__(self) -> None:
        self.during: list[Callable[[], object]] = []


_blocks = _Blocks()


@contextmanager
def unchanged(during: Callable[[], object] = lambda: True) -> Iterator[None]:
    """Around work of ours. ``during()``: whether the code that runs at a moment of it is ours."""
    _blocks.during.append(during)
    try:
        yield
    finally:
        _blocks.during.pop()


def _count_changes_of_scripts(count: Callable[[], None]) -> None:
    @wraps(count)
    def count_change() -> None:
        if not any(during() for during in _blocks.during):
            count()

    warnings._filters_mutated = count_change  # type: ignore[attr-defined]


if hasattr(warnings, "_filters_mutated"):
    _count_changes_of_scripts(warnings._filters_mutated)
