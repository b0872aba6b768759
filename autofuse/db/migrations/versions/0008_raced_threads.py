"""Decisions say on how many threads they were raced, where others used the cores."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    column = sa.Column(
        "raced_threads",
        sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
        nullable=False,
        server_default=sa.text("0"),
    )
    op.add_column("decisions", column)


def downgrade() -> None:
    raise NotImplementedError("a store is never taken back to an older schema: it would lose rows")
