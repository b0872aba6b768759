"""On a fleet's server measurements say where they come from; indexes for what it looks up before it deletes a row."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("measurements", sa.Column("origin", sa.Text(), nullable=True))
    is_sent = sa.text("origin IS NOT NULL")
    op.create_index(
        "ix_measurements_origin",
        "measurements",
        ["origin"],
        unique=True,
        sqlite_where=is_sent,
        postgresql_where=is_sent,
    )
    op.create_index("ix_requests_bucket_id", "requests", ["bucket_id"])
    op.create_index("ix_requests_run_id", "requests", ["run_id"])
    is_of_run = sa.text("run_id IS NOT NULL")
    op.create_index("ix_decisions_run_id", "decisions", ["run_id"], sqlite_where=is_of_run, postgresql_where=is_of_run)


def downgrade() -> None:
    raise NotImplementedError("a store is never taken back to an older schema: it would lose rows")
