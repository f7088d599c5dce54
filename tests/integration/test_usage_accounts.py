"""Accounts over their wire on both databases: limits, projects, scopes, rotation, administrators, audit."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from datetime import UTC, date, datetime
from typing import Any

import grpc
import pytest
import redis.asyncio as aioredis
import sqlalchemy as sa
from google.protobuf import duration_pb2, json_format
from millrace.common.v1 import common_pb2
from millrace.usage.v1 import usage_service_pb2 as pb
from millrace.usage.v1 import usage_service_pb2_grpc as pb_grpc

from services.common.admission_store import AdmissionStore
from services.common.admission_types import KeyRecord, LengthCap, QuotaLimits, Refusal, Reserve, Spent
from services.common.clock import SystemClock
from services.common.errors import (
    InvalidRequest,
    MillraceError,
    NotFound,
    PermissionDenied,
    StoreUnavailable,
    Unauthenticated,
)
from services.common.grpc_client import error_from_rpc, open_channel
from services.usage import schema
from services.usage.accounts import Accounts, KeySpec, TenantSpec
from services.usage.config import UsageConfig
from services.usage.hot_copy import HotCopy
from services.usage.policies import Policy, policy_from_json, policy_to_json
from services.usage.spending import key_spent, tenant_spent
from services.usage.store import Store
from services.usage.wiring import UsageApp, build
from tests.helpers.redis import RedisProcess
from tests.helpers.usage import START, insert, make_entry

ROOT = "root-token-for-tests"


class Admin:
    """A client of the account service that sends one secret with every call."""

    def __init__(self, channel: grpc.aio.Channel, secret: str = ROOT) -> None:
        self.accounts = pb_grpc.AccountServiceStub(channel)
        self.usage = pb_grpc.UsageServiceStub(channel)
        self.sent: dict[str, Any] = {"metadata": (("authorization", f"Bearer {secret}"),)}

    async def tenant(self, name: str = "acme", **fields: Any) -> pb.Tenant:
        request = pb.CreateTenantRequest(tenant=name, **fields)
        return (await self.accounts.CreateTenant(request, **self.sent)).tenant

    async def key(self, tenant: str = "acme", **fields: Any) -> pb.CreateKeyResponse:
        return await self.accounts.CreateKey(pb.CreateKeyRequest(tenant=tenant, **fields), **self.sent)

    async def audit(self, **fields: Any) -> list[pb.AuditRecord]:
        return list((await self.accounts.ListAudit(pb.ListAuditRequest(**fields), **self.sent)).records)


@pytest.fixture
async def app(store: Store, database_url: str, redis_server: RedisProcess) -> AsyncIterator[UsageApp]:
    running = build(UsageConfig(redis_url=redis_server.url, database_url=database_url, admin_token=ROOT))
    await running.start()
    yield running
    await running.drain(1.0)
    await running.stop()


@pytest.fixture
async def channel(app: UsageApp) -> AsyncIterator[grpc.aio.Channel]:
    async with open_channel(app.address) as opened:
        yield opened


@pytest.fixture
def root(channel: grpc.aio.Channel) -> Admin:
    return Admin(channel)


@pytest.fixture
def hot(redis_client: aioredis.Redis) -> AdmissionStore:
    return AdmissionStore(redis_client)


async def looked_up(hot: AdmissionStore, secret: str) -> KeyRecord:
    found = await hot.lookup_key(hashlib.sha256(secret.encode()).digest())
    assert found is not None
    return found


async def failure(call: Any) -> MillraceError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return error_from_rpc(caught.value)


async def test_gateways_see_counted_limits_apart_and_the_stricter_of_all_others(
    app: UsageApp, root: Admin, hot: AdmissionStore
) -> None:
    await app.hot_copy.rebuild()
    limits = pb.Limits(tokens_per_minute=500, monthly_budget_nanos=10**9, queued_request_count=9, worker_slot_count=4)
    limits.length_caps["*"].CopyFrom(pb.LengthCap(prompt_token_count=100, output_token_count=50, choice_count=2))
    await root.tenant(limits=limits, weight=2.0)
    own = pb.Limits(
        input_tokens_per_minute=7, queued_request_count=20, priority_ceiling=common_pb2.PRIORITY_CLASS_BATCH
    )
    own.length_caps["echo"].CopyFrom(pb.LengthCap(output_token_count=80, choice_count=4, tool_count=0))

    key = await root.key(limits=own, weight=0.1, scopes=["inference", "usage:read"], project="search")

    found = await looked_up(hot, key.secret)
    assert found == KeyRecord(
        key_id=key.key.key_id,
        tenant="acme",
        project="search",
        models=(),
        weight=0.1,
        limits=QuotaLimits(tokens_per_minute=500, monthly_budget_nanos=10**9),
        key_limits=QuotaLimits(input_tokens_per_minute=7),
        scopes=("inference", "usage:read"),
        batch_only=True,
        queued_requests=9,
        worker_slots=4,
        length_caps={"*": LengthCap(100, 50, 2), "echo": LengthCap(100, 50, 2, 0)},
    )
    listed = (await root.accounts.ListKeys(pb.ListKeysRequest(tenant="acme"), **root.sent)).keys
    assert listed[0].limits == own
    projects = await root.accounts.ListProjects(pb.ListProjectsRequest(tenant="acme"), **root.sent)
    assert [project.project for project in projects.projects] == ["search"]


async def test_a_changed_limit_reaches_every_key_of_the_tenant(app: UsageApp, root: Admin, hot: AdmissionStore) -> None:
    await app.hot_copy.rebuild()
    await root.tenant(limits=pb.Limits(requests_per_minute=5, concurrent_request_count=3), weight=3.0)
    keys = [await root.key() for _ in range(2)]

    request = pb.UpdateTenantRequest(tenant="acme", limits=pb.Limits(requests_per_minute=6))
    changed = (await root.accounts.UpdateTenant(request, **root.sent)).tenant
    own = pb.UpdateKeyRequest(key_id=keys[0].key.key_id, limits=pb.Limits(requests_per_minute=1))
    await root.accounts.UpdateKey(own, **root.sent)

    assert changed.weight == 3.0
    for key, its_own in zip(keys, (QuotaLimits(requests_per_minute=1), QuotaLimits()), strict=True):
        found = await looked_up(hot, key.secret)
        assert (found.limits, found.key_limits) == (QuotaLimits(requests_per_minute=6), its_own)


async def test_a_rotated_key_is_valid_for_the_overlap_and_its_successor_may_do_the_same(
    app: UsageApp, root: Admin, hot: AdmissionStore
) -> None:
    await app.hot_copy.rebuild()
    await root.tenant()
    old = await root.key(models=["echo"], limits=pb.Limits(requests_per_minute=5), project="p", scopes=["usage:read"])
    request = pb.RotateKeyRequest(key_id=old.key.key_id, overlap=duration_pb2.Duration(seconds=90))
    before = SystemClock().wall()

    rotated = await root.accounts.RotateKey(request, **root.sent)

    first, second = await looked_up(hot, old.secret), await looked_up(hot, rotated.secret)
    assert first.expires_at is not None
    assert before + 90 <= first.expires_at <= SystemClock().wall() + 90
    assert (second.expires_at, second.models, second.scopes) == (None, first.models, first.scopes)
    assert (second.project, second.key_limits) == ("p", first.key_limits)
    await root.accounts.RevokeKey(pb.RevokeKeyRequest(key_id=old.key.key_id), **root.sent)
    again = await failure(root.accounts.RotateKey(request, **root.sent))
    assert (type(again), again.param) == (InvalidRequest, "key_id")


async def test_a_key_that_may_read_usage_reads_its_own_tenants_and_nothing_else(
    root: Admin, channel: grpc.aio.Channel, store: Store
) -> None:
    for name in ("acme", "zeta"):
        await root.tenant(name)
    insert(store, [make_entry("r1", tenant="acme"), make_entry("r2", tenant="zeta")])
    reader = Admin(channel, (await root.key(scopes=["usage:read"])).secret)
    speaker = Admin(channel, (await root.key()).secret)

    asked = pb.ExportUsageRequest(tenant="zeta")
    rows = [row.event.request_id async for page in reader.usage.ExportUsage(asked, **reader.sent) for row in page.rows]

    assert rows == ["r1"]
    foreign = await failure(reader.usage.GetUsage(pb.GetUsageRequest(request_id="r2", tenant="zeta"), **reader.sent))
    assert isinstance(foreign, NotFound)
    own = await failure(speaker.usage.GetUsage(pb.GetUsageRequest(request_id="r1"), **speaker.sent))
    assert isinstance(own, PermissionDenied)
    for caller in (reader, speaker):
        assert isinstance(await failure(caller.tenant("new")), PermissionDenied)


async def test_administrators_have_keys_of_their_own_that_end_when_they_are_revoked(
    root: Admin, channel: grpc.aio.Channel
) -> None:
    made = await root.accounts.CreateAdminKey(pb.CreateAdminKeyRequest(name="ada"), **root.sent)
    ada = Admin(channel, made.secret)
    await ada.tenant()

    await root.accounts.RevokeAdminKey(pb.RevokeAdminKeyRequest(key_id=made.key.key_id), **root.sent)

    assert isinstance(await failure(ada.tenant("other")), Unauthenticated)
    acts = [(act.actor, act.action, act.subject) for act in await root.audit()]
    assert acts == [
        ("root", "admin_key.create", made.key.key_id),
        ("ada", "tenant.create", "acme"),
        ("root", "admin_key.revoke", made.key.key_id),
    ]
    taken = await failure(root.accounts.CreateAdminKey(pb.CreateAdminKeyRequest(name="root"), **root.sent))
    assert (type(taken), taken.param) == (InvalidRequest, "name")


async def test_without_the_key_of_an_administrator_every_call_is_refused(
    store: Store, database_url: str, redis_server: RedisProcess
) -> None:
    running = build(UsageConfig(redis_url=redis_server.url, database_url=database_url))
    await running.start()
    try:
        async with open_channel(running.address) as channel:
            for secret in ("", "x", "mra_1_abc", "\u00e9" * 4):
                caller = Admin(channel, secret.encode("ascii", "ignore").decode())
                for service in ("AccountService", "UsageService"):
                    stub = caller.accounts if service == "AccountService" else caller.usage
                    for method in pb.DESCRIPTOR.services_by_name[service].methods:
                        request = getattr(pb, method.input_type.name)()
                        call = getattr(stub, method.name)(request, **caller.sent)
                        error = await failure(call.read() if method.server_streaming else call)
                        assert isinstance(error, Unauthenticated), method.name
    finally:
        await running.stop()


async def test_every_act_leaves_a_record_of_before_and_after_and_a_failed_one_none(root: Admin) -> None:
    await root.tenant(limits=pb.Limits(requests_per_minute=5))
    await failure(root.tenant())
    await failure(root.key("nobody"))
    key = (await root.key(project="search")).key
    update = pb.UpdateTenantRequest(tenant="acme", limits=pb.Limits(requests_per_minute=6))
    await root.accounts.UpdateTenant(update, **root.sent)
    for _ in range(2):
        await root.accounts.RevokeKey(pb.RevokeKeyRequest(key_id=key.key_id), **root.sent)

    records = await root.audit(tenant="acme")

    assert [record.action for record in records] == [
        "tenant.create", "project.create", "key.create", "tenant.update", "key.revoke",
    ]  # fmt: skip
    updated = json_format.MessageToDict(records[3])
    assert updated["before"]["policy"] == {"requests_per_minute": 5}
    assert updated["after"]["policy"] == {"requests_per_minute": 6}
    assert not records[0].HasField("before")
    assert "revoke_time" not in records[4].before
    assert records[4].after["revoke_time"]
    after = await root.audit(after_audit_id=records[2].audit_id, page_size=1)
    assert [record.action for record in after] == ["tenant.update"]


async def test_a_record_that_cannot_be_written_takes_its_act_with_it(store: Store, hot: AdmissionStore) -> None:
    accounts = Accounts(store, HotCopy(store, hot, SystemClock()), SystemClock())
    store.write_sync(lambda connection: connection.execute(sa.text("DROP TABLE audit")))

    with pytest.raises((StoreUnavailable, sa.exc.ProgrammingError)):
        await accounts.create_tenant(TenantSpec("acme"))

    assert await accounts.list_tenants() == []


async def test_nothing_that_the_database_or_redis_holds_opens_a_door(
    root: Admin, store: Store, redis_client: aioredis.Redis, capsys: pytest.CaptureFixture[str]
) -> None:
    await root.tenant()
    key = await root.key()
    rotated = await root.accounts.RotateKey(pb.RotateKeyRequest(key_id=key.key.key_id), **root.sent)
    admin = await root.accounts.CreateAdminKey(pb.CreateAdminKeyRequest(name="ada"), **root.sent)

    tables = store.read_sync(
        lambda connection: {
            table.name: [tuple(row) for row in connection.execute(sa.select(table))]
            for table in schema.metadata.sorted_tables
        }
    )
    redis = {name: await redis_client.dump(name) for name in await redis_client.keys("*")}

    kept = f"{tables} {redis} {capsys.readouterr()}"
    for secret in (key.secret, rotated.secret, admin.secret):
        assert secret.rpartition("_")[2] not in kept
    assert ROOT not in kept


async def test_budgets_are_rebuilt_from_the_ledger_after_redis_lost_them(
    app: UsageApp, root: Admin, store: Store, hot: AdmissionStore, redis_server: RedisProcess
) -> None:
    await root.tenant(limits=pb.Limits(budget_token_count=1_000))
    key = (await root.key(limits=pb.Limits(budget_token_count=100))).key
    entries = [make_entry(f"r{n}", prompt=20, completion=10) for n in range(3)]
    for entry in entries:
        entry.event.key_id = key.key_id
    insert(store, entries)
    own = QuotaLimits(budget_tokens=100)

    redis_server.flush()
    asked = Reserve("acme", "new", 0, 0, 10, QuotaLimits(budget_tokens=1_000), key.key_id, own)
    refused = await hot.reserve(asked)
    await app.hot_copy.rebuild()

    assert refused == Refusal("STORE_UNAVAILABLE", 1_000, "budget_tokens")
    assert await hot.reserve(asked) is None
    more = Reserve("acme", "more", 0, 0, 1, QuotaLimits(budget_tokens=1_000), key.key_id, own)
    assert await hot.reserve(more) == Refusal("BUDGET_EXHAUSTED", 0, "budget_tokens", of_key=True)


def test_spending_is_summed_by_day_and_month(store: Store) -> None:
    times = [START, datetime(2026, 3, 31, 23, 59, 59, tzinfo=UTC), datetime(2026, 2, 28, tzinfo=UTC)]
    insert(store, [make_entry(f"r{n}", prompt=10, completion=n, end_time=time) for n, time in enumerate(times)])

    def read(connection: sa.Connection) -> tuple[Spent, Spent, Spent]:
        day = START.date()
        return (
            tenant_spent(connection, "acme", day),
            key_spent(connection, "acme", "k1", day),
            key_spent(connection, "acme", "k1", date(2026, 2, 28)),
        )

    tenant, key, earlier = store.read_sync(read)

    assert tenant == key == Spent(START.date(), 33, 10, 0, 21, 0)
    assert (earlier.day_tokens, earlier.month_tokens) == (12, 12)


def test_a_policy_is_stored_and_read_back_whole() -> None:
    policy = Policy(
        QuotaLimits(1, 2, 3, 4, 5, 6, 7, 8, 9, 10),
        weight=0.5,
        queued_requests=11,
        worker_slots=12,
        worker_blocks=13,
        batch_only=True,
        length_caps={"m@1": LengthCap(1), "*": LengthCap(None, 2), "n": LengthCap(tools=0), "o": LengthCap()},
    )

    assert policy_from_json(policy_to_json(policy)) == policy
    assert policy_to_json(Policy()) == {}


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        (KeySpec("acme", policy=Policy(QuotaLimits(daily_budget_tokens=0))), "daily_budget_tokens"),
        (KeySpec("acme", policy=Policy(QuotaLimits(monthly_budget_nanos=2**53))), "monthly_budget_nanos"),
        (KeySpec("acme", policy=Policy(worker_slots=1)), "worker_slots"),
        (KeySpec("acme", policy=Policy(length_caps={"": LengthCap()})), "length_caps"),
        (KeySpec("acme", policy=Policy(length_caps={"m": LengthCap(0)})), "length_caps"),
        (KeySpec("acme", policy=Policy(length_caps={"m": LengthCap(choices=0)})), "length_caps"),
        (KeySpec("acme", policy=Policy(length_caps={"m": LengthCap(tools=-1)})), "length_caps"),
        (KeySpec("acme", policy=Policy(weight=float("nan"))), "weight"),
        (KeySpec("acme", scopes=()), "scopes"),
        (KeySpec("acme", scopes=("admin",)), "scopes"),
    ],
)
async def test_a_bad_policy_is_refused_with_the_field_named(hot: AdmissionStore, spec: KeySpec, field: str) -> None:
    accounts = Accounts(None, None, SystemClock())  # type: ignore[arg-type]

    with pytest.raises(InvalidRequest) as refused:
        await accounts.create_key(spec)

    assert refused.value.param == field
