"""Ledger, balances, accounts and dead letters."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

TOKENS = ("prompt_tokens", "cached_tokens", "completion_tokens", "reasoning_tokens")
ID = sa.Text().with_variant(postgresql.TEXT(collation="C"), "postgresql")
JSON = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")
TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    """Create the first tables and the head of the row ids."""
    head = op.create_table(
        "ledger_head",
        sa.Column("id", sa.Integer, nullable=False, autoincrement=False),
        sa.Column("last_row_id", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_ledger_head"),
    )
    op.bulk_insert(head, [{"id": 1, "last_row_id": 0}])
    _create_ledger()
    op.create_table(
        "balances",
        _text("tenant"),
        sa.Column("day", sa.Date, nullable=False),
        sa.Column("request_count", sa.BigInteger, nullable=False),
        *_token_columns(sa.BigInteger()),
        sa.PrimaryKeyConstraint("tenant", "day", name="pk_balances"),
    )
    _create_accounts()
    op.create_table(
        "dead_letters",
        sa.Column("stream", ID, nullable=False),
        sa.Column("entry_id", ID, nullable=False),
        _text("reason"),
        sa.Column("payload", sa.LargeBinary, nullable=False),
        sa.Column("insert_time", TIME, nullable=False),
        sa.PrimaryKeyConstraint("stream", "entry_id", name="pk_dead_letters"),
    )


def downgrade() -> None:
    """Drop everything: the state before the first migration."""
    for table in ("dead_letters", "api_keys", "tenants", "balances", "ledger", "ledger_head"):
        op.drop_table(table)


def _create_ledger() -> None:
    op.create_table(
        "ledger",
        sa.Column("row_id", sa.BigInteger, nullable=False, autoincrement=False),
        sa.Column("request_id", ID, nullable=False),
        *(_text(name) for name in ("tenant", "project", "key_id", "model", "version")),
        sa.Column("manifest_digest", sa.LargeBinary, nullable=False),
        *(_text(name) for name in ("pool_model", "pool")),
        sa.Column("shard", sa.Integer, nullable=False),
        *(
            _text(name)
            for name in ("priority_class", "length_class", "terminal_state", "finish_reason", "error_reason")
        ),
        *_token_columns(sa.Integer()),
        sa.Column("choice_token_counts", JSON, nullable=False),
        *(
            sa.Column(name, TIME, nullable=True)
            for name in ("admit_time", "claim_time", "submit_time", "start_time", "first_token_time")
        ),
        sa.Column("end_time", TIME, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        *(_text(name) for name in ("worker_instance", "gateway_instance", "user_label")),
        sa.Column("metadata", JSON, nullable=False),
        _text("traceparent"),
        sa.Column("event", sa.LargeBinary, nullable=False),
        sa.Column("insert_time", TIME, nullable=False),
        sa.PrimaryKeyConstraint("row_id", name="pk_ledger"),
        sa.UniqueConstraint("request_id", name="uq_ledger_request_id"),
    )
    op.create_index("ix_ledger_tenant_row_id", "ledger", ["tenant", "row_id"])
    op.create_index("ix_ledger_end_time", "ledger", ["end_time"])


def _create_accounts() -> None:
    op.create_table(
        "tenants",
        *(_text(name) for name in ("tenant", "display_name")),
        sa.Column("requests_per_minute", sa.Integer),
        sa.Column("tokens_per_minute", sa.BigInteger),
        sa.Column("concurrent_requests", sa.Integer),
        sa.Column("budget_tokens", sa.BigInteger),
        sa.Column("queued_requests", sa.Integer),
        sa.Column("weight", sa.Float, nullable=False),
        sa.Column("create_time", TIME, nullable=False),
        sa.PrimaryKeyConstraint("tenant", name="pk_tenants"),
    )
    op.create_table(
        "api_keys",
        *(_text(name) for name in ("key_id", "tenant", "project", "display_name")),
        sa.Column("digest", sa.LargeBinary, nullable=False),
        _text("prefix"),
        sa.Column("models", JSON, nullable=False),
        sa.Column("create_time", TIME, nullable=False),
        sa.Column("expire_time", TIME),
        sa.Column("revoke_time", TIME),
        sa.PrimaryKeyConstraint("key_id", name="pk_api_keys"),
        sa.ForeignKeyConstraint(["tenant"], ["tenants.tenant"], name="fk_api_keys_tenant_tenants"),
        sa.UniqueConstraint("digest", name="uq_api_keys_digest"),
    )
    op.create_index("ix_api_keys_tenant", "api_keys", ["tenant"])


def _text(name: str) -> sa.Column[str]:
    return sa.Column(name, sa.Text, nullable=False)


def _token_columns(kind: sa.types.TypeEngine[int]) -> list[sa.Column[int]]:
    return [sa.Column(f"{part}_{name}", kind, nullable=False) for part in ("delivered", "billed") for name in TOKENS]
