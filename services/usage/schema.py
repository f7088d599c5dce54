"""The tables of the usage database, as the newest migration leaves them. Never runs SQL.

Row ids are handed out by `ledger_head` inside the inserting transaction, so they have no gaps and become visible in
their order: a cursor never skips a row and a hash chain has one order. Request ids are ULIDs compared byte by byte,
so PostgreSQL can range-partition `ledger` by `request_id` (by time, in effect) and keep the event id unique.
"""

from __future__ import annotations

from datetime import UTC, datetime

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.engine import Dialect
from sqlalchemy.types import TypeDecorator


class UtcTime(TypeDecorator[datetime]):
    """A point in time, always aware and in UTC, on databases with and without time zones."""

    impl = sa.DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return None if value is None else value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


# Compared byte by byte on both databases.
IdText = sa.Text().with_variant(postgresql.TEXT(collation="C"), "postgresql")
JsonValue = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")

metadata = sa.MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)

TOKEN_COLUMNS = ("prompt_tokens", "cached_tokens", "completion_tokens", "reasoning_tokens")

# What the client waited, as the gateway measured it.
LATENCY_COLUMNS = ("first_token_micros", "per_token_micros", "whole_micros")

ledger_head = sa.Table(
    "ledger_head",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("last_row_id", sa.BigInteger, nullable=False),
)

