"""Generated requests, each in the words of every door. A seed is a case; door_answers.py asks the doors."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from millrace.gateway.v1 import gateway_service_pb2 as pb

from tests.helpers.seeded_model import CONTEXT, FAILING_FIRST, FAILING_STEP, tokenizer

VOCABULARY = tokenizer().vocab_size
TEXTS = ("Hi", "the end 🙂", "é" * 9, "日本\n\n", "STOP", " ", "<|im_end|>", "\u202e\x00a", "x" * 60)
TOOL_NAMES = ("add", "no-args")

# Field of the drafts: its name over HTTP, its name over gRPC, values that are served, values that are not.
_NUMBERS: tuple[tuple[str, str, Sequence[float], Sequence[float]], ...] = (
    ("temperature", "temperature", (0, 0.1, 0.7, 1, 2), (-0.1, 2.5)),
    ("top_p", "top_p", (0.1, 0.95, 1), (-1, 1.5)),
    ("top_k", "top_k", (-1, 0, 1, 40, VOCABULARY), (-2, VOCABULARY + 1)),
    ("min_p", "min_p", (0, 0.05, 1), (-0.5, 1.25)),
    ("repetition_penalty", "repetition_penalty", (0.01, 1, 1.1, 10), (0, 10.5)),
    ("frequency_penalty", "frequency_penalty", (-2, 0.3, 2), (-2.5, 3)),
    ("presence_penalty", "presence_penalty", (-2, 0.3, 2), (-2.5, 3)),
    ("n", "choice_count", (1, 1, 2, 3, 8), (0, -1, 9)),
    ("min_tokens", "min_token_count", (0, 1, 2), (-1, CONTEXT)),
    ("max_tokens", "max_token_count", (1, 2, 15, 16, 17, 64, 90), (0, -5, CONTEXT, CONTEXT + 1, 1_000_000)),
)
_STOPS = ("STOP", "a", "🙃", "🙂", "\n\n", "OPST", "the end", "é", "日", "</tool_call>", "zz")


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One request; `chat` says which HTTP endpoint. `echoed` is what the HTTP answer has before its text."""

    seed: int
    chat: bool
    body: Mapping[str, Any]
    request: pb.GenerateRequest
    echoed: str = ""


def make_case(seed: int) -> Case:
    """The request of this seed; about one in five is refused."""
    rng = random.Random(seed)
    chat = rng.random() < 0.6
    body: dict[str, Any] = {"model": "echo", "seed": _seed(rng)}
    request = pb.GenerateRequest(model="echo", seed=body["seed"])
    (_add_chat if chat else _add_prompt)(rng, body, request)
    for name, other, values, _ in _NUMBERS:
        if rng.random() < (0.95 if name == "max_tokens" else 0.25):
            _set(body, request, name, other, rng.choice(values))
    _add_lists(rng, body, request)
    _add_logprobs(rng, body, request, chat)
    if rng.random() < 0.2:
        rng.choice(_BREAKS)(rng, body, request)
    echoed = _echo(rng, body) if not chat else ""
    return Case(seed, chat, body, request, echoed)


def _seed(rng: random.Random) -> int:
    return rng.choice((0, 1, -1, 2**63 - 1, -(2**63), *(rng.getrandbits(62) for _ in range(15))))


def _set(body: dict[str, Any], request: pb.GenerateRequest, name: str, other: str, value: float) -> None:
    body[name] = value
    setattr(request, other, value)


def _add_prompt(rng: random.Random, body: dict[str, Any], request: pb.GenerateRequest) -> None:
    if rng.random() < 0.5:
        body["prompt"] = request.prompt = "".join(rng.choices(TEXTS, k=rng.randint(1, 4)))
    else:
        body["prompt"] = [rng.randrange(VOCABULARY) for _ in range(rng.choice((1, 15, 16, 17, 40)))]
        request.prompt_token_ids.token_ids.extend(body["prompt"])


