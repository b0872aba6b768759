"""How a store file is opened, and what goes wrong with one.

In: a path. Out: an engine on one kept SQLite connection with our pragmas and the newest schema.
Guarantee: a file that is not ours is never written to, renamed or deleted; every failure is a ``StoreError``
that names the path and what to type.

The file is never opened except through SQLite: closing any other descriptor of it would drop the
process's POSIX locks on it (sqlite.org/howtocorrupt.html, 2.2), which corrupts a store under concurrency.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import sqlite3
from pathlib import Path

from filelock import FileLock, Timeout
from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.exc import DBAPIError, StatementError
from sqlalchemy.pool import StaticPool

from autofuse.db.file_systems import network_type
from autofuse.errors import StoreError, StoreVersionError
from autofuse.private_files import Untrusted, check_beside, make_folder

APPLICATION_ID = 0x61667573  # "afus", in the header of every store of ours
REVISIONS = (
    "0001",
    "0002",
    "0003",
    "0004",
    "0005",
    "0006",
    "0007",
    "0008",
)  # schemas this version reads or upgrades, oldest first, as Alembic lists them
HEAD = REVISIONS[-1]
SMALLEST_PAGE_BYTES = 512  # of a database of SQLite
BUSY_TIMEOUT_SECONDS = 5.0
UPGRADE_TIMEOUT_SECONDS = 60.0

WRITES = "autofuse_writes"  # execution option: begin with the write lock, so that no statement has to wait for it

# Suffixes of files that SQLite and we put beside a store; none may be another user's.
BESIDE = ("", "-wal", "-shm", "-journal", ".lock")
_ELSEWHERE = "or choose another store with --store PATH (or AUTOFUSE_STORE=PATH)"


# ---- opening ------------------------------------------------------------------------------------


def open_engine(path: Path, *, readonly: bool = False, timeout_seconds: float = BUSY_TIMEOUT_SECONDS) -> Engine:
    """An engine on the store at ``path``, created or upgraded as needed. Errors: StoreError, StoreVersionError."""
    try:
        _check_file(path, readonly)
        if not readonly:
            _create_private(path)
        engine = _engine(path, readonly, timeout_seconds)
        try:
            _check_schema(engine, path, readonly)
            if not readonly:
                _choose_journal(engine, path, timeout_seconds=0.0)
        except BaseException:
            engine.dispose()
            raise
    except Untrusted as error:
        raise StoreError(f"expected a store that only this user may write to, found: {error}; {_ELSEWHERE}") from error
    except (DBAPIError, sqlite3.Error, OSError) as error:
        raise store_error(path, error) from error
    return engine


def _check_file(path: Path, readonly: bool) -> None:
    if path.is_dir():
        raise StoreError(f"expected a store file at {path}, found a directory; name a file in it with --store")
    if path.exists():
        if 0 < path.stat().st_size < SMALLEST_PAGE_BYTES:
            raise _not_a_database(path)  # SQLite takes a file of one byte for an empty one that is locked
        check_beside(path, BESIDE)
    elif readonly:
        raise StoreError(
            f"expected a store at {path}, found no such file; "
            "fill one with: autofuse run SCRIPT.py, or name another with --store PATH"
        )


def _check_schema(engine: Engine, path: Path, readonly: bool) -> None:
    """Upgrade an older schema, refuse a newer one."""
    with engine.connect() as connection:
        found = _found_revision(connection, path)
    if found == HEAD:
        return
    if found is not None and found not in REVISIONS:
        raise StoreVersionError(
            f"expected a store with schema {HEAD} or older at {path}, found schema {found}, written by a newer "
            f"autofuse; upgrade with: pip install --upgrade autofuse, {_ELSEWHERE}"
        )
    if readonly:
        raise StoreVersionError(
            f"expected schema {HEAD} at {path}, found {found or 'none'}; the next `autofuse run` or "
            "`autofuse tune` on this store upgrades it"
        )
    _upgrade(engine, path)


def _create_private(path: Path) -> None:
    """Make the parents and an empty file that only its owner can read: decisions and binaries come from it."""
    if not os.path.lexists(path.parent):
        make_folder(path.parent)
    check_beside(path, BESIDE)
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))


def _engine(path: Path, readonly: bool, timeout_seconds: float) -> Engine:
    def connect() -> sqlite3.Connection:
        uri = path.absolute().as_uri()
        if not readonly:
            return _connect(f"{uri}?mode=rw", timeout_seconds)
        try:
            return _connect(f"{uri}?mode=ro", timeout_seconds)
        except sqlite3.OperationalError:
            # In a folder that we may not write to, SQLite cannot make WAL's index. Without a log the index would be
            # empty, and the file itself is complete.
            log = path.with_name(path.name + "-wal")
            if log.exists() and log.stat().st_size > 0:
                raise
            return _connect(f"{uri}?immutable=1", timeout_seconds)

    engine = create_engine("sqlite+pysqlite://", creator=connect, poolclass=StaticPool)

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        writes = connection.get_execution_options().get(WRITES, False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine


def _connect(uri: str, timeout_seconds: float) -> sqlite3.Connection:
    # isolation_level=None: pysqlite starts no transactions of its own; the listener of "begin" above does.
    connection = sqlite3.connect(uri, uri=True, timeout=timeout_seconds, isolation_level=None, check_same_thread=False)
    try:
        connection.execute(f"PRAGMA busy_timeout={int(timeout_seconds * 1000)}")
        connection.execute("PRAGMA foreign_keys=ON")
        connection.execute("PRAGMA synchronous=NORMAL")  # with WAL: a power cut may lose the newest rows, no more
        connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()  # SQLite opens the file lazily: read it now
    except BaseException:
        connection.close()
        raise
    return connection


def _found_revision(connection: Connection, path: Path) -> str | None:
    """The schema of the file, None for an empty one. Raises StoreError for a file that is not a sound store."""
    tables = set(connection.exec_driver_sql("SELECT name FROM sqlite_master WHERE type = 'table'").scalars())
    application_id = connection.exec_driver_sql("PRAGMA application_id").scalar_one()
    if not tables and application_id in (0, APPLICATION_ID):
        return None
    if application_id != APPLICATION_ID:
        raise StoreError(
            f"expected a store of autofuse at {path}, found a database of another program (left as it is); "
            f"move it away with: {_move_away(path)}, {_ELSEWHERE}"
        )
    found = None
    if "alembic_version" in tables:
        found = connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar()
    if found is None:
        raise StoreError(
            f"expected a schema number in the store {path}, found none: the file is damaged; "
            f"move it away with: {_move_away(path)}, {_ELSEWHERE}"
        )
    return str(found)


def _upgrade(engine: Engine, path: Path) -> None:
    """Bring the schema to HEAD in one transaction, one process at a time."""
    lock = FileLock(path.with_name(path.name + ".lock"), timeout=UPGRADE_TIMEOUT_SECONDS, mode=0o600)
    try:
        with lock:
            _choose_journal(engine, path, UPGRADE_TIMEOUT_SECONDS)  # first, so that it holds for what is written below
            with engine.connect().execution_options(**{WRITES: True}) as connection, connection.begin():
                found = _found_revision(connection, path)
                if found is None:
                    _create_schema(connection)
                elif found != HEAD:  # another process may have upgraded it meanwhile
                    from autofuse.db.migrate import upgrade  # imported here: Alembic takes 0.15 s

                    upgrade(connection)
    except Timeout as error:
        raise StoreError(
            f"expected to upgrade the store {path}, found its lock {lock.lock_file} held for "
            f"{UPGRADE_TIMEOUT_SECONDS:.0f} s; end the process that holds it, {_ELSEWHERE}"
        ) from error


def _create_schema(connection: Connection) -> None:
    """Make the schema that all migrations together make (a test compares the two), in a tenth of their time."""
    from autofuse.db.models import Base

    connection.exec_driver_sql(f"PRAGMA application_id = {APPLICATION_ID}")
    Base.metadata.create_all(connection)
    connection.exec_driver_sql("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY)")
    connection.exec_driver_sql("INSERT INTO alembic_version VALUES (?)", (HEAD,))


def _choose_journal(engine: Engine, path: Path, timeout_seconds: float) -> None:
    """Choose WAL, or on network file systems, where other machines may write too, a rollback journal, which is slower.

    The file keeps the mode. While others have the store open it cannot change; the next process to open the store tries
    again.
    """
    wanted = "delete" if network_type(path) else "wal"
    raw = engine.raw_connection()
    try:
        cursor = raw.cursor()
        if cursor.execute("PRAGMA journal_mode").fetchone()[0] != wanted:
            (before,) = cursor.execute("PRAGMA busy_timeout").fetchone()
            cursor.execute(f"PRAGMA busy_timeout={int(timeout_seconds * 1000)}")
            with contextlib.suppress(sqlite3.OperationalError):
                cursor.execute(f"PRAGMA journal_mode={wanted}").fetchone()
            cursor.execute(f"PRAGMA busy_timeout={before}")
        cursor.close()
    finally:
        raw.close()


# ---- failures -----------------------------------------------------------------------------------


def store_error(path: Path, error: BaseException) -> StoreError:
    """The StoreError that tells a person what a failure of SQLite or of the system means."""
    original = error.orig if isinstance(error, StatementError) and error.orig is not None else error
    name = getattr(original, "sqlite_errorname", "") or ""
    text = str(original)
    if name == "SQLITE_NOTADB":
        return _not_a_database(path)
    if name.startswith("SQLITE_CORRUPT"):
        return StoreError(
            f"expected a sound store at {path}, found a damaged one ({text}); "
            f"move it away with: {_move_away(path)}, {_ELSEWHERE}"
        )
    if name.startswith(("SQLITE_FULL", "SQLITE_IOERR")) or _errno_is_full(original):
        return StoreError(
            f"expected to write the store {path}, found no room or a failing disk ({text}); "
            f"make room (df -h {shlex.quote(str(path.parent))}), {_ELSEWHERE}"
        )
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return StoreError(
            f"expected the store {path} to be free within its timeout, found it locked by another process; "
            f"find that process with: fuser {shlex.quote(str(path))}, {_ELSEWHERE}"
        )
    if name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM")) or isinstance(original, OSError):
        return StoreError(
            f"expected a store that can be written at {path}, found: {text}; make {path.parent} writable, {_ELSEWHERE}"
        )
    return StoreError(f"the store {path} refused a request: {text}")


def _not_a_database(path: Path) -> StoreError:
    return StoreError(
        f"expected a store of autofuse at {path}, found a file that is not a database (left as it is); "
        f"move it away with: {_move_away(path)}, {_ELSEWHERE}"
    )


def _errno_is_full(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _move_away(path: Path) -> str:
    return f"autofuse store reset --store {shlex.quote(str(path))}"  # not mv: most of it may be in the log beside it
