"""A model for a live stack whose answers are a hash of all that was asked: the same request, the same tokens.

The echo model hashes the request's id, so two doors never get the same answer. Here a parameter that a door loses on
its way gives other tokens. The vocabulary has bytes, emoji cut in pieces, reasoning markers and calls of tools.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib

from millrace.worker.v1 import worker_service_pb2
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from services.gateway.file_tokenizer import FileTokenizer
from services.worker.config import EngineSettings, WorkerConfig
from services.worker.engine.fake_model_runner import FakeModelRunner
from services.worker.engine.kv_blocks import KVLayout
from services.worker.engine.model_runner import RunnerSpec
from services.worker.engine.outputs import ModelRunnerOutput, SampledRow, SchedulerOutput, TokenLogprobs
from services.worker.engine.request import RequestKey, SamplingParams
from services.worker.model_source import LoadedModel, load_model
from services.worker.service import ServedModel
from tests.helpers.echo_generation import CHATML

CONTEXT = 2_048
WORDS = (
    "Hi ", "the ", "🙂", "é", "\n\n", "STOP", "ST", "OP", "日本", "</tool_call>", "<tool_", '{"name": "add", ',
    '<tool_call>{"name": "add", "arguments": {"a": [1, "}"]}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": {"a" oops</tool_call>',
    '<tool_call>{"arguments": {"é": 1}, "name": "no-args"}</tool_call>',
)  # fmt: skip
SPECIALS = ("<|im_start|>", "<|im_end|>", "<think>", "</think>")
TEMPLATE = CHATML + "{# <think> #}"
# Rows of a request with the seed 5, 28, 51 … fail after some tokens. The canary's seed is 0.
FAILING_STEP, FAILING_FIRST = 23, 5


@functools.cache
def tokenizer_json() -> bytes:
    """A byte tokenizer of 256 ids, then `WORDS`, then `SPECIALS`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={character: index for index, character in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_tokens([AddedToken(word, special=False, normalized=False) for word in WORDS])
    made.add_special_tokens(list(SPECIALS))
    return str(made.to_str()).encode()


@functools.cache
def tokenizer() -> FileTokenizer:
    """As the gateway loads it."""
    return FileTokenizer(tokenizer_json(), vocab_size=256 + len(WORDS) + len(SPECIALS))


@dataclasses.dataclass(slots=True)
class _Row:
    """What was asked of one choice, as a digest, and how many tokens it has."""

    digest: bytes
    sampling: SamplingParams
    count: int


class SeededRunner:
    """A ModelRunner over the fake one: token i of a choice hashes prompt, sampling parameters, choice and i."""

    def __init__(self, spec: RunnerSpec) -> None:
        self._fake = FakeModelRunner(spec)
        self._rows: dict[RequestKey, _Row] = {}
        by_bytes = {tokenizer().token_bytes(i): i for i in range(spec.vocab_size)}
        self._pieces = [by_bytes[bytes([byte])] for byte in "🙃".encode()]
        self._letters = [by_bytes[bytes([byte])] for byte in b"abcSTOP 7\n"]
        self._words = [by_bytes[word.encode()] for word in (*WORDS, *WORDS[-3:] * 4, "<think>", "</think>", "</think>")]
        self._eos = min(spec.eos_token_ids)

    @property
    def spec(self) -> RunnerSpec:
        return self._fake.spec

    @property
    def kv_layout(self) -> KVLayout:
        return self._fake.kv_layout

    def export_block(self, block: int) -> bytes:
        return self._fake.export_block(block)

    def import_block(self, block: int, payload: bytes) -> None:
        self._fake.import_block(block, payload)

    def check_invariants(self) -> None:
        self._fake.check_invariants()

    def execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        for key in scheduler_output.released:
            self._rows.pop(key, None)
        for new in scheduler_output.new_requests:
            asked = (new.prompt_token_ids.tolist(), dataclasses.replace(new.sampling, prompt_logprob_count=None))
            digest = hashlib.blake2b(repr((asked, new.key.choice)).encode()).digest()
            self._rows[new.key] = _Row(digest, new.sampling, len(new.output_token_ids))
        answered = self._fake.execute(scheduler_output)
        pairs = zip(scheduler_output.scheduled, answered.rows, strict=True)
        return ModelRunnerOutput(
            tuple([self._sampled(self._rows[r.key], row) if r.samples else row for r, row in pairs])
        )

    def _sampled(self, row: _Row, answered: SampledRow) -> SampledRow:
        if row.sampling.seed % FAILING_STEP == FAILING_FIRST and row.count == row.sampling.seed % 7:
            return SampledRow(error="a row that fails")
        token_id = self._token(row)
        row.count += 1
        wanted = row.sampling.logprob_count
        value = -row.digest[row.count % 64] / 7
        top = tuple((max(0, token_id - place), value - place) for place in range(wanted or 0))
        logprobs = () if wanted is None else (TokenLogprobs(token_id, value, top),)
        return SampledRow((token_id,), logprobs, answered.prompt_logprobs)

    def _token(self, row: _Row) -> int:
        group, place = divmod(row.count, 4)
        noise = hashlib.blake2b(row.digest + bytes([group % 256, group // 256])).digest()
        if noise[60] < 40:
            return self._pieces[place]
        kind, pick = noise[place], noise[4 + place]
        if kind < 16:
            return self._eos
        table = self._words if kind < 110 else self._letters
        return table[pick % len(table)]


def seeded_model(config: WorkerConfig) -> LoadedModel:
    """Serves as `echo`, with a tokenizer file and a chat template that reasons."""
    vocabulary = tokenizer().vocab_size
    eos = vocabulary - len(SPECIALS) + SPECIALS.index("<|im_end|>")
    echo = load_model(config)
    spec = dataclasses.replace(echo.runner.spec, vocab_size=vocabulary, eos_token_ids=frozenset({eos}))
    card = worker_service_pb2.ModelCard()
    card.CopyFrom(echo.served.card)
    card.MergeFrom(
        worker_service_pb2.ModelCard(
            vocab_size=vocabulary,
            eos_token_ids=[eos],
            chat_template=TEMPLATE,
            tokenizer_digest=hashlib.sha256(tokenizer_json()).digest(),
            longest_token_byte_count=max(len(word.encode()) for word in WORDS),
        )
    )
    return LoadedModel(SeededRunner(spec), ServedModel(card, tokenizer_json()), echo.budget_text)


def seeded_config(redis_url: str) -> WorkerConfig:
    """Settings of a worker that serves it without waiting between steps."""
    engine = EngineSettings(max_model_len=CONTEXT, num_blocks=4_096, max_num_seqs=64)
    return WorkerConfig(redis_url=redis_url, model="echo", echo_step_ms=0.0, engine=engine)
