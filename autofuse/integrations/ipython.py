"""IPython and Jupyter: ``%load_ext autofuse``, then ``%%autofuse`` above a cell, or ``%autofuse`` for the last report.

In: a cell. Out: the cell has run under autofuse, in the notebook's own names; its report is printed. What the cell
raises, the notebook shows as ever.
"""

from __future__ import annotations

import argparse
import shlex
from typing import Any

from autofuse.integrations.watched import Watched, watched

_last: list[Watched] = []


def load_ipython_extension(shell: Any) -> None:
    """Called by ``%load_ext autofuse``."""

    def line_magic(line: str) -> None:
        print(_last[-1].report() if _last else "Nothing has run under autofuse yet. Put %%autofuse above a cell.")

    def cell_magic(line: str, cell: str) -> None:
        options = _options(line)
        with watched(options.store, options.tune) as part:
            outcome = shell.run_cell(cell)
        _last[:] = [part]
        if getattr(outcome, "success", True):
            print(part.report(), end="")

    shell.register_magic_function(line_magic, magic_kind="line", magic_name="autofuse")
    shell.register_magic_function(cell_magic, magic_kind="cell", magic_name="autofuse")


def _options(line: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="%%autofuse", exit_on_error=False, add_help=False)
    parser.add_argument("--store")
    parser.add_argument("--tune", choices=("off", "background", "wait", "after"))
    try:
        found, rest = parser.parse_known_args(shlex.split(line))
    except argparse.ArgumentError as error:
        raise ValueError(f"expected %%autofuse [--store FILE] [--tune MODE], found {line!r}: {error}") from None
    if rest:
        raise ValueError(f"expected %%autofuse [--store FILE] [--tune MODE], found {' '.join(rest)!r}")
    return found
