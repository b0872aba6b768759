"""Stores on a file and on a fleet's server, opened once more."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import cast

from autofuse.db.base import StoreFile
from autofuse.db.fleet_server import FleetServer
from autofuse.db.store import Store


@contextlib.contextmanager
def another(both: Store) -> Iterator[Store]:
    """Another store object on the same rows, that only reads."""
    if isinstance(both.file, StoreFile):
        with Store.open(both.path, readonly=True) as opened:
            yield opened
        return
    with contextlib.closing(FleetServer(url_of(cast(FleetServer, both.file)))) as server:
        yield Store(cast(StoreFile, server))


def url_of(server: FleetServer) -> str:
    """With its password."""
    return server._engine.url.render_as_string(hide_password=False)
