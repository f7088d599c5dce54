"""Mutual TLS by role between services, and what each service's user may do in Redis (contract S2)."""

from __future__ import annotations

import datetime
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import redis.asyncio as aioredis
from millrace.gateway.v1.usage_sums_pb2 import GetUsageRequest, GetUsageResponse
from millrace.router.v1 import router_service_pb2
from millrace.usage.v1 import canary_service_pb2, route_service_pb2
from millrace.usage.v1 import usage_service_pb2 as pb
from millrace.usage.v1 import usage_service_pb2_grpc as pb_grpc
from millrace.worker.v1 import worker_service_pb2
from redis.exceptions import NoPermissionError

from cli.dev_ca import DevAuthority, issue_all
from cli.redis_acl import RULES, acl_file
from services.common.admission_store import AdmissionStore
from services.common.admission_types import KeyRecord, Ownership, QuotaLimits, Reserve, Spent, WorkerRecord
from services.common.errors import MillraceError, PermissionDenied
from services.common.grpc_client import dialler, error_from_rpc, open_channel
from services.common.lifecycle import StartupError
from services.common.redis_client import connect
from services.common.tls import GATEWAY, OPERATOR, ROLES, USAGE, WORKER, Tls, load_tls
from services.gateway.idempotency_store import IdempotencyStore
from services.gateway.usage_reader import UsageReader
from services.router.wiring import CALLERS as ROUTER_CALLERS
from services.usage.config import UsageConfig
from services.usage.wiring import CALLERS as USAGE_CALLERS
from services.usage.wiring import UsageApp, build
from services.worker.wiring import CALLERS as WORKER_CALLERS
from tests.helpers.admission import CAPS, POOL, StoreTime, make_entry, make_terminal
from tests.helpers.redis import RedisProcess
from tests.helpers.waiting import WAIT_S

ROOT = "root-token-for-tests"
SENT = (("authorization", f"Bearer {ROOT}"),)


@pytest.fixture(scope="module")
def authority() -> DevAuthority:
    return DevAuthority()


def tls_of(folder: Path) -> Tls:
    loaded = load_tls(str(folder))
    assert loaded is not None
    return loaded


@pytest.fixture
async def app(tmp_path: Path, redis_server: RedisProcess, authority: DevAuthority) -> AsyncIterator[UsageApp]:
    folder = authority.issue(tmp_path / "usage", USAGE)
    url = f"sqlite:///{tmp_path}/usage.sqlite3"
    running = build(UsageConfig(redis_url=redis_server.url, database_url=url, admin_token=ROOT, tls_dir=str(folder)))
    await running.start()
    yield running
    await running.stop()


async def call(address: str, tls: Tls | None, server_role: str = USAGE) -> pb.ListTenantsResponse:
    async with open_channel(address, tls=tls, server_role=server_role) as channel:
        stub = pb_grpc.AccountServiceStub(channel)
        return await stub.ListTenants(pb.ListTenantsRequest(), metadata=SENT, timeout=WAIT_S)


async def failure(address: str, tls: Tls | None, server_role: str = USAGE) -> MillraceError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(address, tls, server_role)
    assert caught.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.PERMISSION_DENIED)
    return error_from_rpc(caught.value)


async def test_an_operators_certificate_and_key_open_the_account_service(
    app: UsageApp, authority: DevAuthority, tmp_path: Path
) -> None:
    answer = await call(app.address, tls_of(authority.issue(tmp_path / "mine", OPERATOR)))

    assert list(answer.tenants) == []


@pytest.mark.parametrize("role", sorted(set(ROLES) - {OPERATOR}))
async def test_a_services_certificate_does_not_even_with_an_administrators_key(
    app: UsageApp, authority: DevAuthority, tmp_path: Path, role: str
) -> None:
    error = await failure(app.address, tls_of(authority.issue(tmp_path / "mine", role)))

    assert isinstance(error, PermissionDenied)


async def test_without_a_certificate_of_the_same_authority_that_is_valid_today_nothing_answers(
    app: UsageApp, authority: DevAuthority, tmp_path: Path
) -> None:
    good = tls_of(authority.issue(tmp_path / "good", OPERATOR))
    stranger = tls_of(DevAuthority().issue(tmp_path / "stranger", OPERATOR))
    expired = tls_of(authority.issue(tmp_path / "expired", OPERATOR, datetime.timedelta(days=-1)))
    trusting = Tls(good.folder, good.ca, stranger.certificate, stranger.key)
    no_certificate = grpc.ssl_channel_credentials(good.ca)

    for tls in (None, stranger, trusting, expired):
        assert not isinstance(await failure(app.address, tls), PermissionDenied)
    async with grpc.aio.secure_channel(
        app.address, no_certificate, options=[("grpc.ssl_target_name_override", "usage.millrace.internal")]
    ) as channel:
        with pytest.raises(grpc.aio.AioRpcError):
            await pb_grpc.AccountServiceStub(channel).ListTenants(
                pb.ListTenantsRequest(), metadata=SENT, timeout=WAIT_S
            )


