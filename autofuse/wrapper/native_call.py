"""Plans that run in C: the callable that a plan tries first.

In: a `Program` with the text of `native_text`, a plan's key and callables, the `Runner` of this process. Out: a
function of the list of a graph's inputs, which gives the results, or None where Python is to run the call. Guarantee: a
plan that cannot be written down stays with Python, which one line of `AUTOFUSE_DEBUG` says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from autofuse.debug import Level, tell
from autofuse.dynamo_skip import define
from autofuse.wrapper.below_autograd import NAMES
from autofuse.wrapper.graph_call import Program
from autofuse.wrapper.native_build import NativeBuilder
from autofuse.wrapper.native_library import Run, installed
from autofuse.wrapper.node_call import NodeCall


def native_call(program: Program, key: tuple[int, ...], calls: Sequence[NodeCall | None]) -> Run | None:
    """The plan's call in C; None where there is no runner, or the plan cannot be written down."""
    runner = installed()
    if runner is None or not program.native:
        return None
    try:
        builder = NativeBuilder(runner.dtypes)
        _writer(program)(builder, key, calls)
        return runner.make(builder.program()) if builder.pays else None
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        tell(Level.ROUTES, lambda: f"a plan for {key} runs in Python: {problem}")
        return None


def _writer(program: Program) -> Callable[..., None]:
    """The function of the program's text, compiled on first use: most shapes of most graphs come once."""
    found = program.writer
    if not found:
        namespace: dict[str, Any] = {"torch": torch, **NAMES, **program.constants}
        define(program.native, "steps of a graph", namespace)
        found.append(namespace["native"])
    return found[0]
