"""What a door answered to a generated request, in one form for all doors."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import grpc
import httpx
from millrace.gateway.v1 import gateway_service_pb2 as pb
from millrace.gateway.v1 import gateway_service_pb2_grpc as pb_grpc

from millrace_client.errors import error_of
from millrace_client.values import Gathered
from tests.helpers.three_doors import Case

# Token, its bytes where the endpoint shows them, its value, and the alternatives.
Logprob = tuple[str, tuple[int, ...], float, tuple[Any, ...]]


@dataclasses.dataclass(slots=True)
class Said:
    """One choice. Ids of calls differ between requests by design. `offsets` are of completions over HTTP only."""

    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    finish: str = ""
    logprobs: list[Logprob] = dataclasses.field(default_factory=list)
    offsets: list[int] = dataclasses.field(default_factory=list, compare=False)
    token_ids: list[int] = dataclasses.field(default_factory=list, compare=False)


@dataclasses.dataclass(slots=True)
class Outcome:
    """The answer, or (reason, field) of an error. What came before an error in mid-stream is not compared."""

    choices: list[Said] = dataclasses.field(default_factory=list)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    error: tuple[str, str | None] | None = None
    # Depends on what was asked before.
    cached_tokens: int = dataclasses.field(default=0, compare=False)


async def ask_whole(client: httpx.AsyncClient, case: Case) -> Outcome:
    """Over HTTP at once."""
    response = await client.post(_path(case), json=case.body)
    got = response.json()
    if not response.is_success:
        return Outcome(error=(got["error"]["code"], got["error"]["param"]))
    made = _with_usage(Outcome(), got["usage"])
    for choice in got["choices"]:
        message = choice.get("message", {})
        calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", ())]
        text = message["content"] or "" if case.chat else choice["text"]
        said = Said(text, message.get("reasoning_content", ""), calls, choice["finish_reason"])
        _add_logprobs(said, choice["logprobs"])
        made.choices.append(said)
    return _without_echo(made, case)


async def ask_stream(client: httpx.AsyncClient, case: Case) -> Outcome:
    """Over HTTP as events."""
    options = {"include_usage": True, "continuous_usage_stats": case.seed % 2 == 0}
    response = await client.post(_path(case), json={**case.body, "stream": True, "stream_options": options})
    if not response.is_success:
        error = response.json()["error"]
        return Outcome(error=(error["code"], error["param"]))
    assert response.text.endswith("\n\n")
    frames = [f.removeprefix("data: ") for f in response.text.split("\n\n") if f and not f.startswith(":")]
    if frames[-1] != "[DONE]":
        error = json.loads(frames[-1])["error"]
        return Outcome(error=(error["code"], error["param"]))
    chunks = [json.loads(frame) for frame in frames[:-1]]
    parts = [choice for chunk in chunks for choice in chunk["choices"]]
    made = _with_usage(Outcome(), chunks[-1]["usage"])
    made.choices = [Said() for _ in range(1 + max(part["index"] for part in parts))]
    for part in parts:
        _add_part(made.choices[part["index"]], part)
    return _without_echo(made, case)


async def ask_grpc(stub: pb_grpc.GatewayServiceAsyncStub, case: Case, metadata: tuple[tuple[str, str], ...]) -> Outcome:
    """Over gRPC."""
    gathered, logprobs = Gathered(), dict[int, list[pb.TokenLogprob]]()
    try:
        async for response in stub.Generate(case.request, metadata=metadata):
            gathered.take(response)
            logprobs.setdefault(response.delta.choice, []).extend(response.delta.logprobs)
    except grpc.aio.AioRpcError as failed:
        error = error_of(failed)
        return Outcome(error=(error.reason, error.param))
    answer = gathered.answer()
    used = answer.usage
    made = Outcome([], used.prompt_tokens, used.completion_tokens, used.reasoning_tokens)
    made.cached_tokens = used.cached_tokens
    form = _chat_logprob if case.chat else _completion_logprob
    for index, choice in enumerate(answer.choices):
        calls = [(call.name, call.arguments) for call in choice.tool_calls]
        entries = [form(entry) for entry in logprobs.get(index, ())]
        said = Said(choice.text, choice.reasoning, calls, choice.finish_reason or "", entries)
        said.token_ids = choice.token_ids
        made.choices.append(said)
    return made


def _path(case: Case) -> str:
    return "/v1/chat/completions" if case.chat else "/v1/completions"


def _with_usage(made: Outcome, usage: dict[str, Any]) -> Outcome:
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    made.prompt_tokens, made.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    made.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
    made.reasoning_tokens = usage["completion_tokens_details"]["reasoning_tokens"]
    return made


def _add_part(said: Said, part: dict[str, Any]) -> None:
    assert not said.finish, "a chunk after the finish"
    delta = part.get("delta", {})
    said.text += part.get("text") or delta.get("content") or ""
    said.reasoning += delta.get("reasoning_content", "")
    for call in delta.get("tool_calls", ()):
        name, arguments = call["function"].get("name", ""), call["function"]["arguments"]
        if call["index"] == len(said.calls):
            said.calls.append((name, arguments))
        else:
            known = said.calls[call["index"]]
            said.calls[call["index"]] = (known[0] + name, known[1] + arguments)
    said.finish = part["finish_reason"] or ""
    _add_logprobs(said, part["logprobs"])


def _add_logprobs(said: Said, sent: dict[str, Any] | None) -> None:
    if sent is None:
        return
    for entry in sent.get("content", ()):
        top = tuple((t["token"], tuple(t["bytes"]), t["logprob"]) for t in entry["top_logprobs"])
        said.logprobs.append((entry["token"], tuple(entry["bytes"]), entry["logprob"], top))
    if "tokens" in sent:
        said.offsets += sent["text_offset"]
        rows = zip(sent["tokens"], sent["token_logprobs"], sent["top_logprobs"], strict=True)
        said.logprobs += [(token, (), value, tuple(sorted((top or {}).items()))) for token, value, top in rows]


def _chat_logprob(sent: pb.TokenLogprob) -> Logprob:
    top = tuple((t.token, tuple(t.token_bytes), t.logprob) for t in sent.top)
    return sent.token, tuple(sent.token_bytes), sent.logprob, top


def _completion_logprob(sent: pb.TokenLogprob) -> Logprob:
    top: dict[str, float] = {t.token: t.logprob for t in sent.top} or {sent.token: sent.logprob}
    return sent.token, (), sent.logprob, tuple(sorted(top.items()))


def _without_echo(made: Outcome, case: Case) -> Outcome:
    """The HTTP answer as it were without the prompt that it repeats: gRPC has no `echo`."""
    for said in made.choices if case.body.get("echo") else ():
        assert said.text.startswith(case.echoed)
        said.text = said.text.removeprefix(case.echoed)
        if case.body.get("logprobs") is not None:
            assert said.logprobs[0][2] is None
            del said.logprobs[: made.prompt_tokens]
    return made
