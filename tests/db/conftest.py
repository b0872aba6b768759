from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from autofuse.db.base import StoreFile
from autofuse.db.fleet_server import FleetServer
from autofuse.db.store import Store


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "new folder" / "store.db"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    with Store.open(path) as opened:
        yield opened


@pytest.fixture(params=["file", "server"])
def both(request: pytest.FixtureRequest) -> Iterator[Store]:
    """The parts of a store, on a file and on a fleet's server.

    Not on a server: kernels, which never go there; `history`, whose bounds are `fleet_retention`'s there; rows that are
    lost, which its foreign keys keep.
    """
    if request.param == "file":
        yield request.getfixturevalue("store")
        return
    server = request.getfixturevalue("postgres")
    with contextlib.closing(FleetServer(server.url(server.new_database()))) as opened:
        opened.check()
        yield Store(cast(StoreFile, opened))
