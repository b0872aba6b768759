"""Transactions on one kept connection: what every part of the store stands on.

In: an engine from ``connection``. Out: a `StoreFile`, whose ``read()`` and ``write()`` are short transactions with
failures that are ``StoreError``; and the row operations that several parts share.
Guarantee: a transaction holds the write lock from its first statement or not at all, so none deadlocks;
a store may be used from several threads (one at a time) and survives a fork.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, TypeVar

from sqlalchemy import Connection, Engine, insert, select
from sqlalchemy.dialects import sqlite
from sqlalchemy.exc import SQLAlchemyError

from autofuse.db import models
from autofuse.db.connection import BUSY_TIMEOUT_SECONDS, WRITES, open_engine, store_error
from autofuse.errors import StoreError
from autofuse.ir.records import Bucket, DecisionKey, Event, ObservedShape
from autofuse.ir.validation import stored_number

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from sqlalchemy.dialects import postgresql

Record = TypeVar("Record", bound="DataclassInstance")


def now() -> float:
    """UTC epoch seconds."""
    return time.time()


class Database(Protocol):
    """What the parts of a store stand on: a file of this machine, or a fleet's server (`fleet_server`)."""

    @property
    def path(self) -> Path | str:
        """The file, or the server without its password."""

    @property
    def readonly(self) -> bool: ...

    def read(self) -> contextlib.AbstractContextManager[Connection]:
        """A transaction that sees one consistent state."""

    def write(self) -> contextlib.AbstractContextManager[Connection]:
        """A transaction that commits at its end, or changes nothing if it fails; one at a time."""


class StoreFile:
    """An open store file, which all parts of a store share."""

    def __init__(self, engine: Engine, path: Path, readonly: bool) -> None:
        self.path = path
        self.readonly = readonly
        self._engine: Engine | None = engine
        self._inode = _inode(path)
        self._pid = os.getpid()
        self._lock = threading.RLock()

    @classmethod
    def open(cls, path: Path, *, readonly: bool = False, timeout_seconds: float = BUSY_TIMEOUT_SECONDS) -> Self:
        """Open the store at ``path``; unless ``readonly``, make its parents and bring its schema up to date.

        ``timeout_seconds`` is how long any transaction waits for another process's write. Errors, each of which leaves
        the file as it was: StoreError for a file that is another program's, or cannot be read or written;
        StoreVersionError for a newer schema, and with ``readonly`` for an older one.
        """
        path = Path(path)
        return cls(open_engine(path, readonly=readonly, timeout_seconds=timeout_seconds), path, readonly)

    def close(self) -> None:
        """Close the file; closing twice is allowed."""
        with self._lock:
            if self._engine is not None:
                # SQLite's connections must not be used, not even closed, on the other side of a fork.
                self._engine.dispose(close=self._pid == os.getpid())
                self._engine = None

    @property
    def was_moved(self) -> bool:
        """Whether the path leads to another file by now, or to none."""
        return _inode(self.path) != self._inode

    def data_version(self) -> int:
        """A number that changes when another process or store has written (about 0.1 ms)."""
        with self._transaction(writes=False) as connection:
            return int(connection.exec_driver_sql("PRAGMA data_version").scalar_one())

    def read(self) -> contextlib.AbstractContextManager[Connection]:
        """A transaction that sees one consistent state of the store."""
        return self._transaction(writes=False)

    def write(self) -> contextlib.AbstractContextManager[Connection]:
        """A transaction that commits at its end, or changes nothing if it fails."""
        if self.readonly:
            raise StoreError(f"expected a store that can be written, found {self.path} opened for reading only")
        return self._transaction(writes=True)

    def outside_transactions(self, statement: str) -> None:
        """Run a statement that SQLite allows only outside of transactions."""
        with self._lock:
            if self._engine is None or self.readonly:
                raise StoreError(f"expected a store that is open for writing, found {self.path} closed or readonly")
            try:
                raw = self._engine.raw_connection()
                try:
                    raw.cursor().execute(statement).close()
                finally:
                    raw.close()
            except (SQLAlchemyError, sqlite3.Error) as error:
                raise store_error(self.path, error) from error

    @contextlib.contextmanager
    def _transaction(self, writes: bool) -> Iterator[Connection]:
        if self._pid != os.getpid():
            self._reopen_after_fork()
        with self._lock:
            if self._engine is None:
                raise StoreError(f"the store {self.path} is closed")
            try:
                with self._engine.connect() as connection:
                    connection = connection.execution_options(**{WRITES: writes})
                    with connection.begin():
                        yield connection
            # OverflowError and ValueError: numbers and texts that SQLite cannot hold, and damaged JSON in a row.
            except (SQLAlchemyError, sqlite3.Error, OverflowError, ValueError) as error:
                raise store_error(self.path, error) from error

    def _reopen_after_fork(self) -> None:
        self._lock = threading.RLock()  # another thread of the parent may have held the lock
        self._pid = os.getpid()
        if self._engine is not None:
            self._engine.dispose(close=False)


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


# ---- rows that several parts write --------------------------------------------------------------


