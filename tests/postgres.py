"""A PostgreSQL server for tests: Debian's, on a free port of the loopback, in a folder of its own.

In: nothing. Out: a `Postgres` with databases made from one that `autofuse fleet upgrade` has prepared. Where it is not
installed, tests that need it are skipped; in continuous integration they fail.
"""

from __future__ import annotations

import contextlib
import glob
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import psycopg
import pytest

from autofuse.db.fleet_server import FleetServer

OWNER = "owner"  # of the databases; not PostgreSQL's superuser
PASSWORD = "w0rd"  # of every role; connections over TCP need it
SETTINGS = """
listen_addresses = '127.0.0.1'
fsync = off
synchronous_commit = off
full_page_writes = off
shared_buffers = 16MB
max_connections = 40
log_min_messages = warning
"""


def programs() -> Path | None:
    """The folder of PostgreSQL's programs, None where it is not installed."""
    found = shutil.which("initdb")
    folders = [Path(found).parent] if found else []
    folders += [Path(path).parent for path in sorted(glob.glob("/usr/lib/postgresql/*/bin/initdb"))[::-1]]
    return next((folder for folder in folders if (folder / "postgres").exists()), None)


def need_postgres() -> Path:
    folder = programs()
    if folder is None:
        told = "PostgreSQL is not installed; type: apt-get install postgresql"
        if os.environ.get("CI"):
            pytest.fail(told)
        pytest.skip(told)
    return folder


class Postgres:
    """A server and its databases."""

    def __init__(self, folder: Path, programs: Path, settings: str = SETTINGS) -> None:
        self.folder = folder
        self._settings = settings
        self.data = folder / "data"
        self._programs = programs
        self._user = _unprivileged()
        self._databases = 0
        self._process: subprocess.Popen[bytes] | None = None
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]

    def make(self) -> None:
        """Make the files, the owner's role and an upgraded database that others are copied from; leave it running."""
        if self._user is not None:
            os.chown(self.folder, self._user.pw_uid, self._user.pw_gid)
        secret = self.folder / "password"
        secret.write_text(PASSWORD)
        secret.chmod(0o644)
        options = [
            "--no-sync",
            "-U",
            "postgres",
            "-A",
            "scram-sha-256",
            f"--pwfile={secret}",
            "-E",
            "UTF8",
            "--no-locale",
        ]
        done = self._run("initdb", "-D", str(self.data), *options)
        assert done.returncode == 0, done.stdout
        with (self.data / "postgresql.conf").open("a") as file:
            file.write(f"{self._settings}port = {self.port}\nunix_socket_directories = '{self.folder}'\n")
        self.start()
        self.sql(f"CREATE ROLE {OWNER} LOGIN PASSWORD '{PASSWORD}'", f"CREATE DATABASE made OWNER {OWNER}")
        with contextlib.closing(FleetServer(self.url("made"))) as server:
            assert server.upgrade() and not server.upgrade()

    @property
    def process(self) -> psutil.Process:
        """The one that starts all others of the server."""
        assert self._process is not None
        return psutil.Process(self._process.pid)

    def start(self) -> None:
        self._process = subprocess.Popen(
            [str(self._programs / "postgres"), "-D", str(self.data)],
            stderr=(self.folder / "log").open("ab"),
            **self._as_user(),
        )
        deadline = time.monotonic() + 30.0
        while time.monotonic() < deadline:
            with contextlib.suppress(psycopg.OperationalError):
                self.sql("SELECT 1")
                return
            time.sleep(0.05)
        raise AssertionError((self.folder / "log").read_text())

    def kill(self) -> None:
        """End it at once, as a crash would."""
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait()
            self._process = None

    @contextlib.contextmanager
    def halted(self) -> Iterator[None]:
        """All of its processes stand still; the machine goes on answering for its sockets."""
        processes = [self.process, *self.process.children(recursive=True)]
        for process in processes:
            process.suspend()
        try:
            yield
        finally:
            for process in processes:
                process.resume()

    def url(self, database: str, user: str = OWNER, password: str = PASSWORD) -> str:
        return f"postgresql+psycopg://{user}:{password}@127.0.0.1:{self.port}/{database}"

    def socket_url(self, database: str) -> str:
        """The same over a socket in a folder, which a process without any network reaches too."""
        return f"postgresql+psycopg://{OWNER}:{PASSWORD}@/{database}?host={self.folder}&port={self.port}"

    def new_database(self, template: str = "made") -> str:
        """A database of its own; its name."""
        self._databases += 1
        name = f"fleet{self._databases}"
        self.sql(f"CREATE DATABASE {name} TEMPLATE {template} OWNER {OWNER}")
        return name

    def sql(self, *statements: str, database: str = "postgres") -> list[tuple[object, ...]]:
        """Run statements as the superuser; the rows of the last one."""
        place = f"host=127.0.0.1 port={self.port} user=postgres password={PASSWORD} dbname={database}"
        rows: list[tuple[object, ...]] = []
        with psycopg.connect(place, autocommit=True) as connection:
            for statement in statements:
                cursor = connection.execute(statement)
                rows = cursor.fetchall() if cursor.description else []
        return rows

    @contextlib.contextmanager
    def offering_tls(self) -> Iterator[Path]:
        """A certificate for localhost, which the server shows meanwhile."""
        key, made = self.data / "server.key", self.data / "server.crt"
        names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-days", "2"]
        kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
        command = ["openssl", "req", "-new", "-x509", "-nodes", *kind, *names, "-keyout", str(key), "-out", str(made)]
        subprocess.run(command, check=True, capture_output=True)
        self.own(key, made)
        self.sql("ALTER SYSTEM SET ssl = on", "SELECT pg_reload_conf()")
        try:
            yield made
        finally:
            self.sql("ALTER SYSTEM RESET ssl", "SELECT pg_reload_conf()")

    def own(self, *paths: Path) -> None:
        """Give files to the user that the server runs as, and to nobody else."""
        for path in paths:
            if self._user is not None:
                os.chown(path, self._user.pw_uid, self._user.pw_gid)
            path.chmod(0o600)

    def _run(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command: Sequence[str] = [str(self._programs / program), *arguments]
        return subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, **self._as_user()
        )

    def _as_user(self) -> dict[str, object]:
        """It does not run as root."""
        place: dict[str, object] = {"cwd": self.folder, "stdin": subprocess.DEVNULL}
        if self._user is None:
            return place
        return {**place, "user": self._user.pw_uid, "group": self._user.pw_gid, "extra_groups": []}


def _unprivileged() -> pwd.struct_passwd | None:
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    return None


def _memory() -> str | None:
    """A folder in memory, if there is room: to delete a session's hundred databases from a disk took 11 to 44 s."""
    folder = Path("/dev/shm")
    is_roomy = folder.is_dir() and shutil.disk_usage(folder).free > 4 << 30
    return str(folder) if is_roomy and psutil.virtual_memory().available > 8 << 30 else None


@contextlib.contextmanager
def running_postgres(settings: str = SETTINGS) -> Iterator[Postgres]:
    """A server for the time of a test session. ``settings``: lines of its configuration."""
    found = need_postgres()
    with tempfile.TemporaryDirectory(prefix="autofuse-postgres-", dir=_memory()) as folder:
        Path(folder).chmod(0o755)
        server = Postgres(Path(folder), found, settings)
        try:
            server.make()
            yield server
        finally:
            server.kill()
