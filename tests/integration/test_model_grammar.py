"""Answers held to a grammar by the real engine: they parse, validate, and nothing around them changes them."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from services.worker.engine.engine import Engine
from services.worker.engine.outputs import EngineOutput
from services.worker.engine.proposer import DraftRequest
from services.worker.engine.request import (
    Choice,
    EngineRequest,
    FinishReason,
    Grammar,
    GrammarKind,
    PriorityClass,
    RequestKey,
    SamplingParams,
    TokenArray,
)
from services.worker.kernels.cpu import load_kernels
from services.worker.kernels.cpu_build import KernelUnavailableError
from services.worker.runtime.factory import RunnerOptions, load_runner
from services.worker.runtime.native_forward import NativeForward
from tests.helpers.grammar_model import (
    CONTEXT,
    closing_bias,
    compiled,
    grammar_compiler,
    text_of,
    tiny_model,
    tiny_tensors,
    tokenizer,
)
from tests.helpers.model import ModelRig

pytestmark = [pytest.mark.model, pytest.mark.slow]

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 2, "maxLength": 12, "pattern": "^[A-Z][a-z]+$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "role": {"enum": ["decision", "advice", None, 7]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 5}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "age", "role", "tags"],
    "additionalProperties": False,
}
UNION: dict[str, Any] = {
    "$defs": {"point": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}},
    "anyOf": [{"$ref": "#/$defs/point"}, {"const": "none"}, {"type": "boolean"}],
}
PROMPT = (1, 4093, 198, 57, 5345, 281, 1234, 30, 2)
BASE = SamplingParams(max_tokens=120, seed=5, temperature=0.8)
TOKENIZER = tokenizer()
ENDS = tiny_tensors()[0].tokenizer.eos_token_ids
SHORT: dict[str, Any] = {**PERSON, "required": ["age", "role"], "properties": PERSON["properties"].copy()}
del SHORT["properties"]["name"], SHORT["properties"]["tags"]
SHORT_GRAMMAR = compiled(GrammarKind.JSON_SCHEMA, json.dumps(SHORT))
PERSON_GRAMMAR = compiled(GrammarKind.JSON_SCHEMA, json.dumps(PERSON))


def guided(grammar: Grammar, **changes: Any) -> SamplingParams:
    return dataclasses.replace(BASE, grammar=grammar, logit_bias=closing_bias(6.0), **changes)


def tiny_rig(**settings: Any) -> ModelRig:
    return ModelRig(**{"model": tiny_model(), **settings})


def end_of(rig: ModelRig, request_id: str = "a", choice: int = 0) -> EngineOutput:
    return rig.outputs[RequestKey(request_id, choice, 1)][-1]


def alone(sampling: SamplingParams, **settings: Any) -> ModelRig:
    rig = tiny_rig(**settings)
    rig.add("a", PROMPT, sampling=sampling)
    rig.run()
    return rig


def test_the_embedded_model_keeps_to_every_kind_of_grammar() -> None:
    schema, union = json.dumps(PERSON), json.dumps(UNION)
    loaded = load_runner(RunnerOptions(max_model_len=256, num_blocks=64, threads=1))
    assert loaded.grammars is not None
    rig = tiny_rig()
    rig.runner = loaded.runner
    rig.engine = Engine(loaded.runner, rig.settings)
    asked = {
        "person": Grammar(GrammarKind.JSON_SCHEMA, schema),
        "union": Grammar(GrammarKind.JSON_SCHEMA, union),
        "choice": Grammar(GrammarKind.CHOICE, "", ("yes", "no", "not at all")),
        "regex": Grammar(GrammarKind.REGEX, r"[0-9]{3}-[a-f]{2}"),
        "lark": Grammar(GrammarKind.LARK, 'start: "<" word ("," word)? ">"\nword: /[a-z]{1,4}/'),
        "object": Grammar(GrammarKind.JSON_OBJECT),
    }
    for name, grammar in asked.items():
        prompt = TOKENIZER.encode(f"Answer about Ann, aged 31, in the form asked for ({name}):").ids
        ready = dataclasses.replace(grammar, compiled=loaded.grammars.compile(grammar))
        rig.add(name, prompt, sampling=SamplingParams(max_tokens=64, seed=1, temperature=0.0, grammar=ready))
    rig.run()

    for name, sent in (("person", PERSON), ("union", UNION)):
        assert end_of(rig, name).finish_reason is FinishReason.STOP
        jsonschema.validate(json.loads(text_of(rig, name)), sent)
    assert text_of(rig, "choice") in ("yes", "no", "not at all")
    assert re.fullmatch(r"[0-9]{3}-[a-f]{2}", text_of(rig, "regex"))
    assert re.fullmatch(r"<[a-z]{1,4}(,[a-z]{1,4})?>", text_of(rig, "lark"))
    if end_of(rig, "object").finish_reason is FinishReason.STOP:
        assert isinstance(json.loads(text_of(rig, "object")), dict)
    assert text_of(rig, "object").lstrip().startswith("{")


def test_each_choice_has_a_place_of_its_own() -> None:
    rig = tiny_rig()
    rig.add("a", PROMPT, sampling=guided(PERSON_GRAMMAR), n=2)
    rig.run()

    texts = [text_of(rig, choice=choice) for choice in range(2)]
    assert len(set(texts)) == 2
    for choice, text in enumerate(texts):
        assert end_of(rig, choice=choice).finish_reason is FinishReason.STOP
        jsonschema.validate(json.loads(text), PERSON)


def test_logprobs_are_those_of_the_model_not_of_the_mask() -> None:
    free = alone(dataclasses.replace(BASE, max_tokens=1, logprob_count=5))
    held = alone(
        dataclasses.replace(BASE, max_tokens=1, logprob_count=5, grammar=compiled(GrammarKind.REGEX, "[0-9]+"))
    )

    (before,), (after,) = end_of(free).logprobs, end_of(held).logprobs
    assert after.top == before.top
    assert after.token_id not in [token for token, _ in before.top]
    assert after.logprob < before.top[-1][1]


class Guesses:
    """Proposes what an undisturbed run said, every third token wrong."""

    def __init__(self, said: Sequence[int]) -> None:
        self._said = said

    def propose(self, requests: Sequence[DraftRequest]) -> list[TokenArray]:
        found = []
        for request in requests:
            first = len(request.token_ids) - len(PROMPT)
            drafts = self._said[first : first + request.max_draft_count]
            found.append(np.array([t if (first + i) % 3 else 11 for i, t in enumerate(drafts)], dtype=np.int32))
        return found

    def release(self, key: RequestKey) -> None:
        """Nothing is kept."""


@pytest.fixture(scope="module")
def undisturbed() -> list[int]:
    rig = alone(guided(SHORT_GRAMMAR, repetition_penalty=1.2))
    assert end_of(rig).finish_reason is FinishReason.STOP
    jsonschema.validate(json.loads(text_of(rig)), SHORT)
    return rig.tokens("a")


def test_speculation_changes_nothing(undisturbed: list[int]) -> None:
    rig = alone(guided(SHORT_GRAMMAR, repetition_penalty=1.2), proposer=Guesses(undisturbed), max_draft_count=4)

    assert rig.tokens("a") == undisturbed
    assert end_of(rig).finish_reason is FinishReason.STOP
    assert rig.engine.stats(rig.now).accepted_draft_token_total > 0


def test_the_company_and_a_preemption_change_nothing(undisturbed: list[int]) -> None:
    rig = tiny_rig(num_blocks=8, max_num_seqs=4)
    rig.add(
        "a",
        PROMPT,
        sampling=guided(SHORT_GRAMMAR, repetition_penalty=1.2),
        priority_class=PriorityClass.BATCH,
    )
    for _ in range(len(undisturbed) // 2):
        rig.step()
    for index in range(3):
        rig.add(f"b{index}", PROMPT, sampling=guided(compiled(GrammarKind.REGEX, "[a-z]{200}"), max_tokens=60))
    rig.run()

    assert rig.engine.stats(rig.now).preemption_total > 0
    assert rig.tokens("a") == undisturbed


def test_a_resume_after_any_token_goes_on_as_if_undisturbed(undisturbed: list[int]) -> None:
    rig = tiny_rig(num_blocks=1024, max_num_seqs=16)
    sampling = guided(SHORT_GRAMMAR, repetition_penalty=1.2)
    for kept in range(len(undisturbed) + 1):
        prefix = np.array(undisturbed[:kept], dtype=np.int32)
        prompt = np.array(PROMPT, dtype=np.int32)
        rig.engine.add_request(EngineRequest(str(kept), 1, prompt, sampling, (Choice(0, prefix),)), now=rig.now)
    rig.run()

    for kept in range(len(undisturbed) + 1):
        assert rig.tokens(str(kept)) == undisturbed[kept:], kept
        assert end_of(rig, str(kept)).finish_reason is FinishReason.STOP


def test_a_prefix_that_does_not_fit_the_grammar_fails_its_request_alone() -> None:
    rig = tiny_rig()
    prompt = np.array(PROMPT, dtype=np.int32)
    wrong = (Choice(0, np.array([11], dtype=np.int32)),)
    rig.engine.add_request(EngineRequest("wrong", 1, prompt, guided(PERSON_GRAMMAR), wrong), now=0.0)
    rig.add("a", PROMPT, sampling=guided(PERSON_GRAMMAR))
    rig.run()

    assert end_of(rig, "wrong").finish_reason is FinishReason.ERROR
    assert "does not fit the grammar" in str(end_of(rig, "wrong").error)
    assert end_of(rig).finish_reason is FinishReason.STOP


def test_no_end_of_text_before_the_grammar_is_satisfied_however_much_it_is_wanted() -> None:
    wish = tuple((token, 100.0) for token in ENDS)
    digits = compiled(GrammarKind.REGEX, "[0-9]{4,40}")
    rig = alone(dataclasses.replace(BASE, grammar=digits, logit_bias=wish))

    assert re.fullmatch("[0-9]{4,}", text_of(rig))
    assert rig.tokens("a")[-1] in ENDS
    assert len(text_of(rig)) < 12


def test_more_tokens_than_a_grammar_has_are_not_waited_for() -> None:
    rig = alone(dataclasses.replace(BASE, grammar=compiled(GrammarKind.CHOICE, "", "yes", "yes, but"), min_tokens=50))

    assert text_of(rig) == "yes, but"
    assert end_of(rig).finish_reason is FinishReason.STOP


def test_bans_of_all_that_a_grammar_allows_give_way_to_it() -> None:
    only = TOKENIZER.encode("x").ids
    rig = alone(dataclasses.replace(BASE, grammar=compiled(GrammarKind.REGEX, "x"), bad_words=(tuple(only),)))

    assert text_of(rig) == "x"


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_what_is_complete_at_the_last_token_was_not_cut(*, ignore_eos: bool) -> None:
    seven = compiled(GrammarKind.REGEX, "7")
    rig = alone(dataclasses.replace(BASE, grammar=seven, max_tokens=1, ignore_eos=ignore_eos))

    assert text_of(rig) == "7"
    assert end_of(rig).finish_reason is FinishReason.STOP


def test_white_space_between_json_tokens_is_bounded() -> None:
    spaces = [token for text, token in TOKENIZER.get_vocab().items() if text and not text.strip("ĠĊĉ")]
    wish = tuple((token, 90.0) for token in spaces[:1000])
    flags = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    grammar = compiled(GrammarKind.JSON_SCHEMA, json.dumps(flags | {"additionalProperties": False}))
    rig = alone(dataclasses.replace(BASE, grammar=grammar, logit_bias=wish, max_tokens=200))

    runs = [len(run) for run in re.findall(r"[ \n\t\r]+", text_of(rig))]
    assert max(runs) <= 16
    assert sum(runs) > 16
    assert end_of(rig).finish_reason is FinishReason.STOP


def test_the_compiled_kernels_keep_to_it_too() -> None:
    try:
        kernels = load_kernels(Path.home() / ".cache" / "millrace" / "kernels", 1)
    except KernelUnavailableError as error:
        pytest.skip(str(error))
    checkpoint, tensors = tiny_tensors()
    forward = NativeForward(kernels, tensors, max_model_len=CONTEXT, quantised=False)
    rig = alone(guided(PERSON_GRAMMAR), model=(checkpoint, forward))

    assert end_of(rig).finish_reason is FinishReason.STOP
    jsonschema.validate(json.loads(text_of(rig)), PERSON)


def test_a_grammar_is_compiled_once() -> None:
    again = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(PERSON))

    assert grammar_compiler().compile(again) is PERSON_GRAMMAR.compiled
