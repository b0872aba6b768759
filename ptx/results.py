"""The file of results: a row for each part of the work.

In: a file, the name of a row, and what was found. Out: the file with this row and those of other runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import triton

from benchmarks.common import commit, machine, save
from ptx.kernels import ARCHITECTURE


def keep(path: Path, name: str, found: Mapping[str, Any]) -> None:
    """Put a row in the place of the one with its name."""
    facts = {"commit": commit(), "machine": machine(), "triton": triton.__version__, "target": ARCHITECTURE}
    before = json.loads(path.read_text()) if path.exists() else {}
    kept = {key: value for key, value in before.items() if key.startswith(("share", "train", "built-in"))}
    save(path, "ptx", command="scripts/ptx", **kept | {name: {**facts, **found}})
