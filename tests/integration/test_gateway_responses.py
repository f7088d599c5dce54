"""`/v1/responses` through the OpenAI SDK, over a scripted model and a real file."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import openai
import pydantic
import pytest
from millrace.common.v1 import common_pb2

from services.common.http_server import HttpServer, listen
from services.common.metrics import Metrics
from services.gateway.app import create_app
from services.gateway.response_store import RESPONSE_TTL_S, SqliteResponseStore
from tests.helpers.echo_generation import (
    LENGTH,
    STOP,
    FakeGenerator,
    FakeKeyRing,
    front_parts,
    key,
    one_by_one,
    served,
)
from tests.helpers.fake_clock import FakeClock

HELLO = list(b"Hello")
CALLS = list(
    b'<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rom"}}\n</tool_call>\n'
    b'<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
)
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "name": "get_weather", "description": "Now", "parameters": CITY}
TIME = {"type": "function", "name": "get_time"}


class Rig:
    """A served door, its fakes, and SDK clients of two tenants."""

    def __init__(self, generator: FakeGenerator, store: SqliteResponseStore, clock: FakeClock, url: str) -> None:
        self.generator, self.store, self.clock, self.url = generator, store, clock, url
        self.sdk = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0)
        self.other = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="other", max_retries=0)

    def prompts(self) -> list[str]:
        model = served()
        return [model.tokenizer.decode(valid.prompt_token_ids) for _, valid in self.generator.requests]


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    names = iter(f"01ARZ3NDEKTSV4RRFFQ69G5F{i:02d}" for i in range(99))
    generator = FakeGenerator(lambda _: one_by_one(HELLO, finish=STOP))
    generator.new_id = lambda: next(names)
    clock = FakeClock()
    store = SqliteResponseStore(tmp_path / "store", clock)
    keyring = FakeKeyRing(secret=key(), other=key("other"))
    parts = front_parts(generator, served(structured_output=True), keyring=keyring, responses=store)
    server = HttpServer(create_app(parts, metrics=Metrics(), ready=lambda: True), listen("127.0.0.1:0"))
    server.start()
    made = Rig(generator, store, clock, f"http://127.0.0.1:{server.port}")
    yield made
    await made.sdk.close()
    await made.other.close()
    await server.stop()
    await store.close()


async def test_a_conversation_goes_on_from_what_is_stored(rig: Rig) -> None:
    first = await rig.sdk.responses.create(model="tiny", input="Hi", instructions="Be brief.")
    second = await rig.sdk.responses.create(model="tiny", input="And?", previous_response_id=first.id)
    found = await rig.sdk.responses.retrieve(first.id)

    assert (first.status, first.output_text, first.usage.output_tokens) == ("completed", "Hello", 5)
    assert found.output_text == "Hello"
    assert second.previous_response_id == first.id
    one, two = rig.prompts()
    assert "Be brief." in one
    assert "Be brief." not in two
    assert two.index("Hi") < two.index("Hello") < two.index("And?")


async def test_events_are_named_and_numbered_and_tell_the_same_answer(rig: Rig) -> None:
    stream = await rig.sdk.responses.create(
        model="tiny", input=[{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}], stream=True
    )
    events = [event async for event in stream]

    kinds = list(dict.fromkeys(event.type for event in events))
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "Hello"
    assert (await rig.sdk.responses.retrieve(events[-1].response.id)).to_dict() == events[-1].response.to_dict()


async def test_the_sdk_helper_reads_the_stream(rig: Rig) -> None:
    async with rig.sdk.responses.stream(model="tiny", input="Hi") as stream:
        final = await stream.get_final_response()

    assert final.output_text == "Hello"


async def test_a_call_and_its_result_go_through_a_conversation(rig: Rig) -> None:
    rig.generator.script = one_by_one(CALLS, finish=STOP)
    first = await rig.sdk.responses.create(model="tiny", input="Weather?", tools=[WEATHER, TIME])
    rig.generator.script = one_by_one(HELLO, finish=STOP)
    results = [{"type": "function_call_output", "call_id": item.call_id, "output": "22"} for item in first.output]
    second = await rig.sdk.responses.create(
        model="tiny", input=results, tools=[WEATHER, TIME], previous_response_id=first.id
    )
    replayed = await rig.sdk.responses.create(
        model="tiny", input=[{"role": "user", "content": "Weather?"}, *first.output, *results], tools=[WEATHER, TIME]
    )

    assert [(item.type, item.name, item.arguments, item.status) for item in first.output] == [
        ("function_call", "get_weather", '{"city": "Rom"}', "completed"),
        ("function_call", "get_time", "{}", "completed"),
    ]
    assert first.tools[0].to_dict() == WEATHER | {"strict": False}
    assert second.output_text == replayed.output_text == "Hello"
    assert second.tools[1].name == "get_time"
    _, by_id, by_replay = rig.prompts()
    assert by_id == by_replay
    assert by_id.index("Weather?") < by_id.index('{"city": "Rom"}') < by_id.index("22")


async def test_calls_are_streamed_item_after_item(rig: Rig) -> None:
    rig.generator.script = one_by_one([*b"Let me see. ", *CALLS], finish=STOP)
    async with rig.sdk.responses.stream(model="tiny", input="Weather?", tools=[WEATHER, TIME]) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()

    places = [(e.type, e.output_index) for e in events if e.type.startswith("response.output_item")]
    assert places == [(f"response.output_item.{what}", index) for index in range(3) for what in ("added", "done")]
    deltas = {index: "" for index in range(3)}
    for event in events:
        if event.type in ("response.output_text.delta", "response.function_call_arguments.delta"):
            deltas[event.output_index] += event.delta
    assert deltas == {0: "Let me see.", 1: '{"city": "Rom"}', 2: "{}"}
    assert [item.type for item in final.output] == ["message", "function_call", "function_call"]
    assert [event.sequence_number for event in events if hasattr(event, "sequence_number")] == sorted(
        event.sequence_number for event in events if hasattr(event, "sequence_number")
    )
    assert (await rig.sdk.responses.retrieve(final.id)).output[1].arguments == '{"city": "Rom"}'


async def test_one_call_only_where_no_more_are_wanted(rig: Rig) -> None:
    rig.generator.script = one_by_one(CALLS, finish=STOP)
    answer = await rig.sdk.responses.create(
        model="tiny", input="Weather?", tools=[WEATHER, TIME], parallel_tool_calls=False
    )

    assert [item.name for item in answer.output] == ["get_weather"]
    assert answer.parallel_tool_calls is False


async def test_a_cut_answer_is_incomplete(rig: Rig) -> None:
    rig.generator.script = one_by_one(HELLO, finish=LENGTH)
    answer = await rig.sdk.responses.create(model="tiny", input="Hi", max_output_tokens=5)

    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"


async def test_what_is_not_stored_or_deleted_or_expired_or_of_another_tenant_is_404(rig: Rig) -> None:
    kept = await rig.sdk.responses.create(model="tiny", input="Hi")
    unkept = await rig.sdk.responses.create(model="tiny", input="Hi", store=False)
    gone = await rig.sdk.responses.create(model="tiny", input="Hi")
    await rig.sdk.responses.delete(gone.id)

    for client, asked in ((rig.sdk, unkept.id), (rig.sdk, gone.id), (rig.other, kept.id), (rig.sdk, "resp_x")):
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(asked)
        with pytest.raises(openai.NotFoundError):
            await client.responses.delete(asked)
        with pytest.raises(openai.NotFoundError) as caught:
            await client.responses.create(model="tiny", input="Hi", previous_response_id=asked)
        assert caught.value.param == "previous_response_id"
    with pytest.raises(openai.NotFoundError):
        await rig.other.responses.cancel(kept.id)
    rig.clock.jump(RESPONSE_TTL_S + 1)
    with pytest.raises(openai.NotFoundError):
        await rig.sdk.responses.retrieve(kept.id)


async def test_reads_make_no_request(rig: Rig) -> None:
    made = await rig.sdk.responses.create(model="tiny", input="Hi")
    for _ in range(3):
        await rig.sdk.responses.retrieve(made.id)
    assert (await rig.sdk.responses.cancel(made.id)).status == "completed"

    assert len(rig.generator.requests) == 1


async def test_structured_text_is_held_to_its_schema_and_parsed(rig: Rig) -> None:
    class City(pydantic.BaseModel):
        city: str

    rig.generator.script = one_by_one(list(b'{"city": "Rom"}'), finish=STOP)
    answer = await rig.sdk.responses.parse(model="tiny", input="Where?", text_format=City)
    loose = await rig.sdk.responses.create(model="tiny", input="Where?", text={"format": {"type": "json_object"}})

    assert answer.output_parsed == City(city="Rom")
    first, second = (valid.sampling.grammar for _, valid in rig.generator.requests)
    assert first.kind == common_pb2.GRAMMAR_KIND_JSON_SCHEMA
    assert "city" in json.loads(first.text)["properties"]
    assert answer.text is not None
    assert answer.text.format is not None
    assert answer.text.format.type == "json_schema"
    assert second.kind == common_pb2.GRAMMAR_KIND_JSON_OBJECT
    assert loose.text is not None
    assert loose.text.format is not None
    assert loose.text.format.type == "json_object"


async def test_a_failed_answer_is_not_stored(rig: Rig) -> None:
    rig.generator.script = [*one_by_one(HELLO)[:2], RuntimeError("boom")]
    with pytest.raises(openai.InternalServerError):
        await rig.sdk.responses.create(model="tiny", input="Hi")

    name = f"resp_{rig.generator.only.request_id}"
    assert await rig.store.get("acme", name) is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search", "name": "x"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "no name"}]}, "tools[0].name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "other"}, "tools": [WEATHER]}, "tool_choice"),
        ({"input": [{"type": "function_call_output", "output": "22"}]}, "input[0].call_id"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"background": True}, "background"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": 7}}}}, "text.format.schema"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary"),
        ({"stream_options": {}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"input": []}, "input"),
        ({"input": [{"type": "function_call", "role": "user", "content": "x"}]}, "input[0].call_id"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]}]},
         "input[0].content[0].type"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"temperature": 9}, "temperature"),
        ({"nonsense": 1}, "nonsense"),
    ],
)  # fmt: skip
async def test_what_is_not_served_is_400_by_name(rig: Rig, fields: dict[str, object], param: str) -> None:
    async with httpx.AsyncClient(base_url=rig.url, headers={"Authorization": "Bearer secret"}) as client:
        answer = await client.post("/v1/responses", json={"model": "tiny", "input": "Hi"} | fields)

    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert rig.generator.requests == []


async def test_the_store_survives_a_restart_and_is_shared(rig: Rig, tmp_path: Path) -> None:
    made = await rig.sdk.responses.create(model="tiny", input="Hi")
    again = SqliteResponseStore(tmp_path / "store", rig.clock)
    await asyncio.gather(*(again.put("acme", f"r{i}", b"x") for i in range(20)))

    found = await again.get("acme", made.id)

    assert found is not None
    assert json.loads(found)["turns"][-1] == {
        "role": "assistant",
        "content": "Hello",
        "calls": [],
        "call_id": None,
        "reasoning": None,
    }
    assert all([await rig.store.get("acme", f"r{i}") == b"x" for i in range(20)])
    await again.close()
