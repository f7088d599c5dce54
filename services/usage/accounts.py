"""Tenants and API keys. Truth is the database; Redis holds a hot copy that gateways read, rebuilt from truth.

A secret is `mr_<key id>_<random>`; only its SHA-256 is stored, and it is shown once, in the answer that creates it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import re
import secrets
import string
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa
import structlog
from sqlalchemy.exc import IntegrityError

from services.common.admission_store import AdmissionStore
from services.common.admission_types import KeyRecord, QuotaLimits
from services.common.clock import Clock
from services.common.errors import InvalidRequest, NotFound, StoreUnavailable
from services.usage.schema import api_keys, tenants
from services.usage.store import Store

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
MAX_TEXT = 256
MAX_MODELS = 64
# 24 of 62 characters are 142 random bits.
SECRET_CHARS = 24
ALPHABET = string.ascii_letters + string.digits
OWN_SECRET = re.compile(r"mr_[0-9A-Za-z]{1,32}_[0-9A-Za-z]{16,128}")
REBUILD_EVERY_S = 30.0
CHECK_EVERY_S = 1.0
DEMO_TENANT = "demo"


@dataclasses.dataclass(frozen=True, slots=True)
class TenantSpec:
    """What a tenant is created with; `weight` > 0 is its share against other tenants."""

    tenant: str
    display_name: str = ""
    limits: QuotaLimits = dataclasses.field(default_factory=QuotaLimits)
    queued_requests: int | None = None
    weight: float = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class KeySpec:
    """What a key is created with; no models means all of the tenant's."""

    tenant: str
    display_name: str = ""
    models: tuple[str, ...] = ()
    expire_time: datetime | None = None
    project: str = ""


class Accounts:
    """Creates, lists and revokes; keeps the hot copy true."""

    def __init__(self, store: Store, admission: AdmissionStore, clock: Clock) -> None:
        self._store = store
        self._admission = admission
        self._clock = clock
        # The hot copy may differ from the database: rebuild it as soon as Redis answers.
        self._stale = True

    async def create_tenant(self, spec: TenantSpec) -> sa.Row[Any]:
        """Raises InvalidRequest for a bad or taken name or a limit below 1."""
        _check_tenant(spec)
        row = {
            "tenant": spec.tenant,
            "display_name": spec.display_name,
            **dataclasses.asdict(spec.limits),
            "queued_requests": spec.queued_requests,
            "weight": spec.weight,
            "create_time": self._now(),
        }
        try:
            await self._store.write(lambda connection: connection.execute(sa.insert(tenants), row))
        except IntegrityError:
            raise InvalidRequest(f"The tenant {spec.tenant} exists already.", param="tenant") from None
        return (await self._select(sa.select(tenants).where(tenants.c.tenant == spec.tenant)))[0]

    async def list_tenants(self) -> Sequence[sa.Row[Any]]:
        """Every tenant, by name."""
        return await self._select(sa.select(tenants).order_by(tenants.c.tenant))

    async def create_key(self, spec: KeySpec, secret: str | None = None) -> tuple[sa.Row[Any], str]:
        """A new key and its secret. Raises NotFound for an unknown tenant, InvalidRequest for bad fields."""
        _check_key(spec, self._now())
        key_id = secrets.token_hex(6)
        if secret is None:
            secret = f"mr_{key_id}_{''.join(secrets.choice(ALPHABET) for _ in range(SECRET_CHARS))}"
        row = {
            "key_id": key_id,
            "tenant": spec.tenant,
            "project": spec.project,
            "display_name": spec.display_name,
            "digest": digest_of(secret),
            "prefix": secret.rpartition("_")[0],
            "models": list(spec.models),
            "create_time": self._now(),
            "expire_time": spec.expire_time,
        }

        def insert(connection: sa.Connection) -> None:
            if connection.execute(sa.select(tenants.c.tenant).where(tenants.c.tenant == spec.tenant)).first() is None:
                raise NotFound(f"There is no tenant {spec.tenant}.", param="tenant")
            connection.execute(sa.insert(api_keys), row)

        try:
            await self._store.write(insert)
        except IntegrityError:
            raise InvalidRequest("This key exists already.", param="key_id") from None
        await self._publish(key_id)
        return (await self._select(sa.select(api_keys).where(api_keys.c.key_id == key_id)))[0], secret

    async def list_keys(self, tenant: str) -> Sequence[sa.Row[Any]]:
        """Keys of a tenant, or of all for the empty name; newest last."""
        query = sa.select(api_keys).order_by(api_keys.c.create_time, api_keys.c.key_id)
        return await self._select(query.where(api_keys.c.tenant == tenant) if tenant else query)

    async def revoke_key(self, key_id: str) -> sa.Row[Any]:
        """Revoke now; gateways refuse it once their two-second cache is over. Idempotent. Raises NotFound."""
        change = (
            sa.update(api_keys)
            .where(api_keys.c.key_id == key_id, api_keys.c.revoke_time.is_(None))
            .values(revoke_time=self._now())
        )
        await self._store.write(lambda connection: connection.execute(change))
        rows = await self._select(sa.select(api_keys).where(api_keys.c.key_id == key_id))
        if not rows:
            raise NotFound(f"There is no key {key_id}.", param="key_id")
        await self._publish(key_id)
        return rows[0]

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

    async def rebuild_hot_copy(self) -> None:
        """Replace all of Redis' copy by what the database says. Raises StoreUnavailable.

        What changes in the database while the copy is written is written after it: a key that was revoked meanwhile,
        here or by another usage service, does not come back to life.
        """
        self._stale = False
        try:
            written = await self._records(sa.true())
            await self._admission.replace_keys(written)
            while changed := _changes(written, await self._records(sa.true())):
                for digest, record in changed.items():
                    await self._admission.put_key(digest, record)
                written |= changed
        except BaseException:
            self._stale = True
            raise

    async def keep_hot_copy(self) -> None:
        """For ever: rebuild at start, each 30 s, and within a second once Redis has lost it or missed a change."""
        due = 0.0
        while True:
            try:
                if self._stale or self._clock.monotonic() >= due or await self._copy_is_gone():
                    await self.rebuild_hot_copy()
                    due = self._clock.monotonic() + REBUILD_EVERY_S
            except StoreUnavailable as error:
                structlog.get_logger().warning("hot_copy_waits", error=error.message)
            await self._clock.sleep(CHECK_EVERY_S)

    async def _copy_is_gone(self) -> bool:
        try:
            await self._admission.lookup_key(b"")
        except StoreUnavailable:
            return True
        return False

    async def _publish(self, key_id: str) -> None:
        records = await self._records(api_keys.c.key_id == key_id)
        try:
            for digest, record in records.items():
                await self._admission.put_key(digest, record)
        except StoreUnavailable as error:
            # The database has it, which is what counts; gateways cannot look keys up now either.
            self._stale = True
            structlog.get_logger().warning("hot_copy_waits", error=error.message)

    async def _records(self, condition: sa.ColumnElement[bool]) -> dict[bytes, KeyRecord]:
        query = sa.select(api_keys, tenants).join_from(api_keys, tenants).where(condition)
        rows = await self._select(query.set_label_style(sa.LABEL_STYLE_TABLENAME_PLUS_COL))
        return {bytes(row.api_keys_digest): _record(row) for row in rows}

    async def _select(self, query: sa.Select[Any]) -> Sequence[sa.Row[Any]]:
        return await self._store.read(lambda connection: list(connection.execute(query)))

    def _now(self) -> datetime:
        return datetime.fromtimestamp(self._clock.wall(), UTC)


