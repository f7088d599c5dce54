"""Bodies before they mean anything: size, depth, syntax, types; each refusal names its field."""

from __future__ import annotations

import time

import pytest

from services.common.errors import InvalidRequest, MillraceError, PayloadTooLarge
from services.gateway.json_body import decode_body, is_deeper_than
from services.gateway.limits import Limits
from services.gateway.openai_draft import completion_draft
from services.gateway.openai_types import ChatRequest, CompletionRequest

LIMITS = Limits()


def draft(fields: bytes) -> object:
    body = b'{"model":"m","prompt":"x",' + fields + b"}"
    return completion_draft(decode_body(body, CompletionRequest, LIMITS))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (b'"temperature":NaN', "temperature"),
        (b'"temperature":-Infinity', "temperature"),
        (b'"temperature":1e999', "temperature"),
        (b'"temperature":"nan"', "temperature"),
        (b'"temperature":1' + b"0" * 400, "temperature"),
        (b'"max_tokens":1' + b"0" * 5_000, "max_tokens"),
        (b'"n":true', "n"),
        (b'"n":1.5', "n"),
        (b'"n":[]', "n"),
        (b'"best_of":1e999', "best_of"),
        (b'"best_of":NaN', "best_of"),
        (b'"guided_json":{"a":1e999}', "guided_json"),
        (b'"logit_bias":{"1":1e999}', "logit_bias[...]"),
        (b'"logit_bias":{"one":1}', "logit_bias"),
        (b'"logit_bias":[1]', "logit_bias"),
        (b'"metadata":{"a":1}', "metadata[...]"),
        (b'"stop":[1]', "stop[0]"),
        (b'"stop":1', "stop"),
        (b'"unknown":1', "unknown"),
        (b'"millrace":{"unknown":1}', "millrace.unknown"),
        (b'"priority":"urgent"', "priority"),
        (b'"stream":1', "stream"),
        (b'"seed":"1"', "seed"),
    ],
)
def test_a_wrong_value_is_a_400_that_names_the_field(fields: bytes, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        draft(fields)

    assert caught.value.param == param
    assert len(caught.value.message) < 300


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"x"',
        b"\xff\xfe",
        b'{"model":"m"} x',
        b'{"model":"\\ud800","prompt":"x"}',
        b"{" * 32,
    ],
)
def test_what_is_not_the_expected_json_is_a_400(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        decode_body(body, CompletionRequest, LIMITS)


def test_a_missing_field_is_named() -> None:
    with pytest.raises(InvalidRequest, match="`messages` is required") as caught:
        decode_body(b'{"model":"m"}', ChatRequest, LIMITS)

    assert caught.value.param == "messages"


def test_a_body_of_exactly_the_limit_is_read_and_one_byte_more_is_not() -> None:
    head = b'{"model":"m","prompt":"'
    full = head + b"x" * (LIMITS.body_bytes - len(head) - 2) + b'"}'
    assert len(full) == LIMITS.body_bytes

    decode_body(full, CompletionRequest, LIMITS)
    with pytest.raises(PayloadTooLarge):
        decode_body(full + b" ", CompletionRequest, LIMITS)


@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}"), (b'[{"[[":', b"}]")])
def test_depth_is_counted_over_arrays_and_objects_but_not_inside_strings(opening: bytes, closing: bytes) -> None:
    levels = opening.count(b"[") + opening.count(b"{") if b'"[[' not in opening else 2
    times = 32 // levels

    assert not is_deeper_than(opening * times + b"1" + closing * times, 32)
    assert is_deeper_than(b"[" + opening * times + b"1" + closing * times + b"]", 32)


def test_many_shallow_values_are_not_deep() -> None:
    assert not is_deeper_than(b"[" + b"[[]]," * 1_000 + b"[]]", 32)


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 40 + b'"' + b'\\"' * 1_000_000,
        b"[" * 40 + b'"' * 2_000_001,
        b"[" * 2_000_000,
        b"[" * 40 + b"\\" * 2_000_000,
        b"[" * 40 + b'"' + b"\\" * 2_000_001,
        b"[]" * 1_000_000,
    ],
)
def test_hostile_bodies_are_refused_in_linear_time(body: bytes) -> None:
    began = time.process_time()

    with pytest.raises(MillraceError):
        decode_body(body, CompletionRequest, LIMITS)

    # Quadratic work on any of these takes hours.
    assert time.process_time() - began < 3


@pytest.mark.parametrize(
    "fields",
    [
        b'"best_of":2',
        b'"use_beam_search":true',
        b'"suffix":"tail"',
        b'"prompt_embeds":"AAAA"',
        b'"logits_processors":["os.system"]',
        b'"include_stop_str_in_output":true',
        b'"truncate_prompt_tokens":5',
        b'"kv_transfer_params":{"do_remote_decode":true}',
        b'"cache_salt":"mine"',
        b'"request_id":"mine"',
        b'"best_of":true',
    ],
)
def test_a_known_field_with_an_unserved_value_is_refused_and_never_ignored(fields: bytes) -> None:
    with pytest.raises(MillraceError) as caught:
        draft(fields)

    assert caught.value.row.http_status == 400
    assert caught.value.param == fields.split(b'"')[1].decode()


@pytest.mark.parametrize(
    "fields", [b'"best_of":1', b'"use_beam_search":false', b'"suffix":null', b'"store":false', b'"n":null']
)
def test_a_known_field_with_its_served_value_is_fine(fields: bytes) -> None:
    draft(fields)
