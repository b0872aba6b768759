"""Requests name the device and versions of their key, for an index that a queue of many kinds needs; and leases one."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for name in ("device", "versions"):
        op.add_column("requests", sa.Column(name, sa.Text(), nullable=False, server_default=sa.text("''")))
    op.execute(
        "UPDATE requests SET device = (SELECT device FROM decision_keys WHERE digest = requests.key), "
        "versions = (SELECT versions FROM decision_keys WHERE digest = requests.key)"
    )
    op.drop_index("ix_requests_queue", "requests")
    op.create_index("ix_requests_queue", "requests", ["status", "device", "versions", "expected_saving_us", "calls"])
    is_leased = sa.text("lease_until IS NOT NULL")
    op.create_index(
        "ix_requests_lease", "requests", ["lease_until"], sqlite_where=is_leased, postgresql_where=is_leased
    )


def downgrade() -> None:
    raise NotImplementedError("a store is never taken back to an older schema: it would lose rows")
