"""Clients of the wild and the embedded model: tools, and answers of a given shape where it can be held to one."""

from __future__ import annotations

import subprocess
import sys
from typing import Any, Literal

import openai
import pydantic
import pytest

from millrace_client import Client, Message, Options, Tool
from tests.helpers.stack import ROOT, Stack, clean_environment

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(180)]

MODEL = "smollm2-135m"
MESSAGES: Any = [{"role": "user", "content": "What is the weather in Paris?"}]


class Weather(pydantic.BaseModel):
    """Where, and in which unit; nothing else, or a small model would go on for ever."""

    model_config = pydantic.ConfigDict(extra="forbid")
    city: str = pydantic.Field(max_length=20)
    unit: Literal["celsius", "fahrenheit"]


SCHEMA = Weather.model_json_schema()
TOOL: Any = {"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": SCHEMA}}
OTHER: Any = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture
def sdk(smollm2: Stack) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{smollm2.url}/v1", api_key=smollm2.key, max_retries=0)


def needs_structured_output(sdk: openai.OpenAI) -> None:
    try:
        sdk.completions.create(model=MODEL, prompt="x", max_tokens=2, extra_body={"guided_choice": ["a"]})
    except openai.BadRequestError as refused:
        pytest.skip(f"needs structured output: {refused.code}")


def test_an_answer_with_tools_offered_is_the_same_over_every_door(smollm2: Stack, sdk: openai.OpenAI) -> None:
    common: Any = {"seed": 7, "temperature": 0.7, "max_tokens": 24}
    asked: Any = {"model": MODEL, "messages": MESSAGES, "tools": [TOOL], **common}
    whole = sdk.chat.completions.create(**asked)
    chunks = list(sdk.chat.completions.create(**asked, stream=True))
    with Client(smollm2.grpc_address, smollm2.key, timeout_s=60) as client:
        options = Options(**common, tools=[Tool("get_weather", "Weather", SCHEMA)])
        over_grpc = client.generate(MODEL, [Message("user", MESSAGES[0]["content"])], options)

    said = whole.choices[0].message.content or ""
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == said == over_grpc.text
    assert whole.usage is not None
    # The tools are part of the prompt, in the same words.
    assert whole.usage.prompt_tokens == over_grpc.usage.prompt_tokens > 100


def test_a_model_without_reasoning_says_so(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        sdk.chat.completions.create(model=MODEL, messages=MESSAGES, reasoning_effort="low")

    assert refused.value.param == "reasoning_effort"
    answer = sdk.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=2, reasoning_effort="none")
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_call_that_is_asked_for_fits_its_schema(sdk: openai.OpenAI, choice: Any) -> None:
    needs_structured_output(sdk)
    tools = [TOOL] if choice == "required" else [OTHER, TOOL]
    asked: Any = {
        "model": MODEL, "messages": MESSAGES, "tools": tools, "tool_choice": choice, "temperature": 0,
        "parallel_tool_calls": False, "max_tokens": 96,
    }  # fmt: skip

    whole = sdk.chat.completions.create(**asked)
    with sdk.chat.completions.stream(**asked) as stream:
        stream.until_done()
        final = stream.get_final_completion()

    assert whole.choices[0].finish_reason == final.choices[0].finish_reason == "tool_calls"
    assert whole.choices[0].message.content is None
    (call,) = whole.choices[0].message.tool_calls or []
    (same,) = final.choices[0].message.tool_calls or []
    assert call.type == same.type == "function"
    assert call.function.name == same.function.name == "get_weather"
    assert call.function.arguments == same.function.arguments
    Weather.model_validate_json(call.function.arguments)


def test_a_strict_tool_is_parsed_into_its_model(sdk: openai.OpenAI) -> None:
    needs_structured_output(sdk)
    tool = openai.pydantic_function_tool(Weather, name="get_weather")

    answer = sdk.chat.completions.parse(
        model=MODEL, messages=MESSAGES, tools=[tool], tool_choice="required", parallel_tool_calls=False,
        temperature=0, max_tokens=96,
    )  # fmt: skip

    (call,) = answer.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Weather)


def test_an_answer_is_parsed_into_its_model(sdk: openai.OpenAI) -> None:
    needs_structured_output(sdk)

    answer = sdk.chat.completions.parse(
        model=MODEL, messages=MESSAGES, response_format=Weather, temperature=0, max_tokens=96
    )

    assert isinstance(answer.choices[0].message.parsed, Weather)


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        pytest.param("green", "red, ", id="in the middle"),
        pytest.param(", green and", "red", id="across tokens"),
        pytest.param("red", "", id="at the start"),
        pytest.param("blue", "red, green and ", id="with the last token that the grammar has"),
        pytest.param("blue!", "red, green and blue", id="begun where the grammar ends, never whole"),
    ],
)
def test_a_stop_string_cuts_an_answer_that_a_grammar_holds(sdk: openai.OpenAI, stop: str, text: str) -> None:
    needs_structured_output(sdk)
    asked: Any = {"model": MODEL, "prompt": "Colours:", "max_tokens": 24, "stop": [stop], "n": 2}
    held: Any = {"extra_body": {"guided_choice": ["red, green and blue"]}}

    answer = sdk.completions.create(**asked, **held)
    streamed, ends = ["", ""], ["", ""]
    for event in sdk.completions.create(**asked, **held, stream=True):
        for choice in event.choices:
            streamed[choice.index] += choice.text
            ends[choice.index] = choice.finish_reason or ends[choice.index]

    assert [choice.text for choice in answer.choices] == streamed == [text, text]
    assert [choice.finish_reason for choice in answer.choices] == ends == ["stop", "stop"]


def test_a_stop_string_leaves_of_a_schema_what_came_before_it(sdk: openai.OpenAI) -> None:
    needs_structured_output(sdk)
    schema: Any = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA, "strict": True}}
    asked: Any = {"model": MODEL, "messages": MESSAGES, "response_format": schema, "temperature": 0, "max_tokens": 96}

    whole = sdk.chat.completions.create(**asked)
    cut = sdk.chat.completions.create(**asked, stop=['"unit"'])

    before, found, _ = (whole.choices[0].message.content or "").partition('"unit"')
    assert found
    assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == (before, "stop")
    assert cut.usage is not None
    assert whole.usage is not None
    assert 0 < cut.usage.completion_tokens < whole.usage.completion_tokens


def test_langchain_gets_structured_output_by_a_tool(smollm2: Stack, sdk: openai.OpenAI) -> None:
    needs_structured_output(sdk)
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(
        model=MODEL,
        base_url=f"{smollm2.url}/v1",
        api_key=smollm2.key,  # type: ignore[arg-type]
        temperature=0,
        max_completion_tokens=96,
        max_retries=0,
    )

    found = model.with_structured_output(Weather, method="function_calling").invoke("What is the weather in Paris?")

    assert isinstance(found, Weather)


def test_the_examples_of_the_python_client_run(smollm2: Stack) -> None:
    folder = ROOT / "clients" / "python"
    environment = clean_environment(smollm2.home, {})
    environment["PYTHONPATH"] += f":{folder}"

    def example(name: str, *more: str) -> str:
        command = [sys.executable, str(folder / "examples" / name), smollm2.grpc_address, smollm2.key, MODEL, *more]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "Usage(prompt_tokens=" in example("stream.py", "Once upon a time")
    assert example("tool_loop.py")
