"""Wrong requests are refused beside a stream of the embedded model as beside an echo stream, and change nothing."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest

from services.worker.config import EngineSettings, WorkerConfig
from services.worker.model_source import load_model
from tests.helpers.four_services import running_services
from tests.helpers.redis import RedisProcess
from tests.helpers.transcripts import Transcript, stream_completion
from tests.helpers.waiting import until
from tests.integration.test_wrong_requests import HTTP, VOCAB, prefill_count

pytestmark = [pytest.mark.fault, pytest.mark.model, pytest.mark.timeout(300)]

# Served under the name that the wrong requests ask for.
ENGINE = EngineSettings(max_model_len=2048, max_num_seqs=4, num_blocks=256, threads=1)
CANARY: dict[str, object] = {
    "model": "echo",
    "prompt": "Once upon a time",
    "max_tokens": 256,
    "temperature": 0,
    "ignore_eos": True,
}


async def test_a_stream_of_a_model_is_the_same_among_wrong_requests_as_alone(
    redis_server: RedisProcess, tmp_path: Path
) -> None:
    config = WorkerConfig(redis_url=redis_server.url, model_name="echo", engine=ENGINE)
    model = await asyncio.to_thread(load_model, config)
    first_outside = str(model.runner.spec.vocab_size).encode()
    wrong_answers = []
    sent = 0
    async with running_services(redis_server.url, tmp_path, worker_config=config, model=model) as services:
        alone = await stream_completion(services.client, CANARY)
        seen = Transcript()
        canary = asyncio.create_task(stream_completion(services.client, CANARY, seen=seen))
        await until(lambda: seen.text)
        prefilled = prefill_count(services)
        for wrong in itertools.cycle(HTTP):
            if canary.done() and sent >= len(HTTP):
                break
            sent += 1
            body = wrong.body().replace(str(VOCAB).encode(), first_outside)
            headers = {"content-type": "application/json"} | wrong.headers
            response = await services.client.post(wrong.path, content=body, headers=headers)
            error = response.json().get("error", {})
            got = (response.status_code, error.get("code"), error.get("param"))
            if got != (wrong.status, wrong.code, wrong.param):
                wrong_answers.append((wrong.name, got))
        assert prefill_count(services) == prefilled, "the engine computed a prompt that was refused"
        await canary

    assert wrong_answers == []
    assert (alone.ending, seen.ending) == ("completed", "completed")
    assert seen.usage is not None
    assert seen.usage["completion_tokens"] == CANARY["max_tokens"]
    assert seen.text == alone.text
