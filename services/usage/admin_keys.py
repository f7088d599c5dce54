"""Keys of administrators, and who a caller of the administrators' port is. Deny by default.

No API key opens it, but one of scope `usage:read` reads its own tenant's usage.

A secret is `mra_<key id>_<random>`; only its SHA-256 is stored. The root token of the settings makes the first keys.
"""

from __future__ import annotations

import dataclasses
import functools
import hmac
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa

from services.common.clock import Clock
from services.common.errors import InvalidRequest, NotFound, PermissionDenied, Unauthenticated
from services.usage.accounts import check_name, digest_of, random_text
from services.usage.audit import Act, record, shown
from services.usage.schema import admin_keys, api_keys
from services.usage.store import Store

ROOT = "root"
USAGE_READ = "usage:read"
MAX_SECRET_CHARS = 256
Row = sa.Row[Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Caller:
    """Who calls: an administrator's name, or the id of an API key that may read the usage of `tenant` only."""

    name: str
    tenant: str = ""


class AdminKeys:
    """Creates, lists, revokes and recognises. `root_token` empty: there is no root."""

    def __init__(self, store: Store, clock: Clock, root_token: str) -> None:
        self._store = store
        self._clock = clock
        self._root_token = root_token

    async def administrator(self, authorization: str) -> Caller:
        """Who sent `Bearer <secret>`. Raises Unauthenticated, PermissionDenied for who is no administrator."""
        caller = await self.reader(authorization)
        if caller.tenant:
            raise PermissionDenied("This call needs a key of an administrator.")
        return caller

    async def reader(self, authorization: str) -> Caller:
        """An administrator, or a key that may read its tenant's usage. Raises Unauthenticated, PermissionDenied."""
        scheme, _, secret = authorization.strip().partition(" ")
        if scheme.lower() != "bearer" or not 0 < len(secret) <= MAX_SECRET_CHARS:
            raise Unauthenticated("Send the key of an administrator as `Authorization: Bearer <key>`.")
        if self._root_token and hmac.compare_digest(secret.encode(), self._root_token.encode()):
            return Caller(ROOT)
        digest = digest_of(secret)
        for table in (admin_keys, api_keys):
            row = await self._store.read(functools.partial(_by_digest, table=table, digest=digest))
            if row is None or not hmac.compare_digest(bytes(row.digest), digest):
                continue
            now = self._now()
            if row.revoke_time is not None or (row.expire_time is not None and row.expire_time <= now):
                break
            if table is admin_keys:
                return Caller(row.name)
            if USAGE_READ not in row.scopes:
                raise PermissionDenied("This API key may not read usage.")
            return Caller(row.key_id, row.tenant)
        raise Unauthenticated("The key is not valid.")

    async def create(self, name: str, expire_time: datetime | None, actor: str) -> tuple[Row, str]:
        """A new key and its secret. Raises InvalidRequest."""
        check_name("name", name)
        now = self._now()
        if name == ROOT:
            raise InvalidRequest("The name root is the root token's.", param="name")
        if expire_time is not None and expire_time <= now:
            raise InvalidRequest("expire_time lies in the past.", param="expire_time")
        key_id = secrets.token_hex(6)
        secret = f"mra_{key_id}_{random_text()}"
        row = {
            "key_id": key_id,
            "name": name,
            "digest": digest_of(secret),
            "create_time": now,
            "expire_time": expire_time,
        }

        def work(connection: sa.Connection) -> Row:
            connection.execute(sa.insert(admin_keys), row)
            return _acted(connection, key_id, "admin_key.create", actor, None, now)

        return await self._store.write(work), secret

    async def list(self) -> Sequence[Row]:
        """Every key, newest last."""
        query = sa.select(admin_keys).order_by(admin_keys.c.create_time, admin_keys.c.key_id)
        return await self._store.read(lambda connection: list(connection.execute(query)))

    async def revoke(self, key_id: str, actor: str) -> Row:
        """Revoke now. Idempotent. Raises NotFound."""
        now = self._now()

        def work(connection: sa.Connection) -> Row:
            where = admin_keys.c.key_id == key_id
            before = connection.execute(sa.select(admin_keys).where(where).with_for_update()).one_or_none()
            if before is None:
                raise NotFound(f"There is no key {key_id}.", param="key_id")
            if before.revoke_time is not None:
                return before
            connection.execute(sa.update(admin_keys).where(where).values(revoke_time=now))
            return _acted(connection, key_id, "admin_key.revoke", actor, before, now)

        return await self._store.write(work)

    def _now(self) -> datetime:
        return datetime.fromtimestamp(self._clock.wall(), UTC)


def _by_digest(connection: sa.Connection, table: sa.Table, digest: bytes) -> Row | None:
    return connection.execute(sa.select(table).where(table.c.digest == digest)).one_or_none()


def _acted(connection: sa.Connection, key_id: str, action: str, actor: str, before: Row | None, now: datetime) -> Row:
    after = connection.execute(sa.select(admin_keys).where(admin_keys.c.key_id == key_id)).one()
    old = None if before is None else shown(before)
    record(connection, Act(actor, action, "", key_id, old, shown(after)), now)
    return after
