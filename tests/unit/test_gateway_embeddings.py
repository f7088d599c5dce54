"""Embeddings through the doors: OpenAI's shapes, one request an input, all delivered or none."""

from __future__ import annotations

import asyncio
import base64
import struct
from typing import Any

import pytest
from millrace.common.v1 import common_pb2

from services.common.errors import ConcurrencyLimited, DeadlineExceeded, WorkerLost
from services.gateway.generation import ValidRequest
from services.gateway.limits import Limits
from tests.helpers.echo_generation import AsgiClient, FakeGenerator, Step, front, served, tokens
from tests.helpers.waiting import until

STOP = common_pb2.FINISH_REASON_STOP
COMPLETED = (common_pb2.TERMINAL_STATE_COMPLETED, STOP, "")


def vector_of(request: ValidRequest) -> bytes:
    """A vector that tells the first token and the length."""
    return struct.pack("<2f", request.prompt_token_ids[0], len(request.prompt_token_ids) + 0.1)


def embedding(*, fail: dict[str, Step] | None = None) -> FakeGenerator:
    """A back that embeds; a prompt whose text is in `fail` does that step instead."""

    def script(request: ValidRequest) -> list[Step]:
        text = bytes(request.prompt_token_ids.tolist()).decode()
        instead = (fail or {}).get(text)
        return [tokens([], finish=STOP)] if instead is None else [instead]

    generator = FakeGenerator(script)
    generator.embedding_of = vector_of
    return generator


async def ask(asked: AsgiClient, sent: Any, **fields: Any) -> Any:
    return await asked.ask("POST", "/v1/embeddings", {"model": "tiny", "input": sent} | fields)


@pytest.mark.parametrize(
    ("sent", "prompts"),
    [
        ("ab", ["ab"]),
        (["ab", "c"], ["ab", "c"]),
        ([97, 98], ["ab"]),
        ([[97, 98], [99]], ["ab", "c"]),
        (["ab", [99]], ["ab", "c"]),
    ],
)
async def test_each_input_is_one_request_with_one_vector_in_order(sent: Any, prompts: list[str]) -> None:
    generator = embedding()

    answer = await ask(front(generator), sent, user="u")

    assert answer.status == 200
    assert [bytes(request.prompt_token_ids.tolist()).decode() for _, request in generator.requests] == prompts
    body = answer.json()
    assert [(d["object"], d["index"]) for d in body["data"]] == [("embedding", i) for i in range(len(prompts))]
    expected = [list(struct.unpack("<2f", vector_of(request))) for _, request in generator.requests]
    assert [d["embedding"] for d in body["data"]] == expected
    count = sum(map(len, prompts))
    assert body["usage"] == {"prompt_tokens": count, "total_tokens": count}
    assert (body["object"], body["model"]) == ("list", "tiny")
    assert len(body["millrace"]["request_ids"]) == len(prompts)
    assert answer.headers["x-request-id"] == body["millrace"]["request_ids"][0]
    assert [generation.endings for generation in generator.generations] == [[COMPLETED]] * len(prompts)
    sampling = generator.requests[0][1].sampling
    assert (sampling.embed, sampling.choice_count, sampling.max_token_count) == (True, 1, 1)
    assert generator.requests[0][1].user == "u"


async def test_base64_has_the_bits_of_the_numbers() -> None:
    numbers = (await ask(front(embedding()), "ab", encoding_format="float")).json()["data"][0]["embedding"]
    packed = (await ask(front(embedding()), "ab", encoding_format="base64")).json()["data"][0]["embedding"]

    assert list(struct.unpack("<2f", base64.b64decode(packed))) == numbers


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": ["a", []]}, "input[1]"),
        ({"input": [97, "a"]}, "input[0]"),
        ({"input": ["a", [999_999]]}, "input[1]"),
        ({"input": [True]}, "input[0]"),
        ({"input": {"text": "a"}}, "input"),
        ({"input": "a" * 4_096}, "input"),
        ({"input": ["a"] * (Limits().embedding_inputs + 1)}, "input"),
        ({"dimensions": 8}, "dimensions"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"stream": True}, "stream"),
        ({"user": "u" * 513}, "user"),
    ],
)
async def test_what_cannot_be_served_is_refused_by_name_and_admits_nothing(fields: dict[str, Any], param: str) -> None:
    generator = embedding()

    answer = await ask(front(generator), **({"sent": "a"} | fields if "input" not in fields else {"sent": 0} | fields))

    assert answer.status == 400, answer.body
    assert answer.error["param"] == param
    assert generator.requests == []


async def test_the_longest_input_and_the_largest_batch_are_taken() -> None:
    most = Limits().embedding_inputs
    assert (await ask(front(embedding()), ["a"] * most)).status == 200
    assert (await ask(front(embedding()), "a" * 4_095)).status == 200


@pytest.mark.parametrize(
    ("failure", "status", "state"),
    [
        (WorkerLost("gone"), 502, common_pb2.TERMINAL_STATE_FAILED),
        (DeadlineExceeded("late"), 504, common_pb2.TERMINAL_STATE_EXPIRED),
    ],
)
async def test_one_failure_is_the_answer_and_the_end_of_every_input(failure: Any, status: int, state: int) -> None:
    never = asyncio.Event()
    generator = embedding(fail={"bad": failure, "slow": never})

    answer = await ask(front(generator), ["good", "bad", "slow"])

    assert answer.status == status
    assert answer.error["code"] == failure.row.reason
    assert [(len(g.endings), g.endings[0][0]) for g in generator.generations] == [(1, state)] * 3


async def test_a_refused_input_refuses_the_whole_batch() -> None:
    generator = embedding()
    generator.refusal = ConcurrencyLimited("Enough.", retry_after_s=1.0)

    answer = await ask(front(generator), ["a", "b"])

    assert (answer.status, answer.error["code"]) == (429, "CONCURRENT_REQUESTS")
    assert generator.generations == []


async def test_a_worker_that_sends_no_vector_is_an_error_and_not_an_empty_answer() -> None:
    generator = embedding()
    generator.embedding_of = lambda _request: b""

    answer = await ask(front(generator), "a")

    assert (answer.status, answer.error["type"]) == (500, "server_error")
    assert generator.only.endings[0][0] == common_pb2.TERMINAL_STATE_FAILED


async def test_a_client_that_goes_away_stops_every_input() -> None:
    held = asyncio.Event()
    generator = embedding(fail={"slow": held})
    asked = front(generator, served())
    asking = asyncio.create_task(ask(asked, ["fast", "slow"]))
    await until(lambda: [generation.reading.is_set() for generation in generator.generations] == [False, True])

    asked.disconnect.set()
    await asking

    assert [g.endings[0][0] for g in generator.generations] == [common_pb2.TERMINAL_STATE_CANCELLED] * 2
