"""Kernels for GPUs: what they take of a device, host time beside device time, the files of Triton's own cache."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("kernels", sa.Column("resources", sa.JSON(), nullable=True))
    op.add_column("measurements", sa.Column("host_us", sa.Float(), nullable=True))
    op.add_column("measurements", sa.Column("eager_host_us", sa.Float(), nullable=True))
    op.create_table(
        "triton_files",
        sa.Column("key", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=True),
        sa.Column("checksum", sa.Text(), nullable=False),
        sa.Column("size_bytes", sa.Integer(), nullable=False),
        sa.Column("used_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("key", "name"),
    )
    op.create_index("ix_triton_files_used_at", "triton_files", ["used_at"])


def downgrade() -> None:
    raise NotImplementedError("a store is never taken back to an older schema: it would lose rows")
