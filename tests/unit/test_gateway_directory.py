"""Names, versions and defaults; cards and tokenizers that must not be believed."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from array import array
from collections.abc import AsyncIterator, Sequence

import grpc
import pytest
from millrace.common.v1 import common_pb2
from millrace.worker.v1 import worker_service_pb2 as pb
from millrace.worker.v1 import worker_service_pb2_grpc

from services.common.admission_types import Pool, WorkerRecord
from services.common.errors import ModelNotFound, NoWorker
from services.gateway import model_directory
from services.gateway.model_directory import WorkerDirectory


class PlainTokenizer:
    """Enough of a tokenizer for a directory."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    vocab_size = 16
    special_texts: tuple[str, ...] = ()

    def encode(self, text: str) -> array[int]:
        return array("I")

    def encode_rendered(self, rendered: str, guard: str) -> array[int]:
        return array("I")

    def token_bytes(self, token_id: int) -> bytes:
        return b""

    def visible_bytes(self, token_id: int) -> bytes:
        return b""

    def decode(self, token_ids: Sequence[int]) -> str:
        return ""


class CardWorker(worker_service_pb2_grpc.WorkerServiceServicer):
    """Serves a card and a tokenizer file."""

    def __init__(self, model: str, version: str, data: bytes = b"{}") -> None:
        self.data = data
        self.tokenizer_calls = 0
        self.card = pb.ModelCard(
            model=common_pb2.ModelRef(model=model, version=version),
            max_model_len=64,
            vocab_size=16,
            block_size=4,
            tokenizer_digest=hashlib.sha256(data).digest(),
            chat_template="{{ messages }}",
        )

    async def GetModelCard(  # type: ignore[override]
        self, request: pb.GetModelCardRequest, context: object
    ) -> pb.GetModelCardResponse:
        return pb.GetModelCardResponse(card=self.card)

    async def GetTokenizer(  # type: ignore[override]
        self, request: pb.GetTokenizerRequest, context: object
    ) -> AsyncIterator[pb.GetTokenizerResponse]:
        self.tokenizer_calls += 1
        for start in range(0, len(self.data), 1_024):
            yield pb.GetTokenizerResponse(chunk=self.data[start : start + 1_024])


@contextlib.asynccontextmanager
async def serving(*workers: CardWorker) -> AsyncIterator[list[WorkerRecord]]:
    records, servers = [], []
    for number, worker in enumerate(workers):
        server = grpc.aio.server()
        worker_service_pb2_grpc.add_WorkerServiceServicer_to_server(worker, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        servers.append(server)
        model = worker.card.model
        records.append(
            WorkerRecord(f"w{number}", f"127.0.0.1:{port}", model.model, model.version, Pool(model.model), "aggregated")
        )
    try:
        yield records
    finally:
        for server in servers:
            await server.stop(0)


def make_directory() -> WorkerDirectory:
    return WorkerDirectory(load=lambda card, data: PlainTokenizer(data))


async def test_a_model_is_known_by_name_and_by_version() -> None:
    directory = make_directory()
    async with serving(CardWorker("m", "1"), CardWorker("m", "2")) as records:
        await directory.update(records)

    assert directory.resolve("m@1").card.model.version == "1"
    assert directory.resolve("m@2").card.model.version == "2"
    assert directory.resolve("m").template is not None


async def test_the_default_version_stays_while_somebody_serves_it() -> None:
    directory = make_directory()
    async with serving(CardWorker("m", "1"), CardWorker("m", "2"), CardWorker("m", "2")) as records:
        await directory.update(records[:1])
        await directory.update(records)
        assert directory.resolve("m").card.model.version == "1"
        assert [m.card.model.version for m in directory.models()] == ["1", "2"]

        await directory.update(records[1:])

    assert directory.resolve("m").card.model.version == "2"
    with pytest.raises(NoWorker):
        directory.resolve("m@1")


async def test_a_version_that_workers_only_prefill_is_not_served() -> None:
    directory = make_directory()
    async with serving(CardWorker("m", "1")) as [record]:
        await directory.update([dataclasses.replace(record, role="prefill")])
        assert directory.models() == []
        await directory.update([record])

    assert len(directory.models()) == 1


async def test_an_unknown_name_differs_from_one_that_nobody_serves_now() -> None:
    directory = make_directory()
    with pytest.raises(NoWorker):
        directory.resolve("m")
    async with serving(CardWorker("m", "1")) as records:
        await directory.update(records)

    with pytest.raises(ModelNotFound):
        directory.resolve("other")
    with pytest.raises(ModelNotFound):
        directory.resolve("m@9")
    await directory.update([])
    with pytest.raises(NoWorker) as refused:
        directory.resolve("m")
    assert refused.value.retry_after_s is not None
    assert directory.models() == []


async def test_a_tokenizer_is_fetched_once_per_digest() -> None:
    first, second = CardWorker("m", "1", b"x" * 3_000), CardWorker("m", "2", b"x" * 3_000)
    directory = make_directory()
    async with serving(first, second) as records:
        await directory.update(records)

    assert first.tokenizer_calls + second.tokenizer_calls == 1
    assert directory.resolve("m@1").tokenizer is directory.resolve("m@2").tokenizer


async def test_a_tokenizer_that_does_not_match_its_digest_is_refused() -> None:
    worker = CardWorker("m", "1")
    worker.card.tokenizer_digest = b"\0" * 32
    directory = make_directory()
    async with serving(worker) as records:
        await directory.update(records)
        await directory.update(records)

    assert directory.models() == []
    assert worker.tokenizer_calls == 1, "a refused worker is not asked again"


async def test_a_tokenizer_above_the_limit_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_directory, "MAX_TOKENIZER_BYTES", 2_000)
    directory = make_directory()
    async with serving(CardWorker("m", "1", b"x" * 2_001), CardWorker("n", "1", b"x" * 2_000)) as records:
        await directory.update(records)

    assert [m.card.model.model for m in directory.models()] == ["n"]


async def test_a_card_of_another_model_is_refused() -> None:
    worker = CardWorker("m", "1")
    directory = make_directory()
    async with serving(worker) as records:
        worker.card.model.version = "2"
        await directory.update(records)

    assert directory.models() == []


async def test_a_worker_that_cannot_be_reached_is_asked_again() -> None:
    directory = make_directory()
    async with serving(CardWorker("m", "1")) as records:
        pass

    await directory.update(records)

    assert directory.models() == []
    async with serving(CardWorker("m", "1")) as again:
        await directory.update(again)
    assert len(directory.models()) == 1
