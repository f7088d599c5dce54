"""Every wrong request gets its own typed refusal at both doors, the engine never hears of it, and a stream runs on."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import math
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import httpx
from google.rpc import error_details_pb2, status_pb2
from millrace.common.v1 import common_pb2
from millrace.gateway.v1 import gateway_service_pb2 as pb
from millrace.gateway.v1 import gateway_service_pb2_grpc as pb_grpc

from tests.helpers.four_services import KEY, FourServices, running_services
from tests.helpers.redis import RedisProcess
from tests.helpers.transcripts import Transcript, stream_completion
from tests.helpers.waiting import until

VOCAB = 32_000
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
BASE: dict[str, dict[str, object]] = {
    COMPLETIONS: {"model": "echo", "prompt": "hi", "max_tokens": 4},
    CHAT: {"model": "echo", "messages": MESSAGES, "max_tokens": 4},
}


@dataclasses.dataclass(frozen=True)
class Wrong:
    """A request that must be refused: `changes` to the good body of `path`, or a `raw` body; and what comes back."""

    name: str
    param: str | None
    changes: dict[str, object] = dataclasses.field(default_factory=dict)
    path: str = COMPLETIONS
    raw: bytes | None = None
    headers: dict[str, str] = dataclasses.field(default_factory=dict)
    status: int = 400
    code: str = "INVALID_REQUEST"

    def body(self) -> bytes:
        if self.raw is not None:
            return self.raw
        return json.dumps(BASE[self.path] | self.changes).encode()


def raw(text: str) -> bytes:
    """The good completion body with `text` spliced in as further members."""
    return b'{"model":"echo","prompt":"hi","max_tokens":4,' + text.encode() + b"}"


HTTP: list[Wrong] = [
    # Numbers that are none, or not of this field.
    Wrong("temperature NaN", "temperature", raw=raw('"temperature":NaN')),
    Wrong("temperature Infinity", "temperature", raw=raw('"temperature":Infinity')),
    Wrong("temperature 1e999", "temperature", raw=raw('"temperature":1e999')),
    Wrong("temperature as text", "temperature", {"temperature": "nan"}),
    Wrong("temperature below 0", "temperature", {"temperature": -0.1}),
    Wrong("temperature above 2", "temperature", {"temperature": 2.1}),
    Wrong("top_p below 0", "top_p", {"top_p": -0.5}),
    Wrong("top_p above 1", "top_p", {"top_p": 1.01}),
    Wrong("top_k below -1", "top_k", {"top_k": -2}),
    Wrong("top_k a fraction", "top_k", {"top_k": 1.5}),
    Wrong("min_p above 1", "min_p", {"min_p": 1.5}),
    Wrong("repetition_penalty 0", "repetition_penalty", {"repetition_penalty": 0}),
    Wrong("repetition_penalty NaN", "repetition_penalty", raw=raw('"repetition_penalty":NaN')),
    Wrong("frequency_penalty 3", "frequency_penalty", {"frequency_penalty": 3}),
    Wrong("presence_penalty -2.5", "presence_penalty", {"presence_penalty": -2.5}),
    Wrong("seed 2**64", "seed", {"seed": 2**64}),
    Wrong("seed -2**63-1", "seed", {"seed": -(2**63) - 1}),
    Wrong("seed a fraction", "seed", {"seed": 1.5}),
    Wrong("max_tokens 0", "max_tokens", {"max_tokens": 0}),
    Wrong("max_tokens negative", "max_tokens", {"max_tokens": -1}),
    Wrong("max_tokens 2**70", "max_tokens", {"max_tokens": 2**70}),
    Wrong("max_tokens a boolean", "max_tokens", {"max_tokens": True}),
    Wrong("max_tokens beyond the context", "max_tokens", {"max_tokens": 40_000}),
    Wrong("a prompt that leaves no room", "prompt", {"prompt": [1] * 32_766}, code="CONTEXT_LENGTH_EXCEEDED"),
    Wrong("min_tokens above max_tokens", "min_tokens", {"min_tokens": 5}),
    Wrong("min_tokens negative", "min_tokens", {"min_tokens": -1}),
    Wrong("n 0", "n", {"n": 0}),
    Wrong("n negative", "n", {"n": -1}),
    Wrong("n huge", "n", {"n": 1_000_000}),
    Wrong("n 0 streamed", "n", {"n": 0, "stream": True}),
    Wrong("best_of", "best_of", {"best_of": 4, "stream": True}, code="UNSUPPORTED"),
    Wrong("beam search", "use_beam_search", {"use_beam_search": True}, code="UNSUPPORTED"),
    # Ids.
    Wrong("logit_bias of an id outside", "logit_bias", {"logit_bias": {"191222": -100}}),
    Wrong("logit_bias of a negative id", "logit_bias", {"logit_bias": {"-1": 1}}),
    Wrong("logit_bias of a word", "logit_bias", {"logit_bias": {"cat": 1}}),
    Wrong("logit_bias of 101", "logit_bias", {"logit_bias": {"1": 101}}),
    Wrong("logit_bias of NaN", "logit_bias.1", raw=raw('"logit_bias":{"1":NaN}')),
    Wrong("1,025 logit biases", "logit_bias", {"logit_bias": {str(i): 1 for i in range(1025)}}),
    Wrong("stop_token_ids outside", "stop_token_ids", {"stop_token_ids": [VOCAB], "min_tokens": 1}),
    Wrong("stop_token_ids negative", "stop_token_ids", {"stop_token_ids": [-1], "min_tokens": 1}),
    Wrong("65 stop_token_ids", "stop_token_ids", {"stop_token_ids": list(range(65))}),
    Wrong("prompt ids outside", "prompt", {"prompt": [1, VOCAB]}),
    Wrong("prompt ids negative", "prompt", {"prompt": [-5]}),
    Wrong("prompt ids of 2**40", "prompt", {"prompt": [2**40]}),
    # Stops, logprobs, prompts.
    Wrong("five stops", "stop", {"stop": ["a", "b", "c", "d", "e"]}),
    Wrong("a stop of 257 bytes", "stop", {"stop": "x" * 257}),
    Wrong("stop a number", "stop", {"stop": 7}),
    Wrong("logprobs 21", "logprobs", {"logprobs": 21}),
    Wrong("logprobs negative", "logprobs", {"logprobs": -1}),
    Wrong("top_logprobs without logprobs", "top_logprobs", {"top_logprobs": 3}, CHAT),
    Wrong("top_logprobs 21", "logprobs", {"logprobs": True, "top_logprobs": 21}, CHAT),
    Wrong("empty prompt", "prompt", {"prompt": ""}),
    Wrong("a list with an empty prompt", "prompt", {"prompt": [""]}),
    Wrong("empty list as prompt", "prompt", {"prompt": []}),
    Wrong("prompt null", "prompt", {"prompt": None}),
    Wrong("prompt an object", "prompt", {"prompt": {"a": 1}}),
    Wrong("no messages", "messages", {"messages": []}, CHAT),
    Wrong("messages null", "messages", {"messages": None}, CHAT),
    Wrong("messages a text", "messages", {"messages": "hi"}, CHAT),
    Wrong("an unknown role", "messages[0].role", {"messages": [{"role": "root", "content": "x"}]}, CHAT),
    Wrong("content a number", "messages[0].content", {"messages": [{"role": "user", "content": 7}]}, CHAT),
    Wrong("2,049 messages", "messages", {"messages": MESSAGES * 2049}, CHAT),
    # Grammars and tools.
    Wrong("an unknown response_format", "response_format.type", {"response_format": {"type": "xml"}}, CHAT),
    Wrong("a tool without a name", "tools[0].function.name", {"tools": [{"type": "function", "function": {}}]}, CHAT),
    # Bodies.
    Wrong("model null", "model", {"model": None}),
    Wrong("an unknown model", "model", {"model": "gpt-9"}, status=404, code="MODEL_NOT_FOUND"),
    Wrong("an unknown field", "temperatur", {"temperatur": 1}),
    Wrong("user of 513 bytes", "user", {"user": "x" * 513}),
    Wrong("an array", None, raw=b"[]"),
    Wrong("null", None, raw=b"null"),
    Wrong("nothing", None, raw=b""),
    Wrong("cut JSON", None, raw=b'{"model":"echo","prompt":"h'),
    Wrong("bad UTF-8", None, raw=b'{"model":"echo","prompt":"\xff\xfe"}'),
    Wrong("a lone surrogate", None, raw=b'{"model":"echo","prompt":"\\ud800"}'),
    Wrong("deep JSON", None, raw=b'{"model":"echo","prompt":' + b"[" * 5000 + b"]" * 5000 + b"}"),
    Wrong("two bodies", None, raw=b'{"model":"echo","prompt":"a"}{}'),
    Wrong("gzip", "content-encoding", headers={"content-encoding": "gzip"}, code="UNSUPPORTED"),
    Wrong(
        "a body too large", None, raw=b'{"prompt":"' + b"x" * (4 << 20) + b'"}', status=413, code="PAYLOAD_TOO_LARGE"
    ),
]


GRPC: list[tuple[str, str, dict[str, object]]] = [
    ("temperature NaN", "temperature", {"temperature": math.nan}),
    ("temperature Infinity", "temperature", {"temperature": math.inf}),
    ("temperature below 0", "temperature", {"temperature": -1.0}),
    ("top_p above 1", "top_p", {"top_p": 1.5}),
    ("min_p NaN", "min_p", {"min_p": math.nan}),
    ("repetition_penalty 0", "repetition_penalty", {"repetition_penalty": 0.0}),
    ("frequency_penalty 3", "frequency_penalty", {"frequency_penalty": 3.0}),
    ("max_token_count 0", "max_tokens", {"max_token_count": 0}),
    ("max_token_count negative", "max_tokens", {"max_token_count": -1}),
    ("min_token_count above max_token_count", "min_tokens", {"min_token_count": 5}),
    ("choice_count 0", "n", {"choice_count": 0}),
    ("choice_count huge", "n", {"choice_count": 1_000_000}),
    ("logprob_count 21", "logprobs", {"logprob_count": 21}),
    ("five stops", "stop", {"stop": list("abcde")}),
    ("stop_token_ids outside", "stop_token_ids", {"stop_token_ids": [VOCAB]}),
    ("logit_bias of an id outside", "logit_bias", {"logit_bias": [common_pb2.LogitBias(token_id=191_222, bias=-100)]}),
    ("logit_bias NaN", "logit_bias", {"logit_bias": [common_pb2.LogitBias(token_id=1, bias=math.nan)]}),
    ("empty prompt", "prompt", {"prompt": ""}),
    ("no messages", "messages", {"chat": pb.ChatInput()}),
    ("an unknown role", "messages[0].role", {"chat": pb.ChatInput(messages=[pb.ChatMessage(role="root")])}),
    ("user of 513 bytes", "user", {"user": "x" * 513}),
    ("an unknown model", "model", {"model": "gpt-9"}),
    ("no model", "model", {"model": ""}),
]


@contextlib.asynccontextmanager
async def canary(services: FourServices) -> AsyncIterator[None]:
    """A stream that grows all the while, whole; the engine computes for it alone, and it alone is billed."""
    seen, enough = Transcript(), asyncio.Event()
    body: dict[str, object] = {"model": "echo", "prompt": "canary", "max_tokens": 30_000, "ignore_eos": True}
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(stream_completion(services.client, body, seen=seen, until=enough))
        await grown(seen, beyond=0)
        prefilled = prefill_count(services)
        yield
        await grown(seen, beyond=len(seen.token_ids))
        enough.set()
    assert prefill_count(services) == prefilled, "the engine computed a prompt that was refused"
    assert seen.is_echo_prefix(VOCAB)
    assert seen.broken is None
    assert seen.error is None


async def grown(seen: Transcript, *, beyond: int) -> None:
    await until(lambda: len(seen.token_ids) > beyond)


def prefill_count(services: FourServices) -> int:
    stats = services.worker.parts.board.stats
    assert stats is not None
    return stats.prefill_token_total


async def test_every_wrong_body_is_refused_by_its_name_and_the_engine_never_hears_of_it(
    redis_server: RedisProcess, tmp_path: Path
) -> None:
    wrong_answers = []
    async with running_services(redis_server.url, tmp_path) as services, canary(services):
        for wrong in HTTP:
            headers = {"content-type": "application/json"} | wrong.headers
            response = await services.client.post(wrong.path, content=wrong.body(), headers=headers)
            error = response.json().get("error", {}) if response.status_code != httpx.codes.OK else {}
            got = (response.status_code, error.get("type"), error.get("code"), error.get("param"))
            if got != (wrong.status, "invalid_request_error", wrong.code, wrong.param):
                wrong_answers.append((wrong.name, got))

    assert wrong_answers == []


async def test_every_wrong_message_is_refused_by_its_name_and_the_engine_never_hears_of_it(
    redis_server: RedisProcess, tmp_path: Path
) -> None:
    wrong_answers = []
    async with (
        running_services(redis_server.url, tmp_path) as services,
        canary(services),
        grpc.aio.insecure_channel(services.gateway.grpc_address) as channel,
    ):
        stub = pb_grpc.GatewayServiceStub(channel)
        for name, param, changes in GRPC:
            got = await refusal(stub, changes)
            code = grpc.StatusCode.NOT_FOUND if param == "model" else grpc.StatusCode.INVALID_ARGUMENT
            if got != (code, param):
                wrong_answers.append((name, got))

    assert wrong_answers == []


async def refusal(stub: pb_grpc.GatewayServiceAsyncStub, changes: dict[str, object]) -> tuple[grpc.StatusCode, str]:
    """Status and the field that ErrorInfo names, of a good message with `changes`."""
    fields: dict[str, object] = {"model": "echo", "max_token_count": 4} | changes
    if "chat" not in fields:
        fields.setdefault("prompt", "hi")
    call = stub.Generate(pb.GenerateRequest(**fields), metadata=(("authorization", f"Bearer {KEY}"),), timeout=30)  # type: ignore[arg-type]
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        details = dict(error.trailing_metadata() or ()).get("grpc-status-details-bin", b"")
        status = status_pb2.Status.FromString(bytes(details))  # type: ignore[arg-type]
        info = error_details_pb2.ErrorInfo()
        for detail in status.details:
            if detail.Unpack(info):
                return error.code(), info.metadata.get("param", "")
        return error.code(), "no ErrorInfo"
    return grpc.StatusCode.OK, ""


async def test_what_looks_wrong_and_is_not_gets_its_answer(redis_server: RedisProcess, tmp_path: Path) -> None:
    """Nulls are absent fields, empty stop strings stop nothing, 0 is a value."""
    odd: list[dict[str, object]] = [
        {
            name: None
            for name in ("max_tokens", "temperature", "top_p", "stop", "n", "seed", "logprobs", "user", "stream")
        },
        {"stop": ""},
        {"stop": ["", ""]},
        {"temperature": 0, "top_p": 0, "seed": 0, "frequency_penalty": 0, "min_tokens": 0},
        {"seed": 2**64 - 1},
        {"seed": -(2**63)},
        {"logit_bias": {}},
    ]
    async with running_services(redis_server.url, tmp_path) as services:
        for changes in odd:
            body = BASE[COMPLETIONS] | {"ignore_eos": True} | changes
            response = await services.client.post(COMPLETIONS, json=body)
            assert response.status_code == httpx.codes.OK, (changes, response.text)
            asked = 16 if body["max_tokens"] is None else 4
            assert response.json()["usage"]["completion_tokens"] == asked, changes
