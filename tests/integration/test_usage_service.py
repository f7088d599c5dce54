"""The usage service over its wire: accounts, hot copy of keys, exports, administrators, and its process."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest
import redis.asyncio as aioredis
import sqlalchemy as sa
from google.protobuf import timestamp_pb2
from millrace.usage.v1 import usage_service_pb2 as pb
from millrace.usage.v1 import usage_service_pb2_grpc as pb_grpc

from services.common.admission_scripts import pool_key
from services.common.admission_store import AdmissionStore
from services.common.admission_types import KeyRecord, Pool, QuotaLimits, WorkerRecord
from services.common.clock import SystemClock
from services.common.errors import InvalidRequest, MillraceError, NotFound, StoreUnavailable, Unauthenticated
from services.common.grpc_client import error_from_rpc, open_channel
from services.common.lifecycle import end_tasks
from services.usage.accounts import Accounts, KeySpec, TenantSpec
from services.usage.config import UsageConfig
from services.usage.hot_copy import HotCopy
from services.usage.store import Store
from services.usage.wiring import UsageApp, build
from tests.helpers import containers
from tests.helpers.redis import RedisProcess, free_port
from tests.helpers.stack import ROOT, clean_environment
from tests.helpers.usage import START, insert, make_entry, make_event
from tests.helpers.waiting import WAIT_S, until

TOKEN = "admin-token-for-tests"
POOL = Pool("echo")


@pytest.fixture
async def app(store: Store, database_url: str, redis_server: RedisProcess, tmp_path: Path) -> AsyncIterator[UsageApp]:
    config = UsageConfig(
        redis_url=redis_server.url,
        database_url=database_url,
        data_dir=str(tmp_path / "data"),
        admin_token=TOKEN,
        bootstrap_key="mr_demo_" + "a1" * 16,
    )
    running = build(config)
    await running.start()
    yield running
    await running.drain(1.0)
    await running.stop()


@pytest.fixture
async def channel(app: UsageApp) -> AsyncIterator[grpc.aio.Channel]:
    async with open_channel(app.address) as opened:
        yield opened


AS_ROOT = {"metadata": (("authorization", f"Bearer {TOKEN}"),)}


async def failure(call: grpc.aio.Call) -> MillraceError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return error_from_rpc(caught.value)


def digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


async def test_a_key_works_at_once_is_shown_once_and_stored_as_a_digest(
    channel: grpc.aio.Channel, store: Store, redis_client: aioredis.Redis
) -> None:
    accounts = pb_grpc.AccountServiceStub(channel)
    limits = pb.Limits(requests_per_minute=60, budget_token_count=10**12)
    await accounts.CreateTenant(pb.CreateTenantRequest(tenant="acme", limits=limits, weight=2.0), **AS_ROOT)

    created = await accounts.CreateKey(pb.CreateKeyRequest(tenant="acme", models=["echo"], project="search"), **AS_ROOT)

    found = await AdmissionStore(redis_client).lookup_key(digest(created.secret))
    assert found == KeyRecord(
        key_id=created.key.key_id,
        tenant="acme",
        project="search",
        models=("echo",),
        weight=2.0,
        limits=QuotaLimits(requests_per_minute=60, budget_tokens=10**12),
    )
    kept = store.read_sync(lambda c: c.execute(sa.text("SELECT * FROM api_keys WHERE tenant = 'acme'")).all())
    listed = await accounts.ListKeys(pb.ListKeysRequest(tenant="acme"), **AS_ROOT)
    random_part = created.secret.rpartition("_")[2]
    assert len(random_part) == 24
    assert random_part not in f"{kept} {listed}"


async def test_a_revoked_key_is_revoked_for_gateways_within_five_seconds_and_stays_so(
    app: UsageApp, channel: grpc.aio.Channel, redis_client: aioredis.Redis
) -> None:
    accounts = pb_grpc.AccountServiceStub(channel)
    created = await accounts.CreateKey(pb.CreateKeyRequest(tenant="demo"), **AS_ROOT)

    answer = await accounts.RevokeKey(pb.RevokeKeyRequest(key_id=created.key.key_id), **AS_ROOT)
    again = await accounts.RevokeKey(pb.RevokeKeyRequest(key_id=created.key.key_id), **AS_ROOT)

    hot = AdmissionStore(redis_client)

    async def refused() -> bool:
        found = await hot.lookup_key(digest(created.secret))
        return found is None or found.revoked

    await until(refused)
    assert answer.key.HasField("revoke_time")
    assert again.key.revoke_time == answer.key.revoke_time
    await app.hot_copy.rebuild()
    assert await refused()


async def test_a_flushed_hot_copy_comes_back_by_itself(app: UsageApp, redis_client: aioredis.Redis) -> None:
    hot = AdmissionStore(redis_client)
    secret = "mr_demo_" + "a1" * 16

    known = functools.partial(_looked_up, hot, secret)
    await until(known)
    await redis_client.flushall()
    await until(known)


async def _looked_up(hot: AdmissionStore, secret: str) -> bool:
    try:
        found = await hot.lookup_key(digest(secret))
    except StoreUnavailable:
        return False
    return found is not None and not found.revoked


class RevokedMeanwhile(AdmissionStore):
    """Another usage service revokes a key after this one read the keys and before it has written them."""

    def __init__(self, client: aioredis.Redis, other: Accounts, key_id: str) -> None:
        super().__init__(client)
        self._other = other
        self._key_id = key_id

    async def replace_keys(self, keys: dict[bytes, KeyRecord]) -> None:
        await self._other.revoke_key(self._key_id)
        await super().replace_keys(keys)


async def test_a_rebuild_never_brings_a_key_back_that_was_revoked_meanwhile(
    store: Store, redis_client: aioredis.Redis
) -> None:
    hot = AdmissionStore(redis_client)
    other = Accounts(store, HotCopy(store, hot, SystemClock()), SystemClock())
    await other.create_tenant(TenantSpec("acme"))
    row, secret = await other.create_key(KeySpec("acme"))
    slow = HotCopy(store, RevokedMeanwhile(redis_client, other, row.key_id), SystemClock())

    await slow.rebuild()

    found = await hot.lookup_key(digest(secret))
    assert found is None or found.revoked


async def test_accounts_change_while_redis_is_away_and_the_hot_copy_follows(store: Store) -> None:
    server = RedisProcess().start()
    client = aioredis.Redis.from_url(server.url, protocol=2)
    try:
        hot = AdmissionStore(client)
        copy = HotCopy(store, hot, SystemClock())
        accounts = Accounts(store, copy, SystemClock())
        await accounts.create_tenant(TenantSpec("acme"))
        old, old_secret = await accounts.create_key(KeySpec("acme"))
        keeper = asyncio.create_task(copy.keep())
        await until(functools.partial(_looked_up, hot, old_secret))
        server.kill()

        _, secret = await accounts.create_key(KeySpec("acme"))
        await accounts.revoke_key(old.key_id)
        server.start()

        async def follows() -> bool:
            return await _looked_up(hot, secret) and not await _looked_up(hot, old_secret)

        await until(follows)
        await end_tasks([keeper])
    finally:
        await client.aclose()
        server.stop()


async def test_bad_accounts_are_refused_with_the_field_named(channel: grpc.aio.Channel) -> None:
    accounts = pb_grpc.AccountServiceStub(channel)
    past = timestamp_pb2.Timestamp(seconds=1)
    cases = [
        (accounts.CreateTenant(pb.CreateTenantRequest(tenant=""), **AS_ROOT), InvalidRequest, "tenant"),
        (accounts.CreateTenant(pb.CreateTenantRequest(tenant="a b"), **AS_ROOT), InvalidRequest, "tenant"),
        (accounts.CreateTenant(pb.CreateTenantRequest(tenant="x" * 64), **AS_ROOT), InvalidRequest, "tenant"),
        (accounts.CreateTenant(pb.CreateTenantRequest(tenant="demo"), **AS_ROOT), InvalidRequest, "tenant"),
        (
            accounts.CreateTenant(pb.CreateTenantRequest(tenant="w", weight=float("nan")), **AS_ROOT),
            InvalidRequest,
            "weight",
        ),
        (accounts.CreateTenant(pb.CreateTenantRequest(tenant="w", weight=0), **AS_ROOT), InvalidRequest, "weight"),
        (
            accounts.CreateTenant(pb.CreateTenantRequest(tenant="l", limits=pb.Limits(tokens_per_minute=0)), **AS_ROOT),
            InvalidRequest,
            "tokens_per_minute",
        ),
        (accounts.CreateKey(pb.CreateKeyRequest(tenant="nobody"), **AS_ROOT), NotFound, "tenant"),
        (
            accounts.CreateKey(pb.CreateKeyRequest(tenant="demo", expire_time=past), **AS_ROOT),
            InvalidRequest,
            "expire_time",
        ),
        (
            accounts.CreateKey(pb.CreateKeyRequest(tenant="demo", models=["m"] * 65), **AS_ROOT),
            InvalidRequest,
            "models",
        ),
        (
            accounts.CreateKey(pb.CreateKeyRequest(tenant="demo", display_name="a\nb"), **AS_ROOT),
            InvalidRequest,
            "display_name",
        ),
        (accounts.RevokeKey(pb.RevokeKeyRequest(key_id="nothing"), **AS_ROOT), NotFound, "key_id"),
    ]
    for call, kind, field in cases:
        error = await failure(call)
        assert (type(error), error.param) == (kind, field)


async def test_an_export_streams_every_row_once_in_order_even_past_a_page(
    channel: grpc.aio.Channel, store: Store
) -> None:
    insert(store, [make_entry(f"r{n:04}", tenant="ab"[n % 2]) for n in range(1_203)])
    usage = pb_grpc.UsageServiceStub(channel)

    rows = [row async for page in usage.ExportUsage(pb.ExportUsageRequest(), **AS_ROOT) for row in page.rows]
    rest = [
        row
        async for page in usage.ExportUsage(pb.ExportUsageRequest(after_row_id=1_200), **AS_ROOT)
        for row in page.rows
    ]
    of_b = [row async for page in usage.ExportUsage(pb.ExportUsageRequest(tenant="b"), **AS_ROOT) for row in page.rows]

    assert [row.row_id for row in rows] == list(range(1, 1_204))
    assert rows[7].event == make_event("r0007", tenant="b")
    assert [row.row_id for row in rest] == [1_201, 1_202, 1_203]
    assert {row.event.tenant for row in of_b} == {"b"}
    assert len(of_b) == 601


async def test_a_time_that_no_calendar_has_is_a_bad_request(channel: grpc.aio.Channel) -> None:
    usage = pb_grpc.UsageServiceStub(channel)
    request = pb.ExportUsageRequest(start_time=timestamp_pb2.Timestamp(seconds=10**13))

    error = await failure(usage.ExportUsage(request, **AS_ROOT).read())

    assert (type(error), error.param) == (InvalidRequest, "start_time")


async def test_a_request_is_in_the_ledger_within_three_seconds_of_its_event(
    channel: grpc.aio.Channel, redis_client: aioredis.Redis
) -> None:
    await AdmissionStore(redis_client).register_worker(
        WorkerRecord("w1", "127.0.0.1:1", "echo", "1", POOL, "AGGREGATED")
    )
    usage = pb_grpc.UsageServiceStub(channel)
    await redis_client.xadd(pool_key(POOL, "usage"), {"e": make_event("r1").SerializeToString()})

    async def visible() -> bool:
        try:
            await usage.GetUsage(pb.GetUsageRequest(request_id="r1", tenant="acme"), **AS_ROOT)
        except grpc.aio.AioRpcError as error:
            if isinstance(error_from_rpc(error), NotFound):
                return False
            raise
        return True

    await until(visible)
    error = await failure(usage.GetUsage(pb.GetUsageRequest(request_id="r1", tenant="zeta"), **AS_ROOT))
    assert isinstance(error, NotFound)


async def test_with_a_token_configured_every_call_without_it_is_refused(
    tmp_path: Path, redis_server: RedisProcess
) -> None:
    config = UsageConfig(
        redis_url=redis_server.url,
        database_url=f"sqlite:///{tmp_path}/usage.sqlite3",
        data_dir=str(tmp_path / "data"),
        admin_token=TOKEN,
    )
    running = build(config)
    await running.start()
    try:
        async with open_channel(running.address) as channel:
            for stub, service in (
                (pb_grpc.UsageServiceStub(channel), pb.DESCRIPTOR.services_by_name["UsageService"]),
                (pb_grpc.AccountServiceStub(channel), pb.DESCRIPTOR.services_by_name["AccountService"]),
                (pb_grpc.PriceServiceStub(channel), pb.DESCRIPTOR.services_by_name["PriceService"]),
            ):
                for method in service.methods:
                    request = getattr(pb, method.input_type.name)()
                    for sent in ((), (("authorization", "Bearer wrong"),), (("authorization", TOKEN),)):
                        call = getattr(stub, method.name)(request, metadata=sent)
                        error = await failure(call.read() if method.server_streaming else call)
                        assert isinstance(error, Unauthenticated), method.name
            good = (("authorization", f"Bearer {TOKEN}"),)
            listed = await pb_grpc.AccountServiceStub(channel).ListTenants(pb.ListTenantsRequest(), metadata=good)
            assert list(listed.tenants) == []
    finally:
        await running.stop()


def run_service(settings: dict[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "services.usage"],
        env=clean_environment(folder, settings),
        cwd=ROOT,
        timeout=60,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"MILLRACE_DATABASE_URL": "mysql://root:hunter2@db/x"}, "mysql"),
        ({"MILLRACE_DATABASE_URL": "sqlite:////proc/no/usage.db"}, "cannot be opened"),
        ({"MILLRACE_DATABASE_URL": "postgresql://u:hunter2@127.0.0.1:1/x"}, "cannot be opened"),
        ({"MILLRACE_DATA_DIR": "/proc/no"}, "/proc/no"),
        ({"MILLRACE_BOOTSTRAP_KEY": "hunter2"}, "MILLRACE_BOOTSTRAP_KEY"),
        ({"MILLRACE_DATABSE_URL": "sqlite:///x"}, "MILLRACE_DATABASE_URL"),
        ({"MILLRACE_GRPC_LISTEN": "nowhere"}, "MILLRACE_GRPC_LISTEN"),
    ],
)
def test_a_mistake_of_the_operator_is_one_sentence_and_exit_code_two(
    settings: dict[str, str], sentence: str, tmp_path: Path
) -> None:
    base = {
        "MILLRACE_DATABASE_URL": f"sqlite:///{tmp_path}/usage.sqlite3",
        "MILLRACE_DATA_DIR": str(tmp_path / "data"),
    }

    done = run_service(base | settings, tmp_path)

    assert done.returncode == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
    assert "hunter2" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.fixture(scope="module")
def redis_backend() -> Iterator[containers.Backend]:
    backend = containers.start_redis()
    yield backend
    backend.stop()


def cli(folder: Path, address: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = clean_environment(folder, {"MILLRACE_USAGE_ADDRESS": address, "MILLRACE_ADMIN_TOKEN": TOKEN})
    argv = [sys.executable, "-m", "cli.main", *arguments]
    return subprocess.run(argv, env=environment, cwd=folder, timeout=60, capture_output=True, text=True, check=False)


def test_the_process_and_the_commands_from_key_to_export(
    redis_backend: containers.Backend, new_postgres_url: object, tmp_path: Path
) -> None:
    address = f"127.0.0.1:{free_port()}"
    settings = {
        "MILLRACE_REDIS_URL": redis_backend.new_url(),
        "MILLRACE_DATABASE_URL": new_postgres_url(),  # type: ignore[operator]
        "MILLRACE_DATA_DIR": str(tmp_path / "data"),
        "MILLRACE_GRPC_LISTEN": address,
        "MILLRACE_ADMIN_TOKEN": TOKEN,
    }
    argv = [sys.executable, "-m", "services.usage"]
    log = (tmp_path / "usage.log").open("w")
    process = subprocess.Popen(argv, env=clean_environment(tmp_path, settings), cwd=ROOT, stderr=log)
    try:
        asyncio.run(_until_serving(address))
        created = cli(tmp_path, address, "tenant", "create", "acme", "--limit", "requests_per_minute=60")
        key = cli(tmp_path, address, "key", "create", "--tenant", "acme")
        asyncio.run(_publish(settings["MILLRACE_REDIS_URL"]))
        asyncio.run(_until_rows(address, 3))

        exported = cli(tmp_path, address, "usage", "export", "--tenant", "acme", "--format", "jsonl")
        as_csv = cli(tmp_path, address, "usage", "export", "--output", "usage.csv")
        shown = cli(tmp_path, address, "usage", "show", "r1")
        keys = cli(tmp_path, address, "key", "list")
        revoked = cli(tmp_path, address, "key", "revoke", key.stdout.split("_")[1])
        missing = cli(tmp_path, address, "usage", "show", "nothing")
        unknown = cli(tmp_path, address, "key", "create", "--tenant", "nobody")
        nowhere = cli(tmp_path, "127.0.0.1:1", "usage", "export")
        bad_folder = cli(tmp_path, address, "usage", "export", "--output", "no/such/usage.csv")
    finally:
        process.terminate()
        code = process.wait(timeout=WAIT_S)
        log.close()

    assert code == 0
    assert [done.returncode for done in (created, key, exported, as_csv, shown, keys, revoked)] == [0] * 7
    assert key.stdout.startswith("mr_")
    rows = [json.loads(line) for line in exported.stdout.splitlines()]
    assert [(row["request_id"], row["billed_completion_tokens"]) for row in rows] == [("r1", 5), ("r2", 5)]
    lines = (tmp_path / "usage.csv").read_text().splitlines()
    assert lines[0].startswith("row_id,request_id,tenant,")
    assert len(lines) == 4
    assert json.loads(shown.stdout)["request_id"] == "r1"
    secret = key.stdout.strip()
    assert secret not in keys.stdout + (tmp_path / "usage.log").read_text()
    for done in (missing, unknown, nowhere, bad_folder):
        assert done.returncode == 2
        assert "Traceback" not in done.stderr
        assert done.stderr.strip()


async def _until_serving(address: str) -> None:
    async def serving() -> bool:
        async with open_channel(address) as channel:
            try:
                stub = pb_grpc.AccountServiceStub(channel)
                await stub.ListTenants(
                    pb.ListTenantsRequest(), metadata=(("authorization", f"Bearer {TOKEN}"),), timeout=WAIT_S
                )
            except grpc.aio.AioRpcError:
                return False
        return True

    await until(serving)


async def _publish(redis_url: str) -> None:
    client = aioredis.Redis.from_url(redis_url, protocol=2)
    await AdmissionStore(client).register_worker(WorkerRecord("w1", "127.0.0.1:1", "echo", "1", POOL, "AGGREGATED"))
    for event in (make_event("r1"), make_event("r2"), make_event("r3", tenant="zeta", end_time=START)):
        await client.xadd(pool_key(POOL, "usage"), {"e": event.SerializeToString()})
    await client.aclose()


async def _until_rows(address: str, count: int) -> None:
    async def there() -> bool:
        async with open_channel(address) as channel:
            stub = pb_grpc.UsageServiceStub(channel)
            pages = stub.ExportUsage(pb.ExportUsageRequest(), metadata=(("authorization", f"Bearer {TOKEN}"),))
            return sum([len(page.rows) async for page in pages]) == count

    await until(there)
