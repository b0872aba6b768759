"""What a session imports only once it needs it, so that scripts start sooner; all of it at once where that is unsafe.

A script's own folder is first on the path while it runs: a ``sympy.py`` in it would be taken for ours. Where a folder
has such a name in it, everything is imported before the script runs.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import sys

from autofuse.untouched import untouched

NAMES = (
    "alembic", "colorsys", "configparser", "graphlib", "html", "mako", "markupsafe", "mpmath", "pygments", "sympy",
    "termios",
)  # fmt: skip
_MODULES = (
    "autofuse.db.migrate",
    "autofuse.optimizer.router",
    "autofuse.runtime.catalogue",
    "autofuse.runtime.checking",
    "autofuse.runtime.planner",
    "autofuse.runtime.usage",
)


def shadowed(folder: str) -> list[str]:
    """Names of modules in ``folder`` that are also those of ones imported late."""
    found = ((name, importlib.machinery.PathFinder.find_spec(name, [folder])) for name in NAMES)
    return [name for name, spec in found if spec is not None and spec.loader is not None]


def import_for(folder: str) -> None:
    """Import all of it now if ``folder`` has such a name, and leave the name to the script."""
    names = shadowed(folder)
    if not names:
        return
    for name in _MODULES:
        with contextlib.suppress(Exception), untouched():  # whoever needs it meets the error again, and says it
            importlib.import_module(name)
    for loaded in [n for n in sys.modules if n.partition(".")[0] in names]:
        del sys.modules[loaded]
