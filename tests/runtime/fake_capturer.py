"""Captures roots without Dynamo: each as a function that a test gives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from autofuse.runtime.roots.services import Capturer


def fake_capturer(call: Callable[..., Any]) -> Capturer:
    """``call(module, *args, **kwargs)``: what runs in place of a captured root, and of none is code learnt."""
    root = SimpleNamespace(trace=call, settled=call, direct=SimpleNamespace(find=lambda *args: None), traces=None)
    made: Any = SimpleNamespace(
        compile_root=lambda *args: root,
        reset_root=lambda root: None,
        mark_dynamic=lambda *args: None,
        capture_settings=lambda limit: nullcontext(),
        suppressed_errors=nullcontext,
        suppressed_behind_breaks=nullcontext,
        CAPTURE_ERRORS=(ZeroDivisionError,),
        note_read=lambda: None,
        graphs_read=lambda: 0,
        graph_breaks=Counter,
        why_no_graph=lambda target, before: "",
    )
    found: Capturer = made
    return found
