"""What a session imports only once it needs it, so that scripts start sooner; all of it at once where that is unsafe.

A script's own folder is first on the path while it runs: a ``sympy.py`` in it would be taken for ours. Where a folder
has such a name in it, everything is imported before the script runs.
"""

from __future__ import annotations

import importlib
import importlib.machinery

NAMES = (
    "alembic", "colorsys", "configparser", "graphlib", "html", "mako", "markupsafe", "mpmath", "pygments", "rich",
    "sympy", "termios",
)  # fmt: skip
_MODULES = (
    "autofuse.db.migrate",
    "autofuse.optimizer.router",
    "autofuse.report.progress",
    "autofuse.runtime.catalogue",
    "autofuse.runtime.checking",
    "autofuse.runtime.planner",
    "autofuse.runtime.usage",
)


def is_shadowed(folder: str) -> bool:
    """Whether a module in ``folder`` has the name of one that is imported late."""
    return any(importlib.machinery.PathFinder.find_spec(name, [folder]) is not None for name in NAMES)


def import_all() -> None:
    """Now, not later."""
    for name in _MODULES:
        importlib.import_module(name)