def upsert(
    connection: Connection,
    model: type[models.Base],
    rows: Iterable[Mapping[str, Any]],
    keys: Sequence[str],
    update: Sequence[str],
) -> None:
    """Insert ``rows``; where a row with the same ``keys`` exists, replace its columns ``update``.

    Without ``update`` such a row stays as it is; ``keys`` may be left out then, and any unique ones count.
    """
    values = [dict(row) for row in rows]
    if values:
        connection.execute(_upsert(connection.dialect.name, model, tuple(keys), tuple(update)), values)


@functools.cache
def _upsert(
    dialect: str, model: type[models.Base], keys: tuple[str, ...], update: tuple[str, ...]
) -> sqlite.Insert | postgresql.Insert:
    """The statement of `upsert`, cached: making a statement takes longer than running it."""
    statement: sqlite.Insert | postgresql.Insert = sqlite.insert(model)
    if dialect == "postgresql":
        from sqlalchemy.dialects import postgresql  # 0.03 s, which no script should take

        statement = postgresql.insert(model)
    if not update:
        return statement.on_conflict_do_nothing(index_elements=list(keys) or None)
    return statement.on_conflict_do_update(
        index_elements=list(keys), set_={name: statement.excluded[name] for name in update}
    )


def put_keys(connection: Connection, keys: Iterable[DecisionKey]) -> None:
    """Store the fields of keys beside their digests."""
    rows = [
        {
            "digest": key.digest,
            "fusion_id": key.fusion_id,
            "bucket": key.bucket,
            "device": key.device,
            "threads": key.threads,
            "versions": key.versions,
        }
        for key in keys
    ]
    upsert(connection, models.DecisionKeyRow, rows, ["digest"], [])


def key_of(row: Any) -> DecisionKey:
    """The decision key of a row that has its columns."""
    return DecisionKey(row.fusion_id, row.bucket, row.device, row.threads, row.versions)


class NodeText(NamedTuple):
    """A node, with texts that describe it to people."""

    fusion_id: str
    form: Mapping[str, Any]
    operations: str
    label: str = ""
    source: str = ""


def put_nodes(connection: Connection, nodes: Iterable[NodeText]) -> None:
    """Store nodes; of nodes that are stored already, texts that are not empty replace the old ones."""
    texts = ("label", "operations", "source")
    rows: dict[str, dict[str, Any]] = {}
    for node in nodes:
        row = rows.setdefault(node.fusion_id, {**dict.fromkeys(texts, ""), "first_seen_at": now()})
        row |= {name: value for name, value in node._asdict().items() if value}
    alike: dict[tuple[str, ...], list[dict[str, Any]]] = {}  # rows, by the names of their known texts
    for row in rows.values():
        alike.setdefault(tuple(name for name in texts if row[name]), []).append(row)
    for known, group in alike.items():
        upsert(connection, models.Node, group, ["fusion_id"], known)


def put_buckets(connection: Connection, buckets: Iterable[tuple[str, Bucket]]) -> dict[tuple[str, str], int]:
    """Store buckets, each with its node's fusion_id; the row ids, by fusion_id and label."""
    rows = {(of, bucket.label): {"fusion_id": of, "label": bucket.label, "ranges": ranges_json(bucket)}
            for of, bucket in buckets}  # fmt: skip
    upsert(connection, models.BucketRow, rows.values(), ["fusion_id", "label"], [])
    table = models.BucketRow
    query = select(table.fusion_id, table.label, table.id).where(table.fusion_id.in_({of for of, _ in rows}))
    found = {(of, label): number for of, label, number in connection.execute(query)}
    return {key: found[key] for key in rows}


def add_event_row(connection: Connection, run_id: int | None, event: Event) -> None:
    values = {"run_id": run_id, "kind": event.kind, "message": clean(event.message), "data": dict(event.data)}
    connection.execute(insert(models.EventRow).values(**values, at=now()))


# ---- values -------------------------------------------------------------------------------------


def clean(text: str) -> str:
    """Text that SQLite can store: file names from the command line may hold bytes that are not UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def key_text(value: Any) -> str:
    """Canonical JSON text, for columns that are part of a key."""
    return json.dumps(value, separators=(",", ":"))


def as_tuples(value: Any) -> Any:
    """Turn lists, which JSON returns, into the tuples that records hold."""
    return tuple(as_tuples(item) for item in value) if isinstance(value, list) else value


def record_of(kind: type[Record], data: Mapping[str, Any]) -> Record:
    """A record from its stored JSON; fields that only another version of the code knows are left out."""
    names = {item.name for item in fields(kind)}
    return kind(**{name: as_tuples(value) for name, value in data.items() if name in names})


def ranges_json(bucket: Bucket) -> list[list[int]]:
    return [list(pair) for pair in bucket.ranges]


def stored_bucket(ranges: list[Any]) -> Bucket:
    return Bucket(tuple((stored_number(low), stored_number(high)) for low, high in ranges))


def shapes_json(shapes: Iterable[ObservedShape]) -> list[Any]:
    return [[list(shape.symbol_values), shape.calls] for shape in shapes]


def shapes_of(data: list[Any]) -> tuple[ObservedShape, ...]:
    return tuple(ObservedShape(tuple(map(stored_number, values)), stored_number(calls)) for values, calls in data)
