"""Alembic's environment: runs the revisions on the connection that the store hands over."""

from __future__ import annotations

from alembic import context

from autofuse.db.models import Base

connection = context.config.attributes["connection"]
# transactional_ddl: Alembic takes SQLite for a database that commits at each CREATE TABLE, which is true of
# pysqlite's own transactions but not of ours; so an upgrade that dies half-way leaves nothing behind.
# render_as_batch: SQLite alters a table by copying it.
context.configure(connection=connection, target_metadata=Base.metadata, transactional_ddl=True, render_as_batch=True)
context.run_migrations()
