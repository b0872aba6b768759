"""Frames whose trace fails run in eager, and the rest of the call with them.

In: a call that may be traced. Out: nothing. Guarantee: where part of a module's work is done, it is not done again:
behind a graph break, a failed trace ends the capture of that frame and not the whole call, which the root would begin
anew in eager. A failure before that still reaches the root, which then knows of it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch
import torch._dynamo

from autofuse.capture.traced import ROOT_FILE

_CAPTURE = f"{Path(__file__).parents[1]}{os.sep}"
# Files between Dynamo's tracer and the frame of a root, which only calls its module.
_CALLS_ONLY = (
    ROOT_FILE,
    contextlib.__file__,
    str(Path(torch.__file__).parent / "_"),
    torch.nn.modules.module.__file__,
    f"{Path(__file__).parents[2]}{os.sep}",
)


@contextlib.contextmanager
def suppressed_errors() -> Iterator[None]:
    """For a function: it may have done part of its work when its first frame is traced."""
    with torch._dynamo.config.patch(suppress_errors=True):
        yield


@contextlib.contextmanager
def suppressed_behind_breaks() -> Iterator[None]:
    """For a module: until its forward runs, nothing is done."""
    config, thread = torch._dynamo.config, threading.get_ident()

    def begin(_: object) -> None:
        if threading.get_ident() == thread and _has_begun(sys._getframe(1)):
            config.suppress_errors = True

    with config.patch(suppress_errors=config.suppress_errors):  # puts back what `begin` sets
        torch._dynamo.callback.callback_handler.register_start_callback(begin)
        try:
            yield
        finally:
            with contextlib.suppress(ValueError):  # the script has reset Dynamo meanwhile
                torch._dynamo.callback.callback_handler.remove_start_callback(begin)


def _has_begun(frame: FrameType | None) -> bool:
    """Whether code of the script called what Dynamo is about to trace. ``frame``: of Dynamo's, which traces."""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_CAPTURE):  # it called the root, and nothing of it has run
            return False
        if not file.startswith(_CALLS_ONLY):
            return True
        frame = frame.f_back
    return False
