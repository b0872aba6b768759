"""Collects what the stages learn about a trace while it is made.

In: notes of Dynamo's backend, of AOTAutograd's cache and of the planner, on the thread that traces. Out: a `Traced` for
the trace cache. Guarantee: without a trace cache nothing is collected.
"""

from __future__ import annotations

import hashlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

import autofuse
from autofuse.private_files import PrivateFolder

if TYPE_CHECKING:
    from autofuse.capture.corrections.double_backward import Replay

OF_THE_LOSS = "backward, of the loss alone"  # the phase of a graph that `loss_alone` makes
ROOT_FILE = "<autofuse root"  # so begins the name of the file that a captured root's code says it comes from

_active = threading.local()


class TracedElsewhere(RuntimeError):
    """Torch runs none of Dynamo's functions while any thread traces with torch.fx; nothing of this call has run."""


class Keeper(NamedTuple):
    """The folder in which traces are kept across runs, and the function that is told of refusals."""

    folder: PrivateFolder
    report: Callable[[str, str], None]  # kind, message


def trace_prefix(root: str) -> str:
    """The prefix of files with a root's traces by this version. Other files need not be opened, nor Dynamo imported."""
    return f"{_prefix(root)}{version()}."


def is_of_another_version(name: str, root: str) -> bool:
    """Whether a file holds a trace of a root by another version of autofuse, torch or Python."""
    return name.startswith(_prefix(root)) and not name.startswith(trace_prefix(root))


def _prefix(root: str) -> str:
    return hashlib.sha256(root.encode()).hexdigest()[:20] + "."


@cache
def version() -> str:
    """The version of all code that shapes traces and plans: autofuse, torch, Python. Takes 7 ms."""
    digest = hashlib.sha256(f"{torch.__version__} {torch.version.git_version} {sys.version}".encode())
    for path in sorted(Path(autofuse.__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@dataclass
class Traced:
    """One trace of a root."""

    graphs: str = ""  # the file of AOTAutograd's graphs
    replay: Replay | None = None  # Dynamo's graph
    statistics: tuple[int, ...] = ()  # inputs of that which are statistics of norms, and written to
    plans: dict[str, Any] = field(default_factory=dict)  # of the planner, by phase
    problem: str = ""  # why it cannot be kept

    def spoil(self, problem: str) -> None:
        self.problem = self.problem or problem


def being_traced() -> Traced | None:
    """The trace that is being made on this thread, where it is to be kept."""
    found: Traced | None = getattr(_active, "traced", None)
    return found


@contextmanager
def noted_in(traced: Traced) -> Iterator[None]:
    """Collect notes into this trace while it is made."""
    before = being_traced()
    _active.traced = traced
    try:
        yield
    finally:
        _active.traced = before
