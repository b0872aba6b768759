"""Long runs keep one in so many timed steps; runs say on which machine their process number counts."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("runs", sa.Column("machine", sa.Text(), nullable=False, server_default=sa.text("''")))
    op.add_column("runs", sa.Column("steps_one_in", sa.Integer(), nullable=False, server_default=sa.text("1")))


def downgrade() -> None:
    raise NotImplementedError("a store is never taken back to an older schema: it would lose rows")
