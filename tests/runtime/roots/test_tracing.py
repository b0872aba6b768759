"""Whose error it is that a traced call raises."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch

import autofuse
from autofuse.capture.traced import ROOT_FILE
from autofuse.runtime.roots.tracing import was_ours

ROOT, SCRIPT = f"{ROOT_FILE} Net>", "/home/someone/train.py"
TORCH, OURS = os.path.dirname(torch.__file__), os.path.dirname(autofuse.__file__)
ROUTER = f"{OURS}/runtime/graphs/router.py"


def raised_through(*files: str) -> ZeroDivisionError:
    """An error below functions of these files, the first of which called the next."""
    call: Callable[[], object] = lambda: 1 / 0  # noqa: E731
    for file in reversed(files):
        namespace: dict[str, Callable[[], object]] = {"call": call}
        exec(compile("def run():\n    call()\n", file, "exec"), namespace)
        call = namespace["run"]
    with pytest.raises(ZeroDivisionError) as found:
        call()
    return found.value


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ((ROOT, f"{TORCH}/_dynamo/convert_frame.py", f"{TORCH}/_dynamo/variables/lazy.py"), True),
        ((ROOT, f"{TORCH}/_functorch/aot_autograd.py", f"{OURS}/capture/training_call.py", ROUTER), True),
        ((ROOT, f"{TORCH}/autograd/function.py", ROUTER, "<autofuse unfused node>"), True),
        ((ROOT, f"{TORCH}/nn/modules/module.py", SCRIPT, ROUTER), False),  # behind a graph break
        ((ROOT, f"{TORCH}/nn/modules/container.py", ROUTER), False),
        ((ROOT, f"{TORCH}/nn/modules/module.py", SCRIPT), False),
        ((SCRIPT,), False),
    ],
)
def test_errors_of_tracers_and_whole_graphs_are_ours(files: tuple[str, ...], expected: bool) -> None:
    assert was_ours(raised_through(*files)) is expected
