"""Policies of tenants and keys, projects, keys of administrators, the audit trail, and sums by key."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0002_accounts"
down_revision = "0001"
branch_labels = None
depends_on = None

JSON = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")
TIME = sa.DateTime(timezone=True)
MOVED: dict[str, sa.types.TypeEngine[Any]] = {
    **{name: sa.BigInteger() for name in ("tokens_per_minute", "budget_tokens")},
    **{name: sa.Integer() for name in ("requests_per_minute", "concurrent_requests", "queued_requests")},
    "weight": sa.Float(),
}


def upgrade() -> None:
    """Move the tenants' limits into one policy and create what keys and administrators need."""
    for table in ("tenants", "api_keys"):
        op.add_column(table, sa.Column("policy", JSON, nullable=False, server_default="{}"))
    op.add_column("api_keys", sa.Column("scopes", JSON, nullable=False, server_default='["inference"]'))
    tenants = _tenants()
    for row in op.get_bind().execute(sa.select(tenants)).all():
        policy = {name: getattr(row, name) for name in MOVED if getattr(row, name) is not None}
        op.execute(sa.update(tenants).where(tenants.c.tenant == row.tenant).values(policy=policy))
    for name in MOVED:
        op.drop_column("tenants", name)
    _create_projects()
    op.create_table(
        "admin_keys",
        *(_text(name) for name in ("key_id", "name")),
        sa.Column("digest", sa.LargeBinary, nullable=False),
        sa.Column("create_time", TIME, nullable=False),
        *(sa.Column(name, TIME) for name in ("expire_time", "revoke_time")),
        sa.PrimaryKeyConstraint("key_id", name="pk_admin_keys"),
        sa.UniqueConstraint("digest", name="uq_admin_keys_digest"),
    )
    op.create_table(
        "audit",
        sa.Column("audit_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False, autoincrement=True),
        sa.Column("time", TIME, nullable=False),
        *(_text(name) for name in ("actor", "action", "tenant", "subject")),
        sa.Column("before", JSON),
        sa.Column("after", JSON, nullable=False),
        sa.PrimaryKeyConstraint("audit_id", name="pk_audit"),
    )
    op.create_index("ix_audit_tenant_audit_id", "audit", ["tenant", "audit_id"])
    _create_key_balances()


def downgrade() -> None:
    """Back to limits in columns; what the first version does not know is lost."""
    for table in ("key_balances", "audit", "admin_keys", "projects"):
        op.drop_table(table)
    for name, kind in MOVED.items():
        op.add_column("tenants", sa.Column(name, kind))
    tenants = _tenants()
    for row in op.get_bind().execute(sa.select(tenants)).all():
        values = {"weight": 1.0, **{name: row.policy[name] for name in MOVED if name in row.policy}}
        op.execute(sa.update(tenants).where(tenants.c.tenant == row.tenant).values(values))
    op.drop_column("api_keys", "scopes")
    for table in ("tenants", "api_keys"):
        op.drop_column(table, "policy")


def _create_projects() -> None:
    projects = op.create_table(
        "projects",
        *(_text(name) for name in ("tenant", "project", "display_name")),
        sa.Column("create_time", TIME, nullable=False),
        sa.PrimaryKeyConstraint("tenant", "project", name="pk_projects"),
        sa.ForeignKeyConstraint(["tenant"], ["tenants.tenant"], name="fk_projects_tenant_tenants"),
    )
    keys = sa.table("api_keys", *(sa.column(n) for n in ("tenant", "project", "create_time")))
    used = sa.select(keys.c.tenant, keys.c.project, sa.literal(""), sa.func.min(keys.c.create_time))
    used = used.where(keys.c.project != "").group_by(keys.c.tenant, keys.c.project)
    op.execute(sa.insert(projects).from_select(["tenant", "project", "display_name", "create_time"], used))


def _create_key_balances() -> None:
    balances = op.create_table(
        "key_balances",
        *(_text(name) for name in ("tenant", "key_id")),
        sa.Column("day", sa.Date, nullable=False),
        sa.Column("billed_tokens", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("tenant", "key_id", "day", name="pk_key_balances"),
    )
    columns = ("tenant", "key_id", "end_time", "billed_prompt_tokens", "billed_completion_tokens")
    ledger = sa.table("ledger", *(sa.column(n) for n in columns))
    day = sa.func.date(ledger.c.end_time)
    tokens = sa.func.sum(ledger.c.billed_prompt_tokens + ledger.c.billed_completion_tokens)
    sums = sa.select(ledger.c.tenant, ledger.c.key_id, day, tokens).group_by(ledger.c.tenant, ledger.c.key_id, day)
    op.execute(sa.insert(balances).from_select(["tenant", "key_id", "day", "billed_tokens"], sums))


def _tenants() -> sa.TableClause:
    return sa.table("tenants", *(sa.column(n) for n in ("tenant", *MOVED)), sa.column("policy", JSON))


def _text(name: str) -> sa.Column[str]:
    return sa.Column(name, sa.Text, nullable=False)
