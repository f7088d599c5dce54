"""A worker lost at any token of a stream: the next one goes on with exactly the tokens of an undisturbed run."""

from __future__ import annotations

import dataclasses
import functools
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from millrace.common.v1 import admission_pb2, common_pb2

from services.gateway.file_tokenizer import FileTokenizer
from services.gateway.generation import TokenEvent
from services.gateway.text_stream import ChoiceText
from services.worker.engine.request import EngineRequest, GrammarKind
from services.worker.models.checkpoint import Checkpoint
from services.worker.models.registry import decoder_tensors
from services.worker.models.safetensors_loader import load_folder
from services.worker.runtime.torch_forward import TorchForward
from tests.helpers.grammar_model import closing_bias, compiled, tiny_model, tiny_tensors, tokenizer
from tests.helpers.lost_worker import LosingRequest, Served, run_all
from tests.helpers.model import ModelRig
from tests.helpers.tiny_model import write_tiny_model
from tests.helpers.worker import entry

pytestmark = pytest.mark.model

LENGTH = 64
PROMPT = (5, 40, 19, 57, 33, 28, 12, 30, 2)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "role": {"enum": ["decision", "advice", None, 7]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 5}, "minItems": 1, "maxItems": 2},
    },
    "required": ["age", "role", "tags"],
    "additionalProperties": False,
}
GREEDY = {"ignore_eos": True}
PENALTIES = {
    "temperature": 0.9,
    "top_p": 0.95,
    "top_k": 50,
    "seed": 2**62 + 11,
    "frequency_penalty": 0.4,
    "presence_penalty": 0.3,
    "repetition_penalty": 1.2,
    "ignore_eos": True,
}


@functools.cache
def small() -> tuple[Checkpoint, TorchForward]:
    """A transformer of 64 words, so that a step takes half a millisecond."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = load_folder(write_tiny_model(Path(folder)))
        tensors = decoder_tensors(checkpoint.config, checkpoint.tensors)
    return checkpoint, TorchForward(tensors, max_model_len=256)


def asked(*, choices: int = 1, greedy: bool = False, **sampling: object) -> admission_pb2.AdmissionEntry:
    made = entry("r", prompt=PROMPT, max_tokens=LENGTH, choices=choices, **sampling)
    if greedy:
        made.sampling.temperature = 0.0
    return made


def guided() -> admission_pb2.AdmissionEntry:
    made = asked(temperature=0.8, seed=5)
    made.sampling.grammar.kind = common_pb2.GRAMMAR_KIND_JSON_SCHEMA
    made.sampling.grammar.text = json.dumps(SCHEMA)
    for token_id, bias in closing_bias(6.0):
        made.sampling.logit_bias.add(token_id=token_id, bias=bias)
    return made


@functools.cache
def grammar() -> object:
    return compiled(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)).compiled


def compile_grammar(request: EngineRequest) -> EngineRequest:
    """What the worker's grammar gate does."""
    held = request.sampling.grammar
    if held is None:
        return request
    ready = dataclasses.replace(held, compiled=grammar())
    return dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, grammar=ready))


def run_at(
    made: admission_pb2.AdmissionEntry,
    losses: Sequence[Sequence[int]],
    *,
    fronts: Sequence[Callable[[TokenEvent], bool]] = (),
    resumes: bool = True,
) -> list[Served]:
    """The request as often as there are `losses`, its worker lost after so many tokens; `fronts` read the answers."""
    model = tiny_model() if made.sampling.HasField("grammar") else small()
    requests = []
    for number, lost in enumerate(losses):
        entry = admission_pb2.AdmissionEntry()
        entry.CopyFrom(made)
        entry.request_id = f"r{number}"
        front = {"front": fronts[number]} if fronts else {}
        requests.append(LosingRequest(entry, lost, resumes=resumes, **front))
    return run_all(
        requests,
        lambda: ModelRig(model=model, num_blocks=1_024, max_num_seqs=128).engine,
        vocab_size=model[0].config.vocab_size,
        ready=compile_grammar,
    )


def run(made: admission_pb2.AdmissionEntry, *losses: int) -> Served:
    return run_at(made, [losses])[0]


KINDS: dict[str, Callable[[], admission_pb2.AdmissionEntry]] = {
    "greedy": lambda: asked(greedy=True, **GREEDY),
    "penalties": lambda: asked(**PENALTIES),
    "guided": guided,
}


@functools.cache
def undisturbed(kind: str) -> Served:
    return run(KINDS[kind]())


