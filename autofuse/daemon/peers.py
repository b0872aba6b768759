"""Neighbours: the scripts and daemons of one user on one machine, whatever their stores.

In: a private folder. Out: which scripts run and for how long they are expected to, what daemons have taken from them so
far, and whose turn it is to work beside them.
Guarantee: one daemon at a time has the turn, and that of one that died is free, since the kernel unlocks it; a script
that was killed is told from one that runs by its process; no folder that others may write to is used, nor one behind a
link. Never imports torch: scripts use it too.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from autofuse.daemon.process_id import ProcessId, start_ticks, this_machine
from autofuse.settings.layers import Settings


@dataclass(frozen=True)
class Script:
    """A script that runs under autofuse."""

    pid: int
    ticks: float  # clock ticks at its process's start, to tell it from a later process of the same number
    began: float  # the run's start, UTC epoch seconds
    expected_seconds: float  # how long the last run of the same command took, 0.0 where there was none
    spent: float  # CPU seconds that daemons had taken when it began


def peers_folder(settings: Settings) -> Path:
    """The folder that all scripts and daemons of this user share; one beside the store where none can be trusted.

    Raises OSError.
    """
    name = f"autofuse-{os.getuid()}"
    chosen = settings.tuner.shared_folder
    for folder in [chosen] if chosen is not None else [Path("/run/user", str(os.getuid()), name), Path("/tmp", name)]:
        with contextlib.suppress(OSError):
            _make_private(folder)
            return folder
    store = Path(settings.run.store)
    folder = store.with_name(store.name + ".neighbours")
    store.parent.mkdir(parents=True, exist_ok=True)
    _make_private(folder)
    return folder


def _make_private(folder: Path) -> None:
    """Make a folder for this user alone. Raises OSError where that fails, it is a link, or others may use it."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"expected a folder that is only ours, found {folder}")


class Peers:
    """One process's view of the folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._turn: int | None = None  # the locked file's descriptor, while we have the turn
        self._own: Path | None = None

    # ---- scripts --------------------------------------------------------------------------------

    def announce(self, expected_seconds: float, began: float | None = None) -> Script:
        """Announce that this process runs a script; ``began`` in UTC epoch seconds, now if None. Raises OSError."""
        ticks = start_ticks(os.getpid())
        script = Script(os.getpid(), ticks, time.time() if began is None else began, expected_seconds, self.spent())
        path = self._folder / f"script-{script.pid}"
        self._write(path, json.dumps(asdict(script)))
        self._own = path
        return script

    def withdraw(self) -> None:
        """Withdraw the announcement: the script has ended."""
        if self._own is not None:
            self._own.unlink(missing_ok=True)
            self._own = None

    def scripts(self) -> list[Script]:
        """The scripts that run; files that killed scripts have left are removed."""
        found = []
        with contextlib.suppress(OSError):
            for path in self._folder.glob("script-*"):
                script = _read_script(path)
                if script is not None and _runs(script):
                    found.append(script)
                else:
                    path.unlink(missing_ok=True)
        return found

    # ---- what daemons took ----------------------------------------------------------------------

    def spent(self) -> float:
        """CPU seconds that all daemons have taken beside scripts so far; begins anew at 0 where its file is lost."""
        try:
            return float((self._folder / "spent").read_text())
        except (OSError, ValueError):
            return 0.0

    def add_spent(self, seconds: float) -> None:
        """Add to `spent`; only the process that has the turn may call this."""
        with contextlib.suppress(OSError):
            self._write(self._folder / "spent", repr(self.spent() + seconds))

    # ---- turns ----------------------------------------------------------------------------------

    @property
    def has_turn(self) -> bool:
        return self._turn is not None

    def take_turn(self) -> bool:
        """Take the turn to work beside scripts if it is free; True if we have it, then until `give_turn`."""
        if self._turn is not None:
            return True
        try:
            descriptor = os.open(self._folder / "turn", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError:
            return True  # the folder has vanished: nobody else can have the turn either
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return False
        self._turn = descriptor
        return True

    def give_turn(self) -> None:
        if self._turn is not None:
            os.close(self._turn)
            self._turn = None

    def _write(self, path: Path, text: str) -> None:
        fresh = path.with_name(f".{path.name}.{os.getpid()}")
        fresh.write_text(text)
        os.replace(fresh, path)


def _read_script(path: Path) -> Script | None:
    try:
        values = json.loads(path.read_text())
        return Script(int(values.pop("pid")), **{name: float(value) for name, value in values.items()})
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _runs(script: Script) -> bool:
    return script.ticks >= 0 and ProcessId(script.pid, int(script.ticks), this_machine()).is_alive
