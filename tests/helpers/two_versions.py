"""Four services in one event loop, with workers of two versions of the echo model and a table that routes between."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import redis.asyncio as aioredis
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from services.common.route_store import RouteStore
from services.common.routes import Route, RouteTable, Target, WeightedTarget
from services.worker.config import EngineSettings, WorkerConfig
from services.worker.engine.fake_model_runner import FakeModelRunner, FakeScript
from services.worker.model_source import ECHO_VOCABULARY, LoadedModel, load_model
from services.worker.service import ServedModel
from tests.helpers.four_services import FourServices, running_services
from tests.helpers.transcripts import Transcript, stream_completion
from tests.helpers.waiting import until
from tests.helpers.worker import Gate

V1, V2 = Target("echo", "1"), Target("echo", "2")
TOKENS = 12
KNOBS = EngineSettings(max_model_len=512, num_blocks=2_048, max_num_seqs=64)


def worker_config(redis_url: str, version: str, knobs: EngineSettings = KNOBS) -> WorkerConfig:
    return WorkerConfig(redis_url=redis_url, model="echo", model_version=version, engine=knobs)


def routed(table: RouteTable, version_2: int, *withdrawn: Target) -> RouteTable:
    targets = (WeightedTarget(V1, 100 - version_2), WeightedTarget(V2, version_2))
    return dataclasses.replace(table, routes={"echo": Route("echo", targets)}, withdrawn=frozenset(withdrawn))


@dataclasses.dataclass(frozen=True)
class Versions:
    """Four services with workers of both versions, and the table that decides between them."""

    services: FourServices
    routes: RouteStore
    database: Path
    redis: aioredis.Redis

    async def route(self, version_2: int, *withdrawn: Target) -> None:
        """Change the table and wait until gateway and router act by it."""
        before = await self.routes.read() or RouteTable()
        changed = await self.routes.replace(routed(before, version_2, *withdrawn), who="test", why="")
        parts = self.services.gateway.back.parts
        await until(lambda: parts.routes.table == changed == self.services.router.routes.table)

    async def ledger(self, count: int) -> dict[str, sqlite3.Row]:
        """Rows by request id, once there are `count`."""
        rows: list[sqlite3.Row] = []

        def complete() -> bool:
            with contextlib.closing(sqlite3.connect(self.database)) as connection:
                connection.row_factory = sqlite3.Row
                rows[:] = connection.execute("SELECT * FROM ledger").fetchall()
            return len(rows) >= count

        await until(complete)
        return {row["request_id"]: row for row in rows}


@contextlib.asynccontextmanager
async def versions(
    url: str, redis_client: aioredis.Redis, folder: Path, second: LoadedModel | None = None
) -> AsyncIterator[Versions]:
    """Version 1 is the echo model; version 2 is too, or `second`, whose worker then has one slot."""
    knobs = KNOBS if second is None else dataclasses.replace(KNOBS, max_num_seqs=1)
    other = (worker_config(url, "2", knobs), second)
    async with running_services(url, folder, worker_config=worker_config(url, "1"), others=[other]) as services:
        pool = services.gateway.back.parts.pool
        await until(lambda: pool.serves("echo", "1") and pool.serves("echo", "2"))
        yield Versions(services, RouteStore(redis_client), folder / "ledger.sqlite3", redis_client)


async def complete(client: httpx.AsyncClient, prompt: str = "hello", tokens: int = TOKENS) -> Transcript:
    return await stream_completion(client, {"model": "echo", "prompt": prompt, "max_tokens": tokens})


def second_version(gate: Gate, tokenizer: bytes = b"") -> LoadedModel:
    """Version 2, whose steps wait for the gate; with a tokenizer of its own unless that is empty."""
    config = WorkerConfig(model="echo", model_version="2", engine=dataclasses.replace(KNOBS, max_num_seqs=1))
    loaded = load_model(config)
    spec, card = loaded.runner.spec, loaded.served.card
    if tokenizer:
        size = Tokenizer.from_str(tokenizer.decode()).get_vocab_size()
        spec = dataclasses.replace(spec, vocab_size=size)
        card.vocab_size, card.tokenizer_digest = size, hashlib.sha256(tokenizer).digest()
    return LoadedModel(
        FakeModelRunner(spec, script=FakeScript(before_step=gate), salt="2"), ServedModel(card, tokenizer), ""
    )


def pair_tokenizer() -> bytes:
    """Bytes, and the pairs `he` and `ll`: `hello` is three tokens, five of the echo model."""
    words = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {word: index for index, word in enumerate([*words, "he", "ll"])}
    made = Tokenizer(models.BPE(vocab, [("h", "e"), ("l", "l")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made.to_str().encode()


async def roll_forward_and_back(rig: Versions, clients: int, tokens: int) -> list[Transcript]:
    """Under so many clients version 2 is rolled out and withdrawn, twice. Asserts what a release must never break:
    no failed and no mixed stream, and every ledger row names the version that made its tokens."""
    began: list[tuple[int, Transcript]] = []
    stop, gateway = asyncio.Event(), rig.services.gateway.back.parts

    async def one(client: httpx.AsyncClient) -> None:
        while not stop.is_set():
            revision = gateway.routes.table.revision
            began.append((revision, await complete(client, tokens=tokens)))

    def since_the_change() -> set[str]:
        return {t.version for revision, t in began if revision == gateway.routes.table.revision}

    await rig.route(0)
    async with asyncio.TaskGroup() as load:
        for _ in range(clients):
            load.create_task(one(rig.services.client))
        for share, withdrawn, version in ((25, (), "2"), (100, (), "2"), (0, (V2,), "1")) * 2:
            await rig.route(share, *withdrawn)
            await until(lambda v=version: v in since_the_change())
            assert share == 25 or since_the_change() == {version}
        stop.set()
    seen = [transcript for _, transcript in began]
    rows = await rig.ledger(len(seen))

    assert [t for t in seen if t.ending != "completed"] == []
    assert {t.version for t in seen} == {"1", "2"}
    assert all(t.is_echo_prefix(ECHO_VOCABULARY) and len(t.token_ids) == tokens for t in seen)
    assert {i: (row["version"], row["billed_completion_tokens"]) for i, row in rows.items()} == {
        t.request_id: (t.version, tokens) for t in seen
    }
    return seen
