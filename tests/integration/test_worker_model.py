"""A worker with the embedded model: its card, its tokenizer file and a greedy answer."""

from __future__ import annotations

import hashlib

import pytest
from millrace.common.v1 import common_pb2
from millrace.worker.v1 import worker_service_pb2 as pb
from tokenizers import Tokenizer

from services.worker.config import EngineSettings, WorkerConfig
from services.worker.model_source import load_model
from services.worker.wiring import build
from tests.helpers.waiting import WAIT_S, until
from tests.helpers.worker import GatewayClient, RememberingStore, entry

QUESTION = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.model
async def test_the_embedded_model_answers_with_paris_through_the_worker() -> None:
    config = WorkerConfig(engine=EngineSettings(max_model_len=512, max_num_seqs=4, num_blocks=64, threads=1))
    app = build(config, store=RememberingStore(), model=load_model(config))  # type: ignore[arg-type]
    await app.start()
    gateway = await GatewayClient(app.address).attach()
    await until(lambda: app.parts.table.is_attached("gateway-1"))

    card = (await gateway.stub.GetModelCard(pb.GetModelCardRequest(), timeout=WAIT_S)).card
    data = b"".join([m.chunk async for m in gateway.stub.GetTokenizer(pb.GetTokenizerRequest())])
    tokenizer = Tokenizer.from_str(data.decode())
    work = entry("r1", prompt=tokenizer.encode(QUESTION, add_special_tokens=False).ids, max_tokens=48)
    work.model.CopyFrom(card.model)
    work.tokenizer_digest = card.tokenizer_digest
    work.sampling.temperature = 0.0
    response = await gateway.submit(work)
    await gateway.finished("r1")

    held = gateway.of("r1")
    assert response.accepted
    assert hashlib.sha256(data).digest() == card.tokenizer_digest
    assert (card.runner, card.model.model, card.max_model_len, card.block_count) == ("torch", "smollm2-135m", 512, 64)
    assert card.chat_template
    assert "Paris" in tokenizer.decode(held.tokens[0])
    assert held.finishes[0].reason in (common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH)
    await gateway.close()
    await app.stop()
    app.parts.engine.check_invariants()