# A step of a guided answer masks 49,152 words a row: every token of it is for `make test-model`.
@pytest.mark.parametrize(
    ("kind", "stride"),
    [("greedy", 1), ("penalties", 1), ("guided", 6), pytest.param("guided", 1, marks=pytest.mark.slow)],
)
def test_a_worker_lost_at_every_token_changes_no_token_and_no_bill(kind: str, stride: int) -> None:
    whole = undisturbed(kind)
    count = len(whole.tokens[0])
    assert count == LENGTH or kind == "guided"

    losses = [(at,) for at in range(0, count + 1, stride)]
    for (lost_at,), served in zip(losses, run_at(KINDS[kind](), losses), strict=True):
        assert served.tokens == whole.tokens, lost_at
        assert served.finishes == whole.finishes, lost_at
        assert served.billed == whole.billed, lost_at
        assert served.attempts == (2 if lost_at < count else 1), lost_at
    assert whole.billed.prompt_token_count == len(PROMPT)
    assert whole.billed.completion_token_count == count


def test_guided_json_that_was_cut_anywhere_is_valid() -> None:
    whole = undisturbed("guided")
    ends = tiny_tensors()[0].tokenizer.eos_token_ids
    text = tokenizer().decode([token_id for token_id in whole.tokens[0] if token_id not in ends])

    assert whole.finishes == {0: common_pb2.FINISH_REASON_STOP}
    jsonschema.validate(json.loads(text), SCHEMA)


def test_two_choices_resume_each_from_its_own_end() -> None:
    made = asked(choices=2, **PENALTIES)
    whole = run(made)
    assert whole.tokens[0] != whole.tokens[1]

    losses = [(at,) for at in range(0, 2 * LENGTH + 1, 4)]
    for lost_at, served in zip(losses, run_at(made, losses), strict=True):
        assert (served.tokens, served.finishes, served.billed) == (whole.tokens, whole.finishes, whole.billed), lost_at


def test_a_choice_that_had_ended_is_not_run_again() -> None:
    made = asked(choices=2, **PENALTIES | {"ignore_eos": False})
    first = run(made).tokens[0]
    made.sampling.stop_token_ids.append(first[7])
    whole = run(made)
    ended = [choice for choice in whole.tokens if whole.finishes[choice] == common_pb2.FINISH_REASON_STOP]
    assert ended

    losses = [(at,) for at in range(0, sum(map(len, whole.tokens.values())), 2)]
    for lost_at, served in zip(losses, run_at(made, losses), strict=True):
        assert (served.tokens, served.finishes, served.billed) == (whole.tokens, whole.finishes, whole.billed), lost_at


def test_three_losses_in_one_stream_are_still_one_answer() -> None:
    whole, served = undisturbed("penalties"), run(KINDS["penalties"](), 3, 17, 40)

    assert (served.tokens, served.billed, served.attempts) == (whole.tokens, whole.billed, 4)


def test_a_stop_string_across_the_loss_ends_the_answer_where_it_would_have_ended() -> None:
    checkpoint = small()[0]
    reader = FileTokenizer(checkpoint.tokenizer.json, vocab_size=checkpoint.config.vocab_size)
    text = b"".join(map(reader.visible_bytes, undisturbed("penalties").tokens[0])).decode(errors="replace")
    stop = text[len(text) // 2 : len(text) // 2 + 9]

    class Front:
        """The text of one answer."""

        def __init__(self) -> None:
            self.said = ""
            self._choice = ChoiceText(reader, (stop,), 0)

        def __call__(self, event: TokenEvent) -> bool:
            delta = self._choice.feed(event)
            self.said += delta.text if delta is not None else ""
            return self._choice.finished

    first = Front()
    (whole,) = run_at(KINDS["penalties"](), [()], fronts=[first])
    assert first.said == text[: text.index(stop)]
    count = len(whole.tokens[0])
    assert count < LENGTH

    fronts = [Front() for _ in range(count)]
    for front, served in zip(
        fronts, run_at(KINDS["penalties"](), [(at,) for at in range(count)], fronts=fronts), strict=True
    ):
        assert (front.said, served.tokens) == (first.said, whole.tokens)


def test_without_resume_a_loss_after_the_first_token_is_an_error_that_bills_what_was_delivered() -> None:
    whole = undisturbed("greedy")

    for lost_at, served in enumerate(run_at(KINDS["greedy"](), [(at,) for at in range(LENGTH + 1)], resumes=False)):
        if lost_at in (0, LENGTH):
            # Nothing was delivered, so it may start over; or all was.
            assert (served.error, served.tokens) == (None, whole.tokens)
        else:
            assert served.error == "WORKER_LOST"
            assert served.tokens[0] == whole.tokens[0][:lost_at]
            assert served.billed.completion_token_count == lost_at
            assert served.billed.prompt_token_count == len(PROMPT)
