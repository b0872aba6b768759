"""The server as a daemon finds it: right, wrong, down, newer, of others; one line says what to do."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from store_records import decision, key, request

from autofuse.cli.app import parse
from autofuse.db.connection import HEAD
from autofuse.db.fleet_queue import FleetQueue
from autofuse.db.fleet_retention import Bounds, FleetRetention
from autofuse.db.fleet_server import FleetServer
from autofuse.db.proposals import Proposal
from autofuse.db.store import Store
from autofuse.doctor import Finding, examine
from autofuse.errors import FleetError
from autofuse.settings.layers import load
from tests.postgres import OWNER, PASSWORD, Postgres


def refusal(url: str) -> str:
    """The one line that a daemon would say."""
    with pytest.raises(FleetError) as caught, contextlib.closing(FleetServer(url)) as server:
        server.check()
    line = str(caught.value)
    assert "\n" not in line and PASSWORD not in line and "this host goes on with its own store" in line
    return line


@pytest.mark.parametrize(
    "url",
    [
        "postgres://owner:w0rd@db/fleet",
        "postgresql://owner:w0rd@db/fleet",
        "sqlite:///x",
        "db:5432/fleet",
        "postgresql+psycopg://owner:w0rd@db:port/fleet",
        "postgresql+psycopg://owner:w0rd@db",
    ],
)
def test_a_url_that_no_server_can_have(url: str) -> None:
    line = refusal(url)
    assert line.startswith("expected fleet.url=postgresql+psycopg://USER@HOST/DATABASE, found ")


def test_without_psycopg_the_line_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['psycopg'] = None\n"
        "from autofuse.db.fleet_server import FleetServer\n"
        "from autofuse.errors import FleetError\n"
        "try: FleetServer('postgresql+psycopg://u@h/d')\n"
        "except FleetError as error: print(error, error.is_lasting)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'autofuse[fleet]'" in done.stdout and done.stdout.strip().endswith("True")


def test_a_server_that_is_not_there() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert "Connection refused" in refusal(f"postgresql+psycopg://owner:w0rd@127.0.0.1:{port}/fleet")


def test_a_server_that_keeps_silent_is_not_waited_for() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        began = time.monotonic()
        line = refusal(f"postgresql+psycopg://owner:w0rd@127.0.0.1:{silent.getsockname()[1]}/fleet")
    assert "timeout" in line and time.monotonic() - began < 30.0


def test_wrong_passwords_databases_and_roles(postgres: Postgres) -> None:
    made = postgres.new_database()
    wrong = refusal(postgres.url(made, password="wr0ng"))
    assert "mend the password in ~/.pgpass or PGPASSWORD" in wrong and "wr0ng" not in wrong
    assert "make the database, or name another one" in refusal(postgres.url("nowhere"))
    assert "mend the password" in refusal(postgres.url(made, user="nobody"))


def test_the_password_may_come_from_where_postgresql_looks(
    postgres: Postgres, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    url = postgres.url(postgres.new_database()).replace(f":{PASSWORD}@", "@")
    assert "no password supplied" in refusal(url)
    with monkeypatch.context() as environment, contextlib.closing(FleetServer(url)) as server:
        environment.setenv("PGPASSWORD", PASSWORD)
        assert len(server.check()) == 32
    own = tmp_path / "pgpass"
    own.write_text(f"127.0.0.1:{postgres.port}:*:{OWNER}:{PASSWORD}\n")
    own.chmod(0o600)
    monkeypatch.setenv("PGPASSFILE", str(own))
    with contextlib.closing(FleetServer(url)) as server:
        assert len(server.check()) == 32


def test_schemas_that_are_not_ours(postgres: Postgres) -> None:
    empty = postgres.url(postgres.new_database("template1"))
    assert "found no tables; as the owner of its tables, type: autofuse fleet upgrade" in refusal(empty)
    name = postgres.new_database()
    newer = postgres.url(name)
    postgres.sql("UPDATE alembic_version SET version_num = '0999'", database=name)
    assert f"expected schema {HEAD} or older" in refusal(newer)
    assert "found schema 0999, of a newer autofuse; upgrade with: pip install --upgrade autofuse" in refusal(newer)
    with contextlib.closing(FleetServer(newer)) as server, pytest.raises(FleetError, match="0999"):
        server.upgrade()
    foreign = postgres.new_database("template1")
    postgres.sql("CREATE TABLE alembic_version (version_num text)", database=foreign)
    assert "found tables of another program" in refusal(postgres.url(foreign))
    with contextlib.closing(FleetServer(postgres.url(foreign))) as server, pytest.raises(FleetError, match="another"):
        server.upgrade()


def doctors_view() -> Finding:
    (found,) = examine(load(), only=("fleet",))
    return found


def test_upgrade_and_status_from_the_command_line(
    postgres: Postgres, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    url = postgres.url(postgres.new_database("template1"))
    monkeypatch.setenv("AUTOFUSE_FLEET_URL", url)
    assert not doctors_view().ok and "autofuse fleet upgrade" in doctors_view().found
    assert parse(["fleet", "status"]) == 1 and "autofuse fleet upgrade" in capfd.readouterr().err
    assert parse(["fleet", "upgrade"]) == 0 and parse(["fleet", "upgrade"]) == 0
    assert capfd.readouterr().out.count(f"{OWNER}:***@") == 2
    with contextlib.closing(FleetServer(url)) as server:
        FleetQueue(server).add([request()])
        retention = FleetRetention(server, Bounds(30.0, 10, 10))
    monkeypatch.setenv("AUTOFUSE_STORE", str(tmp_path / "store.db"))
    with Store.open(tmp_path / "store.db") as store:
        store.proposals.put({key(name * 64): Proposal.of(decision(name * 64)) for name in "abc"})
        store.proposals.close(key(), "overridden", "")
    assert doctors_view().ok and "owner:***@127.0.0.1" in doctors_view().found
    assert parse(["fleet", "status"]) == 0
    told = capfd.readouterr().out
    assert "requests: 1 wait, 0 in work, 0 done, 0 failed" in told
    assert "looked through for what nobody uses: never: no daemon's role may delete rows" in told
    assert "proposals here: 0 adopted, 1 overridden, 0 refused, 2 not asked for yet" in told
    assert retention.begin() and parse(["fleet", "status"]) == 0
    assert "looked through for what nobody uses: 0.0 h ago" in capfd.readouterr().out
    assert parse(["config", "fleet"]) == 0 and parse(["config", "--json"]) == 0 and parse(["config"]) == 0
    assert PASSWORD not in capfd.readouterr().out
    monkeypatch.setenv("AUTOFUSE_FLEET_URL", "")
    assert doctors_view().ok and doctors_view().found.startswith("none;")
    assert parse(["fleet", "status"]) == 2 and "fleet.url" in capfd.readouterr().err


def test_a_connection_that_was_lost_is_made_again(postgres: Postgres) -> None:
    with contextlib.closing(FleetServer(postgres.url(postgres.new_database()))) as server:
        name = server.check()
        postgres.sql(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = '{OWNER}'")
        with pytest.raises(FleetError):
            server.check()
        assert server.check() == name


# ---- TLS ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(postgres: Postgres) -> Iterator[Path]:
    with postgres.offering_tls() as made:
        yield made


def test_certificates_that_do_not_verify(postgres: Postgres, certificate: Path, tmp_path: Path) -> None:
    url = postgres.url(postgres.new_database()) + "?sslmode=verify-full&sslrootcert="
    own = tmp_path / "root.crt"
    own.write_bytes(certificate.read_bytes())
    named = url.replace("127.0.0.1", "localhost")
    with contextlib.closing(FleetServer(f"{named}{own}")) as server:
        server.check()
        with server.read() as connection:
            query = "SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()"
            assert connection.exec_driver_sql(query).scalar_one() is True
    assert "name the server in fleet.url as its certificate does" in refusal(f"{url}{own}")
    other = tmp_path / "other.crt"
    command = ["openssl", "req", "-new", "-x509", "-nodes", "-newkey", "rsa:2048", "-subj", "/CN=other", "-keyout"]
    subprocess.run([*command, str(tmp_path / "other.key"), "-out", str(other)], check=True, capture_output=True)
    line = refusal(f"{named}{other}")
    assert "certificate verify failed" in line and "name the authority that signed it with ?sslrootcert=FILE" in line
    assert "?sslrootcert=FILE" in refusal(f"{named}{tmp_path / 'none.crt'}")