def _add_chat(rng: random.Random, body: dict[str, Any], request: pb.GenerateRequest) -> None:
    messages = [{"role": "system", "content": rng.choice(TEXTS)}] if rng.random() < 0.3 else []
    messages.append({"role": "user", "content": "".join(rng.choices(TEXTS, k=rng.randint(1, 3)))})
    if rng.random() < 0.2:
        call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{"}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})  # type: ignore[dict-item]
        messages.append({"role": "tool", "tool_call_id": "c1", "content": "3"})
    body["messages"] = messages
    for message in messages:
        sent = request.chat.messages.add(role=message["role"], content=message["content"])
        sent.tool_call_id = message.get("tool_call_id", "")
        if "tool_calls" in message:
            sent.tool_calls.add(id="c1", name="add", arguments="{")
    if rng.random() < 0.6:
        schema = {"type": "object", "properties": {"a": {"type": "array"}}}
        body["tools"] = [{"type": "function", "function": {"name": n, "parameters": schema}} for n in TOOL_NAMES]
        for name in TOOL_NAMES:
            request.chat.tools.add(name=name, parameters=json.dumps(schema))
        if rng.random() < 0.3:
            body["tool_choice"], request.chat.tool_choice = "none", pb.TOOL_CHOICE_MODE_NONE
        if rng.random() < 0.4:
            body["parallel_tool_calls"] = request.chat.parallel_tool_calls = False
    if rng.random() < 0.2:
        body["reasoning_effort"] = request.chat.reasoning_effort = rng.choice(("none", "low", "high"))


def _add_lists(rng: random.Random, body: dict[str, Any], request: pb.GenerateRequest) -> None:
    if rng.random() < 0.5:
        body["stop"] = rng.sample(_STOPS, rng.randint(1, 4))
        request.stop.extend(body["stop"])
    if rng.random() < 0.2:
        body["stop_token_ids"] = rng.sample(range(VOCABULARY), rng.choice((1, 5, 64)))
        request.stop_token_ids.extend(body["stop_token_ids"])
    if rng.random() < 0.2:
        bias = {rng.randrange(VOCABULARY): rng.choice((-100, 0.5, 100)) for _ in range(rng.choice((1, 20)))}
        body["logit_bias"] = {str(token_id): value for token_id, value in bias.items()}
        for token_id, value in bias.items():
            request.logit_bias.add(token_id=token_id, bias=value)
    if rng.random() < 0.2:
        body["ignore_eos"] = request.ignore_eos = True
    if rng.random() < 0.2:
        body["user"] = request.user = rng.choice(("u", "é" * 256))
        body["metadata"] = {"k" * 64: "v" * 512, "a": ""}
        request.metadata.update(body["metadata"])


def _add_logprobs(rng: random.Random, body: dict[str, Any], request: pb.GenerateRequest, chat: bool) -> None:
    if rng.random() < 0.4:
        count = rng.choice((0, 0, 1, 5, 20))
        request.logprob_count = count
        if not chat:
            body["logprobs"] = count
            return
        body["logprobs"] = True
        if count or rng.random() < 0.5:
            body["top_logprobs"] = count


def _echo(rng: random.Random, body: dict[str, Any]) -> str:
    if rng.random() >= 0.3:
        return ""
    body["echo"] = True
    prompt = body["prompt"]
    ids = tokenizer().encode(prompt) if isinstance(prompt, str) else prompt
    return tokenizer().decode(ids)


# --- what is refused ---------------------------------------------------------------------------------------------
_Break = Callable[[random.Random, dict[str, Any], pb.GenerateRequest], None]


def _break_number(rng: random.Random, body: dict[str, Any], request: pb.GenerateRequest) -> None:
    name, other, _, values = rng.choice(_NUMBERS)
    _set(body, request, name, other, rng.choice(values))


def _break_model(rng: random.Random, body: dict[str, Any], request: pb.GenerateRequest) -> None:
    body["model"] = request.model = rng.choice(("nope", "echo@nope", "", "x" * 300))


def _break_stop(rng: random.Random, body: dict[str, Any], request: pb.GenerateRequest) -> None:
    body["stop"] = rng.choice((["a", "b", "c", "d", "e"], ["x" * 257], ["é" * 129]))
    del request.stop[:]
    request.stop.extend(body["stop"])


def _break_ids(rng: random.Random, body: dict[str, Any], request: pb.GenerateRequest) -> None:
    body["stop_token_ids"] = rng.choice(([VOCABULARY], [1] * 65))
    del request.stop_token_ids[:]
    request.stop_token_ids.extend(body["stop_token_ids"])


def _break_bias(rng: random.Random, body: dict[str, Any], request: pb.GenerateRequest) -> None:
    token_id, value = rng.choice(((VOCABULARY, 1), (1, 101), (1, -100.5)))
    body["logit_bias"] = {str(token_id): value}
    del request.logit_bias[:]
    request.logit_bias.add(token_id=token_id, bias=value)


def _break_labels(rng: random.Random, body: dict[str, Any], request: pb.GenerateRequest) -> None:
    if rng.random() < 0.5:
        body["user"] = request.user = "u" * 513
        return
    body["metadata"] = rng.choice(({str(i): "" for i in range(17)}, {"k" * 65: ""}, {"k": "v" * 513}))
    request.metadata.clear()
    request.metadata.update(body["metadata"])


def _break_input(rng: random.Random, body: dict[str, Any], request: pb.GenerateRequest) -> None:
    if "messages" in body:
        role = rng.choice(("robot", "tool", ""))
        extra = {"tool_call_id": "c9"} if role == "tool" else {}
        body["messages"] = [{"role": role, "content": "x", **extra}] if role else []
        del request.chat.messages[:]
        for message in body["messages"]:
            request.chat.messages.add(**message)
    elif rng.random() < 0.5:
        body["prompt"] = request.prompt = rng.choice(("", "a" * CONTEXT, "a" * 100_000))
    else:
        body["prompt"] = rng.choice(([], [VOCABULARY], [1] * CONTEXT))
        request.prompt_token_ids.token_ids[:] = body["prompt"]
        request.prompt_token_ids.SetInParent()


def _break_tools(rng: random.Random, body: dict[str, Any], request: pb.GenerateRequest) -> None:
    if "messages" not in body:
        _break_number(rng, body, request)
        return
    names = rng.choice((("a b",), ("add", "add"), ("",), ("x" * 65,)))
    body["tools"] = [{"type": "function", "function": {"name": name}} for name in names]
    del request.chat.tools[:]
    for name in names:
        request.chat.tools.add(name=name)


def _break_seed(rng: random.Random, body: dict[str, Any], request: pb.GenerateRequest) -> None:
    """Not refused: a row of the answer fails after some tokens."""
    body["seed"] = request.seed = FAILING_FIRST + FAILING_STEP * rng.randrange(1_000_000)


_BREAKS: tuple[_Break, ...] = (
    _break_number, _break_number, _break_number, _break_model, _break_stop, _break_ids, _break_bias, _break_labels,
    _break_input, _break_input, _break_tools, _break_seed, _break_seed,
)  # fmt: skip
