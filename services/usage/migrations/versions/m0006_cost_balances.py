"""What keys spent in money by day, kept beside the ratings; and which attempts were prompts computed for a peer."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the sums from the ratings that are there; no attempt so far was told to be a peer's."""
    op.add_column("attempts", sa.Column("asking_worker", sa.Text))
    op.create_table(
        "cost_balances",
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("key_id", sa.Text, nullable=False),
        sa.Column("day", sa.Date, nullable=False),
        sa.Column("micros", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("tenant", "key_id", "day", name="pk_cost_balances"),
    )
    day = "CAST(end_time AS date)" if op.get_bind().dialect.name == "postgresql" else "substr(end_time, 1, 10)"
    op.execute(
        "INSERT INTO cost_balances (tenant, key_id, day, micros) "  # noqa: S608 - no value from outside
        f"SELECT tenant, key_id, {day}, SUM(prompt_micros + cached_micros + completion_micros + reasoning_micros) "
        "FROM ratings JOIN ledger ON ledger.row_id = ratings.row_id GROUP BY 1, 2, 3"
    )


def downgrade() -> None:
    """Drop them."""
    op.drop_table("cost_balances")
    op.drop_column("attempts", "asking_worker")
