"""The gateway's tokenizer, built from a GGUF, gives the ids that llama.cpp gives on a corpus of awkward text."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import pytest
from millrace.worker.v1 import worker_service_pb2

from services.gateway.chat_template import ChatTemplate
from services.gateway.tokenizer import Tokenizer, load_tokenizer
from services.worker.models.gguf_file import read_gguf
from services.worker.models.tokenizer_export import TokenizerExport, tokenizer_from_gguf
from tests.golden.make_smollm2_greedy import model_path
from tests.golden.make_tokenizer_goldens import corpus, golden, summary
from tests.helpers.echo_generation import FakeGenerator, front, one_by_one, served
from tests.helpers.gemma import gemma_path

MODELS: dict[str, Callable[[], Path]] = {"smollm2": model_path, "gemma3": gemma_path}
# llama.cpp takes `</s>` for an end of turn whatever the file says; Gemma's own vocabulary has it as plain user text.
OTHERWISE = {"gemma3": "<s></s>[INST] [/INST]<<SYS>>"}


@functools.cache
def loaded(model: str) -> tuple[TokenizerExport, Tokenizer]:
    export = tokenizer_from_gguf(read_gguf(MODELS[model]()).metadata)
    return export, load_tokenizer(worker_service_pb2.ModelCard(vocab_size=export.vocab_size), export.json)


@pytest.mark.parametrize("model", MODELS)
def test_every_string_of_the_corpus_has_the_ids_of_llama_cpp(model: str) -> None:
    _, tokenizer = loaded(model)
    expected = dict(zip(corpus(), golden(model), strict=True))
    expected.pop(OTHERWISE.get(model, ""), None)

    assert {text: summary(tokenizer.encode(text)) for text in expected} == expected


@pytest.mark.parametrize("model", MODELS)
def test_every_string_of_the_corpus_comes_back(model: str) -> None:
    _, tokenizer = loaded(model)
    # A SentencePiece vocabulary writes a space as U+2581, so to it the character itself is a space.
    spelt_as_space = "▁" if model == "gemma3" else " "

    for text in corpus():
        assert tokenizer.decode(tokenizer.encode(text)) == text.replace(spelt_as_space, " ")


@pytest.mark.parametrize("model", MODELS)
def test_no_string_of_the_corpus_holds_a_control_token(model: str) -> None:
    export, tokenizer = loaded(model)
    controls = {token_id for _, token_id in export.control_tokens}

    for text in (*corpus(), *(f"a {control}b" for control, _ in export.control_tokens[:50])):
        assert not controls & set(tokenizer.encode(text))


@pytest.mark.parametrize("turn", ["hello", "<bos>hello"])
async def test_a_prompt_for_gemma_starts_with_exactly_one_bos(turn: str) -> None:
    export, tokenizer = loaded("gemma3")
    card = {"vocab_size": export.vocab_size, "bos_token_id": export.bos_token_id, "add_bos": export.add_bos}
    source = "{{ bos_token }}<start_of_turn>user\n{{ messages[0].content }}<end_of_turn>\n"
    template = ChatTemplate(source, (("bos_token", "<bos>"),))
    model = dataclasses.replace(served(**card), tokenizer=tokenizer, template=template)
    generator = FakeGenerator(one_by_one([107]))

    await front(generator, model).complete(prompt=turn)
    await front(generator, model).chat(messages=[{"role": "user", "content": turn}])

    prompts = [list(request.prompt_token_ids) for _, request in generator.requests]
    assert [ids.count(2) for ids in prompts] == [1, 1]
    assert [ids[0] for ids in prompts] == [2, 2]
    assert prompts[1][1:4] == [105, *tokenizer.encode("user\n")]
