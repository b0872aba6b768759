"""The levels of ``run.debug`` (``AUTOFUSE_DEBUG``): what each one prints, in one place.

In: the level of a process, and texts from the stages. Out: a block "autofuse: ..." for each, on the interpreter's own
stderr. Each level includes the lower ones. The daemon's texts are in its log (`autofuse daemon logs`). Guarantee: at
level 0 no text is made; none is made in a call of a captured graph at any level; a text that cannot be made is left
out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from enum import IntEnum

from autofuse.stderr import say


class Level(IntEnum):
    """What is told from which level on."""

    ROUTES = (
        1  # each change of a module's state; the nodes of a graph and what each runs, when that changes for a shape
    )
    TIMINGS = 2  # at the end: times of sampled calls, of each graph and of its nodes
    PLAN = 3  # a graph's nodes, and what was not fused and why; the traceback of whatever failed
    SOURCE = 4  # the generated Python of a graph, and the source of each kernel that is loaded
    GRAPHS = 5  # a graph as Dynamo gave it, as AOTAutograd made it, as it was planned
    COMPILER = 6  # each command of the C compiler and what it printed; each kernel of Triton and what it takes


_level = 0


def set_level(level: int) -> None:
    """Of this process, from now on."""
    global _level
    _level = level


def tell(level: Level, text: Callable[[], str]) -> None:
    """Say a text where its level is told; an empty one is none."""
    if level <= _level:
        with contextlib.suppress(Exception):
            if made := text():
                say(made)