async def test_a_server_of_another_role_than_the_one_dialled_is_not_spoken_to(
    app: UsageApp, authority: DevAuthority, tmp_path: Path
) -> None:
    mine = tls_of(authority.issue(tmp_path / "mine", OPERATOR))

    assert not isinstance(await failure(app.address, mine, WORKER), PermissionDenied)


async def test_a_gateways_certificate_reads_usage(app: UsageApp, authority: DevAuthority, tmp_path: Path) -> None:
    mine = tls_of(authority.issue(tmp_path / "mine", GATEWAY))
    reader = UsageReader(app.address, dialler(mine, USAGE))

    answer = await reader.read("acme", GetUsageRequest(group_by=["day"]), f"Bearer {ROOT}")
    await reader.close()

    assert answer == GetUsageResponse()


def test_every_method_between_services_names_who_may_call_it() -> None:
    for files, callers in (
        ((pb, canary_service_pb2, route_service_pb2), USAGE_CALLERS),
        ((router_service_pb2,), ROUTER_CALLERS),
        ((worker_service_pb2,), WORKER_CALLERS),
    ):
        services = [service for file in files for service in file.DESCRIPTOR.services_by_name.values()]
        methods = {method.name for service in services for method in service.methods}
        assert methods == set(callers)
        assert all(roles and set(roles) <= set(ROLES) for roles in callers.values())


def test_keys_of_certificates_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    for role, folder in issue_all(tmp_path).items():
        assert folder.name == role
        assert (folder / "tls.key").stat().st_mode & 0o777 == 0o600
        assert folder.stat().st_mode & 0o777 == 0o700
        assert "PRIVATE" not in repr(tls_of(folder))


def test_a_folder_without_its_files_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"tls\.key"):
        load_tls(str(tmp_path))
    assert load_tls("") is None


@pytest.fixture
async def users(redis_server: RedisProcess, redis_client: aioredis.Redis) -> AsyncIterator[dict[str, Any]]:
    administrator: Any = redis_client
    for line in acl_file({name: f"password-of-{name}" for name in RULES}).splitlines()[1:]:
        _, name, *rules = line.split(" ")
        await administrator.execute_command("ACL", "SETUSER", name, "reset", *rules)
    path = redis_server.url.removeprefix("unix://")
    clients = {name: connect(f"unix://{name}:password-of-{name}@{path}") for name in RULES}
    yield clients
    for client in clients.values():
        await client.aclose()
    await administrator.execute_command("ACL", "DELUSER", *RULES)


async def test_each_service_does_its_part_of_a_request_as_its_own_user(users: dict[str, Any]) -> None:
    time = StoreTime()
    stores = {name: AdmissionStore(client, now_ms=time) for name, client in users.items()}
    gateway, router, worker, usage = (stores[name] for name in ("gateway", "router", "worker", "usage"))
    key = KeyRecord("k", "acme", "", (), 1.0, QuotaLimits(budget_tokens=100))
    ask = Reserve("acme", "r1", 10, 10, 20, key.limits, "k", QuotaLimits(requests_per_minute=5), where=(POOL, "g"))

    await usage.raise_spent("acme", "", Spent(time.day), Spent(time.day))
    await usage.replace_keys({b"digest": key})
    await worker.register_worker(WorkerRecord("w", "host:1", "echo", "1", POOL, "AGGREGATED"))
    await gateway.renew_gateway("g", "host:2")
    assert await gateway.lookup_key(b"digest") == key
    assert await gateway.reserve(ask) is None
    await gateway.enqueue(POOL, make_entry("r1"), CAPS)
    await IdempotencyStore(users["gateway"]).announce("acme", "r1", "g", 5.0)
    await gateway.uptime()
    [claim] = await router.claim(POOL, "router", 1)
    assert claim.entry.request_id == "r1"
    await router.own(POOL, [Ownership("r1", 256, "w")])
    assert await gateway.renew_budget(ask, 10) == 10
    await worker.finish(POOL, [make_terminal("r1")])
    await router.settle("acme", "r1", 15, 15)
    assert [pool.tag for pool in await usage.list_pools()] == [POOL.tag]
    assert await usage.list_workers()


@pytest.mark.parametrize(
    ("user", "command"),
    [
        ("worker", ("HGETALL", "mr:{keys}:table")),
        ("worker", ("HGETALL", "mr:{acme}:budget")),
        ("worker", ("DEL", "mr:{acme}:where:r1")),
        ("router", ("HGETALL", "mr:{keys}:table")),
        ("usage", ("XRANGE", "mr:{echo/default/0}:s:interactive:acme", "-", "+")),
        ("usage", ("GET", "mr:{acme}:where:r1")),
        *((user, command) for user in RULES for command in (("FLUSHALL",), ("KEYS", "*"), ("CONFIG", "GET", "*"))),
        *((user, ("SET", "other", "1")) for user in RULES),
    ],
)
async def test_what_is_not_a_services_part_is_refused_to_its_user(
    users: dict[str, Any], user: str, command: tuple[str, ...]
) -> None:
    with pytest.raises(NoPermissionError):
        await users[user].execute_command(*command)
