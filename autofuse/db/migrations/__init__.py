"""Alembic's environment and the revisions of the schema; run by ``autofuse.db.migrate``."""
