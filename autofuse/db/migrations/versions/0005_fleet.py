"""A fleet's server: leases of requests, how far rows were exchanged, proposals; integers of 64 bits there."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("requests", sa.Column("lease_until", sa.Float(), nullable=True))
    op.create_table(
        "fleet_marks",
        sa.Column("server", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("value", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("server", "name"),
    )
    op.create_table(
        "proposals",
        sa.Column("key", sa.String(), nullable=False),
        sa.Column("variant", sa.Text(), nullable=False),
        sa.Column("config", sa.JSON(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("speedup", sa.Float(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["key"], ["decision_keys.digest"]),
        sa.PrimaryKeyConstraint("key"),
    )
    if op.get_bind().dialect.name != "sqlite":  # whose integers have 64 bits anyway
        inspector = sa.inspect(op.get_bind())
        for table in inspector.get_table_names():
            for column in inspector.get_columns(table):
                if isinstance(column["type"], sa.Integer) and not isinstance(column["type"], sa.BigInteger):
                    op.alter_column(table, column["name"], type_=sa.BigInteger(), existing_type=sa.Integer())


def downgrade() -> None:
    raise NotImplementedError("a store is never taken back to an older schema: it would lose rows")
