"""The files of Triton's own cache in the store: what its compiler would otherwise keep in ``~/.triton``.

In: files under the key that Triton gives a kernel. Out: the same, or fewer; one that is missing is compiled again.
Guarantee: bytes are handed out only if their seal holds (`seals`). They share the bound of the kernels' binaries, and
all files of a key are evicted together (``kernel_cache.evict``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sqlalchemy import Connection, func, select, update

from autofuse.db import models
from autofuse.db.base import add_event_row, now, upsert
from autofuse.db.seals import is_sealed, seal_of
from autofuse.ir.records import Event

TABLE = models.TritonFile


def put(connection: Connection, key: str, files: Mapping[str, bytes]) -> None:
    """Store files of a kernel, in addition to those that are stored."""
    at = now()
    rows = [
        {
            "key": key,
            "name": name,
            "data": data,
            "checksum": seal_of(_name(key, name), data),
            "size_bytes": len(data),
            "used_at": at,
        }
        for name, data in files.items()
    ]
    upsert(connection, TABLE, rows, ["key", "name"], ["data", "checksum", "size_bytes", "used_at"])


def get(connection: Connection, key: str) -> tuple[dict[str, bytes], list[str]]:
    """The sound files of a kernel, and the names of the damaged ones."""
    sound: dict[str, bytes] = {}
    damaged: list[str] = []
    for row in connection.execute(select(TABLE).where(TABLE.key == key, TABLE.data.is_not(None))):
        if is_sealed(_name(key, row.name), row.data, row.checksum):
            sound[row.name] = row.data
        else:
            damaged.append(row.name)
    return sound, damaged


def last_use(connection: Connection, key: str) -> float | None:
    """When a use of the key was last noted."""
    return connection.execute(select(func.max(TABLE.used_at)).where(TABLE.key == key)).scalar()


def touch(connection: Connection, key: str) -> None:
    """Note a use, which keeps the files from eviction."""
    connection.execute(update(TABLE).where(TABLE.key == key).values(used_at=now()))


def note_damage(connection: Connection, key: str, names: Sequence[str]) -> None:
    """Drop files that must not be used, and record it."""
    damaged = (TABLE.key == key) & TABLE.name.in_(names)
    connection.execute(update(TABLE).where(damaged).values(data=None, size_bytes=0))
    what = (
        f"{', '.join(names)} of Triton's cache are not as this user's autofuse wrote them here; they are compiled again"
    )
    add_event_row(connection, None, Event("damaged_kernel", what, {"key": key}))


def drop(connection: Connection, keys: Sequence[str]) -> None:
    """Evict all files of these keys."""
    connection.execute(update(TABLE).where(TABLE.key.in_(keys)).values(data=None, size_bytes=0))


def _name(key: str, name: str) -> str:
    return f"triton {key} {name}"