ledger = sa.Table(
    "ledger",
    metadata,
    sa.Column("row_id", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("request_id", IdText, nullable=False, unique=True),
    sa.Column("tenant", sa.Text, nullable=False),
    sa.Column("project", sa.Text, nullable=False),
    sa.Column("key_id", sa.Text, nullable=False),
    sa.Column("model", sa.Text, nullable=False),
    sa.Column("version", sa.Text, nullable=False),
    sa.Column("manifest_digest", sa.LargeBinary, nullable=False),
    sa.Column("pool_model", sa.Text, nullable=False),
    sa.Column("pool", sa.Text, nullable=False),
    sa.Column("shard", sa.Integer, nullable=False),
    sa.Column("priority_class", sa.Text, nullable=False),
    sa.Column("length_class", sa.Text, nullable=False),
    sa.Column("terminal_state", sa.Text, nullable=False),
    sa.Column("finish_reason", sa.Text, nullable=False),
    sa.Column("error_reason", sa.Text, nullable=False),
    *(sa.Column(f"delivered_{name}", sa.Integer, nullable=False) for name in TOKEN_COLUMNS),
    *(sa.Column(f"billed_{name}", sa.Integer, nullable=False) for name in TOKEN_COLUMNS),
    sa.Column("choice_token_counts", JsonValue, nullable=False),
    sa.Column("admit_time", UtcTime),
    sa.Column("claim_time", UtcTime),
    sa.Column("submit_time", UtcTime),
    sa.Column("start_time", UtcTime),
    sa.Column("first_token_time", UtcTime),
    sa.Column("end_time", UtcTime, nullable=False),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("epoch", sa.BigInteger, nullable=False),
    sa.Column("worker_instance", sa.Text, nullable=False),
    sa.Column("gateway_instance", sa.Text, nullable=False),
    sa.Column("user_label", sa.Text, nullable=False),
    sa.Column("metadata", JsonValue, nullable=False),
    sa.Column("traceparent", sa.Text, nullable=False),
    sa.Column("event", sa.LargeBinary, nullable=False),
    sa.Column("insert_time", UtcTime, nullable=False),
    # Columns that came later stand here, and are NULL in the rows that were there before.
    *(sa.Column(name, sa.BigInteger) for name in LATENCY_COLUMNS),
    sa.Column("targets_met", sa.Boolean),
    sa.Index(None, "tenant", "row_id"),
    sa.Index(None, "end_time"),
)

# Sums of the ledger by tenant and UTC day of the request's end, moved in the inserting transaction.
balances = sa.Table(
    "balances",
    metadata,
    sa.Column("tenant", sa.Text, primary_key=True),
    sa.Column("day", sa.Date, primary_key=True),
    sa.Column("request_count", sa.BigInteger, nullable=False),
    *(sa.Column(f"delivered_{name}", sa.BigInteger, nullable=False) for name in TOKEN_COLUMNS),
    *(sa.Column(f"billed_{name}", sa.BigInteger, nullable=False) for name in TOKEN_COLUMNS),
)

# Billed tokens by key and UTC day, moved with `balances`: what budgets of keys are rebuilt from.
key_balances = sa.Table(
    "key_balances",
    metadata,
    sa.Column("tenant", sa.Text, primary_key=True),
    sa.Column("key_id", sa.Text, primary_key=True),
    sa.Column("day", sa.Date, primary_key=True),
    sa.Column("billed_tokens", sa.BigInteger, nullable=False),
)

# `policy` is a policies.Policy in its stored form, read and written whole.
tenants = sa.Table(
    "tenants",
    metadata,
    sa.Column("tenant", sa.Text, primary_key=True),
    sa.Column("display_name", sa.Text, nullable=False),
    sa.Column("create_time", UtcTime, nullable=False),
    sa.Column("policy", JsonValue, nullable=False, server_default="{}"),
)

projects = sa.Table(
    "projects",
    metadata,
    sa.Column("tenant", sa.Text, sa.ForeignKey("tenants.tenant"), primary_key=True),
    sa.Column("project", sa.Text, primary_key=True),
    sa.Column("display_name", sa.Text, nullable=False),
    sa.Column("create_time", UtcTime, nullable=False),
)

# `digest` is the SHA-256 of the secret; the secret itself is stored nowhere.
api_keys = sa.Table(
    "api_keys",
    metadata,
    sa.Column("key_id", sa.Text, primary_key=True),
    sa.Column("tenant", sa.Text, sa.ForeignKey("tenants.tenant"), nullable=False, index=True),
    sa.Column("project", sa.Text, nullable=False),
    sa.Column("display_name", sa.Text, nullable=False),
    sa.Column("digest", sa.LargeBinary, nullable=False, unique=True),
    sa.Column("prefix", sa.Text, nullable=False),
    sa.Column("models", JsonValue, nullable=False),
    sa.Column("create_time", UtcTime, nullable=False),
    sa.Column("expire_time", UtcTime),
    sa.Column("revoke_time", UtcTime),
    sa.Column("policy", JsonValue, nullable=False, server_default="{}"),
    sa.Column("scopes", JsonValue, nullable=False, server_default='["inference"]'),
)

# Keys of administrators; they open nothing but the administrators' port.
admin_keys = sa.Table(
    "admin_keys",
    metadata,
    sa.Column("key_id", sa.Text, primary_key=True),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("digest", sa.LargeBinary, nullable=False, unique=True),
    sa.Column("create_time", UtcTime, nullable=False),
    sa.Column("expire_time", UtcTime),
    sa.Column("revoke_time", UtcTime),
)

# One row an administrative act, written in its transaction.
audit = sa.Table(
    "audit",
    metadata,
    sa.Column("audit_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), primary_key=True),
    sa.Column("time", UtcTime, nullable=False),
    sa.Column("actor", sa.Text, nullable=False),
    sa.Column("action", sa.Text, nullable=False),
    sa.Column("tenant", sa.Text, nullable=False),
    sa.Column("subject", sa.Text, nullable=False),
    sa.Column("before", JsonValue),
    sa.Column("after", JsonValue, nullable=False),
    sa.Index(None, "tenant", "audit_id"),
)

# What one attempt took on one worker; the key is its event id.
attempts = sa.Table(
    "attempts",
    metadata,
    sa.Column("request_id", IdText, primary_key=True),
    sa.Column("epoch", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("worker_instance", IdText, primary_key=True),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("tenant", sa.Text, nullable=False),
    sa.Column("model", sa.Text, nullable=False),
    sa.Column("version", sa.Text, nullable=False),
    sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
    sa.Column("cached_tokens", sa.BigInteger, nullable=False),
    sa.Column("prefill_tokens", sa.BigInteger, nullable=False),
    sa.Column("decode_tokens", sa.BigInteger, nullable=False),
    sa.Column("accepted_draft_tokens", sa.BigInteger, nullable=False),
    sa.Column("rejected_draft_tokens", sa.BigInteger, nullable=False),
    sa.Column("block_milliseconds", sa.BigInteger, nullable=False),
    sa.Column("prefill_nanos", sa.BigInteger, nullable=False),
    sa.Column("decode_nanos", sa.BigInteger, nullable=False),
    # Of each choice: its number, the first index made here, and the one after the last.
    sa.Column("choices", JsonValue, nullable=False),
    sa.Column("error_reason", sa.Text, nullable=False),
    sa.Column("start_time", UtcTime),
    sa.Column("end_time", UtcTime, nullable=False),
    sa.Column("insert_time", UtcTime, nullable=False),
    # Set where only the prompt was computed here, for the attempt of this epoch on another worker.
    sa.Column("asking_worker", sa.Text),
    sa.Index(None, "end_time"),
)

# Sums of ratings by key and UTC day of the request's end, moved with them: what budgets of money start from.
cost_balances = sa.Table(
    "cost_balances",
    metadata,
    sa.Column("tenant", sa.Text, primary_key=True),
    sa.Column("key_id", sa.Text, primary_key=True),
    sa.Column("day", sa.Date, primary_key=True),
    sa.Column("micros", sa.BigInteger, nullable=False),
)

# Spans of workers' time: busy is what the shares of attempts sum to, idle the rest.
worker_times = sa.Table(
    "worker_times",
    metadata,
    sa.Column("worker_instance", IdText, primary_key=True),
    sa.Column("sequence", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("model", sa.Text, nullable=False),
    sa.Column("version", sa.Text, nullable=False),
    sa.Column("start_time", UtcTime, nullable=False),
    sa.Column("end_time", UtcTime, nullable=False),
    sa.Column("busy_nanos", sa.BigInteger, nullable=False),
    sa.Column("idle_nanos", sa.BigInteger, nullable=False),
    sa.Column("insert_time", UtcTime, nullable=False),
    sa.Index(None, "end_time"),
)

# Events that can never become rows, unique by where they came from, so that a replay adds none.
dead_letters = sa.Table(
    "dead_letters",
    metadata,
    sa.Column("stream", IdText, primary_key=True),
    sa.Column("entry_id", IdText, primary_key=True),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("payload", sa.LargeBinary, nullable=False),
    sa.Column("insert_time", UtcTime, nullable=False),
)

# Set once, never edited; of two with the same selectors and start, the later id holds.
prices = sa.Table(
    "prices",
    metadata,
    sa.Column("price_id", sa.Integer, primary_key=True),
    sa.Column("plan", sa.Text, nullable=False),
    sa.Column("model", sa.Text, nullable=False),
    sa.Column("version", sa.Text, nullable=False),
    sa.Column("priority_class", sa.Text, nullable=False),
    sa.Column("token_kind", sa.Text, nullable=False),
    sa.Column("currency", sa.Text, nullable=False),
    sa.Column("micros_per_million", sa.BigInteger, nullable=False),
    sa.Column("start_time", UtcTime, nullable=False),
    sa.Column("end_time", UtcTime),
    sa.Column("create_time", UtcTime, nullable=False),
)

# The plan of a tenant from a moment on; none means the empty plan.
tenant_plans = sa.Table(
    "tenant_plans",
    metadata,
    sa.Column("tenant", sa.Text, primary_key=True),
    sa.Column("start_time", UtcTime, primary_key=True),
    sa.Column("plan", sa.Text, nullable=False),
    sa.Column("create_time", UtcTime, nullable=False),
)

# Ledger rows up to here have been looked at by the rater.
rating_head = sa.Table(
    "rating_head",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("last_row_id", sa.BigInteger, nullable=False),
)

MICRO_COLUMNS = ("prompt_micros", "cached_micros", "completion_micros", "reasoning_micros")

# What a ledger row costs is the sum of its ratings: rating it again adds the difference as one more.
ratings = sa.Table(
    "ratings",
    metadata,
    sa.Column("row_id", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("currency", sa.Text, nullable=False),
    *(sa.Column(name, sa.BigInteger, nullable=False) for name in MICRO_COLUMNS),
    sa.Column("rate_time", UtcTime, nullable=False),
)

# One signed seal a UTC day with rows, each naming the one before.
day_seals = sa.Table(
    "day_seals",
    metadata,
    sa.Column("day", sa.Date, primary_key=True),
    sa.Column("after_row_id", sa.BigInteger, nullable=False),
    sa.Column("last_row_id", sa.BigInteger, nullable=False),
    sa.Column("row_count", sa.BigInteger, nullable=False),
    *(sa.Column(name, sa.LargeBinary, nullable=False) for name in ("digest", "previous", "public_key", "signature")),
)

# The digests of the sealed rows from `first_row_id` on, 16 bytes each.
seal_digests = sa.Table(
    "seal_digests",
    metadata,
    sa.Column("first_row_id", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("digests", sa.LargeBinary, nullable=False),
)
