"""The daemons' files beside a store: who serves it, under which lock, and where they log.

In: settings, which name the store. Out: process numbers of daemons that run, and locks.
Guarantee: one daemon a store for each kind of request that one process can serve: torch's version and ours, the
processor and how many cores of it may be used. Two of different kinds never write the same decision. Files are this
user's own, never behind links, in a folder that nobody else can write to (`private_files`); a process number is
believed only while the process that wrote it runs.

``.daemon-KIND.lock`` and ``.daemon-KIND.pid``, one of each for a kind; ``.daemon.log``; ``.start.lock``; ``.urgent`` is
touched by scripts that wait.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from filelock import FileLock, Timeout

from autofuse.codegen.version import versions
from autofuse.daemon.process_id import ProcessId, process_id
from autofuse.errors import DaemonError
from autofuse.ir.device import cpu_device
from autofuse.private_files import Untrusted, check_beside, make_folder, open_own, read_own
from autofuse.settings.layers import Settings

_KIND = re.compile(r"[0-9a-f]{8}")


class DaemonFiles:
    """The files beside one store."""

    def __init__(self, settings: Settings) -> None:
        self.store = Path(settings.run.store)
        self.log = self.beside(".daemon.log")
        self.urgent = self.beside(".urgent")

    @functools.cached_property
    def kind(self) -> str:
        """A hash of what a daemon and its requests must share: the processor, its usable cores and the versions."""
        return hashlib.sha256(f"{cpu_device().key} {versions()}".encode()).hexdigest()[:8]

    def beside(self, suffix: str) -> Path:
        """The file of that suffix, such as ".daemon.log"."""
        return self.store.with_name(self.store.name + suffix)

    def _lock_path(self, kind: str) -> Path:
        return self.beside(f".daemon-{kind}.lock")

    def pid_path(self, kind: str) -> Path:
        """The file in which the daemon of a kind writes down which process it is."""
        return self.beside(f".daemon-{kind}.pid")

    def check(self) -> None:
        """Make the store's folder if it is missing. Raises DaemonError where others may write there, and OSError."""
        try:
            if not os.path.lexists(self.store.parent):
                make_folder(self.store.parent)
            names = [".daemon.log", ".start.lock", ".urgent", f".daemon-{self.kind}.lock", f".daemon-{self.kind}.pid"]
            check_beside(self.store, names)
        except Untrusted as error:
            raise DaemonError(f"expected a folder that only this user may write to, found: {error}") from error

    # ---- who runs ---------------------------------------------------------------------------------------

    def announce(self, pid: int) -> None:
        """Write down that process ``pid``, ours or a new one, serves the store. Raises OSError and Untrusted."""
        path = self.pid_path(self.kind)
        fresh = path.with_name(path.name + ".new")
        with os.fdopen(open_own(fresh, os.O_WRONLY | os.O_TRUNC), "w") as file:
            json.dump(asdict(process_id(pid)), file)
        os.replace(fresh, path)

    def withdraw(self) -> None:
        self.pid_path(self.kind).unlink(missing_ok=True)

    def running(self, kind: str | None = None) -> ProcessId | None:
        """The running daemon of a kind (default: ours), or None. Takes no lock, so it does not disturb a start."""
        with contextlib.suppress(OSError, ValueError, TypeError, Untrusted):
            check_beside(self.store, ())
            found = ProcessId(**json.loads(read_own(self.pid_path(kind or self.kind))))
            return found if found.is_alive else None
        return None

    def all_running(self) -> list[ProcessId]:
        """The running daemons of all kinds."""
        named = re.compile(re.escape(self.store.name) + r"\.daemon-([0-9a-f]{8})\.pid")
        kinds: list[str] = []
        with contextlib.suppress(OSError):
            matches = map(named.fullmatch, os.listdir(self.store.parent))
            kinds = sorted(match[1] for match in matches if match is not None)
        return [found for kind in kinds if (found := self.running(kind)) is not None]

    # ---- locks ------------------------------------------------------------------------------------------

    def lock(self) -> FileLock:
        """The lock that a daemon holds while it serves. Entering raises Timeout where another process holds it."""
        return FileLock(self._lock_path(self.kind), timeout=1.0, mode=0o600)

    def start_lock(self, timeout: float) -> FileLock:
        """The lock that a process holds while it starts a daemon; ``timeout`` in seconds."""
        return FileLock(self.beside(".start.lock"), timeout=timeout, mode=0o600)

    def is_served(self, kind: str) -> bool:
        """Whether a daemon of this kind holds its lock, here or in another container."""
        path = self._lock_path(kind)
        if not _KIND.fullmatch(kind) or not path.exists():
            return False
        try:
            with FileLock(path, timeout=0, mode=0o600):
                return False
        except (Timeout, OSError, NotImplementedError):
            return True

    @contextlib.contextmanager
    def open_log(self, most_bytes: int) -> Iterator[int]:
        """Open the log for appending; a log longer than ``most_bytes`` is moved aside. Raises OSError and Untrusted."""
        with contextlib.suppress(FileNotFoundError):
            found = os.lstat(self.log)
            if stat.S_ISREG(found.st_mode) and found.st_size > most_bytes:
                os.replace(self.log, self.log.with_name(self.log.name + ".old"))
        descriptor = open_own(self.log, os.O_WRONLY | os.O_APPEND)
        try:
            yield descriptor
        finally:
            os.close(descriptor)
