"""Schemas: the migrations make what the models say, and every past schema can be upgraded.

``assets/schema_<revision>.sql`` is the dump of a small store of each schema that ever shipped, made by
``python tests/db/make_schema_asset.py``. Never edit one.
"""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, create_engine, text
from store_records import DEVICE, TRITON_FILES, VERSIONS, decision, gpu_kernel, kernel, use

from autofuse.db import connection as opening
from autofuse.db.fleet_server import FleetServer
from autofuse.db.migrate import revisions, upgrade
from autofuse.db.models import Base
from autofuse.db.store import Store
from autofuse.errors import FleetError, StoreVersionError
from tests.postgres import Postgres

ASSETS = Path(__file__).with_name("assets")


def set_revision(path: Path, revision: str) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE alembic_version SET version_num = ?", (revision,))
    connection.close()


def schema_of(path: Path) -> dict[str, object]:
    """Tables with their columns, keys and indices, whatever their order; what marks the file as ours."""
    with sqlite3.connect(path) as connection:
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        found: dict[str, object] = {"id": connection.execute("PRAGMA application_id").fetchone()}
        found["version"] = connection.execute("SELECT version_num FROM alembic_version").fetchall()
        for table in tables:
            indices = connection.execute(f"PRAGMA index_list({table})").fetchall()
            keyed = [(connection.execute(f"PRAGMA index_info({i[1]})").fetchall(), i[2], i[3]) for i in indices]
            found[table] = (
                sorted(repr(column[1:]) for column in connection.execute(f"PRAGMA table_info({table})")),
                sorted(repr(key[2:]) for key in connection.execute(f"PRAGMA foreign_key_list({table})")),
                sorted(repr(([name for _, _, name in columns], *rest)) for columns, *rest in keyed),
            )
    connection.close()
    return found


def test_migrations_make_what_the_models_say(store: Store, path: Path, tmp_path: Path) -> None:
    migrated = tmp_path / "migrated.db"
    engine = create_engine(f"sqlite:///{migrated}")
    with engine.begin() as connection:
        upgrade(connection)
        assert compare_metadata(MigrationContext.configure(connection), Base.metadata) == []
    engine.dispose()
    assert schema_of(migrated) == schema_of(path)  # a new store is made from the models


def test_known_revisions_are_alembics() -> None:
    assert list(opening.REVISIONS) == revisions()


def test_every_schema_that_shipped_has_an_asset() -> None:
    assert sorted(file.stem for file in ASSETS.glob("*.sql")) == [f"schema_{name}" for name in opening.REVISIONS]


@pytest.mark.parametrize("revision", opening.REVISIONS)
def test_upgrade_from(revision: str, tmp_path: Path) -> None:
    path = tmp_path / "old.db"
    connection = sqlite3.connect(path)
    connection.executescript((ASSETS / f"schema_{revision}.sql").read_text())
    connection.close()
    path.chmod(0o600)
    with Store.open(path) as store:
        assert store.runs.get(1).command == "train.py"
        assert store.nodes.uses(1) == [use()]
        assert [made for _, made in store.results.decisions(DEVICE.key, VERSIONS)] == [decision()]
        assert len(store.steps.of_run(1)) == 4
        for record in (kernel(), gpu_kernel()):
            assert store.kernels.get(record.key.digest) is None  # no seal of this user's
            store.kernels.put(record)
            assert store.kernels.get(record.key.digest) == record
        assert store.kernels.get_triton_files("KEY") is None
        store.kernels.put_triton_files("KEY", TRITON_FILES)
        assert store.kernels.get_triton_files("KEY") == TRITON_FILES


def test_newer_schema_is_refused_and_left_alone(path: Path) -> None:
    Store.open(path).close()
    set_revision(path, "0999")
    before = path.read_bytes()
    for readonly in (False, True):
        with pytest.raises(StoreVersionError) as caught:
            Store.open(path, readonly=readonly)
        message = str(caught.value)
        assert f"expected a store with schema {opening.HEAD} or older" in message and "found schema 0999" in message
        assert "pip install --upgrade autofuse" in message and "--store PATH" in message
        assert caught.value.exit_code == 2
    assert path.read_bytes() == before


def test_older_schema_is_upgraded_and_readers_ask_for_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "REVISIONS", ("0000", *opening.REVISIONS))
    Store.open(path).close()
    set_revision(path, "0000")
    with pytest.raises(StoreVersionError, match="found 0000; the next `autofuse run`"):
        Store.open(path, readonly=True)
    called = []
    monkeypatch.setattr("autofuse.db.migrate.upgrade", lambda connection: called.append(connection))
    Store.open(path).close()
    assert len(called) == 1


def test_migrations_make_what_the_models_say_on_a_server(postgres: Postgres) -> None:
    migrated = create_engine(postgres.url(postgres.new_database("template1")))
    made = create_engine(postgres.url(postgres.new_database()))
    with migrated.begin() as connection:
        upgrade(connection)
        assert compare_metadata(MigrationContext.configure(connection), Base.metadata) == []
    with migrated.begin() as left, made.begin() as right:
        assert described(left) == described(right)
        assert compare_metadata(MigrationContext.configure(right), Base.metadata) == []
    for engine in (migrated, made):
        engine.dispose()


def test_a_server_of_an_older_schema_is_upgraded_by_its_owner_alone(postgres: Postgres) -> None:
    url = postgres.url(postgres.new_database("template1"))
    engine = create_engine(url)
    with engine.begin() as connection:
        upgrade(connection, opening.REVISIONS[-2])
    engine.dispose()
    with contextlib.closing(FleetServer(url)) as server:
        with pytest.raises(FleetError, match=f"found {opening.REVISIONS[-2]}; as the owner .* autofuse fleet upgrade"):
            server.check()
        assert server.upgrade() and not server.upgrade()
        assert server.check() == server.check() != ""


def described(connection: Connection) -> list[tuple[object, ...]]:
    """Tables, columns, types and defaults of a server's database, but for the names of sequences."""
    columns = "table_name, column_name, data_type, is_nullable, column_default"
    query = f"SELECT {columns} FROM information_schema.columns WHERE table_schema = 'public' ORDER BY 1, 2"
    return [tuple(row) for row in connection.execute(text(query))]
