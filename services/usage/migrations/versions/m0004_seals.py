"""Seals of days and the digests of their rows."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create what audits read."""
    op.create_table(
        "day_seals",
        sa.Column("day", sa.Date, nullable=False),
        *(sa.Column(name, sa.BigInteger, nullable=False) for name in ("after_row_id", "last_row_id", "row_count")),
        *(
            sa.Column(name, sa.LargeBinary, nullable=False)
            for name in ("digest", "previous", "public_key", "signature")
        ),
        sa.PrimaryKeyConstraint("day", name="pk_day_seals"),
    )
    op.create_table(
        "seal_digests",
        sa.Column("first_row_id", sa.BigInteger, nullable=False, autoincrement=False),
        sa.Column("digests", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("first_row_id", name="pk_seal_digests"),
    )


def downgrade() -> None:
    """Drop them."""
    op.drop_table("seal_digests")
    op.drop_table("day_seals")
