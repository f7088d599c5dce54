"""Redis goes away after a rollback and comes back empty: the last route table outlives it, and a gateway's restart."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from services.common.redis_client import connect
from services.common.route_store import RouteStore
from services.gateway import wiring as gateway_wiring
from services.gateway.config import GatewayConfig
from services.worker.engine.fake_model_runner import FakeModelRunner, FakeScript
from services.worker.engine.outputs import SchedulerOutput
from services.worker.model_source import ECHO_VOCABULARY, LoadedModel, echo_salt, load_model
from tests.helpers import rollout_command
from tests.helpers.four_services import ADMIN_TOKEN, KEY, running_services
from tests.helpers.redis import RedisProcess
from tests.helpers.transcripts import Transcript, stream_completion
from tests.helpers.two_versions import V2, Versions, worker_config
from tests.helpers.waiting import WAIT_S, until
from tests.helpers.worker import Gate

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]

HEADERS = {"Authorization": f"Bearer {KEY}"}
TOKENS = 40
BODY: dict[str, object] = {"model": "echo", "prompt": "hello", "max_tokens": TOKENS}


class Brake(Gate):
    """Lets some steps of a worker pass, then holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.left = 1_000_000

    def __call__(self, scheduled: SchedulerOutput) -> None:
        self.left -= 1
        if self.left < 0:
            self.open.clear()
        super().__call__(scheduled)

    def release(self) -> None:
        self.left = 1_000_000
        self.open.set()


@pytest.fixture
def forgetful() -> Iterator[RedisProcess]:
    """A Redis that comes back empty."""
    server = RedisProcess(append_only=False).start()
    yield server
    server.stop()


def braked(redis_url: str, version: str, brake: Brake) -> LoadedModel:
    loaded = load_model(worker_config(redis_url, version))
    runner = FakeModelRunner(loaded.runner.spec, script=FakeScript(before_step=brake), salt=echo_salt(version))
    return LoadedModel(runner, loaded.served, loaded.budget_text)


@contextlib.asynccontextmanager
async def two_braked_versions(server: RedisProcess, folder: Path, one: Brake, two: Brake) -> AsyncIterator[Versions]:
    client = connect(server.url)
    others = [(worker_config(server.url, "2"), braked(server.url, "2", two))]
    config, model = worker_config(server.url, "1"), braked(server.url, "1", one)
    try:
        async with running_services(server.url, folder, worker_config=config, model=model, others=others) as services:
            pool = services.gateway.back.parts.pool
            await until(lambda: pool.serves("echo", "1") and pool.serves("echo", "2"))
            yield Versions(services, RouteStore(client), folder / "ledger.sqlite3", client)
    finally:
        for brake in (one, two):
            brake.release()
        await client.aclose()


@contextlib.asynccontextmanager
async def second_gateway(server: RedisProcess, folder: Path) -> AsyncIterator[gateway_wiring.GatewayApp]:
    """Another one, of the data folder that it had before."""
    app = gateway_wiring.build(
        GatewayConfig(
            redis_url=server.url,
            http_listen="127.0.0.1:0",
            grpc_listen="127.0.0.1:0",
            data_dir=str(folder / "second"),
            cache_secret="test",
        )
    )
    await app.start()
    try:
        yield app
    finally:
        await app.stop()


def client_of(app: gateway_wiring.GatewayApp, **headers: str) -> httpx.AsyncClient:
    url = f"http://127.0.0.1:{app.http_port}"
    return httpx.AsyncClient(base_url=url, headers=HEADERS | headers, timeout=WAIT_S, limits=httpx.Limits())


async def held_stream(client: httpx.AsyncClient, brake: Brake) -> tuple[Transcript, asyncio.Task[Transcript]]:
    """A stream that the client has the first tokens of, and that goes on once its worker is let go."""
    seen = Transcript()
    brake.left = 5
    running = asyncio.create_task(stream_completion(client, BODY, seen=seen))
    await until(lambda: seen.token_ids or running.done())
    return seen, running


