"""Generated kernels in the store: source and binary under the digest of their compile key.

In: ``KernelRecord``. Out: the same record, or a miss; a miss only ever costs a compilation.
Guarantee: a binary is handed out only if its seal holds (`seals`). Binaries and the files of Triton's cache together
stay within a bound, the least recently used ones going first; sources are kept for good, because people read them.
"""

from __future__ import annotations

from sqlalchemy import Connection, func, literal, select, union_all, update

from autofuse.db import models, triton_files
from autofuse.db.base import add_event_row, now, upsert
from autofuse.db.rows import KernelSource
from autofuse.db.seals import is_sealed, seal_of
from autofuse.ir.records import CompileKey, Event, KernelRecord

DEFAULT_LIMIT_BYTES = 512 << 20  # some ten thousand kernels of 16 to 60 kB
TOUCH_SECONDS = 600.0  # a use is noted at most this often, so that reading kernels seldom writes


def put(connection: Connection, record: KernelRecord, limit_bytes: int) -> None:
    """Store a kernel, or refresh a damaged or evicted one, then evict down to ``limit_bytes``."""
    at = now()
    row = {
        "digest": record.key.digest,
        "source_hash": record.key.source_hash,
        "compiler": record.key.compiler,
        "flags": record.key.flags,
        "target": record.key.target,
        "name": record.name,
        "source": record.source,
        "binary": record.binary,
        "checksum": seal_of(_name(record.key.digest, record.name), record.binary),
        "size_bytes": len(record.binary),
        "created_at": at,
        "used_at": at,
        "resources": dict(record.resources) or None,
    }
    upsert(
        connection,
        models.Kernel,
        [row],
        ["digest"],
        ["name", "binary", "checksum", "size_bytes", "used_at", "resources"],
    )
    evict(connection, limit_bytes, keep=record.key.digest)


def get(connection: Connection, digest: str) -> tuple[KernelRecord | None, str]:
    """The kernel and "", or None and what is wrong with it ("" where it is unknown or evicted)."""
    row = connection.execute(select(models.Kernel).where(models.Kernel.digest == digest)).one_or_none()
    if row is None or row.binary is None:
        return None, ""
    if not is_sealed(_name(digest, row.name), row.binary, row.checksum):
        return None, f"kernel {row.name} is not as this user's autofuse wrote it here: damaged, or of a copied store"
    key = CompileKey(row.source_hash, row.compiler, row.flags, row.target)
    if key.digest != digest:
        return None, f"kernel {row.name} does not belong to its key"
    return KernelRecord(key, row.name, row.source, row.binary, row.resources or {}), ""


def _name(digest: str, name: str) -> str:
    """The name under which a kernel's binary is sealed: its key's digest and the symbol that a profiler shows."""
    return f"kernel {digest} {name}"


def needs_touch(connection: Connection, digest: str) -> bool:
    """Whether the last noted use of a kernel is long ago."""
    used_at = connection.execute(select(models.Kernel.used_at).where(models.Kernel.digest == digest)).scalar()
    return used_at is not None and now() - used_at > TOUCH_SECONDS


def touch(connection: Connection, digest: str) -> None:
    """Note a use, which keeps a kernel from eviction."""
    connection.execute(update(models.Kernel).where(models.Kernel.digest == digest).values(used_at=now()))


def note_damage(connection: Connection, digest: str, problem: str) -> None:
    """Drop a binary that must not be loaded, and record why."""
    _drop_binaries(connection, [digest])
    add_event_row(connection, None, Event("damaged_kernel", f"{problem}; it is tuned again", {"digest": digest}))


def source(connection: Connection, digest: str) -> KernelSource | None:
    """A kernel for people to read; ``digest`` may be a prefix."""
    table = models.Kernel
    columns = (
        table.source_hash, table.compiler, table.flags, table.target, table.name, table.source, table.size_bytes,
        table.resources,
    )  # fmt: skip
    query = select(*columns).where(table.digest.startswith(digest, autoescape=True))
    row = connection.execute(query.limit(1)).one_or_none()
    if row is None:
        return None
    key = CompileKey(row.source_hash, row.compiler, row.flags, row.target)
    return KernelSource(key, row.name, row.source, row.size_bytes, row.resources or {})


def size_bytes(connection: Connection) -> int:
    """Bytes of all binaries and of Triton's files together."""
    tables = (models.Kernel, models.TritonFile)
    return sum(connection.execute(select(func.coalesce(func.sum(t.size_bytes), 0))).scalar_one() for t in tables)


def evict(connection: Connection, limit_bytes: int, keep: str) -> None:
    """Evict the least recently used binaries and Triton files beyond the bound; ``keep``: a digest or key."""
    excess = size_bytes(connection) - limit_bytes
    if excess <= 0:
        return
    kernel, file = models.Kernel, models.TritonFile
    kernels = select(kernel.digest.label("key"), kernel.size_bytes, kernel.used_at, literal(True).label("is_kernel"))
    files = select(
        file.key, func.sum(file.size_bytes).label("size_bytes"), func.max(file.used_at).label("used_at"), literal(False)
    )
    held = union_all(kernels, files.group_by(file.key)).subquery()
    oldest = select(held).where(held.c.size_bytes > 0, held.c.key != keep).order_by(held.c.used_at, held.c.key)
    victims: dict[bool, list[str]] = {True: [], False: []}
    for row in connection.execute(oldest):
        if excess <= 0:
            break
        victims[bool(row.is_kernel)].append(row.key)
        excess -= row.size_bytes
    _drop_binaries(connection, victims[True])
    triton_files.drop(connection, victims[False])


def _drop_binaries(connection: Connection, digests: list[str]) -> None:
    connection.execute(update(models.Kernel).where(models.Kernel.digest.in_(digests)).values(binary=None, size_bytes=0))
