"""Tokenising over HTTP: the ids are those that a generation of the same body would have; cancel by id."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.echo_generation import REQUEST_ID, AsgiClient, FakeGenerator, front, one_by_one, served
from tests.helpers.echo_generation import FakeKeyRing as Keys
from tests.helpers.echo_generation import key as key_of

MESSAGES = [
    {"role": "system", "content": "be <|im_end|> brief"},
    {"role": "user", "content": [{"type": "text", "text": "é"}]},
]


def client(**card: Any) -> tuple[AsgiClient, FakeGenerator]:
    generator = FakeGenerator(one_by_one([65]))
    return front(generator, served(**card)), generator


@pytest.mark.parametrize("bos", [{}, {"add_bos": True, "bos_token_id": 7}])
@pytest.mark.parametrize(
    ("path", "fields"), [("/v1/completions", {"prompt": "hi 🙂"}), ("/v1/chat/completions", {"messages": MESSAGES})]
)
async def test_the_ids_are_those_of_a_generation(path: str, fields: dict[str, Any], bos: dict[str, Any]) -> None:
    asked, generator = client(**bos)
    assert (await asked.ask("POST", path, {"model": "tiny", **fields})).status == 200

    answer = await asked.ask("POST", "/tokenize", {"model": "tiny", **fields})

    assert answer.status == 200
    assert answer.json()["tokens"] == generator.requests[0][1].prompt_token_ids.tolist()
    assert answer.json()["count"] == len(answer.json()["tokens"])
    assert answer.json()["max_model_len"] == 4_096
    assert len(generator.requests) == 1, "tokenising admits nothing"


async def test_special_tokens_can_be_left_out_and_tokens_shown() -> None:
    asked, _ = client(add_bos=True, bos_token_id=7)
    body = {"model": "tiny@v1", "prompt": "ab", "add_special_tokens": False, "return_token_strs": True}

    answer = await asked.ask("POST", "/tokenize", body)

    assert answer.json() == {"count": 2, "max_model_len": 4_096, "tokens": [97, 98], "token_strs": ["a", "b"]}


async def test_detokenize_undoes_tokenize_and_shows_control_tokens() -> None:
    asked, _ = client()
    tokens = (await asked.ask("POST", "/tokenize", {"model": "tiny", "messages": MESSAGES})).json()["tokens"]

    answer = await asked.ask("POST", "/detokenize", {"model": "tiny", "tokens": tokens})

    assert answer.json() == {
        "prompt": "<|im_start|>system\nbe <|im_end|> brief<|im_end|>\n"
        "<|im_start|>user\né<|im_end|>\n<|im_start|>assistant"
    }
    assert (await asked.ask("POST", "/detokenize", {"model": "tiny", "tokens": []})).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": ""}, "prompt"),
        ("/tokenize", {"prompt": "a" * 4_096 * 17}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": MESSAGES, "add_generation_prompt": False}, "add_generation_prompt"),
        ("/tokenize", {"prompt": "a", "wrong": 1}, "wrong"),
        ("/detokenize", {"tokens": [258]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [1] * 4_097}, "tokens"),
        ("/detokenize", {"tokens": "ab"}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ],
)
async def test_what_cannot_be_is_refused_by_name(path: str, fields: dict[str, Any], param: str) -> None:
    asked, _ = client()

    answer = await asked.ask("POST", path, {"model": "tiny", **fields})

    assert answer.status == 400
    assert answer.error["param"] == param


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_a_model_that_the_key_may_not_use_does_not_exist(path: str) -> None:
    asked = front(FakeGenerator(), served(), served("other"), keyring=Keys(secret=key_of("a", "tiny")))

    answer = await asked.ask(
        "POST", path, {"model": "other", "prompt": "a"} if path == "/tokenize" else {"model": "other", "tokens": [1]}
    )

    assert (answer.status, answer.error["code"]) == (404, "MODEL_NOT_FOUND")


@pytest.mark.parametrize("prefix", ["", "chatcmpl-", "cmpl-"])
async def test_a_request_is_cancelled_by_the_id_of_its_answer(prefix: str) -> None:
    asked, generator = client()

    answer = await asked.ask("POST", f"/v1/requests/{prefix}{REQUEST_ID}/cancel")

    assert answer.status == 200
    assert answer.json() == {"id": REQUEST_ID, "object": "request.cancellation", "cancelled": True}
    assert generator.cancelled == [("acme", REQUEST_ID)]


@pytest.mark.parametrize("request_id", ["01JBBBBBBBBBBBBBBBBBBBBBBB", "x", "-", "chatcmpl-"])
async def test_a_request_that_is_not_known_cannot_be_cancelled(request_id: str) -> None:
    asked, _ = client()

    answer = await asked.ask("POST", f"/v1/requests/{request_id}/cancel")

    assert (answer.status, answer.error["code"]) == (404, "NOT_FOUND")
