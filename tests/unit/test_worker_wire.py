"""Protobuf to engine values and back."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from millrace.common.v1 import common_pb2

from services.worker import wire
from services.worker.engine.outputs import TokenLogprobs
from services.worker.engine.request import FinishReason, Grammar, GrammarKind, PriorityClass
from tests.helpers.worker import entry

VOCABULARY = 1_000


def params(**changes: object) -> common_pb2.SamplingParams:
    message = common_pb2.SamplingParams(
        temperature=1.0, top_p=1.0, choice_count=1, max_token_count=16, repetition_penalty=1.0
    )
    for name, value in changes.items():
        setattr(message, name, value)
    return message


def test_every_engine_finish_reason_has_a_name_on_the_wire() -> None:
    names = {wire.finish_reason(reason) for reason in FinishReason}

    assert len(names) == len(FinishReason)
    assert common_pb2.FINISH_REASON_UNSPECIFIED not in names


def test_every_priority_class_but_unspecified_is_understood() -> None:
    known = {common_pb2.PRIORITY_CLASS_INTERACTIVE: PriorityClass.INTERACTIVE}
    known[common_pb2.PRIORITY_CLASS_BATCH] = PriorityClass.BATCH

    for value in common_pb2.PriorityClass.values():
        if value in known:
            assert wire.priority_class(value) is known[value]
        else:
            with pytest.raises(wire.WireError):
                wire.priority_class(value)


def test_every_field_of_sampling_reaches_the_engine() -> None:
    message = params(
        temperature=0.5, top_p=0.75, top_k=40, min_p=0.25, seed=-1, max_token_count=9, min_token_count=2,
        ignore_eos=True, repetition_penalty=1.5, frequency_penalty=-0.5, presence_penalty=0.25,
        logprob_count=0, prompt_logprob_count=3,
    )  # fmt: skip
    message.stop_token_ids.extend([5, 6])
    message.logit_bias.add(token_id=7, bias=-100.0)
    message.bad_words.add(token_ids=[8, 9])
    message.grammar.kind = common_pb2.GRAMMAR_KIND_CHOICE
    message.grammar.choices.extend(["a", "b"])

    sampling = wire.sampling_params(message, vocab_size=VOCABULARY)

    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.75, 40, 0.25)
    assert sampling.seed == 2**64 - 1
    assert (sampling.max_tokens, sampling.min_tokens, sampling.ignore_eos) == (9, 2, True)
    assert (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty) == (1.5, -0.5, 0.25)
    assert sampling.stop_token_ids == (5, 6)
    assert sampling.logit_bias == ((7, -100.0),)
    assert sampling.bad_words == ((8, 9),)
    assert (sampling.logprob_count, sampling.prompt_logprob_count) == (0, 3)
    assert sampling.grammar == Grammar(GrammarKind.CHOICE, "", ("a", "b"))


def test_no_logprobs_asked_for_is_none_and_not_zero() -> None:
    sampling = wire.sampling_params(params(), vocab_size=VOCABULARY)

    assert sampling.logprob_count is None
    assert sampling.prompt_logprob_count is None
    assert sampling.grammar is None


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [math.nan, -0.1, math.inf]),
        ("top_p", [math.nan, -0.1, 1.1]),
        ("top_k", [-1]),
        ("min_p", [math.nan, -0.1, 1.1]),
        ("choice_count", [0, -1, 9]),
        ("max_token_count", [0, -1]),
        ("min_token_count", [-1, 17]),
        ("repetition_penalty", [math.nan, 0.0, -1.0, math.inf]),
        ("frequency_penalty", [math.nan, math.inf]),
        ("presence_penalty", [math.nan, -math.inf]),
        ("logprob_count", [-1, 1025]),
        ("prompt_logprob_count", [-1, 1025]),
    ],
)
def test_a_value_outside_its_range_is_refused_by_name(field: str, values: list[float]) -> None:
    for value in values:
        with pytest.raises(wire.WireError, match=field):
            wire.sampling_params(params(**{field: value}), vocab_size=VOCABULARY)


@pytest.mark.parametrize("token_id", [VOCABULARY, 2**32 - 1])
def test_ids_outside_the_vocabulary_are_refused_everywhere(token_id: int) -> None:
    stop, bias, word, prefix = params(), params(), params(), entry("r1")
    stop.stop_token_ids.append(token_id)
    bias.logit_bias.add(token_id=token_id, bias=1.0)
    word.bad_words.add(token_ids=[1, token_id])
    prefix.prefix.add(choice=0, token_ids=[token_id])

    for message in (stop, bias, word):
        with pytest.raises(wire.WireError):
            wire.sampling_params(message, vocab_size=VOCABULARY)
    for work in (prefix, entry("r1", prompt=[token_id])):
        with pytest.raises(wire.WireError):
            wire.engine_request(work, epoch=1, vocab_size=VOCABULARY, deadline=None)


def test_an_unknown_grammar_is_refused() -> None:
    message = params()
    message.grammar.text = "root ::= x"

    with pytest.raises(wire.WireError, match="grammar"):
        wire.sampling_params(message, vocab_size=VOCABULARY)


def test_without_prefixes_all_choices_start_afresh_and_with_them_only_the_listed_ones_run() -> None:
    fresh, resumed = entry("r1", choices=3), entry("r1", choices=3)
    resumed.prefix.add(choice=2, token_ids=[4, 5])
    resumed.prefix.add(choice=0)

    whole = wire.engine_request(fresh, epoch=1, vocab_size=VOCABULARY, deadline=None)
    part = wire.engine_request(resumed, epoch=1, vocab_size=VOCABULARY, deadline=9.0)

    assert [(c.index, c.output_token_ids.tolist()) for c in whole.choices] == [(0, []), (1, []), (2, [])]
    assert [(c.index, c.output_token_ids.tolist()) for c in part.choices] == [(2, [4, 5]), (0, [])]
    assert part.deadline == 9.0


@pytest.mark.parametrize("prefixes", [[(3, [1])], [(-1, [1])], [(0, [1]), (0, [2])], [(0, [1] * 8)]])
def test_a_prefix_that_cannot_be_is_refused(prefixes: list[tuple[int, list[int]]]) -> None:
    work = entry("r1", choices=3, max_tokens=8)
    for choice, ids in prefixes:
        work.prefix.add(choice=choice, token_ids=ids)

    with pytest.raises(wire.WireError, match="prefix"):
        wire.engine_request(work, epoch=1, vocab_size=VOCABULARY, deadline=None)


def test_tenant_salt_class_and_weight_reach_the_engine() -> None:
    request = wire.engine_request(entry("r1"), epoch=3, vocab_size=VOCABULARY, deadline=None)

    assert (request.request_id, request.epoch, request.tenant, request.weight) == ("r1", 3, "tenant-1", 1.0)
    assert request.cache_salt == b"salt"
    assert request.priority_class is PriorityClass.INTERACTIVE
    assert request.prompt_token_ids.tolist() == [1, 2, 3]


@given(
    token_id=st.integers(0, 2**31 - 1),
    logprob=st.floats(-1e6, 0, width=32),
    top=st.lists(st.tuples(st.integers(0, 2**31 - 1), st.floats(-1e6, 0, width=32)), max_size=20),
)
def test_logprobs_keep_value_and_order(token_id: int, logprob: float, top: list[tuple[int, float]]) -> None:
    message = wire.position_logprobs(TokenLogprobs(token_id, logprob, tuple(top)))

    assert (message.token.token_id, message.token.logprob) == (token_id, logprob)
    assert [(item.token_id, item.logprob) for item in message.top] == top


@given(st.floats(0, 1e9))
def test_durations_go_there_and_back_to_the_nanosecond(seconds: float) -> None:
    assert abs(wire.seconds_of(wire.duration_of(seconds)) - seconds) < 1e-6


def test_cached_tokens_never_exceed_the_prompt() -> None:
    assert wire.token_usage(5, 9, 1).cached_token_count == 5
