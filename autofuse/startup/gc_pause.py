"""Python's cyclic garbage collector while autofuse starts, and while it traces.

What is imported before the script lives as long as the process. To look through it again and again while it is
imported, and once more when the interpreter ends, takes as long as all our own imports; so both are left out.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused() -> Iterator[None]:
    """No collection while this lasts; nothing happens where the user has turned it off."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def freeze() -> None:
    """Let no collection look at objects that exist by now; those that the script makes are collected as ever.

    ``gc.get_objects`` and ``gc.get_referrers`` do not list them from then on; ``gc.unfreeze()`` undoes it.
    """
    gc.freeze()
