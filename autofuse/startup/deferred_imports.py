"""Modules that a session imports on first use, so that scripts start sooner; all of them at once where that is unsafe.

A script's own folder is first on the path while it runs: an ``html.py`` in it would be taken for ours. Where a folder
has such a name in it, everything is imported before the script runs. Packages that tracing imports again and again
cannot be saved so: beside a ``sympy.py`` nothing can be captured.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import sys
from collections.abc import Sequence

from autofuse.preserve_rng import untouched

NAMES = (
    "_elementtree", "_lsprof", "_remote_module_non_scriptable", "alembic", "cProfile", "colorsys", "configparser",
    "functorch", "getpass", "graphlib", "html", "mako", "markupsafe", "mpmath", "networkx", "profile", "pstats",
    "pyexpat", "pygments", "sympy", "termios", "triton", "xml",
)  # fmt: skip
TRACING = ("functorch", "mpmath", "networkx", "sympy", "triton")  # torch's functions import them when they are called
_MODULES = (
    "autofuse.capture.kept.trace_cache",
    "autofuse.runtime.optimizers.router",
    "autofuse.pipeline",
    "autofuse.runtime.kernels.catalogue",
    "autofuse.runtime.graphs.checking",
    "autofuse.runtime.graphs.rng_kernels",
    "autofuse.runtime.graphs.plan_cache",
    "autofuse.runtime.graphs.planner",
    "autofuse.runtime.graphs.usage",
    "torch._dynamo.repro.after_dynamo",  # which comes with the first torch.compile
)
_WITH_A_STORE = ("autofuse.db.migrate",)  # where this process opens it itself


def shadowed(folder: str, names: Sequence[str] = NAMES) -> list[str]:
    """Those of ``names`` that modules in ``folder`` have, too."""
    found = ((name, importlib.machinery.PathFinder.find_spec(name, [folder])) for name in names)
    return [name for name, spec in found if spec is not None and spec.loader is not None]


def import_now_for(folder: str) -> None:
    """Import all of it now if ``folder`` has such a name, and leave the name to the script."""
    names = shadowed(folder)
    if not names:
        return
    for name in (*_MODULES, *(_WITH_A_STORE if "autofuse.db.store" in sys.modules else ())):
        with contextlib.suppress(Exception), untouched():  # its user meets the error again, and reports it
            importlib.import_module(name)
    for loaded in [n for n in sys.modules if n.partition(".")[0] in names]:
        del sys.modules[loaded]