async def command(rig: Versions, *arguments: object) -> str:
    done = await rollout_command.rollout(rig.services.usage, ADMIN_TOKEN, *arguments)
    assert done.exit_code == 0, done.output
    return done.stdout


def assert_comes_again(answer: httpx.Response) -> None:
    assert (answer.status_code, "retry-after" in answer.headers) == (503, True), answer.text


async def first_served(clients: list[httpx.AsyncClient], each: int) -> list[Transcript]:
    """What is asked of these gateways without a pause, until each has served so many."""

    async def ask(client: httpx.AsyncClient) -> list[Transcript]:
        served: list[Transcript] = []
        while len(served) < each:
            seen = await stream_completion(client, BODY)
            served += [seen] if seen.status == httpx.codes.OK else []
        return served

    return [seen for part in await asyncio.gather(*map(ask, clients)) for seen in part]


async def test_what_was_rolled_back_stays_so_without_redis_over_a_restart_and_with_an_empty_one(
    forgetful: RedisProcess, tmp_path: Path
) -> None:
    one, two = Brake(), Brake()
    async with two_braked_versions(forgetful, tmp_path, one, two) as rig, contextlib.AsyncExitStack() as opened:
        gateway, client = rig.services.gateway, rig.services.client
        await command(rig, "start", "echo", "--to", "2", "--from", "1", "--step", "100", "--force", "--why", "a try")
        await until(lambda: gateway.back.parts.routes.table.revision == 1)
        bad, on_bad = await held_stream(client, two)
        shown = await command(rig, "rollback", "echo", "--why", "bad")
        async with second_gateway(forgetful, tmp_path) as second:
            tables = (gateway.back.parts.routes, second.back.parts.routes, rig.services.router.routes)
            await until(lambda: [table.table.revision for table in tables] == [2] * 3)
        keyed = await opened.enter_async_context(client_of(gateway, **{"Idempotency-Key": "k"}))
        good, on_good = await held_stream(keyed, one)
        table = gateway.back.parts.routes.table

        forgetful.kill()
        await until(gateway.back.closed_because)
        restarted = await opened.enter_async_context(second_gateway(forgetful, tmp_path))
        other = await opened.enter_async_context(client_of(restarted))

        models = await client.get("/v1/models")
        withdrawn = await client.post("/v1/completions", json=BODY | {"model": "echo@2"})
        for asked, name in ((client, "echo"), (client, "echo@1"), (client, "none"), (other, "echo"), (other, "none")):
            assert_comes_again(await asked.post("/v1/completions", json=BODY | {"model": name}))
        for answer in (await client.get("/v1/models/none"), await other.get("/v1/models")):
            assert_comes_again(answer)
        assert {model["id"]: model["millrace"]["version"] for model in models.json()["data"]} == {
            "echo": "1",
            "echo@1": "1",
        }
        assert withdrawn.status_code == 404
        assert restarted.back.parts.routes.table == table
        assert await command(rig, "routes") == shown

        # A retry of the key joins the answer that runs.
        again = asyncio.create_task(stream_completion(keyed, BODY))
        for brake in (one, two):
            brake.release()
        ended = [await on_bad, await on_good, await again]
        assert [(t.ending, t.version, len(t.token_ids)) for t in ended] == [
            ("completed", version, TOKENS) for version in "211"
        ]
        assert all(t.is_echo_prefix(ECHO_VOCABULARY) for t in (bad, good))
        assert ended[2].text == good.text

        asking = asyncio.create_task(first_served([client, other], 10))
        await asyncio.to_thread(forgetful.start)
        served = await asking
        assert {(t.ending, t.version) for t in served} == {("completed", "1")}
        await until(lambda: V2 in restarted.back.parts.directory)
        assert await rig.routes.read() == table
        rows = await rig.ledger(2 + len(served))
    assert {i: row["version"] for i, row in rows.items()} == {t.request_id: t.version for t in (bad, good, *served)}
