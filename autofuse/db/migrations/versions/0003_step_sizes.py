"""How large the inputs of a timed step were, so that steps of nearly equal sizes can be compared."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("step_samples", sa.Column("elements", sa.Integer(), nullable=False, server_default=sa.text("0")))


def downgrade() -> None:
    raise NotImplementedError("a store is never taken back to an older schema: it would lose rows")
