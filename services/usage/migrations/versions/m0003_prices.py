"""Prices, plans of tenants, and ratings."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002_accounts"
branch_labels = None
depends_on = None

TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    """Create what bills are made of besides the ledger."""
    op.create_table(
        "prices",
        sa.Column("price_id", sa.Integer, nullable=False),
        *(_text(name) for name in ("plan", "model", "version", "priority_class", "token_kind", "currency")),
        sa.Column("micros_per_million", sa.BigInteger, nullable=False),
        sa.Column("start_time", TIME, nullable=False),
        sa.Column("end_time", TIME),
        sa.Column("create_time", TIME, nullable=False),
        sa.PrimaryKeyConstraint("price_id", name="pk_prices"),
    )
    op.create_table(
        "tenant_plans",
        _text("tenant"),
        sa.Column("start_time", TIME, nullable=False),
        _text("plan"),
        sa.Column("create_time", TIME, nullable=False),
        sa.PrimaryKeyConstraint("tenant", "start_time", name="pk_tenant_plans"),
    )
    head = op.create_table(
        "rating_head",
        sa.Column("id", sa.Integer, nullable=False, autoincrement=False),
        sa.Column("last_row_id", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_rating_head"),
    )
    op.bulk_insert(head, [{"id": 1, "last_row_id": 0}])
    op.create_table(
        "ratings",
        sa.Column("row_id", sa.BigInteger, nullable=False, autoincrement=False),
        sa.Column("number", sa.Integer, nullable=False, autoincrement=False),
        _text("currency"),
        *(
            sa.Column(f"{kind}_micros", sa.BigInteger, nullable=False)
            for kind in ("prompt", "cached", "completion", "reasoning")
        ),
        sa.Column("rate_time", TIME, nullable=False),
        sa.PrimaryKeyConstraint("row_id", "number", name="pk_ratings"),
    )


def downgrade() -> None:
    """Drop them."""
    for table in ("ratings", "rating_head", "tenant_plans", "prices"):
        op.drop_table(table)


def _text(name: str) -> sa.Column[str]:
    return sa.Column(name, sa.Text, nullable=False)
