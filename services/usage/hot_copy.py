"""The hot copy that gateways read: every key with what holds for it, and what its budgets have spent. Truth is the
database; this copy is rebuilt from it at start, each 30 s, and within a second once Redis has lost it.

Spending is written before the keys, so that a key is never known without it. Where Redis knows it, it is only raised,
and to what the ledger said one rebuild ago: the ledger follows the reservations, which know first.
"""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa
import structlog

from services.common.admission_store import AdmissionStore
from services.common.admission_types import KeyRecord, Spent
from services.common.clock import Clock
from services.common.errors import StoreUnavailable
from services.usage.policies import policy_from_json, stricter, stricter_caps
from services.usage.prices import token_nanos
from services.usage.rating import read_plans, read_prices
from services.usage.schema import api_keys, tenants
from services.usage.spending import key_spent, tenant_spent, with_money
from services.usage.store import Store

REBUILD_EVERY_S = 30.0
CHECK_EVERY_S = 1.0
Records = dict[bytes, KeyRecord]
# Tenant and key id; the empty key id is the tenant itself.
Scope = tuple[str, str]


class HotCopy:
    """Keeps Redis' copy true."""

    def __init__(self, store: Store, admission: AdmissionStore, clock: Clock) -> None:
        self._store = store
        self._admission = admission
        self._clock = clock
        # The copy may differ from the database: rebuild it as soon as Redis answers.
        self._stale = True
        # What the ledger said at the last rebuild, all of which is settled by the next.
        self._said: dict[Scope, Spent] = {}

    def mark_stale(self) -> None:
        """What every key may cost has changed: rebuild within a second."""
        self._stale = True

    async def publish(self, condition: sa.ColumnElement[bool]) -> None:
        """Write the keys that a change concerns. Never fails: while Redis is away they are written later."""
        records = await self._records(condition)
        try:
            await self._write_spending(records)
            for digest, record in records.items():
                await self._admission.put_key(digest, record)
        except StoreUnavailable as error:
            # The database has it, which is what counts; gateways cannot look keys up now either.
            self._stale = True
            structlog.get_logger().warning("hot_copy_waits", error=error.message)

    async def rebuild(self) -> None:
        """Replace all of Redis' copy by what the database says. Raises StoreUnavailable.

        What changes in the database while the copy is written is written after it: a key that was revoked meanwhile,
        here or by another usage service, does not come back to life.
        """
        self._stale = False
        try:
            written = await self._records(sa.true())
            self._said = await self._write_spending(written)
            await self._admission.replace_keys(written)
            while changed := _changes(written, await self._records(sa.true())):
                await self._write_spending(changed)
                for digest, record in changed.items():
                    await self._admission.put_key(digest, record)
                written |= changed
        except BaseException:
            self._stale = True
            raise

    async def keep(self) -> None:
        """For ever: rebuild at start, each 30 s, and within a second once Redis has lost it or missed a change."""
        due = 0.0
        while True:
            try:
                if self._stale or self._clock.monotonic() >= due or await self._is_gone():
                    await self.rebuild()
                    due = self._clock.monotonic() + REBUILD_EVERY_S
            except StoreUnavailable as error:
                structlog.get_logger().warning("hot_copy_waits", error=error.message)
            await self._clock.sleep(CHECK_EVERY_S)

    async def _is_gone(self) -> bool:
        try:
            await self._admission.lookup_key(b"")
        except StoreUnavailable:
            return True
        return False

    async def _write_spending(self, records: Records) -> dict[Scope, Spent]:
        limits = {(r.tenant, ""): r.limits for r in records.values()}
        limits |= {(r.tenant, r.key_id): r.key_limits for r in records.values() if not r.revoked}
        scopes = {scope for scope, its_own in limits.items() if its_own.has_budget}
        today = datetime.fromtimestamp(self._clock.wall(), UTC).date()

        def read(connection: sa.Connection) -> dict[Scope, Spent]:
            said: dict[Scope, Spent] = {}
            for tenant, key_id in sorted(scopes):
                sums = (
                    key_spent(connection, tenant, key_id, today) if key_id else tenant_spent(connection, tenant, today)
                )
                money = limits[tenant, key_id].has_money_budget
                said[tenant, key_id] = with_money(connection, sums, tenant, key_id) if money else sums
            return said

        said = await self._store.read(read) if scopes else {}
        for scope, spent in said.items():
            await self._admission.raise_spent(*scope, spent, self._said.get(scope, Spent(today)))
        return said

    async def _records(self, condition: sa.ColumnElement[bool]) -> Records:
        query = sa.select(api_keys, tenants).join_from(api_keys, tenants).where(condition)
        query = query.set_label_style(sa.LABEL_STYLE_TABLENAME_PLUS_COL)
        now = datetime.fromtimestamp(self._clock.wall(), UTC)

        def read(connection: sa.Connection) -> Records:
            records = {bytes(row.api_keys_digest): _record(row) for row in connection.execute(query)}
            return _priced(connection, records, now)

        return await self._store.read(read)


def _changes(old: Records, new: Records) -> Records:
    return {digest: record for digest, record in new.items() if old.get(digest) != record}


def _priced(connection: sa.Connection, records: Records, now: datetime) -> Records:
    """The same with today's prices where money is limited."""
    limited = {digest: r for digest, r in records.items() if r.limits.has_money_budget or r.key_limits.has_money_budget}
    if not limited:
        return records
    prices, plans = read_prices(connection), read_plans(connection)
    by_plan: dict[str, dict[str, tuple[int, int]]] = {}
    for digest, record in limited.items():
        plan = plans.plan_of(record.tenant, now)
        if plan not in by_plan:
            by_plan[plan] = token_nanos(prices, plan, now)
        records[digest] = dataclasses.replace(record, prices=by_plan[plan])
    return records


def _record(row: Any) -> KeyRecord:
    tenant, key = policy_from_json(row.tenants_policy), policy_from_json(row.api_keys_policy)
    weights = [weight for weight in (key.weight, tenant.weight) if weight is not None]
    expires = row.api_keys_expire_time
    return KeyRecord(
        key_id=row.api_keys_key_id,
        tenant=row.tenants_tenant,
        project=row.api_keys_project,
        models=tuple(row.api_keys_models),
        weight=weights[0] if weights else 1.0,
        limits=tenant.limits,
        expires_at=None if expires is None else expires.timestamp(),
        revoked=row.api_keys_revoke_time is not None,
        key_limits=key.limits,
        scopes=tuple(row.api_keys_scopes),
        batch_only=tenant.batch_only or key.batch_only,
        queued_requests=stricter(tenant.queued_requests, key.queued_requests),
        worker_slots=tenant.worker_slots,
        worker_blocks=tenant.worker_blocks,
        length_caps=stricter_caps(tenant.length_caps, key.length_caps),
    )
