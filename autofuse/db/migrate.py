"""Runs the migrations that ship inside the package.

In: a connection inside a transaction. Out: the newest schema on it; the caller commits.
Guarantee: needs no ``alembic.ini``, prints nothing, leaves logging as it is.
"""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import Connection

MIGRATIONS = Path(__file__).with_name("migrations")


def config() -> Config:
    """Alembic's configuration; % is its escape character."""
    made = Config()
    made.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    made.set_main_option("path_separator", "os")
    return made


def upgrade(connection: Connection, revision: str = "head") -> None:
    """Bring the schema of ``connection`` to ``revision`` within its transaction."""
    made = config()
    made.attributes["connection"] = connection
    command.upgrade(made, revision)


def revisions() -> list[str]:
    """All schemas, oldest first."""
    script = ScriptDirectory.from_config(config())
    return [revision.revision for revision in script.walk_revisions()][::-1]