def digest_of(secret: str) -> bytes:
    """SHA-256 of a secret: what is stored and looked up."""
    return hashlib.sha256(secret.encode()).digest()


def check_secret(secret: str) -> str:
    """Check the form of a secret that an operator chose; returns it. Raises ValueError."""
    if secret and OWN_SECRET.fullmatch(secret) is None:
        raise ValueError("expected mr_<name>_<at least 16 letters and digits>")
    return secret


def _changes(old: dict[bytes, KeyRecord], new: dict[bytes, KeyRecord]) -> dict[bytes, KeyRecord]:
    return {digest: record for digest, record in new.items() if old.get(digest) != record}


def _record(row: Any) -> KeyRecord:
    expires = row.api_keys_expire_time
    return KeyRecord(
        key_id=row.api_keys_key_id,
        tenant=row.tenants_tenant,
        project=row.api_keys_project,
        models=tuple(row.api_keys_models),
        weight=row.tenants_weight,
        limits=QuotaLimits(
            requests_per_minute=row.tenants_requests_per_minute,
            tokens_per_minute=row.tenants_tokens_per_minute,
            concurrent_requests=row.tenants_concurrent_requests,
            budget_tokens=row.tenants_budget_tokens,
        ),
        expires_at=None if expires is None else expires.timestamp(),
        revoked=row.api_keys_revoke_time is not None,
    )


def _check_tenant(spec: TenantSpec) -> None:
    if NAME.fullmatch(spec.tenant) is None:
        raise InvalidRequest(
            "A tenant's name is 1 to 63 letters, digits, dots, dashes and underscores, the first a letter or digit.",
            param="tenant",
        )
    _check_text("display_name", spec.display_name)
    limits = dataclasses.asdict(spec.limits) | {"queued_requests": spec.queued_requests}
    for name, value in limits.items():
        if value is not None and not 1 <= value < 2**31 * (2**20 if "tokens" in name else 1):
            raise InvalidRequest(f"{name} must be at least 1; leave it out for no limit.", param=name)
    if not 0.001 <= spec.weight <= 1_000:
        raise InvalidRequest("weight must be between 0.001 and 1000.", param="weight")


def _check_key(spec: KeySpec, now: datetime) -> None:
    _check_text("display_name", spec.display_name)
    if spec.project and NAME.fullmatch(spec.project) is None:
        raise InvalidRequest("A project's name follows the rule of a tenant's name.", param="project")
    if len(spec.models) > MAX_MODELS or any(not 1 <= len(m) <= MAX_TEXT or not m.isprintable() for m in spec.models):
        raise InvalidRequest(f"models takes at most {MAX_MODELS} names of up to {MAX_TEXT} characters.", param="models")
    if spec.expire_time is not None and spec.expire_time <= now:
        raise InvalidRequest("expire_time lies in the past.", param="expire_time")


def _check_text(name: str, text: str) -> None:
    if len(text) > MAX_TEXT or not (text.isprintable() or text == ""):
        raise InvalidRequest(f"{name} takes at most {MAX_TEXT} printable characters.", param=name)
