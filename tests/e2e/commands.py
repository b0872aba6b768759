"""Commands about a store, in this process: each as one of its own takes most of a second to start."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

from autofuse.cli.app import parse


def report(store: Path, *arguments: str) -> Any:
    """What ``autofuse report --json`` prints about a store."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert parse(["report", "--json", "--store", str(store), *arguments]) == 0
    return json.loads(out.getvalue())


def stop_daemon(store: Path) -> None:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        parse(["daemon", "stop", "--store", str(store)])
