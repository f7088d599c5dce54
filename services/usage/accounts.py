"""Tenants, projects and API keys. Truth is the database; each change leaves its audit record in the same transaction.

A secret is `mr_<key id>_<random>`; only its SHA-256 is stored, and it is shown once, in the answer that creates it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import re
import secrets
import string
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from services.common.admission_types import SHADOW_TENANT
from services.common.clock import Clock
from services.common.errors import InvalidRequest, NotFound
from services.usage.audit import Act, record, shown
from services.usage.hot_copy import HotCopy
from services.usage.policies import MAX_MODELS, MAX_TEXT, Policy, check_policy, check_policy_of_key, policy_to_json
from services.usage.schema import api_keys, projects, tenants
from services.usage.store import Store

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
# 24 of 62 characters are 142 random bits.
SECRET_CHARS = 24
ALPHABET = string.ascii_letters + string.digits
DEMO_TENANT = "demo"
SCOPES = ("inference", "usage:read")
MAX_OVERLAP = timedelta(days=90)
# Who acts when no administrator does.
SYSTEM = "system"
Row = sa.Row[Any]
Condition = sa.ColumnElement[bool]


@dataclasses.dataclass(frozen=True, slots=True)
class TenantSpec:
    """What a tenant is created with."""

    tenant: str
    display_name: str = ""
    policy: Policy = dataclasses.field(default_factory=Policy)


@dataclasses.dataclass(frozen=True, slots=True)
class KeySpec:
    """What a key is created with; no models means all of the tenant's. `policy` holds beside the tenant's."""

    tenant: str
    display_name: str = ""
    models: tuple[str, ...] = ()
    expire_time: datetime | None = None
    project: str = ""
    policy: Policy = dataclasses.field(default_factory=Policy)
    scopes: tuple[str, ...] = ("inference",)


class Accounts:
    """Creates, lists, changes and revokes. `actor` is who does it, for the audit trail."""

    def __init__(self, store: Store, hot_copy: HotCopy, clock: Clock) -> None:
        self._store = store
        self._hot_copy = hot_copy
        self._clock = clock

    async def create_tenant(self, spec: TenantSpec, actor: str = SYSTEM) -> Row:
        """Raises InvalidRequest for a bad or taken name or a limit out of its range."""
        check_name("tenant", spec.tenant)
        if spec.tenant == SHADOW_TENANT:
            raise InvalidRequest("This name is the platform's own.", param="tenant")
        check_text("display_name", spec.display_name)
        check_policy(spec.policy)
        row = {
            "tenant": spec.tenant,
            "display_name": spec.display_name,
            "policy": policy_to_json(spec.policy),
            "create_time": self._now(),
        }

        def work(connection: sa.Connection) -> Row:
            connection.execute(sa.insert(tenants), row)
            return self._acted(connection, tenants, tenants.c.tenant == spec.tenant, "tenant.create", actor)

        return await self._write(work, InvalidRequest(f"The tenant {spec.tenant} exists already.", param="tenant"))

    async def update_tenant(self, tenant: str, change: Callable[[Row], dict[str, Any]], actor: str = SYSTEM) -> Row:
        """Set the columns that `change` makes of the row as it stands. Raises NotFound, InvalidRequest."""
        where = tenants.c.tenant == tenant

        def work(connection: sa.Connection) -> Row:
            before = _find(connection, tenants, where, f"There is no tenant {tenant}.", "tenant")
            connection.execute(sa.update(tenants).where(where).values(change(before)))
            return self._acted(connection, tenants, where, "tenant.update", actor, before)

        row = await self._store.write(work)
        await self._hot_copy.publish(api_keys.c.tenant == tenant)
        return row

    async def list_tenants(self) -> Sequence[Row]:
        """Every tenant, by name."""
        return await self._select(sa.select(tenants).order_by(tenants.c.tenant))

    async def create_project(self, tenant: str, project: str, display_name: str, actor: str = SYSTEM) -> Row:
        """Raises NotFound for an unknown tenant, InvalidRequest for a bad or taken name."""
        check_name("project", project)
        check_text("display_name", display_name)

        def work(connection: sa.Connection) -> Row:
            _find(connection, tenants, tenants.c.tenant == tenant, f"There is no tenant {tenant}.", "tenant")
            return self._add_project(connection, tenant, project, display_name, actor)

        return await self._write(work, InvalidRequest(f"The project {project} exists already.", param="project"))

    async def list_projects(self, tenant: str) -> Sequence[Row]:
        """Projects of a tenant, or of all for the empty name."""
        query = sa.select(projects).order_by(projects.c.tenant, projects.c.project)
        return await self._select(query.where(projects.c.tenant == tenant) if tenant else query)

    async def create_key(self, spec: KeySpec, secret: str | None = None, actor: str = SYSTEM) -> tuple[Row, str]:
        """A new key and its secret. Raises NotFound for an unknown tenant, InvalidRequest for bad fields."""
        _check_key(spec, self._now())
        row, secret = self._new_key(spec, secret)

        def work(connection: sa.Connection) -> Row:
            where = tenants.c.tenant == spec.tenant
            _find(connection, tenants, where, f"There is no tenant {spec.tenant}.", "tenant")
            known = sa.and_(projects.c.tenant == spec.tenant, projects.c.project == spec.project)
            if spec.project and connection.execute(sa.select(projects).where(known)).first() is None:
                self._add_project(connection, spec.tenant, spec.project, "", actor)
            connection.execute(sa.insert(api_keys), row)
            return self._acted(connection, api_keys, api_keys.c.key_id == row["key_id"], "key.create", actor)

        made = await self._write(work, InvalidRequest("This key exists already.", param="key_id"))
        await self._hot_copy.publish(api_keys.c.key_id == made.key_id)
        return made, secret

    async def update_key(self, key_id: str, change: Callable[[Row], dict[str, Any]], actor: str = SYSTEM) -> Row:
        """Set the columns that `change` makes of the row as it stands. Raises NotFound, InvalidRequest."""
        row = await self._store.write(lambda connection: self._change_key(connection, key_id, change, actor))
        await self._hot_copy.publish(api_keys.c.key_id == key_id)
        return row

    async def rotate_key(self, key_id: str, overlap: timedelta, actor: str = SYSTEM) -> tuple[Row, str, Row]:
        """A new key that may do what the old one may, its secret, and the old key, which ends after the overlap.

        Raises NotFound, and InvalidRequest for a key that has ended or an overlap below 0 or above 90 days.
        """
        if not timedelta() <= overlap <= MAX_OVERLAP:
            raise InvalidRequest("overlap must be between 0 and 90 days.", param="overlap")
        now = self._now()

        def work(connection: sa.Connection) -> tuple[Row, str, Row]:
            old = _find(connection, api_keys, api_keys.c.key_id == key_id, f"There is no key {key_id}.", "key_id")
            if old.revoke_time is not None or (old.expire_time is not None and old.expire_time <= now):
                raise InvalidRequest("A key that has ended cannot be rotated; create a new one.", param="key_id")
            row, secret = self._new_key(KeySpec(old.tenant, old.display_name, project=old.project))
            row |= {name: getattr(old, name) for name in ("models", "expire_time", "policy", "scopes")}
            connection.execute(sa.insert(api_keys), row)
            made = self._acted(connection, api_keys, api_keys.c.key_id == row["key_id"], "key.create", actor)
            ends = min(now + overlap, old.expire_time or datetime.max.replace(tzinfo=UTC))
            return made, secret, self._change_key(connection, key_id, lambda _: {"expire_time": ends}, actor)

        made, secret, old = await self._store.write(work)
        await self._hot_copy.publish(api_keys.c.key_id.in_([made.key_id, key_id]))
        return made, secret, old

    async def list_keys(self, tenant: str) -> Sequence[Row]:
        """Keys of a tenant, or of all for the empty name; newest last."""
        query = sa.select(api_keys).order_by(api_keys.c.create_time, api_keys.c.key_id)
        return await self._select(query.where(api_keys.c.tenant == tenant) if tenant else query)

    async def revoke_key(self, key_id: str, actor: str = SYSTEM) -> Row:
        """Revoke now; gateways refuse it once their two-second cache is over. Idempotent. Raises NotFound."""
        now = self._now()

        def work(connection: sa.Connection) -> Row:
            where = api_keys.c.key_id == key_id
            before = _find(connection, api_keys, where, f"There is no key {key_id}.", "key_id")
            if before.revoke_time is not None:
                return before
            connection.execute(sa.update(api_keys).where(where).values(revoke_time=now))
            return self._acted(connection, api_keys, where, "key.revoke", actor, before)

        row = await self._store.write(work)
        await self._hot_copy.publish(api_keys.c.key_id == key_id)
        return row

    async def bootstrap(self, secret: str) -> None:
        """Make sure that the tenant demo exists and that `secret` is one of its keys. Idempotent."""
        names = {row.tenant for row in await self.list_tenants()}
        if DEMO_TENANT not in names:
            with contextlib.suppress(InvalidRequest):
                # Another usage service that starts now may have been faster.
                await self.create_tenant(TenantSpec(DEMO_TENANT, display_name="Demo"))
        known = sa.select(api_keys.c.key_id).where(api_keys.c.digest == digest_of(secret))
        if not await self._select(known):
            with contextlib.suppress(InvalidRequest):
                await self.create_key(KeySpec(DEMO_TENANT, display_name="bootstrap"), secret)

    def _change_key(
        self, connection: sa.Connection, key_id: str, change: Callable[[Row], dict[str, Any]], actor: str
    ) -> Row:
        where = api_keys.c.key_id == key_id
        before = _find(connection, api_keys, where, f"There is no key {key_id}.", "key_id")
        connection.execute(sa.update(api_keys).where(where).values(change(before)))
        return self._acted(connection, api_keys, where, "key.update", actor, before)

    def _add_project(self, connection: sa.Connection, tenant: str, project: str, text: str, actor: str) -> Row:
        row = {"tenant": tenant, "project": project, "display_name": text, "create_time": self._now()}
        connection.execute(sa.insert(projects), row)
        where = sa.and_(projects.c.tenant == tenant, projects.c.project == project)
        return self._acted(connection, projects, where, "project.create", actor)

    def _new_key(self, spec: KeySpec, secret: str | None = None) -> tuple[dict[str, Any], str]:
        key_id = secrets.token_hex(6)
        if secret is None:
            secret = f"mr_{key_id}_{random_text()}"
        return {
            "key_id": key_id,
            "tenant": spec.tenant,
            "project": spec.project,
            "display_name": spec.display_name,
            "digest": digest_of(secret),
            "prefix": secret.rpartition("_")[0],
            "models": list(spec.models),
            "create_time": self._now(),
            "expire_time": spec.expire_time,
            "policy": policy_to_json(spec.policy),
            "scopes": list(spec.scopes),
        }, secret

    def _acted(
        self,
        connection: sa.Connection,
        table: sa.Table,
        where: Condition,
        action: str,
        actor: str,
        before: Row | None = None,
    ) -> Row:
        """The row as it now is, its change on record."""
        after = connection.execute(sa.select(table).where(where)).one()
        subject = {"tenant": "tenant", "project": "project", "key": "key_id"}[action.partition(".")[0]]
        act = Act(
            actor,
            action,
            after.tenant,
            getattr(after, subject),
            None if before is None else shown(before),
            shown(after),
        )
        record(connection, act, self._now())
        return after

    async def _write(self, work: Callable[[sa.Connection], Row], taken: InvalidRequest) -> Row:
        try:
            return await self._store.write(work)
        except IntegrityError:
            raise taken from None

    async def _select(self, query: sa.Select[Any]) -> Sequence[Row]:
        return await self._store.read(lambda connection: list(connection.execute(query)))

    def _now(self) -> datetime:
        return datetime.fromtimestamp(self._clock.wall(), UTC)


def digest_of(secret: str) -> bytes:
    """SHA-256 of a secret: what is stored and looked up."""
    return hashlib.sha256(secret.encode()).digest()


def random_text() -> str:
    """The random part of a secret."""
    return "".join(secrets.choice(ALPHABET) for _ in range(SECRET_CHARS))


def check_name(field: str, name: str) -> None:
    """Raise InvalidRequest for what is no name of a tenant, a project or an administrator."""
    if NAME.fullmatch(name) is None:
        raise InvalidRequest(
            f"{field}: a name is 1 to 63 letters, digits, dots, dashes and underscores, the first a letter or digit.",
            param=field,
        )


def check_text(field: str, text: str) -> None:
    """Raise InvalidRequest for a text that is too long or cannot be printed."""
    if len(text) > MAX_TEXT or not (text.isprintable() or text == ""):
        raise InvalidRequest(f"{field} takes at most {MAX_TEXT} printable characters.", param=field)


def _find(connection: sa.Connection, table: sa.Table, where: Condition, missing: str, param: str) -> Row:
    row = connection.execute(sa.select(table).where(where).with_for_update()).one_or_none()
    if row is None:
        raise NotFound(missing, param=param)
    return row


def _check_key(spec: KeySpec, now: datetime) -> None:
    check_text("display_name", spec.display_name)
    check_policy(spec.policy)
    check_policy_of_key(spec.policy)
    if spec.project:
        check_name("project", spec.project)
    if len(spec.models) > MAX_MODELS or any(not 1 <= len(m) <= MAX_TEXT or not m.isprintable() for m in spec.models):
        raise InvalidRequest(f"models takes at most {MAX_MODELS} names of up to {MAX_TEXT} characters.", param="models")
    if not spec.scopes or not set(spec.scopes) <= set(SCOPES):
        raise InvalidRequest(f"scopes takes {' and '.join(SCOPES)}.", param="scopes")
    if spec.expire_time is not None and spec.expire_time <= now:
        raise InvalidRequest("expire_time lies in the past.", param="expire_time")
