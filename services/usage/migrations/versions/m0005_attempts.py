"""What workers computed, and how fast each request was for its client."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

ID = sa.Text().with_variant(postgresql.TEXT(collation="C"), "postgresql")
JSON = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")
TIME = sa.DateTime(timezone=True)
COUNTS = (
    "prompt_tokens", "cached_tokens", "prefill_tokens", "decode_tokens", "accepted_draft_tokens",
    "rejected_draft_tokens", "block_milliseconds", "prefill_nanos", "decode_nanos",
)  # fmt: skip
LATENCIES = ("first_token_micros", "per_token_micros", "whole_micros")


def upgrade() -> None:
    """Create both tables; rows of the ledger that are there have no latency."""
    op.create_table(
        "attempts",
        sa.Column("request_id", ID, nullable=False),
        sa.Column("epoch", sa.BigInteger, nullable=False, autoincrement=False),
        sa.Column("worker_instance", ID, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        *(sa.Column(name, sa.Text, nullable=False) for name in ("tenant", "model", "version")),
        *(sa.Column(name, sa.BigInteger, nullable=False) for name in COUNTS),
        sa.Column("choices", JSON, nullable=False),
        sa.Column("error_reason", sa.Text, nullable=False),
        sa.Column("start_time", TIME),
        sa.Column("end_time", TIME, nullable=False),
        sa.Column("insert_time", TIME, nullable=False),
        sa.PrimaryKeyConstraint("request_id", "epoch", "worker_instance", name="pk_attempts"),
    )
    op.create_index("ix_attempts_end_time", "attempts", ["end_time"])
    op.create_table(
        "worker_times",
        sa.Column("worker_instance", ID, nullable=False),
        sa.Column("sequence", sa.BigInteger, nullable=False, autoincrement=False),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("version", sa.Text, nullable=False),
        sa.Column("start_time", TIME, nullable=False),
        sa.Column("end_time", TIME, nullable=False),
        sa.Column("busy_nanos", sa.BigInteger, nullable=False),
        sa.Column("idle_nanos", sa.BigInteger, nullable=False),
        sa.Column("insert_time", TIME, nullable=False),
        sa.PrimaryKeyConstraint("worker_instance", "sequence", name="pk_worker_times"),
    )
    op.create_index("ix_worker_times_end_time", "worker_times", ["end_time"])
    for name in LATENCIES:
        op.add_column("ledger", sa.Column(name, sa.BigInteger))
    op.add_column("ledger", sa.Column("targets_met", sa.Boolean))


def downgrade() -> None:
    """Drop them."""
    for name in ("targets_met", *LATENCIES):
        op.drop_column("ledger", name)
    op.drop_table("worker_times")
    op.drop_table("attempts")
