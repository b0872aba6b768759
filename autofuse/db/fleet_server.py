"""A fleet's server: a PostgreSQL database with the tables of a store, to which many hosts' daemons speak.

In: `fleet.url`. Out: a `FleetServer`, on which the parts of a store work as they do on a file.
Guarantee: connecting, a statement and a lock each have a timeout. Only a server that is halted while its machine goes
on keeps a caller waiting, so callers have a thread of their own. Writers take turns, so ids of rows become visible in
their order, and a reader that asks for what is newer misses none; only `share` and `append` are beside them. Whatever
goes wrong is a `FleetError` of one line, without a password, that says what to do. Only `upgrade` changes the schema.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, extract, func, make_url, select, text
from sqlalchemy.exc import (
    ArgumentError,
    DBAPIError,
    InterfaceError,
    NoSuchModuleError,
    OperationalError,
    SQLAlchemyError,
)

from autofuse.db import models
from autofuse.db.base import upsert
from autofuse.db.connection import APPLICATION_ID, HEAD, REVISIONS
from autofuse.errors import FleetError
from autofuse.settings.secrets import masked

DRIVER = "postgresql+psycopg"
STATEMENT_SECONDS = 5.0  # for one statement, the wait for a lock included
LOCAL = "this host goes on with its own store"
# The server's, since clocks of hosts may differ; when a statement began: an index can serve what does not change in it.
CLOCK = extract("epoch", func.statement_timestamp())
ABOUT_ITSELF = ""  # in the place of a server's name in `FleetMark`
_NAME = "name"
_APPENDING = APPLICATION_ID + 1  # the lock of those who append; APPLICATION_ID is that of writers
_GUIDE = "docs/guides/fleet.md"
_UPGRADE = "autofuse fleet upgrade"
NO_ANSWER = "to answer, found"  # in the message where the server was not reached

# Part of a message of libpq or of the server, and what to do about it.
_ADVICE = (
    ("does not match host name", "name the server in fleet.url as its certificate does"),
    ("root certificate file", "name the authority's certificate with ?sslrootcert=FILE in fleet.url"),
    ("certificate verify failed", "name the authority that signed it with ?sslrootcert=FILE in fleet.url"),
    ("does not support SSL", "let the server offer TLS, or change sslmode in fleet.url"),
    ("password authentication failed", "mend the password in ~/.pgpass or PGPASSWORD"),
    ("no password supplied", "put the password into ~/.pgpass or PGPASSWORD"),
    ("permission denied", f"grant this role the rights that {_GUIDE} lists"),
    ("role ", f"make the role as {_GUIDE} shows"),
    ("database ", "make the database, or name another one in fleet.url"),
    ("no pg_hba.conf entry", "allow this host and role in the server's pg_hba.conf"),
)


class FleetServer:
    """A connection to a server, made when it is first used and again after it was lost."""

    readonly = False

    def __init__(self, url: str, connect_seconds: int = 2) -> None:
        """Nothing is sent yet. Raises FleetError for a URL that no server can have, and without psycopg."""
        self.path = masked(url)
        self._engine = _engine(url, connect_seconds)

    def read(self) -> contextlib.AbstractContextManager[Connection]:
        """A transaction that sees one consistent state."""
        return self._transaction({"isolation_level": "REPEATABLE READ", "postgresql_readonly": True})

    @contextlib.contextmanager
    def write(self) -> Iterator[Connection]:
        """A transaction that commits at its end, or changes nothing if it fails; one at a time of all hosts."""
        with self.share() as connection:
            connection.execute(select(func.pg_advisory_xact_lock(APPLICATION_ID)))
            yield connection

    def share(self) -> contextlib.AbstractContextManager[Connection]:
        """A transaction beside others, which locks rows by itself."""
        return self._transaction({})

    @contextlib.contextmanager
    def append(self) -> Iterator[Connection]:
        """A transaction beside others that adds rows whose order nobody asks for; what they name stays meanwhile."""
        with self.share() as connection:
            connection.execute(select(func.pg_advisory_xact_lock_shared(_APPENDING)))
            yield connection

    def check(self) -> str:
        """The server's name, which is its own for good. Raises FleetError where its schema is not this version's."""
        with self.read() as connection:
            found = _found_revision(connection)
            if found != HEAD:
                raise self._schema_error(found)
            table = models.FleetMark
            query = select(table.value).where(table.server == ABOUT_ITSELF, table.name == _NAME)
            return str(connection.execute(query).scalar_one())

    def upgrade(self) -> bool:
        """Make the tables, or bring those of an older version up to date; whether anything had to be done.

        Raises FleetError; a newer schema and another program's tables stay as they are.
        """
        with self.write() as connection:
            found = _found_revision(connection)
            if found == HEAD:
                return False
            if found is None:
                _create_schema(connection)
            elif found in REVISIONS:
                from autofuse.db.migrate import upgrade  # Alembic takes 0.15 s

                upgrade(connection)
            else:
                raise self._schema_error(found)
            mark = {"server": ABOUT_ITSELF, "name": _NAME, "value": secrets.token_hex(16)}
            upsert(connection, models.FleetMark, [mark], ["server", "name"], [])
            return True

    def close(self) -> None:
        self._engine.dispose()

    @contextlib.contextmanager
    def _transaction(self, options: dict[str, Any]) -> Iterator[Connection]:
        try:
            with self._engine.connect() as connection:
                connection = connection.execution_options(**options)
                with connection.begin():
                    yield connection
        # ValueError: texts that PostgreSQL cannot hold, and damaged JSON in a row.
        except (SQLAlchemyError, OverflowError, ValueError) as error:
            raise fleet_error(self.path, error) from error

    def _schema_error(self, found: str | None) -> FleetError:
        if found is None or found in REVISIONS:
            return FleetError(
                f"expected schema {HEAD} on the fleet's server {self.path}, found {found or 'no tables'}; as the "
                f"owner of its tables, type: {_UPGRADE}; {LOCAL}"
            )
        return FleetError(
            f"expected schema {HEAD} or older on the fleet's server {self.path}, found schema {found}, of a newer "
            f"autofuse; upgrade with: pip install --upgrade autofuse; {LOCAL}"
        )


def nobody_appends(connection: Connection) -> bool:
    """Whether no `append` is under way on the server, and none begins before this transaction ends."""
    return bool(connection.execute(select(func.pg_try_advisory_xact_lock(_APPENDING))).scalar_one())


def fleet_error(server: str, error: BaseException) -> FleetError:
    """The FleetError that tells a person, in one line, what a failure means."""
    original = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    found = " ".join(str(original).split())[:300]
    advice = next((advice for part, advice in _ADVICE if part in found), "")
    is_reached = isinstance(error, DBAPIError) and not isinstance(error, OperationalError | InterfaceError)
    what = (
        f"the fleet's server {server} refused a request"
        if is_reached
        else f"expected the fleet's server {server} {NO_ANSWER}"
    )
    return FleetError(f"{what}: {found}; {advice + '; ' if advice else ''}{LOCAL}")


def _engine(url: str, connect_seconds: int) -> Engine:
    try:
        made = make_url(url)
    except (ArgumentError, ValueError):  # the latter of a port that is no number
        raise _url_error(url) from None
    if made.drivername != DRIVER or not made.database:
        raise _url_error(url)
    try:
        return create_engine(made, pool_size=1, max_overflow=0, connect_args=_connect_args(made, connect_seconds))
    except (ImportError, NoSuchModuleError) as error:
        raise FleetError(
            f"expected psycopg, which speaks to the fleet's server, found: {error}; "
            f"type: pip install 'autofuse[fleet]'; {LOCAL}",
            is_lasting=True,
        ) from None


def _url_error(url: str) -> FleetError:
    return FleetError(
        f"expected fleet.url={DRIVER}://USER@HOST/DATABASE, found {masked(url)!r}; {LOCAL}", is_lasting=True
    )


def _connect_args(url: URL, connect_seconds: int) -> dict[str, Any]:
    """Timeouts for each way in which a server can keep silent; what the URL says itself goes before."""
    milliseconds = int(STATEMENT_SECONDS * 1000)
    limits = f"-c statement_timeout={milliseconds} -c idle_in_transaction_session_timeout={4 * milliseconds}"
    args = {
        "connect_timeout": connect_seconds,
        "options": limits,
        "tcp_user_timeout": milliseconds,
        "keepalives_idle": 5,
        "keepalives_interval": 2,
        "keepalives_count": 2,
        "application_name": "autofuse",
    }
    return {name: value for name, value in args.items() if name not in url.query}


def _found_revision(connection: Connection) -> str | None:
    """The schema of the database; None where there are no tables of ours. Raises FleetError for another program's."""

    def is_there(table: str) -> bool:
        return connection.execute(select(func.to_regclass(table))).scalar() is not None

    if not is_there("alembic_version"):
        return None
    if not is_there("decision_keys"):
        raise FleetError(
            "expected a database of its own for the fleet, found tables of another program (left as they are); name "
            f"another one in fleet.url; {LOCAL}"
        )
    return str(connection.execute(text("SELECT version_num FROM alembic_version")).scalar())


def _create_schema(connection: Connection) -> None:
    """Make what all migrations together make (a test compares the two)."""
    models.Base.metadata.create_all(connection)
    connection.execute(text("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY)"))
    connection.execute(text("INSERT INTO alembic_version VALUES (:head)"), {"head": HEAD})
